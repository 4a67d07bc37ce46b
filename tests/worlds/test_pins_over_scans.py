"""Pins over starts: all of them outlive a kill at any moment, and what NVMe's scan finds again of them is kept."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.model.replica import Tier
from kvstore.node import book
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import TieringRules
from tests.helpers.worlds.copying import WorldDisk
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.simulation import SMALL
from tests.helpers.worlds.tiered_world import TieredWorld
from tests.helpers.worlds.world import Chain, root_of

MS = 10**6
HOUR_NS = 3600 * 10**9
PINNED = Chain(SMALL, tuple(range(1, 41)))


def world() -> TieredWorld:
    """A chain of 40 pages under a pin, of which DRAM has lost all but for the first ten."""
    disk = WorldDisk(512 << 10, 8, 5)
    made = TieredWorld(128 << 10, 6, Nvme(disk, TieringRules(demote_at=0.0), "lru"))
    made.populate(list(range(6)))
    made.open(1)
    assert made.grant(1, SMALL, len(PINNED.path))
    made.put(1, PINNED)
    made.settle()
    assert made.nvme_pages(PINNED) == len(PINNED.path)
    assert made.evict(pages=30) == 30
    assert made.pin(PINNED, HOUR_NS) == len(PINNED.path)
    return made


def pinned(made: TieredWorld) -> list[tuple[int, dict[Tier, int]]]:
    """Pages asked for, and kept per tier, of each pin."""
    return [(len(pin.keys), dict(pin.lengths)) for pin in made.state.pins.pins.values()]


def test_a_scan_finds_what_a_pin_keeps() -> None:
    made = world()
    made.forget_tables()
    assert pinned(made) == [(40, {Tier.DRAM: 10})], "the pin waits for the scan"
    made.check()
    while made.scan_on(count=7):
        made.check()
        assert made.state.pins.pins
    assert pinned(made) == [(40, {Tier.DRAM: 10, Tier.NVME: 40})]
    made.tick(HOUR_NS + MS)
    assert not pinned(made) and not made.state.pins.kept_bytes[Tier.NVME]


@pytest.mark.parametrize("offered", range(8))
def test_a_kill_in_the_middle_of_a_scan(offered: int) -> None:
    made = world()
    made.forget_tables()
    for _ in range(offered):
        made.scan_on(count=7)
    made.restart()
    made.check()
    while made.scan_on(count=7):
        made.check()
    assert pinned(made) == [(40, {Tier.DRAM: 10, Tier.NVME: 40})]


def test_a_pin_ends_with_the_scan_where_nothing_of_it_is_left() -> None:
    made = world()
    made.evict(pages=100)
    for key in PINNED.keys[20:]:
        made.rot(key)
    made.forget_tables()
    while made.scan_on(count=7):
        made.check()
    assert pinned(made) == [(20, {Tier.DRAM: 10, Tier.NVME: 20})], "it keeps what is there, and waits no more"
    number = next(iter(made.state.pins.pins))
    assert made.node.pins[number].keys == PINNED.keys[:20]
    gone = Chain(SMALL, tuple(range(100, 110)))
    made.node.write_pin(do.WritePin(77, list(gone.keys), root_of(SMALL), gone.keys[-1], 1 << 62, 1e12))
    made.forget_tables()
    assert (10, {}) in pinned(made)
    unpinned = made.send(ev.Unpin(made.now_ns, 77))
    assert unpinned is not None and unpinned.detail == {"unpinned": 1} and 77 not in made.node.pins
    made.node.write_pin(do.WritePin(78, list(gone.keys), root_of(SMALL), gone.keys[-1], 1 << 62, 1e12))
    made.forget_tables()
    while made.scan_on(count=7):
        made.check()
    assert 78 not in made.state.pins.pins and 78 not in made.node.pins


@pytest.mark.parametrize("kill_at", range(4))
def test_a_kill_at_any_write_of_the_restored_book_loses_no_pin(
    kill_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the daemon got to write of its restored pins, the next one finds all of them."""
    folder: Any = SimpleNamespace(path=tmp_path)
    keys = [bytes([i]) * 16 for i in range(4)]
    pins = [do.WritePin(number, keys, b"r" * 16, keys[-1], 1 << 62, 4e9) for number in range(1, 30)]
    first = book.Book(folder, 7)
    for pin in pins:
        first.add_pin(pin)
    first.flush()
    calls = 0

    def dies(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > kill_at:
                raise KeyboardInterrupt
            return real(*args, **more)

        return call

    with monkeypatch.context() as patched:
        for name in ("open_plain", "remove"):
            patched.setattr(book, name, dies(getattr(book, name)))
        patched.setattr(book.os, "replace", dies(book.os.replace))
        again = book.Book(folder, 7)
        again.replace_pins(pins)
        with contextlib.suppress(KeyboardInterrupt):
            again.flush()
    assert len(book.read_pins(folder, 7, time.monotonic_ns())) == len(pins)
