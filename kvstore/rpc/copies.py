"""Copies: the stores into granted frames that are under way in this process, so that no session ends beneath one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from kvstore.errors import KVStoreError


class Copies:
    """Copies in flight into frames that a node granted to one session. Threads may share it.

    ``with copies:`` stands around every store into such a frame. Life: open -> ``close``: no other copy begins, and
    what ends the session for its node (its lock, its frames) is called when the last copy in flight has ended; at once
    where there is none. No caller waits for that. A process that dies first ends its copies with it.
    """

    __slots__ = ("_lock", "_in_flight", "_refusal", "_then")

    def __init__(self) -> None:
        # Reentrant: a signal handler, or a finalizer, may close the store in a thread that is just here.
        self._lock = threading.RLock()
        self._in_flight = 0
        self._refusal: Callable[[], KVStoreError] | None = None
        self._then: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        """A copy begins. Raises what ``close`` was given, once closed: nothing may be stored."""
        with self._lock:
            self._in_flight += 1
        if self._refusal is not None:  # looked at when we count already: ``close`` waits for us, or we see it
            self.__exit__()
            raise self._refusal()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._in_flight -= 1
            then = self._ended() if self._refusal is not None else ()
        for call in then:
            call()

    def close(self, refusal: Callable[[], KVStoreError], then: Callable[[], None]) -> None:
        """Let no other copy begin: it raises ``refusal()``. Call ``then`` when none is in flight any more, in the
        thread of the last. May be called again: the first refusal stays, every ``then`` is called."""
        with self._lock:
            self._refusal = self._refusal or refusal
            self._then.append(then)
            calls = self._ended()
        for call in calls:
            call()

    def after_fork(self, refusal: Callable[[], KVStoreError]) -> None:
        """In a forked child: the copies are its parent's, and so is what they end."""
        self.__init__()  # type: ignore[misc]  # another thread may have held the lock during the fork
        self._refusal = refusal

    def _ended(self) -> Iterable[Callable[[], None]]:
        """What is to be called now. ``_lock`` is held."""
        if self._in_flight or self._refusal is None:
            return ()
        then, self._then = self._then, []
        return then
