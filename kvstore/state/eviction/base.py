"""What an eviction policy is, and its building blocks: pages, tails, heaps in arrays, and the policy ``Lru``.

A policy orders the pages of one frame class. It names them by *slots*, small integers that a frame keeps as long as its
extent exists. Only leaves are offered to it: sealed pages without stored children that nothing holds. Chains are
prefix-closed, so the pages that leave are always the tail of a chain. A worked example: one put has stored a chain of
three pages in the slots 5, 6 and 7, and then room is needed twice::

    add(7, Page(...))        the put: its last page is a leaf, the others have children
    victim(...) -> 7         room is needed
    forget(7, key)           the page is evicted; slot 7 will name another page
    add(6, Page(...))        its parent is a leaf now, with its own last use
    remove(6)                a request extends the chain: page 6 has a child again, and is still stored
    add(6, ...), forget(6, key)   and so on

Clients read without a message: they only store the time of a use into the page's mark. A policy that needs to know
whether a page was used reads its mark, and does so only for pages that it is about to evict.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from kvstore.model.replica import hint_in, position_of, turns_of
from kvstore.model.retention import HINTS, STEP, priority_of, ttl_s_of

SLOT_MASK = 0xFFFFFFFF
MS_MAX = 1 << 32
STALE_MAX = 4096  # a heap may have this many stale entries, in addition to one per offered page
GROW_SLOTS = 4096  # tables by slot grow by this, not by doubling: there may be millions of slots

# By hint: the factor of a page's worth, and the age (ms) until which it applies.
HINT_WEIGHTS = [float(STEP) ** priority_of(hint) for hint in range(HINTS)]
HINT_MS = [MS_MAX if ttl_s_of(hint) is None else 1000 * (ttl_s_of(hint) or 0) for hint in range(HINTS)]

UsedMs = Callable[[int], int]


class Page(NamedTuple):
    """The facts about a page that a policy may use."""

    used_ms: int  # last use, on the node's clock
    key: int = 0  # 64 bits of its key, to recognise pages that return
    position: int = 0  # number of pages before it in its chain
    turns: int = 0  # how many later requests had extended its chain when it was stored
    hint: int = 0  # how long its writer asked to keep it, see ``kvstore.model.retention``
    owner: int = 0  # number of its root; hints order only pages of one root

    @classmethod
    def of(cls, used_ms: int, key: int, info: int, owner: int) -> Page:
        """Return a page with this ``standing``."""
        return cls(used_ms, key, position_of(info), turns_of(info), hint_in(info), owner)


class Tail(NamedTuple):
    """A leaf and the pages before it that could leave with it, one after another, because each has only one child.

    The leaf comes last. Each field has one plain number per page, because most tails are short.
    """

    slots: Sequence[int]
    keys: Sequence[int]  # 64 bits of each key
    used_ms: Sequence[int]
    standings: Sequence[int]  # see ``model.replica.standing``


class EvictionPolicy(Protocol):
    """The order of one frame class's evictable pages. Every call costs O(log pages) or less."""

    @property
    def hinted(self) -> bool:
        """True if the policy follows hints."""
        ...

    def resize(self, pages: int) -> None:
        """Adapt to this approximate number of pages in the class."""
        ...

    def add(self, slot: int, page: Page) -> None:
        """List a page that became evictable. The page must not be listed now; it may have been listed earlier."""
        ...

    def remove(self, slot: int) -> None:
        """Stop listing a page that is still stored, but has a child, is held, or the like. No-op if not listed."""
        ...

    def forget(self, slot: int, key: int | None) -> None:
        """Forget a removed page, listed or not: its slot will name another page. ``key`` is set if the page was evicted
        for room."""
        ...

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """Forget the page that ``victim`` named, and preceding pages that are worth no more. All are evicted for room.

        Return how many preceding pages leave. The result is as if each of them had been offered and chosen next.
        ``together``: number of preceding pages in its group. They leave with it without being judged, unless the policy
        has other facts about them.
        """
        ...

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """Return the slot of the page to evict next, which stays listed; None if no page is listed.

        ``used_ms(slot)`` reads a page's mark. A mark later than the last use with which the page was added means that
        the page was used since.
        """
        ...

    def coldest_ms(self) -> int | None:
        """Return the last use of the coldest page, as far as known; None if no page is evictable."""
        ...

    def __contains__(self, slot: int) -> bool:
        """Return True if the page is listed."""
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
    """Drop the least entry. (``heapq`` works on lists only, which take 4 times the memory.)"""
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
    """The policy that evicts the least recently used page first. Every other policy must be at least as good.

    The pages are in a binary heap of ``use << 32 | slot`` in an array: 13 bytes per page and no objects. ``use`` is in
    milliseconds since a time before the first page was added. The order is corrected lazily: a page at the cold end
    with a later mark is moved to the place of its mark, at most once per read. A removed or moved page leaves a stale
    entry, which is dropped when it reaches the cold end, or when there are too many.
    """

    hinted = False

    def __init__(self, pages: int = 0) -> None:
        self._heap = array("Q")
        self._use = array("I")  # last use of each listed slot; a heap entry with another use is stale
        self._listed = bytearray()
        self._count = 0
        self._base_ms: int | None = None

    def resize(self, pages: int) -> None:
        """Do nothing: the order does not depend on the number of pages."""

    def add(self, slot: int, page: Page) -> None:
        """List a page at the time of its last use."""
        while slot >= len(self._listed):
            self._use.extend([0] * GROW_SLOTS)
            self._listed.extend(bytes(GROW_SLOTS))
        assert not self._listed[slot], slot
        self._listed[slot] = 1
        self._count += 1
        self._push(slot, self._relative(page.used_ms))

    def remove(self, slot: int) -> None:
        """Stop listing a page. Its heap entry becomes stale."""
        if slot in self:
            self._listed[slot] = 0
            self._count -= 1
            if len(self._heap) > 2 * self._count + STALE_MAX:
                # A page that was removed and added again without a use has two equal entries: hence the set.
                self._heap = array("Q", sorted({entry for entry in self._heap if self._current(entry)}))

    def forget(self, slot: int, key: int | None) -> None:
        """Stop listing a page that was removed."""
        self.remove(slot)

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """Forget the leaf, and preceding pages that were not used later than the leaf."""
        self.remove(tail.slots[-1])
        coldest = tail.used_ms[-1]
        return next(
            (back for back, use in enumerate(reversed(tail.used_ms[:-1])) if use > coldest), len(tail.slots) - 1
        )

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """Return the page with the oldest mark."""
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
        """Return the last use of the coldest page, as far as marks were read."""
        while self._heap and not self._current(self._heap[0]):
            heap_pop(self._heap)
        return (self._heap[0] >> 32) + (self._base_ms or 0) if self._heap else None

    def __contains__(self, slot: int) -> bool:
        """Return True if the page is listed."""
        return slot < len(self._listed) and self._listed[slot] == 1

    def __len__(self) -> int:
        """Return the number of listed pages."""
        return self._count

    def _current(self, entry: int) -> bool:
        slot = entry & SLOT_MASK
        return self._listed[slot] == 1 and self._use[slot] == entry >> 32

    def _relative(self, used_ms: int) -> int:
        """Return milliseconds since the base. The base moves up when 49 days have passed."""
        if self._base_ms is None:
            self._base_ms = max(0, used_ms - MS_MAX // 4)  # later pages may have been used before this one
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
