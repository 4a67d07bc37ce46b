"""``LocalPut`` copies pages into granted frames of a node on this machine, and seals or publishes them batch by
batch."""

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
from kvstore.client.local.grants import BUSY_PAUSE_S, OVER_QUOTA, GrantPool, Purpose, is_still_granted
from kvstore.client.local.node import MappedNode
from kvstore.client.local.publisher import PendingReply, Publisher
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import DeadlineExceeded, NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import Address, FrameClass, FrameState, Status, word_of
from kvstore.shm.counters import SessionCounters
from kvstore.shm.header import DaemonState, Header
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import BATCH_MAX, CHECKSUMS, CONTINUES, HINTS, NO_REPLY, Op, encode, pack_addresses

BUSY_PAUSE_MAX_S = 0.02

_OK, _NO_PARENT, _STALE = int(Status.OK), int(Status.NO_PARENT), int(Status.STALE)
_BUSY, _OVER_QUOTA = int(Status.BUSY), int(Status.OVER_QUOTA)
_STATE, _READY = Header.state.position, int(DaemonState.READY)


class SealBatch:
    """Consecutive pages that one request seals, starting at ``page``."""

    __slots__ = ("page", "addresses", "body", "reply", "is_resent")

    def __init__(self, page: int, addresses: list[Address], body: tuple[bytes, ...]) -> None:
        self.page = page
        self.addresses = addresses
        self.body = body
        self.reply: PendingReply | None = None
        self.is_resent = False


class LocalPut(PendingPut):
    """A put of pages. ``send`` copies the pages and sends their seals; ``result`` waits for the replies.

    With ``publishes``, batches are published in the log, which needs no reply. Once a batch cannot be published, it and
    the later ones are sent as requests, because a page can be sealed only after its parent. After a failure, pages
    whose seal was acknowledged are stored. The frames of the others are forfeit, and return to the node.

    Args:
        flags: flags of the requests, such as CHECKSUMS.
        below: pages that are already in a lower tier. They are stored in DRAM too, but do not count as new.
    """

    __slots__ = (
        "_mapped",
        "_keys",
        "_pool",
        "_flags",
        "_first",
        "_below",
        "_batches",
        "_lock",
        "_new",
        "_failure",
        "_has_resent",
        "_is_over_quota",
        "_publishes",
        "_published",
        "_since",
    )

    def __init__(
        self,
        mapped: MappedNode,
        keys: Keys,
        frame_class: FrameClass,
        flags: int = 0,
        below: Collection[int] = (),
        publishes: bool = False,
    ) -> None:
        self._mapped = mapped
        self._keys = keys
        self._pool: GrantPool = mapped.pool(frame_class, keys.root if publishes else b"")
        self._flags = flags
        self._first = 0  # the first page that this put stores
        self._below = below
        self._batches: list[SealBatch] = []  # batches whose requests are not answered
        self._lock = threading.Lock()
        self._new = 0
        self._failure: Unavailable | None = None
        self._has_resent = False
        self._is_over_quota = False
        self._publishes = publishes
        self._published = 0  # the position in the log where the record of the last batch ends
        publisher = mapped.channel.publisher
        self._since = publisher.published + 1 if publishes and publisher is not None else 0

    @property
    def counters(self) -> SessionCounters:
        """The counters of the session."""
        return self._mapped.counters

    def result(self) -> int:
        """Wait until all pages are stored, and return how many are new. Raises as ``PendingPut.result``."""
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
        if self._is_over_quota and not self._new:
            raise QuotaExceeded(OVER_QUOTA)
        return self._new

    def wait_for_copies(self) -> None:
        """Wait until another node has stored a second copy of each page, after ``result``.

        Raises:
            DeadlineExceeded: no further copy was stored for the node's ``timeout_s``. The copies are owed.
            NodeUnavailable: no other node can store them now. The copies are owed.
        """
        mapped, waiting = self._mapped, self._keys.hashes
        deadline_s, pause_s = time.monotonic() + mapped.timeout_s, BUSY_PAUSE_S
        while True:
            statuses = list(zip(waiting, self._owed(waiting), strict=True))
            left = [key for key, status in statuses if status != _OK]
            if not left:
                return
            if all(status == Status.NO_SPACE for _, status in statuses if status != _OK):
                raise NodeUnavailable(f"replicas: no other node can store a copy of {len(left)} pages; they are owed")
            now_s = time.monotonic()
            deadline_s = now_s + mapped.timeout_s if len(left) < len(waiting) else deadline_s
            if now_s >= deadline_s:
                raise DeadlineExceeded(f"replicas: {len(left)} pages have no second copy yet; they are owed")
            waiting = left
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, BUSY_PAUSE_MAX_S)

    def _owed(self, keys: list[bytes]) -> bytes:
        """Return the status of each key, see ``Op.OWED``."""
        statuses = b""
        for first in range(0, len(keys), BATCH_MAX):
            part = keys[first : first + BATCH_MAX]
            statuses += bytes(self._mapped.exchange(Op.OWED, count=len(part), body=part).body[: len(part)])
        return statuses

    def leave(self) -> None:
        """Let the pool call ``result`` later, because the caller may never do so."""
        if self._batches:
            self._pool.add_unread(self)

    def send(self, rows: Rows | DeviceRows, stored: int) -> None:
        """Copy the pages of ``rows``, ``[pages, page_bytes]``, starting at page ``stored``, and send their seals.
        Called once."""
        pool, total = self._pool, len(rows)
        limit = pool.batch_pages
        frames = pool.take(total - stored)
        request: PendingReply | None = None
        self._first = page = stored
        try:
            if len(frames) < total - stored:
                request = pool.request(total - stored - len(frames), self._purpose(stored))
            pool.fill_ahead(total - stored, partial(self._purpose, stored))  # the node grants frames during the copies
            while page < total:
                if not frames:
                    try:
                        frames, request = self._granted(request, page), None
                    except QuotaExceeded:
                        self._is_over_quota, request = True, None
                    if not frames:
                        break  # the store is full of pages that cannot be evicted
                part = frames[:limit]
                if failpoint.ACTIVE:
                    failpoint.hit("client.granted")
                del frames[: len(part)]  # these never return to the pool, even if the copy fails
                body = self._body(page, part)  # before the copy, which evicts the keys from the CPU's caches
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
            if request is not None:
                with contextlib.suppress(Unavailable):
                    pool.add(pool.granted(request))

    @staticmethod
    def may_publish(mapped: MappedNode) -> bool:
        """Return whether puts can be published: this session has a log, and the node is serving. A quota does not
        matter, because a tenant is charged when frames are granted."""
        return mapped.channel.publisher is not None and mapped.words[_STATE] == _READY

    def take(self, page: int) -> list[Address]:
        """Return frames for the pages starting at ``page``, as many as the node grants. The caller copies the pages
        into them, and then calls ``seal``.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        return self._pool.take_granted(len(self._keys) - page, self._purpose(page), self._mapped.timeout_s)

    def seal(self, page: int, addresses: list[Address]) -> None:
        """Seal the pages starting at ``page``, which are in these frames. Called once, after ``take``."""
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
        """Give up these frames instead of sealing them. The caller must no longer write into them."""
        self._pool.forfeit(addresses)

    def _granted(self, request: PendingReply | None, page: int) -> list[Address]:
        """Wait for frames for the pages starting at ``page``. They are requested if ``request`` is None, or if the
        request was lost with the daemon."""
        pool, arguments = self._pool, (len(self._keys) - page, self._purpose(page))
        deadline = time.monotonic() + self._mapped.timeout_s
        return pool.wait_granted(request if request is not None else pool.request(*arguments), *arguments, deadline)

    def _purpose(self, page: int) -> Purpose:
        return Purpose(self._parent_key(page), self._since)

    def _parent_key(self, page: int) -> bytes:
        """Return the key of the parent of ``page``."""
        return self._keys.hashes[page - 1] if page else self._keys.parent

    def _copy(self, rows: Rows | DeviceRows, page: int, addresses: list[Address]) -> None:
        if isinstance(rows, DeviceRows):
            from_device(self._mapped, rows[page : page + len(addresses)], addresses, self._pool)
            return
        for extent, frame, i, j in frames_of(self._mapped, addresses):
            fill(extent.pages[frame : frame + j - i], rows[page + i : page + j])
            extent.last_use[frame : frame + j - i] = (
                time.monotonic_ns()
            )  # replaces the last use of the frame's old page

    def _body(self, page: int, addresses: list[Address]) -> tuple[bytes, ...]:
        """Return the body of a request that seals the pages starting at ``page`` in these frames: the parent's key, the
        addresses, and the identities."""
        identity, count = self._keys.identity_bytes, len(addresses)
        if count < len(self._keys):
            width = len(identity) // len(self._keys)
            identity = identity[page * width : (page + count) * width]
        return self._parent_key(page), pack_addresses(addresses), identity

    def _seal(
        self, rows: Rows | DeviceRows | None, page: int, addresses: list[Address], body: tuple[bytes, ...]
    ) -> None:
        """Publish the seal of the pages starting at ``page``, or send it as a request. ``rows`` are the put's pages,
        from which checksums are computed if requested."""
        keys, count = self._keys, len(addresses)
        if self._flags & CHECKSUMS and rows is not None:
            layers = self._pool.frame_class.layers
            if isinstance(rows, DeviceRows):
                checksums = frame_checksums(self._mapped, addresses, layers)
            else:
                checksums = checksums_of(rows[page : page + count], layers)
            body = (*body, checksums.tobytes())
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
        """Publish a batch in the log. From then on, readers find its pages, and its frames no longer belong to this
        session. Return False if the batch must be sent as a request, because the log is full or the parent page is only
        on NVMe."""
        mapped, count = self._mapped, len(batch.addresses)
        publisher = mapped.channel.publisher
        if publisher is None or not self.has_parent(publisher, batch.page):
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
        new = sum(page not in self._below for page in pages) if self._below else count
        self._new += new
        mapped.counters.put(mapped.row(self._pool.frame_class), new)
        return True

    def has_parent(self, publisher: Publisher, page: int) -> bool:
        """Return whether a page can be published: whether its parent is the root, or a page that is in DRAM or
        published. Such a parent cannot be evicted before the node takes the page in."""
        parent = self._parent_key(page)
        if parent == self._keys.root or (page > self._first and publisher.drained < self._published):
            return True
        try:
            return self._mapped.index.find(self._mapped.dram.tier, parent) is not None or publisher.holds(parent)
        except IndexDamaged:
            return False

    def _settle(self, batch: SealBatch) -> None:
        """Wait for the reply to a batch, and count its new pages. The request is sent again if the daemon ended before
        it replied, and while the node is busy."""
        assert batch.reply is not None
        count = len(batch.addresses)
        try:
            message = batch.reply.result()
        except NodeUnavailable:
            message = self._resend(batch)
        statuses = bytes(message.body[:count])
        if self._has_resent and not batch.is_resent and _NO_PARENT in statuses:
            # The request of the batch before was lost, so this one arrived first. The other one has been sent again.
            message = self._resend(batch)
            statuses = bytes(message.body[:count])
        deadline, pause_s = time.monotonic() + self._mapped.timeout_s, BUSY_PAUSE_S
        # Busy: the node saves other pages of the tenant to free space, or these pages, whose parent is only on NVMe.
        while _BUSY in statuses and time.monotonic() < deadline:
            time.sleep(pause_s)
            previous, pause_s = statuses, min(2 * pause_s, BUSY_PAUSE_MAX_S)
            statuses = bytes(self._resend(batch).body[:count])
            statuses = bytes(_OK if old == _OK else new for old, new in zip(previous, statuses, strict=True))
        self._is_over_quota = self._is_over_quota or _OVER_QUOTA in statuses or _BUSY in statuses
        sealed: Sequence[int] = range(batch.page, batch.page + count)
        if statuses.count(_OK) != count:
            sealed = self._sort_frames(batch, statuses)
        new = sum(page not in self._below for page in sealed) if self._below else len(sealed)
        self._new += new
        self.counters.put(self._mapped.row(self._pool.frame_class), new)

    def _resend(self, batch: SealBatch) -> Any:
        batch.is_resent = self._has_resent = True
        self._request(batch)
        assert batch.reply is not None
        return batch.reply.result()

    def _sort_frames(self, batch: SealBatch, statuses: bytes) -> list[int]:
        """Return the pages of a batch that are sealed. Return unused frames to the pool: those whose records show that
        they are still granted to this session. Forfeit frames that the node may still be reading."""
        unused, busy, sealed = list[Address](), list[Address](), []
        for page, (address, status) in enumerate(zip(batch.addresses, statuses, strict=True), batch.page):
            extent = self._mapped.dram.extent(address.extent)
            word = int(extent.words[address.frame]) if extent is not None else 0
            if status == _OK or (batch.is_resent and word == word_of(address.generation, FrameState.SEALED)):
                sealed.append(page)
            elif status == _BUSY:
                busy.append(address)
            elif status != _STALE and is_still_granted(address, word):
                unused.append(address)
        self._pool.add(unused)
        self._pool.forfeit(busy)
        return sealed

    def _abandon(self) -> None:
        """Forfeit the frames of all batches that are not answered."""
        self._pool.forfeit([address for batch in self._batches for address in batch.addresses])
        self._batches.clear()
