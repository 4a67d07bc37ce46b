"""Heard: whether the directory's owners have heard what a node has, and nothing else of it.

Pages come and go in the meantime, and owners hear of it a moment later. So what differs is looked at again, a second
later: only what differed every time counts.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from kvstore.cluster.announce_plan import Entries
from kvstore.cluster.directory import Placement, page_entries
from kvstore.cluster.directory_messages import LISTED_MAX, pack_list, unpack_listed
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode
from kvstore.errors import KVStoreError
from kvstore.model.prefix import Fingerprints
from kvstore.node.node import Node
from kvstore.node.page_feed import dump
from kvstore.wire.data import FrameKind

LOOKS: Final = 3
BETWEEN_S: Final = 1.0
ANSWER_S: Final = 2.0  # for one owner, for each of its answers
NOTHING: Final = np.zeros(0, np.uint64)


@dataclass
class OwnerKnows:
    """What one owner knows of the node.

    Attributes:
        entries: how many of the node's pages and tiers it should know.
        missing: of these, what it does not know.
        stale: what it knows and is so no more.
        error: why it could not be asked; "" where it could.
    """

    entries: int = 0
    missing: int = 0
    stale: int = 0
    error: str = ""


class Heard:
    """For one node's daemon. ``look`` may be called from any thread."""

    def __init__(self, node: Node, name: str, members: Membership, peers: PeersFile, links: PeerLinks) -> None:
        self._node = node
        self._name = name
        self._members = members
        self._peers = peers
        self._links = links

    def look(self, _: dict[str, Any]) -> dict[str, Any]:
        """Ask all owners. An admin call: ``owners``, by name what ``OwnerKnows`` says; ``reason``: why there are none.

        Raises:
            Unavailable: the node is stopping.
        """
        view, secret = self._peers.look(), self._members.secret
        if view is None or secret is None or not view.lists(self._node.incarnation):
            return {
                "owners": {},
                "reason": "the catalog lists no data server of this node: it announces its pages to no node",
            }
        placement, found = Placement(view.peers), dict[str, OwnerKnows]()
        differs: dict[str, tuple[Fingerprints, Fingerprints]] = {}
        for look in range(LOOKS):
            if look:
                time.sleep(BETWEEN_S)
            dumped = dump(self._node, secret)
            if dumped is None:
                return {"owners": {}, "reason": "more happens to its pages than can be followed"}
            pages = dumped[1]
            for name, mine in placement.owned(pages.spans).items():
                if look and name not in differs:
                    continue
                found[name], differs[name] = self._compare(view.peers[name], pages, mine, differs.get(name))
                if not found[name].missing + found[name].stale:
                    del differs[name]
            if not differs:
                break
        return {"owners": {name: asdict(knows) for name, knows in found.items()}, "reason": ""}

    def _compare(
        self, owner: PoolNode, pages: Entries, mine: Any, before: tuple[Fingerprints, Fingerprints] | None
    ) -> tuple[OwnerKnows, tuple[Fingerprints, Fingerprints]]:
        """What differs now, and did before; with the entries themselves."""
        have = page_entries(pages.fingerprints[mine], pages.marks[mine])
        try:
            known = self._known_to(owner)
        except KVStoreError as error:
            return OwnerKnows(len(have), error=str(error)), (NOTHING, NOTHING)
        missing, stale = np.setdiff1d(have, known, True), np.setdiff1d(known, have, True)
        if before is not None:
            missing, stale = np.intersect1d(missing, before[0], True), np.intersect1d(stale, before[1], True)
        return OwnerKnows(len(have), len(missing), len(stale)), (missing, stale)

    def _known_to(self, owner: PoolNode) -> Fingerprints:
        """All that it lists of this node. Raises KVStoreError where it does not answer."""
        parts, start = [NOTHING], 0
        with self._links.to(owner, time.monotonic() + ANSWER_S) as connection:
            while True:
                deadline_s = time.monotonic() + ANSWER_S
                body = pack_list(self._name, start)
                reply = connection.call(FrameKind.LIST, body, reply=FrameKind.LISTED, deadline_s=deadline_s)
                parts.append(unpack_listed(reply))
                if len(parts[-1]) < LISTED_MAX:
                    return np.concatenate(parts)
                start = int(parts[-1][-1]) + 1
