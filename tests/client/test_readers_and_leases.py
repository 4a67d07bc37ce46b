"""Readers need no daemon, and what is leased stays where it is, whatever happens to the daemon."""

from __future__ import annotations

import pytest

from kvstore import Store
from kvstore.errors import DeadlineExceeded
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.put_log import PutLog
from tests.helpers.content import SMALL, chain
from tests.helpers.inside import hurry
from tests.helpers.processes import (
    Daemon,
    Machine,
    Worker,
    check_laws,
    check_pages,
    check_right,
    evict_all,
    frames,
    put,
    wait_settled,
    wait_until,
)

POOL_PAGES = (4 << 20) // SMALL.page_bytes  # of --dram 4MiB


def fill(store: Store, first: int, times: int, pages: int = 16) -> range:
    """Put ``times`` the pool's capacity. Returns the prompts."""
    seeds = range(first, first + times * POOL_PAGES // pages)
    for seed in seeds:
        put(store, seed, pages)
    return seeds


def reads_on(reader: Worker, reads: int) -> dict[str, object]:
    """Wait until it has read that often again, finding pages all the time. Returns the last log line."""
    before = reader.events("read")[-1]

    def moved() -> bool:
        return bool(reader.events("read")[-1]["reads"] >= before["reads"] + reads)

    wait_until(f"{reads} more reads", moved)
    now = reader.events("read")[-1]
    assert now["pages"] - before["pages"] == 8 * (now["reads"] - before["reads"]), (before, now)
    return dict(now)


def test_readers_read_on_without_the_daemon(machine: Machine) -> None:
    """Down, restarted, down again: not one miss, and the same mapping all the time."""
    daemon = machine.serve("n")
    with machine.connect("n") as store:
        for seed in range(10):
            put(store, seed, 8)
    readers = [
        machine.worker("read", "n", first=0, count=10, pages=8, random=i, ways=["get", "out", "layers"])
        for i in range(2)
    ]
    first = [reader.wait_for("read") for reader in readers]
    for _ in range(2):
        daemon.kill()
        for reader in readers:
            reads_on(reader, 50)
        daemon = machine.spawn("n")
        for reader in readers:
            reads_on(reader, 100)  # through the restart
        daemon.wait_ready()
        for reader in readers:
            reads_on(reader, 50)
    for reader, before in zip(readers, first, strict=True):
        assert reader.events("read")[-1]["segment"] == before["segment"] != 0
        assert reader.events("read")[-1]["misses"] == {}
        reader.finish()


def test_leased_views_stay_true_through_a_restart(machine: Machine) -> None:
    """kill -9, restart, four times the capacity put by another process; then the frames can leave."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    holder = machine.worker("lease", "n", seed=1, pages=16, ttl_s=12.0)
    assert holder.wait_for("leased")["pages"] == 16
    daemon.kill()
    holder.tell("check")
    holder.wait_for("checked", 1)
    machine.serve("n")
    with machine.connect("n") as other:
        seeds = fill(other, 100, 4)
        check_right(other, dict.fromkeys(seeds, 16))
        assert other.stats()["leases"] > 0, "the lease ended before the test could show anything"
    holder.tell("check")
    assert holder.wait_for("checked", 2)["pages"] == 16
    check_pages(store, {1: 16})
    check_laws(store)
    holder.tell("release")
    holder.wait_for("released")
    wait_until("the lease ends, by its deadline at the latest", lambda: store.stats()["leases"] == 0)
    with machine.connect("n") as other:
        fill(other, 1000, 2)
    assert store.cache(SMALL).get(chain(1, 16)).pages == 0, "nobody leases it, and all else is younger"
    wait_settled(store)
    evict_all(store)


def test_an_overstayed_lease_is_said_to_be_broken(machine: Machine) -> None:
    """Its deadline passed, its frames hold other pages: whoever read them must hear of it."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    holder = machine.worker("lease", "n", seed=1, pages=16, ttl_s=0.3)
    holder.wait_for("leased")
    wait_until("its deadline passes", lambda: store.stats()["leases"] == 0)
    fill(store, 100, 3)
    assert store.cache(SMALL).get(chain(1, 16)).pages == 0
    holder.tell("release")
    holder.wait_for("broken")


def test_the_lease_of_a_killed_process_ends(machine: Machine) -> None:
    """By its death, a minute before its deadline; also where the daemon did not see it die."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    for _ in range(2):
        holder = machine.worker("lease", "n", seed=1, pages=16, ttl_s=60.0)
        holder.wait_for("leased")
        assert store.stats()["leases"] == 1
        holder.kill()
        wait_settled(store)
    evict_all(store)
    assert frames(store)["sealed"] == 0
    assert daemon.alive


@pytest.mark.parametrize("given", [False, True], ids=["allocated", "given"])
@pytest.mark.parametrize("meanwhile", ["nothing", "evicted", "evicted and put again"])
def test_a_get_stopped_before_its_copy(meanwhile: str, given: bool, machine: Machine) -> None:
    """Its pages are proven when their frames are given to others: what it copies then does not count."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 16)
    reader = machine.worker("stopped_get", "n", seed=1, pages=16, given=given)
    reader.wait_for("proven")
    wait_until("it stops itself", lambda: reader.state() == "T")
    if meanwhile != "nothing":
        fill(store, 100, 3)
        assert store.cache(SMALL).lookup(chain(1, 16)).pages == 0
    if meanwhile == "evicted and put again":
        put(store, 1, 16)
    reader.resume()
    found = reader.wait_for("got")
    assert found["pages"] == (0 if meanwhile == "evicted" else 16), found
    reader.wait_well()


def stop_at_rest(machine: Machine, daemon: Daemon) -> PutLog:
    """The daemon is stopped, and not in the middle of a decision. Returns its log of puts."""
    folder = NodeFolder.at(machine.folder("n"))
    header = Header.open(folder)
    assert header is not None
    log = PutLog.open(folder, header.puts_id)
    assert log is not None
    daemon.stop()
    while log.deciding:
        daemon.resume()
        daemon.stop()
    return log


@pytest.mark.parametrize("killed", [False, True])
def test_a_lease_of_a_session_that_publishes_needs_no_answer(killed: bool, machine: Machine) -> None:
    """Of a daemon that stands still, and is perhaps killed then: whoever decides next keeps the pages."""
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        put(store, 1, 16)
        store.stats()
        stop_at_rest(machine, daemon)
        with store.cache(SMALL).lease(chain(1, 16), ttl_s=60.0) as held:
            assert len(held.pages) == 16
            if killed:
                daemon.kill()
                machine.serve("n")
            else:
                daemon.resume()
            with machine.connect("n") as other:
                fill(other, 100, 3)
                assert other.stats()["leases"] == 1
            held.check()
        assert store.stats()["leases"] == 0
        check_pages(store, {1: 16})
        check_laws(store)


def test_a_lease_that_a_deciding_node_may_not_see_is_asked_for(machine: Machine) -> None:
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        put(store, 1, 16)
        store.stats()
        log = stop_at_rest(machine, daemon)
        log.deciding = True
        hurry(store, 0.3)
        with pytest.raises(DeadlineExceeded), store.cache(SMALL).lease(chain(1, 16), ttl_s=60.0):
            raise AssertionError("nobody can have answered")
        daemon.resume()
        wait_until("it has decided", lambda: not log.deciding)
        with store.cache(SMALL).lease(chain(1, 16), ttl_s=60.0) as held:
            assert len(held.pages) == 16
            assert store.stats()["leases"] >= 1
        check_laws(store)
