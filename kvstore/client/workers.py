"""Workers: a few threads behind the asynchronous forms of blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, InvalidRequest

WORKERS = 2  # a copy saturates memory with about this many
CALLS_WAITING_MAX = 64

T = TypeVar("T")


class Workers:
    """Threads that run calls in order of submission.

    Life: made (nothing started) -> the first ``submit`` starts a thread -> ``close`` cancels what has not begun and
    lets the threads end; so does the end of the process. After ``close`` calls are refused.
    """

    def __init__(self, name: str) -> None:
        self._room = threading.BoundedSemaphore(CALLS_WAITING_MAX)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix=name)
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any, timeout_s: float = 5.0, **kwargs: Any) -> Future[T]:
        """Run ``call`` in a worker; its value or exception is the future's.

        Raises:
            DeadlineExceeded: ``CALLS_WAITING_MAX`` calls have been waiting for ``timeout_s``.
            InvalidRequest: closed.
        """
        if self._closed:
            raise InvalidRequest("store", "is closed")
        if not self._room.acquire(timeout=timeout_s):
            raise DeadlineExceeded(f"{CALLS_WAITING_MAX} calls are waiting already")
        try:
            future = self._threads.submit(call, *args, **kwargs)
        except RuntimeError:  # closed
            self._room.release()
            raise InvalidRequest("store", "is closed") from None
        future.add_done_callback(lambda _: self._room.release())
        return future

    def close(self) -> None:
        """Cancel what has not begun; threads end after the call they are in."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
