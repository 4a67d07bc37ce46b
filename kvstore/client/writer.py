"""Writer: pages written layer by layer into reserved frames, readable while they are being written."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from kvstore import failpoint
from kvstore.client.buffers import rows_to_read
from kvstore.client.local.grants import BUSY_PAUSE_S, OVER_QUOTA
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.prefetch import await_saved
from kvstore.client.local.proof import address_runs
from kvstore.client.local.spans import Span, parts_of, unbroken
from kvstore.client.local.stored import stored_pages
from kvstore.client.ranges import Ranges
from kvstore.errors import InvalidRequest, NodeUnavailable, OutOfSpace, QuotaExceeded, Unavailable
from kvstore.model.prefix import Keys
from kvstore.model.replica import (
    ADDRESS_BYTES,
    ADDRESS_DTYPE,
    SHARDS_MAX,
    FrameClass,
    FrameState,
    Status,
)
from kvstore.model.shard import Shard
from kvstore.rpc.base import PendingReply
from kvstore.rpc.control import NO_REPLY, Op, batch_pages, pack_class, statuses_bytes

_RESERVED = int(FrameState.RESERVED)
_OURS = (int(Status.OK), int(Status.JOINED))
_DONE = (int(Status.OK), int(Status.PARTIAL), int(Status.PRESENT), int(Status.BUSY))

PIECES_MAX = 256  # that one page may lie in meanwhile, written by ``write_range``


class Writer:
    """A layer-wise put: ``with cache.writer(tokens) as w: w.write_layer(layer, data)`` for every layer, in any order.

    Life: made -> entered (frames reserved) -> written, readers in other processes following layer by layer -> left:
    sealed. Other ends: leaving by an exception, or without having written everything, revokes all of it; the deadline
    ``ttl_s`` or the death of this process do the same. Never is a page readable that was not written whole.

    Several shards of one write give the same ``group``, and each its ``rank`` of ``ranks`` (its heads) and ``stage`` of
    ``stages`` (its layers): a page is sealed when every shard has sealed its part. A rank whose heads are another one's
    to write (MLA, more ranks than heads) makes the same calls; nothing of its data is used. A reader follows once all
    shards have entered: before, nobody knows which layers they leave to others. A shard of a group has one writer at a
    time: a second one (a retry) gets no frames (``OutOfSpace``) until the first has left.

    Attributes (once entered):
        pages_new: indices of the pages to be written, ascending; the others are stored already, or had no room.
        sealed: after leaving, how many pages this shard sealed (those still waiting for other shards included).
        waits: whether leaving waits until pages are durable whose parent only NVMe has. It is not needed for them to be
            stored; those that are not yet do not count as ``sealed``.
    """

    def __init__(
        self,
        node: LocalNode,
        shard: Shard,
        keys: Keys,
        ttl_s: float,
        group: str | int | None,
        name: Callable[[Mapped], None] | None = None,
    ) -> None:
        if not 0 < ttl_s < 1e6:
            raise InvalidRequest("ttl_s", f"must be positive seconds, not {ttl_s!r}")
        if shard.count > SHARDS_MAX:
            field = "ranks" if shard.ranks > SHARDS_MAX or shard.stages == 1 else "stages"
            raise InvalidRequest(field, f"{shard.count} shards of one page are more than {SHARDS_MAX}")
        self.pages_new: list[int] = []
        self.sealed = 0
        self.waits = True
        self._node = node
        self._shard = shard
        self._layout = layout = shard.layout
        self._keys = keys
        self._name = name  # tells the node whose pages these are
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._group = _group_number(group, shard.stages)
        self._class = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
        self._mapped: Mapped | None = None
        self._entered = False
        self._raw = b""  # addresses of pages_new, end to end
        self._spans: list[Span] = []
        self._written = np.zeros((0, layout.layers), np.bool_)
        self._ranges: dict[int, Ranges] = {}  # page -> bytes of it written by ``write_range``

    def __enter__(self) -> Writer:
        """Reserve frames for the pages that are not stored.

        Raises:
            QuotaExceeded: the tenant may have no more, not even one page.
            OutOfSpace: there is no room for even one page.
            NodeUnavailable, DeadlineExceeded: the daemon did not answer in time.
        """
        if self._entered:
            raise InvalidRequest("writer", "was entered already: make another")
        self._entered = True
        self._mapped = mapped = self._node.writable()
        self._keys = mapped.in_pool(self._keys)
        if self._name is not None:
            self._name(mapped)
        try:
            self._reserve(mapped)
            with mapped.channel.copies:
                self._lay_out(mapped)
        except BaseException:
            self._revoke(self._raw)
            mapped.claims.release(self)
            raise
        self._begin()
        if self._shard.count > 1:
            with self._open():
                self._progress(self._spans)
        return self

    def write_layer(self, layer: int, data: Any) -> None:
        """Write one layer of all pages; readers may read it from then on.

        Args:
            data: ``[pages, bytes]`` for all pages of the keys (also those in no need of writing): ``layer_bytes``, or
                this rank's heads' share of them, of any dtype and further shape. Rows may lie apart, each contiguous:
                ``arena[first:last, layer]`` of a page-major arena is copied once.

        Raises:
            InvalidRequest: the layer is not in the layout or another stage's, or data has another size; nothing was
                written.
        """
        with self._open():
            start = self._start(layer)
            rows = rows_to_read(data, self._shard.width, len(self._keys), "data", apart=True)
            if not self._shard.writes:
                return
            stop = start + self._shard.width
            for span in self._spans:
                span.pages[:, start:stop] = rows[span.page : span.page + span.count]
            if failpoint.ACTIVE:
                failpoint.hit("client.layer")
            self._written[:, layer] = True
            self._progress(self._spans)

    def write_page(self, page: int, data: Any) -> None:
        """Write all layers of one page: ``page_bytes``, or of a shard its heads' share of each of its layers, in order.

        Raises:
            InvalidRequest: no such page among the keys, or data has another size; nothing was written.
        """
        with self._open():
            self._check_page(page)
            shard, (first, last) = self._shard, self._shard.layers
            rows = rows_to_read(data, shard.width, last - first, "data", apart=True)
            for span in self._spans:
                i = page - span.page
                if shard.writes and 0 <= i < span.count:
                    shard.part(span.pages[i : i + 1])[0] = rows
                    self._written[span.first + i] = True
                    self._progress([span])

    def write_range(self, page: int, offset: int, data: Any) -> None:
        """Write some bytes of one page where they lie in it; a layer is written when all bytes of it were.

        Raises:
            InvalidRequest: no such page among the keys, or the bytes are not in the page, or (of a shard) not in its
                layers and, where it has not all heads, not in its heads of one layer; nothing was written.
        """
        with self._open():
            self._write_range(page, offset, data)

    def _write_range(self, page: int, offset: int, data: Any) -> None:
        self._check_page(page)
        layout, shard, row = self._layout, self._shard, rows_to_read(data, len(data), 1, "data")[0]
        stop = offset + len(row)
        first, last = offset // layout.layer_bytes, max(0, stop - 1) // layout.layer_bytes
        start = first * layout.layer_bytes + shard.offset
        inside = shard.width == layout.layer_bytes or start <= offset <= stop <= start + shard.width
        low, high = (layer * layout.layer_bytes for layer in shard.layers)
        if not low <= offset <= stop <= high or not inside:
            raise InvalidRequest("offset", f"bytes {offset}..{stop} are not this writer's in a page")
        span = next((span for span in self._spans if 0 <= page - span.page < span.count), None)
        if span is None or not shard.writes or not len(row):
            return
        ranges = self._ranges.setdefault(page, Ranges())
        if len(ranges) >= PIECES_MAX:
            raise InvalidRequest("offset", f"page {page} lies in more than {PIECES_MAX} pieces: write longer ones")
        span.pages[page - span.page, offset:stop] = row
        ranges.add(offset, stop)
        done = self._written[span.first + page - span.page]
        for layer in range(first, last + 1):
            start = layer * layout.layer_bytes + shard.offset
            done[layer] = done[layer] or ranges.covers(start, start + shard.width)
        if done[first] or done[last]:
            self._progress([span])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Seal, or revoke where an exception is on its way.

        Raises:
            InvalidRequest: a layer was not written; everything was revoked.
            NodeUnavailable, DeadlineExceeded: no acknowledgement; what was not sealed is revoked by its deadline.
        """
        raw, self._raw, self._spans = self._raw, b"", []
        try:
            if kind is not None:
                self._revoke(raw)
                return
            if not self._written.all():
                self._revoke(raw)
                page, layer = (int(i) for i in np.argwhere(~self._written)[0])
                raise InvalidRequest("layer", f"layer {layer} of page {self.pages_new[page]} was not written")
            self._seal(raw)
        finally:
            if self._mapped is not None:
                self._mapped.claims.release(self)

    # --- reserving --------------------------------------------------------------------------------------------------

    def _reserve(self, mapped: Mapped) -> None:
        keys, width = self._keys, len(self._keys.identity_bytes) // max(1, len(self._keys))
        page, last = stored_pages(mapped, keys, self._layout.attention == "full")
        if last is not None:
            mapped.mark_used(last)
        limit = batch_pages(self._class.page_tokens, self._class.layers)
        number, count = self._shard.number, self._shard.count
        head = self._group.to_bytes(8, "little") + number.to_bytes(4, "little") + count.to_bytes(4, "little")
        end = page + mapped.claims.claim(self, self._group, number, keys.hashes[page:])
        full, refused, deadline = False, False, time.monotonic() + self._node.timeout_s
        while page < end and not full:
            stop = min(page + limit, end)
            body = (
                head,
                keys.hashes[page - 1] if page else keys.parent,
                keys.identity_bytes[page * width : stop * width],
            )
            # May be asked twice: what this session has reserved for this group and shard already is joined. It is ours,
            # for no other writer has a claim on it.
            geometry = pack_class(self._class)
            message = mapped.exchange(Op.RESERVE, count=stop - page, a=geometry, b=self._ttl_ms, body=body)
            statuses, start = bytes(message.body[: stop - page]), statuses_bytes(stop - page)
            busy = statuses.find(Status.BUSY) if message.op != Status.BUSY else 0
            if busy >= 0:  # pages are being saved to make room
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
            raise OutOfSpace("no frame could be reserved: another writer here writes as this shard of the group")
        if full and not self.pages_new:
            raise OutOfSpace("no frame could be reserved: the store is full of pages that may not leave")

    def _lay_out(self, mapped: Mapped) -> None:
        addresses = np.frombuffer(self._raw, ADDRESS_DTYPE)
        for number, frame, first, words in address_runs(addresses, _RESERVED):
            extent = mapped.extent(number)
            if extent is None:
                raise NodeUnavailable(f"extent {number} is gone: the node was made anew")
            for i, count in unbroken(self.pages_new[first : first + len(words)]):
                frames = slice(frame + i, frame + i + count)
                marks = extent.progress[frames, self._shard.number]
                extent.last_use[frames] = time.monotonic_ns()  # a frame keeps its last page's mark
                generations = (words[i : i + count] >> np.uint64(8)) << np.uint64(32)
                page = self.pages_new[first + i]
                self._spans.append(Span(extent.pages[frames], marks, page, first + i, generations))

    # --- writing ----------------------------------------------------------------------------------------------------

    def _open(self) -> AbstractContextManager[None]:
        """To be entered around what is stored into our frames. Raises InvalidRequest where nothing may be."""
        if self._mapped is None:
            raise InvalidRequest("writer", "is not entered: use it in a with statement")
        self._node.check_open()
        return self._mapped.channel.copies

    def _begin(self) -> None:
        """Nothing of ours is written yet. What others write counts as written, for nobody waits for us there."""
        first, last = self._shard.layers
        self._written = np.ones((len(self.pages_new), self._layout.layers), np.bool_)
        if self._shard.writes:
            self._written[:, first:last] = False

    def _start(self, layer: int) -> int:
        """Where in a page our heads of a layer begin. Raises InvalidRequest where it is not ours."""
        start = self._layout.byte_range(layer)[0] + self._shard.offset
        first, last = self._shard.layers
        if not first <= layer < last:
            raise InvalidRequest("layer", f"{layer} is another stage's, this one has {first}..{last - 1}")
        return start

    def _check_page(self, page: int) -> None:
        if not isinstance(page, int) or not 0 <= page < len(self._keys):
            raise InvalidRequest("page", f"{page!r} is not in 0..{len(self._keys) - 1}")

    def _progress(self, spans: list[Span]) -> None:
        """Raise this shard's marks to the leading layers that are written. After the data, never before."""
        for span in spans:
            written = self._written[span.first : span.first + span.count]
            leading = np.where(written.all(axis=1), self._layout.layers, written.argmin(axis=1))
            span.marks[:] = span.generations | leading.astype(np.uint64)

    # --- ending -----------------------------------------------------------------------------------------------------

    def _seal(self, raw: bytes) -> None:
        assert self._mapped is not None
        requests = []
        for part in parts_of(raw):
            count = len(part) // ADDRESS_BYTES
            requests.append(
                (part, self._mapped.channel.request(Op.SEAL, count=count, a=self._shard.number, body=(part,)))
            )
        if failpoint.ACTIVE:
            failpoint.hit("client.sealing")
        first, busy = 0, []
        for part, request in requests:
            statuses = self._statuses(part, request)
            busy += [first + i for i, status in enumerate(statuses) if status == Status.BUSY]
            first += len(statuses)
            self.sealed += sum(status in (Status.OK, Status.PARTIAL) for status in statuses)
            self._mapped.counters.put(self._mapped.row(self._class), statuses.count(int(Status.OK)))
            lost = [i for i, status in enumerate(statuses) if status not in _DONE]
            self._revoke(b"".join([part[i * ADDRESS_BYTES : (i + 1) * ADDRESS_BYTES] for i in lost]))
        if busy and self.waits:
            hashes = [self._keys.hashes[self.pages_new[i]] for i in busy]
            addresses = np.frombuffer(raw, ADDRESS_DTYPE)[busy]
            saved = await_saved(self._mapped, hashes, addresses, time.monotonic() + self._node.timeout_s)
            self.sealed += saved
            self._mapped.counters.put(self._mapped.row(self._class), saved)

    def _statuses(self, part: bytes, request: PendingReply) -> bytes:
        """What became of these pages. Asked once more where the daemon went away; sealed pages then answer STALE."""
        assert self._mapped is not None
        count = len(part) // ADDRESS_BYTES
        try:
            return bytes(request.result().body[:count])
        except NodeUnavailable:
            again = self._mapped.channel.request(Op.SEAL, count=count, a=self._shard.number, body=(part,))
            statuses = bytearray(again.result().body[:count])
        for i, (number, frame, generation) in enumerate(np.frombuffer(part, ADDRESS_DTYPE).tolist()):
            extent = self._mapped.extent(number)
            word = generation << 8 | int(FrameState.SEALED)
            if statuses[i] == Status.STALE and extent is not None and int(extent.words[frame]) == word:
                statuses[i] = Status.OK
        return bytes(statuses)

    def _revoke(self, raw: bytes) -> None:
        """Give frames back; where the daemon does not hear of it, their deadline does."""
        mapped = self._mapped
        for part in parts_of(raw):
            if mapped is not None:
                with contextlib.suppress(Unavailable):
                    count, shard = len(part) // ADDRESS_BYTES, self._shard.number + 1
                    mapped.channel.request(Op.REVOKE, count=count, a=shard, flags=NO_REPLY, body=(part,))

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("writer", "cannot be pickled: it belongs to this process")


def _group_number(group: str | int | None, stages: int) -> int:
    """A number for the node. With stages it depends on how many: shards that see the cut differently are not one."""
    if group is None or group == 0 or group == "":
        return secrets.randbits(63) | 1
    if isinstance(group, str):
        number = _digest(group.encode())
    elif isinstance(group, bool) or not isinstance(group, int) or not 0 < group < 1 << 64:
        raise InvalidRequest("group", f"must be text or an integer in 1..2**64 - 1, not {group!r}")
    else:
        number = group
    return number if stages == 1 else _digest(number.to_bytes(8, "little") + stages.to_bytes(8, "little"))


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, person=b"kvstore.group").digest()) | 1
