"""Layer-wise writers that wait for nobody: frames granted ahead, begun, sealed in the log of puts."""

from __future__ import annotations

import time

import numpy as np
import pytest

import kvstore
from kvstore import Keys, Store
from kvstore.errors import DeadlineExceeded
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.processes import Machine, check_laws, check_pages, evict_all, put, wait_settled, wait_until

PAGES = 4


def warm(store: Store) -> None:
    """Frames are granted ahead, and everything published is taken in."""
    for seed in range(1_000_000, 1_000_003):
        put(store, seed, 2 * PAGES)
    store.stats()


def layers_of(keys: Keys) -> list[np.ndarray]:
    """The bytes of each layer, ``[pages, layer_bytes]``."""
    rows = contents(keys).reshape(len(keys), SMALL.layers, -1)
    return [rows[:, layer] for layer in range(SMALL.layers)]


def write(store: Store, keys: Keys, ttl_s: float = 30.0) -> int:
    with store.cache(SMALL).writer(keys, ttl_s=ttl_s) as writer:
        for layer, data in enumerate(layers_of(keys)):
            writer.write_layer(layer, data)
    return writer.sealed


def test_a_writer_waits_for_nobody_and_its_pages_are_found(machine: Machine) -> None:
    """Nothing is asked of a daemon that stands still: all of it is done with what the session has."""
    daemon = machine.serve("n")
    store, other = machine.connect("n"), machine.connect("n")
    warm(store)
    daemon.stop()
    assert write(store, chain(1, PAGES)) == PAGES
    assert write(store, chain(1, 2 * PAGES)) == PAGES, "it goes on from what is only published"
    assert put(store, 1, 2 * PAGES) == 0
    daemon.resume()
    assert other.cache(SMALL).lookup(chain(1, 2 * PAGES)).pages == 2 * PAGES
    check_pages(other, {1: 2 * PAGES})
    assert store.stats()["counters"].get("pages_published_in_vain", 0) == 0
    check_laws(store)


def test_readers_follow_and_nobody_else_sees_it(machine: Machine) -> None:
    machine.serve("n")
    store, other = machine.connect("n"), machine.connect("n")
    warm(store)
    keys, cache = chain(1, PAGES), other.cache(SMALL)
    layers, out = layers_of(keys), np.zeros((PAGES, SMALL.layer_bytes), np.uint8)
    with store.cache(SMALL).writer(keys) as writer:
        for layer, data in enumerate(layers):
            writer.write_layer(layer, data)
            reader = cache.reader(keys, timeout_s=20.0)
            reader.read_layer(layer, out)
            assert np.array_equal(out, data)
            if layer + 1 < SMALL.layers:
                with pytest.raises(DeadlineExceeded):
                    cache.reader(keys, timeout_s=0.05).read_layer(layer + 1, out)
            assert cache.lookup(keys).pages == cache.get(keys).pages == 0
    assert cache.lookup(keys).pages == PAGES
    check_laws(store)


@pytest.mark.parametrize("killed", ["once", "twice"])
def test_readers_follow_over_a_kill_of_the_daemon(killed: str, machine: Machine) -> None:
    """What was begun is in the records: a reader who comes later finds it, and its writer goes on."""
    daemon = machine.serve("n")
    store = machine.connect("n")
    warm(store)
    keys, out = chain(1, PAGES), np.zeros((PAGES, SMALL.layer_bytes), np.uint8)
    layers = layers_of(keys)
    with store.cache(SMALL).writer(keys) as writer:
        writer.write_layer(0, layers[0])
        assert store.stats()["reservations"] == PAGES
        for _ in range({"once": 1, "twice": 2}[killed]):
            daemon.kill()
            daemon = machine.serve("n")
        with kvstore.connect("n") as late:
            late.cache(SMALL).reader(keys, timeout_s=20.0).read_layer(0, out)
        assert np.array_equal(out, layers[0])
        for layer in range(1, SMALL.layers):
            writer.write_layer(layer, layers[layer])
        store.stats()  # it has said HELLO to this daemon
        daemon.stop()
    daemon.kill()
    assert writer.sealed == PAGES
    machine.serve("n")
    check_pages(store, {1: PAGES})
    wait_settled(store)
    check_laws(store)


@pytest.mark.parametrize("then", ["resumed", "killed"])
def test_readers_follow_what_no_daemon_has_heard(then: str, machine: Machine) -> None:
    """The writer tells nobody. Who waits for its pages has the node take in what it published, or the next one has."""
    daemon = machine.serve("n")
    store, other = machine.connect("n"), machine.connect("n")
    warm(store)
    keys, out = chain(1, PAGES), np.zeros((PAGES, SMALL.layer_bytes), np.uint8)
    layers = layers_of(keys)
    daemon.stop()
    with store.cache(SMALL).writer(keys) as writer:
        writer.write_layer(0, layers[0])
        with pytest.raises(DeadlineExceeded):
            other.cache(SMALL).reader(keys, timeout_s=0.05).read_layer(0, out)
        if then == "resumed":
            daemon.resume()
        else:
            daemon.kill()
            machine.serve("n")
        other.cache(SMALL).reader(keys, timeout_s=20.0).read_layer(0, out)
        assert np.array_equal(out, layers[0])
        for layer in range(1, SMALL.layers):
            writer.write_layer(layer, layers[layer])
    assert writer.sealed == PAGES
    check_pages(other, {1: PAGES})
    wait_settled(store)
    check_laws(store)


@pytest.mark.parametrize("end", ["raises", "is late"])
def test_what_is_given_up_is_free_again(end: str, machine: Machine) -> None:
    machine.serve("n")
    store = machine.connect("n")
    warm(store)
    keys = chain(1, PAGES)
    writer = store.cache(SMALL).writer(keys, ttl_s=0.3)
    writer.__enter__()
    for layer, data in enumerate(layers_of(keys)):
        writer.write_layer(layer, data)
    assert store.stats()["reservations"] == PAGES
    if end == "is late":
        wait_until("readers see it no more", lambda: store.stats()["reservations"] == 0)
        time.sleep(0.3)
        writer.__exit__(None, None, None)
    else:
        writer.__exit__(RuntimeError, RuntimeError(), None)
    assert writer.sealed == 0 and store.cache(SMALL).lookup(keys).pages == 0
    wait_settled(store)
    check_laws(store)
    assert write(store, keys) == PAGES
    evict_all(store)
