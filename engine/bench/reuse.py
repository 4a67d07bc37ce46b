"""Rows about reuse: the time to the first token of a prompt whose KV is in the pool, against computing it again.

One engine on one core, or one device, with one node, one prompt per length. The prompt is answered once, which stores
it; then hits and recomputations (``use_pool=False``) take turns, and every answer has to be the same. A hit is a whole
one: all full pages are loaded and the last token is computed, for its logits. What is timed is the engine's own TTFT,
from submission to the first token.

In the row about HBM the engine has kept the pages in its arena; the other rows' engines keep none.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from engine.bench.processes import EngineProcess, Scale, Tokens, node, prompt, same, started
from engine.client import Answer
from kvstore.addresses import connect
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.client.store import Store

HITS = 3  # per round, in addition to one recomputation
BESIDE = Bar(1.25, at_least=False)  # either way one token is computed


@dataclass
class ReusePool:
    """An engine over a pool, and the tier that its hits come from."""

    engine: EngineProcess
    store: Store
    scale: Scale
    tier: str = "dram"

    def hit(self, tokens: Tokens) -> Answer:
        """An answer whose prefix comes from the tier, all of it. Raises BenchFailed where it does not.

        The page that the last token is in is the engine's own, since it writes there: not out of its arena, but of the
        pool.
        """
        found = self.engine.answer(tokens)
        page_tokens = self.scale.page_tokens
        whole = min(len(tokens) // page_tokens * page_tokens, len(tokens) - 1)
        want = {self.tier: whole}
        if self.tier == "hbm" and (rest := whole % page_tokens):
            want = {"hbm": whole - rest, "dram": rest}
        if dict(found.usage.cached_tokens) != want:
            raise BenchFailed(f"{len(tokens)} tokens: cached {dict(found.usage.cached_tokens)}, not {want}")
        return found


def reuse(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """``<name>.1k`` and so on: how many times faster the first token comes on a full hit in DRAM; and
    ``<name>.1k_pages.longer``: a prompt of full pages compared with one that is a token longer.
    """
    with ExitStack() as scene:
        place = _place(stage, scene)
        lengths = place.scale.long
        answers = _stored(place, lengths)
        lines = [
            _line(stage, f"{name}.{label}", bar, place, length, answers[label]) for label, length in lengths.items()
        ]
        pairs = [(label, length) for label, length in lengths.items() if length + 1 in lengths.values()]
        return lines + [_longer(stage, f"{name}.{label}.longer", place, length) for label, length in pairs]


def arena(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """``<name>.1k`` and so on: how many times faster the first token comes where the engine has kept the pages in its
    arena; ``<name>.1k.dram``: than where an engine that keeps none finds them in DRAM.
    """
    lines: list[Result] = []
    with ExitStack() as scene:
        dram = _place(stage, scene)
        room = 2 * dram.scale.arena_bytes  # what is kept, and a prompt that is computed in between
        settings = {"role": "both", "node": dram.store.name, "keep_pages": 1, "arena": room}
        hbm = ReusePool(started(stage, scene, 0, settings), dram.store, dram.scale, "hbm")
        hbm.engine.ready()
        lengths = hbm.scale.long
        answers = _stored(hbm, lengths)
        dram.engine.answer(prompt(max(lengths.values()), seed=0), use_pool=False)
        for label, length in lengths.items():
            lines.append(_line(stage, f"{name}.{label}", bar, hbm, length, answers[label]))
            lines.append(_sooner(stage, f"{name}.{label}.dram", hbm, dram, length, answers[label]))
    return lines


def stores(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """TTFT of new prompts, which an engine writes to the pool while it computes them, against prompts that it keeps to
    itself.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    with ExitStack() as scene:
        place = _place(stage, scene)
        length = place.scale.handed
        for turn in range(stage.settings.rounds + 1):  # the first one shows the process what is new to it
            for written in (True, False) if turn % 2 else (False, True):
                found = place.engine.answer(prompt(length, seed=100 + 2 * turn + written), use_pool=written)
                if found.usage.computed_tokens != length:
                    raise BenchFailed(f"{name}: {found.usage.cached_tokens} were there already")
                if turn:
                    times[written].append(found.usage.ttft_ms / 1e3)
    details = {"tokens": length, "chunk_tokens": place.scale.step_tokens}
    limit_is = "a prompt that is not written"
    return [result(name, Kind.TIME, times[True], times[False], bar=bar, limit_is=limit_is, details=details)]


def _place(stage: Stage, scene: ExitStack) -> ReusePool:
    daemon = node(stage, scene, {})
    store = scene.enter_context(connect(daemon.name))
    engine = started(stage, scene, 0, {"role": "both", "node": daemon.name})
    engine.ready()
    return ReusePool(engine, store, Scale.of(stage.settings))


def _stored(place: ReusePool, lengths: Mapping[str, int]) -> dict[str, Answer]:
    """Answers that were computed, by length; their prompts are in the pool then."""
    place.engine.answer(prompt(max(lengths.values()), seed=0), use_pool=False)  # nothing is new to the process after it
    answers = {}
    for label, length in lengths.items():
        answers[label] = place.engine.answer(prompt(length, seed=1))
        if answers[label].usage.computed_tokens != length:
            raise BenchFailed(f"{label}: {answers[label].usage.cached_tokens} were there already")
    return answers


def _line(stage: Stage, name: str, bar: Bar | None, place: ReusePool, length: int, want: Answer) -> Result:
    tokens = prompt(length, seed=1)
    hits: list[float] = []
    computed: list[float] = []
    place.hit(tokens)
    for turn in range(stage.settings.rounds):
        times: list[float] = []
        for step in range(HITS + 1):
            if step == turn % (HITS + 1):
                found = place.engine.answer(tokens, use_pool=False)
                computed.append(found.usage.ttft_ms / 1e3)
            else:
                found = place.hit(tokens)
                times.append(found.usage.ttft_ms / 1e3)
            same(name, found, want)
        hits.append(statistics.median(times))
    details = {"tokens": length, "tier": place.tier, "loaded_bytes": place.hit(tokens).usage.loaded_bytes}
    return result(name, Kind.GAIN, hits, computed, bar=bar, limit_is="the prompt computed again", details=details)


def _sooner(stage: Stage, name: str, hbm: ReusePool, dram: ReusePool, length: int, want: Answer) -> Result:
    """Hits in the arena of one engine, and in DRAM of another one, in turn."""
    tokens = prompt(length, seed=1)
    times: list[list[float]] = [[], []]
    for turn in range(stage.settings.rounds):
        found: list[list[float]] = [[], []]
        for step in range(2 * HITS):
            which = (turn + step) % 2
            answer = (hbm, dram)[which].hit(tokens)
            same(name, answer, want)
            found[which].append(answer.usage.ttft_ms / 1e3)
        for which in (0, 1):
            times[which].append(statistics.median(found[which]))
    return result(name, Kind.GAIN, *times, bar=None, limit_is="found in DRAM", details={"tokens": length})


def _longer(stage: Stage, name: str, place: ReusePool, length: int) -> Result:
    """A hit of all pages of a prompt, compared with a hit of one that has one token more."""
    times: list[list[float]] = [[], []]
    for turn in range(stage.settings.rounds):
        found: list[list[float]] = [[], []]
        for step in range(2 * HITS):
            more = (turn + step) % 2
            found[more].append(place.hit(prompt(length + more, seed=1)).usage.ttft_ms / 1e3)
        for more in (0, 1):
            times[more].append(statistics.median(found[more]))
    details = {"tokens": length, "tier": place.tier}
    return result(name, Kind.TIME, *times, bar=BESIDE, limit_is="a prompt one token longer", details=details)
