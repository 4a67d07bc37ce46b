"""After a reboot what reached NVMe is there again: at once where its extent had a checkpoint, else after a scan.

A reboot is a daemon that ends, by SIGTERM or kill -9, and its folder in /dev/shm removed.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore import Store
from kvstore.client.local import grants
from kvstore.tier.nvme.disk import FileDisk
from kvstore.tier.nvme.target import read_superblock, read_table
from tests.helpers.content import SMALL, chain, mismatch
from tests.helpers.nvme.nodes import (
    NODE,
    check_closed,
    check_findings,
    check_sound,
    check_stored,
    configure,
    kill,
    nvme,
    reboot,
    save_all,
    serve_format,
    stored,
    target,
    wait_quiet,
    wait_scanned,
)
from tests.helpers.nvme.nodes import PROMPT_PAGES as PAGES
from tests.helpers.processes import Machine, put, wait_until

REFUSED = 2  # exit code of a daemon that may not have its target
NO_CHECKPOINT: dict[str, Any] = {"checkpoint_s": 1e6}


@pytest.fixture(autouse=True)
def give_back_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not keep frames that it was granted ahead for seconds: the tests wait for them often."""
    monkeypatch.setattr(grants, "IDLE_S", 0.1)


def check_all(store: Store, acked: dict[int, int]) -> None:
    """All of it is there, sound, and stays so when it is put, moved and read again."""
    check_stored(store, acked)
    check_sound(store)
    for seed in list(acked)[:5]:
        assert put(store, seed, PAGES) == 0, "it is there already"
        keys = chain(seed, PAGES)
        assert store.cache(SMALL).prefetch(keys).pages == PAGES
        match = store.cache(SMALL).get(keys)
        assert not mismatch(match, keys) and match.tiers == {kvstore.Tier.DRAM: PAGES}
    wait_quiet(store)
    check_stored(store, acked)
    check_findings(store)


# --- one target -----------------------------------------------------------------------------------------------------


def test_clean_extents_are_there_at_once(machine: Machine) -> None:
    """A daemon that ends well writes a checkpoint; one that is killed has those it wrote before."""
    daemon, store, acked = stored(machine)
    assert daemon.terminate() == 0
    store.close()
    for _ in range(2):
        reboot(machine)
        daemon = machine.serve(NODE, **configure(machine))
        assert f"0 + {len(acked) * PAGES} pages kept" in daemon.wait_ready(), daemon.wait_ready()
        store = machine.connect(NODE)
        assert nvme(store)["state"] == "ready"
        check_stored(store, acked)
        check_all(store, acked)
        wait_until("all is checkpointed", lambda: _dirty(machine) == 0)
        daemon.kill()
        store.close()


def _dirty(machine: Machine, number: int = 0) -> int:
    """Extents that the device's table has as written to since their last checkpoint."""
    disk = FileDisk.open(target(machine, number), target(machine, number).stat().st_size, writable=False)
    try:
        superblock = read_superblock(disk)
        assert superblock is not None
        table, _ = read_table(disk, superblock)
        return sum(not extent.clean for extent in table.extents().values())
    finally:
        disk.close()


def open_gate(gate: Path, extents: int) -> None:
    """Let the scan begin so many of its extents."""
    new = gate.with_suffix(".new")
    new.write_text(str(extents))
    new.rename(gate)


def scanned_percent(store: Store) -> int:
    """How far the node says its scan is."""
    state = nvme(store)["state"]
    assert state.startswith("scanning "), state
    return int(state.split()[1])


@pytest.mark.parametrize("end", ["kill", "kill, in the middle of the scan"])
def test_unclean_extents_are_there_after_the_scan(end: str, machine: Machine) -> None:
    """And the clean ones meanwhile; and what is put meanwhile stays."""
    daemon, store, clean = stored(machine, prompts=40)
    assert daemon.terminate() == 0
    daemon = machine.serve(NODE, **configure(machine, **NO_CHECKPOINT))
    for seed in range(100, 140):
        put(store, seed, PAGES)
    both = clean | dict.fromkeys(range(100, 140), PAGES)
    save_all(store, len(both) * PAGES)
    daemon.kill()
    store.close()
    reboot(machine)
    gate = machine.logs / "gate"
    open_gate(gate, 3)
    gated = (sys.executable, "-m", "tests.helpers.workers.gated_scans", str(gate))
    daemon = machine.serve(NODE, cli=gated)
    if "scan" in end:
        with machine.connect(NODE) as early:
            wait_until("it scans", lambda: scanned_percent(early))
        kill(daemon)
        reboot(machine)
        daemon = machine.serve(NODE, cli=gated)
    store = machine.connect(NODE)
    before = wait_until("some of it is scanned", lambda: scanned_percent(store))
    found = check_closed(store, both)
    assert len(clean) * PAGES * 0.5 < found <= len(both) * PAGES, f"{found} pages are served while it scans"
    check_findings(store)
    put(store, 200, PAGES)
    put(store, 120, PAGES)  # of a chain that the scan may find as well
    check_stored(store, {120: PAGES, 200: PAGES})
    open_gate(gate, 6)
    wait_until("progress is shown", lambda: 100 > scanned_percent(store) > before)
    open_gate(gate, 1 << 30)
    wait_scanned(store)
    wait_quiet(store)
    check_all(store, both | {200: PAGES})
    kill(daemon)


# --- several targets ------------------------------------------------------------------------------------------------


def _targets(machine: Machine, *numbers: int) -> dict[str, Any]:
    return {**NO_CHECKPOINT, "nvme": [f"{target(machine, number)}:{40 - 8 * number}MiB" for number in numbers]}


@pytest.mark.parametrize("rebooted", [True, False])
def test_devices_in_another_order(rebooted: bool, machine: Machine) -> None:
    """Everything on a device is named by its own positions, so the order does not matter; killed or not."""
    daemon, store, acked = stored(machine, **_targets(machine, 0, 1))
    assert {device["pages"] > 0 for device in nvme(store)["devices"]} == {True}
    for number, order in enumerate(((1, 0), (0, 1), (1, 0))):
        if number == 1:
            assert daemon.terminate() == 0
        else:
            daemon.kill()
        store.close()
        if rebooted:
            reboot(machine)
        daemon = machine.serve(NODE, **configure(machine, **_targets(machine, *order)))
        store = machine.connect(NODE)
        wait_scanned(store)
        check_stored(store, acked)
    check_all(store, acked)


@pytest.mark.parametrize("rebooted", [True, False])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_device_is_missing_and_comes_back(missing: int, rebooted: bool, machine: Machine) -> None:
    """Its pages are gone, the others that hang on none of them are there; then all that nobody made anew is back."""
    daemon, store, acked = stored(machine, **_targets(machine, 0, 1))
    daemon.kill()
    store.close()
    if rebooted:
        reboot(machine)
    daemon = machine.serve(NODE, **configure(machine, **_targets(machine, 1 - missing)))
    store = machine.connect(NODE)
    wait_scanned(store)
    wait_quiet(store)
    check_sound(store)
    found = check_closed(store, acked)
    assert 0 < found < len(acked) * PAGES, f"{found} pages"
    for seed in (3, 200, 201, 202):  # the one is (partly) there, the others take numbers that the other device used
        put(store, seed, PAGES)
    acked |= dict.fromkeys((200, 201, 202), PAGES)
    check_stored(store, dict.fromkeys((3, 200, 201, 202), PAGES))
    save_all(store, 4 * PAGES)
    assert daemon.terminate() == 0
    store.close()
    if rebooted:
        reboot(machine)
    machine.serve(NODE, **configure(machine, **_targets(machine, 0, 1)))
    store = machine.connect(NODE)
    wait_scanned(store)
    wait_quiet(store)
    check_sound(store)
    check_stored(store, dict.fromkeys((3, 200, 201, 202), PAGES))
    again = check_closed(store, acked)
    assert again >= found + 3 * PAGES, f"{found} pages without the device, then {again}"
    for seed in acked:
        put(store, seed, PAGES)
    check_all(store, acked)


def test_a_device_that_cannot_be_used_is_left_out(machine: Machine) -> None:
    """A file larger than the free space: the node goes on with the other one and says so; and with none, too."""
    free = shutil.disk_usage(machine.logs).free
    too_large = f"{machine.logs}/too-large:{free // (1 << 20) + 4096}MiB"
    flags = configure(machine, nvme=[too_large, f"{target(machine)}:64MiB"])
    daemon = machine.serve(NODE, **flags)
    store = machine.connect(NODE)
    for seed in range(50):
        put(store, seed, PAGES)
    save_all(store, 50 * PAGES)
    assert "too-large" in nvme(store)["state"], nvme(store)["state"]
    check_all(store, dict.fromkeys(range(50), PAGES))
    assert not (machine.logs / "too-large").exists()
    assert daemon.terminate() == 0
    daemon = machine.serve(NODE, **configure(machine, nvme=[too_large]))
    put(store, 100, PAGES)
    check_stored(store, {100: PAGES})
    check_findings(store)
    assert nvme(store)["capacity_bytes"] == 0 and daemon.alive


# --- whose it is ----------------------------------------------------------------------------------------------------


def _refuses(machine: Machine, name: str, *words: str) -> None:
    """The daemon does not start, says why in one line, and the file is as it was."""
    path = target(machine)
    before = path.read_bytes()
    daemon = machine.spawn(name, **configure(machine, name))
    assert daemon.wait() == REFUSED, daemon.trace()
    said = daemon.errors.read_text()
    assert said.count("\n") == 1 and all(word in said for word in (str(path), "--format", *words)), said
    assert path.read_bytes() == before, "it was changed"


def test_a_file_of_another_node_is_refused(machine: Machine) -> None:
    """Until --format is given; then nothing of the other node's is ever served, not even to its own readers."""
    daemon, store, acked = stored(machine)
    assert daemon.terminate() == 0
    _refuses(machine, "other", NODE)
    other = serve_format(machine, "other")
    mine = machine.connect("other")
    assert nvme(mine)["pages"] == 0 and check_closed(mine, acked) == 0
    check_closed(store, acked)  # of a node that is down: its DRAM, and no wrong bytes from the file
    put(mine, 500, PAGES)
    check_stored(mine, {500: PAGES})
    check_sound(mine)
    check_closed(store, acked)
    _refuses_busy(machine, NODE)
    assert other.terminate() == 0
    _refuses(machine, NODE, "'other'")


def _refuses_busy(machine: Machine, name: str) -> None:
    daemon = machine.spawn(name, **configure(machine, name))
    assert daemon.wait() != 0 and "another node" in daemon.errors.read_text(), daemon.trace()


# --- embedded -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [None, "mine"])
def test_an_embedded_store_reopens_with_its_pages(name: str | None, machine: Machine) -> None:
    """One without a name saves what is in DRAM when it is closed; a named one keeps it where it is."""
    settings: dict[str, Any] = {
        "dram": "4MiB",
        "nvme": f"{target(machine)}:32MiB",
        "nvme_extent": "1MiB",
        "shm_dir": str(machine.shm_dir),
    }
    acked = dict.fromkeys(range(60), PAGES)
    for life in range(3):
        with kvstore.open(name, **settings) as store:
            if life:
                check_stored(store, acked)
            else:
                for seed in acked:
                    put(store, seed, PAGES)
            put(store, 100 + life, PAGES)
            acked[100 + life] = PAGES
            if life == 1:
                check_all(store, acked)
        assert [path.name for path in machine.shm_dir.iterdir()] == ([f"kvstore-{name}"] if name else [])
