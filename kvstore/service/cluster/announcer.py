"""Announcer: tells the directory's owners what pages a node has, in a thread."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter
from typing import Any, Final

from kvstore import boundary
from kvstore.errors import KVStoreError, Unavailable
from kvstore.service.cluster.view import Members
from kvstore.service.node.node import Node
from kvstore.service.node.page_feed import PageFeed
from kvstore.state.announcing import Announcing, pause_s
from kvstore.state.directory import Told
from kvstore.state.directory_owner import IDLE_S
from kvstore.transfer.find_messages import pack_announce, unpack_announced
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PeersFile, PoolNode, PoolView
from kvstore.transfer.wire import FrameKind

ANSWER_S: Final = 1.0
PAGES_PER_S: Final = 500_000  # at most
STOP_S: Final = 5.0
STUCK_S: Final = 30.0  # a turn takes so long where something hangs: owners have a second each, and dead ones none

log = logging.getLogger("kvstore.cluster")


class Announcer:
    """From ``start`` to ``stop``. Where a turn fails it tells everything again, in new streams. Status says if it
    hangs.

    Args:
        daemon: the number that our entry in the catalog has: by it owners know that it is we who tell.
        members: what the catalog tells.
        peers: who there is. A node whose own data server is not among them has nothing to tell: nobody could read it.
    """

    def __init__(
        self, node: Node, name: str, daemon: str, members: Members, peers: PeersFile, links: PeerLinks
    ) -> None:
        self._node = node
        self._daemon = int(daemon, 16)
        self._members = members
        self._peers = peers
        self._links = links
        self._name = name
        self._turn_s = time.monotonic()
        self._told_s: dict[str, float] = {}
        self._stopping = threading.Event()
        run = boundary.kept("task/announcer", self._turn, self._stopping)
        self._thread = threading.Thread(target=run, name="announcer", daemon=True)
        self.counters: Counter[str] = Counter()
        self._begin()

    def _begin(self) -> None:
        """Tell everything from the beginning."""
        self._announcing = Announcing(self._name, lambda: secrets.randbits(63))
        self._feed = PageFeed(self._node, self._announcing, self.counters)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; what nobody was told yet is not told."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> dict[str, Any]:
        """What waits to be told, and what was; how long ago it last looked for news, and what that means."""
        ago_s = time.monotonic() - self._turn_s
        return {
            "queued": self._announcing.queued,
            "owners": len(self._announcing.owners),
            "turn_ago_s": round(ago_s, 3),
            "fault": f"others have not been told what it has for {ago_s:.0f} s" if ago_s > STUCK_S else "",
            **self.counters,
        }

    def _turn(self) -> None:
        view = self._peers.look()
        try:
            with contextlib.suppress(Unavailable):  # the node is stopping
                self._follow(view)
            sent = self._tell(view) if view is not None else 0
        except Exception:
            self._begin()
            raise
        self._turn_s = time.monotonic()
        its = self._announcing
        self._stopping.wait(sent / PAGES_PER_S if its.queued else pause_s(len(its.owners)))

    def _follow(self, view: PoolView | None) -> None:
        secret = self._members.secret
        listed = view is not None and secret is not None and view.lists(self._node.incarnation)
        self._announcing.members(view.peers if listed and view is not None else ())
        self._feed.veil(secret)
        self._feed.follow()

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
                body = pack_announce(batch, self._daemon)
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
