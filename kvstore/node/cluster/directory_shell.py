"""DirectoryShell: this node's part of the directory, behind FIND, ANNOUNCE and LIST of its data server."""

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
from kvstore.model.prefix import Fingerprints, veil_of
from kvstore.wire.data import FrameKind

DECIDED: Final = boundary.StateGuard("state/directory")  # around what changes it; to ask it changes nothing
LOOK_S: Final = 0.5  # how often it looks who is still there, where the members are the same
TURN_PAGES: Final = 4096  # looked up in one turn, which takes some 10 ms in a directory of 10 million entries
TURN_WAIT_S: Final = 0.2  # for all turns of one request: a reader takes an owner that says nothing for 0.3 s for dead


class DirectoryShell:
    """Lives in the data server's process. Its threads share it, in turns that give each caller the same time.

    Args:
        bytes_max: see ``DirectoryOwner``.
        peers: who there is. What others told is forgotten when they leave.

    Attributes:
        members: what the catalog tells; None until it does: nothing is announced or asked until then.
        membership: what ``status`` says of the data server's own place in its pool.
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
        """For ``cluster.data_listener``."""
        return {
            FrameKind.FIND: self.find,
            FrameKind.ANNOUNCE: self.announce,
            FrameKind.LIST: self.list,
            FrameKind.STATUS: self.tell,
        }

    def find(self, exchange: Exchange, body: memoryview) -> None:
        """Answer FIND. Raises PermissionDenied where these pages are not the caller's."""
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
        """Answer ANNOUNCE. Raises PermissionDenied where the caller is not that node."""
        batch, daemon = unpack_announce(body)
        nodes = self.members.nodes() if self.members is not None else []
        its = next((each.process for each in nodes if each.name == batch.node), "")
        if not exchange.caller.operator or its != f"{daemon:016x}":
            raise PermissionDenied(f"only {batch.node[:80]} itself may announce its pages, as the catalog lists it")
        with self._turns.turn(exchange.caller, TURN_WAIT_S):
            now_s = self._look()
            with DECIDED:
                wanted = self._owner.apply(batch, now_s)
        exchange.reply(FrameKind.ANNOUNCED, pack_announced(wanted))

    def list(self, exchange: Exchange, body: memoryview) -> None:
        """Answer LIST. Raises PermissionDenied where the caller is not a node."""
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators are told what a directory lists")
        node, start = unpack_list(body)
        with self._turns.turn(exchange.caller, TURN_WAIT_S):
            self._look()
            entries = self._owner.directory.entries_of(node, start, LISTED_MAX)
        exchange.reply(FrameKind.LISTED, pack_listed(entries))

    def tell(self, exchange: Exchange, body: memoryview) -> None:
        """Answer STATUS with one page of the state. Raises PermissionDenied where the caller is not an operator."""
        if not exchange.caller.operator:
            raise PermissionDenied("only operators are told what a directory holds")
        page = state_page(self.status(exchange.caller), bytes(body).decode(errors="replace"))
        exchange.reply(FrameKind.STATE, json.dumps({**page, "connections": exchange.connections}).encode())

    def status(self, caller: Owner = ALONE) -> dict[str, Any]:
        """Entries and their memory; how each task of the data server's membership fares; how long ago the catalog was
        heard of, and what each node told last."""
        with self._turns.turn(caller, TURN_WAIT_S):
            now_s = self._look()
            view, directory, heard_s = self._peers.look(), self._owner.directory, self._owner.heard_s
            return {
                "membership": self.membership(),
                "catalog_heard_ago_s": round(boot_s() - view.heard_s, 3) if view is not None else None,
                "peers": sorted(view.peers) if view is not None else [],
                "entries": len(directory),
                "entries_bytes": directory.nbytes,
                "refused": directory.refused,
                "heard_ago_s": {name: round(now_s - heard_s[name], 3) for name in directory.nodes},
            }

    def _look(self) -> float:
        """Tell the owner who is there, where that changed, and from time to time. The time now."""
        now_s, view = time.monotonic(), self._peers.look()
        if view is not self._seen or now_s >= self._looked_s + LOOK_S:
            self._seen, self._looked_s = view, now_s
            with DECIDED:
                self._owner.look(view.peers if view is not None else (), now_s)
        return now_s
