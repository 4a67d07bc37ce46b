"""Inbox: events from other threads for the one that computes."""

from __future__ import annotations

import threading
from collections import deque

from engine.state.events import Event


class Inbox:
    """Events in the order in which they were posted. Their number is bounded by the requests that an engine takes: one
    call and a few threads each.
    """

    def __init__(self) -> None:
        self._items: deque[Event | BaseException] = deque()
        self._changed = threading.Condition()

    def post(self, item: Event | BaseException) -> None:
        """Add an event, from any thread. An exception is our own bug: the thread that takes it raises it."""
        with self._changed:
            self._items.append(item)
            self._changed.notify()

    def take(self, timeout_s: float = 0.0) -> list[Event]:
        """Take all events; waits at most this long for the first one."""
        with self._changed:
            if not self._items and timeout_s:
                self._changed.wait(timeout_s)
            items = list(self._items)
            self._items.clear()
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return [item for item in items if isinstance(item, Event)]
