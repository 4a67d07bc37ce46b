"""LocalWriter: writes pages layer by layer directly into reserved frames of this machine's memory.

LayerCopies: copies layers of one writer from a device into its frames.

Spans: the pages a writer has reserved, as runs of consecutive frames.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore import failpoint
from kvstore.client.buffers import DeviceRows, Rows, on_device
from kvstore.client.device_link import DeviceLink, PinnedExtent, link_of
from kvstore.client.local.frame_copies import frame_runs
from kvstore.client.local.grants import BUSY_PAUSE_S, OVER_QUOTA
from kvstore.client.local.hints import wait_for_saves
from kvstore.client.local.index_lookup import stored_or_published, stored_pages
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.publisher import Copies, PendingReply, Publisher
from kvstore.client.local.put import LocalPut
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import address_runs
from kvstore.client.writer import Writer
from kvstore.device.base import DeviceEvent, DeviceLost
from kvstore.device.host_memory import copy
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, OutOfSpace, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, Address, FrameClass, FrameState, Status
from kvstore.model.shard import Shard
from kvstore.wire.control import (
    BATCH_MAX,
    HINTS,
    NO_REPLY,
    WRITER,
    Op,
    batch_pages,
    encode,
    pack_addresses,
    pack_class,
    statuses_bytes,
)

Pairs = list[tuple[Rows, DeviceRows]]


class _Begun(NamedTuple):
    layer: int
    link: DeviceLink
    event: DeviceEvent
    pairs: Pairs


class LayerCopies:
    """Copies that were started and not yet waited for. While there is one, the session cannot end. Used by one thread.

    Ends with ``finish``. If that gives up, the session and its frames stay until the process ends: the device may still
    write into them.
    """

    def __init__(self) -> None:
        self._copies: Copies | None = None  # entered, while there are some
        self._begun: deque[_Begun] = deque()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def begin(self, copies: Copies, layer: int, extents: Sequence[PinnedExtent], pairs: Pairs) -> None:
        """Copy one layer into frames of these extents, ordered after the work of the caller's stream.

        Raises:
            DeviceLost: nothing was started.
        """
        link = link_of(pairs[0][1].device)
        event = link.copy(pairs, extents, to_device=False, layer=True)
        if self._copies is None:
            copies.__enter__()
            self._copies = copies
        self._begun.append(_Begun(layer, link, event, pairs))

    def below(self, layers: int) -> int:
        """Return how many leading layers have arrived, at most ``layers``, without waiting. Raises DeviceLost."""
        while self._begun and self._begun[0].event.over():
            self._begun.popleft()
        self._leave()
        return min((begun.layer for begun in self._begun), default=layers)

    def finish(self) -> None:
        """Wait until all layers have arrived.

        Raises:
            DeviceLost: they will never arrive; nothing writes any more.
            DeadlineExceeded: the device may still write.
        """
        memory = list(self._begun)
        try:
            for _, link, event, _ in memory:
                link.wait(event, memory)
        except DeadlineExceeded:
            self._copies = None  # never left: the session stays open
            raise
        finally:
            self._begun.clear()
            self._leave()

    def _leave(self) -> None:
        if not self._begun and self._copies is not None:
            copies, self._copies = self._copies, None
            copies.__exit__()


class ReservedRun:
    """Reserved pages in consecutive frames: ``pages[i]`` of the extent is page ``page + i`` of the keys."""

    __slots__ = ("pages", "shown", "page", "count", "first", "levels")

    def __init__(
        self,
        pages: npt.NDArray[np.uint8],
        shown: npt.NDArray[Any],
        page: int,
        first: int,
        levels: npt.NDArray[Any],
    ) -> None:
        self.pages = pages  # [count, page_bytes]
        self.shown = shown  # [count], where this shard records its progress
        self.page = page
        self.count = len(pages)
        self.first = first  # index of its first page among the writer's own
        self.levels = levels  # [layers + 1, count], the progress to record after each number of layers

    def beside(self, shard: Shard, parts: list[Rows]) -> Iterator[tuple[list[Rows], list[Rows]]]:
        """Yield, for each of the concatenated arrays ``[n, layers, width]`` that has some of these pages, the targets
        in our pages and the sources, both by layer."""
        first = 0
        for part in parts:
            low, high = max(first, self.page), min(first + len(part), self.page + self.count)
            if low < high:
                pages = shard.part(self.pages[low - self.page : high - self.page])
                yield list(pages.swapaxes(0, 1)), list(part[low - first : high - first].swapaxes(0, 1))
            first += len(part)


def parts_of(raw: bytes, pages: int = BATCH_MAX) -> list[bytes]:
    """Split concatenated addresses into parts that fit one request."""
    step = pages * ADDRESS_BYTES
    return [raw[start : start + step] for start in range(0, len(raw), step)]


def unbroken(pages: list[int]) -> list[tuple[int, int]]:
    """Return ``(start, count)`` of runs of consecutive page numbers."""
    runs, start = [], 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            runs.append((start, i - start))
            start = i
    return runs


_RESERVED = int(FrameState.RESERVED)
_OURS = (int(Status.OK), int(Status.JOINED))
_DONE = (int(Status.OK), int(Status.PARTIAL), int(Status.PRESENT), int(Status.BUSY))


class LocalWriter(Writer):
    """A writer that copies each byte once, into its frame, and records its progress next to it for readers.

    A writer without other shards takes frames that were granted ahead, tells the node what they are for, and publishes
    their seal, as a put does, so it never waits for the node. Others reserve frames under their keys, and seal those.
    """

    TAKES_DEVICE = True

    def __init__(
        self,
        node: LocalNode,
        shard: Shard,
        keys: Keys,
        ttl_s: float,
        group: str | int | None,
        name: Callable[[Mapped], None],
    ) -> None:
        super().__init__(shard, keys, ttl_s, group)
        layout = shard.layout
        self._node = node
        self._name = name  # tells the node which tenant these pages belong to
        self._class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._alone = shard.count == 1 and group is None
        self._even = 0 if shard.stages == 1 else None
        self._copies: AbstractContextManager[None] | None = None  # entered while there are frames to write into
        self._mapped: Mapped | None = None
        self._put: LocalPut | None = None  # seals pages in granted frames
        self._frames: list[Address] = []  # granted frames
        self._until_s = 0.0  # their deadline
        self._raw = b""  # addresses of pages_new, end to end
        self._spans: list[ReservedRun] = []
        self._extents: list[MappedExtent] = []  # the extents of those frames
        self._coming = LayerCopies()

    # --- reserving --------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        self._mapped = mapped = self._node.writable()
        self._keys = mapped.in_pool(self._keys)
        self._name(mapped)
        try:
            if not self._take(mapped):
                self._ask(mapped)
            with mapped.channel.copies:
                self._lay_out(mapped)
            self._copies = mapped.channel.copies
        except BaseException:
            self._revoke()
            raise

    def _take(self, mapped: Mapped) -> bool:
        """Take frames that were granted ahead, and request the few that are missing. Returns False if frames must be
        reserved: with other shards, where a put would wait, after a page that only NVMe has, or if none are free.
        """
        keys, publisher = self._keys, mapped.channel.publisher
        if not self._alone or publisher is None or not LocalPut.may_publish(mapped):
            return False
        began_s = time.monotonic()
        page, last = stored_or_published(mapped, keys, self._layout.attention == "full")
        if last is not None:
            mapped.dram.mark_used(last)
        if page == len(keys):
            return True
        if time.monotonic() - began_s > self._node.timeout_s / 2:
            # The node hardly answered about published pages. A request for frames would wait as long again.
            raise NodeUnavailable(f"{self._node.name}: no answer in time")
        put = LocalPut(mapped, keys, self._class, publishes=True)
        if publisher.slot < 0 or not put.hangs(publisher, page):
            return False
        frames = put.take(page)
        if not frames:
            return False  # RESERVE reports why
        self._put, self._frames, self._until_s = put, frames, time.monotonic() + self._ttl_ms / 1000
        self.pages_new, self._raw = list(range(page, page + len(frames))), pack_addresses(frames)
        self._begin(mapped, publisher, page)
        if failpoint.ACTIVE:
            failpoint.hit("client.begun")
        return True

    def _begin(self, mapped: Mapped, publisher: Publisher, page: int) -> None:
        """Publish which pages these frames are for, so that readers can follow: a waiting reader asks the node to take
        that in. If the log is full, readers wait for the seal."""
        keys, width = self._keys, len(self._keys.identity_bytes) // len(self._keys)
        number, step = pack_class(self._class), batch_pages(self._class.page_tokens, self._class.layers)
        for part in parts_of(self._raw, step):
            count = len(part) // ADDRESS_BYTES
            before = keys.hashes[page - 1] if page else keys.parent
            body = (before, part, keys.identity_bytes[page * width : (page + count) * width])
            request = encode(Op.BEGIN, 0, count=count, a=number, b=self._ttl_ms, flags=NO_REPLY, body=body)
            publisher.publish(request, [], mapped.header)
            page += count

    def _ask(self, mapped: Mapped) -> None:
        keys, width = self._keys, len(self._keys.identity_bytes) // max(1, len(self._keys))
        page, last = stored_pages(mapped, keys, self._layout.attention == "full")
        if last is not None:
            mapped.dram.mark_used(last)
        limit = batch_pages(self._class.page_tokens, self._class.layers)
        number, count = self._shard.number, self._shard.count
        head = WRITER.pack(self._group, number, count)
        end = page + mapped.claims.claim(self, self._group, number, keys.hashes[page:])
        full, refused, deadline = False, False, time.monotonic() + self._node.timeout_s
        while page < end and not full:
            stop = min(page + limit, end)
            body = (
                head,
                keys.hashes[page - 1] if page else keys.parent,
                keys.identity_bytes[page * width : stop * width],
                keys.hints[page:stop],
            )
            # May be requested twice: the node returns the frames that this session has already reserved for this group
            # and shard. They are ours, since no other writer has a claim on them.
            geometry = pack_class(self._class)
            flags = HINTS if keys.hints else 0
            message = mapped.exchange(Op.RESERVE, count=stop - page, a=geometry, b=self._ttl_ms, flags=flags, body=body)
            statuses, start = bytes(message.body[: stop - page]), statuses_bytes(stop - page)
            busy = statuses.find(Status.BUSY) if message.op != Status.BUSY else 0
            if busy >= 0:  # pages are being saved to free space
                statuses, stop = statuses[:busy], page + busy
                full = time.monotonic() >= deadline
                time.sleep(BUSY_PAUSE_S)
            for i, status in enumerate(statuses):
                if status in _OURS:
                    self.pages_new.append(page + i)
                    self._raw += bytes(message.body[start + i * ADDRESS_BYTES : start + (i + 1) * ADDRESS_BYTES])
                elif status != Status.PRESENT:
                    full, refused = True, refused or status == Status.OVER_QUOTA
            page = stop
        if refused and not self.pages_new:
            raise QuotaExceeded(OVER_QUOTA)
        if end < len(keys) and not self.pages_new and not full:
            raise OutOfSpace("no frame could be reserved: another writer of this process is this shard of the group")
        if full and not self.pages_new:
            raise OutOfSpace("no frame could be reserved: the store is full of pages that cannot be evicted")

    def _lay_out(self, mapped: Mapped) -> None:
        addresses = np.frombuffer(self._raw, ADDRESS_DTYPE)
        generations = addresses["generation"]
        for number, frame, first, count in self._runs(addresses):
            extent = mapped.dram.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
            frames, theirs = slice(frame, frame + count), generations[first : first + count]
            extent.last_use[frames] = time.monotonic_ns()  # not its last page's
            extent.uses.begin(frames, theirs)  # the node does not do that for granted frames
            shown = extent.uses.shown(frames, self._shard.number)
            levels = extent.uses.levels(theirs, self._layout.layers)
            self._extents.append(extent)
            self._spans.append(ReservedRun(extent.pages[frames], shown, self.pages_new[first], first, levels))

    def _runs(self, addresses: npt.NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(extent, first frame, first of our pages, count)`` for consecutive pages in consecutive frames."""
        if self._put is not None:  # granted frames are ascending, for consecutive pages
            for number, frame, i, j in frame_runs(self._frames):
                yield number, frame, i, j - i
            return
        for number, frame, first, words in address_runs(addresses, _RESERVED):
            for i, count in unbroken(self.pages_new[first : first + len(words)]):
                yield number, frame + i, first + i, count

    # --- writing ----------------------------------------------------------------------------------------------------

    def _open(self) -> AbstractContextManager[None]:
        return self._copies if self._copies is not None else super()._open()

    def _storing(self) -> AbstractContextManager[None]:
        self._node.check_open()
        if self._mapped is None:
            raise InvalidRequest("writer", "has no frames: the node was unavailable when the writer was entered")
        return self._mapped.channel.copies

    def prepared(self, pages: Any) -> Callable[[int], None]:
        """See ``Writer.prepared``. A layer in its order costs one copy and one store of progress per run of frames."""
        if on_device(pages):
            return super().prepared(pages)
        parts = self._parts(pages)
        pairs = [pair for span in self._spans for pair in span.beside(self._shard, parts)]
        return partial(self._write_in_turn, pairs, parts)

    def _write_in_turn(self, pairs: list[tuple[list[Rows], list[Rows]]], parts: list[Rows], layer: int) -> None:
        copies = self._copies
        if copies is None or self._coming or layer != self._even or layer == self._layout.layers:
            self._write_prepared(parts, layer)
            return
        with copies:
            for targets, sources in pairs:
                copy(targets[layer], sources[layer])
            if failpoint.ACTIVE:
                failpoint.hit("client.layer")
            self._even = layer + 1
            for span in self._spans:
                span.shown[:] = span.levels[layer + 1]

    def _store_layer(self, start: int, rows: Rows | DeviceRows) -> None:
        stop = start + self._shard.width
        if isinstance(rows, DeviceRows):
            assert self._mapped is not None
            pairs = [(span.pages[:, start:stop], rows[span.page : span.page + span.count]) for span in self._spans]
            self._coming.begin(self._mapped.channel.copies, start // self._layout.layer_bytes, self._extents, pairs)
            return
        for span in self._spans:
            copy(span.pages[:, start:stop], rows[span.page : span.page + span.count])
        if failpoint.ACTIVE:
            failpoint.hit("client.layer")

    def _store_page(self, page: int, rows: Rows) -> None:
        span = self._span(page)
        if span is not None:
            i = page - span.page
            copy(self._shard.part(span.pages[i : i + 1])[0], rows)

    def _store_range(self, page: int, offset: int, row: Rows) -> None:
        span = self._span(page)
        if span is not None:
            copy(span.pages[page - span.page, offset : offset + len(row)], row)

    def _span(self, page: int) -> ReservedRun | None:
        return next((span for span in self._spans if 0 <= page - span.page < span.count), None)

    def _show(self, page: int | None) -> None:
        """Record the leading layers that this shard has written."""
        there = self._coming.below(self._layout.layers)
        if self._even is not None:
            for span in self._spans:
                span.shown[:] = span.levels[min(self._even, there)]
            return
        for span in self._spans:
            if page is None or 0 <= page - span.page < span.count:
                written = self._written[span.first : span.first + span.count]
                leading = np.where(written.all(axis=1), there, np.minimum(written.argmin(axis=1), there))
                span.shown[:] = span.levels[leading, np.arange(span.count)]

    # --- ending -----------------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        try:
            self._coming.finish()
            self._show(None)
        except DeviceLost:
            self._revoke()
            raise
        except DeadlineExceeded:
            self._let_be()
            raise
        raw, self._raw, self._spans, self._copies = self._raw, b"", [], None
        if self._mapped is None:
            return
        if self._put is not None:
            frames, self._frames = self._frames, []
            self._publish(self._put, frames)
            return
        try:
            self._seal_frames(self._mapped, raw)
        finally:
            self._mapped.claims.release(self)

    def _publish(self, put: LocalPut, addresses: list[Address]) -> None:
        self._node.check_open()
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        if time.monotonic() > self._until_s:
            put.forfeit(addresses)
            return
        put.seal(self.pages_new[0], addresses)
        with contextlib.suppress(QuotaExceeded):  # the tenant has a quota by now: nothing is sealed
            self.sealed = put.result()

    def _seal_frames(self, mapped: Mapped, raw: bytes) -> None:
        requests = []
        for part in parts_of(raw):
            count = len(part) // ADDRESS_BYTES
            requests.append((part, mapped.channel.request(Op.SEAL, count=count, a=self._shard.number, body=(part,))))
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        first, busy = 0, []
        for part, request in requests:
            statuses = self._statuses(mapped, part, request)
            busy += [first + i for i, status in enumerate(statuses) if status == Status.BUSY]
            first += len(statuses)
            self.sealed += sum(status in (Status.OK, Status.PARTIAL) for status in statuses)
            mapped.counters.put(mapped.row(self._class), statuses.count(int(Status.OK)))
            lost = [i for i, status in enumerate(statuses) if status not in _DONE]
            self._give_back(b"".join([part[i * ADDRESS_BYTES : (i + 1) * ADDRESS_BYTES] for i in lost]))
        if busy and self.waits:
            hashes = [self._keys.hashes[self.pages_new[i]] for i in busy]
            addresses = np.frombuffer(raw, ADDRESS_DTYPE)[busy]
            saved = wait_for_saves(mapped, hashes, addresses, time.monotonic() + self._node.timeout_s)
            self.sealed += saved
            mapped.counters.put(mapped.row(self._class), saved)

    def _statuses(self, mapped: Mapped, part: bytes, request: PendingReply) -> bytes:
        """Return the statuses of these pages. Asks once more if the daemon ended; sealed pages then have the status
        STALE."""
        count = len(part) // ADDRESS_BYTES
        try:
            return bytes(request.result().body[:count])
        except NodeUnavailable:
            again = mapped.channel.request(Op.SEAL, count=count, a=self._shard.number, body=(part,))
            statuses = bytearray(again.result().body[:count])
        for i, (number, frame, generation) in enumerate(np.frombuffer(part, ADDRESS_DTYPE).tolist()):
            extent = mapped.dram.extent(number)
            word = generation << 8 | int(FrameState.SEALED)
            if statuses[i] == Status.STALE and extent is not None and int(extent.words[frame]) == word:
                statuses[i] = Status.OK
        return bytes(statuses)

    def _let_be(self) -> None:
        """Leave the frames unused until this process has ended, since the device may still write into them."""
        self._raw, self._spans, self._copies, self._frames = b"", [], None, []
        if self._mapped is not None:
            self._mapped.claims.release(self)

    def _revoke(self) -> None:
        try:
            self._coming.finish()
        except DeviceLost:
            pass  # it writes no more
        except DeadlineExceeded:
            self._let_be()
            return
        raw, self._raw, self._spans, self._copies = self._raw, b"", [], None
        if self._put is not None:
            self._node.check_open()
            frames, self._frames = self._frames, []
            self._put.forfeit(frames)
            return
        try:
            self._give_back(raw)
        finally:
            if self._mapped is not None:
                self._mapped.claims.release(self)

    def _give_back(self, raw: bytes) -> None:
        """Return reserved frames. If the daemon does not receive this, they end with their deadline."""
        mapped = self._mapped
        for part in parts_of(raw):
            if mapped is not None:
                with contextlib.suppress(Unavailable):
                    count, shard = len(part) // ADDRESS_BYTES, self._shard.number + 1
                    mapped.channel.request(Op.REVOKE, count=count, a=shard, flags=NO_REPLY, body=(part,))
