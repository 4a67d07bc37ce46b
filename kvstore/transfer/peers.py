"""Peers: who else is in a node's pool, as a small file in its folder says.

The node's data server writes it (``service.cluster.view``); the daemon and its clients read it, and never ask the
catalog themselves. With the catalog away the last view stays; ``heard_s`` says how old it is.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from kvstore.tier.folder import NodeFolder
from kvstore.tier.plain_files import NotPlain, read_plain

NAME: Final = "peers"
LOOK_NS: Final = 100_000_000  # between two looks at the file: a reader that misses a page must not pay for one


@dataclass(frozen=True)
class PoolNode:
    """A node whose data server lives.

    Attributes:
        name: of the node.
        process: of its data server, drawn when that started.
        incarnation: of the node's memory, 16 hex digits.
        addresses: HOST:PORT of its data server, best first.
        tls: whether connections to it are encrypted.
        transports: how pages may leave it.
        tls_name: what its certificate names; "": the address.
    """

    name: str
    process: str
    incarnation: str
    addresses: tuple[str, ...] = ()
    tls: bool = False
    transports: tuple[str, ...] = ("tcp",)
    tls_name: str = ""


@dataclass(frozen=True)
class PoolView:
    """One view.

    Attributes:
        pool: what they all belong to.
        node: whose view it is.
        heard_s: when the catalog was last heard of, on the clock that counts from the machine's start.
        peers: by name; the node itself is among them.
    """

    pool: str
    node: str
    heard_s: float
    peers: dict[str, PoolNode]

    def lists(self, incarnation: int) -> bool:
        """Whether its own node, of that incarnation, is among them, and not another that has its name now."""
        mine = self.peers.get(self.node)
        return mine is not None and mine.incarnation in ("", f"{incarnation:016x}")


def write(folder: NodeFolder, view: PoolView) -> None:
    """Replace the file: who reads it sees the old view or this one. Raises OSError where the folder is gone."""
    told = {**asdict(view), "peers": [asdict(peer) for peer in view.peers.values()]}
    temporary = folder.temporary(NAME)
    temporary.unlink(missing_ok=True)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, folder.file_mode)
    with open(fd, "wb") as file:
        file.write(json.dumps(told, separators=(",", ":")).encode())
    temporary.replace(folder.path / NAME)


def forget(folder: NodeFolder) -> None:
    """The node is in no cluster."""
    (folder.path / NAME).unlink(missing_ok=True)


class PeersFile:
    """A reader. Threads may share it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._seen: tuple[tuple[int, int], PoolView | None] = (0, 0), None
        self._look_ns = 0

    def look(self) -> PoolView | None:
        """The view now, or of a moment ago; None: the node is in no cluster."""
        now_ns = time.monotonic_ns()
        if now_ns < self._look_ns:
            return self._seen[1]
        self._look_ns = now_ns + LOOK_NS
        try:
            status = os.stat(self._path)
        except OSError:
            self._seen = (0, 0), None
            return None
        identity = status.st_ino, status.st_mtime_ns
        seen, view = self._seen
        if identity != seen:
            view = _read(self._path)
            self._seen = identity, view
        return view


def _read(path: Path) -> PoolView | None:
    """What a file says; None where it is not plain or makes no sense."""
    try:
        told = json.loads(read_plain(path))
        peers = [PoolNode(**_tuples(_known(PoolNode, each))) for each in told["peers"]]
        return PoolView(**{**_known(PoolView, told), "peers": {peer.name: peer for peer in peers}})
    except (OSError, NotPlain, ValueError, TypeError, KeyError, AttributeError):
        return None


def _tuples(told: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}


def _known(kind: type[Any], told: dict[str, Any]) -> dict[str, Any]:
    return {each.name: told[each.name] for each in fields(kind) if each.name in told}
