"""Requests that are cancelled, late, moved and handed over at random: what is said is right, and nothing leaks.

An answer that was cut off is the beginning of the right one. After each test every frame is free (see ``Lab``).
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine.model.request import Grain, Role, Source, Timing
from engine.shell.engine import Engine
from kvstore.errors import DeadlineExceeded, KVStoreError
from tests.helpers.engines.tokens import Answer, Lab, check_answer, expected, is_moving, prompt, within
from tests.helpers.processes import Machine, check_laws

PRESET = "tiny-llama"


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def check_beginning(answer: Answer) -> None:
    """It is right as far as it goes; of an answer that was not cut off, all of it."""
    if answer.wait().reason == "length":
        check_answer(answer)
        return
    assert answer.reason == "cancelled" or isinstance(answer.error, DeadlineExceeded), answer.error
    count = len(answer.tokens)
    if count:
        assert tuple(answer.tokens) == expected(answer.preset, answer.request.tokens, count, answer.tokens).tokens


def some_way(chance: random.Random) -> dict[str, object]:
    return {
        "handoff": chance.choice([*Timing]),
        "source": chance.choice([*Source]),
        "grain": chance.choice([*Grain]),
        "use_pool": chance.random() < 0.8,
    }


@pytest.mark.parametrize(
    ("number", "preset"), [*((n, PRESET) for n in range(6)), (6, "tiny-mistral"), (7, "tiny-gemma2")]
)
def test_cancels_deadlines_and_moves(lab: Lab, number: int, preset: str) -> None:
    chance = random.Random(number)
    store = lab.store()
    chunks = (24, 64, 256) if preset == PRESET else (24,)  # so that windows have rings of frames
    how = {"link": chance.choice(("none", "3MB/s", "30MB/s")), "chunk_tokens": chance.choice(chunks)}
    _, decode = lab.pair(preset, store, batch_max=6, **how)
    spare = lab.engine(preset, store, role=Role.BOTH, **how)
    asked: list[tuple[Engine, Answer]] = []
    for i in range(30):
        one = chance.choice((decode, decode, spare))
        tokens = np.concatenate(
            [prompt(i % 4, 16 * chance.randint(0, 9)), prompt(10 + i, 1 + 7 * chance.randint(0, 9))]
        )
        deadline_s = chance.choice((60.0, 60.0, 0.02 + 0.2 * chance.random()))
        asked.append((one, lab.ask(one, tokens, chance.randint(1, 60), deadline_s=deadline_s, **some_way(chance))))
        for _ in range(chance.randint(0, 2)):
            where, answer = chance.choice(asked)
            if chance.random() < 0.6:
                where.cancel(answer.request.id)
            else:
                with contextlib.suppress(KVStoreError):  # too late there as here: it goes on where it is
                    where.migrate(answer.request.id, lab.address_of(decode if where is spare else spare))
        time.sleep(0.01 * chance.random())
    for _, answer in asked:
        check_beginning(answer)
    assert any(answer.reason == "length" for _, answer in asked)
    assert any(answer.reason == "cancelled" for _, answer in asked) or number
    lab.settle()
    lab.answers(decode, [prompt(40, 70)], 4)
    check_laws(store)


def test_cancelled_in_every_state(lab: Lab) -> None:
    """While it waits for frames, is computed there, moves, decodes; twice; and after its end."""
    store = lab.store()
    prefill = lab.engine(PRESET, store, role=Role.PREFILL, chunk_tokens=16)
    asks = {"prefill": (lab.address_of(prefill),), "local_prefill_tokens": 0, "link": "200KB/s"}
    decode = lab.engine(PRESET, store, role=Role.DECODE, arena=12 * prefill.layout.page_bytes, **asks)
    first = lab.ask(decode, prompt(50, 100), 60)
    waiting = [lab.ask(decode, prompt(51 + i, 150), 30, handoff=handoff) for i, handoff in enumerate(Timing)]
    within("it is being moved", lambda: is_moving(decode))
    for answer in (*waiting, first, first):
        assert decode.cancel(answer.request.id) or answer is first
        check_beginning(answer)
    lab.settle()
    assert not decode.cancel(first.request.id)
    running = lab.ask(decode, prompt(53, 20), 130, prefill=()).wait(4)
    assert decode.cancel(running.request.id)
    check_beginning(running)
    assert running.reason == "cancelled" and len(running.tokens) >= 4


@pytest.mark.parametrize("handoff", Timing)
@pytest.mark.parametrize("grain", Grain)
def test_a_deadline_within_a_handoff(lab: Lab, handoff: Timing, grain: Grain) -> None:
    """The link would take minutes: it fails in time, both engines have their frames, others are answered meanwhile."""
    _, decode = lab.pair(PRESET, lab.store(), link="20KB/s", handoff=handoff, grain=grain)
    late = lab.ask(decode, prompt(60, 150), 20, deadline_s=0.7, use_pool=False)
    other = lab.ask(decode, prompt(61, 40), 20, prefill=())
    check_answer(other)
    assert isinstance(late.wait().error, DeadlineExceeded)
