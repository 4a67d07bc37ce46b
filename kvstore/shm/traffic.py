"""The token bucket of a node's background traffic. All processes of the node share it.

The file ``traffic`` in the node's folder has three words: when the traffic that was charged so far will have passed at
the node's rate (nanoseconds of the machine's monotonic clock), how many bytes were charged, and how many nanoseconds
callers were told to wait. A process that charges holds the file's lock for some microseconds. A caller waits *before*
its transfer until the traffic before it has passed, so the rate holds on average, with a burst of ``BURST_S``.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvstore.errors import OutOfSpace
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate

NAME: Final = "traffic"
FILE_BYTES: Final = 4096
BURST_S: Final = 0.1  # an idle bucket lets this much of its rate pass at once

_PASSED, _BYTES, _WAITED = range(3)  # the words


class TrafficBucket:
    """The bucket of one node, as one process uses it. Thread-safe. If there is no memory for the file, the process has
    a bucket of its own.

    Args:
        bytes_per_s: the rate; 0 for no limit.
    """

    def __init__(self, folder: NodeFolder, bytes_per_s: int) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._fd = -1
        self._words = memoryview(bytearray(FILE_BYTES)).cast("Q")
        with contextlib.suppress(OSError, OutOfSpace):  # the folder is being purged, or full
            self._map(folder)

    @property
    def bytes_per_s(self) -> int:
        """The rate; 0 for no limit."""
        return self._rate

    @property
    def charged_bytes(self) -> int:
        """Bytes that all processes of the node have charged."""
        return self._words[_BYTES]

    @property
    def waited_s(self) -> float:
        """Seconds that callers were told to wait, in total."""
        return self._words[_WAITED] / 1e9

    def charge(self, nbytes: int, wait_s_max: float = math.inf, now_ns: int | None = None) -> float | None:
        """Charge a transfer, and return for how many seconds the caller has to wait before it begins.

        Return None, and charge nothing, if that is longer than ``wait_s_max``.
        """
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        with self._lock, self._exclusive():
            words = self._words
            passed_ns = max(words[_PASSED], now_ns - int(BURST_S * 1e9))
            wait_ns = max(0, passed_ns - now_ns) if self._rate else 0
            if wait_ns > wait_s_max * 1e9:
                return None
            words[_BYTES] += nbytes
            words[_WAITED] += wait_ns
            if self._rate:
                words[_PASSED] = passed_ns + nbytes * 1_000_000_000 // self._rate
        return wait_ns / 1e9

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._fd < 0:
            yield
            return
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _map(self, folder: NodeFolder) -> None:
        path = folder.path / NAME
        fd = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, folder.file_mode)
        try:
            if os.fstat(fd).st_size < FILE_BYTES:
                allocate(fd, 0, FILE_BYTES, str(path))
                os.fchmod(fd, folder.file_mode)  # regardless of the umask
            self._words = memoryview(mmap.mmap(fd, FILE_BYTES)).cast("Q")
        except (OSError, OutOfSpace):
            os.close(fd)
            raise
        self._fd = fd

    def close(self) -> None:
        """Close the file. The numbers stay readable."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
