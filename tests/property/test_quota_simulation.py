"""The tier simulation once more, every tenant under quotas in both tiers: no tier ever has more than they allow."""

from __future__ import annotations

import pytest

from kvstore.config import Quota
from kvstore.model.replica import Tier
from kvstore.state import events as ev
from tests.property.test_tier_simulation import STEPS, TierSimulation
from tests.property.tiered_world import TieredWorld

DRAM, NVME = 200_000, 300_000


class QuotaWorld(TieredWorld):
    """All roots are of one tenant, which has less than there is."""

    may_lose = (*TieredWorld.may_lose, ev.SealGranted)

    def limit(self) -> None:
        """From here on, and after every restart."""
        self.options["quotas"] = [Quota("*", DRAM, NVME)]
        self.restart()

    def check(self) -> None:
        """See ``TieredWorld.check``."""
        super().check()
        for holdings in self.state.tenants.holdings.values():
            share = holdings.share("")
            assert share.quota is not None
            if holdings.tier == Tier.NVME and self.reboots:
                continue  # the scan may find pages that had been evicted; they leave when the tenant saves more
            assert share.bytes + share.coming <= share.quota, f"{holdings.tier}: {share.bytes} + {share.coming}"


@pytest.mark.parametrize("seed", range(200, 206))
def test_quotas_hold_whatever_happens(seed: int) -> None:
    simulation = TierSimulation(seed, crash_every=(0, 60, 20)[seed % 3], lossless=False)
    world = simulation.world
    world.__class__ = QuotaWorld
    assert isinstance(world, QuotaWorld)
    world.limit()
    simulation._populate()
    simulation.run(STEPS)
    simulation.finish()
    assert world.state.counters["evicted_quota"] or world.crashes or world.state.counters["demoted"]
