"""Lanes: the work on NVMe, device by device, so that a device that does not answer holds up nothing of another.

A device has one lane for what is written there and one for what is read. Pages that are carried from one extent to
others have a lane of their own, since such a copy may wait for two devices.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

IDLE_S: Final = 1.0  # a caller that adds a piece ends the wait

Piece = Callable[[], None]


class DeviceLane:
    """Pieces of work, one at a time, in order. Any thread may add some; one thread calls ``step``.

    A piece takes as long as its device does. Whatever comes after it in this lane waits, also at the node's end: so no
    two threads ever carry out one piece, or two pieces of one lane.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pieces: deque[Piece] = deque()  # bounded by what the node decides: see ``state.tiering``
        self._chores: dict[str, Piece] = {}
        self._some = threading.Event()
        self._began_s: float | None = None  # the piece under way

    def put(self, piece: Piece) -> None:
        """Add a piece behind those that are there."""
        self._pieces.append(piece)
        self._some.set()

    def put_chore(self, name: str, piece: Piece) -> None:
        """Add a piece for when there is nothing else to do; once, however often it is asked for."""
        self._chores[name] = piece
        self._some.set()

    def step(self) -> bool:
        """Carry out the next piece; False where there is none."""
        self._began_s = time.monotonic()
        try:
            piece = self._next()
            if piece is not None:
                piece()
            return piece is not None
        finally:
            self._began_s = None

    def _next(self) -> Piece | None:
        if self._pieces:
            return self._pieces.popleft()
        name = next(iter(self._chores), None)
        return self._chores.pop(name) if name is not None else None

    @property
    def is_busy(self) -> bool:
        """Something is under way, or waits."""
        return bool(self._pieces or self._chores) or self._began_s is not None

    def is_late(self, late_s: float) -> bool:
        """The piece under way has taken longer than that."""
        began_s = self._began_s
        return began_s is not None and began_s < time.monotonic() - late_s

    def wait(self) -> None:
        """Return when there may be something to do."""
        self._some.wait(IDLE_S)
        self._some.clear()

    def wake(self) -> None:
        """End ``wait``."""
        self._some.set()


class Joint:
    """Work of which several lanes do a part each: the lane that is done last reports it."""

    def __init__(self, parts: int, report: Callable[[], None]) -> None:
        self._left = parts
        self._report = report
        self._mutex = threading.Lock()

    def done(self) -> None:
        """One part is done."""
        with self._mutex:
            self._left -= 1
            last = not self._left
        if last:
            self._report()
