"""DramReader: pages in a node's memory as one process maps them. They are proven by their records; see ``proof``."""

from __future__ import annotations

import struct
import time

from kvstore.client.local.mapped_extent import MappedExtent
from kvstore.client.local.tier_reader import ObjectHead
from kvstore.model.objects import is_object_class
from kvstore.model.replica import FrameClass, FrameState, Tier, word_of
from kvstore.tier.dram import SegmentMap
from kvstore.tier.folder import NodeFolder
from kvstore.tier.records import ExtentTable

_unpack_address = struct.Struct("<IIQ").unpack_from


class DramReader:
    """See ``TierReader``. One incarnation of a node's segment; its extents are mapped when somebody asks for them.

    Attributes:
        segment: the memory.
        extents: those mapped so far, by number. ``extent`` maps one more.
    """

    tier = Tier.DRAM
    __slots__ = ("segment", "extents", "_folder", "_incarnation")

    def __init__(self, folder: NodeFolder, incarnation: int, segment: SegmentMap) -> None:
        self.segment = segment
        self.extents: dict[int, MappedExtent] = {}
        self._folder = folder
        self._incarnation = incarnation

    def extent(self, number: int) -> MappedExtent | None:
        """The extent of that number; None where there is none (any more)."""
        found = self.extents.get(number)
        return found if found is not None else self._open_extent(number)

    def _open_extent(self, number: int) -> MappedExtent | None:
        table = ExtentTable.open(self._folder, number, self._incarnation, writable=False)
        if table is None or table.tier is not self.tier:
            return None
        extents = self.extents
        for old in extents.keys() - set(self._folder.extents()):  # rare enough to look: their mappings hold memory
            extents.pop(old, None)
        extent = MappedExtent(table, self.segment)
        extents[number] = extent
        return extent

    def root_at(self, raw: bytes) -> bytes | None:
        """See ``TierReader``."""
        number, frame, _ = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        return extent.roots[frame].tobytes() if extent is not None and frame < len(extent.roots) else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        """See ``TierReader``."""
        extent = self.extent(_unpack_address(raw)[0])
        return extent.frame_class if extent is not None else None

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """See ``TierReader``."""
        number, frame, generation = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        word = word_of(generation, FrameState.SEALED)
        if extent is None or frame >= len(extent.words) or int(extent.words[frame]) != word:
            return None
        row = extent.identity[frame].tobytes()
        if not is_object_class(extent.frame_class) or int(extent.words[frame]) != word:
            return None
        return ObjectHead(extent.frame_class, row, extent, frame, word)

    def mark_used(self, raw: bytes) -> None:
        """Mark a page as used now: whoever looks for pages to evict looks elsewhere first."""
        number, frame, _ = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        if extent is not None and frame < len(extent.last_use):
            extent.last_use[frame] = time.monotonic_ns()
