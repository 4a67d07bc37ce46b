"""Disks: files and what refuses to be one, short reads, full file systems, two owners; threads for I/O."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, NodeBusy, OutOfSpace
from kvstore.tier.nvme import disk as disk_module
from kvstore.tier.nvme.disk import FileDisk, IoThreads, aligned_buffer
from tests.helpers.nvme.faulty_disk import refuse_direct
from tests.helpers.nvme.memory_disk import MemoryDisk

MIB = 1 << 20


def filled(nbytes: int, seed: int) -> Any:
    buffer = aligned_buffer(nbytes)
    buffer[:] = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    return buffer


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_new_file_has_all_its_space_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    disk = FileDisk.open(path, MIB + 4000, create=True)
    status = path.stat()
    assert (disk.size_bytes, status.st_size) == (MIB, MIB)
    assert status.st_blocks * 512 >= MIB
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert disk.path == str(path)
    disk.close()
    shared = FileDisk.open(tmp_path / "shared", MIB, create=True, mode=0o660)
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o660
    shared.close()


@pytest.mark.parametrize("direct", [True, False])
def test_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    disk = FileDisk.open(tmp_path / "nvme", MIB, create=True)
    assert disk.direct or not direct
    a, b = filled(8192, 1), filled(4096, 2)
    disk.write(4096, [a, b])
    disk.sync()
    x, y, z = (aligned_buffer(4096) for _ in range(3))
    disk.read(4096, [x, y, z])
    assert (np.concatenate([x, y]) == a).all() and (z == b).all()
    reader = FileDisk.open(tmp_path / "nvme", MIB, writable=False)
    reader.read(12288, [x])
    assert (x == b).all()
    with pytest.raises(OSError) as caught:
        reader.write(0, [x])
    assert caught.value.filename == str(tmp_path / "nvme")
    disk.close()
    reader.close()


@pytest.mark.parametrize("direct", [True, False])
def test_short_steps_of_the_kernel_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    if not direct:
        refuse_direct(monkeypatch)
    disk = FileDisk.open(tmp_path / "nvme", MIB, create=True)
    steps = iter([5000, 4096, 12288] * 100)
    real = {"preadv": os.preadv, "pwritev": os.pwritev}

    def short(name: str) -> Any:
        def call(fd: int, buffers: Any, offset: int) -> int:
            left, some = next(steps), []
            for buffer in buffers:
                part = buffer.reshape(-1)[:left] if not disk.direct else buffer.reshape(-1)[: left // 4096 * 4096]
                left -= len(part)
                some.append(part)
                if len(part) < buffer.nbytes:
                    break
            return int(real[name](fd, some, offset))

        return call

    monkeypatch.setattr(os, "preadv", short("preadv"))
    monkeypatch.setattr(os, "pwritev", short("pwritev"))
    parts = [filled(size, size) for size in (4096, 32768, 8192)]
    disk.write(8192, parts)
    back = [aligned_buffer(len(part)) for part in parts]
    disk.read(8192, back)
    assert all((a == b).all() for a, b in zip(parts, back, strict=True))
    disk.close()


def test_a_file_that_was_cut_is_an_error_not_zeros(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    disk = FileDisk.open(path, MIB, create=True)
    os.truncate(path, MIB // 2)
    with pytest.raises(OSError) as caught:
        disk.read(MIB // 2 - 4096, [aligned_buffer(8192)])
    assert caught.value.errno == errno.EIO and caught.value.filename == str(path)
    disk.close()


@pytest.mark.parametrize(("offset", "size"), [(100, 4096), (0, 4000), (MIB, 4096), (-4096, 4096), (MIB - 4096, 8192)])
def test_parts_of_blocks_and_what_lies_outside_are_bugs(tmp_path: Path, offset: int, size: int) -> None:
    file = FileDisk.open(tmp_path / "nvme", MIB, create=True)
    for disk in (file, MemoryDisk(MIB)):
        for verb in (disk.read, disk.write):
            with pytest.raises(AssertionError):
                verb(offset, [aligned_buffer(size)])
    file.close()


def test_pages_go_to_disk_straight_from_shared_memory(tmp_path: Path) -> None:
    import mmap
    import tempfile

    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(MIB)
        shared = np.frombuffer(mmap.mmap(file.fileno(), MIB), np.uint8)
        shared[:] = filled(MIB, 1)
        disk = FileDisk.open(tmp_path / "nvme", MIB, create=True)
        disk.write(0, [shared])
        back = aligned_buffer(MIB)
        disk.read(0, [back])
        assert (back == shared).all()
        disk.close()


# --- O_DIRECT -------------------------------------------------------------------------------------------------------


def test_without_direct_there_is_one_plain_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING):
        disk = FileDisk.open(tmp_path / "nvme", MIB, create=True)
        reader = FileDisk.open(tmp_path / "nvme", MIB, writable=False)
    assert not disk.direct and not reader.direct
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/nvme: its file system does not support O_DIRECT; the page cache is used"
    ]
    disk.close()
    reader.close()


def test_some_file_systems_refuse_only_the_first_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def refusing(fd: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refusing)
    disk = FileDisk.open(tmp_path / "nvme", MIB, create=True)
    assert not disk.direct
    disk.read(0, [aligned_buffer(4096)])
    disk.close()


# --- owners ---------------------------------------------------------------------------------------------------------


def test_a_file_has_one_owner_under_any_name(tmp_path: Path) -> None:
    path, link, hard = tmp_path / "nvme", tmp_path / "link", tmp_path / "hard"
    disk = FileDisk.open(path, MIB, create=True)
    link.symlink_to(path)
    hard.hardlink_to(path)
    fds = open_fds()
    for name in (path, link, hard):
        with pytest.raises(NodeBusy, match=f"{name} is used by another node, or was given twice"):
            FileDisk.open(name, MIB, create=True)
    assert open_fds() == fds and path.exists()
    disk.close()
    FileDisk.open(link, MIB).close()


def test_another_process_is_refused_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    source = """
import sys
from kvstore.tier.nvme.disk import FileDisk
from tests.helpers.nvme.memory_disk import MemoryDisk
disk = FileDisk.open(sys.argv[1], 1 << 20, create=True)
print("held", flush=True)
sys.stdin.read()
"""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", source, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        with pytest.raises(NodeBusy):
            FileDisk.open(path, MIB)
        child.kill()
    FileDisk.open(path, MIB).close()


# --- what is no file for us -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("has", [1, MIB - 4096, MIB + 4096])
def test_a_file_of_another_size_is_left_alone(tmp_path: Path, has: int) -> None:
    path = tmp_path / "nvme"
    path.write_bytes(b"x" * has)
    with pytest.raises(InvalidRequest, match=r"is a file of .* bytes, not .*--format"):
        FileDisk.open(path, MIB, create=True)
    assert path.read_bytes() == b"x" * has
    FileDisk.open(path, MIB, create=True, resize=True).close()
    assert path.stat().st_size == MIB


def test_what_a_kill_left_of_a_new_file_is_completed(tmp_path: Path) -> None:
    path = tmp_path / "nvme"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, MIB // 2)
    FileDisk.open(path, MIB).close()
    assert path.stat().st_size == MIB
    path.write_bytes(b"")
    FileDisk.open(path, MIB).close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("there", [False, True])
def test_a_full_file_system_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, there: bool
) -> None:
    path = tmp_path / "nvme"
    if there:
        path.write_bytes(b"")
    real = os.posix_fallocate

    def full(fd: int, start: int, size: int) -> None:
        real(fd, start, size // 2)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "posix_fallocate", full)
    fds = open_fds()
    expected = OSError if code == errno.EIO else OutOfSpace
    with pytest.raises(expected) as caught:
        FileDisk.open(path, MIB, create=True)
    assert str(path) in str(caught.value)
    assert code == errno.EIO or f"needs {MIB} bytes, its file system has " in str(caught.value)
    assert path.exists() == there and (not there or path.stat().st_size == 0)
    assert open_fds() == fds


def test_two_that_make_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slower one neither takes nor removes what the faster one has made."""
    path = tmp_path / "nvme"
    real = disk_module._lock
    faster: list[FileDisk] = []

    def late(fd: int, name: str) -> None:
        monkeypatch.setattr(disk_module, "_lock", real)
        faster.append(FileDisk.open(path, MIB, create=True))
        real(fd, name)

    monkeypatch.setattr(disk_module, "_lock", late)
    with pytest.raises(NodeBusy):
        FileDisk.open(path, MIB, create=True)
    assert path.stat().st_size == MIB
    faster[0].close()


# --- threads --------------------------------------------------------------------------------------------------------


def test_tasks_run_side_by_side_and_answer_in_order() -> None:
    threads = IoThreads(4)
    together = threading.Barrier(4, timeout=60)

    def task(number: int) -> int:
        together.wait()
        return number

    assert threads.run([lambda n=n: task(n) for n in range(4)]) == [0, 1, 2, 3]  # type: ignore[misc]
    assert threads.run([]) == []
    assert threads.run([lambda: 7]) == [7]
    threads.close()
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]


def test_bugs_are_bugs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    threads = IoThreads(2)
    started = threading.Event()

    def bug() -> int:
        started.set()
        raise KeyError("a bug")

    def slow() -> int:
        if threading.current_thread() is threading.main_thread():
            started.wait(60)
        return 1

    with pytest.raises((AssertionError, KeyError)):
        threads.run([slow, bug, slow])
    threads.close()


def test_many_callers_share_the_threads() -> None:
    threads = IoThreads(4)
    results: list[Any] = []

    def caller(base: int) -> None:
        for _ in range(50):
            results.append(threads.run([lambda n=n: base + n for n in range(7)]) == [base + n for n in range(7)])  # type: ignore[misc]

    callers = [threading.Thread(target=caller, args=(base,)) for base in (0, 100, 200)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    assert len(results) == 150 and all(results)
    threads.close()


def test_a_forked_child_works_alone() -> None:
    threads = IoThreads(4)
    threads.run([lambda: 1, lambda: 2])
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(threads.run([lambda: 1, lambda: 2])))
    child.start()
    child.join(60)
    assert child.exitcode == 0 and queue.get() == [1, 2]
    threads.close()
