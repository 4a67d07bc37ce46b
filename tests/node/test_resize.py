"""A node that is started with another DRAM size keeps its pages, and its clients."""

from __future__ import annotations

import contextlib
import os

import pytest

import kvstore
from kvstore.errors import KVStoreError
from tests.helpers.content import SMALL, chain, contents, layer_of
from tests.helpers.processes import Machine, check_laws, check_pages, check_right, frames, put, wait_until

PAGES = 8  # of 16 KiB: a prompt is 128 KiB
SMALLER, LARGER = {"dram": "4MiB"}, {"dram": "16MiB"}
MIB = 1 << 20


def fill(store: kvstore.Store, first: int, prompts: int) -> dict[int, int]:
    for seed in range(first, first + prompts):
        assert put(store, seed, PAGES) == PAGES
    return dict.fromkeys(range(first, first + prompts), PAGES)


def capacity(store: kvstore.Store) -> int:
    return int(store.stats()["tiers"]["dram"]["capacity_bytes"])


def held_bytes(machine: Machine, name: str = "n") -> int:
    """Memory that the segment really has."""
    return os.stat(machine.folder(name) / "segment").st_blocks * 512


# --- larger -----------------------------------------------------------------------------------------------------------


def test_a_larger_node_keeps_its_pages_and_takes_more(machine: Machine) -> None:
    """Under the eyes of clients that mapped the smaller one."""
    daemon = machine.serve("n", **SMALLER)
    store, reader = machine.connect("n"), machine.connect("n")
    acked = fill(store, 0, 28)
    check_pages(reader, acked)
    assert daemon.terminate() == 0
    check_pages(reader, acked)
    machine.serve("n", **LARGER)
    check_pages(reader, acked)
    assert capacity(store) == 16 * MIB
    acked |= fill(store, 100, 80)  # beyond what fitted before; nothing has to leave for it
    check_pages(reader, acked)
    check_pages(machine.connect("n"), acked)
    check_laws(store)


def test_a_writer_and_a_lease_live_through_it(machine: Machine) -> None:
    """Frames of a writer that has stopped stay its own; a lease holds its pages, and its views stay right."""
    daemon = machine.serve("n", **SMALLER)
    store = machine.connect("n")
    acked = fill(store, 0, 8)
    written = chain(50, PAGES)
    data = contents(written)
    writer = store.cache(SMALL).writer(written).__enter__()
    writer.write_layer(0, layer_of(data, 0))
    keys = chain(3, PAGES)
    with store.cache(SMALL).lease(keys, ttl_s=60.0) as lease:
        daemon.kill()
        machine.serve("n", **LARGER)
        other = machine.connect("n")
        other.evict(pages=1 << 20)
        assert bytes(lease.pages[5]) == contents(keys)[5].tobytes()
        lease.check()
        assert check_right(other, acked) == PAGES, "of all pages those under the lease are left"
        more = fill(other, 100, 80)
        with contextlib.suppress(KVStoreError):  # it may be told that the node was made anew
            for layer in range(1, SMALL.layers):
                writer.write_layer(layer, layer_of(data, layer))
            writer.__exit__(None, None, None)
        check_pages(other, more)
        check_right(other, {50: PAGES})
    check_laws(other)


@pytest.mark.parametrize("step", [1, 2, 5, 100])
def test_killed_while_it_grows(step: int, machine: Machine) -> None:
    """At each file that gets the new incarnation: the next start goes on, with whatever size."""
    daemon = machine.serve("n", **SMALLER)
    store = machine.connect("n")
    acked = fill(store, 0, 24)
    daemon.kill()
    killed = machine.spawn("n", failpoint=f"node.resize:{step}", **LARGER)
    if step < 100:
        assert killed.wait() == -9
    else:
        killed.wait_ready()
        killed.kill()
    machine.serve("n", **(SMALLER if step == 2 else LARGER))
    check_pages(machine.connect("n"), acked)
    check_pages(store, acked)
    fill(store, 100, 4)
    check_laws(store)


def test_no_memory_for_a_larger_one(machine: Machine) -> None:
    """It is refused in words, and the node is as it was."""
    daemon = machine.serve("n", **SMALLER)
    acked = fill(machine.connect("n"), 0, 8)
    assert daemon.terminate() == 0
    refused = machine.spawn("n", dram="900TiB")
    assert refused.wait() == 2 and "dram: needs" in refused.errors.read_text()
    machine.serve("n", **SMALLER)
    check_pages(machine.connect("n"), acked)


def test_extents_of_another_size_are_refused(machine: Machine) -> None:
    daemon = machine.serve("n", **SMALLER)
    assert daemon.terminate() == 0
    refused = machine.spawn("n", extent="512KiB", **SMALLER)
    assert refused.wait() == 2 and "extent: node n has a segment of 4MiB" in refused.errors.read_text()
    refused = machine.spawn("n", dram="128KiB")
    assert refused.wait() == 2 and "at least one extent" in refused.errors.read_text()


# --- smaller ----------------------------------------------------------------------------------------------------------


def shrunk(machine: Machine, name: str = "n") -> None:
    """Memory beyond the bound is given back; the head comes on top."""
    wait_until("memory is given back", lambda: held_bytes(machine, name) <= 4 * MIB + (64 << 10))


def test_a_smaller_node_keeps_what_is_hottest_and_gives_memory_back(machine: Machine) -> None:
    daemon = machine.serve("n", eviction="lru", **LARGER)
    store = machine.connect("n")
    acked = fill(store, 0, 120)
    assert daemon.terminate() == 0
    assert held_bytes(machine) >= 16 * MIB
    machine.serve("n", eviction="lru", **SMALLER)
    shrunk(machine)
    assert capacity(store) == 4 * MIB
    kept = check_right(store, acked)
    assert 16 * PAGES <= kept <= 32 * PAGES
    assert check_right(store, {119: PAGES}) == PAGES and check_right(store, {0: PAGES}) == 0, "the hottest"
    fill(store, 200, 40)
    assert sum(frames(store).values()) * (16 << 10) <= 4 * MIB
    check_laws(store)
