"""Exported: how one process reads memory that another one has mounted at the node of their machine.

The owner of a segment writes in its records how other processes reach the memory: a ``kind``, and bytes that mean
something to that kind alone. A reader opens it by the row of ``OPENERS``; what cannot be opened here is a miss.
"""

from __future__ import annotations

import importlib
import mmap
import os
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable
from kvstore.model.strides import Strides
from kvstore.tier.device import Addresses, Device
from kvstore.tier.folder import NodeFolder
from kvstore.tier.host_memory import copy
from kvstore.tier.mounted import MountedTable, data_path
from kvstore.tier.plain_files import open_plain

HOST: Final = 1  # shared memory: the file beside the records
DEVICE: Final = 3  # memory of a device, by what that exports; 2 was a form of it that nobody had read
NO_INCARNATION: Final = 0  # records of others say what is there


class PeerMemory(Protocol):
    """The frames of a segment of another process. Threads may share it; it is unmapped with the last reference."""

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """Copy the pages in the frames from ``frame`` on into ``rows`` ``[pages, page_bytes]``, and return when that is
        done. What lies there is somebody else's matter: ask the records before and after.

        Args:
            layer: only that one of each page, into ``[pages, layer_bytes]``.

        Raises:
            Unavailable: the memory, or the device, is gone, or too slow; or its layers do not lie apart.
        """
        ...

    def places(
        self, device: Device, frame: int, count: int, layer: int | None = None
    ) -> tuple[Addresses, Addresses] | None:
        """Where the pieces of these pages lie for streams of that device, and their lengths, in the order of the pages'
        bytes; None: it cannot copy from there, and ``read`` is the way. This memory stays mapped until such a copy has
        ended. Raises Unavailable as ``read``."""
        ...


class SharedFrames:
    """Shared memory, mapped: see ``PeerMemory``."""

    def __init__(self, memory: npt.NDArray[np.uint8], table: MountedTable) -> None:
        self._memory, self._frames, self._strides = memory, table.frames, table.strides
        self._page_layers = table.frame_class.layers
        self._whole = table.strides.views(memory, table.frames)

    @classmethod
    def open(cls, folder: NodeFolder, table: MountedTable) -> SharedFrames | None:
        """None where it is not as long as the records say: reading beyond its end would be a SIGBUS."""
        try:
            fd = open_plain(data_path(folder, table.number), os.O_RDONLY)
        except OSError:
            return None
        try:
            nbytes = table.nbytes
            if os.fstat(fd).st_size < nbytes:
                return None
            map_ = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it was cut meanwhile
            return None
        finally:
            os.close(fd)
        try:
            return cls(np.frombuffer(map_, np.uint8), table)
        except ValueError:  # pages so large that there are none
            return None

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """See ``PeerMemory``."""
        views = self._whole
        if layer is not None:
            views = layer_of(self._strides, layer, self._page_layers).views(self._memory, self._frames)
        targets = rows.reshape(len(rows), len(views), *views[0].shape[1:])
        for number, pages in enumerate(views):
            copy(targets[:, number], pages[frame : frame + len(rows)])

    def places(
        self, device: Device, frame: int, count: int, layer: int | None = None
    ) -> tuple[Addresses, Addresses] | None:
        """See ``PeerMemory``: the host's memory is nobody's to copy from directly."""
        return None


def layer_of(strides: Strides, layer: int, layers: int) -> Strides:
    """Where one layer of the pages lies. Raises Unavailable."""
    found = strides.part(layer, layers)
    if found is None:
        raise Unavailable("the layers of that memory do not lie apart")
    return found


class MountedMemory(Protocol):
    """Memory of this process, to be mounted. It stays as it is as long as the segment is open.

    Attributes:
        kind: the row of ``OPENERS`` by which others read it.
        stride: bytes from one frame to the next, where pages lie in one piece.
    """

    @property
    def kind(self) -> int:
        """See the class."""
        ...

    @property
    def stride(self) -> int:
        """See the class."""
        ...

    @property
    def nbytes(self) -> int:
        """The length of the memory in bytes."""
        ...

    def export(self, folder: NodeFolder, number: int) -> bytes:
        """The bytes by which other processes open it, as the segment of that number. Raises Unavailable: it cannot be
        shared."""
        ...

    def withdraw(self) -> None:
        """Let no other process open it any more: the segment is closed."""
        ...

    def here(self, table: MountedTable) -> PeerMemory:
        """The memory as this process reads it."""
        ...


def _open_device(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    opened = importlib.import_module("kvstore.transfer.device_memory").opened  # late: few processes need it
    found: PeerMemory | None = opened(folder, table)
    return found


OPENERS: Final[dict[int, Callable[[NodeFolder, MountedTable], PeerMemory | None]]] = {
    HOST: SharedFrames.open,
    DEVICE: _open_device,
}
"""Kinds of memory that this machine's processes can read of one another."""
