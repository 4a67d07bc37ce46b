"""A paced model: its steps take as long as they should, its answers follow from prompts, and its pages are real."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from engine.compute.models import Model, load_model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.presets import Pace, PacedRunner, paced_answer
from engine.compute.runner import runner_of
from engine.memory.arena import Arena
from tests.helpers.engines.tokens import Answer, Lab, prompt
from tests.helpers.processes import Machine, check_laws

PRESET = "paced-llama"
QUICK = Pace(tokens_per_s=1e9, context_even=1e9, alone_s=0.0, each=0.0)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model(PRESET)


def test_steps_take_what_the_cost_model_says() -> None:
    pace = Pace(tokens_per_s=100, context_even=50, alone_s=0.2, each=0.5)
    assert pace.step_s([(0, 100)], 0) == pytest.approx(2.0)  # the middle token has 50 before it
    assert pace.step_s([(100, 100)], 0) == pytest.approx(4.0)
    assert pace.step_s([], 1) == pytest.approx(0.3)
    assert pace.step_s([(0, 100)], 2) == pytest.approx(2.0 + 0.4)


def test_a_wrong_page_makes_another_answer(model: Model) -> None:
    layout = model.layout(16)
    arena = Arena(layout, 4, model.geometry.k_dim)
    runner = PacedRunner(QUICK, 258, arena)
    frames, tokens = arena.take(4), prompt(2, 61)
    assert frames is not None
    want = paced_answer(tokens.tolist(), 1)
    for start, stop in ((0, 30), (30, 60)):
        runner.forward(Batch(arena, [Slice(frames, start, tokens[start:stop])]))
    last = Batch(arena, [Slice(frames, 60, tokens[60:])])
    assert runner.forward(last).argmax(dim=-1).tolist() == want
    for layer in range(layout.layers):
        arena.pages[frames[1], layer] += layout.layers
        assert runner.forward(last).argmax(dim=-1).tolist() != want, "nobody looked at that page"
        arena.pages[frames[1], layer] -= layout.layers
    arena.pages[frames[[0, 1]]] = arena.pages[frames[[1, 0]]]
    assert runner.forward(last).argmax(dim=-1).tolist() != want, "pages may not change places"


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


def _check(answer: Answer, count: int) -> None:
    assert answer.wait().tokens == paced_answer(answer.request.tokens.tolist(), count), answer.error


def test_its_pages_are_stored_loaded_and_handed_over(lab: Lab, model: Model) -> None:
    assert isinstance(runner_of(model, Arena(model.layout(16), 1, model.geometry.k_dim), 1), PacedRunner)
    store = lab.store()
    served = {"served": model}
    both = lab.engine(PRESET, store, **served)
    prefill, decode = lab.pair(PRESET, store, **served)
    tokens = prompt(3, 100)
    _check(lab.ask(both, tokens, 6), 6)
    longer = np.concatenate([tokens, prompt(4, 50)])
    answer = lab.ask(decode, longer, 6)
    _check(answer, 6)
    assert answer.usage.prefill_engine == lab.address_of(prefill) and answer.usage.moved_bytes > 0
    assert answer.usage.prefill_cached_tokens == {"dram": 96}
    _check(lab.ask(both, np.append(longer, np.array(answer.tokens[:2], np.uint32)), 3), 3)
    going_on = lab.ask(both, np.append(longer, np.array(answer.tokens[:4], np.uint32)), 6, generated=4)
    assert going_on.wait().tokens == answer.tokens[4:], "what goes on elsewhere goes on as it would have"
    assert store.stats()["tiers"]["dram"]["pages"] >= 9
    check_laws(store)
