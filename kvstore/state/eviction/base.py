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

Least recently used: the yardstick that every other policy must at least reach.

The order is kept lazily: a page found at the cold end with a mark younger than its place is put where the mark belongs
(each read moves a page at most once).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
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


class Tail(NamedTuple):
    """A leaf, last, and pages before it in its chain that would be leaves one after another if those behind them left.

    In the order of the chain, one element per page: plain numbers, since most tails are short.
    """

    slots: Sequence[int]
    keys: Sequence[int]  # 64 bits of each
    used_ms: Sequence[int]
    standings: Sequence[int]  # see ``model.replica.standing``


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

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """The page that ``victim`` named is evicted for room, and so are pages before it, as many as are worth no more.

        Returns how many pages before it go. It is as if each had been offered, and chosen next. ``together``: as many
        pages before it are too few to be judged apart from it, where nothing else is known of them.
        """
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


class Lru:
    """A binary heap of ``use << 32 | slot`` in an array, 13 bytes per page and no objects.

    ``use`` is milliseconds since some time before the first page came. A removed or moved page leaves a stale entry
    behind, which is dropped when it surfaces, or when there are too many.
    """

    hinted = False

    def __init__(self, pages: int = 0) -> None:
        self._heap = array("Q")
        self._use = array("I")  # of each listed slot; an entry that says otherwise is stale
        self._listed = bytearray()
        self._count = 0
        self._base_ms: int | None = None

    def resize(self, pages: int) -> None:
        """The order does not depend on how many pages there may be."""

    def add(self, slot: int, page: Page) -> None:
        """See ``EvictionPolicy.add``."""
        while slot >= len(self._listed):
            self._use.extend([0] * GROW_SLOTS)
            self._listed.extend(bytes(GROW_SLOTS))
        assert not self._listed[slot], slot
        self._listed[slot] = 1
        self._count += 1
        self._push(slot, self._relative(page.used_ms))

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        if slot in self:
            self._listed[slot] = 0
            self._count -= 1
            if len(self._heap) > 2 * self._count + STALE_MAX:
                # A page removed and added again without a use left two equal entries: hence the set.
                self._heap = array("Q", sorted({entry for entry in self._heap if self._current(entry)}))

    def forget(self, slot: int, key: int | None) -> None:
        """See ``EvictionPolicy.forget``."""
        self.remove(slot)

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """See ``EvictionPolicy.forget_tail``. Those that were used no later than the coldest leaf go."""
        self.remove(tail.slots[-1])
        coldest = tail.used_ms[-1]
        return next(
            (back for back, use in enumerate(reversed(tail.used_ms[:-1])) if use > coldest), len(tail.slots) - 1
        )

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while self._heap:
            entry = self._heap[0]
            slot = entry & SLOT_MASK
            if not self._current(entry):
                heap_pop(self._heap)
                continue
            use = self._relative(used_ms(slot))
            if use <= entry >> 32:
                return slot
            heap_pop(self._heap)
            self._push(slot, use)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        while self._heap and not self._current(self._heap[0]):
            heap_pop(self._heap)
        return (self._heap[0] >> 32) + (self._base_ms or 0) if self._heap else None

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        return slot < len(self._listed) and self._listed[slot] == 1

    def __len__(self) -> int:
        """Pages listed."""
        return self._count

    def _current(self, entry: int) -> bool:
        slot = entry & SLOT_MASK
        return self._listed[slot] == 1 and self._use[slot] == entry >> 32

    def _relative(self, used_ms: int) -> int:
        """Milliseconds since the base; the base moves up when 49 days have gone by."""
        if self._base_ms is None:
            self._base_ms = max(0, used_ms - MS_MAX // 4)  # later ones may have been used before it
        if used_ms - self._base_ms >= MS_MAX:
            shift = used_ms - self._base_ms - MS_MAX // 2
            self._base_ms += shift
            live = [entry & SLOT_MASK for entry in self._heap if self._current(entry)]
            for slot in live:
                self._use[slot] = max(0, self._use[slot] - shift)
            self._heap = array("Q", sorted(self._use[slot] << 32 | slot for slot in live))
        return max(0, used_ms - self._base_ms)

    def _push(self, slot: int, use: int) -> None:
        self._use[slot] = use
        heap_push(self._heap, use << 32 | slot)
