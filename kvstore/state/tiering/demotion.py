"""Demotion: which pages of a tier are saved to the tier below, and when.

A leaf that is about to leave waits in ``ClassPool.unsaved``. Its chain is saved from the front, so that the pages on
disk are usable after a reboot. The pages from the leaf up to the first one that the tier below has are looked up once.
Then they are taken from the front end, as many per batch as it may have::

    below has  A B        climb, leaf first:  F E D C       batches:  C D | E F
    above has  A B C D E F

The frame classes take turns, one batch each. Only one batch is saved at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from kvstore.model.replica import Address, FrameClass
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.eviction import Page
from kvstore.state.frames import ClassPool
from kvstore.state.interfaces import TieringRules
from kvstore.state.space import UNSAVED_MAX, Space
from kvstore.state.tiering.copying import CopyBatch, CopyBatches

ADMISSIONS = ("all", "reused")
AHEAD_SHARE = 8  # one frame in this many, of a class, is kept ready to leave
LEAVES_PER_STEP = 256  # cold leaves to look at per class and step
CLIMB_MAX = 4096  # pages of one chain to look at per step; longer chains take several steps


class Climb:
    """The pages from a leaf up to the first page of its chain that the tier below has, or gets with this batch.

    Attributes:
        pages: (key, address) of each page, the leaf first.
        anchor: key of the last one's parent, which the tier below has; b"" if the last one starts the chain.
    """

    def __init__(self, leaf: Address, upper: Space, lower: Space, down: Collection[bytes]) -> None:
        self.leaf = leaf
        self.pages: list[tuple[bytes, Address]] = []
        self.anchor = b""
        self._upper, self._lower = upper, lower
        self._down = down  # keys that are being saved to the tier below
        self._next: Address | None = leaf

    def proceed(self) -> bool:
        """Look at up to ``CLIMB_MAX`` more pages; return True once the top is reached."""
        upper, records = self._upper, self._upper.pages.records
        for _ in range(CLIMB_MAX):
            if self._next is None:
                break
            extent, frame, _ = self._next
            key, root, parent = records.lineage(extent, frame)
            if self._is_below(key):
                self.anchor, self._next = key, None
                if key not in self._down and self._lower.pages.find_in(root, key) is None:
                    self.pages.clear()  # a page of another root has this key there: our pages cannot follow it
                break
            self.pages.append((key, self._next))
            self._next = None if parent == root else upper.pages.find(parent)
        return self._next is None

    def is_valid(self) -> bool:
        """Return True if the pages of earlier steps are still valid. Drop pages that another chain's save included."""
        while self.pages and self._is_below(self.pages[-1][0]):
            self.anchor = self.pages.pop()[0]
        top = self.pages[-1][1] if self.pages else self.leaf
        can_continue = self._next is None or self._upper.pages.sealed(self._next)
        return can_continue and self._upper.pages.sealed(top) and (not self.anchor or self._is_below(self.anchor))

    def count(self, most: int) -> int:
        """Return how many of the topmost pages, up to ``most``, are still at their addresses. The result is at least 1
        if there are pages."""
        top = self.pages[: -most - 1 : -1]
        return next((i for i, (_, address) in enumerate(top) if not self._upper.pages.sealed(address)), len(top))

    def take(self, count: int) -> list[tuple[bytes, Address]]:
        """Remove the topmost ``count`` pages and return them, parents first."""
        taken = [self.pages.pop() for _ in range(count)]
        self.anchor = taken[-1][0]
        return taken

    def _is_below(self, key: bytes) -> bool:
        return key in self._down or self._lower.pages.find(key) is not None


class Demotion:
    """The decisions about saves. Part of ``Tiering``; it is also the ``departures.TierBelow`` of the upper tier."""

    def __init__(
        self, copies: CopyBatches, upper: Space, lower: Space, counters: Counter[str], rules: TieringRules
    ) -> None:
        self.copies = copies
        self.upper = upper
        self.lower = lower
        self.counters = counters
        self.rules = rules
        self.find_in = self.lower.pages.find_in  # see ``departures.TierBelow``
        self._climb: Climb | None = None  # of a chain that was too long for one batch
        self._refused: set[FrameClass] = set()  # classes for which no frame in the lower tier is free or can be freed
        self._tails: dict[FrameClass, dict[int, int]] = {}  # by slot of a leaf set aside: see ``_tail_pages``
        self._turn = 0  # place of the class to look at first
        self._day_bytes_left = rules.write_bytes_per_day
        self._day_bytes_started = 0  # bytes of the copies that have started: see ``charge``

    # --- for the upper tier: see ``departures.TierBelow`` -----------------------------------------------------------

    def may_leave(self, pool: ClassPool, key: bytes, page: Page) -> bool:
        """Return True if the lower tier has the page, or the page is not worth a write or cannot be saved."""
        return not self.admits(page) or self.lower.pages.find(key) is not None or not self.accepts(pool.frame_class)

    def admits(self, page: Page) -> bool:
        """Return True if the page is worth a write."""
        return self.rules.admission == "all" or page.turns > 0

    def is_saving(self, pool: ClassPool) -> bool:
        """Return True if pages of this class wait for a save or are being copied."""
        return bool(pool.unsaved) or self.copies.is_moving(pool.frame_class, self.upper)

    def held_pages(self) -> list[Address]:
        """Return the pages of the upper tier that are held for copies."""
        return self.copies.held_pages(self.upper)

    @property
    def writable(self) -> bool:
        """True if a device accepts writes, and today's writes are not used up."""
        if self.rules.write_bytes_per_day and self._day_bytes_left <= 0:
            return False
        segment = self.lower.segment
        return bool(segment.vacant) or any(not extent.closed for extent in segment.extents.values())

    def accepts(self, frame_class: FrameClass) -> bool:
        """Return True if the tier below accepts pages of this class.

        A page must fit into an extent and into today's writes, and there must be room for it.
        """
        capped = self.rules.write_bytes_per_day and self._day_bytes_left < self.lower.segment.stride(frame_class)
        fits = self.lower.segment.frames_per_extent(frame_class) > 0 and frame_class not in self._refused
        return fits and self.writable and not capped

    # --- deciding ---------------------------------------------------------------------------------------------------

    def demote(self, event: ev.Demote) -> list[do.Instruction]:
        """Handle ``events.Demote``. At most one batch is being saved at a time, apart from late ones."""
        out: list[do.Instruction] = []
        self.begin_day(event.day_bytes_left)
        pools = list(enumerate(self.upper.segment.pools.values()))
        for place, pool in pools[self._turn :] + pools[: self._turn]:
            if pool.frame_class in self._refused and self._has_room(pool.frame_class):
                self._refused.discard(pool.frame_class)
            if not self.accepts(pool.frame_class):
                self.give_up(pool)
            elif not self.copies.is_saving(self.upper):
                if self._is_crowded(pool):
                    ahead = pool.frames if self.rules.demote_at == 0 else -(-pool.frames // AHEAD_SHARE)
                    self._look_ahead(pool, ahead)
                batch = self._choose(pool, self.pages_max(pool.frame_class, event.bytes_max), out)
                if batch.pages:
                    self.copies.start_saving(batch, out)
                    self.charge(batch)
                    self._turn = place + 1
        return out

    def begin_day(self, day_bytes_left: int) -> None:
        """Set how many bytes may still be written today. Unfinished copies may be included in them."""
        self._day_bytes_left, self._day_bytes_started = day_bytes_left, self.copies.bytes_to(self.lower)

    def charge(self, batch: CopyBatch) -> None:
        """Charge a batch that has started to today's writes, until the next ``begin_day``."""
        self._day_bytes_started += len(batch.pages) * self.lower.segment.stride(batch.frame_class)

    def pages_max(self, frame_class: FrameClass, bytes_max: int) -> int:
        """Return how many pages a batch of at most ``bytes_max`` may have today, at least one.

        Return 0 if unfinished copies might use up the day's writes. Further pages then wait until these copies report.
        """
        stride = self.lower.segment.stride(frame_class)
        pages = max(1, bytes_max // stride)
        if self.rules.write_bytes_per_day:
            pages = min(pages, (self._day_bytes_left - self._day_bytes_started) // stride)
        return max(0, pages)

    def _has_room(self, frame_class: FrameClass) -> bool:
        return self.lower.can_take(self.lower.segment.pool(frame_class))

    def device_failed(self) -> None:
        """After a device has failed, let pages that the remaining devices cannot take leave unsaved."""
        for pool in self.upper.segment.pools.values():
            if not self._has_room(pool.frame_class):
                self._refused.add(pool.frame_class)
            if not self.accepts(pool.frame_class):
                self.give_up(pool)

    def give_up(self, pool: ClassPool) -> None:
        """Let the pages that wait for a save leave unsaved."""
        pool.ready.update(pool.unsaved)
        pool.unsaved.clear()

    def _is_crowded(self, pool: ClassPool) -> bool:
        room = len(self.upper.segment.vacant) * pool.frames_per_extent
        return pool.free + room < (1 - self.rules.demote_at) * (pool.frames + room)

    def _look_ahead(self, pool: ClassPool, pages: int) -> None:
        """Set cold leaves aside before their frames are needed, until ``pages`` pages can leave with them.

        No more are set aside, because such pages leave in the order in which they were set aside, even if the policy
        would rank them differently later.
        """
        lengths = self._tails.get(pool.frame_class, {})
        tails = {slot: lengths.get(slot, 1) for slot in (*pool.ready, *pool.unsaved)}
        ahead = sum(tails.values())
        pages = min(pages, ahead + CLIMB_MAX)
        for _ in range(LEAVES_PER_STEP):
            if ahead >= pages or len(tails) >= UNSAVED_MAX or (slot := self.upper.set_coldest_aside(pool)) is None:
                break
            tails[slot] = self._tail_pages(pool, slot, pages - ahead)
            ahead += tails[slot]
        self._tails[pool.frame_class] = tails

    def _tail_pages(self, pool: ClassPool, slot: int, most: int) -> int:
        """Return how many pages, up to ``most``, can leave one after the other from this leaf upwards.

        These are the pages whose only child is the next one of them.
        """
        upper, records = self.upper, self.upper.pages.records
        extent, frame = pool.locate(slot)
        for length in range(1, most):
            parent_key = records.parent(extent.number, frame)
            at_root = parent_key == records.root(extent.number, frame)
            parent = None if at_root else upper.pages.find(parent_key)
            if parent is None:
                return length
            extent, frame = upper.segment.extents[parent.extent], parent.frame
            if extent.children[frame] != 1:
                return length
        return most

    def _choose(self, pool: ClassPool, pages_max: int, out: list[do.Instruction]) -> CopyBatch:
        """Choose whole chains, coldest first, each from its front, and take frames for them in the lower tier."""
        batch = CopyBatch([], pool.frame_class, self.upper, self.lower)
        lower_pool = self.lower.segment.pool(pool.frame_class)
        for slot, aside_ms in list(pool.unsaved.items()):
            room = pages_max - len(batch.pages)
            climb = self._climb_from(pool, slot) if room else None
            if climb is None:
                break
            if not climb.pages:
                pool.ready[slot] = pool.unsaved.pop(slot)
                continue
            if self.copies.is_behind_late(self.lower, climb.anchor):
                continue
            count = climb.count(room)
            owner = self.copies.root_number(self.upper, climb.leaf)
            fits = self.lower.quotas.fit(owner, pool.frame_class, count, climb.anchor, out, aside_ms)
            if count and not fits:
                if self.lower.pages.holdings.roots[owner].share.expected_bytes:
                    # Pages that are being copied can make room once they have arrived.
                    continue
                # The tenant's quota in the lower tier is used up: the page leaves unsaved.
                pool.ready[slot] = pool.unsaved.pop(slot)
                self.counters["save_refused_quota"] += 1
                continue
            targets = self.lower.take_after((climb.anchor,), lower_pool, fits, out)
            if not targets:
                if not batch.pages and not self.lower.departures.waiting:
                    # All pages of the lower tier must stay: nothing can be saved now.
                    self._refused.add(pool.frame_class)
                    self.counters["save_refused_space"] += len(pool.unsaved)
                    self.give_up(pool)
                break
            self.add(batch, climb.anchor, climb.take(len(targets)), targets)
            if climb.pages:
                self._climb = climb
                break
            batch.leaves[climb.leaf] = aside_ms
        return batch

    def _climb_from(self, pool: ClassPool, slot: int) -> Climb | None:
        """Return the climb from this leaf; None if it is too long for now and goes on at the next step."""
        extent, frame = pool.locate(slot)
        leaf = Address(extent.number, frame, extent.generation[frame])
        climb, self._climb = self._climb, None
        if climb is None or climb.leaf != leaf or not climb.is_valid():
            climb = self.climb(leaf)
        if not climb.proceed():
            self._climb = climb
            return None
        return climb

    def climb(self, leaf: Address) -> Climb:
        """Start a climb from this leaf."""
        return Climb(leaf, self.upper, self.lower, self.copies.down[self.lower.tier])

    def add(self, batch: CopyBatch, anchor: bytes, chain: list[tuple[bytes, Address]], targets: list[Address]) -> None:
        """Add these pages, which follow ``anchor``, to a batch. ``targets`` are their frames in the lower tier."""
        held = self.lower.pages.find(anchor) if anchor else None
        if held is not None:  # else the first page starts the chain, or follows a page of this batch
            self.lower.pages.hold(held)
            batch.held.append(held)
        for (key, source), target in zip(chain, targets, strict=True):
            batch.pages.append(do.Copying(key, source, target))
            self.lower.pages.expect([target], self.copies.root_number(self.upper, source))
            self.copies.down[self.lower.tier].add(key)

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """Handle ``events.Saved``: pages that were written and are still valid become pages of the tier below."""
        out: list[do.Instruction] = []
        batch = self.copies.saving.pop(event.number)
        self.copies.down[self.lower.tier].difference_update(page.key for page in batch.pages)
        arrival = self.copies.seal_arrived(batch, event.heads, event.failed)
        arrived = [batch.pages[i] for i in arrival.places]
        if arrived:
            targets, keys = [page.target for page in arrived], [page.key for page in arrived]
            used_ns = [self.upper.pages.records.last_use_ns(*page.source[:2]) for page in arrived]
            for page, used in zip(arrived, used_ns, strict=True):
                self.lower.pages.offer_leaf(page.target, page.key, used // 1_000_000)
            out.append(do.WriteUse(targets, used_ns))
            heads = event.heads[arrival.places]
            sealed = do.WriteSealed(targets, keys, arrival.standings, heads, arrival.parents, cause="save")
            sealed.spans = spans_at(self.lower.segment, targets)
            out.append(sealed)
            self.counters["pages_saved"] += len(arrived)
            self.counters["bytes_saved"] += len(arrived) * batch.frame_class.page_bytes
        for reason in event.failed.values():
            self.counters[f"save_failed_{reason}"] += 1
        self.copies.finish(batch, arrival.unused, out)
        return out
