"""Boundary: how far an unexpected error reaches, in every process that serves.

Code raises ``KVStoreError`` on purpose, and catches the other errors that it expects where they happen. Any other error
is a bug, or a fault of the machine: no descriptors, no threads, no memory. It is logged with its stack, and counted by
the place where it happened (``kvstore_internal_errors_total``). The place decides what else it ends:

- **A connection or a request** (``RequestGuard``): its caller gets ``InternalError`` in the form that its protocol
  defines, or loses its connection. The process continues to serve other callers. These are gRPC methods, requests to
  data servers, HTTP requests of nodes, engines and conductors, and requests over the unix socket.
- **A periodic task** (``thread_loop``, ``task_loop``): it begins again after a pause, which doubles until a turn
  succeeds. These are ticks, scanners, scrubbers, announcers, publishers, and the loops of membership and conductors.
- **Any other thread or callback** (``watch_threads``): only that thread or callback ends.
- **Decided state** (``StateGuard``): the process ends with exit code 1. Decided state is that of a node
  (``NodeState.handle`` with ``Performer.perform``), a directory, a conductor or an engine. An error in the middle of a
  decision may leave a state that contradicts itself and cannot be trusted. The next process recovers from files, or
  receives everything again.

Only daemons end (``become_daemon``). In a process that embeds a store, the error is raised.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Final

from kvstore import failpoint
from kvstore.errors import InternalError, KVStoreError

PAUSE_S: Final = 0.1  # before a periodic task begins again, ...
PAUSE_S_MAX: Final = 2.0  # ... and after many failures: a node without a tick for 3 s counts as dead

log = logging.getLogger("kvstore.internal")

_counts: Counter[str] = Counter()
_lock = threading.Lock()
_daemon = ""  # the name of this process in its log; "" if it is not a daemon


def counts() -> dict[str, int]:
    """Unexpected errors of this process so far, by place."""
    with _lock:
        return dict(_counts)


def report_error(place: str, error: BaseException) -> InternalError:
    """Log and count an unexpected error. Returns the error for the caller, without internal details."""
    with _lock:
        _counts[place] += 1
    log.error("%s: unexpected error", place, exc_info=error)
    return InternalError(f"{place}: unexpected error; the log of the server has the details")


# --- requests --------------------------------------------------------------------------------------------------------


class RequestGuard:
    """``with RequestGuard(place):`` around the work of one request or one connection.

    ``KVStoreError`` and the types in ``expected`` pass. Many threads may use one object at the same time.

    Raises:
        InternalError: the work failed. The error is logged and counted, and sent like any ``KVStoreError``.
    """

    __slots__ = ("_expected", "_place")

    def __init__(self, place: str, *expected: type[Exception]) -> None:
        self._place = place
        self._expected: tuple[type[Exception], ...] = (KVStoreError, *expected)

    def __enter__(self) -> None:
        if failpoint.ACTIVE:
            try:
                failpoint.fault(self._place)
            except failpoint.Fault as fault:
                raise report_error(self._place, fault) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, self._expected):
            raise report_error(self._place, error) from None


# --- periodic tasks --------------------------------------------------------------------------------------------------


def thread_loop(place: str, step: Callable[[], bool | None], stopped: threading.Event) -> Callable[[], None]:
    """Make the target of a thread that calls ``step`` until ``stopped``, or until ``step`` returns True.

    A step that has nothing to do waits. After a failed step there is a pause.
    """

    def run() -> None:
        pause_s = PAUSE_S
        while not stopped.is_set():
            try:
                if failpoint.ACTIVE:
                    failpoint.fault(place)
                if step():
                    return
                pause_s = PAUSE_S
            except Exception as error:
                report_error(place, error)
                stopped.wait(pause_s)
                pause_s = min(2 * pause_s, PAUSE_S_MAX)

    return run


async def task_loop(place: str, step: Callable[[], Awaitable[bool | None]]) -> None:
    """Await ``step`` until it returns True, or until cancelled. After a failed step there is a pause."""
    import asyncio  # only here: clients without an event loop import this module as well

    pause_s = PAUSE_S
    while True:
        try:
            if failpoint.ACTIVE:
                failpoint.fault(place)
            if await step():
                return
            pause_s = PAUSE_S
        except Exception as error:
            report_error(place, error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)


# --- decided state ---------------------------------------------------------------------------------------------------


class StateGuard:
    """``with guard:`` around every change of a decided state. One object per state; its use costs half a microsecond.

    ``KVStoreError`` passes, because a state refuses requests with it. Any other error ends a daemon.
    """

    __slots__ = ("_place",)

    def __init__(self, place: str) -> None:
        self._place = place

    def __enter__(self) -> None:
        if failpoint.ACTIVE:
            try:
                failpoint.fault(self._place)
            except failpoint.Fault as fault:
                self._end(fault)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, KVStoreError):
            self._end(error)

    def _end(self, error: Exception) -> None:
        report_error(self._place, error)
        if _daemon:
            log.critical("%s: its state cannot be trusted any more, %s ends", self._place, _daemon)
            logging.shutdown()
            os._exit(1)


# --- processes -------------------------------------------------------------------------------------------------------


def become_daemon(daemon: str) -> None:
    """Make this process a daemon with this name: an error in decided state then ends it."""
    global _daemon
    _daemon = daemon
    watch_threads()


def watch_threads() -> None:
    """Log and count errors that end a thread."""

    def hook(ended: threading.ExceptHookArgs) -> None:
        if ended.exc_value is not None and ended.exc_type is not SystemExit:
            report_error(f"thread/{ended.thread.name if ended.thread is not None else ''}", ended.exc_value)

    threading.excepthook = hook


def report_loop_error(loop: Any, context: dict[str, Any]) -> None:
    """The exception handler of an event loop: an error in a callback or a task that nothing awaits."""
    error = context.get("exception")
    if error is not None:
        report_error("loop", error)
    else:
        log.error("%s", context.get("message"))
