"""A few threads that run the asynchronous forms of blocking calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, InvalidRequest

WORKERS = 2  # about two threads saturate memory with copies
CALLS_WAITING_MAX = 64

T = TypeVar("T")


class Workers:
    """Threads that run calls in the order of submission.

    The first ``submit`` starts a thread. ``close`` cancels calls that have not started, and threads end after their
    current call; the end of the process does the same. Later calls are refused.
    """

    def __init__(self, name: str) -> None:
        self._room = threading.BoundedSemaphore(CALLS_WAITING_MAX)
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix=name)
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any, timeout_s: float = 5.0, **kwargs: Any) -> Future[T]:
        """Run ``call`` in a thread, and return a future of its value or exception.

        Raises:
            DeadlineExceeded: ``CALLS_WAITING_MAX`` calls were still waiting after ``timeout_s``.
            InvalidRequest: the store is closed.
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
        """Cancel calls that have not started. Threads end after their current call."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
