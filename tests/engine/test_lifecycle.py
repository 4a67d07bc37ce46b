"""Ends, ids and peers that misbehave: who asked is told one end, frames come back, and no answer is wrong for it."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from engine.model.observer import Observer
from engine.model.piece import Bytes, LocalData, Piece, checksum_of
from engine.model.request import Done, Failed, PrefillEvent, Request, Role, Sampling
from engine.shell.engine import Engine
from kvstore import Store
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers.engines.tokens import (
    Answer,
    InProcess,
    Lab,
    Tokens,
    check_answer,
    expected,
    is_moving,
    prompt,
    within,
)
from tests.helpers.processes import Machine

PRESET = "tiny-llama"
LONG = prompt(1, 40)  # of answers that run while something happens: one reference for all of them
GATE_S = 30.0


class Sender(InProcess):
    """A peer that sends what ``Bench.sends`` makes of the pieces asked for, and takes its time to release."""

    bench: Bench

    def pull(self, *asked: Any, **how: Any) -> Generator[Piece, None, None]:
        with closing(super().pull(*asked, **how)) as pieces:
            yield from self.bench.sends(pieces)

    def release(self, request_id: str) -> bool:
        time.sleep(self.bench.release_s)
        return super().release(request_id)


class Bench(Lab):
    sends: Callable[[Iterator[Piece]], Iterator[Piece]] = staticmethod(iter)
    release_s, holding = 0.0, True

    def trickle(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """One piece of layer 0 again and again instead of the other layers, while they are held back."""
        until_s, first = time.monotonic() + GATE_S, None
        for piece in pieces:
            first = first or piece
            while piece.layer and self.holding and time.monotonic() < until_s:
                time.sleep(0.02)
                yield first
            yield piece

    def decoding(self, source: Engine, store: Store | None = None) -> Engine:
        asks: dict[str, Any] = {"prefill": (self.address_of(source),), "local_prefill_tokens": 0}
        return self.engine(PRESET, store, role=Role.DECODE, **asks)

    def connect(self, address: str) -> InProcess:
        peer = Sender(self.engines[address])
        peer.bench = self
        return peer

    def ask_as(self, one: Engine, request_id: str, tokens: Tokens, count: int = 8, **request: Any) -> Answer:
        chosen = Sampling(max_tokens=count, ignore_eos=True)
        self._drawn[id(chosen)] = chosen, {}
        made = Request(id=request_id, tokens=tokens, sampling=chosen, **request)
        answer = Answer(PRESET, made, self._drawn[id(chosen)][1])
        one.submit(made, answer.emit)
        return answer


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with Bench(machine, monkeypatch) as here:
        yield here  # type: ignore[misc]


@contextmanager
def gated(one: Engine, free: int = 0) -> Iterator[Callable[[], None]]:
    """Forwards of an engine wait, the first after ``free`` others, until this is left. Yields what waits for that."""
    runner, number, entered, left = one.performer._step._runner, count(), threading.Event(), threading.Event()
    forward = runner.forward

    def late(batch: Any) -> Any:
        if next(number) >= free:
            entered.set()
            left.wait(GATE_S)
        return forward(batch)

    runner.forward = late  # type: ignore[method-assign]
    try:
        yield lambda: within("a forward stands", entered.is_set)
    finally:
        left.set()


def _late(forward: Callable[[Any], Any], batch: Any) -> Any:
    time.sleep(0.005)
    return forward(batch)


def slowed(*engines: Engine) -> None:
    """Every forward of them takes longer."""
    for one in engines:
        one.performer._step._runner.forward = partial(_late, one.performer._step._runner.forward)  # type: ignore[method-assign]


def prefill(one: Engine, request_id: str, tokens: Tokens, hold_s: float = GATE_S) -> list[PrefillEvent]:
    """Have a prompt computed. What is told of it, as it comes."""
    told: list[PrefillEvent] = []
    one.prefill(Request(id=request_id, tokens=tokens), one.layout, hold_s, told.append)
    return told


def ends(told: list[PrefillEvent]) -> list[PrefillEvent]:
    return [event for event in list(told) if isinstance(event, Done | Failed)]


def all_free(one: Engine) -> None:
    """Its frames are back, soon, and it is alive."""
    within("all frames are back", lambda: not one.remains())
    assert one.alive


def check_beginning(answer: Answer) -> None:
    """It was cancelled, and was right so far."""
    assert answer.wait().reason == "cancelled", (answer.reason, answer.error)
    so_far = answer.tokens
    assert tuple(so_far) == expected(PRESET, answer.request.tokens, len(so_far), so_far).tokens


@pytest.mark.parametrize("when", ["waiting", "computing", "last chunk", "held"])
def test_a_prefill_is_released(lab: Bench, when: str) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL, batch_max=1)
    with gated(one, free={"computing": 1, "held": 9}.get(when, 0)) as reached:
        if when == "waiting":
            prefill(one, "other", prompt(2, 20))
            reached()
        told = prefill(one, "x", prompt(3, 40 if when in ("last chunk", "held") else 300))
        if when == "held":
            within("it is held", lambda: ends(told))
        else:
            reached()
        assert one.status()["requests"][when if when in ("waiting", "held") else "computing"] == 1
        assert one.release("x")
    within("who asked is told", lambda: ends(told))
    one.release("other")
    all_free(one)
    assert len(ends(told)) == 1 and (when != "held" or isinstance(ends(told)[0], Done))


def test_prefills_released_at_any_moment(lab: Bench) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL, batch_max=2)
    stop_s, interval_s = time.monotonic() + 2.0, sys.getswitchinterval()
    told: list[list[PrefillEvent]] = []

    def ask(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < stop_s or len(told) <= 50:
            name = f"{number}-{chance.random()}"
            told.append(prefill(one, name, prompt(number, chance.randint(20, 60))))
            time.sleep(0.004 * chance.random())
            one.release(name)

    sys.setswitchinterval(0.0005)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(ask, range(4)))
    finally:
        sys.setswitchinterval(interval_s)
    all_free(one)
    assert [len(ends(each)) for each in told] == [1] * len(told)


def test_a_prefill_and_an_answer_of_one_id(lab: Bench) -> None:
    one = lab.engine(PRESET)
    slowed(one)
    told = prefill(one, "x", prompt(4, 40))
    within("it is held", lambda: ends(told))
    with pytest.raises(InvalidRequest, match="x is in use"):
        lab.ask_as(one, "x", LONG)
    one.release("x")
    all_free(one)
    answer = lab.ask_as(one, "x", LONG, 60).wait(2)
    with pytest.raises(InvalidRequest, match="x is in use"):
        prefill(one, "x", LONG)
    check_answer(answer)


def test_an_id_asked_again_right_after_its_end(lab: Bench) -> None:
    """Another prompt of another tenant: it has nothing of the hand-off that was given up."""
    lab.sends = lab.trickle
    _, decode = lab.pair(PRESET)
    for turn in range(3):
        lab.holding = True
        first = lab.ask_as(decode, "x", prompt(7, 100), salt="one")
        within("it is being moved", lambda: is_moving(decode))
        assert decode.cancel("x")
        assert first.wait().reason == "cancelled"
        second = lab.ask_as(decode, "x", prompt(8 + turn, 100), salt="two")
        lab.holding = False
        check_answer(second)


def test_a_layer_that_comes_late(lab: Bench) -> None:
    """The last one: its sequence goes aside, and the neighbour goes on meanwhile. It is one hand-off."""
    come, seen, lab.release_s = threading.Event(), Mock(spec=Observer), 0.2

    def late_last(pieces: Iterator[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.layer == decode.layout.layers - 1:
                come.wait(GATE_S)
            yield piece

    lab.sends = late_last
    _, decode = lab.pair(PRESET, chunk_tokens=512, observer=seen)
    slowed(decode)
    neighbour = lab.ask(decode, LONG, 600, prefill=()).wait(5)
    late = lab.ask(decode, prompt(12, 100), 80).wait(1)
    within("it is aside", lambda: decode.status()["side_steps"] >= 1)
    neighbour.wait(len(neighbour.tokens) + 40)
    come.set()
    late.wait()
    decode.cancel(neighbour.request.id)
    check_answer(late)
    assert seen.stalled.call_count <= 1
    assert [call.args[0] for call in seen.handed_off.call_args_list] == [late.usage.moved_bytes]
    check_beginning(neighbour)


def bytes_of(it: Piece) -> Bytes:
    data = np.empty(it.data.nbytes, np.uint8)
    it.data.read_into([data])
    return data


def with_data(it: Piece, data: Bytes) -> Piece:
    return replace(it, data=LocalData(data), checksum=checksum_of([data]))


def headless(it: Piece) -> Piece:
    """The prompt's first page is left out."""
    cut = with_data(it, bytes_of(it)[it.data.nbytes * 16 // it.tokens :])
    return it if it.token_start else replace(cut, token_start=16, tokens=it.tokens - 16)


MALFORMED: dict[str, Callable[[Piece], Piece]] = {
    "size": lambda it: with_data(it, bytes_of(it)[:-3]),
    "start beyond the prompt": lambda it: replace(it, token_start=it.token_start + 16),
    "start after a gap": headless,
    "layer": lambda it: replace(it, layer=99),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_piece_fails_its_handoff_alone(lab: Bench, what: str) -> None:
    """The prompt is computed here then, and nothing is counted that the other engine had found of it."""
    tokens = prompt(14, 100)
    source = lab.engine(PRESET, lab.store(), role=Role.PREFILL)
    decode = lab.decoding(source)
    check_answer(lab.ask(decode, tokens, 6))
    lab.sends = lambda pieces: map(MALFORMED[what], pieces)
    answer = lab.ask(decode, tokens, 6)
    check_answer(answer)
    usage = answer.usage
    assert (usage.computed_tokens, usage.prefill_engine, usage.prefill_cached_tokens) == (100, "", {})
    lab.sends = iter
    all_free(source)
    again = lab.ask(decode, tokens, 6).wait()
    assert again.usage.prefill_engine and again.usage.prefill_cached_tokens == {"dram": 96}


def test_bytes_that_changed_on_the_way_are_noticed(lab: Bench) -> None:
    """The prompt is computed here then, and that engine is not asked for a while."""
    source = lab.engine(PRESET, role=Role.PREFILL)
    decode = lab.decoding(source)
    lab.sends = lambda pieces: (replace(it, data=LocalData(bytes_of(it) ^ 1)) for it in pieces)
    answer = lab.ask(decode, prompt(14, 100), 6)
    check_answer(answer)
    assert (answer.usage.computed_tokens, answer.usage.prefill_engine) == (100, "")
    all_free(source)


@pytest.mark.parametrize("end", ["release", "role"])
def test_a_drain_waits_for_prefills_that_are_held(lab: Bench, end: str) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL)
    told = prefill(one, "x", LONG)
    within("it is held", lambda: ends(told))
    with ThreadPoolExecutor(1) as thread:
        drained = thread.submit(one.drain, None, GATE_S)
        within("it drains", lambda: one.status()["draining"])
        assert not drained.done()
        with pytest.raises(NodeUnavailable):
            prefill(one, "y", LONG)
        (partial(one.release, "x") if end == "release" else partial(one.set_role, Role.BOTH))()
        assert drained.result(GATE_S / 2) == (end == "role")
    one.release("x")


def test_usage_after_a_load_that_failed_half_way(lab: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that lie apart are filled one after the other; the second read fails."""
    one, tokens = lab.engine(PRESET, lab.store()), prompt(16, 100)
    check_answer(lab.ask(one, tokens, 2))
    all_free(one)
    taken: Any = one.arena.take(one.arena.frames_total)
    one.arena.give_back(taken[0:20:2])
    caches = one.pool.cache("", "")
    assert caches is not None
    kind: Any = type(caches.groups[0])
    reads = iter((kind.get, Mock(side_effect=NodeUnavailable("the second read"))))
    monkeypatch.setattr(kind, "get", lambda *asked, **how: next(reads)(*asked, **how))
    answer = lab.ask(one, tokens, 2)
    check_answer(answer)
    one.arena.give_back(taken[1:20:2])
    one.arena.give_back(taken[20:])
    assert not list(reads) and answer.cached == {"dram": 16} and answer.usage.computed_tokens == 84
    assert answer.usage.loaded_bytes == one.layout.page_bytes
