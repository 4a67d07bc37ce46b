"""Orders: the leading conductor moves pages before a request needs them.

- A common prefix is copied to another node if all engines whose nodes have it are busy and another engine is not. How
  often a prefix is used is counted at its last page that some node has, and at every power of two before it: so a
  prompt that all tenants share is detected, whatever follows it.
- Pages that a waiting request will need from its node's NVMe are brought to memory in the meantime.

Both compete with the transfers of requests, so they have a budget: bytes per second, and bytes at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count
from typing import Final

import numpy as np

from engine.conductor.state.candidates import Candidates
from engine.conductor.state.instructions import CopyPrefix, Instruction, PrefetchPrefix
from engine.conductor.state.prefixes import Prefixes
from engine.conductor.state.routed_requests import Route

HOT_USES: Final = 8.0  # uses within about HOT_S that make a prefix hot
HOT_S: Final = 10.0
HOT_MAX: Final = 1 << 16  # prefixes that are counted; the oldest are dropped first
BUSY_S: Final = 0.1  # an engine whose prompts wait longer is busy
BURST_S: Final = 1.0  # the part of the budget that may be spent at once
LATE_S: Final = 30.0  # the longest that the end of an order is awaited


@dataclass(frozen=True, slots=True)
class _Order:
    until_s: float
    size: int
    what: tuple[str, int]  # node, last page


class Orders:
    """Orders of one conductor.

    An order ends when its end is reported, or ``LATE_S`` after it was given. Either way its bytes become available.

    Args:
        bytes_per_s: of all orders together.
        bytes_max: of those that have not ended; a larger one is given alone.

    Attributes:
        leads: whether orders are given.
    """

    def __init__(self, bytes_per_s: float, bytes_max: int) -> None:
        self.leads = False
        self._bytes_per_s = bytes_per_s
        self._max = bytes_max
        self._left = bytes_per_s * BURST_S
        self._at_s = 0.0
        self._numbers = count(1)
        self._given: dict[int, _Order] = {}  # by number, so by age
        self._uses: dict[int, tuple[float, float]] = {}  # by page: use count, time of the last use

    def end(self, order: int) -> None:
        """Record that an order has ended."""
        self._given.pop(order, None)

    def follow(
        self, candidates: Candidates, route: Route, waits: bool, prefixes: Prefixes, now_s: float
    ) -> list[Instruction]:
        """Return the orders that follow from an accepted request. ``waits``: whether it waits for its engine."""
        if not self.leads or route.computing.engine.about.foreign:
            return []
        copied = self._copy(candidates, route, prefixes, now_s)
        fetched = self._prefetch(candidates, route, now_s) if waits else None
        return [order for order in (copied, fetched) if order is not None]

    def _copy(self, candidates: Candidates, route: Route, prefixes: Prefixes, now_s: float) -> CopyPrefix | None:
        layout = route.computing.engine.about.layout
        matches, pages = candidates.matches.get(layout), candidates.request.pages.get(layout)
        if matches is None or pages is None or not matches.stored.any():
            return None
        longest = int(matches.stored.max())
        places = [*(1 << bit for bit in range(longest.bit_length() - 1)), longest]
        hot = max((place for place in places if self._used(int(pages[place - 1]), now_s) >= HOT_USES), default=0)
        columns, nodes = candidates.columns, candidates.columns.node.astype(np.int64)
        able = candidates.columns.layout == candidates.layouts.index(layout)
        has = able & (np.maximum(matches.stored, matches.soon)[nodes] >= hot)
        lacks = able & ~has & (nodes >= 0)
        if not hot or not lacks.any() or (has.any() and candidates.wait_s[has].min() <= BUSY_S):
            return None
        at = int(lacks.nonzero()[0][candidates.wait_s[lacks].argmin()])
        if candidates.wait_s[at] > BUSY_S:
            return None
        node = candidates.engines[at].about.node
        source = int((matches.stored >= hot).argmax())
        size = int((hot - matches.stored[nodes[at]]) * columns.page_tokens[at] * columns.kv_bytes[at])
        order = self._give(node, int(pages[hot - 1]), size, now_s)
        if order is None:
            return None
        moves_s = size / min(self._bytes_per_s, 1 / candidates.costs.s_per_byte["zone"])
        prefixes.expect(node, pages[int(matches.stored[nodes[at]]) : hot], now_s + moves_s, now_s)
        return CopyPrefix(order, candidates.request.number, node, candidates.node_names[source], layout, hot, size)

    def _prefetch(self, candidates: Candidates, route: Route, now_s: float) -> PrefetchPrefix | None:
        about = route.computing.engine.about
        at = candidates.engines.index(route.computing.engine)
        pages, upper = int(candidates.own_pages[at]), int(candidates.upper_pages[at])
        if pages <= upper:
            return None
        size = (pages - upper) * about.page_tokens * about.kv_bytes
        order = self._give(about.node, int(candidates.request.pages[about.layout][pages - 1]), size, now_s)
        if order is None:
            return None
        return PrefetchPrefix(order, candidates.request.number, about.node, about.layout, pages, size)

    def _used(self, page: int, now_s: float) -> float:
        """Record one more use; returns the recent number of uses."""
        uses, at_s = self._uses.pop(page, (0.0, now_s))
        if len(self._uses) >= HOT_MAX:
            del self._uses[next(iter(self._uses))]
        uses = uses * math.exp((at_s - now_s) / HOT_S) + 1
        self._uses[page] = uses, now_s
        return uses

    def _give(self, node: str, page: int, size: int, now_s: float) -> int | None:
        """Return the number of a new order for ``size`` bytes; None if the budget is used up, or if the order was given
        already."""
        self._expire(now_s)
        self._left = min(self._bytes_per_s * BURST_S, self._left + self._bytes_per_s * (now_s - self._at_s))
        self._at_s = now_s
        under_way = sum(order.size for order in self._given.values())
        if self._left <= 0 or (under_way and under_way + size > self._max):
            return None
        if any(order.what == (node, page) for order in self._given.values()):
            return None
        self._left -= size
        number = next(self._numbers)
        self._given[number] = _Order(now_s + LATE_S, size, (node, page))
        return number

    def _expire(self, now_s: float) -> None:
        while self._given and (oldest := next(iter(self._given)), self._given[oldest].until_s <= now_s)[1]:
            del self._given[oldest]
