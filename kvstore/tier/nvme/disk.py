"""Disks as the NVMe tier uses them: O_DIRECT reads and writes, deadlines, and threads.

**Disk** is a file or block device. Offsets are in bytes. All reads and writes are multiples of 4096 bytes, and buffers
are page-aligned (``aligned_buffer``, or frames of a DRAM segment, which are written straight from shared memory).
``FileDisk`` bypasses the page cache (O_DIRECT) if the file system supports that. If not, it logs a warning and uses the
page cache. Writes survive power loss only after ``sync`` has returned. Until then, each 512-byte sector might or might
not be on the disk, in any order.

**PatientDisk** adds deadlines. A system call to a device cannot be cancelled: if the device is not responding, the
calling thread is blocked until it responds. So the disk's own threads make the calls, and the caller waits for at most
``answer_s``. After that the call is abandoned, its buffers must not be reused, and the disk is *silent*::

    answers ──no answer for answer_s──> silent: every call fails at once ──abandoned calls have ended──> reads again

After its first silence the disk accepts no more writes. An abandoned write might still happen, so no later write could
be relied on. The next start reformats the disk.

**IoThreads** runs reads and writes in parallel. System calls release the interpreter lock, so threads are enough.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import queue
import stat
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar, cast

import numpy as np

from kvstore import boundary, failpoint
from kvstore.device.host_memory import Bytes as Bytes
from kvstore.errors import InvalidRequest, KVStoreError, NodeBusy, OutOfSpace
from kvstore.safe_files import check_placed

BLOCK_BYTES: Final = 4096
IOV_MAX: Final = 1024  # buffers of one system call
# A child that was just forked holds the lock for a moment, until it closes the files of its parent.
_LOCK_TRIES: Final = 5
_LOCK_RETRY_S: Final = 0.01


log = logging.getLogger("kvstore.nvme")


class Disk(Protocol):
    """One file or device. Any thread may call; reads and writes of the same blocks are not ordered.

    Attributes:
        path: path of the file, for messages, and for clients that open it themselves.
        size_bytes: size of the disk, a multiple of 4096.
        direct: whether reads and writes bypass the page cache.
    """

    path: str
    size_bytes: int
    direct: bool

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Fill all ``buffers``, starting at ``offset``.

        Raises:
            OSError: with ``filename``; the contents of the buffers are undefined.
        """
        ...

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """Write all ``buffers``, starting at ``offset``.

        Raises:
            OSError: with ``filename``; those blocks hold the old bytes, the new bytes or a mixture.
        """
        ...

    def sync(self) -> None:
        """Make earlier writes survive power loss.

        Raises:
            OSError: with ``filename``; nothing written since the last sync may be relied on, even after another sync.
        """
        ...

    def close(self) -> None:
        """Close the disk and release its lock. The contents stay."""
        ...


def aligned_buffer(nbytes: int) -> Bytes:
    """``nbytes`` of zeros, page-aligned. Freed with the last view."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8, nbytes)


def check_blocks(disk: Disk, offset: int, buffers: Sequence[Bytes]) -> int:
    """Return the total size of ``buffers`` in bytes. Asserts that they are entire blocks inside the disk."""
    total = 0
    for buffer in buffers:
        assert buffer.nbytes % BLOCK_BYTES == 0, buffer.nbytes
        total += buffer.nbytes
    assert offset % BLOCK_BYTES == 0 and 0 <= offset <= offset + total <= disk.size_bytes, (offset, total)
    return total


class FileDisk:
    """A file or block device. Made by ``open``; ends with ``close``, with its last reference, or with the process.

    The owner (``writable``) holds a lock, so that no other process can own it under any path. A forked child keeps
    neither the lock nor the file.
    """

    def __init__(self, fd: int, path: str, size_bytes: int, owner: bool) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.direct = False
        self._fd = fd
        self._closer = weakref.finalize(self, os.close, fd)
        if owner:
            _locked_disks.add(self)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        size_bytes: int,
        *,
        create: bool = False,
        writable: bool = True,
        resize: bool = False,
        is_truncated: Callable[[int, int], bool] | None = None,
        mode: int = 0o600,
    ) -> FileDisk:
        """Open ``size_bytes`` (rounded down to 4096) of a file or device; for writing, as its only owner.

        When this returns, an owner's file has all its space allocated. A shorter file that holds nothing (a kill
        interrupted its creation) is completed. Stored data is changed only with ``resize``. A reader accepts a file of
        another size: the missing part cannot be read, the rest can.

        Args:
            create: create the file, with ``mode``, if it does not exist. Devices are never created.
            resize: cut or extend a file of another size, because its contents are about to be dropped.
            is_truncated: returns whether the file ``fd`` had ``size_bytes`` and lost its tail. If so, it is extended
                with zeros.

        Raises:
            InvalidRequest (field ``nvme``): the target does not exist, has another kind or size, or must not be opened.
            NodeBusy: the target has an owner: another process, or this process under another name.
            OutOfSpace: the file system is too small. A newly created file is removed again.
            OSError: it fails.
        """
        name, size_bytes = os.path.abspath(path), size_bytes // BLOCK_BYTES * BLOCK_BYTES
        if size_bytes <= 0:
            raise InvalidRequest("nvme", f"{name}: must have at least {BLOCK_BYTES} bytes (got {size_bytes})")
        fd, is_new = _open(name, create and writable, writable, mode)
        disk, created = cls(fd, name, size_bytes, writable), False
        try:
            if writable:
                _lock(fd, name)
                created = is_new  # only after the lock, because another process may be faster
            if not stat.S_ISBLK(os.fstat(fd).st_mode):
                if writable:
                    _size_file(
                        fd, name, size_bytes, resize or (is_truncated is not None and is_truncated(fd, size_bytes))
                    )
                if created:
                    _sync_folder(name)
            elif os.lseek(fd, 0, os.SEEK_END) < size_bytes:
                raise InvalidRequest(
                    "nvme", f"{name}: must have at least {size_bytes} bytes (got {os.lseek(fd, 0, os.SEEK_END)})"
                )
            disk._go_direct(warn=writable)
        except BaseException:
            if created:
                os.unlink(name)
            disk.close()
            raise
        return disk

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._transfer(os.preadv, offset, buffers)

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        self._transfer(os.pwritev, offset, buffers)

    def sync(self) -> None:
        """See ``Disk``."""
        if failpoint.ACTIVE:
            failpoint.stall(self.path)
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            error.filename = self.path
            raise

    def close(self) -> None:
        """See ``Disk``. No other call may be running."""
        _locked_disks.discard(self)
        self._closer()
        self._fd = -1

    def _transfer(self, call: Callable[..., int], offset: int, buffers: Sequence[Bytes]) -> None:
        """Transfer all of ``buffers``, even if the kernel makes short steps."""
        total = check_blocks(self, offset, buffers)
        if failpoint.ACTIVE:
            failpoint.stall(self.path)
        try:
            done = call(self._fd, buffers, offset) if len(buffers) <= IOV_MAX else 0
            while done < total:
                if self.direct:
                    done -= done % BLOCK_BYTES  # O_DIRECT needs entire blocks
                count = call(self._fd, _after(buffers, done), offset + done)
                if count < (BLOCK_BYTES if self.direct else 1):
                    raise OSError(errno.EIO, f"{total - done} bytes are missing")
                done += count
        except OSError as error:
            error.filename = self.path
            raise

    def _go_direct(self, warn: bool) -> None:
        """Switch O_DIRECT on if the file system supports it. Some file systems refuse the flag, others only the first
        read."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.preadv(self._fd, [aligned_buffer(BLOCK_BYTES).data], 0)
            self.direct = True
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                error.filename = self.path
                raise
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            if warn:
                log.warning("%s: its file system does not support O_DIRECT; the page cache is used", self.path)


def _open(name: str, create: bool, writable: bool, mode: int) -> tuple[int, bool]:
    """Return ``(fd, whether the file was created)``. The file's contents are not changed."""
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        kind = os.stat(name).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISBLK(kind):
            raise InvalidRequest("nvme", f"{name} is neither a file nor a block device")
        # O_EXCL keeps out mounts and other owners. Without O_CREAT it has an effect on devices only.
        fd = os.open(name, flags | (os.O_EXCL if writable and stat.S_ISBLK(kind) else 0))
        if writable:
            _check_place(name, fd)
        return fd, False
    except FileNotFoundError:
        if not create:
            raise InvalidRequest("nvme", f"{name} does not exist") from None
    except OSError as error:
        raise _refusal(error, name) from None
    if name.startswith("/dev/") and not name.startswith("/dev/shm/"):
        raise InvalidRequest("nvme", f"{name} does not exist (files are not created in /dev)")
    try:
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, mode)
        os.fchmod(fd, mode)  # independent of the umask
    except FileExistsError:
        raise NodeBusy(f"{name} is being created by another process") from None
    except OSError as error:
        raise _refusal(error, name) from None
    return fd, True


def _check_place(name: str, fd: int) -> None:
    try:
        check_placed(name, fd)
    except PermissionError:
        os.close(fd)
        raise


def _refusal(error: OSError, name: str) -> Exception:
    if error.errno == errno.EBUSY:
        return NodeBusy(f"{name} is mounted or has another owner")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP):
        return InvalidRequest("nvme", f"{name}: {error.strerror}")
    return error


def _lock(fd: int, name: str) -> None:
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt + 1 == _LOCK_TRIES:
                raise NodeBusy(f"{name} is used by another node, or was given twice") from None
            time.sleep(_LOCK_RETRY_S)
    try:
        same = os.path.samestat(os.fstat(fd), os.stat(name))
    except FileNotFoundError:
        same = False
    if not same:
        raise NodeBusy(f"{name} is being created or removed by another process")


def _size_file(fd: int, name: str, size_bytes: int, resize: bool) -> None:
    """Make sure that an owner's file has ``size_bytes``, all allocated."""
    has = os.fstat(fd).st_size
    if has != size_bytes and not resize and not (has < size_bytes and _is_empty(fd, has)):
        raise InvalidRequest(
            "nvme",
            f"{name} is a file of {has} bytes, not {size_bytes}; give that size, or --format reformats it and drops "
            "what is stored there",
        )
    if has > size_bytes:
        os.ftruncate(fd, size_bytes)
    status, system = os.fstat(fd), os.fstatvfs(fd)
    free_bytes = system.f_bavail * system.f_frsize
    try:
        if size_bytes - 512 * status.st_blocks > free_bytes:  # trying would fill the file system for other programs
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size_bytes)  # also fills holes that a copy of the file may have
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, min(has, size_bytes))
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutOfSpace(
                f"{name}: needs {size_bytes} bytes, its file system has {free_bytes} free "
                f"({error.strerror}); remedy: a smaller --nvme size or another place"
            ) from None
        error.filename = name
        raise
    os.fsync(fd)


def _is_empty(fd: int, has: int) -> bool:
    """Return whether nothing was ever written into the file. Its space may be allocated, if a kill interrupted its
    creation."""
    if has == 0:
        return True
    try:
        os.lseek(fd, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO  # it has no data at all
    return False


def _sync_folder(name: str) -> None:
    """Make a new file's name durable."""
    fd = os.open(Path(name).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _after(buffers: Sequence[Bytes], done: int) -> list[Any]:
    """Return the part of ``buffers`` after ``done`` bytes, as much as one system call takes."""
    tail: list[Any] = []
    for buffer in buffers:
        if len(tail) == IOV_MAX:
            break
        if done < buffer.nbytes:
            tail.append(buffer.reshape(-1)[done:])
        done = max(0, done - buffer.nbytes)
    return tail


# Locks belong to the open file, which a forked child shares: without this a child would keep a dead daemon's lock.
_locked_disks: weakref.WeakSet[FileDisk] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for disk in list(_locked_disks):
        disk.close()


os.register_at_fork(after_in_child=_after_fork_in_child)


T = TypeVar("T")

THREADS_MAX: Final = 16  # threads of one disk; there are never that many calls at the same time

_BOUNDARY = boundary.RequestGuard("task/disk", OSError)


class _Call:
    """One call to the disk, and the lock that its caller waits for."""

    def __init__(self, perform: Callable[[], None]) -> None:
        self.perform = perform
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None
        self.is_abandoned = False


class PatientDisk:
    """See the module. Any thread may call. Ends with ``close``, which does not wait for abandoned calls."""

    def __init__(self, disk: Disk, answer_s: float) -> None:
        self.path = disk.path
        self.size_bytes = disk.size_bytes
        self.direct = disk.direct
        self._disk = disk
        self._answer_s = answer_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._mutex = threading.Lock()  # guards everything that follows; never held during a call
        self._threads = 0
        self._idle = 0  # threads that wait for a call, less the calls that wait for a thread
        self._abandoned = 0  # abandoned calls that have not ended
        self._was_silent = False
        self._closed = False

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``. If it raises ETIMEDOUT, ``buffers`` may be written to at any time."""
        self._make(partial(self._disk.read, offset, buffers))

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``. If it raises ETIMEDOUT, ``buffers`` may be read at any time."""
        self._check_writable()
        self._make(partial(self._disk.write, offset, buffers))

    def sync(self) -> None:
        """See ``Disk``."""
        self._check_writable()
        self._make(self._disk.sync)

    def close(self) -> None:
        """See ``Disk``. Abandoned calls keep the disk and its lock until they end."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            waits = self._abandoned > 0
        if not waits:
            self._disk.close()

    def _check_writable(self) -> None:
        if self._was_silent:
            raise OSError(errno.EIO, "it did not answer before, so it accepts no more writes", self.path)

    def _make(self, perform: Callable[[], None]) -> None:
        call = _Call(perform)
        with self._mutex:
            if self._abandoned:
                raise self._silence()
            assert not self._closed, "the disk is closed"
            self._idle -= 1
            if self._idle < 0 and self._threads < THREADS_MAX:
                try:
                    threading.Thread(target=self._serve, name="kvstore-disk", daemon=True).start()
                    self._threads += 1
                    self._idle += 1
                except RuntimeError as error:  # no more threads: this call waits for the existing ones
                    if not self._threads:
                        self._idle += 1
                        raise OSError(errno.EAGAIN, f"there is no thread for the call: {error}", self.path) from None
        self._calls.put(call)
        if not call.done.acquire(timeout=self._answer_s):
            with self._mutex:
                if call.done.locked():  # it may have ended just now
                    call.is_abandoned = self._was_silent = True
                    self._abandoned += 1
                    raise self._silence()
        if call.error is not None:
            raise call.error

    def _silence(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"it did not answer for {self._answer_s:g} s", self.path)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if not call.is_abandoned:
                    with _BOUNDARY:
                        call.perform()
            except (OSError, KVStoreError) as error:
                call.error = error
            with self._mutex:
                self._idle += 1
                call.done.release()
                last = False
                if call.is_abandoned:
                    self._abandoned -= 1
                    last = self._closed and not self._abandoned
            if last:
                self._disk.close()
            del call


def is_silent(error: OSError) -> bool:
    """Return whether this error means that the device is not responding."""
    return error.errno == errno.ETIMEDOUT


def open_patiently(path: str, size_bytes: int, answer_s: float, open_it: Callable[[], Disk]) -> PatientDisk:
    """Return what ``open_it`` opens, within ``answer_s``. The time to create a file in its full size does not count.

    Raises:
        OSError: ETIMEDOUT; a disk that opens later is closed again. Also the errors of ``open_it``.
    """
    exists = _Attempt(lambda: _has_size(path, size_bytes)).result(path, answer_s)
    attempt = _Attempt(open_it)
    try:
        disk = attempt.result(path, answer_s if exists else None)
    except OSError as error:
        if is_silent(error):
            attempt.then(lambda disk: disk.close())
        raise
    return PatientDisk(disk, answer_s)


def _has_size(path: str, size_bytes: int) -> bool:
    try:
        status = os.stat(path)
    except OSError:  # reported when it is opened
        return False
    return stat.S_ISBLK(status.st_mode) or status.st_size == size_bytes


class _Attempt(Generic[T]):
    """A call in a separate thread. Its result may arrive too late."""

    def __init__(self, perform: Callable[[], T]) -> None:
        self._perform = perform
        self._value: T | None = None
        self._has_value = False
        self._error: OSError | KVStoreError | None = None
        self._then: Callable[[T], None] | None = None
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvstore-disk-open", daemon=True)
        self._thread.start()

    def result(self, path: str, answer_s: float | None) -> T:
        """Return the call's result or error. Raises OSError (ETIMEDOUT) after ``answer_s``."""
        self._thread.join(answer_s)
        if self._thread.is_alive():
            raise OSError(errno.ETIMEDOUT, f"it did not answer for {answer_s:g} s", path)
        if self._error is not None:
            raise self._error
        assert self._has_value, "it failed in its thread"
        return cast(T, self._value)

    def then(self, use: Callable[[T], None]) -> None:
        """Stop waiting. Use the result if it has arrived, or when it arrives."""
        with self._mutex:
            self._then, has_value = use, self._has_value
        if has_value:
            use(cast(T, self._value))

    def _run(self) -> None:
        try:
            value = self._perform()
        except (OSError, KVStoreError) as error:
            self._error = error
            return
        with self._mutex:
            self._value, self._has_value = value, True
            use = self._then
        if use is not None:
            use(value)


# Measured: four requests in flight read as fast as any number; io_uring gains nothing over them.
IO_THREADS: Final = 4


class _Batch:
    """Tasks that threads take one by one."""

    def __init__(self, tasks: Sequence[Callable[[], Any]]) -> None:
        self.results: list[Any] = [None] * len(tasks)
        self.is_finished = [False] * len(tasks)
        self.done = threading.Semaphore(0)  # one release per task
        self._tasks = tasks
        self._next = itertools.count()  # next() is atomic

    def work(self) -> None:
        """Perform tasks until there are none. An unexpected error is a bug, and ends the thread with a traceback."""
        while (number := next(self._next)) < len(self._tasks):
            try:
                self.results[number] = self._tasks[number]()
                self.is_finished[number] = True
            except (OSError, KVStoreError) as error:
                self.results[number] = error
                self.is_finished[number] = True
            finally:
                self.done.release()


class IoThreads:
    """A pool of daemon threads. The caller of ``run`` works too. Several threads may call it at the same time.

    Life: made (starts nothing) -> the first ``run`` of more than one task starts the threads -> ``close`` ends them, as
    does the end of the process. After ``close``, or in a forked child, ``run`` still works, in the caller only.
    """

    def __init__(self, threads: int = IO_THREADS) -> None:
        assert threads >= 1, threads
        self._threads_max = threads - 1  # the caller is one more
        self._threads: list[threading.Thread] = []
        # At most one entry per helper and caller: a batch is offered, its tasks are not copied.
        self._offers: queue.SimpleQueue[_Batch | None] = queue.SimpleQueue()
        self._mutex = threading.Lock()
        self._closed = False
        self._pid = os.getpid()  # threads do not exist in a forked child

    def run(self, tasks: Sequence[Callable[[], T]]) -> list[T | OSError | KVStoreError]:
        """Perform all ``tasks``. Return, in their order, what each task returned or raised (OSError, KVStoreError).

        Any other error of a task is a bug: an AssertionError here, and a traceback in the task's thread.
        """
        batch = _Batch(tasks)
        if len(tasks) > 1 and os.getpid() == self._pid:
            self._start()
            for _ in range(min(len(self._threads), len(tasks) - 1)):
                self._offers.put(batch)
        batch.work()
        for _ in tasks:
            batch.done.acquire()
        assert all(batch.is_finished), "a task failed in another thread"
        return batch.results

    def close(self) -> None:
        """End the threads after their current tasks."""
        with self._mutex:
            self._closed = True
            for _ in self._threads:
                self._offers.put(None)
            self._threads = []

    def _start(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]  # a bug may have ended some
        if len(self._threads) == self._threads_max or self._closed:
            return
        with self._mutex:
            while len(self._threads) < self._threads_max and not self._closed:
                thread = threading.Thread(target=self._serve, name="kvstore-io", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # no more threads: the callers do the work
                    return
                self._threads.append(thread)

    def _serve(self) -> None:
        while (batch := self._offers.get()) is not None:
            batch.work()
