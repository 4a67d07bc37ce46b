"""Space: the frames of one tier. It takes frames for new pages, and makes room by evicting and by moving pages.

Only a page without children may leave. The first line is for the lowest tier, the others are for all other tiers::

    policy ──coldest──────────────────────────────────────────────> evicted
    policy ──coldest──> ready (saved, or not worth saving) ────────> evicted from this tier
                   └──> unsaved ──``TierBelow`` saves its chain──> ready

``ready`` and ``unsaved`` are fields of ``ClassPool``. A page that is used while it waits there returns to the policy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from kvstore.model.replica import Address
from kvstore.state import instructions as do
from kvstore.state.departures import Departures
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.quotas import Quotas
from kvstore.state.tier_pages import SEALED, TierPages

EVICT_STEP = 16  # pages to evict from the coldest class before the classes are compared again
SPARE_SHARE = 256  # an eviction may free one frame in this many, in addition to the frames that were missing
CLOSED_MAX = 1024  # how many pages on failed devices may leave in addition to those that make room
UNSAVED_MAX = 1024  # how many cold leaves of a class may wait for their save at a time


class ExtentEmptier(Protocol):
    """A part that empties extents whose pages cannot be moved within one decision."""

    taker: ClassPool | None
    """The class that will get the extent that is being emptied; None if no extent is being emptied."""

    def start(self, extent: Extent, taker: ClassPool, out: list[do.Instruction]) -> None:
        """Start emptying this extent. It is dropped once it is empty."""
        ...


class Space:
    """The frames of one tier under prefix closure. Part of ``NodeState``; all changes are instructions in ``out``.

    Attributes:
        pages: what the frames hold.
        departures: how pages leave.
        quotas: what tenants may add.
        emptier: empties extents of a tier whose pages take long to move. None if pages move within a decision.
        extents_in_flight: returns the extents whose pages must keep their addresses now.
        late: some devices are not responding; their free frames can be used once they respond again.
    """

    def __init__(self, pages: TierPages) -> None:
        self.tier, self.segment = pages.tier, pages.segment
        self.pages = pages
        self.departures = Departures(pages)
        self.quotas = Quotas(pages, self.departures)
        self.emptier: ExtentEmptier | None = None
        self.extents_in_flight: Callable[[], set[int]] = set
        self.late = False
        self._has_stolen = False  # one extent per event: pages moved by this event have no record yet to be evicted by

    def begin(self, now_ns: int) -> None:
        """Start an event. All instructions of earlier events have been performed."""
        self.pages.begin(now_ns)
        self.departures.waiting = False
        self._has_stolen = False

    # --- taking -----------------------------------------------------------------------------------------------------

    def take(self, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """Take up to ``count`` frames, RESERVED under new generations: free frames, frames of a new extent, or frames
        of evicted pages."""
        pool.used_ns = self.pages.now_ns
        if pool.frames_per_extent == 0:
            return []
        while (short := count - pool.free) > 0:
            position = self.segment.next_vacant(pool)
            if position is not None:
                self._carve(pool, position, out)
            elif not self.segment.may_carve(pool) or not self._steal(pool, out):
                if self.emptier is None or self.emptier.taker is not pool:  # else the emptied extent will have room
                    self._evict_from(pool, short, "space", out, pool.frames // SPARE_SHARE)
                self.departures.waiting = self.departures.waiting or (self.late and count > pool.free)
                break
        return self.pages.grant(pool, count)

    def take_after(
        self, anchors: Iterable[bytes], pool: ClassPool, count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """Take frames as ``take`` does, without evicting the pages of these keys: new pages will follow them."""
        with self.holding(anchors):
            return self.take(pool, count, out)

    @contextlib.contextmanager
    def holding(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Hold the pages of these keys inside the context, so that they are not evicted."""
        held: list[bytes] = []
        for key in keys:
            page = self.pages.find(key) if key else None
            if page is not None:
                self.pages.hold(page)
                held.append(key)
        yield
        for key in held:
            page = self.pages.find(key)
            assert page is not None  # a held page is not evicted, but may have moved
            self.pages.unhold(page)

    def extents_needed(self, pool: ClassPool, count: int) -> int:
        """Return how many extents ``take`` might have to carve now to get ``count`` frames."""
        short = count - pool.free
        if short <= 0 or pool.frames_per_extent == 0:
            return 0
        needed, available = -(-short // pool.frames_per_extent), len(self.segment.vacant & self.segment.populated)
        if needed > available and len(self.segment.extents) > len(pool.extents):
            available += max(1, len(self.segment.empty(pool, self.pages.now_ns)))  # taken from another class
        return min(needed, available)

    def can_take(self, pool: ClassPool) -> bool:
        """Return True if ``take`` would probably get a frame. Nothing is evicted or moved to find out."""
        if pool.free or self.segment.next_vacant(pool) is not None or pool.policy.coldest_ms() is not None:
            return True
        fixed = self.pages.leases.extents() | self.extents_in_flight()
        return (
            self.segment.may_carve(pool)
            and self.segment.donor(pool, self._coldest_ns, fixed, self.pages.now_ns) is not None
        )

    def _carve(self, pool: ClassPool, position: int, out: list[do.Instruction]) -> None:
        extent = self.segment.carve(pool, position)
        out.append(do.Carve(extent.number, position, pool.frame_class, extent.frames, self.tier))

    def _steal(self, pool: ClassPool, out: list[do.Instruction]) -> bool:
        """Take an extent from another class; return True if its position is vacant.

        The other class evicts its coldest pages until the remaining pages of the extent fit elsewhere; these are
        moved. At most one extent with pages is taken per event.
        """
        leased, in_flight = self.pages.leases.extents(), self.extents_in_flight()
        if self.emptier is not None and self.emptier.taker is not None:
            self.departures.waiting = True
            return False
        extent = self.segment.donor(pool, self._coldest_ns, leased | in_flight, self.pages.now_ns)
        if extent is not None and extent.sealed and self._has_stolen:
            return False
        if extent is None:
            if in_flight and self.segment.donor(pool, self._coldest_ns, leased, self.pages.now_ns) is not None:
                self.departures.waiting = True
            return False
        giver = extent.pool
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            self._evict_from(giver, extent.sealed - room, "reclaim", out)
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            return False
        self._has_stolen = self._has_stolen or extent.sealed > 0
        if self.emptier is not None:
            self.emptier.start(extent, pool, out)
            self.departures.waiting = self.emptier.taker is not None
            return not self.departures.waiting
        extent.set_leaving(True)
        for frame in [f for f in range(extent.frames) if extent.state[f] == SEALED]:
            self.pages.move(Address(extent.number, frame, extent.generation[frame]), self.pages.grant(giver, 1)[0], out)
        self.drop_extent(extent, out)
        return True

    def drop_extent(self, extent: Extent, out: list[do.Instruction]) -> None:
        """Drop an extent whose frames are all free, so that its position is vacant again."""
        self.segment.uncarve(extent)
        out.append(do.Drop(extent.number))
        self.pages.counters["extents_reclaimed"] += 1

    # --- evicting ---------------------------------------------------------------------------------------------------

    def _coldest_ns(self, pool: ClassPool) -> int | None:
        aside = (next(iter(slots.values()), None) for slots in (pool.ready, pool.unsaved))
        times_ms = [used_ms for used_ms in (pool.policy.coldest_ms(), *aside) if used_ms is not None]
        return min(min(times_ms) * 1_000_000, self.pages.now_ns) if times_ms else None

    def evict(self, pages: int, size: int, out: list[do.Instruction]) -> tuple[int, int]:
        """Evict this number of pages or bytes for an operator, coldest class first. Return how much was evicted:
        (pages, bytes)."""
        evicted_pages = evicted_bytes = 0
        pools = list(self.segment.pools.values())
        while evicted_pages < pages or evicted_bytes < size:
            pools = [pool for pool in pools if self._coldest_ns(pool) is not None]
            pool = min(pools, key=lambda pool: self._coldest_ns(pool) or 0, default=None)
            if pool is None:
                break
            page_bytes = pool.frame_class.page_bytes
            want = max(pages - evicted_pages, -(-(size - evicted_bytes) // page_bytes))
            evicted = self._evict_from(pool, min(want, EVICT_STEP if len(pools) > 1 else want), "request", out)
            if not evicted:
                pools.remove(pool)  # its remaining pages are leased, or have to be saved first
            evicted_pages += evicted
            evicted_bytes += evicted * page_bytes
        return evicted_pages, evicted_bytes

    def _evict_from(self, pool: ClassPool, count: int, reason: str, out: list[do.Instruction], spare: int = 0) -> int:
        """Evict up to ``count`` pages without children, in the policy's order. Return how many frames are free then.

        Each leased page is passed over once. Up to ``spare`` more pages leave if otherwise the end of a chain would be
        cut, so that pages in consecutive frames stay together.

        Pages on a device that accepts no more writes leave in their turn, at most ``CLOSED_MAX`` of them, but make no
        room. Pages on a device that is not responding are passed over (also at most ``CLOSED_MAX``): they make no room
        until the device responds. If no other device accepts writes, no page leaves.
        """
        if self.late and all(extent.closed or extent.late for extent in pool.extents.values()):
            return 0
        leaving = self.departures.new_batch()
        passed_over: list[int] = []
        room = late = 0
        while room < count and len(leaving.keys) + late < count + CLOSED_MAX:
            slot = self._next_to_leave(pool, min(UNSAVED_MAX, count + EVICT_STEP))
            if slot is None:
                break
            extent, frame = pool.locate(slot)
            if extent.late or self.pages.leases.holds(extent.number, frame):
                passed_over.append(slot)
                late += extent.late
                continue
            evicted = self.departures.leave(extent, frame, leaving, count + spare - room)
            room += 0 if extent.closed else evicted
        for slot in passed_over:
            pool.offer(slot, self.pages.page(pool, slot)._replace(used_ms=self.pages.now_ns // 1_000_000))
        self.departures.finish(leaving, reason, out)
        if room < count and self.departures.below is not None and self.departures.below.is_saving(pool):
            self.departures.waiting = True
        return room

    def evict_for_move(self, pool: ClassPool, count: int, out: list[do.Instruction]) -> None:
        """Make room for pages of this class that have to move."""
        self._evict_from(pool, count, "reclaim", out)

    def _next_to_leave(self, pool: ClassPool, unsaved_max: int) -> int | None:
        """Take the next page that may leave at once out of the policy, or return None if there is none.

        Colder pages that have to be saved first are set aside on the way, until ``unsaved_max`` pages are waiting.
        """
        while pool.ready:
            slot, aside_ms = next(iter(pool.ready.items()))
            del pool.ready[slot]
            if self.pages.used_ms(pool, slot) <= aside_ms:
                return slot
            pool.offer(slot, self.pages.page(pool, slot))  # used in the meantime: it stays
        if self.departures.below is None:
            coldest = self._coldest(pool)
            if coldest is not None:
                pool.policy.remove(coldest)
            return coldest
        while len(pool.unsaved) < unsaved_max:
            cold = self.set_coldest_aside(pool)
            if cold is None or pool.ready.pop(cold, None) is not None:
                return cold
        return None

    def set_coldest_aside(self, pool: ClassPool) -> int | None:
        """Move the coldest page from the policy to ``pool.ready`` or ``pool.unsaved``, and return its slot, if any."""
        assert self.departures.below is not None
        slot = self._coldest(pool)
        if slot is None:
            return None
        pool.policy.remove(slot)
        extent, frame = pool.locate(slot)
        page = self.pages.page(pool, slot)
        may_leave = self.departures.below.may_leave(pool, self.pages.records.key(extent.number, frame), page)
        (pool.ready if may_leave else pool.unsaved)[slot] = page.used_ms
        return slot

    def reconsider(self, keys: set[bytes]) -> None:
        """Offer the ready pages with these keys to the policy again: the tier below has lost their copies."""
        for pool in self.segment.pools.values():
            for slot in list(pool.ready):
                extent, frame = pool.locate(slot)
                if self.pages.records.key(extent.number, frame) in keys:
                    del pool.ready[slot]
                    pool.offer(slot, self.pages.page(pool, slot))

    def _coldest(self, pool: ClassPool) -> int | None:
        return pool.policy.victim(lambda slot: self.pages.used_ms(pool, slot), self.pages.now_ns // 1_000_000)
