"""Write-through: new pages whose parent only NVMe has are saved to NVMe, out of the frames that they were written into.

The frames are free after the save, so each tier stays prefix-closed::

    NVMe has  A B C        put D E F, into granted frames, or into reserved ones that all shards have sealed
                           D E F wait in the pending table ──save after C──> NVMe has A B C D E F

A put of such pages is as fast as NVMe: its writer receives BUSY until they are durable, and asks again. The same
happens to a chain that is longer than DRAM. If no other page can be evicted for the next pages of the chain, its own
last pages leave DRAM once NVMe has them (``shorten``), and the next pages are written through. Pages that are written
through occupy at most an eighth of DRAM's frames at a time.

Each batch of a chain waits for the one before it. A page that cannot be saved is doomed, with all pages after it; its
writer then receives STALE for its frames. After kill -9 of the daemon the pages of unfinished saves are in no index,
and their frames are free: the put of these pages was never acknowledged.
"""

from __future__ import annotations

from collections import Counter, deque

from kvstore.model.objects import is_object_class
from kvstore.model.replica import (
    FETCH_GROUP,
    ROOT,
    Address,
    FrameState,
    Status,
    keys_of,
    position_of,
    roots_of,
    standing,
    turns_of,
)
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.frames import ClassPool
from kvstore.state.tiering.copying import NODE_SESSION, CopyBatch, CopyBatches
from kvstore.state.tiering.demotion import Demotion
from kvstore.state.writing import GROUP, Pending, WriteThroughBase, Writing

SHARE = 8  # pages that are written through may fill one frame in this many of their class
TTL_NS = 60 * 10**9  # deadline of a page that cannot be saved yet


class WriteThrough(WriteThroughBase):
    """The decisions about pages whose parent only NVMe has. Part of ``Tiering``.

    Life of a page here: complete in the pending table -> chosen -> in a batch -> on NVMe, its frame free. Or doomed.
    """

    def __init__(self, copies: CopyBatches, writing: Writing, demotion: Demotion, counters: Counter[str]) -> None:
        self.copies = copies
        self.upper = demotion.upper
        self.lower = demotion.lower
        self.writing = writing
        self.pending = writing.pending
        self.demotion = demotion
        self.counters = counters
        self._staged: dict[bytes, Pending] = {}  # all pages to write through
        self._chosen: dict[bytes, Pending] = {}  # those of them that this event has chosen, parents before children
        self._postponed: list[Pending] = []  # those of them for which NVMe had no space

    # --- what NVMe has, or is about to have ---------------------------------------------------------------------------

    def can_extend(self, root: bytes, key: bytes) -> bool:
        """Return True if NVMe has the page or is about to have it, and accepts more pages of its class."""
        staged = self._live(key)
        if staged is not None:
            return staged.root == root
        address = self.lower.pages.find_in(root, key)
        return address is not None and self.demotion.accepts(
            self.lower.segment.extents[address.extent].pool.frame_class
        )

    def _live(self, key: bytes) -> Pending | None:
        """Return the page with this key that is to be written through. Drop it if it was given up."""
        staged = self._staged.get(key)
        if staged is None or self._is_pending(staged):
            return staged
        if key not in self.copies.down[self.lower.tier]:
            del self._staged[key]
        return None

    def _is_pending(self, page: Pending) -> bool:
        """Return False for a page that was given up, or sealed in DRAM because its parent has arrived there."""
        return not page.doomed and self.pending.by_address.get(page.address) is page

    def has(self, root: bytes, key: bytes) -> bool:
        """Return True if NVMe has this page."""
        return self.lower.pages.find_in(root, key) is not None

    def grantable(self, pool: ClassPool, anchor: bytes, count: int) -> int:
        """Return ``count`` if DRAM has the page ``anchor``, else the number of frames that remain for written-through
        pages."""
        if not anchor or self.upper.pages.find(anchor) is not None:
            return count
        if self._live(anchor) is None and self.lower.pages.find(anchor) is None:
            return count
        occupied = sum(self._class_of(page) is pool for page in self._staged.values() if self._is_pending(page))
        remaining = max(0, min(count, self.frames_max(pool) - occupied))
        self.upper.departures.waiting = self.upper.departures.waiting or not remaining
        return remaining

    def frames_max(self, pool: ClassPool) -> int:
        """Return how many frames of a class may hold pages that are written through."""
        frames = pool.frames + len(self.upper.segment.vacant) * pool.frames_per_extent
        return max(1, frames // SHARE)

    def _class_of(self, page: Pending) -> ClassPool:
        return self.upper.segment.extents[page.address.extent].pool

    def shorten(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> int:
        """Evict up to ``count`` pages from the end of the chain of ``anchor``, as far as NVMe has them.

        This is the last resort to make room for pages after ``anchor``, when no other page can be evicted. Return how
        many pages were evicted. If the end of the chain has to be saved first, it is set aside for that, and
        ``Departures.waiting`` is True.
        """
        upper = self.upper
        page = upper.pages.find(anchor) if anchor else None
        if (
            page is None
            or not count
            or is_object_class(pool.frame_class)
            or not self.demotion.accepts(pool.frame_class)
        ):
            return 0
        evicted, leaving = 0, upper.departures.new_batch()
        while page is not None and evicted < count:
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
            evicted += 1
        upper.departures.finish(leaving, "space", out)
        return evicted

    def take_for_put(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """Take frames that ``shorten`` has made free."""
        count = min(count, self.frames_max(pool))
        evicted = 0 if self.upper.departures.waiting else self.shorten(anchor, pool, count, out)
        return self.upper.take(pool, evicted, out) if evicted else []

    def take_for_reservation(
        self, anchor: bytes, pool: ClassPool, owner: int, taken: list[Address], count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """Add frames that ``shorten`` has made free to ``taken``.

        Return no frame at all if the end of the chain has to be saved before it can leave: reservations after it would
        hold it in DRAM.
        """
        page = self.upper.pages.find(anchor) if anchor else None
        if page is None:
            return taken
        is_held = self.upper.segment.extents[page.extent].children[page.frame] > 0
        if is_held and not self.copies.is_moving(pool.frame_class, self.upper):  # by a page, and not only by a copy
            return taken
        evicted = 0 if self.upper.departures.waiting else self.shorten(anchor, pool, count - len(taken), out)
        if self.upper.departures.waiting:
            if taken:
                out.append(do.WriteGranted(taken, NODE_SESSION))  # their records do not show yet that they were taken
                self.upper.pages.free(taken, out)
            return []
        fits = self.upper.quotas.fit(owner, pool.frame_class, evicted, b"", out) if evicted else 0
        more = self.upper.take(pool, fits, out) if fits else []
        self.upper.pages.expect(more, owner)
        return taken + more

    # --- which pages are written through ------------------------------------------------------------------------------

    def seal(
        self, event: ev.SealGranted, granted: set[Address], keys: list[bytes], number: int
    ) -> list[do.Instruction] | None:
        """Stage the pages of a put whose parent only NVMe has. Return None if NVMe does not have it either.

        The reply has a status per page. BUSY: it is staged or being saved. OK: it is stored, and its frame is free.
        PRESENT: another writer has stored it. Any other status says why the page was refused.

        Args:
            number: number of the root.
        """
        root = event.rows[0, ROOT].tobytes()
        if is_object_class(event.frame_class) or not self.can_extend(root, event.parent):
            return None
        out: list[do.Instruction] = []
        statuses: list[Status] = []
        new: list[int] = []
        for i, (key, address) in enumerate(zip(keys, event.addresses, strict=True)):
            is_granted = address in granted
            if self.has(root, key):
                statuses.append(Status.PRESENT if is_granted else Status.OK)
            elif (staged := self._live(key)) is not None and staged.root == root:
                statuses.append(Status.BUSY)
            elif (
                not is_granted
                or staged is not None
                or self.lower.pages.find(key) is not None
                or self.upper.pages.find(key) is not None
            ):
                break  # the page was given up, or a page of another root has this key: one of the two is forged
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
        refused = event.addresses[len(statuses) :]
        numbers = [int(status) for status in statuses]
        numbers += [int(Status.NO_PARENT if address in granted else Status.STALE) for address in refused]
        return [*out, do.Reply(statuses=numbers)]

    def _stage(
        self,
        event: ev.SealGranted,
        keys: list[bytes],
        places: list[int],
        granted: set[Address],
        number: int,
        out: list[do.Instruction],
    ) -> list[Pending]:
        """Turn these pages in granted frames into complete reserved pages, and choose them."""
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
            self.accept(page)
        return pages

    def accept(self, page: Pending) -> bool:
        """Choose a complete page to be written through; return False if this is not possible.

        It is not possible if the page's own writers are about to store the parent in DRAM.
        """
        parent = self.pending.find(page.root, page.parent, page.group)
        if parent is not None and self._staged.get(page.parent) is not parent:
            return False
        if not self.can_extend(page.root, page.parent):
            return False
        if self._live(page.key) is None:  # a copy that was given up may still be in a batch: see ``saved``
            self._staged[page.key] = page
        in_batch = page.key in self.copies.down[self.lower.tier]  # out of this frame, or out of another one
        is_covered = in_batch or self._staged[page.key] is not page
        if not is_covered and (self._live(page.parent) is None or page.parent in self._chosen):  # else it waits for it
            self._chosen[page.key] = page
        return True

    def is_waiting(self, page: Pending) -> bool:
        """Return True if the page is in a batch, or was postponed."""
        return page.key in self.copies.down[self.lower.tier] or page in self._postponed

    # --- saving -------------------------------------------------------------------------------------------------------

    def retry(self, out: list[do.Instruction]) -> None:
        """Choose the postponed pages again, and start saving them."""
        if self._postponed:
            self._chosen |= {page.key: page for page in self._postponed if self._live(page.key) is page}
            self._postponed = []
            self.start(out)

    def start(self, out: list[do.Instruction]) -> None:
        """Start saving the chosen pages, each chain in a batch of its own."""
        while self._chosen:
            keys: set[bytes] = set()
            chain: list[Pending] = []
            for page in self._chosen.values():
                if not chain or page.parent in keys:
                    chain.append(page)
                    keys.add(page.key)
            self._chosen = {key: page for key, page in self._chosen.items() if key not in keys}
            self._save(chain, out)

    def _save(self, chain: list[Pending], out: list[do.Instruction]) -> None:
        """Take frames on NVMe for these pages and start the batch. Postpone or fail the pages that get no frame."""
        root, anchor = chain[0].root, chain[0].parent
        frame_class, owner = self._class_of(chain[0]).frame_class, self.copies.root_number(self.upper, chain[0].address)
        targets: list[Address] = []
        if self.has(root, anchor) and self.demotion.accepts(frame_class):
            pages_max = self.demotion.pages_max(frame_class, len(chain) * self.lower.segment.stride(frame_class))
            fits = self.lower.quotas.fit(owner, frame_class, pages_max, anchor, out) if pages_max else 0
            pool = self.lower.segment.pool(frame_class)
            targets = self.lower.take_after((anchor,), pool, fits, out) if fits else []
            share = self.lower.pages.holdings.roots[owner].share
            if not targets and (not pages_max or self.lower.departures.waiting or share.expected_bytes):
                self._postponed += chain
                return
        parent = self.lower.pages.find_in(root, anchor)
        if targets and parent is not None:
            self.lower.pages.hold(parent)
            batch = CopyBatch([], frame_class, self.upper, self.lower, [parent])
            info = standing(*self.lower.pages.standing_after(parent, chain[0].continues))
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
            self.demotion.charge(batch)
        self.fail(chain[len(targets) :], out)

    def fail(self, pages: list[Pending], out: list[do.Instruction]) -> None:
        """Doom these pages, and the complete pages after them."""
        waiting = deque(pages)
        while waiting:
            page = waiting.popleft()
            if self._staged.get(page.key) is page:
                del self._staged[page.key]
            if self._is_pending(page):
                waiting.extend(
                    child for child in self.pending.children(page.key) if child.is_complete and child.root == page.root
                )
                self.writing.doom([page], out)
                self.counters["pages_not_saved_through"] += 1

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """Handle ``events.Saved``: written pages are sealed on NVMe, and their frames in DRAM are free."""
        out: list[do.Instruction] = []
        batch = self.copies.staging.pop(event.number)
        self.copies.down[self.lower.tier].difference_update(page.key for page in batch.pages)
        done: list[Pending] = []
        failed: list[Pending] = []
        successors: list[Pending] = []
        places: list[int] = []
        parents: list[bytes] = []
        cause = "through"
        unused: list[Address] = []
        keys, roots = keys_of(event.heads), roots_of(event.heads)
        for i, (page, key, root) in enumerate(zip(batch.pages, keys, roots, strict=True)):
            staged = self._staged.pop(page.key, None)
            if staged is None or staged.address != page.source:  # given up; another writer's copy may be staged now
                unused.append(page.target)
                if staged is not None:
                    successors.append(staged)
                continue
            source = self._is_pending(staged) and staged.address == page.source
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
            cause = "copy" if staged.group == FETCH_GROUP else "through"  # a batch has pages of one chain
        self._seal_on_nvme(event, batch, places, parents, cause, out)
        self.copies.finish(batch, unused, out)
        for staged in done:
            self.writing.stored_below(staged, out)
        self.fail(failed, out)
        self.fail([page for page in successors if self._is_pending(page) and not self.accept(page)], out)
        stored = [staged.key for staged in done]  # includes keys that another writer has stored in the meantime
        self.writing.follow(list(dict.fromkeys([*stored, *(batch.pages[i].key for i in places)])), out)
        self.retry(out)
        self.start(out)
        return out

    def _seal_on_nvme(
        self,
        event: ev.Saved,
        batch: CopyBatch,
        places: list[int],
        parents: list[bytes],
        cause: str,
        out: list[do.Instruction],
    ) -> None:
        if not places:
            return
        pages = [batch.pages[i] for i in places]
        targets, keys = [page.target for page in pages], [page.key for page in pages]
        used_ns = [self.upper.pages.records.last_use_ns(*page.source[:2]) for page in pages]
        for page, used in zip(pages, used_ns, strict=True):
            self.lower.pages.offer_leaf(page.target, page.key, used // 1_000_000)
        out.append(do.WriteUse(targets, used_ns))
        standings = [page.standing for page in pages]
        spans = spans_at(self.lower.segment, targets)
        out.append(do.WriteSealed(targets, keys, standings, event.heads[places], parents, None, cause, spans))
        for name, count in (("pages_sealed", 1), ("pages_saved", 1), ("bytes_saved", batch.frame_class.page_bytes)):
            self.counters[name] += count * len(pages)
