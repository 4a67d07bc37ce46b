"""What an engine's usage teaches the conductor about the speed of that engine."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.conductor.config import ConductorConfig
from engine.conductor.shell.metrics import ConductorTally
from engine.conductor.shell.open_answer import OpenAnswer
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.engine_table import LoadReport
from engine.model.request import AnswerTokens, Finished, Request, Role, Usage
from kvstore.errors import InvalidRequest
from tests.helpers.fleet import PAGE, STEP_S, TOKENS_PER_S, arrival, engines_of, pages_of, world

TOKENS = 40 * PAGE + 1
WHOLE = Usage(prompt_tokens=TOKENS, computed_tokens=TOKENS, ttft_ms=20000.0, prefill_ms=9000.0)


class Heard:
    """A conductor that keeps what it is told, with engines that answer with this usage."""

    def __init__(self, usage: Usage) -> None:
        self.config, self.tally = ConductorConfig(engine=("127.0.0.1:1",)), ConductorTally()
        self.members: Any = SimpleNamespace(
            engines=dict.fromkeys(("e0", "e1"), SimpleNamespace(link=self, speeds=None))
        )
        self.events: list[ev.ConductorEvent] = []
        self._usage = usage

    def handle(self, event: ev.ConductorEvent) -> None:
        self.events.append(event)

    def barred(self, request: Request, begun: bool) -> dict[str, InvalidRequest]:
        return {}

    async def answer(self, request: Request) -> AsyncGenerator[AnswerTokens | Finished]:
        yield AnswerTokens((5,), "")
        yield Finished("length", self._usage, "")


def ended(send: do.Send, usage: Usage) -> ev.AnswerEnded:
    """What the conductor is told at the end of an answer with this usage."""
    heard = Heard(usage)

    async def answer() -> None:
        open_answer = OpenAnswer(heard, Request(id="r", model="m", tokens=np.zeros(TOKENS, np.uint32)), send.number, {})
        open_answer.deliver(send)
        async for _ in open_answer.parts():
            pass

    asyncio.run(answer())
    first, last = heard.events
    assert isinstance(first, ev.FirstToken) and isinstance(last, ev.AnswerEnded)
    return last


def test_a_slow_engine_is_known_by_its_answers() -> None:
    made = world(1)
    made.arrive(arrival(1, pages_of(*range(40))))
    ((_, send),) = made.sends
    last = ended(send, WHOLE)
    assert (last.cached, last.prefill_s) == (0, 9.0)
    engine = made.state.fleet.engines["e0"]
    made.tell(replace(last, now_s=made.now_s))
    assert engine.scale > 1.0


def test_a_hand_off_teaches_of_the_engine_that_computed() -> None:
    made = world(roles="pd", split="always")
    made.arrive(arrival(1, pages_of(*range(40))))
    ((_, send),) = made.sends
    assert (send.route.computing.engine.about.name, send.route.answering.engine.about.name) == ("e0", "e1")
    there = replace(WHOLE, computed_tokens=0, prefill_engine="e0", prefill_cached_tokens={"dram": PAGE})
    last = ended(send, there)
    assert (last.cached, last.prefill_s) == (PAGE, 9.0)
    made.tell(replace(last, now_s=made.now_s))
    scales = {name: engine.scale for name, engine in made.state.fleet.engines.items()}
    assert scales["e0"] > 1.0 == scales["e1"]
    assert ended(send, WHOLE).prefill_s == 0.0, "it was computed by who answered, after all"


@pytest.mark.parametrize(
    "usage",
    [
        replace(WHOLE, prefill_ms=0.0),  # nothing was computed
        replace(WHOLE, computed_tokens=PAGE + 1),  # by two engines, or nobody says where the rest was
        replace(WHOLE, computed_tokens=0, prefill_engine="e7"),
        replace(WHOLE, computed_tokens=0, cached_tokens={"dram": TOKENS}),
    ],
)
def test_what_does_not_add_up_teaches_nothing(usage: Usage) -> None:
    made = world(1)
    made.arrive(arrival(1, pages_of(*range(40))))
    assert ended(made.sends[0][1], usage).prefill_s == 0.0


# --- equal engines ----------------------------------------------------------------------------------------------------

ENGINES, COLD = 4, 80


def noisy(seed: int, slow: str = "") -> Counter[str]:
    """Who computed prompts that came one by one, at engines whose speeds were measured with a noise of a tenth. One is
    ``slow``: half as fast."""
    draw, made = random.Random(seed), world(ENGINES, seed=seed)
    for number in range(COLD):
        for name in made.engines:
            factor = draw.uniform(0.9, 1.1) * (0.5 if name == slow else 1.0)
            report = LoadReport(role=Role.BOTH, prefill_tokens_per_s=TOKENS_PER_S * factor, step_s=STEP_S / factor)
            made.tell(ev.ReportRequested(made.now_s, name))
            made.tell(ev.LoadReported(made.now_s, name, report))
        made.arrive(arrival(number, pages_of(*range(1000 * number, 1000 * number + 40))))
        made.settle()
    assert any(engine.scale != 1.0 for engine in made.state.fleet.engines.values()), "they learn"
    return Counter(engines_of(made))


def test_equal_engines_share_cold_prompts() -> None:
    """None draws more than the others because it seems to be faster by what is noise."""
    counts = noisy(1)
    assert all(COLD / ENGINES * 0.5 <= counts[f"e{n}"] <= COLD / ENGINES * 1.5 for n in range(ENGINES)), counts
    assert counts == noisy(1), "the same events, the same decisions"


def test_an_engine_that_has_reported_nothing_is_believed_to_be_as_fast_as_the_others() -> None:
    """Where those are much faster than was believed of any, it would get nothing else."""
    made = world(roles="bb")
    for name in ("e0", "e1"):
        made.tell(ev.ReportRequested(made.now_s, name))
        report = LoadReport(role=Role.BOTH, prefill_tokens_per_s=1e6, step_s=1e-4)
        made.tell(ev.LoadReported(made.now_s, name, report))
    made.add("e2", Role.BOTH)
    for number in range(3):
        made.arrive(arrival(number, pages_of(*range(1000 * number, 1000 * number + 40))))
    assert {send.route.answering.engine.about.name for _, send in made.sends} == {"e0", "e1", "e2"}


def test_hand_offs_that_come_later_than_predicted_are_avoided_and_tried_again() -> None:
    made = world(roles="pd")
    costs, asked = made.state.costs, arrival(1, pages_of(*range(40)))

    def tail_s() -> float:
        told: Any = made.explain(asked)["candidates"]
        (best,) = (row["best"] for row in told if row["engine"] == "e0")
        assert best["answers"] == "e1"
        return float(best["tail_s"])

    before = tail_s()
    for _ in range(80):
        costs.add_first_token(
            local=False, late_s=0.5 - costs.handoff_s
        )  # late by half a second, of which so much is predicted
        costs.add_first_token(local=True, late_s=0.1)
    assert 0.3 < tail_s() - before < 0.5, "what both are late by is no hand-off's"
    for _ in range(1000):
        costs.add_first_token(local=True, late_s=0.1)
    assert tail_s() - before < 0.1, "it is forgotten"
    for late_s in (-1e9, 1e9):
        costs.add_first_token(local=False, late_s=late_s)
    assert before <= tail_s() <= before + 1, "one request says little"
