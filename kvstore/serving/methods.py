"""Methods: from the names in a .proto to the code that serves them. Messages pass as bytes; the code parses them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc
import grpc.aio

from kvstore import boundary
from kvstore.errors import InvalidRequest
from kvstore.serving.gate import Call, Gate

Unary = Callable[[Call, bytes], Awaitable[bytes]]
"""A method with one request and one reply."""
Sending = Callable[[Call, bytes], Awaitable[None]]
"""Sends a stream of replies."""
Taking = Callable[[Call, AsyncIterator[bytes]], Awaitable[bytes]]
"""Takes a stream of requests."""


def serving(
    gate: Gate,
    service: str,
    unary: Mapping[str, Unary],
    sending: Mapping[str, Sending],
    taking: Mapping[str, Taking] = MappingProxyType({}),
) -> grpc.GenericRpcHandler:
    """A service of these methods, every call through the gate."""
    # All take a stream, which looks the same to a caller: handlers of one message only begin when it is there.
    table: dict[str, Any] = {
        **{name: grpc.stream_unary_rpc_method_handler(_unary(gate, name, work)) for name, work in unary.items()},
        **{name: grpc.stream_stream_rpc_method_handler(_sending(gate, name, work)) for name, work in sending.items()},
        **{name: grpc.stream_unary_rpc_method_handler(_taking(gate, name, work)) for name, work in taking.items()},
    }
    return grpc.method_handlers_generic_handler(service, table)


# Errors of the work that are not our mistakes: its transport has gone, or its time is over. The gate reports them.
_EXPECTED = grpc.aio.BaseError, TimeoutError


def _unary(gate: Gate, name: str, work: Unary) -> Any:
    answered = boundary.answered(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call, call.request(aiter(messages)) as message:
                with answered:
                    reply = await work(call, message)
                gate.calls.sent_bytes += len(reply)
                return reply

    return serve


def _sending(gate: Gate, name: str, work: Sending) -> Any:
    answered = boundary.answered(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> None:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call, call.request(aiter(messages)) as message:
                with answered:
                    await work(call, message)

    return serve


def _taking(gate: Gate, name: str, work: Taking) -> Any:
    answered = boundary.answered(f"grpc/{name}", *_EXPECTED)

    async def serve(messages: AsyncIterator[bytes], context: Any) -> bytes:
        with gate.calls.watch(name, context):
            async with gate.admit(context) as call:
                with answered:
                    reply = await work(call, aiter(messages))
                gate.calls.sent_bytes += len(reply)
                return reply

    return serve


class GateOthers(grpc.aio.ServerInterceptor):
    """Health and reflection pass the gate as well: a stranger learns nothing. Their handlers come ready made."""

    def __init__(self, gate: Gate, service: str) -> None:
        self._gate = gate
        self._ours = f"/{service}/"  # its handlers do it themselves

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(self._ours):
            return handler
        name = handler_call_details.method.lstrip("/")
        serializers = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._replying(name, handler.unary_unary), *serializers)
        if handler.unary_stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._streaming(name, handler.unary_stream), *serializers)
        assert handler.stream_stream is not None, "health and reflection have no other kind"
        work = self._streaming(name, handler.stream_stream, many=True)
        return grpc.stream_stream_rpc_method_handler(work, *serializers)

    def _replying(self, name: str, work: Any) -> Any:
        async def serve(requests: AsyncIterator[Any], context: Any) -> Any:
            with self._gate.calls.watch(name, context):
                async with self._gate.admit(context) as call:
                    request = await _only(call, requests)
                    with boundary.answered(f"grpc/{name}", *_EXPECTED):
                        return await work(request, context)

        return serve

    def _streaming(self, name: str, work: Any, many: bool = False) -> Any:
        async def serve(requests: AsyncIterator[Any], context: Any) -> None:
            with self._gate.calls.watch(name, context):
                async with self._gate.admit(context) as call:
                    given = _bounded(call, requests) if many else await _only(call, requests)
                    with boundary.answered(f"grpc/{name}", *_EXPECTED):
                        replies = work(given, context)
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


async def _bounded(call: Call, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Pass the requests on; the first has to come soon."""
    coming = aiter(requests)
    request = await call.first(coming)
    while request is not None:
        yield request
        with call.waits():
            request = await anext(coming, None)
