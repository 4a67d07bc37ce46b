"""EngineFleet: all engines, what is known of each, and the boards that decisions look at."""

from __future__ import annotations

from typing import Final

from engine.conductor.state.board import Board
from engine.conductor.state.fleet import EngineAbout, EngineWork, FleetEngine, LoadReport
from engine.conductor.state.names import NumberedNames
from engine.model.request import Role

AVOID_S: Final = 5.0  # an engine that failed on a request gets nothing for so long, and twice as long each time again
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
        self._places: dict[int, tuple[int, int]] = {}  # of a node: its host and zone
        self._boards: dict[str, Board] = {}  # by model

    # --- who there is -----------------------------------------------------------------------------------------------

    def found(self, about: EngineAbout, role: Role, now_s: float) -> None:
        """An engine is there, or says something else of itself. Its requests stay, and its role until it reports."""
        known = self.engines.get(about.name)
        if known is None:
            self.engines[about.name] = FleetEngine(about, role, now_s, now_s)
        elif known.about == about:
            return
        else:
            known.about = about
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

    def asking(self, name: str, now_s: float) -> None:
        """It is asked for a report now."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.asked = engine.waiting, len(engine.ends), engine.tokens, now_s

    def reported(self, name: str, report: LoadReport, now_s: float) -> None:
        """It has answered."""
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
        if report.step_s:  # of the batch that it has
            engine.alone_s = report.step_s / (1 + max(1, report.running) * self._step_each)
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

    def role_ordered(self, name: str) -> None:
        """An order for another role is on its way there. Until the engine reports, its role is not known."""
        engine = self.engines[name]
        engine.ordered = engine.unsure = True
        self.write(engine)

    def role_answered(self, name: str) -> None:
        """An order is no longer under way, whatever became of it. The answer to the next question says what did."""
        engine = self.engines.get(name)
        if engine is not None and engine.ordered:
            engine.ordered, engine.asked = False, None

    def role_refused(self, name: str) -> None:
        """An engine refused a request for its role: it does other work than it had said. It has not failed."""
        engine = self.engines.get(name)
        if engine is not None:
            engine.unsure, engine.asked = True, None
            self.write(engine)

    def takes(self, name: str, answers: bool) -> bool:
        """True where an engine takes such work, as far as is known: answers, or else prompts for other engines."""
        engine = self.engines.get(name)
        other = Role.PREFILL if answers else Role.DECODE
        return engine is not None and not engine.unsure and not engine.draining and engine.role is not other

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
