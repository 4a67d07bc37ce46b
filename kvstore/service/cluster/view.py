"""ViewKeeper: keeps the ``peers`` file of a node as its catalog tells. See ``transfer.peers``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from kvstore.catalog.schema import DataEntry, NodeEntry
from kvstore.serving.membership import Membership
from kvstore.tier.folder import NodeFolder
from kvstore.transfer import peers
from kvstore.transfer.peers import PoolNode, PoolView

HEARD_STEP_S: Final = 1.0  # the file is written again when the catalog answered this much later

log = logging.getLogger("kvstore.cluster")


def serving(nodes: Iterable[NodeEntry], servers: Iterable[DataEntry]) -> dict[str, DataEntry]:
    """By node, the data server that its pages are read from.

    The newest of several: an older one is perhaps dead, and not forgotten yet. But where a name is a node's, a data
    server of another incarnation is not that node's: another node had the name before, and was cut off since.

    Args:
        servers: the newest last.
    """
    named = {each.name: each.incarnation for each in nodes}
    found: dict[str, DataEntry] = {}
    for each in servers:
        if each.node not in found or not each.incarnation or each.incarnation == named.get(each.node, each.incarnation):
            found[each.node] = each
    return found


def offered_by(server: DataEntry) -> tuple[str, ...]:
    """How pages may leave its node."""
    return tuple(name for name, why in server.transports.items() if not why)


class ViewKeeper:
    """Lives in the node's data server, so that a dead daemon changes nothing. One thread calls ``refresh``."""

    def __init__(self, folder: NodeFolder, pool: str, members: Membership) -> None:
        self._folder = folder
        self._members = members
        self._view = PoolView(pool, folder.name, 0.0, {})
        self._written = False

    def refresh(self) -> None:
        """Write the file where it would say something else."""
        found = {
            name: PoolNode(
                name, each.process, each.incarnation, each.addresses, each.tls, offered_by(each), each.tls_name
            )
            for name, each in serving(self._members.nodes(), self._members.data_servers()).items()
        }
        heard_s, before = self._members.heard_s, self._view
        if self._written and found == before.peers and heard_s < before.heard_s + HEARD_STEP_S:
            return
        self._view = PoolView(before.pool, before.node, heard_s, found)
        try:
            peers.write(self._folder, self._view)
            self._written = True
        except OSError as error:
            log.warning("%s: cannot say who is in the cluster: %s", self._folder.name, error)
