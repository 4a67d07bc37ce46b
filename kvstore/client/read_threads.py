"""ReadThreads: reads from NVMe devices side by side, with a deadline that a silent device cannot break.

A system call that reads from a device cannot be called off: where the device does not answer, its thread is lost until
it does. So the caller never reads itself, it waits. What a thread reads goes into a buffer of its own, and from there
into the caller's memory only while the caller is still waiting (``ReadBatch.may_write``): a device that answers late
harms nobody. A disk that owes an answer is not asked again until it has given it, so that it costs one deadline, once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from kvstore.model.replica import FrameClass
from kvstore.tier.bounces import large_buffer
from kvstore.tier.disk import Bytes, Disk

THREADS: Final = 4  # so many reads in flight make any device as fast as it gets
SHAPES_MAX: Final = 16  # kinds of reads whose views a thread keeps

_WAITING, _RUNNING, _DONE = 0, 1, 2


class Bounce:
    """One thread's buffer: in large memory pages, as large as its largest read, kept for the next one."""

    def __init__(self) -> None:
        self._buffer = np.zeros(0, np.uint8)
        self._pieces: dict[tuple[FrameClass, int], list[memoryview[int]]] = {}

    def take(self, nbytes: int) -> Bytes:
        """``nbytes`` to read into, until the next ``take``."""
        if len(self._buffer) < nbytes:
            self._pieces.clear()
            self._buffer = large_buffer(nbytes)
        return self._buffer[:nbytes]

    def pages(self, frame_class: FrameClass, frames: int) -> list[memoryview[int]]:
        """The pages of consecutive frames that were read to the beginning of what was taken.

        Kept from read to read: to make a view costs as much as to hash what it shows.
        """
        pieces = self._pieces.get((frame_class, frames))
        if pieces is None:
            if len(self._pieces) == SHAPES_MAX:
                self._pieces.clear()
            whole, page_bytes, stride = self._buffer.data, frame_class.page_bytes, frame_class.nvme_stride
            starts = range(frame_class.nvme_header_bytes, frames * stride, stride)
            pieces = self._pieces[frame_class, frames] = [whole[at : at + page_bytes] for at in starts]
        return pieces


class ReadTask(NamedTuple):
    """One read: from which disk, and what to do. ``call`` returns an outcome, or raises OSError."""

    disk: Disk
    call: Callable[[ReadBatch, Bounce], Any]


class ReadBatch:
    """Tasks that threads take one by one.

    Ends when all are done, or when ``wait`` gives up. From then on none of them writes into the caller's memory.

    Attributes:
        tasks: as given.
        outcomes: per task what it returned, or the OSError it raised; None where it is not done.
    """

    def __init__(self, tasks: Sequence[ReadTask]) -> None:
        self.tasks = tasks
        self.outcomes: list[Any] = [None] * len(tasks)
        self._states = [_WAITING] * len(tasks)
        self._left = len(tasks)
        self._writing = 0
        self._given_up = False
        self._changed = threading.Condition()  # guards all of the above

    def wait(self, silence_s: float) -> list[int]:
        """Wait for all tasks; give up when none was done for ``silence_s``.

        Returns the tasks that were given up while they were being performed.
        """
        with self._changed:
            left, deadline = self._left, time.monotonic() + silence_s
            while self._left:
                self._changed.wait(max(0.0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    if self._left == left:
                        break
                    left, deadline = self._left, time.monotonic() + silence_s
            self._given_up = True
            while self._writing:  # copies of memory: they end
                self._changed.wait()
            return [number for number, state in enumerate(self._states) if state == _RUNNING]

    def begin(self, number: int) -> bool:
        """A thread takes a task. False: nobody waits for it any more."""
        with self._changed:
            if not self._given_up:
                self._states[number] = _RUNNING
            return not self._given_up

    def may_write(self) -> bool:
        """Whether the caller still waits; it then goes on waiting until ``written``. To be asked before each copy."""
        with self._changed:
            if not self._given_up:
                self._writing += 1
            return not self._given_up

    def written(self) -> None:
        """The copy that ``may_write`` allowed is done."""
        with self._changed:
            self._writing -= 1
            if self._given_up:
                self._changed.notify_all()

    def end(self, number: int, outcome: Any) -> bool:
        """A task is done, or will never be begun. False: it was given up meanwhile."""
        with self._changed:
            if not self._given_up:
                self.outcomes[number] = outcome
            self._states[number] = _DONE
            self._left -= 1
            if not self._left:
                self._changed.notify_all()
            return not self._given_up


class ReadThreads:
    """A few daemon threads, each with its buffer, shared by all threads of this process.

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
        self._queue: queue.SimpleQueue[tuple[ReadBatch, int] | None] = queue.SimpleQueue()

    def start(self, tasks: Sequence[ReadTask]) -> ReadBatch:
        """Begin to perform ``tasks``. Those of a disk that owes an answer fail at once: their outcome is an OSError."""
        batch = ReadBatch(tasks)
        with self._mutex:
            if not self._started and not self._closed:
                self._started = True
                for number in range(self._threads):
                    name = f"{self._name}-{number}"
                    threading.Thread(target=self._serve, name=name, daemon=True).start()
            owed, refused = set(self._owed), self._closed or self._owed.total() >= self._threads
        for number, task in enumerate(tasks):
            if refused or id(task.disk) in owed:
                batch.end(number, OSError(f"{task.disk.path} does not answer"))
            else:
                self._queue.put((batch, number))
        time.sleep(0)  # lets go of the interpreter, so that they begin before their caller goes on
        return batch

    def finish(self, batch: ReadBatch, silence_s: float) -> list[Any]:
        """The outcomes of ``batch``. What is not done when nothing was for ``silence_s`` is None for ever."""
        for number in batch.wait(silence_s):
            self._owe(batch.tasks[number].disk, 1)
        return batch.outcomes

    def close(self) -> None:
        """The threads end after the task they are in; every read fails from now on."""
        with self._mutex:
            if self._started and not self._closed:
                for _ in range(self._threads):
                    self._queue.put(None)
            self._closed = True

    def _serve(self) -> None:
        bounce = Bounce()
        while (item := self._queue.get()) is not None:
            batch, number = item
            if batch.begin(number):
                self._perform(batch, number, bounce)

    def _perform(self, batch: ReadBatch, number: int, bounce: Bounce) -> None:
        disk, call = batch.tasks[number]
        outcome: Any = AssertionError("a read failed in another thread")  # a bug of ours; the thread says which
        try:
            outcome = call(batch, bounce)
        except OSError as error:
            outcome = error.with_traceback(None)  # its frames would keep the batch, and the disk, in a circle
        finally:
            if not batch.end(number, outcome):
                self._owe(disk, -1)

    def _owe(self, disk: Disk, reads: int) -> None:
        """Count reads given up. An answer may come before its read was counted."""
        with self._mutex:
            self._owed[id(disk)] += reads
            if not self._owed[id(disk)]:
                del self._owed[id(disk)]
