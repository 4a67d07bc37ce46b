"""LEND and RETURN: pages of a node's memory that another process reads one-sidedly. Pure.

The node proves the pages, keeps their frames under a lease, and sends their addresses and checksums. The reader gives
them back when it has read them, and is told which were unchanged until then: nothing counts before that::

    ATTACH     -
    ATTACHED   incarnation of the memory u64 | what an agent has to know of the node's agent
    LEND       as READ
    LENT       incarnation u64, lease u64, runs u32, pages u32, checksums of a page u32 | runs | words u64[pages] |
               checksums u32[pages, ...] | why not more
    RETURN     lease u64, runs u32, pages u32 | runs | words u64[pages]
    RETURNED   as END

A run: address of its extent's first frame u64, bytes from frame to frame u32, frames of the extent u32, extent u32,
first frame u32, pages u32.
``words`` (generation and state of each frame) go back as they came, so that the node remembers nothing but the lease.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.transfer.reading import READ_PAGES_MAX, ReadRequest, Sums
from kvstore.transfer.wire import BODY_MAX, FrameKind, WireError

LOAN_MS: Final = 30_000  # after which a node keeps what was not given back no longer

_ATTACHED: Final = struct.Struct("<Q")
_LENT: Final = struct.Struct("<QQIII")
_RETURN: Final = struct.Struct("<QII")
_RUN: Final = struct.Struct("<QIIIII")

Words = npt.NDArray[np.uint64]


class LentRun(NamedTuple):
    """Consecutive frames of an extent."""

    address: int
    stride: int
    frames: int
    extent: int
    frame: int
    pages: int


@dataclass(frozen=True)
class Loan:
    """Pages that were lent.

    Attributes:
        words: of each page's frame.
        sums: of each page, as those of a RANGE.
        reason: why not more, "" where all.
    """

    incarnation: int
    lease: int
    runs: list[LentRun] = field(default_factory=list)
    words: Words = field(default_factory=lambda: np.zeros(0, np.uint64))
    sums: Sums = field(default_factory=lambda: np.zeros((0, 1), np.uint32))
    reason: str = ""

    @property
    def pages(self) -> int:
        """How many."""
        return len(self.words)


def pages_lent_max(request: ReadRequest) -> int:
    """How many pages one LENT may tell of."""
    return (BODY_MAX[FrameKind.LENT] - (64 << 10)) // (_RUN.size + 8 + 4 * request.pieces)


def pack_attached(incarnation: int, metadata: bytes) -> bytes:
    """The body of ATTACHED."""
    return _ATTACHED.pack(incarnation) + metadata


def unpack_attached(body: bytearray) -> tuple[int, bytes]:
    """What an ATTACHED says. Raises WireError where it makes no sense."""
    if len(body) <= _ATTACHED.size:
        raise WireError(f"attached: has {len(body)} bytes")
    return _ATTACHED.unpack_from(body)[0], bytes(body[_ATTACHED.size :])


def pack_lent(loan: Loan) -> bytes:
    """The body of LENT."""
    head = _LENT.pack(loan.incarnation, loan.lease, len(loan.runs), loan.pages, loan.sums.shape[1])
    runs = b"".join(_RUN.pack(*run) for run in loan.runs)
    return b"".join((head, runs, loan.words.tobytes(), loan.sums.astype("<u4").tobytes(), loan.reason.encode()))


def unpack_lent(body: bytearray, request: ReadRequest) -> Loan:
    """What a LENT says. Raises WireError where it is not what was asked for."""
    try:
        incarnation, lease, count, pages, pieces = _LENT.unpack_from(body)
        runs, at = _runs(body, _LENT.size, count, pages)
        if pages > len(request.keys) or pieces != request.pieces:
            raise ValueError(f"{pages} pages of {pieces} checksums")
        words = np.frombuffer(body, "<u8", pages, at).astype(np.uint64)
        sums = np.frombuffer(body, "<u4", pages * pieces, at + 8 * pages).reshape(pages, pieces)
    except (struct.error, ValueError) as error:
        raise WireError(f"lent: {error}") from None
    end = at + pages * (8 + 4 * pieces)
    return Loan(incarnation, lease, runs, words, sums, body[end:].decode("ascii", "replace"))


def pack_return(loan: Loan) -> bytes:
    """The body of RETURN."""
    runs = b"".join(_RUN.pack(*run) for run in loan.runs)
    return _RETURN.pack(loan.lease, len(loan.runs), loan.pages) + runs + loan.words.tobytes()


def unpack_return(body: memoryview) -> Loan:
    """What is given back: lease, runs and words. Raises WireError where it makes no sense."""
    try:
        lease, count, pages = _RETURN.unpack_from(body)
        runs, at = _runs(body, _RETURN.size, count, pages)
        if len(body) != at + 8 * pages:
            raise ValueError(f"{len(body)} bytes")
        return Loan(0, lease, runs, np.frombuffer(body, "<u8", pages, at).astype(np.uint64))
    except (struct.error, ValueError) as error:
        raise WireError(f"return: {error}") from None


def _runs(body: bytearray | memoryview, at: int, count: int, pages: int) -> tuple[list[LentRun], int]:
    """``count`` runs, of ``pages`` pages in all, and where they end. Raises ValueError, struct.error."""
    if count > READ_PAGES_MAX:
        raise ValueError(f"{count} runs")
    runs = [LentRun(*_RUN.unpack_from(body, at + i * _RUN.size)) for i in range(count)]
    if sum(run.pages for run in runs) != pages or any(not run.pages for run in runs):
        raise ValueError(f"{pages} pages that are not in its runs")
    return runs, at + count * _RUN.size
