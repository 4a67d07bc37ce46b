"""HbmReader: reads pages in memory that other processes of this machine have mounted.

The index names a segment and a frame. The segment's records prove the page: its word says SEALED under the generation
that the index named, and key, root, extra and token ids equal the requested ones. The bytes are read in the way that
the segment exports its memory (``tier.peer_memory``), and then the generation is checked again. Everything in the
files is a hint, and is checked against the size of the files. If the target is device memory, and that device can
access the segment's memory, one device copy reads the pages (``DirectRead``); otherwise they are copied through the
host.

A segment whose engine has died is not read any more; the lock of its session shows that, even while the node's daemon
is down. Its memory is then released (``MountsWatch``), as it is when the segment is closed.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from kvstore.client.buffers import DeviceRows
from kvstore.client.device_link import Pieces, link_of
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

LOOK_S: Final = 1.0  # interval of checks for ended engines in a process that reads nothing
RECHECK_NS: Final = 100_000_000  # how often a read checks that a segment's engine is alive
UNOPENED_NS: Final = 2_000_000_000  # pause before a segment that could not be opened is tried again
_SEALED, _RETIRING = int(FrameState.SEALED), int(FrameState.RETIRING)


class _PeerSegment:
    """A mounted segment, opened for reading."""

    def __init__(self, table: MountedTable, memory: PeerMemory, here: bool) -> None:
        self.table = table
        self.memory = memory
        self.here = here  # this process mounted it
        self.check_ns = 0

    def holds(self, frame: int, generation: int, states: tuple[int, ...]) -> bool:
        """Return whether the frame holds a page under that generation, in one of these states."""
        return int(self.table.words[frame]) in [generation << 8 | state for state in states]


class _Run(NamedTuple):
    """Pages ``page .. page + length`` in consecutive frames of one segment."""

    segment: _PeerSegment
    frame: int
    page: int
    generations: list[int]

    def goes_on(self, number: int, frame: int) -> bool:
        """Return whether that frame of that segment continues the run."""
        table = self.segment.table
        return number == table.number and frame == self.frame + len(self.generations) < table.frames

    def unchanged(self, count: int) -> int:
        """Return how many of the leading ``count`` pages are unchanged. Bytes read from the others are invalid."""
        for i, generation in enumerate(self.generations[:count]):
            if not self.segment.holds(self.frame + i, generation, (_SEALED, _RETIRING)):
                return i
        return count


@contextlib.contextmanager
def _held(run: _Run) -> Iterator[None]:
    """Tell the segment's engine that this process reads there (see ``mounted``). To be entered before any word is
    read."""
    held = run.segment.table.held[run.frame : run.frame + len(run.generations)]
    until_ns = np.uint64(time.monotonic_ns() + HOLD_NS)
    held[:] = np.maximum(held, until_ns)
    try:
        yield
    finally:
        held[held == until_ns] = 0


class HbmReader:
    """The ``LowerReader`` of mounted segments. A segment is opened when the index first names it."""

    tier = Tier.HBM
    closed = False

    def __init__(self, folder: NodeFolder, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._segments: dict[int, _PeerSegment] = {}
        self._unopened: dict[int, int] = {}  # segment number -> when to try again

    def own(self, table: MountedTable, memory: PeerMemory) -> None:
        """Note that this process has mounted that segment, which lives as long as the process."""
        self._segments[table.number] = _PeerSegment(table, memory, True)

    def disown(self, number: int) -> None:
        """Note that this process has closed that segment."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """Release all memory. A reader that is using it keeps it until its read is done."""
        self._segments.clear()

    def readable(self) -> bool:
        """See ``LowerReader``."""
        return self._header.mounts > 0

    def root_at(self, raw: bytes) -> bytes | None:
        """See ``TierReader``. Returns b"" if the page has left, or cannot be read from here: engines retire pages
        faster than the index is updated."""
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
        """See ``TierReader``. Engines do not mount objects."""
        return None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> HbmRead:
        """See ``LowerReader``."""
        return HbmRead(_Located(self, located[: len(rows)], keys, frame_class), rows)

    def start_layer(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, layer: int, rows: Bytes
    ) -> HbmRead:
        """As ``start``, for one layer of each page, into ``rows`` ``[pages, layer_bytes]``."""
        return HbmRead(_Located(self, located[: len(rows)], keys, frame_class), rows, layer)

    def start_direct(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: DeviceRows, layer: int | None = None
    ) -> DirectRead:
        """As ``start``, into device memory, for the leading pages whose memory that device can access."""
        return DirectRead(_Located(self, located[: len(rows)], keys, frame_class), rows, layer)

    def segment(self, number: int) -> _PeerSegment | None:
        """Return the segment of that number, while its engine is alive."""
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
        """Release segments that have ended; called by the thread of ``MountsWatch``. A read in progress keeps its
        memory until it is done."""
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
    """Pages that the index named, as runs of frames."""

    def __init__(self, reader: HbmReader, located: list[bytes], keys: Keys, frame_class: FrameClass) -> None:
        self._reader = reader
        self._located = located
        self.keys = keys
        self._class = frame_class

    def runs(self) -> list[_Run | None]:
        """Return runs of consecutive frames. A final None means that the next page is in a segment that cannot be
        read."""
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
        """Return how many leading pages of a run are the requested ones, and why not more."""
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
    """A ``PendingRead`` whose ``result`` does all the work."""

    damaged = b""
    addresses = b""  # the node promotes only its own pages

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
        """Read the leading pages of a run that are proven; return how many, and why not all."""
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
    """A read into device memory, by one copy of that device from memory that it can access."""

    def __init__(self, located: _Located, rows: DeviceRows, layer: int | None = None) -> None:
        self._located = located
        self._rows = rows
        self._layer = layer

    def result(self) -> tuple[int, str]:
        """Return how many leading pages are in the rows and proven, and why not more ("" for all). EXTENT means that
        the device cannot access the next page's memory, or cannot copy from it.

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
                except Unavailable:  # the driver refuses memory of another process: no fault of the caller
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
        """Return a run's addresses for the device; None if it cannot access them."""
        if run is None:
            return None
        try:
            places = run.segment.memory.places(self._rows.device, run.frame, len(run.generations), self._layer)
        except Unavailable:
            return None
        return places


def _pieces(rows: DeviceRows, sources: Addresses, nbytes: Addresses) -> Pieces:
    """Return targets, sources and lengths of the copies that fill the rows."""
    each = len(nbytes) // (int(nbytes.sum()) // rows.row_bytes)
    sources, nbytes = sources[: rows.rows * each], nbytes[: rows.rows * each]
    inside = places_in(0, nbytes[:each])
    return (rows.addresses[:, None] + inside).reshape(-1), sources, nbytes


class MountsWatch:
    """Makes readers release memory that an engine had mounted, soon after the engine has ended. One per process; its
    thread runs while there is a reader.

    Device memory stays allocated as long as any process has it mapped. So without this watch, a process that once read
    an engine's pages and then became idle would keep that memory from the next engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[HbmReader] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, reader: HbmReader) -> None:
        """Watch a reader as long as it exists. May be repeated."""
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
