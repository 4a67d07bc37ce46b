"""Prefetch: the leading conductor orders nodes to move pages before a request needs them.

- A hot prefix is copied to another node if all engines whose nodes have it are busy, and an engine of the other node is
  not. Uses of a prefix are counted at its last stored page, and at every page before it whose number is a power of two.
  A prompt that all tenants share is therefore detected, whatever follows it.
- While a request waits for its engine, the pages that it needs from the NVMe of the engine's node are loaded into
  memory.

These moves compete with the transfers of requests. They therefore have a budget: bytes per second, and bytes at a time.
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

HOT_USES: Final = 8.0  # a prefix is hot after this many uses within about HOT_S
HOT_S: Final = 10.0
HOT_MAX: Final = 1 << 16  # prefixes whose uses are counted; beyond it, the one that was used least recently is dropped
BUSY_S: Final = 0.1  # an engine is busy if a new prompt would wait longer than this
BURST_S: Final = 1.0  # the budget of this many seconds may be spent at once
LATE_S: Final = 30.0  # an order counts as ended after this time


@dataclass(frozen=True, slots=True)
class _Order:
    until_s: float
    size: int
    target: tuple[str, int]  # the node, and the last page that the order brings there


class Orders:
    """The orders of one conductor, and their budget.

    An order ends when its end is reported, or ``LATE_S`` after it was given. Either end frees its share of
    ``bytes_max``.

    Args:
        bytes_per_s: budget of all orders together.
        bytes_max: limit for the orders that have not ended. An order that exceeds it is given only alone.

    Attributes:
        leads: True if this conductor leads. Only then it gives orders.
    """

    def __init__(self, bytes_per_s: float, bytes_max: int) -> None:
        self.leads = False
        self._bytes_per_s = bytes_per_s
        self._bytes_max = bytes_max
        self._budget = bytes_per_s * BURST_S  # bytes that may be spent now
        self._budget_s = 0.0  # when the budget was last updated
        self._numbers = count(1)
        self._open: dict[int, _Order] = {}  # orders that have not ended, by number; the oldest is first
        self._uses: dict[int, tuple[float, float]] = {}  # by page: recent uses, time of the last use

    def end(self, order: int) -> None:
        """Record that an order has ended."""
        self._open.pop(order, None)

    def follow(
        self, candidates: Candidates, route: Route, waits: bool, prefixes: Prefixes, now_s: float
    ) -> list[Instruction]:
        """Return the orders that follow from an accepted request.

        Args:
            waits: True if the request waits for its engine.
        """
        if not self.leads or route.computing.engine.about.foreign:
            return []
        copy = self._copy(candidates, route, prefixes, now_s)
        prefetch = self._prefetch(candidates, route, now_s) if waits else None
        return [order for order in (copy, prefetch) if order is not None]

    def _copy(self, candidates: Candidates, route: Route, prefixes: Prefixes, now_s: float) -> CopyPrefix | None:
        layout = route.computing.engine.about.layout
        matches, pages = candidates.matches.get(layout), candidates.request.pages.get(layout)
        if matches is None or pages is None or not matches.stored.any():
            return None
        longest = int(matches.stored.max())
        places = [*(1 << bit for bit in range(longest.bit_length() - 1)), longest]
        hot = max((place for place in places if self._add_use(int(pages[place - 1]), now_s) >= HOT_USES), default=0)
        columns, nodes = candidates.columns, candidates.columns.node.astype(np.int64)
        same_layout = candidates.columns.layout == candidates.layouts.index(layout)
        has = same_layout & (np.maximum(matches.stored, matches.soon)[nodes] >= hot)
        lacks = same_layout & ~has & (nodes >= 0)
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

    def _add_use(self, page: int, now_s: float) -> float:
        """Count a use of the prefix that ends with this page. Returns its recent uses."""
        uses, last_s = self._uses.pop(page, (0.0, now_s))
        if len(self._uses) >= HOT_MAX:
            del self._uses[next(iter(self._uses))]
        uses = uses * math.exp((last_s - now_s) / HOT_S) + 1
        self._uses[page] = uses, now_s
        return uses

    def _give(self, node: str, page: int, size: int, now_s: float) -> int | None:
        """Give an order for ``size`` bytes.

        Args:
            page: the last page that the node is to have.

        Returns:
            The number of the order. None if the budget is used up, or if the same order is already open.
        """
        self._expire(now_s)
        earned = self._bytes_per_s * (now_s - self._budget_s)
        self._budget, self._budget_s = min(self._bytes_per_s * BURST_S, self._budget + earned), now_s
        open_bytes = sum(order.size for order in self._open.values())
        if self._budget <= 0 or (open_bytes and open_bytes + size > self._bytes_max):
            return None
        if any(order.target == (node, page) for order in self._open.values()):
            return None
        self._budget -= size
        number = next(self._numbers)
        self._open[number] = _Order(now_s + LATE_S, size, (node, page))
        return number

    def _expire(self, now_s: float) -> None:
        while self._open and (oldest := next(iter(self._open)), self._open[oldest].until_s <= now_s)[1]:
            del self._open[oldest]
