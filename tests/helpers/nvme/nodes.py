"""Nodes with NVMe as processes: their configuration, what a reboot leaves, and the checks over both tiers."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvstore import Layout, Store
from tests.helpers.content import SMALL, chain, mismatch
from tests.helpers.inside import admin
from tests.helpers.nursery import of_nodes
from tests.helpers.processes import CLI, SETTLE_S, WAIT_S, Daemon, Machine, Worker, put, wait_until

NODE = "n"
NVME_WORKER = (sys.executable, "-m", "tests.helpers.workers.nvme")
KILLED = -int(signal.SIGKILL)
PROMPT_PAGES = 8
# ``tests/nvme/test_kills.py`` kills at every one: while pages move, and while a device is made, loaded and scanned.
MOVING_STEPS = ("mover.copy", "mover.saved", "mover.loaded", "mover.reported", "mover.checkpoint", "nvme.table")
NVME_STEPS = (*MOVING_STEPS, "nvme.format", "nvme.loaded", "scanner.run", "scanner.offered")
BUSY_STATES = ("reserved", "quarantined", "retiring")

# A page of 16 KiB takes 20 KiB of NVMe: extents of 50 frames, and some 3000 pages in 64 MiB. DRAM holds 128.
SETTINGS: Mapping[str, Any] = {
    "dram": "2MiB",
    "extent": "128KiB",
    "nvme_extent": "1MiB",
    "demote_at": 0.3,
    "promote_after": 1,
    "checkpoint_s": 0.05,
    "scrub_bytes_per_s": "256MiB",
}


def configure(machine: Machine, name: str = NODE, **settings: Any) -> dict[str, str]:
    """Flags of a node with these settings beside ``SETTINGS``; its file is ``target(machine)``, of 64 MiB."""
    settings = {"name": name, "nvme": [f"{target(machine)}:64MiB"]} | dict(SETTINGS) | settings
    path = machine.logs / f"{name}.toml"
    path.write_text("[node]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return {"config": str(path)}


def target(machine: Machine, number: int = 0) -> Path:
    """Where NVMe lies: on the disk that the tests run on."""
    return machine.logs / f"nvme-{number}"


def serve_format(machine: Machine, name: str = NODE, **settings: Any) -> Daemon:
    """Start a daemon as ``serve`` does, with ``--format``."""
    flags = configure(machine, name, **settings)
    command = [*CLI, "serve", "--name", name, "--format", "--config", flags["config"]]
    daemon = machine.start(Daemon, "format", command, of_nodes())
    daemon.wait_ready()
    return daemon


def reboot(machine: Machine, name: str = NODE) -> None:
    """What shared memory looks like after the machine was started again. No daemon of that name may run."""
    shutil.rmtree(machine.folder(name))


def nvme_worker(machine: Machine, verb: str, **arguments: Any) -> Worker:
    """Start a worker of ``workers.nvme``, which knows the verbs of ``workers.pages``, too."""
    command = [*NVME_WORKER, verb, json.dumps({"node": NODE, **arguments})]
    return machine.start(Worker, verb, command, of_nodes())


def kill(daemon: Daemon) -> None:
    """kill -9. That it had ended by itself is a finding."""
    assert daemon.kill() == KILLED, daemon.trace()


def start_killed(machine: Machine, failpoint: str, **flags: str) -> None:
    """A daemon, which comes to its failpoint."""
    daemon = machine.spawn(NODE, failpoint=failpoint, **flags)
    assert daemon.wait(60) == KILLED, daemon.trace()


def stored(machine: Machine, prompts: int = 50, **settings: Any) -> tuple[Daemon, Store, dict[int, int]]:
    """A node with prompts ``0 .. prompts``, all of them on NVMe, in extents without a checkpoint."""
    daemon = machine.serve(NODE, **configure(machine, **{"checkpoint_s": 1e6, **settings}))
    store = machine.connect(NODE)
    for seed in range(prompts):
        assert put(store, seed, PROMPT_PAGES) == PROMPT_PAGES
    save_all(store, prompts * PROMPT_PAGES)
    return daemon, store, dict.fromkeys(range(prompts), PROMPT_PAGES)


# --- checks ---------------------------------------------------------------------------------------------------------


def nvme(store: Store) -> dict[str, Any]:
    """What the node says of its NVMe tier."""
    return dict(store.stats()["tiers"]["nvme"])


def held(store: Store) -> dict[str, int]:
    """Frames of both tiers that neither hold a page nor are free, by tier and state; leases and reservations."""
    stats = store.stats()
    found = {
        f"{tier} {state}": about["frames"].get(state, 0)
        for tier, about in stats["tiers"].items()
        for state in BUSY_STATES
        if about["frames"].get(state, 0)
    }
    return found | {name: stats[name] for name in ("leases", "reservations") if stats[name]}


def wait_quiet(store: Store, timeout_s: float = SETTLE_S + 12) -> None:
    """Nothing stays reserved: dead writers' frames come back, copies arrive, and the scan ends."""
    try:
        wait_until("every frame holds a page or is free", lambda: not held(store), timeout_s)
    except AssertionError as late:
        raise AssertionError(f"{late}: {held(store)}") from None


def wait_pages(store: Store, pages: int, timeout_s: float = WAIT_S) -> int:
    """At least so many pages are on NVMe; returns how many."""

    def there() -> int:
        found = int(nvme(store)["pages"])
        return found if found >= pages else 0

    return int(wait_until(f"{pages} pages are on NVMe", there, timeout_s))


def save_all(store: Store, pages: int, timeout_s: float = WAIT_S) -> None:
    """Everything leaves DRAM, so that all of these pages are on NVMe; the node rests then."""

    def saved() -> bool:
        store.evict(pages=1 << 20)  # what is not saved yet is, and leaves the next time
        tiers = store.stats()["tiers"]
        return bool(tiers["dram"]["pages"] == 0 and tiers["nvme"]["pages"] >= pages)

    try:
        wait_until(f"{pages} pages are on NVMe alone", saved, timeout_s)
    except AssertionError as late:
        stats = store.stats()
        where = {tier: about["pages"] for tier, about in stats["tiers"].items()}
        raise AssertionError(f"{late}: {where}; {stats['counters']}") from None
    wait_quiet(store)


def wait_scanned(store: Store, timeout_s: float = WAIT_S) -> None:
    """The scan after a start is done."""
    wait_until("the scan is done", lambda: "scanning" not in nvme(store)["state"], timeout_s)


def check_stored(store: Store, acked: Mapping[int, int], layout: Layout = SMALL) -> int:
    """Every acknowledged page is found and every byte of it is right; a lookup says what a get finds."""
    cache = store.cache(layout)
    for seed, pages in sorted(acked.items()):
        keys = chain(seed, pages, layout)
        there = cache.lookup(keys)
        match = cache.get(keys)
        wrong = mismatch(match, keys, layout)
        assert not wrong, f"prompt {seed}: {wrong}"
        assert match.pages == there.pages == pages, f"prompt {seed}: {pages} acknowledged, {there}, then {match}"
    return sum(acked.values())


def check_closed(store: Store, pages: Mapping[int, int], layout: Layout = SMALL) -> int:
    """What is there of these prompts is right, and as much as a lookup says. Nobody else may be at work."""
    cache, found = store.cache(layout), 0
    for seed, count in sorted(pages.items()):
        keys = chain(seed, count, layout)
        match = cache.get(keys)
        wrong = mismatch(match, keys, layout)
        assert not wrong, f"prompt {seed}: {wrong}"
        found += match.pages
    return found


def check_findings(store: Store) -> None:
    """The conservation laws hold now, in whatever the node is busy with."""
    findings = admin(store, "verify")["findings"]
    assert findings == [], "\n".join(findings[:20])


def check_sound(store: Store) -> None:
    """Every page of both tiers holds what its checksums say, and all laws hold."""
    found = store.verify()
    assert found["findings"] == [], "\n".join(found["findings"][:20])
    assert found["pages_damaged"] == 0 and not any(found["damage_since_start"].values()), found
