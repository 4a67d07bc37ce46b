"""A node with NVMe under more load than its DRAM, or both tiers, can hold: with a mover, kills, reboots and scans."""

from __future__ import annotations

import pytest

from tests.helpers.worlds.tier_simulation import STEPS, TierSimulation


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_lost_while_nvme_has_room(seed: int) -> None:
    simulation = TierSimulation(seed, crash_every=(0, 60, 20)[seed % 3], lossless=True)
    simulation.run(STEPS)
    simulation.finish()
    world = simulation.world
    assert not world.nvme_evicted
    assert world.scanned or not world.reboots


@pytest.mark.parametrize("seed", range(100, 106))
def test_both_tiers_overloaded(seed: int) -> None:
    simulation = TierSimulation(seed, crash_every=(0, 60, 20)[seed % 3], lossless=False)
    simulation.run(STEPS)
    simulation.finish()
    assert simulation.world.nvme_evicted
