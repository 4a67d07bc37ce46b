"""A fleet that is simulated around the decisions of a conductor: engines that compute, die, hang and come back."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import numpy as np

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state import integrity
from engine.conductor.state.conductor_state import ConductorRules, ConductorState
from engine.conductor.state.fleet import EngineAbout, LoadReport
from engine.conductor.state.options import RouteWish
from engine.model.request import Role
from kvstore.model.span import Fingerprints
from kvstore.state.directory import Told

PAGE = 64
LAYOUT = "layout"
STEP_S = 0.02
TOKENS_PER_S = 8000.0
FEW = 50  # requests; with more of them integrity is checked after every so many events
CHECKED_EVERY = 20
NOTICED_S = 1.0  # after so long a request at an engine that is dead or hangs is known to be broken
DRAM, NVME = 1, 2  # marks of a page, see ``kvstore.state.directory``
KV_BYTES = 1 << 17  # of a token
COPY_BYTES_PER_S = 3e9


def pages_of(*parts: int) -> Fingerprints:
    """Fingerprints of a chain: ``parts`` are the numbers of its texts, one page each."""
    draw, pages = 0x9E3779B9, []
    for part in parts:
        draw = random.Random(draw * 1_000_003 + part).getrandbits(62)
        pages.append(draw << 1)
    return np.array(pages, np.uint64)


def wish(
    number: int, pages: Fingerprints, *, tenant: str = "t", answer: int = 20, more: int = 10, **how: object
) -> RouteWish:
    """A request for the answer to these pages and ``more`` tokens."""
    said: dict[str, object] = {"model": "m", "tokens": PAGE * len(pages) + more, "answer_max": answer, **how}
    return RouteWish(number=number, tenant=tenant, pages={LAYOUT: pages}, **said)  # type: ignore[arg-type]


def about(name: str, **how: object) -> EngineAbout:
    """An engine."""
    said: dict[str, object] = {"model": "m", "node": f"node-{name}", "zone": "z", "batch_max": 64, **how}
    return EngineAbout(name=name, address=name, layout=LAYOUT, page_tokens=PAGE, kv_bytes=KV_BYTES, **said)  # type: ignore[arg-type]


@dataclass
class Sim:
    """One simulated engine; or, with an egress, a remote cluster of as many as it has lanes."""

    role: Role
    lanes: int = 1
    egress: float = 0.0
    leaves_s: float = 0.0  # when all that is to leave it has left
    left: int = 0  # bytes that have
    busy: int = 0
    line: deque[Callable[[], float]] = field(default_factory=deque)  # each returns how long it takes
    up: bool = True
    held: set[int] = field(default_factory=set)
    told: int = 0


@dataclass
class World:
    """A conductor and its fleet. Moments are in seconds; everything is drawn from one seed."""

    state: ConductorState
    engines: dict[str, Sim] = field(default_factory=dict)
    now_s: float = 0.0
    sends: list[tuple[float, do.Send]] = field(default_factory=list)
    refused: dict[int, do.Refuse] = field(default_factory=dict)
    given_up: list[int] = field(default_factory=list)
    roles: list[tuple[float, do.SetRole]] = field(default_factory=list)
    first: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    wishes: dict[int, RouteWish] = field(default_factory=dict)
    orders: list[do.CopyPrefix | do.PrefetchPrefix] = field(default_factory=list)
    computed_pages: int = 0

    def __post_init__(self) -> None:
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order: Iterator[int] = count()
        self._attempt: dict[int, int] = {}
        self._told = 0

    # --- the fleet --------------------------------------------------------------------------------------------------

    def add(self, name: str, role: Role = Role.BOTH, **how: object) -> None:
        """An engine with a node of its own joins."""
        said = about(name, **how)
        self.engines[name] = Sim(role, said.lanes, said.egress_bytes_per_s)
        self.tell(ev.NodeFound(self.now_s, f"node-{name}", zone="z"))
        self.tell(ev.EngineFound(self.now_s, said, role))

    def ask(self, late_s: float = 0.0) -> None:
        """Ask every engine for a report, which comes ``late_s`` later."""
        for name in sorted(self.engines):
            self.tell(ev.ReportAsked(self.now_s, name))
            self.after(late_s, lambda name=name: self._report(name))  # type: ignore[misc]

    def _report(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is None:
            return
        if not engine.up:
            self.tell(ev.Silent(self.now_s, name))
            return
        known = self.state.fleet.engines[name]
        self.tell(
            ev.Reported(self.now_s, name, LoadReport(role=engine.role, waiting=known.waiting, running=len(known.ends)))
        )

    # --- time -------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self._later, (self.now_s + seconds, next(self._order), what))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._later and self._later[0][0] <= until_s:
            self.now_s, _, what = heapq.heappop(self._later)
            what()
        self.now_s = until_s
        self.tell(ev.Ticked(until_s))

    def settle(self, most_s: float = 3600.0) -> None:
        """Let time pass until every request has ended."""
        end_s = self.now_s + most_s
        while self.state.requests:
            assert self.now_s < end_s, f"{len(self.state.requests)} requests never end"
            self.run(self.now_s + 0.25)

    def tell(self, event: ev.ConductorEvent) -> None:
        """The conductor decides, and what it says is done."""
        for instruction in self.state.handle(event):
            match instruction:
                case do.Send():
                    self.sends.append((self.now_s, instruction))
                    self._serve(instruction)
                case do.Refuse():
                    self.refused[instruction.number] = instruction
                case do.LoseRequest():
                    self.given_up.append(instruction.number)
                case do.CopyPrefix() | do.PrefetchPrefix():
                    self.orders.append(instruction)
                    self._perform(instruction)
                case do.SetRole():
                    self.engines[instruction.engine].role = instruction.role
                    self.roles.append((self.now_s, instruction))
        self._told += 1
        if self._told % CHECKED_EVERY == 0 or len(self.state.requests) < FEW:
            integrity.check(self.state)

    def arrive(self, wish: RouteWish) -> None:
        """A request comes."""
        self.wishes[wish.number] = wish
        self.tell(ev.Arrived(self.now_s, wish, 4 * wish.tokens))

    def _perform(self, order: do.CopyPrefix | do.PrefetchPrefix) -> None:
        """A node does what it is told, as fast as memory allows."""
        pages = self.wishes[order.number].pages[order.layout][: order.pages]

        def done() -> None:
            self.holds(order.node.removeprefix("node-"), pages)
            self.tell(ev.OrderEnded(self.now_s, order.order))

        self.after(order.size / COPY_BYTES_PER_S, done)

    def holds(self, name: str, pages: Fingerprints, mark: int = DRAM) -> None:
        """The engine's node has these pages now, and tells of them."""
        engine = self.engines[name]
        engine.held.update(pages.tolist())
        told = Told(f"node-{name}", 1, engine.told, pages, np.full(len(pages), mark, np.uint8))
        engine.told += 1
        self.tell(ev.PagesTold(self.now_s, told))

    # --- engines ----------------------------------------------------------------------------------------------------

    def _serve(self, send: do.Send) -> None:
        number = send.number
        attempt = self._attempt[number] = self._attempt.get(number, 0) + 1
        name = send.route.computing.engine.about.name
        answering = send.route.answering.engine.about.name
        engine, request = self.engines.get(name), self.state.requests[number]
        if engine is None or not engine.up:
            self.after(NOTICED_S, lambda: self._broken(number, attempt, name, 0))
            return
        donor = self.engines.get(send.route.computing.donor.removeprefix("node-"))
        pages, tokens = request.wish.pages[LAYOUT].tolist(), request.wish.tokens

        def compute() -> float:
            there = (page in engine.held or (donor is not None and page in donor.held) for page in pages)
            found = sum(1 for _ in takewhile(bool, there))
            cached = min(found * PAGE, tokens - 1)
            took_s = (tokens - cached) / TOKENS_PER_S
            self.computed_pages += len(pages) - found
            late_s = took_s
            if engine.egress:  # layer by layer, behind what is to leave before it
                size = tokens * KV_BYTES
                engine.left += size
                engine.leaves_s = max(engine.leaves_s, self.now_s) + size / engine.egress
                late_s = max(took_s, engine.leaves_s - self.now_s)
            self.after(late_s, lambda: self._computed(number, attempt, name, answering, cached, took_s))
            return took_s

        engine.line.append(compute)
        self._next(engine)

    def _next(self, engine: Sim) -> None:
        def free() -> None:
            engine.busy -= 1
            self._next(engine)

        while engine.line and engine.busy < engine.lanes:
            engine.busy += 1
            self.after(engine.line.popleft()(), free)

    def _computed(self, number: int, attempt: int, name: str, answering: str, cached: int, took_s: float) -> None:
        if self._attempt.get(number) != attempt or number not in self.state.requests:
            return
        engine = self.engines.get(name)
        if engine is None or not engine.up:
            self.after(NOTICED_S, lambda: self._broken(number, attempt, name, 0))
            return
        pages = self.state.requests[number].wish.pages[LAYOUT]
        self.holds(name, np.array([page for page in pages.tolist() if page not in engine.held], np.uint64))
        if number not in self.state.requests:
            return
        self.first.setdefault(number, self.now_s)
        self.tell(ev.FirstToken(self.now_s, number))
        answer = self.wishes[number].answer_max
        self.after(answer * STEP_S, lambda: self._answered(number, attempt, answering, answer, cached, took_s))

    def _answered(self, number: int, attempt: int, name: str, tokens: int, cached: int, took_s: float) -> None:
        if self._attempt.get(number) != attempt or number not in self.state.requests:
            return
        engine = self.engines.get(name)
        if engine is None or not engine.up:
            self.after(NOTICED_S, lambda: self._broken(number, attempt, name, tokens // 2))
            return
        self.done[number] = self.now_s
        self.tell(ev.Ended(self.now_s, number, tokens, cached, took_s))

    def _broken(self, number: int, attempt: int, name: str, generated: int) -> None:
        if self._attempt.get(number) == attempt:
            self.tell(ev.Broke(self.now_s, number, name, generated))


def world(engines: int = 0, roles: str = "", **rules: object) -> World:
    """A world with engines ``e0``, ``e1`` ...: so many that do both, or by ``roles``, a letter each (p, d, b)."""
    made = World(ConductorState(replace(ConductorRules(), **rules)))  # type: ignore[arg-type]
    letters = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    for number, letter in enumerate(roles or "b" * engines):
        made.add(f"e{number}", letters[letter])
    return made


def engines_of(made: World) -> list[str]:
    """Who computed, in the order in which requests were sent."""
    return [send.route.computing.engine.about.name for _, send in made.sends]
