"""Answers that are drawn: token ``i`` depends on the seed, ``i`` and the logits alone, whoever draws it.

The reference is plain transformers step by step, and the engine's own choice from those logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.sampling import choose
from engine.model.request import Grain, Sampling, Source, Timing
from engine.text.tokenizer import Detokenizer
from tests.helpers.engines.tokens import MAIN, Answer, Lab, plain, prompt, within
from tests.helpers.processes import Machine

COUNT = 50
AGAIN = 24  # of the same answer in each of many ways
TOKENS = prompt(700, 75)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"temperature": 1.5, "seed": 2},
    {"temperature": 1.0, "top_p": 0.3, "seed": 2**62},
)


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch) as here:
        yield here


@cache
def drawn(preset: str, number: int) -> list[int]:
    """What is drawn with ``SETTINGS[number]`` from the logits of plain transformers."""
    sampling = Sampling(max_tokens=COUNT, **SETTINGS[number])
    net = plain(preset).net
    tokens: list[int] = []
    given = torch.from_numpy(TOKENS.astype(np.int64))[None]
    past = None
    with torch.inference_mode():
        for index in range(COUNT):
            out = net(given, past_key_values=past, use_cache=True)
            past = out.past_key_values
            tokens.append(choose(out.logits[0, -1], sampling, index))
            given = torch.tensor([[tokens[-1]]])
    return tokens


def ended(answer: Answer) -> list[int]:
    """Its tokens, once they are all there."""
    assert answer.wait().reason == "length", answer.error
    return answer.tokens


@pytest.mark.parametrize(("preset", "number"), [*zip(MAIN, range(3), strict=True)])
def test_drawn_tokens_do_not_depend_on_the_way(lab: Lab, preset: str, number: int) -> None:
    """One engine, cold and with a hit and in a crowd; handed over; resumed; migrated."""
    whole, settings = drawn(preset, number), SETTINGS[number]
    want = whole[:AGAIN]
    store = lab.store()
    one, other = lab.engine(preset, store), lab.engine(preset, store)
    assert ended(lab.ask(one, TOKENS, AGAIN, settings)) == want
    crowd = [lab.ask(one, prompt(701 + i, 30 + i), AGAIN, {**settings, "seed": i}) for i in range(4)]
    assert ended(lab.ask(one, TOKENS, AGAIN, settings)) == want
    for answer in crowd:
        ended(answer)
    for handoff, source, grain in (
        (Timing.EAGER, Source.ARENA, Grain.LAYER),
        (Timing.LAZY, Source.DRAM, Grain.LAYER),
        (Timing.EAGER, Source.DRAM, Grain.WHOLE),
    ):
        _, decode = lab.pair(preset, lab.store(), handoff=handoff, source=source, grain=grain)
        answer = lab.ask(decode, TOKENS, AGAIN, settings)
        assert ended(answer) == want and answer.usage.prefill_engine
        for k in (1, AGAIN - 1):
            known = np.concatenate([TOKENS, np.array(want[:k], np.uint32)])
            for target in (one, decode):
                assert ended(lab.ask(target, known, AGAIN, settings, generated=k)) == want[k:]
    answer = lab.ask(one, TOKENS, COUNT, settings).wait(5)
    assert one.migrate(answer.request.id, lab.address_of(other))
    assert ended(answer) == whole


def test_seeds_differ_and_greedy_has_none(lab: Lab) -> None:
    one = lab.engine("tiny-llama", lab.store())
    answers = {tuple(ended(lab.ask(one, TOKENS, 20, {"temperature": 1.0, "seed": seed}))) for seed in range(5)}
    assert len(answers) == 5
    assert len({tuple(ended(lab.ask(one, TOKENS, 20, {"seed": seed}))) for seed in range(3)}) == 1


@pytest.mark.parametrize("handoff", Timing)
def test_stop_strings_end_an_answer_wherever_it_runs(lab: Lab, handoff: Timing) -> None:
    """A stop string that begins in one token and ends in another; also where two engines made those tokens."""
    one, other = (lab.engine("tiny-llama", lab.store()) for _ in range(2))
    _, decode = lab.pair("tiny-llama", lab.store(), handoff=handoff)
    want, settings = drawn("tiny-llama", 1), SETTINGS[1]
    whole = lab.ask(one, TOKENS, COUNT, settings).wait().text
    assert len(whole) > 40
    stop = next(whole[i : i + 3] for i in range(20, 40) if whole.find(whole[i : i + 3]) == i)
    text = whole[: whole.index(stop)]
    with_stop = {**settings, "stop": ("never", stop)}
    for target in (one, decode):
        answer = lab.ask(target, TOKENS, COUNT, with_stop).wait()
        assert (answer.reason, answer.text) == ("stop", text)
        made = len(answer.tokens)
        # Resumed within the stop string: what was held back then is known from the tokens.
        known = np.concatenate([TOKENS, np.array(want[: made - 1], np.uint32)])
        rest = lab.ask(target, known, COUNT, with_stop, generated=made - 1).wait()
        told = Detokenizer(target.model.tokenizer, with_stop["stop"])
        before = "".join(told.feed(token) for token in want[: made - 1])
        assert (rest.reason, before + rest.text, rest.tokens) == ("stop", text, want[made - 1 : made])
    moving = lab.ask(one, TOKENS, COUNT, with_stop).wait(5)
    assert one.migrate(moving.request.id, lab.address_of(other))
    assert (moving.wait().reason, moving.text) == ("stop", text)
    within("nobody has it any more", lambda: not one.admission.numbers and not other.admission.numbers)
