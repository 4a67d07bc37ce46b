"""MappedExtent: one extent of memory as a client maps it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvstore.tier.dram import SegmentMap
from kvstore.tier.records import ExtentTable


class MappedExtent:
    """One extent as a client sees it. Valid for ever: a dropped extent's words are zero, so that nothing matches.

    ``words`` uint64 ``[frames]`` (generation and state), ``identity`` uint8 ``[frames, 48 + 4 * page_tokens]``,
    ``info`` uint64 ``[frames]``, ``checksums`` uint32 ``[frames, layers]``: read-only, the daemon's.
    ``uses``: what clients write, and of it ``last_use`` uint64 ``[frames]``.
    ``memory`` uint8: the whole position of the segment, to be pinned. See ``pins``.
    ``pages`` uint8 ``[frames, page_bytes]``: written only in frames granted to us; ``views``: the same, read-only.
    """

    __slots__ = (
        "number",
        "frame_class",
        "page_bytes",
        "words",
        "identity",
        "roots",
        "info",
        "checksums",
        "last_use",
        "uses",
        "memory",
        "pages",
        "views",
        "_table",
    )

    def __init__(self, table: ExtentTable, segment: SegmentMap) -> None:
        frame_class, fmt = table.frame_class, table.fmt
        self.number = table.extent
        self.frame_class = frame_class
        self.page_bytes = frame_class.page_bytes
        self.words = table.words
        self.identity = table.rows[:, fmt.identity]
        self.roots = table.rows[:, fmt.root]
        self.info = table.column(fmt.info)
        self.checksums = table.rows[:, fmt.checksums].view(np.uint32)
        self.last_use = table.last_use
        self.uses = table.uses
        self.memory: npt.NDArray[np.uint8] = segment.frames(table.position, segment.extent_bytes, 1)[0]
        place = table.position, frame_class.frame_bytes, table.frames
        self.pages: npt.NDArray[np.uint8] = segment.frames(*place)[:, : frame_class.page_bytes]
        self.views: npt.NDArray[np.uint8] = segment.frames_readonly(*place)[:, : frame_class.page_bytes]
        self._table = table  # keeps the mappings
