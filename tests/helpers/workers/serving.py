"""A data server in a process of its own, that can be stopped and killed: ``python -m tests.helpers.workers.serving``.

Its argument is a JSON object: ``folder`` of the node, ``way`` (unix, tcp, tls, nixl), ``socket`` for unix, ``files``
of a certificate for tls, ``armed``: where that file is, the pages of the next reply leave while it is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvstore
from kvstore.client.local.lease import RunLease
from kvstore.client.local.node import LocalNode
from kvstore.cluster.data_connection import Caller
from kvstore.cluster.data_listener import Server
from kvstore.cluster.nixl import NixlAgent
from kvstore.node.cluster import page_handlers
from kvstore.node.cluster.page_handlers import LendHandler, ReadHandler
from kvstore.server.certificates import ServerCertificate
from kvstore.server.identities import LOCAL
from kvstore.wire.data import FrameKind, Hello

PATIENCE_S = 10.0


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    """Whoever asks is an operator."""
    return LOCAL


def lose_when_armed(node: LocalNode, armed: Path) -> None:
    """Replies of both handlers look whether they are to lose their pages, before their bytes leave."""

    def leave(lease: int) -> None:
        if not armed.exists():
            return
        armed.unlink()
        mapped = node.writable()
        if lease:
            RunLease(mapped, 1, lease).release()
        with kvstore.connect(node.name) as store:
            store.evict(pages=1 << 20)

    pack_range, pack_lent = page_handlers.pack_range, page_handlers.pack_lent

    def ranged(*given: Any) -> bytes:
        leave(0)
        return pack_range(*given)

    def lent(loan: Any) -> bytes:
        leave(loan.lease)
        return pack_lent(loan)

    page_handlers.pack_range, page_handlers.pack_lent = ranged, lent


def handlers(node: LocalNode, agent: Any) -> dict[FrameKind, Any]:
    """What it answers."""
    return {FrameKind.READ: ReadHandler(node), **LendHandler(node, agent).handlers}


def main(told: dict[str, Any]) -> None:
    """Serve until the end of stdin."""
    node = LocalNode(Path(told["folder"]), timeout_s=PATIENCE_S)
    lose_when_armed(node, Path(told["armed"]))
    tls = ServerCertificate(*map(Path, told["files"])).for_sockets() if told["way"] == "tls" else None
    server = Server(node.name, handlers(node, lambda: NixlAgent(f"worker-{node.name}")), admit, tls=tls)
    if told["way"] == "unix":
        server.start_unix(Path(told["socket"]), 0o600)
        address = f"unix:{told['socket']}"
    else:
        address = server.start("127.0.0.1", 0)
    print(json.dumps({"event": "serves", "address": address, "process": server.process}), flush=True)
    sys.stdin.read()
    server.stop()
    node.close()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
