"""Ends, ids and peers that misbehave: who asked is told one end, frames come back, and no answer is wrong for it."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import xxhash

from engine.compression import lossy_layout
from engine.core import Engine
from engine.observer import Observer
from engine.request import Done, Failed, Piece, PrefillEvent, Request, Role, Sampling, Source
from engine.sequence import State
from kvstore.errors import InvalidRequest, NodeUnavailable, TooManyCalls
from tests.process.engine_tokens import Answer, InProcess, Lab, Tokens, check_answer, expected, prompt, within
from tests.process.harness import Machine

PRESET = "tiny-llama"
LONG = prompt(1, 40)  # of answers that run while something happens: one reference for all of them
GATE_S = 30.0


class Bench(Lab):
    """Engines that know each other as ``peer``."""

    peer: Callable[[Engine], InProcess] = InProcess

    def connect(self, address: str) -> InProcess:
        """For engines."""
        return self.peer(self.engines[address])

    def ask_as(self, one: Engine, request_id: str, tokens: Tokens, count: int = 8, **request: Any) -> Answer:
        """Submit a prompt under that id."""
        chosen = Sampling(max_tokens=count, ignore_eos=True)
        self._drawn[id(chosen)] = chosen, {}
        made = Request(id=request_id, tokens=tokens, sampling=chosen, **request)
        answer = Answer(PRESET, made, self._drawn[id(chosen)][1])
        one.submit(made, answer.emit)
        return answer


@pytest.fixture
def lab(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with Bench(machine, monkeypatch) as here:
        yield here


class Gate:
    """Forwards of an engine wait here, the first after ``free`` others, until it is opened."""

    def __init__(self, one: Engine, free: int = 0) -> None:
        self._runner, self._forward = one._step._runner, one._step._runner.forward
        self._free = free
        self.entered, self._opened = threading.Event(), threading.Event()
        self._runner.forward = self._wait  # type: ignore[method-assign]

    def _wait(self, batch: Any) -> Any:
        self._free -= 1
        if self._free < 0:
            self.entered.set()
            self._opened.wait(GATE_S)
        return self._forward(batch)

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.set()

    def reached(self) -> None:
        """Wait until a forward stands here."""
        assert self.entered.wait(GATE_S), "no forward came"


def slowed(one: Engine, seconds: float = 0.005) -> None:
    """Every forward of it takes that much longer."""
    forward = one._step._runner.forward

    def late(batch: Any) -> Any:
        time.sleep(seconds)
        return forward(batch)

    one._step._runner.forward = late  # type: ignore[method-assign]


def prefill(one: Engine, request_id: str, tokens: Tokens, hold_s: float = GATE_S) -> list[PrefillEvent]:
    """Have a prompt computed. What is told of it, as it comes."""
    told: list[PrefillEvent] = []
    one.prefill(Request(id=request_id, tokens=tokens), one.layout, hold_s, told.append)
    return told


def ends(told: list[PrefillEvent]) -> list[PrefillEvent]:
    return [event for event in list(told) if isinstance(event, Done | Failed)]


def all_free(one: Engine) -> None:
    """Its frames are back, soon, and it is alive."""
    within("all frames are back", lambda: one.arena.frames_free == one.arena.frames_total and not one._known)
    assert one._thread.is_alive()


def check_beginning(answer: Answer) -> None:
    """It was cancelled, and was right so far."""
    assert answer.wait().reason == "cancelled", (answer.reason, answer.error)
    tokens = tuple(answer.tokens)
    assert tokens == expected(PRESET, answer.request.tokens, len(tokens)).tokens


# --- prefills that are released ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["waiting", "computing", "last chunk", "held"])
def test_a_prefill_is_released(lab: Bench, when: str) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL, batch_max=1)
    with Gate(one, free={"waiting": 0, "computing": 1, "last chunk": 0, "held": 9}[when]) as gate:
        if when == "waiting":
            prefill(one, "other", prompt(2, 20))
            gate.reached()
        told = prefill(one, "x", prompt(3, 40 if when in ("last chunk", "held") else 300))
        if when == "held":
            within("it is held", lambda: ends(told))
        else:
            gate.reached()
        state = {"waiting": State.WAITING, "held": State.HELD}.get(when, State.COMPUTING)
        assert one._known["x"].state is state
        assert one.release("x")
    within("who asked is told", lambda: ends(told))
    one.release("other")
    all_free(one)
    assert len(ends(told)) == 1
    assert isinstance(ends(told)[0], Done if when in ("held",) else (Done, Failed))
    assert not one.release("x")
    again = prefill(one, "x", prompt(3, 40), 0.05)
    assert isinstance(within("it computes", lambda: ends(again))[0], Done)


def test_prefills_released_at_any_moment(lab: Bench) -> None:
    one = lab.engine(PRESET, role=Role.PREFILL, batch_max=2)
    stop_s = time.monotonic() + 2.0
    told: list[list[PrefillEvent]] = []

    def ask(number: int) -> None:
        chance, asked = random.Random(number), 0
        while time.monotonic() < stop_s:
            name, asked = f"{number}-{asked}", asked + 1
            told.append(prefill(one, name, prompt(number, chance.randint(20, 60))))
            time.sleep(0.004 * chance.random())
            one.release(name)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    all_free(one)
    assert len(told) > 50
    assert [len(ends(each)) for each in told] == [1] * len(told)


# --- ids --------------------------------------------------------------------------------------------------------------


def test_a_prefill_and_an_answer_of_one_id(lab: Bench) -> None:
    one = lab.engine(PRESET)
    slowed(one)
    told = prefill(one, "x", prompt(4, 40))
    within("it is held", lambda: ends(told))
    with pytest.raises(InvalidRequest, match="x is in use"):
        lab.ask_as(one, "x", LONG)
    with pytest.raises(InvalidRequest, match="x is in use"):
        prefill(one, "x", prompt(4, 40))
    one.release("x")
    all_free(one)
    answer = lab.ask_as(one, "x", LONG, 60).wait(2)
    with pytest.raises(InvalidRequest, match="x is in use"):
        prefill(one, "x", prompt(4, 40))
    assert not one.release("x"), "no prefill of that id is here"
    check_answer(answer)


def test_two_threads_submit_one_id(lab: Bench) -> None:
    one = lab.engine(PRESET, lab.store())
    cache, both = one.pool.cache, threading.Barrier(2)

    def together(*names: Any) -> Any:
        both.wait(GATE_S)
        return cache(*names)

    one.pool.cache = together  # type: ignore[method-assign]
    accepted: list[Answer] = []
    refused: list[InvalidRequest] = []

    def submit(tokens: Tokens) -> None:
        try:
            accepted.append(lab.ask_as(one, "twin", tokens))
        except InvalidRequest as error:
            refused.append(error)

    threads = [threading.Thread(target=submit, args=(tokens,)) for tokens in (LONG, prompt(5, 50))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(accepted) == len(refused) == 1
    check_answer(accepted[0])


def test_an_id_is_free_when_its_end_is_told(lab: Bench) -> None:
    one = lab.engine(PRESET)
    for turn in range(30):
        lab.ask_as(one, "x", prompt(6, 20 + turn % 5), 2).wait()
    check_answer(lab.ask_as(one, "x", LONG))


class Trickle(InProcess):
    """Sends a piece of layer 0 again and again instead of the other layers, while ``on``."""

    on = True

    def pull(self, *asked: Any, **how: Any) -> Iterator[Piece]:
        """As ``EngineClient.pull``."""
        until_s, first = time.monotonic() + GATE_S, None
        for piece in super().pull(*asked, **how):
            first = first or piece
            while piece.layer and self.on and time.monotonic() < until_s:
                time.sleep(0.02)
                yield first
            yield piece


def test_an_id_asked_again_while_the_first_is_being_moved(lab: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another prompt of another tenant: it has nothing of the hand-off that was given up."""
    lab.peer = Trickle
    _, decode = lab.pair(PRESET)
    for turn in range(3):
        monkeypatch.setattr(Trickle, "on", True)
        first = lab.ask_as(decode, "x", prompt(7, 100), salt="one")
        within("it is being moved", lambda: any(one.spent.moved_bytes for one in list(decode._known.values())))
        assert decode.cancel("x")
        assert first.wait().reason == "cancelled"
        second = lab.ask_as(decode, "x", prompt(8 + turn, 100), salt="two")
        monkeypatch.setattr(Trickle, "on", False)
        check_answer(second)


# --- hand-offs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2 * 64 + 40, 3 * 64 + 50])
def test_a_tail_that_is_computed_in_two_chunks(lab: Bench, count: int) -> None:
    _, decode = lab.pair(PRESET, lab.store(), page_tokens=64, chunk_tokens=16, source=Source.DRAM)
    check_answer(lab.ask(decode, prompt(count, count), 6))


def test_what_another_engine_took_from_lossy_pages_is_not_exact(lab: Bench) -> None:
    store, tokens = lab.store(), prompt(11, 120)
    lossy = lab.engine(PRESET, store, role=Role.PREFILL, compress="int8")
    asks = {"prefill": (lab.address_of(lossy),), "local_prefill_tokens": 0}
    decode = lab.engine(PRESET, store, role=Role.DECODE, **asks)
    prefill(lossy, "first", tokens[:100], 0.05)
    pages = store.cache(lossy_layout(lossy.layout, "int8"))
    within("lossy pages are stored", lambda: pages.lookup(tokens[:100]).tokens == 96)
    lax = lab.ask(decode, tokens, 24, allow_lossy=True).wait()
    assert lax.usage.prefill_cached_tokens == {"dram-int8": 96}
    lab.settle()
    history = np.concatenate([tokens, np.array(lax.tokens, np.uint32)])
    assert store.cache(decode.layout).lookup(history).tokens == 0
    strict = lab.ask(decode, tokens, 24)
    check_answer(strict)
    assert strict.cached == {} == strict.usage.prefill_cached_tokens


class Counting(Observer):
    def __init__(self) -> None:
        self.stalls: list[float] = []
        self.handoffs: list[int] = []

    def stalled(self, seconds: float) -> None:
        self.stalls.append(seconds)

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        self.handoffs.append(moved_bytes)


def test_a_layer_that_comes_late(lab: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one: its sequence goes aside, and the neighbour goes on as long as it does not come."""
    come = threading.Event()

    class Late(InProcess):
        def pull(self, *asked: Any, **how: Any) -> Iterator[Piece]:
            for piece in super().pull(*asked, **how):
                if piece.layer == self.target.layout.layers - 1:
                    come.wait(GATE_S)
                yield piece

    lab.peer = Late
    seen = Counting()
    _, decode = lab.pair(PRESET, chunk_tokens=512, observer=seen)
    slowed(decode, 0.002)
    neighbour = lab.ask(decode, LONG, 400, prefill=()).wait(5)
    late = lab.ask(decode, prompt(12, 100), 6).wait(1)
    try:
        within("it is aside", lambda: decode.status()["side_steps"] >= 1)
        neighbour.wait(len(neighbour.tokens) + 40)
        assert len(seen.stalls) <= 1
        assert late._events.empty(), "its second token needs the last layer"
    finally:
        come.set()
    check_answer(late)
    assert late.usage.prefill_engine and len(seen.stalls) <= 1
    decode.cancel(neighbour.request.id)
    check_beginning(neighbour)


def test_a_sequence_that_waits_aside_is_cancelled(lab: Bench) -> None:
    """Its layers would never come: nobody waits for them any longer."""
    lab.peer = Trickle
    source, decode = lab.pair(PRESET, chunk_tokens=512)
    answer = lab.ask(decode, prompt(13, 100), 6).wait(1)
    within("it is aside", lambda: len(decode._sides._inside) == 1)
    assert decode.cancel(answer.request.id)
    check_beginning(answer)
    start_s = time.monotonic()
    all_free(decode)
    all_free(source)
    assert len(decode._routes) == 0 and time.monotonic() - start_s < GATE_S / 3


def resized(piece: Piece) -> Piece:
    return replace(piece, data=piece.data[:-3], checksum=xxhash.xxh3_64_intdigest(piece.data[:-3]))


MALFORMED: dict[str, Callable[[Piece], Piece]] = {
    "size": resized,
    "start inside a page": lambda piece: replace(piece, token_start=piece.token_start + 1),
    "start beyond the prompt": lambda piece: replace(piece, token_start=1024),
    "start of another page": lambda piece: replace(piece, token_start=piece.token_start + 16),
    "layer": lambda piece: replace(piece, layer=99),
    "checksum": lambda piece: replace(piece, checksum=piece.checksum ^ 1),
    "tokens": lambda piece: replace(piece, tokens=piece.tokens - 1),
    "nothing": lambda piece: replace(piece, tokens=0, data=b"", checksum=xxhash.xxh3_64_intdigest(b"")),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_piece_fails_its_handoff_alone(lab: Bench, what: str) -> None:
    """The prompt is computed here then, and nothing is counted that the other engine had found of it."""
    bad = False

    class Malformed(InProcess):
        def pull(self, *asked: Any, **how: Any) -> Iterator[Piece]:
            return (MALFORMED[what](piece) if bad else piece for piece in super(Malformed, self).pull(*asked, **how))

    lab.peer, tokens = Malformed, prompt(14, 100)
    source = lab.engine(PRESET, lab.store(), role=Role.PREFILL)
    asks = {"prefill": (lab.address_of(source),), "local_prefill_tokens": 0}
    decode = lab.engine(PRESET, None, role=Role.DECODE, **asks)
    for bad in (False, True):
        answer = lab.ask(decode, tokens, 6)
        check_answer(answer)
        assert answer.usage.computed_tokens == (100 if bad else 0)
        assert bool(answer.usage.prefill_engine) is not bad
    assert answer.usage.prefill_cached_tokens == {}
    bad = False
    lab.settle()
    decode._peers._failed.clear()
    again = lab.ask(decode, tokens, 6)
    check_answer(again)
    assert again.usage.prefill_engine and again.usage.prefill_cached_tokens == {"dram": 96}


def test_a_handoff_is_counted_once(lab: Bench) -> None:
    class Slow(InProcess):
        def release(self, request_id: str) -> bool:
            time.sleep(0.3)
            return super().release(request_id)

    lab.peer = Slow
    seen = Counting()
    _, decode = lab.pair(PRESET, observer=seen)
    slowed(decode)
    answer = lab.ask(decode, prompt(15, 100), 80)
    check_answer(answer)
    assert seen.handoffs == [answer.usage.moved_bytes]


# --- answers that go on elsewhere -------------------------------------------------------------------------------------


def test_a_resumed_answer_that_holds_a_stop_string(lab: Bench) -> None:
    one = lab.engine(PRESET)
    tokens = np.concatenate([LONG, np.frombuffer(b"abEND", np.uint8).astype(np.uint32)])
    answer = lab.ask(one, tokens, 50, sampling={"stop": ("END",)}, generated=5).wait()
    assert (answer.reason, answer.tokens) == ("stop", [])
