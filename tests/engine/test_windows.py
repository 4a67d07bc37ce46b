"""A model whose layers all have a sliding window keeps a ring of frames per sequence: no more than the window and a
chunk touch. Answers stay those of plain transformers, from every tier, over hand-offs and migrations.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import pytest

from engine.conductor.shell.reports import engine_about
from engine.model.observer import Observer
from engine.model.piece import Piece
from engine.model.request import Grain, Request, Role, Sampling, Source, Timing
from engine.shell.engine import Engine
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers.engines.tokens import (
    CPU,
    Answer,
    InProcess,
    Lab,
    check_answer,
    prompt,
    served,
    to_nvme,
)
from tests.helpers.processes import Machine, wait_until

PRESET, WINDOW, PAGE, CHUNK = "tiny-mistral", 40, 16, 24
RING = 5  # pages that 24 tokens, and the 39 before them, can touch
NEEDED = 4  # pages that 40 tokens can touch
WAYS = list(itertools.product(Timing, Source, Grain))


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    with Lab(machine, monkeypatch, CPU) as here:
        yield here


class FramesSeen(Observer):
    """The most frames that were in use after a step."""

    engine: Engine | None = None
    most = 0

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """See Observer."""
        if self.engine is not None:
            self.most = max(self.most, self.engine.arena.frames_total - self.engine.arena.frames_free)


def page_bytes() -> int:
    return served(PRESET).layout(PAGE).page_bytes


def test_long_sequences_use_a_ring_of_frames(lab: Lab) -> None:
    """An arena of two rings answers sequences of which each would fill it several times over, two at a time."""
    seen = FramesSeen()
    arena = 2 * RING * page_bytes()
    one = lab.engine(PRESET, chunk_tokens=CHUNK, page_tokens=PAGE, arena=arena, observer=seen, keep_pages=1.0)
    seen.engine = one
    assert one.arena.frames_total == 2 * RING
    lab.answers(one, [prompt(i, 400 + i) for i in range(3)], 100)
    assert seen.most == 2 * RING
    lab.answers(one, [prompt(9, 21)] * 2, 9)  # what fits shares and keeps its pages, as ever
    assert one.state.roster.frames.kept == 1
    mixed = lab.engine("tiny-gpt-oss", chunk_tokens=CHUNK, page_tokens=PAGE, arena=arena)
    with pytest.raises(InvalidRequest, match="do not fit the arena"):  # one layer sees everything
        lab.ask(mixed, prompt(1, 400))
    told = [engine_about("e", "", each.status(), "", "").tokens_max for each in (one, mixed)]
    assert told == [0, mixed.status()["frames"]["total"] * PAGE], "conductors send it what it takes"


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_hits_load_what_the_window_needs(lab: Lab, tier: str) -> None:
    store = lab.store(nvme=True)
    one = lab.engine(PRESET, store, chunk_tokens=CHUNK, page_tokens=PAGE, arena=2 * RING * page_bytes())
    prompts = [prompt(20, 320), prompt(21, 327), prompt(22, 200)]
    assert not any(answer.cached for answer in lab.answers(one, prompts, 40))
    if tier == "nvme":
        to_nvme(store)
    for tokens in (*prompts, np.concatenate([prompt(20, 230), prompt(23, 100)])):
        answer = lab.answers(one, [tokens], 40)[0]
        stored = 224 if len(tokens) == 330 else len(tokens) // PAGE * PAGE
        assert sum(answer.cached.values()) == min(stored, len(tokens) - 1)
        assert sum(answer.cached.values()) + answer.usage.computed_tokens == len(tokens)
        assert 3 * page_bytes() <= answer.usage.loaded_bytes <= NEEDED * page_bytes()


@pytest.mark.parametrize(("handoff", "source", "grain"), WAYS)
def test_a_handoff_sends_what_the_window_needs(lab: Lab, handoff: Timing, source: Source, grain: Grain) -> None:
    store = lab.store() if source is Source.DRAM else None
    way = {"handoff": handoff, "source": source, "grain": grain, "chunk_tokens": CHUNK, "page_tokens": PAGE}
    prefill, decode = lab.pair(PRESET, store, arena=2 * RING * page_bytes(), **way)
    for answer in lab.answers(decode, [prompt(50 + i, count) for i, count in enumerate((300, 304, 80))], 60):
        assert answer.usage.prefill_engine == lab.address_of(prefill)
        assert answer.usage.computed_tokens == 0
        came = answer.usage.moved_bytes + answer.usage.loaded_bytes  # a lazy one may find all of it in the pool
        assert 0 < came <= (NEEDED + 1) * page_bytes()


@pytest.mark.parametrize("preset", [PRESET, "tiny-gemma2"])
def test_a_handoff_that_fails_when_all_of_it_came_is_not_gone_back_to(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, preset: str
) -> None:
    """Until the other engine is known to be gone the answer goes on, and the ring has no window behind the prompt."""
    _, decode = lab.pair(preset, chunk_tokens=CHUNK, page_tokens=PAGE)
    asked: list[Answer] = []
    pull = InProcess.pull

    def without_end(*how: Any, **more: Any) -> Generator[Piece, None, None]:
        yield from pull(*how, **more)
        wait_until("the answer is known here", lambda: bool(asked))  # the pull may end before `ask` returns
        asked[0].wait(10)
        raise NodeUnavailable("it was killed")

    monkeypatch.setattr(InProcess, "pull", without_end)
    asked.append(lab.ask(decode, prompt(75, 300), 90))
    check_answer(asked[0])


def test_what_is_out_of_the_window_is_not_given_away(lab: Lab) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL, chunk_tokens=CHUNK, page_tokens=PAGE)
    peer = lab.connect(lab.address_of(one))
    asked = Request(id="windowed", tokens=prompt(70, 300), sampling=Sampling(max_tokens=4))
    assert len(list(peer.prefill(asked, one.layout, 30.0))) > 2
    with pytest.raises(InvalidRequest, match="before the window"):
        next(peer.pull("windowed", 240))
    assert next(peer.pull("windowed", 256)).token_start == 256
    one.release("windowed")
