"""Room: memory is had before a decision that needs it, so that no decision is performed by half.

What a decision may carve needs three things of the tmpfs: frames (populated positions), tables, and an index that can
follow. Where one of them cannot be had, the state is told before it decides, and does without.
"""

from __future__ import annotations

from typing import Protocol

from kvstore.model.replica import FrameClass
from kvstore.state import events as ev
from kvstore.state.node_state import NodeState


class Memory(Protocol):
    """What the tmpfs still gives."""

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """Have ``count`` tables of so many frames to spare; returns how many there are, fewer where memory is out."""
        ...

    def blocked(self) -> bool:
        """True where tables are missing for want of descriptors, which comes to an end: memory would not help."""
        ...

    def index(self, frames_more: int) -> bool:
        """Have what the index needs to follow every change, with so many frames more. False: there is none."""
        ...

    def low(self) -> bool:
        """Less is left than sessions and a rebuild of the index may need."""
        ...

    def give_back(self, position: int) -> None:
        """A vacant position's memory goes to others, for good."""
        ...


def make_room(state: NodeState, memory: Memory, frame_class: FrameClass, count: int, now_ns: int) -> None:
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
