"""The interface of transports between nodes, and the one over TCP.

Transport: a way in which pages come from another node. One class each; a process has a table of them.

What a node offers stands in the catalog by the names of that table, so that a transport more is a class and a row
(``cluster.page_mover``). Which one a pull takes is decided and done by ``page_mover``.

Pulling: the pages of one READ, received into their final place and verified there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.errors import Unavailable
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
RATE_MIN: Final = 16 << 20  # bytes per second: a source that is slower is given up as a silent one
VERIFY_BYTES: Final = 512 << 10  # are received, then verified, where a page is not larger
Rows = npt.NDArray[np.uint8]
Places = Rows | list[Rows]
"""Where pages go: one array ``[pages, length]``, or one contiguous row ``[length]`` per page."""


@dataclass
class Pulled:
    """What one READ brought.

    Attributes:
        pages: leading ones that are in their place, verified.
        reason: why not more, "" where all; as ``Match.reason`` says it.
        tiers: how many of them came from which tier of the source.
        touched: pages that anything was written to. Those after ``pages`` hold no page.
    """

    pages: int = 0
    reason: str = ""
    tiers: dict[Tier, int] = field(default_factory=dict)
    touched: int = 0

    def add(self, more: Pulled) -> None:
        """What was read of the pages after these."""
        self.touched = self.pages + more.touched
        self.pages += more.pages
        self.reason = more.reason
        for tier, pages in more.tiers.items():
            self.tiers[tier] = self.tiers.get(tier, 0) + pages


def pull(connection: DataConnection, request: ReadRequest, rows: Places, deadline_s: float) -> Pulled:
    """Read these pages over one connection. ``send_read`` and ``receive_pages``, one after the other."""
    return receive_pages(connection, send_read(connection, request, deadline_s), request, rows, deadline_s)


def send_read(connection: DataConnection, request: ReadRequest, deadline_s: float) -> int:
    """Ask for these pages; returns the number of the request. Raises as ``DataConnection.send``."""
    return connection.send(FrameKind.READ, *request.pack(), deadline_s=deadline_s)


def receive_pages(
    connection: DataConnection, number: int, request: ReadRequest, rows: Places, deadline_s: float
) -> Pulled:
    """Receive the reply to a request that was sent.

    Args:
        rows: where the pages go.

    Raises:
        KVStoreError: as ``DataConnection.receive_head``. Where the connection broke, any of ``rows`` may hold anything.
    """
    connection.rate_min = RATE_MIN
    pulled, sent, wrong = Pulled(), 0, len(request.keys)
    tiers: list[Tier] = []
    while True:
        head = connection.receive_head(number, FrameKind.RANGE, FrameKind.END, deadline_s=deadline_s)
        if head.kind is FrameKind.END:
            size = min(head.body_bytes, BODY_MAX[FrameKind.END])
            good, reason = unpack_end(connection.receive(size, deadline_s=deadline_s), sent)
            break
        raw = connection.receive(RANGE_HEAD_BYTES, deadline_s=deadline_s)
        found = unpack_range(raw, head.body_bytes, request, sent)
        bad = _receive_range(connection, found, request, rows, deadline_s)
        wrong = min(wrong, bad)
        tiers += [found.tier] * found.pages
        sent += found.pages
    pulled.touched = sent
    pulled.pages = min(good, wrong)
    pulled.reason = CHECKSUM if wrong < good else reason
    for tier in tiers[: pulled.pages]:
        pulled.tiers[tier] = pulled.tiers.get(tier, 0) + 1
    return pulled


def _receive_range(
    connection: DataConnection, found: RangeHead, request: ReadRequest, rows: Places, deadline_s: float
) -> int:
    """Receive and verify the pages of one RANGE, some at a time, while a cache still has them. The first that does not
    hold."""
    pieces, stop, bad = request.pieces, found.first + found.pages, len(request.keys)
    raw = connection.receive(4 * pieces * found.pages, deadline_s=deadline_s)
    sums: Sums = np.frombuffer(raw, "<u4").reshape(found.pages, pieces)
    for page, part in _places(rows, found.first, stop, max(1, VERIFY_BYTES // request.length)):
        connection.receive_into(part.data.cast("B"), deadline_s=deadline_s)
        if bad > page:  # else what came before was wrong already
            equal = sums_of(part, pieces) == sums[page - found.first : page - found.first + len(part)]
            if not equal.all():
                bad = page + int(equal.all(axis=1).argmin())
    return bad


def _places(rows: Places, first: int, stop: int, step: int) -> Iterator[tuple[int, Rows]]:
    """Where pages ``first`` to ``stop`` go: contiguous arrays ``[pages, length]``, each with its first page."""
    if isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        for page in range(first, stop, step):
            yield page, rows[page : min(page + step, stop)]
        return
    for page in range(first, stop):
        yield page, rows[page].reshape(1, -1)


class LateBytes(Unavailable):
    """Pages did not come in time, and their bytes may still land where they were to go: that memory may not be used
    again."""


class HeldPlaces(Protocol):
    """Holds the places: frames that no other writer gets, even where bytes land late."""

    def leave(self) -> Callable[[], None]:
        """Bytes may still land there. The frames stay held until what this returns was called, or this process and the
        reservation have ended."""
        ...


class Transport(Protocol):
    """One for a process; its threads share it. Life: made (nothing is opened) -> ``read``, at any time -> ``close``."""

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: HeldPlaces | None = None,
    ) -> Pulled:
        """Bring the pages of one READ from a node to their places. The leading ones that count are verified, and were
        unchanged at their source when they had been sent.

        Args:
            silence_s: for how long nothing may come, at the beginning and later.
            held: who holds the places; None: nothing may be written there once this has returned.

        Raises:
            LateBytes: only where ``held`` was told to leave the places.
            KVStoreError: it brought nothing that counts. The places may hold anything, and keep it.
        """
        ...

    def close(self) -> None:
        """End its connections."""
        ...


class TransportKind(NamedTuple):
    """A row of the table.

    Attributes:
        make: the transport, for a process that reaches data servers by these links.
        missing: why this machine has it not; "" where it has.
        guarded: whether pages travel as a data connection lets them: encrypted where it is, to whom it answers. One
            that is not has to be named in the settings of a node.
        bytes_per_s: what it is taken for until it was measured; 0: it has to be measured first. See ``TransportPlan``.
    """

    make: Callable[[PeerLinks], Transport]
    missing: Callable[[], str]
    guarded: bool = True
    bytes_per_s: float = 0.0


class TcpTransport:
    """See ``Transport``: a data connection, plain or encrypted. Every node has it."""

    def __init__(self, links: PeerLinks) -> None:
        self._links = links

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: HeldPlaces | None = None,
    ) -> Pulled:
        """See ``Transport``. A connection that fails is closed before the error leaves: nothing can arrive later."""
        return self._links.call(
            peer, deadline_s, lambda connection: pull(connection, request, places, deadline_s), silence_s
        )

    def close(self) -> None:
        """See ``Transport``. The links are others' as well, who close them."""
