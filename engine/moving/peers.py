"""Peers: other engines, as far as hand-offs and migrations need them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Protocol

from engine.model.piece import Piece
from engine.model.request import PrefillEvent, Request
from kvstore.model.layout import Layout

PEERS_MAX = 64

Pieces = Generator[Piece, None, None]


class Peer(Protocol):
    """Another engine, as a hand-off uses it. ``EngineClient`` is one."""

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """Ask it to compute a prompt."""
        ...

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Pieces:
        """Fetch the KV. The user of a piece compares its checksum."""
        ...

    def release(self, request_id: str) -> bool:
        """Tell it that the KV is no longer needed."""
        ...


class Peers:
    """Clients of other engines, one per address, made when first needed; the ``PEERS_MAX`` used last are kept."""

    def __init__(self, connect: Callable[[str], Peer]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._known: dict[str, Peer] = {}

    def __getitem__(self, address: str) -> Peer:
        with self._lock:
            peer = self._known.pop(address, None) or self._connect(address)
            self._known[address] = peer  # the newest, at the end
            while len(self._known) > PEERS_MAX:
                forgotten = next(iter(self._known))
                del self._known[forgotten]
            return peer
