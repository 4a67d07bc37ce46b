"""Frames granted ahead: none stays with a client that has stopped writing."""

from __future__ import annotations

import select
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.client.local import grants
from kvstore.errors import Unavailable
from tests.helpers.processes import Machine, check_laws, frames, put, wait_until

LAYOUT = kvstore.Layout(model="m", layers=2, kv_heads=1, head_dim=32, dtype="float16", page_tokens=8)


@pytest.mark.parametrize("refused", ["no parent", "present"])
def test_frames_of_a_put_that_nobody_asks_about_come_back(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages were refused, so that their frames are still its own; only its replies say so."""
    monkeypatch.setattr(grants, "IDLE_S", 1.0)
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        cache = store.cache(LAYOUT)
        keys = cache.keys(np.arange(64, dtype=np.uint32))
        pages = np.zeros((8, LAYOUT.page_bytes), np.uint8)
        if refused == "no parent":
            cache.put_async(keys[4:], pages[4:])
        else:
            send = grants.GrantPool.take

            def overtaken(pool: grants.GrantPool, count: int) -> list[grants.Address]:
                monkeypatch.undo()  # the other put is no slower than this one, and first
                monkeypatch.setattr(grants, "IDLE_S", 1.0)
                assert cache.put(keys, pages) == 8
                return send(pool, count)

            monkeypatch.setattr(grants.GrantPool, "take", overtaken)
            cache.put_async(keys, pages)
        assert frames(store)["reserved"], "nothing was refused: nothing could stay"
        wait_until("its frames come back", lambda: frames(store)["reserved"] == 0)
        assert cache.put(keys, pages) == (8 if refused == "no parent" else 0)


def test_frames_granted_just_before_a_kill_come_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node's last words are read although its connection has ended, and was found to have by another request."""
    monkeypatch.setattr(grants, "IDLE_S", 1.0)
    daemon = machine.serve("n", dram="4MiB")
    with machine.connect("n") as store:
        put(store, 1, 16)  # asks for more, and does not wait for them
        channel = store._node.mapped().channel
        assert channel._waiting, "nothing is on its way"
        assert select.select([channel._socket], [], [], 30.0)[0]
        daemon.kill()
        machine.serve("n")
        wait_until("what was granted comes back", lambda: frames(store)["reserved"] == 0)


def test_frames_of_a_reply_that_came_too_late_come_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node was stopped for longer than the client waits; the client writes no more, and its session lives."""
    monkeypatch.setattr(grants, "IDLE_S", 1.0)
    daemon = machine.serve("n", dram="16MiB")
    with machine.connect("n", timeout_s=0.5) as store, machine.connect("n") as other:
        cache = store.cache(LAYOUT)
        keys, pages = cache.keys(np.arange(64, dtype=np.uint32)), np.zeros((8, LAYOUT.page_bytes), np.uint8)
        assert cache.put(keys[:1], pages[:1]) == 1
        wait_until("it has no frames", lambda: frames(other)["reserved"] == 0)
        daemon.stop()
        with pytest.raises(Unavailable):
            cache.put(keys, pages)
        pool = store._node.mapped().pool(cache.frame_class)
        assert pool._late, "no request for frames is unanswered"
        daemon.resume()
        wait_until("the reply is read", lambda: not pool._late)
        wait_until("the frames come back", lambda: frames(other)["reserved"] == 0)
        assert cache.put(keys, pages) == 7


def test_frames_of_a_reply_that_was_lost_come_back(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon dies after it has granted them and before it replies. The session goes on with the next daemon."""
    monkeypatch.setattr(grants, "IDLE_S", 1.0)
    daemon = machine.serve("n", dram="16MiB", failpoint="node.reply:3")
    with machine.connect("n") as store:
        put(store, 1, 4)
        daemon.wait(30.0)
        machine.serve("n", dram="16MiB")
        put(store, 2, 4)
        assert store.stats()["counters"]["grants_lost"] > 0, "no reply was lost"
        wait_until("all come back", lambda: frames(store)["reserved"] == 0)
        check_laws(store)
