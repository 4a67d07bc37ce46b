"""Demotion: which pages of a tier are saved to the one below, and when.

A leaf that is about to leave waits in ``ClassPool.unsaved``. Its chain is saved from the front, so that what reaches
the disk is usable after a reboot: the pages from the leaf up to the first that it has are looked up once, then taken
from that end, as many as a batch may hold::

    below has  A B        climb, leaf first:  F E D C       batches:  C D | E F
    above has  A B C D E F

The classes take turns, one batch each, one at a time.
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
AHEAD_SHARE = 8  # this part of a class's frames is kept ready to leave
LEAVES_PER_STEP = 256  # cold leaves looked at per class and step
CLIMB_MAX = 4096  # pages of one chain looked at per step; what is longer takes several


class Climb:
    """The way from a leaf up to the first page of its chain that the tier below has, or will have after this batch.

    ``pages`` (key, address) leaf first; the last of them hangs on ``anchor`` (b"": it starts the chain).
    """

    def __init__(self, leaf: Address, upper: Space, lower: Space, down: Collection[bytes]) -> None:
        self.leaf = leaf
        self.pages: list[tuple[bytes, Address]] = []
        self.anchor = b""
        self._upper, self._lower = upper, lower
        self._down = down  # keys of what is on its way there
        self._next: Address | None = leaf

    def go_on(self) -> bool:
        """Look at the next pages; whether the top is reached."""
        upper, records = self._upper, self._upper.pages.records
        for _ in range(CLIMB_MAX):
            if self._next is None:
                break
            extent, frame, _ = self._next
            key, root, parent = records.lineage(extent, frame)
            if self._is_there(key):
                self.anchor, self._next = key, None
                if key not in self._down and self._lower.pages.find_in(root, key) is None:
                    self.pages.clear()  # another root's page has this key there: nothing of ours can hang on it
                break
            self.pages.append((key, self._next))
            self._next = None if parent == root else upper.pages.find(parent)
        return self._next is None

    def still_holds(self) -> bool:
        """What was found by earlier decisions is still so; pages that were saved since, with another chain, go."""
        while self.pages and self._is_there(self.pages[-1][0]):
            self.anchor = self.pages.pop()[0]
        top = self.pages[-1][1] if self.pages else self.leaf
        upwards = self._next is None or self._upper.pages.sealed(self._next)
        return upwards and self._upper.pages.sealed(top) and (not self.anchor or self._is_there(self.anchor))

    def count(self, most: int) -> int:
        """How many of the topmost pages, up to ``most``, are still where they were found: at least one, if any."""
        top = self.pages[: -most - 1 : -1]
        return next((i for i, (_, address) in enumerate(top) if not self._upper.pages.sealed(address)), len(top))

    def take(self, count: int) -> list[tuple[bytes, Address]]:
        """The topmost ``count`` pages, parents first."""
        taken = [self.pages.pop() for _ in range(count)]
        self.anchor = taken[-1][0]
        return taken

    def _is_there(self, key: bytes) -> bool:
        return key in self._down or self._lower.pages.find(key) is not None


class Demotion:
    """Decides about saves. Part of ``Tiering``; what a tier asks of the one below it (``space.Below``)."""

    def __init__(
        self, copies: CopyBatches, upper: Space, lower: Space, counters: Counter[str], rules: TieringRules
    ) -> None:
        self.copies = copies
        self.upper = upper
        self.lower = lower
        self.counters = counters
        self.rules = rules
        self.find_in = self.lower.pages.find_in  # see ``space.Below``
        self._climb: Climb | None = None  # of a chain that was too long for one batch
        self._refused: set[FrameClass] = set()  # below there was no frame for these, and none that could be made free
        self._tails: dict[FrameClass, dict[int, int]] = {}  # of leaves set aside, by slot: see ``_tail``
        self._turn = 0  # place of the class that is looked at first
        self._day_bytes_left, self._day_bytes_begun = rules.write_bytes_per_day, 0  # begun: see ``began``

    # --- what the tier above asks: see ``space.Below`` --------------------------------------------------------------

    def may_leave(self, pool: ClassPool, key: bytes, page: Page) -> bool:
        """See ``Below.may_leave``."""
        return not self.admits(page) or self.lower.pages.find(key) is not None or not self.takes(pool.frame_class)

    def admits(self, page: Page) -> bool:
        """The page is worth a write."""
        return self.rules.admission == "all" or page.turns > 0

    def coming(self, pool: ClassPool) -> bool:
        """See ``Below.coming``."""
        return bool(pool.unsaved) or self.copies.moving(pool.frame_class, self.upper)

    def held(self) -> list[Address]:
        """See ``Below.held``."""
        return self.copies.held(self.upper)

    @property
    def writable(self) -> bool:
        """A device is up, and today's writes are not used up."""
        if self.rules.write_bytes_per_day and self._day_bytes_left <= 0:
            return False
        segment = self.lower.segment
        return bool(segment.vacant) or any(not extent.closed for extent in segment.extents.values())

    def takes(self, frame_class: FrameClass) -> bool:
        """The tier below takes pages of this class: one fits an extent and today's writes, and there is room."""
        capped = self.rules.write_bytes_per_day and self._day_bytes_left < self.lower.segment.stride(frame_class)
        fits = self.lower.segment.frames_per_extent(frame_class) > 0 and frame_class not in self._refused
        return fits and self.writable and not capped

    # --- deciding ---------------------------------------------------------------------------------------------------

    def demote(self, event: ev.Demote) -> list[do.Instruction]:
        """See ``events.Demote``; at most one batch is on its way down, but for those that are late."""
        out: list[do.Instruction] = []
        self.begin_day(event.day_bytes_left)
        pools = list(enumerate(self.upper.segment.pools.values()))
        for place, pool in pools[self._turn :] + pools[: self._turn]:
            if pool.frame_class in self._refused and self._has_room(pool.frame_class):
                self._refused.discard(pool.frame_class)
            if not self.takes(pool.frame_class):
                self.give_up(pool)
            elif not self.copies.is_saving(self.upper):
                if self._is_crowded(pool):
                    everything = self.rules.demote_at == 0
                    self._look_ahead(pool, pool.frames if everything else -(-pool.frames // AHEAD_SHARE))
                batch = self._choose(pool, self.pages_max(pool.frame_class, event.bytes_max), out)
                if batch.pages:
                    self.copies.start_saving(batch, out)
                    self.began(batch)
                    self._turn = place + 1
        return out

    def begin_day(self, day_bytes_left: int) -> None:
        """Set how many bytes may still be written today. Copies under way may be a part of that."""
        self._day_bytes_left, self._day_bytes_begun = day_bytes_left, self.copies.bytes_to(self.lower)

    def began(self, batch: CopyBatch) -> None:
        """Charge a batch that has started to today's writes, until the next ``begin_day``."""
        self._day_bytes_begun += len(batch.pages) * self.lower.segment.stride(batch.frame_class)

    def pages_max(self, frame_class: FrameClass, bytes_max: int) -> int:
        """How many pages a batch of at most ``bytes_max`` may have today, at least one. 0 where the copies under way
        may use up the day: further pages wait for their report."""
        stride = self.lower.segment.stride(frame_class)
        pages = max(1, bytes_max // stride)
        if self.rules.write_bytes_per_day:
            pages = min(pages, (self._day_bytes_left - self._day_bytes_begun) // stride)
        return max(0, pages)

    def _has_room(self, frame_class: FrameClass) -> bool:
        return self.lower.could_take(self.lower.segment.pool(frame_class))

    def device_failed(self) -> None:
        """There are fewer devices now: what cannot be saved any more may leave as it is."""
        for pool in self.upper.segment.pools.values():
            if not self._has_room(pool.frame_class):
                self._refused.add(pool.frame_class)
            if not self.takes(pool.frame_class):
                self.give_up(pool)

    def give_up(self, pool: ClassPool) -> None:
        """Pages that wait to be saved will not be: they may leave as they are."""
        pool.ready.update(pool.unsaved)
        pool.unsaved.clear()

    def _is_crowded(self, pool: ClassPool) -> bool:
        room = len(self.upper.segment.vacant) * pool.frames_per_extent
        return pool.free + room < (1 - self.rules.demote_at) * (pool.frames + room)

    def _look_ahead(self, pool: ClassPool, pages: int) -> None:
        """Set cold leaves aside before their frames are needed, until they and what they hang on are ``pages``.

        No more than that: what is set aside leaves in the order it was found, whatever the policy learns later.
        """
        known = self._tails.get(pool.frame_class, {})
        tails = {slot: known.get(slot, 1) for slot in (*pool.ready, *pool.unsaved)}
        ahead = sum(tails.values())
        pages = min(pages, ahead + CLIMB_MAX)
        for _ in range(LEAVES_PER_STEP):
            if ahead >= pages or len(tails) >= UNSAVED_MAX or (slot := self.upper.next_cold(pool)) is None:
                break
            tails[slot] = self._tail(pool, slot, pages - ahead)
            ahead += tails[slot]
        self._tails[pool.frame_class] = tails

    def _tail(self, pool: ClassPool, slot: int, most: int) -> int:
        """Pages that can leave one after the other with this leaf, up to ``most``: those nothing else hangs on."""
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
        """Whole chains, coldest first, each from its front; frames for them are taken below."""
        batch = CopyBatch([], pool.frame_class, self.upper, self.lower)
        lower_pool = self.lower.segment.pool(pool.frame_class)
        for slot, aside_ms in list(pool.unsaved.items()):
            room = pages_max - len(batch.pages)
            climb = self._climbed(pool, slot) if room else None
            if climb is None:
                break
            if not climb.pages:
                pool.ready[slot] = pool.unsaved.pop(slot)
                continue
            if self.copies.behind(self.lower, climb.anchor):
                continue
            wanted = climb.count(room)
            owner = self.copies.owner(self.upper, climb.leaf)
            fits = self.lower.quotas.fit(owner, pool.frame_class, wanted, climb.anchor, out, aside_ms)
            if wanted and not fits:
                if self.lower.pages.holdings.roots[owner].share.coming:  # when this batch is there, it can make room
                    continue
                # Its tenant may have no more there: it leaves as it is.
                pool.ready[slot] = pool.unsaved.pop(slot)
                self.counters["save_refused_quota"] += 1
                continue
            targets = self.lower.take_after((climb.anchor,), lower_pool, fits, out)
            if not targets:
                if (
                    not batch.pages and not self.lower.departures.waiting
                ):  # full of what may not leave: nothing can be saved now
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

    def _climbed(self, pool: ClassPool, slot: int) -> Climb | None:
        """The way up from this leaf; None where it is too long for now and goes on at the next step."""
        extent, frame = pool.locate(slot)
        leaf = Address(extent.number, frame, extent.generation[frame])
        climb, self._climb = self._climb, None
        if climb is None or climb.leaf != leaf or not climb.still_holds():
            climb = self.climb(leaf)
        if not climb.go_on():
            self._climb = climb
            return None
        return climb

    def climb(self, leaf: Address) -> Climb:
        """The way up from this leaf, from its beginning."""
        return Climb(leaf, self.upper, self.lower, self.copies.down[self.lower.tier])

    def add(self, batch: CopyBatch, anchor: bytes, chain: list[tuple[bytes, Address]], targets: list[Address]) -> None:
        """These pages, which hang on ``anchor``, are part of the batch, and will be in these frames below."""
        held = self.lower.pages.find(anchor) if anchor else None
        if held is not None:  # else it starts the chain, or hangs on a page of this very batch
            self.lower.pages.hold(held)
            batch.held.append(held)
        for (key, source), target in zip(chain, targets, strict=True):
            batch.pages.append(do.Copying(key, source, target))
            self.lower.pages.expect([target], self.copies.owner(self.upper, source))
            self.copies.down[self.lower.tier].add(key)

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """See ``events.Saved``: what was written and still is wanted becomes a page of the tier below."""
        out: list[do.Instruction] = []
        batch = self.copies.saving.pop(event.number)
        self.copies.down[self.lower.tier].difference_update(page.key for page in batch.pages)
        arrival = self.copies.arrive(batch, event.heads, event.failed)
        arrived = [batch.pages[i] for i in arrival.places]
        if arrived:
            targets, keys = [page.target for page in arrived], [page.key for page in arrived]
            used_ns = [self.upper.pages.records.last_use_ns(*page.source[:2]) for page in arrived]
            for page, used in zip(arrived, used_ns, strict=True):
                self.lower.pages.leaf(page.target, page.key, used // 1_000_000)
            out.append(do.WriteUse(targets, used_ns))
            heads = event.heads[arrival.places]
            sealed = do.WriteSealed(targets, keys, arrival.standings, heads, arrival.parents, cause="save")
            sealed.spans = spans_at(self.lower.segment, targets)
            out.append(sealed)
            self.counters["pages_saved"] += len(arrived)
            self.counters["bytes_saved"] += len(arrived) * batch.frame_class.page_bytes
        for reason in event.failed.values():
            self.counters[f"save_failed_{reason}"] += 1
        self.copies.end(batch, arrival.unused, out)
        return out
