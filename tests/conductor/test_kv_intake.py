"""KV events of a foreign engine over real sockets: what was missed, what is lost, what is no message at all."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.conductor.backends import kv_intake
from engine.conductor.backends.follower import layout_of
from engine.conductor.backends.kv_intake import KvIntake
from engine.conductor.backends.settings import parse_backends
from engine.conductor.shell.conductor import Conductor
from kvstore.cluster.directory import AnnounceBatch
from tests.helpers.backend import MODEL, BackendProcess, spawn_backend
from tests.helpers.conducting import asking, conducting, until
from tests.helpers.processes import Machine

PROMPTS = [[number] * 96 for number in range(1, 5)]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def own(conductor: Conductor, tokens: list[int]) -> int:
    told = await conductor.explain(asking([*tokens, 0], MODEL))
    return int(told["candidates"][0]["own_tokens"])


async def knows(conductor: Conductor, *prompts: list[int]) -> None:
    """Wait until it knows of these, and of no other one."""
    wanted = [96 if each in prompts else 0 for each in PROMPTS]
    while [await own(conductor, each) for each in PROMPTS] != wanted:
        await asyncio.sleep(0.01)


def joined(conductor: Conductor, backend: BackendProcess) -> Any:
    """It hears of what is told from now on."""

    async def hears() -> None:
        while await own(conductor, PROMPTS[3]) == 0:
            backend.tell(clear=True)
            backend.ask(PROMPTS[3])
            await asyncio.sleep(0.02)
        conductor.tally.kv_events.clear()

    return hears()


@pytest.mark.parametrize("topic", [True, False])
def test_who_comes_late_is_told_what_was_before(machine: Machine, topic: bool) -> None:
    async def test() -> None:
        backend = spawn_backend(machine, topic=topic)
        for each in PROMPTS[:2]:
            backend.ask(each)
        async with conducting([backend.words()]) as conductor:
            await knows(conductor, *PROMPTS[:2])
            backend.ask(PROMPTS[2])
            await knows(conductor, *PROMPTS[:3])
            assert conductor.tally.kv_events["gap"] == conductor.tally.kv_events["malformed"] == 0

    run(test())


def test_what_was_missed_is_asked_for(machine: Machine) -> None:
    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words()]) as conductor:
            await joined(conductor, backend)
            backend.tell(silent=1)
            backend.ask(PROMPTS[0])
            backend.ask(PROMPTS[1])  # its number is not the next one
            await knows(conductor, *PROMPTS[:2], PROMPTS[3])
            assert conductor.tally.kv_events["gap"] == 1 and conductor.tally.kv_events["forgotten"] == 0

    run(test())


@pytest.mark.parametrize("replay", [True, False])
def test_where_nobody_can_tell_what_was_missed_all_is_forgotten(machine: Machine, replay: bool) -> None:
    """A miss is only a computation. What is told from there on is known."""

    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words() if replay else backend.words(replay="")]) as conductor:
            await joined(conductor, backend)
            backend.tell(silent=1)
            backend.ask(PROMPTS[0])
            backend.tell(drop=True)
            backend.ask(PROMPTS[1])
            await knows(conductor, PROMPTS[1])
            assert conductor.tally.kv_events["gap"] == conductor.tally.kv_events["forgotten"] == 1
            backend.ask(PROMPTS[2])
            await knows(conductor, *PROMPTS[1:3])

    run(test())


def test_a_replay_that_never_comes_is_not_waited_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_intake, "REPLAY_S", 0.2)

    async def test() -> None:
        backend, deaf = spawn_backend(machine), spawn_backend(machine)
        words = backend.words(replay=deaf.where["replay"])
        deaf.stop()
        async with conducting([words]) as conductor:
            await joined(conductor, backend)
            backend.tell(silent=1)
            backend.ask(PROMPTS[0])
            backend.ask(PROMPTS[1])
            await knows(conductor, PROMPTS[1])
            assert conductor.tally.kv_events["forgotten"] == 1

    run(test())


def test_one_that_was_heard_of_by_a_replay_alone_may_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first numbers are those of messages that were told again, and not those messages."""
    (words,) = parse_backends("http://h:1 tokenizer=bytes events=tcp://h:1 replay=tcp://h:2")
    told: list[AnnounceBatch] = []
    intake = KvIntake(words, layout_of(words), Counter(), told.append)
    old, new = ([payload_of(hash, [hash] * 16) for hash in hashes] for hashes in ((1, 2, 3), (4, 5)))
    kept = old

    async def replay(context: Any, start: int) -> None:
        for number in range(start, len(kept)):
            await intake._take_replayed(number, kept[number])

    async def hear(payloads: list[bytes], numbers: list[int]) -> int:
        for number in numbers:
            await intake._take_published(None, [b"", number.to_bytes(8, "big"), payloads[number]])
        return len(intake._blocks.all_pages()[0])

    monkeypatch.setattr(intake, "_replay", replay)

    async def test() -> None:
        nonlocal kept
        await intake._catch_up(None)
        assert await hear(old, [1, 2]) == 3, "they come a second time"
        intake._forget()
        intake._last_published = -1
        await intake._catch_up(None)
        kept = new[:1]
        assert await hear(new, [0]) == 1
        kept = new
        assert await hear(new, [1]) == 2

    run(test())


def payload_of(name: int, tokens: list[int]) -> bytes:
    """A message with one block."""
    return bytes(msgpack.packb([0.0, [["BlockStored", [name], None, tokens, len(tokens), None, "GPU"]], 0]))


def test_what_it_told_is_told_again_where_the_index_asks(machine: Machine) -> None:
    async def test() -> None:
        backend = spawn_backend(machine)
        async with conducting([backend.words()]) as conductor:
            await joined(conductor, backend)
            conductor.state.prefixes.forget(backend.url)
            assert await own(conductor, PROMPTS[3]) == 0
            backend.ask(PROMPTS[0])  # a batch of a stream that nobody knows any more
            backend.ask(PROMPTS[1])
            await knows(conductor, *PROMPTS[:2], PROMPTS[3])

    run(test())


def test_blocks_of_one_that_has_died_are_forgotten(machine: Machine) -> None:
    async def test() -> None:
        backend, other = spawn_backend(machine), spawn_backend(machine)
        async with conducting([backend.words(), other.words()]) as conductor:
            backend.ask(PROMPTS[0])
            await until("its pages are known", lambda: len(conductor.state.prefixes) == 6)
            backend.kill()
            await until("and not any more", lambda: len(conductor.state.prefixes) == 0)

    run(test())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.binary(max_size=60) | st.just(bytes(8)), max_size=4), max_size=5))
def test_no_message_does_harm(messages: list[list[bytes]]) -> None:
    told: list[AnnounceBatch] = []
    (words,) = parse_backends("http://h:1 tokenizer=bytes events=tcp://h:1")
    intake = KvIntake(words, layout_of(words), Counter(), told.append)

    async def take() -> None:
        for frames in messages:
            await intake._take_published(None, frames)

    asyncio.run(take())
    for before, batch in pairwise(told):
        assert batch.number == (before.number + 1 if batch.stream == before.stream else 0)
