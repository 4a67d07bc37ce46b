"""PageFeed: what pages a node has, and what comes and goes, taken from its event log for those who are to be told."""

from __future__ import annotations

from collections import Counter
from typing import Final

import numpy as np

from kvstore.model.replica import FrameState
from kvstore.model.span import fingerprint, fingerprints
from kvstore.service.node.event_log import CLEARED, STORED, PageEvent
from kvstore.service.node.node import Node
from kvstore.service.node.performer import Performer
from kvstore.state.announcing import Announcing, Entries
from kvstore.state.directory import GONE, TIERS
from kvstore.state.node_state import NodeState

EVENTS: Final = 1000  # taken in at a time


class PageFeed:
    """Feeds one ``Announcing`` from now on. One thread at a time calls ``follow``."""

    def __init__(self, node: Node, announcing: Announcing, counters: Counter[str]) -> None:
        self._node = node
        self._announcing = announcing
        self._after = node.events.last
        self._counters = counters

    def follow(self) -> None:
        """Take in what happened to pages, and where that is not enough, all of them.

        Raises:
            Unavailable: the node is stopping.
        """
        its = self._announcing
        if not its.wants_pages:
            self._take_in(self._node.events.last)
            return
        until, pages = self._node.look(lambda performer, state: (performer.events.last, pages_of(performer, state)))
        self._take_in(until)
        its.dumped(pages)
        self._counters["dumps"] += 1

    def _take_in(self, until: int) -> None:
        """Events up to that number."""
        while self._after < until:
            events, after, lost = self._node.events.since(self._after, min(EVENTS, until - self._after))
            self._after = after
            if lost or any(event.kind == CLEARED for event in events):
                self._announcing.lost()
                self._counters["lost"] += lost
            told = [event for event in events if event.keys]
            if told:
                self._announcing.changed(_entries(told))
            if not events and not lost:
                return


def _entries(events: list[PageEvent]) -> Entries:
    """What these events say."""
    marks = [
        np.full(len(event.keys), TIERS.index(event.tier) | (0 if event.kind in STORED else GONE), np.uint8)
        for event in events
    ]
    spans = np.concatenate([np.array(event.spans, np.uint64) for event in events])
    pages = np.array([fingerprint(key) for event in events for key in event.keys], np.uint64)
    return Entries(spans, pages, np.concatenate(marks))


def pages_of(performer: Performer, state: NodeState) -> Entries:
    """All pages of a node that holds still."""
    spans, pages, marks = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)], [np.zeros(0, np.uint8)]
    for tier, space in state.spaces.items():
        for number, extent in space.segment.extents.items():
            sealed = np.flatnonzero(np.frombuffer(extent.state, np.uint8) == FrameState.SEALED)
            table = performer.tables[number]
            pages.append(fingerprints(table.rows[sealed, table.fmt.key].tobytes()))
            spans.append(np.frombuffer(extent.span, np.uint64)[sealed])
            marks.append(np.full(len(sealed), TIERS.index(tier), np.uint8))
    return Entries(np.concatenate(spans), np.concatenate(pages), np.concatenate(marks))
