"""Answers to other nodes about pages of this one: READ, LEND, CHECK and HOLD.

READ sends pages from the node's memory, its NVMe files and mounted memory, without the daemon. So pages are served even
while the daemon is busy, stopped or dead. Pages in memory are sent from their frames: the kernel copies them, and after
that their generations are compared again. Pages on NVMe are read into memory of this process, which reads the next part
while it sends the previous one.

LEND, with ATTACH and RETURN, lets other nodes read pages of memory one-sidedly (see ``wire.data``). A process that
knows an agent's metadata may read all of the node's memory, under any salt. So only nodes and operators receive it.

CHECK is passed to the daemon, and is limited to calls that verify. HOLD returns from the node's own index which pages
of a chain the node has.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import hint_read, report_damaged
from kvstore.client.local.index_lookup import locate, tiers_by_page
from kvstore.client.local.lease import RunLease, leased_runs
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.tier_reader import LowerReader, PendingRead
from kvstore.client.local.verify_hit import Run, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION
from kvstore.cluster.data_connection import Buffer, Caller, Exchange, Handler
from kvstore.cluster.directory import Locations
from kvstore.cluster.directory_messages import pack_found, unpack_hold
from kvstore.cluster.nixl import NixlAgent
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied, TooManyCalls
from kvstore.limits import ThreadShares
from kvstore.model.prefix import Keys
from kvstore.model.replica import STAMPED, TIERS, Tier
from kvstore.shm.folder import list_nodes
from kvstore.wire import control
from kvstore.wire.control import Op
from kvstore.wire.data import (
    LOAN_MS,
    RANGE_BYTES,
    FrameKind,
    LentRun,
    Loan,
    ReadRequest,
    Sums,
    pack_attached,
    pack_end,
    pack_lent,
    pack_range,
    pages_lent_max,
    sums_of,
    unpack_read,
    unpack_return,
)

NVME_BYTES: Final = 4 << 20  # bytes of pages per read from a lower tier, at least one page; a reply has two buffers
NVME_REPLIES_MAX: Final = 9  # replies that read from a lower tier at a time: two callers with four each, and a third
NVME_WAIT_S: Final = 0.2  # the longest wait for a turn; a reader considers a server dead after 0.5 s of silence
SLOW_S: Final = 0.5  # a turn passes to another reply if for this time its reader takes less than ...
SLOW_BYTES_PER_S: Final = 1 << 20  # ... this rate
BUSY: Final = "busy"  # the reason of a reply that ended because it got no turn

_STAMPED_BIT = np.uint64(STAMPED << 48)


class ReadHandler:
    """The handler of READ, for all threads. Each reply from a lower tier uses two buffers of ``NVME_BYTES``.

    Attributes:
        below: the turns at lower tiers.
    """

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self.below = ThreadShares("turns at lower tiers", "lower_tiers", NVME_REPLIES_MAX)

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Send the pages that are stored. Raises InvalidRequest, PermissionDenied."""
        request = unpack_read(body)
        exchange.caller.check_salt(request.chain.salt)
        mapped = self._node.mapped()
        if mapped is None:
            exchange.reply(FrameKind.END, pack_end(0, ABSENT))
            return
        reply = _Reply(exchange, request, mapped)
        reason = self._send(reply)
        row = mapped.row(request.chain.frame_class)
        below, hbm = reply.sent_below.total(), reply.sent_below[Tier.HBM]
        mapped.counters.got(row, len(request.keys), reply.sent - below, below - hbm, reason, hbm)
        exchange.reply(FrameKind.END, pack_end(reply.sent, reason))

    def _send(self, reply: _Reply) -> str:
        """Send pages from one tier after the other, as long as some tier continues the chain. Return why sending
        ended."""
        mapped, shape = reply.mapped, reply.request.chain.frame_class
        while True:
            rest = reply.rest()
            runs, _, reason = prove(mapped, rest, shape.page_bytes, reply.closed)
            before = reply.sent
            for run in runs:
                if not reply.send_run(run):
                    return GENERATION
            if not reason or reason not in ELSEWHERE:
                return reason
            for reader in mapped.below.values():
                reason = self._send_below(reply, reader) or reason
                if reply.done:
                    return ""
                if reason == BUSY:  # the reader has waited long enough, and does not wait for another tier
                    return reason
            if reply.sent == before:
                return reason

    def _send_below(self, reply: _Reply, reader: LowerReader) -> str:
        """Send pages from this tier. Return why sending ended, or "" if the tier has no more pages of the chain."""
        located = locate(reply.mapped, reader, reply.rest(), reply.closed)
        if not located or reader.class_at(located[0]) != reply.request.chain.frame_class:
            return ""  # no memory is allocated for a page size that a caller claims
        try:
            with self.below.turn(reply.watch.caller, NVME_WAIT_S, reply.watch):
                return reply.send_below(reader, located)
        except TooManyCalls:  # the reply ends early: the pages sent before are valid, and this server is alive
            return BUSY


class SendWatch:
    """Sends frames of a reply, and knows whether its reader takes them too slowly.

    While the reply has a turn at a lower tier, the watch is the ``limits.Holder`` of that turn. Only the time spent
    sending counts, not the time spent reading from the tier.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._progress: tuple[float, int] | None = None  # while the watch sends: a time, and the bytes sent by then

    @property
    def caller(self) -> Caller:
        """The caller, to whose share the turn counts."""
        return self._exchange.caller

    def reply(self, kind: FrameKind, *body: Buffer) -> None:
        """Send one frame, as ``Exchange.reply`` does."""
        self._progress = time.monotonic(), self._exchange.sent_bytes
        self._exchange.reply(kind, *body)
        self._progress = None

    def late(self) -> bool:
        """Return whether the reader is too slow."""
        if self._progress is None:
            return False
        (since_s, before), now_s, sent = self._progress, time.monotonic(), self._exchange.sent_bytes
        if sent - before >= SLOW_BYTES_PER_S * (now_s - since_s):
            self._progress = now_s, sent
        return now_s - since_s > SLOW_S

    def cut(self) -> None:
        """End the reader's connection."""
        self._exchange.abort()


class _Reply:
    """The reply to one READ.

    Attributes:
        sent: number of leading pages that were sent unchanged.
        sent_below: lower tier -> number of these pages that came from it.
        watch: sends the pages of lower tiers.
    """

    def __init__(self, exchange: Exchange, request: ReadRequest, mapped: MappedNode) -> None:
        self.mapped = mapped
        self.request = request
        self.closed = request.chain.closed
        self.sent = 0
        self.sent_below = Counter[Tier]()
        self._exchange = exchange
        self.watch = SendWatch(exchange)
        self._keys = mapped.in_pool(request.keys)

    @property
    def done(self) -> bool:
        """True when all requested pages are sent."""
        return self.sent == len(self._keys)

    def rest(self) -> Keys:
        """Return the keys of the pages that are not sent yet."""
        return self._keys[self.sent :] if self.sent else self._keys

    def send_run(self, run: Run) -> bool:
        """Send pages of memory. Return False if one of them changed while it was sent."""
        request, extent = self.request, run.extent
        stop_byte, step = request.offset + request.length, max(1, RANGE_BYTES // request.length)
        for first in range(0, run.length, step):
            count = min(step, run.length - first)
            frames = slice(run.frame + first, run.frame + first + count)
            rows = extent.views[frames, request.offset : stop_byte]
            buffers: list[Buffer] = [rows.data] if rows.flags.c_contiguous else [row.data for row in rows]
            head = pack_range(self.sent, Tier.DRAM, sums_for(request, run, frames))
            self._exchange.reply(FrameKind.RANGE, head, *buffers)
            words = run.words[8 * first : 8 * (first + count)]
            if extent.words[frames].tobytes() != words:
                self.sent += max(0, run.unchanged() - first)
                return False
            self.sent += count
        return True

    def send_below(self, reader: LowerReader, located: list[bytes]) -> str:
        """Send pages of a lower tier. Return why some of them were not sent, or ""."""
        request, mapped = self.request, self.mapped
        shape = request.chain.frame_class
        step = max(1, NVME_BYTES // shape.page_bytes)
        memory = [empty((min(step, len(located)), shape.page_bytes)) for _ in (0, 1)]
        keys = self.rest()[: len(located)]

        def reads() -> Iterator[PendingRead]:
            for turn, first in enumerate(range(0, len(located), step)):
                part = slice(first, min(first + step, len(located)))
                yield reader.start(located[part], keys[part], shape, memory[turn % 2][: part.stop - part.start])

        turns = reads()
        current: PendingRead | None = next(turns)
        rows = memory
        while current is not None:
            pages, why = current.result(mapped.timeout_s)
            if current.damaged:
                report_damaged(mapped, current.damaged)
            hint_read(mapped, current.addresses)
            current = next(turns, None) if not why else None
            self._send_rows(reader.tier, rows[0][:pages])
            rows = rows[::-1]
            if why:
                return why
        return ""

    def _send_rows(self, tier: Tier, rows: Rows) -> None:
        request = self.request
        part = rows[:, request.offset : request.offset + request.length]
        step = max(1, RANGE_BYTES // request.length)
        for first in range(0, len(rows), step):
            batch = part[first : first + step]
            buffers: list[Buffer] = [batch.data] if batch.flags.c_contiguous else [row.data for row in batch]
            head = pack_range(self.sent, tier, sums_of(batch, request.pieces))
            self.watch.reply(FrameKind.RANGE, head, *buffers)
            self.sent += len(batch)
            self.sent_below[tier] += len(batch)


def sums_for(request: ReadRequest, run: Run, frames: slice) -> Sums:
    """Return the stored checksums of pages if they cover the requested range; otherwise compute checksums."""
    extent, shape, pieces = run.extent, request.chain.frame_class, request.pieces
    layer = shape.page_bytes // shape.layers
    is_covered = request.offset % layer == 0 and request.length == pieces * layer and extent.frame_class == shape
    if is_covered and (extent.info[frames] & _STAMPED_BIT).all():
        first = request.offset // layer
        return extent.checksums[frames, first : first + pieces]
    return sums_of(extent.views[frames, request.offset : request.offset + request.length], pieces)


class LendHandler:
    """The handlers of ATTACH, LEND and RETURN of one node, for all threads.

    Args:
        make: makes an agent, and may raise Unavailable. It is called at the first ATTACH, and again for each new memory
            of the node.
    """

    def __init__(self, node: LocalNode, make: Callable[[], NixlAgent]) -> None:
        self._node = node
        self._make = make
        self._lock = threading.Lock()
        self._agent_memory: MappedNode | None = None  # the memory that the agent has registered
        self._metadata = b""
        self._agents: list[NixlAgent] = []  # keeps the current agent; the last one ends with its memory

    @property
    def handlers(self) -> dict[FrameKind, Handler]:
        """The handlers of these requests, for ``cluster.data_listener``."""
        return {FrameKind.ATTACH: self.attach, FrameKind.LEND: self.lend, FrameKind.RETURN: self.take_back}

    def attach(self, exchange: Exchange, body: memoryview) -> None:
        """Answer ATTACH. Raises PermissionDenied, and Unavailable if there is no agent."""
        mapped = self._mapped(exchange)
        with self._lock:
            if self._agent_memory is not mapped:
                agent = self._make()
                agent.register(mapped.dram.segment.data)
                self._agent_memory, self._metadata, self._agents = mapped, agent.metadata(), [agent]
            metadata = self._metadata
        exchange.reply(FrameKind.ATTACHED, pack_attached(mapped.incarnation, metadata))

    def lend(self, exchange: Exchange, body: memoryview) -> None:
        """Answer LEND. Raises InvalidRequest, PermissionDenied, and Unavailable if the node grants no lease."""
        request = unpack_read(body)
        exchange.caller.check_salt(request.chain.salt)
        mapped = self._mapped(exchange)
        keys, shape = mapped.in_pool(request.keys)[: pages_lent_max(request)], request.chain.frame_class
        runs, _, reason = prove(mapped, keys, shape.page_bytes, request.chain.closed)
        lease = RunLease(mapped, LOAN_MS)
        if runs:
            runs, reason = leased_runs(runs, lease.take(runs), reason)
        if len(keys) < len(request.keys):
            reason = reason or ABSENT  # the reader has to request the rest again
        exchange.reply(FrameKind.LENT, pack_lent(_loan(mapped, request, runs, lease.number, reason)))

    def take_back(self, exchange: Exchange, body: memoryview) -> None:
        """Answer RETURN. Raises WireError, PermissionDenied."""
        loan, mapped, pages = unpack_return(body), self._mapped(exchange), 0
        for run in loan.runs:
            extent, words = mapped.dram.extent(run.extent), loan.words[pages : pages + run.pages].tobytes()
            unchanged = 0
            if extent is not None and run.frame + run.pages <= len(extent.words):
                unchanged = Run(extent, run.frame, 0, run.pages, words).unchanged()
            pages += unchanged
            if unchanged < run.pages:
                break
        RunLease(mapped, LOAN_MS, loan.lease).release()
        exchange.reply(FrameKind.RETURNED, pack_end(pages, "" if pages == loan.pages else GENERATION))

    def _mapped(self, exchange: Exchange) -> MappedNode:
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators may read a node's memory directly")
        mapped = self._node.mapped()
        if mapped is None:
            raise NodeUnavailable(f"{self._node.name}: its memory is gone")
        return mapped


def _loan(mapped: MappedNode, request: ReadRequest, runs: list[Run], lease: int, reason: str) -> Loan:
    if not runs:
        return Loan(mapped.incarnation, lease, sums=np.zeros((0, request.pieces), np.uint32), reason=reason)
    lent_runs = []
    for run in runs:
        extent = run.extent
        frames, stride = len(extent.views), extent.views.strides[0]
        lent_runs.append(LentRun(extent.views.ctypes.data, stride, frames, extent.number, run.frame, run.length))
    words = np.frombuffer(b"".join([run.words for run in runs]), np.uint64)
    sums = [sums_for(request, run, slice(run.frame, run.frame + run.length)) for run in runs]
    return Loan(mapped.incarnation, lease, lent_runs, words, np.concatenate(sums), reason)


CALLS: Final = frozenset(("stats", "scrub", "scrub_status", "verify", "heard"))
"""The admin calls that verify a node. ``scrub`` drops damaged pages."""
ANSWER_S: Final = 60.0
HEARTBEAT_NS_MAX: Final = 3_000_000_000  # thirty ticks of the daemon


class CheckHandler:
    """The handler of CHECK: passes a JSON object ``{"call": ...}`` to the daemon, and returns its answer."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Answer CHECK. Raises PermissionDenied, InvalidRequest, and NodeUnavailable if the daemon is not running."""
        if not exchange.caller.operator:
            raise PermissionDenied("only operators may verify a node")
        request: dict[str, Any] = control.unpack_json(body)
        call = request.get("call")
        if not isinstance(call, str) or call not in CALLS:
            raise InvalidRequest("call", f"must be one of {', '.join(sorted(CALLS))} (got {call!r})")
        mapped = self._node.writable()
        is_running = dict(list_nodes(self._node.path.parent)).get(self._node.name, False)
        if not is_running or time.monotonic_ns() - mapped.header.heartbeat_ns > HEARTBEAT_NS_MAX:
            raise NodeUnavailable(f"{self._node.name}: its daemon is not running, or hangs")
        reply = mapped.exchange(Op.ADMIN, body=[control.pack_json(request)], timeout_s=ANSWER_S)
        exchange.reply(FrameKind.CHECKED, bytes(reply.body))


NO_TOKENS = np.zeros(0, np.uint32)


class HoldHandler:
    """The handler of HOLD of one node, for all threads.

    The caller names a root that it may read. The keys get the tag of this root, so that they cannot match a page of
    another root. The reply proves nothing: pages are proven when they are read.
    """

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Answer HOLD. Raises PermissionDenied if the caller must not read these pages."""
        namespace, links, closed = unpack_hold(body)
        exchange.caller.check_salt(namespace.salt)
        mapped, tiers = self._node.mapped(), dict[int, int]()
        if mapped is not None and links:
            root, tag = namespace.root, None if namespace.holds_objects else b""
            keys = mapped.in_pool(Keys(1, root, root, links, NO_TOKENS, None, tag=tag))
            tiers = {page: TIERS.index(tier) for page, tier in tiers_by_page(mapped, keys, closed).items()}
        pages = np.array(sorted(tiers), np.int64)
        ranks = np.array([tiers[page] for page in pages.tolist()], np.uint8)
        listed = Locations(pages, np.zeros(len(pages), np.int64), ranks, [self._node.name])
        exchange.reply(FrameKind.FOUND, pack_found(listed))
