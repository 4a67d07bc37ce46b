"""Bounds of NVMe: capacity, daily writes, what is admitted and when, memory of the daemon; and all ways to write and
read through a DRAM that is much too small."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from kvstore import Store, Tier
from kvstore.errors import KVStoreError
from kvstore.tier.nvme import geometry
from tests.helpers.content import SMALL, layer_of
from tests.helpers.inside import node_of
from tests.helpers.nvme.files import (
    CLASS,
    MIB,
    counted,
    found,
    nvme_worker,
    prompt,
    reboot,
    save_all,
    serve,
    target,
    tier,
)
from tests.helpers.processes import (
    Daemon,
    Machine,
    Worker,
    check_laws,
    put,
    wait_settled,
    wait_until,
)

PAGES = 8
DRAM_PROMPTS = 256 // PAGES  # that fit in 4 MiB


def put_all(store: Store, seeds: range, pages: int = PAGES) -> None:
    """Put prompts; all of each is new."""
    for seed in seeds:
        assert put(store, seed, pages) == pages


def there(store: Store, seeds: range) -> int:
    """How many of these prompts are whole; what is there is right."""
    return sum(found(store, seed, PAGES) == PAGES for seed in seeds)


# --- what NVMe may take ---------------------------------------------------------------------------------------------


def open_files(daemon: Daemon) -> int:
    """Descriptors of a process."""
    return len(os.listdir(f"/proc/{daemon.pid}/fd"))


def threads(daemon: Daemon) -> int:
    """Threads of a process."""
    return len(os.listdir(f"/proc/{daemon.pid}/task"))


def test_five_times_what_nvme_holds(machine: Machine) -> None:
    """Neither the tier nor the file ever exceeds its size, evictions are counted, and the daemon does not grow."""
    daemon = serve(machine, nvme=8 * MIB)
    store = machine.connect("n")
    about = tier(store)
    assert about["capacity_bytes"] <= 8 * MIB and about["extents_vacant"] > 0
    capacity_pages = about["capacity_bytes"] // geometry.stride_bytes(CLASS)
    count = 5 * capacity_pages // PAGES // 2
    writers = [
        nvme_worker(machine, "put", first=first, count=count, pages=PAGES, parts=2, pause_s=0.005)
        for first in (0, 10_000)
    ]
    seen: list[tuple[int, int, int]] = []
    while any(writer.alive for writer in writers):
        about = tier(store)
        assert about["used_bytes"] <= about["capacity_bytes"] and sum(about["frames"].values()) <= capacity_pages
        status = target(machine).stat()
        assert status.st_size == 8 * MIB and status.st_blocks * 512 <= 8 * MIB + 65536
        if about["evicted"]:
            seen.append((daemon.memory_bytes(), threads(daemon), open_files(daemon)))
        time.sleep(0.02)
    for writer in writers:
        writer.wait_well()
    assert len(seen) > 10, "too fast to have been measured"
    memory, tasks, files = zip(*seen, strict=True)
    early = memory[len(memory) // 4]  # what its threads touch first is had by then
    assert max(memory) <= early + 8 * MIB and max(memory) <= 96 * MIB, f"{early} to {max(memory)} bytes"
    assert max(tasks) <= tasks[0] + 2 and max(files) <= files[0] + 4, (tasks, files)
    assert tier(store)["evicted"].get("space", 0) >= 2 * capacity_pages, tier(store)["evicted"]
    put_all(store, range(50_000, 50_020))
    save_all(store)
    assert there(store, range(50_000, 50_020)) == 20, "what came last is there"
    wait_settled(store)
    check_laws(store)


def test_what_may_be_written_in_a_day(machine: Machine) -> None:
    """The cap is kept, over a clean restart and a reboot too; nothing is saved from then on, and DRAM goes on."""
    cap = 2 * MIB
    daemon = serve(machine, dram="5MiB", nvme_write_bytes_per_day=cap)  # an eighth may be granted ahead
    store = machine.connect("n")
    put_all(store, range(3 * DRAM_PROMPTS))
    wait_until("it is used up", lambda: tier(store)["written_today_bytes"] > cap - geometry.stride_bytes(CLASS))
    written, saved = tier(store)["written_today_bytes"], tier(store)["demoted_pages"]
    assert written <= cap and saved * geometry.stride_bytes(CLASS) == written, (written, saved)
    assert there(store, range(2 * DRAM_PROMPTS + 5, 3 * DRAM_PROMPTS)) == DRAM_PROMPTS - 5
    assert counted(store, "evicted_space"), "pages that could not be saved left"
    for restart in (lambda: None, lambda: reboot(machine)):
        assert daemon.terminate() == 0
        restart()
        daemon = machine.serve("n")
        store = machine.connect("n")
        assert tier(store)["written_today_bytes"] == written
        assert tier(store)["pages"] == saved
        put_all(store, range(100, 100 + 2 * DRAM_PROMPTS))
        time.sleep(0.2)
        assert tier(store)["written_today_bytes"] == written and tier(store)["demoted_pages"] == 0
        store.evict(pages=1 << 16)
        assert tier(store, "dram")["pages"] == 0
        assert sum(found(store, seed, PAGES) for seed in range(3 * DRAM_PROMPTS)) == saved
    check_laws(store)


@pytest.mark.parametrize("nvme", [2 * MIB, 16 * MIB], ids=["full", "empty"])
def test_a_dram_full_of_leases(nvme: int, machine: Machine) -> None:
    """A put ends in time, with what found room; when the leases end, puts find room again."""
    serve(machine, nvme=nvme, nvme_extent=MIB // 4)
    store = machine.connect("n")
    if nvme == 2 * MIB:
        put_all(store, range(1000, 1000 + 2 * DRAM_PROMPTS))
        wait_until("NVMe is full", lambda: tier(store)["evicted"])
    cache, leases = store.cache(SMALL), []
    store.evict(pages=1 << 16)
    for seed in range(DRAM_PROMPTS):
        keys, data = prompt(seed, PAGES)
        cache.put(keys, data)
        lease = cache.lease(keys, ttl_s=600.0)
        lease.__enter__()
        leases.append((seed, lease))
    node_of(store).writable().timeout_s = 1.0
    for seed in range(100, 103):
        keys, data = prompt(seed, PAGES)
        started = time.monotonic()
        try:
            stored = cache.put(keys, data)
        except KVStoreError as error:
            raise AssertionError(f"a full store is no failure: {error}") from error
        assert time.monotonic() - started < 30.0
        assert stored < PAGES
    for seed, lease in leases:
        expected = prompt(seed, PAGES)[1]
        assert all(np.array_equal(view, row) for view, row in zip(lease.pages, expected, strict=False))
        lease.__exit__(None, None, None)
    for seed in range(200, 230):
        put_all(store, range(seed, seed + 1))
        assert found(store, seed, PAGES) == PAGES
    check_laws(store)


# --- through a DRAM that is much too small --------------------------------------------------------------------------


def written_by_layers(store: Store, seed: int, ranks: int) -> None:
    """A write group of ``ranks`` that writes a prompt layer by layer."""
    keys, data = prompt(seed, PAGES)
    cache = store.cache(SMALL)
    writers = [cache.writer(keys, group=f"g{seed}", rank=rank, ranks=ranks) for rank in range(ranks)]
    for writer in writers:
        writer.__enter__()
    for layer in range(SMALL.layers):
        for rank, writer in enumerate(writers):
            writer.write_layer(layer, layer_of(data, layer, SMALL, SMALL.shard_heads(rank, ranks)))
    for writer in writers:
        writer.__exit__(None, None, None)


def read_by_layers(store: Store, seed: int) -> None:
    """Every layer, in any order, is right."""
    keys, data = prompt(seed, PAGES)
    reader = store.cache(SMALL).reader(keys, timeout_s=5.0)
    out = np.empty((PAGES, SMALL.layer_bytes), np.uint8)
    for layer in random.Random(seed).sample(range(SMALL.layers), SMALL.layers):
        reader.read_layer(layer, out)
        assert np.array_equal(out, layer_of(data, layer)), f"layer {layer} of prompt {seed}"


def read_leased(store: Store, seed: int) -> None:
    """Views of pages that were on NVMe: they are in DRAM now."""
    keys, data = prompt(seed, PAGES)
    with store.cache(SMALL).lease(keys) as lease:
        assert len(lease.pages) == PAGES
        assert all(np.array_equal(view, row) for view, row in zip(lease.pages, data, strict=True))


def prefetched(store: Store, seed: int) -> None:
    keys, data = prompt(seed, PAGES)
    assert store.cache(SMALL).prefetch(keys).pages == PAGES
    match = store.cache(SMALL).get(keys)
    assert match.tiers == {Tier.DRAM: PAGES} and match.data is not None and np.array_equal(match.data, data)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_write_groups_and_layer_wise_readers(ranks: int, machine: Machine) -> None:
    """Pages written layer by layer, by one or several ranks, go down; leases, layer-wise readers and prefetches bring
    them up again."""
    serve(machine)
    store = machine.connect("n")
    seeds = range(2 * DRAM_PROMPTS)
    for seed in seeds:
        written_by_layers(store, seed, ranks)
    save_all(store)
    assert store.cache(SMALL).lookup(prompt(0, PAGES)[0]).tiers == {Tier.NVME: PAGES}
    ways: tuple[Callable[[Store, int], None], ...] = (read_by_layers, read_leased, prefetched)
    for seed in seeds:
        ways[seed % 3](store, seed)
        assert store.cache(SMALL).lookup(prompt(seed, PAGES)[0]).tiers == {Tier.DRAM: PAGES}, ways[seed % 3].__name__
    assert there(store, seeds) == len(seeds)
    assert store.stats()["counters"]["pages_promoted"] == len(seeds) * PAGES
    check_laws(store)


def test_readers_of_pages_that_are_evicted_and_rewritten(machine: Machine) -> None:
    """Three processes read a NVMe of 3 MiB while two write fifteen times as much: they miss, and see no other bytes."""
    serve(machine, nvme=3 * MIB, dram="1MiB", nvme_extent=MIB // 4, promote_after=2)
    store = machine.connect("n")
    writers = [nvme_worker(machine, "mixed", first=first, count=1 << 20, pages=PAGES) for first in (0, 600_000)]
    for writer in writers:
        writer.wait_for("put", 20)
    readers: list[Worker] = []
    end = time.monotonic() + 8.0
    for number in range(3):  # each follows the writers: prompts of a second ago are on NVMe, if anywhere
        readers.append(nvme_worker(machine, "follow_puts", logs=[str(w.log) for w in writers], random=number))
    while time.monotonic() < end:
        assert tier(store)["used_bytes"] <= tier(store)["capacity_bytes"]
        time.sleep(0.05)

    def pressed() -> bool:
        clients = store.stats()["clients"]
        gone = tier(store)["evicted"].get("space", 0)
        return bool(gone > 500 and clients["hit_nvme"] > 500 and clients["missed_absent"] > 100)

    wait_until("enough was read, missed and evicted", pressed)
    for worker in [*readers, *writers]:
        worker.finish()
    wait_settled(store)
    check_laws(store)
    assert target(machine).stat().st_size == 3 * MIB
