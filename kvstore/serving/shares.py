"""Shares: something that all calls need and there is little of (threads, buffers), given out in turns of their owners.

Whoever waits is let in owner by owner, so that a hundred calls of one tenant cost another's call one turn. A tenant may
have at most as much as it leaves free, and ``each`` at most: with 16 threads and 8 of one owner the first tenant gets
8, the second 4, the third 2: whoever comes next still finds some, however long those steps take.

A call that would wait longer than it may is refused at once. How long that is says its place: waiting cost those before
it so many seconds per place. Worked example: 30 calls wait, the last that was let in had been tenth and had waited 0.5
s; so the next one will wait 1.5 s, and where it has 1 s left it is told to come back.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from typing import Final

from kvstore.errors import TooManyCalls
from kvstore.serving.identities import LOCAL, Identity, is_tenant

WAITING_MAX: Final = 4096  # of one kind of shares; calls under way are bounded, this only says so
PACES_MAX: Final = 256  # owners whose waits are remembered
REST: Final = 8  # one part of so many
RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0
_WEIGHT: Final = 0.1  # of the newest wait in what waiting costs


class _Waiter:
    """One call that waits for its turn."""

    def __init__(self, size: int, mine: int, before: int, begun: bool) -> None:
        self.size = size
        self.mine = mine
        self.before = before
        self.begun = begun
        self.began_s = time.monotonic()
        self.turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Pace:
    """What waiting costs an owner per place, and how long what it gets is held. Seconds."""

    def __init__(self) -> None:
        self._waited_s = 0.0
        self._places = 0.0
        self._held_s = 0.0

    @property
    def place_s(self) -> float:
        """Lately. Of all waits together: who is first in the line when the machine stops for a moment says little."""
        return self._waited_s / self._places if self._places else 0.0

    def waited(self, seconds: float, places: int) -> None:
        """One wait."""
        self._waited_s += seconds - _WEIGHT * self._waited_s
        self._places += places - _WEIGHT * self._places

    def held(self, seconds: float) -> None:
        """What was got was given back."""
        self._held_s += _WEIGHT * (seconds - self._held_s)

    def expected_s(self, before: int) -> float:
        """From now on, with so many places before it."""
        return (before + 1) * self.place_s + self._held_s


class Shares:
    """Of the event loop alone. What ``take`` gave goes back by ``give``.

    Args:
        what: for messages: "other calls hold all <what>".
        kind: for metrics.
        total: how much there is.
        each: how much of it one tenant may have, and any other owner: these are asked for nothing but that.
    """

    def __init__(self, what: str, kind: str, total: int, each: int, each_other: int) -> None:
        self.total = total
        self.free = total
        self._what = what
        self._kind = kind
        self._each, self._each_other = each, each_other
        self._of: Counter[Identity] = Counter()
        self._waiting: OrderedDict[Identity, deque[_Waiter]] = OrderedDict()
        self._paces: OrderedDict[Identity, _Pace] = OrderedDict()

    def _fits(self, size: int, owner: Identity, mine: int) -> bool:
        if not size:
            return True
        theirs = self._of[owner]
        if not is_tenant(owner):
            return size <= self.free and (theirs == mine or theirs + size <= self._each_other)
        return size <= self.free and (theirs == mine or theirs + size <= min(self._each, self.free))

    async def take(
        self, size: int, wait_s: float, owner: Identity = LOCAL, mine: int = 0, *, begun: bool = False
    ) -> int:
        """How much that took: more than all counts as all, or as nearly all where the call holds some already.

        Args:
            wait_s: how long the caller may wait, and hold what it gets, if it is to be of use.
            mine: what the same call has taken already.
            begun: something of this call was done already: it takes turns with those of its owner that only begin,
                however many these are, and is not refused for having to wait.

        Raises:
            TooManyCalls: it would take longer than ``wait_s``, or did.
        """
        # Calls that hold a little and want all the rest would wait for each other: they leave room for what is little.
        size = max(0, min(size, self.total - mine - (self.total // REST if mine else 0)))
        if (not size or owner not in self._waiting) and self._fits(size, owner, mine):
            self._grant(size, owner)
            return size
        waiter = _Waiter(size, mine, self._before(owner), begun)
        self._check(waiter, owner, wait_s, begun)
        queue = self._waiting.setdefault(owner, deque())
        queue.insert(2 * sum(other.begun for other in queue) + 1 if begun else len(queue), waiter)
        try:
            async with asyncio.timeout(wait_s):
                await waiter.turn
        except BaseException as error:
            if waiter.turn.done() and not waiter.turn.cancelled():  # its turn came in the same moment
                self.give(size, owner)
            else:
                self._forget(owner, waiter)
                self._learn(waiter, owner, at_least=True)
                self._let_in()  # those behind it may want less
            if isinstance(error, TimeoutError):
                raise self._refusal(owner, waiter.before) from None
            raise
        self._learn(waiter, owner)
        return size

    def give(self, size: int, owner: Identity = LOCAL, held_s: float | None = None) -> None:
        """Give back what ``take`` said; ``held_s``: how long it was held."""
        self.free += size
        self._of[owner] -= size
        if not self._of[owner]:
            del self._of[owner]
        if held_s is not None:
            self._pace(owner).held(held_s)
        self._let_in()

    def _grant(self, size: int, owner: Identity) -> None:
        self.free -= size
        self._of[owner] += size

    def _let_in(self) -> None:
        """Let in who fits, one of each owner and round again."""
        left_out = 0
        while left_out < len(self._waiting):
            owner, queue = next(iter(self._waiting.items()))
            self._waiting.move_to_end(owner)
            waiter = queue[0]
            if not self._fits(waiter.size, owner, waiter.mine):
                left_out += 1
                continue
            left_out = 0
            self._forget(owner, waiter)
            if not waiter.turn.done():
                self._grant(waiter.size, owner)
                waiter.turn.set_result(None)

    def _forget(self, owner: Identity, waiter: _Waiter) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and waiter in queue:
            queue.remove(waiter)
            if not queue:
                del self._waiting[owner]

    def _before(self, owner: Identity) -> int:
        """How many are let in before the next call of this owner."""
        mine = len(self._waiting.get(owner, ()))
        return mine + sum(min(len(queue), mine + 1) for other, queue in self._waiting.items() if other != owner)

    def _check(self, waiter: _Waiter, owner: Identity, wait_s: float, begun: bool) -> None:
        """Who is first in the line always waits: so it is seen that things go faster again."""
        waiting = sum(map(len, self._waiting.values()))
        if waiting >= WAITING_MAX or (
            waiter.before and not begun and self._pace(owner).expected_s(waiter.before) > wait_s
        ):
            raise self._refusal(owner, waiter.before)

    def _learn(self, waiter: _Waiter, owner: Identity, at_least: bool = False) -> None:
        pace, seconds = self._pace(owner), time.monotonic() - waiter.began_s
        if not at_least or seconds / (waiter.before + 1) > pace.place_s:
            pace.waited(seconds, waiter.before + 1)

    def _pace(self, owner: Identity) -> _Pace:
        pace = self._paces.setdefault(owner, _Pace())
        self._paces.move_to_end(owner)
        if len(self._paces) > PACES_MAX:
            self._paces.popitem(last=False)
        return pace

    def _refusal(self, owner: Identity, before: int) -> TooManyCalls:
        retry_s = min(max(self._pace(owner).expected_s(before), RETRY_S_MIN), RETRY_S_MAX)
        return TooManyCalls(f"other calls hold all {self._what}", retry_s, self._kind)
