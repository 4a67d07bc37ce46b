"""Announcer: tells the directory's owners what pages a node has, in a thread."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from typing import Any, Final

from kvstore import boundary
from kvstore.cluster.announce_plan import AnnouncePlan, pause_s
from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.directory import AnnounceBatch
from kvstore.cluster.directory_messages import pack_announce, unpack_announced
from kvstore.cluster.directory_owner import IDLE_S
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode, PoolView
from kvstore.errors import KVStoreError, TooManyCalls, Unavailable
from kvstore.node.node import Node
from kvstore.node.page_feed import PageFeed
from kvstore.wire.data import FrameKind

ANSWER_S: Final = 1.0
PAGES_PER_S: Final = 500_000  # at most
STOP_S: Final = 5.0
RETRY_MAX_S: Final = 8.0  # between two tries to tell an owner that has too many connections
LOOK_MAX_S: Final = 0.5  # between two tries to tell any other owner
FAULT_AFTER_S: Final = 10.0
FAULTS_MAX: Final = 4  # faults that are described in full
STUCK_S: Final = 30.0  # a turn takes this long where something hangs: owners have a second each, and dead ones none


class Announcer:
    """From ``start`` to ``stop``. Where a turn fails it tells everything again, in new streams. Status says if it
    hangs.

    Args:
        daemon: the number that our entry in the catalog has: by it owners know that it is we who tell.
        members: what the catalog tells.
        peers: who there is. A node whose own data server is not among them has nothing to announce, since no node could
            read its pages.
        fault_after_s: an owner that was not told for longer is a fault. A dead owner is not a member by then.
        served: whether the node has a data server, so that it is a fault where none is in the catalog.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        daemon: str,
        members: Membership,
        peers: PeersFile,
        links: PeerLinks,
        fault_after_s: float = FAULT_AFTER_S,
        served: bool = False,
    ) -> None:
        self._node = node
        self._fault_after_s, self._served = fault_after_s, served
        self._listed_s = time.monotonic()
        self._daemon = int(daemon, 16)
        self._members = members
        self._peers = peers
        self._links = links
        self._name = name
        self._turn_s = time.monotonic()
        self._told_s: dict[str, float] = {}
        self._owners: dict[str, _Owner] = {}
        self._stopping = threading.Event()
        run = boundary.thread_loop("task/announcer", self._turn, self._stopping)
        self._thread = threading.Thread(target=run, name="announcer", daemon=True)
        self.counters: Counter[str] = Counter()
        self._begin()

    def _begin(self) -> None:
        """Tell everything from the beginning."""
        self._announcing = AnnouncePlan(self._name, lambda: secrets.randbits(63))
        self._feed = PageFeed(self._node, self._announcing, self.counters)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; pending announcements are dropped."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> dict[str, Any]:
        """What waits to be told, and what was; how long ago it last looked for news, when the owner that was told
        least lately was told, which owners have failed for longest and why, and what that means."""
        owners = self._owners  # replaced, never changed
        failing = {name: each.health.status() for name, each in owners.items() if each.health.failing_since_s}
        failing = dict(sorted(failing.items(), key=lambda item: -item[1]["failing_s"])[:FAULTS_MAX])
        return {
            "queued": self._announcing.queued,
            "owners": len(self._announcing.owners),
            "turn_ago_s": round(time.monotonic() - self._turn_s, 3),
            "told_ago_s": round(self._told_ago_s(), 3),
            "failing": failing,
            "fault": self.fault(),
            **self.counters,
        }

    def ages(self) -> list[tuple[str, float, int]]:
        """For metrics, as ``Membership.ages``."""
        return [("announcing", self._told_ago_s(), self.counters["failed"])]

    def _told_ago_s(self) -> float:
        """Since the owner that was told least lately was told, or since the last turn where there is none."""
        told = [each.health.succeeded_s or each.since_s for each in self._owners.values()]
        return max(boot_s() - min(told, default=boot_s()), time.monotonic() - self._turn_s)

    def fault(self) -> str:
        """What is wrong: it hangs; an owner has no connection for us; one was not told, or our data server was not in
        the catalog or did not hear of it, for longer than ``fault_after_s``."""
        ago_s, view = time.monotonic() - self._turn_s, self._peers.look()
        faults = [f"others have not been told what it has for {ago_s:.0f} s"] if ago_s > STUCK_S else []
        unlisted_s = time.monotonic() - self._listed_s
        if self._served and unlisted_s > self._fault_after_s:
            faults.append(f"its data server has not been in the catalog for {unlisted_s:.0f} s")
        elif self._served and view is not None and boot_s() > view.heard_s + self._fault_after_s:
            faults.append(f"its data server has not heard of the catalog for {boot_s() - view.heard_s:.0f} s")
        late = (each.health.fault(0.0 if each.full else self._fault_after_s) for each in self._owners.values())
        faults += [fault for fault in late if fault]
        more = f" and {len(faults) - FAULTS_MAX} more" if len(faults) > FAULTS_MAX else ""
        return "; ".join(faults[:FAULTS_MAX]) + more

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
        if listed:
            self._listed_s = time.monotonic()
        self._announcing.members(view.peers if listed and view is not None else ())
        self._feed.veil(secret)
        self._feed.follow()

    def _tell(self, view: PoolView) -> int:
        """Send each owner its next batch; how many entries were sent."""
        its, now_s, sent = self._announcing, time.monotonic(), 0
        if self._owners.keys() != set(its.owners):
            self._owners = {name: self._owners.get(name) or _Owner(name) for name in its.owners}
        for name, owner in self._owners.items():
            peer = view.peers.get(name)
            if peer is None or self._stopping.is_set() or not owner.due(peer.process, now_s):
                continue
            batch = its.batch(name, idle=now_s - self._told_s.get(name, 0.0) > IDLE_S)
            if batch is not None and self._send(peer, owner, batch):
                self._told_s[name] = now_s
                sent = max(sent, len(batch.marks))
        return sent

    def _send(self, peer: PoolNode, owner: _Owner, batch: AnnounceBatch) -> bool:
        deadline_s = time.monotonic() + ANSWER_S
        try:
            body = pack_announce(batch, self._daemon)
            wanted = self._links.call(
                peer,
                deadline_s,
                lambda connection: unpack_announced(
                    connection.call(FrameKind.ANNOUNCE, body, reply=FrameKind.ANNOUNCED, deadline_s=deadline_s)
                ),
            )
        except KVStoreError as error:
            owner.fail(error)
            self.counters["failed"] += 1
            return False
        owner.succeed()
        self._announcing.take_answer(peer.name, batch, wanted)
        self.counters["batches"] += 1
        self.counters["entries"] += len(batch.marks)
        return True


class _Owner:
    """An owner to be told: when it is told next, and how that goes.

    Attributes:
        since_s: when it became one, by ``boot_s``.
        process: of its data server, as of the last try.
        next_s: not told before; later and later while telling it fails.
        full: it answers that it has too many connections.
    """

    def __init__(self, name: str) -> None:
        self.health = TaskHealth(f"announcing to {name}", pause_s_max=RETRY_MAX_S)
        self.since_s = boot_s()
        self.process = ""
        self.next_s = 0.0
        self.full = False

    def due(self, process: str, now_s: float) -> bool:
        """Whether it may be told now. Another process of that node is told at once."""
        if process != self.process:
            self.process, self.next_s = process, 0.0
        return now_s >= self.next_s

    def succeed(self) -> None:
        """Note that the owner received the announcement."""
        self.health.note_success()
        self.full = False

    def fail(self, error: KVStoreError) -> None:
        """Note that the owner did not receive it. ``PeerLinks`` tries an owner that does not answer from time to time,
        so a look costs nothing; one that does not know us yet will, within a second."""
        self.full = isinstance(error, TooManyCalls)
        pause_s = self.health.note_failure(error, error.retry_after_s if isinstance(error, TooManyCalls) else 0.0)
        self.next_s = time.monotonic() + (pause_s if self.full else min(pause_s, LOOK_MAX_S))
