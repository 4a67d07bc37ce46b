"""Pages that hang on a prefix which only NVMe has, and chains that DRAM cannot hold: a put stores all of them, in this
process, layer by layer, and over gRPC; what was acknowledged is there after kill -9 and after a reboot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvstore
from kvstore import Store
from tests.helpers.content import SMALL, layer_of
from tests.helpers.nvme.files import found, prompt, reboot, save_all, scanned, serve, tier
from tests.helpers.processes import Daemon, Machine, check_laws, free_port, wait_settled

TURN = 10  # pages of a turn
TURNS = 4
SMALL_DRAM: dict[str, Any] = {"dram": "1MiB", "extent": "256KiB", "nvme": 16 << 20}  # 64 pages
LONG = 200


@pytest.fixture(params=["local", "grpc"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def started(machine: Machine, **settings: Any) -> tuple[Daemon, str]:
    """A node, and where it listens."""
    where = f"127.0.0.1:{free_port()}"
    return serve(machine, listen=where, **{**SMALL_DRAM, **settings}), f"kv://{where}"


@pytest.fixture
def node(machine: Machine, way: str) -> Iterator[tuple[Daemon, Store, Store]]:
    """A node, a store that writes as ``way`` says, and one on the same machine."""
    daemon, address = started(machine)
    with kvstore.connect(address if way == "grpc" else "n") as store, kvstore.connect("n") as local:
        yield daemon, store, local


def lives_on(machine: Machine, daemon: Daemon, pages: int, seed: int = 1) -> None:
    """All of the prompt is there after kill -9, and after a reboot."""
    daemon.kill()
    with kvstore.connect("n") as store:
        assert found(store, seed, pages) == pages, "while nobody serves"
    again, _ = started(machine)
    with kvstore.connect("n") as store:
        assert found(store, seed, pages) == pages
        wait_settled(store)
        check_laws(store)
        save_all(store)
    again.kill()
    reboot(machine)
    started(machine)
    with kvstore.connect("n") as store:
        scanned(store)
        assert found(store, seed, pages) == pages


def test_a_conversation_whose_prefix_has_left_dram(machine: Machine, node: tuple[Daemon, Store, Store]) -> None:
    """Each turn puts its own pages only. They are stored behind the others when the put returns."""
    daemon, store, local = node
    keys, pages = prompt(1, TURN * TURNS)
    cache = store.cache(SMALL)
    for turn in range(TURNS):
        first, stop = turn * TURN, (turn + 1) * TURN
        assert cache.lookup(keys).pages == first
        assert cache.put(keys[first:stop], pages[first:stop]) == TURN
        assert cache.lookup(keys).pages == stop
        assert found(local, 1, stop) == stop
        assert cache.put(keys[first:stop], pages[first:stop]) == 0, "nothing of it is new"
        save_all(local)
    check_laws(local)
    wait_settled(local)
    lives_on(machine, daemon, TURN * TURNS)


def test_layers_of_a_turn_are_written_behind_nvme(machine: Machine, node: tuple[Daemon, Store, Store]) -> None:
    daemon, store, local = node
    keys, pages = prompt(1, TURN * TURNS)
    cache = store.cache(SMALL)
    for turn in range(TURNS):
        first, stop = turn * TURN, (turn + 1) * TURN
        with cache.writer(keys[first:stop]) as writer:
            for layer in range(SMALL.layers):
                writer.write_layer(layer, layer_of(pages[first:stop], layer))
        assert writer.sealed == TURN
        assert found(local, 1, stop) == stop
        save_all(local)
    wait_settled(local)
    lives_on(machine, daemon, TURN * TURNS)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_chain_longer_than_dram(machine: Machine, node: tuple[Daemon, Store, Store], at_once: bool) -> None:
    """All of it is stored, whether it comes in one put or bit by bit; and DRAM's bound holds."""
    daemon, store, local = node
    keys, pages = prompt(1, LONG)
    cache = store.cache(SMALL)
    step = LONG if at_once else 17
    for first in range(0, LONG, step):
        stop = min(first + step, LONG)
        assert cache.put(keys[first:stop], pages[first:stop]) == stop - first
    assert found(local, 1, LONG) == LONG
    assert tier(local, "dram")["pages"] <= 64
    wait_settled(local)
    check_laws(local)
    lives_on(machine, daemon, LONG)


def test_what_nvme_cannot_hold_is_cut(machine: Machine) -> None:
    """A chain longer than both tiers: a prefix of it is stored, the put ends in time, and its neighbour goes on."""
    started(machine, nvme=4 << 20, nvme_extent=1 << 20)
    with kvstore.connect("n", timeout_s=5.0) as store:
        keys, pages = prompt(1, 400)
        stored = store.cache(SMALL).put(keys, pages)
        assert 64 < stored < 400
        assert found(store, 1, 400) == stored
        wait_settled(store)
        check_laws(store)
        assert store.cache(SMALL).put(*prompt(2, TURN)) == TURN
