"""A disk that does not answer: who waits how long, and what may be done with it afterwards."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence

import pytest

from kvstore.tier.nvme.disk import Bytes, PatientDisk, aligned_buffer, is_silent, open_patiently
from tests.helpers.nvme.memory_disk import MemoryDisk
from tests.helpers.processes import wait_until

ANSWER_S = 0.2
PATIENT_S = 60.0  # for a disk that answers


class StoppedDisk(MemoryDisk):
    """Calls wait until ``answers`` is set. ``writes`` counts those that were carried out."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.answers = threading.Event()
        self.answers.set()
        self.writes = 0
        self.closed = False

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self.answers.wait()
        super().read(offset, buffers)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self.answers.wait()
        super().write(offset, buffers)
        self.writes += 1

    def sync(self) -> None:
        """See ``Disk``."""
        self.answers.wait()

    def close(self) -> None:
        """See ``Disk``."""
        self.closed = True


def block(value: int) -> Bytes:
    buffer = aligned_buffer(4096)
    buffer[:] = value
    return buffer


def refused(call: Callable[[], None]) -> OSError:
    with pytest.raises(OSError) as error:
        call()
    return error.value


def test_silence_costs_one_deadline_once() -> None:
    below = StoppedDisk()
    disk = PatientDisk(below, ANSWER_S)
    below.answers.clear()
    assert is_silent(refused(lambda: disk.read(0, [block(0)])))
    since = time.monotonic()
    for _ in range(100):
        assert is_silent(refused(lambda: disk.read(0, [block(0)])))
    assert time.monotonic() - since < 100 * ANSWER_S / 2, "it was waited for again"
    below.answers.set()

    def reads() -> bool:
        try:
            disk.read(0, [block(0)])
        except OSError:
            return False
        return True

    wait_until("it is read again", reads)


def test_after_a_silence_nothing_more_is_written() -> None:
    below = StoppedDisk()
    disk = PatientDisk(below, ANSWER_S)
    below.answers.clear()
    assert is_silent(refused(lambda: disk.write(0, [block(1)])))
    below.answers.set()
    wait_until("what was begun is written", lambda: below.writes == 1)
    for call in (lambda: disk.write(0, [block(2)]), disk.sync):
        assert refused(call).errno == errno.EIO
    assert below.writes == 1


def test_close_waits_for_nobody_and_lets_go_when_all_has_come() -> None:
    below = StoppedDisk()
    disk = PatientDisk(below, ANSWER_S)
    below.answers.clear()
    assert is_silent(refused(disk.sync))
    disk.close()
    assert not below.closed, "its lock keeps others from a disk that is still written to"
    below.answers.set()
    wait_until("it is closed", lambda: below.closed)


def test_many_callers_at_a_time() -> None:
    below = StoppedDisk()
    disk = PatientDisk(below, PATIENT_S)
    below.answers.clear()
    threads = [threading.Thread(target=disk.write, args=(4096 * i, [block(i)])) for i in range(40)]
    for thread in threads:
        thread.start()
    below.answers.set()
    for thread in threads:
        thread.join()
    assert below.writes == 40 and [int(below.data[4096 * i]) for i in range(40)] == list(range(40))


def test_a_disk_that_is_not_open_in_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("disk") / "target"
    path.write_bytes(bytes(1 << 20))
    below = StoppedDisk()

    def open_it() -> StoppedDisk:
        below.answers.wait()
        return below

    below.answers.clear()
    error = refused(lambda: open_patiently(str(path), 1 << 20, ANSWER_S, open_it).close())
    assert is_silent(error) and error.filename == str(path)
    below.answers.set()
    wait_until("what came too late is closed", lambda: below.closed)
    open_patiently(str(path), 1 << 20, PATIENT_S, open_it).close()
