"""Calls whose request has not come: they end soon, unless it is the loop that has not looked."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator

import pytest

from kvstore.boundary import task_loop
from kvstore.errors import DeadlineExceeded
from kvstore.server.gate import HALF_OPEN_S, Call, Gate, Threads
from kvstore.server.identities import LOCAL, Identities
from tests.helpers.loops import run, until

BOUND_S = 0.2  # for a request to come
LATE_S = 3 * max(BOUND_S, HALF_OPEN_S)  # that the loop stands still


class Wire:
    """Brings a request as gRPC does: from another thread, to whom the loop has to listen first."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Future[bytes] = self._loop.create_future()

    def bring(self) -> None:
        """From another thread."""
        self._loop.call_soon_threadsafe(self._loop.call_soon, self._came.set_result, b"request")

    async def messages(self) -> AsyncIterator[bytes]:
        yield await self._came


@contextlib.asynccontextmanager
async def gate_of(bound_s: float) -> AsyncIterator[tuple[Gate, Call]]:
    """A gate that looks, and a call."""
    gate = Gate(Identities(None), Threads(), 8, 60.0, 1 << 20)
    gate.first_message_s = bound_s
    looking = asyncio.create_task(task_loop("test", gate.look))
    yield gate, Call(gate, LOCAL, None, time.monotonic() + 60)
    looking.cancel()
    gate.threads.close()


def test_a_request_that_came_while_the_loop_was_late_is_taken() -> None:
    async def test() -> None:
        async with gate_of(BOUND_S) as (_, call):
            wire = Wire()
            receiving = asyncio.create_task(call.receive(aiter(wire.messages())))
            await asyncio.sleep(0)
            bringing = threading.Thread(target=wire.bring)
            bringing.start()
            bringing.join()
            time.sleep(LATE_S)
            assert await receiving == b"request"

    run(test)


def test_a_loop_that_was_late_lets_nobody_give_way() -> None:
    async def test() -> None:
        async with gate_of(60.0) as (gate, call):
            wire = Wire()
            receiving = asyncio.create_task(call.receive(aiter(wire.messages())))
            await asyncio.sleep(0)
            time.sleep(LATE_S)
            assert not gate._give_way(None), "nobody has looked whether its request is there"
            await until(lambda: gate._give_way(None))
            with pytest.raises(DeadlineExceeded, match="did not come in time"):
                await receiving

    run(test)


def test_a_request_that_does_not_come_ends_its_call() -> None:
    async def test() -> None:
        async with gate_of(BOUND_S) as (_, call):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded, match="did not come in time"):
                await call.receive(aiter(Wire().messages()))
            assert time.monotonic() - began >= BOUND_S

    run(test)
