"""ReadThreads: deadlines, disks that fall silent, and what arrives too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.client.read_threads import Bounce, ReadBatch, ReadTask, ReadThreads
from kvstore.tier.disk import MemoryDisk

LONG_S = 20.0


@pytest.fixture
def threads() -> Iterator[ReadThreads]:
    threads = ReadThreads("test", threads=2)
    yield threads
    threads.close()


def task(outcome: Any, disk: MemoryDisk | None = None, wait: threading.Event | None = None) -> ReadTask:
    def call(batch: ReadBatch, bounce: Bounce) -> Any:
        assert wait is None or wait.wait(LONG_S)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    return ReadTask(disk or MemoryDisk(4096), call)


def run(threads: ReadThreads, tasks: list[ReadTask], timeout_s: float = LONG_S) -> list[Any]:
    return threads.finish(threads.start(tasks), timeout_s)


def test_outcomes_come_in_order_whatever_fails(threads: ReadThreads) -> None:
    failure = OSError(5, "broken")
    assert run(threads, []) == []
    assert run(threads, [task(1), task(failure), *[task(i) for i in range(2, 9)]]) == [1, failure, *range(2, 9)]


def test_a_thread_keeps_its_buffer(threads: ReadThreads) -> None:
    bounce = Bounce()
    large = bounce.take(8192)
    assert large.ctypes.data % 4096 == 0
    assert bounce.take(4096).ctypes.data == large.ctypes.data
    assert len(bounce.take(3 * 4096)) == 3 * 4096


def test_a_silent_disk_is_waited_for_once(threads: ReadThreads) -> None:
    silent, sound, answer = MemoryDisk(4096), MemoryDisk(4096), threading.Event()
    started = time.monotonic()
    assert run(threads, [task(1, silent, answer), task(2, sound)], 0.1) == [None, 2]
    assert 0.09 < time.monotonic() - started < 5
    outcomes = run(threads, [task(3, silent), task(4, sound)])
    assert isinstance(outcomes[0], OSError) and outcomes[1] == 4
    answer.set()
    wait_for_no_debt(threads)
    assert run(threads, [task(5, silent)]) == [5], "it has answered"


def test_as_long_as_something_comes_it_is_waited_for(threads: ReadThreads) -> None:
    slow = ReadTask(MemoryDisk(4096), lambda batch, bounce: time.sleep(0.1))
    batch = threads.start([slow] * 8)
    started = time.monotonic()
    threads.finish(batch, 0.25)
    assert time.monotonic() - started > 0.35, "longer than it may be silent"
    assert not threads._owed


def test_where_all_threads_are_lost_reads_fail_at_once(threads: ReadThreads) -> None:
    answer = threading.Event()
    assert run(threads, [task(i, None, answer) for i in range(2)], 0.05) == [None, None]
    assert isinstance(run(threads, [task(1)])[0], OSError)
    answer.set()
    wait_for_no_debt(threads)
    assert run(threads, [task(1)]) == [1]


def test_what_was_not_begun_in_time_is_never_begun(threads: ReadThreads) -> None:
    answer, begun = threading.Event(), []
    late = ReadTask(MemoryDisk(4096), lambda batch, bounce: begun.append(1))
    assert run(threads, [task(1, None, answer), task(2, None, answer), late], 0.05) == [None] * 3
    answer.set()
    wait_for_no_debt(threads)
    assert run(threads, [task(3), task(4), task(5)]) == [3, 4, 5]
    assert not begun


def test_nothing_is_written_after_the_deadline(threads: ReadThreads) -> None:
    answer, said = threading.Event(), []

    def call(batch: ReadBatch, bounce: Bounce) -> None:
        said.append(batch.may_write())
        batch.written()
        assert answer.wait(LONG_S)
        said.append(batch.may_write())

    assert run(threads, [ReadTask(MemoryDisk(4096), call)], 0.05) == [None]
    answer.set()
    wait_for_no_debt(threads)
    assert said == [True, False]


def test_the_caller_waits_for_a_copy_in_progress(threads: ReadThreads) -> None:
    copying, copied = threading.Event(), []

    def call(batch: ReadBatch, bounce: Bounce) -> None:
        assert batch.may_write()
        copying.set()
        time.sleep(0.2)
        copied.append(1)
        batch.written()

    batch = threads.start([ReadTask(MemoryDisk(4096), call)])
    assert copying.wait(LONG_S)
    threads.finish(batch, 0.0)
    assert copied == [1]


def test_closed_threads_read_nothing(threads: ReadThreads) -> None:
    threads.close()
    threads.close()
    assert isinstance(run(threads, [task(1)])[0], OSError)


def wait_for_no_debt(threads: ReadThreads) -> None:
    deadline = time.monotonic() + LONG_S
    while threads._owed:
        assert time.monotonic() < deadline
        time.sleep(0.002)
