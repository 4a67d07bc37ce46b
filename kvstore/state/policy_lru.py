"""Least recently used: the yardstick, and the floor that no other policy may fall below.

The order is kept lazily: a page found at the cold end with a mark younger than its place is put where the mark belongs
(each read moves a page at most once).
"""

from __future__ import annotations

from array import array

from kvstore.state.policy_base import GROW_SLOTS, MS_MAX, SLOT_MASK, STALE_MAX, Page, UsedMs, heap_pop, heap_push


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
