"""``Replicator``: threads of a node's daemon that order second copies of the node's pages on other nodes.

``cluster.replicas`` decides which copies are owed and where they go. The threads describe the pages from their records,
and order the target to copy them (``wire.copy_order``). A new page is owed from its seal on. Pages whose copy may have
been lost are found by a *survey* of all records: after a start, after a node has left the pool, and after the queue was
full. A survey asks the directory which pages another node has. It adds the other pages to the queue.

The first pages of a chain are copied before later ones. If the target lacks the page before a run, the source sends the
whole chain, and the target skips what it has.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kvstore import boundary
from kvstore.client.local.peer_caching import BUSY, FULL, LATE, ORPHAN
from kvstore.client.match import ABSENT
from kvstore.cluster.catalog.schema import NodeEntry
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode
from kvstore.cluster.replicas import NO_NODE, OWED_MAX, OwedCopies, OwedRun, Site, choose_target
from kvstore.errors import KVStoreError, Unavailable
from kvstore.model.replica import KEY, Status
from kvstore.node.cluster.chain_parts import ChainPart, ancestors, read_part
from kvstore.node.cluster.copy_handler import copy_limit_s
from kvstore.node.cluster.survey import MissingRun, Survey
from kvstore.node.node import Node
from kvstore.shm.traffic import TrafficBucket
from kvstore.wire.data import FrameKind, unpack_end

WORKERS: Final = 2  # orders under way, of different chains
LOOK_S: Final = 0.25  # how often the members are looked at
SETTLE_S: Final = 2.0  # after a node has left: until the directory's owners have dropped it, and have moved spans
RETRY_S: Final = 1.0  # between two tries of a survey that could not look up every page
SURVEY_TRIES: Final = 5  # at the last try, pages that could not be looked up are owed; a target skips what it has
PLACED_MAX: Final = 1 << 14  # last pages of copied runs whose nodes are remembered
STOP_S: Final = 5.0

log = logging.getLogger("kvstore.cluster")

OK, OWED, REFUSED = int(Status.OK), int(Status.BUSY), int(Status.NO_SPACE)


class Replicator:
    """The replicator of one node, from ``start`` to ``stop``.

    Args:
        entry: the node's entry in the catalog.
        members: the catalog's members.
        peers: the nodes that can be reached.
        links: connections to these nodes, which only the replicator uses.
        bucket: charged for everything that is copied.
        same_machine: see ``choose_target``.

    Attributes:
        entry: the entry, as last published.
        counters: pages and bytes copied, orders that failed, surveys.
        survey: looks up which pages no other node has.
    """

    def __init__(
        self,
        node: Node,
        entry: NodeEntry,
        members: Membership,
        peers: PeersFile,
        links: PeerLinks,
        bucket: TrafficBucket,
        same_machine: bool = False,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._node = node
        self.entry = entry
        self._members = members
        self._peers = peers
        self._links = links
        self._bucket = bucket
        self._same_machine = same_machine
        self._owed = OwedCopies()
        self._lock = threading.Lock()  # guards ``_owed`` and ``_placed``
        self._placed: OrderedDict[bytes, str] = OrderedDict()  # last page of a copied run -> its node
        self._known: frozenset[str] = frozenset()  # nodes of the pool at the last look
        self._survey_s = 0.0  # when the next survey is due; infinity if none is
        self._inbox = node.performer.waiting.owed
        self._lost = 0
        self._stopping = threading.Event()
        self.survey = Survey(node, peers, links)
        self._survey_tries = 0
        self._surveyed = False  # True if the queue has all owed copies, because a survey has added the missing ones
        self._threads = [
            threading.Thread(target=boundary.thread_loop(f"task/{name}", turn, self._stopping), name=name, daemon=True)
            for name, turn in [
                ("replica survey", self._watch),
                *[(f"replicator {i}", self._turn) for i in range(WORKERS)],
            ]
        ]
        node.owed_of = self.owed

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads. Copies that are owed are found again by the next daemon."""
        self._stopping.set()
        self._inbox.arrived.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(STOP_S)

    def owed(self, keys: list[bytes]) -> list[int]:
        """Return the status of each sealed page, see ``wire.control.Op.OWED``."""
        with self._lock:
            self._take_in()
            if not self._surveyed:
                return [OWED] * len(keys)  # the daemon has just started, or the queue was full
            owed = self._owed
            return [OK if not owed.owes(key) else REFUSED if owed.refuses(key) else OWED for key in keys]

    def status(self) -> dict[str, Any]:
        """Return what is owed, why, and what was copied."""
        with self._lock:
            self._take_in()
            owed = self._owed
            return {
                "owed_pages": len(owed),
                "owed_bytes": owed.nbytes,
                "dropped_pages": owed.dropped,
                "reason": owed.reason if len(owed) else "",
                "surveying": self._survey_s < math.inf,
                "background_bytes": self._bucket.charged_bytes,
                "background_bytes_per_s": self._bucket.bytes_per_s,
                "background_waited_s": round(self._bucket.waited_s, 3),
                **{name: self.counters[name] for name in ("copied_pages", "copied_bytes", "failed", "surveys")},
            }

    # --- which copies are owed --------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Owe the copies of new pages. The caller holds the lock."""
        now_s = time.monotonic()
        for parent, keys, page_bytes in self._inbox.take():
            self._owed.owe(parent, keys, page_bytes, now_s)
        lost = self._inbox.lost + self._owed.dropped
        self._surveyed &= lost == self._lost  # until the next survey, any page may be owed
        if lost > self._lost and len(self._owed) <= OWED_MAX // 2:  # the queue has space for what a survey finds
            self._lost = lost
            self._survey_s = min(self._survey_s, now_s + SETTLE_S)

    def _watch(self) -> None:
        """Notice nodes that leave or join, and make surveys."""
        view, now_s = self._peers.look(), time.monotonic()
        names = frozenset(view.peers) if view is not None and view.lists(self._node.incarnation) else frozenset()
        with self._lock:
            if self._known - names and names:
                self._survey_s = min(self._survey_s, now_s + SETTLE_S)
            if names - self._known:
                self._owed.retry_all(now_s)
            self._known = names or self._known
            is_due = self._survey_s <= now_s and bool(names)
        if is_due:
            self._make_survey()
        self._stopping.wait(LOOK_S)

    def _make_survey(self) -> None:
        """Owe the pages that want a second copy and that no other node has."""
        with self._lock:
            self._survey_s = math.inf
            lost = self._lost
        self._survey_tries += 1
        is_last = self._survey_tries >= SURVEY_TRIES
        runs, is_complete = list[MissingRun](), False
        try:
            runs, is_complete = self.survey.missing(self.counted(), replicated=True, assume_missing=is_last)
            is_complete |= is_last
        except Unavailable:  # the node is stopping
            return
        finally:
            self._finish_survey(runs, is_complete, lost)

    def _finish_survey(self, runs: list[MissingRun], is_complete: bool, lost: int) -> None:
        """Owe the pages that a survey has found, and plan the next survey if this one is not complete.

        Args:
            lost: how many owed pages the queue had dropped when the survey began.
        """
        with self._lock:
            now_s = time.monotonic()
            for run in runs:
                self._owed.owe(run.parent, run.keys, run.page_bytes, now_s)
            self.counters["surveys"] += 1
            if is_complete:
                self._survey_tries, self._surveyed = 0, lost == self._inbox.lost + self._owed.dropped
            else:
                self._survey_s = min(self._survey_s, now_s + RETRY_S)
        self._inbox.arrived.set()

    def counted(self) -> set[str]:
        """Return the nodes whose copies count as second copies."""
        mine = self.entry
        sites = [_site(each) for each in self._members.nodes() if each.name != mine.name]
        return {each.name for each in sites if choose_target(_site(mine), [each], b"", (), self._same_machine)}

    # --- copying ----------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """Copy the next run, or wait for one."""
        with self._lock:
            self._take_in()
            now_s = time.monotonic()
            run = self._owed.next(now_s)
            due_s = self._owed.due_s()
        if run is None:
            self._inbox.arrived.wait(min(LOOK_S, max(0.01, due_s - now_s)))
            return
        pages, gone, reason, refused_by = 0, 0, "internal error", ""
        try:
            pages, gone, reason, refused_by = self._copy(run)
        finally:
            with self._lock:
                now_s = time.monotonic()
                if pages or gone:
                    self._owed.settle(run, pages or gone, now_s, gone=not pages)
                else:
                    self._owed.postpone(run, reason, now_s, refused_by)
                    self.counters["failed"] += reason not in (NO_NODE, BUSY)

    def _copy(self, run: OwedRun) -> tuple[int, int, str, str]:
        """Order copies of the leading pages of a run. Return how many were copied, how many are no longer stored, why
        nothing was copied, and the node that had no space."""
        try:
            part = read_part(self._node, run.keys)
        except (Unavailable, OSError):  # the node is stopping, or a device is not responding
            return 0, 0, LATE, ""
        if isinstance(part, int):
            return 0, part, "", ""
        pages, reason, node = self.send(part, run.keys[0], run.refused)
        return pages, 0, "" if pages else reason, node if reason == FULL else ""

    def send(self, part: ChainPart, anchor: bytes, refused: Sequence[str] = ()) -> tuple[int, str, str]:
        """Order a copy of pages on the node that the pool's members and ``anchor`` determine. Return how many leading
        pages that node has now, why not more, and its name.

        Args:
            refused: nodes that have no space for them.
        """
        if part.about is None or "fingerprint" not in part.about:
            return 0, "no client has named the tenant of its root", ""
        target = self._target(part, anchor, refused)
        if target is None:
            return 0, NO_NODE, ""
        pages, reason = self._order(target, part)
        if reason == ORPHAN and not pages:
            reason = self._send_ancestors(target, part)
            if not reason:
                pages, reason = self._order(target, part)
        if pages:
            with self._lock:
                self._placed[part.rows[pages - 1][KEY]] = target.name
                while len(self._placed) > PLACED_MAX:
                    self._placed.popitem(last=False)
        return pages, reason, target.name

    def _target(self, part: ChainPart, anchor: bytes, refused: Sequence[str]) -> PoolNode | None:
        view = self._peers.look()
        peers = view.peers if view is not None else {}
        alive = {name for name, peer in peers.items() if name not in refused and not self._links.dead(peer)}
        sites = [_site(each) for each in self._members.nodes() if each.name in alive]
        name = choose_target(_site(self.entry), sites, anchor, self._parent_nodes(part), self._same_machine)
        return peers[name] if name is not None else None

    def _parent_nodes(self, part: ChainPart) -> set[str]:
        """Return the nodes that have the parent of these pages; none if the parent has other stored children, too."""
        if part.siblings > 1 or part.parent == part.root:
            return set()
        with self._lock:
            node = self._placed.get(part.parent)
        if node is not None:
            return {node}
        try:
            return self.survey.nodes_of(part.parent)
        except Unavailable:  # the node is stopping
            return set()

    def _send_ancestors(self, target: PoolNode, part: ChainPart) -> str:
        """Order copies of the pages before ``part``, from the start of the chain. Return why they were not copied, or
        ""."""
        try:
            keys = self._node.look(partial(ancestors, key=part.parent))
            while keys:
                before = read_part(self._node, keys)
                if isinstance(before, int):
                    return ABSENT
                pages, reason = self._order(target, before)
                if not pages:
                    return reason or ABSENT
                keys = keys[pages:]
        except (Unavailable, OSError):
            return LATE
        return ""

    def _order(self, target: PoolNode, part: ChainPart) -> tuple[int, str]:
        """Order the target to copy these pages. Return how many leading pages it has now, and why not more."""
        nbytes = part.nbytes
        wait_s = self._bucket.charge(nbytes)
        if wait_s and self._stopping.wait(wait_s):
            return 0, LATE
        limit_s = copy_limit_s(nbytes)
        deadline_s = time.monotonic() + limit_s
        body = part.order(self._node.config.name).pack()
        try:
            reply = self._links.call(
                target,
                deadline_s,
                lambda link: link.call(FrameKind.COPY, *body, reply=FrameKind.COPIED, deadline_s=deadline_s),
                silence_s=limit_s,
            )
            pages, reason = unpack_end(reply, len(part.rows))
        except KVStoreError as error:
            log.debug("%s copies no pages: %s", target.name, error)
            return 0, f"{target.name}: {error}"
        self.counters["copied_pages"] += pages
        self.counters["copied_bytes"] += pages * part.frame_class.page_bytes
        return pages, reason


def _site(entry: NodeEntry) -> Site:
    return Site(entry.name, entry.machine, entry.zone, sum(entry.capacity_bytes.values()), entry.draining)
