"""Rows about hand-offs: what it costs that a prompt is computed by one engine and answered by another.

Two engines, a core each, and a link between them that is so slow that the KV of a prompt takes a given share of the
time of its prefill. Everything is measured until the *second* token: the first one is known where the prompt was
computed, the second one needs all of the KV here.

- **Limit**: the engine that computes the prompts answers itself: prefill and one step, no transfer at all. Ratio and
  ``visible_s`` in the details are what the hand-off adds to that.
- ``….ideal``: the same time of the eager, layer-wise hand-off against an ideal pipeline. The ends of the chunks are
  measured in a prefill alone; chunk ``c`` runs from ``e[c-1]`` to ``e[c]``, and its ``L`` layers take equal parts of
  it, one after the other. The KV of layer ``l`` is counted as ready when that layer *begins*, before it can be, and
  goes over the link at its full speed ``B``, in that order:

      ready(c, l)   = e[c-1] + (e[c] - e[c-1]) * l / L
      arrive(c, l)  = max(ready(c, l), arrive(of the piece before)) + bytes(c, l) / B

  The step of the second token begins when the first one is known and needs layer by layer what has arrived:

      done(l) = max(done(l-1), arrive(last chunk, l)) + step / L,   done(-1) = e[last]

  The ideal is ``done(L-1)``. Nothing that sends layers as they are computed over this link can be earlier.

Out of the arena nothing touches the pool. Out of DRAM the prompt is new to the pool every time (a salt of its own). All
answers of a round are to one prompt and have to be the same.
"""

from __future__ import annotations

import itertools
import statistics
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from engine.bench.processes import ANSWER_S, EngineProcess, Scale, Tokens, check_same, prompt, start_engine, start_node
from engine.client import Answer
from engine.compute.models import load_model
from engine.model.request import Done, Failed, Progress, Request, Sampling
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.processes import NO_SETTINGS
from kvstore.bench.stage import Stage
from kvstore.model.layout import Layout

HOLD_S = 10.0
PROBES = 3  # prefills that say how fast the link is to be

# name: when, where from, in which pieces
WAYS = {
    "eager_layer": ("eager", "arena", "layer"),
    "eager_whole": ("eager", "arena", "whole"),
    "lazy_layer": ("lazy", "arena", "layer"),
    "lazy_whole": ("lazy", "arena", "whole"),
    "eager_layer_dram": ("eager", "dram", "layer"),
    "eager_whole_dram": ("eager", "dram", "whole"),
}
IDEAL_OF = ("eager_layer", "eager_layer_dram")


@dataclass(frozen=True)
class Prefilled:
    """One prefill alone: ``ends_s`` of its chunks since it was asked for, and up to which token each went."""

    ends_s: tuple[float, ...]
    tokens: tuple[int, ...]


def ideal_s(prefill: Prefilled, step_s: float, layers: int, layer_token_bytes: float, bytes_per_s: float) -> float:
    """When the second token could be there at best; the formula of this module's docstring."""
    link, begin_s, first = 0.0, 0.0, 0
    arrived = [0.0] * layers
    for end_s, stop in zip(prefill.ends_s, prefill.tokens, strict=True):
        for layer in range(layers):
            ready = begin_s + (end_s - begin_s) * layer / layers
            link = max(ready, link) + (stop - first) * layer_token_bytes / bytes_per_s
            arrived[layer] = link
        begin_s, first = end_s, stop
    done = prefill.ends_s[-1]
    for layer in range(layers):
        done = max(done, arrived[layer]) + step_s / layers
    return done


@dataclass
class EnginePair:
    """An engine that computes prompts (and answers, for comparison), and one that only answers."""

    prefill: EngineProcess
    decode: EngineProcess
    layout: Layout
    scale: Scale
    bytes_per_s: float  # of the link
    prefill_s: float  # of a prompt of ``scale.handoff_tokens`` tokens

    def alone(self, tokens: Tokens) -> Answer:
        """Answered where the prompt is computed."""
        return self.prefill.answer(tokens, use_pool=False, max_tokens=3)

    def handed(self, tokens: Tokens, way: str) -> Answer:
        """Answered by the other engine. Raises BenchFailed where the KV did not come all the way that was asked for."""
        handoff, source, grain = WAYS[way]
        found = self.decode.answer(
            tokens,
            max_tokens=3,
            handoff=handoff,
            source=source,
            grain=grain,
            use_pool=source == "dram",
            salt=uuid.uuid4().hex,
        )
        usage, wanted = found.usage, len(tokens) * self.scale.token_bytes
        if usage.prefill_engine != self.prefill.address or usage.moved_bytes != wanted:
            where = usage.prefill_engine or "the engine that was asked"
            raise BenchFailed(f"{way}: computed by {where}, {usage.moved_bytes} of {wanted} bytes moved")
        return found


def handoff(stage: Stage, name: str, bar: Bar | None, ratio: float) -> list[Result]:
    """Every way to hand a prompt over, with a transfer of ``ratio`` times the prefill. ``bar``: of ``.ideal``."""
    with ExitStack() as scene:
        return _lines(stage, name, bar, paired(stage, scene, ratio))


def paired(stage: Stage, scene: ExitStack, ratio: float, settings: Mapping[str, object] = NO_SETTINGS) -> EnginePair:
    """Both engines, the link such that the KV of the usual prompt takes ``ratio`` times its prefill. Ended with
    ``scene``. ``settings``: of both, in addition to the usual ones.
    """
    scale = Scale.of(stage.settings)
    daemon = start_node(stage, scene, {})
    common = {**settings, "node": daemon.name}
    prefill = start_engine(stage, scene, 0, {**common, "role": "both"})
    layout = load_model(scale.model).layout(scale.page_tokens)
    assert layout.page_bytes == scale.token_bytes * scale.page_tokens, "the scale says what a token's KV takes"
    prefill.ready()
    tokens = prompt(scale.handoff_tokens, seed=1)
    prefill.answer(tokens, use_pool=False)
    prefill_s = statistics.median(_prefill(prefill, layout, tokens).ends_s[-1] for _ in range(PROBES))
    bytes_per_s = len(tokens) * scale.token_bytes / (ratio * prefill_s)
    asking = {"role": "decode", "prefill": prefill.address, "local_prefill_tokens": 0, "link": f"{bytes_per_s:.0f}B/s"}
    decode = start_engine(stage, scene, 1, {**common, **asking})
    decode.ready()
    pair = EnginePair(prefill, decode, layout, scale, bytes_per_s, prefill_s)
    pair.handed(prompt(scale.handoff_tokens, seed=2), "eager_layer")  # nothing is new to the processes after it
    return pair


def _prefill(engine: EngineProcess, layout: Layout, tokens: Tokens) -> Prefilled:
    """The chunks of one prefill, as an engine that asks for it hears of them."""
    request = Request(id=uuid.uuid4().hex, tokens=tokens, sampling=Sampling(), deadline_s=ANSWER_S, use_pool=False)
    ends: list[float] = []
    stops: list[int] = []
    start = time.perf_counter()
    for event in engine.client.prefill(request, layout, HOLD_S, timeout_s=ANSWER_S):
        if isinstance(event, Failed):
            raise BenchFailed(f"a prefill failed: {event.error}")
        if isinstance(event, Progress | Done):
            ends.append(time.perf_counter() - start)
            stops.append(event.tokens if isinstance(event, Progress) else len(tokens))
    engine.client.release(request.id)
    return Prefilled(tuple(ends), tuple(stops))


def _second_s(answer: Answer) -> float:
    return (answer.usage.ttft_ms + answer.usage.gap_ms) / 1e3


def _lines(stage: Stage, name: str, bar: Bar | None, pair: EnginePair) -> list[Result]:
    layers = pair.layout.layers
    layer_token_bytes = pair.scale.token_bytes / layers
    alone: list[float] = []
    ideals: list[float] = []
    answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for turn in range(stage.settings.rounds):
        tokens = prompt(pair.scale.handoff_tokens, seed=10 + turn)
        want = pair.alone(tokens)
        alone.append(_second_s(want))
        prefilled = _prefill(pair.prefill, pair.layout, tokens)
        step_s = want.usage.gap_ms / 1e3
        ideals.append(ideal_s(prefilled, step_s, layers, layer_token_bytes, pair.bytes_per_s))
        for way in itertools.islice(itertools.cycle(ways), turn % len(ways), turn % len(ways) + len(ways)):
            found = pair.handed(tokens, way)
            check_same(f"{name}.{way}", found, want)
            answers[way].append(found)
    lines = []
    for way, given in answers.items():
        ours = [_second_s(one) for one in given]
        details = {
            "prefill_s": pair.prefill_s,
            "link_bytes_per_s": pair.bytes_per_s,
            "ttft_s": statistics.median(one.usage.ttft_ms / 1e3 for one in given),
            "gap_s": statistics.median(one.usage.gap_ms / 1e3 for one in given),
            "visible_s": statistics.median(us - them for us, them in zip(ours, alone, strict=True)),
        }
        limit_is = "the second token without a transfer"
        lines.append(result(f"{name}.{way}", Kind.TIME, ours, alone, limit_is=limit_is, details=details))
        if way in IDEAL_OF:
            limit_is = "the second token of an ideal pipeline"
            lines.append(result(f"{name}.{way}.ideal", Kind.TIME, ours, ideals, bar=bar, limit_is=limit_is))
    return lines
