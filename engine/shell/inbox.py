"""Inbox: what threads tell the one that computes."""

from __future__ import annotations

import threading
from collections import deque

from engine.state.events import Event


class Inbox:
    """Events in the order in which they were posted. What is in it is bounded by the requests that an engine takes: one
    call and a few threads each.
    """

    def __init__(self) -> None:
        self._items: deque[Event | BaseException] = deque()
        self._changed = threading.Condition()

    def post(self, item: Event | BaseException) -> None:
        """One more, from any thread. An exception is a mistake of ours: who takes it ends with it, loudly."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def take(self, timeout_s: float = 0.0) -> list[Event]:
        """All there are; waits so long for the first one, at most."""
        with self._changed:
            if not self._items and timeout_s:
                self._changed.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return [item for item in items if isinstance(item, Event)]
