"""Objects that are put with ``wait=False``: found at once by every call, kept through every kill, one value per key.

A daemon that is stopped (SIGSTOP) takes nothing in, so that what these tests look at is really only published.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import pytest

from kvstore import Store
from kvstore.errors import QuotaExceeded
from tests.helpers.nursery import of_nodes
from tests.helpers.processes import (
    Daemon,
    Machine,
    Worker,
    check_laws,
    evict_all,
    frames,
    kill,
    log_of,
    wait_settled,
    wait_until,
)
from tests.helpers.workers.objects import value_of

SIZES = (0, 1, 5000, 65_536, 65_537, 300_000, 2_000_000)


def warm(store: Store, name: str = "warm") -> None:
    """Frames are granted ahead, and everything published is taken in."""
    for turn in range(3):
        keys = [f"{name}/{turn}/{i}" for i in range(24)]
        assert all(store.put_many(keys, [value_of(1, SIZES[i % 6]) for i in range(24)], wait=False))
    store.stats()


def publish(store: Store, daemon: Daemon, first: int, batches: int) -> dict[str, bytes]:
    """Put batches of small values while the daemon is stopped; it stays so."""
    daemon.stop()
    acked = {}
    for batch in range(batches):
        values = {f"k/{first + batch}/{i}": value_of(first + batch * 10 + i, SIZES[i]) for i in range(4)}
        assert store.put_many(list(values), list(values.values()), wait=False) == [True] * 4
        acked |= values
    return acked


def start(machine: Machine, verb: str, **arguments: Any) -> Worker:
    command = [sys.executable, "-m", "tests.helpers.workers.objects", verb, json.dumps({"node": "n", **arguments})]
    return machine.start(Worker, verb, command, of_nodes())


def check(store: Store, values: dict[str, bytes]) -> None:
    outs = [bytearray(len(value)) for value in values.values()]
    assert store.get_many(list(values), outs) == [len(value) for value in values.values()]
    assert [bytes(out) for out in outs] == list(values.values())


def test_published_objects_are_found_by_every_call_of_another_client(machine: Machine) -> None:
    machine.serve("n", dram="256MiB")
    writer, reader = machine.connect("n"), machine.connect("n")
    for turn in range(60):
        values = {f"{turn}/{i}": os.urandom(SIZES[(turn + i) % len(SIZES)] % 400_000) for i in range(5)}
        assert writer.put_many(list(values), list(values.values()), wait=False) == [True] * 5
        first = f"{turn}/0"
        match turn % 6:
            case 0:
                check(reader, values)
            case 1:
                assert reader.get(first).tobytes() == values[first]
            case 2:
                assert reader.contains([*values, "none"]) == [True] * 5 + [False]
            case 3:
                assert reader.size(first) == len(values[first])
            case 4:
                assert reader.delete(list(values)) == 5 and not any(writer.contains(list(values)))
            case 5:
                assert set(values) <= set(reader.object_keys())
        again = reader.put_many(list(values), list(values.values()), wait=False)
        assert again == [turn % 6 == 4] * 5, "a key that is only published exists"
    assert writer.stats()["counters"]["puts_drained"] >= 60, "these objects were not published"
    assert reader.clear("5") > 0 and not any(key.startswith("5") for key in writer.object_keys())
    check_laws(writer)


@pytest.mark.parametrize("killed", ["daemon", "writer", "both"])
def test_published_objects_survive(killed: str, machine: Machine) -> None:
    daemon = machine.serve("n", dram="256MiB")
    store = machine.connect("n")
    warm(store)
    worker = start(machine, "publish", sizes=SIZES[:6])
    worker.wait_for("put", 5)
    daemon.stop()
    puts = len(worker.events("put"))
    worker.wait_for("put", puts + 1)
    kill(machine, killed, worker, daemon, dram="256MiB")
    acked: dict[str, bytes] = {}
    for event in worker.events("put"):
        assert event["stored"] == [True] * 6
        acked |= {f"{event['turn']}/{i}": value_of(event["turn"] + i, SIZES[i]) for i in range(6)}
    assert len(acked) >= 6 * (puts + 1)
    check(machine.connect("n"), acked)
    wait_settled(store)
    check_laws(store)
    evict_all(store)


def test_writers_of_the_same_keys_leave_one_whole_value(machine: Machine) -> None:
    """A refused value leaves no frame behind, although its writer receives no reply."""
    machine.serve("n", dram="256MiB")
    store = machine.connect("n")
    about = {"turns": 60, "batch": 16, "size": 9000, "wait": False}
    workers = [start(machine, "race", number=1000 * n, **about) for n in (1, 2)]
    for worker in workers:
        worker.wait_for("put", 60)
    for turn in range(60):
        outs = [bytearray(9000) for _ in range(16)]
        assert store.get_many([f"{turn}/{i}" for i in range(16)], outs) == [9000] * 16
        for i, out in enumerate(outs):
            assert bytes(out) in (value_of(1000 + i, 9000), value_of(2000 + i, 9000))
    for worker in workers:
        worker.kill()
    wait_settled(store)
    wait_until("their frames return", lambda: frames(store)["reserved"] == 0)
    check_laws(store)


def test_what_is_published_twice_is_stored_once(machine: Machine) -> None:
    """A writer that cannot know of the other one's objects, since the node is stopped, is refused later."""
    daemon = machine.serve("n", dram="64MiB")
    one, other = machine.connect("n"), machine.connect("n", timeout_s=0.5)
    warm(one)
    warm(other, "other")
    acked = publish(one, daemon, 0, 3)
    began = time.monotonic()
    assert other.put_many(list(acked), [b"late"] * len(acked), wait=False) == [True] * len(acked)
    assert time.monotonic() - began < 20.0
    daemon.resume()
    wait_until("all is taken in", lambda: log_of(machine).is_drained)
    check(other, acked)
    assert one.stats()["counters"]["pages_published_in_vain"] == len(acked)
    check_laws(one)


def test_replacing_waits_for_the_node(machine: Machine) -> None:
    machine.serve("n", dram="64MiB")
    store = machine.connect("n")
    assert store.put("k", b"old", wait=False)
    drained = store.stats()["counters"]["puts_drained"]
    assert store.put("k", b"new", replace=True, wait=False) and store.get("k").tobytes() == b"new"
    assert store.put("other", b"first", replace=True, wait=False) and store.get("other").tobytes() == b"first"
    assert store.stats()["counters"]["puts_drained"] == drained


def test_a_quota_refuses_objects_before_they_are_published(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["limited dram=256KiB"]\n')
    machine.serve("n", dram="64MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("n")
    for turn in range(30):
        keys = [f"{turn}/{i}" for i in range(8)]
        assert store.put_many(keys, [os.urandom(4096)] * 8, salt="limited", wait=False) == [True] * 8
        assert store.contains(keys, salt="limited") == [True] * 8
    with pytest.raises(QuotaExceeded):
        store.put_many(["large"], [os.urandom(300_000)], salt="limited", wait=False)
    stats = store.stats()
    held = stats["tenants"]["limited"]["dram"]
    assert held["bytes"] <= held["quota_bytes"] and held["evicted_quota"] >= 30 * 8 - 64
    assert stats["counters"]["puts_drained"] >= 20, "these objects were not published"
    assert stats["counters"].get("pages_published_in_vain", 0) == 0
    check_laws(store)
