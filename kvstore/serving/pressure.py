"""Pressure: how much a server has to do, and whether one more call would be answered in time.

What waits for the event loop, or for the interpreter, is in no queue of ours. It is seen by what it does: the loop is
late, and calls end at a certain rate however many there are. Then a new call takes as long as those before it need to
end. Worked example: the loop is 8 ms late, 900 calls end per second and 300 are at work; so the next one will take a
third of a second, and where it has half a second left it is let in, else refused (with ``MARGIN`` 1).

Calls count by owner as in ``shares``: before the next call of an owner come its own, and as many of each other one.
A call that waits for its caller is not at work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Final

from kvstore.errors import TooManyCalls
from kvstore.serving.identities import Identity

LOOK_S: Final = 0.02
LOOK_S_MAX: Final = 2 * LOOK_S  # counts as time of a loop that is on time
WINDOW_S: Final = 0.1  # in which calls that end are counted
LAG_S_MIN: Final = 0.002  # a loop that is less late has nothing to do that it could not do
LOOP_TURNS: Final = 4  # that a call takes at least: its request, its step, its reply, its end
MARGIN: Final = 2.0  # a call is let in where it will probably end in half of the time it has
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
_WEIGHT: Final = 0.3  # of the newest look
_WEIGHT_LESS: Final = 0.1  # where less can be done than before: a machine that stops for a moment is not slower


class Pressure:
    """How busy the event loop is. Used in the event loop alone.

    Attributes:
        lag_s: how late the loop recently did what was due.
        on_time_s: a clock that hardly moves while the loop is late: what arrived in that time has not been read.
        ends_per_s: how many calls can end in a second, as observed; 0: not known yet.
        at_work: calls by owner, without those that wait for their caller.
    """

    def __init__(self) -> None:
        self.lag_s = 0.0
        self.on_time_s = 0.0
        self.ends_per_s = 0.0
        self.at_work: Counter[Identity] = Counter()
        self._ended = 0
        self._began_s: float | None = None  # of the window
        self._busy = True  # there was something to do all the time, as far as was looked

    @contextlib.contextmanager
    def working(self, owner: Identity) -> Iterator[None]:
        """Around a call that was let in."""
        self.at_work[owner] += 1
        try:
            yield
        finally:
            self._less(owner)
            self._ended += 1

    @contextlib.contextmanager
    def waiting(self, owner: Identity) -> Iterator[None]:
        """Around what a call waits for that is its caller's to do."""
        self._less(owner)
        try:
            yield
        finally:
            self.at_work[owner] += 1

    def _less(self, owner: Identity) -> None:
        self.at_work[owner] -= 1
        if not self.at_work[owner]:
            del self.at_work[owner]

    def check(self, owner: Identity, left_s: float) -> None:
        """Raises TooManyCalls where a call of this owner that begins now would not end within ``left_s``."""
        if self.lag_s < LAG_S_MIN or self.at_work.total() < LOOP_TURNS:
            return  # whatever keeps the loop, it is not that calls are too many
        expected_s = LOOP_TURNS * self.lag_s
        if self.ends_per_s:
            mine = self.at_work[owner]
            before = sum(min(calls, mine + 1) for other, calls in self.at_work.items() if other != owner) + mine
            expected_s = max(expected_s, MARGIN * before / self.ends_per_s)
        if expected_s > left_s:
            retry_s = min(max(expected_s - left_s, RETRY_S_MIN), RETRY_S_MAX)
            raise TooManyCalls("too many calls come at once to answer this one in time", retry_s, "late")

    async def look(self) -> None:
        """Keep the numbers up to date: to be called again and again."""
        clock = asyncio.get_running_loop().time
        last_s = clock()
        if self._began_s is None:
            self._began_s = last_s
        await asyncio.sleep(LOOK_S)
        now_s = clock()
        self.lag_s += _WEIGHT * (max(0.0, now_s - last_s - LOOK_S) - self.lag_s)
        self.on_time_s += min(now_s - last_s, LOOK_S_MAX)
        self._busy = self._busy and self.at_work.total() >= LOOP_TURNS
        if now_s - self._began_s >= WINDOW_S:
            self._count(self._ended / (now_s - self._began_s))
            self._ended, self._busy, self._began_s = 0, True, now_s

    def _count(self, rate: float) -> None:
        """What ended in a window is what can end at least; and at most, where there always was something to do."""
        if rate > self.ends_per_s:
            self.ends_per_s += _WEIGHT * (rate - self.ends_per_s) if self.ends_per_s else rate
        elif self._busy and self._ended:
            self.ends_per_s += _WEIGHT_LESS * (rate - self.ends_per_s)
