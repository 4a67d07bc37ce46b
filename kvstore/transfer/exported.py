"""Exported: how one process reads memory that another one has mounted at the node of their machine.

Who mounts says in the records of its segment how others come to the memory: a ``kind``, and bytes that mean something
to that kind alone. Whoever reads opens it by the row of ``OPENERS``; what cannot be opened here is a miss.
"""

from __future__ import annotations

import importlib
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable
from kvstore.model.replica import FrameClass
from kvstore.model.strides import Strides
from kvstore.tier.device import Addresses, Device
from kvstore.tier.folder import NodeFolder
from kvstore.tier.hbm import HbmStore, StridedFrames
from kvstore.tier.host_memory import copy
from kvstore.tier.mounted import MountedTable, data_path
from kvstore.tier.plain_files import open_plain

HOST: Final = 1  # shared memory: the file beside the records
CUDA: Final = 2  # memory of a GPU, by a handle of its driver
COPY_S: Final = 5.0  # for pages of a device that are on their way at a time
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
            views = _layer(self._strides, layer, self._page_layers).views(self._memory, self._frames)
        targets = rows.reshape(len(rows), len(views), *views[0].shape[1:])
        for number, pages in enumerate(views):
            copy(targets[:, number], pages[frame : frame + len(rows)])


class DevicePages:
    """Memory of a device that this process can address: see ``PeerMemory``. Pages come as they come out of every store
    of a device's memory."""

    def __init__(self, device: Device, address: int, table: MountedTable) -> None:
        self._class = table.frame_class
        self._device, self._layers = device, _Layers(table, address)
        arena = StridedFrames(table.frame_class, address, table.frames, table.strides)
        self._store = HbmStore(device, arena, NO_INCARNATION, [(0, table.frame_class)], COPY_S)
        self._by_layer: HbmStore | None = None  # made when first a layer is read
        self._making = threading.Lock()

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """See ``PeerMemory``."""
        if layer is None:
            self._store.read_pages(0, frame, self._class, rows)
            return
        layers = self._layers
        with self._making:
            if self._by_layer is None:
                carved = ((position, layers.frame_class) for position in range(layers.positions))
                self._by_layer = HbmStore(self._device, layers, NO_INCARNATION, carved, COPY_S)
        self._by_layer.read_pages(layer, frame, layers.frame_class, rows)


class _Layers:
    """See ``FrameMap``: of a segment's pages each layer is one position."""

    def __init__(self, table: MountedTable, address: int) -> None:
        whole, frames = table.frame_class, table.frames
        self.frame_class = FrameClass(whole.page_bytes // whole.layers, whole.page_tokens, 1)
        self.positions, self.extent_bytes = whole.layers, frames * self.frame_class.frame_bytes
        self._address, self._frames, self._strides = address, frames, table.strides

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self._frames if frame_class == self.frame_class else 0

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``. Raises Unavailable where the layers do not lie apart."""
        strides = _layer(self._strides, position, self.positions)
        return StridedFrames(frame_class, self._address, self._frames, strides).pieces(0, frame, frame_class, count)


def _layer(strides: Strides, layer: int, layers: int) -> Strides:
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
        """Its length."""
        ...

    def export(self) -> bytes:
        """What others open it by. Raises Unavailable where it cannot be shown to others."""
        ...

    def here(self, table: MountedTable) -> PeerMemory:
        """The same, as this process reads it."""
        ...


def _open_cuda(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    opened = importlib.import_module("kvstore.transfer.cuda").opened  # late: it needs the driver's package
    found: PeerMemory | None = opened(folder, table)
    return found


OPENERS: Final[dict[int, Callable[[NodeFolder, MountedTable], PeerMemory | None]]] = {
    HOST: SharedFrames.open,
    CUDA: _open_cuda,
}
"""Kinds of memory that this machine's processes can read of one another."""
