"""Opaque objects with real daemons: they survive kill -9 and reboots, and what was deleted does not come back."""

from __future__ import annotations

import os

import pytest

from tests.helpers.nvme.nodes import NODE, configure, reboot
from tests.helpers.processes import Machine, evict_all, wait_until

ALL_SAVED = {"demote_at": 0.0, "dram": "8MiB", "extent": "512KiB", "nvme_extent": "4MiB"}


@pytest.mark.parametrize("checkpoint_s", [0.05, 1e6])
def test_a_deleted_object_does_not_come_back_others_do(machine: Machine, checkpoint_s: float) -> None:
    name = NODE
    flags = configure(machine, name, checkpoint_s=checkpoint_s, **ALL_SAVED)
    daemon, store = machine.serve(name, **flags), machine.connect(name)
    values = {f"k{i}": os.urandom(1 + i * 30_000) for i in range(12)}
    assert all(store.put_many(list(values), list(values.values())))
    wait_until("all is saved", lambda: _pages(store, "nvme") >= _pages(store, "dram"))
    assert store.delete(["k0", "k5", "k11"]) == 3
    assert store.put("k7", b"new", replace=True)
    daemon.kill()
    reboot(machine, name)
    machine.serve(name, **flags)
    store = machine.connect(name)
    wait_until("the scan is over", lambda: store.put("probe", b"", replace=True))
    for key, value in values.items():
        found = store.get(key)
        if key in ("k0", "k5", "k11"):
            assert found is None, f"{key} came back"
        elif key == "k7":
            assert found is None or found.tobytes() == b"new"
        else:
            assert found is not None and found.tobytes() == value, key
    assert store.verify()["findings"] == []


def _pages(store: object, tier: str) -> int:
    return int(store.stats()["tiers"][tier]["pages"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("then", ["restart", "evict"])
def test_kill_of_the_daemon_keeps_objects_and_nvme_serves_evicted_ones(machine: Machine, then: str) -> None:
    flags = configure(machine, NODE, **ALL_SAVED)
    daemon, store = machine.serve(NODE, **flags), machine.connect(NODE)
    value = os.urandom(400_000)
    assert store.put("k", value)
    if then == "restart":
        daemon.kill()
        assert store.get("k").tobytes() == value, "reads need no daemon"
        machine.serve(NODE, **flags)
    else:
        wait_until("it is saved", lambda: _pages(store, "nvme") >= _pages(store, "dram"))
        evict_all(store)
    assert store.get("k").tobytes() == value
    assert store.delete("k") == 1 and store.get("k") is None
