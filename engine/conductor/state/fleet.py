"""Fleet: the engines that requests can go to, and how busy each is.

How busy an engine is has two sources. Of its own requests the conductor knows all: it sends them, and sees every token
come back. What others send to the same engine is seen in the engine's reports alone. A report is the answer to a
question, and says as many requests as there were at some moment between the two; the conductor remembers how many of
its own were there when it asked, and takes the rest for the others'. So a report that is late cannot hide what was
decided meanwhile, and nothing is counted twice.

Whether an engine is there has three sources. Its reports and the tokens that come from it are signs of life. One that
did not answer a question is silent, and gets requests where there is no other. One that failed on a request gets none
for a while; a report ends that, the first time, for it may have been the network.

A request's life here: sent -> its first token has come (it decodes) -> ended.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Final

from engine.conductor.state.board import Board
from engine.conductor.state.names import Names
from engine.model.request import Role

AVOID_S: Final = 5.0  # an engine that failed on a request gets nothing for so long, and twice as long each time again
AVOID_MAX_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbout:
    """What an engine says of itself in the catalog, and does not change while it lives.

    Attributes:
        name: unique in the pool; the conductor's name for it.
        address: of its gRPC API.
        node: whose pool it reads and writes; empty: none.
        host, zone: where it is; empty: not known.
        layout: fingerprint of its pages. Engines of one fingerprint can hand over to each other.
        page_tokens: of its pages.
        kv_bytes: of one token, in its pages.
        batch_max: sequences that it decodes together.
        tokens_max: that fit its memory together; 0: not known.
        context_max: tokens of one sequence; 0: not known.
        lanes: prompts that it computes at the same time, each as fast as a single one.
        egress_bytes_per_s: of a remote cluster, that is told of here as one engine which computes prompts: what may
            leave it; 0: it is no remote cluster. ``address`` is its conductor's.
    """

    name: str
    address: str
    model: str
    layout: str
    page_tokens: int
    kv_bytes: int
    node: str = ""
    host: str = ""
    zone: str = ""
    batch_max: int = 64
    tokens_max: int = 0
    context_max: int = 0
    lanes: int = 1
    egress_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What an engine answers when it is asked how busy it is.

    Attributes:
        waiting: requests whose prompt is not computed yet.
        running: requests that decode.
        prefill_tokens_per_s, step_s: as it has measured; 0: not yet.
    """

    role: Role
    draining: bool = False
    waiting: int = 0
    running: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class EngineWork:
    """One request at one engine, for as long as the engine has to do with it.

    Attributes:
        prefill_s: what its prompt takes there, by prediction; 0: the prompt is computed elsewhere.
        tokens: that it holds there, at its end.
        sent_s: when it was sent.
        decodes: the answer is made here.
        ends_s: when that will be complete, by prediction.
        computed: its prompt is.
    """

    number: int
    prefill_s: float
    tokens: int
    sent_s: float
    decodes: bool
    ends_s: float
    computed: bool = False


@dataclass(slots=True)
class FleetEngine:
    """One engine, as far as is known. ``EngineFleet`` alone changes it.

    Attributes:
        works: requests of ours that it has to do with.
        waiting: those of them whose prompt it computes, or will.
        ends: of those that it answers or will answer, when that is over, by prediction; sorted.
        tokens: that these hold.
        others_waiting, others_running: requests that somebody else has sent.
        prompts_done_s: when it will have computed what it has of ours, by prediction; where it computes several at
            once, when one engine that is so much faster would have.
        scale: how much longer prompts take there than is predicted, by what was measured.
        tokens_per_s: of prompts, and ``step_s``: as it reports; 0: not yet.
        heard_s: when it gave the last sign of life.
        silent: it was asked since, and did not answer.
        failures: requests on which it failed, one after the other.
        avoided_until_s: it gets nothing before.
        egress_free_s: of a remote cluster, when all that is to leave it will have left.
        asked: our requests that were there when it was asked for its next report: (waiting, running).
    """

    about: EngineAbout
    role: Role
    heard_s: float
    draining: bool = False
    works: dict[int, EngineWork] = field(default_factory=dict)
    waiting: int = 0
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    others_waiting: int = 0
    others_running: int = 0
    prompts_done_s: float = 0.0
    scale: float = 1.0
    tokens_per_s: float = 0.0
    step_s: float = 0.0
    silent: bool = False
    failures: int = 0
    avoided_until_s: float = 0.0
    egress_free_s: float = 0.0
    asked: tuple[int, int] | None = None

    def add(self, work: EngineWork) -> None:
        """One more."""
        self.works[work.number] = work
        self.prompts_done_s = max(self.prompts_done_s, work.sent_s) + work.prefill_s / self.about.lanes
        self.waiting += work.prefill_s > 0
        if work.decodes:
            insort(self.ends, work.ends_s)
            self.tokens += work.tokens

    def computed(self, work: EngineWork, now_s: float, ends_s: float) -> None:
        """Its prompt is. What is left is what the prompts that are left take: errors of prediction do not add up."""
        work.computed = True
        if work.prefill_s:
            self.waiting -= 1
            left_s = sum(other.prefill_s for other in self.works.values() if not other.computed)
            self.prompts_done_s = min(self.prompts_done_s, now_s + left_s / self.about.lanes)
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            work.ends_s = ends_s
            insort(self.ends, ends_s)

    def remove(self, work: EngineWork, now_s: float) -> None:
        """It is over here."""
        if not work.computed:
            self.computed(work, now_s, work.ends_s)
        del self.works[work.number]
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            self.tokens -= work.tokens


class EngineFleet:
    """All engines.

    Attributes:
        engines: by name.
        nodes: numbers of nodes.
    """

    def __init__(self, nodes: Names) -> None:
        self.engines: dict[str, FleetEngine] = {}
        self.nodes = nodes
        self._where = Names()  # hosts and zones
        self._places: dict[int, tuple[int, int]] = {}  # of a node: its host and zone
        self._boards: dict[str, Board] = {}  # by model

    # --- who there is -----------------------------------------------------------------------------------------------

    def found(self, about: EngineAbout, role: Role, now_s: float) -> None:
        """An engine is there, or says something else of itself. Its requests stay."""
        known = self.engines.get(about.name)
        if known is None:
            self.engines[about.name] = FleetEngine(about, role, now_s)
        elif (known.about, known.role) == (about, role):
            return
        else:
            known.about, known.role = about, role
        self._boards.clear()

    def lost(self, name: str) -> list[int]:
        """An engine has gone. Returns the requests that it had to do with."""
        engine = self.engines.pop(name, None)
        self._boards.clear()
        return list(engine.works) if engine is not None else []

    def node_found(self, name: str, host: str, zone: str) -> None:
        """A node is there."""
        self._places[self.nodes.number(name)] = self._where.number(host), self._where.number(zone)

    def node_lost(self, name: str) -> None:
        """It is not."""
        self._places.pop(self.nodes.number(name), None)

    def place(self, node: int) -> tuple[int, int]:
        """Numbers of its host and zone."""
        return self._places.get(node, (-1, -1))

    def board(self, model: str) -> Board | None:
        """The engines of this model; None where there are none."""
        if model not in self._boards:
            engines = [engine for engine in self.engines.values() if engine.about.model == model]
            if not engines:
                return None
            self._boards[model] = Board(engines, self.nodes, self._where)
        return self._boards[model]

    @property
    def models(self) -> list[str]:
        """That some engine has."""
        return sorted({engine.about.model for engine in self.engines.values()})

    def write(self, engine: FleetEngine) -> None:
        """It has changed: so does the board."""
        board = self._boards.get(engine.about.model)
        if board is not None:
            board.write(engine)

    # --- what it says of itself -------------------------------------------------------------------------------------

    def asking(self, name: str) -> None:
        """It is asked for a report now."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked = engine.waiting, len(engine.ends)

    def reported(self, name: str, report: LoadReport, now_s: float) -> None:
        """It has answered."""
        engine = self.engines.get(name)
        if engine is None or engine.asked is None:
            return
        waiting, running = engine.asked
        engine.others_waiting = max(0, report.waiting - max(waiting, engine.waiting))
        engine.others_running = max(0, report.running - max(running, len(engine.ends)))
        engine.role, engine.draining, engine.heard_s, engine.silent = report.role, report.draining, now_s, False
        engine.tokens_per_s = report.prefill_tokens_per_s or engine.tokens_per_s
        engine.step_s = report.step_s or engine.step_s
        engine.asked = None
        if engine.failures <= 1:
            engine.avoided_until_s = 0.0
        self.write(engine)

    def silent(self, name: str) -> None:
        """It was asked, and did not answer in time."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked, engine.silent = None, True
            self.write(engine)

    def failed(self, name: str, now_s: float) -> None:
        """It failed on a request. Those that had been sent before and fail with it are one failure."""
        engine = self.engines.get(name)
        if engine is None:
            return
        engine.asked = None
        if engine.avoided_until_s <= now_s:
            engine.failures += 1
            engine.avoided_until_s = now_s + min(AVOID_MAX_S, AVOID_S * 2 ** min(8, engine.failures - 1))
        self.write(engine)

    def set_role(self, name: str, role: Role) -> None:
        """It was told to do something else. Its next report says whether it did."""
        self.engines[name].role = role
        self.write(self.engines[name])

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, name: str, work: EngineWork) -> None:
        """A request is on its way there."""
        self.engines[name].add(work)
        self.write(self.engines[name])

    def leaves(self, name: str, size: int, now_s: float) -> None:
        """So much of KV is to leave it; that counts where it is a remote cluster."""
        engine = self.engines[name]
        if engine.about.egress_bytes_per_s:
            engine.egress_free_s = max(engine.egress_free_s, now_s) + size / engine.about.egress_bytes_per_s
            self.write(engine)

    def first_token(self, number: int, names: tuple[str, ...], now_s: float, ends_s: float) -> None:
        """A request's prompt is computed: an engine that only computed it has done its part."""
        for engine, work in self._at(number, names):
            if work.decodes:
                engine.computed(work, now_s, ends_s)
            else:
                engine.remove(work, now_s)
            engine.failures, engine.heard_s, engine.silent = 0, now_s, False
            self.write(engine)

    def ended(self, number: int, names: tuple[str, ...], now_s: float, *, answered: bool = False) -> None:
        """A request is over, whatever became of it; where it was ``answered``, that is a sign of life."""
        for engine, work in self._at(number, names):
            engine.remove(work, now_s)
            if answered:
                engine.heard_s, engine.silent = now_s, False
            self.write(engine)

    def _at(self, number: int, names: tuple[str, ...]) -> list[tuple[FleetEngine, EngineWork]]:
        found = [self.engines[name] for name in names if name in self.engines]
        return [(engine, engine.works[number]) for engine in found if number in engine.works]
