"""IoThreads: reads and writes side by side. System calls release the interpreter, so threads are all it takes."""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvstore.errors import KVStoreError

# Measured: four requests in flight read as fast as any number; io_uring gains nothing over them.
IO_THREADS: Final = 4

T = TypeVar("T")


class _Batch:
    """Tasks that any thread takes one by one."""

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = [None] * len(tasks)
        self.finished = [False] * len(tasks)
        self.done = threading.Semaphore(0)  # one release per task
        self._tasks = tasks
        self._next = itertools.count()  # next() of it is atomic

    def work(self) -> None:
        """Perform tasks until none is left. An unexpected failure is a bug and ends the thread, loudly."""
        while (number := next(self._next)) < len(self._tasks):
            try:
                self.results[number] = self._tasks[number]()
                self.finished[number] = True
            except (OSError, KVStoreError) as error:
                self.results[number] = error
                self.finished[number] = True
            finally:
                self.done.release()


class IoThreads:
    """A pool of daemon threads; the caller of ``run`` is one of those that work. Many may call at a time.

    Life: made (nothing started) -> the first ``run`` of more than one task starts the threads -> ``close`` ends them,
    as does the end of the process. Closed, or in a forked child, ``run`` still works, in the caller alone.
    """

    def __init__(self, threads: int = IO_THREADS) -> None:
        assert threads >= 1, threads
        self._threads_max = threads - 1  # and the caller
        self._threads: list[threading.Thread] = []
        # At most one entry per helper and caller: a batch is offered, its tasks are not copied.
        self._offers: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._closed = False
        self._pid = os.getpid()  # threads do not live on in a forked child

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T | OSError | KVStoreError]:
        """Perform all ``tasks``; returns what each returned or raised (OSError, KVStoreError), in their order.

        Anything else that a task raises is a bug: an AssertionError here, the traceback in the thread's.
        """
        batch = _Batch(tasks)
        if len(tasks) > 1 and os.getpid() == self._pid:
            self._start()
            for _ in range(min(len(self._threads), len(tasks) - 1)):
                self._offers.put(batch)
        batch.work()
        for _ in tasks:
            batch.done.acquire()
        assert all(batch.finished), "a task failed in another thread"
        return batch.results

    def close(self) -> None:
        """The threads end after the task they are in."""
        with self._mutex:
            self._closed = True
            for _ in self._threads:
                self._offers.put(None)
            self._threads = []

    def _start(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]  # a bug of ours ended the others
        if len(self._threads) == self._threads_max or self._closed:
            return
        with self._mutex:
            while len(self._threads) < self._threads_max and not self._closed:
                thread = threading.Thread(target=self._serve, name="kvstore-io", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the machine has no more: who asks does the work
                    return
                self._threads.append(thread)

    def _serve(self) -> None:
        while (batch := self._offers.get()) is not None:
            batch.work()
