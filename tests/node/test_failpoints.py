"""kill -9 at every named step of daemon, writers and readers."""

from __future__ import annotations

import itertools
import signal

import pytest

from kvstore import Store, failpoint
from tests.helpers.nvme.nodes import NVME_STEPS
from tests.helpers.processes import (
    Machine,
    Worker,
    check_laws,
    check_pages,
    check_right,
    evict_all,
    put,
    wait_settled,
    wait_until,
)

KILLED = -int(signal.SIGKILL)
PROMPTS = 1000  # of a writer: two of them, at 8 pages each, fit ROOM, so that whatever is missing is lost
ROOM = "256MiB"

# Steps of a serving daemon. Small counts hit the first grants and seals of a session, larger ones whatever comes.
SERVING = ("node.event", "node.instruction", "node.word", "node.commit", "node.drained", "node.reply")
COUNTS = (1, 2, 3, 5, 8, 13, 30)
STARTING = ("node.recover", "node.rebuild")
RESIZING = ("node.resize",)  # see test_resize
WRITING = {
    "client.granted": "put",
    "client.copied": "put",
    "client.recorded": "put",
    "client.published": "put",
    "client.sealing": "wait",
    "client.begun": "mixed",
    "client.layer": "layers",
}
READING = ("client.reading", "client.leased")


def test_every_failpoint_has_its_test() -> None:
    assert {*SERVING, *STARTING, *RESIZING, *WRITING, *READING, *NVME_STEPS} == set(failpoint.NAMES)


def acknowledged(*workers: Worker) -> dict[int, int]:
    return {seed: pages for worker in workers for seed, pages in worker.acknowledged().items()}


def check_kept(store: Store, acked: dict[int, int]) -> int:
    """All of it is there, and nothing had to leave."""
    evicted = store.stats()["tiers"]["dram"]["evicted"]
    assert evicted == {}, f"the pool is too small for what a writer puts meanwhile: {evicted}"
    return check_pages(store, acked)


@pytest.mark.parametrize("name", SERVING)
def test_daemon_killed_at(name: str, machine: Machine) -> None:
    """The same writers and readers live through all of it; then they are killed too."""
    daemon = machine.serve("n", dram=ROOM)
    store = machine.connect("n")
    writers = [machine.worker("mixed", "n", first=first, count=PROMPTS, pause_s=0.005) for first in (0, 100_000)]
    reader = machine.worker("read", "n", first=0, count=50, pages=8, pause_s=0.002)
    for worker in writers:
        worker.wait_for("put")
    daemon.kill()
    for count in COUNTS:
        daemon = machine.spawn("n", failpoint=f"{name}:{count}")
        assert daemon.wait() == KILLED, daemon.trace()
        check_right(store, acknowledged(*writers))  # no daemon is needed to read, but for what was just published
    daemon = machine.serve("n")
    puts = [len(worker.events("put")) for worker in writers]
    check_kept(store, acknowledged(*writers))
    check_laws(store)
    for worker, before in zip(writers, puts, strict=True):
        worker.wait_for("put", before + 2)  # they go on
    wait_until("enough is stored", lambda: sum(acknowledged(*writers).values()) > 50)
    reader.finish()
    for worker in writers:
        assert worker.kill() in (KILLED, 0), worker.trace()  # on a slow machine it may have put all it had
    wait_settled(store)
    check_laws(store)
    assert check_kept(store, acknowledged(*writers)) > 50
    assert put(store, 900_000, 8) == 8
    check_pages(store, {900_000: 8})
    evict_all(store)
    check_laws(store)
    assert daemon.terminate() == 0


@pytest.mark.parametrize("step", ["node.recover", "node.rebuild"])
def test_daemon_killed_while_it_starts(step: str, machine: Machine) -> None:
    """Killed between records and index, so that there is something to recover; then killed at that, several times."""
    machine.serve("n", dram=ROOM)
    store = machine.connect("n")
    writer = machine.worker("mixed", "n", first=0, count=2 * PROMPTS, pause_s=0.002)
    writer.wait_for("put", 5)
    machine.processes[0].kill()
    causes = ("node.commit:2", "node.commit:7")
    if step == "node.recover":
        causes = ("node.word:2", *causes)  # before the word nothing is sealed, so the index has nothing to follow
    for cause in causes:
        assert machine.spawn("n", failpoint=cause).wait() == KILLED
        for _ in range(2):
            assert machine.spawn("n", failpoint=step).wait() == KILLED
            check_right(store, writer.acknowledged())
    machine.serve("n")
    puts = len(writer.events("put"))
    check_kept(store, writer.acknowledged())
    writer.wait_for("put", puts + 2)
    writer.kill()
    wait_settled(store)
    check_laws(store)
    check_kept(store, writer.acknowledged())
    evict_all(store)
    check_laws(store)


def test_daemon_killed_while_pages_leave_and_move(machine: Machine) -> None:
    """A pool that is much too small for two layouts: evictions, stolen extents, moves. What is there is right."""
    daemon = machine.serve("n", dram="16MiB")
    store = machine.connect("n")
    small = machine.worker("put", "n", first=0, count=1 << 20, pages=24, parts=2, pause_s=0.002)
    large = machine.worker("put", "n", first=0, count=1 << 20, pages=2, layout="large", pause_s=0.02)
    reader = machine.worker("read", "n", first=0, count=200, pages=24)
    small.wait_for("put", 60)
    large.wait_for("put", 20)
    daemon.kill()
    steps = itertools.cycle(("node.instruction", "node.commit"))
    for count in (2, 5, 11, 17, 23, 40, 61, 90):
        daemon = machine.spawn("n", failpoint=f"{next(steps)}:{count}")
        assert daemon.wait() == KILLED, daemon.trace()
    machine.serve("n")
    check_laws(store)
    for worker in (small, large):
        worker.wait_for("put", len(worker.events("put")) + 10)
        worker.kill()
    reader.finish()
    wait_settled(store)
    check_laws(store)
    seeds = sorted(small.acknowledged())
    assert check_right(store, dict.fromkeys(seeds[-50:], 24)) > 0
    evict_all(store)


@pytest.mark.parametrize("name", WRITING)
def test_writer_killed_at(name: str, machine: Machine) -> None:
    """Its frames come back, its acknowledged pages stay, the next one goes on; with a restart in between as well."""
    daemon = machine.serve("n")
    store = machine.connect("n")
    acked: dict[int, int] = {}
    for count in (1, 2, 4):
        first = 1000 * count
        if WRITING[name] == "layers":
            # Not step by step: its layers and pages are what the failpoint counts.
            worker = machine.worker("layers", "n", failpoint=f"{name}:{count}", seed=first, pages=4)
        elif WRITING[name] == "mixed":
            worker = machine.worker("mixed", "n", failpoint=f"{name}:{count}", first=first)
        else:
            worker = machine.worker(
                "put",
                "n",
                failpoint=f"{name}:{count}",
                first=first,
                count=100,
                pages=6,
                parts=2,
                checksum=count == 2,
                wait=WRITING[name] == "wait",
            )
        assert worker.wait() == KILLED, worker.trace()
        acked |= worker.acknowledged()
        if count == 4:
            daemon.kill()
            daemon = machine.serve("n")
        wait_settled(store)
        check_laws(store)
        check_pages(store, acked)
        check_right(store, dict.fromkeys(range(first, first + 3), 6))
    with machine.connect("n") as other:
        for seed in acked or (1000, 2000, 4000):
            put(other, seed, 8)
            check_pages(other, {seed: 8})
    wait_settled(store)
    evict_all(store)


@pytest.mark.parametrize("name", READING)
def test_reader_killed_at(name: str, machine: Machine) -> None:
    """A dead reader holds nothing for long: not its lease, not the index."""
    machine.serve("n")
    store = machine.connect("n")
    for seed in range(8):
        put(store, seed, 8)
    ways = ["lease"] if name == "client.leased" else ["get", "verify"]
    for count in (1, 2, 5):
        worker = machine.worker(
            "read", "n", failpoint=f"{name}:{count}", first=0, count=8, pages=8, ways=ways, ttl_s=600.0
        )
        assert worker.wait() == KILLED, worker.trace()
        check_pages(store, dict.fromkeys(range(8), 8))
    wait_until("its leases end", lambda: store.stats()["leases"] == 0)  # by its death, not by their deadline
    check_laws(store)
    evict_all(store)
