"""The part of the directory that this node owns: FIND, ANNOUNCE, BURY, LIST and STATUS of its data server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import numpy as np

from kvstore import boundary
from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.data_connection import Exchange, Handler
from kvstore.cluster.directory import Doubt, Locations, join
from kvstore.cluster.directory_messages import (
    LISTED_MAX,
    pack_announced,
    pack_found,
    pack_listed,
    state_page,
    unpack_announce,
    unpack_find,
    unpack_list,
)
from kvstore.cluster.directory_owner import DirectoryOwner
from kvstore.cluster.membership import Membership
from kvstore.cluster.peer_links import PeersFile, PoolView
from kvstore.errors import PermissionDenied
from kvstore.limits import ALONE, Owner, ThreadShares
from kvstore.model.prefix import Fingerprints, fingerprint, veil_of
from kvstore.model.tombstones import Tombstone
from kvstore.server.certificates import ktls_missing
from kvstore.wire.data import FrameKind
from kvstore.wire.object_messages import BURIED_MAX, unpack_bury
from kvstore.wire.tombstones import pack_tombstones

DECIDED: Final = boundary.StateGuard("state/directory")  # held while the directory changes; lookups do not need it
LOOK_S: Final = 0.5  # how often members are checked if the list stays the same
TURN_PAGES: Final = 4096  # pages per turn, which takes some 10 ms in a directory of 10 million entries
TURN_WAIT_S: Final = 0.2  # for all turns of one request; a reader considers an owner dead after 0.3 s of silence


class DirectoryShell:
    """The directory in the data server's process. Its threads take turns, which give each caller the same time.

    Args:
        bytes_max: see ``DirectoryOwner``.
        peers: the current members. Announcements of nodes that leave are dropped.

    Attributes:
        members: the catalog's members; None until the catalog answers. Until then nothing is announced or found.
        membership: returns the state of the data server's own membership, for ``status``.
    """

    def __init__(self, bytes_max: int, peers: PeersFile) -> None:
        self.members: Membership | None = None
        self.membership: Callable[[], dict[str, Any]] = dict
        self._owner = DirectoryOwner(bytes_max)
        self._peers = peers
        self._turns = ThreadShares("turns at the directory", "directory", 1)
        self._seen: PoolView | None = None
        self._looked_s = 0.0

    @property
    def handlers(self) -> dict[FrameKind, Handler]:
        """The handlers of these requests, for ``cluster.data_listener``."""
        return {
            FrameKind.FIND: self.find,
            FrameKind.ANNOUNCE: self.announce,
            FrameKind.BURY: self.bury,
            FrameKind.LIST: self.list,
            FrameKind.STATUS: self.send_status,
        }

    def find(self, exchange: Exchange, body: memoryview) -> None:
        """Answer FIND. Raises PermissionDenied if the caller must not read these pages."""
        namespace, pages, placement = unpack_find(body)
        exchange.caller.check_salt(namespace.salt)
        secret = self.members.secret if self.members is not None else None
        veil = np.uint64(veil_of(secret, namespace.root)) if secret is not None else None
        locations = self._find(exchange.caller, pages ^ veil if veil is not None else pages[:0], placement)
        exchange.reply(FrameKind.FOUND, pack_found(locations))

    def _find(self, caller: Owner, pages: Fingerprints, placement: int) -> Locations:
        deadline_s = time.monotonic() + TURN_WAIT_S
        parts, doubts = list[Locations](), tuple[Doubt, ...]()
        for first in range(0, max(1, len(pages)), TURN_PAGES):
            with self._turns.turn(caller, max(0.0, deadline_s - time.monotonic())):
                now_s = self._look()
                doubts = doubts if parts else self._owner.doubts(placement, now_s)
                parts.append(self._owner.directory.find(pages[first : first + TURN_PAGES]))
        return replace(join(parts, TURN_PAGES), doubts=doubts)

    def announce(self, exchange: Exchange, body: memoryview) -> None:
        """Answer ANNOUNCE. Raises PermissionDenied if the caller is not that node."""
        batch, daemon = unpack_announce(body)
        self._check_node(exchange, batch.node, daemon)
        with self._turns.turn(exchange.caller, TURN_WAIT_S):
            now_s = self._look()
            with DECIDED:
                next_number = self._owner.apply(batch, now_s)
                wanted = len(self._owner.tombstones_for(batch.node, now_s))
        exchange.reply(FrameKind.ANNOUNCED, pack_announced(next_number, wanted))

    def _check_node(self, exchange: Exchange, node: str, daemon: int) -> None:
        """Raise PermissionDenied unless the caller is this node."""
        nodes = self.members.nodes() if self.members is not None else []
        process = next((each.process for each in nodes if each.name == node), "")
        if not exchange.caller.operator or process != f"{daemon:016x}":
            raise PermissionDenied(f"only {node[:80]} may announce its pages, with the number in the catalog")

    def bury(self, exchange: Exchange, body: memoryview) -> None:
        """Answer BURY. Raises PermissionDenied if the caller is not that node."""
        node, daemon, tombstones = unpack_bury(body, time.monotonic_ns())
        self._check_node(exchange, node, daemon)
        self._keep(exchange, tombstones, node)
        with self._turns.turn(exchange.caller, TURN_WAIT_S):
            now_s = self._look()
            wanted = self._owner.tombstones_for(node, now_s)[:BURIED_MAX]
        exchange.reply(FrameKind.BURIED, pack_tombstones(wanted, time.monotonic_ns()))

    def keep_tombstones(self, exchange: Exchange, tombstones: list[Tombstone]) -> None:
        """Keep tombstones that a client decided, to return them to nodes that have older objects."""
        self._keep(exchange, tombstones, "")

    def _keep(self, exchange: Exchange, tombstones: list[Tombstone], node: str) -> None:
        secret = self.members.secret if self.members is not None else None
        if secret is None or not tombstones:
            return
        pages = [fingerprint(each.key) ^ veil_of(secret, each.root) for each in tombstones]
        with self._turns.turn(exchange.caller, TURN_WAIT_S), DECIDED:
            self._owner.bury(tombstones, pages, node)

    def list(self, exchange: Exchange, body: memoryview) -> None:
        """Answer LIST. Raises PermissionDenied if the caller is not a node or an operator."""
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators may read what a directory lists")
        node, start = unpack_list(body)
        with self._turns.turn(exchange.caller, TURN_WAIT_S):
            self._look()
            entries = self._owner.directory.entries_of(node, start, LISTED_MAX)
        exchange.reply(FrameKind.LISTED, pack_listed(entries))

    def send_status(self, exchange: Exchange, body: memoryview) -> None:
        """Answer STATUS with one page of the state. Raises PermissionDenied if the caller is not an operator."""
        if not exchange.caller.operator:
            raise PermissionDenied("only operators may read the state of a directory")
        page = state_page(self.status(exchange.caller), bytes(body).decode(errors="replace"))
        exchange.reply(FrameKind.STATE, json.dumps({**page, "connections": exchange.connections}).encode())

    def status(self, caller: Owner = ALONE) -> dict[str, Any]:
        """Return the entries and their memory, the state of the data server's membership, and the ages of the last
        answer of the catalog and of each node's last announcement."""
        with self._turns.turn(caller, TURN_WAIT_S):
            now_s = self._look()
            view, directory, heard_s = self._peers.look(), self._owner.directory, self._owner.heard_s
            return {
                "membership": self.membership(),
                "ktls_missing": ktls_missing(),
                "catalog_heard_ago_s": round(boot_s() - view.heard_s, 3) if view is not None else None,
                "peers": sorted(view.peers) if view is not None else [],
                "entries": len(directory),
                "entries_bytes": directory.nbytes,
                "refused": directory.refused,
                "heard_ago_s": {name: round(now_s - heard_s[name], 3) for name in directory.nodes},
            }

    def _look(self) -> float:
        """Give the owner the current members if they have changed, or if ``LOOK_S`` have passed. Return the time."""
        now_s, view = time.monotonic(), self._peers.look()
        if view is not self._seen or now_s >= self._looked_s + LOOK_S:
            self._seen, self._looked_s = view, now_s
            with DECIDED:
                self._owner.look(view.peers if view is not None else (), now_s)
        return now_s
