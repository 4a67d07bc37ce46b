"""Several writers of one page: independent ones, ranks of one group, a rank that never comes; a reader ahead of all."""

from __future__ import annotations

import time

import pytest

from tests.helpers.content import SMALL, chain
from tests.helpers.processes import (
    Machine,
    check_laws,
    check_pages,
    check_right,
    evict_all,
    frames,
    put,
    wait_settled,
    wait_until,
)

PAGES = 8


@pytest.mark.parametrize("how", ["published", "waited for", "layer-wise"])
def test_two_writers_of_one_chain_at_once(how: str, machine: Machine) -> None:
    """A hundred rounds, both starting at the same moment: one right copy of every page."""
    rounds, every_s = 100, 0.015
    machine.serve("n")
    store = machine.connect("n")
    verb = {"layer_wise": how == "layer-wise", "wait": how == "waited for"}
    writers = [
        machine.worker("race", "n", first=0, count=rounds, pages=PAGES, every_s=every_s, **verb) for _ in range(2)
    ]
    for writer in writers:
        writer.wait_for("ready")
    start = time.monotonic() + 0.1
    for writer in writers:
        writer.tell(str(start))
    for writer in writers:
        writer.wait_well()
    check_pages(store, dict.fromkeys(range(rounds), PAGES))
    assert store.stats()["tiers"]["dram"]["pages"] == rounds * PAGES, "some page has two copies"
    new = [0] * rounds
    for writer in writers:
        for event in writer.events("raced"):
            new[event["seed"]] += event.get("new", 0)
            assert event["seen"] == PAGES
    if how == "published":  # both may count what both have published
        assert min(new) == PAGES and max(new) <= 2 * PAGES, new
    if how == "waited for":
        assert new == [PAGES] * rounds, "a page counted as new by both, or by none"
        shared = sum(0 < e["new"] < PAGES for e in writers[0].events("raced"))
        both = sum(e["new"] > 0 for e in writers[0].events("raced"))
        assert 0 < both < rounds or shared, "one writer was always first: they did not meet"
    check_laws(store)
    wait_settled(store)
    evict_all(store)


@pytest.mark.parametrize("missing", ["never starts", "is killed", "stops"])
def test_a_rank_that_never_comes(missing: str, machine: Machine) -> None:
    """No copy at all; the deadline (or the dead rank) gives the frames back, and another group writes a right one."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    # Both processes are there before the first one reserves: the deadline is not for their starts.
    options = {"seed": 1, "pages": PAGES, "group": "g", "ranks": 2, "ttl_s": 2.0, "wait": True}
    worker = machine.worker("layers", "n", rank=0, **options)
    worker.wait_for("ready")
    late = machine.worker("layers", "n", rank=1, step=True, **options) if missing != "never starts" else None
    if late is not None:
        late.wait_for("ready")
        late.tell()
        late.wait_for("reserved")
        late.tell()
        late.wait_for("layer")
    worker.tell()
    assert worker.wait_for("sealed") == {"event": "sealed", "pages": PAGES, "seen": 0}
    assert frames(store)["reserved"] == PAGES
    worker.wait_well()
    if late is not None and missing == "is killed":
        late.kill()
    elif late is not None:
        late.stop()
        wait_until("the deadline passes", lambda: frames(store)["quarantined"] == PAGES)
        daemon.kill()
        machine.serve("n")
        assert frames(store)["quarantined"] == PAGES
        for seed in range(100, 150):
            put(store, seed, 16)
        assert frames(store)["quarantined"] == PAGES
        late.kill()
    wait_until("the frames come back", lambda: frames(store)["quarantined"] == 0 and store.stats()["reservations"] == 0)
    check_laws(store)
    assert store.cache(SMALL).get(chain(1, PAGES)).pages == 0
    again = [
        machine.worker("layers", "n", seed=1, pages=PAGES, group="another", rank=rank, ranks=2) for rank in range(2)
    ]
    for worker in again:
        worker.wait_well()
    check_pages(store, {1: PAGES})


def test_a_reader_consumes_a_layer_before_the_next_one_is_written(machine: Machine) -> None:
    """Proven by turns: layer l+1 is written only after the reader has told that it read layer l."""
    machine.serve("n")
    store = machine.connect("n")
    ranks = 2
    writers = [
        machine.worker("layers", "n", seed=1, pages=PAGES, group="g", rank=rank, ranks=ranks, step=True)
        for rank in range(ranks)
    ]
    reader = machine.worker("follow", "n", seed=1, pages=PAGES, step=True)
    for writer in writers:
        writer.wait_for("reserved")
    reader.wait_for("ready")
    for layer in range(SMALL.layers):
        reader.tell()  # it may begin to wait
        for rank, writer in enumerate(writers):
            assert len(reader.events("layer")) == layer, f"layer {layer} was read before rank {rank} wrote it"
            writer.tell()
            writer.wait_for("layer", layer + 1)
        reader.wait_for("layer", layer + 1)
        assert all(len(writer.events("layer")) == layer + 1 for writer in writers)
        assert store.cache(SMALL).lookup(chain(1, PAGES)).pages == 0, "sealed already: nothing overlapped"
    for writer in writers:
        writer.tell()
        assert writer.wait_for("sealed")["pages"] == PAGES
    reader.wait_well()
    check_pages(store, {1: PAGES})


def test_a_reader_goes_on_with_another_writer(machine: Machine) -> None:
    """The writer it follows is killed after two layers; a second one writes the prompt again."""
    machine.serve("n")
    store = machine.connect("n")
    first = machine.worker("layers", "n", seed=1, pages=PAGES, step=True)
    reader = machine.worker("follow", "n", seed=1, pages=PAGES, step=True)
    first.wait_for("reserved")
    reader.wait_for("ready")
    for layer in range(2):
        first.tell()
        reader.tell()
        reader.wait_for("layer", layer + 1)
    first.kill()
    reader.tell()
    second = machine.worker("layers", "n", seed=1, pages=PAGES)
    reader.wait_for("layer", 3)
    reader.tell()
    reader.wait_well()
    second.wait_well()
    check_pages(store, {1: PAGES})
    check_right(store, {1: PAGES})
    wait_settled(store)
