"""Opaque objects of a pool of three nodes: found, read and deleted from every node, with real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers.api import address_of
from tests.helpers.device_buffers import InterfaceBuffer, added_device
from tests.helpers.pool import Pool, patient
from tests.helpers.processes import Machine, check_laws, evict_all, stopped, wait_until
from tests.helpers.workers.objects import value_of

SIZES = (0, 5, 4096, 5000, 300_000, 2_500_000)  # of one page and of several, with pages of every size
KEYS = [f"value {size}" for size in SIZES]
VALUES = [np.frombuffer(value_of(number, size), np.uint8) for number, size in enumerate(SIZES)]


@pytest.fixture
def pool(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    patient(monkeypatch)
    yield Pool(machine, f"file:{tmp_path / 'catalog'}")


def wait_found(store: Store, keys: list[str], salt: str = "") -> None:
    wait_until("the pool knows them", lambda: all(store.contains(keys, salt)), 60)


def read(store: Store, keys: list[str], salt: str = "") -> list[bytes | None]:
    """The values under ``keys``, read in one call into buffers that are too large."""
    outs = [np.zeros(3_000_000, np.uint8) for _ in keys]
    sizes = store.get_many(keys, outs, salt)
    return [out[:size].tobytes() if size >= 0 else None for out, size in zip(outs, sizes, strict=True)]


def test_objects_are_found_and_read_from_every_node(pool: Pool) -> None:
    a, b, c = (pool.stores[name] for name in "abc")
    a.put_many(KEYS[:4], VALUES[:4])
    b.put_many(KEYS[4:], VALUES[4:], wait=False)
    a.put("salted", VALUES[3], salt="tenant")
    wait_found(c, KEYS)
    wait_found(c, ["salted"], "tenant")
    assert [c.size(key) for key in KEYS] == list(SIZES) and c.size("none") is None
    assert read(c, [*KEYS, "none"]) == [*(value.tobytes() for value in VALUES), None]
    whole = c.get(KEYS[5])
    assert whole.tobytes() == VALUES[5].tobytes()
    parts = [np.zeros(size, np.uint8) for size in (100_000, 1, 0, 2_399_999)]
    assert c.get(KEYS[5], parts) == SIZES[5] and np.concatenate(parts).tobytes() == VALUES[5].tobytes()
    assert c.get("salted", salt="tenant").tobytes() == VALUES[3].tobytes() and c.get("salted") is None
    with pytest.raises(InvalidRequest, match=r"out: must have at least 300000 bytes for the value .got 10."):
        c.get(KEYS[4], np.zeros(10, np.uint8))
    near = {"local": True}
    assert not any(c.contains(["salted", "none"], "tenant", **near)) and c.size("salted", "tenant", **near) is None
    assert c.get("salted", salt="tenant", **near) is None
    assert c.get_many(["salted"], [np.zeros(5000, np.uint8)], "tenant", **near) == [-1]
    check_laws(c)


def test_objects_of_other_nodes_are_read_into_device_memory(pool: Pool) -> None:
    """At first from the other node, then from a copy here, which is made from the bytes that arrived."""
    a, c = pool.stores["a"], pool.stores["c"]
    a.put_many(KEYS, VALUES)
    wait_found(c, KEYS)
    with added_device() as device:
        for _ in range(3):
            outs: list[Any] = [InterfaceBuffer(device, (size + 10,)) for size in SIZES]
            outs[5] = [InterfaceBuffer(device, (1_000_000,)), InterfaceBuffer(device, (1_500_000,))]
            assert c.get_many([*KEYS, "none"], [*outs, bytearray(1)]) == [*SIZES, -1]
            outs[5] = InterfaceBuffer(device, (2_500_000,), np.concatenate([out.seen for out in outs[5]]))
            for out, value in zip(outs, VALUES, strict=True):
                np.testing.assert_array_equal(out.seen[: value.size], value)
        assert all(c.contains(KEYS, local=True))
        with pytest.raises(InvalidRequest, match=r"out: must have at least 5000 bytes for the value .got 4999."):
            c.get(KEYS[3], InterfaceBuffer(device, (4999,)))


def test_an_object_that_is_read_twice_is_stored_here(pool: Pool) -> None:
    a, c = pool.stores["a"], pool.stores["c"]
    a.put_many(KEYS, VALUES)
    wait_found(c, KEYS)
    assert read(c, KEYS) == [value.tobytes() for value in VALUES] and not any(c.contains(KEYS, local=True))
    assert c.get(KEYS[1]).tobytes() == VALUES[1].tobytes()
    assert c.contains(KEYS[1], local=True) and sum(c.contains(KEYS, local=True)) == 1
    assert read(c, KEYS) == [value.tobytes() for value in VALUES]
    assert all(c.contains(KEYS, local=True))
    pool.daemons["a"].kill()
    assert read(c, KEYS) == [value.tobytes() for value in VALUES]
    check_laws(c)


def test_objects_of_the_pool_are_read_over_grpc(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient(monkeypatch)
    catalog = f"file:{tmp_path / 'catalog'}"
    machine.serve("a", dram="32MiB", catalog=catalog)
    daemon = machine.spawn("b", dram="32MiB", catalog=catalog, listen="127.0.0.1:0")
    machine.connect("a").put_many(KEYS, VALUES)
    with kvstore.connect(f"kv://{address_of(daemon.wait_ready())}") as far:
        wait_found(far, KEYS)
        assert not any(far.contains(KEYS, local=True)) and far.get(KEYS[1], local=True) is None
        assert read(far, KEYS) == [value.tobytes() for value in VALUES]
        assert far.size(KEYS[4]) == SIZES[4] and far.get("none") is None


def test_another_node_is_read_where_one_fails(pool: Pool) -> None:
    for name in "ab":
        pool.stores[name].put_many(KEYS, VALUES)
    c = pool.stores["c"]
    wait_found(c, KEYS)
    with stopped(pool.data_server("a")):
        for _ in range(3):
            assert read(c, KEYS) == [value.tobytes() for value in VALUES]
    for store in pool.stores.values():
        evict_all(store)
    wait_until("all are gone", lambda: not any(c.contains(KEYS)), 60)


def test_a_deletion_holds_on_every_node(pool: Pool) -> None:
    a, b, c = (pool.stores[name] for name in "abc")
    for store in (a, b):
        store.put_many(KEYS, VALUES)
    pool.well()  # the owners list both nodes
    assert c.delete([KEYS[0], KEYS[5], "none"]) == 2
    for store in (a, b, c):
        assert store.contains(KEYS) == [False, True, True, True, True, False]
        assert not any(store.contains([KEYS[0], KEYS[5]], local=True))
    assert c.put(KEYS[0], VALUES[1]) and c.get(KEYS[0]).tobytes() == VALUES[1].tobytes(), "a later put is stored"
    assert a.delete(KEYS[1], local=True) == 1
    assert a.contains(KEYS[1]) and not a.contains(KEYS[1], local=True), "another node has it"
    with stopped(pool.data_server("a")):
        assert b.delete(KEYS[2:5]) == 3
        assert not any(b.contains(KEYS[2:5])) and all(a.contains(KEYS[2:5], local=True)), "a does not know it yet"
    wait_until("a drops its values", lambda: not any(a.contains(KEYS[2:5], local=True)), 60)
    check_laws(a)
    pool.well()


def test_a_value_that_is_replaced_is_replaced_on_every_node(pool: Pool) -> None:
    a, b, c = (pool.stores[name] for name in "abc")
    for store in (a, b):
        store.put_many(KEYS, VALUES)
    pool.well()  # the owners list both nodes
    assert c.put_many(KEYS, VALUES[::-1], replace=True) == [True] * len(KEYS)
    for store in (a, b, c):
        wait_found(store, KEYS)
        assert read(store, KEYS) == [value.tobytes() for value in VALUES[::-1]]
    pool.daemons["b"].stop()
    assert a.put(KEYS[1], b"new", replace=True)
    pool.daemons["b"].resume()
    wait_until("b has no other value", lambda: b.get(KEYS[1]).tobytes() == b"new", 60)
    check_laws(a)


def test_objects_of_all_nodes_are_cleared(pool: Pool) -> None:
    a, b, c = (pool.stores[name] for name in "abc")
    a.put_many([f"k/a/{number}" for number in range(1500)], [b"x"] * 1500)
    b.put_many([f"k/b/{number}" for number in range(700)], [b"x"] * 700)
    for store in (a, b):
        store.put_many(["k/both", "other"], [b"1", b"2"])
        store.put("k/salted", b"3", salt="tenant")
    c.put("k/c", b"4")
    wait_found(c, ["k/a/1499", "k/b/699", "k/both", "other"])
    assert a.clear("k/a", local=True) == 1500
    with stopped(pool.data_server("b")), pytest.raises(NodeUnavailable, match="b: did not answer"):
        c.clear("k/c")
    wait_until("b is reached again", lambda: c.contains("k/b/1"), 60)
    assert c.clear("k/") == 701 and c.clear("k/") == 0
    for store in (a, b, c):
        assert store.contains(["k/b/0", "k/both", "k/c", "other"]) == [False, False, False, True]
        assert store.contains("k/salted", "tenant") and store.object_keys() == ["other"] * (store is not c)
    pool.well()
