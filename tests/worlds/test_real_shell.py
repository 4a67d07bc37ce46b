"""The real shell does what the model of it does: instruction by instruction, through kills, under seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.worlds.simulation import Simulation
from tests.helpers.worlds.tier_simulation import TierSimulation
from tests.helpers.worlds.tiered_world import TieredWorld
from tests.helpers.worlds.twin_shell import TwinShell
from tests.helpers.worlds.world import World


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch, shm_dir: Path) -> Iterator[list[TwinShell]]:
    """Worlds made from here on have both shells."""
    made: list[TwinShell] = []

    def make(*args: object) -> TwinShell:
        made.append(TwinShell(monkeypatch, shm_dir, *args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(World, "make_shell", staticmethod(make))
    yield made
    for shell in made:
        shell.close()


@pytest.mark.parametrize("seed", range(3))
def test_both_shells_go_the_same_way_through_kills(twin: list[TwinShell], seed: int) -> None:
    simulation = Simulation(seed, crash_every=(0, 40, 15)[seed])
    simulation.run(200)
    (shell,) = twin
    assert shell.compared > 300
    assert shell.kills >= (0, 2, 6)[seed]


class OneDay(TierSimulation):
    """Without reboots: the disk is the world's, and the real shell knows nothing of it."""

    def _reboot(self) -> None:
        pass


@pytest.mark.parametrize("seed", range(2))
def test_both_shells_go_the_same_way_with_a_tier_below(
    twin: list[TwinShell], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(TieredWorld, "forget_tables", lambda world: None)
    simulation = OneDay(seed, crash_every=0, lossless=bool(seed))
    simulation.run(150)
    _, shell = twin
    assert shell.compared > 300
    assert simulation.world.state.counters["pages_saved"] > 0
