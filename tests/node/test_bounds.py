"""Bounds: capacity, memory of the daemon, shared memory of the machine, and what two layouts owe each other."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Store
from tests.helpers.content import LARGE, SMALL, chain
from tests.helpers.processes import (
    WAIT_S,
    Machine,
    Worker,
    allocated_bytes,
    check_laws,
    check_pages,
    check_right,
    evict_all,
    put,
    wait_settled,
    wait_until,
)

MIB = 1 << 20


def test_four_times_the_load(machine: Machine) -> None:
    """Used bytes never exceed capacity, neither shared memory nor the daemon's own grows, and it goes on working."""
    daemon = machine.serve("n", dram="32MiB")
    store = machine.connect("n")
    capacity = store.stats()["tiers"]["dram"]["capacity_bytes"]
    assert capacity == 32 * MIB
    pages = capacity // SMALL.page_bytes
    writers = [
        machine.worker("put", "n", first=first, count=2 * pages // 16, pages=16, parts=2) for first in (0, 100_000)
    ]
    load, memory = 0, []
    while any(writer.alive for writer in writers):
        dram = store.stats()["tiers"]["dram"]
        assert dram["used_bytes"] <= capacity
        assert sum(dram["frames"].values()) * SMALL.page_bytes <= capacity
        load = store.stats()["counters"].get("pages_sealed", 0)
        if load > pages:
            memory.append((daemon.memory_bytes(), allocated_bytes(machine.folder("n"))))
        time.sleep(0.02)
    for writer in writers:
        writer.wait_well()
    assert store.stats()["counters"]["pages_sealed"] == 4 * pages, load
    assert len(memory) > 5, "too fast to have been measured"
    anonymous, shared = [size for size, _ in memory], [size for _, size in memory]
    assert max(anonymous) <= anonymous[0] + 8 * MIB, f"the daemon's memory grew: {anonymous[0]} to {max(anonymous)}"
    assert max(anonymous) <= 96 * MIB
    assert max(shared) <= capacity + 8 * MIB, f"{max(shared)} bytes of shared memory for {capacity} of pages"
    wait_settled(store)
    check_laws(store)
    last = {event["seed"]: 16 for writer in writers for event in writer.events("put")[-20:]}
    check_right(store, last)
    evict_all(store)


def test_what_was_just_put_is_not_the_first_to_leave(machine: Machine) -> None:
    """Everything older was read a moment ago, and yet was used before this was written."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    for seed in range(40):
        put(store, seed, 8)
    for seed in range(40, 70):
        check_right(store, dict.fromkeys(range(seed), 8))
        put(store, seed, 8)
        check_pages(store, {seed: 8})


@pytest.mark.parametrize("first", ["small", "large"])
def test_two_layouts_share_a_pool(first: str, machine: Machine) -> None:
    """Pages 32 times as large beside small ones, both putting more than fits: the second layout gets in, and stays.

    The first one has filled the whole pool by then, and goes on putting. How much each of them holds depends on how
    fast each puts: ``tests/state/test_space.py`` judges that.
    """
    machine.serve("n", dram="32MiB")
    store = machine.connect("n")
    options = {
        "small": {"pages": 16, "parts": 2, "pause_s": 0.002},
        "large": {"pages": 2, "layout": "large", "pause_s": 0.01},
    }
    puts: dict[str, Worker] = {}
    for name in sorted(options, key=lambda name: name != first):
        puts[name] = machine.worker("put", "n", first=0, count=1 << 20, **options[name])
        puts[name].wait_for("put", 20)
        if name == first:
            wait_until("the pool is full", lambda: store.stats()["counters"].get("evicted_space", 0) > 0)
    before = store.stats()["counters"]["evicted_space"]
    enough = {name: len(worker.events("put")) + 40 for name, worker in puts.items()}

    def both_have_put() -> bool:
        stats = store.stats()
        for kind in stats["tiers"]["dram"]["classes"]:
            assert kind["frames"]["sealed"] > 0, f"pages of {kind['page_bytes']} bytes were pressed out"
        much = stats["counters"]["evicted_space"] > before + 500
        return much and all(len(worker.events("put")) > enough[name] for name, worker in puts.items())

    wait_until("both put while there is no room", both_have_put, 2 * WAIT_S)
    for worker in puts.values():
        worker.finish()
    assert store.stats()["counters"]["extents_reclaimed"] > 0
    for name, worker in puts.items():
        stalled = sum(event["pages"] == 0 for event in worker.events("put"))
        assert stalled == 0, f"{stalled} of {len(worker.events('put'))} puts of {name} pages stored nothing"
    assert check_right(store, {event["seed"]: event["pages"] for event in puts["small"].events("put")[-4:]}) > 0
    assert check_right(store, {event["seed"]: 2 for event in puts["large"].events("put")[-2:]}, LARGE) > 0
    check_laws(store)
    wait_settled(store)
    evict_all(store)


# --- shared memory that is too small ---------------------------------------------------------------------------------


@pytest.fixture
def small_tmpfs(machine: Machine) -> Iterator[Path]:
    """A tmpfs of 24 MiB in place of /dev/shm."""
    folder = machine.shm_dir / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root and the right to mount: {made.stderr.strip()}")
    machine.shm_dir = folder
    try:
        yield folder
    finally:
        machine.close()
        subprocess.run(["umount", "-l", str(folder)], check=True)
        machine.shm_dir = folder.parent


def test_more_dram_than_shared_memory_is_refused(small_tmpfs: Path, machine: Machine) -> None:
    """One line that names the field, what is there and the remedy; nothing is left behind that would take memory."""
    result = machine.run("serve", "--name", "n", "--dram", "64MiB")
    assert result.returncode != 0
    assert result.stderr.count("\n") == 1, result.stderr
    for word in ("dram", "needs 66.0 MiB", "24.0 MiB", "remount", "--shm-size", "smaller --dram"):
        assert word in result.stderr, (word, result.stderr)
    assert os.statvfs(small_tmpfs).f_bfree * 4096 > 23 * MIB
    machine.serve("n", dram="8MiB")  # the remedy works


@pytest.mark.parametrize("dram", ["20MiB", "23MiB", "24MiB"])
def test_a_tmpfs_that_is_full_kills_nobody(
    dram: str, small_tmpfs: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages fit, tables and index hardly: fewer pages then, or a refusal in words; but no SIGBUS and no mess."""
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(small_tmpfs))
    daemon = machine.spawn("n", dram=dram)
    wait_until("it is ready or refuses", lambda: daemon.output() or not daemon.alive)
    if not daemon.alive:
        assert daemon.wait() > 0 and daemon.errors.read_text().count("\n") == 1, daemon.trace()
        return
    store = machine.connect("n")
    writers = [
        machine.worker("put", "n", first=0, count=150, pages=16),
        machine.worker("put", "n", first=1000, count=20, pages=2, layout="large"),
    ]
    for writer in writers:
        code = writer.wait(60)
        assert code in (0, 1), (code, writer.trace())  # an error in words, but no signal
    assert daemon.alive, daemon.trace()
    still_sound(store, small_tmpfs)
    daemon.kill()
    machine.serve("n")
    still_sound(store, small_tmpfs)


@pytest.mark.parametrize("carved", ["all", "half"])
def test_a_tmpfs_that_others_fill(
    carved: str, small_tmpfs: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a byte is left while pages of one class press out those of another: the index follows, whatever happens."""
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(small_tmpfs))
    machine.serve("n", dram="16MiB")
    store = machine.connect("n")
    wait_until("memory is populated", lambda: store.stats()["tiers"]["dram"]["populated_bytes"] == 16 * MIB)
    for seed in range(80 if carved == "all" else 30):
        put(store, seed, 16)
    machine.worker("put", "n", first=1000, count=1, pages=2, layout="large").wait_well()  # it has its first extent
    ballast = small_tmpfs / "ballast"
    with open(ballast, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    large = machine.worker("put", "n", first=2000, count=20, pages=2, layout="large")
    for seed in range(100, 140):
        put(store, seed, 16)
    assert large.wait(60) in (0, 1), large.trace()
    check_right(store, dict.fromkeys(range(140), 16))
    assert store.verify()["findings"] == []
    ballast.unlink()
    for seed in range(200, 240):
        put(store, seed, 16)
    wait_settled(store)
    check_laws(store)
    assert check_right(store, dict.fromkeys(range(200, 240), 16)) > 100


def still_sound(store: Store, folder: Path) -> None:
    """Laws, what is there, and a new put."""
    wait_settled(store)
    check_laws(store)
    there = check_right(store, dict.fromkeys(range(150), 16))
    assert there > 50, f"of a pool of 20 MiB {there} pages are in use; free: {os.statvfs(folder).f_bfree * 4096}"
    put(store, 5000, 4)
    assert store.cache(SMALL).get(chain(5000, 4)).pages == 4
