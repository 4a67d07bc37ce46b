"""Retention: what a caller says of how long pages are worth keeping. A hint to eviction, and a promise of nothing.

A hint is a *priority* from -3 to 3, and for how long after a page's last use it counts. Each step makes a page eight
times more, or less, worth than it would be. A page keeps the hint of its writer, as seven bits of its record, so
hints outlive restarts and move between tiers with their pages::

    priority 2, ttl_s 300     0b1000_010: low three bits -3..3, the upper four 4, 8, 16 ... 65,536 s or no end (0)

An example, a system prompt of 1,000 tokens before a document that is asked about once, in pages of 64 tokens:
``[Retention(3, stop=1000), Retention(-3, start=1000)]``. A page is found only with all its tokens, so it takes the
range of its last one: pages 0 to 14 stay, page 15, which has the document's first tokens, leaves early.
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
RANGES_SENT_MAX: Final = 2 * RANGES_MAX  # ranges that do not overlap say the same
STEP: Final = 8  # a step of priority makes a page worth this many times more
HINTS: Final = 1 << 7
_PRIORITY_BITS: Final = 3
_PRIORITY_MASK: Final = (1 << _PRIORITY_BITS) - 1


@dataclass(frozen=True, slots=True)
class Retention:
    """How long the pages of one put or writer are worth keeping, or those of a range of its tokens.

    Attributes:
        priority: from -3 (leaves first) to 3 (stays); 0 is the same as no hint.
        ttl_s: how long after a page's last use the hint counts, rounded up to a power of two of at least 4 s. None: as
            long as the page is stored.
        start, stop: the range of tokens, counted from the first one of the call; None: all that follow.

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
            what = f"must be above 0 and at most {TTL_S_MAX}, of a priority that is not 0, or None"
            raise InvalidRequest("ttl_s", f"{what}; is {self.ttl_s!r}")
        _check("start", self.start, 0, None)
        if self.stop is not None:
            _check("stop", self.stop, self.start + 1, None)

    @property
    def hint(self) -> int:
        """Priority and time in seven bits; 0 says nothing."""
        bits = self.priority & _PRIORITY_MASK
        if self.ttl_s is None:
            return bits
        seconds = max(TTL_S_MIN, ceil(self.ttl_s))
        return bits | ((seconds - 1).bit_length() - 1) << _PRIORITY_BITS


def priority_of(hint: int) -> int:
    """The priority that a hint says."""
    priority = hint & _PRIORITY_MASK
    return priority - (1 << _PRIORITY_BITS) if priority > PRIORITY_MAX else priority


def ttl_s_of(hint: int) -> int | None:
    """How long after a page's last use its priority counts; None: always."""
    exponent = hint >> _PRIORITY_BITS
    return 2 << exponent if exponent else None


def checked(retention: Retention | Sequence[Retention], ranges_max: int = RANGES_MAX) -> tuple[Retention, ...]:
    """What a caller says, as ranges.

    Raises:
        InvalidRequest: it is of the wrong type, or has too many ranges.
    """
    ranges: Any = [retention] if isinstance(retention, Retention) else retention
    if not isinstance(ranges, list | tuple) or not all(isinstance(part, Retention) for part in ranges):
        raise InvalidRequest("retention", "must be a kvstore.Retention, or a list of them")
    if len(ranges) > ranges_max:
        raise InvalidRequest("retention", f"has {len(ranges)} ranges, more than {ranges_max}")
    return tuple(ranges)


def hints_of(
    retention: Retention | Sequence[Retention], pages: int, page_tokens: int, ranges_max: int = RANGES_MAX
) -> bytes:
    """A byte per page; empty where no page has a hint. Where ranges overlap, the later one counts. Raises as
    ``checked``."""
    hints = bytearray(pages)
    for part in checked(retention, ranges_max):
        first = part.start // page_tokens  # the first page whose last token is at or after ``start``
        stop = pages if part.stop is None else min(pages, part.stop // page_tokens)
        if first < stop:
            hints[first:stop] = bytes([part.hint]) * (stop - first)
    return bytes(hints) if any(hints) else b""


def ranges_of(hints: bytes, page_tokens: int) -> list[Retention]:
    """The inverse of ``hints_of``: ranges of whole pages, at most twice as many as were given."""
    ranges, start = [], 0
    while start < len(hints):
        hint, stop = hints[start], start + 1
        while stop < len(hints) and hints[stop] == hint:
            stop += 1
        if hint:
            ranges.append(Retention(priority_of(hint), ttl_s_of(hint), start * page_tokens, stop * page_tokens))
        start = stop
    return ranges


def _check(field: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"from {least} to {most}" if most is not None else f"of at least {least}"
        raise InvalidRequest(field, f"must be an integer {limits}, is {value!r}")
