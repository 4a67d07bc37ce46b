"""Answers other nodes about pages of this one: READ, LEND, CHECK and HOLD.

ReadHandler: answers READ from a node's memory and its NVMe files, as any process of that machine reads them.

It asks the daemon nothing: a busy, stopped or dead one serves pages all the same. Pages in memory are sent from where
they lie; the kernel copies them, and when it has, their generations are compared once more. Pages on NVMe come through
memory of our own, the next part on its way from the device while one is on its way to the network.

LendHandler: answers ATTACH, LEND and RETURN: pages of a node's memory that other nodes read one-sidedly.

See ``wire.data``. A process that knows an agent's metadata may read all of the node's memory, whatever salt the pages
are under. So only nodes and operators receive it.

CheckHandler: answers CHECK. The data server passes it to the node's daemon, and only what changes no page.

HoldHandler: answers HOLD, which pages of a chain this node has itself, from the node's own index.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from kvstore.client.buffers import Rows
from kvstore.client.local.hints import tell_damaged, tell_read
from kvstore.client.local.index_lookup import locate, tiers_by_page
from kvstore.client.local.lease import RunLease, still
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.local.tier_reader import LowerReader, PendingRead
from kvstore.client.local.verify_hit import Run, prove
from kvstore.client.match import ABSENT, ELSEWHERE, GENERATION
from kvstore.cluster.data_connection import Buffer, Caller, Exchange, Handler
from kvstore.cluster.directory import TIERS, Locations
from kvstore.cluster.directory_messages import pack_found, unpack_hold
from kvstore.cluster.nixl import NixlAgent
from kvstore.device.host_memory import empty
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied, TooManyCalls
from kvstore.limits import ThreadShares
from kvstore.model.prefix import Keys
from kvstore.model.replica import STAMPED, Tier
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

NVME_BYTES: Final = 4 << 20  # of the pages of one read from a lower tier, where a page is not larger; two per reply
NVME_REPLIES_MAX: Final = 9  # that read from a lower tier at a time: four of each of two callers, one for a third
NVME_WAIT_S: Final = 0.2  # until one more may: a reader takes a server that says nothing for 0.5 s for dead
SLOW_S: Final = 0.5  # in which a reader of a lower tier takes less than ...
SLOW_BYTES_PER_S: Final = 1 << 20  # ... this, whose turn is then another's
BUSY: Final = "busy"  # why a reply ends where there was no turn

_STAMPED_BIT = np.uint64(STAMPED << 48)


class ReadHandler:
    """The handler of READ of one node. Threads share it; holds two pieces of memory per reply from a lower tier."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._below = ThreadShares("turns at lower tiers", "lower_tiers", NVME_REPLIES_MAX)

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises InvalidRequest, PermissionDenied; what is not there is a shorter answer."""
        request = unpack_read(body)
        exchange.caller.check_salt(request.chain.salt)
        mapped = self._node.mapped()
        if mapped is None:
            exchange.reply(FrameKind.END, pack_end(0, ABSENT))
            return
        reply = _Reply(exchange, request, mapped)
        reason = self._send(reply)
        row = mapped.row(request.chain.frame_class)
        below, hbm = reply.from_below.total(), reply.from_below[Tier.HBM]
        mapped.counters.got(row, len(request.keys), reply.sent - below, below - hbm, reason, hbm)
        exchange.reply(FrameKind.END, pack_end(reply.sent, reason))

    def _send(self, reply: _Reply) -> str:
        """Send what is there, tier after tier, as long as one goes on where another ended; why it is not all."""
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
                if reason == BUSY:  # for pages of another tier the reader need not wait once more
                    return reason
            if reply.sent == before:
                return reason

    def _send_below(self, reply: _Reply, reader: LowerReader) -> str:
        """Send what that tier has; why it ended there, where that is not for want of pages."""
        located = locate(reply.mapped, reader, reply.rest(), reply.closed)
        if not located or reader.class_at(located[0]) != reply.request.chain.frame_class:
            return ""  # no memory is allocated for a page size that a caller claims
        try:
            with self._below.turn(reply.caller, NVME_WAIT_S, reply):
                return reply.send_below(reader, located)
        except TooManyCalls:  # a shorter answer: what came before counts, and so does this server
            return BUSY


class _Reply:
    """The reply to one READ while it is sent. A ``limits.Holder`` while it reads from a lower tier.

    Attributes:
        sent: leading pages that were sent, and held still.
        from_below: how many of them came from which other tier than memory.
    """

    def __init__(self, exchange: Exchange, request: ReadRequest, mapped: Mapped) -> None:
        self.mapped = mapped
        self.request = request
        self.closed = request.chain.closed
        self.sent = 0
        self.from_below = Counter[Tier]()
        self._exchange = exchange
        self._seen: tuple[float, int] | None = None  # when sending was looked at, and what had been sent
        self._keys = mapped.in_pool(request.keys)

    @property
    def caller(self) -> Caller:
        """The owner of its turn."""
        return self._exchange.caller

    def late(self) -> bool:
        """See ``limits.Holder``: while pages are sent, and not while they are read."""
        if self._seen is None:
            return False
        (since_s, before), now_s, sent = self._seen, time.monotonic(), self._exchange.sent_bytes
        if sent - before >= SLOW_BYTES_PER_S * (now_s - since_s):
            self._seen = now_s, sent
        return now_s - since_s > SLOW_S

    def cut(self) -> None:
        """See ``limits.Holder``. The reader's connection ends."""
        self._exchange.abort()

    @property
    def done(self) -> bool:
        """Whether all is sent."""
        return self.sent == len(self._keys)

    def rest(self) -> Keys:
        """What is not sent yet."""
        return self._keys[self.sent :] if self.sent else self._keys

    def send_run(self, run: Run) -> bool:
        """Send pages of memory; False where one did not hold still."""
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
        """Send pages of a lower tier; why not all of these ("" where all)."""
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
        now: PendingRead | None = next(turns)
        rows = memory
        while now is not None:
            pages, why = now.result(mapped.timeout_s)
            if now.damaged:
                tell_damaged(mapped, now.damaged)
            tell_read(mapped, now.addresses)
            now = next(turns, None) if not why else None
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
            some = part[first : first + step]
            buffers: list[Buffer] = [some.data] if some.flags.c_contiguous else [row.data for row in some]
            head = pack_range(self.sent, tier, sums_of(some, request.pieces))
            self._seen = time.monotonic(), self._exchange.sent_bytes
            self._exchange.reply(FrameKind.RANGE, head, *buffers)
            self._seen = None
            self.sent += len(some)
            self.from_below[tier] += len(some)


def sums_for(request: ReadRequest, run: Run, frames: slice) -> Sums:
    """The checksums that pages were stored with, where they tell of this range; else computed now."""
    extent, shape, pieces = run.extent, request.chain.frame_class, request.pieces
    layer = shape.page_bytes // shape.layers
    whole = request.offset % layer == 0 and request.length == pieces * layer and extent.frame_class == shape
    if whole and (extent.info[frames] & _STAMPED_BIT).all():
        first = request.offset // layer
        return extent.checksums[frames, first : first + pieces]
    return sums_of(extent.views[frames, request.offset : request.offset + request.length], pieces)


class LendHandler:
    """For one node. Threads share it.

    Args:
        make: makes an agent; called at the first request for it, and for each new memory of the node. Raises
            Unavailable.
    """

    def __init__(self, node: LocalNode, make: Callable[[], NixlAgent]) -> None:
        self._node = node
        self._make = make
        self._lock = threading.Lock()
        self._of: Mapped | None = None
        self._metadata = b""
        self._agents: list[NixlAgent] = []  # the last one alone; an older one ends with its memory

    @property
    def handlers(self) -> dict[FrameKind, Handler]:
        """For ``cluster.data_listener``."""
        return {FrameKind.ATTACH: self.attach, FrameKind.LEND: self.lend, FrameKind.RETURN: self.take_back}

    def attach(self, exchange: Exchange, body: memoryview) -> None:
        """Answer ATTACH. Raises PermissionDenied; Unavailable where there is no agent."""
        mapped = self._mapped(exchange)
        with self._lock:
            if self._of is not mapped:
                agent = self._make()
                agent.register(mapped.dram.segment.data)
                self._of, self._metadata, self._agents = mapped, agent.metadata(), [agent]
            metadata = self._metadata
        exchange.reply(FrameKind.ATTACHED, pack_attached(mapped.incarnation, metadata))

    def lend(self, exchange: Exchange, body: memoryview) -> None:
        """Answer LEND. Raises InvalidRequest, PermissionDenied; Unavailable where the node gives no lease."""
        request = unpack_read(body)
        exchange.caller.check_salt(request.chain.salt)
        mapped = self._mapped(exchange)
        keys, shape = mapped.in_pool(request.keys)[: pages_lent_max(request)], request.chain.frame_class
        runs, _, reason = prove(mapped, keys, shape.page_bytes, request.chain.closed)
        lease = RunLease(mapped, LOAN_MS)
        if runs:
            runs, reason = still(runs, lease.take(runs), reason)
        if len(keys) < len(request.keys):
            reason = reason or ABSENT  # the rest is to be asked for again
        exchange.reply(FrameKind.LENT, pack_lent(_loan(mapped, request, runs, lease.number, reason)))

    def take_back(self, exchange: Exchange, body: memoryview) -> None:
        """Answer RETURN. Raises WireError, PermissionDenied."""
        loan, mapped, pages = unpack_return(body), self._mapped(exchange), 0
        for run in loan.runs:
            extent, words = mapped.dram.extent(run.extent), loan.words[pages : pages + run.pages].tobytes()
            held = 0
            if extent is not None and run.frame + run.pages <= len(extent.words):
                held = Run(extent, run.frame, 0, run.pages, words).unchanged()
            pages += held
            if held < run.pages:
                break
        RunLease(mapped, LOAN_MS, loan.lease).release()
        exchange.reply(FrameKind.RETURNED, pack_end(pages, "" if pages == loan.pages else GENERATION))

    def _mapped(self, exchange: Exchange) -> Mapped:
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators may read a node's memory directly")
        mapped = self._node.mapped()
        if mapped is None:
            raise NodeUnavailable(f"{self._node.name}: its memory is gone")
        return mapped


def _loan(mapped: Mapped, request: ReadRequest, runs: list[Run], lease: int, reason: str) -> Loan:
    if not runs:
        return Loan(mapped.incarnation, lease, sums=np.zeros((0, request.pieces), np.uint32), reason=reason)
    lent = []
    for run in runs:
        extent = run.extent
        frames, stride = len(extent.views), extent.views.strides[0]
        lent.append(LentRun(extent.views.ctypes.data, stride, frames, extent.number, run.frame, run.length))
    words = np.frombuffer(b"".join([run.words for run in runs]), np.uint64)
    sums = [sums_for(request, run, slice(run.frame, run.frame + run.length)) for run in runs]
    return Loan(mapped.incarnation, lease, lent, words, np.concatenate(sums), reason)


CALLS: Final = frozenset(("stats", "scrub", "scrub_status", "verify", "heard"))
"""The admin calls by which a node is verified; ``scrub`` drops what is damaged."""
ANSWER_S: Final = 60.0
BEAT_NS_MAX: Final = 3_000_000_000  # thirty ticks of the daemon


class CheckHandler:
    """The handler of CHECK of one node: a JSON object ``{"call": ...}``, and the daemon's answer to it."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises PermissionDenied, InvalidRequest; NodeUnavailable where the daemon is away."""
        if not exchange.caller.operator:
            raise PermissionDenied("only operators may have a node verified")
        request: dict[str, Any] = control.unpack_json(body)
        call = request.get("call")
        if not isinstance(call, str) or call not in CALLS:
            raise InvalidRequest("call", f"is one of {', '.join(sorted(CALLS))}")
        mapped = self._node.writable()
        lives = dict(list_nodes(self._node.path.parent)).get(self._node.name, False)
        if not lives or time.monotonic_ns() - mapped.header.heartbeat_ns > BEAT_NS_MAX:
            raise NodeUnavailable(f"{self._node.name}: its daemon is not running, or hangs")
        reply = mapped.exchange(Op.ADMIN, body=[control.pack_json(request)], timeout_s=ANSWER_S)
        exchange.reply(FrameKind.CHECKED, bytes(reply.body))


NO_TOKENS = np.zeros(0, np.uint32)


class HoldHandler:
    """The handler of HOLD of one node. Threads share it.

    A key that is asked for gets the tag of the root that the caller names and may read, so that it finds no other
    root's page. Nothing is proven: pages are, when they are read.
    """

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises PermissionDenied where these pages are not the caller's."""
        namespace, links, closed = unpack_hold(body)
        exchange.caller.check_salt(namespace.salt)
        mapped, tiers = self._node.mapped(), dict[int, int]()
        if mapped is not None and links:
            keys = mapped.in_pool(Keys(1, namespace.root, namespace.root, links, NO_TOKENS, None))
            tiers = {page: TIERS.index(tier) for page, tier in tiers_by_page(mapped, keys, closed).items()}
        pages = np.array(sorted(tiers), np.int64)
        ranks = np.array([tiers[page] for page in pages.tolist()], np.uint8)
        listed = Locations(pages, np.zeros(len(pages), np.int64), ranks, [self._node.name])
        exchange.reply(FrameKind.FOUND, pack_found(listed))
