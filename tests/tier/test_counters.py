"""What clients count: the words, the session files, and what a node adds up of the living and the dead."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.local.channel import SessionFile
from kvstore.errors import OutOfSpace
from kvstore.shm import counters as module
from kvstore.shm.counters import (
    COUNTERS_BYTES,
    LATENCY_BOUNDS_S,
    LEASE,
    LOOKUP,
    NAMES,
    NO_COUNTS,
    ONE_GET,
    PUT,
    PUT_ASYNC,
    REUSE_BOUNDS_S,
    SessionCounters,
    Tally,
    add_counts,
    read_counters,
)
from kvstore.shm.folder import NodeFolder
from kvstore.shm.sessions import Sessions

ZERO = dict.fromkeys(NAMES, 0)


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    return folder


@pytest.fixture
def sessions(folder: NodeFolder) -> Sessions:
    return Sessions(folder)


@pytest.fixture
def client(folder: NodeFolder) -> Iterator[SessionFile]:
    file = SessionFile(folder.path, 7)
    file.lock()
    yield file
    file.close()


# --- words ----------------------------------------------------------------------------------------------------------


def put(counters: SessionCounters, pages: int, page_bytes: int) -> None:
    """New pages of that size and one token each."""
    counters.put(counters.row(page_bytes, 1), pages)


def test_the_worked_example() -> None:
    counters = SessionCounters()
    row = counters.row(65536, 64)
    counters.got(row, 32, 20, 8, "checksum")
    before_ns = time.monotonic_ns() - 300_000
    for _ in range(9):
        counters.got(row, 0, 0, 0, "")
    counters.timed(row, before_ns)
    tally = counters.tally()
    assert tally.counts == ZERO | {
        "gets": 10,
        "pages_asked": 32,
        "hit_dram": 20,
        "hit_nvme": 8,
        "hit_dram_tokens": 20 * 64,
        "hit_nvme_tokens": 8 * 64,
        "missed_checksum": 4,
        "missed_tokens": 4 * 64,
        "read_dram_bytes": 20 * 65536,
        "read_nvme_bytes": 8 * 65536,
    }
    took = tally.latency["get"]
    (bucket,) = [i for i, count in enumerate(took.counts) if count]
    assert took.counts[bucket] == 10 and LATENCY_BOUNDS_S[bucket] >= 300e-6
    assert took.sum_s >= 10 * 300e-6
    counters.got(row, 0, 0, 0, "")
    counters.timed(row, before_ns)
    assert sum(counters.tally().latency["get"].counts) == 11


def test_every_verb_counts() -> None:
    counters, start_ns = SessionCounters(), time.monotonic_ns()
    row, other = counters.row(10, 2), counters.row(1000, 16)
    counters.took(LOOKUP, start_ns)
    counters.got(row, 4, 4, 0, "")
    counters.leased(row, 4, 1, "generation", start_ns)
    counters.leased(row, 0, 0, "", start_ns)
    counters.got(row, 3, 0, 0, "whatever else")
    counters.got(other, 2, 1, 1, "")
    counters.put(row, 5)
    counters.put(row, 0)
    counters.took(PUT, start_ns)
    counters.took(PUT_ASYNC, start_ns)
    tally = counters.tally()
    assert tally.counts == ZERO | {
        "lookups": 1,
        "gets": 3,
        "leases": 2,
        "puts": 1,
        "puts_async": 1,
        "pages_asked": 13,
        "hit_dram": 6,
        "hit_nvme": 1,
        "hit_dram_tokens": 5 * 2 + 16,
        "hit_nvme_tokens": 16,
        "read_dram_bytes": 50 + 1000,
        "read_nvme_bytes": 1000,
        "missed_tokens": 6 * 2,
        "missed_generation": 3,
        "missed_absent": 3,
        "pages_put": 5,
        "put_bytes": 50,
    }
    assert {name: sum(took.counts) for name, took in tally.latency.items()} == {
        "get": 0,
        "put": 1,
        "put_async": 1,
        "lookup": 1,
        "lease": 2,
    }


def test_a_row_is_emptied_before_its_pages_or_gets_run_into_each_other() -> None:
    counters = SessionCounters()
    row = counters.row(4096, 16)
    counters.words[row] = (1 << 64) - 2 * ONE_GET + 7
    before = counters.tally().counts
    for _ in range(3):
        counters.got(row, 9, 5, 0, "absent")
    counts = counters.tally().counts
    assert (counts["gets"], counts["hit_dram"]) == (before["gets"] + 3, before["hit_dram"] + 15)


def test_sessions_that_write_anything_spoil_no_sum() -> None:
    hostile, honest = SessionCounters(), SessionCounters()
    for place in range(len(hostile.words)):
        hostile.words[place] = (1 << 64) - 1
    row = honest.row(4096, 16)
    total = NO_COUNTS
    for _ in range(1000):
        total = add_counts(total, hostile.vector())
    assert int(total.max()) < 1 << 63
    before = Tally.of([total]).counts["pages_put"]
    honest.put(row, 5)
    assert Tally.of([add_counts(total, honest.vector())]).counts["pages_put"] >= before
    one = Tally.of([add_counts(hostile.vector(), honest.vector())]).counts
    assert one["pages_put"] == int(hostile.vector()[NAMES.index("pages_put")]) + 5


@pytest.mark.parametrize(
    ("ns", "bound_s"), [(0, 1.024e-6), (1023, 1.024e-6), (1024, 1.536e-6), (1536, 2.048e-6), (2048, 3.072e-6)]
)
def test_buckets_of_latency(ns: int, bound_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "monotonic_ns", lambda: ns)
    counters = SessionCounters()
    counters.took(LEASE, 0)
    (bucket,) = [i for i, count in enumerate(counters.tally().latency["lease"].counts) if count]
    assert pytest.approx(bound_s) == LATENCY_BOUNDS_S[bucket]


def test_buckets_of_reuse_gaps() -> None:
    counters = SessionCounters()
    for gap_ns in (-5, 999_999, 1_000_000, 1_999_999, 2_000_000, int(4e18)):
        counters.reused(gap_ns, 2)
    counts = counters.tally().reuse.counts
    assert (*counts[:3], counts[-1], sum(counts)) == (4, 4, 2, 2, 12)
    assert REUSE_BOUNDS_S[:3] == (0.001, 0.002, 0.004)


@pytest.mark.parametrize("reason", module.MISS_REASONS)
def test_pages_asked_are_hit_or_missed(reason: str) -> None:
    counters = SessionCounters()
    for asked, dram, nvme in ((5, 0, 0), (5, 5, 0), (5, 2, 3), (5, 2, 2), (0, 0, 0)):
        counters.got(counters.row(1, 1), asked, dram, nvme, reason)
    values = counters.tally().counts
    missed = sum(values[f"missed_{name}"] for name in module.MISS_REASONS)
    assert values["pages_asked"] == values["hit_dram"] + values["hit_nvme"] + missed
    assert missed == values[f"missed_{reason}"] == 6


# --- the file -------------------------------------------------------------------------------------------------------


def test_counts_before_the_file_go_with_it(folder: NodeFolder) -> None:
    file = SessionFile(folder.path, 7)
    put(file.counters, 3, 100)
    file.lock()
    put(file.counters, 1, 100)
    path = folder.session(7)
    assert path.stat().st_size == COUNTERS_BYTES and path.stat().st_mode & 0o777 == 0o660
    with open(path, "rb") as other:
        vector = read_counters(other.fileno())
        assert vector is not None
        assert Tally.of([vector]) == file.counters.tally()
        assert file.counters.tally().counts == ZERO | {"pages_put": 4, "put_bytes": 400}
    file.close()


def test_no_memory_for_the_page_costs_the_counts_alone(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr(module, "allocate", full)
    file = SessionFile(folder.path, 7)
    file.lock()
    put(file.counters, 1, 1)
    assert file.counters.tally().counts["pages_put"] == 1
    sessions = Sessions(folder)
    assert sessions.alive(7) and sessions.totals().counts == ZERO
    file.close()
    assert not sessions.alive(7)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\0" * COUNTERS_BYTES, b"\xff" * COUNTERS_BYTES])
def test_a_file_of_something_else_counts_nothing(folder: NodeFolder, sessions: Sessions, content: bytes) -> None:
    folder.session(9).write_bytes(content)
    with open(folder.session(9), "rb") as file:
        assert read_counters(file.fileno()) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sessions.totals().counts == ZERO
        assert sessions.alive(9)
    assert sessions.totals().counts == ZERO
    assert not folder.session(9).exists()


# --- the node -------------------------------------------------------------------------------------------------------


def test_totals_of_living_ended_and_those_in_this_process(
    folder: NodeFolder, sessions: Sessions, client: SessionFile
) -> None:
    here, other = SessionCounters(), SessionFile(folder.path, 8)
    sessions.join(1, here)
    other.lock()
    put(here, 1, 1)
    put(client.counters, 10, 1)
    put(other.counters, 100, 1)
    assert sessions.totals().counts["pages_put"] == 111
    other.close()
    assert sessions.totals().counts["pages_put"] == 111, "it ended, its counts stay"
    assert not folder.session(8).exists()
    sessions.leave(1)
    sessions.leave(1)
    put(here, 5, 1)  # too late
    assert sessions.totals().counts == ZERO | {"pages_put": 111, "put_bytes": 111}
    assert sessions.totals().counts["pages_put"] == 111, "looking changes nothing"


def test_totals_never_go_down(folder: NodeFolder, sessions: Sessions, client: SessionFile) -> None:
    put(client.counters, 5, 1)
    assert sessions.totals().counts["pages_put"] == 5
    folder.session(7).unlink()
    client.lock()
    put(client.counters, 2, 1)
    assert sessions.totals().counts["pages_put"] == 5
    put(client.counters, 4, 1)
    assert sessions.totals().counts["pages_put"] == 6


def test_counts_of_the_living_survive_the_node(folder: NodeFolder, client: SessionFile) -> None:
    put(client.counters, 2, 1)
    assert Sessions(folder).totals().counts["pages_put"] == 2
    assert Sessions(folder).totals().counts["pages_put"] == 2
    client.close()
    after = Sessions(folder)
    after.sweep()
    assert after.totals().counts["pages_put"] == 2, "it ended while there was no node"
    assert Sessions(folder).totals().counts["pages_put"] == 0


def test_a_killed_client_is_counted_once(folder: NodeFolder, sessions: Sessions) -> None:
    """Whoever looks first, and however many look at once."""
    script = (
        "import sys, time; from pathlib import Path; from kvstore.client.local.channel import SessionFile\n"
        f"file = SessionFile(Path({str(folder.path)!r}), 3); file.lock()\n"
        "file.counters.put(file.counters.row(1, 1), 6)\n"
        "print('counted', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert sessions.alive(3) and sessions.totals().counts["pages_put"] == 6
        child.kill()
    seen: list[int] = []

    def look() -> None:
        for _ in range(50):
            sessions.sweep()
            seen.append(sessions.totals().counts["pages_put"])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(seen) == {6} and not sessions.alive(3)


def test_clients_come_and_go_while_the_node_looks(folder: NodeFolder, sessions: Sessions) -> None:
    """The node may look at a file in the very moment in which its client makes it: the client tries again."""
    stopped = threading.Event()

    def look() -> None:
        while not stopped.is_set():
            sessions.sweep()

    looker = threading.Thread(target=look)
    looker.start()
    try:
        for number in range(1, 101):
            file = SessionFile(folder.path, number)
            while True:
                try:
                    file.lock()
                    break
                except OSError:
                    continue
            put(file.counters, 1, 1)
            assert sessions.alive(number)
            file.close()
    finally:
        stopped.set()
        looker.join(60)
    assert sessions.totals().counts["pages_put"] == 100
    assert os.listdir(folder.sessions) == []
