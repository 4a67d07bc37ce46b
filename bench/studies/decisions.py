"""Row about routes: what a conductor's state takes to decide about a request, with an index of a million pages.

Half of the engines compute prompts and half answer; every node has told of as many pages as the others. A request's
prompt begins, for a part that is drawn, with what some node has. ``Arrived`` alone is timed, up to the route. What
follows it, the first token and the end, changes the state between decisions and is not counted.

The limit does nothing but look for the prompt's pages in one sorted array of as many, which no decision can do without.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import count

import numpy as np

from engine.conductor.state import events as ev
from engine.conductor.state.conductor_state import ConductorRules, ConductorState
from engine.conductor.state.engine_table import EngineAbout
from engine.model.request import Request, Role, Sampling
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.cluster.directory import AnnounceBatch
from kvstore.model.prefix import Fingerprints

PAGES, PAGES_QUICK = 1_000_000, 100_000
PROMPT_PAGES = 188  # 12,000 tokens, the mean of the conversations of Mooncake's trace
PAGE_TOKENS = 64
BATCH = 4096  # pages that a node tells at once
CHAINS = 20  # of each node, prompts begin with one of them
DECISIONS, DECISIONS_QUICK = 400, 30  # of a round
PERCENTILE = 99
LAYOUT = "layout"


class DecisionLoad:
    """A conductor with ``engines`` engines, and requests for it."""

    def __init__(self, engines: int, pages: int) -> None:
        self.state = ConductorState(ConductorRules())
        self._numbers = count()
        self._draw, self._pages = random.Random(1), np.random.default_rng(1)
        self._chains: list[Fingerprints] = []
        self._now_s, self._step_s = 0.0, 0.8 / engines  # requests at a rate that keeps all engines half busy
        for number in range(engines):
            name, node = f"e{number:03d}", f"n{number:03d}"
            about = EngineAbout(
                name=name,
                address="",
                model="m",
                layout=LAYOUT,
                page_tokens=PAGE_TOKENS,
                kv_bytes=1 << 17,
                node=node,
                zone="z",
            )
            self.state.handle(ev.NodeFound(0.0, node, zone="z"))
            self.state.handle(ev.EngineFound(0.0, about, (Role.PREFILL, Role.DECODE)[number % 2]))
            self._tell(node, self._some(pages // engines))

    def _some(self, pages: int) -> Fingerprints:
        return self._pages.integers(0, 1 << 63, pages).astype(np.uint64) * np.uint64(2)

    def _tell(self, node: str, pages: Fingerprints) -> None:
        for number, start in enumerate(range(0, len(pages), BATCH)):
            part = pages[start : start + BATCH]
            told = AnnounceBatch(node, 1, number, part, np.ones(len(part), np.uint8), whole=start + BATCH >= len(pages))
            self.state.handle(ev.PagesReported(0.0, told))
        starts = range(0, min(len(pages) - PROMPT_PAGES, CHAINS * PROMPT_PAGES) + 1, PROMPT_PAGES)
        self._chains += [pages[start : start + PROMPT_PAGES] for start in starts]

    def prompt(self) -> Fingerprints:
        """Some pages that are known, the others new."""
        known = self._draw.choice(self._chains)[: self._draw.randrange(PROMPT_PAGES)]
        return np.concatenate([known, self._some(PROMPT_PAGES - len(known))])

    def decide(self, prompt: Fingerprints) -> float:
        """Seconds to decide about one request. It ends at once."""
        self._now_s += self._step_s
        number, tokens = next(self._numbers), np.zeros(PAGE_TOKENS * len(prompt) + 10, np.uint32)
        request = Request(id=str(number), tokens=tokens, tenant="t", model="m", sampling=Sampling(max_tokens=100))
        event = ev.RequestArrived(self._now_s, number, request, {LAYOUT: prompt})
        began_s = time.perf_counter()
        out = self.state.handle(event)
        took_s = time.perf_counter() - began_s
        routed = self.state.requests.get(number)
        if routed is None or routed.route is None:
            raise BenchFailed(f"a request has no route: {out}")
        self.state.handle(ev.FirstToken(self._now_s, number))
        self.state.handle(ev.AnswerEnded(self._now_s, number, 50))
        return took_s


def decisions(stage: Stage, name: str, bar: Bar | None, engines: int) -> list[Result]:
    """``<name>``: seconds of the median decision. The 99th percentile and decisions per second are in the details."""
    quick = stage.settings.quick
    load = DecisionLoad(engines, PAGES_QUICK if quick else PAGES)
    told = np.sort(load._some(PAGES_QUICK if quick else PAGES))
    many = DECISIONS_QUICK if quick else DECISIONS
    ours: list[float] = []
    limit: list[float] = []
    all_s: list[float] = []
    for _ in range(max(3, stage.settings.rounds)):
        took_s, looked_s = [], []
        for _ in range(many):
            prompt = load.prompt()
            took_s.append(load.decide(prompt))
            began_s = time.perf_counter()
            told.searchsorted(prompt)
            looked_s.append(time.perf_counter() - began_s)
        ours.append(statistics.median(took_s))
        limit.append(statistics.median(looked_s))
        all_s += took_s
    details: dict[str, float] = {
        "engines": engines,
        "pages": len(load.state.prefixes),
        "p99_s": float(np.percentile(all_s, PERCENTILE)),
        "per_s": len(all_s) / sum(all_s),
    }
    what = "looking for the prompt's pages in a sorted array"
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=what, details=details)]
