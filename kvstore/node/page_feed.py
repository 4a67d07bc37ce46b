"""PageFeed: reports to an ``AnnouncePlan`` which pages a node has, and which it gains and loses, from its event log.

``dump`` lists the pages of a node without locking it for long. It reads the frames in slices, and the node continues
between two slices. Then it applies the events that were logged in the meantime. A page that only moved is in no event,
and might have moved from a frame that was not read yet into a frame that was already read. So ``dump`` reads all frames
once more at the end, and adds the pages that it did not see in the same frame before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.cluster.announce_plan import AnnouncePlan, Entries, join, part_of, settle
from kvstore.cluster.directory import GONE
from kvstore.model.prefix import Fingerprints, fingerprint, fingerprints, veil_of
from kvstore.model.replica import TIERS, FrameState, Tier
from kvstore.node.event_log import CLEARED, STORED, EventLog, PageEvent
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.state.node_state import NodeState

SLICE_FRAMES: Final = 1 << 14  # read under the node's lock at a time


Select = Callable[[Fingerprints], npt.NDArray[np.bool_]]
"""Which pages to list, by the names of their spans."""


def all_spans(spans: Fingerprints) -> npt.NDArray[np.bool_]:
    """Select all pages."""
    return np.ones(len(spans), np.bool_)


def dump(node: Node, secret: bytes | None, select: Select = all_spans) -> tuple[int, Entries] | None:
    """Return the number of the last event included, and the selected pages of the node; None if its log lost events.

    Args:
        secret: the pool's secret, which is mixed into the fingerprints (see ``veil_of``). With None, fingerprints are
            plain.

    Raises:
        Unavailable: the node is stopping.
    """
    begin, extents = node.look(_begin)
    reading = _Reading(secret, select, {number: np.zeros(frames, np.uint64) for number, frames in extents})
    parts = [entries([], secret)]
    for number, frames in extents:
        for first in range(0, frames, SLICE_FRAMES):
            parts.append(node.look(partial(reading.unseen, number=number, frames=slice(first, first + SLICE_FRAMES))))
    until, unseen = node.look(reading.end)
    events = _between(node.events, begin, until)
    if events is None:
        return None
    changes = entries(events, secret)
    return until, settle(join([*parts, *unseen]), part_of(changes, select(changes.spans)))


def entries(events: list[PageEvent], secret: bytes | None) -> Entries:
    """Return the entries that announce these events."""
    marks, spans, pages = [np.zeros(0, np.uint8)], [np.zeros(0, np.uint64)], list[int]()
    for event in events:
        mark = TIERS.index(event.tier) | (0 if event.kind in STORED else GONE)
        marks.append(np.full(len(event.keys), mark, np.uint8))
        spans.append(np.array(event.spans, np.uint64))
        roots = event.roots if len(event.roots) == len(event.keys) else event.roots[:1] * len(event.keys)
        pages += [fingerprint(key) ^ _veil(secret, root) for key, root in zip(event.keys, roots, strict=True)]
    return Entries(np.concatenate(spans), np.array(pages, np.uint64), np.concatenate(marks))


def _begin(performer: Performer, state: NodeState) -> tuple[int, list[tuple[int, int]]]:
    """Return the number of the newest event, and (number, frames) of each extent."""
    extents = [extent for space in state.spaces.values() for extent in space.segment.extents.values()]
    return performer.events.last, [(extent.number, extent.frames) for extent in extents]


@dataclass
class _Reading:
    """Reads the selected pages of a node for one dump. ``seen``: extent -> for each frame, the generation under which
    it was seen sealed, or 0 if it was not."""

    secret: bytes | None
    select: Select
    seen: dict[int, npt.NDArray[np.uint64]]

    def end(self, performer: Performer, state: NodeState) -> tuple[int, list[Entries]]:
        """Return the number of the newest event, and all pages that were not seen."""
        numbers = [number for space in state.spaces.values() for number in space.segment.extents]
        unseen = [self.unseen(performer, state, number, slice(None)) for number in numbers]
        return performer.events.last, [*unseen, self._mounted(state)]

    def _mounted(self, state: NodeState) -> Entries:
        """Return the pages that engines have mounted; they are few enough for one slice."""
        pages, spans, veils = list[int](), list[int](), dict[bytes, int]()
        for key, root, span in state.mounts.listed():
            if root not in veils:
                veils[root] = _veil(self.secret, root)
            pages.append(fingerprint(key) ^ veils[root])
            spans.append(span)
        marks = np.full(len(pages), TIERS.index(Tier.HBM), np.uint8)
        mounted = Entries(np.array(spans, np.uint64), np.array(pages, np.uint64), marks)
        return part_of(mounted, self.select(mounted.spans))

    def unseen(self, performer: Performer, state: NodeState, number: int, frames: slice) -> Entries:
        """Return the pages in these frames of an extent that were not seen there, and mark them as seen."""
        tier = next((tier for tier, space in state.spaces.items() if number in space.segment.extents), None)
        if tier is None:  # the extent was dropped; pages that moved out of it are seen in their new extent
            return entries([], self.secret)
        space = state.spaces[tier]
        extent = space.segment.extents[number]
        generations = np.frombuffer(extent.generation, np.uint64)[frames]
        before = self.seen.get(number)
        if before is None or len(before) != extent.frames:
            before = self.seen[number] = np.zeros(extent.frames, np.uint64)
        sealed = np.frombuffer(extent.state, np.uint8)[frames] == FrameState.SEALED
        at = np.flatnonzero(sealed & (generations != before[frames]))
        before[frames] = np.where(sealed, generations, 0)
        at += frames.start or 0
        spans = np.frombuffer(extent.span, np.uint64)[at]
        is_selected = self.select(spans)
        at, spans = at[is_selected], spans[is_selected]
        table = performer.tables[number]
        pages = fingerprints(table.rows[at, table.fmt.key].tobytes())
        owners, indexes = np.unique(np.frombuffer(extent.owner, extent.owner.typecode)[at], return_inverse=True)
        roots = [space.pages.holdings.roots[owner].root for owner in owners.tolist()]
        veils = np.array([_veil(self.secret, root) for root in roots], np.uint64)
        marks = np.full(len(at), TIERS.index(tier), np.uint8)
        return Entries(spans, pages ^ veils[indexes], marks)


def _veil(secret: bytes | None, root: bytes) -> int:
    return veil_of(secret, root) if secret is not None else 0


def _between(log: EventLog, after: int, until: int) -> list[PageEvent] | None:
    """Return the events of pages after number ``after``, up to ``until``; None if the log no longer has all of them."""
    between: list[PageEvent] = []
    while after < until:
        events, after, lost = log.since(after, until - after)
        if lost or any(event.kind == CLEARED for event in events) or not events:
            return None
        between += [event for event in events if event.keys]
    return between


EVENTS: Final = 1000  # events applied at a time


class PageFeed:
    """Feeds one ``AnnouncePlan`` with the events after this object was made. One thread at a time calls ``follow``."""

    def __init__(self, node: Node, plan: AnnouncePlan, counters: Counter[str]) -> None:
        self._node = node
        self._plan = plan
        self._after = node.events.last
        self._counters = counters
        self._secret: bytes | None = None

    def veil(self, secret: bytes | None) -> None:
        """From now on, mix this secret of the pool into fingerprints (see ``veil_of``). With None, use plain
        fingerprints."""
        if secret != self._secret:
            self._secret = secret
            self._plan.restart()

    def follow(self) -> None:
        """Apply the new events; if the plan asks for pages, add those too.

        Raises:
            Unavailable: the node is stopping.
        """
        wanted = self._plan.wanted()
        if wanted is None:
            self._apply_events(self._node.events.last)
            return
        dumped = dump(self._node, self._secret, wanted.select)
        if dumped is None:  # the log lost events in the meantime; the next call tries again
            return
        until, pages = dumped
        self._apply_events(until)
        self._plan.add_pages(wanted, pages)
        self._counters["dumps"] += 1

    def _apply_events(self, until: int) -> None:
        """Apply the events up to number ``until``."""
        while self._after < until:
            events, after, lost = self._node.events.since(self._after, min(EVENTS, until - self._after))
            self._after = after
            if lost or any(event.kind == CLEARED for event in events):
                self._plan.restart()
                self._counters["lost"] += lost
            with_pages = [event for event in events if event.keys]
            if with_pages:
                self._plan.apply(entries(with_pages, self._secret))
            if not events and not lost:
                return
