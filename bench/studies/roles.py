"""Row about roles that follow the load: paced engines, real nodes and a real conductor (``bench.studies.fleet``).

Work is measured in engine seconds. At first 80 % of the work is answers, then 80 % is prompts. The row measures the
goodput of a conductor that changes roles, 30 s after the change, and compares it with the best fixed split of roles.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

import numpy as np

from bench.studies.fleet import FleetAnswer, FleetConductor, FleetRequest, PacedFleet, check, say
from engine.model.request import Role
from kvstore.bench.harness import Bar, Kind, Result, result
from kvstore.bench.stage import Stage

ENGINES, ENGINES_QUICK = 6, 2
PER_S: Final = 1.05  # requests per second and engine
MIXES: Final = {
    "answers": (130, 92),
    "prompts": (490, 23),
}  # tokens of prompt and answer, which take 0.12 and 0.48 s; 0.48 and 0.12 s
FIRST_TOKEN_S: Final = 2.0  # deadline of the first token
BEFORE_S, TURNED_S, MEASURED_S = 20.0, 30.0, 15.0
FIXED_S: Final = 5.0  # from the start of a fixed split to its measurement
QUICK: Final = 0.1


def roles(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Measure the goodput with roles that follow the load, divided by that of the best fixed split."""
    quick = stage.settings.quick
    count, scale = (ENGINES_QUICK, QUICK) if quick else (ENGINES, 1.0)
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * count, count // 2)
        fleet.warm_up()
        fixed: dict[int, float] = {}
        for prompts in range(1, count):
            _split(fleet, prompts)
            with _conductor(fleet, f"fixed-{prompts}", roles_floor=0) as conductor:
                requests = _load("prompts", 0.0, scale * (FIXED_S + MEASURED_S), count, prompts)
                fixed[prompts] = _goodput(conductor.ask(requests), scale * FIXED_S)
            say(f"{prompts} of {count} engines on prompts: goodput {fixed[prompts]:.3f}")
        _split(fleet, 1)
        with _conductor(fleet, "turned", roles_floor=1) as conductor:
            turns_s = scale * BEFORE_S
            requests = _load("answers", 0.0, turns_s, count, 100)
            requests += _load("prompts", turns_s, scale * (TURNED_S + MEASURED_S), count, 101)
            adapted = _goodput(conductor.ask(requests), turns_s + scale * TURNED_S)
            prefill_engines = sum(each["role"] == Role.PREFILL for each in conductor.status()["engines"].values())
    best = max(fixed.values())
    say(f"from 1 to {prefill_engines} of {count} engines on prompts: goodput {adapted:.3f}")
    details = {"fixed": fixed, "adapted": adapted, "ends": prefill_engines, "engines": count}
    ratio = adapted / best if best else math.inf
    return [result(name, Kind.TIMES, [ratio], bar=bar, details=details)]


def _conductor(fleet: PacedFleet, salt: str, roles_floor: int) -> AbstractContextManager[FleetConductor]:
    settings = {"split": "always", "first_token_s": FIRST_TOKEN_S}
    return fleet.conductor(salt=salt, roles_floor=roles_floor, **settings)


def _split(fleet: PacedFleet, prompts: int) -> None:
    for number, engine in enumerate(fleet.engines):
        engine.client.set_role(Role.PREFILL if number < prompts else Role.DECODE)


def _load(mix: str, start_s: float, seconds: float, engines: int, seed: int) -> list[FleetRequest]:
    """Make requests of one mix for a duration, all with different prompts."""
    random, at_s, requests = np.random.default_rng(seed), start_s, []
    prompt, answer = MIXES[mix]
    while (at_s := at_s + float(random.exponential(1 / (PER_S * engines)))) < start_s + seconds:
        requests.append(FleetRequest(at_s, random.integers(0, 256, prompt).astype(np.uint32), answer))
    return requests


def _goodput(answers: Sequence[FleetAnswer], since_s: float) -> float:
    """Return the share of the requests sent at or after ``since_s`` whose first token arrived in time."""
    check(answers)
    measured = [each for each in answers if each.request.at_s >= since_s]
    return sum(not each.refused and each.first_s <= FIRST_TOKEN_S for each in measured) / max(1, len(measured))
