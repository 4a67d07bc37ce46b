"""Departures: how a page leaves its tier. Which one does, and why, others decide (``space``, ``quotas``, ...).

Only a page that nothing hangs on leaves. Where there is a tier below it is saved there first, or is not worth it::

    may_leave? ──yes──> leave, for each page of a decision ──> left: written down, once
              └──no───> set aside in ``ClassPool.unsaved``, until it is saved
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from kvstore.model.objects import is_object_class
from kvstore.model.replica import KEY_BYTES, Address
from kvstore.state import instructions as do
from kvstore.state.eviction import Page
from kvstore.state.eviction.base import Tail
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.interfaces import ChainRun
from kvstore.state.tier_pages import SEALED, Leaving, TierPages, Vacated

RUN_MAX = 64  # pages of a chain that leave together


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

    def leave(self, extent: Extent, frame: int, leaving: Leaving, most: int = 1) -> int:
        """This page leaves, that nothing hangs on and no lease holds; and with it pages before it in its chain, as many
        as the policy says, up to ``most`` in all. ``left`` has to follow. Returns how many left."""
        pages, pool = self.pages, extent.pool
        run = self._run(extent, frame, most) if most > 1 else None
        if run is None:
            key, root, parent_key = pages.records.lineage(extent.number, frame)
            keys, used_ns = [key], [pages.records.last_use_ns(extent.number, frame)]
            pool.forget(extent.slot_base + frame, int.from_bytes(key[:8], "little"))
        else:
            keys, used_ns = self._leave_run(extent, frame, run)
            _, root, parent_key = pages.records.lineage(extent.number, frame + 1 - len(keys))
        count = len(keys)
        front = frame + 1 - count
        for used, times in Counter(used_ns).items():
            age_s = max(0, pages.now_ns - used) // 10**9
            self.ages[age_s.bit_length()] += times
            self.ages_sum_s += times * age_s
        if self.below is not None:
            copies = (self.below.find_in(root, key) for key in keys)
            leaving.copies.extend((copy, used) for copy, used in zip(copies, used_ns, strict=True) if copy is not None)
        leaving.keys.extend(keys)
        leaving.roots.extend([root] * count)
        leaving.spans.extend(reversed(extent.span[front : frame + 1]))
        if count == 1:
            pages.vacate(Address(extent.number, frame, extent.generation[frame]), keys[0], leaving.vacated)
        else:
            pages.vacate_run(extent, range(front, frame + 1), leaving.vacated)
        parent = None if parent_key == root else self._before(extent, front, parent_key) or pages.find(parent_key)
        if parent is not None:
            pages.unhold(parent)
        return count

    def _run(self, extent: Extent, frame: int, most: int) -> ChainRun | None:
        """The records of this page, last, and of pages before it in its chain, in the frames before it, that nothing
        but the next one hangs on and no lease holds; at most ``most``. None where there is no such page before it."""
        pages, number, before = self.pages, extent.number, frame - 1
        if before < 0 or extent.children[before] != 1 or extent.state[before] != SEALED or pages.moved:
            return None
        if not extent.grants or is_object_class(extent.pool.frame_class):
            return None
        count = extent.alike(frame, min(most, RUN_MAX) - 1)
        run = pages.records.run(number, slice(frame - count, frame + 1))
        keys, parents = run.keys[:-KEY_BYTES], run.parents[KEY_BYTES:]
        if keys != parents:
            ends = range(len(keys), 0, -KEY_BYTES)
            linked = (keys[end - KEY_BYTES : end] == parents[end - KEY_BYTES : end] for end in ends)
            count = next(back for back, follows in enumerate(linked) if not follows)
        if len(pages.leases):
            held = (back for back in range(count) if pages.leases.holds(number, before - back))
            count = next(held, count)
        if self.below is not None:
            slots = range(extent.slot_base + before, extent.slot_base + before - count, -1)
            kept = (back for back, slot in enumerate(slots) if not self._may_leave(extent.pool, slot))
            count = next(kept, count)
        first = len(run.standings) - 1 - count
        return (
            run._replace(
                keys=run.keys[first * KEY_BYTES :], standings=run.standings[first:], used_ns=run.used_ns[first:]
            )
            if count
            else None
        )

    def _leave_run(self, extent: Extent, frame: int, run: ChainRun) -> tuple[list[bytes], list[int]]:
        """The keys and last uses of the pages that the policy lets go, the last of the chain first."""
        last = extent.slot_base + frame
        keys = [run.keys[start : start + KEY_BYTES] for start in range(0, len(run.keys), KEY_BYTES)]
        tail = Tail(
            range(last + 1 - len(keys), last + 1),
            [int.from_bytes(key[:8], "little") for key in keys],
            [used_ns // 1_000_000 for used_ns in run.used_ns],
            run.standings,
        )
        first = len(keys) - 1 - extent.pool.forget_tail(tail)
        return keys[first:][::-1], run.used_ns[first:][::-1]

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
        if slot not in pool.unsaved and not self._may_leave(pool, slot):
            pool.policy.remove(slot)
            pool.unsaved[slot] = self.pages.used_ms(pool, slot)
        return slot not in pool.unsaved

    def _may_leave(self, pool: ClassPool, slot: int) -> bool:
        assert self.below is not None
        extent, frame = pool.locate(slot)
        key = self.pages.records.key(extent.number, frame)
        return self.below.may_leave(pool, key, self.pages.page(pool, slot))
