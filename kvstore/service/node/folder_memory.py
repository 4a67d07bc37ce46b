"""FolderMemory: the memory that the tmpfs of a node's folder still gives, for ``room``."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.model.replica import FrameClass
from kvstore.service.node.performer import Performer

INDEX_HEADROOM_BYTES = 1 << 20  # left free on the tmpfs whenever an extent is carved


def shm_free_bytes(folder: Path) -> int:
    """What the tmpfs of that folder has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


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

    def low(self) -> bool:
        """See ``room.Memory``."""
        return shm_free_bytes(self._performer.folder.path) < INDEX_HEADROOM_BYTES

    def give_back(self, position: int) -> None:
        """See ``room.Memory``."""
        self._performer.segment.give_back(position)
