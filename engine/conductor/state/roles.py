"""Roles: changes the roles of engines so that prompts and answers get the engines that they need.

Demand is measured in seconds of engines per second, for prompts and for answers. It consists of the requests of the
last ``WINDOW_S``, including refused ones, and of the waiting work, spread over the next ``WINDOW_S``. If ``p`` of ``n``
engines compute prompts, the busier side has a load of ``max(prompts / p, answers / (n - p))``. The best ``p`` minimizes
that load.

One engine changes at a time, at least ``CHANGE_S`` after the last change. It changes only if the load falls by the
factor ``GAIN``, so that engines do not switch back and forth between two equally good splits. The engine with the least
work under way changes, and finishes that work in its old role. Engines that do both never change; foreign engines are
of this kind. If a role has fewer engines than its floor, an engine changes to it regardless of demand.

Only the leading conductor gives orders, and all conductors believe the reports of engines. A new leader first waits
until no order of the previous leader can be under way, and until the reports that it has are from after that. Two
leaders therefore never take engines from one role at the same time. Orders carry the leader's revision: an engine that
has obeyed a later leader refuses a late order, whose conductor was suspended.

Worked example, with conductors A and B and an engine E that decodes::

    A wins with revision 7, waits, orders E to prefill (7, 1)      A sends E nothing; B still sends it answers
    E prefills, and refuses an answer that B sent                  B sends E nothing, and asks it for a report
    A and B ask for reports, E replies: prefill, (7, 1)            both send it prompts
    A stops, B wins with revision 9, orders E to decode (9, 1)     E refuses later orders of A
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
BUSY: Final = 0.1  # below this load of the busier side, nothing changes
ORDER_S: Final = 5.0  # the longest time that an order is under way
KNOWN_S: Final = 3.0  # an engine whose last report was requested longer ago does not count towards a floor


class Roles:
    """The recent demand for one model, and the changes of roles that follow from it.

    Args:
        floor: the number of engines that each role keeps.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._prompts_s = 0.0
        self._answers_s = 0.0
        self._faded_s = 0.0  # when the demand was last updated
        self._changed_s = -math.inf

    def add_request(self, prompt_s: float, answer_s: float, now_s: float) -> None:
        """Add a request to the demand. ``prompt_s`` and ``answer_s``: seconds of an engine."""
        self._fade(now_s)
        self._prompts_s += prompt_s / WINDOW_S
        self._answers_s += answer_s / WINDOW_S

    def _fade(self, now_s: float) -> None:
        decay = math.exp(-max(0.0, now_s - self._faded_s) / WINDOW_S)
        self._prompts_s *= decay
        self._answers_s *= decay
        self._faded_s = now_s

    def change(
        self, engines: list[FleetEngine], prompts_s: float, answers_s: float, now_s: float
    ) -> tuple[str, Role] | None:
        """Return the name of the engine that changes now, and its new role; None if no engine changes.

        Args:
            engines: all engines of the model.
            prompts_s, answers_s: seconds of engines that the waiting requests need.
        """
        self._fade(now_s)
        usable = [engine for engine in engines if not engine.draining and not engine.unsure]
        ours = [engine for engine in usable if not engine.about.egress_bytes_per_s]
        prompts = [engine for engine in ours if engine.role is Role.PREFILL]
        answers = [engine for engine in ours if engine.role is Role.DECODE]
        may_answer = self._spare(prompts, now_s)
        may_prefill = self._spare(answers, now_s)
        if len(prompts) + len(answers) < 2 * self._floor or now_s - self._changed_s < CHANGE_S:
            return None
        prompts_s += sum(max(0.0, engine.first_done_s - now_s) + engine.queued_s for engine in prompts)
        work = self._prompts_s + prompts_s / WINDOW_S, self._answers_s + answers_s / WINDOW_S
        target = self._prefill_target(work, prompts, answers, now_s)
        if target > len(prompts) and may_prefill:
            chosen = min(may_prefill, key=lambda engine: (len(engine.ends), engine.about.name))
            role = Role.PREFILL
        elif target < len(prompts) and may_answer:
            chosen = min(may_answer, key=lambda engine: (engine.waiting, engine.about.name))
            role = Role.DECODE
        else:
            return None
        self._changed_s = now_s
        return chosen.about.name, role

    def _prefill_target(
        self, work: tuple[float, float], prompts: list[FleetEngine], answers: list[FleetEngine], now_s: float
    ) -> int:
        """Return how many engines should compute prompts."""
        if len(_recently_reported(prompts, now_s)) < self._floor:
            return len(prompts) + 1
        if len(_recently_reported(answers, now_s)) < self._floor:
            return len(prompts) - 1
        total = len(prompts) + len(answers)
        best = min(range(self._floor, total - self._floor + 1), key=lambda count: _load(*work, count, total))
        load, best_load = _load(*work, len(prompts), total), _load(*work, best, total)
        return len(prompts) if load < BUSY or load < GAIN * best_load else best

    def _spare(self, engines: list[FleetEngine], now_s: float) -> list[FleetEngine]:
        """Return the engines of a role that may leave it; empty if the role would fall below its floor."""
        recent = _recently_reported(engines, now_s)
        return recent if len(recent) > self._floor else []


class FleetRoles:
    """The demand for all models, and the orders to change roles.

    Args:
        floor: see ``Roles``; None if no demand is recorded, and no engine changes.

    Attributes:
        revision: the revision of our election; None if another conductor leads.
    """

    def __init__(self, floor: int | None) -> None:
        self.revision: int | None = None
        self._floor = floor
        self._models: dict[str, Roles] = {}  # models that at least one engine has
        self._number = 0  # the number of our last order with this revision
        self._orders_from_s = 0.0

    def lead(self, revision: int | None, now_s: float) -> None:
        """Record that this conductor leads since the election ``revision``, or that another leads if that is None."""
        self.revision, self._number, self._orders_from_s = revision, 0, now_s + ORDER_S + KNOWN_S

    def see_order(self, order: RoleOrder) -> None:
        """Record that an engine has carried out this order.

        If this order is later than all of ours while we lead, revisions have started again: the catalog was lost, or
        there is none. Our revision then rises above that of the order, because no engine would obey us otherwise.
        """
        if self.revision is not None and order > (self.revision, self._number):
            self.revision, self._number = min(REVISION_MAX, order.revision + 1), 0

    def add_request(self, model: str, prompt_s: float, answer_s: float, now_s: float) -> None:
        """Add a request to the demand for its model; see ``Roles.add_request``."""
        if model in self._models:
            self._models[model].add_request(prompt_s, answer_s, now_s)

    def update_models(self, models: list[str]) -> None:
        """Record which models the engines have. The demand for other models is dropped."""
        if self._floor is not None:
            self._models = {model: self._models.get(model) or Roles(self._floor) for model in models}

    def may_order(self, now_s: float) -> bool:
        """Return True if this conductor may give orders."""
        return self._floor is not None and self.revision is not None and now_s >= self._orders_from_s

    def changes(
        self, engines: list[FleetEngine], waiting: list[tuple[str, float, float]], now_s: float
    ) -> list[SetRole]:
        """Return the orders to give now.

        Args:
            waiting: for each waiting request its model, and the seconds of an engine for its prompt and its answer.
        """
        assert self.may_order(now_s) and self.revision is not None
        orders = []
        for model, roles in self._models.items():
            engines_of_model = [engine for engine in engines if engine.about.model == model]
            prompts_s = sum(prompt_s for name, prompt_s, _ in waiting if name == model)
            answers_s = sum(answer_s for name, _, answer_s in waiting if name == model)
            change = roles.change(engines_of_model, prompts_s, answers_s, now_s)
            if change is not None:
                self._number += 1
                orders.append(SetRole(*change, RoleOrder(self.revision, self._number)))
        return orders


def _recently_reported(engines: list[FleetEngine], now_s: float) -> list[FleetEngine]:
    return [engine for engine in engines if now_s - engine.role_as_of_s < KNOWN_S]


def _load(prompts_s: float, answers_s: float, prompts: int, total: int) -> float:
    """Return the load of the busier side if ``prompts`` of ``total`` engines compute prompts."""
    sides = ((prompts_s, prompts), (answers_s, total - prompts))
    return max(demand / count if count else (math.inf if demand else 0.0) for demand, count in sides)
