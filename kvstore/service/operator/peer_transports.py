"""How pages of other nodes come to this machine: which transports are live to which node, and why others are not."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvstore.client.local.transports import missing_here
from kvstore.transfer.peers import PeersFile
from kvstore.transfer.plan import fit_for

PEERS_TOLD_MAX: Final = 64  # of a whole answer, which is one message


def peer_transports(folder: Path) -> dict[str, dict[str, str]]:
    """By node and transport, why pages do not come that way; "": they do. As both ends declare, not as was tried."""
    view = PeersFile(folder).look()
    if view is None:
        return {}
    ours = missing_here()
    others = [peer for name, peer in sorted(view.peers.items()) if name != view.node]
    return {peer.name: fit_for(ours, peer.transports) for peer in others[:PEERS_TOLD_MAX]}
