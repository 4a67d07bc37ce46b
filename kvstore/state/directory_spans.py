"""Spans of stored pages (see ``model.prefix``): which span each sealed page of a tier is in.

``Extent.span`` stores them, 8 bytes a page. Records do not have them: a page is in its parent's span or begins a new
one, so all spans are computed from the chains at startup.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvstore.model.objects import is_object_class
from kvstore.model.prefix import SPAN_PAGES, Fingerprints, fingerprint, fingerprints, spans_of
from kvstore.model.replica import POSITION_MAX, Address
from kvstore.state.frames import ClassPool, Segment
from kvstore.state.prefix_links import Links

ROUNDS_MAX = POSITION_MAX.bit_length() + 1  # each round doubles the distance up the chain


def spans_at(segment: Segment, addresses: Iterable[Address]) -> list[int]:
    """Return the spans of these pages."""
    return [segment.extents[number].span[frame] for number, frame, _ in addresses]


def spans_after(
    segment: Segment, parent: Address | None, keys: list[bytes], position: int, pool: ClassPool
) -> list[int]:
    """Return the spans of new consecutive pages after ``parent``. The first of them is at ``position`` in its chain."""
    if is_object_class(pool.frame_class):
        return [fingerprint(key) for key in keys]
    before = segment.extents[parent.extent].span[parent.frame] if parent is not None else 0
    return spans_of(keys, position, before)


def find_spans(segment: Segment, links: Links) -> None:
    """At startup, compute and store the spans of all linked pages."""
    spans = spans_by_chain(segment, links)
    for number, extent in segment.extents.items():
        mine = links.extents == number
        np.frombuffer(extent.span, np.uint64)[links.frames[mine]] = spans[mine]


def spans_by_chain(segment: Segment, links: Links) -> Fingerprints:
    """Return the span of each linked page, from its place in its chain."""
    count = len(links.parent)
    itself = np.arange(count)
    up = np.where(links.parent >= 0, links.parent, itself)
    position, jump = (links.parent >= 0).astype(np.int64), up
    for _ in range(ROUNDS_MAX):
        more = position[jump]
        if not more.any():
            break
        position, jump = position + more, jump[jump]
    begins = (position < POSITION_MAX) & ((position % SPAN_PAGES == 0) | (position & (position - 1) == 0))
    objects = [number for number, extent in segment.extents.items() if is_object_class(extent.pool.frame_class)]
    first = np.where(begins | np.isin(links.extents, objects), itself, up)
    for _ in range(ROUNDS_MAX):
        before, first = first, first[first]
        if (first == before).all():
            break
    return fingerprints(links.keys.tobytes())[first]
