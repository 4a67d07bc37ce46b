"""The gRPC API of a conductor: the calls of ``kvstore.v1.Conductor``, and their server."""

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
SETTLE_S: Final = 3.0
LOAD_S: Final = 30.0  # for tokenizers: importing transformers takes seconds
LOOP_CALL_S: Final = 10.0  # for work in the loop on behalf of another thread
LOOK_S: Final = 0.05
MESSAGE_BYTES_ALL: Final = 256 << 20  # large requests, together
NAME_MAX: Final = 256  # characters of a tenant's name
NOT_PASSED_ON: Final = ("generated", "prefill", "own_prefill", "handoff", "source", "grain", "no_pool", "allow_lossy")


class ConductorCalls:
    """All calls. Used on the event loop of ``conductor``."""

    def __init__(
        self,
        config: ConductorConfig,
        conductor: Conductor,
        prompts: PromptMaker,
        status: Callable[[], Any],
        draining: threading.Event,
    ) -> None:
        self._config = config
        self._conductor = conductor
        self._prompts = prompts
        self._status = status
        self._draining = draining

    async def route(self, call: Call, message: bytes) -> bytes:
        """Where a request would go now."""
        return document(await self._conductor.explain(await self._route_request(call, message)))

    async def submit(self, call: Call, message: bytes) -> None:
        """Answer a prompt."""
        if self._draining.is_set():
            raise NodeUnavailable("this conductor is draining: ask another one")
        request = await self._route_request(call, message)
        async with contextlib.aclosing(self._conductor.answer(request)) as parts:
            drawn = 0
            with call.waits():
                async for part in parts:
                    match part:
                        case AnswerRoute():
                            reply = pb.RouteReply(route=_struct(part.document))
                        case AnswerTokens():
                            reply = pb.RouteReply(tokens=_tokens(part, drawn))
                            drawn += len(part.ids)
                        case AnswerEnd():
                            usage = engine_pb2.Usage(**asdict(part.usage))
                            end = engine_pb2.Finished(reason=part.reason, text=part.text, usage=usage)
                            reply = pb.RouteReply(finished=end)
                    await call.send(reply.SerializeToString())

    async def status(self, call: Call, message: bytes) -> bytes:
        """What the conductor is, what it knows, what waits."""
        parse(store_pb2.Empty, message)
        return document(self._status())

    async def _route_request(self, call: Call, message: bytes) -> Request:
        said = parse(pb.RouteRequest, message)
        for name in NOT_PASSED_ON:
            if getattr(said.request, name):
                raise InvalidRequest(name, "is decided by the conductor, or not passed on")
        if said.request.retention:
            raise InvalidRequest("retention", "is not passed on by a conductor")
        call.caller.check_salt(salt_of(said.request, self._config.salt))
        tenant = tenant_of(call.caller, said.tenant)
        if abs(said.priority) > PRIORITY_MAX:
            raise InvalidRequest("priority", f"must be from {-PRIORITY_MAX} to {PRIORITY_MAX} (got {said.priority})")
        model = self._model(said.model)
        return replace(
            await self._request(call, said.request, model),
            model=model.name,
            tenant=tenant,
            priority=said.priority,
            first_token_s=said.first_token_ms / 1e3,
            token_s=said.token_ms / 1e3,
            explain=said.explain,
        )

    def _model(self, name: str) -> ServedModel:
        models = self._conductor.models()
        if not name and len(models) > 1:
            raise InvalidRequest("model", f"is missing: one of {', '.join(each.name for each in models)}")
        fit = [each for each in models if each.name == name or not name]
        return fit[0] if fit else ServedModel(name, None, 0)  # the conductor lists what there is

    async def _request(self, call: Call, said: engine_pb2.SubmitRequest, model: ServedModel) -> Request:
        left_s = min(call.left_s, self._config.request_s_max)
        request = request_of(said, self._config.salt, left_s)
        if not request.text:
            return request
        tokenizer = await self._prompts.tokenizer(model)
        return tokenized(request, await self._prompts.run(partial(tokenizer.text, request.text), call.caller, left_s))


def tenant_of(caller: Identity, named: str) -> str:
    """The tenant that a request of this caller counts for: the caller itself, or the one that an operator names.

    A caller that could choose its tenant would take the shares of as many tenants as it can name.

    Raises:
        PermissionDenied: the caller is not an operator, and names another tenant.
        InvalidRequest: the name is too long.
    """
    if not named or named == caller.name:
        return caller.name
    if not caller.operator:
        raise PermissionDenied(f"tenant: only operators name another tenant (got {named[:NAME_MAX]!r})")
    if len(named) > NAME_MAX:
        raise InvalidRequest("tenant", f"must have at most {NAME_MAX} characters (got {len(named)})")
    return named


class ConductorServer(LoopServer):
    """Serves from ``start`` to ``stop``; its event loop is the conductor's.

    Attributes:
        conductor: set once it has started.
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
        calls = ConductorCalls(self._config, self.conductor, self._prompts, self.conductor.status, self._draining)
        unary = {"Route": calls.route, "Status": calls.status}
        return serve_methods(
            gate, SERVICE, with_buffers(SERVICE, unary), with_buffers(SERVICE, {"Submit": calls.submit})
        )

    def _background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self.conductor.run(),)

    def open_http(self, routes: Mapping[str, Route]) -> OpenAIServer:
        """Answer over HTTP from now on. Must not be called on the loop's thread.

        Raises:
            InvalidRequest: see ``open_http``; or "http": the extra is not installed.
        """
        try:
            from engine.conductor.http.connection import HttpPatience
            from engine.conductor.http.server import open_http
        except ModuleNotFoundError as error:
            raise InvalidRequest("http", f"needs {error.name}: pip install 'kvstore[http]'") from None
        patience = HttpPatience(keepalive_s=self._config.keepalive_s)
        http = open_http(self._config, self.identities, self.conductor, routes, self._prompts, patience)
        self._wait(http.start())
        return http

    def close_http(self, http: OpenAIServer) -> None:
        """Stop answering over HTTP once requests under way have ended, or a grace is over. Not on the loop's thread."""
        self._wait(http.stop())

    def _wait(self, work: Coroutine[Any, Any, None], timeout_s: float = LOOP_CALL_S) -> None:
        assert self._loop is not None, "it is started"
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def refuse(self, http: OpenAIServer | None) -> None:
        """Refuse new requests from now on; the health service reports it too."""
        self._draining.set()
        if http is not None:
            http.drain()
        self.retire()

    def drain(self, timeout_s: float, hurried: threading.Event, http: OpenAIServer | None) -> int:
        """Wait until requests under way have ended, or the daemon is told to hurry; returns how many are left. Not on
        the loop's thread."""
        until_s = time.monotonic() + timeout_s
        while self._under_way(http) and time.monotonic() < until_s and not hurried.wait(LOOK_S):
            pass
        return self._under_way(http)

    def _under_way(self, http: OpenAIServer | None) -> int:
        return max(self.conductor.under_way, http.tally.requests_here if http is not None else 0)

    def settle(self) -> None:
        """Wait until all known engines and nodes have answered, ``SETTLE_S`` at most; with an HTTP server also until
        the tokenizers of their models are loaded, ``LOAD_S`` at most. Not on the loop's thread."""
        self._wait(self.conductor.settled(SETTLE_S))
        if self._config.http is not None:
            self._wait(self._prompts.prepared(self.conductor.models(), LOAD_S), LOAD_S + LOOP_CALL_S)

    def _on_calls_end(self) -> None:
        """Wait for the calls: cancelled calls end their answers themselves."""


def _struct(value: dict[str, Any]) -> struct_pb2.Struct:
    return struct_pb2.Struct.FromString(document(value))


def _tokens(part: AnswerTokens, index: int) -> engine_pb2.Tokens:
    """The tokens of a part; the last one carries all of its text."""
    texts = [""] * (len(part.ids) - 1) + [part.text]
    tokens = [
        engine_pb2.Token(id=token, index=index + at, text=text)
        for at, (token, text) in enumerate(zip(part.ids, texts, strict=True))
    ]
    return engine_pb2.Tokens(tokens=tokens)
