"""``PeerCaching`` fetches pages of other nodes into frames of the local node.

A page is cached here when this machine reads it from another node for the second time. It is also cached when it must
be in the local node's DRAM: for a lease, a reader, a shard or a prefetch. All processes on the machine then read it
there. Copies are worth less than pages that no other node has, so the local node evicts copies first.

A process that fetches pages reserves frames under their keys (``ArrivingPages``). All processes on the machine use one
write group for this, so only one of them fetches a given page. The others see the reservation, and wait until the page
is stored. A page is received directly in its final frame, and sealed after it is verified.

Pages that are only in the mounted memory of local engines are copied to the node too, for a lease or as parents of
fetched pages. These uses need the pages longer than an engine waits for its readers.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import PAUSE_MAX_S, PAUSE_MIN_S, accepts_hints, wait_for_saves, want_copies
from kvstore.client.local.index_lookup import first_unstored, locate, stored_beyond, stored_pages
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.peer_reads import FetchResult, PeerReader, TimeBudget
from kvstore.client.local.verify_hit import address_runs
from kvstore.client.match import ABSENT
from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FETCH_GROUP, FrameClass, FrameState, Status
from kvstore.model.retention import REPLICATED, Retention, hints_of
from kvstore.shm.index import IndexDamaged
from kvstore.shm.traffic import TrafficBucket
from kvstore.wire.control import HINTS, NO_REPLY, WRITER, Op, batch_pages, pack_class, statuses_bytes
from kvstore.wire.data import ChainQuery

ARRIVAL_BYTES: Final = 32 << 20  # bytes of pages that are reserved and fetched at a time, or one page if that is larger
TTL_S: Final = 30.0  # how long a page that has not arrived stays reserved; a get ends much earlier

_OURS = (int(Status.OK), int(Status.JOINED))


class FrameReservation(Enum):
    """The result of reserving frames for pages: which process fetches the first page."""

    OURS = "this process has reserved its frame"
    OTHER = "another process of this machine fetches it"
    RETRY = "it has just arrived, or frames will be free in a moment"
    NONE = "there is no space for it"


class ArrivingPages:
    """Reserved frames of the local node, into which pages of other nodes are received. Used by one thread.

    ``reserve`` reserves frames for the leading pages of ``keys``. The caller receives pages in ``rows``. ``seal``
    stores the leading verified pages, and returns the frames of the others. Nothing may write into the frames after
    that. So the caller ends the transfer, or closes its connection, before.

    If bytes may still arrive (``leave``), the frames of missing pages stay reserved until their deadline. Then they are
    QUARANTINED until the transfer is over or this process has ended. The deadline and the end of this process act as
    for a writer's frames.

    Args:
        timeout_s: how long the node may take to reply.

    Attributes:
        rows: the frame of each page, to be written within ``mapped.channel.copies``.
    """

    def __init__(
        self, node: LocalNode, mapped: MappedNode, keys: Keys, frame_class: FrameClass, timeout_s: float
    ) -> None:
        bytes_limit = max(1, ARRIVAL_BYTES // frame_class.page_bytes)
        limit = min(batch_pages(frame_class.page_tokens, frame_class.layers), bytes_limit)
        self.rows: list[Rows] = []
        self._node = node
        self._mapped = mapped
        self._keys = keys[:limit] if len(keys) > limit else keys
        self._class = frame_class
        self._timeout_s = timeout_s
        self._addresses = np.zeros(0, ADDRESS_DTYPE)
        self._is_left = False

    def reserve(self) -> FrameReservation:
        """Reserve frames for as many leading pages as possible. If the result is OURS, call ``seal`` afterwards.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node is not responding. Frames that it has reserved nevertheless are
                returned later, or end at their deadline.
        """
        mapped, keys = self._mapped, self._keys
        count, result = mapped.claims.claim(self, FETCH_GROUP, 0, keys.hashes), FrameReservation.OTHER
        self._keys = keys[:count]
        try:
            if count:
                result = self._request(self._timeout_s)
        except Unavailable:
            self._node.workers.submit(self._cancel, timeout_s=0.0)
            raise
        if result is not FrameReservation.OURS:
            mapped.claims.release(self)
        return result

    def _cancel(self) -> None:
        """Cancel a request that the node did not answer in time but may have received: repeat it, and return its
        frames. Until then the claim keeps this process from reserving the same pages."""
        with contextlib.suppress(Unavailable, InvalidRequest):
            self._request(self._node.timeout_s)
        self.seal(0)

    def _request(self, timeout_s: float) -> FrameReservation:
        mapped, keys, count = self._mapped, self._keys, len(self._keys)
        body = (WRITER.pack(FETCH_GROUP, 0, 1), keys.parent, keys.identity_bytes, keys.hints)
        flags, ttl_ms = HINTS if keys.hints else 0, int(TTL_S * 1000)
        number = pack_class(self._class)
        fields = {"count": count, "a": number, "b": ttl_ms, "flags": flags}
        reply = mapped.exchange(Op.RESERVE, **fields, body=body, timeout_s=timeout_s)
        if reply.op == Status.BUSY:
            return FrameReservation.RETRY
        statuses = np.frombuffer(reply.body, np.uint8, count).copy()  # the body is soon overwritten
        addresses = np.frombuffer(reply.body, ADDRESS_DTYPE, count, statuses_bytes(count)).copy()
        ours = np.isin(statuses, _OURS)
        leading = count if ours.all() else int(ours.argmin())
        self._addresses = addresses[:leading]
        ours[:leading] = False
        self._return_frames(addresses[ours].tobytes())  # frames after a page that this process does not fetch
        if leading:
            self._map_rows()
            return FrameReservation.OURS
        if statuses[0] == Status.NO_PARENT:
            return FrameReservation.OTHER if is_pending(mapped, keys.hashes[0]) else FrameReservation.NONE
        return FrameReservation.RETRY if statuses[0] in (Status.BUSY, Status.PRESENT) else FrameReservation.NONE

    def _map_rows(self) -> None:
        for number, frame, _, words in address_runs(self._addresses, int(FrameState.RESERVED)):
            extent = self._mapped.dram.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
            frames = slice(frame, frame + len(words))
            extent.last_use[frames] = time.monotonic_ns()  # replaces the last use of the frame's old page
            self.rows += list(extent.pages[frames])

    def seal(self, pages: int) -> None:
        """Seal the first ``pages`` pages, which are in ``rows`` and verified, and return the other frames. If the node
        does not receive this, the frames end at their deadline."""
        mapped, self.rows = self._mapped, []
        raw, cut = self._addresses.tobytes(), pages * ADDRESS_BYTES
        self._addresses = self._addresses[pages:]
        try:
            if not self._is_left:
                self._return_frames(raw[cut:])
            with contextlib.suppress(Unavailable, InvalidRequest):
                if pages:
                    reply = mapped.exchange(Op.SEAL, count=pages, body=(raw[:cut],), timeout_s=self._timeout_s)
                    statuses = bytes(reply.body[:pages])
                    self._wait_for_saves([page for page, status in enumerate(statuses) if status == Status.BUSY], raw)
        finally:
            if not self._is_left:
                mapped.claims.release(self)

    def leave(self) -> Callable[[], None]:
        """Keep the frames of missing pages, because bytes may still arrive in them: ``seal`` then returns no frames.
        Return the function to call when the transfer is over. See ``cluster.transport.PlaceHolder``."""
        self._is_left = True
        return self._end_transfer

    def _end_transfer(self) -> None:
        """Return the frames of missing pages, after the end of the transfer."""
        self._return_frames(self._addresses.tobytes())
        self._mapped.claims.release(self)

    def _wait_for_saves(self, pages: list[int], raw: bytes) -> None:
        if pages:
            hashes = [self._keys.hashes[page] for page in pages]
            addresses = np.frombuffer(raw, ADDRESS_DTYPE)[pages]
            wait_for_saves(self._mapped, hashes, addresses, time.monotonic() + self._timeout_s)

    def _return_frames(self, raw: bytes) -> None:
        if raw:
            count = len(raw) // ADDRESS_BYTES
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
                fields = {"count": count, "a": 1, "flags": NO_REPLY}
                self._mapped.channel.request(Op.REVOKE, **fields, body=(raw,), timeout_s=self._timeout_s)


def is_pending(mapped: MappedNode, key: bytes) -> bool:
    """Return whether a process on this machine has reserved a frame for this page and has not sealed it yet."""
    try:
        return mapped.index.find_pending(key) is not None
    except IndexDamaged:
        return False  # the daemon rebuilds the index under a new epoch


def wait_while_pending(mapped: MappedNode, key: bytes, timeout_s: float) -> bool:
    """Wait until a page is no longer pending, but at least for one pause. Return False if it still is after
    ``timeout_s``."""
    deadline_s, pause_s = time.monotonic() + timeout_s, PAUSE_MIN_S
    while True:
        time.sleep(pause_s)
        if not is_pending(mapped, key):
            return True
        if time.monotonic() >= deadline_s:
            return False
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


BUCKET_WAIT_S: Final = 0.25  # the longest wait of a copy for other background traffic of its node
LATE, BUSY, ORPHAN, FULL = "late", "busy", "parent", "space"  # why ``PeerCaching.copy_from`` stored no more pages
COPIES: Final = Retention(-1)  # copies of other nodes' pages are evicted first

Name = Callable[[MappedNode, float], None]
"""Sends the node the tenant of a cache's pages, within a number of seconds."""


class PeerCaching:
    """Fetches pages of other nodes and of engines into the local node, for one cache."""

    def __init__(self, node: LocalNode, chain: ChainQuery) -> None:
        self._node = node
        self._chain = chain

    def pages_worth_caching(self, peer_reader: PeerReader, keys: Keys) -> int:
        """Return how many leading pages to cache here: those that this machine has read from another node before.
        Return 0 if the local node is not responding."""
        mapped = self._node.last
        return peer_reader.history.leading(keys.links) if mapped is not None and accepts_hints(mapped) else 0

    def fetch(self, keys: Keys, budget: TimeBudget, name: Name) -> FetchResult:
        """Fetch pages of other nodes into the local node, as far as it has space. Return the pages that this call has
        fetched, without those that other processes on this machine have fetched."""
        result, peer_reader = FetchResult(), self._node.peer_reader
        if peer_reader is None or not peer_reader.has_peers:
            return result
        with contextlib.suppress(Unavailable):  # the local node is not responding, so nothing can be stored in it
            while not budget.is_over and self._fetch_some(peer_reader, keys, budget, result, name):
                pass
        return result

    def copy_from(
        self, source: str, peer_reader: PeerReader, keys: Keys, budget: TimeBudget, name: Name, bucket: TrafficBucket
    ) -> tuple[int, str]:
        """Copy pages of the node ``source`` into the local node, in the background. ``keys`` have the hints to store.

        Return how many leading pages any local tier has afterwards, and why not more.

        Raises:
            Unavailable: the local node is not responding.
        """
        mapped = self._node.mapped()
        stored = self._stored(mapped, keys) if mapped is not None else 0
        if mapped is not None and stored and keys.hints[0] & REPLICATED:
            want_copies(mapped, mapped.in_pool(keys[:stored]).hashes, owed=False)  # they may have had one replica
        while True:
            mapped = self._node.mapped()
            pages = self._stored(mapped, keys) if mapped is not None else 0
            if mapped is None or pages == len(keys) or budget.is_over:
                return pages, "" if pages == len(keys) else LATE
            rest = mapped.in_pool(keys[pages:])
            arrival, reservation = self._reserve(mapped, rest, budget, name)
            if reservation is FrameReservation.NONE:
                return pages, ORPHAN if self._lacks_parent(mapped, rest) else FULL
            if reservation is not FrameReservation.OURS:
                self._wait_for_other(mapped, rest.hashes[0], budget)
                continue
            arrived = 0
            try:
                wait_s = bucket.charge(len(arrival.rows) * self._chain.frame_class.page_bytes, BUCKET_WAIT_S)
                if wait_s is None:
                    return pages, BUSY
                time.sleep(wait_s)
                with mapped.channel.copies:
                    arrived = peer_reader.read_from(
                        source, self._chain, keys[pages : pages + len(arrival.rows)], arrival.rows, budget, arrival
                    )
            finally:
                arrival.seal(arrived)
            if not arrived:
                return pages, ABSENT

    def _lacks_parent(self, mapped: MappedNode, keys: Keys) -> bool:
        """Return whether no local tier has the page before these."""
        if keys.parent == keys.root:
            return False
        try:
            return all(mapped.index.find(reader.tier, keys.parent) is None for reader in mapped.tiers)
        except IndexDamaged:
            return False

    def copy_from_engines(self, keys: Keys, budget: TimeBudget, name: Name) -> None:
        """Copy pages that are only in the memory of local engines to frames of the node, as far as it has space."""
        with contextlib.suppress(Unavailable):
            while not budget.is_over and self._copy_some(keys, budget, name):
                pass

    def _copy_some(self, keys: Keys, budget: TimeBudget, name: Name) -> bool:
        """Copy the next pages of engines. Return False if there are no more, or if they cannot be copied."""
        mapped = self._node.mapped()
        if mapped is None or not mapped.hbm.readable() or not accepts_hints(mapped):
            return False
        pool_keys = mapped.in_pool(keys)
        rest = pool_keys[first_unstored(mapped, pool_keys, self._chain.closed) :]
        located = locate(mapped, mapped.hbm, rest, self._chain.closed)
        if not located:
            return False
        arrival, result = self._reserve(mapped, rest[: len(located)], budget, name)
        if result is not FrameReservation.OURS:
            return result is not FrameReservation.NONE and self._wait_for_other(mapped, rest.hashes[0], budget)
        pages = 0
        try:
            with mapped.channel.copies:
                pages = self._read_engines(mapped, located, rest, arrival.rows)
        finally:
            arrival.seal(pages)
        return pages > 0

    def _read_engines(self, mapped: MappedNode, located: list[bytes], keys: Keys, rows: list[Rows]) -> int:
        """Read pages of engines into frames, up to the first one that no longer exists. Return their number."""
        for page, row in enumerate(rows):
            part = slice(page, page + 1)
            read = mapped.hbm.start(located[part], keys[part], self._chain.frame_class, row[None])
            if not read.result(mapped.timeout_s)[0]:
                return page
        return len(rows)

    def _fetch_some(
        self, peer_reader: PeerReader, keys: Keys, budget: TimeBudget, result: FetchResult, name: Name
    ) -> bool:
        """Fetch the next pages of other nodes, or wait for another process that fetches them. Return False if no more
        pages can be fetched."""
        mapped = self._node.mapped()
        if mapped is None or not accepts_hints(mapped):  # the node cannot store pages, and a read must not wait for it
            return False
        pages = self._stored(mapped, keys)
        stretches = peer_reader.find(self._chain, keys, pages, (), budget) if pages < len(keys) else []
        if not stretches:
            return False
        self.copy_from_engines(keys[:pages], budget, name)  # these may be the parents of the fetched pages
        rest = mapped.in_pool(keys[pages : pages + stretches[-1].stop])
        rest = rest.hinted(hints_of(COPIES, len(rest), rest.page_tokens))
        arrival, reservation = self._reserve(mapped, rest, budget, name)
        if reservation is FrameReservation.OURS:
            return self._receive(peer_reader, mapped, arrival, keys, pages, budget, result)
        if reservation is FrameReservation.NONE:
            return False
        start_s = time.monotonic()
        has_ended = self._wait_for_other(mapped, rest.hashes[0], budget)
        if has_ended and self._stored(mapped, keys) > pages:
            budget.extend(time.monotonic() - start_s)
        return has_ended

    def _reserve(
        self, mapped: MappedNode, keys: Keys, budget: TimeBudget, name: Name
    ) -> tuple[ArrivingPages, FrameReservation]:
        """Reserve frames for the leading pages of ``keys``."""
        arrival = ArrivingPages(self._node, mapped, keys, self._chain.frame_class, budget.local_wait_s)
        with budget.query():
            name(mapped, budget.local_wait_s)
            return arrival, arrival.reserve()

    def _wait_for_other(self, mapped: MappedNode, key: bytes, budget: TimeBudget) -> bool:
        """Wait for another process on this machine that fetches this page. Return whether the page is no longer
        pending."""
        has_ended = wait_while_pending(mapped, key, budget.local_wait_s)
        budget.deduct(0.0 if has_ended else budget.local_wait_s)
        return has_ended

    def _receive(
        self,
        peer_reader: PeerReader,
        mapped: MappedNode,
        arrival: ArrivingPages,
        keys: Keys,
        pages: int,
        budget: TimeBudget,
        result: FetchResult,
    ) -> bool:
        """Receive pages in reserved frames, seal them, and add them to ``result``. Return whether a page arrived."""
        fetched = FetchResult()
        try:
            with mapped.channel.copies:
                fetched = peer_reader.read(self._chain, keys, arrival.rows, pages, budget, arrival)
        finally:
            arrival.seal(fetched.pages)
        result.add(fetched)
        return bool(fetched.pages)

    def _stored(self, mapped: MappedNode, keys: Keys) -> int:
        """Return how many leading pages any local tier has."""
        pool_keys = mapped.in_pool(keys)
        pages, _ = stored_pages(mapped, pool_keys, self._chain.closed)
        return stored_beyond(mapped, pool_keys, pages, self._chain.closed)[0] if pages < len(keys) else pages
