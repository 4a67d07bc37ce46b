"""A node under four times the load it can hold, for long, with faults: one seed, one history."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.simulation import SEEDS, Simulation

STEPS = 2400


@pytest.mark.parametrize("seed", SEEDS)
def test_overload_with_faults(seed: int) -> None:
    simulation = Simulation(seed, crash_every=(0, 60, 20)[seed % 3])
    simulation.run(STEPS)
    counters = simulation.world.state.counters
    assert simulation.world.crashes >= (0, 15, 60)[seed % 3]
    assert seed % 3 or counters["evicted_space"] > 200
