"""Writing: reservations under keys, by the shards of a write group; from reserve to seal or to a doomed frame's end.

See ``pending`` for the life of a reserved page. The first seal of a key wins; a page is sealed once every shard has
sealed and its parent is sealed.
"""

from __future__ import annotations

from collections import Counter, deque

from kvstore.model.objects import is_object_class
from kvstore.model.replica import ROOT, Address, FrameState, Status, keys_of, standing
from kvstore.state import events as ev
from kvstore.state.behind import Behind
from kvstore.state.pending import Pending, PendingTable
from kvstore.state.space import Space
from kvstore.state.spans import spans_at
from kvstore.state.tenants import Tenants

QUARANTINED = FrameState.QUARANTINED


class Writing:
    """The reserved pages of a node. Part of ``NodeState``; every change leaves as instructions."""

    def __init__(self, space: Space, tenants: Tenants, counters: Counter[str], ttl_ns_max: int) -> None:
        self.space = space
        self.tenants = tenants
        self.counters = counters
        self.ttl_ns_max = ttl_ns_max
        self.pending = PendingTable()
        self.through = Behind()  # for pages whose parent this tier does not have

    def reserve(self, event: ev.Reserve) -> list[ev.Instruction]:
        """See ``events.Reserve``."""
        out: list[ev.Instruction] = []
        keys = keys_of(event.rows)
        if len(set(keys)) != len(keys):
            return [named_twice()]
        parents = [event.parent, *keys[:-1]]
        root = event.rows[0, ROOT].tobytes()
        pool = self.space.segment.pool(event.frame_class)
        statuses, addresses = [Status.OK] * len(keys), [Address(0, 0, 0)] * len(keys)
        new: list[int] = []
        parent_ok = event.parent == root or self._holdable(root, event.parent, event.group)
        through = not parent_ok and not is_object_class(event.frame_class)
        parent_ok = parent_ok or (through and self.through.holds(root, event.parent))
        absent = False
        anchor = event.parent
        for i, key in enumerate(keys):
            found = None if absent else self.space.find(key)
            joined = self.pending.find(root, key, event.group) if found is None else None
            if found is not None and self.space.root_of(found) != root:  # forged: the page that came first has the key
                statuses[i], parent_ok, absent = Status.NO_PARENT, False, True
                continue
            if found is not None:
                statuses[i], addresses[i], parent_ok, anchor = Status.PRESENT, found, True, key
                continue
            if through and not absent and self.through.has(root, key):
                statuses[i], anchor = Status.PRESENT, key
                continue
            absent = True
            if joined is not None and joined.open_to(event.shard, event.shards, event.session):
                statuses[i], addresses[i], parent_ok = Status.JOINED, joined.address, True
                joined.writing[event.shard] = event.session
                out.append(ev.WriteWriter([joined.address], event.shard, event.session))
            elif joined is not None or not parent_ok:
                statuses[i], parent_ok = Status.NO_PARENT, False
            else:
                new.append(i)
        until_ns = event.now_ns + min(event.ttl_ns, self.ttl_ns_max)
        number = self.tenants.number(root)
        fits = self.space.quotas.fit(number, event.frame_class, len(new), anchor, out) if new else 0
        taken = self.space.take_after((anchor,), pool, fits, out) if fits else []
        self.space.expect(taken, number)
        if len(taken) < len(new):
            taken = self.through.room_for(anchor, pool, number, taken, len(new), out)
            fits = max(fits, len(taken))
        done = new[: len(taken)]
        for i in new[len(taken) :]:
            statuses[i] = self.no_space(Status.OVER_QUOTA if len(taken) == fits else Status.NO_SPACE)
        for i, address in zip(done, taken, strict=True):
            statuses[i], addresses[i] = Status.OK, address
            page = Pending(keys[i], parents[i], parents[i] == root, address, event.group, event.shards, until_ns)
            page.root, page.hint = root, event.hints[i] if event.hints else 0
            page.writing[event.shard] = event.session
            self.hold_parent(page)
            page.continues = not page.holds_parent
            self.pending.add(page)
        if done:
            rows = event.rows[done]
            args = (event.session, event.group, event.shard, event.shards, until_ns)
            out.append(ev.WriteReserved(taken, rows, [parents[i] for i in done], *args))
        out.append(ev.Reply(statuses=[int(s) for s in statuses], addresses=addresses))
        return out

    def no_space(self, otherwise: Status = Status.NO_SPACE) -> Status:
        """Why this event got no frame: pages are on their way and frames come soon, or none may leave."""
        return Status.BUSY if self.space.waiting else otherwise

    def _holdable(self, root: bytes, key: bytes, group: int) -> bool:
        return self.space.find_in(root, key) is not None or self.pending.find(root, key, group) is not None

    def hold_parent(self, page: Pending) -> None:
        """What the page hangs on may not leave, where that is sealed."""
        parent = None if page.at_root or page.holds_parent else self.space.find_in(page.root, page.parent)
        if parent is not None:
            self.space.hold(parent)
            page.holds_parent = True

    def _unhold_parent(self, page: Pending) -> None:
        if page.holds_parent:
            parent = self.space.find(page.parent)
            assert parent is not None  # held, so not evicted; a damaged parent dooms its pending children first
            self.space.unhold(parent)
            page.holds_parent = False

    def seal(self, event: ev.Seal) -> list[ev.Instruction]:
        """See ``events.Seal``."""
        out: list[ev.Instruction] = []
        statuses: list[int] = []
        for address in event.addresses:
            page = self.pending.by_address.get(address)
            if page is None or page.writing.get(event.shard) != event.session:
                statuses.append(Status.STALE)
                continue
            del page.writing[event.shard]
            if page.doomed:
                if page.writing:
                    out.append(ev.WriteWriter([address], event.shard, 0))
                self._settle(page, out)
                statuses.append(Status.STALE)
                continue
            page.sealed_mask |= 1 << event.shard
            if page.shards > 1:
                out.append(ev.WriteShards(address, page.shards, page.sealed_mask))
            status = self._complete(page, out) if page.complete else Status.PARTIAL
            if page.shards == 1 and status in (Status.PARTIAL, Status.BUSY):  # this writer will not speak of it again
                out.append(ev.WriteShards(address, page.shards, page.sealed_mask))
            statuses.append(status)
        self.through.start(out)
        out.append(ev.Reply(statuses=statuses))
        return out

    def _complete(self, page: Pending, out: list[ev.Instruction]) -> Status:
        """All shards are there: seal if the parent is sealed, drop the copy if another writer was first. BUSY: it is
        saved to NVMe, where its parent is."""
        status = self._seal_whole(page, out)
        if status in (Status.OK, Status.BUSY):
            self.follow([page.key], out)
        return status

    def follow(self, keys: list[bytes], out: list[ev.Instruction]) -> None:
        """Pages of these keys were sealed: reservations hang on them, and those that waited for them are sealed too."""
        waiting = deque(keys)
        while waiting:
            for child in self.pending.children(waiting.popleft()):
                self.hold_parent(child)
                there = child.holds_parent or self.through.holds(child.root, child.parent)
                if there and child.complete and self._seal_whole(child, out) in (Status.OK, Status.BUSY):
                    waiting.append(child.key)

    def _seal_whole(self, page: Pending, out: list[ev.Instruction]) -> Status:
        first = self.space.find(page.key)
        if first is not None:
            same = self.space.root_of(first) == page.root
            self.doom([page], out)
            return Status.PRESENT if same else Status.NO_PARENT
        parent = None if page.at_root else self.space.find_in(page.root, page.parent)
        if parent is None and not page.at_root:
            if self.through.takes(page):
                return Status.BUSY
            if self.pending.coming(page.root, page.parent):
                return Status.PARTIAL
            self.doom([page], out)
            return Status.NO_PARENT
        info = standing(*self.space.standing_after(parent, page.continues), page.hint)
        self._unhold_parent(page)
        self._forget(page, out)
        self.space.seal(page.address, page.key, page.root, parent, info)
        self.space.leaf(page.address, page.key, self.space.now_ns // 1_000_000)
        out.append(
            ev.WriteSealed([page.address], [page.key], [info], spans=spans_at(self.space.segment, [page.address]))
        )
        self.counters["pages_sealed"] += 1
        return Status.OK

    def forgotten(self) -> list[Pending]:
        """Pages that are whole, whose parent is stored, and that are not sealed: there is none."""
        return [
            page
            for page in self.pending.by_address.values()
            if page.complete and not page.doomed and not self.through.flies(page)
            if self.space.find_in(page.root, page.parent) is not None or self.through.has(page.root, page.parent)
        ]

    def unbegin(self, page: Pending, out: list[ev.Instruction]) -> None:
        """A begun page is a reservation no longer. Its frame stays its writer's."""
        self._unhold_parent(page)
        self._forget(page, out)

    def stored_below(self, page: Pending, out: list[ev.Instruction]) -> None:
        """The page is on NVMe, and will not be in DRAM: its frame is free, and those of other writers of that key."""
        self._forget(page, out)
        self.space.free([page.address], out)
        while (other := self.pending.named(page.key)) is not None and (other.complete and other.root == page.root):
            self.doom([other], out)

    def revoke(
        self, session: int, addresses: list[Address], out: list[ev.Instruction], shard: int | None = None
    ) -> list[bool]:
        """A session, or one shard of it, writes no more into these pages; per address whether it was a writer there."""
        theirs = []
        for address in addresses:
            page = self.pending.by_address.get(address)
            writing = page.writing.items() if page is not None else ()
            shards = [s for s, owner in writing if owner == session and shard in (None, s)]
            if page is not None and shards:
                self._silence(page, shards, out)
            theirs.append(bool(shards))
        return theirs

    def end_session(self, session: int, out: list[ev.Instruction]) -> None:
        """A session's process is gone: it writes no more."""
        for page in list(self.pending.by_address.values()):
            shards = [shard for shard, owner in page.writing.items() if owner == session]
            if shards:
                self._silence(page, shards, out)
        if self.space.segment.session_ended(session):
            out.append(ev.WriteQuarantine({at: set(held) for at, held in self.space.segment.quarantined.items()}))

    def expire(self, now_ns: int, out: list[ev.Instruction]) -> None:
        """Reservations past their deadline: readers and other writers see them no more."""
        over = [p for p in self.pending.by_address.values() if p.until_ns <= now_ns and not p.doomed]
        self.doom([page for page in over if not page.begun], out)

    def drop_children(self, keys: list[bytes], out: list[ev.Instruction]) -> list[Address]:
        """Sealed pages of these keys go whatever hangs on them. Returns what reservations still hang on. Begun ones
        wait for their parent's next seal, which may be their own writer's."""
        for page in [page for key in keys for page in self.pending.children(key) if page.holds_parent]:
            page.holds_parent = False
            self.doom([page] if not page.begun else [], out)
        return self.held()

    def held(self) -> list[Address]:
        """Sealed pages that reservations hang on, one entry per reservation."""
        parents = [self.space.find(page.parent) for page in self.pending.by_address.values() if page.holds_parent]
        return [parent for parent in parents if parent is not None]

    def _silence(self, page: Pending, shards: list[int], out: list[ev.Instruction]) -> None:
        """These shards will write no more and have not sealed: the page cannot become whole."""
        for shard in shards:
            del page.writing[shard]
            if page.writing:
                out.append(ev.WriteWriter([page.address], shard, 0))
        self.doom([page], out)

    def doom(self, pages: list[Pending], out: list[ev.Instruction]) -> None:
        """These pages will never be sealed; their frames are free once no session may write them any more."""
        for page in pages:
            if not page.doomed:
                self._unhold_parent(page)
                self.pending.doom(page)
                self._rename(page, out)
                if page.writing:
                    self.space.mark(page.address, QUARANTINED)
                    out.append(ev.WriteState([page.address], QUARANTINED))
                    self.counters["pages_quarantined"] += 1
            self._settle(page, out)

    def _settle(self, page: Pending, out: list[ev.Instruction]) -> None:
        """A doomed page whose writers have all spoken or died gives its frame back."""
        if page.doomed and not page.writing:
            self.pending.remove(page)
            self.space.free([page.address], out)

    def _forget(self, page: Pending, out: list[ev.Instruction]) -> None:
        self.pending.remove(page)
        self._rename(page, out)

    def _rename(self, page: Pending, out: list[ev.Instruction]) -> None:
        """Readers look pending pages up by key: show them the next reservation of that key, or none."""
        heir = self.pending.named(page.key)
        out.append(ev.Unpend(page.key, heir.address if heir is not None else None))


def named_twice() -> ev.Reply:
    """The refusal of a request that names one page, or one frame, twice."""
    return ev.Reply(Status.INVALID, detail={"field": "pages", "reason": "a key or a frame is named twice"})
