"""Pulling: the pages of one READ, received into their final place and verified there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Tier
from kvstore.transfer.reading import (
    RANGE_HEAD_BYTES,
    RangeHead,
    ReadRequest,
    Sums,
    sums_of,
    unpack_end,
    unpack_range,
)
from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import BODY_MAX, FrameKind

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
