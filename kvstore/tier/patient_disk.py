"""PatientDisk: a disk whose calls have a deadline.

A system call to a device cannot be called off: where the device does not answer, its thread is lost until it does. So
no caller makes one itself. Threads of the disk do, and the caller waits ``answer_s`` at most. Then the call is left
behind (with its buffers, which may not be used again), and the disk is *silent*::

    answers ──nothing for answer_s──> silent: every call fails at once ──what is owed has come──> reads again

From its first silence on it takes no more writes: what was left behind may yet be written, or not, so nothing that is
written later could be relied on. The next start begins anew.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Final, Generic, TypeVar, cast

from kvstore import boundary
from kvstore.errors import KVStoreError
from kvstore.tier.disk import Bytes, Disk

T = TypeVar("T")

THREADS_MAX: Final = 16  # of one disk: more than callers ever ask at a time

_ASKING = boundary.answered("task/disk", OSError)


class _Call:
    """One call to the disk, and what its caller waits for."""

    def __init__(self, perform: Callable[[], None]) -> None:
        self.perform = perform
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None
        self.left_behind = False


class PatientDisk:
    """See the module. Any thread may call. Ends with ``close``, which never waits for what is owed."""

    def __init__(self, disk: Disk, answer_s: float) -> None:
        self.path = disk.path
        self.size_bytes = disk.size_bytes
        self.direct = disk.direct
        self._disk = disk
        self._answer_s = answer_s
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._mutex = threading.Lock()  # of everything below; never held over a call
        self._threads = 0
        self._idle = 0  # threads that wait for a call, less the calls that wait for a thread
        self._owed = 0  # calls that were left behind
        self._was_silent = False
        self._closed = False

    def read(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``. Where it raises ETIMEDOUT, ``buffers`` may be written to at any time."""
        self._make(partial(self._disk.read, offset, buffers))

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``. Where it raises ETIMEDOUT, ``buffers`` may be read at any time."""
        self._must_take_writes()
        self._make(partial(self._disk.write, offset, buffers))

    def sync(self) -> None:
        """See ``Disk``."""
        self._must_take_writes()
        self._make(self._disk.sync)

    def close(self) -> None:
        """See ``Disk``. What is owed keeps the disk, and its lock, until it has come."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._threads):
                self._calls.put(None)
            waits = self._owed > 0
        if not waits:
            self._disk.close()

    def _must_take_writes(self) -> None:
        if self._was_silent:
            raise OSError(errno.EIO, "it did not answer before, and takes no more writes", self.path)

    def _make(self, perform: Callable[[], None]) -> None:
        call = _Call(perform)
        with self._mutex:
            if self._owed:
                raise self._silence()
            assert not self._closed, "the disk is closed"
            self._idle -= 1
            if self._idle < 0 and self._threads < THREADS_MAX:
                try:
                    threading.Thread(target=self._serve, name="kvstore-disk", daemon=True).start()
                    self._threads += 1
                    self._idle += 1
                except RuntimeError as error:  # the machine has no more: this call waits for those that there are
                    if not self._threads:
                        self._idle += 1
                        raise OSError(errno.EAGAIN, f"no thread to ask it with: {error}", self.path) from None
        self._calls.put(call)
        if not call.done.acquire(timeout=self._answer_s):
            with self._mutex:
                if call.done.locked():  # it may have come just now
                    call.left_behind = self._was_silent = True
                    self._owed += 1
                    raise self._silence()
        if call.error is not None:
            raise call.error

    def _silence(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"it did not answer for {self._answer_s:g} s", self.path)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                if not call.left_behind:
                    with _ASKING:
                        call.perform()
            except (OSError, KVStoreError) as error:
                call.error = error
            with self._mutex:
                self._idle += 1
                call.done.release()
                last = False
                if call.left_behind:
                    self._owed -= 1
                    last = self._closed and not self._owed
            if last:
                self._disk.close()
            del call


def is_silent(error: OSError) -> bool:
    """The device behind this error did not answer."""
    return error.errno == errno.ETIMEDOUT


def open_patiently(path: str, size_bytes: int, answer_s: float, open_it: Callable[[], Disk]) -> PatientDisk:
    """What ``open_it`` opens, within ``answer_s``; to make a file that is not there in its size may take any time.

    Raises:
        OSError: ETIMEDOUT; the disk, once it is open after all, is closed again. And what ``open_it`` raises.
    """
    found = _Late(lambda: _is_made(path, size_bytes)).result(path, answer_s)
    late = _Late(open_it)
    try:
        disk = late.result(path, answer_s if found else None)
    except OSError as error:
        if is_silent(error):
            late.then(lambda disk: disk.close())
        raise
    return PatientDisk(disk, answer_s)


def _is_made(path: str, size_bytes: int) -> bool:
    try:
        status = os.stat(path)
    except OSError:  # reported when it is opened
        return False
    return stat.S_ISBLK(status.st_mode) or status.st_size == size_bytes


class _Late(Generic[T]):
    """A call in a thread of its own, which may come too late."""

    def __init__(self, perform: Callable[[], T]) -> None:
        self._perform = perform
        self._value: T | None = None
        self._came = False
        self._error: OSError | KVStoreError | None = None
        self._then: Callable[[T], None] | None = None
        self._mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvstore-disk-open", daemon=True)
        self._thread.start()

    def result(self, path: str, answer_s: float | None) -> T:
        """What the call returns, or raises. Raises OSError (ETIMEDOUT) after ``answer_s`` without one."""
        self._thread.join(answer_s)
        if self._thread.is_alive():
            raise OSError(errno.ETIMEDOUT, f"it did not answer for {answer_s:g} s", path)
        if self._error is not None:
            raise self._error
        assert self._came, "it failed in its thread"
        return cast(T, self._value)

    def then(self, use: Callable[[T], None]) -> None:
        """Nobody waits any longer: what comes is used so."""
        with self._mutex:
            self._then, came = use, self._came
        if came:
            use(cast(T, self._value))

    def _run(self) -> None:
        try:
            value = self._perform()
        except (OSError, KVStoreError) as error:
            self._error = error
            return
        with self._mutex:
            self._value, self._came = value, True
            use = self._then
        if use is not None:
            use(value)
