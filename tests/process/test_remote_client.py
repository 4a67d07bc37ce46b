"""A node over gRPC when things go wrong: killed and restarted, stopped, forked, closed; and what its bench rows say."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KVStoreError,
    LeaseBroken,
    NodeUnavailable,
    Unavailable,
    VersionMismatch,
)
from tests.process.content import LARGE, SMALL, chain, contents, layer_of, mismatch
from tests.process.harness import ROOT, Machine, wait_until
from tests.process.test_store_contract import free_port

PAGES = 6


@pytest.fixture
def address(machine: Machine) -> str:
    machine.serve("n", dram="32MiB", listen=(where := f"127.0.0.1:{free_port()}"))
    return f"kv://{where}"


@pytest.fixture
def store(machine: Machine, address: str) -> Iterator[Store]:
    with kvstore.connect(address, timeout_s=2.0) as store:
        yield store


def test_killed_and_restarted(machine: Machine, store: Store) -> None:
    """A clear error at once while it is down; then everything works again, and the pages are there."""
    cache, keys = store.cache(LARGE), chain(1, PAGES, LARGE)
    assert cache.put(keys, contents(keys, LARGE)) == PAGES
    lease = cache.lease(keys).__enter__()
    writer = cache.writer(chain(2, 2, LARGE)).__enter__()
    machine.processes[0].kill()
    more = chain(3, 2, LARGE)
    calls = (
        lambda: cache.lookup(keys),
        lambda: cache.get(keys),
        lambda: cache.put(more, contents(more, LARGE)),
        lambda: cache.put_async(more, contents(more, LARGE)).result(),
        lambda: cache.get_async(keys).result(5),
        lambda: cache.lease(keys).__enter__(),
        lambda: cache.writer(more).__enter__(),
        lambda: cache.reader(keys).read_layer(0, bytearray(PAGES * LARGE.layer_bytes)),
        lambda: cache.prefetch(keys),
        lambda: store.get("object"),
        lambda: store.put("object", b"x"),
        store.stats,
    )
    for call in calls:
        began = time.monotonic()
        with pytest.raises(NodeUnavailable, match="kv://"):
            call()
        assert time.monotonic() - began < 1.5
    assert mismatch(kvstore.client.match.Match(0, PAGES, "", np.stack(lease.pages)), keys, LARGE) == ""
    machine.serve("n")
    store.wait_ready(10)
    match = cache.get(keys)
    assert match.pages == PAGES and mismatch(match, keys, LARGE) == ""
    lease.renew(5)  # taken again
    lease.__exit__(None, None, None)
    data = contents(chain(2, 2, LARGE), LARGE)
    with pytest.raises(LeaseBroken):
        writer.write_layer(0, layer_of(data, 0, LARGE))
    writer.__exit__(RuntimeError, RuntimeError(), None)
    assert cache.put(more, contents(more, LARGE)) == 2
    assert store.verify()["findings"] == []


def test_a_stopped_node_costs_a_deadline(machine: Machine, address: str) -> None:
    with kvstore.connect(address, timeout_s=0.5) as store:
        cache, keys = store.cache(SMALL), chain(1, PAGES)
        cache.put(keys, contents(keys))
        daemon = machine.processes[0]
        daemon.stop()
        try:
            for call in (lambda: cache.lookup(keys), lambda: cache.get(keys), lambda: cache.lease(keys).__enter__()):
                began = time.monotonic()
                with pytest.raises(DeadlineExceeded):
                    call()
                assert 0.3 < time.monotonic() - began < 2.5
        finally:
            daemon.resume()
        wait_until("it answers again", lambda: _pages(cache.lookup, keys) == PAGES)


def _pages(call: Any, keys: Any) -> int:
    try:
        return int(call(keys).pages)
    except Unavailable:
        return -1


def test_nothing_there(machine: Machine) -> None:
    for address in (f"kv://127.0.0.1:{free_port()}", f"kv+unix://{machine.shm_dir}/none"):
        began = time.monotonic()
        with pytest.raises(NodeUnavailable, match="kv"):
            kvstore.connect(address, timeout_s=2.0)
        assert time.monotonic() - began < 2.5


def test_the_environment_names_the_node(machine: Machine, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_NODE", address)
    with kvstore.connect() as store:
        assert (store.name, address in repr(store)) == ("n", True)


def test_a_closed_store_refuses(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2)
    lease = cache.lease(keys).__enter__()
    store.close()
    store.close()
    for call in (
        lambda: cache.lookup(keys),
        lambda: cache.get(keys),
        lambda: cache.get(chain(1, 1)[:0]),
        lambda: cache.put(keys, contents(keys)),
        lambda: cache.get_async(keys),
        lambda: cache.lease(keys).__enter__(),
        lambda: cache.writer(keys).__enter__(),
        lambda: store.get("x"),
        lambda: store.contains("x"),
        store.stats,
        lambda: store.cache(SMALL),
    ):
        with pytest.raises(InvalidRequest, match="^store: is closed"):
            call()
    lease.release()


def test_a_forked_child_is_refused_and_ends_nothing(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2)
    cache.put(keys, contents(keys))
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for call in (lambda: cache.get(keys), lambda: cache.put(keys, contents(keys)), store.stats):
            try:
                call()
                said.append("not refused")
            except KVStoreError as error:
                said.append(str(error))
        store.close()
        store._remote._finalizer()  # type: ignore[attr-defined]
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    wait_until("the child ends", lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    said = os.read(read, 2000).decode().split("\n")
    os.close(read), os.close(write)
    assert len(said) == 3 and all("fork" in line for line in said), said
    assert cache.get(keys).pages == 2


def test_it_cannot_be_pickled(store: Store) -> None:
    for thing in (store, store.cache(SMALL)):
        with pytest.raises(InvalidRequest, match=r"kvstore\.connect\(\) in the other process"):
            pickle.dumps(thing)


def test_a_dropped_store_ends_its_threads(machine: Machine, address: str) -> None:
    """A process that never closes anything exits by itself."""
    code = f"""
import kvstore
from tests.process.content import SMALL, chain, contents
cache = kvstore.connect({address!r}).cache(SMALL)
keys = chain(1, 3)
cache.put(keys, contents(keys))
cache.put_async(chain(2, 3), contents(chain(2, 3)))
lease = cache.lease(keys).__enter__()
print(cache.get_async(keys).result(5).pages)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=machine.env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


def test_operators_name_pages_by_keys(machine: Machine, store: Store) -> None:
    cache, keys = store.cache(SMALL, "tenant"), chain(1, PAGES, salt="tenant")
    cache.put(keys, contents(keys))
    pin = store.pin(keys[:2], 30.0)
    assert pin["pages"] == 2 and len(store.pins()["pins"]) == 1
    assert store.evict(keys=keys, tier="all")["pages"] == PAGES - 2
    store.unpin(pin["pin"])
    assert store.evict(pages=PAGES)["pages"] == 2
    seen = store.events(after=0, limit=1000, wait_s=0.2)
    assert {"sealed", "evicted"} <= {event["kind"] for event in seen["events"]}
    assert store.events(after=seen["next"], wait_s=0.1) == {"events": [], "next": seen["next"], "lost": 0}
    with kvstore.connect("n") as local, pytest.raises(InvalidRequest, match="^keys: are of no cache"):
        store.pin(local.cache(SMALL, "another").keys(range(100)), 5.0)
    for field, call in (
        ("order", lambda: store.pages(order="odd")),
        ("wait_s", lambda: store.events(wait_s=2)),
        ("call", lambda: store._admin("no such")),
    ):
        with pytest.raises((InvalidRequest, VersionMismatch), match=field):
            call()
    assert store.pages(order="recent")["total"] == 0
