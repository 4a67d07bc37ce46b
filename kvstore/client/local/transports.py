"""The table of transports that a process of a node has: a transport more is a class, and a row here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvstore.transfer import nixl_agent
from kvstore.transfer.nixl import NixlTransport
from kvstore.transfer.transport import TcpTransport, TransportKind

TRANSPORTS: Final[Mapping[str, TransportKind]] = {
    "nixl": TransportKind(NixlTransport, nixl_agent.missing, guarded=False),
    "tcp": TransportKind(TcpTransport, lambda: "", bytes_per_s=2e9),
}
"""By the names under which nodes offer them in the catalog. Of two that are equally fast the first is taken."""


def missing_here() -> dict[str, str]:
    """By transport, why this machine has it not; "": it has."""
    return {name: kind.missing() for name, kind in TRANSPORTS.items()}
