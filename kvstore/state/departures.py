"""Departures: how a page leaves its tier. Other parts decide which page leaves, and why (``space``, ``quotas``).

Only a page without children leaves. If there is a tier below, the page is saved there first, unless it is not worth a
write::

    may_leave? ──yes──> leave, for each page of a decision ──> finish: write the instructions, once
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

RUN_MAX = 64  # pages of a chain that may leave together


class TierBelow(Protocol):
    """The part of the tier below that a tier needs."""

    def may_leave(self, pool: ClassPool, key: bytes, page: Page) -> bool:
        """Return True if the lower tier has the page, or the page is not worth a write or cannot be saved."""
        ...

    def find_in(self, root: bytes, key: bytes) -> Address | None:
        """Return the address of the page's copy in the lower tier; None if there is none."""
        ...

    def is_saving(self, pool: ClassPool) -> bool:
        """Return True if pages of this class wait for a save or are being copied: frames may be free soon."""
        ...

    def held_pages(self) -> list[Address]:
        """Return the pages that must stay because they, or pages that will follow them, are being copied."""
        ...


class Departures:
    """The removal of pages from a tier. Part of ``Space``.

    Attributes:
        below: the lower tier, to which pages are saved before they leave. If it is None, pages that leave are lost.
        ages: number of removed pages, by the bit length of the whole seconds since their last use.
        ages_sum_s: sum of these seconds over all removed pages.
        waiting: this event found too few frames, but more might become free once copies or erasures have ended.
    """

    def __init__(self, pages: TierPages) -> None:
        self.pages = pages
        self.below: TierBelow | None = None
        self.ages: Counter[int] = Counter()
        self.ages_sum_s = 0
        self.waiting = False

    def new_batch(self) -> Leaving:
        """Return an empty batch for the pages that one decision removes."""
        return Leaving(Vacated(), [], [], [], [])

    def leave(self, extent: Extent, frame: int, leaving: Leaving, most: int = 1) -> int:
        """Remove a page that has no children and no lease, and return how many pages were removed.

        The policy decides how many earlier pages of its chain are removed with it, up to ``most`` pages in all. The
        caller has to call ``finish`` afterwards.
        """
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
        """Return the records of this page and of pages before it in its chain; the page itself comes last.

        The earlier pages are in the frames just before it, have no other child, and no lease; the result has at most
        ``most`` pages. Return None if there is no such earlier page.
        """
        pages, number, before = self.pages, extent.number, frame - 1
        if before < 0 or extent.children[before] != 1 or extent.state[before] != SEALED or pages.moved:
            return None
        if not extent.grants or is_object_class(extent.pool.frame_class):
            return None
        count = extent.similar_before(frame, min(most, RUN_MAX) - 1)
        run = pages.records.run(number, slice(frame - count, frame + 1))
        keys, parents = run.keys[:-KEY_BYTES], run.parents[KEY_BYTES:]
        if keys != parents:
            ends = range(len(keys), 0, -KEY_BYTES)
            is_linked = (keys[end - KEY_BYTES : end] == parents[end - KEY_BYTES : end] for end in ends)
            count = next(back for back, linked in enumerate(is_linked) if not linked)
        if len(pages.leases):
            leased = (back for back in range(count) if pages.leases.holds(number, before - back))
            count = next(leased, count)
        if self.below is not None:
            slots = range(extent.slot_base + before, extent.slot_base + before - count, -1)
            unsaved = (back for back, slot in enumerate(slots) if not self._may_leave(extent.pool, slot))
            count = next(unsaved, count)
        first = len(run.standings) - 1 - count
        return (
            run._replace(
                keys=run.keys[first * KEY_BYTES :], standings=run.standings[first:], used_ns=run.used_ns[first:]
            )
            if count
            else None
        )

    def _leave_run(self, extent: Extent, frame: int, run: ChainRun) -> tuple[list[bytes], list[int]]:
        """Remove the pages that the policy gives up. Return their keys and last uses, with the last page of the chain
        first."""
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
        """Return the page with key ``key``, the parent of the page in ``frame``, if it is in the preceding frame.

        It usually is, and this saves an index lookup. Return None otherwise.
        """
        before = frame - 1
        if self.pages.moved or before < 0 or extent.state[before] != SEALED or not extent.children[before]:
            return None
        if self.pages.records.key(extent.number, before) != key:
            return None
        return Address(extent.number, before, extent.generation[before])

    def finish(self, leaving: Leaving, reason: str, out: list[do.Instruction]) -> None:
        """Write the instructions for the pages that ``leave`` has removed."""
        copies = leaving.copies
        if copies:
            out.append(do.WriteUse([copy for copy, _ in copies], [used_ns for _, used_ns in copies]))
            self.pages.counters["demoted"] += len(copies)
        if leaving.keys:
            self.pages.write_vacated(leaving.vacated, out)
            self.waiting |= bool(leaving.vacated.to_erase)
            out.append(do.Unindex(leaving.keys, self.pages.tier, "evicted", reason, leaving.roots, leaving.spans))
            self.pages.counters[f"evicted_{reason}"] += len(leaving.keys) - len(copies)

    def may_leave(self, pool: ClassPool, slot: int) -> bool:
        """Return True if a page without children may leave at once. Otherwise set it aside, to be saved first."""
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
