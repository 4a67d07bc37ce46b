"""Yardsticks: what a cache of single blocks would hit under LRU, and what no policy can exceed (Belady).

A *cache of single blocks* ignores that a block is of no use without those before it: each block of a request, front
first, is a hit or a miss by itself. It is what published hit ratios of traces count. `Belady` is the same optimum as a
policy object, under the rules of a node: it evicts the leaf whose next use is farthest. (A page is used whenever its
child is, so among all pages the farthest next use is a leaf's: closure costs the optimum next to nothing.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence

from engine.simulator.cache import CacheAccess, key_of
from kvstore.state.eviction import Page
from kvstore.state.policy_base import UsedMs

NEVER = 1 << 62


def infinite_hits(trace: Sequence[CacheAccess], count_from: int = 0) -> int:
    """Hits of a cache that never evicts, from that request on."""
    seen: set[int] = set()
    hits = 0
    for number, access in enumerate(trace):
        if number >= count_from:
            hits += sum(block in seen for block in access.blocks)
        seen.update(access.blocks)
    return hits


def lru_hits(trace: Sequence[CacheAccess], capacity: int, count_from: int = 0) -> int:
    """Hits of single blocks under least recently used, from that request on."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for number, access in enumerate(trace):
        for block in access.blocks:
            if block in cached:
                cached.move_to_end(block)
                hits += number >= count_from
            else:
                if len(cached) >= capacity:
                    cached.popitem(last=False)
                cached[block] = None
    return hits


def belady_hits(trace: Sequence[CacheAccess], capacity: int, count_from: int = 0) -> int:
    """Hits of single blocks if the block whose next use is farthest is always evicted, from that request on."""
    blocks = [block for access in trace for block in access.blocks]
    following = [NEVER] * len(blocks)  # place of the next use of the same block
    last: dict[int, int] = {}
    for place in range(len(blocks) - 1, -1, -1):
        following[place] = last.get(blocks[place], NEVER)
        last[blocks[place]] = place
    cached: dict[int, int] = {}  # block -> its next use
    farthest: list[tuple[int, int]] = []  # heap of (-next use, block); entries that no longer hold are skipped
    hits = place = 0
    for number, access in enumerate(trace):
        for block in access.blocks:
            if block in cached:
                hits += number >= count_from
            elif len(cached) >= capacity:
                while True:
                    use, candidate = heapq.heappop(farthest)
                    if cached.get(candidate) == -use:
                        del cached[candidate]
                        break
            cached[block] = following[place]
            heapq.heappush(farthest, (-following[place], block))
            place += 1
    return hits


class Belady:
    """The optimum as an `EvictionPolicy` that has read the trace. Pages are told apart by key; not for a node."""

    hinted = False

    def __init__(self, trace: Sequence[CacheAccess]) -> None:
        self._uses: dict[int, list[int]] = {}  # key -> times of use
        for access in trace:
            for block in access.blocks:
                self._uses.setdefault(key_of(block), []).append(access.now_ms)
        self._pages: dict[int, Page] = {}
        self._next: dict[int, int] = {}  # of the listed ones
        self._farthest: list[tuple[int, int, int]] = []  # heap of (-next use, -position, slot)
        self._soonest: list[tuple[int, int]] = []  # heap of (next use, slot)

    def resize(self, pages: int) -> None:
        """See ``EvictionPolicy.resize``."""

    def add(self, slot: int, page: Page) -> None:
        """See ``EvictionPolicy.add``."""
        uses = self._uses[page.key]
        place = bisect_right(uses, page.used_ms)
        following = uses[place] if place < len(uses) else NEVER
        self._pages[slot], self._next[slot] = page, following
        heapq.heappush(self._farthest, (-following, -page.position, slot))
        if following != NEVER:
            heapq.heappush(self._soonest, (following, slot))

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        self._next.pop(slot, None)

    def forget(self, slot: int, key: int | None) -> None:
        """See ``EvictionPolicy.forget``."""
        self.remove(slot)

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while self._soonest and self._soonest[0][0] <= now_ms:  # what was due was used: it is due later now
            due, slot = heapq.heappop(self._soonest)
            if self._next.get(slot) == due:
                self.add(slot, self._pages[slot]._replace(used_ms=due))
        while self._farthest:
            following, _, slot = self._farthest[0]
            if self._next.get(slot) == -following:
                return slot
            heapq.heappop(self._farthest)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        return min((self._pages[slot].used_ms for slot in self._next), default=None)

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        return slot in self._next
