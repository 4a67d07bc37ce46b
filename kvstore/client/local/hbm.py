"""HbmReader: pages in memory that other processes of this machine have mounted, read where they lie.

The index names a segment and a frame. The segment's records prove the page: its word says SEALED under the generation
that the index named, and key, root, extra and token ids are ours. The bytes come by whatever way the segment exports
its memory (``transfer.exported``), and then the generation is looked at once more. All that files say is a hint, and
bounded by what the files are. Where bytes are wanted in a device's memory, and that device reaches the segment's, one
copy of that device brings them (``DirectRead``); else they come by way of the host.

A segment whose engine has died is read no more: its session's lock tells, whether the node's daemon lives or not. Then,
and when it is closed, its memory is let go of (``MountsWatch``).
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from kvstore.client.device_link import Pieces, link_of
from kvstore.client.device_rows import DeviceRows
from kvstore.client.local.tier_reader import ObjectHead
from kvstore.client.match import ABSENT, EXTENT, GENERATION, IDENTITY, IO
from kvstore.device.base import Addresses, DeviceLost
from kvstore.device.copies import places_in
from kvstore.errors import Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, ADDRESS_BYTES, FrameClass, FrameState, Tier
from kvstore.safe_files import is_locked
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.mounted import HOLD_NS, MountedTable, mounted_path
from kvstore.tier.base import Bytes
from kvstore.tier.peer_memory import OPENERS, PeerMemory

LOOK_S: Final = 1.0  # between two looks whether engines have ended, of a process that reads nothing
RECHECK_NS: Final = 100_000_000  # how often a read looks whether a segment's engine lives
UNOPENED_NS: Final = 2_000_000_000  # a segment that could not be opened is not tried again before that
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

    def unchanged(self, count: int) -> int:
        """How many of the leading ``count`` pages are still what they were. What was read of the others is not they,
        whatever it looks like."""
        for i, generation in enumerate(self.generations[:count]):
            if not self.segment.holds(self.frame + i, generation, (_SEALED, _RETIRING)):
                return i
        return count


@contextlib.contextmanager
def _held(run: _Run) -> Iterator[None]:
    """Inside, its engine knows that somebody reads there: see ``mounted``. First of all, before a word is looked at."""
    held = run.segment.table.held[run.frame : run.frame + len(run.generations)]
    until_ns = np.uint64(time.monotonic_ns() + HOLD_NS)
    held[:] = np.maximum(held, until_ns)
    try:
        yield
    finally:
        held[held == until_ns] = 0


class HbmReader:
    """See ``LowerReader``. Nothing is opened until the index names it."""

    tier = Tier.HBM
    closed = False

    def __init__(self, folder: NodeFolder, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._segments: dict[int, _PeerSegment] = {}
        self._unopened: dict[int, int] = {}  # by number, until when

    def own(self, table: MountedTable, memory: PeerMemory) -> None:
        """This process has mounted that segment: it lives as long as we do."""
        self._segments[table.number] = _PeerSegment(table, memory, True)

    def disown(self, number: int) -> None:
        """It has no use for it any more."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """Let go of all memory. Whoever is reading there keeps it until that is done."""
        self._segments.clear()

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
        return HbmRead(_Located(self, located[: len(rows)], keys, frame_class), rows)

    def start_layer(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, layer: int, rows: Bytes
    ) -> HbmRead:
        """The same of one layer of each page, into ``rows`` ``[pages, layer_bytes]``."""
        return HbmRead(_Located(self, located[: len(rows)], keys, frame_class), rows, layer)

    def start_direct(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: DeviceRows, layer: int | None = None
    ) -> DirectRead:
        """The same into memory of a device, of the leading pages whose memory that device reaches."""
        return DirectRead(_Located(self, located[: len(rows)], keys, frame_class), rows, layer)

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
        now_ns = time.monotonic_ns()
        if now_ns < self._unopened.get(number, 0):
            return None
        table = MountedTable.open(self._folder, number, self._header.incarnation)
        opener = OPENERS.get(table.kind) if table is not None else None
        memory = opener(self._folder, table) if table is not None and opener is not None else None
        if table is None or memory is None:
            self._unopened = {each: until for each, until in self._unopened.items() if now_ns < until}
            self._unopened[number] = now_ns + UNOPENED_NS
            return None
        _WATCH.add(self)
        segment = self._segments[number] = _PeerSegment(table, memory, False)
        return segment

    def drop_ended(self) -> None:
        """Let go of what has ended; called by the thread of ``MountsWatch``. A read that is under way keeps its memory
        until it is done."""
        for number, segment in list(self._segments.items()):
            there = mounted_path(self._folder, number).exists() and self._lives(segment.table)
            if not segment.here and not there:
                self._segments.pop(number, None)

    def _lives(self, table: MountedTable) -> bool:
        try:
            return is_locked(self._folder.session(table.session))
        except OSError:
            return False


class _Located:
    """Pages that the index has named, as runs of frames."""

    def __init__(self, reader: HbmReader, located: list[bytes], keys: Keys, frame_class: FrameClass) -> None:
        self._reader = reader
        self._located = located
        self.keys = keys
        self._class = frame_class

    def runs(self) -> list[_Run | None]:
        """Runs of consecutive frames; None at the end: the next page is in a segment that cannot be read."""
        runs: list[_Run | None] = []
        for page, raw in enumerate(self._located):
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

    def proven(self, run: _Run) -> tuple[int, str]:
        """How many leading pages of a run are what was asked for, and why not more."""
        table, keys = run.segment.table, self.keys
        width = len(keys.identity_bytes) // len(keys)
        for i, generation in enumerate(run.generations):
            at = (run.page + i) * width
            if not run.segment.holds(run.frame + i, generation, (_SEALED,)):
                return i, GENERATION
            if table.identity[run.frame + i].tobytes() != keys.identity_bytes[at : at + width]:
                return i, IDENTITY
        return len(run.generations), ""


class HbmRead:
    """See ``PendingRead``. Everything is done by ``result``."""

    damaged = b""
    addresses = b""  # the node promotes nothing of what is not its own

    def __init__(self, located: _Located, rows: Bytes, layer: int | None = None) -> None:
        self._located = located
        self._rows = rows
        self._layer = layer

    def result(self, silence_s: float) -> tuple[int, str]:
        """See ``PendingRead``."""
        pages = 0
        for run in self._located.runs():
            if run is None:
                return pages, EXTENT
            count, why = self._read(run)
            pages += count
            if why:
                return pages, why
        return pages, "" if pages == len(self._located.keys) else ABSENT

    def _read(self, run: _Run) -> tuple[int, str]:
        """Read the leading pages of a run that are proven; how many, and why not all."""
        try:
            with _held(run):
                count, why = self._located.proven(run)
                if count:
                    run.segment.memory.read(run.frame, self._rows[run.page : run.page + count], self._layer)
        except Unavailable:
            return 0, IO
        same = run.unchanged(count)
        return (same, GENERATION) if same < count else (count, why)


class DirectRead:
    """Pages into memory of a device, by one copy of that device out of memory that it reaches."""

    def __init__(self, located: _Located, rows: DeviceRows, layer: int | None = None) -> None:
        self._located = located
        self._rows = rows
        self._layer = layer

    def result(self) -> tuple[int, str]:
        """How many leading pages are in the rows and proven, and why not more ("" where all): EXTENT where the device
        does not reach the next one's memory, or cannot copy from it.

        Raises:
            DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
        """
        link, begun, pieces, why = link_of(self._rows.device), list[tuple[_Run, int]](), list[Pieces](), ""
        with contextlib.ExitStack() as held:
            for run in self._located.runs():
                there = self._places(run)
                if run is None or there is None:
                    why = EXTENT
                    break
                held.enter_context(_held(run))
                count, why = self._located.proven(run)
                if count:
                    begun.append((run, count))
                    pieces.append(_pieces(self._rows[run.page : run.page + count], *there))
                if why:
                    break
            if begun:
                memory = [run.segment.memory for run, _ in begun]
                try:
                    event = link.copy_pieces(pieces, after=self._rows.ready())
                except DeviceLost:
                    raise
                except Unavailable:  # the driver refuses what somebody else has exported: not the caller's matter
                    return 0, EXTENT
                link.wait(event, (memory, self._rows))
            pages = 0
            for run, count in begun:
                same = run.unchanged(count)
                pages += same
                if same < count:
                    return pages, GENERATION
        return pages, why or ("" if pages == len(self._located.keys) else ABSENT)

    def _places(self, run: _Run | None) -> tuple[Addresses, Addresses] | None:
        """Where a run lies for the device; None: out of its reach."""
        if run is None:
            return None
        try:
            places = run.segment.memory.places(self._rows.device, run.frame, len(run.generations), self._layer)
        except Unavailable:
            return None
        return places


def _pieces(rows: DeviceRows, sources: Addresses, nbytes: Addresses) -> Pieces:
    """Targets, sources and lengths of what fills the rows: of more pages, or of these."""
    each = len(nbytes) // (int(nbytes.sum()) // rows.row_bytes)
    sources, nbytes = sources[: rows.rows * each], nbytes[: rows.rows * each]
    inside = places_in(0, nbytes[:each])
    return (rows.addresses[:, None] + inside).reshape(-1), sources, nbytes


class MountsWatch:
    """Has readers let go of memory that an engine had mounted, soon after the engine has ended. One per process; its
    thread runs while there is a reader.

    A device's memory stays taken as long as any process has it mapped. So a process that has read an engine's pages
    once, and reads nothing any more, would keep the next engine from its memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[HbmReader] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, reader: HbmReader) -> None:
        """Look after it as long as it is there. May be repeated."""
        with self._lock:
            self._readers.add(reader)
            if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
                self._thread = threading.Thread(target=self._look, name="kvstore-mounts", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            with self._lock:
                readers = list(self._readers)
                if not readers:
                    self._thread = None
                    return
            while readers:
                readers.pop().drop_ended()


_WATCH: Final = MountsWatch()
