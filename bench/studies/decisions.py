"""Row about routes: the time in which a conductor's state decides about a request, with an index of a million pages.

Half of the engines are prefill engines and half are decode engines, and all nodes have the same number of pages. A
prompt begins with a random number of pages that one node has; the rest is new. Only the event ``RequestArrived`` is
timed, up to the route. The events that follow it (first token, end) change the state between decisions and are not
timed.

The limit only searches the prompt's pages in one sorted array of the same size, which every decision needs.
"""

from __future__ import annotations

import random
import statistics
import time
from itertools import count as counter

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
BATCH = 4096  # pages in one announcement of a node
CHAINS = 20  # chains per node; a prompt begins with one of them
DECISIONS, DECISIONS_QUICK = 400, 30  # per round
PERCENTILE = 99
LAYOUT = "layout"


class DecisionLoad:
    """A conductor with ``engines`` engines, and requests for it."""

    def __init__(self, engines: int, pages: int) -> None:
        self.state = ConductorState(ConductorRules())
        self._numbers = counter()
        self._random, self._page_random = random.Random(1), np.random.default_rng(1)
        self._chains: list[Fingerprints] = []
        self._now_s, self._step_s = 0.0, 0.8 / engines  # between requests, at a rate that keeps the engines half busy
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
            self._announce(node, self.new_pages(pages // engines))

    def new_pages(self, pages: int) -> Fingerprints:
        """Return the fingerprints of random pages."""
        return self._page_random.integers(0, 1 << 63, pages).astype(np.uint64) * np.uint64(2)

    def _announce(self, node: str, pages: Fingerprints) -> None:
        for number, start in enumerate(range(0, len(pages), BATCH)):
            part = pages[start : start + BATCH]
            is_last = start + BATCH >= len(pages)
            batch = AnnounceBatch(node, 1, number, part, np.ones(len(part), np.uint8), whole=is_last)
            self.state.handle(ev.PagesReported(0.0, batch))
        starts = range(0, min(len(pages) - PROMPT_PAGES, CHAINS * PROMPT_PAGES) + 1, PROMPT_PAGES)
        self._chains += [pages[start : start + PROMPT_PAGES] for start in starts]

    def prompt(self) -> Fingerprints:
        """Return the pages of a prompt: first stored ones, then new ones."""
        stored = self._random.choice(self._chains)[: self._random.randrange(PROMPT_PAGES)]
        return np.concatenate([stored, self.new_pages(PROMPT_PAGES - len(stored))])

    def decide(self, prompt: Fingerprints) -> float:
        """Decide about one request, then end it. Return the seconds that the decision took."""
        self._now_s += self._step_s
        number, tokens = next(self._numbers), np.zeros(PAGE_TOKENS * len(prompt) + 10, np.uint32)
        request = Request(id=str(number), tokens=tokens, tenant="t", model="m", sampling=Sampling(max_tokens=100))
        event = ev.RequestArrived(self._now_s, number, request, {LAYOUT: prompt})
        start_s = time.perf_counter()
        instructions = self.state.handle(event)
        decision_s = time.perf_counter() - start_s
        entry = self.state.requests.get(number)
        if entry is None or entry.route is None:
            raise BenchFailed(f"a request has no route (got {instructions})")
        self.state.handle(ev.FirstToken(self._now_s, number))
        self.state.handle(ev.AnswerEnded(self._now_s, number, 50))
        return decision_s


def decisions(stage: Stage, name: str, bar: Bar | None, engines: int) -> list[Result]:
    """Measure the median decision. The details have the 99th percentile and the decisions per second."""
    quick = stage.settings.quick
    load = DecisionLoad(engines, PAGES_QUICK if quick else PAGES)
    sorted_pages = np.sort(load.new_pages(PAGES_QUICK if quick else PAGES))
    count = DECISIONS_QUICK if quick else DECISIONS
    ours: list[float] = []
    limit: list[float] = []
    all_s: list[float] = []
    for _ in range(max(3, stage.settings.rounds)):
        decisions_s, searches_s = [], []
        for _ in range(count):
            prompt = load.prompt()
            decisions_s.append(load.decide(prompt))
            start_s = time.perf_counter()
            sorted_pages.searchsorted(prompt)
            searches_s.append(time.perf_counter() - start_s)
        ours.append(statistics.median(decisions_s))
        limit.append(statistics.median(searches_s))
        all_s += decisions_s
    details: dict[str, float] = {
        "engines": engines,
        "pages": len(load.state.prefixes),
        "p99_s": float(np.percentile(all_s, PERCENTILE)),
        "per_s": len(all_s) / sum(all_s),
    }
    limit_is = "search of the prompt's pages in a sorted array"
    return [result(name, Kind.TIME, ours, limit, bar=bar, limit_is=limit_is, details=details)]
