"""Gate: what waits can be cancelled and keeps nothing, what was made for a caller who has gone is undone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from kvstore.boundary import task_loop
from kvstore.errors import DeadlineExceeded, LeaseBroken, TooManyCalls
from kvstore.limits import Lane, Shares
from kvstore.node.api.reservations import Holdings
from kvstore.server.gate import Call, Gate, Threads
from kvstore.server.identities import LOCAL, Identities, Identity
from tests.helpers.loops import run, until


def budget_of(total: int) -> Shares:
    """Buffers, as the gate has them."""
    return Shares("buffers", "buffers", total)


def test_what_was_made_for_a_caller_who_has_gone_is_undone() -> None:
    async def test() -> None:
        lane, go, began, undone = Lane(1, "test"), threading.Event(), threading.Event(), []

        def work() -> int:
            began.set()
            go.wait(60)
            return 7

        call = asyncio.create_task(lane.run(lambda _: None, work, undone.append))
        await asyncio.to_thread(began.wait, 60)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert undone == []
        go.set()
        await until(lambda: undone == [7])
        assert await lane.run(lambda _: None, lambda: 8, undone.append) == 8  # its thread is free again
        assert undone == [7]
        lane.close()

    run(test)


def test_cancelled_calls_that_waited_for_a_thread_leave_nothing() -> None:
    async def test() -> None:
        lane, go, ran = Lane(1, "test"), threading.Event(), []
        first = asyncio.create_task(lane.run(lambda _: None, lambda: go.wait(60), None))
        waiting = [asyncio.create_task(lane.run(lambda _: None, lambda: ran.append(1), None)) for _ in range(100)]
        await asyncio.sleep(0.05)
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert lane._pool._work_queue.qsize() == 0
        go.set()
        assert await first
        assert await lane.run(lambda _: None, lambda: 1, None) == 1
        assert not ran
        lane.close()

    run(test)


def test_the_budget_is_shared_waited_for_and_given_back() -> None:
    async def test() -> None:
        budget = budget_of(10)
        await budget.take(8, 1.0)
        began = time.monotonic()
        with pytest.raises(TooManyCalls) as refused:
            await budget.take(3, 0.1)
        assert time.monotonic() - began > 0.05 and refused.value.retry_after_s > 0
        waiting = asyncio.create_task(budget.take(3, 60.0))
        gone = asyncio.create_task(budget.take(3, 60.0))
        await asyncio.sleep(0.01)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        budget.give(8)
        await waiting
        assert budget.free == 7 and not budget._queues
        budget.give(3)
        assert await budget.take(1000, 1.0) == 10  # more than all is all
        assert budget.free == 0
        budget.give(10)
        assert budget.free == 10

    run(test)


class Context:
    """A connection that takes nothing."""

    def __init__(self) -> None:
        self.said: tuple[Any, ...] | None = None

    def time_remaining(self) -> None:
        return None

    def peer(self) -> str:
        return "unix:"

    async def abort(self, *said: Any) -> None:
        self.said = said
        raise grpc.aio.AbortError

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(60)


async def nothing() -> AsyncIterator[bytes]:
    """A stream that brings nothing."""
    await asyncio.sleep(60)
    yield b""


async def large() -> AsyncIterator[bytes]:
    """A request that counts as buffers."""
    yield bytes(70_000)


def test_a_stream_that_stands_still_ends_and_gives_its_buffers_back() -> None:
    async def test() -> None:
        gate = Gate(Identities(None), Threads(), 8, 60.0, 1 << 20)
        gate.stall_s = gate.first_message_s = 0.1
        looking = asyncio.create_task(task_loop("test", gate.look))
        for stall in (lambda call: call.send(b"x"), lambda call: call.receive(aiter(nothing()))):
            call = Call(gate, LOCAL, Context(), time.monotonic() + 60)
            with pytest.raises(DeadlineExceeded, match="nothing for too long|did not come in time"):
                async with call.buffers(1000):
                    await stall(call)
            assert gate.budget.free == 1 << 20
        looking.cancel()
        gate.threads.close()

    run(test)


def test_buffers_count_as_taken_until_the_last_step_has_ended() -> None:
    async def test() -> None:
        gate, go = Gate(Identities(None), Threads(), 8, 60.0, 1000), threading.Event()

        async def serve() -> None:
            call = Call(gate, LOCAL, Context(), time.monotonic() + 60)
            async with call.buffers(600):
                await call.wait(go.wait, 60)

        task = asyncio.create_task(serve())
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gate.budget.free == 400  # a thread is in them
        go.set()
        await until(lambda: gate.budget.free == 1000)
        gate.threads.close()

    run(test)


class Thing:
    """Something held."""

    def __init__(self) -> None:
        self.ended = 0

    def end(self) -> None:
        self.ended += 1


def test_holdings_are_bounded_in_bytes_and_no_tenant_takes_all() -> None:
    held: Holdings[Any] = Holdings("lease", lambda _: None, bytes_max=100)
    a, b = Identity("a", frozenset("a"), token_digest=b"a"), Identity("b", frozenset("b"), token_digest=b"b")
    numbers = [held.add(a, Thing(), 60.0, 25) for _ in range(2)]
    last = Thing()
    with pytest.raises(TooManyCalls):
        held.add(a, last, 60.0, 1)
    assert last.ended == 1
    held.add(b, Thing(), 60.0, 50)
    held.drop(numbers[0])
    held.add(a, Thing(), 60.0, 25)
    held.sweep(everything=True)
    held.add(a, Thing(), 60.0, 50)
    assert len(held) == 1


def test_holdings_are_bounded_their_owners_own_and_end() -> None:
    held: Holdings[Any] = Holdings("lease", lambda _: None, holdings_max=3)
    a, b = Identity("a", frozenset("a"), token_digest=b"a"), Identity("b", frozenset("b"), token_digest=b"b")
    things = [Thing() for _ in range(4)]
    numbers = [held.add(a, thing, 60.0) for thing in things[:3]]
    with pytest.raises(TooManyCalls):
        held.add(b, things[3], 60.0)
    assert things[3].ended == 1
    assert held.find(a, numbers[0]).resource is things[0]
    for owner, number in ((b, numbers[0]), (a, bytes(16)), (a, b"")):
        with pytest.raises(LeaseBroken):
            held.find(owner, number)
    held.abandon(numbers[0])
    held.abandon(numbers[0])
    held.drop(numbers[1])  # by its owner, who has ended it
    assert (things[0].ended, things[1].ended, len(held)) == (1, 0, 1)
    short = held.add(b, Thing(), 0.0)
    held.sweep()
    with pytest.raises(LeaseBroken):
        held.find(b, short)
    assert len(held) == 1
    held.sweep(everything=True)
    assert things[2].ended == 1 and len(held) == 0


def test_calls_that_begin_have_every_second_turn() -> None:
    async def work() -> list[str]:
        shares = Shares("threads", "threads", 1)
        order: list[str] = []

        async def step(name: str, begun: bool) -> None:
            await shares.take(1, 5.0, begun=begun)
            order.append(name)
            await asyncio.sleep(0)
            shares.give(1)

        await shares.take(1, 5.0)
        steps = [asyncio.create_task(step(f"new {i}", False)) for i in range(3)]
        await asyncio.sleep(0)
        steps += [asyncio.create_task(step(f"begun {i}", True)) for i in range(5)]
        await asyncio.sleep(0)
        shares.give(1)
        await asyncio.gather(*steps)
        return order

    order = asyncio.run(work())
    assert [name for name in order if "new" in name] == ["new 0", "new 1", "new 2"]
    assert [name for name in order if "begun" in name] == [f"begun {i}" for i in range(5)]
    assert order.index("new 2") == 4


def test_who_waited_behind_a_large_one_that_gave_up_is_let_in() -> None:
    async def work() -> None:
        shares = Shares("buffers", "buffers", 10)
        await shares.take(6, 5.0)
        large = asyncio.create_task(shares.take(8, 60.0))
        await asyncio.sleep(0)
        small = asyncio.create_task(shares.take(2, 60.0, mine=0))
        await asyncio.sleep(0)
        large.cancel()
        assert await asyncio.wait_for(small, 5.0) == 2

    asyncio.run(work())
