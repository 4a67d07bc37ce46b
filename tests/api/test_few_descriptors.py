"""A node of 1,024 descriptors, and strangers without a token who keep more connections than that to a port of it.

They are a process of their own, which opens another connection for each that is closed. The node lives, callers that
are connected are served at once, and new ones get in.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.cluster.data_connection import DataConnection
from kvstore.errors import KVStoreError
from kvstore.pb import store_pb2 as pb
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import HEAD, MAGIC, FrameKind, Hello
from tests.helpers import api
from tests.helpers.api import Client
from tests.helpers.beacon import Beacon
from tests.helpers.processes import CLI, Daemon, Machine, Process, wait_until
from tests.helpers.scraping import fetch

DESCRIPTORS = 1024
STRANGERS = 1200
CALLS, NEW_CALLERS = 25, 3
DELAY_S = 1.0  # a call of one that is connected on average, less what the machine stalled
NEW_S = 5.0  # a new caller on average, less that: gRPC's handshake may take so long
TLS_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class Node:
    """A node with all its servers, and where they listen."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        catalog, identities = f"file:{folder / 'catalog'}", api.identities_file(folder)
        flags = ["--dram", "16MiB", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", "--catalog", catalog]
        command = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *CLI, "serve", "--name", "few", *flags]
        self.daemon = machine.start(Daemon, "serve", [*command, "--identities", identities], None)
        line = self.daemon.wait_ready()
        self.grpc = api.address_of(line)
        self.http = line.split("http on ")[1].split(",")[0]
        self._folder = NodeFolder.at(machine.folder("few"))
        self.data_pid = self._data_server().pid

    def _data_server(self):  # type: ignore[no-untyped-def]
        return wait_until("the data server is there", lambda: find_data_server(self._folder))

    @property
    def data(self) -> str:
        return str(self._data_server().address)

    def check_lives(self) -> None:
        assert self.daemon.alive, self.daemon.trace()
        assert self._data_server().pid == self.data_pid, self.daemon.trace()
        assert "Traceback" not in self.daemon.trace(), self.daemon.trace()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("few")
    machine = Machine(folder)
    yield Node(machine, folder)
    machine.close()


@contextlib.contextmanager
def strangers(machine: Machine, address: str, says: bytes) -> Iterator[None]:
    """Around what happens while they are there."""
    command = [sys.executable, "-m", "tests.helpers.workers.strangers", address, str(STRANGERS), says.hex()]
    process = machine.start(Process, "strangers", command)
    wait_until("strangers are there", lambda: "full" in process.output())
    try:
        yield
        assert process.alive, process.trace()
    finally:
        process.kill()


def over_grpc(node: Node) -> tuple[Callable[[], object], Callable[[], None]]:
    client = Client(node.grpc, "a-token")
    return lambda: client.call("About", pb.AboutRequest(), 60), client.close


def over_data(node: Node) -> tuple[Callable[[], object], Callable[[], None]]:
    until_s = time.monotonic() + 60
    connection = DataConnection.open(node.data, Hello(token="a-token"), deadline_s=until_s, silence_s=60)
    return lambda: connection.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=until_s), connection.close


def over_http(node: Node) -> tuple[Callable[[], object], Callable[[], None]]:
    return lambda: fetch(node.http, "/healthz"), lambda: None


PORTS = {
    "grpc": (over_grpc, lambda node: node.grpc),
    "data": (over_data, lambda node: node.data),
    "http": (over_http, lambda node: node.http),
}


@pytest.mark.parametrize(
    ("port", "says"),
    [
        pytest.param("grpc", b"", id="grpc-silent"),
        pytest.param("grpc", HTTP2, id="grpc-settings"),
        pytest.param("grpc", TLS_HELLO, id="grpc-tls"),
        pytest.param("data", b"", id="data-silent"),
        pytest.param("data", HEAD.pack(MAGIC, FrameKind.HELLO, 0, 0, 100) + b"{", id="data-half"),
        pytest.param("http", b"", id="http-silent"),
        pytest.param("http", b"GET /metrics HTTP/1.1\r\nX: ", id="http-half"),
        pytest.param("http", b"GET /metrics HTTP/1.1\r\n\r\n", id="http-asking"),
    ],
)
def test_strangers_neither_end_nor_starve_a_node(node: Node, machine: Machine, port: str, says: bytes) -> None:
    begin, address = PORTS[port]
    call, close = (over_grpc if port == "http" else begin)(node)  # of HTTP each request is a new caller's
    call()
    with Beacon(threads=True) as beacon, strangers(machine, address(node), says):
        waited_s = 0.0
        for _ in range(CALLS):
            began_s = time.monotonic()
            call()
            waited_s += time.monotonic() - began_s - beacon.stall_s(began_s)
            time.sleep(0.02)
        assert waited_s < CALLS * DELAY_S
        began_s = time.monotonic()
        for _ in range(NEW_CALLERS):
            wait_until("a new caller gets in", lambda: gets_in(node, begin), 60)
        assert time.monotonic() - began_s - beacon.stall_s(began_s) < NEW_CALLERS * NEW_S
    close()
    node.check_lives()


def gets_in(node: Node, begin: Callable[[Node], tuple[Callable[[], object], Callable[[], None]]]) -> bool:
    """Whether a new caller is served, at the first attempt."""
    try:
        call, close = begin(node)
        call()
        close()
    except (grpc.RpcError, KVStoreError, OSError):
        return False
    return True


def test_all_ports_at_once(node: Node, machine: Machine) -> None:
    calls = {name: begin(node)[0] for name, (begin, _) in PORTS.items() if name != "http"}
    for call in calls.values():
        call()
    with contextlib.ExitStack() as crowds, Beacon(threads=True) as beacon:
        for _, address in PORTS.values():
            crowds.enter_context(strangers(machine, address(node), b""))
        for call in calls.values():
            for _ in range(5):
                began_s = time.monotonic()
                call()
                assert time.monotonic() - began_s - beacon.stall_s(began_s) < DELAY_S
        for begin, _ in PORTS.values():
            wait_until("a new caller gets in", lambda begin=begin: gets_in(node, begin), 60)
    node.check_lives()


def test_a_daemon_raises_its_descriptors(node: Node) -> None:
    for pid in (node.daemon.pid, node.data_pid):
        limits = Path(f"/proc/{pid}/limits").read_text()
        line = next(line for line in limits.splitlines() if line.startswith("Max open files"))
        assert line.split()[3:5] == [str(DESCRIPTORS), str(DESCRIPTORS)]
    with socket.create_connection(node.http.rsplit(":", 1), 10):
        node.check_lives()
