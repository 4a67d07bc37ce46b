"""LocalPut: puts pages into a node of this machine: copies them into granted frames, and seals them batch by batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows, fill
from kvstore.client.local.copying import checksums_of
from kvstore.client.local.frame_copies import frame_checksums, frames_of, from_device
from kvstore.client.local.grants import BUSY_PAUSE_S, OVER_QUOTA, GrantPool, Purpose, still_ours
from kvstore.client.local.node import Mapped
from kvstore.client.local.publisher import PendingReply, Publisher
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import Address, FrameClass, FrameState, Status, word_of
from kvstore.shm.counters import SessionCounters
from kvstore.shm.header import DaemonState, Header
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import CHECKSUMS, CONTINUES, HINTS, NO_REPLY, Op, encode, pack_addresses

BUSY_PAUSE_MAX_S = 0.02

_OK, _NO_PARENT, _STALE = int(Status.OK), int(Status.NO_PARENT), int(Status.STALE)
_BUSY, _OVER_QUOTA = int(Status.BUSY), int(Status.OVER_QUOTA)
_STATE, _READY = Header.state.position, int(DaemonState.READY)


class SealBatch:
    """Consecutive pages in one seal request."""

    __slots__ = ("page", "addresses", "body", "reply", "sent_again")

    def __init__(self, page: int, addresses: list[Address], body: tuple[bytes, ...]) -> None:
        self.page = page
        self.addresses = addresses
        self.body = body
        self.reply: PendingReply | None = None
        self.sent_again = False


class LocalPut(PendingPut):
    """A put whose pages are copied and whose seals were sent. After a failure, pages whose seal was acknowledged are
    stored; the frames of the others are forfeit (the node takes them back).
    """

    __slots__ = (
        "_mapped",
        "_keys",
        "_pool",
        "_flags",
        "_first",
        "_known",
        "_batches",
        "_lock",
        "_new",
        "_failure",
        "_sent_again",
        "_refused",
        "_publishes",
        "_published",
        "_since",
    )

    def __init__(
        self,
        mapped: Mapped,
        keys: Keys,
        frame_class: FrameClass,
        flags: int = 0,
        known: Collection[int] = (),
        publishes: bool = False,
    ) -> None:
        self._mapped = mapped
        self._keys = keys
        self._pool: GrantPool = mapped.pool(frame_class, keys.root if publishes else b"")
        self._flags = flags
        self._first = 0  # first new page
        self._known = known  # pages that are on NVMe already: sealed in DRAM as well, but not new
        self._batches: list[SealBatch] = []
        self._lock = threading.Lock()
        self._new = 0
        self._failure: Unavailable | None = None
        self._sent_again = False
        self._refused = False  # the tenant's quota is used up
        self._publishes = publishes  # until a batch cannot be published: later ones depend on its seal
        self._published = 0  # where the last batch's record ends in our slot
        publisher = mapped.channel.publisher
        self._since = publisher.published + 1 if publishes and publisher is not None else 0

    @property
    def counters(self) -> SessionCounters:
        """The counters of the session."""
        return self._mapped.counters

    def result(self) -> int:
        """See ``PendingPut.result``."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            batches = self._batches
            try:
                while batches:
                    self._settle(batches[0])
                    del batches[0]
            except Unavailable as error:
                self._failure = error
                self._abandon()
                raise
        if self._refused and not self._new:
            raise QuotaExceeded(OVER_QUOTA)
        return self._new

    def leave(self) -> None:
        """Let the pool call ``result`` some time later, since the caller may never do so."""
        if self._batches:
            self._pool.unread(self)

    def send(self, rows: Rows | DeviceRows, stored: int) -> None:
        """Copy pages ``stored ..`` of ``rows`` ``[pages, page_bytes]`` and send their seals. Called once."""
        pool, total = self._pool, len(rows)
        limit = pool.batch_pages
        frames = pool.take(total - stored)
        asked: PendingReply | None = None
        self._first = page = stored
        try:
            if len(frames) < total - stored:
                asked = pool.ask(total - stored - len(frames), self._purpose(stored))
            pool.ask_ahead(total - stored, partial(self._purpose, stored))  # the node grants while we copy
            while page < total:
                if not frames:
                    try:
                        frames, asked = self._granted(asked, page), None
                    except QuotaExceeded:
                        self._refused, asked = True, None
                    if not frames:
                        break  # the store is full of pages that cannot be evicted
                part = frames[:limit]
                if failpoint.ACTIVE:
                    failpoint.hit("client.granted")
                del frames[: len(part)]  # they no longer belong to the pool, even if the copy fails
                body = self._body(page, part)  # before the copy, which evicts what this reads from the CPU's caches
                with self._mapped.channel.copies:
                    self._copy(rows, page, part)
                if failpoint.ACTIVE:
                    failpoint.hit("client.copied")
                page += len(part)
                self._seal(rows, page - len(part), part, body)
        except BaseException:
            self._abandon()
            raise
        finally:
            pool.add(frames)
            if asked is not None:
                with contextlib.suppress(Unavailable):
                    pool.add(pool.granted(asked))

    @staticmethod
    def may_publish(mapped: Mapped) -> bool:
        """Return whether puts can be published: this session has a log, and the node is serving. A quota does not
        matter, because a tenant is charged when frames are granted."""
        return mapped.channel.publisher is not None and mapped.words[_STATE] == _READY

    def take(self, page: int) -> list[Address]:
        """Return frames for the pages from ``page`` on, as many as are available. The caller copies into them and calls
        ``seal``.

        Raises NodeUnavailable or DeadlineExceeded if the node does not answer.
        """
        return self._pool.take_granted(len(self._keys) - page, self._purpose(page), self._mapped.timeout_s)

    def seal(self, page: int, addresses: list[Address]) -> None:
        """Seal all pages from ``page`` on, which are in these frames. Called once, after ``take``."""
        self._first = page
        step = self._pool.request_pages
        try:
            for start in range(0, len(addresses), step):
                part = addresses[start : start + step]
                self._seal(None, page + start, part, self._body(page + start, part))
        except BaseException:
            self._pool.forfeit(addresses)
            self._batches.clear()
            raise

    def forfeit(self, addresses: list[Address]) -> None:
        """Give these frames up instead of sealing them: nothing writes into them any more."""
        self._pool.forfeit(addresses)

    def _granted(self, asked: PendingReply | None, page: int) -> list[Address]:
        """Return frames for the remaining pages from ``page`` on. Requests them (again) if that was not done, or if the
        request was lost."""
        pool, wanted = self._pool, (len(self._keys) - page, self._purpose(page))
        deadline = time.monotonic() + self._mapped.timeout_s
        return pool.wait_granted(asked if asked is not None else pool.ask(*wanted), *wanted, deadline)

    def _purpose(self, page: int) -> Purpose:
        return Purpose(self._before(page), self._since)

    def _before(self, page: int) -> bytes:
        """Return the key of the parent of ``page``."""
        return self._keys.hashes[page - 1] if page else self._keys.parent

    def _copy(self, rows: Rows | DeviceRows, page: int, addresses: list[Address]) -> None:
        if isinstance(rows, DeviceRows):
            from_device(self._mapped, rows[page : page + len(addresses)], addresses, self._pool)
            return
        for extent, frame, i, j in frames_of(self._mapped, addresses):
            fill(extent.pages[frame : frame + j - i], rows[page + i : page + j])
            extent.last_use[frame : frame + j - i] = time.monotonic_ns()  # not its last page's

    def _body(self, page: int, addresses: list[Address]) -> tuple[bytes, ...]:
        """Return what a seal request says about the pages from ``page`` on, in these frames."""
        identity, count = self._keys.identity_bytes, len(addresses)
        if count < len(self._keys):
            width = len(identity) // len(self._keys)
            identity = identity[page * width : (page + count) * width]
        return self._before(page), pack_addresses(addresses), identity

    def _seal(
        self, rows: Rows | DeviceRows | None, page: int, addresses: list[Address], body: tuple[bytes, ...]
    ) -> None:
        keys, count = self._keys, len(addresses)
        if self._flags & CHECKSUMS and rows is not None:
            layers = self._pool.frame_class.layers
            here = None if isinstance(rows, DeviceRows) else checksums_of(rows[page : page + count], layers)
            body = (*body, (frame_checksums(self._mapped, addresses, layers) if here is None else here).tobytes())
        if hints := keys.hints[page : page + count]:
            body = (*body, hints)
        batch = SealBatch(page, addresses, body)
        self._batches.append(batch)
        self._publishes = self._publishes and self._publish(batch)
        if self._publishes:
            self._batches.pop()
        else:
            self._request(batch)

    def _request(self, batch: SealBatch) -> None:
        batch.reply = self._mapped.channel.request(
            Op.SEAL_GRANTED,
            count=len(batch.addresses),
            a=self._pool.class_number,
            flags=self._flags_of(batch),
            body=batch.body,
        )
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")

    def _flags_of(self, batch: SealBatch) -> int:
        hints = HINTS if self._keys.hints else 0
        return self._flags | hints | (CONTINUES if batch.page > self._first else 0)

    def _publish(self, batch: SealBatch) -> bool:
        """Publish a batch in the log: its pages are found from now on, and its frames no longer belong to this session.
        Returns False if it must be sent as a request instead: the log is full, or only NVMe has the parent."""
        mapped, count = self._mapped, len(batch.addresses)
        publisher = mapped.channel.publisher
        if publisher is None or not self.hangs(publisher, batch.page):
            return False
        number, flags = self._pool.class_number, self._flags_of(batch) | NO_REPLY
        request = encode(Op.SEAL_GRANTED, 0, count=count, a=number, flags=flags, body=batch.body)
        pages = range(batch.page, batch.page + count)
        position = publisher.publish(request, self._keys.hashes[pages.start : pages.stop], mapped.header)
        if not position:
            return False
        if failpoint.ACTIVE:
            failpoint.hit("client.published")
        self._published = position
        new = sum(page not in self._known for page in pages) if self._known else count
        self._new += new
        mapped.counters.put(mapped.row(self._pool.frame_class), new)
        return True

    def hangs(self, publisher: Publisher, page: int) -> bool:
        """Return whether this page's parent is the root, or a page that is in DRAM or published; such a parent cannot
        leave before the page is taken in."""
        before = self._before(page)
        if before == self._keys.root or (page > self._first and publisher.marked < self._published):
            return True
        try:
            return self._mapped.index.find(self._mapped.dram.tier, before) is not None or publisher.holds(before)
        except IndexDamaged:
            return False

    def _settle(self, batch: SealBatch) -> None:
        """Wait for the batch's statuses. The request is sent once more if the daemon ended before it answered."""
        assert batch.reply is not None
        count = len(batch.addresses)
        try:
            message = batch.reply.result()
        except NodeUnavailable:
            message = self._again(batch)
        statuses = bytes(message.body[:count])
        if self._sent_again and not batch.sent_again and _NO_PARENT in statuses:
            # This batch overtook the one before it, which was lost and has been sent again by now.
            message = self._again(batch)
            statuses = bytes(message.body[:count])
        deadline, pause_s = time.monotonic() + self._mapped.timeout_s, BUSY_PAUSE_S
        # The tenant's own pages are being saved to free space; or these pages are, since only NVMe has their parent.
        while _BUSY in statuses and time.monotonic() < deadline:
            time.sleep(pause_s)
            first, pause_s = statuses, min(2 * pause_s, BUSY_PAUSE_MAX_S)
            statuses = bytes(self._again(batch).body[:count])
            statuses = bytes(_OK if old == _OK else new for old, new in zip(first, statuses, strict=True))
        self._refused = self._refused or _OVER_QUOTA in statuses or _BUSY in statuses
        sealed: Sequence[int] = range(batch.page, batch.page + count)
        if statuses.count(_OK) != count:
            sealed = self._sort_out(batch, statuses)
        new = sum(page not in self._known for page in sealed) if self._known else len(sealed)
        self._new += new
        self.counters.put(self._mapped.row(self._pool.frame_class), new)

    def _again(self, batch: SealBatch) -> Any:
        batch.sent_again = self._sent_again = True
        self._request(batch)
        assert batch.reply is not None
        return batch.reply.result()

    def _sort_out(self, batch: SealBatch, statuses: bytes) -> list[int]:
        """Return frames that are still ours to the pool; the record counts, not what the status implies. Frames that
        the node may still be reading are given up. Returns the pages that are sealed."""
        back, busy, sealed = list[Address](), list[Address](), []
        for page, (address, status) in enumerate(zip(batch.addresses, statuses, strict=True), batch.page):
            extent = self._mapped.dram.extent(address.extent)
            word = int(extent.words[address.frame]) if extent is not None else 0
            if status == _OK or (batch.sent_again and word == word_of(address.generation, FrameState.SEALED)):
                sealed.append(page)
            elif status == _BUSY:
                busy.append(address)
            elif status != _STALE and still_ours(address, word):
                back.append(address)
        self._pool.add(back)
        self._pool.forfeit(busy)
        return sealed

    def _abandon(self) -> None:
        self._pool.forfeit([address for batch in self._batches for address in batch.addresses])
        self._batches.clear()
