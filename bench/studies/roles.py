"""Row about roles that follow the load, live: paced engines, real nodes and a real conductor (``bench.studies.fleet``).

Work is counted in seconds of engines. First 80 of 100 of it are answers, then 80 of 100 are prompts. What a conductor
that changes roles reaches 30 s after that is compared with the best split of roles that is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

import numpy as np

from bench.studies.fleet import FleetAnswer, FleetAsk, FleetConductor, PacedFleet, check, say
from engine.model.request import Role
from kvstore.bench.harness import Bar, Kind, Result, result
from kvstore.bench.stage import Stage

ENGINES, ENGINES_QUICK = 6, 2
PER_S: Final = 1.05  # requests, for every engine
MIXES: Final = {"answers": (130, 92), "prompts": (490, 23)}  # tokens of prompt and answer: 0.12 and 0.48 s; 0.48, 0.12
FIRST_TOKEN_S: Final = 2.0  # that requests want
BEFORE_S, TURNED_S, MEASURED_S = 20.0, 30.0, 15.0
FIXED_S: Final = 5.0  # before a fixed split is measured
QUICK: Final = 0.1


def roles(stage: Stage, name: str, bar: Bar | None) -> list[Result]:
    """Goodput, as a part of the best fixed split's."""
    quick = stage.settings.quick
    count, scale = (ENGINES_QUICK, QUICK) if quick else (ENGINES, 1.0)
    with ExitStack() as scene:
        fleet = PacedFleet(stage, scene, [Role.BOTH] * count, count // 2)
        fleet.warm_up()
        fixed: dict[int, float] = {}
        for prompts in range(1, count):
            _split(fleet, prompts)
            with _conductor(fleet, f"fixed-{prompts}", roles_floor=0) as conductor:
                asked = _load("prompts", 0.0, scale * (FIXED_S + MEASURED_S), count, prompts)
                fixed[prompts] = _goodput(conductor.ask(asked), scale * FIXED_S)
            say(f"{prompts} of {count} engines on prompts: goodput {fixed[prompts]:.3f}")
        _split(fleet, 1)
        with _conductor(fleet, "turned", roles_floor=1) as conductor:
            turns_s = scale * BEFORE_S
            asked = _load("answers", 0.0, turns_s, count, 100)
            asked += _load("prompts", turns_s, scale * (TURNED_S + MEASURED_S), count, 101)
            adapted = _goodput(conductor.ask(asked), turns_s + scale * TURNED_S)
            ends = sum(each["role"] == Role.PREFILL for each in conductor.status()["engines"].values())
    best = max(fixed.values())
    say(f"from 1 to {ends} of {count} engines on prompts: goodput {adapted:.3f}")
    details = {"fixed": fixed, "adapted": adapted, "ends": ends, "engines": count}
    ratio = adapted / best if best else math.inf
    return [result(name, Kind.TIMES, [ratio], bar=bar, details=details)]


def _conductor(fleet: PacedFleet, salt: str, roles_floor: int) -> AbstractContextManager[FleetConductor]:
    wanted = {"split": "always", "first_token_s": FIRST_TOKEN_S}
    return fleet.conductor(salt=salt, roles_floor=roles_floor, **wanted)


def _split(fleet: PacedFleet, prompts: int) -> None:
    for number, engine in enumerate(fleet.engines):
        engine.client.set_role(Role.PREFILL if number < prompts else Role.DECODE)


def _load(mix: str, start_s: float, seconds: float, engines: int, seed: int) -> list[FleetAsk]:
    """Make requests of one mix for a duration, all with different prompts."""
    draw, at_s, made = np.random.default_rng(seed), start_s, []
    prompt, answer = MIXES[mix]
    while (at_s := at_s + float(draw.exponential(1 / (PER_S * engines)))) < start_s + seconds:
        made.append(FleetAsk(at_s, draw.integers(0, 256, prompt).astype(np.uint32), answer))
    return made


def _goodput(answers: Sequence[FleetAnswer], since_s: float) -> float:
    """Return the part of the requests since then whose first token came in time."""
    check(answers)
    those = [each for each in answers if each.asking.at_s >= since_s]
    return sum(not each.refused and each.first_s <= FIRST_TOKEN_S for each in those) / max(1, len(those))
