"""Accounts of tenants, apart from any node; pins and quotas of a node without files."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.config import Quota
from kvstore.model.replica import FrameClass, Tier
from kvstore.node import book
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state import pins, tenants
from kvstore.state.tenants import ROOTS_KEPT, Name, Tenants
from tests.helpers.worlds.world import MS, Chain, World, root_of

ROOT = b"r" * 16


def test_roots_without_pages_are_forgotten_and_those_with_pages_are_not() -> None:
    accounts = Tenants([Tier.DRAM])
    kept = accounts.number(ROOT)
    accounts.holdings[Tier.DRAM].add(kept, 1, 10)
    for i in range(3 * ROOTS_KEPT):
        accounts.number(i.to_bytes(16, "big"))
    assert accounts.number(ROOT) == kept and accounts.holdings[Tier.DRAM].roots[kept].pages == 1
    assert len(accounts.holdings[Tier.DRAM].roots) <= ROOTS_KEPT + 2


PAGE = FrameClass(4096, 2, 2)


def test_what_a_start_finds_is_unclaimed_until_its_tenant_speaks() -> None:
    accounts = Tenants([Tier.DRAM, Tier.NVME], [Quota("*", nvme=7)])
    number = accounts.number(ROOT, restored=True)
    below = accounts.holdings[Tier.NVME]
    below.add(number, 2, 20)
    below.suspect = False
    assert below.roots[number].share.quota is None and accounts.unclaimed() == {"dram": 0, "nvme": 20}
    assert accounts.name(ROOT, {"salt": "a"})
    assert below.share("a").bytes == 20 and below.suspect and accounts.unclaimed() == {"dram": 0, "nvme": 0}
    other = accounts.number(b"o" * 16, restored=True)
    assert accounts.number(b"o" * 16) == other and below.roots[other].share.salt == "", "stored again without a name"


def test_more_names_than_fit_cost_those_who_say_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "NAMES_BYTES_MAX", 64 << 10)
    accounts = Tenants([Tier.DRAM], [Quota("*", dram=1000)])
    dram = accounts.holdings[Tier.DRAM]

    def store(i: int, salt: str, adapter: str = "") -> bytes:
        root = i.to_bytes(16, "big")
        accounts.name(root, {"salt": salt, "adapter": adapter})
        dram.add(accounts.number(root), 1, 1)
        return root

    quiet = [store(i, "quiet") for i in range(20)]
    noisy = [store(i, "noisy", "x" * 1000) for i in range(1000, 3000)]
    assert accounts.named.bytes <= accounts.named.bytes_max
    assert all(root in accounts.named for root in quiet), "nobody loses a name for one who says more"
    assert 0 < sum(root in accounts.named for root in noisy) < 50 and noisy[-1] in accounts.named
    assert {accounts.salt(root) for root in noisy} == {"noisy"}, "an account keeps its tenant while it has pages"
    assert dram.share("noisy").bytes == 2000 and "" not in dram.shares
    assert any(type(instruction) is do.WriteNames for instruction in accounts.book)
    for root in noisy:
        dram.add(accounts.number(root), -1, -1)
    for i in range(5000):
        accounts.number(i.to_bytes(16, "little"))
    assert len(dram.shares) <= 3 and len(dram.roots) < 4000, "what is empty is forgotten"


def world(**options: Any) -> World:
    """A node of 80 frames in which a chain of six pages is stored."""
    made = World(64 << 10, 5)
    made.options.update(options)
    made.restart()
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
    monkeypatch.setattr(pins, "TENANT_KEYS_MAX", 10)
    made = world(pins_share_max=8 * 4096 / (5 * (64 << 10)))
    for length in (1, 2, 3):
        assert made.pin(Chain(PAGE, (1, 2, 3)[:length]), 1000 * MS) == length
    assert made.pin(Chain(PAGE, (1, 2, 3)), 2000 * MS) == 3, "the same once more is no other"
    refused = pin(made, Chain(PAGE, (1, 2, 3, 4)))
    assert "this tenant has 3 pins" in refused["refused"]
    monkeypatch.setattr(pins, "TENANT_PINS_MAX", 100)
    assert "may keep 10 pages" in pin(made, Chain(PAGE, (1, 2, 3, 4, 5)))["refused"]
    monkeypatch.setattr(pins, "TENANT_KEYS_MAX", 100)
    monkeypatch.setattr(pins, "KEYS_MAX", 10)
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


def test_a_key_alone_pins_and_unpins_nothing() -> None:
    made = world()
    chain, until_ns = Chain(PAGE, (1, 2, 3)), made.now_ns + 1000 * MS
    reply = made.send(ev.Pin(made.now_ns, 0, list(chain.keys), ROOT, until_ns, until_ns / 1e9))
    assert reply is not None and reply.detail == {"pages": 0}, "these pages are another root's"
    assert made.pin(chain, 1000 * MS) == 3
    reply = made.send(ev.Unpin(made.now_ns, keys=list(chain.keys), root=ROOT))
    assert reply is not None and reply.detail == {"unpinned": 0} and len(made.state.pins.pins) == 1
    reply = made.send(ev.Unpin(made.now_ns, keys=list(chain.keys), root=root_of(PAGE)))
    assert reply is not None and reply.detail == {"unpinned": 1} and not made.state.pins.pins


def pin(made: World, chain: Chain, number: int = 0) -> dict[str, Any]:
    """The answer to a wish for a pin."""
    until_ns = made.now_ns + 1000 * MS
    reply = made.send(ev.Pin(made.now_ns, number, list(chain.keys), root_of(PAGE), until_ns, until_ns / 1e9))
    assert reply is not None
    return dict(reply.detail)


def test_a_book_with_a_torn_line_loses_that_line_alone(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(path=tmp_path)
    written = book.Book(folder, 7)
    for i in range(3):
        written.add_name(Name.of(bytes([i]) * 16, {"salt": f"s{i}"}).line)
    written.flush()
    path = tmp_path / book.NAMES
    path.write_bytes(path.read_bytes()[:-5])
    written.add_name(Name.of(b"z" * 16, {"salt": "after"}).line)
    written.flush()
    assert [about["salt"] for _, about in book.read_names(folder, 7)] == ["s0", "s1", "after"]
    assert list(book.read_names(folder, 8)) == [] and not path.exists(), "names of another incarnation are nobody's"


def test_a_book_of_pins_is_a_line_per_change_and_stays_short(tmp_path: Path) -> None:
    folder: Any = SimpleNamespace(path=tmp_path)
    written, path = book.Book(folder, 7), tmp_path / book.PINS
    keys, until_ns = [bytes([i]) * 16 for i in range(200)], time.monotonic_ns() + 600 * 10**9
    for number in range(1, 301):
        written.add_pin(do.WritePin(number, keys, ROOT, keys[-1], until_ns, 0.0))
        written.flush()
        if number > 2:
            written.remove_pins([number - 1])
            written.flush()
        assert path.stat().st_size < 4 * 7000 + book.WASTE_BYTES
    before = path.stat()
    written.remove_pins([77])
    written.flush()
    assert path.stat() == before, "nothing changed"
    found = book.read_pins(folder, 7, time.monotonic_ns())
    assert [(pin.pin, pin.keys, pin.root, pin.asked) for pin in found] == [
        (number, keys, ROOT, keys[-1]) for number in (1, 300)
    ], "whatever the wall clock says by now"
    assert [pin.until_ns for pin in found] == [until_ns] * 2
    assert book.read_pins(folder, 8, time.monotonic_ns()) == [] and not path.exists()
