"""Space: pages that come and go. Takes frames for new pages, and makes room by evicting and by moving.

A page that nothing hangs on leaves in this order, with no tier below (the upper path) and with one::

    policy ──coldest──────────────────────────────────────────────> gone
    policy ──coldest──> ready (saved, or not worth it) ────────────> gone from here
                   └──> unsaved ──``Below`` saves its chain──> ready

``ready`` and ``unsaved`` are in ``ClassPool``. A page that was used while it waited there goes back to the policy.
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

EVICT_STEP = 16  # pages taken from the coldest class before classes are compared again
SPARE_SHARE = 256  # one frame in this many may be freed in addition to what is short
CLOSED_MAX = 1024  # pages of failed devices that may leave in addition to those that make room
UNSAVED_MAX = 1024  # cold leaves of a class that may wait for being saved at a time


class Clears(Protocol):
    """Empties extents whose pages cannot be moved at once."""

    taker: ClassPool | None
    """For whom an extent is being emptied now; None: none is."""

    def begin(self, extent: Extent, taker: ClassPool, out: list[do.Instruction]) -> None:
        """Empty this extent, and drop it then."""
        ...


class Space:
    """Frames of one tier under closure. Part of ``NodeState``; every change leaves as instructions in ``out``.

    Attributes:
        pages: what the frames hold.
        departures: how pages leave.
        quotas: what tenants may add.
        clears: where pages take their time to move; None: they are moved at once.
        in_flight: extents whose pages must keep their addresses now.
        late: some devices do not answer now; what is free there may be had when they do.
    """

    def __init__(self, pages: TierPages) -> None:
        self.tier, self.segment = pages.tier, pages.segment
        self.pages = pages
        self.departures = Departures(pages)
        self.quotas = Quotas(pages, self.departures)
        self.clears: Clears | None = None
        self.in_flight: Callable[[], set[int]] = set
        self.late = False
        self._stolen = False  # once per event: what was moved is in no record yet and must not be evicted by it

    def begin(self, now_ns: int) -> None:
        """A new event: all earlier instructions were performed."""
        self.pages.begin(now_ns)
        self.departures.waiting = False
        self._stolen = False

    # --- taking -----------------------------------------------------------------------------------------------------

    def take(self, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """Up to ``count`` frames, RESERVED under new generations: free ones, else a fresh extent, else by eviction."""
        pool.used_ns = self.pages.now_ns
        if pool.frames_per_extent == 0:
            return []
        while (short := count - pool.free) > 0:
            position = self.segment.next_vacant(pool)
            if position is not None:
                self._carve(pool, position, out)
            elif not self.segment.may_carve(pool) or not self._steal(pool, out):
                if self.clears is None or self.clears.taker is not pool:  # else there is room when that is done
                    self._evict_from(pool, short, "space", out, pool.frames // SPARE_SHARE)
                self.departures.waiting = self.departures.waiting or (self.late and count > pool.free)
                break
        return self.pages.grant(pool, count)

    def take_after(
        self, anchors: Iterable[bytes], pool: ClassPool, count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """``take``, and the pages of these keys, on which new ones will hang, are not evicted to make room."""
        with self.keeping(anchors):
            return self.take(pool, count, out)

    @contextlib.contextmanager
    def keeping(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Inside, the pages of these keys are not evicted."""
        held: list[bytes] = []
        for key in keys:
            page = self.pages.find(key) if key else None
            if page is not None:
                self.pages.hold(page)
                held.append(key)
        yield
        for key in held:
            page = self.pages.find(key)
            assert page is not None  # held; to make room it may have moved
            self.pages.unhold(page)

    def extents_wanted(self, pool: ClassPool, count: int) -> int:
        """The most extents that ``take`` would carve now for that many frames."""
        short = count - pool.free
        if short <= 0 or pool.frames_per_extent == 0:
            return 0
        wanted, there = -(-short // pool.frames_per_extent), len(self.segment.vacant & self.segment.populated)
        if wanted > there and len(self.segment.extents) > len(pool.extents):
            there += max(1, len(self.segment.empty(pool, self.pages.now_ns)))  # taken from another class
        return min(wanted, there)

    def could_take(self, pool: ClassPool) -> bool:
        """``take`` would find a frame, as far as can be told without evicting and moving."""
        if pool.free or self.segment.next_vacant(pool) is not None or pool.policy.coldest_ms() is not None:
            return True
        kept = self.pages.leases.extents() | self.in_flight()
        return (
            self.segment.may_carve(pool)
            and self.segment.donor(pool, self._coldest_ns, kept, self.pages.now_ns) is not None
        )

    def _carve(self, pool: ClassPool, position: int, out: list[do.Instruction]) -> None:
        extent = self.segment.carve(pool, position)
        out.append(do.Carve(extent.number, position, pool.frame_class, extent.frames, self.tier))

    def _steal(self, pool: ClassPool, out: list[do.Instruction]) -> bool:
        """Empty an extent of another class: evict as many of that class's coldest pages, move what is left. One in
        which something lies only once per event."""
        leased, flying = self.pages.leases.extents(), self.in_flight()
        if self.clears is not None and self.clears.taker is not None:
            self.departures.waiting = True
            return False
        extent = self.segment.donor(pool, self._coldest_ns, leased | flying, self.pages.now_ns)
        if extent is not None and extent.sealed and self._stolen:
            return False
        if extent is None:
            if flying and self.segment.donor(pool, self._coldest_ns, leased, self.pages.now_ns) is not None:
                self.departures.waiting = True
            return False
        giver = extent.pool
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            self._evict_from(giver, extent.sealed - room, "reclaim", out)
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            return False
        self._stolen = self._stolen or extent.sealed > 0
        if self.clears is not None:
            self.clears.begin(extent, pool, out)
            self.departures.waiting = self.clears.taker is not None
            return not self.departures.waiting
        extent.leave(True)
        for frame in [f for f in range(extent.frames) if extent.state[f] == SEALED]:
            self.pages.move(Address(extent.number, frame, extent.generation[frame]), self.pages.grant(giver, 1)[0], out)
        self.drop_extent(extent, out)
        return True

    def drop_extent(self, extent: Extent, out: list[do.Instruction]) -> None:
        """All frames of this extent are free: its position is vacant again."""
        self.segment.uncarve(extent)
        out.append(do.Drop(extent.number))
        self.pages.counters["extents_reclaimed"] += 1

    # --- evicting ---------------------------------------------------------------------------------------------------

    def _coldest_ns(self, pool: ClassPool) -> int | None:
        aside = (next(iter(slots.values()), None) for slots in (pool.ready, pool.unsaved))
        known = [used_ms for used_ms in (pool.policy.coldest_ms(), *aside) if used_ms is not None]
        return min(min(known) * 1_000_000, self.pages.now_ns) if known else None

    def evict(self, pages: int, size: int, out: list[do.Instruction]) -> tuple[int, int]:
        """An operator's wish: that many pages, or bytes, coldest class first. Returns (pages, bytes) gone."""
        gone_pages = gone_bytes = 0
        pools = list(self.segment.pools.values())
        while gone_pages < pages or gone_bytes < size:
            pools = [pool for pool in pools if self._coldest_ns(pool) is not None]
            pool = min(pools, key=lambda pool: self._coldest_ns(pool) or 0, default=None)
            if pool is None:
                break
            page_bytes = pool.frame_class.page_bytes
            want = max(pages - gone_pages, -(-(size - gone_bytes) // page_bytes))
            gone = self._evict_from(pool, min(want, EVICT_STEP if len(pools) > 1 else want), "request", out)
            if not gone:
                pools.remove(pool)  # what is left of it is leased, or has to be saved first
            gone_pages += gone
            gone_bytes += gone * page_bytes
        return gone_pages, gone_bytes

    def _evict_from(self, pool: ClassPool, count: int, reason: str, out: list[do.Instruction], spare: int = 0) -> int:
        """Evict up to ``count`` pages without children, by the policy; leased ones are passed over once each. Up to
        ``spare`` more leave where the tail of a chain would otherwise be cut: consecutive frames stay together.

        Pages of a device that takes no writes leave in their turn, but make no room: a bounded number at a time. As
        many of a device that does not answer now are passed over: there would be no room before it does. Where it is
        the last one that takes writes, nothing leaves.
        """
        if self.late and all(extent.closed or extent.late for extent in pool.extents.values()):
            return 0
        leaving = self.departures.leaving()
        leased: list[int] = []
        room = late = 0
        while room < count and len(leaving.keys) + late < count + CLOSED_MAX:
            slot = self._next_to_leave(pool, min(UNSAVED_MAX, count + EVICT_STEP))
            if slot is None:
                break
            extent, frame = pool.locate(slot)
            if extent.late or self.pages.leases.holds(extent.number, frame):
                leased.append(slot)
                late += extent.late
                continue
            left = self.departures.leave(extent, frame, leaving, count + spare - room)
            room += 0 if extent.closed else left
        for slot in leased:
            pool.offer(slot, self.pages.page(pool, slot)._replace(used_ms=self.pages.now_ns // 1_000_000))
        self.departures.left(leaving, reason, out)
        if room < count and self.departures.below is not None and self.departures.below.coming(pool):
            self.departures.waiting = True
        return room

    def evict_for(self, pool: ClassPool, count: int, out: list[do.Instruction]) -> None:
        """Make room for pages of this class that move."""
        self._evict_from(pool, count, "reclaim", out)

    def _next_to_leave(self, pool: ClassPool, unsaved_max: int) -> int | None:
        """The next page that may leave at once, offered no more; None where there is none.

        Colder ones that have to be saved first are set aside on the way, until ``unsaved_max`` are.
        """
        while pool.ready:
            slot, aside_ms = next(iter(pool.ready.items()))
            del pool.ready[slot]
            if self.pages.used_ms(pool, slot) <= aside_ms:
                return slot
            pool.offer(slot, self.pages.page(pool, slot))  # used since: it stays
        if self.departures.below is None:
            coldest = self._coldest(pool)
            if coldest is not None:
                pool.policy.remove(coldest)
            return coldest
        while len(pool.unsaved) < unsaved_max:
            cold = self.next_cold(pool)
            if cold is None or pool.ready.pop(cold, None) is not None:
                return cold
        return None

    def next_cold(self, pool: ClassPool) -> int | None:
        """Take the coldest page out of the policy, into ``pool.ready`` or ``pool.unsaved``. None: there is none."""
        assert self.departures.below is not None
        slot = self._coldest(pool)
        if slot is None:
            return None
        pool.policy.remove(slot)
        extent, frame = pool.locate(slot)
        page = self.pages.page(pool, slot)
        free_to_go = self.departures.below.may_leave(pool, self.pages.records.key(extent.number, frame), page)
        (pool.ready if free_to_go else pool.unsaved)[slot] = page.used_ms
        return slot

    def reconsider(self, keys: set[bytes]) -> None:
        """The tier below lost these pages: those that are ready to leave have to be saved again."""
        for pool in self.segment.pools.values():
            for slot in list(pool.ready):
                extent, frame = pool.locate(slot)
                if self.pages.records.key(extent.number, frame) in keys:
                    del pool.ready[slot]
                    pool.offer(slot, self.pages.page(pool, slot))

    def _coldest(self, pool: ClassPool) -> int | None:
        return pool.policy.victim(lambda slot: self.pages.used_ms(pool, slot), self.pages.now_ns // 1_000_000)
