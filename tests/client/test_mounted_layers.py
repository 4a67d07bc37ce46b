"""Layers and leases of pages that only mounted memory has: read where they lie, and kept by the node where they have to
stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.client.local.store import LocalStore
from kvstore.errors import DeadlineExceeded
from kvstore.tier.peer_memory import SharedFrames
from tests.helpers.content import SMALL, chain, contents, layer_of, prompt
from tests.helpers.mounted import Engine
from tests.helpers.pool import Pool, patient
from tests.helpers.processes import Machine, check_laws, put, wait_until

FRAMES = 16


def check_layers(store: Store, seed: int, pages: int, timeout_s: float = 30.0) -> None:
    """All layers of these pages, and some heads of each, as a reader of this store gets them."""
    reader = store.cache(SMALL).reader(prompt(seed, pages), timeout_s=timeout_s)
    data = contents(chain(seed, pages))
    for layer in range(SMALL.layers):
        for heads in (None, (1, 3)):
            expected = layer_of(data, layer, SMALL, heads)
            out = np.zeros_like(expected)
            reader.read_layer(layer, out, heads=heads)
            assert (out == expected).all(), (layer, heads)


def check_lease(store: Store, seed: int, pages: int) -> None:
    """A lease has views of all of them."""
    with store.cache(SMALL).lease(prompt(seed, pages)) as lease:
        assert len(lease.pages) == lease.match.pages == pages
        assert (np.stack(lease.pages) == contents(chain(seed, pages))).all()


@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
def test_layers_of_another_process_are_read_where_they_lie(machine: Machine, strided: bool) -> None:
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine, strided=strided)
    put(store, 1, 3)
    engine.publish(1, 20)
    check_layers(store, 1, 20)
    assert store.stats()["tiers"]["dram"]["pages"] == 3, "nothing was copied for that"
    engine.ask("retire", list(range(10, 20)))
    reader = store.cache(SMALL).reader(prompt(1, 20), timeout_s=0.2)
    with pytest.raises(DeadlineExceeded, match="page 10"):
        reader.read_layer(0, np.empty((20, SMALL.layer_bytes), np.uint8))
    check_laws(store)


def test_a_layer_that_changes_while_it_is_read_is_none(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.serve("n")
    store, other = machine.connect("n"), machine.connect("n")
    assert isinstance(other, LocalStore)
    segment, keys = other.mount(SMALL, FRAMES), chain(1, 4)
    segment.pages[:4] = contents(keys)
    segment.publish(keys, range(4))
    read = SharedFrames.read

    def read_late(self: SharedFrames, *given: Any) -> None:
        free = list(range(4))
        while free:  # as an engine does that has waited long enough for us
            free = [frame for frame in free if frame not in segment.retire(free)]
        read(self, *given)

    monkeypatch.setattr(SharedFrames, "read", read_late)
    reader = store.cache(SMALL).reader(prompt(1, 4), timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match="page 0"):
        reader.read_layer(1, np.empty((4, SMALL.layer_bytes), np.uint8))


def test_a_lease_outlives_the_engine(machine: Machine) -> None:
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine, strided=True)
    put(store, 1, 3)
    engine.publish(1, 20)
    with store.cache(SMALL).lease(prompt(1, 20)) as lease:
        engine.process.kill()
        wait_until("the node has noticed", lambda: "hbm" not in store.stats()["tiers"])
        assert lease.match.pages == 20 and (np.stack(lease.pages) == contents(chain(1, 20))).all()
    assert store.cache(SMALL).lookup(chain(1, 20)).pages == 20, "the node has them now"
    check_laws(store)


def test_layers_and_leases_over_nodes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What only engines' memory has, of the node itself and of another one; and pages that hang on it."""
    patient(monkeypatch)
    pool = Pool(machine, f"file:{machine.logs / 'catalog'}")
    theirs, ours = Engine(machine, "a"), Engine(machine, "c")
    for seed in (1, 2):
        theirs.publish(seed, 12, first=20 * seed)
        ours.ask("publish", seed, 5, list(range(20 * seed, 20 * seed + 5)), "")
        pool.known("c", seed, 12)
    check_layers(pool.stores["c"], 1, 12)
    check_lease(pool.stores["c"], 2, 12)
    assert pool.stores["a"].stats()["tiers"]["dram"]["pages"] == 0, "they came out of the engine's memory"
    for name in "ac":
        check_laws(pool.stores[name])
