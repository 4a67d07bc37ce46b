"""Eviction: which unused page leaves first. Only pages without stored children are offered, so no tail is orphaned.

Reads happen in the clients, without a message; a client merely stores the time into the page's mark. So the order
is kept lazily: a page found at the cold end with a mark younger than its place is put where the mark belongs (each
read moves a page at most once). Work per eviction grows with the logarithm of the pages offered, nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

_SLOT = 0xFFFFFFFF
_MS_MAX = 1 << 32
STALE_MAX = 4096  # entries of pages no longer offered that the heap may hold beside as many as are offered


class EvictionPolicy(Protocol):
    """Order of the evictable pages of one frame class. Pages are named by small integers (slot of the frame)."""

    def add(self, slot: int, used_ms: int) -> None:
        """The page became evictable; it was last used at ``used_ms``."""
        ...

    def remove(self, slot: int) -> None:
        """The page is no longer evictable (it got a child, a lease, or is gone). No-op where it is not known."""
        ...

    def victim(self, used_ms: Callable[[int], int]) -> int | None:
        """The page to evict next, still listed; ``used_ms(slot)`` reads its mark. None where nothing is evictable."""
        ...

    def coldest_ms(self) -> int | None:
        """When the coldest page was used, as far as known; None where nothing is evictable."""
        ...

    def __contains__(self, slot: int) -> bool:
        """The page is offered."""
        ...


class Lru:
    """Least recently used: a binary heap of ``use << 32 | slot`` in an array, 13 bytes per page and no objects.

    ``use`` is milliseconds since the first page came. A removed or moved page leaves a stale entry behind, which is
    dropped when it surfaces, or when there are too many.
    """

    def __init__(self) -> None:
        self._heap = array("Q")
        self._use = array("I")  # of each listed slot; an entry that says otherwise is stale
        self._listed = bytearray()
        self._count = 0
        self._base_ms: int | None = None

    def add(self, slot: int, used_ms: int) -> None:
        """See ``EvictionPolicy.add``."""
        while slot >= len(self._listed):  # not by doubling: there may be millions
            self._use.extend([0] * 4096)
            self._listed.extend(bytes(4096))
        assert not self._listed[slot], slot
        self._listed[slot] = 1
        self._count += 1
        self._push(slot, self._relative(used_ms))

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        if slot in self:
            self._listed[slot] = 0
            self._count -= 1
            if len(self._heap) > 2 * self._count + STALE_MAX:
                self._heap = array("Q", sorted(entry for entry in self._heap if self._current(entry)))

    def victim(self, used_ms: Callable[[int], int]) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while self._heap:
            entry = self._heap[0]
            slot = entry & _SLOT
            if not self._current(entry):
                self._pop()
                continue
            use = self._relative(used_ms(slot))
            if use <= entry >> 32:
                return slot
            self._pop()
            self._push(slot, use)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        while self._heap and not self._current(self._heap[0]):
            self._pop()
        return (self._heap[0] >> 32) + (self._base_ms or 0) if self._heap else None

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        return slot < len(self._listed) and self._listed[slot] == 1

    def _current(self, entry: int) -> bool:
        slot = entry & _SLOT
        return self._listed[slot] == 1 and self._use[slot] == entry >> 32

    def _relative(self, used_ms: int) -> int:
        """Milliseconds since the base; the base moves up when 49 days have gone by."""
        if self._base_ms is None:
            self._base_ms = used_ms
        if used_ms - self._base_ms >= _MS_MAX:
            shift = used_ms - self._base_ms - _MS_MAX // 2
            self._base_ms += shift
            live = [entry & _SLOT for entry in self._heap if self._current(entry)]
            for slot in live:
                self._use[slot] = max(0, self._use[slot] - shift)
            self._heap = array("Q", sorted(self._use[slot] << 32 | slot for slot in live))
        return max(0, used_ms - self._base_ms)

    def _push(self, slot: int, use: int) -> None:
        self._use[slot] = use
        entry = use << 32 | slot
        heap = self._heap
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

    def _pop(self) -> None:
        heap = self._heap
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
