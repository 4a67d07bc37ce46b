"""The gRPC API of a node: the methods of store.proto, and the code that serves them.

The server is a client of its own node. One store on an in-process channel serves all remote callers, so that pages are
proven, read and written by the same code as for clients on this machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import grpc

from kvstore.client.local.node import LocalNode
from kvstore.client.local.peer_reads import PeerReader
from kvstore.client.local.pool_objects import PoolObjects
from kvstore.client.local.store import LocalStore
from kvstore.config import NodeConfig
from kvstore.node.api.admin import AdminCalls
from kvstore.node.api.objects import ObjectCalls
from kvstore.node.api.pages import PageCalls, PageWatch
from kvstore.node.api.reservations import Leases, Reservations, sweep_forever
from kvstore.node.dispatch import Dispatcher, InProcessChannel
from kvstore.node.node import Node
from kvstore.server.gate import Gate
from kvstore.server.grpc_server import Limits, LoopServer, ReceiveStream, SendStream, Unary, serve_methods
from kvstore.server.request_cost import with_buffers

SERVICE: Final = "kvstore.v1.Store"


def handlers(
    gate: Gate,
    pages: PageCalls,
    reservations: Reservations,
    leases: Leases,
    objects: ObjectCalls,
    admin: AdminCalls,
    watch: PageWatch,
) -> grpc.GenericRpcHandler:
    """Return the whole service, with every call going through the gate."""
    unary: dict[str, Unary] = {
        "About": pages.about,
        "Lookup": pages.lookup,
        "Prefetch": pages.prefetch,
        "Reserve": reservations.reserve,
        "Seal": reservations.seal,
        "Revoke": reservations.revoke,
        "Lease": leases.lease,
        "Renew": leases.renew,
        "Release": leases.release,
        "ContainsObjects": objects.contains,
        "DeleteObjects": objects.delete,
        "ClearObjects": objects.clear,
        "Stats": admin.stats,
        "Pages": admin.pages,
        "Evict": admin.evict,
        "Pin": admin.pin,
        "Unpin": admin.unpin,
        "Pins": admin.pins,
        "Verify": admin.verify,
        "Admin": admin.admin,
    }
    sending: dict[str, SendStream] = {
        "Read": pages.read,
        "GetObject": objects.get,
        "Watch": admin.watch,
        "WatchPages": watch.pages,
    }
    taking: dict[str, ReceiveStream] = {"Write": pages.write, "PutObject": objects.put}
    return serve_methods(gate, SERVICE, with_buffers(SERVICE, unary), with_buffers(SERVICE, sending), taking)


# Calls of one connection: the minimum, and the part of ``rpcs_max``. If a client does not wait, gRPC refuses further
# calls before it creates them, which is the cheapest refusal.
STREAMS_MIN, STREAMS_SHARE = 16, 16
BUFFER_PAGES: Final = 4  # the buffers of all calls have room for this many pages of the largest size


class _OwnNode:
    """This daemon's node, with the interface of an embedded node. Closing the client does not end the node."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher

    def channel(self) -> InProcessChannel:
        """Return a new channel to the node."""
        return InProcessChannel(self._node, self._dispatcher)

    def close(self) -> None:
        """Do nothing: the daemon ends its node."""


class ApiServer(LoopServer):
    """Serves calls from ``start`` to ``stop``. The node starts before the server and stops after it."""

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
        node = LocalNode(self._node.folder, embedded=_OwnNode(self._node, self._dispatcher))
        node.pool_objects = PoolObjects(PeerReader(self._node.folder))
        store = LocalStore(node)
        ends.callback(store.close)
        self._reservations = Reservations(store, self._node, self.identities)
        self._leases = Leases(store, self._node, self.identities)
        admin = AdminCalls(store, self._node, self._dispatcher.admin)
        objects = ObjectCalls(store, self._limits.buffer_bytes)
        pages = PageCalls(store, self._node, self._reservations, objects.bytes_max)
        return handlers(gate, pages, self._reservations, self._leases, objects, admin, PageWatch(self._node))

    def _background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (sweep_forever(self._sweep),)  # ends leases and reservations past their deadline

    def _on_calls_end(self) -> None:
        self._sweep(everything=True)

    def _sweep(self, everything: bool = False) -> None:
        self._reservations.holdings.sweep(everything)
        self._leases.holdings.sweep(everything)
