"""Tenants who say much and store little: what a node remembers of it is bounded in bytes, and nobody else pays."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import numpy as np
import pytest

import kvstore
from kvstore import Layout
from kvstore.errors import InvalidRequest
from kvstore.node.book import NAMES, PINS, WASTE_BYTES
from kvstore.pb import store_pb2 as pb
from tests.helpers.api import Client, identities_file, serve_api
from tests.helpers.content import SMALL, chain, prompt
from tests.helpers.inside import node_of
from tests.helpers.processes import Machine, check_laws, put

ADAPTER = "x" * 1000
# As large as what a client says of a layout may be.
WORDY = Layout(
    model="m" * 1000, layers=1, kv_heads=1, head_dim=64, page_tokens=16, revision="r" * 1000, rope="o" * 1000
)


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_reads_make_the_node_remember_nothing(machine: Machine) -> None:
    _, address = serve_api(machine, identities=identities_file(machine.logs))
    local = machine.connect("api")
    names = node_of(local).folder.path / NAMES
    assert put(local, 1, 1, salt="b") == 1
    local.stats()  # by now it is taken in
    before = size_of(names)
    assert before > 0, "paired: whose the page is stands there"
    with kvstore.connect(f"kv://{address}", token="a-token") as store:
        for number in range(100):
            cache = store.cache(WORDY, salt="a", adapter=f"{number}-{ADAPTER}")
            tokens = prompt(number, 2, WORDY)
            assert cache.prefetch(tokens).pages == cache.get(tokens).pages == cache.lookup(tokens).pages == 0
            with cache.lease(tokens) as lease:
                assert not lease.pages
    assert size_of(names) == before
    said = node_of(local).mapped().header.names_forgotten  # type: ignore[union-attr]
    for number in range(600):  # as a client does before it reads
        cache = local.cache(WORDY, salt="a", adapter=f"{number}-{ADAPTER}")
        cache._name(node_of(local).writable())
    assert size_of(names) == before
    assert node_of(local).mapped().header.names_forgotten > said  # type: ignore[union-attr]


def test_what_a_tenant_stores_under_many_names_is_bounded_and_its_own_loss(machine: Machine) -> None:
    daemon = machine.serve("a", dram="64MiB")
    store = machine.connect("a")
    names = node_of(store).folder.path / NAMES
    rows = bytes(WORDY.page_bytes)
    for number in range(20):
        assert put(store, number, 1, salt="quiet") == 1
    before = daemon.memory_bytes()
    for number in range(2500):  # some 12 MB of names
        cache = store.cache(WORDY, salt="noisy", adapter=f"{number}-{ADAPTER}")
        assert cache.put(prompt(number, 1, WORDY)[:16], rows) == 1
    assert size_of(names) <= 8 << 20
    assert daemon.memory_bytes() - before < 40 << 20
    tenants = store.stats()["tenants"]
    assert tenants["noisy"]["dram"]["pages"] == 2500 and "" not in tenants, "forgotten names, not accounts"
    daemon.kill()
    machine.serve("a")
    tenants = store.stats()["tenants"]
    assert tenants["quiet"]["dram"]["pages"] == 20, "who says little keeps its names"
    assert 0 < tenants["noisy"]["dram"]["pages"] < 2500 and store.stats()["unclaimed_bytes"]["dram"] > 0
    for number in range(20):  # said again, since the node has started: some are of those that were lost
        cache = store.cache(WORDY, salt="noisy", adapter=f"{number}-{ADAPTER}")
        cache.put(prompt(number, 1, WORDY)[:16], rows)
    after = store.stats()
    noisy = after["tenants"]["noisy"]["dram"]["pages"]
    assert noisy > tenants["noisy"]["dram"]["pages"] and "" not in after["tenants"]
    assert after["unclaimed_bytes"]["dram"] == (2500 - noisy) * WORDY.page_bytes
    check_laws(store)


def test_a_pin_counts_what_is_stored_and_nothing_else_is_written(machine: Machine) -> None:
    daemon = machine.serve("a", dram="16MiB")
    store = machine.connect("a")
    pins = node_of(store).folder.path / PINS
    for salt in ("a", "b"):
        assert put(store, 1, 2, salt=salt) == 2
    long = chain(1, 2000, SMALL, "a")  # of which two pages are stored
    for _ in range(3):
        store.pin(long, 60)
    for number in range(40):  # other tails behind the same pages
        tokens = prompt(1, 2000)
        tokens[2 * SMALL.page_tokens :] += number + 1
        assert store.pin(store.cache(SMALL, salt="a").keys(tokens), 60)["pages"] == 2
    assert store.pin(chain(1, 2, SMALL, "b"), 60)["pages"] == 2, "and another tenant's pages can be pinned"
    assert size_of(pins) < WASTE_BYTES
    before = pins.stat()
    for number in range(100):
        for wrong in (chain(100 + number, 2, SMALL, "a"), chain(1, 2000, SMALL, "b")):
            with pytest.raises(InvalidRequest):
                store.unpin(keys=wrong)
    assert pins.stat() == before, "a wish that finds nothing writes nothing"
    assert len(store.pins()["pins"]) == 42
    assert store.unpin(keys=long)["unpinned"] == 1
    put(store, 1, 4, salt="a")
    assert store.pin(chain(1, 4, SMALL, "a"), 60)["pages"] == 4
    kept = {pin["pin"]: pin["pages"] for pin in store.pins()["pins"]}
    daemon.kill()
    machine.serve("a")
    assert {pin["pin"]: pin["pages"] for pin in store.pins()["pins"]} == kept
    store.pin(chain(1, 2, SMALL, "b"), 60)
    for pin in kept:
        store.unpin(pin)
    assert store.pins() == {"pins": [], "bytes": {"dram": 0}}
    check_laws(store)


def test_one_tenants_pins_leave_room_for_others(machine: Machine) -> None:
    machine.serve("a", dram="16MiB")  # pins may keep 8 MiB: 512 pages
    store = machine.connect("a")
    for seed in range(60):
        put(store, seed, 8, salt="a")
        with contextlib.suppress(InvalidRequest):
            store.pin(chain(seed, 8, SMALL, "a"), 60)
    kept = store.pins()["bytes"]["dram"]
    assert 4 << 20 < kept <= 6 << 20
    assert put(store, 1, 8, salt="b") == 8 and store.pin(chain(1, 8, SMALL, "b"), 60)["pages"] == 8
    check_laws(store)


def test_a_lease_takes_memory_for_what_it_holds(machine: Machine) -> None:
    daemon, address = serve_api(machine)
    tiny = Layout(model="tiny", layers=1, kv_heads=1, head_dim=64, page_tokens=1)
    tokens = np.arange(32_000, dtype=np.uint32)
    with kvstore.connect(f"kv://{address}") as store:
        cache = store.cache(tiny)
        assert cache.put(tokens[:1], bytes(tiny.page_bytes)) == 1
        with cache.lease(tokens) as lease:
            assert len(lease.pages) == 1
        before = daemon.memory_bytes()
        leases = [cache.lease(tokens) for _ in range(40)]
        for lease in leases:
            lease.__enter__()
        assert daemon.memory_bytes() - before < 64 << 20, "each named 32,000 pages, of which one is there"
        for lease in leases:
            lease.renew(60)
            lease.release()


def test_requests_of_very_many_values_are_refused_before_they_are_parsed(machine: Machine) -> None:
    _, address = serve_api(machine, rpc_buffers="16MiB")
    client = Client(address)
    pages = pb.Pages(layout=pb.Layout(model="m", layers=1, head_dim=64, page_tokens=16), tokens=bytes(64 * 60_000))
    for name in ("Lookup", "Prefetch", "Lease"):
        request = pb.LookupRequest(pages=pb.Pages(tokens=bytes(64), extras=[b""] * (1 << 20)))
        with pytest.raises(grpc.RpcError) as refused:
            client.call(name, request)
        assert "values" in refused.value.details() and refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for extras in ([b""] * 60_000, [b"d"] * 60_000):  # paired: a digest for each page is well
        pages.extras[:] = extras
        assert client.call("Lookup", pb.LookupRequest(pages=pages)).pages == 0
    client.close()
