"""Engines in this process, and what plain transformers answer to the same prompts.

The judge is `check_answer`: an answer has the tokens of ``generate``, and every one of its logits is near that of
``generate``. Another token is forgiven only where the reference itself has a tie; the rest of that answer is judged
against what the reference goes on with after it.
"""

from __future__ import annotations

import faulthandler
import queue
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import engine.shell.performer
import kvstore
from engine.compute.models import Model, load_model
from engine.config import EngineConfig
from engine.model.observer import Observer
from engine.model.piece import Piece
from engine.model.request import (
    Done,
    Event,
    Failed,
    Finished,
    PrefillEvent,
    Request,
    Role,
    Sampling,
    Token,
    Usage,
)
from engine.shell.engine import Engine
from kvstore import Keys, Layout, Store
from kvstore.client.local import grants
from tests.helpers.engines.plain import as_reference
from tests.helpers.processes import Machine, wait_settled, wait_until


@dataclass(frozen=True)
class Place:
    """Where engines of a test compute, and plain transformers with them; how far apart their logits may be.

    Between float32 sums in another order 2e-5 is seen, logits are of 5 or so, and any wrong page makes 0.1 and more. So
    half precision shows that its way is there and nearly right, and float32 that it is right.
    """

    device: str = "cpu"
    dtype: str = "float32"
    tolerance: float = 3e-4

    def __str__(self) -> str:
        return f"{self.device}-{self.dtype}"


CPU = Place()
TOLERANCE = CPU.tolerance
GPUS = [Place("cuda:0"), Place("cuda:0", "bfloat16", 0.3)] if torch.cuda.is_available() else []
PLACES = [CPU, *GPUS]
EXACT = [CPU, *GPUS[:1]]  # where a token is computed to the same numbers, whoever its neighbours are
ANSWER_S = 60.0
SETTLE_S = 60.0
MAIN = ("tiny-llama", "tiny-qwen3", "tiny-mla")
Tokens = npt.NDArray[np.uint32]

torch.set_num_threads(1)  # tests share two cores


def prompt(seed: int, count: int) -> Tokens:
    """``count`` tokens; a longer prompt of the same seed begins with the shorter ones."""
    return np.random.default_rng(seed).integers(0, 256, 4096).astype(np.uint32)[:count]


# --- plain transformers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What ``generate`` says to a prompt: tokens, and the logits ``[tokens, vocab]`` they were chosen from."""

    tokens: tuple[int, ...]
    logits: torch.Tensor


def served(preset: str, seed: int = 0, dtype: str = "float32", device: str = "cpu") -> Model:
    """A model for engines: one of a kind in this process."""
    return _served(preset, seed, dtype, device)  # positional: a cache keeps a second result for arguments by name


def plain(preset: str, place: Place = CPU) -> Model:
    """The same model as transformers runs it: no engine ever touches this one."""
    return _plain(preset, place)


@cache
def _served(preset: str, seed: int, dtype: str, device: str) -> Model:
    return load_model(preset, seed=seed, dtype=dtype, device=device)


@cache
def _plain(preset: str, place: Place) -> Model:
    model = load_model(preset, dtype=place.dtype, device=place.device)
    as_reference(model.net)
    return model


_expected: dict[tuple[str, bytes, Place], Expected] = {}


def expected(preset: str, tokens: Tokens, count: int, guess: Sequence[int] = (), place: Place = CPU) -> Expected:
    """What plain transformers answer, ``count`` tokens, greedily. A right ``guess`` takes one forward to show."""
    name = preset, tokens.tobytes(), place
    known = _expected.get(name)
    if known is None or len(known.tokens) < count:
        shown = _shown(preset, tokens, guess, place) if len(guess) == count else None
        known = _expected[name] = shown or _generated(preset, tokens, count, place)
    return Expected(known.tokens[:count], known.logits[:count])


def _shown(preset: str, tokens: Tokens, guess: Sequence[int], place: Place) -> Expected | None:
    """The guess, where each of its tokens is the likeliest after those before it: that is what ``generate`` does."""
    given = torch.from_numpy(np.concatenate([tokens, np.array(guess[:-1], np.uint32)]).astype(np.int64))[None]
    with torch.inference_mode():
        net = plain(preset, place).net
        logits = net(given.to(place.device), use_cache=False, logits_to_keep=len(guess)).logits[0].float().cpu()
    return Expected(tuple(guess), logits) if logits.argmax(-1).tolist() == list(guess) else None


def _generated(preset: str, tokens: Tokens, count: int, place: Place) -> Expected:
    given = torch.from_numpy(tokens.astype(np.int64))[None].to(place.device)
    out: Any = plain(preset, place).net.generate(  # type: ignore[operator]
        given,
        attention_mask=torch.ones_like(given),  # without it, ids that pad are taken for padding
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return Expected(tuple(out.sequences[0, len(tokens) :].tolist()), torch.cat(out.logits).float().cpu())


# --- answers ----------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """One request and what came of it. ``logits``: what an engine drew each token from, by its index."""

    preset: str
    request: Request
    logits: Mapping[int, torch.Tensor]
    tokens: list[int] = field(default_factory=list)
    place: Place = CPU
    text: str = ""
    reason: str = ""
    error: kvstore.errors.KVStoreError | None = None
    _usage: Usage | None = None
    _events: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)

    def emit(self, event: Event) -> None:
        """For the engine."""
        self._events.put(event)

    def wait(self, tokens: int | None = None, timeout_s: float = ANSWER_S) -> Answer:
        """Until it has ended, or has so many tokens. Fails at the deadline."""
        deadline = time.monotonic() + timeout_s
        while not self.ended and (tokens is None or len(self.tokens) < tokens):
            try:
                event = self._events.get(timeout=max(0.001, deadline - time.monotonic()))
            except queue.Empty:
                faulthandler.dump_traceback(sys.__stderr__)  # a thread that hangs, or is not there any more, is seen
                raise AssertionError(f"{self.request.id}: not within {timeout_s:g} s, after {self.tokens}") from None
            match event:
                case Token():
                    assert event.index == self.request.generated + len(self.tokens), event
                    self.tokens.append(event.id)
                    self.text += event.text
                case Finished():
                    self._usage, self.reason, self.text = event.usage, event.reason, self.text + event.text
                case Failed():
                    self.error = event.error
        return self

    @property
    def ended(self) -> bool:
        return self._usage is not None or self.error is not None

    @property
    def usage(self) -> Usage:
        """Of an answer that has finished."""
        assert self._usage is not None, f"{self.request.id}: {self.error!r}"
        return self._usage

    @property
    def cached(self) -> dict[str, int]:
        """Tokens loaded from the pool, by tier."""
        return dict(self.usage.cached_tokens)


def check_answer(answer: Answer) -> None:
    """It ended well, with the tokens of ``generate``, out of logits like those of ``generate``."""
    answer.wait()
    assert answer.error is None, f"{answer.request.id}: {answer.error!r}"
    assert len(answer.tokens) == answer.request.sampling.max_tokens - answer.request.generated, answer.reason
    known, at = answer.request.tokens, 0
    while at < len(answer.tokens):
        rest = answer.tokens[at:]
        want = expected(answer.preset, known, len(rest), guess=rest, place=answer.place)
        at += _agreed(answer, at, want)
        known = np.concatenate([answer.request.tokens, np.array(answer.tokens[:at], np.uint32)])


def _agreed(answer: Answer, start: int, want: Expected) -> int:
    """How many tokens from ``start`` on are those of the reference; one that differs by a tie is counted."""
    for i, (token, row) in enumerate(zip(want.tokens, want.logits, strict=True)):
        at = start + i
        who = f"{answer.request.id}, token {at} after {len(answer.request.tokens)}"
        ours = answer.logits.get(answer.request.generated + at)
        assert ours is not None, f"{who}: was never drawn here"
        off = float((ours - row).abs().max())
        tolerance = answer.place.tolerance
        assert off <= tolerance, f"{who}: logits are off by {off:g}"
        if answer.tokens[at] != token:
            best, second = row.topk(2).values.tolist()
            assert best - second <= tolerance, f"{who}: {answer.tokens[at]}, not {token}, which is no tie"
            assert answer.tokens[at] in row.topk(2).indices.tolist(), f"{who}: {answer.tokens[at]}, of no tie"
            return i + 1
    return len(want.tokens)


def distance(answer: Answer) -> float:
    """How far the logits of the first token are from those of ``generate``; of answers that shall be wrong."""
    row = expected(answer.preset, answer.request.tokens, 1).logits[0]
    return float((answer.wait().logits[answer.request.generated] - row).abs().max())


# --- engines ----------------------------------------------------------------------------------------------------------


class InProcess:
    """An engine as its peers see it, without a wire between them."""

    def __init__(self, target: Engine) -> None:
        self.target = target

    def prefill(
        self, request: Request, layout: Layout, hold_s: float | None = None, *, timeout_s: float | None = None
    ) -> Iterator[PrefillEvent]:
        """As ``EngineClient.prefill``."""
        events: queue.SimpleQueue[PrefillEvent] = queue.SimpleQueue()
        self.target.prefill(request, layout, hold_s or 0.0, events.put)
        done = False
        try:
            for event in _until_end(events, timeout_s):
                done = isinstance(event, Done)
                yield event
        finally:
            if not done:  # closing it before gives it up
                self.target.release(request.id)

    def pull(
        self, request_id: str, token_start: int = 0, codec: str = "none", *, timeout_s: float | None = None
    ) -> Generator[Piece, None, None]:
        """As ``EngineClient.pull``."""
        return self.target.pull(request_id, token_start, codec, timeout_s or ANSWER_S)

    def release(self, request_id: str) -> bool:
        """As ``EngineClient.release``."""
        return self.target.release(request_id)

    def submit(self, request: Request) -> Iterator[Event]:
        """As ``EngineClient.submit``."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.target.submit(request, events.put)
        try:
            yield from _until_end(events, None)
        finally:
            self.target.cancel(request.id)

    def cancel(self, request_id: str) -> bool:
        """As ``EngineClient.cancel``."""
        return self.target.cancel(request_id)

    def status(self) -> dict[str, Any]:
        """As ``EngineClient.status``."""
        return self.target.status()


def _until_end(events: queue.SimpleQueue[Any], timeout_s: float | None) -> Iterator[Any]:
    while True:
        try:
            event = events.get(timeout=ANSWER_S if timeout_s is None else max(0.001, timeout_s))
        except queue.Empty:
            raise kvstore.errors.DeadlineExceeded("the engine did not answer in time") from None
        yield event
        if isinstance(event, Done | Finished | Failed):
            return


class Lab:
    """Stores and engines of one test. Leaving it waits until they are idle, and checks that nothing leaked."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, place: Place = CPU) -> None:
        self.machine = machine
        self.place = place
        self.engines: dict[str, Engine] = {}
        self.presets: dict[str, str] = {}
        self.stores: list[Store] = []
        self._drawn: dict[int, tuple[Sampling, dict[int, torch.Tensor]]] = {}
        self._asked = 0
        choose_many = engine.shell.performer.choose_many

        def tapped(logits: torch.Tensor, samplings: Sequence[Sampling], indexes: Sequence[int]) -> list[int]:
            for row, sampling, index in zip(logits, samplings, indexes, strict=True):
                if id(sampling) in self._drawn:
                    self._drawn[id(sampling)][1][index] = row.float().cpu().clone()
            return choose_many(logits, samplings, indexes)

        monkeypatch.setattr(engine.shell.performer, "choose_many", tapped)
        # This process does not keep frames that it was granted ahead for seconds: the tests wait for them often.
        monkeypatch.setattr(grants, "IDLE_S", 0.1)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def store(self, nvme: bool = False, **settings: Any) -> Store:
        """A node in this process. What is read from its NVMe stays there."""
        if nvme:
            path = self.machine.logs / f"nvme-{len(self.stores)}"
            settings = {"nvme": [f"{path}:48MiB"], "nvme_extent": "1MiB", "promote_after": 255, **settings}
        settings = {"dram": "32MiB", "extent": "1MiB", "shm_dir": str(self.machine.shm_dir), **settings}
        store = kvstore.open(**settings)
        self.stores.append(store)
        return store

    def engine(
        self,
        preset: str,
        store: Store | None = None,
        *,
        observer: Observer | None = None,
        home: Store | None = None,
        **config: Any,
    ) -> Engine:
        """One that runs. It is found by others under ``address_of``. It keeps no pages in its arena unless it is told
        to, so that what comes out of the store is seen."""
        address = f"engine-{len(self.engines)}:1"
        model = config.pop("served", None) or served(preset, dtype=self.place.dtype, device=self.place.device)
        settings = {
            "arena": 24 << 20,
            "keep_pages": 0.0,
            "page_tokens": 16,
            "chunk_tokens": 64,
            "threads": 1,
            "device": self.place.device,
            **config,
        }
        made = Engine(EngineConfig(model=preset, **settings), model, store, self.connect, observer, home)
        self.engines[address] = made
        self.presets[address] = preset
        made.start()
        return made

    def pair(self, preset: str, store: Store | None = None, **config: Any) -> tuple[Engine, Engine]:
        """A prefill engine, and a decode engine that asks it for every prompt."""
        prefill = self.engine(preset, store, role=Role.PREFILL, **config)
        asks = {"prefill": (self.address_of(prefill),), "local_prefill_tokens": 0, **config}
        return prefill, self.engine(preset, store, role=Role.DECODE, **asks)

    def connect(self, address: str) -> InProcess:
        """For engines."""
        return InProcess(self.engines[address])

    def address_of(self, one: Engine) -> str:
        """What other engines know it by."""
        return next(address for address, known in self.engines.items() if known is one)

    def ask(
        self, one: Engine, tokens: Tokens, count: int = 8, sampling: Mapping[str, Any] | None = None, **request: Any
    ) -> Answer:
        """Submit a prompt."""
        self._asked += 1
        chosen = Sampling(**{"max_tokens": count, "ignore_eos": True, **(sampling or {})})
        self._drawn[id(chosen)] = chosen, {}
        made = Request(id=f"request-{self._asked}", tokens=tokens, sampling=chosen, **request)
        answer = Answer(self.presets[self.address_of(one)], made, self._drawn[id(chosen)][1], place=self.place)
        one.submit(made, answer.emit)
        return answer

    def answers(self, one: Engine, prompts: Sequence[Tokens], count: int = 8, **request: Any) -> list[Answer]:
        """Submit all, and check all."""
        answers = [self.ask(one, tokens, count, **request) for tokens in prompts]
        for answer in answers:
            check_answer(answer)
        return answers

    def settle(self) -> None:
        """Every engine is idle and has all its frames; nobody of them holds anything in a store."""
        for address, one in self.engines.items():
            try:
                wait_until(f"{address} is idle", lambda one=one: not one.remains(), SETTLE_S)
            except AssertionError as late:
                raise AssertionError(f"{late}: {one.remains()}") from None
            one.arena.check()
            one.check()
        for store in self.stores:
            wait_settled(store)

    def close(self) -> None:
        """End everything."""
        try:
            self.settle()
        finally:
            for one in self.engines.values():
                one.stop()
            for store in self.stores:
                store.close()


def is_moving(one: Engine) -> bool:
    """Whether KV of a request is on its way here."""
    return any(work.cost.moved_bytes for work in list(one.performer.works.values()))


def keys_of(one: Engine, store: Store, tokens: Tokens) -> Keys:
    """Keys of the full pages of a prompt."""
    return store.cache(one.layout).keys(tokens)


def to_nvme(store: Store) -> None:
    """All pages are on NVMe, and only there."""

    def saved() -> bool:
        store.evict(pages=1 << 20)  # what is not saved yet is, and leaves the next time
        tiers = store.stats()["tiers"]
        return bool(tiers["dram"]["pages"] == 0 and tiers["nvme"]["pages"])

    wait_until("all pages are on NVMe alone", saved)


def within(what: str, holds: Callable[[], Any]) -> Any:
    """Poll until it holds; for what engines do soon after an answer."""
    return wait_until(what, holds, SETTLE_S)
