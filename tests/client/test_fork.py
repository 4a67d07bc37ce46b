"""A forked child has no part in its parent's store: refused in words, and it keeps nothing alive."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

import kvstore
from tests.helpers.content import SMALL, chain, contents, mismatch
from tests.helpers.processes import (
    ROOT,
    Machine,
    Worker,
    check_laws,
    check_pages,
    evict_all,
    frames,
    wait_settled,
    wait_until,
)

PAGES = 8


def refused(worker: Worker) -> int:
    """Everything the child tried was refused in words. Returns its pid."""
    done = worker.wait_for("child done")
    attempts = worker.events("child")
    assert len(attempts) >= 10
    for event in attempts:
        words = ("connect",) if event["attempt"] == "pickle" else ("fork",)
        assert all(word in event["refusal"] for word in words), event
    assert not worker.errors.read_text(), worker.trace()
    return int(done["pid"])


def test_a_forked_child_is_refused_and_keeps_nothing_alive(machine: Machine) -> None:
    """The parent is killed while the child lives on: its session, lease and reserved frames end."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    worker = machine.worker("fork", "n", seed=1, pages=PAGES)
    child = refused(worker)
    try:
        worker.wait_for("forked")
        worker.tell("check")
        assert worker.wait_for("checked") == {"event": "checked", "pages": PAGES, "new": 2}
        assert store.stats()["leases"] == 1 and frames(store)["reserved"] >= PAGES
        check_laws(store)
        worker.kill()
        os.kill(child, 0)  # it lives
        wait_settled(store)
        check_pages(store, {1: PAGES, 3: 2})
        daemon.kill()  # and what the next daemon finds out about the session is the same
        machine.serve("n")
        wait_settled(store)
        os.kill(child, 0)
        evict_all(store)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_exits_ends_nothing_of_its_parent(machine: Machine) -> None:
    """Its finalizers run; session, lease and reservation stay the parent's."""
    machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    worker = machine.worker("fork", "n", seed=1, pages=PAGES, child_exits=True)
    refused(worker)
    assert worker.wait_for("child ended")["status"] == 0
    assert store.stats()["leases"] == 1 and frames(store)["reserved"] >= PAGES
    worker.tell("check")
    assert worker.wait_for("checked") == {"event": "checked", "pages": PAGES, "new": 2}
    worker.kill()
    wait_settled(store)


@pytest.mark.parametrize("child_exits", [False, True])
def test_a_forked_child_and_an_embedded_node(child_exits: bool, machine: Machine) -> None:
    """The child neither removes the node nor keeps its name after the parent's death."""
    worker = machine.worker("fork", "", embedded="e", seed=1, pages=PAGES, child_exits=child_exits, ttl_s=3.0)
    child = refused(worker)
    try:
        if child_exits:
            assert worker.wait_for("child ended")["status"] == 0
        else:
            worker.wait_for("forked")
        with machine.connect("e") as store:
            check_pages(store, {1: PAGES})
        worker.tell("check")
        assert worker.wait_for("checked") == {"event": "checked", "pages": PAGES, "new": 2}
        worker.kill()
        if not child_exits:
            os.kill(child, 0)
        daemon = machine.serve("e", dram="16MiB")  # the name is free; what is there is as good as after any kill -9
        with machine.connect("e") as store:
            check_pages(store, {1: PAGES, 3: 2})
            wait_settled(store)  # whose lease it was is not recorded: it ends at its deadline
        assert daemon.terminate() == 0
    finally:
        if not child_exits:
            os.kill(child, signal.SIGKILL)


def spawned(name: str, seed: int, found: multiprocessing.SimpleQueue) -> None:  # type: ignore[type-arg]
    """A spawned child connects itself."""
    with kvstore.connect(name) as store:
        keys = chain(seed, PAGES)
        match = store.cache(SMALL).get(keys)
        wrong = mismatch(match, keys)
        more = chain(seed + 1, PAGES)
        found.put((match.pages, wrong, store.cache(SMALL).put(more, contents(more))))


def test_a_killed_embedded_node_is_reaped(machine: Machine) -> None:
    """An unnamed embedded node whose process was killed takes no memory once another node starts."""
    code = f"import kvstore, time; s = kvstore.open(dram='4MiB', shm_dir={str(machine.shm_dir)!r}); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", code], env=machine.env(), cwd=ROOT)
    try:
        wait_until("it is there", lambda: list(machine.shm_dir.glob("kvstore-embedded-*/segment")))
        machine.serve("m", dram="4MiB")
        assert list(machine.shm_dir.glob("kvstore-embedded-*")), "a live one was reaped"
    finally:
        process.kill()
        process.communicate()
    assert list(machine.shm_dir.glob("kvstore-embedded-*"))
    machine.serve("n", dram="4MiB")
    assert not list(machine.shm_dir.glob("kvstore-embedded-*"))
