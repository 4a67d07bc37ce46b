"""Span: consecutive pages of one chain, the unit in which the directory of a cluster is divided.

Spans start at pages 0, 1, 2, 4, 8, 16, 32, and then every 32. They are short at the front, where chains branch and
all prompts share pages: one long first span would put what all prompts begin with, and all that follows it, on one
owner. A span is named by the fingerprint of its first page. Each page of an opaque object is a span of its own: a
reader that looks for its head knows no other key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import KEY_BYTES, POSITION_MAX

SPAN_PAGES: Final = 32
FINGERPRINT_BYTES: Final = 8

Fingerprints = npt.NDArray[np.uint64]


def starts_span(position: int) -> bool:
    """Whether a page at this position of its chain begins a span. Positions saturate: the last span has no end."""
    return position < POSITION_MAX and (position % SPAN_PAGES == 0 or position & (position - 1) == 0)


def span_start(position: int) -> int:
    """The first page of the span that contains this page of a chain."""
    if position < SPAN_PAGES:
        return 0 if position == 0 else 1 << (position.bit_length() - 1)
    position = min(position, POSITION_MAX)
    return position - position % SPAN_PAGES


def fingerprint(key: bytes) -> int:
    """What the directory knows of a key: its first 8 bytes. Keys are hashes, so these are as good as random."""
    return int.from_bytes(key[:FINGERPRINT_BYTES], "little")


def fingerprints(keys: bytes) -> Fingerprints:
    """The fingerprints of many keys, which are given end to end."""
    return np.frombuffer(keys, "<u8").reshape(-1, KEY_BYTES // FINGERPRINT_BYTES)[:, 0].astype(np.uint64)


def spans_of(keys: list[bytes], position: int, before: int) -> list[int]:
    """The name of the span of each of these consecutive pages of a chain.

    Args:
        position: of the first of them.
        before: the span of the page before it; of no meaning at position 0.
    """
    spans: list[int] = []
    for at, key in enumerate(keys, position):
        if starts_span(at):
            before = fingerprint(key)
        spans.append(before)
    return spans


@dataclass(frozen=True)
class SpanRange:
    """The spans of consecutive pages of a chain, one after another.

    Attributes:
        starts: the first page of each, which names it; that of the first span may be before the pages.
        firsts, lasts: of each the first and the last one of the pages.
    """

    starts: tuple[int, ...]
    firsts: tuple[int, ...]
    lasts: tuple[int, ...]

    @cached_property
    def _names_and_lasts(self) -> itemgetter[Any]:
        return itemgetter(*self.starts, *self.lasts)

    def __len__(self) -> int:
        return len(self.starts)

    def named(self, keys: list[bytes]) -> tuple[Fingerprints, Fingerprints]:
        """The names of the spans, and the fingerprints of their last pages; ``keys``: of the chain from its root."""
        both = fingerprints(b"".join(self._names_and_lasts(keys)))
        return both[: len(self)], both[len(self) :]


@lru_cache(maxsize=256)
def spans_between(first: int, stop: int) -> SpanRange:
    """The spans of the pages ``first`` to ``stop`` of a chain, of which there is at least one."""
    starts = [span_start(first)]
    while True:
        after = max(1, 2 * starts[-1]) if starts[-1] < SPAN_PAGES else starts[-1] + SPAN_PAGES
        if after >= min(stop, POSITION_MAX):  # the last span has no end
            break
        starts.append(after)
    return SpanRange(tuple(starts), (first, *starts[1:]), (*(start - 1 for start in starts[1:]), stop - 1))
