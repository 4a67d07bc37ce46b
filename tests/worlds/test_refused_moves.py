"""A disk refuses writes just when the pages of an extent of NVMe are to move: what is indexed is there all the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.model.replica import Tier
from kvstore.state.frames import Extent, Segment
from tests.helpers.nvme.faulty_disk import EIO
from tests.helpers.worlds.power_world import NVME_EXTENT_BYTES, Clock, Disks, World

STEPS_MAX = 400


@pytest.mark.parametrize("seed", (1, 3))  # of machines whose NVMe is tight, so that pages move
def test_what_could_not_be_written_is_where_it_was(
    seed: int, disks: Disks, clock: Clock, shm_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(seed, shm_dir, disks, clock)
    (disk,) = disks.by_path.values()
    donor = Segment.donor

    def donor_then_fail(self: Segment, *args: Any) -> Extent | None:
        extent = donor(self, *args)
        if extent is not None and extent.sealed and self.extent_bytes == NVME_EXTENT_BYTES:
            disk.fail_writes = EIO
        return extent

    monkeypatch.setattr(Segment, "donor", donor_then_fail)
    world.start()
    for _ in range(STEPS_MAX):
        if disk.fail_writes is not None:
            break
        world.step()
    assert disk.fail_writes is not None, "no page was to move"
    for _ in range(5):
        world.step()
    there = dict(world.node.performer.index.addresses(Tier.NVME))
    for key, address in there.items():
        world.check_page(key, address)
    assert there and not world.node.verify()
    world.end("power")
