"""PageFeed: what pages a node has, and what comes and goes, taken from its event log for those who are to be told."""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvstore.service.node.event_log import CLEARED
from kvstore.service.node.node import Node
from kvstore.service.node.page_dump import dump, entries
from kvstore.state.announcing import Announcing

EVENTS: Final = 1000  # taken in at a time


class PageFeed:
    """Feeds one ``Announcing`` from now on. One thread at a time calls ``follow``."""

    def __init__(self, node: Node, announcing: Announcing, counters: Counter[str]) -> None:
        self._node = node
        self._announcing = announcing
        self._after = node.events.last
        self._counters = counters
        self._secret: bytes | None = None

    def veil(self, secret: bytes | None) -> None:
        """From now on fingerprints are veiled by this secret of the pool, see ``veil_of``; None: they are not."""
        if secret != self._secret:
            self._secret = secret
            self._announcing.lost()

    def follow(self) -> None:
        """Take in what happened to pages, and where that is not enough, all of them.

        Raises:
            Unavailable: the node is stopping.
        """
        its = self._announcing
        if not its.wants_pages:
            self._take_in(self._node.events.last)
            return
        dumped = dump(self._node, self._secret)
        if dumped is None:  # more happened meanwhile than the log keeps
            return
        until, pages = dumped
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
                self._announcing.changed(entries(told, self._secret))
            if not events and not lost:
                return
