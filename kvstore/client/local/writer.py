"""``LocalWriter`` writes pages layer by layer, directly into frames of this machine's memory.

``LayerCopies`` are the writer's copies from a device that are in flight. A ``ReservedRun`` is a part of the writer's
pages, in consecutive frames.
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
from kvstore.client.local.grants import BUSY_PAUSE_S, NO_FRAMES, OVER_QUOTA, GrantedFrames
from kvstore.client.local.hints import wait_for_saves
from kvstore.client.local.index_lookup import stored_or_published, stored_pages
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.publisher import Copies, PendingReply, Publisher
from kvstore.client.local.put import LocalPut
from kvstore.client.local.tier_reader import MappedExtent
from kvstore.client.local.verify_hit import address_runs
from kvstore.client.writer import Writer
from kvstore.device.base import DeviceEvent, DeviceLost
from kvstore.device.host_memory import copy
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, OutOfSpace, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, FrameState, Status
from kvstore.model.shard import Shard
from kvstore.wire.control import (
    BATCH_MAX,
    HINTS,
    NO_REPLY,
    WRITER,
    Op,
    batch_pages,
    encode,
    pack_class,
    statuses_bytes,
)

Pairs = list[tuple[Rows, DeviceRows]]


class _LayerCopy(NamedTuple):
    """A copy of one layer that a device has started."""

    layer: int
    link: DeviceLink
    event: DeviceEvent
    pairs: Pairs


class LayerCopies:
    """The copies from devices into a writer's frames that are in flight. While there is one, the session cannot end.
    Used by one thread.

    ``finish`` waits for all of them. If a device does not finish in time, it may still write into the frames. So the
    session then stays open, and keeps the frames until the process ends.
    """

    def __init__(self) -> None:
        self._copies: Copies | None = None  # entered while there are copies in flight
        self._in_flight: deque[_LayerCopy] = deque()

    def __bool__(self) -> bool:
        return bool(self._in_flight)

    def start(self, copies: Copies, layer: int, extents: Sequence[PinnedExtent], pairs: Pairs) -> None:
        """Start copying one layer into frames of these extents, after the work that is in the caller's stream.

        Raises:
            DeviceLost: the device has failed. Nothing was started.
        """
        link = link_of(pairs[0][1].device)
        event = link.copy(pairs, extents, to_device=False, layer=True)
        if self._copies is None:
            copies.__enter__()
            self._copies = copies
        self._in_flight.append(_LayerCopy(layer, link, event, pairs))

    def layers_copied(self, layers: int) -> int:
        """Return how many of the first ``layers`` layers have been copied without a gap. Does not wait. Raises
        DeviceLost."""
        while self._in_flight and self._in_flight[0].event.over():
            self._in_flight.popleft()
        self._leave_copies()
        return min((entry.layer for entry in self._in_flight), default=layers)

    def finish(self) -> None:
        """Wait until all layers have been copied.

        Raises:
            DeviceLost: the device has failed, and writes nothing more.
            DeadlineExceeded: the device may still write.
        """
        memory = list(self._in_flight)
        try:
            for _, link, event, _ in memory:
                link.wait(event, memory)
        except DeadlineExceeded:
            self._copies = None  # without an exit, so that the session stays open
            raise
        finally:
            self._in_flight.clear()
            self._leave_copies()

    def _leave_copies(self) -> None:
        if not self._in_flight and self._copies is not None:
            copies, self._copies = self._copies, None
            copies.__exit__()


class ReservedRun:
    """A writer's pages in consecutive frames.

    Attributes:
        pages: the frames, ``[count, page_bytes]``. ``pages[i]`` is page ``page + i`` of the keys.
        progress: where this shard records for readers how many layers it has written, ``[count]``.
        levels: the values to record in ``progress`` after each number of layers, ``[layers + 1, count]``.
        page: the first page, as its index in the keys.
        first: the first page, as its index in the writer's new pages.
    """

    __slots__ = ("pages", "progress", "page", "count", "first", "levels")

    def __init__(
        self,
        pages: npt.NDArray[np.uint8],
        progress: npt.NDArray[Any],
        page: int,
        first: int,
        levels: npt.NDArray[Any],
    ) -> None:
        self.pages = pages
        self.progress = progress
        self.page = page
        self.count = len(pages)
        self.first = first
        self.levels = levels

    def layer_pairs(self, shard: Shard, parts: list[Rows]) -> Iterator[tuple[list[Rows], list[Rows]]]:
        """Yield the targets and sources of the run's copies, both by layer.

        Args:
            parts: arrays ``[n, layers, width]``, which together contain all pages of the keys. Each array with pages of
                this run yields one pair.
        """
        first = 0
        for part in parts:
            low, high = max(first, self.page), min(first + len(part), self.page + self.count)
            if low < high:
                pages = shard.part(self.pages[low - self.page : high - self.page])
                yield list(pages.swapaxes(0, 1)), list(part[low - first : high - first].swapaxes(0, 1))
            first += len(part)


def request_parts(raw: bytes, pages: int = BATCH_MAX) -> list[bytes]:
    """Split concatenated addresses into parts of ``pages`` addresses, one for each request."""
    step = pages * ADDRESS_BYTES
    return [raw[start : start + step] for start in range(0, len(raw), step)]


def consecutive_runs(pages: list[int]) -> list[tuple[int, int]]:
    """Return ``(start, count)`` for each run ``pages[start:start + count]`` of consecutive numbers."""
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
    """A writer that copies each byte once, into its frame. It records its progress in shared memory, for readers.

    A writer of whole pages takes frames that were granted ahead, and publishes which pages it writes into them. At the
    end it publishes the pages, as a put does. So it need not wait for the node. A writer of a shard reserves frames
    under their keys, and seals them by requests.
    """

    TAKES_DEVICE = True

    def __init__(
        self,
        node: LocalNode,
        shard: Shard,
        keys: Keys,
        ttl_s: float,
        group: str | int | None,
        name: Callable[[MappedNode], None],
    ) -> None:
        super().__init__(shard, keys, ttl_s, group)
        layout = shard.layout
        self._node = node
        self._name = name  # sends the node the tenant of these pages
        self._class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._is_whole = shard.count == 1 and group is None  # no other writer writes into the same frames
        self._even = 0 if shard.stages == 1 else None
        self._copies: AbstractContextManager[None] | None = None  # to enter for each copy; None without frames
        self._mapped: MappedNode | None = None
        self._put: LocalPut | None = None  # publishes the pages in granted frames
        self._frames = NO_FRAMES  # granted frames
        self._frames_until_s = 0.0  # the deadline of granted frames
        self._raw = b""  # the addresses of `pages_new`, concatenated
        self._runs: list[ReservedRun] = []
        self._extents: list[MappedExtent] = []  # the extent of each run
        self._layer_copies = LayerCopies()

    # --- reserving --------------------------------------------------------------------------------------------------

    def _reserve(self) -> None:
        self._mapped = mapped = self._node.writable()
        self._keys = mapped.in_pool(self._keys)
        self._name(mapped)
        try:
            if not self._take_granted(mapped):
                self._request_frames(mapped)
            with mapped.channel.copies:
                self._map_runs(mapped)
            self._copies = mapped.channel.copies
        except BaseException:
            self._revoke()
            raise

    def _take_granted(self, mapped: MappedNode) -> bool:
        """Take frames that were granted ahead, and request the few that are missing.

        Return False if frames must be reserved instead: for a shard, for pages whose put would have to wait for the
        node, for pages whose parent is only on NVMe, and if no frames are free.
        """
        keys, publisher = self._keys, mapped.channel.publisher
        if not self._is_whole or publisher is None or not mapped.publishes:
            return False
        start_s = time.monotonic()
        page, last = stored_or_published(mapped, keys, self._layout.attention == "full")
        if last is not None:
            mapped.dram.mark_used(last)
        if page == len(keys):
            return True
        if time.monotonic() - start_s > self._node.timeout_s / 2:
            # The node answered the search for published pages late. A request for frames would wait as long again.
            raise NodeUnavailable(f"{self._node.name}: no answer in time")
        put = LocalPut(mapped, keys, self._class, publishes=True)
        if publisher.slot < 0 or not put.has_parent(publisher, page):
            return False
        frames = put.take(page)
        if not frames:
            return False  # RESERVE reports why
        self._put, self._frames, self._frames_until_s = put, frames, time.monotonic() + self._ttl_ms / 1000
        self.pages_new, self._raw = list(range(page, page + len(frames))), frames.raw
        self._publish_start(mapped, publisher, page)
        if failpoint.ACTIVE:
            failpoint.hit("client.begun")
        return True

    def _publish_start(self, mapped: MappedNode, publisher: Publisher, page: int) -> None:
        """Publish which pages are written into the granted frames. A reader that waits for a page asks the node to take
        this in, and then reads the layers while they are written. If the log is full, readers wait for the seal."""
        keys = self._keys
        number, step = pack_class(self._class), batch_pages(self._class.page_tokens, self._class.layers)
        for part in request_parts(self._raw, step):
            count = len(part) // ADDRESS_BYTES
            parent = keys.hashes[page - 1] if page else keys.parent
            body = (parent, part, *keys.columns(page, page + count))
            request = encode(Op.BEGIN, 0, count=count, a=number, b=self._ttl_ms, flags=NO_REPLY, body=body)
            with mapped.channel.copies:
                publisher.publish(request, [], mapped.header)
            page += count

    def _request_frames(self, mapped: MappedNode) -> None:
        """Reserve frames under the keys of the pages that are not stored, as many as the node has. Raises as
        ``Writer.__enter__``."""
        keys, width = self._keys, len(self._keys.identity_bytes) // max(1, len(self._keys))
        page, last = stored_pages(mapped, keys, self._layout.attention == "full")
        if last is not None:
            mapped.dram.mark_used(last)
        limit = batch_pages(self._class.page_tokens, self._class.layers)
        number, count = self._shard.number, self._shard.count
        head = WRITER.pack(self._group, number, count)
        end = page + mapped.claims.claim(self, self._group, number, keys.hashes[page:])
        is_full, is_over_quota, deadline = False, False, time.monotonic() + self._node.timeout_s
        while page < end and not is_full:
            stop = min(page + limit, end)
            body = (
                head,
                keys.hashes[page - 1] if page else keys.parent,
                keys.identity_bytes[page * width : stop * width],
                keys.hints[page:stop],
            )
            # The request can be repeated: the node then returns the frames that this session has already reserved for
            # the group and shard. These are this writer's, since no other writer has a claim on them.
            geometry = pack_class(self._class)
            flags = HINTS if keys.hints else 0
            message = mapped.exchange(Op.RESERVE, count=stop - page, a=geometry, b=self._ttl_ms, flags=flags, body=body)
            statuses, start = bytes(message.body[: stop - page]), statuses_bytes(stop - page)
            busy = statuses.find(Status.BUSY) if message.op != Status.BUSY else 0
            if busy >= 0:  # the node is saving pages to free space
                statuses, stop = statuses[:busy], page + busy
                is_full = time.monotonic() >= deadline
                time.sleep(BUSY_PAUSE_S)
            for i, status in enumerate(statuses):
                if status in _OURS:
                    self.pages_new.append(page + i)
                    self._raw += bytes(message.body[start + i * ADDRESS_BYTES : start + (i + 1) * ADDRESS_BYTES])
                elif status != Status.PRESENT:
                    is_full, is_over_quota = True, is_over_quota or status == Status.OVER_QUOTA
            page = stop
        if is_over_quota and not self.pages_new:
            raise QuotaExceeded(OVER_QUOTA)
        if end < len(keys) and not self.pages_new and not is_full:
            raise OutOfSpace("no frame could be reserved: another writer of this process is this shard of the group")
        if is_full and not self.pages_new:
            raise OutOfSpace("no frame could be reserved: the store is full of pages that cannot be evicted")

    def _map_runs(self, mapped: MappedNode) -> None:
        """Map the frames as runs, and set their last use and their progress."""
        addresses = np.frombuffer(self._raw, ADDRESS_DTYPE)
        generations = addresses["generation"]
        for number, frame, first, count in self._frame_runs(addresses):
            extent = mapped.dram.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was recreated")
            frames, run_generations = slice(frame, frame + count), generations[first : first + count]
            extent.last_use[frames] = time.monotonic_ns()  # replaces the last use of the frame's old page
            extent.uses.begin(frames, run_generations)  # the node does this only for reserved frames
            progress = extent.uses.progress(frames, self._shard.number)
            levels = extent.uses.levels(run_generations, self._layout.layers)
            self._extents.append(extent)
            self._runs.append(ReservedRun(extent.pages[frames], progress, self.pages_new[first], first, levels))

    def _frame_runs(self, addresses: npt.NDArray[np.void]) -> Iterator[tuple[int, int, int, int]]:
        """Yield ``(extent, first frame, first, count)`` for each run of consecutive pages in consecutive frames.
        ``first`` is the index of the run's first page in ``pages_new``."""
        if self._put is not None:  # the pages in granted frames are consecutive
            for number, frame, i, j in self._frames.runs:
                yield number, frame, i, j - i
            return
        for number, frame, first, words in address_runs(addresses, _RESERVED):
            for i, count in consecutive_runs(self.pages_new[first : first + len(words)]):
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
        """Return a function that writes layers of ``pages``. If layers are written in their order, each of them takes
        one copy and one store of progress per run of frames."""
        if on_device(pages):
            return super().prepared(pages)
        parts = self._parts(pages)
        pairs = [pair for run in self._runs for pair in run.layer_pairs(self._shard, parts)]
        return partial(self._write_in_order, pairs, parts)

    def _write_in_order(self, pairs: list[tuple[list[Rows], list[Rows]]], parts: list[Rows], layer: int) -> None:
        """Write a layer. If it is not the next layer in order, or if copies from a device are in flight, use the
        general method."""
        copies = self._copies
        if copies is None or self._layer_copies or layer != self._even or layer == self._layout.layers:
            self._write_prepared(parts, layer)
            return
        with copies:
            for targets, sources in pairs:
                copy(targets[layer], sources[layer])
            if failpoint.ACTIVE:
                failpoint.hit("client.layer")
            self._even = layer + 1
            for run in self._runs:
                run.progress[:] = run.levels[layer + 1]

    def _store_layer(self, start: int, rows: Rows | DeviceRows) -> None:
        stop = start + self._shard.width
        if isinstance(rows, DeviceRows):
            assert self._mapped is not None
            pairs = [(run.pages[:, start:stop], rows[run.page : run.page + run.count]) for run in self._runs]
            layer = start // self._layout.layer_bytes
            self._layer_copies.start(self._mapped.channel.copies, layer, self._extents, pairs)
            return
        for run in self._runs:
            copy(run.pages[:, start:stop], rows[run.page : run.page + run.count])
        if failpoint.ACTIVE:
            failpoint.hit("client.layer")

    def _store_page(self, page: int, rows: Rows) -> None:
        run = self._run_of(page)
        if run is not None:
            i = page - run.page
            copy(self._shard.part(run.pages[i : i + 1])[0], rows)

    def _store_range(self, page: int, offset: int, row: Rows) -> None:
        run = self._run_of(page)
        if run is not None:
            copy(run.pages[page - run.page, offset : offset + len(row)], row)

    def _run_of(self, page: int) -> ReservedRun | None:
        return next((run for run in self._runs if 0 <= page - run.page < run.count), None)

    def _show(self, page: int | None) -> None:
        """Record for readers how many leading layers of a page, or of all pages, this shard has written."""
        copied = self._layer_copies.layers_copied(self._layout.layers)
        if self._even is not None:
            for run in self._runs:
                run.progress[:] = run.levels[min(self._even, copied)]
            return
        for run in self._runs:
            if page is None or 0 <= page - run.page < run.count:
                written = self._written[run.first : run.first + run.count]
                leading = np.where(written.all(axis=1), copied, np.minimum(written.argmin(axis=1), copied))
                run.progress[:] = run.levels[leading, np.arange(run.count)]

    # --- ending -----------------------------------------------------------------------------------------------------

    def _seal(self) -> None:
        try:
            self._layer_copies.finish()
            self._show(None)
        except DeviceLost:
            self._revoke()
            raise
        except DeadlineExceeded:
            self._abandon_frames()
            raise
        raw, self._raw, self._runs, self._copies = self._raw, b"", [], None
        if self._mapped is None:
            return
        if self._put is not None:
            frames, self._frames = self._frames, NO_FRAMES
            self._publish_pages(self._put, frames)
            return
        try:
            self._seal_frames(self._mapped, raw)
        finally:
            self._mapped.claims.release(self)

    def _publish_pages(self, put: LocalPut, frames: GrantedFrames) -> None:
        """Publish the pages in granted frames. After the frames' deadline, forfeit them instead."""
        self._node.check_open()
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        if time.monotonic() > self._frames_until_s:
            put.forfeit(frames)
            return
        put.seal(self.pages_new[0], frames)
        with contextlib.suppress(QuotaExceeded):  # the tenant has got a quota in the meantime, so nothing is sealed
            self.sealed = put.result()

    def _seal_frames(self, mapped: MappedNode, raw: bytes) -> None:
        """Seal the pages in reserved frames, and return the frames of pages that could not be sealed. Pages that the
        node saves to a lower tier first are waited for if the caller waits."""
        requests = []
        for part in request_parts(raw):
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

    def _statuses(self, mapped: MappedNode, part: bytes, request: PendingReply) -> bytes:
        """Wait for the reply to a seal, and return the status of each page. If the daemon has ended, send the request
        again. The status of a page that is sealed already is then STALE, and is changed to OK here."""
        count = len(part) // ADDRESS_BYTES
        try:
            return bytes(request.result().body[:count])
        except NodeUnavailable:
            retry = mapped.channel.request(Op.SEAL, count=count, a=self._shard.number, body=(part,))
            statuses = bytearray(retry.result().body[:count])
        for i, (number, frame, generation) in enumerate(np.frombuffer(part, ADDRESS_DTYPE).tolist()):
            extent = mapped.dram.extent(number)
            word = generation << 8 | int(FrameState.SEALED)
            if statuses[i] == Status.STALE and extent is not None and int(extent.words[frame]) == word:
                statuses[i] = Status.OK
        return bytes(statuses)

    def _abandon_frames(self) -> None:
        """Abandon the frames without returning them, because a device may still write into them. They stay unused until
        this process has ended."""
        self._raw, self._runs, self._copies, self._frames = b"", [], None, NO_FRAMES
        if self._mapped is not None:
            self._mapped.claims.release(self)

    def _revoke(self) -> None:
        try:
            self._layer_copies.finish()
        except DeviceLost:
            pass  # the device writes nothing more
        except DeadlineExceeded:
            self._abandon_frames()
            return
        raw, self._raw, self._runs, self._copies = self._raw, b"", [], None
        if self._put is not None:
            self._node.check_open()
            frames, self._frames = self._frames, NO_FRAMES
            self._put.forfeit(frames)
            return
        try:
            self._give_back(raw)
        finally:
            if self._mapped is not None:
                self._mapped.claims.release(self)

    def _give_back(self, raw: bytes) -> None:
        """Return reserved frames to the node. If the daemon does not receive this, they end at their deadline."""
        mapped = self._mapped
        for part in request_parts(raw):
            if mapped is not None:
                with contextlib.suppress(Unavailable):
                    count, shard = len(part) // ADDRESS_BYTES, self._shard.number + 1
                    mapped.channel.request(Op.REVOKE, count=count, a=shard, flags=NO_REPLY, body=(part,))
