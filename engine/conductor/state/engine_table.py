"""The engines that requests can go to, and how busy each is: a fleet of engines, and one table for each model.

How busy an engine is comes from two sources. The conductor knows all of its own requests: it sends them, and sees
every token come back. Requests that other conductors and clients send to the same engine are seen only in the engine's
reports. A report counts the requests at some moment after the conductor asked for it. The conductor remembers how many
of its own requests the engine had when it asked, and attributes the rest to other callers. A late report therefore
cannot hide later decisions, and nothing is counted twice.

Reports and tokens are signs of life. An engine that did not answer a question is silent, and gets requests only when
the others are much busier. An engine that failed on a request gets none for ``AVOID_S``. After a first failure its next
report ends that time, because the network may have been at fault.

An engine's role comes from its reports alone, in their order. An ordered role is believed once a report confirms it.
While an order is under way, or after the engine refused a request because of its role, its role is ``unsure``: the
engine gets nothing until it answers a later question.

A request's life here: sent -> its first token has come (it decodes) -> ended.

A ``FleetEngine`` stores the conductor's knowledge of one engine. ``EngineFleet`` copies it to the columns of an
``EngineTable`` whenever it changes, so that one array operation of a decision covers all engines of a model.

Measured speeds are noisy. Among equal engines, one would always look a little faster and attract all requests while the
fleet is idle. ``Paces`` therefore treats an engine within ``NOISE`` of the median as equal to it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.model.request import NO_ORDER, Role, RoleOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAbout:
    """An engine's description of itself in the catalog; it stays the same for the engine's life.

    Attributes:
        name: unique in the pool; the conductor's name for it.
        address: address of its gRPC API.
        node: the node whose pool it reads and writes; empty if there is none.
        host, zone: its place; empty if unknown.
        layout: fingerprint of the layout of its pages. Engines with the same one can hand over to each other.
        page_tokens: tokens of one page.
        kv_bytes: bytes of KV per token.
        batch_max: sequences that it decodes together.
        chunk_tokens: prompt tokens that it computes in one step; 0 if unknown.
        tokens_max: tokens of one sequence that fit in its memory; 0 if unknown.
        kv_tokens_max: tokens of all its sequences together; 0 if unknown.
        context_max: the longest sequence, in tokens; 0 if unknown.
        lanes: prompts that it computes at the same time, each as fast as a single one.
        egress_bytes_per_s: 0 for an engine. A remote cluster appears as one engine that computes prompts: this is then
            the limit of its outgoing KV, and ``address`` is that of its conductor.
        foreign: True for an engine of another system. It computes the prompts that it answers and has no pool of ours;
            ``node`` names its own cache.
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
    chunk_tokens: int = 0
    tokens_max: int = 0
    kv_tokens_max: int = 0
    context_max: int = 0
    lanes: int = 1
    egress_bytes_per_s: float = 0.0
    foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """An engine's answer to the question how busy it is.

    Attributes:
        order: the last order of a leader that it carried out.
        waiting: requests whose prompt is not computed yet.
        running: requests that decode.
        kv_tokens: tokens in its memory.
        prefill_tokens_per_s: its measured speed for prompts; 0 if not measured yet.
        step_s: its measured time of a decode step; 0 if not measured yet.
    """

    role: Role
    order: RoleOrder = NO_ORDER
    draining: bool = False
    waiting: int = 0
    running: int = 0
    kv_tokens: int = 0
    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0


@dataclass(slots=True)
class EngineWork:
    """One request at one engine, for as long as the engine is involved in it.

    Attributes:
        prefill_s: predicted time for its prompt there; 0 if the prompt is computed elsewhere.
        tokens: tokens that the request will have in the engine's memory at its end.
        sent_s: when it was sent.
        decodes: True if this engine answers.
        ends_s: the predicted end of the answer.
        computed: True once its prompt is computed.
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
    """The conductor's knowledge of one engine. Only ``EngineFleet`` changes it.

    Attributes:
        role: the role that it last reported.
        order: the last order of a leader that it had carried out by then.
        role_change_pending: True while an order to change its role is under way.
        unsure: True while its role is in doubt; see the module's docstring.
        works: our requests that it is involved in.
        waiting: how many of ``works`` wait for it to compute their prompt.
        ends: predicted ends of the requests that it answers or will answer, sorted.
        tokens: tokens in its memory of the requests in ``ends``, when they are complete.
        others_waiting, others_running: requests of other callers.
        others_tokens: tokens in its memory of other callers' requests.
        first_done_s: when the first of our prompts there will be computed, by prediction.
        queued_s: predicted seconds for the rest of our prompts. For an engine with several lanes, this and
            ``first_done_s`` are those of a single lane that is faster by that factor.
        scale: how much longer prompts take there than predicted, as measured.
        tokens_per_s: its reported speed for prompts; 0 if unknown.
        alone_s: seconds of a decode step without sequences, from its reports; 0 if unknown.
        last_seen_s: the time of its last sign of life.
        role_as_of_s: when the conductor asked for the report with this ``role``.
        silent: True after it did not answer a question, until its next sign of life.
        failures: consecutive requests on which it failed.
        avoided_until_s: the engine gets nothing before this moment.
        egress_free_s: when a remote cluster will have sent all the data in its queue.
        report_baseline: our requests there when the conductor asked for the next report: (waiting, running, their
            tokens, the time in seconds); None if no report is due.
    """

    about: EngineAbout
    role: Role
    last_seen_s: float
    role_as_of_s: float
    order: RoleOrder = NO_ORDER
    role_change_pending: bool = False
    unsure: bool = False
    draining: bool = False
    works: dict[int, EngineWork] = field(default_factory=dict)
    waiting: int = 0
    ends: list[float] = field(default_factory=list)
    tokens: int = 0
    others_waiting: int = 0
    others_running: int = 0
    others_tokens: int = 0
    first_done_s: float = 0.0
    queued_s: float = 0.0
    scale: float = 1.0
    tokens_per_s: float = 0.0
    alone_s: float = 0.0
    silent: bool = False
    failures: int = 0
    avoided_until_s: float = 0.0
    egress_free_s: float = 0.0
    report_baseline: tuple[int, int, int, float] | None = None

    @property
    def place_free_s(self) -> float:
        """The predicted time of the next free place in its batch; 0 if there is one now."""
        beyond = len(self.ends) + self.others_running - self.about.batch_max
        return self.ends[min(beyond, len(self.ends) - 1)] if beyond >= 0 and self.ends else 0.0

    def memory_free_s(self, tokens: float) -> float:
        """Return when requests of ours will have ended and freed this many tokens; infinite if they hold fewer."""
        for ends_s, freed in sorted((work.ends_s, work.tokens) for work in self.works.values() if work.decodes):
            tokens -= freed
            if tokens <= 0:
                return ends_s
        return math.inf

    def add(self, work: EngineWork) -> None:
        """Record one more request."""
        self.works[work.number] = work
        if work.prefill_s:
            if self.waiting:
                self.queued_s += work.prefill_s / self.about.lanes
            else:
                self.first_done_s = work.sent_s + work.prefill_s / self.about.lanes
            self.waiting += 1
        if work.decodes:
            insort(self.ends, work.ends_s)
            self.tokens += work.tokens

    def mark_computed(self, work: EngineWork, now_s: float, ends_s: float) -> None:
        """Record that its prompt is computed. The next prompt starts now: errors of prediction do not add up."""
        work.computed = True
        if work.prefill_s:
            self.waiting -= 1
            waits_s = [other.prefill_s for other in self.works.values() if other.prefill_s and not other.computed]
            self.first_done_s = now_s + waits_s[0] / self.about.lanes if waits_s else now_s
            self.queued_s = sum(waits_s[1:]) / self.about.lanes
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            work.ends_s = ends_s
            insort(self.ends, ends_s)

    def remove(self, work: EngineWork, now_s: float) -> None:
        """Remove a request that has ended at this engine."""
        if not work.computed:
            self.mark_computed(work, now_s, work.ends_s)
        del self.works[work.number]
        if work.decodes:
            del self.ends[bisect_left(self.ends, work.ends_s)]
            self.tokens -= work.tokens


class NumberedNames:
    """Numbers for names, in the order of their first use; -1 for the empty name.

    Attributes:
        names: by number.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._numbers = {"": -1}

    def __len__(self) -> int:
        return len(self.names)

    def number(self, name: str) -> int:
        """Return the number of a name. The first call assigns it."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Places = npt.NDArray[np.int64]
"""Indices of engines in a table, or in a selection from it."""
Distances = npt.NDArray[np.int64]
"""0: on the same host; 1: in the same zone; 2: further away."""


NOISE: Final = 0.25  # as a fraction of the measurement


class Paces(NamedTuple):
    """How fast engines are, with noise removed, in columns. See ``FleetEngine``."""

    tokens_per_s: Floats
    scale: Floats
    alone_s: Floats

    @classmethod
    def of(cls, columns: Columns) -> Paces:
        """Make paces from the measurements in these columns."""
        return cls(*(_without_noise(each) for each in (columns.tokens_per_s, columns.scale, columns.alone_s)))


class Columns:
    """Columns with one entry for each engine. Counts and flags are floats here as well.

    Attributes:
        first_done_s, queued_s, others_waiting, others_running, others_tokens, place_free_s, tokens, scale,
        tokens_per_s, alone_s, egress_free_s: see ``FleetEngine``.
        running: our requests that it answers or will answer.
        silent: see ``FleetEngine``.
        open_s: the time after which it may get requests; infinite while it drains or its role is unsure.
        prefills: 1 if it computes prompts for other engines.
        answers: 1 if it answers.
        node, layout, host, zone: numbers; -1 if there is none or it is unknown.
        page_tokens, kv_bytes, batch_max, chunk_tokens, tokens_max, kv_tokens_max, context_max, lanes, egress, foreign:
            see ``EngineAbout``; a limit that is 0 there (not known) is infinite here.
        page_bytes: bytes of a page.
    """

    CHANGING = 16  # the first 16 columns change; the others come from EngineAbout

    def __init__(self, values: Floats) -> None:
        self.values = values
        (
            self.first_done_s,
            self.queued_s,
            self.others_waiting,
            self.others_running,
            self.others_tokens,
            self.place_free_s,
            self.running,
            self.tokens,
            self.scale,
            self.tokens_per_s,
            self.alone_s,
            self.open_s,
            self.silent,
            self.prefills,
            self.answers,
            self.egress_free_s,
            self.node,
            self.layout,
            self.host,
            self.zone,
            self.page_tokens,
            self.kv_bytes,
            self.batch_max,
            self.chunk_tokens,
            self.tokens_max,
            self.kv_tokens_max,
            self.context_max,
            self.lanes,
            self.egress,
            self.page_bytes,
            self.foreign,
        ) = values


class EngineTable:
    """The engines of one model.

    Attributes:
        engines: in the order of their names.
        layouts: their layouts, sorted.
        mixed: False if any two of them can hand over to each other.
    """

    def __init__(self, engines: list[FleetEngine], nodes: NumberedNames, where: NumberedNames) -> None:
        self.engines = sorted(engines, key=lambda engine: engine.about.name)
        self.layouts = sorted({engine.about.layout for engine in engines})
        self.mixed = len(self.layouts) > 1 or any(engine.about.foreign for engine in engines)
        self._places = {engine.about.name: place for place, engine in enumerate(self.engines)}
        abouts = [engine.about for engine in self.engines]
        fixed = [
            (
                nodes.number(about.node),
                self.layouts.index(about.layout),
                where.number(about.host),
                where.number(about.zone),
                about.page_tokens,
                about.kv_bytes,
                about.batch_max,
                about.chunk_tokens or math.inf,
                about.tokens_max or math.inf,
                about.kv_tokens_max or math.inf,
                about.context_max or math.inf,
                about.lanes,
                about.egress_bytes_per_s,
                about.page_tokens * about.kv_bytes,
                about.foreign,
            )
            for about in abouts
        ]
        changing = [self._row(engine) for engine in self.engines]
        self._all = np.arange(len(self.engines))
        self.columns = Columns(np.concatenate([np.array(changing).T, np.array(fixed, np.float64).T]))
        self._fits = np.minimum(self.columns.tokens_max, self.columns.context_max)
        self._fits_max = float(self._fits.max())
        places = [(where.number(about.host), where.number(about.zone)) for about in abouts]
        self._apart: dict[tuple[int, int], Distances] = {}  # from the host and zone of engines and of nodes
        self._between = np.array([self.apart(*place) for place in places])
        self._paces: Paces | None = None  # computed by the first call of ``paces`` after a change

    def write(self, engine: FleetEngine) -> None:
        """Copy the current state of an engine into the columns."""
        columns, place = self.columns, self._places[engine.about.name]
        pace = columns.tokens_per_s[place], columns.scale[place], columns.alone_s[place]
        if pace != (engine.tokens_per_s, engine.scale, engine.alone_s):
            self._paces = None
        columns.values[: Columns.CHANGING, place] = self._row(engine)

    @staticmethod
    def _row(engine: FleetEngine) -> tuple[float, ...]:
        return (
            engine.first_done_s,
            engine.queued_s,
            engine.others_waiting,
            engine.others_running,
            engine.others_tokens,
            engine.place_free_s,
            len(engine.ends),
            engine.tokens,
            engine.scale,
            engine.tokens_per_s,
            engine.alone_s,
            math.inf if engine.draining or engine.unsure else engine.avoided_until_s,
            engine.silent,
            engine.role is not Role.DECODE,
            engine.role is not Role.PREFILL,
            engine.egress_free_s,
        )

    def holds(self, tokens: int) -> bool:
        """Return True if any engine has room for a sequence of this many tokens."""
        return tokens <= self._fits_max

    def usable(self, tokens: int, barred: tuple[str, ...], without: tuple[str, ...], now_s: float) -> Places:
        """Return the engines that a request of this many tokens can go to now.

        Engines in ``barred`` are excluded. Engines in ``without`` are used only if no other engine can answer.
        """
        columns = self.columns
        is_usable = (tokens <= self._fits) & (columns.open_s <= now_s)
        if barred:
            is_usable[[self._places[name] for name in barred if name in self._places]] = False
        is_preferred = is_usable.copy()
        if without:
            is_preferred[[self._places[name] for name in without if name in self._places]] = False
        if is_preferred.all():
            return self._all
        choices = (choice for choice in (is_preferred, is_usable) if (columns.answers[choice] > 0).any())
        places: Places = next(choices, is_usable).nonzero()[0]
        return places

    def take(self, at: Places) -> tuple[list[FleetEngine], Columns, Distances]:
        """Select these engines: their columns, and their distances from each other."""
        if at is self._all:
            return self.engines, self.columns, self._between
        engines = [self.engines[place] for place in at.tolist()]
        return engines, Columns(self.columns.values[:, at]), self._between[:, at][at]

    def paces(self, at: Places) -> Paces:
        """Return how fast these engines are, with noise removed."""
        if self._paces is None:
            self._paces = Paces.of(self.columns)
        return self._paces if at is self._all else Paces(*(each[at] for each in self._paces))

    def apart(self, host: int, zone: int) -> Distances:
        """Return the distance of every engine from this place."""
        if (host, zone) not in self._apart:
            near = np.where((self.columns.zone == zone) & (zone >= 0), 1, 2)
            self._apart[host, zone] = np.where((self.columns.host == host) & (host >= 0), 0, near)
        return self._apart[host, zone]


def ending_by(engines: list[FleetEngine], moments_s: Iterable[float], now_s: float) -> Floats:
    """Return how many requests of each engine will end between now and the engine's moment in ``moments_s``.

    Requests whose predicted end has passed do not count: they are late, and more load would make them later.
    """
    ends = [engine.ends for engine in engines]
    until = np.fromiter(map(bisect_right, ends, moments_s), np.float64, len(engines))
    return until - np.fromiter(map(bisect_right, ends, repeat(now_s)), np.float64, len(engines))


def _without_noise(values: Floats) -> Floats:
    """Replace the values near the median with the median. A value of 0 is unknown and stays."""
    known = np.sort(values[values > 0])
    if not len(known):
        return values.copy()
    middle = known[len(known) // 2]
    return np.where(np.abs(values - middle) <= NOISE * middle, middle, values)


AVOID_S: Final = 5.0  # an engine that failed gets nothing for this time, doubled with each further failure
AVOID_MAX_S: Final = 60.0


class EngineFleet:
    """All engines.

    Args:
        step_each: see ``Priors``.

    Attributes:
        engines: by name.
        nodes: numbers of nodes.
    """

    def __init__(self, nodes: NumberedNames, step_each: float) -> None:
        self.engines: dict[str, FleetEngine] = {}
        self.nodes = nodes
        self._step_each = step_each
        self._where = NumberedNames()  # hosts and zones
        self._places: dict[int, tuple[int, int]] = {}  # by node: its host and zone
        self._tables: dict[str, EngineTable] = {}  # by model

    # --- members -----------------------------------------------------------------------------------------------------

    def add_engine(self, about: EngineAbout, role: Role, now_s: float) -> None:
        """Record a new engine, or a new description of a known one. The latter keeps its requests and its role."""
        known = self.engines.get(about.name)
        if known is None:
            self.engines[about.name] = FleetEngine(about, role, now_s, now_s)
        elif known.about == about:
            return
        else:
            known.about = about
        self._tables.clear()

    def remove_engine(self, name: str) -> list[int]:
        """Remove an engine. Returns the requests that it was involved in."""
        engine = self.engines.pop(name, None)
        self._tables.clear()
        return list(engine.works) if engine is not None else []

    def add_node(self, name: str, host: str, zone: str) -> None:
        """Record where a node is."""
        self._places[self.nodes.number(name)] = self._where.number(host), self._where.number(zone)

    def remove_node(self, name: str) -> None:
        """Forget where a node was."""
        self._places.pop(self.nodes.number(name), None)

    def place(self, node: int) -> tuple[int, int]:
        """Return the numbers of the node's host and zone; -1 for one that is unknown."""
        return self._places.get(node, (-1, -1))

    def table(self, model: str) -> EngineTable | None:
        """Return the table of the engines that serve this model; None if there are none."""
        if model not in self._tables:
            engines = [engine for engine in self.engines.values() if engine.about.model == model]
            if not engines:
                return None
            self._tables[model] = EngineTable(engines, self.nodes, self._where)
        return self._tables[model]

    @property
    def models(self) -> list[str]:
        """Models that at least one engine serves."""
        return sorted({engine.about.model for engine in self.engines.values()})

    def write(self, engine: FleetEngine) -> None:
        """Copy an engine that has changed to its table."""
        table = self._tables.get(engine.about.model)
        if table is not None:
            table.write(engine)

    # --- reports ------------------------------------------------------------------------------------------------

    def start_report(self, name: str, now_s: float) -> None:
        """Record that the conductor is asking the engine for a report now."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.report_baseline = engine.waiting, len(engine.ends), engine.tokens, now_s

    def apply_report(self, name: str, report: LoadReport, now_s: float) -> None:
        """Apply the engine's report."""
        engine = self.engines.get(name)
        if engine is None or engine.report_baseline is None:
            return
        waiting, running, tokens, engine.role_as_of_s = engine.report_baseline
        engine.others_waiting = max(0, report.waiting - max(waiting, engine.waiting))
        engine.others_running = max(0, report.running - max(running, len(engine.ends)))
        engine.others_tokens = max(0, report.kv_tokens - max(tokens, engine.tokens))
        engine.role, engine.draining, engine.last_seen_s, engine.silent = report.role, report.draining, now_s, False
        engine.order, engine.unsure = report.order, engine.role_change_pending
        engine.tokens_per_s = report.prefill_tokens_per_s or engine.tokens_per_s
        if report.step_s:  # measured with its current batch
            engine.alone_s = report.step_s / (1 + max(1, report.running) * self._step_each)
        engine.report_baseline = None
        if engine.failures <= 1:
            engine.avoided_until_s = 0.0
        self.write(engine)

    def mark_silent(self, name: str) -> None:
        """Record that the engine did not answer a question in time."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.report_baseline, engine.silent = None, True
            self.write(engine)

    def mark_failed(self, name: str, now_s: float) -> None:
        """Record that the engine failed on a request. Failures while the engine is avoided are not counted again."""
        engine = self.engines.get(name)
        if engine is None:
            return
        engine.report_baseline = None
        if engine.avoided_until_s <= now_s:
            engine.failures += 1
            engine.avoided_until_s = now_s + min(AVOID_MAX_S, AVOID_S * 2 ** min(8, engine.failures - 1))
        self.write(engine)

    def mark_role_ordered(self, name: str) -> None:
        """Record that an order to change its role is under way. Its role is unknown until the engine reports."""
        engine = self.engines[name]
        engine.role_change_pending = engine.unsure = True
        self.write(engine)

    def mark_role_answered(self, name: str) -> None:
        """Record that an order is no longer under way. The engine's next report shows its result."""
        engine = self.engines.get(name)
        if engine is not None and engine.role_change_pending:
            engine.role_change_pending, engine.report_baseline = False, None

    def mark_role_refused(self, name: str) -> None:
        """Record that an engine refused a request because of its role. This is not a failure."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.unsure, engine.report_baseline = True, None
            self.write(engine)

    def takes(self, name: str, answers: bool) -> bool:
        """Return True if the engine accepts requests to answer, or (``answers`` is False) prompts for other engines."""
        engine = self.engines.get(name)
        other = Role.PREFILL if answers else Role.DECODE
        return engine is not None and not engine.unsure and not engine.draining and engine.role is not other

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, name: str, work: EngineWork) -> None:
        """Record that a request is on its way to this engine."""
        self.engines[name].add(work)
        self.write(self.engines[name])

    def add_egress(self, name: str, size: int, now_s: float) -> None:
        """Record that ``size`` bytes of KV will leave the engine. Does nothing unless it is a remote cluster."""
        engine = self.engines[name]
        if engine.about.egress_bytes_per_s:
            engine.egress_free_s = max(engine.egress_free_s, now_s) + size / engine.about.egress_bytes_per_s
            self.write(engine)

    def mark_first_token(self, number: int, names: tuple[str, ...], now_s: float, ends_s: float) -> None:
        """Record that a prompt is computed. An engine that only computes it has then done its work."""
        for engine, work in self._at(number, names):
            if work.decodes:
                engine.mark_computed(work, now_s, ends_s)
            else:
                engine.remove(work, now_s)
            engine.failures, engine.last_seen_s, engine.silent = 0, now_s, False
            self.write(engine)

    def end_request(self, number: int, names: tuple[str, ...], now_s: float, *, answered: bool = False) -> None:
        """Record the end of a request. If it was ``answered``, the engine counts as alive."""
        for engine, work in self._at(number, names):
            engine.remove(work, now_s)
            if answered:
                engine.last_seen_s, engine.silent = now_s, False
            self.write(engine)

    def _at(self, number: int, names: tuple[str, ...]) -> list[tuple[FleetEngine, EngineWork]]:
        engines = [self.engines[name] for name in names if name in self.engines]
        return [(engine, engine.works[number]) for engine in engines if number in engine.works]
