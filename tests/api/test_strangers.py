"""Callers who never finish a request: they take nobody's place, and are soon over."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from kvstore.pb import store_pb2 as pb
from tests.helpers import api
from tests.helpers.api import Client
from tests.helpers.half_open import HalfOpenCalls, call_headers
from tests.helpers.processes import CLI, Daemon, Machine, wait_until

Code = grpc.StatusCode

RPCS_MAX = 8
CONNECTIONS, EACH = 12, 16
METHODS = ("kvstore.v1.Store/Lookup", "kvstore.v1.Store/Read", "kvstore.v1.Store/Write", "grpc.health.v1.Health/Check")
CALL_S = 30.0  # of a call that has a place
HANDSHAKE_S = 5.0  # that the node gives


class HalfOpen:
    """Many calls, of which nothing but the headers is sent."""

    def __init__(self, address: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self.connections = [HalfOpenCalls(host, int(port)) for _ in range(CONNECTIONS)]
        self.ended: Counter[str] = Counter()
        for number, connection in enumerate(self.connections):
            for call in range(EACH):
                connection.open(call_headers(f"/{METHODS[(number + call) % len(METHODS)]}", token=token))
            connection.flush()

    def look(self) -> int:
        """See how they end; returns how many have."""
        for connection in self.connections:
            connection.flush()
            self.ended.update(connection.poll())
        return self.ended.total()

    def wait_seen(self, waiting: int) -> None:
        """The node has seen them all, and let so many wait for their requests at most."""
        wait_until(f"all but {waiting} have ended", lambda: self.look() >= CONNECTIONS * EACH - waiting)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()


def is_served(client: Client) -> bool:
    """A call of this client's is not refused."""
    code = client.code("About", pb.AboutRequest(), CALL_S)
    assert code in (Code.OK, Code.RESOURCE_EXHAUSTED, Code.CANCELLED), code  # CANCELLED: as below
    return code is Code.OK


@pytest.fixture
def node(machine: Machine, tmp_path: Path) -> tuple[Daemon, str]:
    return api.serve_with(machine, f"rpcs_max = {RPCS_MAX}", identities=api.identities_file(tmp_path))


@pytest.fixture
def half_open(node: tuple[Daemon, str]) -> Iterator[Callable[[str], HalfOpen]]:
    made: list[HalfOpen] = []

    def open_calls(token: str) -> HalfOpen:
        made.append(HalfOpen(node[1], token))
        return made[-1]

    yield open_calls
    for calls in made:
        calls.close()


def test_strangers_are_refused_before_they_say_anything(
    node: tuple[Daemon, str], half_open: Callable[[str], HalfOpen]
) -> None:
    calls = half_open("nobody's")
    b = Client(node[1], "b-token")
    calls.wait_seen(0)
    for _ in range(5):
        assert b.code("About", pb.AboutRequest(), CALL_S) is Code.OK
    # What gRPC cancels had not been looked at: there are more than it keeps in line.
    unauthenticated, cancelled = str(Code.UNAUTHENTICATED.value[0]), str(Code.CANCELLED.value[0])
    assert set(calls.ended) <= {unauthenticated, cancelled} and calls.ended[unauthenticated], calls.ended
    assert calls.look() == CONNECTIONS * EACH
    b.close()
    assert node[0].terminate() == 0
    assert "Traceback" not in node[0].trace(), node[0].trace()


def test_half_open_calls_of_a_tenant_give_way(machine: Machine, tmp_path: Path) -> None:
    """Else they would keep their places for good: this node waits an hour for a request."""
    patient = f"from kvstore.server.gate import Gate; Gate.first_message_s = 3600.0; {CLI[2]}"
    settings = {"cli": (sys.executable, "-c", patient), "identities": api.identities_file(tmp_path)}
    node = api.serve_with(machine, f"rpcs_max = {RPCS_MAX}", **settings)
    for token in ("a-token", "op-token"):
        with contextlib.closing(HalfOpen(node[1], token)) as calls:
            calls.wait_seen(RPCS_MAX)
            for client in (Client(node[1], "b-token"), Client(node[1], "op-token"), Client(node[1], token)):
                for _ in range(4):
                    wait_until("one gives way", partial(is_served, client))
                client.close()
    assert node[0].terminate() == 0
    assert "Traceback" not in node[0].trace(), node[0].trace()


def test_connections_that_say_nothing_are_let_go(node: tuple[Daemon, str]) -> None:
    host, _, port = node[1].rpartition(":")
    silent = [socket.create_connection((host, int(port)), timeout=HANDSHAKE_S + 60) for _ in range(2)]
    silent[1].sendall(b"PRI * HTTP/2.0\r\n")  # begun, not ended
    for connection in silent:
        while connection.recv(4096):
            pass
        connection.close()
    client = Client(node[1], "b-token")
    assert client.code("About", pb.AboutRequest(), CALL_S) is Code.OK
    client.close()
