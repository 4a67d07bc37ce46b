"""NVMe that is too large, absent, full, broken, slow or silent: the node goes on with DRAM and says so."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

import kvstore
from kvstore import Store
from kvstore.errors import OutOfSpace
from kvstore.tier.nvme.disk import FileDisk
from tests.helpers.content import SMALL
from tests.helpers.nvme.files import (
    AT_ONCE,
    MIB,
    Faults,
    counted,
    found,
    prompt,
    save_all,
    serve_at,
    target,
    tier,
)
from tests.helpers.processes import Machine, check_laws, wait_until

PAGES = 8
CALL_S = 60.0  # no call may take longer, whatever a disk does; deadlines are 5 s
DRAM_PROMPTS = 256 // PAGES  # that fit in 4 MiB

T = TypeVar("T")


def timed(call: Callable[[], T], most_s: float = CALL_S) -> T:
    """What it returns. Fails where it takes too long."""
    started = time.monotonic()
    value = call()
    took_s = time.monotonic() - started
    assert took_s < most_s, f"it took {took_s:.1f} s"
    return value


def put_all(store: Store, seeds: range) -> None:
    """Put prompts, and find each right after that."""
    cache = store.cache(SMALL)
    for seed in seeds:
        keys, data = prompt(seed, PAGES)
        assert timed(lambda k=keys, d=data: cache.put(k, d)) == PAGES, f"prompt {seed} was not accepted"
        assert timed(lambda s=seed: found(store, s, PAGES)) == PAGES, f"prompt {seed} is gone at once"


def there(store: Store, seeds: range) -> int:
    """How many of these prompts are whole; what is there is right."""
    return sum(timed(lambda s=seed: found(store, s, PAGES)) == PAGES for seed in seeds)


def device(store: Store, number: int = 0) -> str:
    """What the node says of a device."""
    return str(tier(store)["devices"][number]["state"])


# --- targets that cannot be used ------------------------------------------------------------------------------------


def goes_on_with_dram(machine: Machine, daemon: Any, path: Path, *words: str) -> None:
    """It serves DRAM; stats, ``status``, ``tiers`` and the log name the target and the reason."""
    store = machine.connect("n")
    put_all(store, range(3 * DRAM_PROMPTS))
    assert there(store, range(2 * DRAM_PROMPTS + 5, 3 * DRAM_PROMPTS)) == DRAM_PROMPTS - 5
    nvme = tier(store)
    assert nvme["capacity_bytes"] == nvme["pages"] == 0
    for said in (
        nvme["state"],
        device(store),
        daemon.errors.read_text(),
        machine.run("status", "--node", "n").stdout,
        machine.run("tiers", "--node", "n").stdout,
    ):
        assert str(path) in said or said == device(store)
        assert all(word in said for word in words), said
    assert "left out" in daemon.errors.read_text() and not path.exists()
    check_laws(store)


def test_what_does_not_fit_is_not_tried(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the last block from everybody else, for as long as it takes to fail."""
    tried: list[Any] = []
    monkeypatch.setattr("kvstore.tier.nvme.disk.os.posix_fallocate", lambda *arguments: tried.append(arguments))
    system = os.statvfs(machine.logs)
    with pytest.raises(OutOfSpace, match="No space left on device"):
        FileDisk.open(target(machine), system.f_blocks * system.f_frsize, create=True)
    assert tried == [] and not target(machine).exists()


@pytest.fixture
def small_disk(machine: Machine) -> Iterator[Path]:
    """A file system of 24 MiB in memory, to put targets on."""
    folder = machine.logs / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"mounting a small tmpfs needs root and the right to mount: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        machine.close()
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_more_than_a_small_disk_has_room_for(small_disk: Path, machine: Machine) -> None:
    path = small_disk / "device"
    daemon = serve_at(machine, "n", [f"{path}:32MiB"])
    goes_on_with_dram(machine, daemon, path, "needs 33554432 bytes", "25165824 free")
    assert os.statvfs(small_disk).f_bfree * 4096 == 24 * MIB, "nothing is left behind"


def unusable(kind: str, machine: Machine, small_disk: Path) -> str:
    """A path where no target can be."""
    if kind == "read-only":
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        return str(small_disk / "device")
    (machine.logs / "a file").touch()
    return str(
        {
            "in no folder": machine.logs / "nowhere" / "device",
            "in a file": machine.logs / "a file" / "device",
            "a folder": machine.logs,
            "a character device": Path("/dev/null"),
            "no device": Path("/dev/nvme-that-is-not-there"),
        }[kind]
    )


def test_paths_that_no_target_can_have(small_disk: Path, machine: Machine) -> None:
    """That is a mistake of the operator's, and no fault of a disk: the node does not start, one line says why."""
    for kind, words in {
        "in no folder": "No such file or directory",
        "in a file": "Not a directory",
        "a folder": "neither a file nor a block device",
        "a character device": "neither a file nor a block device",
        "no device": "does not exist",
        "read-only": "Read-only file system",
    }.items():
        path = unusable(kind, machine, small_disk)
        result = machine.run("serve", "--name", "n", "--dram", "4MiB", "--nvme", f"{path}:16MiB")
        assert result.returncode == 2 and result.stdout == "", (kind, result)
        assert result.stderr.count("\n") == 1 and words in result.stderr and path in result.stderr, (kind, result)
    serve_at(machine, "n", [])  # and the name is free


# --- disks that fill ------------------------------------------------------------------------------------------------


def fill(folder: Path) -> None:
    """Take all the room that is left."""
    with open(folder / "ballast", "wb") as file:
        while True:
            try:
                os.write(file.fileno(), bytes(1 << 16))
            except OSError:
                return


def test_a_disk_that_promised_more_than_it_has(small_disk: Path, machine: Machine) -> None:
    """Thin provisioning: the space is gone when it is written to. DRAM goes on, what was saved is read on."""
    path = small_disk / "device"
    daemon = serve_at(machine, "n", [f"{path}:16MiB"])
    store = machine.connect("n")
    put_all(store, range(10))
    save_all(store)
    subprocess.run(["fallocate", "-p", "-o", str(8 * MIB), "-l", str(7 * MIB), str(path)], check=True)
    fill(small_disk)
    put_all(store, range(100, 100 + 20 * DRAM_PROMPTS))
    wait_until("it says so", lambda: "No space left" in device(store))
    assert there(store, range(100 + 19 * DRAM_PROMPTS + 5, 100 + 20 * DRAM_PROMPTS)) == DRAM_PROMPTS - 5
    assert there(store, range(10)) == 10
    assert daemon.alive and "takes no more writes" in daemon.errors.read_text()
    assert "No space left" in machine.run("status", "--node", "n").stdout
    check_laws(store)
    daemon.terminate()
    (small_disk / "ballast").unlink()
    machine.serve("n")
    store = machine.connect("n")
    assert there(store, range(10)) == 10 and device(store).startswith("ready")
    put_all(store, range(5000, 5000 + 2 * DRAM_PROMPTS))
    save_all(store)
    assert there(store, range(5000, 5000 + 2 * DRAM_PROMPTS)) == 2 * DRAM_PROMPTS


# --- disks that fail ------------------------------------------------------------------------------------------------


class Embedded:
    """A node in this process, whose disks do what ``faults`` says."""

    def __init__(self, machine: Machine, faults: Faults) -> None:
        self.machine = machine
        self.faults = faults
        self.store: Store | None = None

    def open(self, devices: int = 1, nvme: int = 32 * MIB, **settings: Any) -> Store:
        """Start it, again where it was stopped."""
        targets = [f"{target(self.machine, number)}:{nvme}" for number in range(devices)]
        settings = AT_ONCE | {"shm_dir": str(self.machine.shm_dir)} | settings
        self.store = kvstore.open("n", dram="4MiB", nvme=targets, **settings)
        return self.store

    def close(self) -> None:
        if self.store is not None:
            self.faults.heal()
            timed(self.store.close)


@pytest.fixture
def embedded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Embedded]:
    """Ends with a check that no thread died."""
    died: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    faults = Faults()
    monkeypatch.setattr("kvstore.tier.nvme.disk.os", faults)
    here = Embedded(machine, faults)
    try:
        yield here
    finally:
        here.close()
    assert died == [], [str(failed.exc_value) for failed in died]


FAILURES = {
    "EIO on write": ("pwritev", errno.EIO),
    "full": ("pwritev", errno.ENOSPC),
    "EIO on sync": ("fdatasync", errno.EIO),
}


# Each pair of a failure, of who fails and of when comes up.
@pytest.mark.parametrize(
    ("kind", "failing", "after"),
    [
        ("EIO on write", "one of two", 0),
        ("EIO on write", "all", 7),
        ("full", "one of two", 7),
        ("full", "all", 0),
        ("EIO on sync", "one of two", 0),
        ("EIO on sync", "all", 7),
    ],
)
def test_writes_that_fail(kind: str, failing: str, after: int, embedded: Embedded) -> None:
    """One of two: nothing that was accepted is lost. All: what was saved, and as much as DRAM holds, is there."""
    call, error = FAILURES[kind]
    store = embedded.open(devices=2)
    before, during = range(40), range(100, 200)
    put_all(store, before)
    save_all(store)
    path = str(target(embedded.machine)) if failing == "one of two" else ""
    embedded.faults.add(call, error, path, after=after)
    put_all(store, during)
    wait_until("it says so", lambda: device(store).startswith(f"failed: [Errno {error}]"))
    assert device(store, 1).startswith("ready" if path else "failed")
    assert os.strerror(error) in tier(store)["state"]
    assert there(store, before) == len(before), "what was saved is read on"
    if path:
        assert there(store, during) == len(during), f"accepted pages are gone: {store.stats()['counters']}"
        save_all(store)
        assert there(store, during) == len(during)
    else:
        assert there(store, during[-DRAM_PROMPTS + 5 :]) == DRAM_PROMPTS - 5
        put_all(store, range(1000, 1100))
        timed(lambda: store.evict(pages=1 << 16))
        assert tier(store, "dram")["pages"] == 0, "what cannot be saved leaves as it is"
    check_laws(store)
    embedded.close()
    store = embedded.open(devices=2)
    assert device(store).startswith("ready") and device(store, 1).startswith("ready")
    assert there(store, before) == len(before)
    assert not path or there(store, during) == len(during)
    put_all(store, range(2000, 2050))
    save_all(store)
    assert there(store, range(2000, 2050)) == 50
    check_laws(store)


@pytest.mark.parametrize("failing", ["one of two", "all"])
def test_reads_that_fail(failing: str, embedded: Embedded) -> None:
    """Misses, with their reason; what cannot be read is dropped, so that a later put of it works."""
    store = embedded.open(devices=2, promote_after=2)
    seeds = range(40)
    put_all(store, seeds)
    save_all(store)
    assert there(store, range(1)) == 1
    path = str(target(embedded.machine)) if failing == "one of two" else ""
    embedded.faults.add("preadv", errno.EIO, path)
    whole = there(store, seeds)
    assert (0 < whole < len(seeds)) if path else whole == 0
    misses = store.stats()["client"]["misses"]
    # The node looked as well, and dropped the page before this client had read it, or even looked for it.
    gone = misses.pop("generation", 0) + misses.pop("absent", 0)
    assert misses.keys() == {"io"} and misses["io"] + gone == len(seeds) - whole and gone < misses["io"]
    there(store, seeds)  # a second read: the node tries for itself
    wait_until("they are dropped", lambda: there(store, seeds) == whole and dropped(store, seeds) == whole)
    assert counted(store, "damaged_").keys() == {"damaged_io"}
    put_all(store, range(100, 140))
    for seed in seeds:
        timed(lambda s=seed: store.cache(SMALL).put(*prompt(s, PAGES)))
        assert there(store, range(seed, seed + 1)) == 1
    embedded.faults.heal()
    save_all(store)
    assert there(store, seeds) == len(seeds) and there(store, range(100, 140)) == 40
    check_laws(store)


def dropped(store: Store, seeds: range) -> int:
    """How many of these prompts the index has, whole."""
    return sum(store.cache(SMALL).lookup(prompt(seed, PAGES)[0]).pages == PAGES for seed in seeds)


# --- disks that are slow, or silent ---------------------------------------------------------------------------------


def test_a_put_that_has_to_wait_for_the_disk(embedded: Embedded) -> None:
    """It waits, and succeeds: every page is accepted, and in one of the tiers afterwards."""
    store = embedded.open()
    embedded.faults.add("pwritev", slow_s=0.03)
    put_all(store, range(3 * DRAM_PROMPTS))
    assert there(store, range(3 * DRAM_PROMPTS)) == 3 * DRAM_PROMPTS
    embedded.faults.heal()
    save_all(store)
    assert there(store, range(3 * DRAM_PROMPTS)) == 3 * DRAM_PROMPTS
