"""Answers COPY: stores copies of another node's pages in this node. See ``wire.copy_order``.

The data server does this as a client of its own node, so a copy arrives like every page of another node. A copy counts
only when the node has sealed it.
"""

from __future__ import annotations

from typing import Final

from kvstore.client.local.hints import name_as
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.peer_caching import LATE, PeerCaching
from kvstore.client.local.peer_reads import PeerReader, TimeBudget
from kvstore.cluster.data_connection import Exchange
from kvstore.cluster.transport import RATE_MIN
from kvstore.errors import InvalidRequest, PermissionDenied, Unavailable
from kvstore.shm.traffic import TrafficBucket
from kvstore.wire.copy_order import CopyOrder, unpack_copy
from kvstore.wire.data import FrameKind, pack_end

COPY_S: Final = 3.0  # the longest time for an order, in addition to its bytes' time at ``RATE_MIN``
NODE_S: Final = 1.0  # the longest wait for each answer of the node's daemon


def copy_limit_s(nbytes: int) -> float:
    """Return how long the target of an order of ``nbytes`` may take."""
    return COPY_S + nbytes / RATE_MIN


class CopyHandler:
    """The handler of COPY of one node, for all threads. Ends with ``close``."""

    def __init__(self, node: LocalNode, bucket: TrafficBucket) -> None:
        self._node = node
        self._bucket = bucket
        self._peer_reader = PeerReader(node.path)

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """Answer COPY. Raises PermissionDenied, InvalidRequest."""
        if not exchange.caller.operator:
            raise PermissionDenied("only nodes and operators may order copies")
        order = unpack_copy(body)
        if order.source == self._node.name:
            raise InvalidRequest("source", f"must be another node than the target (got {order.source!r})")
        try:
            pages, reason = self._copy(order)
        except Unavailable:  # the daemon is not responding; nothing is lost, the source tries again
            pages, reason = 0, LATE
        exchange.reply(FrameKind.COPIED, pack_end(pages, reason))

    def _copy(self, order: CopyOrder) -> tuple[int, str]:
        nbytes = len(order.keys) * order.chain.frame_class.page_bytes
        budget = TimeBudget(copy_limit_s(nbytes), local_wait_s=NODE_S)

        def name(mapped: MappedNode, timeout_s: float) -> None:
            name_as(mapped, order.chain.root, order.about, timeout_s)

        caching = PeerCaching(self._node, order.chain)
        return caching.copy_from(order.source, self._peer_reader, order.keys, budget, name, self._bucket)

    def close(self) -> None:
        """Close the connections to other nodes."""
        self._peer_reader.close()
