"""Accounts of tenants, apart from any node."""

from __future__ import annotations

from kvstore.config import Quota
from kvstore.model.replica import Tier
from kvstore.state.tenants import ROOTS_KEPT_MIN, Tenants

ROOT = b"r" * 16


def test_a_root_that_is_named_late_takes_its_bytes_along() -> None:
    tenants = Tenants([Tier.DRAM, Tier.NVME], [Quota("a", dram=100), Quota("*", nvme=7)])
    number = tenants.number(ROOT)
    tenants.holdings[Tier.DRAM].add(number, 2, 20)
    tenants.holdings[Tier.DRAM].expect(number, 10)
    assert tenants.stats()[""]["dram"]["bytes"] == 20
    assert tenants.name(ROOT, {"salt": "a"}) and not tenants.name(ROOT, {"salt": "a"})
    stats = tenants.stats()
    assert stats.keys() == {"a"} and stats["a"]["dram"]["bytes"] == 20
    assert (stats["a"]["dram"]["quota_bytes"], stats["a"]["nvme"]["quota_bytes"]) == (100, None)
    assert tenants.holdings[Tier.NVME].share("").quota == 7
    share = tenants.holdings[Tier.DRAM].share("a")
    assert share.coming == 10 and not share.complete


def test_roots_without_pages_are_forgotten_and_those_with_pages_are_not() -> None:
    tenants = Tenants([Tier.DRAM])
    kept = tenants.number(ROOT)
    tenants.holdings[Tier.DRAM].add(kept, 1, 10)
    for i in range(3 * ROOTS_KEPT_MIN):
        tenants.number(i.to_bytes(16, "big"))
    assert tenants.number(ROOT) == kept and tenants.holdings[Tier.DRAM].roots[kept].pages == 1
    assert len(tenants.holdings[Tier.DRAM].roots) <= ROOTS_KEPT_MIN + 2
