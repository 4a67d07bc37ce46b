"""Retention: hints from callers about how long pages are worth keeping. Eviction uses them without any guarantee.

A hint is a *priority* from -3 to 3, and a time: how long after a page's last use the priority counts. Each step of
priority multiplies or divides the worth of a page by eight. A hint is stored in seven bits of the page's record, so it
is kept over restarts and when the page moves between tiers::

    priority 2, ttl_s 300     0b1000_010: low three bits -3..3, the upper four 4, 8, 16 ... 65,536 s or no end (0)

Worked example with pages of 64 tokens: a system prompt of 1,000 tokens precedes a document that is needed only once,
``[Retention(3, stop=1000), Retention(-3, start=1000)]``. A page has the hint of its last token, because a page is found
only with all its tokens. So pages 0 to 14 stay, and page 15, which ends in the document, is evicted early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from kvstore.errors import InvalidRequest

PRIORITY_MAX: Final = 3
TTL_S_MIN: Final = 4
TTL_S_MAX: Final = 1 << 16
RANGES_MAX: Final = 64
RANGES_SENT_MAX: Final = 2 * RANGES_MAX  # at most this many ranges remain after overlaps are resolved
STEP: Final = 8  # each step of priority multiplies a page's worth by this
HINTS: Final = 1 << 7
REPLICAS_MAX: Final = 2  # copies of a page that a put may ask for, on as many nodes
REPLICATED: Final = 1 << 7  # bit of a page's hint byte above the hint: a second copy on another node is wanted
_PRIORITY_BITS: Final = 3
_PRIORITY_MASK: Final = (1 << _PRIORITY_BITS) - 1


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the pages of one put or writer, or of a range of its tokens, are worth keeping.

    Attributes:
        priority: from -3 (evicted first) to 3 (kept); 0 is the same as no hint.
        ttl_s: how long after a page's last use the hint counts, rounded up to a power of two of at least 4 s. None: as
            long as the page is stored.
        start, stop: the range of tokens, counted from the call's first token. ``stop=None``: to the end.

    Raises:
        InvalidRequest: a number is out of range.
    """

    priority: int
    ttl_s: float | None = None
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        _check("priority", self.priority, -PRIORITY_MAX, PRIORITY_MAX)
        if self.ttl_s is not None and (
            type(self.ttl_s) not in (int, float) or not 0 < self.ttl_s <= TTL_S_MAX or not self.priority
        ):
            limits = f"must be None, or above 0 and at most {TTL_S_MAX} with a priority other than 0"
            raise InvalidRequest("ttl_s", f"{limits} (got {self.ttl_s!r})")
        _check("start", self.start, 0, None)
        if self.stop is not None:
            _check("stop", self.stop, self.start + 1, None)

    @property
    def hint(self) -> int:
        """Priority and time in seven bits; 0 without a hint."""
        bits = self.priority & _PRIORITY_MASK
        if self.ttl_s is None:
            return bits
        seconds = max(TTL_S_MIN, ceil(self.ttl_s))
        return bits | ((seconds - 1).bit_length() - 1) << _PRIORITY_BITS


def priority_of(hint: int) -> int:
    """Return the priority of a hint."""
    priority = hint & _PRIORITY_MASK
    return priority - (1 << _PRIORITY_BITS) if priority > PRIORITY_MAX else priority


def ttl_s_of(hint: int) -> int | None:
    """Return for how many seconds after a page's last use a hint's priority counts; None if it always counts."""
    exponent = hint >> _PRIORITY_BITS
    return 2 << exponent if exponent else None


def as_ranges(retention: Retention | Sequence[Retention], ranges_max: int = RANGES_MAX) -> tuple[Retention, ...]:
    """Return a caller's ``retention`` as a tuple of ranges.

    Raises:
        InvalidRequest: the type is wrong, or there are too many ranges.
    """
    ranges: Any = [retention] if isinstance(retention, Retention) else retention
    if not isinstance(ranges, list | tuple) or not all(isinstance(part, Retention) for part in ranges):
        raise InvalidRequest("retention", "must be a kvstore.Retention, or a list of them")
    if len(ranges) > ranges_max:
        raise InvalidRequest("retention", f"must have at most {ranges_max} ranges (got {len(ranges)})")
    return tuple(ranges)


def hints_of(
    retention: Retention | Sequence[Retention], pages: int, page_tokens: int, ranges_max: int = RANGES_MAX
) -> bytes:
    """Return the hint of each page, one byte per page; empty if no page has a hint. Where ranges overlap, the later one
    counts. Raises as ``as_ranges``."""
    hints = bytearray(pages)
    for part in as_ranges(retention, ranges_max):
        first = part.start // page_tokens  # the first page whose last token is at or after ``start``
        stop = pages if part.stop is None else min(pages, part.stop // page_tokens)
        if first < stop:
            hints[first:stop] = bytes([part.hint]) * (stop - first)
    return bytes(hints) if any(hints) else b""


def replicated(hints: bytes, pages: int) -> bytes:
    """Return the hint bytes of pages that want a second copy. ``hints`` has their hints, or is empty."""
    return bytes(hint | REPLICATED for hint in hints or bytes(pages))


def check_replicas(replicas: object) -> None:
    """Raise InvalidRequest unless ``replicas`` is a number of copies: 1, 2, or None for the default."""
    if replicas is not None and (type(replicas) is not int or not 1 <= replicas <= REPLICAS_MAX):
        raise InvalidRequest("replicas", f"must be 1 or {REPLICAS_MAX} (got {replicas!r})")


def ranges_of(hints: bytes, page_tokens: int) -> list[Retention]:
    """Return ranges of whole pages from ``hints``, the inverse of ``hints_of``. There are at most twice as many ranges
    as ``hints_of`` received."""
    ranges, start = [], 0
    while start < len(hints):
        hint, stop = hints[start] % HINTS, start + 1
        while stop < len(hints) and hints[stop] % HINTS == hint:
            stop += 1
        if hint:
            ranges.append(Retention(priority_of(hint), ttl_s_of(hint), start * page_tokens, stop * page_tokens))
        start = stop
    return ranges


def _check(field: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise InvalidRequest(field, f"must be an integer {limits} (got {value!r})")
