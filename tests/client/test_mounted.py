"""Memory that engines mount: other processes find, prove and read its pages; it ends with its engine, and not with the
node's daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import Store, Tier
from kvstore.client.local.cache import LocalCache
from kvstore.client.local.segment import LocalSegment
from kvstore.client.local.store import LocalStore
from kvstore.errors import InvalidRequest
from kvstore.shm import mounted
from kvstore.shm.folder import NodeFolder
from kvstore.shm.mounted import MountedTable, mounted_numbers, mounted_path
from kvstore.wire.control import CHAINED, Op, pack_addresses, pack_class
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.mounted import FRAMES, Engine
from tests.helpers.pool import Pool, patient
from tests.helpers.processes import Machine, check_laws, check_pages, check_right, put, wait_until

LONG_NS = 600 * 10**9  # however slow the machine is


def tiers(store: Store, seed: int, pages: int, salt: str = "") -> dict[Tier, int]:
    """Where a lookup finds these pages, and a get."""
    cache, keys = store.cache(SMALL, salt=salt), chain(seed, pages, salt=salt)
    looked, got = cache.lookup(keys), cache.get(keys)
    assert looked.tiers == got.tiers, (looked, got)
    return got.tiers


def mounted_pages(store: Store) -> int:
    """Pages that the node knows of, over all tenants."""
    tenants = store.stats()["tenants"].values()
    return sum(about["hbm"]["pages"] for about in tenants if "hbm" in about)


def segment_of(store: Store, frames: int = FRAMES) -> LocalSegment:
    """One of this process."""
    assert isinstance(store, LocalStore)
    return store.mount(SMALL, frames)


def test_pages_of_another_process_are_found_and_read(machine: Machine) -> None:
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    assert tiers(store, 1, 20) == {}
    engine.publish(1, 20)
    assert tiers(store, 1, 20) == {Tier.HBM: 20}
    check_pages(store, {1: 20})
    assert put(store, 1, 5) == 5, "what an engine has is not stored by the node"
    assert tiers(store, 1, 20) == {Tier.DRAM: 5, Tier.HBM: 15}
    check_pages(store, {1: 20})
    assert mounted_pages(store) == 20
    check_laws(store)
    assert engine.ask("retire", list(range(10, 20)))["free"] == list(range(10, 20))
    assert tiers(store, 1, 20) == {Tier.DRAM: 5, Tier.HBM: 5}
    engine.ask("close")
    assert tiers(store, 1, 20) == {Tier.DRAM: 5} and mounted_pages(store) == 0
    check_laws(store)


def test_hbm_comes_before_nvme(machine: Machine, tmp_path: Any) -> None:
    machine.serve("n", dram="4MiB", nvme=f"{tmp_path / 'disk'}:64MiB", demote_at="0")
    store, engine = machine.connect("n"), Engine(machine)
    put(store, 1, 20)
    wait_until("all are saved", lambda: store.stats()["tiers"]["nvme"]["pages"] == 20)
    store.evict(pages=1 << 20)
    assert tiers(store, 1, 20) == {Tier.NVME: 20}
    engine.publish(1, 12)
    found = tiers(store, 1, 20)
    assert found[Tier.HBM] + found.get(Tier.DRAM, 0) == 12 and found[Tier.HBM] > 0, found
    check_pages(store, {1: 20})
    check_laws(store)


def test_a_dead_engine_is_not_read_while_there_is_no_daemon(machine: Machine) -> None:
    daemon = machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    engine.publish(1, 20)
    assert tiers(store, 1, 20) == {Tier.HBM: 20}
    daemon.kill()
    assert store.cache(SMALL).get(chain(1, 20)).pages == 20, "reads go on without the daemon"
    engine.process.kill()
    wait_until("its lock tells", lambda: store.cache(SMALL).get(chain(1, 20)).pages == 0)
    machine.serve("n")
    assert mounted_pages(store) == 0 and not mounted_numbers(NodeFolder.at(machine.folder("n")))
    check_laws(store)


def test_a_new_daemon_finds_what_living_engines_have(machine: Machine) -> None:
    daemon = machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    engine.publish(1, 10)
    engine.publish(2, 10, first=10)
    assert mounted_pages(store) == 20
    daemon.kill()
    engine.ask("retire", list(range(10)))
    engine.publish(3, 5)
    assert store.cache(SMALL).get(chain(1, 10)).pages == 0, "what was retired is read no more"
    machine.serve("n")
    assert tiers(store, 3, 5) == {Tier.HBM: 5}
    assert tiers(store, 2, 10) == {Tier.HBM: 10} and tiers(store, 1, 10) == {}
    check_pages(store, {2: 10, 3: 5})
    assert mounted_pages(store) == 15
    check_laws(store)
    engine.publish(4, 5, first=30)
    assert tiers(store, 4, 5) == {Tier.HBM: 5}
    engine.process.kill()
    wait_until("the node has noticed", lambda: mounted_pages(store) == 0)
    check_laws(store)


def test_what_turns_over_while_it_is_read_is_right_or_a_miss(machine: Machine) -> None:
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    engine.begin("turn_over", 3, 16)
    engine.process.wait_for("turning")
    read, reads = 0, 0
    while read < 200:
        read += check_right(store, {0: 16, 1: 16, 2: 16})
        reads += 1
        assert reads < 100_000, "nothing is ever found"
    engine.process.tell("enough")
    assert engine.end()["turns"] > 0
    check_laws(store)


def test_a_frame_that_is_being_read_is_not_free(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounted, "HOLD_NS", LONG_NS)
    machine.serve("n")
    store = machine.connect("n")
    segment = segment_of(store)
    keys = chain(1, 4)
    segment.pages[:4] = contents(keys)
    segment.publish(keys, range(4))
    folder = NodeFolder.at(machine.folder("n"))
    cache = store.cache(SMALL)
    assert isinstance(cache, LocalCache)
    table = MountedTable.open(folder, segment.number, cache.node.writable().incarnation)
    assert table is not None
    table.held[2] = np.uint64((1 << 64) - 1)  # whatever a reader says, it is bounded
    assert segment.retire(range(4)) == [0, 1, 3]
    with pytest.raises(InvalidRequest, match="retire frame"):
        segment.publish(chain(2, 1), [2])
    assert segment.retire([2]) == []
    monkeypatch.setattr(mounted, "HOLD_NS", 1)
    assert segment.retire([2]) == [2], "the reader's time is over"
    segment.publish(chain(2, 1), [2])
    check_laws(store)


def test_the_directory_is_told(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What engines have is announced, as it comes and goes, and others read it."""
    patient(monkeypatch)
    pool = Pool(machine, f"file:{machine.logs / 'catalog'}")
    engine = Engine(machine, "a")
    engine.publish(1, 10)
    pool.known("c", 1, 10)
    assert pool.lookup("c", 1, 10).tiers == {Tier.HBM: 10}
    match = pool.get("c", 1, 10)
    assert (match.pages, match.tiers, match.nodes) == (10, {Tier.HBM: 10}, {"a": 10})
    for name in "bc":  # an owner that begins anew is told all of it
        pool.daemons[name].kill()
        machine.serve(name)
    engine.ask("retire", list(range(5, 10)))
    wait_until("less is found", lambda: pool.lookup("c", 1, 10).pages == 5, 60)
    engine.process.kill()
    wait_until("nothing is found", lambda: pool.lookup("c", 1, 10).pages == 0, 60)


def test_pages_of_other_tenants_are_not_served(machine: Machine) -> None:
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    store.cache(SMALL, salt="a").put(chain(9, 1, salt="a"), contents(chain(9, 1, salt="a")))  # says whose the root is
    engine.publish(1, 10, salt="a")
    engine.publish(1, 4, first=10, salt="b")
    assert tiers(store, 1, 10, "a") == {Tier.HBM: 10} and tiers(store, 1, 10, "b") == {Tier.HBM: 4}
    assert tiers(store, 1, 10) == {}
    about = store.stats()["tenants"]
    assert about["a"]["hbm"]["pages"] == 10 and about["a"]["hbm"]["bytes"] == 10 * SMALL.page_bytes
    assert about["a"]["hbm"]["quota_bytes"] is None
    check_laws(store)


def test_what_makes_no_sense_is_passed_over(machine: Machine) -> None:
    """Frames beyond the end, old generations, other sessions' segments, by message and by log."""
    machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    engine.publish(1, 4)
    cache = store.cache(SMALL)
    assert isinstance(cache, LocalCache)
    mapped = cache.node.writable()
    keys = mapped.in_pool(chain(1, 4))
    own = segment_of(store, 8)

    def say(op: Op, number: int, addresses: list[tuple[int, int, int]]) -> bytes:
        raw = b"".join(pack_addresses([address]) for address in addresses)  # type: ignore[list-item]
        head = keys.root + CHAINED.pack(0, 0) if op is Op.PUBLISH else b""
        tail = b"".join(keys.hashes[: len(addresses)]) if op is Op.PUBLISH else b""
        message = mapped.exchange(op, count=len(addresses), a=number, body=(head, raw, tail))
        return bytes(message.body[: len(addresses)])

    stale = b"\x06"
    assert say(Op.PUBLISH, engine.number, [(engine.number, 9, 99)]) == stale, "another session's"
    assert say(Op.RETRACT, engine.number, [(engine.number, 0, 1)]) == stale
    assert say(Op.PUBLISH, own.number, [(own.number, 8, 5), (own.number, 1 << 31, 6)]) == 2 * stale
    assert say(Op.PUBLISH, own.number, [(own.number, 3, 7), (own.number, 3, 8)]) == b"\0" + stale
    assert say(Op.PUBLISH, own.number, [(own.number, 3, 7)]) == stale
    assert say(Op.PUBLISH, 12345, [(12345, 0, 7)]) == stale
    with pytest.raises(InvalidRequest):
        mapped.exchange(Op.MOUNT, a=pack_class(cache.frame_class), b=1 << 40)
    with pytest.raises(InvalidRequest):
        mapped.exchange(Op.PUBLISH, count=3, a=own.number, body=(keys.root,))
    assert tiers(store, 1, 4) == {Tier.HBM: 4}, "what was said of a page that is listed changed nothing"
    engine.ask("retire", [0])
    assert tiers(store, 1, 4) == {}, "nothing is in the frame that was named instead"
    check_laws(store)


def test_records_that_are_damaged_are_a_miss(machine: Machine) -> None:
    daemon = machine.serve("n")
    store, engine = machine.connect("n"), Engine(machine)
    engine.publish(1, 4)
    path = mounted_path(NodeFolder.at(machine.folder("n")), engine.number)
    whole = path.read_bytes()
    for at in range(0, (13 + 3) * 8, 8):  # each word of the head, and of where pages lie
        damaged = bytearray(whole)
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        with machine.connect("n") as fresh:
            assert fresh.cache(SMALL).get(chain(1, 4)).pages == 0, at
    path.write_bytes(whole)
    assert tiers(store, 1, 4) == {Tier.HBM: 4}
    path.write_bytes(whole[:-1])
    with machine.connect("n") as fresh:
        assert fresh.cache(SMALL).get(chain(1, 4)).pages == 0
    daemon.kill()
    machine.serve("n")
    assert mounted_pages(store) == 0, "a start believes it no more than readers do"
    check_laws(store)
