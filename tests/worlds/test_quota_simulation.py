"""The tier simulation once more, every tenant under quotas in both tiers: no tier has more than they allow for long."""

from __future__ import annotations

import pytest

from kvstore.config import Quota
from kvstore.model.replica import Tier
from kvstore.state import events as ev
from kvstore.state import instructions as do
from tests.helpers.worlds.simulation import LARGE, SMALL
from tests.helpers.worlds.tier_simulation import STEPS, TierSimulation
from tests.helpers.worlds.tiered_world import TieredWorld

DRAM, NVME = 200_000, 300_000
SALTS = {SMALL: "small", LARGE: "large"}


class QuotaWorld(TieredWorld):
    """Each class is a tenant's, which has less than there is."""

    may_lose = (*TieredWorld.may_lose, ev.SealGranted, ev.Tick)
    nvme_may_lose = (*TieredWorld.nvme_may_lose, ev.Tick)
    trimmed = 0  # pages that left because a scan, or a smaller quota, had left too many

    def limit(self, dram: int, nvme: int) -> None:
        """From here on, and after every restart."""
        self.options["quotas"] = [Quota("*", dram, nvme)]
        self.restart()

    def introduce(self) -> None:
        """Clients say whose their chains are, as they do after every start."""
        for frame_class, salt in SALTS.items():
            self.name(frame_class, salt)

    def restart(self) -> None:
        """See ``TieredWorld.restart``: names under which nothing was stored are gone."""
        super().restart()
        self.introduce()

    def _account(self, event: ev.Event, instructions: list[do.Instruction]) -> None:
        if type(event) is ev.Tick:
            self.trimmed += len(self.gone(instructions, Tier.NVME))
        super()._account(event, instructions)

    def check(self) -> None:
        """See ``TieredWorld.check``."""
        super().check()
        for holdings in self.state.tenants.holdings.values():
            for share in holdings.shares.values():
                assert share.salt in SALTS.values() or not share.bytes + share.expected_bytes, "what is whose?"
                if not holdings.suspect and share.quota is not None:
                    has = share.bytes + share.expected_bytes
                    assert has <= share.quota, f"{share.salt!r} has {has} of {share.quota} in {holdings.tier}"


class QuotaSimulation(TierSimulation):
    """``TierSimulation`` of tenants with quotas."""

    def finish(self) -> None:
        """See ``TierSimulation.finish``; nothing keeps anybody above a quota then."""
        super().finish()
        self.world.tick(10**9)
        self.world.tick(10**9)
        self.world.settle()
        self.world.tick(10**9)
        assert not any(holdings.suspect for holdings in self.world.state.tenants.holdings.values())
        self.world.check()


@pytest.mark.parametrize("seed", range(200, 203))
def test_quotas_hold_whatever_happens(seed: int) -> None:
    simulation = QuotaSimulation(seed, crash_every=(0, 60, 20)[seed % 3], lossless=False)
    world = simulation.world
    world.__class__ = QuotaWorld
    assert isinstance(world, QuotaWorld)
    world.limit(DRAM, NVME)
    simulation._populate()
    simulation.run(STEPS)
    world.limit(DRAM // 2, NVME // 3)
    simulation._populate()
    simulation.run(STEPS // 4)
    simulation.finish()
    assert world.trimmed
