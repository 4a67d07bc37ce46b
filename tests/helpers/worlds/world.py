"""World: one node and its clients, in one process and without a clock. Tests choose what happens next.

Every verb sends an event as a client (or the daemon itself) would, performs what the state decides, and compares the
answer with what a naive model of the store allows: plain sets of keys, addresses and deadlines, kept from the
clients' side alone. ``crash_at`` makes the next decision stop somewhere and the node start again from its
files; what the client was told decides what it may believe afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from kvstore.model.replica import Address, FrameClass, FrameState, Status, Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from tests.helpers.worlds.real_node import Nvme, RealNode

FREE, RETIRING = FrameState.FREE, FrameState.RETIRING

MS = 1_000_000
LEASE_TTL_NS_MAX = 60_000 * MS
PIN_ROUNDING_NS = 1000  # a pin's deadline is kept in seconds
MAY_LOSE = (ev.Grant, ev.Reserve, ev.Evict, ev.Damaged)  # events that may cost acknowledged pages


def root_of(frame_class: FrameClass) -> bytes:
    """Root of all chains of a class."""
    return xxhash.xxh3_128_digest(b"root %d" % frame_class.page_bytes)


@dataclass(frozen=True)
class Chain:
    """Pages of one prompt: page ``i`` differs with ``path[: i + 1]``, so equal beginnings share pages."""

    frame_class: FrameClass
    path: tuple[int, ...]

    @cached_property
    def keys(self) -> list[bytes]:
        """The chained keys."""
        keys, key = [], root_of(self.frame_class)
        for token in self.path:
            key = xxhash.xxh3_128_digest(key + token.to_bytes(4, "little"))
            keys.append(key)
        return keys

    @cached_property
    def parents(self) -> list[bytes]:
        """The key before each page's."""
        return [root_of(self.frame_class), *self.keys[:-1]]

    @cached_property
    def rows(self) -> Rows:
        """Identity rows."""
        rows = np.zeros((len(self.path), 48 + 4 * self.frame_class.page_tokens), np.uint8)
        rows[:, :16] = np.frombuffer(b"".join(self.keys), np.uint8).reshape(-1, 16)
        rows[:, 16:32] = np.frombuffer(root_of(self.frame_class), np.uint8)
        rows[:, 48:52] = np.array(self.path, "<u4").view(np.uint8).reshape(-1, 4)
        return rows


@dataclass
class Reservation:
    """What a write group knows of one page it writes."""

    key: bytes
    parent: bytes
    address: Address
    shards: int
    until_ns: int
    claimed: dict[int, int] = field(default_factory=dict)  # shard -> session that writes it
    sealed: set[int] = field(default_factory=set)


@dataclass
class Pinned:
    """What an operator was promised: these pages, the front of ``keys``, stay until then."""

    keys: list[bytes]
    kept: list[bytes]
    until_ns: int


@dataclass
class Client:
    """One process. ``granted``: frames to write ahead; ``granted_max``: the highest generation of one that it ever had;
    ``writing``: (address, shard) it may store into."""

    session: int
    alive: bool = True
    granted: dict[FrameClass, list[Address]] = field(default_factory=dict)
    granted_max: int = 0
    writing: dict[tuple[Address, int], tuple[int, bytes]] = field(default_factory=dict)  # -> (group, key)
    forfeited: list[Address] = field(default_factory=list)
    leases: dict[int, dict[Address, int]] = field(default_factory=dict)  # lease (-lease: of an earlier daemon)


class World:
    """See the module. ``check`` after every verb; a false promise is an AssertionError."""

    may_lose: tuple[type, ...] = MAY_LOSE

    def __init__(
        self,
        extent_bytes: int,
        positions: int,
        *,
        now_ns: int = 10**12,
        sessions_max: int = 256,
        nvme: Nvme | None = None,
    ) -> None:
        self.now_ns = now_ns
        self.clients: dict[int, Client] = {}
        self.claims: dict[tuple[int, int], set[int]] = {}  # frame -> sessions that may store into it
        self.node = RealNode(extent_bytes, positions, self, nvme)
        self.options: dict[str, Any] = {"lease_ttl_ns_max": LEASE_TTL_NS_MAX, "sessions_max": sessions_max}
        state = self.node.start(now_ns, self.options)
        assert state is not None
        self.state = state
        self.stored: set[bytes] = set()  # acknowledged, and not known to be evicted or damaged
        self.tried: set[bytes] = set()  # ever submitted
        self.roots: set[bytes] = set()
        self.groups: dict[tuple[int, bytes], Reservation] = {}
        self.pins: dict[int, Pinned] = {}
        self.unread: set[bytes] = set()  # of NVMe, that a scan will find again: pins wait for them
        self.crash_at: list[float] = []  # of the next decision, then of the recoveries that follow
        self.crashes = 0
        self.dropped_at_start = 0
        self.status = Status.OK  # of the last grant

    # --- what promises ask ------------------------------------------------------------------------------------------

    def may_write(self, extent: int, frame: int) -> set[int]:
        """See ``Watch``."""
        return self.claims.get((extent, frame), set())

    def is_leased(self, extent: int, frame: int) -> bool:
        """See ``Watch``."""
        return any(
            address[:2] == (extent, frame) and until_ns > self.now_ns
            for client in self.clients.values()
            for held in client.leases.values()
            for address, until_ns in held.items()
        )

    def _claim(self, session: int, addresses: list[Address]) -> None:
        for address in addresses:
            self.claims.setdefault(address[:2], set()).add(session)
            self.node.write(address, b"half by %d" % session)

    def _unclaim(self, session: int, addresses: list[Address]) -> None:
        for address in addresses:
            sessions = self.claims.get(address[:2], set())
            sessions.discard(session)
            if not sessions:
                self.claims.pop(address[:2], None)

    # --- deciding and performing ------------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> do.Reply | None:
        """The node handles an event. None: it was killed before it answered (and has started again)."""
        self.node.now_ns = self.now_ns
        instructions = self.state.handle(event)
        self._account(event, instructions)
        if self.crash_at:
            self._crash(instructions)
            return None
        reply = self.node.perform(instructions)
        to_check = self.node.performer.sessions_to_check
        while to_check and to_check is self.node.performer.sessions_to_check:
            session = to_check.pop()
            client = self.clients.get(session)
            if client is None or not client.alive:
                self.send(ev.SessionDead(self.now_ns, session))
        return reply if reply is not None else do.Reply()

    def gone(self, instructions: list[do.Instruction], tier: Tier = Tier.DRAM) -> set[bytes]:
        """Keys of the pages that a decision takes out of a tier."""
        gone: set[bytes] = set()
        for instruction in instructions:
            if type(instruction) is do.WriteState and instruction.state in (FREE, RETIRING):
                for extent, frame, _ in instruction.addresses:
                    if extent not in self.node.tables:
                        continue  # carved by this very decision: nothing was there
                    table = self.node.tables[extent]
                    if table.tier == tier and self.node.frame_state(extent, frame) == FrameState.SEALED:
                        gone.add(table.key(frame))
        return gone

    def _account(self, event: ev.Event, instructions: list[do.Instruction]) -> None:
        """Which pages this decision takes away; only some events may."""
        gone = self.gone(instructions)
        for instruction in instructions:
            if type(instruction) is do.WriteSealed:
                assert self.tried.issuperset(instruction.keys)
        if type(event) is ev.Damaged:
            self._unpromise(event.key)
            if gone:
                gone.add(event.key)
        assert not gone or isinstance(event, self.may_lose), f"{type(event).__name__} takes pages away"
        self.stored -= self.lost(gone, instructions)
        for name, page in list(self.groups.items()):
            if page.key in gone or (type(event) is ev.Damaged and page.parent in gone):
                del self.groups[name]

    def lost(self, gone: set[bytes], instructions: list[do.Instruction]) -> set[bytes]:
        """Pages that nobody has any more when ``gone`` have left DRAM."""
        return gone

    def _crash(self, instructions: list[do.Instruction]) -> None:
        total = self.node.count_stores(instructions)
        self.node.perform(instructions, int(self.crash_at.pop(0) * (total + 1)))
        self.restart()

    def restart(self) -> None:
        """The daemon is gone, and starts again; maybe several times before it gets through."""
        self.crashes += 1
        while True:
            steps = int(self.crash_at.pop(0) * 20) if self.crash_at else None
            state = self.node.start(self.now_ns, self.options, steps)
            if state is not None:
                break
        self.state = state
        self.dropped_at_start += state.counters["pages_dropped_at_start"]
        for client in self.clients.values():  # the node keeps the frames till their deadlines, and forgets the names
            for lease in [lease for lease in client.leases if lease > 0]:
                held = client.leases.pop(lease)
                nameless = client.leases.setdefault(-lease, {})
                nameless.update({a: max(until_ns, nameless.get(a, 0)) for a, until_ns in held.items()})
        for name, page in list(self.groups.items()):
            if page.sealed:  # what some shards have sealed is not promised to anybody yet
                del self.groups[name]

    def readable(self) -> set[bytes]:
        """Keys of all pages that are stored."""
        return set(self.node.index)

    def check(self) -> None:
        """All laws, and the model's promises."""
        wrong = self.node.check(self.state)
        assert not wrong, "\n".join(wrong[:10])
        assert self.stored <= self.readable(), "an acknowledged page is gone"
        assert self.node.index.keys() <= self.tried
        for name, page in list(self.groups.items()):
            if len(page.sealed) == page.shards:
                whole = page.parent in self.roots or page.parent in self.node.index
                assert not whole or page.key in self.node.index, "every shard and the parent are sealed, the page not"
                if whole:
                    self.stored.add(page.key)
                    del self.groups[name]
        here = self.readable() | self.unread
        for number, pin in self.pins.items():
            if pin.until_ns > self.now_ns + PIN_ROUNDING_NS:
                assert number in self.state.pins.pins or not pin.kept, "a pin is forgotten"
                assert here.issuperset(pin.kept), "a pinned page is gone"
        for client in self.clients.values():
            for held in client.leases.values():
                for address, until_ns in held.items():
                    if until_ns > self.now_ns:
                        state = self.node.frame_state(*address[:2])
                        assert self.node.is_sealed(address) or state == RETIRING, f"{address} changed under its lease"

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, session: int) -> Client:
        """A client says hello, for the first time or again."""
        client = self.clients.get(session)
        if client is None:
            client = self.clients[session] = Client(session)
        reply = self.send(ev.SessionOpened(self.now_ns, session, client.granted_max))
        assert reply is None or reply.status == Status.OK
        return client

    def lose(self, session: int) -> None:
        """The connection breaks; the process lives on, and keeps writing."""
        self.send(ev.ConnectionLost(self.now_ns, session))

    def kill(self, session: int, *, noticed: bool = True) -> None:
        """The process dies: it writes and reads nothing more. The node may notice at once, or by a later tick."""
        client = self.clients.pop(session)
        client.alive = False
        for sessions in self.claims.values():
            sessions.discard(session)
        self.claims = {frame: sessions for frame, sessions in self.claims.items() if sessions}
        for page in list(self.groups.items()):
            if session in page[1].claimed.values():
                self.groups.pop(page[0])
        if noticed:
            self.send(ev.ConnectionLost(self.now_ns, session))

    # --- put ahead --------------------------------------------------------------------------------------------------

    def stored_pages(self, chain: Chain) -> int:
        """How many leading pages are stored: what a client knows before it puts."""
        return next((i for i, key in enumerate(chain.keys) if key not in self.node.index), len(chain.path))

    def grant(
        self, session: int, frame_class: FrameClass, count: int, *, ahead: bool = False, anchor: bytes = b""
    ) -> int:
        """Ask for frames; returns how many came. Some are charged to the tenant at once."""
        client = self.clients[session]
        since, tail = self.tail(session)
        kept = [key for key in (anchor, tail) if key in self.node.index or (key and key == tail)]
        root = root_of(frame_class) if count % 2 else b""
        reply = self.send(ev.Grant(self.now_ns, session, frame_class, count, ahead, anchor, since, root))
        if reply is None:
            return 0
        self.status = reply.status
        for key in kept:
            there = key in self.node.index or key in self.node.nvme_index
            assert there, "the page that new ones will hang on was evicted for them"
        assert len(reply.addresses) <= count
        assert (reply.status == Status.OK) == bool(reply.addresses)
        self._claim(session, reply.addresses)
        client.granted.setdefault(frame_class, []).extend(reply.addresses)
        client.granted_max = max([client.granted_max, *(address.generation for address in reply.addresses)])
        return len(reply.addresses)

    def tail(self, session: int) -> tuple[int, bytes]:
        """The number and the last key of what the session has published of a put that goes on; 0: of none."""
        return 0, b""

    def put(self, session: int, chain: Chain, start: int = 0, *, resend: bool = True) -> list[int]:
        """Seal pages ``start ..`` of a chain into frames granted before, as far as those reach. Returns statuses."""
        client = self.clients[session]
        frames = client.granted.get(chain.frame_class, [])
        addresses = sorted(frames[: len(chain.path) - start])
        if not addresses:
            return []
        del frames[: len(addresses)]
        stop = start + len(addresses)
        keys, rows = chain.keys[start:stop], chain.rows[start:stop]
        self.tried.update(keys)
        self.begin(session, chain, start, addresses)
        self._unclaim(session, addresses)  # it has written, and will not again unless it hears so
        for address, key in zip(addresses, keys, strict=False):
            self.node.write(address, key)
        parent = chain.parents[start]
        sums = self.node.sums(addresses) if chain.path[0] % 2 else None
        reply = self.send(ev.SealGranted(self.now_ns, session, chain.frame_class, parent, addresses, rows, sums))
        crashed = reply is None
        if crashed:
            if not resend:
                client.forfeited += addresses
                return []
            event = ev.SealGranted(self.now_ns, session, chain.frame_class, parent, addresses, rows, sums)
            reply = self.send(event)
            if reply is None:
                client.forfeited += addresses
                return []
        self._put_answered(client, chain.frame_class, keys, addresses, reply, in_doubt=crashed)
        return reply.statuses

    def begin(self, session: int, chain: Chain, start: int, addresses: list[Address]) -> None:
        """Some clients say what they write into granted frames, and some not in time."""
        ttl_ns = (0, 10**15, 0, 10**15, 10**7)[sum(chain.path) % 5]
        if ttl_ns:
            about = ttl_ns, chain.parents[start], addresses, chain.rows[start : start + len(addresses)]
            self.send(ev.Begin(self.now_ns, session, chain.frame_class, *about))

    def _put_answered(
        self,
        client: Client,
        frame_class: FrameClass,
        keys: list[bytes],
        addresses: list[Address],
        reply: do.Reply,
        *,
        in_doubt: bool,
    ) -> None:
        assert len(reply.statuses) == len(keys)
        for key, address, status in zip(keys, addresses, reply.statuses, strict=True):
            if status in (Status.OK, Status.PRESENT):
                self.stored.add(key)
            if status == Status.OK:
                assert self.node.index.get(key) == address or key in self.node.nvme_index
            elif status == Status.STALE:
                assert in_doubt, f"{address} was granted to {client.session}, and is not any more"
            else:
                assert status in (Status.PRESENT, Status.NO_PARENT, Status.OVER_QUOTA, Status.BUSY)
                limited = self.state.space.pages.holdings.limited
                assert limited or status != Status.OVER_QUOTA
                goes_through = address in self.state.pending.by_address
                assert limited or status != Status.BUSY or goes_through or self.state.writing.write_through is not None
                still = self.node.tables[address.extent].words[address.frame] == address.generation << 8 | 1
                assert still or in_doubt
                if still and not goes_through:
                    self._claim(client.session, [address])
                    client.granted[frame_class].append(address)

    # --- reserve, seal, revoke --------------------------------------------------------------------------------------

    def reserve(
        self, session: int, group: int, shard: int, shards: int, chain: Chain, start: int, ttl_ns: int
    ) -> list[int]:
        """One shard's writer reserves pages ``start ..`` of a chain."""
        client = self.clients[session]
        keys, parents = chain.keys[start:], chain.parents[start:]
        self.tried.update(keys)
        self.roots.add(root_of(chain.frame_class))
        rows = chain.rows[start:]
        event = ev.Reserve(
            self.now_ns, session, chain.frame_class, group, shard, shards, ttl_ns, chain.parents[start], rows
        )
        reply = self.send(event)
        if reply is None:
            return []
        assert len(reply.statuses) == len(reply.addresses) == len(keys)
        for key, parent, status, address in zip(keys, parents, reply.statuses, reply.addresses, strict=True):
            if status == Status.PRESENT:
                self.stored.add(key)
            elif status in (Status.OK, Status.JOINED):
                page = self.groups.get((group, key))
                if status == Status.OK or page is None:
                    page = Reservation(key, parent, address, shards, self.now_ns + ttl_ns)
                    if status == Status.OK:
                        self.groups[group, key] = page
                assert page.address == address and page.shards == shards
                assert page.claimed.get(shard, session) == session, "two sessions write one shard"
                assert shard not in page.sealed, "a sealed shard is written again"
                page.claimed[shard] = session
                self._claim(session, [address])
                client.writing[address, shard] = (group, key)
        return reply.statuses

    def seal(self, session: int, shard: int, addresses: list[Address]) -> list[int]:
        """A shard's writer has written these pages (of one shard), and will not touch them again."""
        client = self.clients[session]
        names = [client.writing.pop((address, shard)) for address in addresses]
        for address, (_, key) in zip(addresses, names, strict=True):
            if not any(other == address for other, _ in client.writing):
                self._unclaim(session, [address])
            if address[:2] not in self.claims:
                self.node.write(address, key)
        reply = self.send(ev.Seal(self.now_ns, session, shard, addresses))
        if reply is None:
            for name, address in zip(names, addresses, strict=True):
                self._forget(name, address)
            client.forfeited += addresses
            return []
        for name, address, status in zip(names, addresses, reply.statuses, strict=True):
            self._sealed(name, address, shard, Status(status))
        return reply.statuses

    def _forget(self, name: tuple[int, bytes], address: Address) -> None:
        page = self.groups.get(name)
        if page is not None and page.address == address:
            del self.groups[name]

    def _sealed(self, name: tuple[int, bytes], address: Address, shard: int, status: Status) -> None:
        page = self.groups.get(name)
        if status in (Status.OK, Status.PRESENT):
            self.stored.add(name[1])
        if page is None or page.address != address:
            return
        if status == Status.PARTIAL:
            page.sealed.add(shard)
            page.claimed.pop(shard, None)
            return
        assert status != Status.STALE or page.until_ns <= self.now_ns, "a reservation ended without a reason"
        if status == Status.OK:
            assert len(page.sealed) == page.shards - 1, "sealed while shards are missing"
        del self.groups[name]

    def revoke(self, session: int, addresses: list[Address]) -> None:
        """A writer gives frames up: reserved ones of all its shards, granted ones, forfeited ones."""
        client = self.clients[session]
        for frames in [*client.granted.values(), client.forfeited]:
            frames[:] = [address for address in frames if address not in addresses]
        for address, shard in list(client.writing):
            if address in addresses:
                self._forget(client.writing.pop((address, shard)), address)
        self._unclaim(session, addresses)
        self.send(ev.Revoke(self.now_ns, session, addresses))

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self, session: int, lease: int, keys: list[bytes], ttl_ns: int) -> None:
        """Take a lease on stored pages, or add pages to one."""
        client = self.clients[session]
        addresses = [self.node.index[key] for key in keys if key in self.node.index]
        reply = self.send(ev.TakeLease(self.now_ns, session, lease, ttl_ns, addresses))
        if reply is None:
            return
        assert reply.statuses == [Status.OK] * len(addresses)
        until_ns = self.now_ns + min(ttl_ns, LEASE_TTL_NS_MAX)
        held = client.leases.setdefault(lease, {})
        held.update({address: max(until_ns, held.get(address, 0)) for address in addresses})

    def renew(self, session: int, lease: int, ttl_ns: int) -> bool:
        """Move a lease's deadline; after a restart the node does not know its name, and it is taken again."""
        held = self.clients[session].leases.get(lease, {})
        until_ns = self.now_ns + min(ttl_ns, LEASE_TTL_NS_MAX)
        reply = self.send(ev.RenewLease(self.now_ns, session, lease, ttl_ns))
        if reply is None:  # the old deadline or the new one: who knows
            nameless = self.clients[session].leases.get(-lease, {})
            nameless.update({address: min(until_ns, nameless[address]) for address in held})
            return False
        assert reply.status == Status.OK or not held
        if reply.status == Status.OK:
            for address in held:
                held[address] = until_ns
        return reply.status == Status.OK

    def release(self, session: int, lease: int) -> None:
        """End a lease."""
        self.clients[session].leases.pop(lease, None)
        self.clients[session].leases.pop(-lease, None)
        self.send(ev.ReleaseLease(self.now_ns, session, lease))

    # --- tenants ----------------------------------------------------------------------------------------------------

    def name(self, frame_class: FrameClass, salt: str) -> None:
        """A client says whose the chains of a class are."""
        self.send(ev.NameRoot(self.now_ns, root_of(frame_class), {"salt": salt}))

    def pin(self, chain: Chain, ttl_ns: int) -> int:
        """Keep what is stored of a chain; returns how many pages that are."""
        tiers = (self.node.index, self.node.nvme_index)
        stored = max(next((i for i, k in enumerate(chain.keys) if k not in tier), len(chain.keys)) for tier in tiers)
        until_ns, root = self.now_ns + ttl_ns, root_of(chain.frame_class)
        reply = self.send(ev.Pin(self.now_ns, 0, list(chain.keys), root, until_ns, until_ns / 1e9))
        if reply is None:  # the deadline before, or the new one
            for pin in self.pins.values():
                if pin.keys == chain.keys:
                    pin.until_ns = min(pin.until_ns, until_ns)
            return 0
        if "refused" in reply.detail:
            return 0
        assert reply.detail["pages"] == stored
        if stored:
            self.pins[reply.detail["pin"]] = Pinned(chain.keys, chain.keys[:stored], until_ns)
        return stored

    def unpin(self, number: int) -> None:
        """End a pin."""
        self.pins.pop(number, None)
        self.send(ev.Unpin(self.now_ns, number))

    def _unpromise(self, key: bytes) -> None:
        """This page is damaged, in one tier at least: no pin keeps it, nor what follows."""
        for pin in self.pins.values():
            if key in pin.kept:
                del pin.kept[pin.kept.index(key) :]

    # --- the daemon's own -------------------------------------------------------------------------------------------

    def tick(self, elapsed_ns: int) -> None:
        """Time goes on."""
        self.now_ns += elapsed_ns
        self.pins = {number: pin for number, pin in self.pins.items() if pin.until_ns > self.now_ns + PIN_ROUNDING_NS}
        for name, page in list(self.groups.items()):
            if page.until_ns <= self.now_ns:
                del self.groups[name]
        for client in self.clients.values():
            for lease, held in list(client.leases.items()):
                if all(until_ns <= self.now_ns for until_ns in held.values()):
                    del client.leases[lease]
        self.send(ev.Tick(self.now_ns))

    def evict(self, pages: int = 0, size: int = 0) -> int:
        """An operator wants space. Returns pages gone."""
        before = len(self.node.index)
        reply = self.send(ev.Evict(self.now_ns, pages, size))
        if reply is None:
            return 0
        assert reply.detail["pages"] == before - len(self.node.index)
        return int(reply.detail["pages"])

    def damage(self, key: bytes, reason: str = "data") -> None:
        """A stored page is found damaged; it and its descendants go."""
        address = self.node.index[key]
        if self.send(ev.Damaged(self.now_ns, address, reason, key)) is not None:
            assert key not in self.node.index
            assert self.state.counters[f"damaged_{reason}"] >= 1

    def use(self, key: bytes) -> None:
        """A client reads a page: a store into its mark, without a message."""
        address = self.node.index.get(key)
        if address is not None:
            self.node.tables[address.extent].last_use[address.frame] = self.now_ns

    def populate(self, positions: list[int], *, failed: bool = False) -> None:
        """Memory of these positions is there, or cannot be had."""
        kind = ev.PopulationFailed if failed else ev.Populated
        self.send(kind(self.now_ns, positions))

    # --- one decision, looked at ------------------------------------------------------------------------------------

    def decide(self, event: ev.Event) -> list[do.Instruction]:
        """What the state decides about one event, performed. For tests that compare instructions; no model."""
        self.node.now_ns = self.now_ns
        if isinstance(event, ev.Reserve | ev.SealGranted):
            self.tried.update(row[:16].tobytes() for row in event.rows)
        instructions = self.state.handle(event)
        self._account(event, instructions)
        self.node.perform(instructions)
        return instructions

    def frames(self, session: int, frame_class: FrameClass) -> list[Address]:
        """The frames granted to a client; from here on the caller says what it does with them."""
        addresses = sorted(self.clients[session].granted.pop(frame_class, []))
        self._unclaim(session, addresses)
        return addresses
