"""Reservations and leases of remote callers: writers and leases of the client library, held between calls.

A holding begins with ``add``, which gives the caller a number that cannot be guessed. The owner finds it by this number
in later calls. It ends by a call of its owner, by its deadline, or when the owner's identity ends. For any other caller
the number is unknown.
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
HOLDINGS_MAX: Final = 4096  # holdings of one kind
TENANT_HOLDINGS_MAX: Final = 1024  # holdings of one kind and one tenant
HELD_BYTES_MAX: Final = 128 << 20  # memory for one kind, in bytes; one tenant may use half of it
SWEEP_S: Final = 0.25


class Endable(Protocol):
    """A reservation or a lease."""

    def end(self) -> None:
        """Give up the frames. Raises only errors that mean that the node cannot answer."""
        ...


Resource = TypeVar("Resource", bound=Endable)


class Holding(Generic[Resource]):
    """A resource held for its owner. Callers take ``lock`` and check ``has_ended`` before they use the resource."""

    def __init__(self, owner: Identity, resource: Resource, until_s: float, size_bytes: int) -> None:
        self.owner = owner
        self.resource = resource
        self.size_bytes = size_bytes
        self.until_s = until_s  # time.monotonic
        self.lock = threading.Lock()
        self.has_ended = False

    def end(self) -> None:
        """End the resource. Further calls do nothing."""
        with self.lock:
            if not self.has_ended:
                self.has_ended = True
                self.resource.end()


class Holdings(Generic[Resource]):
    """The holdings of one kind, limited in number and memory. Any thread may use the table.

    Args:
        kind: "reservation" or "lease", for messages.
        check: raises Unauthenticated if an identity has ended.
    """

    def __init__(
        self,
        kind: str,
        check: Callable[[Identity], None],
        holdings_max: int = HOLDINGS_MAX,
        bytes_max: int = HELD_BYTES_MAX,
    ) -> None:
        self._kind = kind
        self._check = check
        self._max = holdings_max
        self._holdings: dict[bytes, Holding[Resource]] = {}
        self._bytes_max = bytes_max
        self._count_by_owner: Counter[Identity] = Counter()
        self._bytes_by_owner: Counter[Identity] = Counter()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._holdings)

    def check_room(self, owner: Identity) -> None:
        """Raise TooManyCalls if this owner must not have another holding."""
        with self._mutex:
            self._check_room(owner, 0)

    def _check_room(self, owner: Identity, size_bytes: int) -> None:
        tenant = is_tenant(owner)
        share = TENANT_HOLDINGS_MAX if tenant else self._max
        if len(self._holdings) >= self._max or self._count_by_owner[owner] >= min(share, self._max):
            raise TooManyCalls(f"the limit of {self._kind}s is reached: end some", retry_after_s=1.0)
        bytes_share = self._bytes_max // 2 if tenant else self._bytes_max
        all_bytes, own_bytes = self._bytes_by_owner.total() + size_bytes, self._bytes_by_owner[owner] + size_bytes
        if size_bytes and (all_bytes > self._bytes_max or own_bytes > bytes_share):
            raise TooManyCalls(f"the current {self._kind}s have too many pages: end some", retry_after_s=1.0)

    def add(self, owner: Identity, resource: Resource, ttl_s: float, size_bytes: int = 0) -> bytes:
        """Hold ``resource`` for ``ttl_s`` and return its number.

        Raises:
            TooManyCalls: a limit is reached; ``resource`` has been ended.
        """
        number = secrets.token_bytes(ID_BYTES)
        try:
            with self._mutex:
                self._check_room(owner, size_bytes)
                self._holdings[number] = Holding(owner, resource, time.monotonic() + ttl_s, size_bytes)
                self._count_by_owner[owner] += 1
                self._bytes_by_owner[owner] += size_bytes
        except TooManyCalls:
            resource.end()
            raise
        return number

    def find(self, owner: Identity, number: bytes) -> Holding[Resource]:
        """Return the owner's holding. Raises LeaseBroken if there is none with this number, or it has ended."""
        holding = self._holdings.get(number)
        if holding is None or holding.owner != owner or time.monotonic() >= holding.until_s:
            raise LeaseBroken(f"{owner.name} has no such {self._kind}, or it has ended")
        return holding

    def drop(self, number: bytes) -> None:
        """Remove a holding that has ended from the table."""
        with self._mutex:
            self._remove(number)

    def abandon(self, number: bytes) -> None:
        """End a holding whose number did not reach its owner."""
        with self._mutex:
            holding = self._remove(number)
        if holding is not None:
            with contextlib.suppress(KVStoreError):
                holding.end()

    def sweep(self, everything: bool = False) -> None:
        """End holdings that are past their deadline, and the holdings of identities that have ended."""
        now_s = time.monotonic()
        with self._mutex:
            numbers = [
                number
                for number, holding in self._holdings.items()
                if everything or now_s >= holding.until_s or not self._is_valid(holding.owner)
            ]
            expired = [self._remove(number) for number in numbers]
        for holding in expired:
            if holding is not None:
                with contextlib.suppress(KVStoreError):
                    holding.end()

    def _remove(self, number: bytes) -> Holding[Resource] | None:
        holding = self._holdings.pop(number, None)
        if holding is not None:
            self._count_by_owner[holding.owner] -= 1
            self._bytes_by_owner[holding.owner] -= holding.size_bytes
            if not self._count_by_owner[holding.owner]:
                del self._count_by_owner[holding.owner], self._bytes_by_owner[holding.owner]
        return holding

    def _is_valid(self, owner: Identity) -> bool:
        try:
            self._check(owner)
        except Unauthenticated:
            return False
        return True


async def sweep_forever(run: Callable[[], None]) -> None:
    """Call ``run`` in a thread every ``SWEEP_S``, until the task is cancelled."""
    while True:
        await asyncio.sleep(SWEEP_S)
        await asyncio.to_thread(run)


WRITE_BUFFER_BYTES = 2 * BATCH_BYTES
LEASE_TTL_S = 30.0  # if a request has no ttl
GROUP_BYTES_MAX = 256
LEASED_PAGE_BYTES = 64  # bytes of memory for a page whose neighbours are not in adjacent frames
RESERVED_PAGE_BYTES = 512


class Reservation:
    """A writer that has reserved its frames, with its cache and keys."""

    def __init__(self, writer: Writer, cache: PrefixCache, keys: Keys) -> None:
        self.writer = writer
        self.cache = cache
        self.keys = keys

    def end(self) -> None:
        """Revoke the pages that are not sealed."""
        revoked = LeaseBroken("the reservation was revoked")
        self.writer.__exit__(LeaseBroken, revoked, None)


class LeaseHold:
    """A lease that is in force. Its views are dropped, because remote callers receive copies."""

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        lease.forget_views()

    def end(self) -> None:
        """Release the lease."""
        self.lease.release()


class Reservations:
    """The calls Reserve, Seal and Revoke, and the call Write if it writes into a reservation."""

    def __init__(self, store: Store, node: Node, identities: Identities) -> None:
        self._store = store
        self._node = node
        self.holdings: Holdings[Reservation] = Holdings("reservation", identities.check)

    async def reserve(self, call: Call, message: bytes) -> bytes:
        """Reserve frames for the pages that are not stored."""
        request = parse(pb.ReserveRequest, message)
        call.caller.check_salt(request.pages.salt)
        if len(request.write_group.encode()) > GROUP_BYTES_MAX:
            raise InvalidRequest("write_group", f"must be at most {GROUP_BYTES_MAX} bytes")
        self.holdings.check_room(call.caller)
        number, new_pages = await call.wait(
            self._reserve, call, request, undo=lambda reserved: self.holdings.abandon(reserved[0])
        )
        return pb.ReserveReply(reservation=number, wanted=new_pages).SerializeToString()

    def _reserve(self, call: Call, request: pb.ReserveRequest) -> tuple[bytes, list[int]]:
        prompt = prompt_of(self._store, self._node, request.pages, to_match=False)
        config = self._node.config
        ttl_s = min((request.ttl_ms or int(config.reserve_ttl_s * 1000)) / 1000, config.lease_ttl_s_max)
        group = request.write_group or None
        cut = request.rank, request.ranks or 1, None, request.stage, request.stages or 1
        writer = prompt.cache.writer(prompt.keys, ttl_s, group, *cut)
        if prompt.orphan:
            raise InvalidRequest("parent", "is not stored on this node: reserve from an earlier page")
        writer.__enter__()
        reservation = Reservation(writer, prompt.cache, prompt.keys)
        return self.holdings.add(call.caller, reservation, ttl_s, _reserved_bytes(prompt.keys)), writer.pages_new

    async def write(self, call: Call, number: bytes, batches: AsyncIterator[list[Data]]) -> bytes:
        """Write data into the reserved frames, each message at its own offset.

        Readers of this node see a layer as soon as it is complete."""
        holding = self.holdings.find(call.caller, number)
        async with call.buffers(WRITE_BUFFER_BYTES):
            async for batch in batches:
                self.holdings.find(call.caller, number)
                await call.wait(_write, holding, batch)
        return pb.WriteReply().SerializeToString()

    async def seal(self, call: Call, message: bytes) -> bytes:
        """Seal the pages if every byte was written. Otherwise revoke all of them."""
        number = parse(pb.ReservationRequest, message).reservation
        return await call.wait(self._seal, self.holdings.find(call.caller, number), number)

    def _seal(self, holding: Holding[Reservation], number: bytes) -> bytes:
        with holding.lock:
            _check(holding)
            holding.has_ended = True
            self.holdings.drop(number)
            reservation = holding.resource
            reservation.writer.__exit__(None, None, None)
            match = reservation.cache.lookup(reservation.keys)
        return pb.WriteReply(new_pages=reservation.writer.sealed, pages=match.pages).SerializeToString()

    async def revoke(self, call: Call, message: bytes) -> bytes:
        """Revoke all pages of the reservation."""
        number = parse(pb.ReservationRequest, message).reservation
        await call.wait(self.holdings.find(call.caller, number).end)
        self.holdings.drop(number)
        return b""


class Leases:
    """The calls Lease, Renew and Release."""

    def __init__(self, store: Store, node: Node, identities: Identities) -> None:
        self._store = store
        self._node = node
        self.holdings: Holdings[LeaseHold] = Holdings("lease", identities.check)

    async def lease(self, call: Call, message: bytes) -> bytes:
        """Lease the stored pages of a prompt. Pages that are only on NVMe are first copied to DRAM."""
        request = parse(pb.LeaseRequest, message)
        call.caller.check_salt(request.pages.salt)
        self.holdings.check_room(call.caller)
        reply = await call.wait(self._lease, call, request, undo=lambda reply: self.holdings.abandon(reply.lease))
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
        number = self.holdings.add(call.caller, LeaseHold(lease), ttl_s, LEASED_PAGE_BYTES * match.pages)
        return pb.LeaseReply(lease=number, pages=match.pages, ttl_ms=int(ttl_s * 1000), reason=match.reason)

    async def renew(self, call: Call, message: bytes) -> bytes:
        """Move a lease's deadline."""
        request = parse(pb.RenewRequest, message)
        holding = self.holdings.find(call.caller, request.lease)
        return await call.wait(self._renew, holding, request.lease, self._ttl_s(request.ttl_ms))

    def _renew(self, holding: Holding[LeaseHold], number: bytes, ttl_s: float) -> bytes:
        with holding.lock:
            _check(holding)
            holding.resource.lease.renew(ttl_s)
            holding.until_s = time.monotonic() + ttl_s
            match = holding.resource.lease.match
        reply = pb.LeaseReply(lease=number, pages=match.pages, ttl_ms=int(ttl_s * 1000), reason=match.reason)
        return reply.SerializeToString()

    async def release(self, call: Call, message: bytes) -> bytes:
        """Release a lease."""
        number = parse(pb.ReleaseRequest, message).lease
        await call.wait(self.holdings.find(call.caller, number).end)
        self.holdings.drop(number)
        return b""

    def _ttl_s(self, ttl_ms: int) -> float:
        return min(ttl_ms / 1000 if ttl_ms else LEASE_TTL_S, self._node.config.lease_ttl_s_max)


def _write(holding: Holding[Reservation], batch: list[Data]) -> None:
    with holding.lock:
        _check(holding)
        for data in batch:
            data.check()
            if len(data.data):
                holding.resource.writer.write_range(data.page, data.offset, data.data)


def _check(holding: Holding[Reservation] | Holding[LeaseHold]) -> None:
    """Raise LeaseBroken if the holding ended while this call waited for its lock."""
    if holding.has_ended:
        raise LeaseBroken("the reservation or lease has ended")


def _reserved_bytes(keys: Keys) -> int:
    """Return how many bytes of memory a reservation takes: keys, identities, addresses, and twice the token ids."""
    return RESERVED_PAGE_BYTES * len(keys) + 2 * keys.tokens.nbytes
