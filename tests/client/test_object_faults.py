"""Opaque objects when something goes wrong: writers die or race, tiers are full, patterns never come to an end."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, OutOfSpace, QuotaExceeded
from tests.helpers.content import SMALL, chain
from tests.helpers.nursery import of_nodes
from tests.helpers.nvme.nodes import NODE
from tests.helpers.processes import Machine, Worker, armed, check_laws, frames, put, wait_settled, wait_until
from tests.helpers.workers.objects import value_of

WORKER = (sys.executable, "-m", "tests.helpers.workers.objects")


def start(machine: Machine, verb: str, *, failpoint: str = "", **arguments: Any) -> Worker:
    """A worker of ``workers.objects``."""
    command = [*WORKER, verb, json.dumps({"node": NODE, **arguments})]
    return machine.start(Worker, f"object-{verb}", command, of_nodes(), **armed(failpoint))


def test_processes_that_replace_one_key_leave_one_whole_value(machine: Machine) -> None:
    machine.serve(NODE, dram="64MiB")
    store = machine.connect(NODE)
    store.put("k", value_of(0, 100))
    writers = [start(machine, "replace", number=first) for first in (1_000, 1_000_000, 2_000_000)]
    for writer in writers:
        writer.wait_for("put", 3)
    seen: set[int] = set()
    deadline, reads = time.monotonic() + 15, 0
    while (len(seen) < 30 or reads < 60) and time.monotonic() < deadline:
        found, reads = store.get("k"), reads + 1
        if reads == 40:
            writers.pop().kill()
        if found is not None:
            number = int.from_bytes(found[:8].tobytes(), "little")
            assert found.tobytes() == value_of(number, len(found)), f"value {number} is mixed with another"
            seen.add(number)
    assert len(seen) >= 30
    for writer in writers:
        assert writer.terminate() == 0, writer.trace()
    wait_settled(store)
    last = store.get("k")
    number = int.from_bytes(last[:8].tobytes(), "little")
    assert last.tobytes() == value_of(number, len(last))
    acknowledged = [max(e["number"] for e in writer.events("put") if e["stored"]) for writer in writers]
    assert number in acknowledged or number > 2_000_000, "the last one that was acknowledged, or the dead writer's"
    assert store.delete("k") == 1
    wait_until("of all the values nothing is left", lambda: frames(store)["sealed"] == 0)
    check_laws(store)


def test_what_does_not_fit_is_refused_by_name(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["t dram=1MiB"]\n')
    machine.serve(NODE, dram="16MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect(NODE)
    with pytest.raises(InvalidRequest) as refused:
        store.put_many(["small", "large"], [b"x", np.zeros(17 << 20, np.uint8)])
    assert refused.value.field == "data" and not store.contains("small"), "nothing was stored"
    for size in (2 << 20, (1 << 20) + 1):
        with pytest.raises(QuotaExceeded) as full:
            store.put("k", bytes(size), salt="t")
        assert full.value.retry_after_s > 0
    assert store.stats()["tenants"]["t"]["dram"]["bytes"] == 0, "its pieces are gone again"
    assert store.put_many(["a", "b"], [bytes(200_000)] * 2, salt="t") == [True, True]
    for i in range(20):
        assert store.put(f"k{i}", bytes(200_000), salt="t"), "the coldest left"
    about = store.stats()["tenants"]["t"]["dram"]
    assert about["bytes"] <= 1 << 20 and about["evicted_quota"] > 0
    keys = [chain(seed, 8) for seed in range(150)]
    leases = []
    for seed, pages in enumerate(keys):
        if not put(store, seed, 8):
            break
        leases.append(store.cache(SMALL).lease(pages))
        leases[-1].__enter__()
    with pytest.raises(OutOfSpace) as none:
        store.put("k", bytes(8 << 20))
    assert not isinstance(none.value, QuotaExceeded)
    for lease in leases:
        lease.release()
    assert store.put("k", bytes(8 << 20)), "paired: the leases ended"
    check_laws(store)
