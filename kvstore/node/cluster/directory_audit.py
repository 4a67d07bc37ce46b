"""An audit of the directory: whether its owners list exactly the pages that a node has.

Pages come and go during the audit, and owners receive these changes a moment later. So differences are looked up again,
one second later. Only differences that appear every time count.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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
ANSWER_S: Final = 2.0  # time for each answer of an owner
NOTHING: Final = np.zeros(0, np.uint64)


@dataclass
class OwnerReport:
    """How one owner's entries differ from the node's pages.

    Attributes:
        entries: number of entries that the owner should have.
        missing: number of these that the owner lacks.
        stale: number of entries that the owner has for pages that the node no longer has.
        error: why the owner gave no answer, or "".
    """

    entries: int = 0
    missing: int = 0
    stale: int = 0
    error: str = ""


class DirectoryAudit:
    """Audits of one node's pages, for its daemon. Any thread may run one."""

    def __init__(self, node: Node, name: str, members: Membership, peers: PeersFile, links: PeerLinks) -> None:
        self._node = node
        self._name = name
        self._members = members
        self._peers = peers
        self._links = links

    def run(self, _: dict[str, Any]) -> dict[str, Any]:
        """Carry out the admin call ``heard``: return ``owners`` (name -> ``OwnerReport``), and ``reason``: why
        ``owners`` is empty, or "".

        Raises:
            Unavailable: the node is stopping.
        """
        view, secret = self._peers.look(), self._members.secret
        if view is None or secret is None or not view.lists(self._node.incarnation):
            return {
                "owners": {},
                "reason": "the catalog lists no data server for this node, so the node does not announce its pages",
            }
        placement, reports = Placement(view.peers), dict[str, OwnerReport]()
        differences: dict[str, tuple[Fingerprints, Fingerprints]] = {}
        for look in range(LOOKS):
            if look:
                time.sleep(BETWEEN_S)
            contents = dump(self._node, secret)
            if contents is None:
                return {"owners": {}, "reason": "the node's pages change faster than they can be listed"}
            pages = contents[1]
            shares = dict(placement.shares(pages.spans))
            for name in placement.nodes if not look else tuple(differences):
                owned = shares.get(name, NOTHING.astype(np.int64))
                reports[name], differences[name] = self._compare(view.peers[name], pages, owned, differences.get(name))
                if not reports[name].missing + reports[name].stale:
                    del differences[name]
            if not differences:
                break
        return {"owners": {name: asdict(report) for name, report in reports.items()}, "reason": ""}

    def _compare(
        self,
        owner: PoolNode,
        pages: Entries,
        owned: npt.NDArray[np.int64],
        before: tuple[Fingerprints, Fingerprints] | None,
    ) -> tuple[OwnerReport, tuple[Fingerprints, Fingerprints]]:
        """Return the report on one owner, and its missing and stale entries. ``before`` restricts both to entries that
        differed in the last look as well."""
        actual = page_entries(pages.fingerprints[owned], pages.marks[owned])
        try:
            listed = self._listed_by(owner)
        except KVStoreError as error:
            return OwnerReport(len(actual), error=str(error)), (NOTHING, NOTHING)
        missing, stale = np.setdiff1d(actual, listed, True), np.setdiff1d(listed, actual, True)
        if before is not None:
            missing, stale = np.intersect1d(missing, before[0], True), np.intersect1d(stale, before[1], True)
        return OwnerReport(len(actual), len(missing), len(stale)), (missing, stale)

    def _listed_by(self, owner: PoolNode) -> Fingerprints:
        """Return all entries that an owner lists for this node. Raises KVStoreError if the owner gives no answer."""
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
