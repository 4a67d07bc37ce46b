"""Rows about reuse: the time to the first token of a prompt whose KV is cached, compared with computing it again.

A row has one engine, on one core or device, one node, and one prompt for each length. The first answer stores the
prompt. Then hits and recomputations (``use_pool=False``) alternate, and all answers must be the same. In a hit, all
full pages are loaded, and the last token is computed for its logits. The measured time is the engine's own TTFT, from
submission to the first token.

In the row about HBM, the engine keeps the pages in its arena. In the other rows, engines keep no pages.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from engine.bench.processes import EngineProcess, Scale, Tokens, check_same, prompt, start_engine, start_node
from engine.client import Answer
from kvstore.addresses import connect
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.client.store import Store

HITS = 3  # in each round, in addition to one recomputation
LONGER = Bar(1.25, at_least=False)  # both prompts compute one token


@dataclass
class ReusePool:
    """An engine with a pool, and the tier from which its hits come."""

    engine: EngineProcess
    store: Store
    scale: Scale
    tier: str = "dram"

    def hit(self, tokens: Tokens) -> Answer:
        """Return an answer whose full prefix was cached in the tier. Raises BenchFailed if it was not.

        The engine writes to the page of the last token, so it does not share this page in its arena. If the page is
        full, it is loaded from the pool.
        """
        answer = self.engine.answer(tokens)
        page_tokens = self.scale.page_tokens
        prefix = min(len(tokens) // page_tokens * page_tokens, len(tokens) - 1)
        expected = {self.tier: prefix}
        if self.tier == "hbm" and (rest := prefix % page_tokens):
            expected = {"hbm": prefix - rest, "dram": rest}
        if (cached := dict(answer.usage.cached_tokens)) != expected:
            raise BenchFailed(f"{len(tokens)} tokens: cached {cached}, expected {expected}")
        return answer


def reuse(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure hits in DRAM.

    ``<name>.1k`` and so on: the time to the first token of a computation, divided by that of a hit.
    ``<name>.1k_pages.longer``: a prompt of full pages, compared with a prompt that is one token longer.
    """
    with ExitStack() as scene:
        pool = _start(stage, scene)
        lengths = pool.scale.prompt_tokens
        answers = _store_prompts(pool, lengths)
        results = [
            _measure_hits(stage, f"{name}.{label}", bar, pool, length, answers[label])
            for label, length in lengths.items()
        ]
        pairs = [(label, length) for label, length in lengths.items() if length + 1 in lengths.values()]
        return results + [_measure_longer(stage, f"{name}.{label}.longer", pool, length) for label, length in pairs]


def arena(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure hits in the arena of the engine.

    ``<name>.1k`` and so on: the time to the first token of a computation, divided by that of a hit.
    ``<name>.1k.dram``: the time to the first token of a hit in DRAM, in an engine that keeps no pages, divided by that
    of a hit in the arena.
    """
    results: list[Result] = []
    with ExitStack() as scene:
        dram = _start(stage, scene)
        arena_bytes = 2 * dram.scale.arena_bytes  # for kept pages, and for a prompt that is computed in between
        settings = {"role": "both", "node": dram.store.name, "keep_pages": 1, "arena": arena_bytes}
        hbm = ReusePool(start_engine(stage, scene, 0, settings), dram.store, dram.scale, "hbm")
        hbm.engine.ready()
        lengths = hbm.scale.prompt_tokens
        answers = _store_prompts(hbm, lengths)
        dram.engine.answer(prompt(max(lengths.values()), seed=0), use_pool=False)
        for label, length in lengths.items():
            results.append(_measure_hits(stage, f"{name}.{label}", bar, hbm, length, answers[label]))
            results.append(_measure_arena_and_dram(stage, f"{name}.{label}.dram", hbm, dram, length, answers[label]))
    return results


def stores(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the TTFT of new prompts that are written to the pool, compared with prompts that are not."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as scene:
        pool = _start(stage, scene)
        length = pool.scale.handoff_tokens
        for turn in range(stage.settings.rounds + 1):  # the first turn warms up, and is not measured
            for use_pool in (True, False) if turn % 2 else (False, True):
                answer = pool.engine.answer(prompt(length, seed=100 + 2 * turn + use_pool), use_pool=use_pool)
                if answer.usage.computed_tokens != length:
                    raise BenchFailed(f"{name}: tokens were cached: {answer.usage.cached_tokens}")
                if turn:
                    times[use_pool].append(answer.usage.ttft_ms / 1e3)
    details = {"tokens": length, "chunk_tokens": pool.scale.step_tokens}
    limit_is = "a prompt that is not written"
    return [result(name, Kind.TIME, times[True], times[False], bar=bar, limit_is=limit_is, details=details)]


def _start(stage: Stage, scene: ExitStack) -> ReusePool:
    daemon = start_node(stage, scene, {})
    store = scene.enter_context(connect(daemon.name))
    engine = start_engine(stage, scene, 0, {"role": "both", "node": daemon.name})
    engine.ready()
    return ReusePool(engine, store, Scale.of(stage.settings))


def _store_prompts(pool: ReusePool, lengths: Mapping[str, int]) -> dict[str, Answer]:
    """Answer a prompt of each length, and so store it. Return the answers by label."""
    pool.engine.answer(prompt(max(lengths.values()), seed=0), use_pool=False)  # warms up
    answers = {}
    for label, length in lengths.items():
        answers[label] = pool.engine.answer(prompt(length, seed=1))
        if answers[label].usage.computed_tokens != length:
            raise BenchFailed(f"{label}: tokens were cached: {answers[label].usage.cached_tokens}")
    return answers


def _measure_hits(stage: Stage, name: str, bar: Bar | None, pool: ReusePool, length: int, expected: Answer) -> Result:
    tokens = prompt(length, seed=1)
    hits: list[float] = []
    computed: list[float] = []
    pool.hit(tokens)
    for turn in range(stage.settings.rounds):
        times: list[float] = []
        for step in range(HITS + 1):
            if step == turn % (HITS + 1):
                answer = pool.engine.answer(tokens, use_pool=False)
                computed.append(answer.usage.ttft_ms / 1e3)
            else:
                answer = pool.hit(tokens)
                times.append(answer.usage.ttft_ms / 1e3)
            check_same(name, answer, expected)
        hits.append(statistics.median(times))
    details = {"tokens": length, "tier": pool.tier, "loaded_bytes": pool.hit(tokens).usage.loaded_bytes}
    return result(name, Kind.GAIN, hits, computed, bar=bar, limit_is="the prompt computed again", details=details)


def _measure_arena_and_dram(
    stage: Stage, name: str, hbm: ReusePool, dram: ReusePool, length: int, expected: Answer
) -> Result:
    """Measure hits in the arena of one engine and hits in DRAM of another engine, alternately."""
    tokens = prompt(length, seed=1)
    times: list[list[float]] = [[], []]
    for turn in range(stage.settings.rounds):
        round_times: list[list[float]] = [[], []]
        for step in range(2 * HITS):
            side = (turn + step) % 2
            answer = (hbm, dram)[side].hit(tokens)
            check_same(name, answer, expected)
            round_times[side].append(answer.usage.ttft_ms / 1e3)
        for side in (0, 1):
            times[side].append(statistics.median(round_times[side]))
    return result(name, Kind.GAIN, *times, bar=None, limit_is="found in DRAM", details={"tokens": length})


def _measure_longer(stage: Stage, name: str, pool: ReusePool, length: int) -> Result:
    """Measure hits of a prompt of full pages and of a prompt that is one token longer, alternately."""
    times: list[list[float]] = [[], []]
    for turn in range(stage.settings.rounds):
        round_times: list[list[float]] = [[], []]
        for step in range(2 * HITS):
            extra = (turn + step) % 2
            round_times[extra].append(pool.hit(prompt(length + extra, seed=1)).usage.ttft_ms / 1e3)
        for extra in (0, 1):
            times[extra].append(statistics.median(round_times[extra]))
    details = {"tokens": length, "tier": pool.tier}
    return result(name, Kind.TIME, *times, bar=LONGER, limit_is="a prompt one token longer", details=details)
