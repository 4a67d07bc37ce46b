"""What an engine's usage teaches the conductor about the speed of that engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.api.wire import replies_of
from engine.conductor.config import ConductorConfig
from engine.conductor.shell.answering import OpenAnswer
from engine.conductor.shell.answers import Ask
from engine.conductor.shell.tally import ConductorTally
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.model.request import Finished, Token, Usage
from kvstore.pb import engine_pb2
from tests.helpers.fleet import PAGE, pages_of, wish, world

TOKENS = 40 * PAGE + 1
WHOLE = Usage(prompt_tokens=TOKENS, computed_tokens=TOKENS, ttft_ms=9000.0)


class Heard:
    """A conductor that keeps what it is told, with one engine that answers with this usage."""

    def __init__(self, usage: Usage) -> None:
        self.config, self.tally = ConductorConfig(engine=("127.0.0.1:1",)), ConductorTally()
        self.members: Any = SimpleNamespace(engines={"e0": SimpleNamespace(link=self)})
        self.events: list[ev.ConductorEvent] = []
        self._usage = usage

    def handle(self, event: ev.ConductorEvent) -> None:
        self.events.append(event)

    async def submit(self, message: engine_pb2.SubmitRequest, within_s: float) -> AsyncGenerator[Any]:
        for reply in replies_of([Token(5, 0, ""), Finished("length", self._usage, "")]):
            yield reply


def ended(send: do.Send, usage: Usage) -> ev.Ended:
    """What the conductor is told at the end of an answer with this usage."""
    heard = Heard(usage)

    async def answer() -> None:
        open_answer = OpenAnswer(
            heard, Ask(request_id="r", model="m", tokens=np.zeros(TOKENS, np.uint32)), send.number, {}
        )
        open_answer.told(send)
        async for _ in open_answer.parts():
            pass

    asyncio.run(answer())
    first, last = heard.events
    assert isinstance(first, ev.FirstToken) and isinstance(last, ev.Ended)
    return last


def test_a_slow_engine_is_known_by_its_answers() -> None:
    made = world(1)
    made.arrive(wish(1, pages_of(*range(40))))
    ((_, send),) = made.sends
    last = ended(send, WHOLE)
    assert (last.cached, last.prefill_s) == (0, 9.0)
    engine = made.state.fleet.engines["e0"]
    made.tell(replace(last, now_s=made.now_s))
    assert engine.scale > 1.0


@pytest.mark.parametrize(
    "usage", [replace(WHOLE, computed_tokens=PAGE + 1), replace(WHOLE, computed_tokens=0, prefill_engine="e1")]
)
def test_a_prompt_that_was_found_teaches_nothing(usage: Usage) -> None:
    """How long it took to bring what was found is not known."""
    made = world(1)
    made.arrive(wish(1, pages_of(*range(40))))
    assert ended(made.sends[0][1], usage).prefill_s == 0.0


def test_a_prompt_behind_others_teaches_nothing() -> None:
    """The time to its first token is that of the others as well."""
    made = world(1)
    for number in (1, 2):
        made.arrive(wish(number, pages_of(*range(100 * number, 100 * number + 40))))
    assert ended(made.sends[1][1], WHOLE).prefill_s == 0.0


def test_an_answer_of_an_engine_that_has_left_is_taken() -> None:
    made = world(2)
    made.arrive(wish(1, pages_of(*range(40))))
    ((_, send),) = made.sends
    made.tell(ev.EngineLost(made.now_s, send.route.computing.engine.about.name))
    made.tell(ev.Ended(made.now_s, 1, 8, 0, 9.0))
    assert 1 not in made.state.requests
