"""Many nodes at once do not answer, or trickle: a get waits for some of them, less than a second in all, and for none
of them again."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.local import peer_reads as brings
from kvstore.client.local.peer_reads import LOSS_S, PeerReader, TimeBudget
from kvstore.cluster import peer_links, transport
from kvstore.cluster.data_connection import SILENCE_S
from kvstore.cluster.data_listener import Server
from kvstore.cluster.find_pages import Stretch
from kvstore.cluster.peer_links import PoolNode, PoolView
from kvstore.errors import DeadlineExceeded
from kvstore.model.replica import FrameClass, Tier
from kvstore.server.identities import LOCAL
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import ChainQuery, FrameKind, pack_end, pack_head, pack_range, sums_of, unpack_read
from tests.helpers.beacon import Beacon
from tests.helpers.content import SMALL, chain
from tests.helpers.pool import PAGES, Pool
from tests.helpers.processes import Machine, put, wait_until

GET_S = 1.0
SILENT = 12
ASKED_MAX = 3  # LOSS_S / SILENCE_S, and one for what connecting took
assert ASKED_MAX >= LOSS_S / SILENCE_S


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    """Who would be there, and never says a word: as a process that was stopped."""
    made = [socket.create_server(("127.0.0.1", 0)) for _ in range(SILENT)]
    yield made
    for listener in made:
        listener.close()


def asked(listener: socket.socket) -> int:
    """How many connections were made to it."""
    listener.setblocking(False)
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


class Named(PeerReader):
    """All of them have all pages, one after another."""

    def find(
        self, chain: Any, keys: Any, pages: int, without: Collection[str] = (), budget: TimeBudget | None = None
    ) -> list[Stretch]:
        view = self._peers.look()
        assert view is not None
        self._connect(view)
        rest = sorted(set(view.peers) - set(without) - {view.node})
        return [Stretch(rest[0], 0, len(keys) - pages, bytes(len(keys) - pages))] if rest else []


def test_of_many_that_are_silent_few_are_waited_for(tmp_path: Path, listeners: list[socket.socket]) -> None:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    known = {
        f"p{i}": PoolNode(f"p{i}", secrets.token_hex(8), "0", (f"127.0.0.1:{listener.getsockname()[1]}",))
        for i, listener in enumerate(listeners)
    }
    peer_links.write(folder, PoolView("pool", "n", 0.0, {"n": PoolNode("n", "1", "0"), **known}))
    elsewhere = Named(folder.path)
    shape = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
    wanted, rows = ChainQuery(SMALL.fingerprint, "", "", shape, True), np.zeros((PAGES, SMALL.page_bytes), np.uint8)
    try:
        began_s = time.monotonic()
        assert elsewhere.read(wanted, chain(1, PAGES), rows, 0).pages == 0
        assert time.monotonic() - began_s < 10 * LOSS_S
        first = sum(asked(listener) for listener in listeners)
        assert 1 <= first <= ASKED_MAX
    finally:
        elsewhere.close()


class Paced:
    """The handler of READ of a node that sends zeros, a page every ``pause_s``: each in a frame of its own, or some of
    its bytes at a time."""

    def __init__(self, pause_s: float, bytes_at_a_time: int = 0) -> None:
        self.pause_s, self.bytes_at_a_time = pause_s, bytes_at_a_time

    def __call__(self, exchange: Any, body: memoryview) -> None:
        request = unpack_read(body)
        page = np.zeros((1, request.length), np.uint8)
        for number in range(len(request.keys)):
            head = pack_range(number, Tier.DRAM, sums_of(page, request.pieces))
            if not self.bytes_at_a_time:
                time.sleep(self.pause_s)
                exchange.reply(FrameKind.RANGE, head, page.data)
                continue
            late_s, raw = time.monotonic() + GET_S, page.tobytes()
            size = len(head) + len(raw)
            exchange._stream.send([pack_head(FrameKind.RANGE, exchange._request, size), head], late_s)
            for first in range(0, len(raw), self.bytes_at_a_time):
                time.sleep(self.pause_s)
                exchange._stream.send([raw[first : first + self.bytes_at_a_time]], late_s)
        exchange.reply(FrameKind.END, pack_end(len(request.keys), ""))


def brought_from(tmp_path: Path, source: Paced) -> tuple[int, float]:
    """How many pages a get brings from that source, and in which time, less what the machine stood still."""
    server = Server("p", {FrameKind.READ: source}, lambda hello, names: LOCAL)
    peer = PoolNode("p", server.process, "0", (server.start("127.0.0.1", 0),))
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    peer_links.write(folder, PoolView("pool", "n", 0.0, {"n": PoolNode("n", "1", "0"), "p": peer}))
    shape = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
    wanted, rows = ChainQuery(SMALL.fingerprint, "", "", shape, True), np.zeros((PAGES, SMALL.page_bytes), np.uint8)
    elsewhere = Named(folder.path)
    try:
        with Beacon(threads=True) as beacon:
            began_s = time.monotonic()
            pages = elsewhere.read(wanted, chain(1, PAGES), rows, 0).pages
            took_s = time.monotonic() - began_s
            return pages, took_s - beacon.stall_s(began_s, began_s + took_s)
    finally:
        elsewhere.close()
        server.stop()


@pytest.mark.parametrize("source", [Paced(0.2), Paced(0.04), Paced(0.2, 1), Paced(0.04, 1)])
def test_a_source_that_trickles_is_given_up_as_a_silent_one(tmp_path: Path, source: Paced) -> None:
    pages, took_s = brought_from(tmp_path, source)
    assert pages < PAGES and took_s < GET_S


def test_a_source_that_is_fast_enough_may_take_as_long_as_its_bytes_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten times as fast as it has to be, and twice as long as silence is waited for."""
    pause_s = 2 * LOSS_S / PAGES
    for module in (brings, transport):
        monkeypatch.setattr(module, "RATE_MIN", int(SMALL.page_bytes / pause_s / 10))
    assert brought_from(tmp_path, Paced(pause_s))[0] == PAGES


def test_one_budget_holds_for_all_nodes() -> None:
    budget = TimeBudget()
    for _ in range(SILENT):
        if budget.is_over:
            break
        before_s = budget.silence_left_s
        with pytest.raises(DeadlineExceeded), budget.transfer() as silence_s:
            assert 0 < silence_s <= min(SILENCE_S, before_s)
            time.sleep(silence_s)
            raise DeadlineExceeded("silent")
        assert budget.silence_left_s <= before_s - silence_s + 0.01
    assert budget.is_over
    with TimeBudget().transfer():
        pass


def test_two_of_three_stand_still_or_die(machine: Machine, tmp_path: Path) -> None:
    """Both that have the pages. What a get can bring it brings; the next one waits for nobody."""
    pool = Pool(machine, f"file:{tmp_path / 'catalog'}")
    for name in "ab":
        put(pool.stores[name], 1, PAGES)
    put(pool.stores["c"], 1, 7)
    pool.known("c", 1)
    stopped = [pool.data_server(name) for name in "ab"]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        assert pool.get("c", 1).pages == 7
        assert time.monotonic() - began_s < 10 * LOSS_S
        readers = [threading.Thread(target=pool.get, args=("c", 1)) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(10 * LOSS_S)
        assert not any(reader.is_alive() for reader in readers)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    wait_until("they are read again", lambda: pool.get("c", 1).pages == PAGES, 60)
    os.kill(pool.data_server("a"), signal.SIGKILL)
    os.kill(pool.data_server("b"), signal.SIGKILL)
    assert pool.get("c", 1).pages >= 7
    wait_until("they are read again", lambda: pool.get("c", 1).pages == PAGES, 60)
