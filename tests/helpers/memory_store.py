"""MemoryStore: a tier of its own in the memory of a test, to show what a node asks of one."""

from __future__ import annotations

from collections.abc import Iterable

from kvstore.model.replica import FrameClass, Tier
from kvstore.tier.base import Bytes
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.disk import aligned_buffer


class MemoryStore:
    """See ``TierStore``: pages are dictionary entries, with the headers that they were written under."""

    mapped = False
    relayed = True
    generation = 1

    def __init__(self, tier: Tier, incarnation: int, extent_bytes: int, positions: int) -> None:
        self.tier = tier
        self.incarnation = incarnation
        self.extent_bytes = extent_bytes
        self.positions = positions
        self.pages: dict[tuple[int, int], tuple[Bytes, Bytes]] = {}
        self.carved: dict[int, FrameClass] = {}
        self.open: set[int] = set()

    def frames_of(self, frame_class: FrameClass) -> int:
        return self.extent_bytes // (self.header_bytes(frame_class) + frame_class.frame_bytes)

    def header_bytes(self, frame_class: FrameClass) -> int:
        return geometry.header_bytes(frame_class)

    def header_incarnation(self, position: int) -> int:
        return self.incarnation

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        assert 0 <= position < self.positions and position not in self.carved and self.frames_of(frame_class)
        self.carved[position] = frame_class

    def drop(self, position: int) -> None:
        del self.carved[position]
        self.pages = {place: page for place, page in self.pages.items() if place[0] != position}

    def open_for_writing(self, positions: Iterable[int]) -> None:
        self.open |= set(positions)

    def close_for_writing(self, positions: Iterable[int]) -> None:
        self.open -= set(positions)

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        self._check(position, frame, frame_class)
        assert position in self.open, "not open for writing"
        self.pages[position, frame] = header.copy(), page.copy()

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        self._check(position, frame, frame_class)
        nothing = aligned_buffer(len(header)), aligned_buffer(len(page))
        header[:], page[:] = self.pages.get((position, frame), nothing)

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _check(self, position: int, frame: int, frame_class: FrameClass) -> None:
        assert self.carved.get(position) == frame_class and 0 <= frame < self.frames_of(frame_class)
