"""An HTTP door in this process, on an event loop in a thread of its own, over answers that tests direct."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

from engine.bench.instant import InstantAnswers
from engine.conductor.door.opening import open_door
from engine.conductor.door.prompts import PromptMaker
from engine.conductor.door.server import HttpDoor, HttpPatience
from engine.conductor.shell.answers import AnswerPart, Ask, Drawn, ServedModel
from kvstore.config.daemon import DaemonConfig
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls
from kvstore.serving.http import Route
from kvstore.serving.identities import Identities

START_S = 20.0
BIG_TEXT = "x" * 4096
KINDS = ("words", "hangs", "floods", "busy", "gone", "breaks", "bug", "picky")


def head_of(length: int, *more: str, path: str = "/v1/completions") -> bytes:
    """The head of a request with a body of so many bytes, or one that says so."""
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {length}", *more)
    return "\r\n".join((*lines, "", "")).encode()


class DirectedAnswers(InstantAnswers):
    """Its models are what they do: draw words; hang; flood; refuse in several ways; break in the middle.

    Attributes:
        asks: all there were.
        open: model -> answers under way.
        drawn: model -> parts that somebody took.
    """

    def __init__(self, **models: str | None) -> None:
        super().__init__(**dict.fromkeys(KINDS), **models)
        self._models.append(ServedModel("short", None, 32))
        self.asks: list[Ask] = []
        self.open: Counter[str] = Counter()
        self.drawn: Counter[str] = Counter()

    async def answer(self, ask: Ask) -> AsyncGenerator[AnswerPart, None]:
        self.asks.append(ask)
        self.open[ask.model] += 1
        try:
            async with contextlib.aclosing(self._answer(ask)) as parts:
                async for part in parts:
                    yield part
                    self.drawn[ask.model] += 1
        finally:
            self.open[ask.model] -= 1

    async def _answer(self, ask: Ask) -> AsyncGenerator[AnswerPart, None]:
        match ask.model:
            case "hangs":
                await asyncio.sleep(3600)
            case "floods":
                for index in range(1 << 20):
                    yield Drawn((index,), BIG_TEXT)
            case "busy":
                raise TooManyCalls("every engine has enough to do", 2.5)
            case "gone":
                raise NodeUnavailable("no engine has that model now")
            case "breaks":
                yield Drawn((1,), "so far")
                raise NodeUnavailable("the last engine that had it has gone")
            case "bug":
                raise AssertionError("our own bug, with a secret in it")
            case "picky":
                raise InvalidRequest("sampling.top_p", "is not to its taste")
            case _:
                async with contextlib.aclosing(super().answer(ask)) as parts:
                    async for part in parts:
                        yield part


class RunningDoor:
    """A door that serves, and what its answers saw."""

    def __init__(self, door: HttpDoor, answers: DirectedAnswers, scheme: str) -> None:
        self.door = door
        self.answers = answers
        self.url = f"{scheme}://{door.address}"
        host, _, port = door.address.rpartition(":")
        self.where = (host, int(port))

    def connect(self, timeout_s: float = 20.0) -> socket.socket:
        """A connection that nothing was sent on."""
        return socket.create_connection(self.where, timeout_s)


@contextlib.contextmanager
def open_doors(
    routes: dict[str, Route] | None = None,
    patience: HttpPatience | None = None,
    identities: str | None = None,
    models: dict[str, str | None] | None = None,
    **config: Any,
) -> Iterator[RunningDoor]:
    """A door on a free port of loopback, while the block runs."""
    answers = DirectedAnswers(**(models or {}))
    settings = DaemonConfig(**{"http": "127.0.0.1:0", **config})
    known = Identities(Path(identities) if identities else None)
    started, stop = threading.Event(), asyncio.Event()
    prompts = PromptMaker()
    door = open_door(settings, known, answers, routes or {}, prompts, patience)
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        await door.start()
        started.set()
        await stop.wait()
        await door.stop(0.0)
        prompts.close()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert started.wait(START_S), "the door did not open"
        yield RunningDoor(door, answers, "https" if config.get("tls_cert") else "http")
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(START_S)
        assert not thread.is_alive()
