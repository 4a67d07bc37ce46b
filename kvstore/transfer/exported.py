"""Exported: how one process reads memory that another one has mounted at the node of their machine.

Who mounts says in the records of its segment how others come to the memory: a ``kind``, and bytes that mean something
to that kind alone. Whoever reads opens it by the row of ``OPENERS``; what cannot be opened here is a miss.
"""

from __future__ import annotations

import importlib
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.tier.device import Device
from kvstore.tier.device_copies import CopyStream, PinnedBounces
from kvstore.tier.folder import NodeFolder
from kvstore.tier.host_memory import copy
from kvstore.tier.mounted import MountedTable, data_path
from kvstore.tier.plain_files import open_plain

HOST: Final = 1  # shared memory: the file beside the records
CUDA: Final = 2  # memory of a GPU, by a handle of its driver
BOUNCE_BYTES: Final = 8 << 20  # of pages of a device that are on their way at a time, where a page is not larger
COPY_S: Final = 5.0  # for each such step


class PeerMemory(Protocol):
    """The frames of a segment of another process. Threads may share it; it is unmapped with the last reference."""

    def read(self, frame: int, rows: npt.NDArray[np.uint8]) -> None:
        """Copy the pages in the frames from ``frame`` on into ``rows`` ``[pages, page_bytes]``, and return when that is
        done. What lies there is somebody else's matter: ask the records before and after.

        Raises:
            Unavailable: the memory, or the device, is gone, or too slow.
        """
        ...


class SharedFrames:
    """Shared memory, mapped: see ``PeerMemory``."""

    def __init__(self, frames: npt.NDArray[np.uint8]) -> None:
        self._frames = frames

    @classmethod
    def open(cls, folder: NodeFolder, table: MountedTable) -> SharedFrames | None:
        """None where it is not as long as the records say: reading beyond its end would be a SIGBUS."""
        try:
            fd = open_plain(data_path(folder, table.number), os.O_RDONLY)
        except OSError:
            return None
        try:
            nbytes = table.frames * table.stride
            if os.fstat(fd).st_size < nbytes:
                return None
            map_ = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it was cut meanwhile
            return None
        finally:
            os.close(fd)
        return cls(frames_in(map_, table))

    def read(self, frame: int, rows: npt.NDArray[np.uint8]) -> None:
        """See ``PeerMemory``."""
        copy(rows, self._frames[frame : frame + len(rows)])


class DevicePages:
    """Memory of a device that this process can address: see ``PeerMemory``. Pages come by way of pinned memory, so that
    a copy that is late writes into nothing that the caller has."""

    def __init__(self, device: Device, address: int, table: MountedTable) -> None:
        self._address, self._stride = address, table.stride
        self._stream = CopyStream(device)
        self._bounces = PinnedBounces(device)

    def read(self, frame: int, rows: npt.NDArray[np.uint8]) -> None:
        """See ``PeerMemory``."""
        page_bytes = rows.shape[1]
        step = max(1, BOUNCE_BYTES // page_bytes)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            deadline_s = time.monotonic() + COPY_S
            with self._bounces.borrow(some.size, deadline_s) as bounce:
                places = np.arange(len(some), dtype=np.uint64)
                sources = np.uint64(self._address) + (places + np.uint64(frame + first)) * np.uint64(self._stride)
                targets = np.uint64(bounce.address) + places * np.uint64(page_bytes)
                sizes = np.full(len(some), page_bytes, np.uint64)
                bounce.event = self._stream.copy(targets, sources, sizes)
                bounce.event.wait(deadline_s)
                copy(some, bounce.memory[: some.size].reshape(some.shape))


class MountedMemory(Protocol):
    """Memory of this process, to be mounted. It stays as it is as long as the segment is open.

    Attributes:
        kind: the row of ``OPENERS`` by which others read it.
        stride: bytes from one frame to the next.
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


def frames_in(memory: Any, table: MountedTable) -> npt.NDArray[np.uint8]:
    """``[frames, page_bytes]`` of a segment's memory, any buffer."""
    whole = np.frombuffer(memory, np.uint8, table.frames * table.stride).reshape(table.frames, table.stride)
    return whole[:, : table.frame_class.page_bytes]


def _open_cuda(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    opened = importlib.import_module("kvstore.transfer.cuda").opened  # late: it needs the driver's package
    found: PeerMemory | None = opened(folder, table)
    return found


OPENERS: Final[dict[int, Callable[[NodeFolder, MountedTable], PeerMemory | None]]] = {
    HOST: SharedFrames.open,
    CUDA: _open_cuda,
}
"""Kinds of memory that this machine's processes can read of one another."""
