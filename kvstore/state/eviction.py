"""Eviction: which unused page leaves first. Only pages without stored children are offered, so no tail is orphaned.

Reads happen in the clients, without a message; a client merely stores the time into the page's mark. So the order
is kept lazily: a page found at the cold end with a mark younger than its place is moved to the warm end instead
(each read moves a page at most once). Work per eviction does not depend on how many pages there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Protocol

_NONE = -1


class EvictionPolicy(Protocol):
    """Order of the evictable pages of one frame class. Pages are named by small integers (slot of the frame)."""

    def add(self, slot: int, used_ms: int, *, cold: bool = False) -> None:
        """The page became evictable. ``cold``: its only child has just been evicted and it was used no later."""
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
    """Least recently used, as a doubly linked list in arrays: 12 bytes per frame."""

    def __init__(self) -> None:
        self._newer = array("i")
        self._older = array("i")
        self._stamp = array("I")
        self._oldest = _NONE
        self._newest = _NONE

    def add(self, slot: int, used_ms: int, *, cold: bool = False) -> None:
        """See ``EvictionPolicy.add``."""
        while slot >= len(self._newer):
            grow = 4096  # not by doubling: a slot is 12 bytes, and there are millions
            self._newer.extend([-2] * grow)
            self._older.extend([_NONE] * grow)
            self._stamp.extend([0] * grow)
        assert self._newer[slot] == -2, slot
        self._stamp[slot] = used_ms & 0xFFFFFFFF
        if cold:
            self._older[slot], self._newer[slot] = _NONE, self._oldest
            if self._oldest != _NONE:
                self._older[self._oldest] = slot
            else:
                self._newest = slot
            self._oldest = slot
        else:
            self._newer[slot], self._older[slot] = _NONE, self._newest
            if self._newest != _NONE:
                self._newer[self._newest] = slot
            else:
                self._oldest = slot
            self._newest = slot

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        if slot >= len(self._newer) or self._newer[slot] == -2:
            return
        newer, older = self._newer[slot], self._older[slot]
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._newest = older
        if older != _NONE:
            self._newer[older] = newer
        else:
            self._oldest = newer
        self._newer[slot] = -2

    def victim(self, used_ms: Callable[[int], int]) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while (slot := self._oldest) != _NONE:
            used = used_ms(slot) & 0xFFFFFFFF
            if not 0 < (used - self._stamp[slot]) & 0xFFFFFFFF < 0x80000000:  # milliseconds wrap after 49 days
                return slot
            self.remove(slot)
            self.add(slot, used)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        return self._stamp[self._oldest] if self._oldest != _NONE else None

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        return slot < len(self._newer) and self._newer[slot] != -2
