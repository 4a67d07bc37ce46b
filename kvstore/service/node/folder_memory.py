"""FolderMemory: the memory that the tmpfs of a node's folder still gives, for ``room``."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.model.replica import FrameClass, RecordFormat
from kvstore.service.node.performer import Performer

INDEX_HEADROOM_BYTES = 1 << 20  # left free on the tmpfs whenever an extent is carved
TABLE_DESCRIPTORS = 8  # what making and mapping a table takes, twice
LEAN_BYTES_PER_FRAME = RecordFormat(0, 0, tail=False).row_bytes + 8  # record and mark of a tier that is not mapped


def shm_free_bytes(folder: Path) -> int:
    """What the tmpfs of that folder has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def lean_table_fits(folder: Path, frames: int) -> bool:
    """There is room for another table of a tier that is not mapped, of so many frames, and descriptors to make it."""
    return shm_free_bytes(folder) > frames * LEAN_BYTES_PER_FRAME + INDEX_HEADROOM_BYTES and descriptors_left()


def descriptors_left() -> bool:
    """True where this process can open ``TABLE_DESCRIPTORS`` files now."""
    opened: list[int] = []
    try:
        while len(opened) < TABLE_DESCRIPTORS:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


class FolderMemory:
    """See ``room.Memory``: that of a node's folder."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """See ``room.Memory``."""
        return self._performer.spares.have(frame_class, frames, count)

    def index(self, frames_more: int) -> bool:
        """See ``room.Memory``."""
        frames = sum(table.frames for table in self._performer.tables.values())
        return self._performer.index.reserve(frames + frames_more)

    def blocked(self) -> bool:
        """See ``room.Memory``."""
        return self._performer.spares.blocked

    def low(self) -> bool:
        """See ``room.Memory``."""
        return shm_free_bytes(self._performer.folder.path) < INDEX_HEADROOM_BYTES

    def give_back(self, position: int) -> None:
        """See ``room.Memory``."""
        self._performer.dram.give_back(position)
