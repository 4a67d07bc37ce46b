"""A thread that announces a node's pages to the owners of the directory."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from typing import Any, Final

from kvstore import boundary
from kvstore.cluster.announce_plan import AnnouncePlan, TombstonePlan, idle_s, pause_s
from kvstore.cluster.ask_peers import PeerRequest, ask_peers
from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.directory import AnnounceBatch
from kvstore.cluster.directory_messages import pack_announce, unpack_announced
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode, PoolView
from kvstore.errors import KVStoreError, TooManyCalls, Unavailable
from kvstore.model.tombstones import Tombstone
from kvstore.node.cluster.contact import Contact
from kvstore.node.node import Node
from kvstore.node.page_feed import PageFeed
from kvstore.state import events as ev
from kvstore.wire.data import FrameKind
from kvstore.wire.object_messages import BURIED_MAX, pack_bury
from kvstore.wire.tombstones import TOMBSTONE_BYTES, unpack_tombstones

ANSWER_S: Final = 1.0
ASKED_AT_ONCE: Final = 64  # owners that batches are sent to at the same time: at most 2.4 MB
LINKS_IDLE_S: Final = 60.0  # a daemon keeps unused connections for longer than the interval of announcements
PAGES_PER_S: Final = 500_000  # at most
STOP_S: Final = 5.0
RETRY_MAX_S: Final = 8.0  # the longest pause before an owner with too many connections is tried again
LOOK_MAX_S: Final = 0.5  # the longest pause before any other owner is tried again
FAULT_AFTER_S: Final = 10.0
FAULTS_MAX: Final = 4  # faults that are described in full
STUCK_S: Final = 30.0  # a turn takes this long only if something hangs: a live owner gets one second, a dead owner none


class Announcer:
    """The announcer of one node, from ``start`` to ``stop``. If a turn fails, all pages are announced again, in new
    streams.

    Args:
        daemon: the number in the node's entry in the catalog, by which owners recognize the node.
        members: the catalog's members.
        peers: the nodes that can be reached. If the node's own data server is not among them, nothing is announced,
            because no other node could read the pages.
        fault_after_s: an owner that could not be reached for longer than this is a fault. By then, a dead owner is no
            longer a member.
        has_data_server: whether the node should have a data server; then it is a fault if the catalog has none.
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
        has_data_server: bool = False,
    ) -> None:
        self._node = node
        self._fault_after_s, self._has_data_server = fault_after_s, has_data_server
        self._listed_s = time.monotonic()
        self._daemon = int(daemon, 16)
        self._members = members
        self._peers = peers
        self._links = links
        self._name = name
        self._turn_s = time.monotonic()
        self._owners: dict[str, _Owner] = {}
        self._stopping = threading.Event()
        run = boundary.thread_loop("task/announcer", self._turn, self._stopping)
        self._thread = threading.Thread(target=run, name="announcer", daemon=True)
        self.counters: Counter[str] = Counter()
        self._tombstones = TombstonePlan()
        self._contact = Contact(node)
        self._has_contact = False  # since the last turn
        self._restart()

    def _restart(self) -> None:
        """Announce all pages again, in new streams."""
        self._plan = AnnouncePlan(self._name, lambda: secrets.randbits(63))
        self._merge_until_s = 0.0
        self._feed = PageFeed(self._node, self._plan, self.counters)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Pending announcements are dropped."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    def status(self) -> dict[str, Any]:
        """Return what is queued, what was sent, the age of the last turn, the age of the least recent success among the
        owners, the owners that have failed for longest, and the fault."""
        owners = self._owners  # the dict is replaced, never changed
        failing = {name: each.health.status() for name, each in owners.items() if each.health.failing_since_s}
        failing = dict(sorted(failing.items(), key=lambda item: -item[1]["failing_s"])[:FAULTS_MAX])
        return {
            "queued": self._plan.queued,
            "owners": len(self._plan.owners),
            "turn_ago_s": round(time.monotonic() - self._turn_s, 3),
            "told_ago_s": round(self._success_age_s(), 3),
            "failing": failing,
            "fault": self.fault(),
            **self.counters,
        }

    def ages(self) -> list[tuple[str, float, int]]:
        """Return ages for metrics, as ``Membership.ages`` does."""
        return [("announcing", self._success_age_s(), self.counters["failed"])]

    def _success_age_s(self) -> float:
        """Return the age of the least recent success among the owners; without owners, return the age of the last
        turn."""
        successes = [each.health.succeeded_s or each.since_s for each in self._owners.values()]
        return max(boot_s() - min(successes, default=boot_s()), time.monotonic() - self._turn_s)

    def fault(self) -> str:
        """Return what is wrong, or "".

        It is a fault if the thread hangs, or an owner has no free connection. It is also a fault if for longer than
        ``fault_after_s`` an owner could not be reached, the catalog did not list the data server, or the data server
        did not reach the catalog.
        """
        if self._stopping.is_set():
            return ""
        ago_s, view = time.monotonic() - self._turn_s, self._peers.look()
        faults = [f"its pages have not been announced for {ago_s:.0f} s"] if ago_s > STUCK_S else []
        unlisted_s = time.monotonic() - self._listed_s
        if self._has_data_server and unlisted_s > self._fault_after_s:
            faults.append(f"its data server has not been in the catalog for {unlisted_s:.0f} s")
        elif self._has_data_server and view is not None and boot_s() > view.heard_s + self._fault_after_s:
            faults.append(f"its data server has not reached the catalog for {boot_s() - view.heard_s:.0f} s")
        late = (each.health.fault(0.0 if each.full else self._fault_after_s) for each in self._owners.values())
        faults += [fault for fault in late if fault]
        more = f" and {len(faults) - FAULTS_MAX} more" if len(faults) > FAULTS_MAX else ""
        return "; ".join(faults[:FAULTS_MAX]) + more

    def _turn(self) -> None:
        view, sent = self._peers.look(), 0
        try:
            with contextlib.suppress(Unavailable):  # the node is stopping
                if view is not None and self._is_current(view):
                    self._follow(view)
                    sent = self._send_batches(view)
        except Exception:
            self._restart()
            raise
        if self._has_contact and not self._contact.is_away:
            self._contact.note()
        self._has_contact = False
        self._turn_s = time.monotonic()
        self._stopping.wait(sent / PAGES_PER_S if self._plan.queued else pause_s(len(self._plan.owners)))

    def _is_current(self, view: PoolView) -> bool:
        """Return whether the node may announce its pages. A node that was away from the pool for a long time first has
        to reach another node, and to drop its old objects. Raises Unavailable if the node is stopping."""
        others = [peer for name, peer in view.peers.items() if name != self._name]
        if not others and boot_s() <= view.heard_s + self._fault_after_s:
            self._has_contact = True
        if not self._contact.is_away:
            return True
        self._has_contact = self._has_contact or any(self._answers(peer) for peer in others)
        if not self._has_contact or not self._contact.drop_old_objects():
            return False
        self._contact.note()
        return True

    def _answers(self, peer: PoolNode) -> bool:
        deadline_s = time.monotonic() + ANSWER_S
        try:
            self._links.call(
                peer,
                deadline_s,
                lambda link: link.call(FrameKind.PING, reply=FrameKind.PONG, deadline_s=deadline_s),
            )
        except KVStoreError:
            return False
        return True

    def _follow(self, view: PoolView) -> None:
        secret = self._members.secret
        listed = secret is not None and view.lists(self._node.incarnation)
        if listed:
            self._listed_s = time.monotonic()
        members = view.peers.keys() if listed else frozenset[str]()
        now_s = time.monotonic()
        if members != self._plan.owners and (not members or now_s >= self._merge_until_s):
            self._plan.members(members)
            self._merge_until_s = now_s + pause_s(len(members))  # changes until then become one change
        self._feed.veil(secret)
        self._feed.follow()

    def _send_batches(self, view: PoolView) -> int:
        """Send each owner its next batch. Return the size of the largest one."""
        plan, now_s, largest = self._plan, time.monotonic(), 0
        if self._owners.keys() != plan.owners:
            self._owners = {name: self._owners.get(name) or _Owner(name) for name in plan.owners}
        idle_until_s = now_s - idle_s(len(self._owners))
        asked: list[tuple[_Owner, PoolNode]] = []
        due: list[tuple[_Owner, PoolNode, AnnounceBatch]] = []
        for name, owner in sorted(self._owners.items(), key=lambda item: item[1].sent_s):
            peer = view.peers.get(name)
            if peer is None or not owner.is_due(peer.process, now_s):
                continue
            asked.append((owner, peer))
            batch = plan.batch(name, idle=owner.sent_s < idle_until_s)
            if batch is not None:
                due.append((owner, peer, batch))
        for start in range(0, len(due), ASKED_AT_ONCE):
            if self._stopping.is_set():
                return largest
            largest = max(largest, self._send(due[start : start + ASKED_AT_ONCE]))
        for owner, peer in asked:
            if not self._stopping.is_set():
                self._exchange_tombstones(peer, owner)
        return largest

    def _exchange_tombstones(self, peer: PoolNode, owner: _Owner) -> None:
        """Send an owner the tombstones that it does not have, and delete the objects that it has tombstones of."""
        placement, tombstones = self._plan.placement, self._node.state.objects.tombstones
        start, last = self._tombstones.start(peer.name, peer.process, placement), tombstones.last
        if start == last and not owner.has_tombstones:
            return
        new = self._node.look(lambda performer, state: state.objects.tombstones.since(start)) if start < last else []
        mine = self._tombstones.for_owner(peer.name, placement, new)
        try:
            for first in range(0, max(1, len(mine)), BURIED_MAX):
                self._bury(peer, mine[first : first + BURIED_MAX])
        except KVStoreError as error:
            owner.fail(error)
            self.counters["failed"] += 1
            return
        self._tombstones.note_sent(peer.name, peer.process, placement, last)
        owner.has_tombstones = False

    def _bury(self, peer: PoolNode, tombstones: list[Tombstone]) -> None:
        """Send an owner some tombstones, and take those that it returns. Raises KVStoreError if it does not answer."""
        body = pack_bury(self._name, self._daemon, tombstones, time.monotonic_ns())
        deadline_s = time.monotonic() + ANSWER_S
        reply = self._links.call(
            peer,
            deadline_s,
            lambda connection: connection.call(FrameKind.BURY, body, reply=FrameKind.BURIED, deadline_s=deadline_s),
        )
        now_ns = time.monotonic_ns()
        theirs = unpack_tombstones(reply, len(reply) // TOMBSTONE_BYTES, now_ns)
        if theirs:
            self._node.handle(ev.Bury(now_ns, theirs))
            self.counters["tombstones"] += len(theirs)

    def _send(self, due: list[tuple[_Owner, PoolNode, AnnounceBatch]]) -> int:
        """Send these batches at the same time. Return the size of the largest one that an owner received."""
        requests = [PeerRequest(peer, FrameKind.ANNOUNCE, pack_announce(batch, self._daemon)) for _, peer, batch in due]
        answers = ask_peers(self._links, requests, FrameKind.ANNOUNCED, time.monotonic() + ANSWER_S)
        largest = 0
        for (owner, peer, batch), answer in zip(due, answers, strict=True):
            if answer is None:  # there was no time for this owner; it is among the first of the next turn
                continue
            try:
                if isinstance(answer, KVStoreError):
                    raise answer
                next_number, tombstones = unpack_announced(answer)
            except KVStoreError as error:
                owner.fail(error)
                self.counters["failed"] += 1
                continue
            owner.succeed()
            self._has_contact = self._has_contact or peer.name != self._name
            self._plan.take_answer(peer.name, batch, next_number)
            owner.has_tombstones = tombstones > 0
            self.counters["batches"] += 1
            self.counters["entries"] += len(batch.marks)
            largest = max(largest, len(batch.marks))
        return largest


class _Owner:
    """An owner of the directory: when the next announcement is due, and whether the last ones succeeded.

    Attributes:
        since_s: when the data server became an owner, by ``boot_s``.
        process: the data server's number at the last try.
        sent_s: when the owner last received a batch, by ``time.monotonic()``; 0 if this process has received none.
        next_s: the earliest time of the next try. Pauses grow while tries fail.
        full: the owner answered that it has too many connections.
        has_tombstones: the owner answered that it has tombstones for this node.
    """

    def __init__(self, name: str) -> None:
        self.health = TaskHealth(f"announcing to {name}", pause_s_max=RETRY_MAX_S)
        self.since_s = boot_s()
        self.process = ""
        self.sent_s = 0.0
        self.next_s = 0.0
        self.full = False
        self.has_tombstones = False

    def is_due(self, process: str, now_s: float) -> bool:
        """Return whether an announcement may be sent now. A new process of the owner does not have to
        wait, because it has no entries yet."""
        if process != self.process:
            self.process, self.next_s, self.sent_s = process, 0.0, 0.0
        return now_s >= self.next_s

    def succeed(self) -> None:
        """Note that the owner received the announcement."""
        self.health.note_success()
        self.sent_s = time.monotonic()
        self.full = False

    def fail(self, error: KVStoreError) -> None:
        """Note that the owner did not receive the announcement.

        Tries are cheap: if an owner is not responding, ``PeerLinks`` contacts it only from time to time. If an owner's
        list of members lacks this node, the owner learns of the node within a second."""
        self.full = isinstance(error, TooManyCalls)
        pause_s = self.health.note_failure(error, error.retry_after_s if isinstance(error, TooManyCalls) else 0.0)
        self.next_s = time.monotonic() + (pause_s if self.full else min(pause_s, LOOK_MAX_S))
