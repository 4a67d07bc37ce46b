"""BackendLink: the connection to a server that speaks OpenAI's API, with the interface of a link to our own engines.

A prompt is sent to ``/v1/completions`` as token ids, and its answer comes as a stream, which is read only as fast as it
is taken. When the answer is no longer wanted the connection is closed, which tells such a server to stop.

Parses what a back end sends, without trusting it: documents of OpenAI's API, and events of a completion stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from engine.conductor.backends.settings import BackendSettings
from engine.conductor.state.measured_speed import MeasuredSpeed
from engine.model.request import AnswerTokens, Finished, Request, Role, RoleOrder, Usage
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, TooManyCalls
from kvstore.model.replica import Tier

EVENT_BYTES_MAX: Final = 1 << 20
TOKEN_MAX: Final = 2**32 - 1
DONE: Final = b"[DONE]"
SHOWN_MAX: Final = 200  # characters of its error message in ours


@dataclass(frozen=True)
class BackendPart:
    """A part of an answer. ``ids`` None: not reported. ``reason``: why it ended; ``stopped``: a stop text ended it.

    Attributes:
        prompt, cached, completion: token counts of its usage; None: not reported.
    """

    text: str = ""
    ids: tuple[int, ...] | None = None
    reason: str = ""
    stopped: bool = False
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


def document_of(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises NodeUnavailable if it is not valid."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise NodeUnavailable("it sent invalid JSON") from None
    if not isinstance(found, dict):
        raise NodeUnavailable("it sent JSON that is not an object")
    return found


def error_in(document: dict[str, Any]) -> tuple[str, str]:
    """The message and the parameter of an error, as far as present."""
    error = document.get("error", document)
    if not isinstance(error, dict):
        return str(error)[:SHOWN_MAX], ""
    message, param = error.get("message"), error.get("param")
    shown = " ".join(message.split())[:SHOWN_MAX] if isinstance(message, str) else "no reason is given"
    return shown, param[:SHOWN_MAX] if isinstance(param, str) else ""


async def events_in(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events, up to ``[DONE]`` or the end. Raises NodeUnavailable if one is too long."""
    waiting = bytearray()
    async for chunk in chunks:
        waiting += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(waiting).split(b"\n")
            waiting = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == DONE:
                        return
                    yield data
        if len(waiting) > EVENT_BYTES_MAX:
            raise NodeUnavailable(f"it sent an event of more than {EVENT_BYTES_MAX} bytes")


def part_in(data: bytes) -> BackendPart:
    """Parse one event of a completion stream. Raises NodeUnavailable if it is an error or not valid."""
    said = document_of(data)
    if said.get("error") is not None:
        raise NodeUnavailable(f"it failed: {error_in(said)[0]}")
    choices, usage = said.get("choices"), said.get("usage")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        raise NodeUnavailable("it sent an invalid completion")
    text, reason = choice.get("text"), choice.get("finish_reason")
    cached = None
    if isinstance(usage, dict) and isinstance(details := usage.get("prompt_tokens_details"), dict):
        cached = _count(details.get("cached_tokens"))
    usage = usage if isinstance(usage, dict) else {}
    return BackendPart(
        text if isinstance(text, str) else "",
        _ids(choice.get("token_ids")),
        reason if isinstance(reason, str) else "",
        isinstance(choice.get("stop_reason"), str),
        _count(usage.get("prompt_tokens")),
        cached,
        _count(usage.get("completion_tokens")),
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(each) is int and 0 <= each <= TOKEN_MAX for each in value):
        raise NodeUnavailable("it sent invalid token ids")
    return tuple(value)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKEN_MAX else None


BODY_BYTES_MAX: Final = 1 << 20  # for a reply that is not a stream
CONNECT_S: Final = 5.0
READ_BYTES: Final = 64 << 10  # buffered here for a slow reader
REASONS: Final = {"length": "length"}  # any other one is "stop"
SLACK: Final = 2  # parts of text may outnumber tokens: text that was held back comes at the end
VLLM: Final = "vllm"
SEEDS: Final = 1 << 63
REFUSING: Final = (400, 413, 422)  # statuses that mean the request itself is at fault


class BackendLink:
    """The link to one back end. Made unconnected -> connected by the first request -> ``retire``. Belongs to one event
    loop.

    Attributes:
        speeds: as observed.
        running: answers that it is giving.
    """

    def __init__(self, settings: BackendSettings) -> None:
        self.settings = settings
        self.speeds = MeasuredSpeed()
        self.model = settings.model
        self.running = 0
        self._limits: set[asyncio.Timeout] = set()
        self._life = 0
        key = _key(settings.key_file)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=_tls(settings)),
            headers={"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            read_bufsize=READ_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )

    async def retire(self) -> None:
        """End the connection, and what is under way on it."""
        self.cut()
        await self._session.close()

    def cut(self) -> None:
        """End requests under way: the back end has gone, or makes no progress."""
        self._life += 1
        for limit in self._limits:
            limit.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _by(self, until_s: float, life: int) -> AsyncIterator[None]:
        """Limit a wait for the back end: to a moment of the loop's clock, and until it is ``cut``."""
        if life != self._life:
            raise NodeUnavailable("it has gone")
        async with asyncio.timeout_at(until_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    # --- about ---------------------------------------------------------------------------------------------------

    async def models(self, timeout_s: float) -> list[dict[str, Any]]:
        """The models that it lists. Raises Unavailable if it does not answer."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        async with self._asked("GET", "/v1/models", None, until_s) as chunks:
            listed = document_of(await _body(chunks)).get("data")
            if not isinstance(listed, list):
                raise NodeUnavailable("it lists no models")
        return [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """See ``AnswerLink``."""
        raise InvalidRequest("role", f"{self.settings.name} always does both")

    def why_not(self, request: Request, begun: bool) -> InvalidRequest | None:
        """See ``AnswerLink``."""
        sampling = request.sampling
        if request.adapter:
            return InvalidRequest("adapter", f"{self.settings.name} supports no adapters")
        if begun and sampling.stop:
            return InvalidRequest("stop", f"{self.settings.name} cannot continue an answer that has stop texts")
        if self.tells_ids:  # a vLLM
            return None
        if request.page_salt:
            return InvalidRequest("salt", f"{self.settings.name} does not keep salts apart")
        if sampling.ignore_eos:
            return InvalidRequest("ignore_eos", f"{self.settings.name} does not support this parameter")
        if request.needs_ids:
            return InvalidRequest("tokens", f"{self.settings.name} does not tell the ids of its answers")
        return None

    # --- answers ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """See ``AnswerLink``."""
        until_s = asyncio.get_running_loop().time() + request.deadline_s
        drawn, told, end = 0, BackendPart(), BackendPart()
        most = (request.sampling.max_tokens - request.generated) * (1 if self.tells_ids else SLACK)
        async with self._asked("POST", "/v1/completions", self._body_of(request), until_s) as chunks, self._giving():
            async with contextlib.aclosing(events_in(chunks)) as events:
                async for data in events:
                    part = part_in(data)
                    told = part if part.prompt is not None else told
                    end = part if part.reason else end
                    if part.ids or part.text:
                        drawn += self._count(part)
                        if drawn > most:
                            raise NodeUnavailable("it generates more tokens than requested")
                        yield AnswerTokens(part.ids or () if self.tells_ids else (), part.text)
            if not end.reason or end.reason == "abort":
                raise NodeUnavailable("it closed the stream before the end of the answer")
        eos = end.reason == "stop" and self.tells_ids and not end.stopped
        yield Finished("eos" if eos else REASONS.get(end.reason, "stop"), _usage(request, told, drawn))

    @contextlib.asynccontextmanager
    async def _giving(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @property
    def tells_ids(self) -> bool:
        """True if it reports the token ids of its answers."""
        return self.settings.dialect == VLLM

    def _count(self, part: BackendPart) -> int:
        """The number of tokens in a part; a part without ids counts as one."""
        if not self.tells_ids:
            return 1
        if part.ids is None:
            raise NodeUnavailable("it reports no token ids: is it a vLLM server?")
        return len(part.ids)

    def _body_of(self, request: Request) -> bytes:
        sampling = request.sampling
        body: dict[str, Any] = {
            **request.extra,
            "model": self.model,
            "prompt": request.tokens.tolist(),
            "max_tokens": sampling.max_tokens - request.generated,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.temperature:
            body["seed"] = (sampling.seed + request.generated) % SEEDS
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if self.tells_ids:
            body |= {"return_token_ids": True, "ignore_eos": sampling.ignore_eos}
            if request.page_salt:
                body["cache_salt"] = request.page_salt
        return json.dumps(body).encode()

    @contextlib.asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: bytes | None, until_s: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Yields the parts of a response with status 200. The connection is closed at the end, unless all was read.

        Errors in the block are raised as errors of the back end.
        """
        name, life = self.settings.name, self._life
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._by(until_s, life):
                response = await self._session.request(
                    method, self.settings.url + path, data=body, headers=headers, allow_redirects=False
                )
            chunks = self._chunks(response, until_s, life)
            try:
                if response.status != 200 or response.headers.get("Content-Encoding", "identity") != "identity":
                    raise await _refusal(response.status, chunks)
                yield chunks
            finally:
                response.close()
        except NodeUnavailable as error:
            raise NodeUnavailable(f"{name}: {error}") from None
        except TimeoutError:
            raise DeadlineExceeded(f"{name} does not answer in time") from None
        except (aiohttp.ClientError, OSError) as error:
            raise NodeUnavailable(f"{name}: {type(error).__name__}: {error}") from None

    async def _chunks(self, response: aiohttp.ClientResponse, until_s: float, life: int) -> AsyncGenerator[bytes, None]:
        """The stream's bytes until its end. The time in which the caller handles them does not count."""
        while True:
            async with self._by(until_s, life):
                chunk = await response.content.readany()
            if not chunk:
                return
            yield chunk


def _usage(request: Request, told: BackendPart, drawn: int) -> Usage:
    """The usage. ``computed_tokens`` 0: the back end does not report cached tokens."""
    drawn = drawn if told.completion is None else told.completion
    cached = min(told.cached or 0, len(request.tokens))
    return Usage(
        prompt_tokens=len(request.tokens),
        completion_tokens=drawn,
        cached_tokens={str(Tier.HBM): cached} if cached else {},
        computed_tokens=len(request.tokens) - cached if told.cached is not None else 0,
    )


async def _refusal(status: int, chunks: AsyncGenerator[bytes, None]) -> KVStoreError:
    try:
        why, param = error_in(document_of(await _body(chunks)))
    except NodeUnavailable as error:
        why, param = str(error), ""
    said = f"it answers {status}: {why}"
    if status in REFUSING:
        return InvalidRequest(param or "request", said)
    return TooManyCalls(said) if status == 429 else NodeUnavailable(said)


async def _body(chunks: AsyncGenerator[bytes, None]) -> bytes:
    """The whole body. Raises NodeUnavailable if it is too long."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > BODY_BYTES_MAX:
            raise NodeUnavailable(f"it answers with more than {BODY_BYTES_MAX} bytes")
    return bytes(body)


def _key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        if path.stat().st_mode & 0o077:
            raise InvalidRequest("backend", f"{path} can be read by other users; chmod 600 it")
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest("backend", f"{path}: {error}") from error
    if not key or not key.isascii() or not key.isprintable():
        raise InvalidRequest("backend", f"{path} has no API key in it")
    return key


def _tls(settings: BackendSettings) -> ssl.SSLContext | bool:
    if settings.ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(settings.ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest("backend", f"{settings.ca}: {error}") from error
