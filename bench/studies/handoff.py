"""Rows about hand-offs: the cost of computing a prompt in one engine and answering it in another.

Two engines have one core each. The link between them is so slow that the KV of a prompt takes a given share of the time
of its prefill. All times end with the *second* token: the prefill engine produces the first one, and the decode engine
needs all of the KV for the second one.

- **Limit**: the prefill engine answers the prompt itself: a prefill and one step, without any transfer. The ratio, and
  ``visible_s`` in the details, show what the hand-off adds.
- ``….ideal``: the time of the eager, layer-wise hand-off, compared with an ideal pipeline. The ends of the chunks are
  measured in a prefill alone. Chunk ``c`` runs from ``e[c-1]`` to ``e[c]``, and its ``L`` layers take equal parts of
  that time, one after the other. The KV of layer ``l`` counts as ready when the layer *begins*, which is earlier than
  in reality. The link sends the pieces in order, at its full speed ``B``:

      ready(c, l)   = e[c-1] + (e[c] - e[c-1]) * l / L
      arrive(c, l)  = max(ready(c, l), arrive(of the piece before)) + bytes(c, l) / B

  The step of the second token begins after the first token. Each of its layers needs the arrived KV of that layer:

      done(l) = max(done(l-1), arrive(last chunk, l)) + step / L,   done(-1) = e[last]

  The ideal is ``done(L-1)``. No hand-off that sends layers over this link as they are computed can be earlier.

A hand-off from the arena does not use the pool. For a hand-off from DRAM every request has its own salt, so the pool
has none of its pages. All answers of a round are to the same prompt and must be equal.
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
PROBES = 3  # prefills from which the speed of the link is derived

# name: (time, source, grain) of the hand-off
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
    """A prefill alone: the time at which each chunk ended, counted from the request, and the token at which it
    ended."""

    ends_s: tuple[float, ...]
    tokens: tuple[int, ...]


def ideal_s(prefill: Prefilled, step_s: float, layers: int, layer_token_bytes: float, bytes_per_s: float) -> float:
    """Return the earliest possible time of the second token, by the formula in this module's docstring."""
    link_s, begin_s, first = 0.0, 0.0, 0
    arrived_s = [0.0] * layers
    for end_s, stop in zip(prefill.ends_s, prefill.tokens, strict=True):
        for layer in range(layers):
            ready_s = begin_s + (end_s - begin_s) * layer / layers
            link_s = max(ready_s, link_s) + (stop - first) * layer_token_bytes / bytes_per_s
            arrived_s[layer] = link_s
        begin_s, first = end_s, stop
    done_s = prefill.ends_s[-1]
    for layer in range(layers):
        done_s = max(done_s, arrived_s[layer]) + step_s / layers
    return done_s


@dataclass
class EnginePair:
    """Two engines. One computes prompts and, for the limit, also answers them; the other only answers."""

    prefill: EngineProcess
    decode: EngineProcess
    layout: Layout
    scale: Scale
    bytes_per_s: float  # of the link
    prefill_s: float  # of a prompt of ``scale.handoff_tokens`` tokens

    def answer_alone(self, tokens: Tokens) -> Answer:
        """Return the answer of the engine that computes the prompt."""
        return self.prefill.answer(tokens, use_pool=False, max_tokens=3)

    def answer_handed_over(self, tokens: Tokens, way: str) -> Answer:
        """Return the answer of the other engine. Raises BenchFailed if not all KV was moved in the requested way."""
        handoff, source, grain = WAYS[way]
        answer = self.decode.answer(
            tokens,
            max_tokens=3,
            handoff=handoff,
            source=source,
            grain=grain,
            use_pool=source == "dram",
            salt=uuid.uuid4().hex,
        )
        usage, expected_bytes = answer.usage, len(tokens) * self.scale.token_bytes
        if usage.prefill_engine != self.prefill.address or usage.moved_bytes != expected_bytes:
            engine = usage.prefill_engine or "the decode engine"
            raise BenchFailed(f"{way}: computed by {engine}, {usage.moved_bytes} of {expected_bytes} bytes moved")
        return answer


def handoff(stage: Stage, name: str, bar: Bar | None, ratio: float) -> list[Result]:
    """Measure every way to hand a prompt over, with a transfer of ``ratio`` times the prefill. ``bar`` applies to
    ``.ideal``."""
    with ExitStack() as scene:
        return _lines(stage, name, bar, start_pair(stage, scene, ratio))


def start_pair(
    stage: Stage, scene: ExitStack, ratio: float, settings: Mapping[str, object] = NO_SETTINGS
) -> EnginePair:
    """Start both engines, with a link over which the KV of the usual prompt takes ``ratio`` times its prefill. They end
    with ``scene``. ``settings`` are additional settings of both."""
    scale = Scale.of(stage.settings)
    daemon = start_node(stage, scene, {})
    common = {**settings, "node": daemon.name}
    prefill = start_engine(stage, scene, 0, {**common, "role": "both"})
    layout = load_model(scale.model).layout(scale.page_tokens)
    assert layout.page_bytes == scale.token_bytes * scale.page_tokens, "the scale has the KV bytes of a token"
    prefill.ready()
    tokens = prompt(scale.handoff_tokens, seed=1)
    prefill.answer(tokens, use_pool=False)
    prefill_s = statistics.median(_prefill(prefill, layout, tokens).ends_s[-1] for _ in range(PROBES))
    bytes_per_s = len(tokens) * scale.token_bytes / (ratio * prefill_s)
    decode_settings = {
        "role": "decode",
        "prefill": prefill.address,
        "local_prefill_tokens": 0,
        "link": f"{bytes_per_s:.0f}B/s",
    }
    decode = start_engine(stage, scene, 1, {**common, **decode_settings})
    decode.ready()
    pair = EnginePair(prefill, decode, layout, scale, bytes_per_s, prefill_s)
    pair.answer_handed_over(prompt(scale.handoff_tokens, seed=2), "eager_layer")  # warms up both processes
    return pair


def _prefill(engine: EngineProcess, layout: Layout, tokens: Tokens) -> Prefilled:
    """Return the chunks of one prefill, as the requesting engine receives their ends."""
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
    alone_s: list[float] = []
    ideals_s: list[float] = []
    answers: dict[str, list[Answer]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for turn in range(stage.settings.rounds):
        tokens = prompt(pair.scale.handoff_tokens, seed=10 + turn)
        expected = pair.answer_alone(tokens)
        alone_s.append(_second_s(expected))
        prefilled = _prefill(pair.prefill, pair.layout, tokens)
        step_s = expected.usage.gap_ms / 1e3
        ideals_s.append(ideal_s(prefilled, step_s, layers, layer_token_bytes, pair.bytes_per_s))
        for way in itertools.islice(itertools.cycle(ways), turn % len(ways), turn % len(ways) + len(ways)):
            answer = pair.answer_handed_over(tokens, way)
            check_same(f"{name}.{way}", answer, expected)
            answers[way].append(answer)
    lines = []
    for way, answers_of_way in answers.items():
        ours = [_second_s(answer) for answer in answers_of_way]
        details = {
            "prefill_s": pair.prefill_s,
            "link_bytes_per_s": pair.bytes_per_s,
            "ttft_s": statistics.median(answer.usage.ttft_ms / 1e3 for answer in answers_of_way),
            "gap_s": statistics.median(answer.usage.gap_ms / 1e3 for answer in answers_of_way),
            "visible_s": statistics.median(us - them for us, them in zip(ours, alone_s, strict=True)),
        }
        limit_is = "the second token without a transfer"
        lines.append(result(f"{name}.{way}", Kind.TIME, ours, alone_s, limit_is=limit_is, details=details))
        if way in IDEAL_OF:
            limit_is = "the second token of an ideal pipeline"
            lines.append(result(f"{name}.{way}.ideal", Kind.TIME, ours, ideals_s, bar=bar, limit_is=limit_is))
    return lines
