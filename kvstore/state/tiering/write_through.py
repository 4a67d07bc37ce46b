"""Through: pages whose parent only NVMe has. They are saved there out of the frames they were written into, which are
free then, so that each tier stays prefix-closed::

    NVMe has  A B C        put D E F, into granted frames, or reserved ones that all shards have sealed
                           D E F wait in the pending table ──saved behind C──> NVMe has A B C D E F

A put of such pages is as fast as NVMe: its writer is told BUSY until they are durable, and asks again. So is a chain
that is longer than DRAM: where nothing else may leave for its next pages, its own end leaves, once NVMe has that
(``shorten``), and what follows goes through. Such chains fill an eighth of DRAM's frames at a time.

A batch waits for the one before it. What cannot be saved is doomed, with what hangs on it; its writer finds its frames
gone (STALE). After a kill pages on their way are in no index, and their frames are free: they were never acknowledged.
"""

from __future__ import annotations

from collections import Counter, deque

from kvstore.model.objects import is_object_class
from kvstore.model.replica import ROOT, Address, FrameState, Status, keys_of, position_of, roots_of, standing, turns_of
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.frames import ClassPool
from kvstore.state.tiering.copying import NODE_SESSION, CopyBatch, CopyBatches
from kvstore.state.tiering.demotion import Demotion
from kvstore.state.writing import GROUP, Behind, Pending, Writing

SHARE = 8  # this part of a class's frames may be filled by pages that go through
TTL_NS = 60 * 10**9  # of a page that cannot be saved yet


class Through(Behind):
    """Decides about such pages. Part of ``Tiering``.

    Life of a page here: complete in the pending table -> chosen, in a batch -> on NVMe, its frame free; or doomed.
    """

    def __init__(self, copies: CopyBatches, writing: Writing, demotion: Demotion, counters: Counter[str]) -> None:
        self.copies = copies
        self.upper = demotion.upper
        self.lower = demotion.lower
        self.writing = writing
        self.pending = writing.pending
        self.demotion = demotion
        self.counters = counters
        self._staged: dict[bytes, Pending] = {}  # all that are to go through
        self._chosen: dict[bytes, Pending] = {}  # of those, by this event; parents before children
        self._later: list[Pending] = []  # of those, NVMe had no room for them yet

    # --- what is below, and on its way there --------------------------------------------------------------------------

    def holds(self, root: bytes, key: bytes) -> bool:
        """See ``Behind``."""
        staged = self._live(key)
        if staged is not None:
            return staged.root == root
        address = self.lower.pages.find_in(root, key)
        return address is not None and self.demotion.takes(self.lower.segment.extents[address.extent].pool.frame_class)

    def _live(self, key: bytes) -> Pending | None:
        staged = self._staged.get(key)
        if staged is None or self._waits(staged):
            return staged
        if key not in self.copies.down[self.lower.tier]:
            del self._staged[key]
        return None

    def _waits(self, page: Pending) -> bool:
        """True for a page that was neither given up nor sealed in DRAM, where its parent has arrived since."""
        return not page.doomed and self.pending.by_address.get(page.address) is page

    def has(self, root: bytes, key: bytes) -> bool:
        """See ``Behind``."""
        return self.lower.pages.find_in(root, key) is not None

    def room(self, pool: ClassPool, anchor: bytes, count: int) -> int:
        """See ``Behind``."""
        if not anchor or self.upper.pages.find(anchor) is not None:
            return count
        if self._live(anchor) is None and self.lower.pages.find(anchor) is None:
            return count
        there = sum(self._class_of(page) is pool for page in self._staged.values() if self._waits(page))
        room = max(0, min(count, self.most(pool) - there))
        self.upper.departures.waiting = self.upper.departures.waiting or not room
        return room

    def most(self, pool: ClassPool) -> int:
        """How many frames of a class pages that go through may fill."""
        frames = pool.frames + len(self.upper.segment.vacant) * pool.frames_per_extent
        return max(1, frames // SHARE)

    def _class_of(self, page: Pending) -> ClassPool:
        return self.upper.segment.extents[page.address.extent].pool

    def shorten(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> int:
        """Nothing else may leave for pages after ``anchor``: the end of their own chain does, where NVMe has it.

        Returns how many pages left; where the end has to be saved first, that begins (``waiting``).
        """
        upper = self.upper
        page = upper.pages.find(anchor) if anchor else None
        if page is None or not count or is_object_class(pool.frame_class) or not self.demotion.takes(pool.frame_class):
            return 0
        left, leaving = 0, upper.departures.leaving()
        while page is not None and left < count:
            extent, frame = upper.segment.extents[page.extent], page.frame
            slot = extent.slot_base + frame
            if extent.pool is not pool or extent.children[frame] or upper.pages.leases.holds(extent.number, frame):
                break
            records = upper.pages.records
            parent, root = records.parent(extent.number, frame), records.root(extent.number, frame)
            if (extent.number, frame) in upper.pages.moved:
                break
            if not self.has(root, records.key(extent.number, frame)):
                upper.departures.waiting = upper.departures.waiting or not upper.departures.may_leave(pool, slot)
                break
            page = upper.pages.find(parent) if parent != root else None
            upper.departures.leave(extent, frame, leaving)
            left += 1
        upper.departures.left(leaving, "space", out)
        return left

    def make_room(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """See ``Behind``."""
        left = 0 if self.upper.departures.waiting else self.shorten(anchor, pool, min(count, self.most(pool)), out)
        return self.upper.take(pool, left, out) if left else []

    def room_for(
        self, anchor: bytes, pool: ClassPool, owner: int, taken: list[Address], count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """See ``Behind``. None at all where the chain would have to leave for the others, and cannot yet: reservations
        would hold it."""
        page = self.upper.pages.find(anchor) if anchor else None
        if page is None:
            return taken
        held = self.upper.segment.extents[page.extent].children[page.frame] > 0
        if held and not self.copies.moving(pool.frame_class, self.upper):  # by another page, and not by a copy alone
            return taken
        left = 0 if self.upper.departures.waiting else self.shorten(anchor, pool, count - len(taken), out)
        if self.upper.departures.waiting:
            if taken:
                out.append(do.WriteGranted(taken, NODE_SESSION))  # no record says yet that they were taken
                self.upper.pages.free(taken, out)
            return []
        fits = self.upper.quotas.fit(owner, pool.frame_class, left, b"", out) if left else 0
        more = self.upper.take(pool, fits, out) if fits else []
        self.upper.pages.expect(more, owner)
        return taken + more

    # --- what is written ----------------------------------------------------------------------------------------------

    def seal(
        self, event: ev.SealGranted, granted: set[Address], keys: list[bytes], number: int
    ) -> list[do.Instruction] | None:
        """See ``Behind``.

        Per page: BUSY on its way, OK stored (its frame is gone), PRESENT stored by another, else why not.
        ``number``: of the root.
        """
        root = event.rows[0, ROOT].tobytes()
        if is_object_class(event.frame_class) or not self.holds(root, event.parent):
            return None
        out: list[do.Instruction] = []
        statuses: list[Status] = []
        new: list[int] = []
        for i, (key, address) in enumerate(zip(keys, event.addresses, strict=True)):
            ours = address in granted
            if self.has(root, key):
                statuses.append(Status.PRESENT if ours else Status.OK)
            elif (staged := self._live(key)) is not None and staged.root == root:
                statuses.append(Status.BUSY)
            elif (
                not ours
                or staged is not None
                or self.lower.pages.find(key) is not None
                or self.upper.pages.find(key) is not None
            ):
                break  # it was given up; or another root's page has that key, which was forged
            else:
                new.append(i)
                statuses.append(Status.BUSY)
        fits = self.upper.quotas.admit(number, event, new, b"", out) if new else 0
        if fits < len(new):
            wait = self.upper.departures.waiting or bool(self._staged)
            statuses[new[fits] :] = [Status.BUSY if wait else Status.OVER_QUOTA] * (len(statuses) - new[fits])
        pages = self._stage(event, keys, new[:fits], granted, number, out)
        self.start(out)
        for i, page in zip(new, pages, strict=False):
            if page.doomed:
                statuses[i] = Status.NO_SPACE
        rest = event.addresses[len(statuses) :]
        found = [int(status) for status in statuses]
        found += [int(Status.NO_PARENT if address in granted else Status.STALE) for address in rest]
        return [*out, do.Reply(statuses=found)]

    def _stage(
        self,
        event: ev.SealGranted,
        keys: list[bytes],
        places: list[int],
        granted: set[Address],
        number: int,
        out: list[do.Instruction],
    ) -> list[Pending]:
        """Pages in granted frames become reserved pages that are complete, and are chosen."""
        if not places:
            return []
        root = event.rows[0, ROOT].tobytes()
        addresses = [event.addresses[i] for i in places]
        parents = [keys[i - 1] if i else event.parent for i in places]
        granted.difference_update(addresses)
        pool = self.upper.segment.extents[addresses[0].extent].pool
        pool.granted_ahead -= len(addresses)
        self.upper.pages.expect(addresses, number)
        until_ns = event.now_ns + TTL_NS
        group = GROUP | min(address.generation for address in addresses)
        out.append(do.WriteReserved(addresses, event.rows[places], parents, event.session, group, 0, 1, until_ns))
        pages = []
        for i, parent, address in zip(places, parents, addresses, strict=True):
            out.append(do.WriteShards(address, 1, 1))
            page = Pending(keys[i], parent, False, address, group, 1, until_ns, sealed_mask=1, root=root)
            page.continues = event.continues or i > 0
            page.hint = event.hints[i] if event.hints else 0
            pages.append(page)
            self.pending.add(page)
        for page in pages:
            self.takes(page)
        return pages

    def takes(self, page: Pending) -> bool:
        """See ``Behind``. Not where its own writers are about to have the parent in DRAM."""
        coming = self.pending.find(page.root, page.parent, page.group)
        if coming is not None and self._staged.get(page.parent) is not coming:
            return False
        if not self.holds(page.root, page.parent):
            return False
        if self._live(page.key) is None:  # a copy of one that was given up may still be on its way: see ``saved``
            self._staged[page.key] = page
        saved = page.key in self.copies.down[self.lower.tier]  # as this page, or as another's
        flies = saved or self._staged[page.key] is not page
        if not flies and (self._live(page.parent) is None or page.parent in self._chosen):  # else it waits for that one
            self._chosen[page.key] = page
        return True

    def flies(self, page: Pending) -> bool:
        """See ``Behind``."""
        return page.key in self.copies.down[self.lower.tier] or page in self._later

    # --- saving -------------------------------------------------------------------------------------------------------

    def again(self, out: list[do.Instruction]) -> None:
        """See ``Behind``."""
        if self._later:
            self._chosen |= {page.key: page for page in self._later if self._live(page.key) is page}
            self._later = []
            self.start(out)

    def start(self, out: list[do.Instruction]) -> None:
        """Have the chosen pages saved, each chain as a batch of its own."""
        while self._chosen:
            inside: set[bytes] = set()
            chain: list[Pending] = []
            for page in self._chosen.values():
                if not chain or page.parent in inside:
                    chain.append(page)
                    inside.add(page.key)
            self._chosen = {key: page for key, page in self._chosen.items() if key not in inside}
            self._save(chain, out)

    def _save(self, chain: list[Pending], out: list[do.Instruction]) -> None:
        root, anchor = chain[0].root, chain[0].parent
        frame_class, owner = self._class_of(chain[0]).frame_class, self.copies.owner(self.upper, chain[0].address)
        targets: list[Address] = []
        if self.has(root, anchor) and self.demotion.takes(frame_class):
            most = self.demotion.pages_max(frame_class, len(chain) * self.lower.segment.stride(frame_class))
            fits = self.lower.quotas.fit(owner, frame_class, most, anchor, out) if most else 0
            pool = self.lower.segment.pool(frame_class)
            targets = self.lower.take_after((anchor,), pool, fits, out) if fits else []
            if not targets and (
                not most or self.lower.departures.waiting or self.lower.pages.holdings.roots[owner].share.coming
            ):
                self._later += chain
                return
        held = self.lower.pages.find_in(root, anchor)
        if targets and held is not None:
            self.lower.pages.hold(held)
            batch = CopyBatch([], frame_class, self.upper, self.lower, [held])
            info = standing(*self.lower.pages.standing_after(held, chain[0].continues))
            standings = {anchor: standing(position_of(info) - 1, turns_of(info))}
            for page, target in zip(chain, targets, strict=False):
                before = standings[page.parent]
                standings[page.key] = standing(position_of(before) + 1, turns_of(before), page.hint)
                source = page.address
                copying = do.Copying(page.key, source, target, FrameState.RESERVED, standings[page.key])
                batch.pages.append(copying)
                self.lower.pages.expect([target], owner)
                self.copies.down[self.lower.tier].add(page.key)
            self.copies.start_staged(batch, out)
            self.demotion.began(batch)
        self.fail(chain[len(targets) :], out)

    def fail(self, pages: list[Pending], out: list[do.Instruction]) -> None:
        """These pages, and complete ones that hang on them, will not be stored."""
        waiting = deque(pages)
        while waiting:
            page = waiting.popleft()
            if self._staged.get(page.key) is page:
                del self._staged[page.key]
            if self._waits(page):
                waiting.extend(
                    child for child in self.pending.children(page.key) if child.complete and child.root == page.root
                )
                self.writing.doom([page], out)
                self.counters["pages_not_saved_through"] += 1

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """See ``events.Saved``: what was written becomes pages of NVMe, and its frames in DRAM are free."""
        out: list[do.Instruction] = []
        batch = self.copies.staging.pop(event.number)
        self.copies.down[self.lower.tier].difference_update(page.key for page in batch.pages)
        done: list[Pending] = []
        failed: list[Pending] = []
        heirs: list[Pending] = []
        places: list[int] = []
        parents: list[bytes] = []
        unused: list[Address] = []
        keys, roots = keys_of(event.heads), roots_of(event.heads)
        for i, (page, key, root) in enumerate(zip(batch.pages, keys, roots, strict=True)):
            staged = self._staged.pop(page.key, None)
            if staged is None or staged.address != page.source:  # it was given up; maybe another writer's page is next
                unused.append(page.target)
                if staged is not None:
                    heirs.append(staged)
                continue
            source = self._waits(staged) and staged.address == page.source
            whole = i not in event.failed and key == page.key and self.lower.pages.find(key) is None
            if source and (self.has(root, key) or (whole and self.has(root, staged.parent))):
                done.append(staged)
            elif source:
                failed.append(staged)
            if not whole or not (source or self.upper.pages.sealed(page.source)):
                unused.append(page.target)
                continue
            parent = self.lower.pages.find_in(root, staged.parent)
            if parent is None:
                unused.append(page.target)
                continue
            self.lower.pages.seal(page.target, key, root, parent, page.standing)
            places.append(i)
            parents.append(staged.parent)
        self._arrived(event, batch, places, parents, out)
        self.copies.end(batch, unused, out)
        for staged in done:
            self.writing.stored_below(staged, out)
        self.fail(failed, out)
        self.fail([heir for heir in heirs if self._waits(heir) and not self.takes(heir)], out)
        there = [staged.key for staged in done]  # also what another writer's copy was saved for in the meantime
        self.writing.follow(list(dict.fromkeys([*there, *(batch.pages[i].key for i in places)])), out)
        self.again(out)
        self.start(out)
        return out

    def _arrived(
        self, event: ev.Saved, batch: CopyBatch, places: list[int], parents: list[bytes], out: list[do.Instruction]
    ) -> None:
        if not places:
            return
        pages = [batch.pages[i] for i in places]
        targets, keys = [page.target for page in pages], [page.key for page in pages]
        used_ns = [self.upper.pages.records.last_use_ns(*page.source[:2]) for page in pages]
        for page, used in zip(pages, used_ns, strict=True):
            self.lower.pages.leaf(page.target, page.key, used // 1_000_000)
        out.append(do.WriteUse(targets, used_ns))
        standings = [page.standing for page in pages]
        spans = spans_at(self.lower.segment, targets)
        out.append(do.WriteSealed(targets, keys, standings, event.heads[places], parents, None, "through", spans))
        for name, count in (("pages_sealed", 1), ("pages_saved", 1), ("bytes_saved", batch.frame_class.page_bytes)):
            self.counters[name] += count * len(pages)
