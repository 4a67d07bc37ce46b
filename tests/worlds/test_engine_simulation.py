"""What engines decide, under load, with losses, cancels, hand-offs, migrations, drains and kills: a seed, a history."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import pytest

from engine.state import events, instructions
from tests.helpers.worlds.engine_world import EngineWorld

STEPS = 1500
SEEDS = range(100)


@pytest.mark.parametrize("seed", SEEDS)
def test_everything_ends_once_and_every_frame_returns(seed: int) -> None:
    world = EngineWorld(seed)
    world.run(STEPS)
    assert world.counts["Step"] > 20


def test_seeds_see_every_event_instruction_and_refusal() -> None:
    """Else a decision could lose its test unnoticed. The rarest of them, a full engine, is seen by one seed in nine."""
    seen: Counter[str] = Counter()
    names = {kind.__name__ for kind in (*events.Event.__subclasses__(), *get_args(instructions.Instruction))}
    refusals = {f"refused: {name}" for name in ("InvalidRequest", "NodeUnavailable", "TooManyCalls")}
    wanted = names | refusals | {"kills", "shared", "found"}
    for seed in range(60):
        world = EngineWorld(1000 + seed)
        world.run(STEPS)
        seen.update(world.counts)
        if wanted <= seen.keys():
            return
    raise AssertionError(f"no seed saw {sorted(wanted - seen.keys())}")
