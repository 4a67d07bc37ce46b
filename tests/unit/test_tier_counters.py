"""What clients count: the words, the session files, and what a node adds up of the living and the dead."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.session import SessionFile
from kvstore.errors import OutOfSpace
from kvstore.tier import counters as module
from kvstore.tier.counters import COUNTERS_BYTES, NAMES, SessionCounters, read_counters
from kvstore.tier.folder import NodeFolder
from kvstore.tier.sessions import Sessions

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


def test_the_worked_example() -> None:
    counters = SessionCounters()
    counters.got(32, 20, 8, 65536, "checksum")
    assert counters.values() == ZERO | {
        "gets": 1,
        "pages_asked": 32,
        "hit_dram": 20,
        "hit_nvme": 8,
        "missed_checksum": 4,
        "read_dram_bytes": 20 * 65536,
        "read_nvme_bytes": 8 * 65536,
    }


def test_every_verb_counts() -> None:
    counters = SessionCounters()
    counters.looked_up()
    counters.got(4, 4, 0, 10, "")
    counters.leased(4, 1, 10, "generation")
    counters.leased(0, 0, 10, "")
    counters.got(3, 0, 0, 10, "whatever else")
    counters.put(5, 10)
    counters.put(0, 10)
    assert counters.values() == ZERO | {
        "lookups": 1,
        "gets": 2,
        "leases": 2,
        "pages_asked": 11,
        "hit_dram": 5,
        "read_dram_bytes": 50,
        "missed_generation": 3,
        "missed_absent": 3,
        "pages_put": 5,
        "put_bytes": 50,
    }


@pytest.mark.parametrize("reason", module.MISS_REASONS)
def test_pages_asked_are_hit_or_missed(reason: str) -> None:
    counters = SessionCounters()
    for asked, dram, nvme in ((5, 0, 0), (5, 5, 0), (5, 2, 3), (5, 2, 2), (0, 0, 0)):
        counters.got(asked, dram, nvme, 1, reason)
    values = counters.values()
    missed = sum(values[f"missed_{name}"] for name in module.MISS_REASONS)
    assert values["pages_asked"] == values["hit_dram"] + values["hit_nvme"] + missed
    assert missed == values[f"missed_{reason}"] == 6


# --- the file -------------------------------------------------------------------------------------------------------


def test_counts_before_the_file_go_with_it(folder: NodeFolder) -> None:
    file = SessionFile(folder.path, 7)
    file.counters.put(3, 100)
    file.lock()
    file.counters.put(1, 100)
    path = folder.session(7)
    assert path.stat().st_size == COUNTERS_BYTES and path.stat().st_mode & 0o777 == 0o660
    with open(path, "rb") as other:
        assert read_counters(other.fileno()) == file.counters.values() == ZERO | {"pages_put": 4, "put_bytes": 400}
    file.close()


def test_a_file_that_was_removed_is_replaced_and_counts_from_zero(
    folder: NodeFolder, sessions: Sessions, client: SessionFile
) -> None:
    client.counters.put(3, 1)
    folder.session(7).unlink()
    client.lock()
    client.counters.put(1, 1)
    assert sessions.totals()["pages_put"] == 1
    client.lock()  # nothing to do
    assert client.counters.values()["pages_put"] == 1


def test_the_map_keeps_no_lock(folder: NodeFolder, client: SessionFile) -> None:
    with open(folder.session(7), "rb") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        client.close()
        client.counters.put(1, 1)  # a thread that was late: harmless
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_no_memory_for_the_page_costs_the_counts_alone(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OutOfSpace("full")

    monkeypatch.setattr(module, "allocate", full)
    file = SessionFile(folder.path, 7)
    file.lock()
    file.counters.put(1, 1)
    assert file.counters.values()["pages_put"] == 1
    sessions = Sessions(folder)
    assert sessions.alive(7) and sessions.totals() == ZERO
    file.close()
    assert not sessions.alive(7)


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"\0" * COUNTERS_BYTES, b"\xff" * COUNTERS_BYTES])
def test_a_file_of_something_else_counts_nothing(folder: NodeFolder, sessions: Sessions, content: bytes) -> None:
    folder.session(9).write_bytes(content)
    with open(folder.session(9), "rb") as file:
        assert read_counters(file.fileno()) is None
        fcntl.flock(file, fcntl.LOCK_EX)
        assert sessions.totals() == ZERO
        assert sessions.alive(9)
    assert sessions.totals() == ZERO
    assert not folder.session(9).exists()


# --- the node -------------------------------------------------------------------------------------------------------


def test_totals_of_living_ended_and_those_in_this_process(
    folder: NodeFolder, sessions: Sessions, client: SessionFile
) -> None:
    here, other = SessionCounters(), SessionFile(folder.path, 8)
    sessions.join(1, here)
    other.lock()
    here.put(1, 1)
    client.counters.put(10, 1)
    other.counters.put(100, 1)
    assert sessions.totals()["pages_put"] == 111
    other.close()
    assert sessions.totals()["pages_put"] == 111, "it ended, its counts stay"
    assert not folder.session(8).exists()
    sessions.leave(1)
    sessions.leave(1)
    here.put(5, 1)  # too late
    assert sessions.totals() == ZERO | {"pages_put": 111, "put_bytes": 111}
    assert sessions.totals()["pages_put"] == 111, "looking changes nothing"


def test_alive(folder: NodeFolder, sessions: Sessions, client: SessionFile) -> None:
    sessions.join(1, SessionCounters())
    assert sessions.alive(1) and sessions.alive(7) and not sessions.alive(99)
    client.counters.put(4, 1)
    client.close()
    sessions.leave(1)
    assert not sessions.alive(7) and not sessions.alive(7) and not sessions.alive(1)
    assert sessions.totals()["pages_put"] == 4


def test_sweep_removes_the_dead_alone(folder: NodeFolder, sessions: Sessions, client: SessionFile) -> None:
    dead = SessionFile(folder.path, 8)
    dead.lock()
    dead.counters.put(2, 1)
    dead.close()
    (folder.sessions / "notes.txt").write_text("none of our business")
    sessions.sweep()
    assert sorted(os.listdir(folder.sessions)) == [f"{7:016x}", "notes.txt"]
    assert sessions.totals()["pages_put"] == 2


def test_counts_of_the_living_survive_the_node(folder: NodeFolder, client: SessionFile) -> None:
    client.counters.put(2, 1)
    assert Sessions(folder).totals()["pages_put"] == 2
    assert Sessions(folder).totals()["pages_put"] == 2
    client.close()
    after = Sessions(folder)
    after.sweep()
    assert after.totals()["pages_put"] == 2, "it ended while there was no node"
    assert Sessions(folder).totals()["pages_put"] == 0


def test_a_node_without_its_folder(tmp_path: Path) -> None:
    sessions = Sessions(NodeFolder(tmp_path, "gone"))
    sessions.sweep()
    assert sessions.totals() == ZERO and not sessions.alive(1)


def test_a_killed_client_is_counted_once(folder: NodeFolder, sessions: Sessions) -> None:
    """Whoever looks first, and however many look at once."""
    script = (
        "import sys, time; from pathlib import Path; from kvstore.client.session import SessionFile\n"
        f"file = SessionFile(Path({str(folder.path)!r}), 3); file.lock(); file.counters.put(6, 1)\n"
        "print('counted', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert sessions.alive(3) and sessions.totals()["pages_put"] == 6
        child.kill()
    seen: list[int] = []

    def look() -> None:
        for _ in range(50):
            sessions.sweep()
            seen.append(sessions.totals()["pages_put"])

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
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
        for number in range(1, 301):
            file = SessionFile(folder.path, number)
            while True:
                try:
                    file.lock()
                    break
                except OSError:
                    continue
            file.counters.put(1, 1)
            assert sessions.alive(number)
            file.close()
    finally:
        stopped.set()
        looker.join(30)
    assert sessions.totals()["pages_put"] == 300
    assert os.listdir(folder.sessions) == []
