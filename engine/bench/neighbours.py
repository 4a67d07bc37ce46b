"""Row about neighbours: how steadily running answers go on while long prompts come in beside them.

Some sequences decode. In quiet: what a gap between two of their tokens is when nothing else happens. Then long prompts
come in, one after the other, each as soon as the engine has been left alone for as long as the last one took:

- ``….packed``: one engine does both, chunks of the prompt packed with the decode steps (role both).
- ``….handed``: the prompts are computed by another engine; the KV arrives over a slow link while the others decode, and
  each prompt's second token is made aside, layer by layer as they arrive.

What is reported is the 99th percentile of the gaps, as a client sees them, of all running sequences together; limit is
the same engine in quiet, in the same round. Its median, and how many steps were made aside, are in the details.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from contextlib import ExitStack
from typing import Any

import numpy as np

from engine.bench.handoff import EnginePair, paired
from engine.bench.processes import ANSWER_S, EngineProcess, Scale, Tokens, prompt
from engine.model.request import Token
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.errors import KVStoreError

STREAMS = 4
LASTS_S, LASTS_S_QUICK = 12.0, 0.5
TOKENS_MAX = 2048  # of a running answer: more than it makes meanwhile
PERCENTILE = 99
RATIO = 0.5  # transfer / prefill
BEGIN_S = 60.0


class Running:
    """Answers that go on until ``stop``, each read by a thread that notes when its tokens came."""

    def __init__(self, engine: EngineProcess, seed: int, prompt_tokens: int) -> None:
        self._stopping = threading.Event()
        self._times: list[list[float]] = [[] for _ in range(STREAMS)]
        self._failed: list[KVStoreError] = []
        self._threads = [
            threading.Thread(target=self._read, args=(engine, times, prompt(prompt_tokens, 100 * seed + number)))
            for number, times in enumerate(self._times)
        ]
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until all are decoding. Raises BenchFailed where one does not come to that."""
        until = time.monotonic() + BEGIN_S
        while any(len(times) < 3 for times in self._times):
            if self._failed or time.monotonic() > until:
                raise BenchFailed(f"answers did not begin: {self._failed or 'too slow'}")
            time.sleep(0.002)

    def stop(self) -> None:
        """End them."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(ANSWER_S)

    def gaps(self, start: float, stop: float) -> list[float]:
        """Seconds between tokens of which the later one came in this time. Raises BenchFailed where there are none."""
        if self._failed:
            raise BenchFailed(f"an answer beside long prompts failed: {self._failed[0]}")
        found = [
            later - earlier
            for times in self._times
            for earlier, later in itertools.pairwise(times)
            if start <= later <= stop
        ]
        if not found:
            raise BenchFailed("no running answer went on")
        return found

    def _read(self, engine: EngineProcess, times: list[float], tokens: Tokens) -> None:
        how: dict[str, Any] = {"max_tokens": TOKENS_MAX, "ignore_eos": True, "use_pool": False, "prefill": ()}
        try:
            for event in engine.client.stream(tokens, deadline_s=ANSWER_S, **how):  # leaving it early cancels it
                if self._stopping.is_set():
                    return
                if isinstance(event, Token):
                    times.append(time.perf_counter())
        except KVStoreError as error:
            self._failed.append(error)


def neighbours(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """``<name>.packed`` and ``<name>.handed``: p99 of the gaps while long prompts come in / in quiet."""
    lasts_s = LASTS_S_QUICK if stage.settings.quick else LASTS_S
    quiet: dict[str, list[float]] = {"packed": [], "handed": []}
    busy: dict[str, list[float]] = {"packed": [], "handed": []}
    details: dict[str, dict[str, float]] = {"packed": {}, "handed": {}}
    with ExitStack() as scene:
        pair = paired(stage, scene, RATIO, {"arena": _arena_bytes(stage)})
        sides = _sides(pair)
        for turn in range(stage.settings.rounds):
            for way, engine in (("packed", pair.prefill), ("handed", pair.decode)):
                running = Running(engine, turn, pair.scale.page_tokens)
                try:
                    running.wait()
                    start = time.perf_counter()
                    time.sleep(lasts_s / 2)
                    middle = time.perf_counter()
                    prompts = _come_in(pair, way, 50 + turn, middle + lasts_s)
                    stop = time.perf_counter()
                finally:
                    running.stop()
                alone, beside = running.gaps(start, middle), running.gaps(middle, stop)
                quiet[way].append(float(np.percentile(alone, PERCENTILE)))
                busy[way].append(float(np.percentile(beside, PERCENTILE)))
                details[way] = {
                    "prompts": prompts,
                    "gaps": len(beside),
                    "median_s": statistics.median(beside),
                    "median_quiet_s": statistics.median(alone),
                }
        details["handed"]["side_steps"] = _sides(pair) - sides
    limit_is = f"p{PERCENTILE} of the gaps in quiet"
    return [
        result(f"{name}.{way}", Kind.TIME, busy[way], quiet[way], bar=bar, limit_is=limit_is, details=details[way])
        for way in busy
    ]


def _arena_bytes(stage: Stage) -> int:
    """Room for all running answers and two long prompts."""
    scale = Scale.of(stage.settings)
    running = STREAMS * (TOKENS_MAX + 2 * scale.page_tokens)
    return scale.token_bytes * (running + 2 * (scale.handed + 2 * scale.page_tokens))


def _come_in(pair: EnginePair, way: str, seed: int, until: float) -> int:
    """Long prompts until then, at least one; how many."""
    count = 0
    while not count or time.perf_counter() < until:
        tokens = prompt(pair.scale.handed, 1000 * seed + count)
        began = time.perf_counter()
        if way == "packed":
            pair.alone(tokens)
        else:
            pair.handed(tokens, "eager_layer")
        count += 1
        time.sleep(max(0.0, min(time.perf_counter() - began, until - time.perf_counter())))
    return count


def _sides(pair: EnginePair) -> int:
    return int(pair.decode.client.status()["side_steps"])
