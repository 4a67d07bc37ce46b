"""The gRPC API of a conductor: the calls of ``kvstore.v1.Conductor``, and the server for them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf import struct_pb2

from engine.api.wire import request_of, salt_of, tokenized
from engine.conductor.config import ConductorConfig
from engine.conductor.http.prompts import PromptMaker
from engine.conductor.shell.conductor import Conductor
from engine.conductor.shell.metrics import ConductorTally
from engine.model.request import PRIORITY_MAX, AnswerEnd, AnswerRoute, AnswerTokens, Request, ServedModel
from kvstore.errors import InvalidRequest, NodeUnavailable, PermissionDenied
from kvstore.pb import conductor_pb2 as pb
from kvstore.pb import engine_pb2, store_pb2
from kvstore.server.gate import Call, Gate, parse
from kvstore.server.grpc_server import Limits, LoopServer, serve_methods
from kvstore.server.http import Route
from kvstore.server.identities import Identity
from kvstore.server.request_cost import with_buffers
from kvstore.wire.grpc import document

if TYPE_CHECKING:
    from engine.conductor.http.server import OpenAIServer  # only where HTTP is served: it loads the web framework

SERVICE: Final = "kvstore.v1.Conductor"
SETTLE_S: Final = 3.0  # a start waits this long for engines and nodes, ...
LOAD_S: Final = 30.0  # ... and this long for tokenizers: importing transformers takes seconds
LOOP_CALL_S: Final = 10.0  # another thread waits this long for work on the event loop
DRAIN_POLL_S: Final = 0.05
MESSAGE_BYTES_ALL: Final = 256 << 20  # memory of all large requests together
NAME_MAX: Final = 256  # characters of a tenant's name
# Fields of an engine's request that clients of a conductor must not set.
NOT_PASSED_ON: Final = ("generated", "prefill", "own_prefill", "handoff", "source", "grain", "no_pool", "allow_lossy")


class ConductorCalls:
    """The calls of the API. They run on the event loop of ``conductor``."""

    def __init__(
        self,
        config: ConductorConfig,
        conductor: Conductor,
        prompts: PromptMaker,
        draining: threading.Event,
    ) -> None:
        self._config = config
        self._conductor = conductor
        self._prompts = prompts
        self._draining = draining

    async def route(self, call: Call, message: bytes) -> bytes:
        """Return where the conductor would send a request now, and why."""
        return document(await self._conductor.explain(await self._route_request(call, message)))

    async def submit(self, call: Call, message: bytes) -> None:
        """Answer a request, as a stream."""
        if self._draining.is_set():
            raise NodeUnavailable("the conductor is draining: use another one")
        request = await self._route_request(call, message)
        async with contextlib.aclosing(self._conductor.answer(request)) as parts:
            tokens_sent = 0
            with call.waits():
                async for part in parts:
                    match part:
                        case AnswerRoute():
                            reply = pb.RouteReply(route=_struct(part.document))
                        case AnswerTokens():
                            reply = pb.RouteReply(tokens=_tokens(part, tokens_sent))
                            tokens_sent += len(part.ids)
                        case AnswerEnd():
                            usage = engine_pb2.Usage(**asdict(part.usage))
                            end = engine_pb2.Finished(reason=part.reason, text=part.text, usage=usage)
                            reply = pb.RouteReply(finished=end)
                    await call.send(reply.SerializeToString())

    async def status(self, call: Call, message: bytes) -> bytes:
        """Return the state of the conductor: its engines, nodes and requests."""
        parse(store_pb2.Empty, message)
        return document(self._conductor.status())

    async def _route_request(self, call: Call, message: bytes) -> Request:
        route_request = parse(pb.RouteRequest, message)
        for name in NOT_PASSED_ON:
            if getattr(route_request.request, name):
                raise InvalidRequest(name, "must not be set: the conductor decides it, or does not pass it on")
        if route_request.request.retention:
            raise InvalidRequest("retention", "must not be set: a conductor does not pass it on")
        call.caller.check_salt(salt_of(route_request.request, self._config.salt))
        tenant = tenant_of(call.caller, route_request.tenant)
        priority = route_request.priority
        if abs(priority) > PRIORITY_MAX:
            raise InvalidRequest("priority", f"must be from {-PRIORITY_MAX} to {PRIORITY_MAX} (got {priority})")
        model = self._model(route_request.model)
        return replace(
            await self._request(call, route_request.request, model),
            model=model.name,
            tenant=tenant,
            priority=priority,
            first_token_s=route_request.first_token_ms / 1e3,
            token_s=route_request.token_ms / 1e3,
            explain=route_request.explain,
        )

    def _model(self, name: str) -> ServedModel:
        models = self._conductor.models()
        if not name and len(models) > 1:
            raise InvalidRequest("model", f"is missing: one of {', '.join(each.name for each in models)}")
        matches = [each for each in models if each.name == name or not name]
        return matches[0] if matches else ServedModel(name, None, 0)  # the conductor refuses it, and lists its models

    async def _request(self, call: Call, message: engine_pb2.SubmitRequest, model: ServedModel) -> Request:
        remaining_s = min(call.left_s, self._config.request_s_max)
        request = request_of(message, self._config.salt, remaining_s)
        if not request.text:
            return request
        tokenizer = await self._prompts.tokenizer(model)
        work = partial(tokenizer.text, request.text)
        return tokenized(request, await self._prompts.run(work, call.caller, remaining_s))


def tenant_of(caller: Identity, tenant: str) -> str:
    """Return the tenant whose share a request uses: the caller, or the tenant that an operator names.

    A caller that could choose any tenant could use the shares of many tenants.

    Args:
        tenant: the name in the request; empty if there is none.

    Raises:
        PermissionDenied: the caller is not an operator, and names another tenant.
        InvalidRequest: the name is too long.
    """
    if not tenant or tenant == caller.name:
        return caller.name
    if not caller.operator:
        raise PermissionDenied(f"tenant: only operators name another tenant (got {tenant[:NAME_MAX]!r})")
    if len(tenant) > NAME_MAX:
        raise InvalidRequest("tenant", f"must have at most {NAME_MAX} characters (got {len(tenant)})")
    return tenant


class ConductorServer(LoopServer):
    """The gRPC server of a conductor. It serves from ``start`` to ``stop``, and the conductor runs on its event loop.

    Attributes:
        conductor: the conductor, after ``start``.
    """

    conductor: Conductor
    _prompts: PromptMaker

    def __init__(self, config: ConductorConfig, tally: ConductorTally, leading: Callable[[], int | None]) -> None:
        limits = Limits(
            rpcs_max=config.rpcs_max,
            call_s_max=config.request_s_max,
            buffer_bytes=MESSAGE_BYTES_ALL,
            streams_max=config.rpcs_max,
        )
        super().__init__("conductor", SERVICE, config, limits)
        self._config = config
        self._tally = tally
        self._leading = leading
        self._draining = threading.Event()

    def _open(self, gate: Gate, ends: contextlib.ExitStack) -> grpc.GenericRpcHandler:
        self.conductor = Conductor(self._config, self._tally, self._leading)
        self._prompts = PromptMaker()
        ends.callback(self._prompts.close)
        calls = ConductorCalls(self._config, self.conductor, self._prompts, self._draining)
        unary = {"Route": calls.route, "Status": calls.status}
        return serve_methods(
            gate, SERVICE, with_buffers(SERVICE, unary), with_buffers(SERVICE, {"Submit": calls.submit})
        )

    def _background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self.conductor.run(),)

    def open_http(self, routes: Mapping[str, Route]) -> OpenAIServer:
        """Start answering over HTTP. Do not call this from the event loop's thread.

        Raises:
            InvalidRequest: the address cannot be used, or a package is not installed. The error names the setting.
        """
        try:
            from engine.conductor.http.connection import HttpPatience
            from engine.conductor.http.server import open_http
        except ModuleNotFoundError as error:
            raise InvalidRequest("http", f"needs {error.name}: pip install 'kvstore[http]'") from None
        patience = HttpPatience(keepalive_s=self._config.keepalive_s)
        http = open_http(self._config, self.identities, self.conductor, routes, self._prompts, patience)
        self._run_on_loop(http.start())
        return http

    def close_http(self, http: OpenAIServer) -> None:
        """Stop answering over HTTP, after a grace period. Do not call this from the event loop's thread."""
        self._run_on_loop(http.stop())

    def _run_on_loop(self, work: Coroutine[Any, Any, None], timeout_s: float = LOOP_CALL_S) -> None:
        assert self._loop is not None, "the server has started"
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def refuse(self, http: OpenAIServer | None) -> None:
        """Begin to refuse new requests. The health service reports this."""
        self._draining.set()
        if http is not None:
            http.drain()
        self.retire()

    def drain(self, timeout_s: float, hurried: threading.Event, http: OpenAIServer | None) -> int:
        """Wait until all running requests have ended, ``timeout_s`` is over, or ``hurried`` is set.

        Do not call this from the event loop's thread. Returns how many requests still run.
        """
        until_s = time.monotonic() + timeout_s
        while self._under_way(http) and time.monotonic() < until_s and not hurried.wait(DRAIN_POLL_S):
            pass
        return self._under_way(http)

    def _under_way(self, http: OpenAIServer | None) -> int:
        return max(self.conductor.under_way, http.tally.requests_here if http is not None else 0)

    def settle(self) -> None:
        """Wait until all known engines and nodes have answered, ``SETTLE_S`` at most.

        With an HTTP server, also wait until the tokenizers of their models are loaded, ``LOAD_S`` at most. Call this
        from another thread than the event loop's.
        """
        self._run_on_loop(self.conductor.wait_settled(SETTLE_S))
        if self._config.http is not None:
            self._run_on_loop(self._prompts.wait_loaded(self.conductor.models(), LOAD_S), LOAD_S + LOOP_CALL_S)

    def _on_calls_end(self) -> None:
        """Do nothing: calls that are cancelled end their own answers."""


def _struct(value: dict[str, Any]) -> struct_pb2.Struct:
    return struct_pb2.Struct.FromString(document(value))


def _tokens(part: AnswerTokens, index: int) -> engine_pb2.Tokens:
    """Return the tokens of a part, numbered from ``index``. The last token has the text of all of them."""
    texts = [""] * (len(part.ids) - 1) + [part.text]
    tokens = [
        engine_pb2.Token(id=token, index=index + at, text=text)
        for at, (token, text) in enumerate(zip(part.ids, texts, strict=True))
    ]
    return engine_pb2.Tokens(tokens=tokens)
