"""Caches pages of other nodes in the local node: which are worth it, and how they are fetched.

A page is cached here when this machine reads it from another node for the second time, or when it must be in this
machine's memory: for a lease, a reader, a shard or a prefetch. It is received in its final frame, sealed after it is
verified, and read from there by all processes of the machine. One process fetches it; the others wait for that. Copies
are worth less than pages that no other node has, so they are evicted first.

Pages that only local engines have, in memory that they mounted, are copied to the node as well, if they must stay
longer than an engine waits for readers: for a lease, or as parents of pages that are fetched.

Frames of the local node that receive pages of other nodes.

A process that fetches pages reserves frames under their keys, in one write group that all processes of the machine
share for this purpose. So only one process fetches a given page; the others see the reservation, and find the page
stored a moment later. A page is received directly into its final frame, and sealed after it is verified.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import PAUSE_MAX_S, PAUSE_MIN_S, accepts_hints, wait_for_saves
from kvstore.client.local.index_lookup import first_unstored, locate, stored_beyond, stored_pages
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.peer_reads import Brought, Elsewhere, Patience
from kvstore.client.local.verify_hit import address_runs
from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, FrameState, Status
from kvstore.model.retention import Retention, hints_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import HINTS, NO_REPLY, WRITER, Op, batch_pages, pack_class, statuses_bytes
from kvstore.wire.data import ChainQuery

BRINGERS: Final = int.from_bytes(b"bring it", "big")  # the write group
ARRIVAL_BYTES: Final = 32 << 20  # reserved and fetched at a time, or one page if that is larger
TTL_S: Final = 30.0  # after which the reservation of a page that has not arrived ends; a get ends much earlier

_OURS = (int(Status.OK), int(Status.JOINED))


class Bringer(Enum):
    """The process that fetches a page."""

    OURS = "this process has reserved its frame"
    COMING = "another process of this machine fetches it"
    AGAIN = "it has just arrived, or frames will be free in a moment"
    NONE = "there is no room for it"


class ArrivingPages:
    """Frames for the leading pages of ``keys``. Used by one thread.

    Life: ``reserve`` -> pages are received into ``rows`` -> ``seal``, which stores the leading verified pages and
    returns the frames of the others. From then on nothing may write there: the connection that carried the pages is
    done or closed. If bytes may still arrive (``leave``), the frames of missing pages stay reserved until the deadline
    and are then QUARANTINED, until the transfer is over or this process has ended. The death of this process and the
    deadline end it like those of a writer.

    Args:
        answer_s: how long the node may take to answer.

    Attributes:
        rows: the frame of each page, to be written within ``mapped.channel.copies``.
    """

    def __init__(self, node: LocalNode, mapped: Mapped, keys: Keys, shape: FrameClass, answer_s: float) -> None:
        limit = min(batch_pages(shape.page_tokens, shape.layers), max(1, ARRIVAL_BYTES // shape.page_bytes))
        self.rows: list[Rows] = []
        self._node = node
        self._mapped = mapped
        self._keys = keys[:limit] if len(keys) > limit else keys
        self._shape = shape
        self._answer_s = answer_s
        self._addresses = np.zeros(0, ADDRESS_DTYPE)
        self._left = False

    def reserve(self) -> Bringer:
        """Reserve frames for as many leading pages as possible. If the result is OURS, ``seal`` must follow.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node does not answer. Frames that it has reserved end with their
                deadline.
        """
        mapped, keys = self._mapped, self._keys
        count, place = mapped.claims.claim(self, BRINGERS, 0, keys.hashes), Bringer.COMING
        self._keys = keys[:count]
        try:
            if count:
                place = self._ask(self._answer_s)
        except Unavailable:
            self._node.workers.submit(self._take_back, timeout_s=0.0)
            raise
        if place is not Bringer.OURS:
            mapped.claims.release(self)
        return place

    def _take_back(self) -> None:
        """Take back a request that the node did not answer in time but may have received. Until its outcome is known
        this process does not ask again."""
        with contextlib.suppress(Unavailable, InvalidRequest):
            self._ask(self._node.timeout_s)
        self.seal(0)

    def _ask(self, timeout_s: float) -> Bringer:
        mapped, keys, count = self._mapped, self._keys, len(self._keys)
        body = (WRITER.pack(BRINGERS, 0, 1), keys.parent, keys.identity_bytes, keys.hints)
        flags, ttl_ms = HINTS if keys.hints else 0, int(TTL_S * 1000)
        number = pack_class(self._shape)
        ask = {"count": count, "a": number, "b": ttl_ms, "flags": flags}
        reply = mapped.exchange(Op.RESERVE, **ask, body=body, timeout_s=timeout_s)
        if reply.op == Status.BUSY:
            return Bringer.AGAIN
        statuses = np.frombuffer(reply.body, np.uint8, count).copy()  # the body is valid for a short time only
        addresses = np.frombuffer(reply.body, ADDRESS_DTYPE, count, statuses_bytes(count)).copy()
        ours = np.isin(statuses, _OURS)
        leading = count if ours.all() else int(ours.argmin())
        self._addresses = addresses[:leading]
        ours[:leading] = False
        self._give_back(addresses[ours].tobytes())  # they follow a page that is stored already
        if leading:
            self._lay_out()
            return Bringer.OURS
        if statuses[0] == Status.NO_PARENT:
            return Bringer.COMING if is_coming(mapped, keys.hashes[0]) else Bringer.NONE
        return Bringer.AGAIN if statuses[0] in (Status.BUSY, Status.PRESENT) else Bringer.NONE

    def _lay_out(self) -> None:
        for number, frame, _, words in address_runs(self._addresses, int(FrameState.RESERVED)):
            extent = self._mapped.dram.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
            frames = slice(frame, frame + len(words))
            extent.last_use[frames] = time.monotonic_ns()  # else a frame keeps the last use of its previous page
            self.rows += list(extent.pages[frames])

    def seal(self, pages: int) -> None:
        """Seal the first ``pages`` pages, which are in ``rows`` and verified; nothing writes there any more. If the
        node does not receive this, the frames end with their deadline."""
        mapped, self.rows = self._mapped, []
        raw, cut = self._addresses.tobytes(), pages * ADDRESS_BYTES
        self._addresses = self._addresses[pages:]
        try:
            if not self._left:
                self._give_back(raw[cut:])
            with contextlib.suppress(Unavailable, InvalidRequest):
                if pages:
                    reply = mapped.exchange(Op.SEAL, count=pages, body=(raw[:cut],), timeout_s=self._answer_s)
                    statuses = bytes(reply.body[:pages])
                    self._await_saved([page for page, status in enumerate(statuses) if status == Status.BUSY], raw)
        finally:
            if not self._left:
                mapped.claims.release(self)

    def leave(self) -> Callable[[], None]:
        """See ``cluster.transport.PlaceHolder``. ``seal`` then returns no frames."""
        self._left = True
        return self._landed

    def _landed(self) -> None:
        """Note that nothing can be received into these frames any more."""
        self._give_back(self._addresses.tobytes())
        self._mapped.claims.release(self)

    def _await_saved(self, pages: list[int], raw: bytes) -> None:
        if pages:
            hashes = [self._keys.hashes[page] for page in pages]
            addresses = np.frombuffer(raw, ADDRESS_DTYPE)[pages]
            wait_for_saves(self._mapped, hashes, addresses, time.monotonic() + self._answer_s)

    def _give_back(self, raw: bytes) -> None:
        if raw:
            count = len(raw) // ADDRESS_BYTES
            with contextlib.suppress(Unavailable, InvalidRequest):  # InvalidRequest: the store was closed
                ask = {"count": count, "a": 1, "flags": NO_REPLY}
                self._mapped.channel.request(Op.REVOKE, **ask, body=(raw,), timeout_s=self._answer_s)


def is_coming(mapped: Mapped, key: bytes) -> bool:
    """Return whether a process of this machine is about to store that page."""
    try:
        return mapped.index.find_pending(key) is not None
    except IndexDamaged:
        return False  # the daemon will rebuild the index under a new epoch


def await_coming(mapped: Mapped, key: bytes, within_s: float) -> bool:
    """Wait at least a moment, while ``is_coming``. Returns False if it still is after ``within_s``."""
    deadline_s, pause_s = time.monotonic() + within_s, PAUSE_MIN_S
    while True:
        time.sleep(pause_s)
        if not is_coming(mapped, key):
            return True
        if time.monotonic() >= deadline_s:
            return False
        pause_s = min(2 * pause_s, PAUSE_MAX_S)


COPIES: Final = Retention(-1)

Name = Callable[[Mapped, float], None]
"""Tells the node which tenant these pages belong to, within a number of seconds."""


class Keeping:
    """Fetches pages of other nodes and engines for one cache."""

    def __init__(self, node: LocalNode, chain: ChainQuery) -> None:
        self._node = node
        self._chain = chain

    def worth(self, elsewhere: Elsewhere, keys: Keys) -> int:
        """Return how many of these leading pages to cache: those that were fetched before."""
        mapped = self._node.last
        return elsewhere.brought.leading(keys.links) if mapped is not None and accepts_hints(mapped) else 0

    def gather(self, keys: Keys, patience: Patience, name: Name) -> Brought:
        """Fetch these pages from other nodes into the local node, as far as there is space. Returns what this call
        fetched, not what other processes of this machine did."""
        brought, elsewhere = Brought(), self._node.elsewhere
        if elsewhere is None or elsewhere.alone:
            return brought
        with contextlib.suppress(Unavailable):  # the local node does not answer: the pages stay where they are
            while not patience.over and self._go_on(elsewhere, keys, patience, brought, name):
                pass
        return brought

    def lift(self, keys: Keys, patience: Patience, name: Name) -> None:
        """Copy pages that only local engines have to frames of the node, as far as there is space."""
        with contextlib.suppress(Unavailable):
            while not patience.over and self._lift_some(keys, patience, name):
                pass

    def _lift_some(self, keys: Keys, patience: Patience, name: Name) -> bool:
        """Copy some more of them; return False if there are no more, or none can be copied."""
        mapped = self._node.mapped()
        if mapped is None or not mapped.hbm.readable() or not accepts_hints(mapped):
            return False
        ours = mapped.in_pool(keys)
        ours = ours[first_unstored(mapped, ours, self._chain.closed) :]
        located = locate(mapped, mapped.hbm, ours, self._chain.closed)
        if not located:
            return False
        arrival = ArrivingPages(self._node, mapped, ours[: len(located)], self._chain.frame_class, patience.here_s)
        with patience.asking():
            name(mapped, patience.here_s)
            place = arrival.reserve()
        if place is not Bringer.OURS:
            return place is not Bringer.NONE and self._await(mapped, ours.hashes[0], patience)
        pages = 0
        try:
            with mapped.channel.copies:
                pages = self._read(mapped, located, ours, arrival.rows)
        finally:
            arrival.seal(pages)
        return pages > 0

    def _read(self, mapped: Mapped, located: list[bytes], keys: Keys, rows: list[Rows]) -> int:
        """Fill these frames with the leading pages that still exist; return how many."""
        for page, row in enumerate(rows):
            one = slice(page, page + 1)
            read = mapped.hbm.start(located[one], keys[one], self._chain.frame_class, row[None])
            if not read.result(mapped.timeout_s)[0]:
                return page
        return len(rows)

    def _go_on(self, elsewhere: Elsewhere, keys: Keys, patience: Patience, brought: Brought, name: Name) -> bool:
        """Fetch some more pages, or wait for another process that does; return False if nothing more comes."""
        mapped = self._node.mapped()
        if mapped is None or not accepts_hints(mapped):  # nothing could be stored, and a read must not wait for it
            return False
        pages = self._stored(mapped, keys)
        found = elsewhere.seek(self._chain, keys, pages, (), patience) if pages < len(keys) else []
        if not found:
            return False
        self.lift(keys[:pages], patience, name)  # the fetched pages may be their children
        wanted = mapped.in_pool(keys[pages : pages + found[-1].stop])
        wanted = wanted.hinted(hints_of(COPIES, len(wanted), wanted.page_tokens))
        arrival = ArrivingPages(self._node, mapped, wanted, self._chain.frame_class, patience.here_s)
        with patience.asking():
            name(mapped, patience.here_s)
            place = arrival.reserve()
        if place is Bringer.OURS:
            return self._bring(elsewhere, mapped, arrival, keys, pages, patience, brought)
        if place is Bringer.NONE:
            return False
        began_s = time.monotonic()
        joined = self._await(mapped, wanted.hashes[0], patience)
        if joined and self._stored(mapped, keys) > pages:
            patience.extend(time.monotonic() - began_s)
        return joined

    def _await(self, mapped: Mapped, key: bytes, patience: Patience) -> bool:
        """Wait for another process of this machine that fetches that page; return whether it has ended."""
        joined = await_coming(mapped, key, patience.here_s)
        patience.waited(0.0 if joined else patience.here_s)
        return joined

    def _bring(
        self,
        elsewhere: Elsewhere,
        mapped: Mapped,
        arrival: ArrivingPages,
        keys: Keys,
        pages: int,
        patience: Patience,
        brought: Brought,
    ) -> bool:
        """Fill those frames; return whether any page arrived."""
        came = Brought()
        try:
            with mapped.channel.copies:
                came = elsewhere.read(self._chain, keys, arrival.rows, pages, patience, arrival)
        finally:
            arrival.seal(came.pages)
        brought.add(came)
        return bool(came.pages)

    def _stored(self, mapped: Mapped, keys: Keys) -> int:
        """Return how many leading pages any local tier has."""
        ours = mapped.in_pool(keys)
        pages, _ = stored_pages(mapped, ours, self._chain.closed)
        return stored_beyond(mapped, ours, pages, self._chain.closed)[0] if pages < len(keys) else pages
