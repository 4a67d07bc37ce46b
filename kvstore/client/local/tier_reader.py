"""Interfaces for reading each tier on the node's machine: one for every tier, and one for tiers below memory.

The fastest tier is mapped (``DramReader``): its pages are proven, copied, leased and written in place. Pages of the
tiers below are read into the caller's rows by one ``LowerReader`` per tier. To add a tier, write such a class and add a
row to ``LOWER_READERS`` (``client.local.node``).

The index names addresses, all of which are hints. A reader opens its files or devices at first use, and again when the
node says that they have changed.

DramReader: reads pages in a node's memory that this process has mapped. Their records prove them; see ``verify_hit``.

MappedExtent: one extent of memory as a client maps it.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, FrameState, Tier, word_of
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier.base import Bytes
from kvstore.tier.dram import SegmentMap


class MappedExtent:
    """One extent as a client sees it. It stays valid for ever: a dropped extent's words are zero, so that nothing
    matches.

    ``words`` uint64 ``[frames]`` (generation and state), ``identity`` uint8 ``[frames, 48 + 4 * page_tokens]``,
    ``info`` uint64 ``[frames]``, ``checksums`` uint32 ``[frames, layers]``: read-only, written by the daemon. ``uses``:
    the table that clients write, with ``last_use`` uint64 ``[frames]``. ``memory`` uint8: the extent's whole range of
    the segment, to be pinned. See ``pins``. ``pages`` uint8 ``[frames, page_bytes]``: written only in frames granted to
    us; ``views``: the same, read-only.
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
        self._table = table  # keeps the mappings alive


class ObjectHead(NamedTuple):
    """The proven description in an object's head. ``extent`` is None if it is not in memory."""

    frame_class: FrameClass
    row: bytes  # its identity row
    extent: MappedExtent | None = None
    frame: int = 0
    word: int = 0


class TierReader(Protocol):
    """Finds pages of one tier. Threads may share it. Holds no page and no lease."""

    @property
    def tier(self) -> Tier:
        """The tier, under which the index lists its pages."""
        ...

    def root_at(self, raw: bytes) -> bytes | None:
        """Return the root of the page at a raw address, as its record says now; None if there is no such record."""
        ...

    def class_at(self, raw: bytes) -> FrameClass | None:
        """Return the class of the frames at a raw address, as the node says now; None if there are none."""
        ...

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """Return the object's head at that address; None if it is not proven."""
        ...


class PendingRead(Protocol):
    """A read of pages into the caller's rows. Ends with ``result``.

    Attributes:
        addresses: the concatenated raw addresses of the pages that are read.
        damaged: after ``result``, the raw address of the page with invalid bytes; b"" if there is none.
    """

    damaged: bytes

    @property
    def addresses(self) -> bytes:
        """See the class."""
        ...

    def result(self, silence_s: float) -> tuple[int, str]:
        """Return how many leading pages are in the rows and proven, and why not more ("" for all); marks them as used.

        Stops with reason "io" if nothing arrives for ``silence_s``.
        """
        ...


class LowerReader(TierReader, Protocol):
    """A tier whose pages are read, not mapped.

    Attributes:
        closed: for prefix-closed layouts, a page is in this tier only if those before it are.
    """

    @property
    def closed(self) -> bool:
        """See the class."""
        ...

    def readable(self) -> bool:
        """Return whether the node has that tier and this process may read it."""
        ...

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> PendingRead:
        """Begin to read the leading pages of ``keys``, at these raw addresses, into ``rows`` ``[pages, page_bytes]``.

        Every page is proven before it counts: key, root, extra, tokens and checksum, and its generation afterwards.
        """
        ...


_unpack_address = struct.Struct("<IIQ").unpack_from


class DramReader:
    """The ``TierReader`` of one incarnation of a node's segment. Each extent is mapped when it is first needed.

    Attributes:
        segment: the memory.
        extents: the extents mapped so far, by number. ``extent`` maps more.
    """

    tier = Tier.DRAM
    __slots__ = ("segment", "extents", "_folder", "_incarnation")

    def __init__(self, folder: NodeFolder, incarnation: int, segment: SegmentMap) -> None:
        self.segment = segment
        self.extents: dict[int, MappedExtent] = {}
        self._folder = folder
        self._incarnation = incarnation

    def extent(self, number: int) -> MappedExtent | None:
        """Return the extent of that number; None if it does not exist (any more)."""
        found = self.extents.get(number)
        return found if found is not None else self._open_extent(number)

    def _open_extent(self, number: int) -> MappedExtent | None:
        table = ExtentTable.open(self._folder, number, self._incarnation, writable=False)
        if table is None or table.tier is not self.tier:
            return None
        extents = self.extents
        for old in extents.keys() - set(self._folder.extents()):  # rare, so worth the check: old mappings hold memory
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
        """Mark a page as used now, so that eviction prefers other pages."""
        number, frame, _ = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        if extent is not None and frame < len(extent.last_use):
            extent.last_use[frame] = time.monotonic_ns()
