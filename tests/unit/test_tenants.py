"""Accounts of tenants, apart from any node; pins and quotas of a node without files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import Quota, parse_quotas
from kvstore.model.replica import FrameClass, Tier
from kvstore.service import book
from kvstore.state import events as ev
from kvstore.state import pins, tenants
from kvstore.state.tenants import ROOTS_KEPT_MIN, Tenants
from tests.property.world import MS, Chain, World, root_of

ROOT = b"r" * 16


def test_a_root_that_is_named_late_takes_its_bytes_along() -> None:
    accounts = Tenants([Tier.DRAM, Tier.NVME], [Quota("a", dram=100), Quota("*", nvme=7)])
    number = accounts.number(ROOT)
    accounts.holdings[Tier.DRAM].add(number, 2, 20)
    accounts.holdings[Tier.DRAM].expect(number, 10)
    assert accounts.stats()[""]["dram"]["bytes"] == 20
    assert accounts.name(ROOT, {"salt": "a"}) and not accounts.name(ROOT, {"salt": "a"})
    stats = accounts.stats()
    assert stats.keys() == {"a"} and stats["a"]["dram"]["bytes"] == 20
    assert (stats["a"]["dram"]["quota_bytes"], stats["a"]["nvme"]["quota_bytes"]) == (100, None)
    assert accounts.holdings[Tier.NVME].share("").quota == 7
    share = accounts.holdings[Tier.DRAM].share("a")
    assert share.coming == 10 and not share.complete


def test_roots_without_pages_are_forgotten_and_those_with_pages_are_not() -> None:
    accounts = Tenants([Tier.DRAM])
    kept = accounts.number(ROOT)
    accounts.holdings[Tier.DRAM].add(kept, 1, 10)
    for i in range(3 * ROOTS_KEPT_MIN):
        accounts.number(i.to_bytes(16, "big"))
    assert accounts.number(ROOT) == kept and accounts.holdings[Tier.DRAM].roots[kept].pages == 1
    assert len(accounts.holdings[Tier.DRAM].roots) <= ROOTS_KEPT_MIN + 2


PAGE = FrameClass(4096, 2, 2)


def test_what_a_start_finds_is_unclaimed_until_its_tenant_speaks() -> None:
    accounts = Tenants([Tier.DRAM, Tier.NVME], [Quota("*", nvme=7)])
    number = accounts.number(ROOT, found=True)
    below = accounts.holdings[Tier.NVME]
    below.add(number, 2, 20)
    below.suspect = False
    assert below.roots[number].share.quota is None and accounts.unclaimed() == {"dram": 0, "nvme": 20}
    assert accounts.name(ROOT, {"salt": "a"})
    assert below.share("a").bytes == 20 and below.suspect and accounts.unclaimed() == {"dram": 0, "nvme": 0}
    other = accounts.number(b"o" * 16, found=True)
    assert accounts.number(b"o" * 16) == other and below.roots[other].share.salt == "", "stored again without a name"


def test_more_roots_than_keep_names_share_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "ROOTS_MAX", 64)
    monkeypatch.setattr(tenants, "FORGET_AT_ONCE", 4)
    accounts = Tenants([Tier.DRAM], [Quota("*", dram=1000)])
    dram = accounts.holdings[Tier.DRAM]

    def speak(i: int, pages: int) -> bool:
        root = i.to_bytes(16, "big")
        kept = accounts.name(root, {"salt": f"s{i}"})
        dram.add(accounts.number(root), pages, pages)
        return kept

    assert all(speak(i, pages=1) for i in range(64))
    assert not any(speak(i, pages=1) for i in range(64, 1064)), "the names of those that have pages are kept"
    assert len(accounts.named) == 64 and dram.share("").bytes == 1000 and accounts.unnamed == 1000
    assert len(dram.shares) == 65
    for i in range(8):
        dram.add(accounts.number(i.to_bytes(16, "big")), -1, -1)
    assert sum(speak(i, pages=0) for i in range(2000, 2100)) >= 8, "those without pages make room"
    assert len(accounts.named) <= 64
    for i in range(5000):
        accounts.number(i.to_bytes(16, "little"))
    assert len(dram.shares) <= 66 and len(dram.roots) < 4 * ROOTS_KEPT_MIN, "what is empty is forgotten"


def world(**options: Any) -> World:
    """A node of 80 frames in which a chain of six pages is stored."""
    made = World(64 << 10, 5)
    made.options.update(options)
    made.state = made.shell.state(**made.options)
    made.populate(list(range(5)))
    made.open(1)
    store(made, Chain(PAGE, (1, 2, 3, 4, 5, 6)))
    return made


def store(made: World, chain: Chain) -> None:
    made.name(PAGE, "t")
    assert made.grant(1, PAGE, len(chain.path)) == len(chain.path)
    made.put(1, chain)


def test_bounds_of_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "TENANT_PINS_MAX", 3)
    monkeypatch.setattr(pins, "KEYS_MAX", 10)
    made = world(pins_share_max=6 * 4096 / (5 * (64 << 10)))
    for length in (1, 2, 3):
        assert made.pin(Chain(PAGE, (1, 2, 3)[:length]), 1000 * MS) == length
    assert made.pin(Chain(PAGE, (1, 2, 3)), 2000 * MS) == 3, "the same once more is no other"
    refused = pin(made, Chain(PAGE, (1, 2, 3, 4)))
    assert "this tenant has 3 pins" in refused["refused"]
    monkeypatch.setattr(pins, "TENANT_PINS_MAX", 100)
    assert "10 pages in all" in pin(made, Chain(PAGE, (1, 2, 3, 4, 5)))["refused"]
    monkeypatch.setattr(pins, "KEYS_MAX", 100)
    store(made, Chain(PAGE, (9,)))
    assert made.pin(Chain(PAGE, (1, 2, 3, 4, 5, 6)), 1000 * MS) == 6, "pages under several pins count once"
    assert "pins_share_max" in pin(made, Chain(PAGE, (9,)))["refused"]
    assert pin(made, Chain(PAGE, (7,))) == {"pages": 0}
    made.restart()
    made.check()
    made.tick(3000 * MS)
    assert not made.state.pins.pins and made.state.pins.kept_bytes == {Tier.DRAM: 0}
    assert made.evict(pages=100) == 7


def pin(made: World, chain: Chain) -> dict[str, Any]:
    """The answer to a wish for a pin."""
    until_ns = made.now_ns + 1000 * MS
    reply = made.send(ev.Pin(made.now_ns, 0, list(chain.keys), root_of(PAGE), until_ns, until_ns / 1e9))
    assert reply is not None
    return dict(reply.detail)


def test_the_default_tenant_can_be_named_in_a_quota() -> None:
    (quota,) = parse_quotas('"" dram=1MiB')
    assert quota.salt == "" and str(quota) == '"" dram=1MiB'


def test_a_book_with_a_torn_line_loses_that_line_alone(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(path=tmp_path)
    for i in range(3):
        book.add_name(folder, 7, bytes([i]) * 16, {"salt": f"s{i}"})
    path = tmp_path / book.NAMES
    path.write_bytes(path.read_bytes()[:-5])
    book.add_name(folder, 7, b"z" * 16, {"salt": "after"})
    assert [about["salt"] for about in book.read_names(folder, 7).values()] == ["s0", "s1", "after"]
    assert book.read_names(folder, 8) == {} and not path.exists(), "names of another incarnation are nobody's"
