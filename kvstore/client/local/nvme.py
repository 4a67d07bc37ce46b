"""``NvmeReader`` reads pages on NVMe directly from the devices, without the daemon. ``ReadThreads`` makes the reads.

The index names a frame, and the header before that frame on the device proves the page. Incarnation, address, key,
root, extra and token ids must equal the requested ones, and the checksum of every layer must match. One read returns
header and payload, and only valid pages are copied to the caller. At the end the records in shared memory show whether
the pages were there during the whole read.

Worked example: 32 pages of 256 KiB in frames 8..39 of extent 6 are one run. It is read in 6 parts of 5, 7, 7, 7, 4 and
2 frames, each of at most 2 MiB. On the device, each part is header, page, header, page, and so on. Two threads read the
parts of a disk, while the caller checks and copies the parts that are done. If page 17 is invalid, the match ends
there, even if page 18 is valid. Each of the caller's rows from 17 on is then unchanged, or contains its page.

A system call that reads from a device cannot be cancelled: its thread is blocked until the device answers. So a caller
never reads in its own thread, and its deadline holds even if a device is silent. Threads read into internal buffers and
return them in the order of completion. Data that arrives after the caller has given up stays in an internal buffer. A
disk with an unanswered read is not used again until it has answered, so it causes only one wait.
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
# Reads of one batch in flight on each disk. Two large reads reach a device's full speed. Devices serve all reads in
# flight evenly: a large number of them would end at the same moment, and no read would overlap the checks of another.
IN_FLIGHT: Final = 2
READS_PER_EXTRA: Final = 8  # a batch has one more in flight for every 8 reads: its last reads then matter less
AHEAD: Final = 8  # reads of one batch that have started and are not yet taken; each of them has a buffer
SHAPES_MAX: Final = 16  # shapes of reads for which a buffer keeps its views

_READING = boundary.RequestGuard("task/read")


class Read(NamedTuple):
    """A read of ``nbytes`` at ``offset`` of a disk."""

    disk: Disk
    offset: int
    nbytes: int


class BounceBuffer:
    """A reusable buffer in large memory pages, as large as the largest read so far."""

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

        The views are kept between reads, because creating a view takes as long as hashing its bytes.
        """
        pieces = self._pieces.get((frame_class, frames))
        if pieces is None:
            if len(self._pieces) == SHAPES_MAX:
                self._pieces.clear()
            data, page_bytes = self._buffer.data, frame_class.page_bytes
            stride = geometry.stride_bytes(frame_class)
            starts = range(geometry.header_bytes(frame_class), frames * stride, stride)
            pieces = self._pieces[frame_class, frames] = [data[start : start + page_bytes] for start in starts]
        return pieces


class ReadBatch:
    """The reads of one caller, numbered from 0. ``ReadThreads.start`` creates it. It ends when ``next`` has returned
    all reads, or with ``give_up``."""

    def __init__(self, threads: ReadThreads) -> None:
        self.reads: list[Read] = []
        self._threads = threads
        self._queued = 0  # reads that were queued for the threads
        self._taken = 0  # reads that `next` has returned
        self._disks: set[int] = set()
        self._mutex = threading.Lock()  # guards the next four
        self._waiting: deque[int] = deque()
        self._running: set[int] = set()
        self._workers = 0  # threads that work on this batch, or are about to
        self._is_abandoned = False
        self._done: queue.SimpleQueue[tuple[int, BounceBuffer | OSError]] = queue.SimpleQueue()

    def add(self, read: Read) -> int:
        """Add a read, and return its number."""
        self.reads.append(read)
        self._disks.add(id(read.disk))
        self._queue_reads()
        return len(self.reads) - 1

    def next(self, silence_s: float) -> tuple[int, BounceBuffer | OSError] | None:
        """Wait for the next completed read. Return its number, and its buffer or its error. The caller returns the
        buffer with ``recycle``.

        Return None if all reads were returned before. If no read ends within ``silence_s``, give up the remaining reads
        and return None too.
        """
        if self._taken == len(self.reads):
            return None
        try:
            done = self._done.get(timeout=silence_s)
        except queue.Empty:
            self.give_up()
            return None
        self._taken += 1
        self._queue_reads()
        return done

    def recycle(self, buffer: BounceBuffer) -> None:
        """Return a buffer that the caller no longer needs."""
        self._threads.recycle(buffer)

    def give_up(self) -> None:
        """Abandon the remaining reads. The disks of reads in progress are not reused until they have answered."""
        with self._mutex:
            disks = [] if self._is_abandoned else [self.reads[number].disk for number in self._running]
            self._is_abandoned = True
        for disk in disks:
            self._threads.count_abandoned(disk, 1)

    def _queue_reads(self) -> None:
        while self._queued < len(self.reads) and self._queued - self._taken < AHEAD:
            number, self._queued = self._queued, self._queued + 1
            disk = self.reads[number].disk
            if self._threads.refuses(disk):
                self._done.put((number, OSError(f"{disk.path} does not answer")))
                continue
            with self._mutex:
                self._waiting.append(number)
                needs_worker = self._workers < IN_FLIGHT * len(self._disks) + len(self.reads) // READS_PER_EXTRA
                self._workers += needs_worker
            if needs_worker:
                self._threads.assign(self)

    # --- calls of the threads ---------------------------------------------------------------------------------------

    def start_read(self) -> int | None:
        """Take a waiting read, and return its number. Return None if there is none, or if the caller has given up; the
        thread then stops working on this batch."""
        with self._mutex:
            if self._is_abandoned or not self._waiting:
                self._workers -= 1
                return None
            number = self._waiting.popleft()
            self._running.add(number)
            return number

    def end_read(self, number: int, outcome: BounceBuffer | OSError) -> bool:
        """Pass a completed read to the caller. Return False if the caller has given up."""
        with self._mutex:
            self._running.discard(number)
            if not self._is_abandoned:
                self._done.put((number, outcome))
            return not self._is_abandoned


class ReadThreads:
    """A few daemon threads that read from devices, and their buffers. All threads of this process share it.

    The first ``start`` starts the threads. ``close`` or the end of the process ends them. A thread that waits for a
    silent disk is not available until the disk answers. If all threads wait, every read fails at once.
    """

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._name = name
        self._threads = threads
        self._is_started = False
        self._is_closed = False
        self._abandoned: Counter[int] = Counter()  # abandoned reads that the disk has not answered, by disk
        self._mutex = threading.Lock()  # guards the three above
        self._queue: queue.SimpleQueue[ReadBatch | None] = queue.SimpleQueue()
        self._buffers: list[BounceBuffer] = []  # a stack: the last used buffer may still be in the CPU cache

    def start(self, reads: Iterable[Read] = ()) -> ReadBatch:
        """Start ``reads``, in this order. Reads from a disk with an unanswered read fail at once."""
        with self._mutex:
            if not self._is_started and not self._is_closed:
                self._start_threads()
                self._is_started = True
        batch = ReadBatch(self)
        for read in reads:  # each read starts before the iterator computes the next one
            if batch.add(read) < IN_FLIGHT:
                time.sleep(0)  # releases the interpreter, so that a thread starts the read
        return batch

    def _start_threads(self) -> None:
        """Start the threads, or as many as the machine allows. Raises NodeUnavailable if it allows none."""
        for number in range(self._threads):
            try:
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
            except RuntimeError as error:
                if not number:
                    raise NodeUnavailable(f"no thread to read with: {error}") from None
                self._threads = number
                return

    def refuses(self, disk: Disk) -> bool:
        """Return whether a disk cannot be used now."""
        with self._mutex:
            return self._is_closed or id(disk) in self._abandoned or self._abandoned.total() >= self._threads

    def assign(self, batch: ReadBatch) -> None:
        """Assign one more thread to a batch."""
        self._queue.put(batch)

    def recycle(self, buffer: BounceBuffer) -> None:
        """Keep a free buffer for later reads, unless there are enough for one batch."""
        if len(self._buffers) <= AHEAD:  # one more than `AHEAD`, since the caller uses one
            self._buffers.append(buffer)

    def close(self) -> None:
        """End each thread after its current read. Every read fails from now on."""
        with self._mutex:
            if self._is_started and not self._is_closed:
                for _ in range(self._threads):
                    self._queue.put(None)
            self._is_closed = True

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            while (number := batch.start_read()) is not None:
                with contextlib.suppress(InternalError), _READING:  # the caller gets an OSError
                    self._perform(batch, number)

    def _perform(self, batch: ReadBatch, number: int) -> None:
        disk, offset, nbytes = batch.reads[number]
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = BounceBuffer()
        outcome: BounceBuffer | OSError = OSError("a read failed in another thread")  # that thread logs the reason
        try:
            disk.read(offset, [buffer.take(nbytes)])
            outcome = buffer
        except OSError as error:
            outcome = error.with_traceback(None)  # a traceback would keep batch and disk in a reference cycle
            self.recycle(buffer)
        finally:
            if not batch.end_read(number, outcome):
                self.count_abandoned(disk, -1)

    def count_abandoned(self, disk: Disk, reads: int) -> None:
        """Add to the number of abandoned reads of a disk. The answer to a read (-1) may be counted before the read
        (+1)."""
        with self._mutex:
            self._abandoned[id(disk)] += reads
            if not self._abandoned[id(disk)]:
                del self._abandoned[id(disk)]


PART_BYTES: Final = 2 << 20  # largest size of one read, or one page if that is larger
SMALL_BYTES: Final = PART_BYTES // 4  # smaller reads take more time than they save
HEADER_SILENCE_S: Final = 5.0  # longest wait for a device that reads one header
RECHECK_NS: Final = 100_000_000  # how often a read checks whether the node's devices have changed

_SEALED = int(FrameState.SEALED)
_digest = xxhash.xxh3_64_intdigest


class NvmeExtent:
    """One extent on NVMe, as a client reads it. When the extent is dropped its words become zero, so no page
    matches."""

    __slots__ = ("number", "position", "frame_class", "words", "last_use", "roots", "_table")

    def __init__(self, table: ExtentTable) -> None:
        self.number = table.extent
        self.position = table.position
        self.frame_class = table.frame_class
        self.words = table.words
        self.last_use = table.last_use
        self.roots = table.rows[:, table.fmt.root]
        self._table = table  # keeps the mappings open


class NvmeRun(NamedTuple):
    """Pages from ``page`` to ``page + length`` in consecutive frames starting at ``frame``, with the words of the
    frames."""

    extent: NvmeExtent
    frame: int
    page: int
    length: int
    words: bytes


class ReadPart(NamedTuple):
    """One read: ``length`` pages starting at ``page``, in consecutive frames starting at ``frame``."""

    disk: Disk
    offset: int
    incarnation: int  # the disk's
    extent: NvmeExtent
    frame: int
    page: int
    length: int
    generations: npt.NDArray[np.uint64]

    def frames(self) -> list[ReadPart]:
        """Return one part for each frame."""
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
    """The ``LowerReader`` of a node's NVMe tier.

    The first read opens the devices. They are opened again when the node's list of devices has changed. A page that is
    evicted during its read is a miss.
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
        """Return whether the node has devices and this process can read the list of them. It may still be unable to
        open a device."""
        return self._devices() is not None

    def root_at(self, raw: bytes) -> bytes | None:
        """Return the root in the record that is now at a raw address; None if there is no record."""
        number, frame, _ = ADDRESS.unpack_from(raw)
        extent = self._extent(number)
        return extent.roots[frame].tobytes() if extent is not None and frame < len(extent.roots) else None

    def class_at(self, raw: bytes) -> FrameClass | None:
        """Return the class of the frame at a raw address; None if the extent no longer exists."""
        extent = self._extent(ADDRESS.unpack_from(raw)[0])
        return extent.frame_class if extent is not None else None

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> NvmeRead:
        """Start reading the leading pages of ``keys`` at these addresses into ``rows``, ``[pages, page_bytes]``."""
        map_ = self._devices()
        if map_ is None:
            return NvmeRead(self, [], [], (), keys, rows, IO)
        reason = "" if len(located) == len(keys) else ABSENT
        runs, runs_reason = self._runs(located, frame_class, map_)
        return NvmeRead(self, located, runs, _parts(map_, runs), keys, rows, runs_reason or reason)

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """Return the object's head at a raw address, proven by its header on the device; None if no sealed head is
        there."""
        number, frame, generation = ADDRESS.unpack(raw)
        map_ = self._devices()
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
        fields = unpack(header, frame_class, place.incarnation, number, frame, generation)
        if isinstance(fields, str) or int(extent.words[frame]) != generation << 8 | _SEALED:
            return None
        return ObjectHead(frame_class, fields.key + fields.root + fields.extra + fields.tokens.tobytes())

    def _runs(self, located: list[bytes], frame_class: FrameClass, map_: NvmeMap) -> tuple[list[NvmeRun], str]:
        """Group addresses into runs of consecutive frames. Return the runs, and why they do not contain all pages (""
        if they do).

        The words of the frames are compared only after the read, since pages rarely leave in between.
        """
        count = len(located)
        fields = struct.unpack("<" + "IIQ" * count, b"".join(located))
        numbers, frames, generations = fields[0::3], fields[1::3], fields[2::3]
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

    # --- devices and extents ----------------------------------------------------------------------------------------

    def _devices(self) -> NvmeMap | None:
        """Return the node's devices; None if the node has none, or if this process cannot read the list of them."""
        if time.monotonic_ns() >= self._check_ns:
            with self._mutex:
                self._check_devices()
        return self._map

    def _check_devices(self) -> None:
        """Open the node's devices if their list has changed."""
        now_ns = time.monotonic_ns()
        if now_ns < self._check_ns:
            return  # another thread has checked in the meantime
        try:
            status = os.stat(self._folder.nvme)
        except OSError:
            identity: tuple[int, ...] = ()
        else:
            identity = status.st_dev, status.st_ino, status.st_mtime_ns
        if identity != self._map_id:
            # The old map keeps its descriptors until the threads that use it are done.
            self._map = NvmeMap.open(self._folder) if identity else None
            self._map_id, self._extents = identity, {}
        self._check_ns = now_ns + RECHECK_NS  # set last: a thread that reads this value also reads the new map

    def forget(self, extent: NvmeExtent) -> None:
        """Forget an extent that does not contain the pages that the index names. It may have been recreated, on the
        same devices or on others."""
        self._extents.pop(extent.number, None)
        self._check_ns = 0

    def _extent(self, number: int) -> NvmeExtent | None:
        extent = self._extents.get(number)
        if extent is None:
            map_ = self._devices()
            extent = self._open_extent(number, map_) if map_ is not None else None
        return extent

    def _open_extent(self, number: int, map_: NvmeMap) -> NvmeExtent | None:
        table = ExtentTable.open(self._folder, number, map_.incarnation)
        if table is None or table.tier is not self.tier:
            self._check_ns = 0
            return None
        extents = self._extents
        for old in extents.keys() - set(self._folder.extents()):  # mappings of dropped extents would keep their memory
            extents.pop(old, None)
        extent = NvmeExtent(table)
        extents[number] = extent
        return extent


class NvmeRead:
    """A ``PendingRead`` of pages on the devices. ``NvmeReader.start`` creates it."""

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
        self._batch = reader.threads.start(map(self._add_part, parts))
        started = self._parts[-1].page + self._parts[-1].length if self._parts else 0
        self._reason = IO if runs and started < runs[-1].page + runs[-1].length else reason
        self._identities = _identities(keys)

    def _add_part(self, part: ReadPart) -> Read:
        self._parts.append(part)
        return _read_of(part)

    @property
    def addresses(self) -> bytes:
        """The raw addresses of the pages that are read, concatenated."""
        return b"".join(self._located[: self._parts[-1].page + self._parts[-1].length]) if self._parts else b""

    def result(self, silence_s: float) -> tuple[int, str]:
        """Wait for the read, and mark the pages as used. Return how many leading pages are in the rows and proven, and
        why no more ("" for all)."""
        pages, reason = self._read_parts(silence_s)
        now_ns = time.monotonic_ns()
        for run in self._runs:
            if run.page > pages:
                break
            words = run.extent.words[run.frame : run.frame + run.length].tobytes()
            unchanged = run.length if words == run.words else _equal_rows(words, run.words, 8)
            if unchanged < run.length and run.page + unchanged <= pages:
                pages, reason = run.page + unchanged, GENERATION  # the bytes read after this page are invalid
                self._reader.forget(run.extent)
            run.extent.last_use[run.frame : run.frame + max(0, min(unchanged, pages - run.page))] = now_ns
        if reason == CHECKSUM:
            self.damaged = self._located[pages]
        return pages, reason

    def _read_parts(self, silence_s: float) -> tuple[int, str]:
        """Check and copy the parts in the order in which their reads end. Return how many leading pages are in the
        rows, and why no more."""
        batch, parts = self._batch, list(self._parts)
        end = parts[-1].page + parts[-1].length if parts else 0
        reasons = {part.page: IO for part in parts}  # why pages are missing, by the first missing page of each part
        first_missing = end  # the first page that is known to be invalid
        while (done := batch.next(silence_s)) is not None:
            number, outcome = done
            part = parts[number]
            if not isinstance(outcome, OSError):
                valid, reason = self._accept(part, outcome) if part.page < first_missing else (0, ABSENT)
                batch.recycle(outcome)
                del reasons[part.page]
                if valid < part.length:
                    first_missing = min(first_missing, part.page + valid)
                    reasons[part.page + valid] = reason
            elif part.length > 1 and part.page < first_missing:
                # Read each frame on its own, so that one unreadable frame does not cost the frames before it.
                for frame_part in part.frames():
                    reasons[frame_part.page] = IO
                    parts.append(frame_part)
                    batch.add(_read_of(frame_part))
            else:
                first_missing = min(first_missing, part.page)
        pages = min(reasons, default=end)
        return pages, reasons.get(pages, self._reason)

    def _accept(self, part: ReadPart, buffer: BounceBuffer) -> tuple[int, str]:
        """Check a part that was read, and copy its leading valid pages to the caller's rows. Return their number, and
        why there are no more."""
        frame_class, pages = part.extent.frame_class, part.length
        head = geometry.header_bytes(frame_class)
        frames = buffer.take(pages * geometry.stride_bytes(frame_class)).reshape(pages, -1)
        headers, payloads = frames[:, :head], frames[:, head:]
        address = part.incarnation, part.extent.number, part.frame
        identities = self._identities[part.page : part.page + pages]
        header_faults = faults(headers, frame_class, *address, part.generations, identities)
        sums = payload_sums_in(headers)
        valid, reason = pages, ""
        for i, (fault, page) in enumerate(zip(header_faults, buffer.pages(frame_class, pages), strict=True)):
            if fault or _digest(page) != sums[i]:
                valid, reason = i, _fault_reason(part, i, headers[i]) if fault else CHECKSUM
                break
        copy(self._rows[part.page : part.page + valid], payloads[:valid, : frame_class.page_bytes])
        return valid, reason


def _read_of(part: ReadPart) -> Read:
    return Read(part.disk, part.offset, part.length * geometry.stride_bytes(part.extent.frame_class))


def _fault_reason(part: ReadPart, i: int, header: Bytes) -> str:
    """Return why the header of a part's frame ``i`` is not the expected one. It is damaged (CHECKSUM), or belongs to
    another page with the same key (IDENTITY)."""
    frame, generation = part.frame + i, int(part.generations[i])
    fields = unpack(header, part.extent.frame_class, part.incarnation, part.extent.number, frame, generation)
    return CHECKSUM if isinstance(fields, str) else IDENTITY


def _parts(map_: NvmeMap, runs: list[NvmeRun]) -> Iterator[ReadPart]:
    """Yield the reads of these runs, up to a device that this process could not open.

    The first read is shorter than the second, so that they do not end at the same moment. The last reads are short,
    because no other read runs while they are checked and copied.
    """
    pages_left, is_first = sum(run.length for run in runs), True
    for run in runs:
        frame_class = run.extent.frame_class
        stride = geometry.stride_bytes(frame_class)
        pages_max, pages_min = max(1, PART_BYTES // stride), max(1, SMALL_BYTES // stride)
        generations = np.frombuffer(run.words, np.uint64) >> np.uint64(8)
        i = 0
        while i < run.length:
            length = min(_part_pages(pages_left, pages_max, pages_min, is_first), run.length - i)
            place = map_.place(run.extent.position, frame_class, run.frame + i)
            if place is None:
                return
            yield ReadPart(*place, run.extent, run.frame + i, run.page + i, length, generations[i : i + length])
            i, pages_left, is_first = i + length, pages_left - length, False


def _part_pages(pages_left: int, pages_max: int, pages_min: int, is_first: bool) -> int:
    """Return the number of pages of the next read: a share of the remaining pages, within the limits. The remaining
    pages are one read if the rest after a share would be below ``pages_min``."""
    share = -(-pages_left // 3) if is_first else -(-3 * pages_left // 5)
    pages = min(-(-2 * pages_max // 3) if is_first else pages_max, max(share, pages_min))
    return pages_left if pages_left - pages < pages_min and pages_left <= pages_max else pages


def _identities(keys: Keys) -> Bytes:
    return np.frombuffer(keys.identity_bytes, np.uint8).reshape(len(keys), -1)


def _equal_rows(left: bytes, right: bytes, width: int) -> int:
    """Return how many leading rows of ``width`` bytes are equal."""
    rows = min(len(left), len(right)) // width
    return next(
        (i for i in range(rows) if left[i * width : (i + 1) * width] != right[i * width : (i + 1) * width]), rows
    )
