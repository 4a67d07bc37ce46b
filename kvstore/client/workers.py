"""Workers: a few threads behind the asynchronous forms of blocking calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kvstore.errors import DeadlineExceeded, InvalidRequest

WORKERS = 2  # a copy saturates memory with about this many
QUEUED_MAX = 64

T = TypeVar("T")
_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Workers:
    """Threads that run calls in the order of submission.

    Life: made (nothing started) -> the first ``submit`` starts the threads -> ``close`` cancels what has not begun and
    lets the threads end; they also end with the process. After ``close`` calls are refused.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[_Job | None] = queue.Queue(QUEUED_MAX)
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def submit(self, call: Callable[..., T], *args: Any, timeout_s: float = 5.0, **kwargs: Any) -> Future[T]:
        """Run ``call`` in a worker; its value or exception is the future's.

        Raises:
            DeadlineExceeded: ``QUEUED_MAX`` calls have been waiting for ``timeout_s``.
            InvalidRequest: closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._ended.is_set():
                raise InvalidRequest("store", "is closed")
            while len(self._threads) < WORKERS:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
        try:
            self._jobs.put((future, call, args, kwargs), timeout=timeout_s)
        except queue.Full:
            raise DeadlineExceeded(f"{QUEUED_MAX} calls are waiting already") from None
        if self._ended.is_set():
            future.cancel()  # nobody may be left to run it
        return future

    def close(self) -> None:
        """Cancel what has not begun; threads end after the call they are in."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            threads = len(self._threads)
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                job[0].cancel()
        for _ in range(threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            future, call, args, kwargs = job
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(*args, **kwargs))
                except BaseException as error:  # the future's owner gets it, whatever it is
                    future.set_exception(error)
            del job, future, call, args, kwargs  # hold nobody's buffers while waiting
