"""Prompts that begin alike have one copy of their common pages in the arena: same tokens, fewer frames, none lost."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvstore
from engine.memory.arena import Arena
from engine.model.observer import Observer
from engine.shell.engine import Engine
from tests.helpers.engines.tokens import EXACT, MAIN, Lab, check_answer, prompt
from tests.helpers.processes import Machine

PAGE = 16
TRUNK, REST, ANSWER, ALIKE = 160, 5, 24, 6
TAIL_PAGES = -(-(REST + ANSWER) // PAGE)
GATE_S = 60.0


@pytest.fixture(params=EXACT, ids=str)
def lab(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch, request.param) as here:
        yield here


class Most(Observer):
    """The most sequences that made a token in one step, and frames that several had then."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.decoding = self.shared = 0

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """See Observer."""
        assert self.engine is not None
        self.decoding = max(self.decoding, decoding)
        self.shared = max(self.shared, self.engine.status()["frames"]["shared"])


def gated(one: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The engine takes requests and decides about none until this is set."""
    gate, turn = threading.Event(), one.performer.turn
    monkeypatch.setattr(one.performer, "turn", lambda: gate.wait(GATE_S) and turn())
    return gate


@pytest.mark.parametrize(("preset", "pool"), list(zip(MAIN, (True, False, False), strict=True)))
def test_equal_prompts_have_one_copy_and_a_tail_each(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, preset: str, pool: bool
) -> None:
    """The arena holds no frame more than that: all of them can only run at once if they share."""
    frames = TRUNK // PAGE + ALIKE * TAIL_PAGES
    page_bytes = lab.engine(preset).layout.page_bytes
    store, most = lab.store() if pool else None, Most()
    most.engine = one = lab.engine(preset, store, arena=frames * page_bytes, chunk_tokens=48, observer=most)
    assert one.arena.frames_total == frames
    gate = gated(one, monkeypatch)
    trunk = prompt(7, TRUNK)
    asked = [lab.ask(one, np.concatenate([trunk, prompt(50 + i, REST)]), ANSWER) for i in range(ALIKE)]
    gate.set()
    for answer in asked:
        check_answer(answer)
    assert [answer.cached for answer in asked] == [{}] + [{"hbm": TRUNK}] * (ALIKE - 1)
    assert [answer.usage.computed_tokens for answer in asked] == [TRUNK + REST] + [REST] * (ALIKE - 1)
    assert (most.decoding, most.shared) == (ALIKE, TRUNK // PAGE)


def test_a_prompt_of_whole_pages_computes_its_last_page_itself(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last token is computed for its logits, into a frame that nobody else reads."""
    one = lab.engine("tiny-llama")
    gate = gated(one, monkeypatch)
    asked = [lab.ask(one, prompt(8, 4 * PAGE), 20) for _ in range(3)]
    gate.set()
    for answer in asked:
        check_answer(answer)
    assert [answer.cached for answer in asked] == [{}, {"hbm": 3 * PAGE}, {"hbm": 3 * PAGE}]


@pytest.mark.parametrize("other", [{"salt": "b"}, {"use_pool": False}, {"allow_lossy": True}])
def test_who_shares_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch, other: dict[str, object]) -> None:
    one = lab.engine("tiny-llama")
    gate = gated(one, monkeypatch)
    asked = [lab.ask(one, prompt(9, 70), 12), lab.ask(one, prompt(9, 70), 12, **other)]
    gate.set()
    for answer in asked:
        check_answer(answer)
    assert [answer.cached for answer in asked] == [{}, {}]


def test_nothing_is_lost_when_those_who_share_are_given_up(lab: Lab) -> None:
    """While they wait for each other's pages, load, compute and decode. What goes on is right all the same."""
    chance = random.Random(11)
    page_bytes = lab.engine("tiny-llama").layout.page_bytes
    one = lab.engine("tiny-llama", lab.store(), arena=48 * page_bytes, chunk_tokens=32)
    asked, ended = [], set()
    for i in range(30):
        cut = chance.choice((3, 5, 9)) * PAGE + chance.randint(0, PAGE)
        tokens = np.concatenate([prompt(chance.randint(0, 2), cut), prompt(100 + i, chance.randint(1, 20))])
        asked.append(lab.ask(one, tokens, chance.choice((2, 10, 30))))
        if chance.random() < 0.4:
            ended.add(victim := chance.randrange(len(asked)))
            one.cancel(asked[victim].request.id)
        if chance.random() < 0.2:
            asked[chance.randrange(len(asked))].wait(1)
    for i, answer in enumerate(asked):
        answer.wait()
        if i not in ended:
            check_answer(answer)
    lab.settle()
    sizes = {"tokens_max": 48 * PAGE, "kv_tokens_max": 48 * PAGE, "kv_tokens": 0}
    assert one.status()["frames"] == {"total": 48, "free": 48, "kept": 0, "shared": 0, **sizes}


class ArenaMachine(RuleBasedStateMachine):
    """Whoever has frames, in every order, against a plain count."""

    def __init__(self) -> None:
        super().__init__()
        layout = kvstore.Layout(model="m", layers=1, kv_heads=1, head_dim=1, page_tokens=1, dtype="float32")
        self.arena = Arena(layout, 12, 1)
        self.held: set[int] = set()

    @rule(count=st.integers(0, 13))
    def take(self, count: int) -> None:
        frames = self.arena.take(count)
        assert (frames is None) == (count > 12 - len(self.held))
        if frames is not None:
            assert len(frames) == count and self.held.isdisjoint(frames.tolist())
            self.held.update(frames.tolist())

    @rule(which=st.randoms(use_true_random=False), part=st.integers(0, 12))
    def give_back(self, which: random.Random, part: int) -> None:
        frames = which.sample(sorted(self.held), min(part, len(self.held)))
        self.arena.give_back(torch.tensor(frames, dtype=torch.int64))
        self.held.difference_update(frames)

    @invariant()
    def counts_are_those_of_who_has_them(self) -> None:
        assert self.arena.frames_free == 12 - len(self.held)
        self.arena.check()


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
