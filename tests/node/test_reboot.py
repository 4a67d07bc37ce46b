"""After a reboot, or with files that are not what they were, nothing old is served. And one daemon per name."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.errors import NodeUnavailable
from tests.helpers.content import SMALL, chain, mismatch
from tests.helpers.processes import Machine, Worker, check_laws, check_pages, put, wait_until

WORD = 8


def flip(path: Path, offset: int) -> None:
    """Invert one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def remove_segment(folder: Path) -> None:
    (folder / "segment").unlink()


def replace_segment(folder: Path) -> None:
    """As large as before, all zeros: a file of that name that somebody made anew."""
    size = (folder / "segment").stat().st_size
    (folder / "segment").unlink()
    with open(folder / "segment", "wb") as file:
        file.truncate(size)


def other_incarnation(folder: Path) -> None:
    """The segment of another life of this node."""
    flip(folder / "segment", 2 * WORD)


def another_boot(folder: Path) -> None:
    flip(folder / "header", 9 * WORD + 3)


def damaged_header(folder: Path) -> None:
    flip(folder / "header", 0)


def cut_header(folder: Path) -> None:
    os.truncate(folder / "header", 100)


def no_header(folder: Path) -> None:
    (folder / "header").unlink()


def all_but_the_folder(folder: Path) -> None:
    """What a reboot leaves of /dev/shm, were the folder on a disk that somebody cleaned."""
    for entry in folder.iterdir():
        if entry.is_file():
            entry.unlink()


REBOOTS: tuple[Callable[[Path], None], ...] = (
    remove_segment,
    replace_segment,
    other_incarnation,
    another_boot,
    damaged_header,
    cut_header,
    no_header,
    all_but_the_folder,
)


@pytest.mark.parametrize("damage", REBOOTS)
def test_nothing_old_is_served(damage: Callable[[Path], None], machine: Machine) -> None:
    """Neither by the node that starts next, nor through a mapping made before."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    check_pages(store, {1: 8})
    reader = machine.worker("read", "n", first=1, count=1, pages=8, ways=["get", "out"])
    reader.wait_for("read", 2)
    daemon.kill()
    reader.stop()  # it has all mapped, and sees nothing of what happens now
    damage(machine.folder("n"))
    serves_nothing(machine, store)
    line = machine.serve("n").wait_ready()
    assert ", 0 pages kept" in line, line
    fresh = machine.connect("n")
    assert fresh.stats()["tiers"]["dram"]["pages"] == 0
    assert fresh.cache(SMALL).get(chain(1, 8)).pages == 0
    put(fresh, 2, 8)
    check_pages(fresh, {2: 8})
    check_laws(fresh)
    wait_until("the old store follows to the new node", lambda: store.cache(SMALL).get(chain(2, 8)).pages == 8)
    assert store.cache(SMALL).get(chain(1, 8)).pages == 0
    follows(reader)
    put(store, 1, 8)
    check_pages(fresh, {1: 8})


def serves_nothing(machine: Machine, store: kvstore.Store) -> None:
    """While the daemon is down: a new client gets no wrong bytes, if anything; one that maps the old files neither."""
    keys = chain(1, 8)
    match = store.cache(SMALL).get(keys)
    assert not mismatch(match, keys)
    try:
        with machine.connect("n", timeout_s=0.1) as late:
            match = late.cache(SMALL).get(keys)
            assert not mismatch(match, keys)
    except NodeUnavailable:
        pass


def follows(reader: Worker) -> None:
    """A reader that was stopped through all of it finds nothing old, and no wrong bytes, once it looks again."""
    before = reader.events("read")[-1]
    reader.resume()
    wait_until("it reads on", lambda: reader.events("read")[-1]["reads"] > before["reads"] + 100)
    settled = reader.events("read")[-1]
    wait_until("it reads on", lambda: reader.events("read")[-1]["reads"] > settled["reads"] + 100)
    assert reader.events("read")[-1]["pages"] == settled["pages"], "it still finds what is gone"
    reader.finish()


def test_a_second_daemon_of_the_name_is_refused(machine: Machine) -> None:
    """With one line, and the first one does not notice."""
    first = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    put(store, 1, 8)
    reader = machine.worker("read", "n", first=1, count=1, pages=8)
    reader.wait_for("read")
    for _ in range(2):
        second = machine.spawn("n")
        assert second.wait() == 1
        said = second.errors.read_text()
        assert said.count("\n") == 1 and "'n'" in said and str(first.pid) in said, said
        assert second.output() == ""
    assert first.alive
    put(store, 2, 8)
    check_pages(store, {1: 8, 2: 8})
    check_laws(store)
    reader.finish()
    assert reader.events("read")[-1]["misses"] == {}
    assert first.terminate() == 0
    machine.serve("n")
    check_pages(store, {1: 8, 2: 8})
