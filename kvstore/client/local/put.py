"""``LocalPut`` copies pages into granted frames of a node on this machine, and seals or publishes them batch by
batch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows, fill
from kvstore.client.local.copying import checksums_of
from kvstore.client.local.frame_copies import frame_checksums, from_device, mapped_runs
from kvstore.client.local.grants import (
    BUSY_PAUSE_S,
    NO_FRAMES,
    OVER_QUOTA,
    GrantedFrames,
    GrantPool,
    Purpose,
    is_still_granted,
)
from kvstore.client.local.node import MappedNode
from kvstore.client.local.publisher import PendingReply, Publisher
from kvstore.client.prefix_cache import PendingPut
from kvstore.errors import DeadlineExceeded, NodeUnavailable, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, Address, FrameClass, FrameState, Status, word_of
from kvstore.shm.index import IndexDamaged
from kvstore.wire.control import BATCH_MAX, CHECKSUMS, CONTINUES, HINTS, NO_REPLY, Op, encode

BUSY_PAUSE_MAX_S = 0.02

_OK, _NO_PARENT, _STALE = int(Status.OK), int(Status.NO_PARENT), int(Status.STALE)
_BUSY, _OVER_QUOTA = int(Status.BUSY), int(Status.OVER_QUOTA)
_SEAL_GRANTED = int(Op.SEAL_GRANTED)


class SealBatch:
    """Consecutive pages that one request seals, starting at ``page``."""

    __slots__ = ("page", "frames", "body", "reply", "is_resent")

    def __init__(self, page: int, frames: GrantedFrames, body: tuple[bytes, ...]) -> None:
        self.page = page
        self.frames = frames
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
        "mapped",
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
        self.mapped = mapped
        self._keys = keys
        root = keys.root if publishes and keys.root in mapped.limited else b""  # frames for it count for its tenant
        self._pool: GrantPool = mapped.pools.of(frame_class, root)
        self._flags = flags | (HINTS if keys.hints else 0)
        self._first = 0  # the first page that this put stores
        self._below = below
        self._batches: list[SealBatch] = []  # batches whose requests are not answered
        self._lock: threading.Lock | None = None  # for ``_batches``, once there are any
        self._new = 0
        self._failure: Unavailable | None = None
        self._has_resent = False
        self._is_over_quota = False
        self._publishes = publishes
        self._published = 0  # the position in the log where the record of the last batch ends
        self._since = 0  # the position in the log where the record of the first batch ends

    def result(self) -> int:
        """Wait until all pages are stored, and return how many are new. Raises as ``PendingPut.result``."""
        if self._batches or self._failure is not None:
            self._settle_all()
        if self._is_over_quota and not self._new:
            raise QuotaExceeded(OVER_QUOTA)
        return self._new

    def _settle_all(self) -> None:
        """Wait for the replies to all batches."""
        assert self._lock is not None, "a batch was sent"
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

    def wait_for_copies(self) -> None:
        """Wait until another node has stored a second copy of each page, after ``result``.

        Raises:
            DeadlineExceeded: no further copy was stored for the node's ``timeout_s``. The copies are owed.
            NodeUnavailable: no other node can store them now. The copies are owed.
        """
        mapped, waiting = self.mapped, self._keys.hashes
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
            statuses += bytes(self.mapped.exchange(Op.OWED, count=len(part), body=part).body[: len(part)])
        return statuses

    def leave(self) -> None:
        """Let the pool call ``result`` later, because the caller may never do so."""
        if self._batches:
            self._pool.add_unread(self)

    def send(self, rows: Rows | DeviceRows, stored: int) -> None:
        """Copy the pages of ``rows``, ``[pages, page_bytes]``, starting at page ``stored``, and send their seals.
        Called once."""
        pool, total, copies = self._pool, len(rows), self.mapped.channel.copies
        batch_bytes = pool.batch_pages * ADDRESS_BYTES
        frames, sealing = pool.take(total - stored), NO_FRAMES
        request: PendingReply | None = None
        self._first = page = stored
        try:
            if len(frames.raw) < (total - stored) * ADDRESS_BYTES:
                request = pool.request(total - stored - len(frames), self._purpose(stored))
            pool.fill_ahead(total - stored, self._purpose, stored)  # the node grants frames during the copies
            while page < total:
                if not frames.raw:
                    try:
                        frames, request = self._granted(request, page), None
                    except QuotaExceeded:
                        self._is_over_quota, request = True, None
                    if not frames.raw:
                        break  # the store is full of pages that cannot be evicted
                # The frames of a batch never return to the pool, even if the copy fails.
                part, frames = frames, NO_FRAMES
                if len(part.raw) > batch_bytes:
                    part, frames = part[: pool.batch_pages], part[pool.batch_pages :]
                if failpoint.ACTIVE:
                    failpoint.hit("client.granted")
                body = self._body(page, part)  # before the copy, which evicts the keys from the CPU's caches
                record = self._record(page, body)
                with copies:
                    self._copy(rows, page, part)
                    if failpoint.ACTIVE:
                        failpoint.hit("client.copied")
                    if self._flags & CHECKSUMS:
                        body = self._with_checksums(body, rows, page, part)
                        record = self._record(page, body)
                    sealing = part
                    self._publishes = self._publishes and self._publish(page, part, record)
                sealing = NO_FRAMES
                if not self._publishes:
                    self._send(page, part, body)
                page += len(part.raw) // ADDRESS_BYTES
        except BaseException:
            self._pool.forfeit(sealing)
            self._abandon()
            raise
        finally:
            if frames.raw:
                pool.add(frames)
            if request is not None:
                with contextlib.suppress(Unavailable):
                    pool.add(pool.granted(request))

    def take(self, page: int) -> GrantedFrames:
        """Return frames for the pages starting at ``page``, as many as there are. The caller copies the pages into
        them, and then calls ``seal``.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        return self._pool.take_granted(len(self._keys) - page, self._purpose(page), self.mapped.timeout_s)

    def seal(self, page: int, frames: GrantedFrames) -> None:
        """Seal the pages starting at ``page``, which are in these frames. Called once, after ``take``."""
        self._first = page
        step = self._pool.request_pages
        try:
            for start in range(0, len(frames), step):
                part = frames[start : start + step]
                body = self._body(page + start, part)
                record = self._record(page + start, body)
                with self.mapped.channel.copies:
                    self._publishes = self._publishes and self._publish(page + start, part, record)
                if not self._publishes:
                    self._send(page + start, part, body)
        except BaseException:
            self._pool.forfeit(frames)
            self._batches.clear()
            raise

    def forfeit(self, frames: GrantedFrames) -> None:
        """Give up these frames instead of sealing them. The caller must no longer write into them."""
        self._pool.forfeit(frames)

    def _granted(self, request: PendingReply | None, page: int) -> GrantedFrames:
        """Wait for frames for the pages starting at ``page``. They are requested if ``request`` is None, or if the
        request was lost with the daemon."""
        pool, arguments = self._pool, (len(self._keys) - page, self._purpose(page))
        deadline = time.monotonic() + self.mapped.timeout_s
        return pool.wait_granted(request if request is not None else pool.request(*arguments), *arguments, deadline)

    def _purpose(self, page: int) -> Purpose:
        publisher, since = self.mapped.channel.publisher, self._since
        if self._publishes and publisher is not None:
            since = since or publisher.published + 1  # the first record is not written yet
        return Purpose(self._keys.hashes[page - 1] if page else self._keys.parent, since)

    def _copy(self, rows: Rows | DeviceRows, page: int, frames: GrantedFrames) -> None:
        if isinstance(rows, DeviceRows):
            from_device(self.mapped, rows[page : page + len(frames)], frames, self._pool)
            return
        now_ns = time.monotonic_ns()
        for extent, frame, i, j in mapped_runs(self.mapped, frames):
            extent.last_use[frame : frame + j - i] = now_ns  # replaces the last use of the frame's old page
            fill(extent.pages[frame : frame + j - i], rows[page + i : page + j])

    def _body(self, page: int, frames: GrantedFrames) -> tuple[bytes, ...]:
        """Return the body of a request that seals the pages starting at ``page`` in these frames: the parent's key, the
        addresses, the identities and the hints."""
        keys, stop = self._keys, page + len(frames.raw) // ADDRESS_BYTES
        parent = keys.hashes[page - 1] if page else keys.parent
        return parent, frames.raw, *keys.columns(page, stop), keys.hints[page:stop]

    def _with_checksums(
        self, body: tuple[bytes, ...], rows: Rows | DeviceRows, page: int, frames: GrantedFrames
    ) -> tuple[bytes, ...]:
        """Return the body of a request with the checksums of its pages, which are in ``rows`` and in these frames."""
        layers = self._pool.frame_class.layers
        if isinstance(rows, DeviceRows):
            checksums = frame_checksums(self.mapped, frames, layers)
        else:
            checksums = checksums_of(rows[page : page + len(frames)], layers)
        *before, hints = body
        return *before, checksums.tobytes(), hints

    def _record(self, page: int, body: tuple[bytes, ...]) -> bytes:
        """Return the record that publishes a request with this body; nothing if the request will be sent."""
        if not self._publishes:
            return b""
        count, flags = len(body[1]) // ADDRESS_BYTES, self._flags_of(page) | NO_REPLY
        return encode(_SEAL_GRANTED, 0, count=count, a=self._pool.class_number, flags=flags, body=body)

    def _publish(self, page: int, frames: GrantedFrames, record: bytes) -> bool:
        """Publish the seal of the pages starting at ``page``. From then on, readers find them, and these frames no
        longer belong to this session. Return False if the seal must be sent as a request, because the log is full or
        the parent page is only on NVMe."""
        mapped, count = self.mapped, len(frames.raw) // ADDRESS_BYTES
        publisher = mapped.channel.publisher
        if publisher is None or not self.has_parent(publisher, page):
            return False
        position = publisher.publish(record, self._keys.hashes[page : page + count], mapped.header)
        if not position:
            return False
        if failpoint.ACTIVE:
            failpoint.hit("client.published")
        self._published, self._since = position, self._since or position
        self._count_new(range(page, page + count))
        return True

    def _send(self, page: int, frames: GrantedFrames, body: tuple[bytes, ...]) -> None:
        """Send the request that seals the pages starting at ``page``."""
        self._lock = self._lock or threading.Lock()
        batch = SealBatch(page, frames, body)
        self._batches.append(batch)
        self._request(batch)

    def _request(self, batch: SealBatch) -> None:
        batch.reply = self.mapped.channel.request(
            Op.SEAL_GRANTED,
            count=len(batch.frames),
            a=self._pool.class_number,
            flags=self._flags_of(batch.page),
            body=batch.body,
        )
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")

    def _flags_of(self, page: int) -> int:
        return self._flags if page == self._first else self._flags | CONTINUES

    def _count_new(self, pages: Sequence[int]) -> None:
        """Count pages that are stored. Those that were on NVMe before are not new."""
        new = len([page for page in pages if page not in self._below]) if self._below else len(pages)
        self._new += new
        self.mapped.counters.put(self._pool.row, new)

    def has_parent(self, publisher: Publisher, page: int) -> bool:
        """Return whether a page can be published: whether its parent is the root, or a page that is in DRAM or
        published. Such a parent cannot be evicted before the node takes the page in."""
        parent = self._keys.hashes[page - 1] if page else self._keys.parent
        if parent == self._keys.root or (page > self._first and publisher.drained < self._published):
            return True
        try:
            return self.mapped.index.find(self.mapped.dram.tier, parent) is not None or publisher.holds(parent)
        except IndexDamaged:
            return False

    def _settle(self, batch: SealBatch) -> None:
        """Wait for the reply to a batch, and count its new pages. The request is sent again if the daemon ended before
        it replied, and while the node is busy."""
        assert batch.reply is not None
        count = len(batch.frames)
        try:
            message = batch.reply.result()
        except NodeUnavailable:
            message = self._resend(batch)
        statuses = bytes(message.body[:count])
        if self._has_resent and not batch.is_resent and _NO_PARENT in statuses:
            # The request of the batch before was lost, so this one arrived first. The other one has been sent again.
            message = self._resend(batch)
            statuses = bytes(message.body[:count])
        deadline, pause_s = time.monotonic() + self.mapped.timeout_s, BUSY_PAUSE_S
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
        self._count_new(sealed)

    def _resend(self, batch: SealBatch) -> Any:
        batch.is_resent = self._has_resent = True
        self._request(batch)
        assert batch.reply is not None
        return batch.reply.result()

    def _sort_frames(self, batch: SealBatch, statuses: bytes) -> list[int]:
        """Return the pages of a batch that are sealed. Return unused frames to the pool: those whose records show that
        they are still granted to this session. Forfeit frames that the node may still be reading."""
        unused, busy, sealed = list[Address](), list[Address](), []
        for page, (address, status) in enumerate(zip(batch.frames, statuses, strict=True), batch.page):
            extent = self.mapped.dram.extent(address.extent)
            word = int(extent.words[address.frame]) if extent is not None else 0
            if status == _OK or (batch.is_resent and word == word_of(address.generation, FrameState.SEALED)):
                sealed.append(page)
            elif status == _BUSY:
                busy.append(address)
            elif status != _STALE and is_still_granted(address, word):
                unused.append(address)
        self._pool.add(GrantedFrames.of(unused))
        self._pool.forfeit(GrantedFrames.of(busy))
        return sealed

    def _abandon(self) -> None:
        """Forfeit the frames of all batches that are not answered."""
        self._pool.forfeit(GrantedFrames.ascending([batch.frames for batch in self._batches]))
        self._batches.clear()
