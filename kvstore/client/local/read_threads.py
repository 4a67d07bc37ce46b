"""ReadThreads: reads from NVMe devices side by side, with a deadline that a silent device cannot break.

A system call that reads from a device cannot be called off: where the device does not answer, its thread is lost until
it does. So the caller never reads itself. Threads read into buffers of ours and hand them over in the order in which
they are done; the caller checks and copies one while the devices are at the next. What comes after the caller gave up
stays in our buffer: a device that answers late harms nobody. A disk that owes an answer is not asked again until it has
given it, so that it costs one deadline, once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from kvstore import boundary
from kvstore.errors import InternalError, NodeUnavailable
from kvstore.model.replica import FrameClass
from kvstore.tier import nvme_geometry
from kvstore.tier.bounces import large_buffer
from kvstore.tier.disk import Bytes, Disk

THREADS: Final = 4
# Reads of one batch in flight on each disk. Large ones make a device as fast as it gets, and of few the first is done
# early: devices serve those in flight alike, so that many would all be done in the end, with nothing left to overlap.
IN_FLIGHT: Final = 2
MORE_PER: Final = 8  # reads: one more in flight; of many parts the last ones are a small part
AHEAD: Final = 8  # reads of one batch given to the threads and not handed out: each has a buffer
SHAPES_MAX: Final = 16  # kinds of reads whose views a buffer keeps

_READING = boundary.answered("task/read")


class Read(NamedTuple):
    """``nbytes`` at ``offset`` of a disk."""

    disk: Disk
    offset: int
    nbytes: int


class Bounce:
    """A buffer in large memory pages, as large as the largest read it served. Kept for the next one."""

    def __init__(self) -> None:
        self._buffer = np.zeros(0, np.uint8)
        self._pieces: dict[tuple[FrameClass, int], list[memoryview[int]]] = {}

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` of it, from its start."""
        if len(self._buffer) < nbytes:
            self._pieces.clear()
            self._buffer = large_buffer(nbytes)
        return self._buffer[:nbytes]

    def pages(self, frame_class: FrameClass, frames: int) -> list[memoryview[int]]:
        """The pages of consecutive frames that were read to its start.

        Kept from read to read: to make a view costs as much as to hash what it shows.
        """
        pieces = self._pieces.get((frame_class, frames))
        if pieces is None:
            if len(self._pieces) == SHAPES_MAX:
                self._pieces.clear()
            whole, page_bytes = self._buffer.data, frame_class.page_bytes
            stride = nvme_geometry.stride_bytes(frame_class)
            starts = range(nvme_geometry.header_bytes(frame_class), frames * stride, stride)
            pieces = self._pieces[frame_class, frames] = [whole[at : at + page_bytes] for at in starts]
        return pieces


class ReadBatch:
    """Reads of one caller, by number from 0. Made by ``ReadThreads.start``; ends when the caller has taken all of them
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
        self._at_work = 0  # threads that perform what waits, or are about to
        self._given_up = False
        self._done: queue.SimpleQueue[tuple[int, Bounce | OSError]] = queue.SimpleQueue()

    def add(self, read: Read) -> int:
        """One read more; its number."""
        self.reads.append(read)
        self._disks.add(id(read.disk))
        self._begin_next()
        return len(self.reads) - 1

    def next(self, silence_s: float) -> tuple[int, Bounce | OSError] | None:
        """The next read that is done: its number, and what it brought (to be given back with ``recycle``) or why not.

        None: all were taken; or nothing came for ``silence_s``, and the rest is given up.
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
        """The caller has what it needs of it."""
        self._threads.keep(bounce)

    def give_up(self) -> None:
        """The caller waits no longer. Disks whose reads are under way owe an answer."""
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
        """A thread takes a read. None: nothing waits, or nobody waits for it any more; the thread is free again."""
        with self._mutex:
            if self._given_up or not self._waiting:
                self._at_work -= 1
                return None
            number = self._waiting.popleft()
            self._running.add(number)
            return number

    def end(self, number: int, outcome: Bounce | OSError) -> bool:
        """A read is done. False: it was given up meanwhile."""
        with self._mutex:
            self._running.discard(number)
            if not self._given_up:
                self._done.put((number, outcome))
            return not self._given_up


class ReadThreads:
    """A few daemon threads and their buffers, shared by all threads of this process.

    Life: made (nothing started) -> the first ``start`` -> ``close``, or the end of the process. A thread that a silent
    disk keeps is missing until that answers; where all are missing, every read fails at once.
    """

    def __init__(self, name: str, threads: int = THREADS) -> None:
        self._name = name
        self._threads = threads
        self._started = False
        self._closed = False
        self._owed: Counter[int] = Counter()  # reads that were given up and not answered, by disk
        self._mutex = threading.Lock()  # guards the three above
        self._queue: queue.SimpleQueue[ReadBatch | None] = queue.SimpleQueue()
        self._bounces: list[Bounce] = []  # the one used last on top: it may be in the cache

    def start(self, reads: Iterable[Read] = ()) -> ReadBatch:
        """Begin to perform ``reads``, in this order. Those of a disk that owes an answer fail at once."""
        with self._mutex:
            if not self._started and not self._closed:
                self._start_threads()
                self._started = True
        batch = ReadBatch(self)
        for read in reads:  # each is on its way before the next one is made
            if batch.add(read) < IN_FLIGHT:
                time.sleep(0)  # lets go of the interpreter, so that a thread begins it
        return batch

    def _start_threads(self) -> None:
        """Fewer where the machine has no more. Raises NodeUnavailable where it has none."""
        for number in range(self._threads):
            try:
                threading.Thread(target=self._serve, name=f"{self._name}-{number}", daemon=True).start()
            except RuntimeError as error:
                if not number:
                    raise NodeUnavailable(f"no thread to read with: {error}") from None
                self._threads = number
                return

    def refuses(self, disk: Disk) -> bool:
        """For ``ReadBatch``: nothing may be asked of that disk now."""
        with self._mutex:
            return self._closed or id(disk) in self._owed or self._owed.total() >= self._threads

    def begin(self, batch: ReadBatch) -> None:
        """For ``ReadBatch``: have one more thread perform what waits there."""
        self._queue.put(batch)

    def keep(self, bounce: Bounce) -> None:
        """For ``ReadBatch``: a buffer is free again. More than a batch needs are not kept."""
        if len(self._bounces) <= AHEAD:  # one more is in the caller's hands
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
                with contextlib.suppress(InternalError), _READING:  # who asked is told that the read failed
                    self._perform(batch, number)

    def _perform(self, batch: ReadBatch, number: int) -> None:
        disk, offset, nbytes = batch.reads[number]
        try:
            bounce = self._bounces.pop()
        except IndexError:
            bounce = Bounce()
        outcome: Bounce | OSError = OSError("a read failed in another thread")  # a bug of ours; the thread says which
        try:
            disk.read(offset, [bounce.take(nbytes)])
            outcome = bounce
        except OSError as error:
            outcome = error.with_traceback(None)  # its frames would keep the batch, and the disk, in a circle
            self.keep(bounce)
        finally:
            if not batch.end(number, outcome):
                self.owe(disk, -1)

    def owe(self, disk: Disk, reads: int) -> None:
        """For ``ReadBatch``: count reads given up. An answer may come before its read was counted."""
        with self._mutex:
            self._owed[id(disk)] += reads
            if not self._owed[id(disk)]:
                del self._owed[id(disk)]
