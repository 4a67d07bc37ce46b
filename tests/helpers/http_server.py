"""An HTTP server in this process, on an event loop in a thread of its own, over answers that tests direct."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx2

from engine.conductor.http.connection import PATIENCE, HttpPatience
from engine.conductor.http.prompts import PromptMaker
from engine.conductor.http.server import OpenAIServer, open_http
from engine.model.request import AnswerEnd, AnswerPart, AnswerRoute, AnswerTokens, Request, ServedModel, Usage
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls
from kvstore.server.http import Route
from kvstore.server.identities import Identities

START_S = 20.0
CONTEXT_TOKENS = 8192
BIG_TEXT = "x" * 4096
CALL_S = 30.0
WORDS = {"model": "words", "prompt": "a"}
ONE_WORD = json.dumps(WORDS | {"max_tokens": 1}).encode()
KINDS = ("words", "hangs", "floods", "busy", "gone", "breaks", "bug", "picky")


class InstantAnswers:
    """Draws ``max_tokens`` words at once, whatever is asked. ``models``: names, and the folders of their tokenizers."""

    def __init__(self, **models: str | None) -> None:
        self._models = [ServedModel(name, path, CONTEXT_TOKENS) for name, path in models.items()]

    def models(self) -> list[ServedModel]:
        """See ``Conductor``."""
        return self._models

    async def answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        """See ``Conductor``."""
        yield AnswerRoute(await self.explain(request))
        count = request.sampling.max_tokens
        for index in range(count):
            yield AnswerTokens((index,), f" word{index}")
        cached = len(request.tokens) // 2
        yield AnswerEnd(
            "length",
            "",
            Usage(prompt_tokens=len(request.tokens), completion_tokens=count, cached_tokens={"dram": cached}),
        )

    async def explain(self, request: Request) -> dict[str, Any]:
        """See ``Conductor``."""
        return {"model": request.model, "reason": "there is nothing to choose"}


def head_of(length: int, *more: str, path: str = "/v1/completions") -> bytes:
    """The head of a request with a body of so many bytes, or one that says so."""
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", *more)
    return "\r\n".join((*lines, "", "")).encode()


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes the connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except ConnectionResetError:
        pass
    return found


def replies_in(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each reply; chunked ones as they travelled."""
    found = []
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        lengths = [int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: ")]
        size = lengths[0] if lengths else rest.index(b"0\r\n\r\n") + 5
        found.append((status, rest[:size]))
        data = rest[size:]
    return found


def post(server: RunningServer, body: Any, path: str = "/v1/completions", **more: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **more}
    return httpx2.post(server.url + path, content=content, headers=headers, timeout=CALL_S)


def refused(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error in it, which is of OpenAI's shape."""
    assert response.status_code == status, response.text
    document = response.json()
    assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    assert document["error"]["message"] and "Traceback" not in response.text
    error: dict[str, Any] = document["error"]
    return error


def key(name: str) -> str:
    """The header with a tenant's key."""
    return f"Authorization: Bearer {name}-token"


def ask(connection: socket.socket, name: str, body: bytes = ONE_WORD) -> int:
    """The status of a small request's reply, on a connection that is kept."""
    connection.sendall(head_of(len(body), key(name)) + body)
    found = b""
    while b"\r\n\r\n" not in found or len(found) < needed(found):
        part = connection.recv(65536)
        if not part:
            raise ConnectionError("the connection was closed")
        found += part
    ((status, _),) = replies_in(found)
    return status


def needed(found: bytes) -> int:
    """How long the reply is whose head has come."""
    head, _, _ = found.partition(b"\r\n\r\n")
    (length,) = (int(line[16:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length: "))
    return len(head) + 4 + length


class DirectedAnswers(InstantAnswers):
    """Its models are what they do: draw words; hang; flood; refuse in several ways; break in the middle.

    Attributes:
        requests: all there were.
        open: model -> answers under way.
        drawn: model -> parts that somebody took.
    """

    def __init__(self, **models: str | None) -> None:
        super().__init__(**dict.fromkeys(KINDS), **models)
        self._models.append(ServedModel("short", None, 32))
        self.requests: list[Request] = []
        self.open: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()

    async def answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        self.requests.append(request)
        self.open[request.model] += 1
        try:
            async with contextlib.aclosing(self._answer(request)) as parts:
                async for part in parts:
                    yield part
                    self.drawn[request.model] += 1
        finally:
            self.open[request.model] -= 1

    async def _answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        match request.model:
            case "hangs":
                await asyncio.sleep(3600)
            case "floods":
                for index in range(1 << 20):
                    yield AnswerTokens((index,), BIG_TEXT)
            case "busy":
                raise TooManyCalls("every engine has enough to do", 2.5)
            case "gone":
                raise NodeUnavailable("no engine has that model now")
            case "breaks":
                yield AnswerTokens((1,), "so far")
                raise NodeUnavailable("the last engine that had it has gone")
            case "bug":
                raise AssertionError("our own bug, with a secret in it")
            case "picky":
                raise InvalidRequest("sampling.top_p", "is not to its taste")
            case _:
                async with contextlib.aclosing(super().answer(request)) as parts:
                    async for part in parts:
                        yield part


class RunningServer:
    """A server that serves, and what its answers saw."""

    def __init__(self, server: OpenAIServer, answers: DirectedAnswers, scheme: str) -> None:
        self.http = server
        self.answers = answers
        self.url = f"{scheme}://{server.address}"
        host, _, port = server.address.rpartition(":")
        self.where = (host, int(port))

    def connect(self, timeout_s: float = 20.0) -> socket.socket:
        """A connection that nothing was sent on."""
        return socket.create_connection(self.where, timeout_s)


@contextlib.contextmanager
def serve_openai(
    routes: dict[str, Route] | None = None,
    patience: HttpPatience = PATIENCE,
    identities: str | None = None,
    models: dict[str, str | None] | None = None,
    **config: Any,
) -> Iterator[RunningServer]:
    """A server on a free port of loopback, while the block runs."""
    answers = DirectedAnswers(**(models or {}))
    settings = DaemonConfig(**{"http": "127.0.0.1:0", **config})
    known = Identities(Path(identities) if identities else None)
    started, stop = threading.Event(), asyncio.Event()
    prompts = PromptMaker()
    server = open_http(settings, known, answers, routes or {}, prompts, patience)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(0.0)
        prompts.close()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(START_S), "the server did not open"
        yield RunningServer(server, answers, "https" if config.get("tls_cert") else "http")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        assert not thread.is_alive()
