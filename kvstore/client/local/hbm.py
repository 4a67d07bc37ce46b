"""HbmReader: pages in memory that other processes of this machine have mounted, read where they lie.

The index names a segment and a frame. The segment's records prove the page: its word says SEALED under the generation
that the index named, and key, root, extra and token ids are ours. The bytes come by whatever way the segment exports
its memory (``transfer.exported``), and then the generation is looked at once more. All that files say is a hint, and
bounded by what the files are.

A segment whose engine has died is read no more: its session's lock tells, whether the node's daemon lives or not.
"""

from __future__ import annotations

import time
from typing import Final, NamedTuple

import numpy as np

from kvstore.client.local.tier_reader import ObjectHead
from kvstore.client.match import ABSENT, EXTENT, GENERATION, IDENTITY, IO
from kvstore.errors import Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, ADDRESS_BYTES, FrameClass, FrameState, Tier
from kvstore.tier.base import Bytes
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.mounted import HOLD_NS, MountedTable, mounted_path
from kvstore.tier.plain_files import is_locked
from kvstore.transfer.exported import OPENERS, PeerMemory

RECHECK_NS: Final = 100_000_000  # how often a read looks whether a segment's engine lives
_SEALED, _RETIRING = int(FrameState.SEALED), int(FrameState.RETIRING)


class _PeerSegment:
    """A segment as one process reads it."""

    def __init__(self, table: MountedTable, memory: PeerMemory, here: bool) -> None:
        self.table = table
        self.memory = memory
        self.here = here  # its engine is this process
        self.check_ns = 0

    def holds(self, frame: int, generation: int, states: tuple[int, ...]) -> bool:
        """Whether a page is there under that generation, in one of these states."""
        return int(self.table.words[frame]) in [generation << 8 | state for state in states]


class _Run(NamedTuple):
    """Pages ``page .. page + length`` in consecutive frames of one segment."""

    segment: _PeerSegment
    frame: int
    page: int
    generations: list[int]

    def goes_on(self, number: int, frame: int) -> bool:
        """Whether that frame of that segment is the next one."""
        table = self.segment.table
        return number == table.number and frame == self.frame + len(self.generations) < table.frames


class HbmReader:
    """See ``LowerReader``. Nothing is opened until the index names it."""

    tier = Tier.HBM
    closed = False

    def __init__(self, folder: NodeFolder, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._segments: dict[int, _PeerSegment] = {}

    def own(self, table: MountedTable, memory: PeerMemory) -> None:
        """This process has mounted that segment: it lives as long as we do."""
        self._segments[table.number] = _PeerSegment(table, memory, True)

    def disown(self, number: int) -> None:
        """It has no use for it any more."""
        self._segments.pop(number, None)

    def readable(self) -> bool:
        """See ``LowerReader``."""
        return self._header.mounts > 0

    def root_at(self, raw: bytes) -> bytes | None:
        """See ``TierReader``. Nobody's (b"") where the page has left, or cannot be read from here: engines take pages
        back faster than the index follows."""
        found = self._at(raw)
        generation = ADDRESS.unpack(raw[:ADDRESS_BYTES])[2]
        if found is None or not found[0].holds(found[1], generation, (_SEALED,)):
            return b""
        return found[0].table.root(found[1])

    def class_at(self, raw: bytes) -> FrameClass | None:
        """See ``TierReader``."""
        found = self._at(raw)
        return found[0].table.frame_class if found is not None else None

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """See ``TierReader``: engines mount no objects."""
        return None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> HbmRead:
        """See ``LowerReader``."""
        return HbmRead(self, located, keys, frame_class, rows)

    def start_layer(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, layer: int, rows: Bytes
    ) -> HbmRead:
        """The same of one layer of each page, into ``rows`` ``[pages, layer_bytes]``."""
        return HbmRead(self, located, keys, frame_class, rows, layer)

    def segment(self, number: int) -> _PeerSegment | None:
        """The segment of that number, while its engine lives."""
        segment = self._segments.get(number) or self._open(number)
        if segment is None or segment.here:
            return segment
        now_ns = time.monotonic_ns()
        if now_ns >= segment.check_ns:
            if not self._lives(segment.table):
                self._segments.pop(number, None)
                return None
            segment.check_ns = now_ns + RECHECK_NS
        return segment

    def _at(self, raw: bytes) -> tuple[_PeerSegment, int] | None:
        number, frame, _ = ADDRESS.unpack(raw[:ADDRESS_BYTES])
        segment = self.segment(number)
        return (segment, frame) if segment is not None and frame < segment.table.frames else None

    def _open(self, number: int) -> _PeerSegment | None:
        table = MountedTable.open(self._folder, number, self._header.incarnation)
        opener = OPENERS.get(table.kind) if table is not None else None
        memory = opener(self._folder, table) if table is not None and opener is not None else None
        if table is None or memory is None:
            return None
        for old in [old for old in self._segments if not mounted_path(self._folder, old).exists()]:
            self._segments.pop(old, None)  # rare enough to look: their mappings hold memory
        segment = self._segments[number] = _PeerSegment(table, memory, False)
        return segment

    def _lives(self, table: MountedTable) -> bool:
        try:
            return is_locked(self._folder.session(table.session))
        except OSError:
            return False


class HbmRead:
    """See ``PendingRead``. Everything is done by ``result``."""

    damaged = b""
    addresses = b""  # the node promotes nothing of what is not its own

    def __init__(
        self,
        reader: HbmReader,
        located: list[bytes],
        keys: Keys,
        frame_class: FrameClass,
        rows: Bytes,
        layer: int | None = None,
    ) -> None:
        self._reader = reader
        self._located = located
        self._keys = keys
        self._class = frame_class
        self._rows = rows
        self._layer = layer

    def result(self, silence_s: float) -> tuple[int, str]:
        """See ``PendingRead``."""
        pages = 0
        for run in self._runs():
            if run is None:
                return pages, EXTENT
            count, why = self._read(run)
            pages += count
            if why:
                return pages, why
        return pages, "" if pages == len(self._keys) else ABSENT

    def _runs(self) -> list[_Run | None]:
        """Runs of consecutive frames; None at the end: the next page is in a segment that cannot be read."""
        runs: list[_Run | None] = []
        for page, raw in enumerate(self._located[: len(self._rows)]):
            number, frame, generation = ADDRESS.unpack(raw)
            last = runs[-1] if runs else None
            if last is not None and last.goes_on(number, frame):
                last.generations.append(generation)
                continue
            segment = self._reader.segment(number)
            if segment is None or segment.table.frame_class != self._class or frame >= segment.table.frames:
                return [*runs, None]
            runs.append(_Run(segment, frame, page, [generation]))
        return runs

    def _read(self, run: _Run) -> tuple[int, str]:
        """Read the leading pages of a run that are proven; how many, and why not all."""
        segment, table = run.segment, run.segment.table
        frames = slice(run.frame, run.frame + len(run.generations))
        until_ns = np.uint64(time.monotonic_ns() + HOLD_NS)
        table.held[frames] = np.maximum(table.held[frames], until_ns)  # first: see ``mounted``
        try:
            count, why = self._proven(run)
            if count:
                segment.memory.read(run.frame, self._rows[run.page : run.page + count], self._layer)
        except Unavailable:
            return 0, IO
        finally:
            mine = table.held[frames] == until_ns
            table.held[frames][mine] = 0
        for i, generation in enumerate(run.generations[:count]):
            if not segment.holds(run.frame + i, generation, (_SEALED, _RETIRING)):
                return i, GENERATION  # what was read is not it, whatever it looks like
        return count, why

    def _proven(self, run: _Run) -> tuple[int, str]:
        table, keys = run.segment.table, self._keys
        width = len(keys.identity_bytes) // len(keys)
        for i, generation in enumerate(run.generations):
            at = (run.page + i) * width
            if not run.segment.holds(run.frame + i, generation, (_SEALED,)):
                return i, GENERATION
            if table.identity[run.frame + i].tobytes() != keys.identity_bytes[at : at + width]:
                return i, IDENTITY
        return len(run.generations), ""
