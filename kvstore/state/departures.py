"""Departures: how a page leaves its tier. Which one does, and why, others decide (``space``, ``quotas``, ...).

Only a page that nothing hangs on leaves. Where there is a tier below it is saved there first, or is not worth it::

    may_leave? ──yes──> leave, for each page of a decision ──> left: written down, once
              └──no───> set aside in ``ClassPool.unsaved``, until it is saved
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvstore.model.replica import Address
from kvstore.state import instructions as do
from kvstore.state.eviction import Page
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.tier_pages import SEALED, Leaving, TierPages, Vacated


class Below(Protocol):
    """The tier below, as a tier needs it."""

    def may_leave(self, pool: ClassPool, key: bytes, page: Page) -> bool:
        """The page is saved there, or not worth it, or cannot be; otherwise it has to be saved first."""
        ...

    def find_in(self, root: bytes, key: bytes) -> Address | None:
        """Its copy of the page."""
        ...

    def coming(self, pool: ClassPool) -> bool:
        """Pages of this class wait for being saved, or are on their way: frames may be free soon."""
        ...

    def held(self) -> list[Address]:
        """Pages that may not leave while they, or what will hang on them, are on their way."""
        ...


class Departures:
    """How a page leaves its tier. Part of ``Space``.

    Attributes:
        below: the tier that pages are saved to before they leave; None: those that leave are gone.
        ages: pages that left, by the bit length of the whole seconds since their last use; ``ages_sum_s`` of them all.
        waiting: in this event frames were short that may be free soon, when pages on their way have arrived.
    """

    def __init__(self, pages: TierPages) -> None:
        self.pages = pages
        self.below: Below | None = None
        self.ages: Counter[int] = Counter()
        self.ages_sum_s = 0
        self.waiting = False

    def leaving(self) -> Leaving:
        """Pages that leave by one decision, none yet."""
        return Leaving(Vacated(), [], [], [], [])

    def leave(self, extent: Extent, frame: int, leaving: Leaving) -> None:
        """This page, that nothing hangs on and no lease holds, leaves. ``left`` has to follow."""
        pool = extent.pool
        key, root, parent_key = self.pages.records.lineage(extent.number, frame)
        used_ns = self.pages.records.last_use_ns(extent.number, frame)
        age_s = max(0, self.pages.now_ns - used_ns) // 10**9
        self.ages[age_s.bit_length()] += 1
        self.ages_sum_s += age_s
        copy = self.below.find_in(root, key) if self.below is not None else None
        if copy is not None:
            leaving.copies.append((copy, used_ns))
        leaving.keys.append(key)
        leaving.roots.append(root)
        leaving.spans.append(extent.span[frame])
        pool.forget(extent.slot_base + frame, int.from_bytes(key[:8], "little"))
        self.pages.vacate(Address(extent.number, frame, extent.generation[frame]), key, leaving.vacated)
        parent = None if parent_key == root else self._before(extent, frame, parent_key) or self.pages.find(parent_key)
        if parent is not None:
            self.pages.unhold(parent)

    def _before(self, extent: Extent, frame: int, key: bytes) -> Address | None:
        """The page of that key, on which one in ``frame`` hangs, where it is just before that one, as it usually is:
        the index need not be asked."""
        before = frame - 1
        if self.pages.moved or before < 0 or extent.state[before] != SEALED or not extent.children[before]:
            return None
        if self.pages.records.key(extent.number, before) != key:
            return None
        return Address(extent.number, before, extent.generation[before])

    def left(self, leaving: Leaving, reason: str, out: list[do.Instruction]) -> None:
        """Write down what ``leave`` decided."""
        copies = leaving.copies
        if copies:
            out.append(do.WriteUse([copy for copy, _ in copies], [used_ns for _, used_ns in copies]))
            self.pages.counters["demoted"] += len(copies)
        if leaving.keys:
            self.pages.vacated(leaving.vacated, out)
            self.waiting |= bool(leaving.vacated.wiped)
            out.append(do.Unindex(leaving.keys, self.pages.tier, "evicted", reason, leaving.roots, leaving.spans))
            self.pages.counters[f"evicted_{reason}"] += len(leaving.keys) - len(copies)

    def may_leave(self, pool: ClassPool, slot: int) -> bool:
        """A page that nothing hangs on may leave at once; otherwise it is set aside to be saved first."""
        if self.below is None or slot in pool.ready:
            return True
        extent, frame = pool.locate(slot)
        page = self.pages.page(pool, slot)
        if slot not in pool.unsaved and not self.below.may_leave(
            pool, self.pages.records.key(extent.number, frame), page
        ):
            pool.policy.remove(slot)
            pool.unsaved[slot] = page.used_ms
        return slot not in pool.unsaved
