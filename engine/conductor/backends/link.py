"""BackendLink: the connection to a server that speaks OpenAI's API. It has the interface of a link to our own engines.

The link sends a prompt to ``/v1/completions`` as token ids, and receives the answer as a stream. It reads the stream
only as fast as the client reads the answer. To cancel an answer, it closes the connection, and the server then stops.

A back end is not trusted: the functions here check every document and event that it sends, and bound their sizes.
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
SHOWN_MAX: Final = 200  # characters of a back end's error message that our error shows


@dataclass(frozen=True)
class BackendPart:
    """A part of an answer.

    Attributes:
        ids: token ids of the text; None if not reported.
        reason: why the answer ended; empty if it continues.
        stopped: True if a stop text ended the answer.
        prompt, cached, completion: token counts of the usage; None if not reported.
    """

    text: str = ""
    ids: tuple[int, ...] | None = None
    reason: str = ""
    stopped: bool = False
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises NodeUnavailable if it is not valid."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise NodeUnavailable("it sent invalid JSON") from None
    if not isinstance(document, dict):
        raise NodeUnavailable("it sent JSON that is not an object")
    return document


def parse_error(document: dict[str, Any]) -> tuple[str, str]:
    """Return the message and the parameter of an error, or "" for one that is missing."""
    error = document.get("error", document)
    if not isinstance(error, dict):
        return str(error)[:SHOWN_MAX], ""
    message, param = error.get("message"), error.get("param")
    text = " ".join(message.split())[:SHOWN_MAX] if isinstance(message, str) else "no reason is given"
    return text, param[:SHOWN_MAX] if isinstance(param, str) else ""


async def parse_events(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield the data of server-sent events, up to ``[DONE]`` or the end. Raises NodeUnavailable if one is too long."""
    buffer = bytearray()
    async for chunk in chunks:
        buffer += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(buffer).split(b"\n")
            buffer = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == DONE:
                        return
                    yield data
        if len(buffer) > EVENT_BYTES_MAX:
            raise NodeUnavailable(f"it sent an event of more than {EVENT_BYTES_MAX} bytes")


def parse_part(data: bytes) -> BackendPart:
    """Parse one event of a completion stream. Raises NodeUnavailable if it is an error or not valid."""
    event = parse_object(data)
    if event.get("error") is not None:
        raise NodeUnavailable(f"it failed: {parse_error(event)[0]}")
    choices, usage = event.get("choices"), event.get("usage")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        raise NodeUnavailable("it sent an invalid completion")
    text, reason = choice.get("text"), choice.get("finish_reason")
    cached = None
    if isinstance(usage, dict) and isinstance(details := usage.get("prompt_tokens_details"), dict):
        cached = _count_or_none(details.get("cached_tokens"))
    usage = usage if isinstance(usage, dict) else {}
    return BackendPart(
        text if isinstance(text, str) else "",
        _ids(choice.get("token_ids")),
        reason if isinstance(reason, str) else "",
        isinstance(choice.get("stop_reason"), str),
        _count_or_none(usage.get("prompt_tokens")),
        cached,
        _count_or_none(usage.get("completion_tokens")),
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(each) is int and 0 <= each <= TOKEN_MAX for each in value):
        raise NodeUnavailable("it sent invalid token ids")
    return tuple(value)


def _count_or_none(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKEN_MAX else None


BODY_BYTES_MAX: Final = 1 << 20  # of a reply that is not a stream
CONNECT_S: Final = 5.0
READ_BYTES: Final = 64 << 10  # of a stream that are buffered for a slow client
REASONS: Final = {"length": "length"}  # any other reason counts as "stop"
PARTS_PER_TOKEN: Final = 2  # an answer may have more parts than tokens, because some text comes later than its token
VLLM: Final = "vllm"
SEEDS: Final = 1 << 63
BAD_REQUEST: Final = (400, 413, 422)  # the statuses for a request that is not valid


class BackendLink:
    """The link to one back end. The first request connects it, and ``retire`` closes it. Belongs to one event loop.

    Attributes:
        speeds: the measured speeds of the back end.
        model: the model's name at the back end.
        running: how many answers the back end is generating.
    """

    def __init__(self, settings: BackendSettings) -> None:
        self.settings = settings
        self.speeds = MeasuredSpeed()
        self.model = settings.model
        self.running = 0
        self._limits: set[asyncio.Timeout] = set()
        self._cuts = 0  # how often ``cut`` was called
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
        """End all requests, and close the connection."""
        self.cut()
        await self._session.close()

    def cut(self) -> None:
        """End all requests with an error, because the back end is lost."""
        self._cuts += 1
        for limit in self._limits:
            limit.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _limit(self, until_s: float, cuts: int) -> AsyncIterator[None]:
        """End the block at ``until_s`` of the loop's clock, or by ``cut``.

        Args:
            cuts: ``_cuts`` at the start of the request.
        """
        if cuts != self._cuts:
            raise NodeUnavailable("it was lost")
        async with asyncio.timeout_at(until_s) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    # --- models -----------------------------------------------------------------------------------------------------

    async def models(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return the models that the back end lists. Raises Unavailable if it is not responding."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        async with self._open("GET", "/v1/models", None, until_s) as chunks:
            listed = parse_object(await _body(chunks)).get("data")
            if not isinstance(listed, list):
                raise NodeUnavailable("it lists no models")
        return [each for each in listed if isinstance(each, dict) and isinstance(each.get("id"), str)]

    async def set_role(self, role: Role, order: RoleOrder, timeout_s: float) -> None:
        """Refuse: a back end always computes and answers."""
        raise InvalidRequest("role", f"{self.settings.name} always does both")

    def refusal(self, request: Request, is_started: bool) -> InvalidRequest | None:
        """Return why the back end cannot serve this request; see ``AnswerLink``."""
        sampling = request.sampling
        if request.adapter:
            return InvalidRequest("adapter", f"{self.settings.name} supports no adapters")
        if is_started and sampling.stop:
            return InvalidRequest("stop", f"{self.settings.name} cannot continue an answer that has stop texts")
        if self.reports_ids:
            return None
        if request.page_salt:
            return InvalidRequest("salt", f"{self.settings.name} does not separate the pages of salts")
        if sampling.ignore_eos:
            return InvalidRequest("ignore_eos", f"{self.settings.name} does not support this parameter")
        if request.needs_ids:
            return InvalidRequest("tokens", f"{self.settings.name} does not report the token ids of its answers")
        return None

    # --- answers ----------------------------------------------------------------------------------------------------

    async def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished, None]:
        """Yield the answer; see ``AnswerLink``."""
        until_s = asyncio.get_running_loop().time() + request.deadline_s
        count, usage, end = 0, BackendPart(), BackendPart()
        tokens_max = request.sampling.max_tokens - request.generated
        count_max = tokens_max if self.reports_ids else tokens_max * PARTS_PER_TOKEN
        async with self._open("POST", "/v1/completions", self._body_of(request), until_s) as chunks, self._running():
            async with contextlib.aclosing(parse_events(chunks)) as events:
                async for data in events:
                    part = parse_part(data)
                    usage = part if part.prompt is not None else usage
                    end = part if part.reason else end
                    if part.ids or part.text:
                        count += self._token_count(part)
                        if count > count_max:
                            raise NodeUnavailable("it generates more tokens than requested")
                        yield AnswerTokens(part.ids or () if self.reports_ids else (), part.text)
            if not end.reason or end.reason == "abort":
                raise NodeUnavailable("it closed the stream before the end of the answer")
        eos = end.reason == "stop" and self.reports_ids and not end.stopped
        yield Finished("eos" if eos else REASONS.get(end.reason, "stop"), _usage(request, usage, count))

    @contextlib.asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    @property
    def reports_ids(self) -> bool:
        """True if the back end reports the token ids of its answers, as vLLM does."""
        return self.settings.dialect == VLLM

    def _token_count(self, part: BackendPart) -> int:
        """Return the number of tokens in a part. Without ids, each part counts as one."""
        if not self.reports_ids:
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
        if self.reports_ids:
            body |= {"return_token_ids": True, "ignore_eos": sampling.ignore_eos}
            if request.page_salt:
                body["cache_salt"] = request.page_salt
        return json.dumps(body).encode()

    @contextlib.asynccontextmanager
    async def _open(
        self, method: str, path: str, body: bytes | None, until_s: float
    ) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """Send a request, and yield the body of a response with status 200 in chunks.

        If the block ends before all chunks are read, the connection is closed. Errors of the connection and of the
        back end in the block get the name of the back end.
        """
        name, cuts = self.settings.name, self._cuts
        headers = {"Content-Type": "application/json"} if body is not None else None
        try:
            async with self._limit(until_s, cuts):
                response = await self._session.request(
                    method, self.settings.url + path, data=body, headers=headers, allow_redirects=False
                )
            chunks = self._chunks(response, until_s, cuts)
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

    async def _chunks(self, response: aiohttp.ClientResponse, until_s: float, cuts: int) -> AsyncGenerator[bytes, None]:
        """Yield the body in chunks. The time limit covers waits for the back end, not the caller's work."""
        while True:
            async with self._limit(until_s, cuts):
                chunk = await response.content.readany()
            if not chunk:
                return
            yield chunk


def _usage(request: Request, part: BackendPart, count: int) -> Usage:
    """Return the usage of an answer. Its ``computed_tokens`` are 0 if the back end does not report cached tokens.

    Args:
        part: the part that has the token counts.
        count: tokens of the answer, if the back end does not report them.
    """
    cached = min(part.cached or 0, len(request.tokens))
    return Usage(
        prompt_tokens=len(request.tokens),
        completion_tokens=count if part.completion is None else part.completion,
        cached_tokens={str(Tier.HBM): cached} if cached else {},
        computed_tokens=len(request.tokens) - cached if part.cached is not None else 0,
    )


async def _refusal(status: int, chunks: AsyncGenerator[bytes, None]) -> KVStoreError:
    """Return the error for a response whose status is not 200."""
    try:
        why, param = parse_error(parse_object(await _body(chunks)))
    except NodeUnavailable as error:
        why, param = str(error), ""
    text = f"it answers {status}: {why}"
    if status in BAD_REQUEST:
        return InvalidRequest(param or "request", text)
    return TooManyCalls(text) if status == 429 else NodeUnavailable(text)


async def _body(chunks: AsyncGenerator[bytes, None]) -> bytes:
    """Return the whole body. Raises NodeUnavailable if it is too long."""
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
        raise InvalidRequest("backend", f"{path} contains no API key")
    return key


def _tls(settings: BackendSettings) -> ssl.SSLContext | bool:
    if settings.ca is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(settings.ca))
    except (OSError, ssl.SSLError) as error:
        raise InvalidRequest("backend", f"{settings.ca}: {error}") from error
