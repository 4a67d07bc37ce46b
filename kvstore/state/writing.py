"""Reserved pages: from the reservation of a key to the seal, or to the release of the frame.

A *pending* page is reserved under a key and not sealed yet. It ends in one of two ways:

- It is sealed, once every shard of its write group has sealed it and its parent is sealed. If several groups write
  the same key, the first seal wins.
- It is *doomed*, because a shard revoked it, its deadline passed, or its writer died. The frame of a doomed page is
  QUARANTINED while one of its writers might still store into it. It is free once each writer has sealed or revoked
  the page, or is proven dead.

A single writer needs no reservation: it writes into frames that were granted ahead, and seals them like a put. It may
announce such pages before it writes them (``events.Begin``). They are then *started*: readers find them in the pending
table and follow them layer by layer (``StartedPages``). The announcement may come late or never. Then readers wait for
the seal; nothing else depends on it.

The parent of a page may be stored in the second tier only. Such a page is *written through*: saved to the second tier
out of the frame that it was written into. ``Writing`` asks an object about such pages: ``WriteThroughBase`` on a node
with one tier, where there are none, and ``tiering.write_through.WriteThrough`` otherwise.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.model.objects import is_object_class
from kvstore.model.replica import FETCH_GROUP, ROOT, Address, FrameState, Status, keys_of, standing
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.frames import ClassPool
from kvstore.state.interfaces import ClientSession
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants

GROUP = 1 << 63  # flag in the group number of pages in granted frames; the rest is their smallest generation


def was_granted(group: int, address: Address) -> bool:
    """Return True if a record with that group number belongs to a page that was written into a granted frame."""
    return group >= GROUP and group ^ GROUP <= address.generation


@dataclass(slots=True)
class Pending:
    """A reserved page.

    Attributes:
        at_root: the page starts a chain, so ``parent`` is its root.
        group: number of the write group.
        shards: number of shards in the write group.
        until_ns: the deadline for the seal.
        writing: the session of each shard that may still store into the frame.
        sealed_mask: a bit for each shard that has sealed.
        holds_parent: the parent is sealed and held, so that it cannot be evicted.
        hint: how long the page is worth keeping, see ``kvstore.model.retention``.
        continues: the parent comes from the same request, not from an earlier one.
        is_started: the page is being written into a granted frame, see ``StartedPages``.
    """

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
    hint: int = 0
    continues: bool = True
    is_started: bool = False

    @property
    def is_complete(self) -> bool:
        """True once every shard has sealed."""
        return self.sealed_mask == (1 << self.shards) - 1

    def is_open_to(self, shard: int, shards: int, session: int) -> bool:
        """Return True if the session may write the shard: it is not sealed and no other session writes it.

        A session that already writes the shard may ask again, because it may have lost the reply. Only one of its
        writers at a time asks for a shard (``Claims``).
        """
        is_free = self.writing.get(shard, session) == session
        return shards == self.shards and is_free and not self.sealed_mask >> shard & 1


class PendingTable:
    """Pending pages by address, by key and by parent. Several groups may write one key."""

    def __init__(self) -> None:
        self.by_address: dict[Address, Pending] = {}
        self._by_key: dict[bytes, list[Pending]] = {}
        self._by_parent: dict[bytes, list[Pending]] = {}

    def __len__(self) -> int:
        return len(self.by_address)

    def add(self, page: Pending) -> None:
        """Add a reservation."""
        self.by_address[page.address] = page
        if not page.doomed:
            self._by_key.setdefault(page.key, []).append(page)
            self._by_parent.setdefault(page.parent, []).append(page)

    def find(self, root: bytes, key: bytes, group: int) -> Pending | None:
        """Return the live reservation of ``key`` under ``root`` by ``group``; None if there is none."""
        return next((page for page in self._by_key.get(key, ()) if page.group == group and page.root == root), None)

    def is_reserved(self, root: bytes, key: bytes) -> bool:
        """Return True if any group has a live reservation of that page."""
        return any(page.root == root for page in self._by_key.get(key, ()))

    def first(self, key: bytes) -> Pending | None:
        """Return the earliest live reservation of ``key``. Readers that look for ``key`` find this one."""
        pages = self._by_key.get(key)
        return pages[0] if pages else None

    def children(self, key: bytes) -> list[Pending]:
        """Return the live reservations whose parent is ``key``."""
        return list(self._by_parent.get(key, ()))

    def doom(self, page: Pending) -> None:
        """Hide a page from readers and other writers. Its frame stays reserved until ``remove``."""
        page.doomed = True
        self._unlist(page)

    def remove(self, page: Pending) -> None:
        """Remove a page that was sealed, or whose frame is free."""
        del self.by_address[page.address]
        if not page.doomed:
            self._unlist(page)

    def _unlist(self, page: Pending) -> None:
        for table, key in ((self._by_key, page.key), (self._by_parent, page.parent)):
            pages = table[key]
            pages.remove(page)
            if not pages:
                del table[key]


class WriteThroughBase:
    """Pages whose parent is only in the second tier. These are the answers of a node with one tier."""

    def has(self, root: bytes, key: bytes) -> bool:
        """Return True if the second tier has this page."""
        return False

    def can_extend(self, root: bytes, key: bytes) -> bool:
        """Return True if children of that page can be written through.

        The second tier has the page, or a save of it has started, and the tier accepts more pages of its class.
        """
        return False

    def grantable(self, pool: ClassPool, anchor: bytes, count: int) -> int:
        """Return how many of ``count`` frames may be granted for pages after ``anchor``."""
        return count

    def take_for_put(self, anchor: bytes, pool: ClassPool, count: int, out: list[do.Instruction]) -> list[Address]:
        """Take up to ``count`` frames for a put that continues after ``anchor`` and got no frame in the first tier."""
        return []

    def take_for_reservation(
        self, anchor: bytes, pool: ClassPool, owner: int, taken: list[Address], count: int, out: list[do.Instruction]
    ) -> list[Address]:
        """Return frames for ``count`` pages that are reserved at once after ``anchor``.

        Args:
            owner: number of the root.
            taken: the frames that the first tier gave, fewer than ``count``.
        """
        return taken

    def seal(
        self, event: ev.SealGranted, granted: set[Address], keys: list[bytes], number: int
    ) -> list[do.Instruction] | None:
        """Seal a put whose parent the first tier does not have. Return None if no tier has the parent."""
        return None

    def accept(self, page: Pending) -> bool:
        """Choose a complete page without a parent in this tier to be written through; return False if it cannot be.

        After a series of these calls, the caller has to call ``start``.
        """
        return False

    def is_waiting(self, page: Pending) -> bool:
        """Return True if the page is being saved, or will be as soon as there is space for it."""
        return False

    def start(self, out: list[do.Instruction]) -> None:
        """Start saving the pages that ``accept`` has chosen."""

    def retry(self, out: list[do.Instruction]) -> None:
        """Try again to save pages for which the second tier had no space."""

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """Handle ``events.Saved`` for the saves that ``start`` started."""
        raise AssertionError("a node with one tier writes no page through")


QUARANTINED = FrameState.QUARANTINED


@dataclass(slots=True)
class ReservePlan:
    """The outcome of a ``Reserve`` before frames are taken.

    Attributes:
        statuses, addresses: of each page, for the reply.
        anchor: key of the last stored page, which the new pages follow.
        new: places of the pages that need frames.
    """

    statuses: list[Status]
    addresses: list[Address]
    anchor: bytes
    new: list[int] = field(default_factory=list)


class Writing:
    """The reserved pages of a node. Part of ``NodeState``; every change leaves as instructions."""

    def __init__(self, space: Space, tenants: Tenants, counters: Counter[str], ttl_ns_max: int) -> None:
        self.space = space
        self.tenants = tenants
        self.counters = counters
        self.ttl_ns_max = ttl_ns_max
        self.pending = PendingTable()
        self.write_through = WriteThroughBase()

    def reserve(self, event: ev.Reserve) -> list[do.Instruction]:
        """Handle ``events.Reserve``."""
        keys = keys_of(event.rows)
        if len(set(keys)) != len(keys):
            return [duplicate_refusal()]
        parents = [event.parent, *keys[:-1]]
        root = event.rows[0, ROOT].tobytes()
        out: list[do.Instruction] = []
        plan = self._plan(event, keys, root, out)
        taken = self._take_frames(event, root, plan, out)
        until_ns = event.now_ns + min(event.ttl_ns, self.ttl_ns_max)
        reserved = plan.new[: len(taken)]
        for i, address in zip(reserved, taken, strict=True):
            plan.statuses[i], plan.addresses[i] = Status.OK, address
            page = Pending(keys[i], parents[i], parents[i] == root, address, event.group, event.shards, until_ns)
            page.root, page.hint = root, event.hints[i] if event.hints else 0
            page.writing[event.shard] = event.session
            self.hold_parent(page)
            page.continues = not page.holds_parent
            self.pending.add(page)
        if reserved:
            args = (event.session, event.group, event.shard, event.shards, until_ns)
            out.append(do.WriteReserved(taken, event.rows[reserved], [parents[i] for i in reserved], *args))
        out.append(do.Reply(statuses=[int(status) for status in plan.statuses], addresses=plan.addresses))
        return out

    def _plan(self, event: ev.Reserve, keys: list[bytes], root: bytes, out: list[do.Instruction]) -> ReservePlan:
        """Find which pages need frames, and let the shard join reservations of its group."""
        plan = ReservePlan([Status.OK] * len(keys), [Address(0, 0, 0)] * len(keys), event.parent)
        parent_ok = event.parent == root or self._has_parent(root, event.parent, event.group)
        is_through = not parent_ok and not is_object_class(event.frame_class)
        parent_ok = parent_ok or (is_through and self.write_through.can_extend(root, event.parent))
        is_absent = False  # True from the first page that is not stored
        for i, key in enumerate(keys):
            stored = None if is_absent else self.space.pages.find(key)
            pending = self.pending.find(root, key, event.group) if stored is None else None
            if stored is not None and self.space.pages.root_of(stored) != root:
                # One of the two keys is forged: the page that was stored first keeps the key.
                plan.statuses[i], parent_ok, is_absent = Status.NO_PARENT, False, True
                continue
            if stored is not None:
                plan.statuses[i], plan.addresses[i], parent_ok, plan.anchor = Status.PRESENT, stored, True, key
                continue
            if is_through and not is_absent and self.write_through.has(root, key):
                plan.statuses[i], plan.anchor = Status.PRESENT, key
                continue
            is_absent = True
            if pending is not None and pending.is_open_to(event.shard, event.shards, event.session):
                plan.statuses[i], plan.addresses[i], parent_ok = Status.JOINED, pending.address, True
                pending.writing[event.shard] = event.session
                out.append(do.WriteWriter([pending.address], event.shard, event.session))
            elif pending is not None or not parent_ok:
                plan.statuses[i], parent_ok = Status.NO_PARENT, False
            else:
                plan.new.append(i)
        return plan

    def _take_frames(
        self, event: ev.Reserve, root: bytes, plan: ReservePlan, out: list[do.Instruction]
    ) -> list[Address]:
        """Take frames for the new pages, the first ones first. Set the status of the pages that get none."""
        new, anchor = plan.new, plan.anchor
        pool, number = self.space.segment.pool(event.frame_class), self.tenants.number(root)
        fits = self.space.quotas.fit(number, event.frame_class, len(new), anchor, out) if new else 0
        taken = self.space.take_after((anchor,), pool, fits, out) if fits else []
        self.space.pages.expect(taken, number)
        if len(taken) < len(new):
            taken = self.write_through.take_for_reservation(anchor, pool, number, taken, len(new), out)
            fits = max(fits, len(taken))
        for i in new[len(taken) :]:
            plan.statuses[i] = self.no_space(Status.OVER_QUOTA if len(taken) == fits else Status.NO_SPACE)
        return taken

    def no_space(self, otherwise: Status = Status.NO_SPACE) -> Status:
        """Return why this event got no frame: BUSY if frames will be free soon, else ``otherwise``."""
        return Status.BUSY if self.space.departures.waiting else otherwise

    def _has_parent(self, root: bytes, key: bytes, group: int) -> bool:
        return self.space.pages.find_in(root, key) is not None or self.pending.find(root, key, group) is not None

    def hold_parent(self, page: Pending) -> None:
        """Hold the parent of the page, if it is sealed, so that it cannot be evicted."""
        parent = None if page.at_root or page.holds_parent else self.space.pages.find_in(page.root, page.parent)
        if parent is not None:
            self.space.pages.hold(parent)
            page.holds_parent = True

    def _unhold_parent(self, page: Pending) -> None:
        if page.holds_parent:
            parent = self.space.pages.find(page.parent)
            assert parent is not None  # a held page is not evicted; damage of a parent first dooms pending children
            self.space.pages.unhold(parent)
            page.holds_parent = False

    def seal(self, event: ev.Seal) -> list[do.Instruction]:
        """Handle ``events.Seal``."""
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
                self._free_if_unwritten(page, out)
                statuses.append(Status.STALE)
                continue
            page.sealed_mask |= 1 << event.shard
            if page.shards > 1:
                out.append(do.WriteShards(address, page.shards, page.sealed_mask))
            status = self._complete(page, out) if page.is_complete else Status.PARTIAL
            if page.shards == 1 and status in (Status.PARTIAL, Status.BUSY):  # this writer sends no other message
                out.append(do.WriteShards(address, page.shards, page.sealed_mask))
            statuses.append(status)
        self.write_through.start(out)
        out.append(do.Reply(statuses=statuses))
        return out

    def _complete(self, page: Pending, out: list[do.Instruction]) -> Status:
        """Seal a page whose shards have all sealed, and the pages that waited for it.

        PARTIAL: the parent is not sealed yet. BUSY: the page is written through. PRESENT: another writer was first,
        and this copy is doomed.
        """
        status = self._seal_complete(page, out)
        if status in (Status.OK, Status.BUSY):
            self.follow([page.key], out)
        return status

    def follow(self, keys: list[bytes], out: list[do.Instruction]) -> None:
        """Hold pages that were just sealed for the reservations after them, and seal reservations that waited."""
        waiting = deque(keys if len(self.pending) else ())
        while waiting:
            for child in self.pending.children(waiting.popleft()):
                self.hold_parent(child)
                has_parent = child.holds_parent or self.write_through.can_extend(child.root, child.parent)
                if has_parent and child.is_complete and self._seal_complete(child, out) in (Status.OK, Status.BUSY):
                    waiting.append(child.key)

    def _seal_complete(self, page: Pending, out: list[do.Instruction]) -> Status:
        first = self.space.pages.find(page.key)
        if first is not None:
            same = self.space.pages.root_of(first) == page.root
            self.doom([page], out)
            return Status.PRESENT if same else Status.NO_PARENT
        parent = None if page.at_root else self.space.pages.find_in(page.root, page.parent)
        if parent is None and not page.at_root:
            if self.write_through.accept(page):
                return Status.BUSY
            if self.pending.is_reserved(page.root, page.parent):
                return Status.PARTIAL
            self.doom([page], out)
            return Status.NO_PARENT
        info = standing(*self.space.pages.standing_after(parent, page.continues), page.hint)
        self._unhold_parent(page)
        self._remove(page, out)
        self.space.pages.seal(page.address, page.key, page.root, parent, info)
        self.space.pages.offer_leaf(page.address, page.key, self.space.pages.now_ns // 1_000_000)
        spans = spans_at(self.space.segment, [page.address])
        cause = "copy" if page.group == FETCH_GROUP else "put"
        out.append(do.WriteSealed([page.address], [page.key], [info], cause=cause, spans=spans))
        self.counters["pages_sealed"] += 1
        return Status.OK

    def overdue(self) -> list[Pending]:
        """Return complete pages with a stored parent that are not sealed. There must be none."""
        return [
            page
            for page in self.pending.by_address.values()
            if page.is_complete and not page.doomed and not self.write_through.is_waiting(page)
            if self.space.pages.find_in(page.root, page.parent) is not None
            or self.write_through.has(page.root, page.parent)
        ]

    def drop_started(self, page: Pending, out: list[do.Instruction]) -> None:
        """Remove a started page from the pending table. Its frame stays with its writer."""
        self._unhold_parent(page)
        self._remove(page, out)

    def stored_below(self, page: Pending, out: list[do.Instruction]) -> None:
        """Free the frame of a page that is now only on NVMe, and doom other complete copies of it."""
        self._remove(page, out)
        self.space.pages.free([page.address], out)
        while (other := self.pending.first(page.key)) is not None and (other.is_complete and other.root == page.root):
            self.doom([other], out)

    def revoke(
        self, session: int, addresses: list[Address], out: list[do.Instruction], shard: int | None = None
    ) -> list[bool]:
        """End the writing of a session, or of one shard of it, into these pages.

        Return for each address whether the session was a writer there.
        """
        was_writer = []
        for address in addresses:
            page = self.pending.by_address.get(address)
            writing = page.writing.items() if page is not None else ()
            shards = [s for s, owner in writing if owner == session and shard in (None, s)]
            if page is not None and shards:
                self._end_writing(page, shards, out)
            was_writer.append(bool(shards))
        return was_writer

    def end_session(self, session: int, out: list[do.Instruction]) -> None:
        """End all writing of a session whose process is gone."""
        for page in list(self.pending.by_address.values()):
            shards = [shard for shard, owner in page.writing.items() if owner == session]
            if shards:
                self._end_writing(page, shards, out)
        if self.space.segment.session_ended(session):
            quarantined = self.space.segment.quarantined
            out.append(do.WriteQuarantine({position: set(sessions) for position, sessions in quarantined.items()}))

    def expire(self, now_ns: int, out: list[do.Instruction]) -> None:
        """Doom the reservations whose deadline has passed. Started pages have an ``expire`` of their own."""
        expired = [p for p in self.pending.by_address.values() if p.until_ns <= now_ns and not p.doomed]
        self.doom([page for page in expired if not page.is_started], out)

    def drop_children(self, keys: list[bytes], out: list[do.Instruction]) -> list[Address]:
        """Release sealed pages that have to leave, and return the sealed pages that reservations still hold.

        Reservations after pages with these keys are doomed. Started pages are not: they wait for the next seal of their
        parent, which may come from their own writer.
        """
        for page in [page for key in keys for page in self.pending.children(key) if page.holds_parent]:
            page.holds_parent = False
            self.doom([page] if not page.is_started else [], out)
        return self.held_parents()

    def held_parents(self) -> list[Address]:
        """Return the sealed pages that reservations hold, one entry per reservation."""
        parents = [self.space.pages.find(page.parent) for page in self.pending.by_address.values() if page.holds_parent]
        return [parent for parent in parents if parent is not None]

    def _end_writing(self, page: Pending, shards: list[int], out: list[do.Instruction]) -> None:
        """Doom a page because these shards stopped before they sealed it."""
        for shard in shards:
            del page.writing[shard]
            if page.writing:
                out.append(do.WriteWriter([page.address], shard, 0))
        self.doom([page], out)

    def doom(self, pages: list[Pending], out: list[do.Instruction]) -> None:
        """Give up these pages. Their frames are free once no session can write into them."""
        for page in pages:
            if not page.doomed:
                self._unhold_parent(page)
                self.pending.doom(page)
                self._update_readers(page, out)
                if page.writing:
                    self.space.pages.mark(page.address, QUARANTINED)
                    out.append(do.WriteState([page.address], QUARANTINED))
                    self.counters["pages_quarantined"] += 1
            self._free_if_unwritten(page, out)

    def _free_if_unwritten(self, page: Pending, out: list[do.Instruction]) -> None:
        """Free the frame of a doomed page once it has no writer."""
        if page.doomed and not page.writing:
            self.pending.remove(page)
            self.space.pages.free([page.address], out)

    def _remove(self, page: Pending, out: list[do.Instruction]) -> None:
        self.pending.remove(page)
        self._update_readers(page, out)

    def _update_readers(self, page: Pending, out: list[do.Instruction]) -> None:
        """Point the pending entry of the key, where readers look, at its next reservation, or remove the entry."""
        successor = self.pending.first(page.key)
        out.append(do.Unpend(page.key, successor.address if successor is not None else None))


def duplicate_refusal() -> do.Reply:
    """Return the refusal of a request that names one page, or one frame, twice."""
    return do.Reply(Status.INVALID, detail={"field": "pages", "reason": "a key or a frame is named twice"})


class StartedPages:
    """The started pages of a node. Part of ``NodeState``.

    Life of a frame: granted -> reserved for a started page -> granted again, when the page is about to be sealed, is
    given up, or misses its deadline. When a session ends, its granted and started frames are freed.
    """

    def __init__(self, writing: Writing, sessions: Mapping[int, ClientSession]) -> None:
        self.writing = writing
        self.space = writing.space
        self.sessions = sessions

    def begin(self, event: ev.Begin) -> list[do.Instruction]:
        """Handle ``events.Begin``."""
        keys, root = keys_of(event.rows), event.rows[0, ROOT].tobytes()
        if len(set(keys)) != len(keys) or len(set(event.addresses)) != len(keys):
            return [duplicate_refusal()]
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
            page.root, page.is_started = root, True
            self.writing.hold_parent(page)
            self.writing.pending.add(page)
        parents = [parents[i] for i in new]
        reserved = do.WriteReserved(addresses, event.rows[new], parents, event.session, group, 0, 1, until_ns)
        return [reserved, do.Reply()]

    def _may_expect(self, number: int, address: Address) -> bool:
        """Return True if the frame may be charged to that root.

        The tenant of the root has no quota, or was charged with this frame before. Any other page is not started:
        its seal decides whether the quota has space for it.
        """
        roots = self.space.pages.holdings.roots
        share, owner = roots[number].share, self.space.segment.extents[address.extent].owner[address.frame]
        return share.quota is None or (owner > 0 and roots[owner].share is share)

    def withdraw(self, session: int, addresses: list[Address], out: list[do.Instruction]) -> None:
        """Turn started pages of the session in these frames back into granted frames."""
        for address in addresses if self.writing.pending else ():
            page = self.writing.pending.by_address.get(address)
            if page is not None and page.is_started and not page.doomed and page.writing.get(0) == session:
                self._withdraw(page, out)

    def expire(self, now_ns: int, out: list[do.Instruction]) -> None:
        """Withdraw started pages that were not sealed in time. Readers no longer find them."""
        for page in list(self.writing.pending.by_address.values()):
            if page.is_started and not page.doomed and page.until_ns <= now_ns:
                self._withdraw(page, out)

    def _withdraw(self, page: Pending, out: list[do.Instruction]) -> None:
        self.writing.drop_started(page, out)
        self.sessions[page.writing[0]].granted.add(page.address)
        self.space.segment.extents[page.address.extent].pool.granted_ahead += 1
