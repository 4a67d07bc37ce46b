"""Room: memory is had before a decision that needs it, so that no decision is performed by half.

What a decision may carve needs three things of the tmpfs: frames (populated positions), tables, and an index that can
follow. Where one of them cannot be had, the state is told before it decides, and does without.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.model.replica import FrameClass, RecordFormat
from kvstore.service.node.performer import Performer
from kvstore.state import events as ev
from kvstore.state.node_state import NodeState

INDEX_HEADROOM_BYTES = 1 << 20  # left free on the tmpfs whenever an extent is carved
TABLE_DESCRIPTORS = 8  # what making and mapping a table takes, twice
LEAN_BYTES_PER_FRAME = RecordFormat(0, 0, tail=False).row_bytes + 8  # record and mark of a tier that is not mapped


def shm_free_bytes(folder: Path) -> int:
    """What the tmpfs of that folder has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def lean_table_fits(folder: Path, frames: int) -> bool:
    """True where another table of ``frames`` frames, of a tier that is not mapped, has room and descriptors."""
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
    """What the tmpfs of a node's folder still gives."""

    def __init__(self, performer: Performer) -> None:
        self._performer = performer

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Have ``count`` spare tables of ``frames`` frames; returns how many there are, fewer where memory is out."""
        return self._performer.spares.have(frame_class, frames, count)

    def index(self, frames_more: int) -> bool:
        """Have what the index needs to follow every change, with ``frames_more`` frames more. False: memory is out."""
        frames = sum(table.frames for table in self._performer.tables.values())
        return self._performer.index.reserve(frames + frames_more)

    def blocked(self) -> bool:
        """True where tables are missing for want of descriptors, which comes to an end: memory would not help."""
        return self._performer.spares.blocked

    def low(self) -> bool:
        """Less is left than sessions and a rebuild of the index may need."""
        return shm_free_bytes(self._performer.folder.path) < INDEX_HEADROOM_BYTES

    def give_back(self, position: int) -> None:
        """A vacant position's memory goes to others, for good."""
        self._performer.dram.give_back(position)


def make_room(state: NodeState, memory: FolderMemory, frame_class: FrameClass, count: int, now_ns: int) -> None:
    """Before a decision that may take ``count`` frames of a class: tell the state how many extents it may carve.

    Where memory is out, vacant positions give theirs up for tables: the pool shrinks, the node goes on.
    ``Segment.tables`` is to be cleared after the decision.
    """
    segment = state.segment
    pool = segment.pool(frame_class)
    while wanted := state.space.extents_wanted(pool, count):
        have = memory.tables(frame_class, pool.frames_per_extent, wanted)
        if not memory.index(have * pool.frames_per_extent):
            have = 0
        segment.tables[frame_class] = have
        if not segment.vacant or memory.blocked() or (have == wanted and not memory.low()):
            return
        position = max(segment.vacant)
        memory.give_back(position)
        state.handle(ev.PopulationFailed(now_ns, [position]))  # there is nothing to perform
