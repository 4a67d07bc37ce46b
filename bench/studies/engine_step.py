"""Rows about all that an engine does for a step of decoding, against the model's forward over one contiguous cache.

An engine decides, forms a batch, runs the forward over its pages, draws, tells clients, and writes full pages to its
pool; its turns are taken here, one by one, so that both ways alternate. The limit is the forward of ``decode_step``
alone, over about as many tokens as the sequences have then. Both share weights, and use one core.

``mounted_step`` compares two such engines, one of which has mounted its arena at the node: shared memory, and records
of what it keeps, which it writes when a request ends.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch

import kvstore
from engine.bench.decode_step import MODEL, MODEL_QUICK, PAGE_TOKENS, ContiguousCache, Nets, nets_of, one_core
from engine.config import EngineConfig
from engine.model.request import Failed, Request, Sampling, Token
from engine.shell.engine import Engine
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage, free_bytes
from kvstore.client.store import Store

CONTEXTS, CONTEXTS_QUICK = (512, 4096), (128,)  # tokens of a prompt; the first gives the row's line
STEPS = 12  # of each variant, per round
JOIN_S = 60.0
EXTENT_BYTES = 32 << 20


def engine_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """A step of ``batch`` sequences, at several lengths of context.

    Raises:
        BenchFailed: the engine does not answer, or there is no memory.
    """
    stage.clear()
    quick = stage.settings.quick
    contexts = CONTEXTS_QUICK if quick else CONTEXTS
    with one_core():
        nets = nets_of(MODEL_QUICK if quick else MODEL)
        names = [name, *(f"{name}.{context}" for context in contexts[1:])]
        return [_measure(stage, line, bar, nets, batch, tokens) for line, tokens in zip(names, contexts, strict=True)]


def mounted_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """A step of an engine whose arena is mounted, against one whose is not, both over the longest context; and
    ``<name>.show``: seconds in which a page of it is shown to others, and taken back.

    Raises:
        BenchFailed: the engine does not answer, or there is no memory.
    """
    stage.clear()
    quick, rounds = stage.settings.quick, stage.settings.rounds
    context = (CONTEXTS_QUICK if quick else CONTEXTS)[-1]
    with one_core(), ExitStack() as scene:
        nets = nets_of(MODEL_QUICK if quick else MODEL)
        answer = 2 * (rounds * STEPS + batch + STEPS)
        store = _node(scene, stage, name, nets, batch, context + 2 * answer, arenas=2)
        variants = {
            kind: _decoding(scene, store, nets, batch, context, answer, mounted=kind == "mounted")
            for kind in ("private", "mounted")
        }

        def check(variant: str, tokens: object) -> None:
            if tokens != batch:
                raise BenchFailed(f"{name}: {variant} made {tokens} tokens in a step of {batch}")

        takes = {kind: turns.take for kind, turns in variants.items()}
        seconds = alternate(takes, range(2 * STEPS), rounds, lambda _: None, check)
        shown = variants["mounted"].show(rounds)
    details: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context,
        "step_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limit = medians(seconds["mounted"]), medians(seconds["private"])
    line = result(name, Kind.TIME, ours, limit, bar=bar, limit_is="an engine whose arena is its own", details=details)
    return [line, result(f"{name}.show", Kind.TIME, shown)]


class Turns:
    """An engine whose sequences have found their prompts in its pool and decode, a turn at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = 0

    def tell(self, event: object) -> None:
        """For the engine."""
        if isinstance(event, Failed):
            raise BenchFailed(f"the engine does not answer: {event.error}")
        self._tokens += isinstance(event, Token)

    def take(self, _: None = None) -> int:
        """One turn; the tokens that clients were told in it."""
        before, engine = self._tokens, self._engine
        for event in engine.inbox.take():
            engine.performer.handle(event)
        engine.performer.turn()
        return self._tokens - before

    def join(self, batch: int) -> None:
        """Turn the engine until one turn makes a token of each sequence."""
        until_s = time.monotonic() + JOIN_S
        while self.take() < batch:
            if time.monotonic() >= until_s:
                raise BenchFailed(f"{batch} sequences do not decode after {JOIN_S:g} s")

    def show(self, rounds: int) -> list[float]:
        """Seconds for each page of a request, in which it is shown and taken back. All requests are given up first."""
        self.end()
        mounted, arena = self._engine.mounted, self._engine.arena
        pages = arena.frames_free  # with nothing that is kept
        tokens = np.arange(pages * PAGE_TOKENS, dtype=np.uint32)
        took = []
        for number in range(rounds):
            cache = self._engine.pool.cache(f"shown-{number}", "")
            frames = arena.take(pages)
            if cache is None or frames is None:
                raise BenchFailed("the engine has no pool, or no frames")
            keys, places = cache.groups[0].keys(tokens), frames.tolist()
            start_s = time.perf_counter()
            shown = mounted.show(keys, places)
            mounted.hide(places)
            took.append((time.perf_counter() - start_s) / pages)
            arena.give_back(frames)
            if not shown:
                raise BenchFailed(f"the arena is not mounted: {mounted.why}")
        return took

    def end(self) -> None:
        """Give all of them up."""
        for request in list(self._engine.admission.known):
            self._engine.cancel(request)
        until_s = time.monotonic() + JOIN_S
        while self._engine.remains() and time.monotonic() < until_s:
            self.take()


def _measure(stage: Stage, name: str, bar: Bar, nets: Nets, batch: int, context: int) -> Result:
    layout = nets.model.layout(PAGE_TOKENS)
    rounds = stage.settings.rounds
    answer = 2 * (rounds * STEPS + batch + STEPS)
    with ExitStack() as scene:
        store = _node(scene, stage, name, nets, batch, context + answer)
        turns = _decoding(scene, store, nets, batch, context, answer)
        held = torch.zeros((layout.layers, 2, batch, layout.kv_heads, context + rounds * STEPS + 1, layout.head_dim))

        def contiguous(_: None) -> int:
            with torch.inference_mode():
                position = torch.full((batch, 1), held.shape[-2] - 2)
                given = torch.zeros((batch, 1), dtype=torch.int64)
                nets.plain(
                    input_ids=given, position_ids=position, past_key_values=ContiguousCache(held), use_cache=True
                )
            return batch

        def check(variant: str, tokens: object) -> None:
            if tokens != batch:
                raise BenchFailed(f"{name}: {variant} made {tokens} tokens in a step of {batch}")

        variants = {"contiguous": contiguous, "engine": turns.take}
        seconds = alternate(variants, range(2 * STEPS), rounds, lambda _: None, check)
    details: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context,
        "step_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limit = medians(seconds["engine"]), medians(seconds["contiguous"])
    return result(name, Kind.TIME, ours, limit, bar=bar, limit_is="a bare forward, contiguous cache", details=details)


def _kv_bytes(nets: Nets, batch: int, tokens: int) -> int:
    return batch * -(-tokens // PAGE_TOKENS) * nets.model.layout(PAGE_TOKENS).page_bytes


def _node(scene: ExitStack, stage: Stage, name: str, nets: Nets, batch: int, tokens: int, arenas: int = 1) -> Store:
    """Start a node for ``batch`` sequences of ``tokens`` tokens. Raises BenchFailed if memory is too small for it and
    ``arenas`` arenas."""
    kv_bytes = _kv_bytes(nets, batch, tokens)
    if (2 + arenas) * kv_bytes > 0.6 * free_bytes(stage.settings.shm_dir):
        raise BenchFailed(f"{name} needs {(2 + arenas) * kv_bytes >> 20} MiB of memory")
    dram = f"{(kv_bytes // EXTENT_BYTES + 3) * EXTENT_BYTES >> 20}MiB"
    store = kvstore.open(dram=dram, extent=f"{EXTENT_BYTES >> 20}MiB", shm_dir=str(stage.settings.shm_dir))
    return scene.enter_context(closing(store))


def _decoding(
    scene: ExitStack, store: Store, nets: Nets, batch: int, context: int, answer: int, mounted: bool = False
) -> Turns:
    """Make an engine that decodes ``batch`` prompts of ``context`` tokens, which it found in the pool."""
    config = EngineConfig(
        model=nets.model.name,
        arena=_kv_bytes(nets, batch, context + answer),
        page_tokens=PAGE_TOKENS,
        batch_max=batch,
        threads=1,
    )
    engine = Engine(config, nets.model, store, _nobody, home=store if mounted else None)
    scene.callback(engine.stop)
    turns, cache = Turns(engine), store.cache(engine.layout)
    random = np.random.default_rng(4)
    some = random.standard_normal((1, engine.layout.page_bytes // 4), np.float32).view(np.uint8)
    for number in range(batch):
        tokens = random.integers(0, nets.model.geometry.vocab_size, context, np.uint32)
        cache.put(tokens, np.repeat(some, context // PAGE_TOKENS, axis=0), wait=True)
        sampling = Sampling(max_tokens=answer, ignore_eos=True)
        engine.submit(Request(id=f"request-{number}", tokens=tokens, sampling=sampling), turns.tell)
    scene.callback(turns.end)
    turns.join(batch)
    return turns


def _nobody(address: str) -> Any:
    raise BenchFailed(f"the engine wants to ask {address}")
