"""A node under load whose clients publish what they put, with kills of both sides: one seed, one history."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.logged_world import LoggedSimulation
from tests.helpers.worlds.simulation import SEEDS

STEPS = 2400


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_published_is_lost(seed: int) -> None:
    simulation = LoggedSimulation(seed, crash_every=(0, 60, 20)[seed % 3])
    simulation.run(STEPS)
    world = simulation.world
    assert world.taken_in > 200
    assert world.together > 15, "records were taken in one by one"
    assert world.refused > 0, "no writer was ever late"
    assert world.shown > 50, "no layer-wise writer began"
    assert world.again >= (0, 3, 12)[seed % 3], "no daemon died while it took something in"
