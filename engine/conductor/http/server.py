"""OpenAIServer: OpenAI's HTTP API in front of a conductor, on the event loop of the conductor.

What a client can occupy is bounded: connections by number, headers and bodies by bytes and by time, replies by what the
connection takes (the next part of an answer is requested when the last one is sent). A client that has gone ends its
request at once; one that takes nothing for ``stall_s`` is cut off.
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
BODY_BYTES_FREE: Final = 64 << 10  # a larger body counts as memory in use until it is tokens,
BODY_COPIES: Final = 8  # this many times: its bytes, and twice its text, with up to four bytes a character
BODIES_BYTES: Final = 256 << 20  # memory of all bodies together
REQUESTS_MAX: Final = 2048
WAIT_S: Final = 2.0  # for memory for a body
RETRY_S: Final = 0.5
GRACE_S: Final = 2.0  # for requests under way when the daemon ends

ANSWERS: Final = {"/v1/completions": False, "/v1/chat/completions": True}  # path -> whether it is a chat
MODELS: Final = "/v1/models"
REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:/=+-]{1,128}")
OPERATORS: Final = ("/metrics",)  # paths for operators, if keys are required

# Expected errors of a request: a refusal, a client that has gone, or a body that is not HTTP (see ``_Handler``).
_EXPECTED = Refusal, OSError, HttpProcessingError, web.RequestPayloadError, web.PayloadAccessError


class OpenAIServer:
    """Serves from ``start`` to ``stop``. Belongs to one event loop.

    Args:
        address: HOST:PORT, checked by ``open_http``.
        tls: None: without TLS.
        hosts: host names that are accepted.
        routes: other paths served by GET, such as /metrics.

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
        self._held = Shares("memory for bodies", "bodies", BODIES_BYTES)
        self._places = Shares("places for requests", "requests", REQUESTS_MAX)
        self._began_s = int(time.time())
        self._server: ConnectionServer | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """The HOST:PORT that it listens on, once started."""
        return self._address

    async def start(self) -> None:
        """Listen. Raises InvalidRequest if the address cannot be used."""
        host, port = parse_address(self._address, "http")
        self._server = ConnectionServer(self._serve, self.tally, self._patience, self._tls)
        try:
            where, port = self._server.listen(host, port)
        except OSError as error:
            raise InvalidRequest("http", f"cannot listen on {self._address}: {error.strerror}") from None
        self._address = f"[{where}]:{port}" if ":" in where else f"{where}:{port}"
        self._preparing = asyncio.create_task(self._prompts.prepare(self._conductor.models))

    def drain(self) -> None:
        """Refuse new requests, on open connections and on new ones. Any thread."""
        self._draining = True

    async def stop(self, grace_s: float = GRACE_S) -> None:
        """Stop listening; requests under way have ``grace_s``, then they are ended. Does nothing before ``start``."""
        if self._server is not None:
            self._server.close()
            self._server.pre_shutdown()
            await self._server.shutdown(grace_s)
        if self._preparing is not None:
            self._preparing.cancel()

    # --- one request ------------------------------------------------------------------------------------------------

    async def _serve(self, request: web.BaseRequest) -> web.StreamResponse:
        path = self._known(request)
        code = 500  # our own bug, which aiohttp takes to ``handle_error``
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

    def _known(self, request: web.BaseRequest) -> str:
        """The path, or "other" if it is not served."""
        return request.path if request.path in (*ANSWERS, MODELS, *self._routes) else "other"

    async def _reply(self, request: web.BaseRequest) -> web.StreamResponse:
        with contextlib.closing(HttpReply(request, self._patience.stall_s, self.tally)) as connection:
            connection.is_last = self._draining
            connection.headers["x-request-id"] = _request_id(request) or f"req-{uuid.uuid4().hex}"
            try:
                try:
                    with boundary.RequestGuard(f"http/{self._known(request).strip('/')}", *_EXPECTED):
                        return await self._route(request, connection)
                except KVStoreError as error:
                    if connection.begun:
                        raise ConnectionError("a reply has begun") from None
                    raise refusal_of(error) from None
            except Refusal as refusal:
                headers = refusal.headers | ({"WWW-Authenticate": "Bearer"} if refusal.status == 401 else {})
                return await connection.whole(refusal.body, JSON, refusal.status, headers)

    async def _route(self, request: web.BaseRequest, connection: HttpReply) -> web.StreamResponse:
        refused = self._hosts.refusal(request.headers.getall("Host", []), request.headers.getall("Origin", []))
        if refused:
            raise Refusal(403, DENIED, refused, code="host_not_allowed")
        path = request.path
        if self._draining and path not in self._routes:
            raise Refusal(503, SERVER, "this server is shutting down", code="draining", retry_after_s=RETRY_S)
        if path in ANSWERS:
            _check_method(request, "POST")
            return await self._answer(request, connection, ANSWERS[path])
        if path in self._routes:
            _check_method(request, "GET", "HEAD")
            if path in OPERATORS:
                self._caller(request).check_operator()
            status, kind, text = self._routes[path]()
            return await connection.whole(text.encode(), f"{kind}; charset=utf-8", status)
        if path == MODELS or path.startswith(f"{MODELS}/"):
            _check_method(request, "GET", "HEAD")
            self._caller(request)
            return await connection.whole(json.dumps(self._models(path)).encode(), JSON)
        shown = unquote(path)[:200].encode("ascii", "replace").decode()
        raise Refusal(404, INVALID, f"there is nothing at {request.method} {shown}", code="unknown_url")

    def _models(self, path: str) -> dict[str, Any]:
        if path == MODELS:
            return models_document(sorted({model.name for model in self._conductor.models()}), self._began_s)
        return model_document(self._model(path.removeprefix(f"{MODELS}/")).name, self._began_s)

    def _model(self, name: str) -> ServedModel:
        found = next((model for model in self._conductor.models() if model.name == name), None)
        if found is None:
            raise Refusal(404, INVALID, f"there is no model {name!r} here", param="model", code="model_not_found")
        return found

    async def _answer(self, request: web.BaseRequest, connection: HttpReply, is_chat: bool) -> web.StreamResponse:
        began_s = time.monotonic()
        caller = self._caller(request)
        if not self._places.take_now(1, caller):
            reason = f"{caller.name} has {self._places.held(caller)} requests under way, and may not have more now"
            raise TooManyCalls(reason, RETRY_S, "requests")
        try:
            return await self._answered(request, connection, caller, is_chat, began_s)
        finally:
            self._places.give(1, caller, time.monotonic() - began_s)

    async def _answered(
        self, request: web.BaseRequest, connection: HttpReply, caller: Identity, is_chat: bool, began_s: float
    ) -> web.StreamResponse:
        async with self._body(request, caller) as body:
            passing = frozenset(model.name for model in self._conductor.models() if model.foreign)
            read = partial(_read, is_chat, passing, body)
            asked, extra = await self._prompts.run(read, caller) if len(body) > SMALL_BYTES else read()
            del body, read
            model = self._model(asked.model)
            salt = _salt_of(caller, asked.kvstore.salt)
            if isinstance(asked, ChatBody):
                prompts = [await self._prompts.chat(asked.turns(), model, caller)]
            else:
                prompts = await self._prompts.texts(asked.prompt, model, caller)
        id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        given = _request_id(request)
        requests = requests_of(asked, extra, given or id, model, prompts, caller.name, salt)
        choices = [Choice() for _ in requests]
        include_usage = asked.stream_options is not None and asked.stream_options.include_usage
        reply = OpenAIReply(id, int(time.time()), model.name, is_chat, asked.n, include_usage, choices)
        connection.headers["x-request-id"] = given or id
        connection.on_begin = lambda: self.tally.first_token.add(time.monotonic() - began_s)
        connection.check = partial(self._identities.check, caller)
        if not asked.stream:
            return await connection.whole(await reply_whole(self._conductor, requests, reply), JSON)
        await reply_streamed(self._conductor, requests, reply, connection)
        return await connection.end()

    # --- callers and bodies ----------------------------------------------------------------------------------------

    def _caller(self, request: web.BaseRequest) -> Identity:
        """The caller whose key it is, to whom its connection belongs from now on. Raises Unauthenticated."""
        caller = self._identified(request)
        assert self._server is not None, "it is started"
        self._server.known(request, caller)
        return caller

    def _identified(self, request: web.BaseRequest) -> Identity:
        if not self._identities.required:
            return LOCAL
        said = request.headers.getall("Authorization", [])
        token = None
        if said:
            scheme, _, rest = said[0].partition(" ")
            token = rest.strip()
            if len(said) != 1 or scheme.lower() != "bearer" or not 0 < len(token) <= TOKEN_BYTES_MAX:
                raise Unauthenticated(UNKNOWN)
        return self._identities.find(token, _certificate_names(request))

    @contextlib.asynccontextmanager
    async def _body(self, request: web.BaseRequest, caller: Identity) -> AsyncIterator[bytearray]:
        """The request's body. A large one takes memory that all requests share, until the block ends."""
        length = _check_body(request)
        taken, began_s = 0, time.monotonic()
        try:
            if length > BODY_BYTES_FREE:
                taken = await self._held.take(BODY_COPIES * length, WAIT_S, caller)
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
                        if BODY_COPIES * len(body) > max(taken, BODY_COPIES * BODY_BYTES_FREE):  # of unknown length
                            taken += await self._held.take(BODY_COPIES * len(body), WAIT_S, caller, taken)
            except TimeoutError:
                raise Refusal(408, INVALID, "the body did not come in time", code="request_timeout") from None
            yield body
        finally:
            if taken:
                self._held.give(taken, caller, time.monotonic() - began_s)


# --- headers -----------------------------------------------------------------------------------------------------


def _request_id(request: web.BaseRequest) -> str:
    """The client's id for this request; "" if there is none that is short and plain."""
    given = request.headers.get("X-Request-Id", "")
    return given if REQUEST_ID.fullmatch(given) else ""


def _read(is_chat: bool, passing: frozenset[str], body: bytearray) -> tuple[AnyBody, dict[str, Any]]:
    return read_body(parse_document(body), is_chat, passing)


def _salt_of(caller: Identity, named: str | None) -> str | None:
    """The salt of a request's pages: the one that it names, else the one of the key; None: the conductor's.

    Raises PermissionDenied.
    """
    if named is not None:
        caller.check_salt(named)
        return named
    if ALL_SALTS in caller.salts:
        return None
    if len(caller.salts) == 1:
        return next(iter(caller.salts))
    if caller.name in caller.salts:
        return caller.name
    raise invalid("kvstore.salt", "is missing: this key may use several or no salts", "missing_required_parameter")


def _check_method(request: web.BaseRequest, *methods: str) -> None:
    if request.method not in methods:
        reason = f"{request.path} takes {' and '.join(methods)}"
        raise Refusal(405, INVALID, reason, code="method_not_allowed", headers={"Allow": ", ".join(methods)})


def _check_body(request: web.BaseRequest) -> int:
    """The body's length; 0: unknown. A web page elsewhere cannot send us JSON without a preflight, which we do not
    answer.

    Raises:
        Refusal: the body is too large, compressed, or not JSON.
    """
    if request.content_type != JSON:
        raise Refusal(415, INVALID, f"Content-Type must be {JSON}", code="unsupported_media_type")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refusal(415, INVALID, "bodies are taken uncompressed", code="unsupported_content_encoding")
    length = request.content_length or 0
    if length > BODY_BYTES_MAX:
        raise _too_large()
    return length


def _too_large() -> Refusal:
    return Refusal(413, INVALID, f"the body has more than {BODY_BYTES_MAX} bytes", code="request_too_large")


def _certificate_names(request: web.BaseRequest) -> list[str]:
    shown = request.transport.get_extra_info("peercert") if request.transport is not None else None
    if not shown:
        return []
    common = [value for part in shown.get("subject", ()) for key, value in part if key == "commonName"]
    return [*common, *(value for _, value in shown.get("subjectAltName", ()))]


# --- opening -------------------------------------------------------------------------------------------------------


def open_http(
    config: DaemonConfig,
    identities: Identities,
    conductor: Conductor,
    routes: Mapping[str, Route],
    prompts: PromptMaker,
    patience: HttpPatience = PATIENCE,
) -> OpenAIServer:
    """The HTTP server at ``config.http``, not started yet; start it on the event loop of ``conductor``.

    Raises:
        InvalidRequest: "http": the address is beyond loopback without TLS or keys; or the certificate cannot be used.
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
