"""Engines that compute in steps, simulated around the decisions of a conductor.

A step computes a chunk of the prompts that wait and one token of every sequence that decodes, as our engines do
(``engine.state.engine_state``), and takes as long as the pace of ``paced-llama`` says. ``tests.helpers.fleet`` has
no steps: prompts cost sequences nothing there, and sequences cost prompts nothing.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from engine.compute.presets import PACED_TOKENS, PRESETS
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state import integrity
from engine.conductor.state.conductor_state import ConductorRules, ConductorState
from engine.conductor.state.engine_table import LoadReport
from engine.conductor.state.routed_requests import Route
from engine.model.request import Role
from engine.simulator.generate import QUICK_SESSIONS, conversations
from kvstore.cluster.directory import AnnounceBatch
from kvstore.model.prefix import Fingerprints
from tests.helpers.fleet import about, arrival, pages_of

PAGE = 16
CHUNK = 64
BATCH = 4
NODE_PAGES = 1024  # the least recently used leave
KV_BYTES = 2048  # of a token
STEP_MORE_S = 0.002  # beside what it computes
HANDOFF_S = 0.01
POLL_S = 0.25
SMOOTH = 0.2  # of what an engine measures of itself
PACE = PRESETS["paced-llama"].pace
assert PACE is not None


@dataclass
class Sequence:
    """One request at one engine. ``answer``: tokens that are made here."""

    number: int
    tokens: int
    answer: int
    pages: list[int]
    cached: int = 0
    found: int = 0
    made: int = 0
    spent_s: float = 0.0

    @property
    def computing(self) -> bool:
        """Its prompt is not complete."""
        return self.cached < self.tokens


@dataclass
class Stepper:
    """One engine."""

    node: str
    waiting: deque[Sequence] = field(default_factory=deque)
    active: list[Sequence] = field(default_factory=list)
    steps: bool = False
    tokens_per_s: float = 0.0
    step_s: float = 0.0


@dataclass
class Outcome:
    """What became of a request that was answered. ``predicted_s``: of its first token, when it was sent."""

    first_s: float
    token_s: float
    sent_s: float
    predicted_s: float


class SteppedFleet:
    """A conductor, engines that do both and share nodes in pairs, and a generated conversation that is asked.

    Args:
        load: 1: as many engines could compute all prompts if nothing were found, and nobody decoded.

    Attributes:
        outcomes: by request; None: it was refused.
    """

    def __init__(self, rules: ConductorRules, engines: int, load: float, seed: int, seconds: float) -> None:
        self.state = ConductorState(rules)
        self.outcomes: dict[int, Outcome | None] = {}
        self._now_s = 0.0
        self._over = 0
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._engines: dict[str, Stepper] = {}
        self._held: dict[str, OrderedDict[int, None]] = {f"n{number}": OrderedDict() for number in range(engines // 2)}
        self._told = dict.fromkeys(self._held, 0)
        self._asked: dict[int, tuple[float, int, Fingerprints, int]] = {}
        self._routes: dict[int, tuple[float, Route]] = {}
        for node in self._held:
            self._tell(ev.NodeFound(0.0, node, host="h", zone="z"))
        for number in range(engines):
            name, node = f"e{number}", f"n{number % len(self._held)}"
            self._engines[name] = Stepper(node)
            said = about(name, node=node, host="h", batch_max=BATCH, chunk_tokens=CHUNK)
            said = replace(said, page_tokens=PAGE, kv_bytes=KV_BYTES)
            self._tell(ev.EngineFound(0.0, said, Role.BOTH))
        lengths = [
            each.input_tokens // PACED_TOKENS
            for each in conversations(2000, rate=10.0, seed=seed, shape=QUICK_SESSIONS)
        ]
        rate = load * engines / float(np.mean([PACE.step_s([(0, length)], 0) for length in lengths]))
        for number, each in enumerate(conversations(int(rate * seconds), rate=rate, seed=seed, shape=QUICK_SESSIONS)):
            tokens, answer = max(1, each.input_tokens // PACED_TOKENS), max(1, round(each.output_tokens / PACED_TOKENS))
            pages = pages_of(*each.block_ids)[: tokens // PAGE]
            self._asked[number] = each.timestamp_ms / 1e3, tokens, pages, answer
            self._after(each.timestamp_ms / 1e3, lambda number=number: self._arrive(number))  # type: ignore[misc]

    def run(self) -> None:
        """Until every request has ended."""
        self._poll()
        while self._over < len(self._asked):
            self._now_s, _, what = heapq.heappop(self._later)
            what()
        integrity.check(self.state)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._later, (self._now_s + seconds, next(self._order), what))

    def _poll(self) -> None:
        for name, engine in self._engines.items():
            computing = sum(each.computing for each in engine.active)
            report = LoadReport(
                role=Role.BOTH,
                waiting=len(engine.waiting) + computing,
                running=len(engine.active) - computing,
                prefill_tokens_per_s=engine.tokens_per_s,
                step_s=engine.step_s,
            )
            self._tell(ev.ReportRequested(self._now_s, name))
            self._tell(ev.LoadReported(self._now_s, name, report))
        self._tell(ev.Ticked(self._now_s))
        self._after(POLL_S, self._poll)

    def _arrive(self, number: int) -> None:
        _, tokens, pages, answer = self._asked[number]
        arrived = arrival(number, pages, answer=answer, tokens=tokens)
        self._tell(replace(arrived, now_s=self._now_s))

    def _tell(self, event: ev.ConductorEvent) -> None:
        for instruction in self.state.handle(event):
            match instruction:
                case do.Send():
                    self._send(instruction)
                case do.Refuse():
                    self.outcomes[instruction.number] = None
                    self._over += 1
                case do.CopyPrefix() | do.PrefetchPrefix():  # nobody carries it out: what is asked for is reuse alone
                    order = instruction.order
                    self._after(0.1, lambda order=order: self._tell(ev.PageOrderEnded(self._now_s, order)))  # type: ignore[misc]

    # --- engines ----------------------------------------------------------------------------------------------------

    def _send(self, send: do.Send) -> None:
        _, tokens, pages, answer = self._asked[send.number]
        self._routes[send.number] = self._now_s, send.route
        made = answer if send.route.local else 1  # the other engine makes the whole answer
        name = send.route.computing.engine.about.name
        self._engines[name].waiting.append(Sequence(send.number, tokens, made, pages.tolist()))
        self._step(name)

    def _admit(self, engine: Stepper) -> None:
        while engine.waiting and len(engine.active) < BATCH:
            sequence = engine.waiting.popleft()
            engine.active.append(sequence)
            if not sequence.computing:  # another engine has computed it
                continue
            held = self._held[engine.node]
            donor = self._held.get(self._routes[sequence.number][1].computing.donor, {})
            for page in sequence.pages:
                if page not in held and page not in donor:
                    break
                sequence.found += PAGE
            sequence.cached = sequence.found = min(sequence.found, sequence.tokens - 1)

    def _step(self, name: str) -> None:
        engine = self._engines[name]
        if engine.steps:
            return
        self._admit(engine)
        decoding = [each for each in engine.active if not each.computing]
        budget, parts = CHUNK - len(decoding), []
        for sequence in engine.active:
            if sequence.computing and budget > 0:
                tokens = min(sequence.tokens - sequence.cached, budget)
                parts.append((sequence, tokens))
                budget -= tokens
        if not decoding and not parts:
            return
        chunks = [(sequence.cached, tokens) for sequence, tokens in parts]
        took_s = PACE.step_s(chunks, len(decoding)) + STEP_MORE_S
        engine.steps = True
        self._after(took_s, lambda: self._stepped(name, decoding, parts, took_s))

    def _stepped(self, name: str, decoding: list[Sequence], parts: list[tuple[Sequence, int]], took_s: float) -> None:
        engine, computed = self._engines[name], sum(tokens for _, tokens in parts)
        if parts and not decoding:
            speed = computed / took_s
            engine.tokens_per_s += SMOOTH * (speed - engine.tokens_per_s) if engine.tokens_per_s else speed
        if decoding and not parts:
            engine.step_s += SMOOTH * (took_s - engine.step_s) if engine.step_s else took_s
        for sequence in decoding:
            self._drew(engine, sequence, name)
        for sequence, tokens in parts:
            sequence.cached += tokens
            sequence.spent_s += took_s * tokens / computed
            if not sequence.computing:
                self._stores(engine.node, sequence.pages)
                self._drew(engine, sequence, name)
        engine.steps = False
        self._step(name)

    def _stores(self, node: str, pages: list[int]) -> None:
        held = self._held[node]
        new = [page for page in pages if page not in held]
        for page in pages:
            held[page] = None
            held.move_to_end(page)
        gone = [held.popitem(last=False)[0] for _ in range(len(held) - NODE_PAGES)]
        marks = np.array([1] * len(new) + [0] * len(gone), np.uint8)
        if len(marks):
            batch = AnnounceBatch(node, 1, self._told[node], np.array(new + gone, np.uint64), marks)
            self._told[node] += 1
            self._tell(ev.PagesReported(self._now_s, batch))

    def _drew(self, engine: Stepper, sequence: Sequence, name: str) -> None:
        number = sequence.number
        began_s, _, _, answer = self._asked[number]
        sent_s, route = self._routes[number]
        answers = name == route.answering.engine.about.name
        sequence.made += 1
        if sequence.made == 1 and answers:
            self.outcomes[number] = Outcome(self._now_s - began_s, 0.0, sent_s - began_s, route.first_token_s)
            self._tell(ev.FirstToken(self._now_s, number))
        if sequence.made < sequence.answer:
            return
        engine.active.remove(sequence)
        if not answers:
            moved = Sequence(number, sequence.tokens, answer, [], sequence.tokens, sequence.found, 0, sequence.spent_s)
            other = route.answering.engine.about.name

            def move() -> None:
                self._engines[other].waiting.appendleft(moved)
                self._step(other)

            self._after(HANDOFF_S, move)
            return
        outcome = self.outcomes[number]
        assert outcome is not None
        self._over += 1
        outcome.token_s = (self._now_s - began_s - outcome.first_s) / max(1, answer - 1)
        self._tell(ev.AnswerEnded(self._now_s, number, answer, sequence.found, sequence.spent_s))
