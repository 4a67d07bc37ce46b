"""The pages of one layout, salt and adapter on a node reached over gRPC: the cache, its leases and its readers.

Reads are streams of data, received directly into their rows and verified by a digest per message.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, NamedTuple

import grpc
import numpy as np

from kvstore.client.buffers import Rows, check_seconds, rows_to_fill
from kvstore.client.device_link import host_rows
from kvstore.client.match import ABSENT, CHECKSUM, GENERATION, Lease, Match
from kvstore.client.prefix_cache import PendingPut, PrefixCache
from kvstore.client.reader import Reader
from kvstore.client.remote.node import REQUEST_PAGES, RemoteNode, end, is_connection_lost
from kvstore.client.remote.writer import RemotePut, RemoteWriter
from kvstore.device.host_memory import copy, empty
from kvstore.errors import InvalidRequest, LeaseBroken, NodeUnavailable, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.model.retention import REPLICATED, Retention, ranges_of
from kvstore.model.shard import Shard
from kvstore.pb import store_pb2 as pb
from kvstore.wire.grpc import digest_of, fields, retention_messages

_MATCH, _DATA, _DIGEST = 1, 2, 3  # fields of ReadReply


class Fetched(NamedTuple):
    """The result of a read: pages in ``rows``, the number of them from NVMe, and why the match ended."""

    pages: int
    nvme_pages: int
    reason: str
    rows: Rows


def fetch(node: RemoteNode, request: pb.ReadRequest, count: int, page_bytes: int, rows: Rows | None) -> Fetched:
    """Fetch the leading pages of a prompt. The read is repeated once if the connection was lost.

    Data is verified before it counts. Rows after the last page may have been written to.

    Args:
        count: the number of pages that the request names.
        rows: ``[>= count, page_bytes]``. If None, rows are allocated for the pages that the node announces.

    Raises:
        NodeUnavailable, DeadlineExceeded: the node did not answer, or the stream broke or stalled.
    """
    raw, again = request.SerializeToString(), True
    while True:
        try:
            return _fetch(node, raw, count, page_bytes, rows)
        except grpc.RpcError as error:
            if not (again and is_connection_lost(error)):
                node.refuse(error)
            again = False
        except ValueError as error:  # not protobuf, or gRPC's error if another thread has closed the channel
            node.check_open()
            raise Unavailable(f"{node.endpoint.address}: sent an invalid reply: {error}") from None


def _fetch(node: RemoteNode, request: bytes, count: int, page_bytes: int, rows: Rows | None) -> Fetched:
    match, position, limit, flat = pb.LookupReply(), 0, 0, np.empty(0, np.uint8)
    stream = node.receive("Read", request, node.stream_s(count * page_bytes))
    try:
        for message in stream:
            data, digest = None, 0
            for number, integer, view in fields(message):
                if number == _DATA:
                    data = view
                elif number == _DIGEST:
                    digest = integer
                elif number == _MATCH and view is not None:
                    match = pb.LookupReply.FromString(bytes(view))
                    if rows is None:
                        rows = empty((min(match.pages, count), page_bytes))
                    flat, limit = rows.reshape(-1), max(limit, min(match.pages, count) * page_bytes)
            if not data:
                continue
            stop = position + len(data)
            if stop > limit:
                raise ValueError(f"{stop} bytes, but {limit} were announced")
            if digest_of(data) != digest:
                return _result(match, position // page_bytes, CHECKSUM, rows, page_bytes)
            copy(flat[position:stop], np.frombuffer(data, np.uint8))
            position = stop
    finally:
        end(stream)
    return _result(match, position // page_bytes, match.reason, rows, page_bytes)


def _result(match: pb.LookupReply, pages: int, reason: str, rows: Rows | None, page_bytes: int) -> Fetched:
    if pages > match.pages:  # the last message withdraws pages that the first one announced
        pages = match.pages
    elif pages < match.pages and not reason:
        reason = GENERATION
    if rows is None:
        rows = np.empty((0, page_bytes), np.uint8)
    return Fetched(pages, min(match.nvme_pages, pages), reason, rows)


RELEASE_S = 0.5  # a release that is not sent does no harm: the lease ends at its deadline

PageMessage = Callable[[Keys], pb.Pages]


class RemoteLease(Lease):
    """A lease that keeps the pages in the node, where other callers can read them.

    ``pages`` are copies made when the lease is taken, and stay valid after it. The lease ends if the node restarts.
    """

    def __init__(self, node: RemoteNode, layout: Layout, keys: Keys, ttl_s: float, page_message: PageMessage) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._page_message = page_message
        self._lease = b""

    def _take(self) -> None:
        self._node.check_open()
        pages, reason = self._request_lease() if len(self._keys) else (0, "")
        try:
            if pages:
                request = pb.ReadRequest(pages=self._page_message(self._keys[:pages]))
                fetched = fetch(self._node, request, pages, self._layout.page_bytes, None)
                if fetched.pages < pages:
                    pages, reason = fetched.pages, fetched.reason
                fetched.rows.flags.writeable = False
                self.pages = list(fetched.rows[:pages])
        except BaseException:
            self.release()
            raise
        if reason:
            self._node.missed(reason)
        self.match = Match(pages * self._layout.page_tokens, pages, reason)

    def check(self) -> None:
        """Do nothing: the copies were verified, and nothing else writes to them."""

    def _renew(self) -> None:
        if not self._lease:
            return
        try:
            self._node.call("Renew", pb.RenewRequest(lease=self._lease, ttl_ms=self._ttl_ms), pb.LeaseReply)
        except LeaseBroken:
            pages, self._lease = len(self.pages), b""
            if self._request_lease()[0] < pages:
                raise

    def release(self) -> None:
        """End the lease now. It drops the arrays in ``pages``, which stay valid for callers that keep them."""
        lease, self._lease = self._lease, b""
        self.pages = []
        if lease:
            with contextlib.suppress(Unavailable, LeaseBroken, InvalidRequest):  # InvalidRequest: the store is closed
                self._node.call("Release", pb.ReleaseRequest(lease=lease), pb.Empty, RELEASE_S, again=False)

    def _request_lease(self) -> tuple[int, str]:
        """Request the lease. Return the number of leading pages that it covers, and why there are no more."""
        request = pb.LeaseRequest(pages=self._page_message(self._keys), ttl_ms=self._ttl_ms)
        reply = self._node.call("Lease", request, pb.LeaseReply)
        self._lease = reply.lease
        return min(reply.pages, len(self._keys)), reply.reason


class RemoteReader(Reader):
    """A reader that fetches whole pages when they are sealed, and keeps them (``pages * page_bytes``). So each page is
    sent only once, and a later eviction does no harm.
    """

    def __init__(
        self, node: RemoteNode, layout: Layout, keys: Keys, timeout_s: float, page_message: PageMessage
    ) -> None:
        super().__init__(layout, keys, timeout_s)
        self._node = node
        self._page_message = page_message
        self._rows = np.empty((0, layout.page_bytes), np.uint8)
        self._fetched = 0

    def _read(self, page: int, layer: int, start: int, stop: int, target: Rows) -> int:
        self._node.check_open()
        if page == self._fetched:
            self._fetch()
        copy(target[page : self._fetched], self._rows[page : self._fetched, start:stop])
        return self._fetched - page

    def _fetch(self) -> None:
        """Fetch pages that were sealed since the last call."""
        if not len(self._rows):
            self._rows = empty((self.pages, self._layout.page_bytes))
        rest = self._keys[self._fetched :]
        request = pb.ReadRequest(pages=self._page_message(rest))
        rows = self._rows[self._fetched :]
        self._fetched += fetch(self._node, request, len(rest), self._layout.page_bytes, rows).pages


PUTS_UNREAD_MAX = 16  # asynchronous puts with unread replies
PREFETCH_GRACE_S = 0.5  # added to the call's deadline, for the node's answer at the end of ``timeout_s``


class RemoteCache(PrefixCache):
    """A prefix cache in which every verb calls the node. Leases have copies of pages, and readers get layers when their
    page is sealed."""

    def __init__(self, node: RemoteNode, layout: Layout, salt: str, adapter: str, replicas: int | None = None) -> None:
        super().__init__(layout, salt, adapter, replicas)
        self._node = node
        self._chain = pb.Pages(layout=pb.Layout(**asdict(layout)), salt=salt, adapter=adapter, whole_pages=True)
        self._puts: deque[PendingPut] = deque()

    def _tag(self) -> bytes:
        return b""  # only nodes have the pool's secret

    def page_message(self, keys: Keys) -> pb.Pages:
        """Return the message that names these pages in a request."""
        keys = keys.with_tag(b"")
        pages = pb.Pages(tokens=keys.tokens.tobytes(), extras=keys.media or ())
        pages.MergeFrom(self._chain)
        if keys.extras is not None and keys.media is None:
            raise InvalidRequest("extras", "must not be digests over gRPC: make the keys with cache.keys()")
        if keys.parent != keys.root:
            pages.parent = keys.parent
        pages.replicas = 2 if keys.hints and keys.hints[0] & REPLICATED else 0
        pages.retention.extend(retention_messages(ranges_of(keys.hints, self._page_tokens)))
        return pages

    def parts(self, keys: Keys) -> Iterator[Keys]:
        """Yield keys in parts that each fit a request. Yields nothing if there are no keys."""
        pages_max = self._node.request_bytes // (4 * self._page_tokens + _media_bytes(keys))
        pages_max = max(1, min(pages_max, REQUEST_PAGES))
        return (keys[start : start + pages_max] for start in range(0, len(keys), pages_max))

    def _one_call(self, keys: Keys) -> Keys:
        """Return these keys if they fit one request. Raises InvalidRequest if they do not."""
        part = next(self.parts(keys), keys)
        if len(part) < len(keys):
            raise InvalidRequest("tokens", f"must be at most {len(part)} pages in one call over gRPC (got {len(keys)})")
        return keys

    # --- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """Return the length of the longest stored prefix, as a hint.
        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        keys = self._matchable_keys(tokens, extras)
        self._node.check_open()
        return self._match(keys, self._lookup)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """Copy the longest stored prefix into ``out``. Data is received directly there, and verified before it counts.

        Args:
            verify: ask the node to compare the checksums of pages in DRAM as well before it sends them.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer, or the stream broke; ``out`` may have some
                pages.
        """
        keys = self._matchable_keys(tokens, extras)
        if out is not None and (match := self._to_device(keys, out, verify)) is not None:
            return match
        target = rows_to_fill(out, self.page_bytes, len(keys)) if out is not None else None
        return self._read(keys, self._whole, target, bool(verify))

    def _get_shard(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool | None) -> Match:
        if target is None or target.flags.c_contiguous:
            return self._read(keys, shard, target, bool(verify))
        match = self._read(keys, shard, None, bool(verify))
        if match.data is not None:
            target[: match.pages] = match.data
        return Match(match.tokens, match.pages, match.reason, None, {Tier.NVME: match.tiers.get(Tier.NVME, 0)})

    def _read(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool) -> Match:
        """Read the match's pages, or a shard's part of them, into ``target``. If that is None, allocate
        ``match.data``."""
        node = self._node
        node.check_open()
        if not len(keys):
            return Match(0, 0, "", np.empty((0, shard.nbytes), np.uint8) if target is None else None)
        cut = {} if shard.count == 1 else shard.cut
        pages, nvme_pages, reason, parts = 0, 0, "", []
        for part in self.parts(keys):
            rows = target[pages : pages + len(part)] if target is not None else None
            request = pb.ReadRequest(pages=self.page_message(part), verify=verify, **cut)
            fetched = fetch(node, request, len(part), shard.nbytes, rows)
            parts.append(fetched.rows[: fetched.pages])
            pages, nvme_pages, reason = pages + fetched.pages, nvme_pages + fetched.nvme_pages, fetched.reason
            if reason:
                node.missed(reason)
                break
        data = (parts[0] if len(parts) == 1 else np.concatenate(parts)) if target is None else None
        return Match(pages * self._page_tokens, pages, reason, data, {Tier.NVME: nvme_pages})

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """Run ``get`` in one of the store's threads. Until the future is done, ``out`` must not be used."""
        return self._node.workers.submit(self.get, tokens, out, extras=extras, verify=verify)

    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """Ask the node to copy the stored prefix from NVMe to DRAM, and return what is in DRAM afterwards."""
        check_seconds(timeout_s, "timeout_s")
        keys = self._matchable_keys(tokens, extras)
        self._node.check_open()
        deadline = time.monotonic() + timeout_s

        def prefetch(part: Keys) -> pb.LookupReply:
            request = pb.LookupRequest(pages=self.page_message(part))
            timeout_s = max(0.0, deadline - time.monotonic()) + PREFETCH_GRACE_S
            return self._node.call("Prefetch", request, pb.LookupReply, timeout_s)

        return self._match(keys, prefetch)

    def _lookup(self, keys: Keys) -> pb.LookupReply:
        return self._node.call("Lookup", pb.LookupRequest(pages=self.page_message(keys)), pb.LookupReply)

    def _match(self, keys: Keys, ask: Callable[[Keys], pb.LookupReply]) -> Match:
        """Combine the answers of ``ask`` for all parts, up to the first part that does not match as a whole."""
        pages, nvme_pages = 0, 0
        for part in self.parts(keys):
            reply = ask(part)
            matched = min(reply.pages, len(part))
            pages, nvme_pages = pages + matched, nvme_pages + min(reply.nvme_pages, matched)
            if matched < len(part):
                return Match(pages * self._page_tokens, pages, reply.reason or ABSENT, None, {Tier.NVME: nvme_pages})
        return Match(pages * self._page_tokens, pages, "", None, {Tier.NVME: nvme_pages})

    # --- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        wait: bool = False,
        retention: Retention | Sequence[Retention] = (),
        replicas: int | None = None,
    ) -> int:
        """Store the full pages of ``tokens``. One round trip asks which are stored; a stream sends the others.

        Args:
            checksum: no effect, because the node verifies all data.
            wait: no effect, because the node answers when it has sealed the pages, and second copies are stored.
        """
        keys = self._keys_to_store(tokens, extras, retention, replicas)
        rows = host_rows(pages, self.page_bytes, len(keys))
        new = done = 0
        self._node.check_open()
        for part in self.parts(keys):
            new_pages, is_complete = self._put(part, rows[done : done + len(part)])
            new, done = new + new_pages, done + len(part)
            if not is_complete:
                break
        return new

    def put_async(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        retention: Retention | Sequence[Retention] = (),
        replicas: int | None = None,
    ) -> PendingPut:
        """Store the full pages of ``tokens`` without waiting for the node's answer. Returns when the connection has
        taken all pages."""
        keys = self._one_call(self._keys_to_store(tokens, extras, retention, replicas))
        put, _ = self._start_put(keys, host_rows(pages, self.page_bytes, len(keys)))
        self._puts.append(put)
        while len(self._puts) > PUTS_UNREAD_MAX:
            try:
                self._puts.popleft().result()
            except Unavailable:  # the put keeps the failure for its caller
                pass
        return put

    def _put(self, keys: Keys, rows: Rows) -> tuple[int, bool]:
        """Put these pages. Return the number of new ones, and whether all are stored now."""
        put, first = self._start_put(keys, rows)
        try:
            new = put.result()
        except NodeUnavailable:  # the connection was lost: pages that were stored since then are from this put
            put, second = self._start_put(keys, rows)
            new = put.result() + max(0, second - first)
            first = second
        return new, first + put.stored == len(keys)

    def _start_put(self, keys: Keys, rows: Rows) -> tuple[RemotePut, int]:
        """Start putting the pages that are not in DRAM. Return the put, and the number of leading pages in DRAM."""
        self._node.check_open()
        put, stored = RemotePut(self._node), 0
        if len(keys):
            reply = self._lookup(keys)
            stored = min(reply.pages - reply.nvme_pages, len(keys))
        if stored < len(keys):
            put.start(pb.WriteBegin(pages=self.page_message(keys[stored:])), rows[stored:])
        return put, stored

    # --- leases, and layers -----------------------------------------------------------------------------------------

    def _lease(self, keys: Keys, ttl_s: float) -> RemoteLease:
        return RemoteLease(self._node, self.layout, self._one_call(keys), ttl_s, self.page_message)

    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> RemoteWriter:
        return RemoteWriter(self._node, shard, self._one_call(keys), ttl_s, group, self.page_message)

    def _reader(self, keys: Keys, timeout_s: float) -> RemoteReader:
        return RemoteReader(self._node, self.layout, self._one_call(keys), timeout_s, self.page_message)


def _media_bytes(keys: Keys) -> int:
    """Return the size of the longest media digest of a page in a request, with its overhead."""
    return 8 + max(map(len, keys.media), default=0) if keys.media is not None else 0
