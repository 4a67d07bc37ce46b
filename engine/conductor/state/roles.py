"""Roles: how many engines of a model compute prompts for others, and how many answer, to match the mix of work.

Demand is counted in seconds of engines per second, for prompts and for answers: what was asked for in the last
``WINDOW_S``, including refused requests, and what waits, as if it were to be done in the next. With ``p`` of ``n``
engines on prompts, the busier side has a load of ``max(prompts / p, answers / (n - p))``; the best ``p`` minimizes it.
One engine changes at a time, at least ``CHANGE_S`` after the one before, and only if the busier side's load falls by a
``GAIN``: so a mix between two splits does not make engines switch back and forth. An engine that does both is left
alone, as is every foreign one. Work under way at an engine finishes as it began; the engine with least of it changes.
If a role has fewer engines than its floor, one changes regardless of demand.

Several conductors agree because only the leader decides, and all of them believe what engines report. A new leader
waits until no order of the previous leader can be under way, and until its knowledge is from after that: so no two
leaders take engines from one role at a time. Its orders carry its revision, so that an engine that has heard of a later
leader refuses a late order (whose conductor was suspended).

Worked example, conductors A and B, an engine E that decodes::

    A wins with revision 7, waits, orders E to prefill (7, 1)    A gives E nothing; B still sends it answers
    E prefills; it refuses an answer that B had sent                     B gives E nothing, and asks it again
    A and B ask, E says prefill, (7, 1)                                  both give it prompts
    A dies, B wins with revision 9, orders E to decode (9, 1)            E refuses whatever A still sends
"""

from __future__ import annotations

import math
from typing import Final

from engine.conductor.state.engine_table import FleetEngine
from engine.conductor.state.instructions import SetRole
from engine.model.request import REVISION_MAX, Role, RoleOrder

WINDOW_S: Final = 5.0
CHANGE_S: Final = 2.0
GAIN: Final = 1.2
BUSY: Final = 0.1  # any split will do if the load of the busier side is below this
ORDER_S: Final = 5.0  # the longest that an order is under way
KNOWN_S: Final = 3.0  # an engine that was asked longer ago, and has not answered since, does not count towards a floor


class Roles:
    """Recent demand for one model.

    Args:
        floor: engines that each role keeps.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._prompts_s = 0.0
        self._answers_s = 0.0
        self._at_s = 0.0
        self._changed_s = -math.inf

    def add_request(self, prompt_s: float, answer_s: float, now_s: float) -> None:
        """Record what a request's prompt and answer take of an engine."""
        self._fade(now_s)
        self._prompts_s += prompt_s / WINDOW_S
        self._answers_s += answer_s / WINDOW_S

    def _fade(self, now_s: float) -> None:
        left = math.exp(-max(0.0, now_s - self._at_s) / WINDOW_S)
        self._prompts_s *= left
        self._answers_s *= left
        self._at_s = now_s

    def change(
        self, engines: list[FleetEngine], prompts_s: float, answers_s: float, now_s: float
    ) -> tuple[str, Role] | None:
        """Return which engines change to which role. ``prompts_s``, ``answers_s``: of requests that wait."""
        self._fade(now_s)
        usable = [engine for engine in engines if not engine.draining and not engine.unsure]
        ours = [engine for engine in usable if not engine.about.egress_bytes_per_s]
        prompts = [engine for engine in ours if engine.role is Role.PREFILL]
        answers = [engine for engine in ours if engine.role is Role.DECODE]
        may_answer = self._spare(prompts, now_s)
        may_prefill = self._spare(answers, now_s)
        both = len(prompts) + len(answers)
        if both < 2 * self._floor or now_s - self._changed_s < CHANGE_S:
            return None
        prompts_s += sum(max(0.0, engine.first_done_s - now_s) + engine.queued_s for engine in prompts)
        work = self._prompts_s + prompts_s / WINDOW_S, self._answers_s + answers_s / WINDOW_S
        wanted = self._prefill_engines(work, prompts, answers, now_s)
        if wanted > len(prompts) and may_prefill:
            chosen = min(may_prefill, key=lambda engine: (len(engine.ends), engine.about.name))
            role = Role.PREFILL
        elif wanted < len(prompts) and may_answer:
            chosen = min(may_answer, key=lambda engine: (engine.waiting, engine.about.name))
            role = Role.DECODE
        else:
            return None
        self._changed_s = now_s
        return chosen.about.name, role

    def _prefill_engines(
        self, work: tuple[float, float], prompts: list[FleetEngine], answers: list[FleetEngine], now_s: float
    ) -> int:
        """How many engines are to compute prompts."""
        if len(_known(prompts, now_s)) < self._floor:
            return len(prompts) + 1
        if len(_known(answers, now_s)) < self._floor:
            return len(prompts) - 1
        both = len(prompts) + len(answers)
        best = min(range(self._floor, both - self._floor + 1), key=lambda count: _busy(*work, count, both))
        now, then = _busy(*work, len(prompts), both), _busy(*work, best, both)
        return len(prompts) if now < BUSY or now < GAIN * then else best

    def _spare(self, engines: list[FleetEngine], now_s: float) -> list[FleetEngine]:
        """The engines of a role that may change without violating the floor."""
        known = _known(engines, now_s)
        return known if len(known) > self._floor else []


class FleetRoles:
    """Roles of all models, and the orders that follow.

    Args:
        floor: as of ``Roles``; None: nothing is counted, and no engine changes.

    Attributes:
        revision: of our election; None: another conductor leads.
    """

    def __init__(self, floor: int | None) -> None:
        self.revision: int | None = None
        self._floor = floor
        self._models: dict[str, Roles] = {}  # for models that at least one engine has
        self._number = 0  # the number of our last order with this revision
        self._orders_from_s = 0.0

    def lead(self, revision: int | None, now_s: float) -> None:
        """Record who leads: we do, by an election of this revision; None: another conductor."""
        self.revision, self._number, self._orders_from_s = revision, 0, now_s + ORDER_S + KNOWN_S

    def see_order(self, order: RoleOrder) -> None:
        """Record that an engine has carried out this order.

        If it is not ours, and later than ours while we lead, revisions have restarted (the catalog was lost, or there
        is none): ours rises above it, otherwise no engine would ever obey again.
        """
        if self.revision is not None and order > (self.revision, self._number):
            self.revision, self._number = min(REVISION_MAX, order.revision + 1), 0

    def add_request(self, model: str, prompt_s: float, answer_s: float, now_s: float) -> None:
        """Record what a request's prompt and answer take of an engine."""
        if model in self._models:
            self._models[model].add_request(prompt_s, answer_s, now_s)

    def keep(self, models: list[str]) -> None:
        """Keep counts for these models, which engines have, and drop the others."""
        if self._floor is not None:
            self._models = {model: self._models.get(model) or Roles(self._floor) for model in models}

    def may_order(self, now_s: float) -> bool:
        """True while we may give orders."""
        return self._floor is not None and self.revision is not None and now_s >= self._orders_from_s

    def changes(
        self, engines: list[FleetEngine], waiting: list[tuple[str, float, float]], now_s: float
    ) -> list[SetRole]:
        """Return which engines change roles now. ``waiting``: model, prompt and answer of requests that wait."""
        assert self.may_order(now_s) and self.revision is not None
        found = []
        for model, roles in self._models.items():
            theirs = [engine for engine in engines if engine.about.model == model]
            prompts_s = sum(prompt_s for name, prompt_s, _ in waiting if name == model)
            answers_s = sum(answer_s for name, _, answer_s in waiting if name == model)
            change = roles.change(theirs, prompts_s, answers_s, now_s)
            if change is not None:
                self._number += 1
                found.append(SetRole(*change, RoleOrder(self.revision, self._number)))
        return found


def _known(engines: list[FleetEngine], now_s: float) -> list[FleetEngine]:
    """Engines that have reported their role recently."""
    return [engine for engine in engines if now_s - engine.role_as_of_s < KNOWN_S]


def _busy(prompts_s: float, answers_s: float, prompts: int, both: int) -> float:
    """The load of the busier side with this many engines on prompts."""
    sides = ((prompts_s, prompts), (answers_s, both - prompts))
    return max(asked / count if count else (math.inf if asked else 0.0) for asked, count in sides)
