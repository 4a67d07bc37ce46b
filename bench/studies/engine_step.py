"""Rows about an engine's whole decode step, compared with the model's forward over one contiguous cache.

In a step an engine decides, forms a batch, runs the forward over its pages, samples tokens, sends them to clients, and
writes full pages to its pool. This module runs the engine turn by turn, so that it alternates with the limit. The limit
is only the forward of ``decode_step``, over about the same number of tokens. Both use the same weights and one core.

``mounted_step`` compares two such engines. One of them has mounted its arena at the node: the arena is in shared
memory, and the engine writes records of the pages that it keeps when a request ends.
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

CONTEXTS, CONTEXTS_QUICK = (512, 4096), (128,)  # prompt tokens; the first one gives the row's main line
STEPS = 12  # steps per variant and round
JOIN_S = 60.0
EXTENT_BYTES = 32 << 20


def engine_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """Measure a step of ``batch`` sequences, at several context lengths.

    Raises:
        BenchFailed: the engine is not responding, or there is too little memory.
    """
    stage.clear()
    quick = stage.settings.quick
    contexts = CONTEXTS_QUICK if quick else CONTEXTS
    with one_core():
        nets = nets_of(MODEL_QUICK if quick else MODEL)
        names = [name, *(f"{name}.{context}" for context in contexts[1:])]
        return [_measure(stage, line, bar, nets, batch, tokens) for line, tokens in zip(names, contexts, strict=True)]


def mounted_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """Measure a step of an engine with a mounted arena, compared with a private arena, over the longest context.

    ``<name>.show`` is the time to make a page of the arena visible to other processes, and to hide it again.

    Raises:
        BenchFailed: the engine is not responding, or there is too little memory.
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

        calls = {kind: turns.take for kind, turns in variants.items()}
        seconds = alternate(calls, range(2 * STEPS), rounds, lambda _: None, check)
        show_s = variants["mounted"].show(rounds)
    details: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context,
        "step_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    ours, limit = medians(seconds["mounted"]), medians(seconds["private"])
    line = result(name, Kind.TIME, ours, limit, bar=bar, limit_is="an engine with a private arena", details=details)
    return [line, result(f"{name}.show", Kind.TIME, show_s)]


class Turns:
    """An engine whose sequences found their prompts in its pool and now decode, one turn at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokens = 0

    def receive(self, event: object) -> None:
        """Count the tokens in an event of the engine. Raises BenchFailed for a failed request."""
        if isinstance(event, Failed):
            raise BenchFailed(f"the engine is not responding: {event.error}")
        self._tokens += isinstance(event, Token)

    def take(self, _: None = None) -> int:
        """Run one turn; return the number of tokens that clients received in it."""
        before, engine = self._tokens, self._engine
        for event in engine.inbox.take():
            engine.performer.handle(event)
        engine.performer.turn()
        return self._tokens - before

    def join(self, batch: int) -> None:
        """Run turns until one of them produces a token of each sequence."""
        deadline_s = time.monotonic() + JOIN_S
        while self.take() < batch:
            if time.monotonic() >= deadline_s:
                raise BenchFailed(f"{batch} sequences do not decode after {JOIN_S:g} s")

    def show(self, rounds: int) -> list[float]:
        """Cancel all requests, then return the seconds per page to show the pages of a request and to hide them
        again."""
        self.end()
        mounted, arena = self._engine.mounted, self._engine.arena
        pages = arena.frames_free  # the arena keeps no pages then
        tokens = np.arange(pages * PAGE_TOKENS, dtype=np.uint32)
        page_s = []
        for number in range(rounds):
            cache = self._engine.pool.cache(f"shown-{number}", "")
            frames = arena.take(pages)
            if cache is None or frames is None:
                raise BenchFailed("the engine has no pool, or no frames")
            keys, places = cache.groups[0].keys(tokens), frames.tolist()
            start_s = time.perf_counter()
            shown = mounted.show(keys, places)
            mounted.hide(places)
            page_s.append((time.perf_counter() - start_s) / pages)
            arena.give_back(frames)
            if not shown:
                raise BenchFailed(f"the arena is not mounted: {mounted.why}")
        return page_s

    def end(self) -> None:
        """Cancel all requests, and run turns until they have ended."""
        for request in list(self._engine.admission.numbers):
            self._engine.cancel(request)
        deadline_s = time.monotonic() + JOIN_S
        while self._engine.remains() and time.monotonic() < deadline_s:
            self.take()


def _measure(stage: Stage, name: str, bar: Bar, nets: Nets, batch: int, context: int) -> Result:
    layout = nets.model.layout(PAGE_TOKENS)
    rounds = stage.settings.rounds
    answer = 2 * (rounds * STEPS + batch + STEPS)
    with ExitStack() as scene:
        store = _node(scene, stage, name, nets, batch, context + answer)
        turns = _decoding(scene, store, nets, batch, context, answer)
        kv = torch.zeros((layout.layers, 2, batch, layout.kv_heads, context + rounds * STEPS + 1, layout.head_dim))

        def contiguous(_: None) -> int:
            with torch.inference_mode():
                position = torch.full((batch, 1), kv.shape[-2] - 2)
                token_ids = torch.zeros((batch, 1), dtype=torch.int64)
                nets.plain(
                    input_ids=token_ids, position_ids=position, past_key_values=ContiguousCache(kv), use_cache=True
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
    """Start a node for ``batch`` sequences of ``tokens`` tokens. Raises BenchFailed if there is too little memory for
    the node and ``arenas`` arenas."""
    kv_bytes = _kv_bytes(nets, batch, tokens)
    if (2 + arenas) * kv_bytes > 0.6 * free_bytes(stage.settings.shm_dir):
        raise BenchFailed(f"{name} needs {(2 + arenas) * kv_bytes >> 20} MiB of memory")
    dram = f"{(kv_bytes // EXTENT_BYTES + 3) * EXTENT_BYTES >> 20}MiB"
    store = kvstore.open(dram=dram, extent=f"{EXTENT_BYTES >> 20}MiB", shm_dir=str(stage.settings.shm_dir))
    return scene.enter_context(closing(store))


def _decoding(
    scene: ExitStack, store: Store, nets: Nets, batch: int, context: int, answer: int, mounted: bool = False
) -> Turns:
    """Return an engine that decodes ``batch`` prompts of ``context`` tokens. It found the prompts in the pool."""
    config = EngineConfig(
        model=nets.model.name,
        arena=_kv_bytes(nets, batch, context + answer),
        page_tokens=PAGE_TOKENS,
        batch_max=batch,
        threads=1,
    )
    engine = Engine(config, nets.model, store, _refuse_peer, home=store if mounted else None)
    scene.callback(engine.stop)
    turns, cache = Turns(engine), store.cache(engine.layout)
    random = np.random.default_rng(4)
    page = random.standard_normal((1, engine.layout.page_bytes // 4), np.float32).view(np.uint8)
    for number in range(batch):
        tokens = random.integers(0, nets.model.geometry.vocab_size, context, np.uint32)
        cache.put(tokens, np.repeat(page, context // PAGE_TOKENS, axis=0), wait=True)
        sampling = Sampling(max_tokens=answer, ignore_eos=True)
        engine.submit(Request(id=f"request-{number}", tokens=tokens, sampling=sampling), turns.receive)
    scene.callback(turns.end)
    turns.join(batch)
    return turns


def _refuse_peer(address: str) -> Any:
    raise BenchFailed(f"the engine tried to connect to {address}")
