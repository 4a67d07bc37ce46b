"""ApiServer: the gRPC API of a node.

It is a client of its own node: one store on an in-process channel serves all remote callers, so pages are proven, read
and written by the same code as on this machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import grpc

from kvstore.client.local.node import LocalNode
from kvstore.client.local.store import LocalStore
from kvstore.config import NodeConfig
from kvstore.service.api.admin import AdminCalls
from kvstore.service.api.holdings import sweep_forever
from kvstore.service.api.methods import SERVICE, handlers
from kvstore.service.api.objects import ObjectCalls
from kvstore.service.api.page_watch import PageWatch
from kvstore.service.api.pages import PageCalls
from kvstore.service.api.reservations import Leases, Reservations
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.local.in_process import InProcessChannel
from kvstore.service.node.node import Node
from kvstore.serving.gate import Gate
from kvstore.serving.loop import Limits, LoopServer

# Calls of one connection: at least, and as a part of ``rpcs_max``. Where a client does not wait, gRPC refuses further
# ones before it makes a call of them; no refusal is cheaper.
STREAMS_MIN, STREAMS_SHARE = 16, 16
BUFFER_PAGES: Final = 4  # of the largest kind, which have to fit in the buffers of all calls


class _Here:
    """This daemon's node, as the client library knows an embedded one. It does not end with its client."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher

    def channel(self) -> InProcessChannel:
        """See ``client.local.node.Embedded``."""
        return InProcessChannel(self._node, self._dispatcher)

    def close(self) -> None:
        """The daemon ends its node itself."""


class ApiServer(LoopServer):
    """Serves from ``start`` to ``stop``. Its node is started before it, and stops after it."""

    def __init__(self, config: NodeConfig, node: Node, dispatcher: Dispatcher) -> None:
        extent_bytes = node.look(lambda _, state: state.segment.extent_bytes)
        limits = Limits(
            rpcs_max=config.rpcs_max,
            call_s_max=config.rpc_timeout_s_max,
            buffer_bytes=max(config.rpc_buffers, BUFFER_PAGES * extent_bytes),
            streams_max=max(STREAMS_MIN, config.rpcs_max // STREAMS_SHARE),
        )
        super().__init__("kvstore-api", SERVICE, config, limits)
        self._node = node
        self._dispatcher = dispatcher

    def _open(self, gate: Gate, ends: contextlib.ExitStack) -> grpc.GenericRpcHandler:
        store = LocalStore(LocalNode(self._node.folder, embedded=_Here(self._node, self._dispatcher)))
        ends.callback(store.close)
        self._reservations = Reservations(store, self._node, self.identities)
        self._leases = Leases(store, self._node, self.identities)
        admin = AdminCalls(store, self._node, self._dispatcher.admin)
        objects = ObjectCalls(store, self._limits.buffer_bytes)
        pages = PageCalls(store, self._node, self._reservations, objects.bytes_max)
        return handlers(gate, pages, self._reservations, self._leases, objects, admin, PageWatch(self._node))

    def _beside(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (sweep_forever(self._sweep),)  # without it leases would never end

    def _calls_ended(self) -> None:
        self._sweep(everything=True)

    def _sweep(self, everything: bool = False) -> None:
        self._reservations.held.sweep(everything)
        self._leases.held.sweep(everything)
