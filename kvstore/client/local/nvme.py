"""NvmeReader: reads pages on NVMe directly from the device, without the daemon.

The index names a frame. The header before that frame on the device proves the page: incarnation, address, key, root,
extra and token ids must equal those of the caller's keys, and every layer's checksum must match. One read returns
header and payload; only valid pages are copied to the caller. At the end the records show whether the pages were there
during the whole read.

Worked example: 32 pages of 256 KiB are in frames 8..39 of extent 6. That is one run. It is read in 6 parts of 5, 7, 7,
7, 4 and 2 frames of at most 2 MiB; on the device each part is header, page, header, page, and so on. Two threads read
the parts one by one, while the caller checks and copies the parts that are done. If page 17 is invalid, the match ends
there, even if page 18 is valid; the caller's rows from 17 on are unchanged or hold their page.

ReadThreads: parallel reads from NVMe devices, with a deadline that holds even if a device does not respond.

A system call that reads from a device cannot be cancelled: if the device does not answer, its thread is blocked until
it does. So the caller never reads directly. Threads read into internal buffers and hand them over in the order of
completion; the caller checks and copies one while the devices read the next. Data that arrives after the caller gave up
stays in an internal buffer and does no harm. A disk with an unanswered read is not used again until it has answered, so
it costs only one deadline.
"""

from __future__ import annotations

import contextlib
import os
import queue
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore import boundary
from kvstore.client.local.tier_reader import ObjectHead
from kvstore.client.match import ABSENT, CHECKSUM, EXTENT, GENERATION, IDENTITY, IO
from kvstore.device.host_memory import copy, large_buffer
from kvstore.errors import InternalError, NodeUnavailable
from kvstore.model.objects import is_object_class
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS, FrameClass, FrameState, Tier
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.disk import Bytes, Disk
from kvstore.tier.nvme.frame_header import faults, payload_sums_in, unpack
from kvstore.tier.nvme.map import NvmeMap

THREADS: Final = 4
# Reads of one batch in flight on each disk. Large reads reach a device's full speed, and with few in flight the first
# is done early. Devices serve all reads in flight evenly, so a large number of them would end at the same time, with
# nothing left to overlap.
IN_FLIGHT: Final = 2
MORE_PER: Final = 8  # reads: one more in flight per this many; in a large batch the last ones matter little
AHEAD: Final = 8  # reads of one batch given to the threads and not yet handed over: each has a buffer
SHAPES_MAX: Final = 16  # shapes of reads for which a buffer keeps its views

_READING = boundary.RequestGuard("task/read")


class Read(NamedTuple):
    """``nbytes`` at ``offset`` of a disk."""

    disk: Disk
    offset: int
    nbytes: int


class Bounce:
    """A buffer in large memory pages, as large as the largest read so far. It is kept for the next read."""

    def __init__(self) -> None:
        self._buffer = np.zeros(0, np.uint8)
        self._pieces: dict[tuple[FrameClass, int], list[memoryview[int]]] = {}

    def take(self, nbytes: int) -> Bytes:
        """Return the first ``nbytes`` of the buffer."""
        if len(self._buffer) < nbytes:
            self._pieces.clear()
            self._buffer = large_buffer(nbytes)
        return self._buffer[:nbytes]

    def pages(self, frame_class: FrameClass, frames: int) -> list[memoryview[int]]:
        """Return the pages of consecutive frames that were read to the start of the buffer.

        The views are kept between reads, since making a view costs as much as hashing its bytes.
        """
        pieces = self._pieces.get((frame_class, frames))
        if pieces is None:
            if len(self._pieces) == SHAPES_MAX:
                self._pieces.clear()
            whole, page_bytes = self._buffer.data, frame_class.page_bytes
            stride = geometry.stride_bytes(frame_class)
            starts = range(geometry.header_bytes(frame_class), frames * stride, stride)
            pieces = self._pieces[frame_class, frames] = [whole[at : at + page_bytes] for at in starts]
        return pieces


class ReadBatch:
    """Reads of one caller, numbered from 0. Made by ``ReadThreads.start``; ends when the caller has taken all of them
    with ``next``, or with ``give_up``."""

    def __init__(self, threads: ReadThreads) -> None:
        self.reads: list[Read] = []
        self._threads = threads
        self._begun = 0  # reads that were given to the threads
        self._taken = 0
        self._disks: set[int] = set()
        self._mutex = threading.Lock()  # guards the next four
        self._waiting: deque[int] = deque()
        self._running: set[int] = set()
        self._at_work = 0  # threads that are working on this batch, or are about to
        self._given_up = False
        self._done: queue.SimpleQueue[tuple[int, Bounce | OSError]] = queue.SimpleQueue()

    def add(self, read: Read) -> int:
        """Add a read; return its number."""
        self.reads.append(read)
        self._disks.add(id(read.disk))
        self._begin_next()
        return len(self.reads) - 1

    def next(self, silence_s: float) -> tuple[int, Bounce | OSError] | None:
        """Return the next completed read: its number, and its buffer (to be returned with ``recycle``) or its error.

        None means that all were taken, or that none ended within ``silence_s`` and the rest is given up.
        """
        if self._taken == len(self.reads):
            return None
        try:
            done = self._done.get(timeout=silence_s)
        except queue.Empty:
            self.give_up()
            return None
        self._taken += 1
        self._begin_next()
        return done

    def recycle(self, bounce: Bounce) -> None:
        """Return a buffer that the caller has finished with."""
        self._threads.keep(bounce)

    def give_up(self) -> None:
        """Stop waiting. Disks with reads in progress owe an answer."""
        with self._mutex:
            late = [] if self._given_up else [self.reads[number].disk for number in self._running]
            self._given_up = True
        for disk in late:
            self._threads.owe(disk, 1)

    def _begin_next(self) -> None:
        while self._begun < len(self.reads) and self._begun - self._taken < AHEAD:
            number, self._begun = self._begun, self._begun + 1
            disk = self.reads[number].disk
            if self._threads.refuses(disk):
                self._done.put((number, OSError(f"{disk.path} does not answer")))
                continue
            with self._mutex:
                self._waiting.append(number)
                more = self._at_work < IN_FLIGHT * len(self._disks) + len(self.reads) // MORE_PER
                self._at_work += more
            if more:
                self._threads.begin(self)

    # --- for the threads --------------------------------------------------------------------------------------------

    def begin(self) -> int | None:
        """Take a read, in a thread. None means that there is none, or that the caller has given up; then the thread is
        free again."""
        with self._mutex:
            if self._given_up or not self._waiting:
                self._at_work -= 1
                return None
            number = self._waiting.popleft()
            self._running.add(number)
            return number

    def end(self, number: int, outcome: Bounce | OSError) -> bool:
        """Hand over a completed read. Returns False if it was given up in the meantime."""
        with self._mutex:
            self._running.discard(number)
            if not self._given_up:
                self._done.put((number, outcome))
            return not self._given_up


class ReadThreads:
    """A few daemon threads and their buffers, shared by all threads of this process.

    Life: made (nothing started) -> the first ``start`` -> ``close``, or the end of the process. A thread that waits for
    a silent disk is not available until the disk answers; if all threads wait, every read fails at once.
    """

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._name = name
        self._threads = threads
        self._started = False
        self._closed = False
        self._owed: Counter[int] = Counter()  # abandoned reads without an answer, by disk
        self._mutex = threading.Lock()  # guards the three above
        self._queue: queue.SimpleQueue[ReadBatch | None] = queue.SimpleQueue()
        self._bounces: list[Bounce] = []  # the last used one on top: it may be in the CPU cache

    def start(self, reads: Iterable[Read] = ()) -> ReadBatch:
        """Start ``reads``, in this order. Those of a disk that owes an answer fail at once."""
        with self._mutex:
            if not self._started and not self._closed:
                self._start_threads()
                self._started = True
        batch = ReadBatch(self)
        for read in reads:  # each starts before the next one is made
            if batch.add(read) < IN_FLIGHT:
                time.sleep(0)  # releases the interpreter, so that a thread starts it
        return batch

    def _start_threads(self) -> None:
        """Start the threads, or fewer if the machine has no more. Raises NodeUnavailable if it has none."""
        for number in range(self._threads):
            try:
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
            except RuntimeError as error:
                if not number:
                    raise NodeUnavailable(f"no thread to read with: {error}") from None
                self._threads = number
                return

    def refuses(self, disk: Disk) -> bool:
        """For ``ReadBatch``: return whether that disk may not be used now."""
        with self._mutex:
            return self._closed or id(disk) in self._owed or self._owed.total() >= self._threads

    def begin(self, batch: ReadBatch) -> None:
        """For ``ReadBatch``: assign one more thread to the batch."""
        self._queue.put(batch)

    def keep(self, bounce: Bounce) -> None:
        """For ``ReadBatch``: keep a free buffer, unless there are as many as a batch needs."""
        if len(self._bounces) <= AHEAD:  # the caller has one more
            self._bounces.append(bounce)

    def close(self) -> None:
        """The threads end after the read they are in; every read fails from now on."""
        with self._mutex:
            if self._started and not self._closed:
                for _ in range(self._threads):
                    self._queue.put(None)
            self._closed = True

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            while (number := batch.begin()) is not None:
                with contextlib.suppress(InternalError), _READING:  # the caller learns that the read failed
                    self._perform(batch, number)

    def _perform(self, batch: ReadBatch, number: int) -> None:
        disk, offset, nbytes = batch.reads[number]
        try:
            bounce = self._bounces.pop()
        except IndexError:
            bounce = Bounce()
        outcome: Bounce | OSError = OSError("a read failed in another thread")  # the thread reports why
        try:
            disk.read(offset, [bounce.take(nbytes)])
            outcome = bounce
        except OSError as error:
            outcome = error.with_traceback(None)  # its frames would keep the batch and the disk in a reference cycle
            self.keep(bounce)
        finally:
            if not batch.end(number, outcome):
                self.owe(disk, -1)

    def owe(self, disk: Disk, reads: int) -> None:
        """For ``ReadBatch``: count abandoned reads. An answer may come before its read is counted."""
        with self._mutex:
            self._owed[id(disk)] += reads
            if not self._owed[id(disk)]:
                del self._owed[id(disk)]


PART_BYTES: Final = 2 << 20  # of one read, or one page if that is larger
SMALL_BYTES: Final = PART_BYTES // 4  # smaller reads cost more than they save
HEADER_SILENCE_S: Final = 5.0  # after which a device that was asked for one header counts as unresponsive
RECHECK_NS: Final = 100_000_000  # how often a read checks whether the node's devices have changed

_SEALED = int(FrameState.SEALED)
_digest = xxhash.xxh3_64_intdigest


class NvmeExtent:
    """One extent on NVMe as a client sees it. A dropped extent's words are zero, so that nothing matches."""

    __slots__ = ("number", "position", "frame_class", "words", "last_use", "roots", "_table")

    def __init__(self, table: ExtentTable) -> None:
        self.number = table.extent
        self.position = table.position
        self.frame_class = table.frame_class
        self.words = table.words
        self.last_use = table.last_use
        self.roots = table.rows[:, table.fmt.root]
        self._table = table  # keeps the mappings


class NvmeRun(NamedTuple):
    """Pages ``page .. page + length`` in consecutive frames of one extent; ``words`` are those frames' words."""

    extent: NvmeExtent
    frame: int
    page: int
    length: int
    words: bytes


class ReadPart(NamedTuple):
    """One read: ``length`` pages from ``page`` on, in consecutive frames."""

    disk: Disk
    offset: int
    incarnation: int  # of that disk
    extent: NvmeExtent
    frame: int
    page: int
    length: int
    generations: npt.NDArray[np.uint64]

    def frames(self) -> list[ReadPart]:
        """Split into one part per frame."""
        stride = geometry.stride_bytes(self.extent.frame_class)
        return [
            self._replace(
                offset=self.offset + i * stride,
                frame=self.frame + i,
                page=self.page + i,
                length=1,
                generations=self.generations[i : i + 1],
            )
            for i in range(self.length)
        ]


class NvmeReader:
    """The ``LowerReader`` of one node's NVMe.

    Life: made (nothing opened) -> devices opened by the first read, and reopened when the node reports other devices ->
    dropped. A page that is evicted during its read is a miss.
    """

    tier = Tier.NVME
    closed = True

    def __init__(self, folder: NodeFolder, threads: ReadThreads) -> None:
        self.threads = threads
        self._folder = folder
        self._map: NvmeMap | None = None
        self._map_id: tuple[int, ...] = ()
        self._mutex = threading.Lock()
        self._check_ns = 0  # when to check again whether the node's devices have changed
        self._extents: dict[int, NvmeExtent] = {}

    def readable(self) -> bool:
        """See ``LowerReader``. True if there are devices, and this process may read at least the node's description of
        them."""
        return self._opened() is not None

    def root_at(self, raw: bytes) -> bytes | None:
        """See ``TierReader``."""
        number, frame, _ = ADDRESS.unpack_from(raw)
        extent = self._extent(number)
        return extent.roots[frame].tobytes() if extent is not None and frame < len(extent.roots) else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        """See ``TierReader``."""
        extent = self._extent(ADDRESS.unpack_from(raw)[0])
        return extent.frame_class if extent is not None else None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> NvmeRead:
        """See ``LowerReader``."""
        map_ = self._opened()
        if map_ is None:
            return NvmeRead(self, [], [], (), keys, rows, IO)
        reason = "" if len(located) == len(keys) else ABSENT
        runs, why = self._runs(located, frame_class, map_)
        return NvmeRead(self, located, runs, _parts(map_, runs), keys, rows, why or reason)

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """See ``TierReader``. Its header on the device proves it."""
        number, frame, generation = ADDRESS.unpack(raw)
        map_ = self._opened()
        extent = None if map_ is None else self._extents.get(number) or self._open_extent(number, map_)
        if map_ is None or extent is None or not is_object_class(extent.frame_class) or frame >= len(extent.words):
            return None
        frame_class, place = extent.frame_class, map_.place(extent.position, extent.frame_class, frame)
        if place is None:
            return None
        batch = self.threads.start([Read(place.disk, place.offset, geometry.header_bytes(frame_class))])
        done = batch.next(HEADER_SILENCE_S)
        if done is None or isinstance(done[1], OSError):
            return None
        header = done[1].take(geometry.header_bytes(frame_class)).copy()
        batch.recycle(done[1])
        found = unpack(header, frame_class, place.incarnation, number, frame, generation)
        if isinstance(found, str) or int(extent.words[frame]) != generation << 8 | _SEALED:
            return None
        return ObjectHead(frame_class, found.key + found.root + found.extra + found.tokens.tobytes())

    def _runs(self, located: list[bytes], frame_class: FrameClass, map_: NvmeMap) -> tuple[list[NvmeRun], str]:
        """Return runs of consecutive frames that should hold these pages, and why not all of them ("" for all).

        They are checked only after they have been read, since pages rarely leave in between.
        """
        count = len(located)
        flat = struct.unpack("<" + "IIQ" * count, b"".join(located))
        numbers, frames, generations = flat[0::3], flat[1::3], flat[2::3]
        runs: list[NvmeRun] = []
        page = 0
        while page < count:
            number, offset, stop = numbers[page], frames[page] - page, page + 1
            while stop < count and frames[stop] - stop == offset and numbers[stop] == number:
                stop += 1
            extent = self._extents.get(number) or self._open_extent(number, map_)
            if extent is None or extent.frame_class != frame_class or frames[stop - 1] >= len(extent.words):
                return runs, EXTENT
            words = struct.pack(
                f"<{stop - page}Q", *[generation << 8 | _SEALED for generation in generations[page:stop]]
            )
            runs.append(NvmeRun(extent, frames[page], page, stop - page, words))
            page = stop
        return runs, ""

    # --- what is mapped ---------------------------------------------------------------------------------------------

    def _opened(self) -> NvmeMap | None:
        """Return the devices; None if the node has none, or this process may not read them."""
        if time.monotonic_ns() >= self._check_ns:
            with self._mutex:
                self._check()
        return self._map

    def _check(self) -> None:
        now_ns = time.monotonic_ns()
        if now_ns < self._check_ns:
            return  # another thread did it first
        try:
            status = os.stat(self._folder.nvme)
        except OSError:
            identity: tuple[int, ...] = ()
        else:
            identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if identity != self._map_id:
            # A map that other threads are using keeps its descriptors until they are done.
            self._map = NvmeMap.open(self._folder) if identity else None
            self._map_id, self._extents = identity, {}
        self._check_ns = now_ns + RECHECK_NS  # last, so that a thread that sees it also sees the map

    def forget(self, extent: NvmeExtent) -> None:
        """Forget an extent that does not hold what the index said: it may have been recreated, on the same devices or
        on others."""
        self._extents.pop(extent.number, None)
        self._check_ns = 0

    def _extent(self, number: int) -> NvmeExtent | None:
        extent = self._extents.get(number)
        if extent is None:
            map_ = self._opened()
            extent = self._open_extent(number, map_) if map_ is not None else None
        return extent

    def _open_extent(self, number: int, map_: NvmeMap) -> NvmeExtent | None:
        table = ExtentTable.open(self._folder, number, map_.incarnation)
        if table is None or table.tier is not self.tier:
            self._check_ns = 0
            return None
        extents = self._extents
        for old in extents.keys() - set(self._folder.extents()):  # rare, so worth the check: old mappings hold memory
            extents.pop(old, None)
        extent = NvmeExtent(table)
        extents[number] = extent
        return extent


class NvmeRead:
    """A ``PendingRead`` of pages from the devices. Made by ``NvmeReader.start``."""

    def __init__(
        self,
        reader: NvmeReader,
        located: list[bytes],
        runs: list[NvmeRun],
        parts: Iterable[ReadPart],
        keys: Keys,
        rows: Bytes,
        reason: str,
    ) -> None:
        self.damaged = b""
        self._reader = reader
        self._located = located
        self._runs = runs
        self._rows = rows
        self._parts: list[ReadPart] = []
        self._batch = reader.threads.start(map(self._noted, parts))
        read = self._parts[-1].page + self._parts[-1].length if self._parts else 0
        self._reason = IO if runs and read < runs[-1].page + runs[-1].length else reason
        self._identities = _identities(keys)

    def _noted(self, part: ReadPart) -> Read:
        self._parts.append(part)
        return _read_of(part)

    @property
    def addresses(self) -> bytes:
        """See ``PendingRead``."""
        return b"".join(self._located[: self._parts[-1].page + self._parts[-1].length]) if self._parts else b""

    def result(self, silence_s: float) -> tuple[int, str]:
        """See ``PendingRead``."""
        pages, reason = self._read_all(silence_s)
        now_ns = time.monotonic_ns()
        for run in self._runs:
            if run.page > pages:
                break
            now = run.extent.words[run.frame : run.frame + run.length].tobytes()
            same = run.length if now == run.words else _equal_rows(now, run.words, 8)
            if same < run.length and run.page + same <= pages:
                pages, reason = run.page + same, GENERATION  # the bytes read are invalid
                self._reader.forget(run.extent)
            run.extent.last_use[run.frame : run.frame + max(0, min(same, pages - run.page))] = now_ns
        if reason == CHECKSUM:
            self.damaged = self._located[pages]
        return pages, reason

    def _read_all(self, silence_s: float) -> tuple[int, str]:
        """Check and copy the parts in the order in which their reads end."""
        batch, parts = self._batch, list(self._parts)
        end = parts[-1].page + parts[-1].length if parts else 0
        missing = {part.page: IO for part in parts}  # first missing page -> why
        first = end  # first invalid page known so far
        while (done := batch.next(silence_s)) is not None:
            number, outcome = done
            part = parts[number]
            if not isinstance(outcome, OSError):
                good, why = self._accept(part, outcome) if part.page < first else (0, ABSENT)
                batch.recycle(outcome)
                del missing[part.page]
                if good < part.length:
                    first = min(first, part.page + good)
                    missing[part.page + good] = why
            elif part.length > 1 and part.page < first:  # read each frame alone: one must not spoil those before it
                for one in part.frames():
                    missing[one.page] = IO
                    parts.append(one)
                    batch.add(_read_of(one))
            else:
                first = min(first, part.page)
        pages = min(missing, default=end)
        return pages, missing.get(pages, self._reason)

    def _accept(self, part: ReadPart, bounce: Bounce) -> tuple[int, str]:
        """Copy the leading valid pages of a part to the caller's rows; return how many, and why not all."""
        frame_class, pages = part.extent.frame_class, part.length
        head = geometry.header_bytes(frame_class)
        frames = bounce.take(pages * geometry.stride_bytes(frame_class)).reshape(pages, -1)
        headers, payloads = frames[:, :head], frames[:, head:]
        where = part.incarnation, part.extent.number, part.frame
        identities = self._identities[part.page : part.page + pages]
        reasons = faults(headers, frame_class, *where, part.generations, identities)
        sums = payload_sums_in(headers)
        good, why = pages, ""
        for i, (reason, page) in enumerate(zip(reasons, bounce.pages(frame_class, pages), strict=True)):
            if reason or _digest(page) != sums[i]:
                good, why = i, _why(part, i, headers[i]) if reason else CHECKSUM
                break
        copy(self._rows[part.page : part.page + good], payloads[:good, : frame_class.page_bytes])
        return good, why


def _read_of(part: ReadPart) -> Read:
    return Read(part.disk, part.offset, part.length * geometry.stride_bytes(part.extent.frame_class))


def _why(part: ReadPart, i: int, header: Bytes) -> str:
    """Return why a header is not the expected one: it is of another page with the same key, or it is damaged."""
    frame, generation = part.frame + i, int(part.generations[i])
    sound = unpack(header, part.extent.frame_class, part.incarnation, part.extent.number, frame, generation)
    return CHECKSUM if isinstance(sound, str) else IDENTITY


def _parts(map_: NvmeMap, runs: list[NvmeRun]) -> Iterator[ReadPart]:
    """Split runs into reads. Ends at a device that could not be opened here.

    The first read is shorter than the second, so that they do not end at the same moment. The last ones are short,
    because they are checked and copied when no other read runs.
    """
    left, first = sum(run.length for run in runs), True
    for run in runs:
        frame_class = run.extent.frame_class
        stride = geometry.stride_bytes(frame_class)
        most, least = max(1, PART_BYTES // stride), max(1, SMALL_BYTES // stride)
        generations = np.frombuffer(run.words, np.uint64) >> np.uint64(8)
        i = 0
        while i < run.length:
            length = min(_step(left, most, least, first), run.length - i)
            place = map_.place(run.extent.position, frame_class, run.frame + i)
            if place is None:
                return
            yield ReadPart(*place, run.extent, run.frame + i, run.page + i, length, generations[i : i + length])
            i, left, first = i + length, left - length, False


def _step(left: int, most: int, least: int, first: bool) -> int:
    """Return the number of pages of the next read, when ``left`` pages remain."""
    share = -(-left // 3) if first else -(-3 * left // 5)
    step = min(-(-2 * most // 3) if first else most, max(share, least))
    return left if left - step < least and left <= most else step


def _identities(keys: Keys) -> Bytes:
    return np.frombuffer(keys.identity_bytes, np.uint8).reshape(len(keys), -1)


def _equal_rows(left: bytes, right: bytes, width: int) -> int:
    """Return how many leading rows of ``width`` bytes are equal."""
    rows = min(len(left), len(right)) // width
    return next(
        (i for i in range(rows) if left[i * width : (i + 1) * width] != right[i * width : (i + 1) * width]), rows
    )
