"""LoopServer: the gRPC server of a daemon, in a thread with an event loop. Messages pass as bytes; the code of each
method parses them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore import boundary
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest
from kvstore.limits import GRPC_PART, connections_max
from kvstore.server import listening
from kvstore.server.call_counts import Calls
from kvstore.server.gate import CALLS_OUTSIDE, Call, Gate, Threads
from kvstore.server.grpc_connections import GrpcConnections
from kvstore.server.identities import Identities
from kvstore.wire.grpc import MESSAGE_BYTES_MAX

Unary = Callable[[Call, bytes], Awaitable[bytes]]
"""A method with one request and one reply."""
SendStream = Callable[[Call, bytes], Awaitable[None]]
"""A method that sends a stream of replies."""
ReceiveStream = Callable[[Call, AsyncIterator[bytes]], Awaitable[bytes]]
"""A method that receives a stream of requests."""


def serve_methods(
    gate: Gate,
    service: str,
    unary: Mapping[str, Unary],
    send_streams: Mapping[str, SendStream],
    receive_streams: Mapping[str, ReceiveStream] = MappingProxyType({}),
) -> grpc.GenericRpcHandler:
    """Return a service with these methods. Every call passes the gate."""
    # All methods take a stream. Callers see no difference, and a unary handler would only start after its message.
    unary_reply, stream_reply = grpc.stream_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
    table: dict[str, Any] = {
        **{name: unary_reply(_unary(gate, name, work)) for name, work in unary.items()},
        **{name: stream_reply(_send_stream(gate, name, work)) for name, work in send_streams.items()},
        **{name: unary_reply(_receive_stream(gate, name, work)) for name, work in receive_streams.items()},
    }
    return grpc.method_handlers_generic_handler(service, table)


# Errors that are not bugs: the transport is gone, or the time is up. The gate reports them.
_EXPECTED = grpc.aio.BaseError, TimeoutError


def _unary(gate: Gate, name: str, work: Unary) -> Any:
    boundary_of = boundary.RequestGuard(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call, call.request(aiter(messages)) as message:
                with boundary_of:
                    reply = await work(call, message)
                gate.calls.sent_bytes += len(reply)
                return reply

    return serve


def _send_stream(gate: Gate, name: str, work: SendStream) -> Any:
    boundary_of = boundary.RequestGuard(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call, call.request(aiter(messages)) as message:
                with boundary_of:
                    await work(call, message)

    return serve


def _receive_stream(gate: Gate, name: str, work: ReceiveStream) -> Any:
    boundary_of = boundary.RequestGuard(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call:
                with boundary_of:
                    reply = await work(call, aiter(messages))
                gate.calls.sent_bytes += len(reply)
                return reply

    return serve


class GateOthers(grpc.aio.ServerInterceptor):
    """Puts health and reflection behind the gate too, so that a stranger learns nothing. Their handlers come from a
    library."""

    def __init__(self, gate: Gate, service: str) -> None:
        self._gate = gate
        self._ours = f"/{service}/"  # these handlers use the gate themselves

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._ours):
            return handler
        name = handler_call_details.method.lstrip("/")
        serializers = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._wrap_unary(name, handler.unary_unary), *serializers)
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._wrap_stream(name, handler.unary_stream), *serializers)
        assert handler.stream_stream is not None, "health and reflection have no other kind"
        work = self._wrap_stream(name, handler.stream_stream, is_stream=True)
        return grpc.stream_stream_rpc_method_handler(work, *serializers)

    def _wrap_unary(self, name: str, work: Any) -> Any:
        async def serve(requests: AsyncIterator[Any], context: Any) -> Any:
            with self._gate.calls.watch(name, context):
                async with self._gate.admit(context) as call:
                    request = await _only(call, requests)
                    with boundary.RequestGuard(f"grpc/{name}", *_EXPECTED):
                        return await work(request, context)

        return serve

    def _wrap_stream(self, name: str, work: Any, is_stream: bool = False) -> Any:
        async def serve(requests: AsyncIterator[Any], context: Any) -> None:
            with self._gate.calls.watch(name, context):
                async with self._gate.admit(context) as call:
                    argument = _pass_on(call, requests) if is_stream else await _only(call, requests)
                    with boundary.RequestGuard(f"grpc/{name}", *_EXPECTED):
                        replies = work(argument, context)
                        if isinstance(replies, Awaitable):
                            with call.waits():  # usually for changes of health
                                await replies
                            return
                        async for reply in replies:
                            call.check()
                            await context.write(reply)

        return serve


async def _only(call: Call, requests: AsyncIterator[Any]) -> Any:
    request = await call.first(aiter(requests))
    if request is None:
        raise InvalidRequest("request", "is missing")
    return request


async def _pass_on(call: Call, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Pass the requests on. The first one has to arrive soon."""
    iterator = aiter(requests)
    request = await call.first(iterator)
    while request is not None:
        yield request
        with call.waits():
            request = await anext(iterator, None)


START_S: Final = 10.0
STOP_S: Final = 10.0
GRACE_S: Final = 2.0  # for running calls when the daemon ends
CONNECTIONS_MAX: Final = 2048
HANDSHAKE_MS: Final = 5000  # a silent new connection is closed after this time
IDLE_MS: Final = 300_000  # a connection without calls is closed; its client connects again for the next call
PENDING_MIN: Final = 64


@dataclass(frozen=True)
class Limits:
    """The limits of a server.

    Attributes:
        rpcs_max: running calls.
        call_s_max: the longest time of one call.
        buffer_bytes: buffers of all calls.
        streams_max: calls of one connection; further calls wait at the client.
        ping_ms_min: the least time between two keepalive pings of a client.
    """

    rpcs_max: int
    call_s_max: float
    buffer_bytes: int
    streams_max: int
    ping_ms_min: int = 5000


class LoopServer(ABC):
    """Serves one service from ``start`` to ``stop``, together with health and reflection. Every call passes the gate.

    Args:
        name: the name of its thread.
        service: full name, as in its .proto.

    Attributes:
        addresses: the addresses at which it listens, after ``start``.
        identities: who may call.

    Raises:
        InvalidRequest: the configuration would admit strangers, or send tokens unencrypted. The message names the
            setting and the remedy.
    """

    def __init__(self, name: str, service: str, config: DaemonConfig, limits: Limits) -> None:
        self.addresses: list[str] = []
        self.identities = Identities(config.identities)
        self._service = service
        self._plan = listening.plan(config, self.identities)
        self._limits = limits
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._alive: health.aio.HealthServicer | None = None
        self._gate: Gate | None = None

    def start(self) -> None:
        """Listen and serve. Sets ``addresses``. Raises InvalidRequest if the server cannot listen at an address."""
        self._thread.start()
        if not self._ready.wait(START_S):
            raise InvalidRequest("listen", f"did not start within {START_S:g} s")
        if self._failure is not None:
            raise self._failure

    @property
    def calls(self) -> Calls | None:
        """The counts of all calls; None before ``start``."""
        return self._gate.calls if self._gate is not None else None

    def under_way(self) -> int:
        """Calls that were admitted and have not ended."""
        return self._gate.under_way if self._gate is not None else 0

    def reload(self) -> None:
        """Read the identities again. A signal handler may call it: the loop does the work."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self.identities.reload)

    def retire(self) -> None:
        """Report through the health service that clients should use another server. Calls are still served."""
        if self._loop is not None and self._alive is not None:
            shutdown = self._alive.enter_graceful_shutdown()
            with contextlib.suppress(RuntimeError):
                asyncio.run_coroutine_threadsafe(shutdown, self._loop)

    def stop(self) -> None:
        """Accept no more calls. Running calls are cancelled after a grace period."""
        if self._loop is not None and self._stopping is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stopping.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_S)

    # --- what is served ---------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(self, gate: Gate, ends: contextlib.ExitStack) -> grpc.GenericRpcHandler:
        """Open the service. ``ends`` closes its resources after the last step of a call has ended."""

    def _background(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Return coroutines that run next to calls until cancelled, each as a ``boundary.task_loop``."""
        return ()

    @abstractmethod
    def _on_calls_end(self) -> None:
        """Handle the end of the last call. Steps of calls might still run in threads."""

    # --- in the loop ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except InvalidRequest as error:
            if self._ready.is_set():
                raise
            self._failure = error
            self._ready.set()

    async def _run(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(boundary.report_loop_error)
        limits, threads = self._limits, Threads()
        with contextlib.ExitStack() as ends:
            gate = Gate(self.identities, threads, limits.rpcs_max, limits.call_s_max, limits.buffer_bytes)
            handler = self._open(gate, ends)
            ends.callback(threads.close)
            ends.callback(self._on_calls_end)
            server = grpc.aio.server(
                options=_options(limits),
                interceptors=[GateOthers(gate, self._service)],
                # The gate refuses calls with a status. This bounds the calls that have not reached it yet.
                maximum_concurrent_rpcs=CALLS_OUTSIDE * limits.rpcs_max,
            )
            server.add_generic_rpc_handlers((handler,))
            self._alive = await _add_others(server, self._service)
            self.addresses = self._plan.bind(server)
            await server.start()
            gate.connections = GrpcConnections(self.addresses, connections_max(GRPC_PART, CONNECTIONS_MAX))
            self._gate = gate
            self._ready.set()
            await self._run_until_stop(server, self._alive, gate, self._stopping)

    async def _run_until_stop(
        self, server: grpc.aio.Server, alive: health.aio.HealthServicer, gate: Gate, stopping: asyncio.Event
    ) -> None:
        stop = asyncio.create_task(stopping.wait())
        looks = [
            boundary.task_loop("task/gate", gate.look),
            boundary.task_loop("task/connections", gate.connections.turn),
        ]
        tasks = [asyncio.create_task(work) for work in (*looks, *self._background())]
        try:
            ended, _ = await asyncio.wait({stop, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await alive.enter_graceful_shutdown()
            await server.stop(GRACE_S)
            self._plan.unlink()


def _options(limits: Limits) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_metadata_size", 16 << 10),
        ("grpc.max_concurrent_streams", limits.streams_max),
        # Without this, gRPC also counts ended calls that it still remembers, and refuses clients within the bound.
        ("grpc.http.overload_protection", 0),
        # These bound calls that no code has seen yet: beyond the first some are cancelled, beyond the second all.
        # To refuse a call in code would cost as much as to answer a short one.
        ("grpc.server.max_pending_requests", max(PENDING_MIN, limits.rpcs_max)),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max(PENDING_MIN, limits.rpcs_max)),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", IDLE_MS),
        ("grpc.max_allowed_incoming_connections", connections_max(GRPC_PART, CONNECTIONS_MAX)),
        ("grpc.so_reuseport", 0),  # two daemons on one port would each get some of the calls
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", limits.ping_ms_min),
        ("grpc.keepalive_time_ms", 60000),  # finds clients whose machine has gone
        ("grpc.keepalive_timeout_ms", 20000),
        ("grpc.default_compression_algorithm", 0),
    ]


async def _add_others(server: grpc.aio.Server, service: str) -> health.aio.HealthServicer:
    """Add the health service and reflection."""
    alive = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
    await alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    reflection.enable_server_reflection(names, server)
    return alive
