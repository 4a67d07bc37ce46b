"""``HbmReader`` reads pages in memory that other processes on this machine have mounted.

The index names a segment and a frame, and the frame's record proves the page: its word must be SEALED with the
generation that the index names, and key, root, extra and token ids must equal the requested ones. How the bytes are
read depends on how the segment exports its memory (``tier.peer_memory``). Afterwards the generation is compared again.
All other contents of the files are hints, and are checked against the sizes of the files.

If the target is device memory and that device can access the segment's memory, the device copies the pages
(``DirectRead``). Otherwise they are copied through the host.

When an engine dies, the lock of its session becomes free, even while the node's daemon is down. From then on its
segments are not read, and ``MountsWatch`` releases their memory. The same happens when an engine closes a segment.
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

WATCH_S: Final = 1.0  # how often the watch looks for ended engines
RECHECK_NS: Final = 100_000_000  # how often a read checks that a segment's engine is alive
RETRY_NS: Final = 2_000_000_000  # pause before a segment that could not be opened is tried again
_SEALED, _RETIRING = int(FrameState.SEALED), int(FrameState.RETIRING)


class _PeerSegment:
    """A mounted segment, opened for reading."""

    def __init__(self, table: MountedTable, memory: PeerMemory, is_own: bool) -> None:
        self.table = table
        self.memory = memory
        self.is_own = is_own  # this process has mounted the segment
        self.check_ns = 0

    def holds(self, frame: int, generation: int, states: tuple[int, ...]) -> bool:
        """Return whether a frame holds a page under this generation, in one of these states."""
        return int(self.table.words[frame]) in [generation << 8 | state for state in states]


class _Run(NamedTuple):
    """Pages starting at ``page``, in consecutive frames of one segment starting at ``frame``."""

    segment: _PeerSegment
    frame: int
    page: int
    generations: list[int]

    def is_followed_by(self, number: int, frame: int) -> bool:
        """Return whether this frame, of the segment with this number, continues the run."""
        table = self.segment.table
        return number == table.number and frame == self.frame + len(self.generations) < table.frames

    def unchanged(self, count: int) -> int:
        """Return how many of the first ``count`` pages have not changed. Bytes read from the others are invalid."""
        for i, generation in enumerate(self.generations[:count]):
            if not self.segment.holds(self.frame + i, generation, (_SEALED, _RETIRING)):
                return i
        return count


@contextlib.contextmanager
def _hold(run: _Run) -> Iterator[None]:
    """Keep the segment's engine from overwriting the run's frames (see ``shm.mounted``). Enter it before reading any of
    their words."""
    holds = run.segment.table.held[run.frame : run.frame + len(run.generations)]
    until_ns = np.uint64(time.monotonic_ns() + HOLD_NS)
    holds[:] = np.maximum(holds, until_ns)
    try:
        yield
    finally:
        holds[holds == until_ns] = 0


class HbmReader:
    """The ``LowerReader`` of mounted segments. A segment is opened when it is first needed."""

    tier = Tier.HBM
    closed = False

    def __init__(self, folder: NodeFolder, header: Header) -> None:
        self._folder = folder
        self._header = header
        self._segments: dict[int, _PeerSegment] = {}
        self._retry_ns: dict[int, int] = {}  # when to open a segment that could not be opened, by number

    def own(self, table: MountedTable, memory: PeerMemory) -> None:
        """Add a segment that this process has mounted. It stays until ``disown``."""
        self._segments[table.number] = _PeerSegment(table, memory, True)

    def disown(self, number: int) -> None:
        """Remove a segment that this process has closed."""
        self._segments.pop(number, None)

    def close(self) -> None:
        """Release all memory. A read in progress keeps its memory until it is done."""
        self._segments.clear()

    def readable(self) -> bool:
        """Return whether any process has mounted a segment."""
        return self._header.mounts > 0

    def root_at(self, raw: bytes) -> bytes | None:
        """Return the root in the record at a raw address. Return b"", which equals no root, if the page is retired or
        its segment cannot be read: engines retire pages faster than the index is updated."""
        place = self._place(raw)
        generation = ADDRESS.unpack(raw[:ADDRESS_BYTES])[2]
        if place is None or not place[0].holds(place[1], generation, (_SEALED,)):
            return b""
        return place[0].table.root(place[1])

    def class_at(self, raw: bytes) -> FrameClass | None:
        """Return the class of the frame at a raw address; None if the frame no longer exists."""
        place = self._place(raw)
        return place[0].table.frame_class if place is not None else None

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """Return None, since mounted segments contain no objects."""
        return None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> HbmRead:
        """Return a read of the leading pages of ``keys`` from these raw addresses into ``rows``
        ``[pages, page_bytes]``."""
        return HbmRead(_LocatedPages(self, located[: len(rows)], keys, frame_class), rows)

    def start_layer(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, layer: int, rows: Bytes
    ) -> HbmRead:
        """Return a read of one layer of each page into ``rows`` ``[pages, layer_bytes]``."""
        return HbmRead(_LocatedPages(self, located[: len(rows)], keys, frame_class), rows, layer)

    def start_direct(
        self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: DeviceRows, layer: int | None = None
    ) -> DirectRead:
        """Return a read of pages, or of one layer of them, into device memory. It reads the leading pages whose memory
        the device can access."""
        return DirectRead(_LocatedPages(self, located[: len(rows)], keys, frame_class), rows, layer)

    def segment(self, number: int) -> _PeerSegment | None:
        """Return the segment with this number; None if it cannot be read or its engine is dead."""
        segment = self._segments.get(number) or self._open(number)
        if segment is None or segment.is_own:
            return segment
        now_ns = time.monotonic_ns()
        if now_ns >= segment.check_ns:
            if not self._is_alive(segment.table):
                self._segments.pop(number, None)
                return None
            segment.check_ns = now_ns + RECHECK_NS
        return segment

    def _place(self, raw: bytes) -> tuple[_PeerSegment, int] | None:
        """Return the segment and frame of a raw address; None if the frame no longer exists."""
        number, frame, _ = ADDRESS.unpack(raw[:ADDRESS_BYTES])
        segment = self.segment(number)
        return (segment, frame) if segment is not None and frame < segment.table.frames else None

    def _open(self, number: int) -> _PeerSegment | None:
        now_ns = time.monotonic_ns()
        if now_ns < self._retry_ns.get(number, 0):
            return None
        table = MountedTable.open(self._folder, number, self._header.incarnation)
        opener = OPENERS.get(table.kind) if table is not None else None
        memory = opener(self._folder, table) if table is not None and opener is not None else None
        if table is None or memory is None:
            self._retry_ns = {other: retry_ns for other, retry_ns in self._retry_ns.items() if now_ns < retry_ns}
            self._retry_ns[number] = now_ns + RETRY_NS
            return None
        _WATCH.add(self)
        segment = self._segments[number] = _PeerSegment(table, memory, False)
        return segment

    def drop_ended(self) -> None:
        """Release the memory of segments that have ended. A read in progress keeps its memory until it is done.
        ``MountsWatch`` calls this in its thread."""
        for number, segment in list(self._segments.items()):
            is_mounted = mounted_path(self._folder, number).exists() and self._is_alive(segment.table)
            if not segment.is_own and not is_mounted:
                self._segments.pop(number, None)

    def _is_alive(self, table: MountedTable) -> bool:
        """Return whether the engine that has mounted a segment is alive."""
        try:
            return is_locked(self._folder.session(table.session))
        except OSError:
            return False


class _LocatedPages:
    """The pages of some keys, and the raw addresses that the index names for them."""

    def __init__(self, reader: HbmReader, located: list[bytes], keys: Keys, frame_class: FrameClass) -> None:
        self._reader = reader
        self._located = located
        self.keys = keys
        self._class = frame_class

    def runs(self) -> list[_Run | None]:
        """Return the pages as runs of consecutive frames. A final None means that the segment of the next page cannot
        be read."""
        runs: list[_Run | None] = []
        for page, raw in enumerate(self._located):
            number, frame, generation = ADDRESS.unpack(raw)
            last = runs[-1] if runs else None
            if last is not None and last.is_followed_by(number, frame):
                last.generations.append(generation)
                continue
            segment = self._reader.segment(number)
            if segment is None or segment.table.frame_class != self._class or frame >= segment.table.frames:
                return [*runs, None]
            runs.append(_Run(segment, frame, page, [generation]))
        return runs

    def prove(self, run: _Run) -> tuple[int, str]:
        """Return how many leading pages of a run are the requested pages, and why no more."""
        table, keys = run.segment.table, self.keys
        width = len(keys.identity_bytes) // len(keys)
        for i, generation in enumerate(run.generations):
            start = (run.page + i) * width
            if not run.segment.holds(run.frame + i, generation, (_SEALED,)):
                return i, GENERATION
            if table.identity[run.frame + i].tobytes() != keys.identity_bytes[start : start + width]:
                return i, IDENTITY
        return len(run.generations), ""


class HbmRead:
    """A ``PendingRead`` of mounted pages. ``result`` does the whole read."""

    damaged = b""
    addresses = b""  # empty, because the node promotes only pages of its own tiers

    def __init__(self, located: _LocatedPages, rows: Bytes, layer: int | None = None) -> None:
        self._located = located
        self._rows = rows
        self._layer = layer

    def result(self, silence_s: float) -> tuple[int, str]:
        """Read the pages. Return how many leading pages are in the rows and proven, and why no more ("" if all)."""
        pages = 0
        for run in self._located.runs():
            if run is None:
                return pages, EXTENT
            count, reason = self._read(run)
            pages += count
            if reason:
                return pages, reason
        return pages, "" if pages == len(self._located.keys) else ABSENT

    def _read(self, run: _Run) -> tuple[int, str]:
        """Read the leading proven pages of a run. Return their number, and why there are no more."""
        try:
            with _hold(run):
                count, reason = self._located.prove(run)
                if count:
                    run.segment.memory.read(run.frame, self._rows[run.page : run.page + count], self._layer)
        except Unavailable:
            return 0, IO
        unchanged = run.unchanged(count)
        return (unchanged, GENERATION) if unchanged < count else (count, reason)


class DirectRead:
    """A read of mounted pages into device memory, by one copy of a device that can access their memory."""

    def __init__(self, located: _LocatedPages, rows: DeviceRows, layer: int | None = None) -> None:
        self._located = located
        self._rows = rows
        self._layer = layer

    def result(self) -> tuple[int, str]:
        """Read the pages. Return how many leading pages are in the rows and proven, and why no more ("" if all). The
        reason EXTENT means that the device cannot access the memory of the next page, or cannot copy from it.

        Raises:
            DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
        """
        link, copied, pieces, reason = link_of(self._rows.device), list[tuple[_Run, int]](), list[Pieces](), ""
        with contextlib.ExitStack() as holds:
            for run in self._located.runs():
                places = self._places(run)
                if run is None or places is None:
                    reason = EXTENT
                    break
                holds.enter_context(_hold(run))
                count, reason = self._located.prove(run)
                if count:
                    copied.append((run, count))
                    pieces.append(_pieces(self._rows[run.page : run.page + count], *places))
                if reason:
                    break
            if copied:
                memory = [run.segment.memory for run, _ in copied]
                try:
                    event = link.copy_pieces(pieces, after=self._rows.ready())
                except DeviceLost:
                    raise
                except Unavailable:  # the driver refuses memory of another process
                    return 0, EXTENT
                link.wait(event, (memory, self._rows))
            pages = 0
            for run, count in copied:
                unchanged = run.unchanged(count)
                pages += unchanged
                if unchanged < count:
                    return pages, GENERATION
        return pages, reason or ("" if pages == len(self._located.keys) else ABSENT)

    def _places(self, run: _Run | None) -> tuple[Addresses, Addresses] | None:
        """Return the addresses and lengths of a run's pieces for the device; None if it cannot access them."""
        if run is None:
            return None
        try:
            places = run.segment.memory.places(self._rows.device, run.frame, len(run.generations), self._layer)
        except Unavailable:
            return None
        return places


def _pieces(rows: DeviceRows, sources: Addresses, nbytes: Addresses) -> Pieces:
    """Return targets, sources and lengths of the copies that fill the rows."""
    row_pieces = len(nbytes) // (int(nbytes.sum()) // rows.row_bytes)
    sources, nbytes = sources[: rows.rows * row_pieces], nbytes[: rows.rows * row_pieces]
    offsets = places_in(0, nbytes[:row_pieces])
    return (rows.addresses[:, None] + offsets).reshape(-1), sources, nbytes


class MountsWatch:
    """A thread that makes readers release an engine's mounted memory soon after the engine has ended. A process has one
    watch. Its thread runs while there is a reader.

    Device memory stays allocated as long as any process maps it. Without the watch, a process that has read an engine's
    pages and then becomes idle would keep that memory from the next engine.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: weakref.WeakSet[HbmReader] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def add(self, reader: HbmReader) -> None:
        """Watch a reader as long as it exists. Adding it again has no effect."""
        with self._lock:
            self._readers.add(reader)
            if self._thread is None or not self._thread.is_alive():  # a forked child has no thread
                self._thread = threading.Thread(target=self._watch, name="kvstore-mounts", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        while True:
            time.sleep(WATCH_S)
            with self._lock:
                readers = list(self._readers)
                if not readers:
                    self._thread = None
                    return
            while readers:
                readers.pop().drop_ended()


_WATCH: Final = MountsWatch()
