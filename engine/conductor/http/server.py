"""OpenAIServer: OpenAI's HTTP API in front of a conductor, on the conductor's event loop.

All resources that a client can use are bounded. Connections are bounded by number, headers and bodies by bytes and by
time. A reply is buffered only by its connection, because the next part of an answer is requested when the last one is
sent. A request ends at once if its client disconnects. A client that reads nothing for ``stall_s`` is disconnected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final
from urllib.parse import unquote

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from engine.conductor.http.connection import JSON, PATIENCE, ConnectionServer, HttpPatience, HttpReply
from engine.conductor.http.openai_errors import DENIED, INVALID, SERVER, Refusal, invalid, refusal_of
from engine.conductor.http.openai_replies import (
    Choice,
    OpenAIReply,
    model_document,
    models_document,
    reply_streamed,
    reply_whole,
)
from engine.conductor.http.openai_schema import SMALL_BYTES, AnyBody, ChatBody, parse_document, read_body, requests_of
from engine.conductor.http.prompts import PromptMaker
from engine.conductor.shell.conductor import Conductor
from engine.conductor.shell.metrics import GONE, HttpTally
from engine.model.request import ServedModel
from kvstore import boundary
from kvstore.cluster.data_connection import is_loopback
from kvstore.config import parse_address
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest, KVStoreError, TooManyCalls, Unauthenticated
from kvstore.limits import Shares
from kvstore.server.certificates import ServerCertificate
from kvstore.server.gate import TOKEN_BYTES_MAX
from kvstore.server.http import HostNames, Route
from kvstore.server.identities import ALL_SALTS, LOCAL, UNKNOWN, Identities, Identity
from kvstore.server.listening import check_certificates, check_remote, numeric

BODY_BYTES_MAX: Final = 8 << 20
BODY_BYTES_FREE: Final = 64 << 10  # a body up to this size takes no memory of ``BODIES_BYTES``
BODY_COPIES: Final = 8  # memory of a larger body, as a multiple: its bytes, and twice its text with 4 bytes a character
BODIES_BYTES: Final = 256 << 20  # memory of all bodies together
REQUESTS_MAX: Final = 2048  # that run at the same time
WAIT_S: Final = 2.0  # the longest wait for the memory of a body
RETRY_S: Final = 0.5  # after which a refused client should retry
GRACE_S: Final = 2.0  # running requests get this long when the daemon ends

ANSWERS: Final = {"/v1/completions": False, "/v1/chat/completions": True}  # path -> whether it is a chat
MODELS: Final = "/v1/models"
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
OPERATOR_PATHS: Final = ("/metrics",)  # paths that only operators may read, if keys are required

# Errors that a request may end with: a refusal, a client that has gone, or a body that is not HTTP (see ``_Handler``).
_EXPECTED = Refusal, OSError, HttpProcessingError, web.RequestPayloadError, web.PayloadAccessError


class OpenAIServer:
    """The HTTP server. It serves from ``start`` to ``stop``. Belongs to one event loop.

    Args:
        address: HOST:PORT, as ``open_http`` has checked it.
        tls: None if connections are not encrypted.
        hosts: host names that requests may use.
        routes: other paths that answer GET, such as /metrics.

    Attributes:
        tally: counts for metrics.
    """

    def __init__(
        self,
        conductor: Conductor,
        address: str,
        identities: Identities,
        tls: ssl.SSLContext | None,
        hosts: HostNames,
        routes: Mapping[str, Route],
        prompts: PromptMaker,
        patience: HttpPatience,
    ) -> None:
        self.tally = HttpTally()
        self._conductor = conductor
        self._address = address
        self._identities = identities
        self._tls = tls
        self._hosts = hosts
        self._draining = False
        self._routes = routes
        self._patience = patience
        self._prompts = prompts
        self._body_memory = Shares("memory for bodies", "bodies", BODIES_BYTES)
        self._places = Shares("places for requests", "requests", REQUESTS_MAX)
        self._created_s = int(time.time())
        self._server: ConnectionServer | None = None
        self._prepare_task: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """HOST:PORT. After ``start``, the port is the real one."""
        return self._address

    async def start(self) -> None:
        """Start serving. Raises InvalidRequest if the address cannot be used."""
        host, port = parse_address(self._address, "http")
        self._server = ConnectionServer(self._serve, self.tally, self._patience, self._tls)
        try:
            where, port = self._server.listen(host, port)
        except OSError as error:
            raise InvalidRequest("http", f"cannot listen on {self._address}: {error.strerror}") from None
        self._address = f"[{where}]:{port}" if ":" in where else f"{where}:{port}"
        self._prepare_task = asyncio.create_task(self._prompts.prepare(self._conductor.models))

    def drain(self) -> None:
        """Refuse new requests on open and new connections. Any thread may call this."""
        self._draining = True

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop serving. Running requests are cancelled after ``grace_s``. Does nothing before ``start``."""
        if self._server is not None:
            self._server.close()
            self._server.pre_shutdown()
            await self._server.shutdown(grace_s)
        if self._prepare_task is not None:
            self._prepare_task.cancel()

    # --- one request ------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        path = self._metric_path(request)
        code = 500  # for an internal error, which aiohttp passes to ``handle_error``
        self.tally.requests_here += 1
        try:
            response = await self._reply(request)
            code = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            code = GONE
            raise
        finally:
            self.tally.requests_here -= 1
            self.tally.ended[path, code] += 1

    def _metric_path(self, request: web.BaseRequest) -> str:
        """Return the path of a request for metrics, or "other" if that path is not served."""
        return request.path if request.path in (*ANSWERS, MODELS, *self._routes) else "other"

    async def _reply(self, request: web.BaseRequest) -> web.StreamResponse:
        with contextlib.closing(HttpReply(request, self._patience.stall_s, self.tally)) as reply:
            reply.is_last = self._draining
            reply.headers["x-request-id"] = _request_id(request) or f"req-{uuid.uuid4().hex}"
            try:
                try:
                    with boundary.RequestGuard(f"http/{self._metric_path(request).strip('/')}", *_EXPECTED):
                        return await self._route(request, reply)
                except KVStoreError as error:
                    if reply.is_started:
                        raise ConnectionError("the reply has already started") from None
                    raise refusal_of(error) from None
            except Refusal as refusal:
                headers = refusal.headers | ({"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {})
                return await reply.whole(refusal.body, JSON, refusal.status, headers)

    async def _route(self, request: web.BaseRequest, reply: HttpReply) -> web.StreamResponse:
        host_problem = self._hosts.refusal(request.headers.getall("Host", []), request.headers.getall("Origin", []))
        if host_problem:
            raise Refusal(403, DENIED, host_problem, code="host_not_allowed")
        path = request.path
        if self._draining and path not in self._routes:
            raise Refusal(503, SERVER, "this server is shutting down", code="draining", retry_after_s=RETRY_S)
        if path in ANSWERS:
            _check_method(request, "POST")
            return await self._admit(request, reply, ANSWERS[path])
        if path in self._routes:
            _check_method(request, "GET", "HEAD")
            if path in OPERATOR_PATHS:
                self._caller(request).check_operator()
            status, kind, text = self._routes[path]()
            return await reply.whole(text.encode(), f"{kind}; charset=utf-8", status)
        if path == MODELS or path.startswith(f"{MODELS}/"):
            _check_method(request, "GET", "HEAD")
            self._caller(request)
            return await reply.whole(json.dumps(self._models(path)).encode(), JSON)
        shown = unquote(path)[:200].encode("ascii", "replace").decode()
        raise Refusal(404, INVALID, f"{request.method} {shown}: there is no such path", code="unknown_url")

    def _models(self, path: str) -> dict[str, Any]:
        if path == MODELS:
            return models_document(sorted({model.name for model in self._conductor.models()}), self._created_s)
        return model_document(self._model(path.removeprefix(f"{MODELS}/")).name, self._created_s)

    def _model(self, name: str) -> ServedModel:
        model = next((each for each in self._conductor.models() if each.name == name), None)
        if model is None:
            raise Refusal(404, INVALID, f"model: no engine serves {name!r}", param="model", code="model_not_found")
        return model

    async def _admit(self, request: web.BaseRequest, reply: HttpReply, is_chat: bool) -> web.StreamResponse:
        """Answer a request if its caller may have one more request now."""
        start_s = time.monotonic()
        caller = self._caller(request)
        if not self._places.take_now(1, caller):
            reason = f"{caller.name} has {self._places.held(caller)} running requests, and may not have more now"
            raise TooManyCalls(reason, RETRY_S, "requests")
        try:
            return await self._answer(request, reply, caller, is_chat, start_s)
        finally:
            self._places.give(1, caller, time.monotonic() - start_s)

    async def _answer(
        self, request: web.BaseRequest, reply: HttpReply, caller: Identity, is_chat: bool, start_s: float
    ) -> web.StreamResponse:
        async with self._body(request, caller) as data:
            passing = frozenset(model.name for model in self._conductor.models() if model.foreign)
            read = partial(_read, is_chat, passing, data)
            body, extra = await self._prompts.run(read, caller) if len(data) > SMALL_BYTES else read()
            del data, read
            model = self._model(body.model)
            salt = _salt_of(caller, body.kvstore.salt)
            if isinstance(body, ChatBody):
                prompts = [await self._prompts.chat(body.turns(), model, caller)]
            else:
                prompts = await self._prompts.texts(body.prompt, model, caller)
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        client_id = _request_id(request)
        requests = requests_of(body, extra, client_id or id, model, prompts, caller.name, salt)
        choices = [Choice() for _ in requests]
        include_usage = body.stream_options is not None and body.stream_options.include_usage
        documents = OpenAIReply(id, int(time.time()), model.name, is_chat, body.n, include_usage, choices)
        reply.headers["x-request-id"] = client_id or id
        reply.on_start = lambda: self.tally.first_token.add(time.monotonic() - start_s)
        reply.check = partial(self._identities.check, caller)
        if not body.stream:
            return await reply.whole(await reply_whole(self._conductor, requests, documents), JSON)
        await reply_streamed(self._conductor, requests, documents, reply)
        return await reply.end()

    # --- callers and bodies ----------------------------------------------------------------------------------------

    def _caller(self, request: web.BaseRequest) -> Identity:
        """Identify the caller of a request, who then owns the connection. Raises Unauthenticated."""
        caller = self._identify(request)
        assert self._server is not None, "the server has started"
        self._server.identify(request, caller)
        return caller

    def _identify(self, request: web.BaseRequest) -> Identity:
        if not self._identities.required:
            return LOCAL
        headers = request.headers.getall("Authorization", [])
        token = None
        if headers:
            scheme, _, rest = headers[0].partition(" ")
            token = rest.strip()
            if len(headers) != 1 or scheme.lower() != "bearer" or not 0 < len(token) <= TOKEN_BYTES_MAX:
                raise Unauthenticated(UNKNOWN)
        return self._identities.find(token, _certificate_names(request))

    @contextlib.asynccontextmanager
    async def _body(self, request: web.BaseRequest, caller: Identity) -> AsyncIterator[bytearray]:
        """Receive the body of a request. Until the block ends, a large body takes memory that all requests share."""
        length = _check_body(request)
        memory_bytes, start_s = 0, time.monotonic()
        try:
            if length > BODY_BYTES_FREE:
                memory_bytes = await self._body_memory.take(BODY_COPIES * length, WAIT_S, caller)
            if request.headers.get("Expect", "").lower() == "100-continue":
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # the interim response is not part of the reply
            body = bytearray()
            try:
                async with asyncio.timeout(self._patience.body_s):
                    while chunk := await request.content.readany():
                        body += chunk
                        if len(body) > BODY_BYTES_MAX:
                            raise _too_large()
                        more = BODY_COPIES * len(body)
                        if more > max(memory_bytes, BODY_COPIES * BODY_BYTES_FREE):  # the headers gave no length
                            memory_bytes += await self._body_memory.take(more, WAIT_S, caller, memory_bytes)
            except TimeoutError:
                raise Refusal(408, INVALID, "the body did not arrive in time", code="request_timeout") from None
            yield body
        finally:
            if memory_bytes:
                self._body_memory.give(memory_bytes, caller, time.monotonic() - start_s)


# --- headers -----------------------------------------------------------------------------------------------------


def _request_id(request: web.BaseRequest) -> str:
    """Return the client's id for this request; "" if there is none, or if it does not match ``REQUEST_ID``."""
    id = request.headers.get("X-Request-Id", "")
    return id if REQUEST_ID.fullmatch(id) else ""


def _read(is_chat: bool, passing: frozenset[str], body: bytearray) -> tuple[AnyBody, dict[str, Any]]:
    return read_body(parse_document(body), is_chat, passing)


def _salt_of(caller: Identity, salt: str | None) -> str | None:
    """Return the salt of a request's pages: the one in the request, or the one of the caller's key.

    Returns None if the conductor's default applies. Raises PermissionDenied if the caller may not use the salt.

    Args:
        salt: the salt in the request; None if there is none.
    """
    if salt is not None:
        caller.check_salt(salt)
        return salt
    if ALL_SALTS in caller.salts:
        return None
    if len(caller.salts) == 1:
        return next(iter(caller.salts))
    if caller.name in caller.salts:
        return caller.name
    raise invalid("kvstore.salt", "is missing: the key may use several salts, or none", "missing_required_parameter")


def _check_method(request: web.BaseRequest, *methods: str) -> None:
    if request.method not in methods:
        reason = f"{request.path}: must be called with {' or '.join(methods)} (got {request.method})"
        raise Refusal(405, INVALID, reason, code="method_not_allowed", headers={"Allow": ", ".join(methods)})


def _check_body(request: web.BaseRequest) -> int:
    """Check the headers of a body, and return its length; 0 if not given.

    Bodies must be JSON. A page of another web site can only send JSON after a preflight request, which this server
    refuses.

    Raises:
        Refusal: the body is too large, compressed, or not JSON.
    """
    if request.content_type != JSON:
        raise Refusal(415, INVALID, f"Content-Type must be {JSON}", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, INVALID, "the body must not be compressed", code="unsupported_content_encoding")
    length = request.content_length or 0
    if length > BODY_BYTES_MAX:
        raise _too_large()
    return length


def _too_large() -> Refusal:
    return Refusal(413, INVALID, f"the body has more than {BODY_BYTES_MAX} bytes", code="request_too_large")


def _certificate_names(request: web.BaseRequest) -> list[str]:
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    if not certificate:
        return []
    common = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return [*common, *(value for _, value in certificate.get("subjectAltName", ()))]


# --- opening -------------------------------------------------------------------------------------------------------


def open_http(
    config: DaemonConfig,
    identities: Identities,
    conductor: Conductor,
    routes: Mapping[str, Route],
    prompts: PromptMaker,
    patience: HttpPatience = PATIENCE,
) -> OpenAIServer:
    """Make the HTTP server at ``config.http``. Start it on the event loop of ``conductor``.

    Raises:
        InvalidRequest: "http": the address is beyond loopback, without TLS or keys. Or the certificate cannot be used.
    """
    assert config.http is not None
    host, port = parse_address(config.http, "http")
    number = numeric(host, config.http, "http")[0]
    if not is_loopback(number):
        check_remote(config, identities, config.http, "http")
    check_certificates(config, identities)
    certificate = ServerCertificate.of(config)
    tls = certificate.for_sockets() if certificate is not None else None
    shown = f"[{number}]" if ":" in number else number
    hosts = HostNames.of(config, certificate.names() if certificate is not None else ())
    return OpenAIServer(conductor, f"{shown}:{port}", identities, tls, hosts, routes, prompts, patience)
