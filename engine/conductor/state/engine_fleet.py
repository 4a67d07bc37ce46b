"""EngineFleet: all engines, what is known of each, and the boards that decisions read."""

from __future__ import annotations

from typing import Final

from engine.conductor.state.board import Board
from engine.conductor.state.fleet import EngineAbout, EngineWork, FleetEngine, LoadReport
from engine.conductor.state.names import NumberedNames
from engine.model.request import Role

AVOID_S: Final = 5.0  # how long an engine that failed on a request gets nothing; doubled with each further failure
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
        self._boards: dict[str, Board] = {}  # by model

    # --- members -----------------------------------------------------------------------------------------------------

    def found(self, about: EngineAbout, role: Role, now_s: float) -> None:
        """Record that an engine is there, or has changed. Its requests stay, and so does its role until it reports."""
        known = self.engines.get(about.name)
        if known is None:
            self.engines[about.name] = FleetEngine(about, role, now_s, now_s)
        elif known.about == about:
            return
        else:
            known.about = about
        self._boards.clear()

    def lost(self, name: str) -> list[int]:
        """Remove an engine. Returns the requests that it was involved in."""
        engine = self.engines.pop(name, None)
        self._boards.clear()
        return list(engine.works) if engine is not None else []

    def node_found(self, name: str, host: str, zone: str) -> None:
        """Record where a node is."""
        self._places[self.nodes.number(name)] = self._where.number(host), self._where.number(zone)

    def node_lost(self, name: str) -> None:
        """Forget where a node was."""
        self._places.pop(self.nodes.number(name), None)

    def place(self, node: int) -> tuple[int, int]:
        """Numbers of the node's host and zone."""
        return self._places.get(node, (-1, -1))

    def board(self, model: str) -> Board | None:
        """The engines of this model; None if there are none."""
        if model not in self._boards:
            engines = [engine for engine in self.engines.values() if engine.about.model == model]
            if not engines:
                return None
            self._boards[model] = Board(engines, self.nodes, self._where)
        return self._boards[model]

    @property
    def models(self) -> list[str]:
        """Models that at least one engine serves."""
        return sorted({engine.about.model for engine in self.engines.values()})

    def write(self, engine: FleetEngine) -> None:
        """Copy an engine that has changed to its board."""
        board = self._boards.get(engine.about.model)
        if board is not None:
            board.write(engine)

    # --- reports ------------------------------------------------------------------------------------------------

    def asking(self, name: str, now_s: float) -> None:
        """Record that the engine is being asked for a report now."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked = engine.waiting, len(engine.ends), engine.tokens, now_s

    def reported(self, name: str, report: LoadReport, now_s: float) -> None:
        """Apply the engine's report."""
        engine = self.engines.get(name)
        if engine is None or engine.asked is None:
            return
        waiting, running, tokens, engine.known_s = engine.asked
        engine.others_waiting = max(0, report.waiting - max(waiting, engine.waiting))
        engine.others_running = max(0, report.running - max(running, len(engine.ends)))
        engine.others_tokens = max(0, report.kv_tokens - max(tokens, engine.tokens))
        engine.role, engine.draining, engine.heard_s, engine.silent = report.role, report.draining, now_s, False
        engine.order, engine.unsure = report.order, engine.ordered
        engine.tokens_per_s = report.prefill_tokens_per_s or engine.tokens_per_s
        if report.step_s:  # measured with its current batch
            engine.alone_s = report.step_s / (1 + max(1, report.running) * self._step_each)
        engine.asked = None
        if engine.failures <= 1:
            engine.avoided_until_s = 0.0
        self.write(engine)

    def silent(self, name: str) -> None:
        """Record that the engine did not answer in time."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked, engine.silent = None, True
            self.write(engine)

    def failed(self, name: str, now_s: float) -> None:
        """Record that the engine failed on a request. Requests sent before that fail with it count as one failure."""
        engine = self.engines.get(name)
        if engine is None:
            return
        engine.asked = None
        if engine.avoided_until_s <= now_s:
            engine.failures += 1
            engine.avoided_until_s = now_s + min(AVOID_MAX_S, AVOID_S * 2 ** min(8, engine.failures - 1))
        self.write(engine)

    def role_ordered(self, name: str) -> None:
        """Record that an order to change its role is under way. Its role is unknown until the engine reports."""
        engine = self.engines[name]
        engine.ordered = engine.unsure = True
        self.write(engine)

    def role_answered(self, name: str) -> None:
        """Record that an order is no longer under way. The engine's next report tells its result."""
        engine = self.engines.get(name)
        if engine is not None and engine.ordered:
            engine.ordered, engine.asked = False, None

    def role_refused(self, name: str) -> None:
        """Record that an engine refused a request because its role differs from its report. It has not failed."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.unsure, engine.asked = True, None
            self.write(engine)

    def takes(self, name: str, answers: bool) -> bool:
        """True if an engine takes this work, as far as is known: answers, or prompts for other engines."""
        engine = self.engines.get(name)
        other = Role.PREFILL if answers else Role.DECODE
        return engine is not None and not engine.unsure and not engine.draining and engine.role is not other

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, name: str, work: EngineWork) -> None:
        """Record that a request is on its way there."""
        self.engines[name].add(work)
        self.write(self.engines[name])

    def leaves(self, name: str, size: int, now_s: float) -> None:
        """Record that this much KV will leave the engine, which counts for a remote cluster."""
        engine = self.engines[name]
        if engine.about.egress_bytes_per_s:
            engine.egress_free_s = max(engine.egress_free_s, now_s) + size / engine.about.egress_bytes_per_s
            self.write(engine)

    def first_token(self, number: int, names: tuple[str, ...], now_s: float, ends_s: float) -> None:
        """Record that a prompt is computed: an engine that only computed it has done its part."""
        for engine, work in self._at(number, names):
            if work.decodes:
                engine.computed(work, now_s, ends_s)
            else:
                engine.remove(work, now_s)
            engine.failures, engine.heard_s, engine.silent = 0, now_s, False
            self.write(engine)

    def ended(self, number: int, names: tuple[str, ...], now_s: float, *, answered: bool = False) -> None:
        """Record the end of a request, whatever its result; if it was ``answered``, the engine is alive."""
        for engine, work in self._at(number, names):
            engine.remove(work, now_s)
            if answered:
                engine.heard_s, engine.silent = now_s, False
            self.write(engine)

    def _at(self, number: int, names: tuple[str, ...]) -> list[tuple[FleetEngine, EngineWork]]:
        found = [self.engines[name] for name in names if name in self.engines]
        return [(engine, engine.works[number]) for engine in found if number in engine.works]
