"""The interface of transports between nodes, and the one over TCP.

A node's catalog entry names the transports that it offers. ``cluster.page_mover`` has the table of transports, and
chooses one for each read. To add a transport, write a class and add a row to that table. ``pull`` reads the pages of
one READ over a data connection into their final place, and verifies them there.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.cluster.data_connection import DataConnection, wait_for_any
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.replica import Tier
from kvstore.wire.data import (
    BODY_MAX,
    RANGE_HEAD_BYTES,
    FrameKind,
    RangeHead,
    ReadRequest,
    Sums,
    sums_of,
    unpack_end,
    unpack_range,
)

CHECKSUM: Final = "checksum"
RATE_MIN: Final = 16 << 20  # bytes per second; a slower source is given up like a silent one
VERIFY_BYTES: Final = 512 << 10  # bytes that are received before they are verified; at least one page
SILENCE_LEFT_S: Final = 0.05  # the rest of the time that a node may be silent, if it was silent before
HEDGES_PART: Final = 0.03  # second requests for each request, at most
HEDGES_CREDIT_MAX: Final = 3.0  # second requests that may follow each other
DELAYS_MIN, DELAYS_MAX = 20, 200  # replies of a data server from which its usual delay is known; replies to remember
PEERS_MAX: Final = 256  # data servers whose delays are remembered
Rows = npt.NDArray[np.uint8]
Places = Rows | list[Rows]
"""Where pages go: one array ``[pages, length]``, or one contiguous row ``[length]`` per page."""


@dataclass
class PullResult:
    """The result of one READ.

    Attributes:
        pages: number of leading pages that are in their place and verified.
        reason: why there are no more pages, in the words of ``Match.reason``; "" if all were read.
        tiers: tier of the source -> number of pages that came from it.
        dirty: number of leading places that might have been written to. The places after ``pages`` do not hold a page.
    """

    pages: int = 0
    reason: str = ""
    tiers: dict[Tier, int] = field(default_factory=dict)
    dirty: int = 0

    def add(self, more: PullResult) -> None:
        """Add the result for the pages that follow."""
        self.dirty = self.pages + more.dirty
        self.pages += more.pages
        self.reason = more.reason
        for tier, pages in more.tiers.items():
            self.tiers[tier] = self.tiers.get(tier, 0) + pages


def pull(connection: DataConnection, request: ReadRequest, rows: Places, deadline_s: float) -> PullResult:
    """Read these pages over one connection: ``send_read``, then ``receive_pages``."""
    return receive_pages(connection, send_read(connection, request, deadline_s), request, rows, deadline_s)


def send_read(connection: DataConnection, request: ReadRequest, deadline_s: float) -> int:
    """Send a READ, and return its number. Raises as ``DataConnection.send``."""
    return connection.send(FrameKind.READ, *request.pack(), deadline_s=deadline_s)


def receive_pages(
    connection: DataConnection, number: int, request: ReadRequest, rows: Places, deadline_s: float
) -> PullResult:
    """Receive the reply to a READ.

    Args:
        rows: where the pages go.

    Raises:
        KVStoreError: as ``DataConnection.receive_head``. If the connection broke, ``rows`` may hold anything.
    """
    connection.rate_min = RATE_MIN
    result, received, wrong = PullResult(), 0, len(request.keys)
    tiers: list[Tier] = []
    while True:
        head = connection.receive_head(number, FrameKind.RANGE, FrameKind.END, deadline_s=deadline_s)
        if head.kind is FrameKind.END:
            size = min(head.body_bytes, BODY_MAX[FrameKind.END])
            good, reason = unpack_end(connection.receive(size, deadline_s=deadline_s), received)
            break
        raw = connection.receive(RANGE_HEAD_BYTES, deadline_s=deadline_s)
        range_head = unpack_range(raw, head.body_bytes, request, received)
        bad = _receive_range(connection, range_head, request, rows, deadline_s)
        wrong = min(wrong, bad)
        tiers += [range_head.tier] * range_head.pages
        received += range_head.pages
    result.dirty = received
    result.pages = min(good, wrong)
    result.reason = CHECKSUM if wrong < good else reason
    for tier in tiers[: result.pages]:
        result.tiers[tier] = result.tiers.get(tier, 0) + 1
    return result


def _receive_range(
    connection: DataConnection, head: RangeHead, request: ReadRequest, rows: Places, deadline_s: float
) -> int:
    """Receive and verify the pages of one RANGE, a few at a time, while they are in a CPU cache. Returns the first page
    with a wrong checksum, or ``len(request.keys)``."""
    pieces, stop, bad = request.pieces, head.first + head.pages, len(request.keys)
    raw = connection.receive(4 * pieces * head.pages, deadline_s=deadline_s)
    sums: Sums = np.frombuffer(raw, "<u4").reshape(head.pages, pieces)
    for page, part in _places(rows, head.first, stop, max(1, VERIFY_BYTES // request.length)):
        connection.receive_into(part.data.cast("B"), deadline_s=deadline_s)
        if bad > page:  # otherwise an earlier page was wrong already
            equal = sums_of(part, pieces) == sums[page - head.first : page - head.first + len(part)]
            if not equal.all():
                bad = page + int(equal.all(axis=1).argmin())
    return bad


def _places(rows: Places, first: int, stop: int, step: int) -> Iterator[tuple[int, Rows]]:
    """Yield the places of pages ``first`` to ``stop`` as contiguous arrays ``[pages, length]``, each with its first
    page."""
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        for page in range(first, stop, step):
            yield page, rows[page : min(page + step, stop)]
        return
    for page in range(first, stop):
        yield page, rows[page].reshape(1, -1)


class LateBytes(Unavailable):
    """Pages did not arrive in time. Their bytes may still be written to their places, so that memory must not be
    reused."""


class PlaceHolder(Protocol):
    """Holds the places: frames that no other writer gets, even if bytes arrive late."""

    def leave(self) -> Callable[[], None]:
        """Keep the frames, because bytes may still arrive. They stay reserved until the returned function is called, or
        until this process and the reservation have ended."""
        ...


class Transport(Protocol):
    """A transport, one per process; threads share it. Life: made (opens nothing) -> ``read``, at any time ->
    ``close``."""

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        holder: PlaceHolder | None = None,
        second: PoolNode | None = None,
    ) -> PullResult:
        """Read the pages of one READ from a node into their places. The leading pages that the result counts are
        verified, and were still unchanged at their source after they were sent.

        Args:
            silence_s: longest time without arriving bytes, at the beginning and later.
            holder: holds the places. With None, nothing may be written to the places after this call returns.
            second: another node that has the pages. A transport may read from it if the first one answers late.

        Raises:
            LateBytes: only with ``holder``, after ``holder.leave`` was called.
            KVStoreError: no page was read. The places may hold anything, and are not written to later.
        """
        ...

    def close(self) -> None:
        """Close its connections."""
        ...


class TransportKind(NamedTuple):
    """A row of the table of transports.

    Attributes:
        make: makes the transport, for a process that reaches data servers through these links.
        missing: returns why the transport is unavailable on this machine, or "".
        guarded: whether pages are protected like a data connection: encrypted if it is, and only for admitted callers.
            A transport that is not guarded has to be named in a node's settings.
        bytes_per_s: the expected speed until it is measured; 0 if it has to be measured first. See ``TransportPlan``.
    """

    make: Callable[[PeerLinks], Transport]
    missing: Callable[[], str]
    guarded: bool = True
    bytes_per_s: float = 0.0


class Hedges:
    """Decides when a READ is also sent to a second node: if the first bytes of the reply take longer than 95 % of the
    recent replies of that node did, and not for more than ``HEDGES_PART`` of all READs. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delays: OrderedDict[str, deque[float]] = OrderedDict()
        self._credit = 1.0

    def wait_s(self, process: str) -> float | None:
        """Return how long to wait for the first bytes; None if too little is known about this data server."""
        with self._lock:
            self._credit = min(HEDGES_CREDIT_MAX, self._credit + HEDGES_PART)
            delays = self._delays.get(process, ())
            return sorted(delays)[int(0.95 * len(delays))] if len(delays) >= DELAYS_MIN else None

    def note(self, process: str, delay_s: float) -> None:
        """Record how long the first bytes of a reply took."""
        with self._lock:
            delays = self._delays.setdefault(process, deque(maxlen=DELAYS_MAX))
            self._delays.move_to_end(process)
            delays.append(delay_s)
            while len(self._delays) > PEERS_MAX:
                self._delays.popitem(last=False)

    def take(self) -> bool:
        """Return whether a second request may be sent now."""
        with self._lock:
            if self._credit < 1.0:
                return False
            self._credit -= 1.0
            return True


class TcpTransport:
    """A data connection, plain or encrypted. Every node has it. See ``Transport``."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links
        self.hedges = Hedges()

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        holder: PlaceHolder | None = None,
        second: PoolNode | None = None,
    ) -> PullResult:
        """See ``Transport``. A failed connection is closed before the error is raised, so nothing arrives later."""
        if second is None:
            return self._links.call(
                peer, deadline_s, lambda connection: pull(connection, request, places, deadline_s), silence_s
            )

        def use(connection: DataConnection) -> PullResult:
            return self._hedged(connection, peer, second, request, places, deadline_s, silence_s)

        return self._links.call(peer, deadline_s, use, silence_s)

    def _hedged(
        self,
        connection: DataConnection,
        peer: PoolNode,
        second: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
    ) -> PullResult:
        """Read from ``peer``. If its reply does not begin in time, read from whichever node answers first."""
        began_s = time.monotonic()
        number, until_s = send_read(connection, request, deadline_s), began_s + connection.silence_s
        wait_s = self.hedges.wait_s(peer.process)
        is_ready = wait_s is None or wait_for_any([connection], min(wait_s, silence_s / 2)) is not None
        if not is_ready and not self._links.dead(second) and self.hedges.take():
            result = self._read_second(connection, second, request, places, deadline_s, until_s)
            if result is not None:
                connection.broken = True  # its reply may still arrive, so the connection is closed
                self.hedges.note(peer.process, time.monotonic() - began_s)
                return result
        if wait_for_any([connection], until_s - time.monotonic()) is None:
            connection.silence_s = SILENCE_LEFT_S  # it was silent all the time
        self.hedges.note(peer.process, time.monotonic() - began_s)
        return receive_pages(connection, number, request, places, deadline_s)

    def _read_second(
        self,
        first: DataConnection,
        second: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        until_s: float,
    ) -> PullResult | None:
        """Read from a second node, unless the first one answers earlier, or none does until ``until_s``. Return None if
        the pages must be received from the first one."""
        try:
            with self._links.to(second, deadline_s, max(SILENCE_LEFT_S, until_s - time.monotonic())) as connection:
                number = send_read(connection, request, deadline_s)
                if wait_for_any([first, connection], until_s - time.monotonic()) is connection:
                    result = receive_pages(connection, number, request, places, deadline_s)
                    return result if result.pages == len(request.keys) else None
                connection.broken = True  # the reply is not needed, so the connection is closed
        except KVStoreError:
            pass  # the first one may still answer
        return None

    def close(self) -> None:
        """Do nothing: the owner of the links closes them."""
