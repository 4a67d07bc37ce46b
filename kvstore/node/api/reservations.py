"""Reservations and leases of remote callers: writers and leases of the client library, held between calls.

Holdings: what the node holds for remote callers between calls: reservations and leases.

Life of one: ``add`` (the caller is told a number that cannot be guessed) -> ``find`` by its owner, any number of times
-> it is ended and dropped, by its owner, by its deadline, or because its owner's identity has ended. A caller that is
not the owner gets the answer for an unknown number: nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Final, Generic, Protocol, TypeVar

from kvstore.client.match import ABSENT, Lease
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.client.writer import Writer
from kvstore.errors import InvalidRequest, KVStoreError, LeaseBroken, TooManyCalls, Unauthenticated
from kvstore.model.prefix import Keys
from kvstore.node.api.messages import prompt_of
from kvstore.node.api.streams import BATCH_BYTES, Data
from kvstore.node.node import Node
from kvstore.pb import store_pb2 as pb
from kvstore.server.gate import Call, parse
from kvstore.server.identities import Identities, Identity, is_tenant

ID_BYTES: Final = 16
HELD_MAX: Final = 4096  # of one kind
HELD_SHARE_MAX: Final = 1024  # of them by one tenant
HELD_BYTES_MAX: Final = 128 << 20  # of memory that all of one kind take; half of it by one tenant
SWEEP_S: Final = 0.25


class Ending(Protocol):
    """What can be held."""

    def end(self) -> None:
        """Give it back; nothing is raised but what a node says that cannot answer."""
        ...


Thing = TypeVar("Thing", bound=Ending)


class Held(Generic[Thing]):
    """One thing held for its owner. To work with it, hold ``lock`` and then check ``over``."""

    def __init__(self, owner: Identity, thing: Thing, until_s: float, size_bytes: int) -> None:
        self.owner = owner
        self.thing = thing
        self.size_bytes = size_bytes
        self.until_s = until_s  # time.monotonic
        self.lock = threading.Lock()
        self.over = False

    def end(self) -> None:
        """Give it back, once."""
        with self.lock:
            if not self.over:
                self.over = True
                self.thing.end()


class Holdings(Generic[Thing]):
    """A bounded table of one kind. Any thread may use it.

    Args:
        what: "reservation" or "lease", for messages.
        check: raises Unauthenticated where an identity has ended.
    """

    def __init__(
        self,
        what: str,
        check: Callable[[Identity], None],
        held_max: int = HELD_MAX,
        bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self._what = what
        self._check = check
        self._max = held_max
        self._held: dict[bytes, Held[Thing]] = {}
        self._bytes_max = bytes_max
        self._of: Counter[Identity] = Counter()
        self._bytes_of: Counter[Identity] = Counter()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._held)

    def check_room(self, owner: Identity) -> None:
        """Raises TooManyCalls where no more can be held for this owner."""
        with self._mutex:
            self._check_room(owner, 0)

    def _check_room(self, owner: Identity, size_bytes: int) -> None:
        tenant = is_tenant(owner)
        share = HELD_SHARE_MAX if tenant else self._max
        if len(self._held) >= self._max or self._of[owner] >= min(share, self._max):
            raise TooManyCalls(f"no more {self._what}s are held: end some", retry_after_s=1.0)
        bytes_share = self._bytes_max // 2 if tenant else self._bytes_max
        all_bytes, mine = self._bytes_of.total() + size_bytes, self._bytes_of[owner] + size_bytes
        if size_bytes and (all_bytes > self._bytes_max or mine > bytes_share):
            raise TooManyCalls(f"the {self._what}s that are held name too many pages: end some", retry_after_s=1.0)

    def add(self, owner: Identity, thing: Thing, ttl_s: float, size_bytes: int = 0) -> bytes:
        """Hold ``thing`` for ``ttl_s``; returns the number to name it by. Raises TooManyCalls, and then has ended
        it."""
        number = secrets.token_bytes(ID_BYTES)
        try:
            with self._mutex:
                self._check_room(owner, size_bytes)
                self._held[number] = Held(owner, thing, time.monotonic() + ttl_s, size_bytes)
                self._of[owner] += 1
                self._bytes_of[owner] += size_bytes
        except TooManyCalls:
            thing.end()
            raise
        return number

    def find(self, owner: Identity, number: bytes) -> Held[Thing]:
        """What the owner named. Raises LeaseBroken where there is no such thing (any more)."""
        held = self._held.get(number)
        if held is None or held.owner != owner or time.monotonic() >= held.until_s:
            raise LeaseBroken(f"there is no such {self._what} of {owner.name}'s, or it is over")
        return held

    def drop(self, number: bytes) -> None:
        """Forget a thing that was ended; its number names nothing any more."""
        with self._mutex:
            self._forget(number)

    def abandon(self, number: bytes) -> None:
        """End a reservation that no client was told of."""
        with self._mutex:
            held = self._forget(number)
        if held is not None:
            with contextlib.suppress(KVStoreError):
                held.end()

    def sweep(self, everything: bool = False) -> None:
        """End those past their deadline, and those of owners that have ended."""
        now_s = time.monotonic()
        with self._mutex:
            over = [
                number
                for number, held in self._held.items()
                if everything or now_s >= held.until_s or not self._known(held.owner)
            ]
            ended = [self._forget(number) for number in over]
        for held in ended:
            if held is not None:
                with contextlib.suppress(KVStoreError):
                    held.end()

    def _forget(self, number: bytes) -> Held[Thing] | None:
        held = self._held.pop(number, None)
        if held is not None:
            self._of[held.owner] -= 1
            self._bytes_of[held.owner] -= held.size_bytes
            if not self._of[held.owner]:
                del self._of[held.owner], self._bytes_of[held.owner]
        return held

    def _known(self, owner: Identity) -> bool:
        try:
            self._check(owner)
        except Unauthenticated:
            return False
        return True


async def sweep_forever(run: Callable[[], None]) -> None:
    """Call ``run`` in a thread every ``SWEEP_S``, until cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        await asyncio.to_thread(run)


WRITE_BUFFER_BYTES = 2 * BATCH_BYTES
LEASE_TTL_S = 30.0  # where a request names none
GROUP_BYTES_MAX = 256
LEASED_PAGE_BYTES = 64  # of memory, where each lies apart
RESERVED_PAGE_BYTES = 512


class Reservation:
    """An entered writer, with the cache and keys it writes."""

    def __init__(self, writer: Writer, cache: PrefixCache, keys: Keys) -> None:
        self.writer = writer
        self.cache = cache
        self.keys = keys

    def end(self) -> None:
        """Revoke what was not sealed."""
        given_up = LeaseBroken("given up")
        self.writer.__exit__(LeaseBroken, given_up, None)


class LeaseHold:
    """An entered lease. Its views are not used, since remote leases have copies."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        lease.forget_views()

    def end(self) -> None:
        """Release it."""
        self.lease.release()


class Reservations:
    """Reserve, Seal, Revoke, and Write into what was reserved."""

    def __init__(self, store: Store, node: Node, identities: Identities) -> None:
        self._store = store
        self._node = node
        self.held: Holdings[Reservation] = Holdings("reservation", identities.check)

    async def reserve(self, call: Call, message: bytes) -> bytes:
        """Take frames for pages that are not stored."""
        request = parse(pb.ReserveRequest, message)
        call.caller.check_salt(request.pages.salt)
        if len(request.write_group.encode()) > GROUP_BYTES_MAX:
            raise InvalidRequest("write_group", f"has more than {GROUP_BYTES_MAX} bytes")
        self.held.check_room(call.caller)
        number, wanted = await call.wait(self._reserve, call, request, undo=lambda made: self.held.abandon(made[0]))
        return pb.ReserveReply(reservation=number, wanted=wanted).SerializeToString()

    def _reserve(self, call: Call, request: pb.ReserveRequest) -> tuple[bytes, list[int]]:
        prompt = prompt_of(self._store, self._node, request.pages, to_match=False)
        config = self._node.config
        ttl_s = min((request.ttl_ms or int(config.reserve_ttl_s * 1000)) / 1000, config.lease_ttl_s_max)
        group = request.write_group or None
        cut = request.rank, request.ranks or 1, None, request.stage, request.stages or 1
        writer = prompt.cache.writer(prompt.keys, ttl_s, group, *cut)
        if prompt.orphan:
            raise InvalidRequest("parent", "is not stored here: reserve from an earlier page on")
        writer.__enter__()
        reservation = Reservation(writer, prompt.cache, prompt.keys)
        return self.held.add(call.caller, reservation, ttl_s, _held_bytes(prompt.keys)), writer.pages_new

    async def write(self, call: Call, number: bytes, batches: AsyncIterator[list[Data]]) -> bytes:
        """Data goes where each message says; readers of this node see a layer as soon as it is whole."""
        held = self.held.find(call.caller, number)
        async with call.buffers(WRITE_BUFFER_BYTES):
            async for batch in batches:
                self.held.find(call.caller, number)
                await call.wait(_write, held, batch)
        return pb.WriteReply().SerializeToString()

    async def seal(self, call: Call, message: bytes) -> bytes:
        """Make the pages readable, if every byte was written; else everything is revoked."""
        number = parse(pb.ReservationRequest, message).reservation
        return await call.wait(self._seal, self.held.find(call.caller, number), number)

    def _seal(self, held: Held[Reservation], number: bytes) -> bytes:
        with held.lock:
            _check(held)
            held.over = True
            self.held.drop(number)
            reservation = held.thing
            reservation.writer.__exit__(None, None, None)
            match = reservation.cache.lookup(reservation.keys)
        return pb.WriteReply(new_pages=reservation.writer.sealed, pages=match.pages).SerializeToString()

    async def revoke(self, call: Call, message: bytes) -> bytes:
        """Give everything back."""
        number = parse(pb.ReservationRequest, message).reservation
        await call.wait(self.held.find(call.caller, number).end)
        self.held.drop(number)
        return b""


class Leases:
    """Lease, Renew, Release."""

    def __init__(self, store: Store, node: Node, identities: Identities) -> None:
        self._store = store
        self._node = node
        self.held: Holdings[LeaseHold] = Holdings("lease", identities.check)

    async def lease(self, call: Call, message: bytes) -> bytes:
        """Keep the stored pages of a prompt where they are; what is on NVMe only is brought to DRAM first."""
        request = parse(pb.LeaseRequest, message)
        call.caller.check_salt(request.pages.salt)
        self.held.check_room(call.caller)
        reply = await call.wait(self._lease, call, request, undo=lambda made: self.held.abandon(made.lease))
        return reply.SerializeToString()

    def _lease(self, call: Call, request: pb.LeaseRequest) -> pb.LeaseReply:
        prompt = prompt_of(self._store, self._node, request.pages, to_match=True)
        ttl_s = self._ttl_s(request.ttl_ms)
        if prompt.orphan:
            return pb.LeaseReply(reason=ABSENT)
        lease = prompt.cache.lease(prompt.keys, ttl_s)
        lease.__enter__()
        match = lease.match
        if not match.pages:
            lease.release()
            return pb.LeaseReply(reason=match.reason)
        number = self.held.add(call.caller, LeaseHold(lease), ttl_s, LEASED_PAGE_BYTES * match.pages)
        return pb.LeaseReply(lease=number, pages=match.pages, ttl_ms=int(ttl_s * 1000), reason=match.reason)

    async def renew(self, call: Call, message: bytes) -> bytes:
        """Move a lease's deadline."""
        request = parse(pb.RenewRequest, message)
        held = self.held.find(call.caller, request.lease)
        return await call.wait(self._renew, held, request.lease, self._ttl_s(request.ttl_ms))

    def _renew(self, held: Held[LeaseHold], number: bytes, ttl_s: float) -> bytes:
        with held.lock:
            _check(held)
            held.thing.lease.renew(ttl_s)
            held.until_s = time.monotonic() + ttl_s
            match = held.thing.lease.match
        reply = pb.LeaseReply(lease=number, pages=match.pages, ttl_ms=int(ttl_s * 1000), reason=match.reason)
        return reply.SerializeToString()

    async def release(self, call: Call, message: bytes) -> bytes:
        """End a lease."""
        number = parse(pb.ReleaseRequest, message).lease
        await call.wait(self.held.find(call.caller, number).end)
        self.held.drop(number)
        return b""

    def _ttl_s(self, ttl_ms: int) -> float:
        return min(ttl_ms / 1000 if ttl_ms else LEASE_TTL_S, self._node.config.lease_ttl_s_max)


def _write(held: Held[Reservation], batch: list[Data]) -> None:
    with held.lock:
        _check(held)
        for data in batch:
            data.check()
            if len(data.data):
                held.thing.writer.write_range(data.page, data.offset, data.data)


def _check(held: Held[Reservation] | Held[LeaseHold]) -> None:
    """Raises LeaseBroken where it ended while this call waited for it."""
    if held.over:
        raise LeaseBroken("it is over")


def _held_bytes(keys: Keys) -> int:
    """What a reservation of these pages takes in memory: keys, identities, addresses; and the token ids, twice."""
    return RESERVED_PAGE_BYTES * len(keys) + 2 * keys.tokens.nbytes
