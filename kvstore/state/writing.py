"""Writing: reservations under keys, by the shards of a write group; from reserve to seal or to a doomed frame's end.

See ``PendingTable`` for the life of a reserved page. The first seal of a key wins; a page is sealed once every shard
has sealed and its parent is sealed.

Begun: granted frames that a client is writing layer by layer, and whose pages readers may follow already.

A writer that is alone with its pages asks for nothing: it writes into frames that were granted ahead, says so, and
seals them like a put. What it says may come late, or never. Then its readers wait for the seal; nothing else depends
on it.

The pending table: pages reserved under a key and not sealed yet.

A pending page lives from reserve until every shard has sealed (it becomes a SEALED frame) or until it is *doomed*:
revoked by a shard, past its deadline, or its writer died. A doomed page's frame is QUARANTINED while any of its
writers might still store into it, and free once each of them has spoken (sealed, revoked) or is proven dead.

Behind: pages that are put behind a parent that the first tier does not have. What ``Writing`` asks about them.

A node with one tier answers as ``Behind`` does: there is no such parent. With a second tier ``through.Through`` does.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.model.objects import is_object_class
from kvstore.model.replica import ROOT, Address, FrameState, Status, keys_of, standing
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.frames import ClassPool
from kvstore.state.interfaces import ClientSession
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants

GROUP = 1 << 63  # of pages that are written into granted frames; the rest of the number is their least generation


def was_granted(group: int, address: Address) -> bool:
    """Whether a record of that group is of a page that was written into a granted frame."""
    return group >= GROUP and group ^ GROUP <= address.generation


@dataclass(slots=True)
class Pending:
    """One reserved page. ``writing`` are the shards (with their sessions) that may still store into the frame."""

    key: bytes
    parent: bytes
    at_root: bool
    address: Address
    group: int
    shards: int
    until_ns: int
    writing: dict[int, int] = field(default_factory=dict)
    sealed_mask: int = 0
    doomed: bool = False
    holds_parent: bool = False
    root: bytes = b""
    hint: int = 0  # see ``kvstore.model.retention``
    continues: bool = True  # it hangs on a page of the same request, not on what an earlier one left
    begun: bool = False  # it is being written into a frame that was granted: see ``Begun``

    @property
    def complete(self) -> bool:
        """Every shard has sealed."""
        return self.sealed_mask == (1 << self.shards) - 1

    def open_to(self, shard: int, shards: int, session: int) -> bool:
        """True where the session may write the shard: it is not sealed and no other session writes it. A session that
        already writes it lost the reply and asks again: only one of its writers at a time asks for a shard
        (``Claims``)."""
        mine = self.writing.get(shard, session) == session
        return shards == self.shards and mine and not self.sealed_mask >> shard & 1


class PendingTable:
    """Pending pages by address, by key (several groups may write one key) and by parent."""

    def __init__(self) -> None:
        self.by_address: dict[Address, Pending] = {}
        self._by_key: dict[bytes, list[Pending]] = {}
        self._by_parent: dict[bytes, list[Pending]] = {}

    def __len__(self) -> int:
        return len(self.by_address)

    def add(self, page: Pending) -> None:
        """A reservation was made."""
        self.by_address[page.address] = page
        if not page.doomed:
            self._by_key.setdefault(page.key, []).append(page)
            self._by_parent.setdefault(page.parent, []).append(page)

    def find(self, root: bytes, key: bytes, group: int) -> Pending | None:
        """The live reservation of ``key`` by ``group``; a page of another root is another page."""
        return next((page for page in self._by_key.get(key, ()) if page.group == group and page.root == root), None)

    def coming(self, root: bytes, key: bytes) -> bool:
        """Whether any session has reserved that page."""
        return any(page.root == root for page in self._by_key.get(key, ()))

    def named(self, key: bytes) -> Pending | None:
        """The reservation readers are shown for ``key``: the earliest live one."""
        pages = self._by_key.get(key)
        return pages[0] if pages else None

    def children(self, key: bytes) -> list[Pending]:
        """Live reservations whose page follows ``key``."""
        return list(self._by_parent.get(key, ()))

    def doom(self, page: Pending) -> None:
        """No longer live: readers and other writers do not see it. Its frame stays until ``remove``."""
        page.doomed = True
        self._unlist(page)

    def remove(self, page: Pending) -> None:
        """Sealed, or its frame is free."""
        del self.by_address[page.address]
        if not page.doomed:
            self._unlist(page)

    def _unlist(self, page: Pending) -> None:
        for table, key in ((self._by_key, page.key), (self._by_parent, page.parent)):
            pages = table[key]
            pages.remove(page)
            if not pages:
                del table[key]


class Behind:
    """The answers of a node with one tier."""

    def has(self, root: bytes, key: bytes) -> bool:
        """The second tier has that page."""
        return False

    def holds(self, root: bytes, key: bytes) -> bool:
        """The second tier has that page, or is about to have it, and takes more pages of its class."""
        return False

    def room(self, pool: ClassPool, anchor: bytes, count: int) -> int:
        """How many frames may be granted for pages after ``anchor``; all of ``count`` where they stay in this tier."""
        return count

    def make_room(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """Up to ``count`` frames for what a put goes on with after ``anchor``, where there were none."""
        return []

    def room_for(
        self, anchor: bytes, pool: ClassPool, owner: int, taken: list[Address], count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """Frames for ``count`` reservations after ``anchor``, which need them all at once, where only ``taken`` were to
        be had."""
        return taken

    def seal(
        self, event: ev.SealGranted, granted: set[Address], keys: list[bytes], number: int
    ) -> list[do.Instruction] | None:
        """A put whose pages hang on one that the first tier does not have; None where no tier has it."""
        return None

    def takes(self, page: Pending) -> bool:
        """This page is complete and has no parent here: whether the second tier takes it. ``start`` has to follow."""
        return False

    def flies(self, page: Pending) -> bool:
        """This page is being saved, or will be as soon as there is room for it."""
        return False

    def start(self, out: list[do.Instruction]) -> None:
        """Have those pages saved that ``takes`` said yes to."""

    def again(self, out: list[do.Instruction]) -> None:
        """Try once more what the second tier had no room for."""

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """See ``events.Saved``, of pages that ``start`` had saved."""
        raise AssertionError("nothing was to be saved behind anything")


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

    def reserve(self, event: ev.Reserve) -> list[do.Instruction]:
        """See ``events.Reserve``."""
        out: list[do.Instruction] = []
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
            found = None if absent else self.space.pages.find(key)
            joined = self.pending.find(root, key, event.group) if found is None else None
            if (
                found is not None and self.space.pages.root_of(found) != root
            ):  # forged: the page that came first has the key
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
                out.append(do.WriteWriter([joined.address], event.shard, event.session))
            elif joined is not None or not parent_ok:
                statuses[i], parent_ok = Status.NO_PARENT, False
            else:
                new.append(i)
        until_ns = event.now_ns + min(event.ttl_ns, self.ttl_ns_max)
        number = self.tenants.number(root)
        fits = self.space.quotas.fit(number, event.frame_class, len(new), anchor, out) if new else 0
        taken = self.space.take_after((anchor,), pool, fits, out) if fits else []
        self.space.pages.expect(taken, number)
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
            out.append(do.WriteReserved(taken, rows, [parents[i] for i in done], *args))
        out.append(do.Reply(statuses=[int(s) for s in statuses], addresses=addresses))
        return out

    def no_space(self, otherwise: Status = Status.NO_SPACE) -> Status:
        """Why this event got no frame: pages are on their way and frames come soon, or none may leave."""
        return Status.BUSY if self.space.departures.waiting else otherwise

    def _holdable(self, root: bytes, key: bytes, group: int) -> bool:
        return self.space.pages.find_in(root, key) is not None or self.pending.find(root, key, group) is not None

    def hold_parent(self, page: Pending) -> None:
        """What the page hangs on may not leave, where that is sealed."""
        parent = None if page.at_root or page.holds_parent else self.space.pages.find_in(page.root, page.parent)
        if parent is not None:
            self.space.pages.hold(parent)
            page.holds_parent = True

    def _unhold_parent(self, page: Pending) -> None:
        if page.holds_parent:
            parent = self.space.pages.find(page.parent)
            assert parent is not None  # held, so not evicted; a damaged parent dooms its pending children first
            self.space.pages.unhold(parent)
            page.holds_parent = False

    def seal(self, event: ev.Seal) -> list[do.Instruction]:
        """See ``events.Seal``."""
        out: list[do.Instruction] = []
        statuses: list[int] = []
        for address in event.addresses:
            page = self.pending.by_address.get(address)
            if page is None or page.writing.get(event.shard) != event.session:
                statuses.append(Status.STALE)
                continue
            del page.writing[event.shard]
            if page.doomed:
                if page.writing:
                    out.append(do.WriteWriter([address], event.shard, 0))
                self._settle(page, out)
                statuses.append(Status.STALE)
                continue
            page.sealed_mask |= 1 << event.shard
            if page.shards > 1:
                out.append(do.WriteShards(address, page.shards, page.sealed_mask))
            status = self._complete(page, out) if page.complete else Status.PARTIAL
            if page.shards == 1 and status in (Status.PARTIAL, Status.BUSY):  # this writer will not speak of it again
                out.append(do.WriteShards(address, page.shards, page.sealed_mask))
            statuses.append(status)
        self.through.start(out)
        out.append(do.Reply(statuses=statuses))
        return out

    def _complete(self, page: Pending, out: list[do.Instruction]) -> Status:
        """All shards are there: seal if the parent is sealed, drop the copy if another writer was first. BUSY: it is
        saved to NVMe, where its parent is."""
        status = self._seal_whole(page, out)
        if status in (Status.OK, Status.BUSY):
            self.follow([page.key], out)
        return status

    def follow(self, keys: list[bytes], out: list[do.Instruction]) -> None:
        """Pages of these keys were sealed: reservations hang on them, and those that waited for them are sealed too."""
        waiting = deque(keys)
        while waiting:
            for child in self.pending.children(waiting.popleft()):
                self.hold_parent(child)
                there = child.holds_parent or self.through.holds(child.root, child.parent)
                if there and child.complete and self._seal_whole(child, out) in (Status.OK, Status.BUSY):
                    waiting.append(child.key)

    def _seal_whole(self, page: Pending, out: list[do.Instruction]) -> Status:
        first = self.space.pages.find(page.key)
        if first is not None:
            same = self.space.pages.root_of(first) == page.root
            self.doom([page], out)
            return Status.PRESENT if same else Status.NO_PARENT
        parent = None if page.at_root else self.space.pages.find_in(page.root, page.parent)
        if parent is None and not page.at_root:
            if self.through.takes(page):
                return Status.BUSY
            if self.pending.coming(page.root, page.parent):
                return Status.PARTIAL
            self.doom([page], out)
            return Status.NO_PARENT
        info = standing(*self.space.pages.standing_after(parent, page.continues), page.hint)
        self._unhold_parent(page)
        self._forget(page, out)
        self.space.pages.seal(page.address, page.key, page.root, parent, info)
        self.space.pages.leaf(page.address, page.key, self.space.pages.now_ns // 1_000_000)
        out.append(
            do.WriteSealed([page.address], [page.key], [info], spans=spans_at(self.space.segment, [page.address]))
        )
        self.counters["pages_sealed"] += 1
        return Status.OK

    def forgotten(self) -> list[Pending]:
        """Pages that are whole, whose parent is stored, and that are not sealed: there is none."""
        return [
            page
            for page in self.pending.by_address.values()
            if page.complete and not page.doomed and not self.through.flies(page)
            if self.space.pages.find_in(page.root, page.parent) is not None or self.through.has(page.root, page.parent)
        ]

    def unbegin(self, page: Pending, out: list[do.Instruction]) -> None:
        """A begun page is a reservation no longer. Its frame stays its writer's."""
        self._unhold_parent(page)
        self._forget(page, out)

    def stored_below(self, page: Pending, out: list[do.Instruction]) -> None:
        """The page is on NVMe, and will not be in DRAM: its frame is free, and those of other writers of that key."""
        self._forget(page, out)
        self.space.pages.free([page.address], out)
        while (other := self.pending.named(page.key)) is not None and (other.complete and other.root == page.root):
            self.doom([other], out)

    def revoke(
        self, session: int, addresses: list[Address], out: list[do.Instruction], shard: int | None = None
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

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """A session's process is gone: it writes no more."""
        for page in list(self.pending.by_address.values()):
            shards = [shard for shard, owner in page.writing.items() if owner == session]
            if shards:
                self._silence(page, shards, out)
        if self.space.segment.session_ended(session):
            out.append(do.WriteQuarantine({at: set(held) for at, held in self.space.segment.quarantined.items()}))

    def expire(self, now_ns: int, out: list[do.Instruction]) -> None:
        """Reservations past their deadline: readers and other writers see them no more."""
        over = [p for p in self.pending.by_address.values() if p.until_ns <= now_ns and not p.doomed]
        self.doom([page for page in over if not page.begun], out)

    def drop_children(self, keys: list[bytes], out: list[do.Instruction]) -> list[Address]:
        """Sealed pages of these keys go whatever hangs on them. Returns what reservations still hang on. Begun ones
        wait for their parent's next seal, which may be their own writer's."""
        for page in [page for key in keys for page in self.pending.children(key) if page.holds_parent]:
            page.holds_parent = False
            self.doom([page] if not page.begun else [], out)
        return self.held()

    def held(self) -> list[Address]:
        """Sealed pages that reservations hang on, one entry per reservation."""
        parents = [self.space.pages.find(page.parent) for page in self.pending.by_address.values() if page.holds_parent]
        return [parent for parent in parents if parent is not None]

    def _silence(self, page: Pending, shards: list[int], out: list[do.Instruction]) -> None:
        """These shards will write no more and have not sealed: the page cannot become whole."""
        for shard in shards:
            del page.writing[shard]
            if page.writing:
                out.append(do.WriteWriter([page.address], shard, 0))
        self.doom([page], out)

    def doom(self, pages: list[Pending], out: list[do.Instruction]) -> None:
        """These pages will never be sealed; their frames are free once no session may write them any more."""
        for page in pages:
            if not page.doomed:
                self._unhold_parent(page)
                self.pending.doom(page)
                self._rename(page, out)
                if page.writing:
                    self.space.pages.mark(page.address, QUARANTINED)
                    out.append(do.WriteState([page.address], QUARANTINED))
                    self.counters["pages_quarantined"] += 1
            self._settle(page, out)

    def _settle(self, page: Pending, out: list[do.Instruction]) -> None:
        """A doomed page whose writers have all spoken or died gives its frame back."""
        if page.doomed and not page.writing:
            self.pending.remove(page)
            self.space.pages.free([page.address], out)

    def _forget(self, page: Pending, out: list[do.Instruction]) -> None:
        self.pending.remove(page)
        self._rename(page, out)

    def _rename(self, page: Pending, out: list[do.Instruction]) -> None:
        """Readers look pending pages up by key: show them the next reservation of that key, or none."""
        heir = self.pending.named(page.key)
        out.append(do.Unpend(page.key, heir.address if heir is not None else None))


def named_twice() -> do.Reply:
    """The refusal of a request that names one page, or one frame, twice."""
    return do.Reply(Status.INVALID, detail={"field": "pages", "reason": "a key or a frame is named twice"})


class BegunPages:
    """The begun pages of a node. Part of ``NodeState``.

    Life of a frame here: granted -> begun, a reservation of its session -> granted again, when its page is about to
    be sealed, is given up, or was not sealed by its deadline. A session that ends takes both with it.
    """

    def __init__(self, writing: Writing, sessions: Mapping[int, ClientSession]) -> None:
        self.writing = writing
        self.space = writing.space
        self.sessions = sessions

    def begin(self, event: ev.Begin) -> list[do.Instruction]:
        """See ``events.Begin``."""
        keys, root = keys_of(event.rows), event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [named_twice()]
        session = self.sessions.get(event.session)
        if session is None or not (event.parent == root or self.space.pages.find_in(root, event.parent) is not None):
            return [do.Reply()]
        new = [i for i, address in enumerate(event.addresses) if address in session.granted]
        new = [i for i in new if self.space.pages.find(keys[i]) is None]
        number = self.writing.tenants.number(root)
        new = [i for i in new if self._may_expect(number, event.addresses[i])]
        if not new:
            return [do.Reply()]
        parents = [event.parent, *keys[:-1]]
        addresses = [event.addresses[i] for i in new]
        self.space.pages.expect(addresses, number)
        group, until_ns = GROUP | min(address.generation for address in addresses), event.now_ns + event.ttl_ns
        for i, address in zip(new, addresses, strict=True):
            session.granted.discard(address)
            self.space.segment.extents[address.extent].pool.granted_ahead -= 1
            writing = {0: event.session}
            page = Pending(keys[i], parents[i], parents[i] == root, address, group, 1, until_ns, writing)
            page.root, page.begun = root, True
            self.writing.hold_parent(page)
            self.writing.pending.add(page)
        parents = [parents[i] for i in new]
        reserved = do.WriteReserved(addresses, event.rows[new], parents, event.session, group, 0, 1, until_ns)
        return [reserved, do.Reply()]

    def _may_expect(self, number: int, address: Address) -> bool:
        """The frame may count for that root: its tenant has no quota, or was charged with the frame already. A page in
        any other is not begun: whether there is room for it its seal will tell."""
        roots = self.space.pages.holdings.roots
        share, owner = roots[number].share, self.space.segment.extents[address.extent].owner[address.frame]
        return share.quota is None or (owner > 0 and roots[owner].share is share)

    def withdraw(self, session: int, addresses: list[Address], out: list[do.Instruction]) -> None:
        """Frames that the session has begun to write are merely granted again."""
        for address in addresses if self.writing.pending else ():
            page = self.writing.pending.by_address.get(address)
            if page is not None and page.begun and not page.doomed and page.writing.get(0) == session:
                self._withdraw(page, out)

    def expire(self, now_ns: int, out: list[do.Instruction]) -> None:
        """Pages that were not sealed in time are shown to readers no longer."""
        for page in list(self.writing.pending.by_address.values()):
            if page.begun and not page.doomed and page.until_ns <= now_ns:
                self._withdraw(page, out)

    def _withdraw(self, page: Pending, out: list[do.Instruction]) -> None:
        self.writing.unbegin(page, out)
        self.sessions[page.writing[0]].granted.add(page.address)
        self.space.segment.extents[page.address.extent].pool.granted_ahead += 1
