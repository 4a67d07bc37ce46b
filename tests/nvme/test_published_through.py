"""A parent leaves for NVMe between the look at it and the moment in which its children are published."""

from __future__ import annotations

import time
from typing import Any

import pytest

from kvstore import Store
from kvstore.client.local.publisher import ARRIVAL_S
from kvstore.errors import QuotaExceeded
from kvstore.failpoint import STALL
from tests.helpers.content import SMALL
from tests.helpers.inside import hurry, node_of
from tests.helpers.nvme.files import MIB, found, prompt, save_all, silent, target, tier, write_config
from tests.helpers.processes import Daemon, Machine, check_laws, frames, put, wait_settled, wait_until

PAGES, MORE = 8, 3


def serve(machine: Machine) -> Daemon:
    about = {"nvme": [f"{target(machine)}:{16 * MIB}"], "nvme_answer_s": 20.0}
    return machine.serve("n", failpoint=STALL, dram="4MiB", config=str(write_config(machine, "n", **about)))


def put_late(store: Store, other: Store, seed: int) -> None:
    """A writer that is paused just before it publishes, until DRAM has been emptied."""
    publisher = node_of(store).writable().channel.publisher
    assert publisher is not None
    publish = publisher.publish

    def late(*about: Any) -> int:
        save_all(other)
        return publish(*about)

    publisher.publish = late  # type: ignore[method-assign]
    assert put(store, seed, PAGES + MORE) == MORE
    publisher.publish = publish  # type: ignore[method-assign]


@pytest.mark.parametrize("killed", ["nobody", "writer", "daemon", "both"])
def test_children_follow_their_parent(killed: str, machine: Machine) -> None:
    """NVMe does not answer while they are on their way there, and whoever is killed is killed then."""
    daemon = serve(machine)
    store, other = machine.connect("n"), machine.connect("n")
    for seed in (1, 2):
        assert put(store, seed, PAGES) == PAGES
    wait_until("NVMe has them", lambda: tier(other)["pages"] == 2 * PAGES)
    with silent(target(machine)):
        put_late(store, other, 1)
        assert put(store, 5, 4) == 4  # a record behind the one that waits
        assert found(other, 5, 4) == 4, "it waits as well"
        assert found(other, 1, PAGES + MORE) in (0, PAGES)
        if killed in ("writer", "both"):
            store.close()
        other.stats()
        if killed in ("daemon", "both"):
            daemon.kill()
    if killed in ("daemon", "both"):
        serve(machine)
    wait_until("they have arrived", lambda: found(other, 1, PAGES + MORE) == PAGES + MORE)
    assert found(other, 5, 4) == 4
    assert other.stats()["counters"].get("pages_published_in_vain", 0) == 0
    if killed in ("nobody", "daemon"):
        assert put(store, 6, 4) == 4 and found(other, 6, 4) == 4
        store.close()
    wait_settled(other)
    check_laws(other)
    wait_until("its frames are free", lambda: frames(other)["reserved"] == 0)


def test_children_are_found_while_they_follow_their_parent(machine: Machine) -> None:
    """By the next lookup of anybody, as every put that returned: whoever misses them waits until they are on NVMe."""
    serve(machine)
    store, other = machine.connect("n"), machine.connect("n")
    for seed in range(10):
        assert put(store, seed, PAGES) == PAGES
        put_late(store, other, seed)
        reader, keys = (store, other)[seed % 2].cache(SMALL), prompt(seed, PAGES + MORE)[0]
        assert reader.lookup(keys).pages == PAGES + MORE
        assert found(other, seed, PAGES + MORE) == PAGES + MORE
    assert other.stats()["counters"].get("pages_published_in_vain", 0) == 0
    wait_settled(other)
    check_laws(other)


def test_a_device_that_does_not_answer_costs_whoever_misses_them_one_deadline(machine: Machine) -> None:
    serve(machine)
    store, other = machine.connect("n"), machine.connect("n")
    assert put(store, 1, PAGES) == PAGES
    wait_until("NVMe has them", lambda: tier(other)["pages"] == PAGES)
    with silent(target(machine)):
        put_late(store, other, 1)
        cache, keys = other.cache(SMALL), prompt(1, PAGES + MORE)[0]
        began = time.monotonic()
        for _ in range(20):
            cache.lookup(keys)
        assert time.monotonic() - began < 10 * ARRIVAL_S
    wait_until("they have arrived", lambda: found(other, 1, PAGES + MORE) == PAGES + MORE)


def test_a_frame_whose_page_is_on_its_way_is_not_written_again(machine: Machine) -> None:
    """Its writer was told to ask again, and gave up; what it puts next must not be saved under the first page's key."""
    serve(machine)
    store, other = machine.connect("n"), machine.connect("n")
    assert put(store, 1, PAGES) == PAGES
    save_all(other)
    with silent(target(machine)):
        keys, data = prompt(1, PAGES + MORE)
        hurry(store, 0.5)
        with pytest.raises(QuotaExceeded):  # what is said of everything that may not be stored now
            store.cache(SMALL).put(keys[PAGES:], data[PAGES:])
        hurry(store, 30.0)
        for seed in range(20, 40):
            assert put(store, seed, MORE) == MORE
    wait_until("they have arrived", lambda: found(other, 1, PAGES + MORE) == PAGES + MORE)
    for seed in range(20, 40):
        assert found(other, seed, MORE) == MORE
    store.close()
    wait_settled(other)
    check_laws(other)
