"""A fleet that is simulated around the decisions of a conductor: engines that compute, die, hang and come back."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, takewhile

import numpy as np

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state import integrity
from engine.conductor.state.candidates import Candidates
from engine.conductor.state.conductor_state import ConductorRules, ConductorState
from engine.conductor.state.engine_table import EngineAbout, LoadReport
from engine.conductor.state.roles import ORDER_S
from engine.conductor.state.routed_requests import RoutedRequest
from engine.model.request import Request, Role, RoleOrder, Sampling
from engine.state.admission import Admission
from kvstore.cluster.directory import AnnounceBatch
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.prefix import Fingerprints

PAGE = 64
LAYOUT = "layout"
STEP_S = 0.02
TOKENS_PER_S = 8000.0
FEW = 50  # requests; with more of them integrity is checked after every so many events
CHECKED_EVERY = 20
NOTICED_S = 1.0  # after so long a request at an engine that is dead or hangs is known to be broken
DRAM, NVME = 1, 2  # marks of a page, see ``kvstore.cluster.directory``
KV_BYTES = 1 << 17  # of a token
COPY_BYTES_PER_S = 3e9
TICK_S = 0.05  # of a conductor's loop
POLL_S = 0.25
SILENT_S = 7.0  # the longest until a question that is lost is known to be
TTL_S = 2.0  # of a leader


def pages_of(*parts: int) -> Fingerprints:
    """Fingerprints of a chain: ``parts`` are the numbers of its texts, one page each."""
    draw, pages = 0x9E3779B9, []
    for part in parts:
        draw = random.Random(draw * 1_000_003 + part).getrandbits(62)
        pages.append(draw << 1)
    return np.array(pages, np.uint64)


def arrival(
    number: int, pages: Fingerprints, *, answer: int = 20, more: int = 10, tokens: int | None = None, **how: object
) -> ev.RequestArrived:
    """A request for the answer to these pages and ``more`` tokens, or to this many tokens in all."""
    count = PAGE * len(pages) + more if tokens is None else tokens
    said: dict[str, object] = {"model": "m", "tenant": "t", "sampling": Sampling(max_tokens=answer), **how}
    prompt = np.broadcast_to(np.uint32(0), count)  # decisions look at their number alone
    request = Request(id=str(number), tokens=prompt, **said)  # type: ignore[arg-type]
    return ev.RequestArrived(0.0, number, request, {LAYOUT: pages})


def about(name: str, **how: object) -> EngineAbout:
    """An engine."""
    said: dict[str, object] = {"model": "m", "node": f"node-{name}", "zone": "z", "batch_max": 64, **how}
    return EngineAbout(name=name, address=name, layout=LAYOUT, page_tokens=PAGE, kv_bytes=KV_BYTES, **said)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RoleChange:
    """An engine changed its role. ``by``: the conductor that had ordered it at ``sent_s``; "": an operator did."""

    at_s: float
    role: Role
    by: str = ""
    sent_s: float = 0.0


@dataclass(frozen=True)
class RoleRefusal:
    """An engine refused a request for its role.

    Attributes:
        answers: it was to be answered; else its prompt was to be computed for another engine.
        known_s: when that engine had said what its conductor knew of it when it sent the request.
    """

    number: int
    engine: str
    answers: bool
    conductor: str
    known_s: float
    sent_s: float
    at_s: float


@dataclass
class Sim:
    """One simulated engine; or, with an egress, a remote cluster of as many as it has lanes."""

    admission: Admission
    lanes: int = 1
    egress: float = 0.0
    leaves_s: float = 0.0  # when all that is to leave it has left
    left: int = 0  # bytes that have
    busy: int = 0
    line: deque[Callable[[], float]] = field(default_factory=deque)  # each returns how long it takes
    up: bool = True
    held: set[int] = field(default_factory=set)
    told: int = 0
    changes: list[RoleChange] = field(default_factory=list)

    @property
    def role(self) -> Role:
        """What it does."""
        return self.admission.role


@dataclass
class Poll:
    """How a conductor stands with the reports of one engine."""

    asking: bool = False
    again: bool = False  # at once when that is answered
    turn: int = 0  # of the wait for the next one


@dataclass
class Seat:
    """One conductor of a world, and what is cut between it and others.

    Attributes:
        cut: engines that nothing of it reaches; ``deaf``: of which nothing reaches it.
        off_catalog: it does not reach the catalog.
        revision: of its last election; ``leads_until_s``: by its own clock.
        words: of each engine, when the last was said that has come here.
    """

    name: str
    state: ConductorState
    cut: set[str] = field(default_factory=set)
    deaf: set[str] = field(default_factory=set)
    off_catalog: bool = False
    revision: int = 0
    leads_until_s: float = -1.0
    led: int | None = None
    words: dict[str, float] = field(default_factory=dict)
    polls: dict[str, Poll] = field(default_factory=dict)


@dataclass
class World:
    """Conductors and their fleet. Moments are in seconds; everything is drawn from one seed.

    In a world of one conductor all is told at once. Several conductors, by ``live``, have links that take time and may
    be cut, ask engines for their reports, and elect a leader.
    """

    seats: list[Seat]
    engines: dict[str, Sim] = field(default_factory=dict)
    now_s: float = 0.0
    sends: list[tuple[float, do.Send]] = field(default_factory=list)
    refused: dict[int, do.Refuse] = field(default_factory=dict)
    given_up: list[int] = field(default_factory=list)
    roles: list[tuple[float, do.SetRole]] = field(default_factory=list)
    role_refusals: list[RoleRefusal] = field(default_factory=list)
    fenced: list[str] = field(default_factory=list)  # what engines said of orders that they did not carry out
    splits: list[tuple[float, int, int]] = field(default_factory=list)  # engines of role prefill and decode, since when
    first: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    arrivals: dict[int, ev.RequestArrived] = field(default_factory=dict)
    orders: list[do.CopyPrefix | do.PrefetchPrefix] = field(default_factory=list)
    computed_pages: int = 0

    def __post_init__(self) -> None:
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._order: Iterator[int] = count()
        self._attempt: dict[int, int] = {}
        self._told = 0
        self._links: random.Random | None = None
        self._elections = count(1)
        self._leads_until_s = 0.0  # in the catalog's eyes

    @property
    def state(self) -> ConductorState:
        """Decisions of the first conductor, or the only one."""
        return self.seats[0].state

    # --- the fleet --------------------------------------------------------------------------------------------------

    def add(self, name: str, role: Role = Role.BOTH, **how: object) -> None:
        """An engine with a node of its own joins."""
        said = about(name, **how)
        self.engines[name] = Sim(Admission(role, FEW), said.lanes, said.egress_bytes_per_s)
        for seat in self.seats:
            self.tell(ev.NodeFound(self.now_s, f"node-{name}", zone="z"), seat)
            self.tell(ev.EngineFound(self.now_s, said, role), seat)
            seat.words[name] = self.now_s

    def ask(self, late_s: float = 0.0) -> None:
        """Ask every engine for a report, which comes ``late_s`` later."""
        for name in sorted(self.engines):
            self.tell(ev.ReportRequested(self.now_s, name))
            self.after(late_s, lambda name=name: self._answer_ask(name))  # type: ignore[misc]

    def _answer_ask(self, name: str) -> None:
        engine = self.engines.get(name)
        if engine is None:
            return
        if not engine.up:
            self.tell(ev.EngineSilent(self.now_s, name))
            return
        self.tell(ev.LoadReported(self.now_s, name, self._report(name)))

    def _report(self, name: str) -> LoadReport:
        """What the engine says of itself now."""
        admission, known = self.engines[name].admission, [seat.state.fleet.engines[name] for seat in self.seats]
        return LoadReport(
            role=admission.role,
            order=admission.order,
            draining=admission.draining,
            waiting=sum(each.waiting for each in known),
            running=sum(len(each.ends) for each in known),
        )

    def set_role(
        self, name: str, role: Role, order: RoleOrder | None = None, by: str = "", sent_s: float = 0.0
    ) -> None:
        """An engine is told its role. Raises what ``Admission.set_role`` does."""
        engine, before = self.engines[name], self.engines[name].role
        engine.admission.set_role(role, order)
        if engine.role is not before:
            engine.changes.append(RoleChange(self.now_s, role, by, sent_s))
        counts = Counter(each.role for each in self.engines.values())
        self.splits.append((self.now_s, counts[Role.PREFILL], counts[Role.DECODE]))

    # --- several conductors -----------------------------------------------------------------------------------------

    def lead(self) -> None:
        """The only conductor leads, and asks its engines for reports, as it does when it runs."""
        self.seats[0].revision, self.seats[0].leads_until_s = 1, math.inf
        self._begin()

    def live(self, seed: int) -> None:
        """Conductors ask for reports, and take part in elections. Links take time, which is drawn from this seed."""
        self._links = random.Random(seed)
        self._begin()

    def _begin(self) -> None:
        for seat in self.seats:
            seat.polls = {name: Poll() for name in self.engines}
            for name in self.engines:
                self.after(self._link_s(), lambda seat=seat, name=name: self._poll(seat, name))  # type: ignore[misc]
            self._tick(seat)

    def _link_s(self) -> float:
        """How long a message is on its way."""
        if self._links is None:
            return 0.0
        return (
            self._links.choice((0.001, 0.005, 0.02)) if self._links.random() < 0.95 else self._links.uniform(0.1, 1.0)
        )

    def _soon(self, what: Callable[[], None]) -> None:
        """When a message is there."""
        late_s = self._link_s()
        self.after(late_s, what) if late_s else what()

    def leading(self, seat: Seat) -> int | None:
        """The revision with which this conductor leads, as its shell knows it."""
        return seat.revision if self.now_s < seat.leads_until_s else None

    def _tick(self, seat: Seat) -> None:
        """A conductor's loop, and its session in the catalog."""
        if self._links is not None and not seat.off_catalog:
            if self.leading(seat) is not None:
                seat.leads_until_s = self._leads_until_s = self.now_s + TTL_S
            elif self.now_s > self._leads_until_s:
                seat.revision = next(self._elections)
                seat.leads_until_s = self._leads_until_s = self.now_s + TTL_S
        if (leading := self.leading(seat)) != seat.led:
            seat.led = leading
            self.tell(ev.LeadershipChanged(self.now_s, leading is not None, leading or 0), seat)
        self.tell(ev.Ticked(self.now_s), seat)
        self.after(TICK_S, lambda: self._tick(seat))

    def look(self, seat: Seat, name: str) -> None:
        """Ask an engine for its report at once, where it is asked at all."""
        poll = seat.polls.get(name)
        if poll is not None and poll.asking:
            poll.again = True
        elif poll is not None:
            self._poll(seat, name)

    def _poll(self, seat: Seat, name: str) -> None:
        poll = seat.polls[name]
        poll.asking, poll.again, poll.turn = True, False, poll.turn + 1
        self.tell(ev.ReportRequested(self.now_s, name), seat)

        def next_one() -> None:
            poll.asking, turn = False, poll.turn
            wait_s = 0.0 if poll.again else POLL_S
            self.after(wait_s, lambda: self._poll(seat, name) if poll.turn == turn and not poll.asking else None)

        def silent() -> None:
            self.tell(ev.EngineSilent(self.now_s, name), seat)
            next_one()

        def lost() -> None:
            assert self._links is not None
            self.after(self._links.uniform(1.0, SILENT_S), silent)

        def asked() -> None:
            if name in seat.cut:
                lost()
                return
            said, said_s = self._report(name), self.now_s
            self._soon(lambda: answered(said, said_s))

        def answered(said: LoadReport, said_s: float) -> None:
            if name in seat.deaf:
                lost()
                return
            seat.words[name] = max(seat.words[name], said_s)
            self.tell(ev.LoadReported(self.now_s, name, said), seat)
            next_one()

        self._soon(asked)

    def _set_role(self, seat: Seat, it: do.SetRole) -> None:
        """An order goes to its engine, and is there in ``ORDER_S`` or never."""
        sent_s = self.now_s

        def ended() -> None:
            self.tell(ev.RoleOrderEnded(self.now_s, it.engine), seat)
            self.look(seat, it.engine)

        def given_up() -> None:
            self.after(sent_s + ORDER_S - self.now_s, ended)

        def arrived() -> None:
            if it.engine in seat.cut:
                given_up()
                return
            try:
                self.set_role(it.engine, it.role, it.order, seat.name, sent_s)
            except KVStoreError as error:
                self.fenced.append(str(error))
            self._soon(given_up if it.engine in seat.deaf else ended)

        if self.leading(seat) is None:  # asked at the last moment
            self.after(0.0, ended)
            return
        self.roles.append((self.now_s, it))
        late_s = self._link_s()
        if self._links is not None and self._links.random() < 0.2:
            late_s = self._links.uniform(0.0, 1.2 * ORDER_S)
        self.after(late_s, arrived) if late_s < ORDER_S else given_up()

    def misrouted(self) -> list[RoleRefusal]:
        """Refusals that their conductor could have known better than to meet.

        It could not know where the engine's role has changed after the engine said the last word of it that had come
        to this conductor, a report or a refusal, when it sent the request: then the report that tells of the change is
        under way. A change that it has ordered itself before it sent the request does not count.
        """

        def excused(it: RoleRefusal) -> bool:
            changes = [each for each in self.engines[it.engine].changes if it.known_s < each.at_s <= it.at_s]
            return any(each.by != it.conductor or each.sent_s > it.sent_s for each in changes)

        return [each for each in self.role_refusals if not excused(each)]

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
        for seat in self.seats:
            self.tell(ev.Ticked(until_s), seat)

    def settle(self, most_s: float = 3600.0) -> None:
        """Let time pass until every request has ended."""
        end_s = self.now_s + most_s
        while left := sum(len(seat.state.requests) for seat in self.seats):
            assert self.now_s < end_s, f"{left} requests never end"
            self.run(self.now_s + 0.25)

    def tell(self, event: ev.ConductorEvent, seat: Seat | None = None) -> None:
        """A conductor decides, and what it says is done."""
        seat = seat or self.seats[0]
        for instruction in seat.state.handle(event):
            match instruction:
                case do.Send():
                    self.sends.append((self.now_s, instruction))
                    self._serve(seat, instruction)
                case do.Refuse():
                    self.refused[instruction.number] = instruction
                case do.LoseRequest():
                    self.given_up.append(instruction.number)
                case do.CopyPrefix() | do.PrefetchPrefix():
                    self.orders.append(instruction)
                    self._perform(seat, instruction)
                case do.SetRole():
                    self._set_role(seat, instruction)
        self._told += 1
        if self._told % CHECKED_EVERY == 0 or (self._links is None and len(seat.state.requests) < FEW):
            integrity.check(seat.state)

    def arrive(self, arrival: ev.RequestArrived, seat: Seat | None = None) -> None:
        """A request comes."""
        self.arrivals[arrival.number] = arrival
        self.tell(replace(arrival, now_s=self.now_s), seat)

    def explain(self, arrival: ev.RequestArrived) -> dict[str, object]:
        """What would become of a request now."""
        return self.state.explain(replace(arrival, now_s=self.now_s))

    def candidates(self, arrival: ev.RequestArrived, now_s: float | None = None) -> Candidates | None:
        """What could be done with a request now."""
        limits = arrival.request.first_token_s, arrival.request.token_s
        request = RoutedRequest(arrival.number, arrival.request, arrival.pages, arrival.barred, 0.0, *limits)
        return self.state.candidates(request, self.now_s if now_s is None else now_s)

    def _perform(self, seat: Seat, order: do.CopyPrefix | do.PrefetchPrefix) -> None:
        """A node does what it is told, as fast as memory allows."""
        pages = self.arrivals[order.number].pages[order.layout][: order.pages]

        def done() -> None:
            self.holds(order.node.removeprefix("node-"), pages)
            self.tell(ev.PageOrderEnded(self.now_s, order.order), seat)

        self.after(order.size / COPY_BYTES_PER_S, done)

    def holds(self, name: str, pages: Fingerprints, mark: int = DRAM) -> None:
        """The engine's node has these pages now, and tells of them."""
        engine = self.engines[name]
        engine.held.update(pages.tolist())
        told = AnnounceBatch(f"node-{name}", 1, engine.told, pages, np.full(len(pages), mark, np.uint8))
        engine.told += 1
        for seat in self.seats:
            self.tell(ev.PagesReported(self.now_s, told), seat)

    # --- engines ----------------------------------------------------------------------------------------------------

    def _serve(self, seat: Seat, send: do.Send) -> None:
        number, sent_s, known_s = send.number, self.now_s, dict(seat.words)
        attempt = self._attempt[number] = self._attempt.get(number, 0) + 1
        name = send.route.computing.engine.about.name
        answering = send.route.answering.engine.about.name

        def takes(engine: str, answers: bool) -> bool:
            try:
                self.engines[engine].admission.check(answers)
            except InvalidRequest:
                about = number, engine, answers, seat.name
                self.role_refusals.append(RoleRefusal(*about, known_s[engine], sent_s, self.now_s))
                return False
            return True

        def there() -> None:
            if answering in self.engines and self.engines[answering].up and answering not in seat.cut:
                if not takes(answering, answers=True):
                    said_s = self.now_s
                    self._soon(lambda: self._role_refused(seat, number, attempt, answering, said_s))
                    return
                if answering == name or name not in self.engines or takes(name, answers=False):
                    self._compute(seat, send, attempt, name)
                else:  # the engine that answers does it all
                    self._compute(seat, send, attempt, answering)
            elif self._links is None:  # the other one begins all the same
                self._compute(seat, send, attempt, name)
            else:
                self._break(seat, number, attempt, answering, 0)

        self._soon(there)

    def _role_refused(self, seat: Seat, number: int, attempt: int, name: str, said_s: float) -> None:
        if name in seat.deaf:
            self._break(seat, number, attempt, name, 0)
            return
        seat.words[name] = max(seat.words[name], said_s)
        if self._attempt.get(number) == attempt:
            self.tell(ev.RoleRefused(self.now_s, number, name), seat)
            self.look(seat, name)

    def _compute(self, seat: Seat, send: do.Send, attempt: int, name: str) -> None:
        number, answering = send.number, send.route.answering.engine.about.name
        engine, request = self.engines.get(name), seat.state.requests.get(number)
        if request is None or self._attempt.get(number) != attempt:
            return
        if engine is None or not engine.up:
            self._break(seat, number, attempt, name, 0)
            return
        donor = self.engines.get(send.route.computing.donor.removeprefix("node-"))
        pages, tokens = request.pages[LAYOUT].tolist(), request.tokens

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
            self.after(late_s, lambda: self._computed(seat, number, attempt, name, answering, cached, took_s))
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

    def _computed(
        self, seat: Seat, number: int, attempt: int, name: str, answering: str, cached: int, took_s: float
    ) -> None:
        if self._attempt.get(number) != attempt or number not in seat.state.requests:
            return
        engine = self.engines.get(name)
        if engine is None or not engine.up or answering in seat.deaf:
            self._break(seat, number, attempt, answering if answering in seat.deaf else name, 0)
            return
        pages = seat.state.requests[number].pages[LAYOUT]
        self.holds(name, np.array([page for page in pages.tolist() if page not in engine.held], np.uint64))
        if number not in seat.state.requests:
            return
        self.first.setdefault(number, self.now_s)
        self.tell(ev.FirstToken(self.now_s, number), seat)
        answer = self.arrivals[number].request.sampling.max_tokens
        self.after(answer * STEP_S, lambda: self._answered(seat, number, attempt, answering, answer, cached, took_s))

    def _answered(
        self, seat: Seat, number: int, attempt: int, name: str, tokens: int, cached: int, took_s: float
    ) -> None:
        if self._attempt.get(number) != attempt or number not in seat.state.requests:
            return
        engine = self.engines.get(name)
        if engine is None or not engine.up or name in seat.deaf:
            self._break(seat, number, attempt, name, tokens // 2)
            return
        self.done[number] = self.now_s
        self.tell(ev.AnswerEnded(self.now_s, number, tokens, cached, took_s), seat)

    def _break(self, seat: Seat, number: int, attempt: int, name: str, generated: int) -> None:
        """The engine has failed on a request, which is known a while later."""

        def broken() -> None:
            if self._attempt.get(number) == attempt:
                self.tell(ev.EngineFailed(self.now_s, number, name, generated), seat)

        self.after(NOTICED_S, broken)


def world(engines: int = 0, roles: str = "", conductors: int = 1, **rules: object) -> World:
    """A world with engines ``e0``, ``e1`` ...: so many that do both, or by ``roles``, a letter each (p, d, b)."""
    said = replace(ConductorRules(), **rules)  # type: ignore[arg-type]
    made = World([Seat(f"c{number}", ConductorState(said)) for number in range(conductors)])
    letters = {"p": Role.PREFILL, "d": Role.DECODE, "b": Role.BOTH}
    for number, letter in enumerate(roles or "b" * engines):
        made.add(f"e{number}", letters[letter])
    return made


def engines_of(made: World) -> list[str]:
    """Who computed, in the order in which requests were sent."""
    return [send.route.computing.engine.about.name for _, send in made.sends]
