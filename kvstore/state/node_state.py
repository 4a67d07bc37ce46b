"""NodeState: everything that a node decides about its frames, as ``handle(event) -> [instruction]``.

The tiers of a node form a row, the fastest first. Clients write and lease in the first one; the node copies pages
between neighbours (``tiering``). Free frames are in each tier's ``frames.Segment``, reserved pages in
``writing.Writing``, leases in ``leases.LeaseTable``, and memory that engines mount in ``mounts``. Sealed pages are only
in the index and the records, which are read through ``PageIndex`` and ``RecordView``.

When a node is restarted with less DRAM, it gives back the positions beyond its new size (``Segment.limit``). Frames
there are no longer granted (``Extent.close``), and each tick one extent is emptied (``shrink``): its pages move into
other extents of their class, which evict their coldest pages if they are full. Leases, reservations and unfinished
copies keep an extent in place; a later tick tries again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kvstore.model.replica import REPLICATED_INFO, ROOT, Address, FrameClass, FrameState, Status, Tier, keys_of
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_after
from kvstore.state.eviction import Page
from kvstore.state.frames import GRANTED_AHEAD_SHARE, Extent
from kvstore.state.groups import Groups
from kvstore.state.interfaces import ClientSession, TierParts
from kvstore.state.leases import LeaseTable
from kvstore.state.mounts import Mounts
from kvstore.state.objects import ObjectBatches, Objects
from kvstore.state.operator_evict import ChosenEviction
from kvstore.state.pins import Pins
from kvstore.state.space import Space
from kvstore.state.tenants import TenantQuota, Tenants
from kvstore.state.tier_pages import TierPages, standings_of
from kvstore.state.tiering.tiering import Tiering
from kvstore.state.writing import PendingTable, StartedPages, Writing, duplicate_refusal

FREE, SEALED = FrameState.FREE, FrameState.SEALED


def shrink(space: Space, out: list[do.Instruction]) -> None:
    """Empty one extent beyond the bound, if possible. A decision empties at most one extent."""
    beyond = [extent for extent in space.segment.extents.values() if extent.position >= space.segment.bound]
    fixed = space.pages.leases.extents() | space.extents_in_flight() if beyond else set()
    for extent in beyond:
        can_move = extent.number not in fixed and extent.count(FREE) + extent.sealed == extent.frames
        if can_move and _fits(space, extent, out):
            for frame in [frame for frame in range(extent.frames) if extent.state[frame] == SEALED]:
                target = space.pages.grant(extent.pool, 1)[0]
                space.pages.move(Address(extent.number, frame, extent.generation[frame]), target, out)
            space.drop_extent(extent, out)
            return


def _fits(space: Space, extent: Extent, out: list[do.Instruction]) -> bool:
    """Return True if the extent's pages fit into other extents, after these have evicted their coldest pages."""
    pool = extent.pool  # its free frames do not include those of a closed extent
    if extent.sealed > pool.free:
        space.evict_for_move(pool, extent.sealed - pool.free, out)
    return extent.sealed <= pool.free


CHECK_SESSIONS_PER_TICK = 64
_MAKES_ROOM = ev.Tick, ev.Grant, ev.Demote  # before these events, members of groups that have lost one are removed
_OK, _PRESENT, _BUSY = int(Status.OK), int(Status.PRESENT), int(Status.BUSY)


class NodeState:
    """The decisions of a node.

    One thread calls ``handle``, and performs the instructions of each decision before the next event.

    Attributes:
        spaces: the tiers, in the order of ``tiers``.
        space: the first tier.
    """

    def __init__(
        self,
        tiers: Mapping[Tier, TierParts],
        *,
        lease_ttl_ns_max: int = 3600 * 10**9,
        sessions_max: int = 256,
        quotas: Iterable[TenantQuota] = (),
        named: Iterable[tuple[bytes, dict[str, Any]]] = (),
        pins_share_max: float = 0.5,
    ) -> None:
        self.sessions: dict[int, ClientSession] = {}
        self.leases = LeaseTable()
        self.counters: Counter[str] = Counter()
        self.lease_ttl_ns_max = lease_ttl_ns_max
        self.sessions_max = sessions_max
        self._checked = 0
        self.tenants = Tenants(tiers, quotas)
        for root, about in named:
            self.tenants.restore(root, about)
        self.spaces: dict[Tier, Space] = {}
        for tier, parts in tiers.items():
            counters = Counter[str]() if self.spaces else self.counters  # the first tier uses the node's counters
            self.spaces[tier] = Space(TierPages(tier, parts, self.leases, counters, self.tenants.holdings[tier]))
        self.space = next(iter(self.spaces.values()))
        self.segment, self.records = self.space.segment, self.space.pages.records
        self.writing = Writing(self.space, self.tenants, self.counters, lease_ttl_ns_max)
        self.started = StartedPages(self.writing, self.sessions)
        rules = {tier: parts.rules for tier, parts in tiers.items()}
        self.tiering = Tiering(self.spaces, rules, self.writing, self.tenants, self.counters)
        self.groups = Groups(self.spaces.values(), self._class_of)
        self.pins = self.tiering.pins = Pins(self.spaces, self.tenants, pins_share_max)
        self.objects = Objects(
            *(self.spaces, self.sessions, self.tiering.copies, self.counters, self._seal_granted, self.pins.release),
            self.groups,
        )
        self.batches = ObjectBatches(self.objects, self.writing, self.sessions)
        self.mounts = Mounts(self.segment.numbers, self.tenants, self.sessions)
        self._handlers = self._table()

    def _table(self) -> dict[type, Callable[[Any], list[do.Instruction]]]:
        """Return the handler of each event."""
        return {
            ev.SealGranted: self._seal,
            ev.SealObjects: self._seal_objects,
            ev.Delete: self.objects.delete,
            ev.Bury: self.objects.bury,
            ev.Grant: self._grant,
            ev.Begin: self.started.begin,
            ev.Reserve: self._reserve,
            ev.Seal: self.writing.seal,
            ev.Revoke: self._revoke,
            ev.TakeLease: self._take_lease,
            ev.RenewLease: self._renew_lease,
            ev.ReleaseLease: self._release_lease,
            ev.SessionOpened: self._session_opened,
            ev.ConnectionLost: self._session_lost,
            ev.SessionDead: self._session_dead,
            ev.Damaged: self._damaged,
            ev.Stamped: self._stamped,
            ev.WantCopies: self._want_copies,
            ev.Evict: self._evict,
            ev.EvictChosen: ChosenEviction(self.space_of).evict,
            ev.Tick: self._tick,
            ev.NameRoot: self.tenants.name_root,
            ev.Pin: self.pins.pin,
            ev.RestorePins: self.pins.restore,
            ev.Unpin: self.pins.unpin,
            ev.Populated: self._populated,
            ev.PopulationFailed: self._population_failed,
            **self.tiering.handlers(),
            **self.mounts.handlers(),
        }

    def handle(self, event: ev.Event) -> list[do.Instruction]:
        """Decide about one event. If the event needs a ``Reply``, it is the last instruction."""
        for space in () if event.joins else self.spaces.values():
            space.begin(event.now_ns)
        out: list[do.Instruction] = []
        if isinstance(event, _MAKES_ROOM):
            self.objects.remove_broken(out)
        out += self._handlers[type(event)](event)
        out = self.groups.follow(out, event.now_ns)
        return self._with_book(out) if self.tenants.book or self.pins.book else out

    def _with_book(self, out: list[do.Instruction]) -> list[do.Instruction]:
        """Put the changes of names and pins first, so that a root's name is written before its pages."""
        book = self.tenants.book + self.pins.book
        self.tenants.book, self.pins.book = [], []
        return book + out

    def space_of(self, extent: int) -> Space:
        """Return the tier that has this extent; the first tier if none has it."""
        return next((space for space in self.spaces.values() if extent in space.segment.extents), self.space)

    def frames_needed(self, event: ev.Event) -> tuple[FrameClass, int] | None:
        """Return the class and number of first-tier frames that the decision about this event may take."""
        return event.frames_needed(self._class_of)

    def _class_of(self, address: Address) -> FrameClass | None:
        extent = self.space_of(address.extent).segment.extents.get(address.extent)
        return extent.pool.frame_class if extent is not None else None

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _session_opened(self, event: ev.SessionOpened) -> list[do.Instruction]:
        session = self.sessions.get(event.session)
        if session is None:
            if len(self.sessions) >= self.sessions_max:
                return [do.Reply(Status.NO_SPACE)]
            session = self.sessions[event.session] = ClientSession()
        session.connected = True
        out: list[do.Instruction] = []
        if event.granted is not None:
            lost = sorted(address for address in session.granted if address.generation > event.granted)
            if lost:
                self._free_granted(session, lost, out)
                self.counters["grants_lost"] += len(lost)
        return [*out, do.Reply()]

    def _session_lost(self, event: ev.ConnectionLost) -> list[do.Instruction]:
        session = self.sessions.get(event.session)
        if session is None:
            return []
        session.connected = False
        return [do.CheckSession(event.session)]

    def _session_dead(self, event: ev.SessionDead) -> list[do.Instruction]:
        session = self.sessions.pop(event.session, None)
        if session is None:
            return []
        out: list[do.Instruction] = []
        self._free_granted(session, list(session.granted), out)
        for part in (self.writing, self.objects, self.mounts):
            part.end_session(event.session, out)
        for name in self.leases.of_session(event.session):
            self._end_lease(name, out)
        self.counters["sessions_dead"] += 1
        return out

    # --- put: granted ahead, sealed in one message ------------------------------------------------------------------

    def _grant(self, event: ev.Grant) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        pool, count = self.segment.pool(event.frame_class), event.count
        if event.ahead:
            count = max(0, min(count, self.segment.ahead_max(pool) - pool.granted_ahead))
        else:
            count = self.writing.write_through.grantable(pool, event.anchor, count)
        session = self.sessions.setdefault(event.session, ClientSession())
        published, tail = session.tail
        anchors = (event.anchor, tail) if 0 < event.since <= published else (event.anchor,)
        with self.space.holding(anchors):
            fits = self._fit(event, count, out) if self.space.pages.holdings.limited and count else count
            addresses = self.space.take(pool, fits, out) if fits else []
        if not addresses and not event.ahead:
            addresses = self.writing.write_through.take_for_put(event.anchor, pool, event.count, out)
        if addresses:
            session.granted.update(addresses)
            pool.granted_ahead += len(addresses)
            if event.root:
                self.space.pages.expect(addresses, self.tenants.number(event.root))
            out.append(do.WriteGranted(addresses, event.session))
        refusal = self.writing.no_space(Status.OVER_QUOTA if fits < count else Status.NO_SPACE)
        status = Status.OK if addresses else refusal if count or self.space.departures.waiting else Status.NO_SPACE
        out.append(do.Reply(status, addresses=addresses))
        return out

    def _fit(self, event: ev.Grant, count: int, out: list[do.Instruction]) -> int:
        """Return how many of these frames the tenant may fill. Frames ahead of need are limited to a small share of its
        quota.

        The tenant is that of the event's root, or else of the page that the new pages will follow.
        """
        root = event.root
        if not root:
            page = self.space.pages.find(event.anchor) if event.anchor else None
            root = event.anchor
            if page is not None and not self.tenants.is_known(root):
                root = self.space.pages.root_of(page)
            if not self.tenants.is_known(root):  # the page was evicted: the tenant is unknown before the seal
                return count
        number = self.tenants.number(root)
        if event.ahead:
            return self.space.quotas.spare(number, event.frame_class, count, GRANTED_AHEAD_SHARE)
        return self.space.quotas.fit(number, event.frame_class, count, b"", out)

    def _seal(self, event: ev.SealGranted) -> list[do.Instruction]:
        if event.replaces is not None:
            return self.objects.seal(event)
        out = self._seal_granted(event)
        reply = out[-1]
        assert type(reply) is do.Reply
        if event.frame_class.layers == 1:
            self.objects.sealed(event, reply)
        return self._with_refused_freed(event, out)

    def _seal_objects(self, event: ev.SealObjects) -> list[do.Instruction]:
        return self._with_refused_freed(event, self.batches.seal(event))

    def _with_refused_freed(
        self, event: ev.SealGranted | ev.SealObjects, out: list[do.Instruction]
    ) -> list[do.Instruction]:
        """Free the frames of refused pages in a published put, whose writer receives no reply.

        A put that is BUSY keeps its frames, because it will be decided again.
        """
        reply, session = out[-1], self.sessions.get(event.session)
        assert type(reply) is do.Reply
        statuses = reply.statuses
        if not event.number or session is None or _BUSY in statuses or (statuses and not any(statuses)):
            return out
        statuses = statuses or [-1] * len(event.addresses)
        refused = {address for address, status in zip(event.addresses, statuses, strict=True) if status != _OK}
        freed = sorted(refused & session.granted)
        if freed:
            out.pop()
            self._free_granted(session, freed, out)
            out.append(reply)
            self.counters["pages_published_in_vain"] += len(freed)
        return out

    def _seal_granted(self, event: ev.SealGranted) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        session = self.sessions.get(event.session) or self.sessions.setdefault(event.session, ClientSession())
        granted = session.granted
        keys = keys_of(event.rows)
        count = len(keys)
        if len(set(keys)) != count or len(set(event.addresses)) != count:
            return [duplicate_refusal()]
        self.started.withdraw(event.session, event.addresses, out)
        root = event.rows[0, ROOT].tobytes()
        first, parent = self.space.pages.leading(root, event.parent, keys)
        if parent is None and event.parent != root:
            below = self.writing.write_through.seal(event, granted, keys, self.tenants.number(root))
            if below is not None:
                return [*out, *below]
        # By prefix closure, no page after the first absent one can be stored. So pages are sealed up to the first frame
        # that is not granted; the pages after it would have no parent.
        last = first
        if parent is not None or event.parent == root:
            rest = event.addresses[first:]
            last = count if granted.issuperset(rest) else first + [a in granted for a in rest].index(False)
            last = first + self.space.pages.absent(keys[first:last])  # a forged key stays with the page that has it
        number, whole = self.tenants.number(root), last
        if last > first and self.space.pages.holdings.limited:
            anchor = keys[first - 1] if first else event.parent
            last = first + self.space.quotas.admit(number, event, range(first, last), anchor, out)
        statuses = [_PRESENT] * first + [_OK] * (last - first)
        if last < count:
            statuses += [int(self.writing.no_space(Status.OVER_QUOTA))] * (whole - last)
            statuses += [int(Status.NO_PARENT if a in granted else Status.STALE) for a in event.addresses[whole:]]
        if last and event.number:
            session.tail = event.number, keys[last - 1]
        if last > first:
            addresses, parents = event.addresses[first:last], [event.parent, *keys][first:last]
            granted.difference_update(addresses)
            # Pages that this request has put before, or found stored, do not belong to an earlier request.
            position, turns = self.space.pages.standing_after(parent, event.continues)
            infos = standings_of(position, turns, last - first, event.hints[first:last])
            leaf_key = int.from_bytes(keys[last - 1][:8], "little")
            leaf = Page.of(event.now_ns // 1_000_000, leaf_key, infos[-1], number)
            spans = spans_after(self.segment, parent, keys[first:last], position, self.segment.pool(event.frame_class))
            self.space.pages.seal_chain(addresses, spans, parent, leaf, number)
            sums = event.checksums[first:last] if event.checksums is not None else None
            sealed = do.WriteSealed(addresses, keys[first:last], infos, event.rows[first:last], parents, sums)
            sealed.spans = spans
            out.append(sealed)
            self.segment.extents[addresses[0].extent].pool.granted_ahead -= len(addresses)
            self.counters["pages_sealed"] += len(addresses)
            if self.pending or event.number:
                self.space.pages.show(keys[first:last], root, addresses, infos)
                self.writing.follow(keys[first:last], out)
        out.append(do.Reply(statuses=statuses))
        return out

    def _free_granted(self, session: ClientSession, addresses: list[Address], out: list[do.Instruction]) -> None:
        for address in addresses:
            session.granted.discard(address)
            self.segment.extents[address.extent].pool.granted_ahead -= 1
        self.space.pages.free(addresses, out)

    # --- reserve, seal, revoke: see ``Writing`` ---------------------------------------------------------------------

    @property
    def pending(self) -> PendingTable:
        """The pending pages."""
        return self.writing.pending

    def _reserve(self, event: ev.Reserve) -> list[do.Instruction]:
        self.sessions.setdefault(event.session, ClientSession())
        return self.writing.reserve(event)

    def _revoke(self, event: ev.Revoke) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        session = self.sessions.setdefault(event.session, ClientSession())
        self.started.withdraw(event.session, event.addresses, out)
        granted = set(event.addresses) & session.granted
        self._free_granted(session, sorted(granted), out)
        was_writer = self.writing.revoke(event.session, event.addresses, out, event.shard)
        statuses = [
            int(Status.OK if written or address in granted else Status.STALE)
            for address, written in zip(event.addresses, was_writer, strict=True)
        ]
        out.append(do.Reply(statuses=statuses))
        return out

    # --- leases -----------------------------------------------------------------------------------------------------

    def _take_lease(self, event: ev.TakeLease) -> list[do.Instruction]:
        until_ns = event.now_ns + min(event.ttl_ns, self.lease_ttl_ns_max)
        sealed = [address for address in event.addresses if self.space.pages.sealed(address)]
        statuses = [int(Status.OK)] * len(sealed)
        if len(sealed) < len(event.addresses):
            statuses = [int(Status.OK if self.space.pages.sealed(a) else Status.STALE) for a in event.addresses]
        out: list[do.Instruction] = []
        if sealed:
            out.append(do.WriteLease(sealed, self.leases.add((event.session, event.lease), sealed, until_ns)))
        return [*out, do.Reply(statuses=statuses)]

    def _renew_lease(self, event: ev.RenewLease) -> list[do.Instruction]:
        lease = self.leases.leases.get((event.session, event.lease))
        if lease is None:
            return [do.Reply(Status.STALE)]
        lease.until_ns = event.now_ns + min(event.ttl_ns, self.lease_ttl_ns_max)
        untils = [self.leases.until_ns(a.extent, a.frame) for a in lease.addresses]
        return [do.WriteLease(lease.addresses, untils), do.Reply()]

    def _release_lease(self, event: ev.ReleaseLease) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        self._end_lease((event.session, event.lease), out)
        return [*out, do.Reply()]

    def _end_lease(self, name: tuple[int, int], out: list[do.Instruction]) -> None:
        unleased = self.leases.end(name)
        sealed = [address for address in unleased if self.space.pages.sealed(address)]
        if sealed:
            out.append(do.WriteLease(sealed, [0] * len(sealed)))
        self.space.pages.free_retired(unleased, out)

    # --- damage, eviction, time -------------------------------------------------------------------------------------

    def _damaged(self, event: ev.Damaged) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        space = self.space_of(event.address.extent)
        if space.pages.sealed(event.address):
            self.counters[f"damaged_{event.reason}"] += 1
            family = space.pages.with_descendants(event.address, event.key)
            held = self.writing.drop_children(list(family.values()), out) if space is self.space else []
            self.pins.lost(space, family.values())
            held += self.tiering.copies.held_pages(space) + self.pins.held_pages(space)
            space.pages.drop(family, held, out, event.reason)
            self.tiering.lost(space, set(family.values()))
            self.counters["pages_dropped"] += len(family)
        out.append(do.Reply())
        return out

    def _want_copies(self, event: ev.WantCopies) -> list[do.Instruction]:
        addresses, keys = list[Address](), list[bytes]()
        for key in event.keys:
            before = len(addresses)
            for space in self.spaces.values():
                address = space.pages.find(key)
                if address is not None and not space.pages.records.standing(*address[:2]) & REPLICATED_INFO:
                    addresses.append(address)
            if len(addresses) > before:
                keys.append(key)
        out: list[do.Instruction] = [do.WriteReplicated(addresses, keys if event.owe else [])] if addresses else []
        return [*out, do.Reply()]

    def _stamped(self, event: ev.Stamped) -> list[do.Instruction]:
        return [do.WriteStamp(event.address, event.checksums)] if self.space.pages.sealed(event.address) else []

    def _evict(self, event: ev.Evict) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        pages, size = self.space.evict(event.pages, event.bytes, out)
        return [*out, do.Reply(detail={"pages": pages, "bytes": size})]

    def _tick(self, event: ev.Tick) -> list[do.Instruction]:
        out: list[do.Instruction] = []
        for name in self.leases.expired(event.now_ns):
            self._end_lease(name, out)
        self.writing.expire(event.now_ns, out)
        self.started.expire(event.now_ns, out)
        self.pins.expire(event.now_ns)
        self.objects.tick(event.now_ns, out)
        for space in self.spaces.values():
            space.quotas.trim(out)
        shrink(self.space, out)
        disconnected = [number for number, session in self.sessions.items() if not session.connected]
        start = self._checked % len(disconnected) if disconnected else 0  # in turn, so that every one is checked
        self._checked += CHECK_SESSIONS_PER_TICK
        sessions = (disconnected[start:] + disconnected[:start])[:CHECK_SESSIONS_PER_TICK]
        out += [do.CheckSession(number) for number in sessions]
        return out

    def _populated(self, event: ev.Populated) -> list[do.Instruction]:
        self.segment.populated.update(event.positions)
        return []

    def _population_failed(self, event: ev.PopulationFailed) -> list[do.Instruction]:
        self.segment.fail(event.positions)
        return []
