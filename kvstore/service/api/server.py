"""ApiServer: the gRPC server of a daemon, in a thread and an event loop of its own.

It is a client of its own node: one store on an in-process channel serves all remote callers, so pages are proven, read
and written by the same code as on this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.client.local.node import LocalNode
from kvstore.client.store import Store
from kvstore.config import NodeConfig
from kvstore.service.api.admin import AdminCalls
from kvstore.service.api.holdings import sweep_forever
from kvstore.service.api.methods import SERVICE, GateOthers, handlers
from kvstore.service.api.objects import ObjectCalls
from kvstore.service.api.pages import PageCalls
from kvstore.service.api.reservations import Leases, Reservations
from kvstore.service.api.wire import MESSAGE_BYTES_MAX
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.local.in_process import InProcessChannel
from kvstore.service.node.node import Node
from kvstore.serving import listening
from kvstore.serving.gate import CALLS_OUTSIDE, Gate
from kvstore.serving.identities import Identities
from kvstore.serving.lanes import Threads
from kvstore.serving.loop import LoopServer

GRACE_S: Final = 2.0  # for calls under way when the daemon ends
CONNECTIONS_MAX: Final = 2048
HANDSHAKE_MS: Final = 5000  # who connects and says nothing is let go
IDLE_MS: Final = 300_000  # a connection without calls; its client connects again with the next one
# Calls of one connection: at least, and one part of so many of ``rpcs_max``. What comes beyond it gRPC answers, where
# a client does not wait, before it makes a call of it; that is the cheapest no there is.
STREAMS_MIN, STREAMS_SHARE = 16, 16
PENDING_MIN: Final = 64
BUFFER_PAGES: Final = 4  # of the largest kind, which have to fit in the buffers of all calls

log = logging.getLogger("kvstore.api")


class _Here:
    """This daemon's node, as the client library knows an embedded one. It does not end with its client."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher

    def channel(self) -> InProcessChannel:
        """See ``client.local.ends.Embedded``."""
        return InProcessChannel(self._node, self._dispatcher)

    def close(self) -> None:
        """The daemon ends its node itself."""


class ApiServer(LoopServer):
    """Serves from ``start`` to ``stop``.

    Raises:
        InvalidRequest: what is configured would let strangers in, or show tokens; names the setting and the remedy.
    """

    def __init__(self, config: NodeConfig, node: Node, dispatcher: Dispatcher) -> None:
        super().__init__("kvstore-api", Identities(config.identities))
        self._plan = listening.plan(config, self.identities)
        self._config = config
        self._node = node
        self._dispatcher = dispatcher

    def under_way(self) -> int:
        """Calls that were admitted and have not ended."""
        return self._gate.under_way if self._gate is not None else 0

    async def _run(self, stopping: asyncio.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(log_unexpected)
        config, threads = self._config, Threads()
        folder = self._node.folder
        with contextlib.ExitStack() as ends:
            store = Store(LocalNode(folder, embedded=_Here(self._node, self._dispatcher)))
            ends.callback(store.close)
            ends.callback(threads.close)
            extent_bytes = self._node.look(lambda _, state: state.segment.extent_bytes)
            buffers = max(config.rpc_buffers, BUFFER_PAGES * extent_bytes)
            gate = Gate(self.identities, threads, config.rpcs_max, config.rpc_timeout_s_max, buffers)
            self._gate = gate
            reservations = Reservations(store, self._node, self.identities)
            leases = Leases(store, self._node, self.identities)

            def sweep(everything: bool = False) -> None:
                reservations.held.sweep(everything)
                leases.held.sweep(everything)

            # The gate refuses politely; this bounds what strangers may have on its way there.
            outside = CALLS_OUTSIDE * config.rpcs_max
            gating = [GateOthers(gate)]
            server = grpc.aio.server(
                options=options(config.rpcs_max, max(STREAMS_MIN, config.rpcs_max // STREAMS_SHARE)),
                interceptors=gating,
                maximum_concurrent_rpcs=outside,
            )
            admin = AdminCalls(store, self._node, self._dispatcher.admin)
            objects = ObjectCalls(store, buffers)
            pages = PageCalls(store, self._node, reservations, objects.bytes_max)
            server.add_generic_rpc_handlers((handlers(gate, pages, reservations, leases, objects, admin),))
            alive = await add_others(server, SERVICE)
            ends.callback(sweep, True)
            await self._serve_until_stopped(server, alive, sweep, stopping)

    async def _serve_until_stopped(
        self,
        server: grpc.aio.Server,
        alive: health.aio.HealthServicer,
        sweep: Callable[[], None],
        stopped: asyncio.Event,
    ) -> None:
        self.addresses = self._plan.bind(server)
        await server.start()
        self._started.set()
        sweeping = asyncio.create_task(sweep_forever(sweep))
        assert self._gate is not None, "set by ``_run``"
        measuring = asyncio.create_task(self._gate.keep_looking())
        stopping = asyncio.create_task(stopped.wait())
        try:
            ended, _ = await asyncio.wait({stopping, sweeping}, return_when=asyncio.FIRST_COMPLETED)
            if sweeping in ended:
                sweeping.result()  # it failed: without it leases would never end, so the daemon does
        finally:
            sweeping.cancel()
            measuring.cancel()
            await alive.enter_graceful_shutdown()
            await server.stop(GRACE_S)
            self._plan.unlink()


def options(rpcs_max: int, streams: int) -> list[tuple[str, Any]]:
    """Limits of a gRPC server; ``streams``: calls of one connection, more wait at the client."""
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", streams),
        # Else gRPC counts calls that have ended, but are not forgotten yet: clients who keep to the bound are refused.
        ("grpc.http.overload_protection", 0),
        # Calls that nobody has looked at yet. More are cancelled without a look: to look at one in order to refuse it
        # costs as much as to answer a short one. Some of them beyond the first bound, all beyond the second one.
        ("grpc.server.max_pending_requests", max(PENDING_MIN, rpcs_max)),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max(PENDING_MIN, rpcs_max)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
        ("grpc.so_reuseport", 0),  # two daemons on one port would each get some of the calls
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.keepalive_time_ms", 60000),  # finds clients whose machine has gone
        ("grpc.keepalive_timeout_ms", 20000),
        ("grpc.default_compression_algorithm", 0),
    ]


async def add_others(server: grpc.aio.Server, service: str) -> health.aio.HealthServicer:
    """Health of ``service``, and reflection."""
    alive = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    await alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(names, server)
    return alive


def log_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What an event loop does with a failure that nobody waits for."""
    log.error("%s", context.get("message"), exc_info=context.get("exception"))
