"""Roles: how many engines of a model compute prompts for others, and how many answer, as the mix of work asks for it.

Demand is counted in seconds of engines per second, of prompts and of answers: what was asked for in the last
``WINDOW_S``, also by those who were refused, and what waits, as if it were to be done in the next. With ``p`` of
``n`` engines on prompts, the busier side is busy to ``max(prompts / p, answers / (n - p))``; the best ``p`` makes that
small. One engine changes at a time, not sooner than ``CHANGE_S`` after the one before, and only where the busier side
becomes less busy by a ``GAIN``: so a mix between two splits does not make engines go to and fro. An engine that does
both is left alone, as is every foreign one. What is under way at an engine is finished as it began; the one with least
of it changes.
"""

from __future__ import annotations

import math
from typing import Final

from engine.conductor.state.fleet import FleetEngine
from engine.conductor.state.instructions import SetRole
from engine.model.request import Role

WINDOW_S: Final = 5.0
CHANGE_S: Final = 2.0
GAIN: Final = 1.2
BUSY: Final = 0.1  # where the busier side is busy to less, any split does


class Roles:
    """What was asked for lately of one model.

    Args:
        floor: engines that each role keeps.
    """

    def __init__(self, floor: int) -> None:
        self._floor = floor
        self._prompts_s = 0.0
        self._answers_s = 0.0
        self._at_s = 0.0
        self._changed_s = -math.inf

    def asked(self, prompt_s: float, answer_s: float, now_s: float) -> None:
        """A request came: what its prompt and its answer take of an engine."""
        self._fade(now_s)
        self._prompts_s += prompt_s / WINDOW_S
        self._answers_s += answer_s / WINDOW_S

    def _fade(self, now_s: float) -> None:
        left = math.exp(-max(0.0, now_s - self._at_s) / WINDOW_S)
        self._prompts_s *= left
        self._answers_s *= left
        self._at_s = now_s

    def change(self, engines: list[FleetEngine], prompts_s: float, answers_s: float, now_s: float) -> SetRole | None:
        """Which engine does something else from now on. ``prompts_s``, ``answers_s``: of those that wait."""
        self._fade(now_s)
        ours = [engine for engine in engines if not engine.about.egress_bytes_per_s and not engine.draining]
        prompts = [engine for engine in ours if engine.role is Role.PREFILL]
        answers = [engine for engine in ours if engine.role is Role.DECODE]
        both = len(prompts) + len(answers)
        if both < 2 * self._floor or now_s - self._changed_s < CHANGE_S:
            return None
        prompts_s += sum(max(0.0, engine.prompts_done_s - now_s) for engine in prompts)
        work = self._prompts_s + prompts_s / WINDOW_S, self._answers_s + answers_s / WINDOW_S
        best = min(range(self._floor, both - self._floor + 1), key=lambda count: _busy(*work, count, both))
        now, then = _busy(*work, len(prompts), both), _busy(*work, best, both)
        if now < BUSY or now < GAIN * then or best == len(prompts):
            return None
        self._changed_s = now_s
        if best > len(prompts):
            chosen = min(answers, key=lambda engine: (len(engine.ends), engine.about.name))
            return SetRole(chosen.about.name, Role.PREFILL)
        chosen = min(prompts, key=lambda engine: (engine.waiting, engine.about.name))
        return SetRole(chosen.about.name, Role.DECODE)


class FleetRoles:
    """Of all models.

    Args:
        floor: as of ``Roles``; None: nothing is counted, and no engine changes.
    """

    def __init__(self, floor: int | None) -> None:
        self._floor = floor
        self._models: dict[str, Roles] = {}  # that some engine has

    def asked(self, model: str, prompt_s: float, answer_s: float, now_s: float) -> None:
        """A request came: what its prompt and its answer take of an engine."""
        if model in self._models:
            self._models[model].asked(prompt_s, answer_s, now_s)

    def changes(
        self, engines: list[FleetEngine], waiting: list[tuple[str, float, float]], now_s: float
    ) -> list[SetRole]:
        """Which engines do something else from now on. ``waiting``: model, prompt and answer of those that wait."""
        if self._floor is None:
            return []
        names = sorted({engine.about.model for engine in engines})
        self._models = {model: self._models.get(model, Roles(self._floor)) for model in names}
        found = []
        for model, roles in self._models.items():
            theirs = [engine for engine in engines if engine.about.model == model]
            prompts_s = sum(prompt_s for name, prompt_s, _ in waiting if name == model)
            answers_s = sum(answer_s for name, _, answer_s in waiting if name == model)
            change = roles.change(theirs, prompts_s, answers_s, now_s)
            if change is not None:
                found.append(change)
        return found


def _busy(prompts_s: float, answers_s: float, prompts: int, both: int) -> float:
    """How busy the busier side is with so many engines on prompts."""
    sides = ((prompts_s, prompts), (answers_s, both - prompts))
    return max(asked / count if count else (math.inf if asked else 0.0) for asked, count in sides)
