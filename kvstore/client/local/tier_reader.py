"""The interfaces through which a client reads the tiers of a node on its machine, and ``DramReader``.

Every tier has a ``TierReader``. DRAM is mapped into this process (``DramReader``, ``MappedExtent``): its pages are
proven, copied, leased and written in place; see ``verify_hit``. Each other tier has a ``LowerReader``, which reads
pages into the caller's rows. To add a tier, write such a class and add a row to ``LOWER_READERS``
(``client.local.node``).

The addresses in the index are hints, so a reader proves each page. A reader opens its files or devices at first use,
and again when they have changed.
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
    """One extent of DRAM, mapped into this process. The mapping stays valid after the extent is dropped: its words are
    then zero, so no page matches.

    Attributes:
        words: generation and state of each frame, uint64 ``[frames]``; read-only, like the next four.
        identity: key, root, extra and tokens of each page, uint8 ``[frames, 48 + 4 * page_tokens]``.
        roots: the root of each page, uint8 ``[frames, 16]``.
        info: payload size, shards and flags of each record, uint64 ``[frames]``; see ``RecordFormat``.
        checksums: uint32 ``[frames, layers]``.
        uses: the table that clients write.
        last_use: a column of ``uses``, uint64 ``[frames]``.
        memory: the extent's whole range in the segment, uint8, which is pinned for devices.
        pages: the frames, uint8 ``[frames, page_bytes]``. This process writes only frames granted to its session.
        views: the frames, read-only.
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
        "_address",
        "_stride",
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
        self._address, self._stride = self.pages.ctypes.data, self.pages.strides[0]
        self._table = table  # keeps the mappings open

    def address(self, frame: int, offset: int = 0) -> int:
        """Return the address of a byte of a frame in this process, for devices."""
        return self._address + frame * self._stride + offset


class ObjectHead(NamedTuple):
    """The head of an object, whose record or header has proven the object's identity.

    Attributes:
        row: the object's identity row.
        extent, frame, word: the frame of the head and its word, if the head is in DRAM; otherwise ``extent`` is None.
    """

    frame_class: FrameClass
    row: bytes
    extent: MappedExtent | None = None
    frame: int = 0
    word: int = 0


class TierReader(Protocol):
    """Reads what a node stores about the pages of one tier. Thread-safe. Takes no lease."""

    @property
    def tier(self) -> Tier:
        """The tier under which the index lists the pages."""
        ...

    def root_at(self, raw: bytes) -> bytes | None:
        """Return the root in the current record at a raw address; None if there is no such record."""
        ...

    def class_at(self, raw: bytes) -> FrameClass | None:
        """Return the class of the frame at a raw address; None if the frame no longer exists."""
        ...

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """Return the object's head at a raw address; None if no object's head is proven there."""
        ...


class PendingRead(Protocol):
    """A read of pages into the caller's rows, until ``result`` has returned."""

    damaged: bytes
    """After ``result``, the raw address of the page with invalid bytes; b"" if there is none."""

    @property
    def addresses(self) -> bytes:
        """The raw addresses of the pages that are read, concatenated."""
        ...

    def result(self, silence_s: float) -> tuple[int, str]:
        """Wait for the read, and mark the pages as used. Return how many leading pages are in the rows and proven, and
        why no more ("" for all). The reason is "io" if nothing arrived for ``silence_s``."""
        ...


class LowerReader(TierReader, Protocol):
    """The reader of a tier whose pages are not mapped."""

    @property
    def closed(self) -> bool:
        """True if chains of prefix-closed layouts are prefix-closed in this tier: a page is in the tier only if the
        pages before it are."""
        ...

    def readable(self) -> bool:
        """Return whether the node has this tier and this process can read it."""
        ...

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> PendingRead:
        """Start reading the leading pages of ``keys`` from these raw addresses into ``rows`` ``[pages, page_bytes]``.

        A page counts only if it is proven: its key, root, extra, tokens and checksum, and after the read its
        generation.
        """
        ...


_unpack_address = struct.Struct("<IIQ").unpack_from


class DramReader:
    """The ``TierReader`` of one incarnation of a node's DRAM segment. An extent is mapped when it is first needed.

    Attributes:
        segment: the mapped memory.
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
        """Return the extent with this number; None if there is none now."""
        extent = self.extents.get(number)
        return extent if extent is not None else self._open_extent(number)

    def _open_extent(self, number: int) -> MappedExtent | None:
        table = ExtentTable.open(self._folder, number, self._incarnation, writable=False)
        if table is None or table.tier is not self.tier:
            return None
        extents = self.extents
        for old in extents.keys() - set(self._folder.extents()):  # mappings of dropped extents would keep their memory
            extents.pop(old, None)
        extent = MappedExtent(table, self.segment)
        extents[number] = extent
        return extent

    def root_at(self, raw: bytes) -> bytes | None:
        """Return the root in the current record at a raw address; None if there is no such record."""
        number, frame, _ = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        return extent.roots[frame].tobytes() if extent is not None and frame < len(extent.roots) else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        """Return the class of the frame at a raw address; None if there is no such extent now."""
        extent = self.extent(_unpack_address(raw)[0])
        return extent.frame_class if extent is not None else None

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """Return the object's head at a raw address, proven by its record; None if no sealed head is there."""
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
        """Record that a page is used now, so that eviction takes other pages first."""
        number, frame, _ = _unpack_address(raw)
        extent = self.extents.get(number) or self.extent(number)
        if extent is not None and frame < len(extent.last_use):
            extent.last_use[frame] = time.monotonic_ns()
