"""Objects are cleared step by step: no call has all keys in memory, or keeps another tenant's calls waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import kvstore
from kvstore.client.local import objects
from kvstore.client.store import Store
from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.api import Client, pages_message
from tests.helpers.content import chain, contents
from tests.helpers.processes import Machine, check_laws

OBJECTS, STEP = 10, 3
MANY = 4000
PUT_S = 10.0


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="16MiB") as opened:
        for number in range(OBJECTS):
            opened.put(f"k{number}", b"value", salt="a")
            opened.put(f"k{number}", b"value", salt="b")
        yield opened


def test_each_step_of_a_clear_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LOOK_PAGES", STEP)
    steps = list(store.clear_in_steps("k", "a"))
    assert sum(steps) == OBJECTS and max(steps) <= STEP and len(steps) > 2 * OBJECTS // STEP
    assert store.object_keys("a") == [] and len(store.object_keys("b")) == OBJECTS


def test_what_moves_past_a_look_is_cleared_by_the_next(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that moves between tiers behind the look is like one that is put behind it."""
    monkeypatch.setattr(objects, "LOOK_PAGES", STEP)
    steps = store.clear_in_steps("k", "a")
    gone = next(steps) + next(steps)
    again = [key for key in (f"k{number}" for number in range(OBJECTS)) if not store.contains(key, "a")]
    assert len(again) == gone > 0
    assert store.put_many(again, [b"behind"] * gone, "a") == [True] * gone
    assert gone + sum(steps) == OBJECTS + gone and store.object_keys("a") == []


def test_a_call_ends_while_new_objects_come_all_the_time(store: Store) -> None:
    ended = 0
    for gone in store.clear_in_steps("k", "a"):
        ended += 1
        assert gone
        store.put(f"k{ended}", b"new", "a")
    assert ended == objects.LOOKS_MAX


def test_one_tenant_clears_while_another_puts(machine: Machine, tmp_path: Path) -> None:
    daemon, address = api.serve_api(machine, identities=api.identities_file(tmp_path))
    a, b = Client(address, "a-token"), Client(address, "b-token")
    local = machine.connect("api")
    names = [f"w/{number}" for number in range(MANY)]
    assert all(local.put_many(names, [b"value"] * MANY, salt="a"))
    assert local.put("w/0", b"of b", salt="b")
    cleared: list[int] = []
    request = pb.ClearObjectsRequest(prefix="w/", salt="a")
    thread = threading.Thread(target=lambda: cleared.append(a.call("ClearObjects", request, 60.0).removed))
    thread.start()
    for number in range(5):
        keys = chain(30 + number, 4, salt="b")
        reply = b.call("Write", api.write_messages(pages_message(keys, salt="b"), contents(keys)), PUT_S)
        assert reply.new_pages == 4
    thread.join(60)
    assert cleared == [MANY] and not any(local.contains(names, "a"))
    assert b.code("ClearObjects", request) is grpc.StatusCode.PERMISSION_DENIED
    assert b.call("ClearObjects", pb.ClearObjectsRequest(prefix="w", salt="b")).removed == 1
    with pytest.raises(grpc.RpcError) as refused:
        a.call("ClearObjects", pb.ClearObjectsRequest(prefix="k" * 1001, salt="a"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and "prefix" in refused.value.details()
    check_laws(local)
    a.close()
    b.close()
    assert daemon.terminate() == 0 and "Traceback" not in daemon.trace()


def test_a_node_that_is_away_is_told(machine: Machine) -> None:
    daemon = machine.serve("n")
    with kvstore.connect("n", timeout_s=0.5) as store:
        assert store.put("k", b"value")
        daemon.kill()
        began = time.monotonic()
        with pytest.raises(kvstore.errors.Unavailable):
            store.clear("k")
        assert time.monotonic() - began < 30
        machine.serve("n")
        assert store.clear("k") == 1


def test_members_of_a_group_count_wherever_the_look_finds_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "LOOK_PAGES", 1)
    store.put_many(["g1", "g2", "g3"], [b"1", b"2", b"3"], "a", group="g", count=3)
    assert store.clear("g", "a") == 3
