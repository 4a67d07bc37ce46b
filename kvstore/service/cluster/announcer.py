"""Announcer: tells the directory's owners what pages a node has. It follows the node's event log, in a thread."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from typing import Any, Final

import numpy as np

from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.replica import FrameState
from kvstore.model.span import fingerprint, fingerprints
from kvstore.service.node.event_log import CLEARED, STORED, PageEvent
from kvstore.service.node.node import Node
from kvstore.service.node.performer import Performer
from kvstore.state.announcing import Announcing, Entries, pause_s
from kvstore.state.directory import GONE, TIERS, Told
from kvstore.state.node_state import NodeState
from kvstore.transfer.find_messages import pack_announce, unpack_announced
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PeersFile, PoolNode, PoolView
from kvstore.transfer.wire import FrameKind

IDLE_S: Final = 1.0  # an owner that was told nothing for so long is told that
ANSWER_S: Final = 1.0
PAGES_PER_S: Final = 500_000  # at most
STOP_S: Final = 5.0
EVENTS: Final = 1000  # taken in at a time

log = logging.getLogger("kvstore.cluster")


class Announcer:
    """From ``start`` to ``stop``.

    Args:
        peers: who there is. A node whose own data server is not among them has nothing to tell: nobody could read it.
    """

    def __init__(self, node: Node, name: str, peers: PeersFile, links: PeerLinks) -> None:
        self._node = node
        self._name = name
        self._peers = peers
        self._links = links
        self._announcing = Announcing(name, lambda: secrets.randbits(63))
        self._after = node.events.last
        self._told_s: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self.counters: Counter[str] = Counter()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what nobody was told yet is not told."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> dict[str, Any]:
        """What waits to be told, and what was."""
        return {"queued": self._announcing.queued, "owners": len(self._announcing.owners), **self.counters}

    def _run(self) -> None:
        while not self._stopping.is_set():
            view = self._peers.look()
            with contextlib.suppress(Unavailable):  # the node is stopping
                self._follow(view)
            sent = self._tell(view) if view is not None else 0
            its = self._announcing
            self._stopping.wait(sent / PAGES_PER_S if its.queued else pause_s(len(its.owners)))

    def _follow(self, view: PoolView | None) -> None:
        """Take in what happened to pages, and where that is not enough, all of them."""
        its = self._announcing
        its.members(view.peers if view is not None and view.lists(self._node.incarnation) else ())
        if not its.wants_pages:
            self._take_in(self._node.events.last)
            return
        until, pages = self._node.look(lambda performer, state: (performer.events.last, pages_of(performer, state)))
        self._take_in(until)
        its.dumped(pages)
        self.counters["dumps"] += 1

    def _take_in(self, until: int) -> None:
        """Events up to that number."""
        while self._after < until:
            events, after, lost = self._node.events.since(self._after, min(EVENTS, until - self._after))
            self._after = after
            if lost or any(event.kind == CLEARED for event in events):
                self._announcing.lost()
                self.counters["lost"] += lost
            told = [event for event in events if event.keys]
            if told:
                self._announcing.changed(_entries(told))
            if not events and not lost:
                return

    def _tell(self, view: PoolView) -> int:
        """Send each owner its next batch; how many entries were sent."""
        its, now_s, sent = self._announcing, time.monotonic(), 0
        for name in its.owners:
            peer = view.peers.get(name)
            if peer is None or self._links.dead(peer) or self._stopping.is_set():
                continue
            batch = its.batch(name, idle=now_s - self._told_s.get(name, 0.0) > IDLE_S)
            if batch is not None and self._send(peer, batch):
                self._told_s[name] = now_s
                sent = max(sent, len(batch.marks))
        return sent

    def _send(self, peer: PoolNode, batch: Told) -> bool:
        deadline_s = time.monotonic() + ANSWER_S
        try:
            with self._links.to(peer, deadline_s) as connection:
                body = pack_announce(batch)
                reply = connection.call(FrameKind.ANNOUNCE, body, reply=FrameKind.ANNOUNCED, deadline_s=deadline_s)
                wanted = unpack_announced(reply)
        except KVStoreError as error:
            log.debug("%s: %s", peer.name, error)
            self.counters["failed"] += 1
            return False
        self._announcing.answered(peer.name, batch, wanted)
        self.counters["batches"] += 1
        self.counters["entries"] += len(batch.marks)
        return True


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
