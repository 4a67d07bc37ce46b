"""Exported: how one process reads memory that another one has mounted at the node of their machine.

Who mounts says in the records of its segment how others come to the memory: a ``kind``, and bytes that mean something
to that kind alone. Whoever reads opens it by the row of ``OPENERS``; what cannot be opened here is a miss.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.tier.folder import NodeFolder
from kvstore.tier.host_memory import copy
from kvstore.tier.mounted import MountedTable, data_path
from kvstore.tier.plain_files import open_plain

HOST: Final = 1  # shared memory: the file beside the records


class PeerMemory(Protocol):
    """The frames of a segment of another process. Threads may share it; it is unmapped with the last reference."""

    def read(self, frame: int, rows: npt.NDArray[np.uint8]) -> None:
        """Copy the pages in the frames from ``frame`` on into ``rows`` ``[pages, page_bytes]``, and return when that is
        done. What lies there is somebody else's matter: ask the records before and after.

        Raises:
            Unavailable: the memory, or the device, is gone.
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


def frames_in(memory: Any, table: MountedTable) -> npt.NDArray[np.uint8]:
    """``[frames, page_bytes]`` of a segment's memory, any buffer."""
    whole = np.frombuffer(memory, np.uint8, table.frames * table.stride).reshape(table.frames, table.stride)
    return whole[:, : table.frame_class.page_bytes]


OPENERS: Final[dict[int, Callable[[NodeFolder, MountedTable], PeerMemory | None]]] = {HOST: SharedFrames.open}
"""Kinds of memory that this machine's processes can read of one another."""
