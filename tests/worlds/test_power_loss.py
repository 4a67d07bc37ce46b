"""Power loss, kill and reboot of a node with NVMe, at any step of its disks, under seeds.

A seed is a machine through several lives. In each one pages are put, read, saved, loaded, evicted and checkpointed,
until the life ends: in peace, by a kill, or by a loss of power that drops, tears and reorders what was not synced. The
next life has to find what was durable, and never anything wrong. ``KVSTORE_TEST_POWER_SEEDS``: how many machines, in
twenties.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers.nvme.faulty_disk import PowerCut
from tests.helpers.worlds.power_world import Clock, Disks, World

SEEDS = int(os.environ.get("KVSTORE_TEST_POWER_SEEDS", "40"))
TOGETHER = 20  # machines of one test: to as many everything of MUST_HAPPEN happens
LIVES, STEPS = 5, 40
MUST_HAPPEN = (
    *("cut short", "end power", "end kill", "end stop", "cut in start, power", "cut in start, kill", "demoted"),
    *("pages_saved", "pages_promoted", "pages_adopted", "pages read from NVMe"),
    *("nvme evicted_space", "nvme extents_reclaimed", "nvme pages_moved"),
)


def live(world: World) -> bool:
    """One life of the machine's node; False where it was cut short."""
    chance = world.random.random
    if chance() < 0.75:
        world.cut_soon()
    how = world.random.choices(("power", "kill", "stop"), (5, 3, 2))[0]
    unclean = "kill" if how == "kill" else "power"
    try:
        world.start()
    except PowerCut:
        world.end_of_start(unclean)
        return False
    try:
        if chance() < 0.4:
            world.check(scanned=False)
            world.scan(whole=False)
            world.step()
            world.check(scanned=False)
        world.scan()
        world.check(scanned=True)
        for _ in range(world.random.randrange(STEPS)):
            world.step()
        if how == "stop":
            world.stop()
            return True
    except PowerCut:
        world.end(unclean)
        return False
    world.end(how)
    return True


def last_life(world: World) -> None:
    """Nothing interrupts this one; everything that has to be there is, and the node goes on well."""
    for disk in world.disks.by_path.values():
        disk.cut_at = None
    world.start()
    world.check(scanned=False)
    world.scan()
    world.check(scanned=True)
    for _ in range(6):
        world.step()
    world.check(scanned=True)
    world.stop()


@pytest.mark.parametrize("first", range(0, SEEDS, TOGETHER))
def test_nothing_is_lost_or_wrong(
    first: int, disks: Disks, clock: Clock, shm_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    happened: Counter[str] = Counter()
    for seed in range(first, first + TOGETHER):
        world = World(seed, shm_dir, disks, clock)
        try:
            for _ in range(LIVES):
                happened["lives"] += 1
                happened["cut short"] += not live(world)
            last_life(world)
        except BaseException as error:
            error.add_note(f"seed {seed}: {dict(world.happened)}")
            raise
        happened += world.happened
        shutil.rmtree(shm_dir / "kvstore-n", ignore_errors=True)
    for what in MUST_HAPPEN:
        assert happened[what] > 0, f"{what} never happened: {dict(happened)}"
    with capsys.disabled():
        print(f"\n{TOGETHER} machines: {dict(happened)}")
