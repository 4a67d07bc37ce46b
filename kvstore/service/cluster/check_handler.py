"""CheckHandler: answers CHECK. The data server passes it to the node's daemon, and only what changes no page."""

from __future__ import annotations

import time
from typing import Any, Final

from kvstore.client.local.node import LocalNode
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied
from kvstore.rpc import control
from kvstore.rpc.control import Op
from kvstore.tier.folder import list_nodes
from kvstore.transfer.base import Exchange
from kvstore.transfer.wire import FrameKind

CALLS: Final = frozenset(("stats", "scrub", "scrub_status", "verify", "heard"))
"""The admin calls by which a node is verified; ``scrub`` drops what is damaged."""
ANSWER_S: Final = 60.0
BEAT_NS_MAX: Final = 3_000_000_000  # thirty ticks of the daemon


class CheckHandler:
    """The handler of CHECK of one node: a JSON object ``{"call": ...}``, and the daemon's answer to it."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    def __call__(self, exchange: Exchange, body: memoryview) -> None:
        """See ``Handler``. Raises PermissionDenied, InvalidRequest; NodeUnavailable where the daemon is away."""
        if not exchange.caller.operator:
            raise PermissionDenied("only operators may have a node verified")
        request: dict[str, Any] = control.unpack_json(body)
        call = request.get("call")
        if not isinstance(call, str) or call not in CALLS:
            raise InvalidRequest("call", f"is one of {', '.join(sorted(CALLS))}")
        mapped = self._node.writable()
        lives = dict(list_nodes(self._node.path.parent)).get(self._node.name, False)
        if not lives or time.monotonic_ns() - mapped.header.heartbeat_ns > BEAT_NS_MAX:
            raise NodeUnavailable(f"{self._node.name}: its daemon is not running, or hangs")
        reply = mapped.exchange(Op.ADMIN, body=[control.pack_json(request)], timeout_s=ANSWER_S)
        exchange.reply(FrameKind.CHECKED, bytes(reply.body))
