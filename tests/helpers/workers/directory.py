"""A data server that is a directory and nothing else: ``python -m tests.helpers.workers.directory``.

Five nodes have told it a million pages each. Callers are tenants, by the names that they give. It ends with its stdin.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore.cluster.data_listener import Server
from kvstore.cluster.directory import AnnounceBatch
from kvstore.limits import NamedOwner
from kvstore.node.cluster.directory_shell import DirectoryShell
from kvstore.wire.data import Hello

NODES, PAGES, BATCH = 5, 1 << 20, 1 << 16


class Tenant(NamedOwner):
    """A caller to whom every salt belongs."""

    def check_salt(self, salt: str) -> None:
        """Nothing is refused."""


def admit(hello: Hello, names: Sequence[str]) -> Tenant:
    return Tenant(hello.caller)


def main() -> None:
    """Until stdin ends."""
    peers: Any = SimpleNamespace(look=lambda: SimpleNamespace(peers=dict.fromkeys(nodes), heard_s=0.0))
    nodes = [f"n{number}" for number in range(NODES)]
    shell = DirectoryShell(256 << 20, peers)
    members: Any = SimpleNamespace(secret=bytes(32), nodes=list)
    shell.members = members
    pages = np.random.default_rng(1).integers(0, 1 << 63, PAGES, dtype=np.uint64)
    for place, name in enumerate(nodes):
        for batch in range(PAGES // BATCH):
            part, whole = pages[BATCH * batch :][:BATCH], batch == PAGES // BATCH - 1
            shell._owner.directory.apply(AnnounceBatch(name, place, batch, part, np.ones(BATCH, np.uint8), whole))
    server = Server("directory", shell.handlers, admit)
    print(json.dumps({"event": "serves", "address": server.start("127.0.0.1", 0)}), flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
