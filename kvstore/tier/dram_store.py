"""DramStore: the segment of a node as one of its tiers. Frames are mapped, and nothing stands before them."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.model.replica import FrameClass, Tier
from kvstore.tier.base import Bytes
from kvstore.tier.dram import SegmentFile


class DramStore:
    """See ``TierStore``. Made over an open segment, with the extents ``found`` in it; ``close`` closes that."""

    tier = Tier.DRAM
    generation = 1
    mapped = True
    relayed = False

    def __init__(self, segment: SegmentFile, incarnation: int, found: Iterable[tuple[int, FrameClass]] = ()) -> None:
        self.segment = segment
        self.incarnation = incarnation
        self.extent_bytes = segment.extent_bytes
        self.positions = segment.positions
        self._carved = dict(found)

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.extent_bytes // frame_class.frame_bytes

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return 0

    def header_incarnation(self, position: int) -> int:
        """See ``TierStore``."""
        return self.incarnation

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``. Its memory was had before: see ``service.node.room``."""
        assert 0 <= position < self.positions and position not in self._carved and self.frames_of(frame_class)
        self._carved[position] = frame_class

    def drop(self, position: int) -> None:
        """See ``TierStore``. Its memory is kept for the next extent."""
        del self._carved[position]

    def give_back(self, position: int) -> None:
        """Free the memory of a position where no extent is: clients know by an extent's number whether the memory
        behind it is still the same (``client.pins``)."""
        assert position not in self._carved, f"an extent lies in position {position}"
        self.segment.give_back(position)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self._frame(position, frame, frame_class)[:] = page

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        page[:] = self._frame(position, frame, frame_class)

    def sync(self) -> None:
        """See ``TierStore``."""

    def close(self) -> None:
        """See ``TierStore``."""
        self.segment.close()

    def _frame(self, position: int, frame: int, frame_class: FrameClass) -> Bytes:
        frames = self.frames_of(frame_class)
        assert self._carved.get(position) == frame_class and 0 <= frame < frames, (position, frame, frame_class)
        return self.segment.frame_view(position, frame_class.frame_bytes, frames)[frame]
