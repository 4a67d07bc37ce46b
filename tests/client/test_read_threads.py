"""ReadThreads: deadlines, disks that fall silent, and what arrives too late."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import pytest

from kvstore.client.local.nvme import AHEAD, BounceBuffer, Read, ReadBatch, ReadThreads
from kvstore.tier.nvme.disk import BLOCK_BYTES, Bytes
from tests.helpers.nvme.memory_disk import MemoryDisk

LONG_S = 60.0
BLOCKS = 64
THREADS = 2


class FakeDisk(MemoryDisk):
    """Block i holds the byte i. It answers once ``answer`` is set, and not at all for blocks in ``broken``."""

    def __init__(self, answer: threading.Event | None = None, broken: Collection[int] = (), slow_s: float = 0) -> None:
        super().__init__(BLOCKS * BLOCK_BYTES)
        self.data.reshape(BLOCKS, BLOCK_BYTES)[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None]
        self.asked: list[int] = []  # blocks, in order
        self._answer, self._broken, self._slow_s = answer, broken, slow_s

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        block = offset // BLOCK_BYTES
        self.asked.append(block)
        time.sleep(self._slow_s)
        assert self._answer is None or self._answer.wait(LONG_S)
        if block in self._broken:
            raise OSError(5, "broken")
        super().read(offset, buffers)

    def block(self, number: int) -> Read:
        return Read(self, number * BLOCK_BYTES, BLOCK_BYTES)

    def blocks(self, count: int) -> list[Read]:
        return [self.block(number) for number in range(count)]


@pytest.fixture
def threads() -> Iterator[ReadThreads]:
    threads = ReadThreads("test", threads=THREADS)
    yield threads
    threads.close()


@pytest.fixture
def answer() -> Iterator[threading.Event]:
    """Set at the latest in the end, so that no thread stays."""
    answer = threading.Event()
    yield answer
    answer.set()


def outcomes(batch: ReadBatch, silence_s: float = LONG_S) -> list[int | str | None]:
    """Per read: the byte that it brought; "failed"; None where nothing came."""
    came: dict[int, int | str] = {}
    while (done := batch.next(silence_s)) is not None:
        number, outcome = done
        assert number not in came
        if isinstance(outcome, OSError):
            came[number] = "failed"
        else:
            data = outcome.take(BLOCK_BYTES)
            assert (data == data[0]).all()
            came[number] = int(data[0])
            batch.recycle(outcome)
    return [came.get(number) for number in range(len(batch.reads))]


def run(threads: ReadThreads, reads: list[Read], silence_s: float = LONG_S) -> list[int | str | None]:
    return outcomes(threads.start(reads), silence_s)


def bounce_of(batch: ReadBatch) -> BounceBuffer:
    """What the next read brought."""
    done = batch.next(LONG_S)
    assert done is not None and isinstance(done[1], BounceBuffer)
    return done[1]


# --- reads and their buffers ----------------------------------------------------------------------------------------


def test_each_read_has_its_outcome_whatever_fails(threads: ReadThreads) -> None:
    disk = FakeDisk(broken={1, 30})
    assert run(threads, []) == []
    expected = [number if number not in (1, 30) else "failed" for number in range(3 * AHEAD + 10)]
    assert run(threads, disk.blocks(3 * AHEAD + 10)) == expected
    batch = threads.start([disk.block(1)])
    done = batch.next(LONG_S)
    assert done is not None and isinstance(done[1], OSError) and done[1].errno == 5, "as the disk said it"
    assert batch.next(LONG_S) is None


def test_a_bug_in_a_read_fails_that_read() -> None:
    """Nobody waits for it, its disk owes nothing, and its thread performs other reads."""
    threads, disk = ReadThreads("buggy", THREADS), FakeDisk()
    assert run(threads, [Read(disk, 1, BLOCK_BYTES)]) == ["failed"]
    assert not threads._abandoned
    for _ in range(2 * THREADS):
        assert run(threads, [Read(disk, 1, BLOCK_BYTES)]) == ["failed"]
    assert sum(thread.name.startswith("buggy-") for thread in threading.enumerate()) == THREADS
    assert run(threads, disk.blocks(5)) == [0, 1, 2, 3, 4]
    threads.close()


def test_what_is_done_first_comes_first(threads: ReadThreads, answer: threading.Event) -> None:
    late, sound = FakeDisk(answer), FakeDisk()
    batch = threads.start([late.block(0), *sound.blocks(5)])
    numbers = []
    for _ in range(5):
        done = batch.next(LONG_S)
        assert done is not None
        numbers.append(done[0])
    assert numbers == [1, 2, 3, 4, 5]
    answer.set()
    done = batch.next(LONG_S)
    assert done is not None and done[0] == 0


def test_buffers_are_used_again_and_not_before_they_are_given_back(threads: ReadThreads) -> None:
    disk = FakeDisk(broken={9})
    first = threads.start([disk.block(1)])
    bounce = bounce_of(first)
    second = threads.start([disk.block(2)])
    other = bounce_of(second)
    assert other is not bounce
    assert (bounce.take(BLOCK_BYTES) == 1).all() and (other.take(BLOCK_BYTES) == 2).all()
    first.recycle(bounce)
    assert run(threads, [disk.block(9)]) == ["failed"]
    assert bounce_of(threads.start([disk.block(3)])) is bounce, "a read that failed gave it back"


# --- a batch --------------------------------------------------------------------------------------------------------


def test_no_more_is_begun_than_the_caller_can_take(threads: ReadThreads) -> None:
    disk = FakeDisk()
    batch = threads.start(disk.blocks(3 * AHEAD))
    for taken in range(2 * AHEAD):
        wait_until(lambda: len(disk.asked) == batch._taken + AHEAD)
        if taken in (0, AHEAD):
            time.sleep(0.05)
            assert len(disk.asked) == AHEAD + taken
        batch.recycle(bounce_of(batch))
    assert [outcome is not None for outcome in outcomes(batch)] == [False] * 2 * AHEAD + [True] * AHEAD
    assert sorted(disk.asked) == list(range(3 * AHEAD)), "each once"


def test_a_long_batch_does_not_keep_others_waiting(threads: ReadThreads) -> None:
    disk = FakeDisk()
    batch = threads.start(disk.blocks(BLOCKS))
    assert run(threads, [disk.block(5)]) == [5], "though nobody takes what the other one reads"
    assert outcomes(batch) == list(range(BLOCKS))


def test_reads_are_added_while_others_run(threads: ReadThreads) -> None:
    disk = FakeDisk()
    batch = threads.start(disk.blocks(2 * AHEAD))
    batch.recycle(bounce_of(batch))
    assert [batch.add(disk.block(40 + number)) for number in range(3)] == [2 * AHEAD + number for number in range(3)]
    assert outcomes(batch)[2 * AHEAD :] == [40, 41, 42]
    assert batch.next(LONG_S) is None
    assert batch.add(disk.block(50)) == 2 * AHEAD + 3, "when all others were taken"
    assert outcomes(batch)[-1] == 50


# --- silence --------------------------------------------------------------------------------------------------------


def test_a_silent_disk_is_waited_for_once(threads: ReadThreads, answer: threading.Event) -> None:
    silent, sound = FakeDisk(answer), FakeDisk()
    batch = threads.start([silent.block(1), sound.block(2)])
    assert (bounce_of(batch).take(BLOCK_BYTES) == 2).all()
    started = time.monotonic()
    assert batch.next(0.1) is None
    assert time.monotonic() - started > 0.09
    assert run(threads, [silent.block(3), sound.block(4)]) == ["failed", 4]
    answer.set()
    wait_for_no_debt(threads)
    assert silent.asked == [1]
    assert run(threads, [silent.block(5)]) == [5], "it has answered"


def test_where_all_threads_are_lost_reads_fail_at_once(threads: ReadThreads, answer: threading.Event) -> None:
    sound = FakeDisk()
    assert run(threads, [FakeDisk(answer).block(0) for _ in range(THREADS)], 0.05) == [None] * THREADS
    assert run(threads, sound.blocks(2)) == ["failed"] * 2
    assert not sound.asked
    answer.set()
    wait_for_no_debt(threads)
    assert run(threads, sound.blocks(2)) == [0, 1]


def test_what_was_not_begun_in_time_is_never_begun(threads: ReadThreads, answer: threading.Event) -> None:
    late = FakeDisk()
    silent = [FakeDisk(answer).block(0) for _ in range(THREADS)]
    assert run(threads, [*silent, *late.blocks(2 * AHEAD)], 0.05) == [None] * (THREADS + 2 * AHEAD)
    answer.set()
    wait_for_no_debt(threads)
    assert run(threads, FakeDisk().blocks(5)) == [0, 1, 2, 3, 4], "whoever had it before these did not begin it"
    assert not late.asked


@pytest.mark.parametrize("broken", [(), (1,)])
def test_nothing_reaches_the_caller_after_it_gave_up(
    threads: ReadThreads, answer: threading.Event, broken: tuple[int, ...]
) -> None:
    silent, sound = FakeDisk(answer, broken), FakeDisk()
    batch = threads.start([sound.block(8), silent.block(1)])
    bounce = bounce_of(batch)
    assert batch.next(0.05) is None
    answer.set()
    wait_for_no_debt(threads)
    assert batch.next(0) is None
    assert (bounce.take(BLOCK_BYTES) == 8).all(), "not even into a buffer it still has"


def test_giving_up_counts_what_is_under_way_once(threads: ReadThreads, answer: threading.Event) -> None:
    silent = FakeDisk(answer)
    batch = threads.start(silent.blocks(5))
    wait_until(lambda: len(silent.asked) == THREADS)
    batch.give_up()
    batch.give_up()
    assert threads._abandoned.total() == THREADS
    answer.set()
    wait_for_no_debt(threads)
    assert silent.asked == [0, 1]
    assert run(threads, silent.blocks(3)) == [0, 1, 2]


def test_an_answer_may_come_before_its_read_was_counted(threads: ReadThreads) -> None:
    disk = FakeDisk()
    threads.count_abandoned(disk, -1)
    threads.count_abandoned(disk, 1)
    assert not threads._abandoned and run(threads, [disk.block(6)]) == [6]


# --- the end --------------------------------------------------------------------------------------------------------


def test_closed_threads_read_nothing(threads: ReadThreads) -> None:
    disk = FakeDisk()
    assert run(threads, disk.blocks(3)) == [0, 1, 2]
    threads.close()
    threads.close()
    assert run(threads, disk.blocks(3)) == ["failed"] * 3
    assert disk.asked == [0, 1, 2]


def wait_for_no_debt(threads: ReadThreads) -> None:
    wait_until(lambda: not threads._abandoned)


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)
