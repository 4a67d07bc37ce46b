"""A process stopped inside a read of the index pins its old pages: the index must not grow for it without bound."""

from __future__ import annotations

from tests.helpers.processes import (
    Machine,
    allocated_bytes,
    check_laws,
    check_pages,
    check_right,
    put,
    wait_until,
)

MIB = 1 << 20
INDEX_BYTES_MAX = 24 * MIB  # of a node of 4 MiB: its map is 16 MiB and a little


def test_a_stopped_index_reader_does_not_make_the_index_grow(machine: Machine) -> None:
    """Writes go on, the index is made anew under another epoch, and what the reader finds afterwards is right."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    first = 100_000
    reader = machine.worker("stopped_in_index", "n", seed=1, pages=16, first=first, count=20)
    epoch = reader.wait_for("inside")["epoch"]
    wait_until("it stops itself", lambda: reader.state() == "T")
    writers = [
        machine.worker("put", "n", first=start, count=1 << 20, pages=16, parts=4) for start in (first, 2 * first)
    ]
    sizes = []

    def rebuilt() -> bool:
        index = store.stats()["index"]
        sizes.append(index["used_bytes"])
        return bool(index["epoch"] > epoch)

    wait_until("the index is made anew", rebuilt, 60.0)
    seen = [len(writer.events("put")) for writer in writers]
    for writer, count in zip(writers, seen, strict=True):
        writer.wait_for("put", count + 20)  # they go on
        writer.finish()
    index = store.stats()["index"]
    assert MIB < max(sizes) <= INDEX_BYTES_MAX, f"{max(sizes)}: the reader pinned nothing, or too much"
    assert index["rebuilds"].get("grown", 0) + index["rebuilds"].get("full", 0) >= 1, index
    assert index["used_bytes"] < 2 * MIB, f"the new index, which nobody pins, grows too: {index}"
    assert allocated_bytes(machine.folder("n")) <= 4 * MIB + INDEX_BYTES_MAX + 4 * MIB
    check_laws(store)
    last = {event["seed"]: event["pages"] for writer in writers for event in writer.events("put")[-12:]}
    assert check_right(store, last) > 0
    for seed in range(first, first + 5):
        put(store, seed, 16)
    reader.resume()
    assert reader.wait_for("resumed")["same"], "a snapshot is what it was"
    found = reader.wait_for("read")
    assert found["pages"] > 0 and found["epoch"] == store.stats()["index"]["epoch"]
    reader.wait_well()
    check_laws(store)


def test_a_reader_killed_inside_the_index_is_cleared(machine: Machine) -> None:
    """Its place in the table of readers is freed; after that the index is not rebuilt for its sake."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    reader = machine.worker("stopped_in_index", "n", seed=1, pages=16, first=0, count=1)
    reader.wait_for("inside")
    reader.kill()
    wait_until("the daemon has looked after dead readers", lambda: store.stats()["uptime_s"] > 3.0)
    before = store.stats()["index"]
    for seed in range(300):
        put(store, 1000 + seed, 16)
    after = store.stats()["index"]
    assert after["rebuilds"] == before["rebuilds"]
    assert after["used_bytes"] < 2 * MIB, after
    check_pages(store, {1299: 16})
