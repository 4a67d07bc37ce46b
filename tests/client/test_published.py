"""Puts that return when their pages are published: found at once, kept through every kill, refused without a trace.

A daemon that is stopped (SIGSTOP) takes nothing in, so that what these tests look at is really only published.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from kvstore import Layout, Store
from kvstore.client.local import hints
from kvstore.client.local.publisher import DRAIN_S
from kvstore.errors import QuotaExceeded, Unavailable
from kvstore.node.verify_stopped import verify_folder
from kvstore.shm import put_log
from tests.helpers.beacon import Beacon
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.inside import hurry
from tests.helpers.processes import (
    Daemon,
    Machine,
    check_laws,
    check_pages,
    evict_all,
    frames,
    kill,
    log_of,
    put,
    wait_settled,
    wait_until,
)

WIDE = Layout(model="published-test", layers=1, kv_heads=1, head_dim=1, dtype="uint8", page_tokens=4096)
"""Pages whose token ids are longer than their bytes: a few of them fill a ring."""


def warm(store: Store, layout: Layout = SMALL, pages: int = 8, first: int = 1_000_000) -> None:
    """Frames are granted ahead, and everything published is taken in."""
    for seed in range(first, first + 3):
        put(store, seed, pages, layout)
    store.stats()


def publish(store: Store, daemon: Daemon, seeds: range, pages: int = 2) -> dict[int, int]:
    """Put while nobody takes in; the daemon is stopped afterwards."""
    daemon.stop()
    for seed in seeds:
        assert put(store, seed, pages) == pages
    return dict.fromkeys(seeds, pages)


def test_a_put_is_found_by_the_next_lookup_of_anybody(machine: Machine) -> None:
    machine.serve("n")
    writer, reader = machine.connect("n"), machine.connect("n")
    mine, theirs = writer.cache(SMALL), reader.cache(SMALL)
    for seed in range(300):
        keys = chain(seed, 1 + seed % 4)
        assert mine.put(keys, contents(keys)) == len(keys)
        assert theirs.lookup(keys).pages == len(keys), seed
        assert theirs.get(keys).pages == mine.get(keys).pages == len(keys)
    assert writer.stats()["counters"]["puts_drained"] > 250, "these puts were not published"
    check_pages(reader, {seed: 1 + seed % 4 for seed in range(300)})
    check_laws(writer)


def test_a_put_of_many_records_is_found_whole_while_they_are_taken_in(machine: Machine) -> None:
    """Frames come in pieces, so that a prompt lies in several records, and the node is through with some of them."""
    machine.serve("n", dram="256MiB")
    writer, reader = machine.connect("n"), machine.connect("n")
    mine, theirs = writer.cache(SMALL), reader.cache(SMALL)
    for seed in range(60):
        keys = chain(seed, 100)
        whole = contents(keys)
        for pages in (1, 30, 61, 100):
            mine.put(keys[:pages], whole[:pages])
        assert theirs.lookup(keys).pages == mine.lookup(keys).pages == 100, seed
    check_laws(writer)


def test_what_grows_is_not_written_again(machine: Machine) -> None:
    """A prompt that is put in steps: nothing of it is asked, though nothing was taken in."""
    daemon = machine.serve("n")
    store = machine.connect("n")
    warm(store)
    daemon.stop()
    for pages in range(1, 6):
        assert put(store, 1, pages) == 1
    assert put(store, 1, 5) == 0
    daemon.resume()
    check_pages(store, {1: 5})
    assert store.stats()["counters"].get("pages_published_in_vain", 0) == 0


def test_a_put_into_a_full_pool_presses_out_no_page_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many records, with frames that are asked for meanwhile; few chains fill the pool."""
    monkeypatch.setattr("kvstore.client.local.grants.BATCH_BYTES", 4 * SMALL.page_bytes)
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    for seed in range(150):
        assert put(store, seed, 48) == 48
        assert store.cache(SMALL).lookup(chain(seed, 48)).pages == 48
    assert store.stats()["counters"].get("pages_published_in_vain", 0) == 0
    check_laws(store)


@pytest.mark.parametrize("killed", ["daemon", "writer", "both"])
def test_a_put_that_returned_survives(killed: str, machine: Machine) -> None:
    daemon = machine.serve("n")
    store = machine.connect("n")
    worker = machine.worker("put", "n", first=0, count=1 << 20, pages=3, pause_s=0.01)
    worker.wait_for("put", 5)
    daemon.stop()
    puts = len(worker.events("put"))
    worker.wait_for("put", puts + 3)  # it goes on as long as its frames last
    kill(machine, killed, worker, daemon)
    acked = worker.acknowledged()
    assert len(acked) >= puts + 3
    check_pages(store, acked)
    wait_settled(store)
    check_laws(store)
    evict_all(store)


def test_while_the_daemon_is_down_puts_go_on_as_long_as_frames_last(machine: Machine) -> None:
    daemon = machine.serve("n")
    writer, reader = machine.connect("n"), machine.connect("n")
    warm(writer)
    hurry(writer, 0.5)
    daemon.kill()
    acked = {}
    with pytest.raises(Unavailable):
        for seed in range(1000):
            acked[seed] = put(writer, seed, 2)
    acked = {seed: pages for seed, pages in acked.items() if pages}
    assert len(acked) > 3
    cache = reader.cache(SMALL)
    with Beacon(threads=True) as beacon:
        began = time.monotonic()
        assert [cache.lookup(chain(seed, 2)).pages for seed in acked] == [0] * len(acked), "a log row proves nothing"
        took_s = time.monotonic() - began - beacon.stall_s(began)
    assert took_s < len(acked) * DRAIN_S / 2, "reads waited for a daemon that is down"
    machine.serve("n")
    check_pages(reader, acked)
    check_laws(reader)


def test_a_stopped_daemon_costs_a_reader_one_deadline(machine: Machine) -> None:
    daemon = machine.serve("n")
    writer, reader = machine.connect("n"), machine.connect("n")
    warm(writer)
    acked = publish(writer, daemon, range(4))
    cache = reader.cache(SMALL)
    with Beacon(threads=True) as beacon:
        began = time.monotonic()
        for _ in range(20):
            for seed in acked:
                assert cache.lookup(chain(seed, 2)).pages == 0
        assert time.monotonic() - began - beacon.stall_s(began) < 20 * DRAIN_S
    daemon.resume()
    wait_until("it gives a sign", lambda: cache.lookup(chain(0, 2)).pages == 2)
    check_pages(reader, acked)


def test_a_full_log_is_taken_in_by_asking(machine: Machine) -> None:
    """Records of 130 KB: the ring has room for one or two; every put comes through."""
    machine.serve("n", dram="64MiB")
    store, reader = machine.connect("n"), machine.connect("n")
    cache = store.cache(WIDE)
    for seed in range(40):
        keys = chain(seed, 7, WIDE)
        assert cache.put(keys, contents(keys, WIDE)) == 7
    check_pages(reader, dict.fromkeys(range(40), 7), WIDE)
    check_laws(store)


def test_a_full_log_of_a_stopped_daemon_ends_at_the_deadline(machine: Machine) -> None:
    daemon = machine.serve("n", dram="64MiB")
    store = machine.connect("n")
    warm(store, WIDE, 7)
    hurry(store, 0.5)
    daemon.stop()
    acked, began = {}, time.monotonic()
    with pytest.raises(Unavailable):
        for seed in range(100):
            acked[seed] = put(store, seed, 7, WIDE)
    assert time.monotonic() - began < 30.0
    daemon.resume()
    check_pages(machine.connect("n"), acked, WIDE)
    store.close()


def test_a_damaged_log_costs_its_session_and_nobody_else(machine: Machine) -> None:
    daemon = machine.serve("n", dram="512MiB")  # both have frames ahead
    hurt, well, reader = machine.connect("n"), machine.connect("n"), machine.connect("n")
    warm(hurt)
    warm(well, first=2_000_000)
    log = log_of(machine)
    publish(hurt, daemon, range(3))
    (slot,) = log.waiting()
    kept = publish(well, daemon, range(10, 13))
    ring = put_log._RINGS_AT + slot * put_log.RING_BYTES
    start = log.drained_position(slot) % put_log.RING_BYTES
    log._map[ring + start + 100] ^= 1
    daemon.resume()
    wait_until("it is noticed", lambda: reader.stats()["counters"].get("put_logs_damaged") == 1)
    check_pages(reader, kept)
    for seed in range(20, 30):  # it goes on by asking
        assert put(hurt, seed, 2) == 2
    check_pages(reader, dict.fromkeys(range(20, 30), 2))
    check_laws(reader)
    hurt.close()
    wait_until("its slot is free", lambda: slot not in log.sessions().values())
    well.close()
    wait_settled(reader)
    check_laws(reader)
    wait_until("its frames return", lambda: frames(reader)["reserved"] == 0)


def test_tenants_with_a_quota_publish_what_they_may_have_and_are_told(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["limited dram=256KiB"]\n')
    machine.serve("n", dram="64MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("n")
    keys = chain(0, 32, SMALL, "limited")
    cache = store.cache(SMALL, salt="limited")
    assert cache.put(keys, contents(keys, SMALL)) == 16
    with store.cache(SMALL, salt="limited").lease(keys), pytest.raises(QuotaExceeded):
        more = chain(1, 4, SMALL, "limited")
        cache.put(more, contents(more, SMALL))
    for seed in range(2, 40):
        keys = chain(seed, 8, SMALL, "limited")
        assert cache.put(keys, contents(keys, SMALL)) == 8
        assert cache.lookup(keys).pages == 8
    stats = store.stats()
    assert stats["counters"]["puts_drained"] > 30, "these puts were not published"
    held = stats["tenants"]["limited"]["dram"]
    assert held["bytes"] <= held["quota_bytes"] and held["evicted_quota"] >= 16 + 37 * 8 - 16
    assert stats["counters"].get("pages_published_in_vain", 0) == 0
    check_laws(store)


def test_roots_with_a_quota_are_forgotten_with_their_names(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client remembers a bounded number of them, and asks again about the others: the quota holds."""
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["limited dram=256KiB"]\n')
    machine.serve("n", dram="64MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("n")
    monkeypatch.setattr(hints, "NAMED_MAX", 4)
    for turn in range(2):
        for adapter in range(10):
            layout = replace(SMALL, revision=str(adapter))
            keys = chain(adapter, 2, layout, "limited")
            store.cache(layout, salt="limited").put(keys, contents(keys, layout))
            limited = store._node.mapped().limited  # type: ignore[attr-defined]
            assert 0 < len(limited) <= 4, turn
    held = store.stats()["tenants"]["limited"]["dram"]
    assert 0 < held["bytes"] <= held["quota_bytes"]
    check_laws(store)


def test_frames_of_a_tenant_with_a_quota_are_its_own(machine: Machine) -> None:
    """Two salts of one session and class take their frames in turns, and the quota counts those of one."""
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["limited dram=512KiB"]\n')
    machine.serve("n", dram="64MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect("n")
    for seed in range(60):
        for salt in ("limited", "free"):
            keys = chain(seed, 5, SMALL, salt)
            assert store.cache(SMALL, salt=salt).put(keys, contents(keys, SMALL)) == 5
    tenants = store.stats()["tenants"]
    assert tenants["limited"]["dram"]["pages"] <= 32 and tenants["free"]["dram"]["pages"] == 300
    check_laws(store)


def test_more_sessions_than_slots(machine: Machine) -> None:
    machine.serve("n")
    stores = [machine.connect("n") for _ in range(put_log.SLOTS + 3)]
    for seed, store in enumerate(stores):
        assert put(store, seed, 2) == 2
    check_pages(stores[0], dict.fromkeys(range(len(stores)), 2))
    assert len(log_of(machine).sessions()) == put_log.SLOTS
    for store in stores[1:]:
        store.close()
    wait_until("slots are free again", lambda: len(log_of(machine).sessions()) <= 1)


@pytest.mark.parametrize("damaged", [False, True])
def test_verification_of_a_killed_node_tells_what_was_not_taken_in(damaged: bool, machine: Machine) -> None:
    daemon = machine.serve("n")
    store = machine.connect("n")
    warm(store)
    acked = publish(store, daemon, range(3))
    log = log_of(machine)
    (slot,) = log.waiting()
    daemon.kill()
    if damaged:
        start = log.drained_position(slot) % put_log.RING_BYTES
        log._map[put_log._RINGS_AT + slot * put_log.RING_BYTES + start + 100] ^= 1
    found = verify_folder(machine.folder("n"))
    if damaged:
        assert any("the checksum of the record" in line for line in found["findings"]), found
        return
    assert found["findings"] == []
    assert any(f"{len(acked)} puts are published and not taken in" in line for line in found["repairs"]), found
    machine.serve("n")
    check_pages(store, acked)
