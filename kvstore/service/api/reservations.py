"""Reservations and leases of remote callers: writers and leases of the client library, held between calls."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from kvstore.client.lease import Lease
from kvstore.client.match import ABSENT
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.client.writer import Writer
from kvstore.errors import InvalidRequest, LeaseBroken
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb
from kvstore.service.api.holdings import Held, Holdings
from kvstore.service.api.streams import BATCH_BYTES, Data
from kvstore.service.api.wire import prompt_of
from kvstore.service.node.node import Node
from kvstore.serving.gate import Call, parse
from kvstore.serving.identities import Identities

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
    """An entered lease. Its views are not used: nobody reads through a remote one."""

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
