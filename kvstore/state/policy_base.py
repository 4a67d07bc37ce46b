"""What an eviction policy is, and what the policies are made of: pages, slots, and heaps in arrays.

A policy orders the pages of one frame class. It names them by *slots*, small integers that a frame keeps for as long as
its extent lasts. Only leaves are offered to it (sealed pages without stored children that nothing holds), because
chains are prefix-closed: what leaves is always the tail of a chain. A worked example, three pages of one chain in the
slots 5, 6, 7, stored by one put, in a policy that is asked for room twice::

    add(7, Page(...))        the put: its last page is a leaf, the others have children
    victim(...) -> 7         room is needed
    forget(7, key)           it was evicted; slot 7 will name another page
    add(6, Page(...))        its parent became a leaf, with its own last use
    remove(6)                a request extends the chain there: page 6 gets a child. It is still stored
    add(6, ...), forget(6, key)   and so on

Reads happen in the clients, without a message: a client merely stores the time into the page's mark. So a policy that
wants to know whether a page was used reads its mark, and only does so for pages it is about to evict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvstore.model.replica import hint_in, position_of, turns_of
from kvstore.model.retention import HINTS, STEP, priority_of, ttl_s_of

SLOT_MASK = 0xFFFFFFFF
MS_MAX = 1 << 32
STALE_MAX = 4096  # entries of pages no longer offered that a heap may hold in addition to as many as are offered
GROW_SLOTS = 4096  # tables by slot grow by this, not by doubling: there may be millions

# What a hint does to a page's worth, and until which age.
HINT_WEIGHTS = [float(STEP) ** priority_of(hint) for hint in range(HINTS)]
HINT_MS = [MS_MAX if ttl_s_of(hint) is None else 1000 * (ttl_s_of(hint) or 0) for hint in range(HINTS)]

UsedMs = Callable[[int], int]


class Page(NamedTuple):
    """What a policy may know of a page."""

    used_ms: int  # last use, on the node's clock
    key: int = 0  # 64 bits of its key, for memories of pages that left
    position: int = 0  # pages before it in its chain
    turns: int = 0  # how many times its chain had been extended by a later request when it was stored; 0: by the first
    hint: int = 0  # what its writer said of how long to keep it, see ``kvstore.model.retention``
    owner: int = 0  # whose it is: hints order pages of one owner only

    @classmethod
    def of(cls, used_ms: int, key: int, info: int, owner: int) -> Page:
        """A page with this ``standing``."""
        return cls(used_ms, key, position_of(info), turns_of(info), hint_in(info), owner)


class EvictionPolicy(Protocol):
    """Order of the evictable pages of one frame class. Every call costs O(log pages) or less."""

    @property
    def hinted(self) -> bool:
        """Whether it follows hints."""
        ...

    def resize(self, pages: int) -> None:
        """The class holds about this many pages now."""
        ...

    def add(self, slot: int, page: Page) -> None:
        """The page became evictable. It may have been before; it must not be listed now."""
        ...

    def remove(self, slot: int) -> None:
        """The page is not evictable for now (it got a child, is held, ...), but stored. No-op where not listed."""
        ...

    def forget(self, slot: int, key: int | None) -> None:
        """The page is gone, listed or not; the slot will name another. ``key``: it was evicted for room."""
        ...

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """The page to evict next, still listed; None where none is.

        ``used_ms(slot)`` reads a page's mark: one younger than what the page was added with means that it was used.
        """
        ...

    def coldest_ms(self) -> int | None:
        """When the coldest page was used, as far as known; None where nothing is evictable."""
        ...

    def __contains__(self, slot: int) -> bool:
        """The page is listed."""
        ...


def heap_push(heap: array[int], entry: int) -> None:
    """Put ``entry`` into a binary heap of plain integers."""
    heap.append(entry)
    place = len(heap) - 1
    while place:
        parent = (place - 1) >> 1
        above = heap[parent]
        if above <= entry:
            break
        heap[place] = above
        place = parent
    heap[place] = entry


def heap_pop(heap: array[int]) -> None:
    """Drop the least entry. (``heapq`` takes lists only, whose integers are objects: 4 times the memory.)"""
    entry = heap.pop()
    size = len(heap)
    if not size:
        return
    place, child = 0, 1
    while child < size:
        below = heap[child]
        if child + 1 < size and heap[child + 1] < below:
            child += 1
            below = heap[child]
        if entry <= below:
            break
        heap[place] = below
        place, child = child, 2 * child + 1
    heap[place] = entry
