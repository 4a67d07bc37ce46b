"""Strangers take all descriptors of a daemon: it lives, its clients are served, and what failed goes on afterwards."""

from __future__ import annotations

import errno
import resource
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.pb import store_pb2
from kvstore.server.http import ACCEPT_AGAIN_S, HostNames, HttpServer
from tests.helpers.api import Client, address_of
from tests.helpers.content import SMALL, chain
from tests.helpers.processes import Daemon, Machine, put, wait_until
from tests.helpers.scraping import http_of

DESCRIPTORS = 256  # of the daemon
TICKS_S = 6.0  # so long are they gone: every task has had its turn, a sweep of sessions as well


def descriptors_of(daemon: Daemon) -> int:
    return len(list(Path(f"/proc/{daemon.pid}/fd").iterdir()))


@contextmanager
def flood(address: str) -> Iterator[None]:
    """Connections that say nothing, more than there are descriptors; one that is dropped is made again."""
    host, port = address.rsplit(":", 1)
    ended, held = threading.Event(), list[socket.socket]()

    def hold() -> None:
        while not ended.wait(0.01):
            for old in held[:-DESCRIPTORS]:
                old.close()
            del held[:-DESCRIPTORS]
            for _ in range(20):
                stranger = socket.socket()
                stranger.setblocking(False)
                stranger.connect_ex((host, int(port)))
                held.append(stranger)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        for each in held:
            each.close()


def test_a_daemon_without_descriptors_lives_and_serves_who_is_connected(machine: Machine) -> None:
    daemon = machine.spawn("n", dram="16MiB", listen="127.0.0.1:0", http="127.0.0.1:0")
    line = daemon.wait_ready()
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    store, client = machine.connect("n"), Client(address_of(line))
    put(store, 1, 8)
    capacity = store.stats()["tiers"]["dram"]["capacity_bytes"]
    with flood(address_of(line)), flood(http_of(line)):
        wait_until("they are gone", lambda: descriptors_of(daemon) >= DESCRIPTORS - 8)
        until_s = time.monotonic() + TICKS_S
        while time.monotonic() < until_s:
            assert daemon.alive, daemon.trace()
            put(store, 1 + int(10 * time.monotonic()) % 1000, 4)
            assert store.cache(SMALL).get(chain(1, 8)).pages == 8
            time.sleep(0.05)
        assert daemon.alive, daemon.trace()
    wait_until("a new client is served", lambda: machine.connect("n", 5.0).stats()["name"] == "n")
    dram = machine.connect("n").stats()["tiers"]["dram"]
    assert dram["capacity_bytes"] == capacity and not dram.get("failed_bytes"), "no memory was given up"
    assert client.call("Stats", store_pb2.Empty()) is not None
    client.close()
    assert daemon.terminate() == 0


def test_http_without_descriptors_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepting fails while the connection stays in the backlog: without a pause that is a loop that burns a core."""
    tries = []

    def no_descriptor(server: socketserver.TCPServer) -> None:
        tries.append(time.monotonic())
        raise OSError(errno.EMFILE, "Too many open files")

    server = HttpServer("127.0.0.1:0", {}, HostNames([]))
    monkeypatch.setattr(socketserver.TCPServer, "get_request", no_descriptor)
    server.start()
    with socket.create_connection(("127.0.0.1", int(server.address.rsplit(":", 1)[1]))):
        wait_until("it is tried again", lambda: len(tries) >= 10)
    server.stop()
    assert tries[9] - tries[0] >= 9 * ACCEPT_AGAIN_S
