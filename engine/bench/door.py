"""Rows about the HTTP door of a conductor: what it costs over answers that cost nothing.

The limit is a bare server of the same web framework that sends the same bytes (``engine.bench.front``), in a process of
its own as the door is. Both are asked by one client, in turn.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from engine.bench.front import TOKENS, asked
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage

ENDS = {True: b"0\r\n\r\n", False: b"}}}"}  # of a reply: streamed, whole
READY_S = 60.0
CALL_S = 60.0
WARM_UP = 50
FIRST_STEPS = 400  # requests of a round, half of them to each server
RATE_CLIENTS, RATE_REQUESTS = 16, 20  # at once; each so often
STREAMS, STREAMS_QUICK = 500, 50
LIMIT_IS = "a bare aiohttp server that sends the same bytes"


class HttpCaller(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.first: asyncio.Future[float] | None = None
        self._done: asyncio.Future[None] | None = None
        self._end = b""
        self._tail = b""
        self._began_s = 0.0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is open."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """More of the reply."""
        if self.first is not None and not self.first.done():
            self.first.set_result(time.perf_counter() - self._began_s)
        self._tail = (self._tail + data)[-8:]
        if self._done is not None and not self._done.done() and self._tail.endswith(self._end):
            self._done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is closed."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(BenchFailed("a server closed the connection"))

    async def ask(self, request: bytes, stream: bool) -> float:
        """Seconds to the first byte of the reply, when all of it has come."""
        loop = asyncio.get_running_loop()
        self.first, self._done = loop.create_future(), loop.create_future()
        self._end, self._tail = ENDS[stream], b""
        assert self._transport is not None
        self._began_s = time.perf_counter()
        self._transport.write(request)
        await asyncio.wait_for(self._done, CALL_S)
        return await self.first

    def close(self) -> None:
        """The connection is not needed any more."""
        if self._transport is not None:
            self._transport.close()


class Front:
    """One server, and connections to it."""

    def __init__(self, kind: str, runner: asyncio.Runner, exits: ExitStack, connections: int) -> None:
        port = exits.enter_context(_server(kind))
        self._runner = runner
        self._callers: list[HttpCaller] = []
        for _ in range(connections):
            caller: HttpCaller = runner.run(_connected(port))
            exits.callback(caller.close)
            self._callers.append(caller)
        self._streamed, self._whole = asked(True), asked(False)
        self.warm_up()

    def warm_up(self) -> None:
        """What is done for the first time takes longer."""
        for _ in range(WARM_UP):
            self.first()
            self.whole(1)

    def first(self, _: object = None) -> float:
        """One streamed answer: seconds to its first byte."""
        return float(self._runner.run(self._callers[0].ask(self._streamed, True)))

    def whole(self, times: int) -> int:
        """Every connection asks so often; how many answers that were."""
        return self._all(self._whole, False, times)

    def streams(self, times: int) -> int:
        """The same, streamed."""
        return self._all(self._streamed, True, times)

    def _all(self, request: bytes, stream: bool, times: int) -> int:
        async def one(caller: HttpCaller) -> None:
            for _ in range(times):
                await caller.ask(request, stream)

        async def everyone() -> None:
            await asyncio.gather(*map(one, self._callers))

        self._runner.run(everyone())
        return times * len(self._callers)


async def _connected(port: int) -> HttpCaller:
    _, caller = await asyncio.get_running_loop().create_connection(HttpCaller, "127.0.0.1", port)
    return caller


@contextmanager
def _server(kind: str) -> Iterator[int]:
    process = subprocess.Popen([sys.executable, "-m", "engine.bench.front", kind], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise BenchFailed(f"the server {kind!r} did not start")
        yield int(line)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _fronts(stage: Stage, connections: int) -> Iterator[dict[str, Front]]:
    stage.clear()
    with asyncio.Runner() as runner, ExitStack() as exits:
        yield {kind: Front(kind, runner, exits, connections) for kind in ("door", "bare")}


def first(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Time to the first event of a streamed answer, p50."""
    settings = stage.settings
    with _fronts(stage, 1) as fronts:
        variants = {kind: front.first for kind, front in fronts.items()}
        steps = range(FIRST_STEPS // 10 if settings.quick else FIRST_STEPS)
        seconds = alternate(variants, steps, settings.rounds, lambda step: step, _nothing_wrong)
    ours, limit = medians(seconds["door"]), medians(seconds["bare"])
    added = [1e6 * (mine - bare) for mine, bare in zip(ours, limit, strict=True)]
    details = {"tokens": TOKENS, "added_us": added}
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=LIMIT_IS, details=details)]


def rate(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Whole answers per second, asked over several connections at once."""
    times = 2 if stage.settings.quick else RATE_REQUESTS
    return _rates(stage, name, bar, RATE_CLIENTS, times, stream=False)


def streams(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Events per second over hundreds of streams that are open at once."""
    return _rates(stage, name, bar, STREAMS_QUICK if stage.settings.quick else STREAMS, 1, stream=True)


def _rates(stage: Stage, name: str, bar: Bar | None, connections: int, times: int, *, stream: bool) -> list[Result]:
    settings = stage.settings
    with _fronts(stage, connections) as fronts:
        variants: dict[str, Any] = {kind: front.streams if stream else front.whole for kind, front in fronts.items()}
        steps: Sequence[int] = [times] * (2 if settings.quick else 6)
        seconds = alternate(variants, steps, settings.rounds, lambda step: step, _nothing_wrong)
    work = connections * times * (TOKENS if stream else 1)
    ours, limit = ([work / median for median in medians(seconds[kind])] for kind in ("door", "bare"))
    details = {"connections": connections, "requests": connections * times, "tokens": TOKENS}
    return [result(name, Kind.RATE, ours, limit, bar=bar, limit_is=LIMIT_IS, details=details)]


def _nothing_wrong(name: str, value: object) -> None:
    """A reply that did not come has raised."""
