"""An error at every handler and task of real daemons: it ends that request, connection or turn, is counted, and nothing
else notices.

One node with its data server, one engine and one conductor serve the whole file. A file names the place that fails.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import Store
from kvstore.cluster.data_connection import DataConnection
from kvstore.errors import InternalError, KVStoreError, Unavailable
from kvstore.pb import conductor_pb2, engine_pb2, store_pb2
from kvstore.shm.data_server_file import RunningDataServer, find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire import control
from kvstore.wire.control import Op
from kvstore.wire.data import FrameKind, Hello
from kvstore.wire.grpc import from_rpc
from tests.helpers.api import address_of
from tests.helpers.conductors import ConductorProcess, serve_conductor
from tests.helpers.content import SMALL, chain, contents, prompt
from tests.helpers.engines.processes import EngineProcess, spawn_engine
from tests.helpers.nursery import ROOT
from tests.helpers.processes import Daemon, Machine, put, wait_until
from tests.helpers.scraping import Scrape, fetch, http_of

CALL_S = 30.0
ENDED_S = 20.0


@dataclass
class House:
    """All daemons, and the file that names what fails."""

    machine: Machine
    faults: Path
    node: Daemon
    engine: EngineProcess
    conductor: ConductorProcess
    store: Store

    @property
    def processes(self) -> dict[str, int]:
        """What has to live on."""
        daemons = {"node": self.node, "engine": self.engine, "conductor": self.conductor}
        return {**{name: each.pid for name, each in daemons.items() if each.alive}, "data": self.data.pid}

    @property
    def data(self) -> RunningDataServer:
        found = find_data_server(NodeFolder.at(self.machine.folder("n")))
        assert found is not None
        return found

    @property
    def https(self) -> list[str]:
        return [http_of(self.node.output()), self.engine.http, self.conductor.http]

    def counted(self, place: str) -> float:
        """Errors of that place that the daemons tell of, the data server's by its node."""
        places = {place, f"data/{place}"}
        scrapes = [Scrape(address) for address in self.https]
        return sum(each("kvstore_internal_errors_total", place=place) for each in scrapes for place in places)

    def fails(self, *places: str) -> None:
        """From now on these places fail, and no others."""
        self.faults.write_text("\n".join(places))

    def data_connection(self) -> DataConnection:
        hello = Hello(node="n", process=self.data.process)
        return DataConnection.open(self.data.address, hello, deadline_s=time.monotonic() + CALL_S)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    machine, faults = Machine(folder), folder / "faults"
    armed = f"fault:{faults}"
    catalog = {"catalog": f"file:{folder}/catalog"}
    patch = pytest.MonkeyPatch()
    patch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
    try:
        node = machine.spawn(
            "n",
            failpoint=armed,
            dram="32MiB",
            nvme=f"{folder}/disk:64MiB",
            listen="127.0.0.1:0",
            http="127.0.0.1:0",
            kv_events="tcp://127.0.0.1:*",
            **catalog,
        )
        env = {"KVSTORE_FAILPOINT": armed}
        node.wait_ready()
        engine = spawn_engine(machine, env=env, node="n", listen="127.0.0.1:0", http="127.0.0.1:0", **catalog)
        engine.wait_ready()
        conductor = serve_conductor(machine, env=env, listen="127.0.0.1:0", http="127.0.0.1:0", **catalog)
        store = machine.connect("n")
        put(store, 1, 8)
        yield House(machine, faults, node, engine, conductor, store)
    finally:
        machine.close()
        patch.undo()


@pytest.fixture
def unhurt(house: House) -> Iterator[House]:
    """After the test nothing fails, every process is the one that it was, and all of them serve."""
    before = house.processes
    yield house
    house.fails()
    assert house.processes == before
    match = house.store.cache(SMALL).get(chain(1, 8))
    assert match.pages == 8
    assert all(fetch(address, "/readyz")[0] == 200 for address in house.https)


def shows(house: House, place: str, attempt: Callable[[], object]) -> None:
    """``attempt`` raises while that place fails, which is counted, and does not afterwards."""
    before = house.counted(place)
    house.fails(place)
    with pytest.raises((KVStoreError, EOFError)) as ended:
        attempt()
    assert "unexpected error" in str(ended.value) or isinstance(ended.value, EOFError | Unavailable)
    house.fails()
    attempt()
    assert wait_until(f"{place} is counted", lambda: house.counted(place) >= before + 1, ENDED_S)


# --- gRPC ------------------------------------------------------------------------------------------------------------

SERVICES = {
    "node": store_pb2.DESCRIPTOR.services_by_name["Store"],
    "engine": engine_pb2.DESCRIPTOR.services_by_name["Engine"],
    "conductor": conductor_pb2.DESCRIPTOR.services_by_name["Conductor"],
}
METHODS = [
    (who, method.name, method.server_streaming) for who, service in SERVICES.items() for method in service.methods
]
OTHERS = [("node", "grpc.health.v1.Health", "Check", False), ("node", "grpc.health.v1.Health", "Watch", True)]


def grpc_call(house: House, who: str, service: str, name: str, streams: bool) -> None:
    """Send an empty message, whatever it means to the method. Raises InternalError where the call ends with one."""
    address = {
        "node": lambda: address_of(house.node.output()),
        "engine": lambda: house.engine.address,
        "conductor": lambda: house.conductor.address,
    }[who]()
    with grpc.insecure_channel(address) as channel:
        path = f"/{service}/{name}"
        try:
            if streams:
                call = channel.unary_stream(path)(b"", timeout=CALL_S)
                next(iter(call), None)
                call.cancel()
            else:
                channel.unary_unary(path)(b"", timeout=CALL_S)
        except grpc.RpcError as error:
            if isinstance(found := from_rpc(error), InternalError):
                raise found from None


@pytest.mark.parametrize(("who", "name", "streams"), METHODS, ids=[f"{who}-{name}" for who, name, _ in METHODS])
def test_an_error_in_a_method_ends_that_call(unhurt: House, who: str, name: str, streams: bool) -> None:
    call = lambda: grpc_call(unhurt, who, SERVICES[who].full_name, name, streams)  # noqa: E731
    shows(unhurt, f"grpc/{name}", call)


@pytest.mark.parametrize(("who", "service", "name", "streams"), OTHERS)
def test_an_error_in_the_health_service_ends_that_call(
    unhurt: House, who: str, service: str, name: str, streams: bool
) -> None:
    shows(unhurt, f"grpc/{service}/{name}", lambda: grpc_call(unhurt, who, service, name, streams))


# --- HTTP ------------------------------------------------------------------------------------------------------------

PATHS = ["/healthz", "/readyz", "/other", "/v1/models", "/v1/completions", "/v1/chat/completions"]


@pytest.mark.parametrize("path", PATHS)
def test_an_error_in_an_http_request_is_its_answer(unhurt: House, path: str) -> None:
    place = "http/" + path.strip("/")
    before = unhurt.counted(place)
    unhurt.fails(place)
    codes = [fetch(address, path)[0] for address in unhurt.https]
    unhurt.fails()
    assert 500 in codes and unhurt.counted(place) == before + codes.count(500)
    assert codes.count(500) == (1 if path.startswith("/v1") else 3), codes
    assert 500 not in [fetch(address, path)[0] for address in unhurt.https]


def test_an_error_in_a_scrape_is_its_answer(unhurt: House) -> None:
    before = unhurt.counted("http/metrics")
    unhurt.fails("http/metrics")
    assert [fetch(address)[0] for address in unhurt.https] == [500, 500, 500]
    unhurt.fails()
    assert unhurt.counted("http/metrics") == before + 3


# --- data connections ------------------------------------------------------------------------------------------------

KINDS = [FrameKind.PING, FrameKind.READ, FrameKind.CHECK, FrameKind.FIND, FrameKind.ANNOUNCE, FrameKind.LIST]
KINDS += [FrameKind.STATUS]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_error_in_a_data_request_is_its_answer_and_the_connection_goes_on(unhurt: House, kind: FrameKind) -> None:
    connection = unhurt.data_connection()

    def ask(kind: FrameKind) -> None:
        deadline_s = time.monotonic() + CALL_S
        number = connection.send(kind, b"", deadline_s=deadline_s)
        head = connection.receive_head(number, *FrameKind, deadline_s=deadline_s)
        connection.receive(head.body_bytes, deadline_s=deadline_s)

    place = f"data/{kind.name}"
    before = unhurt.counted(place)
    unhurt.fails(place)
    with pytest.raises(InternalError, match=place):
        ask(kind)
    unhurt.fails()
    ask(FrameKind.PING)
    connection.close()
    assert wait_until("it is counted", lambda: unhurt.counted(place) == before + 1, ENDED_S)


def test_an_error_in_a_data_connection_ends_it_alone(unhurt: House) -> None:
    other = unhurt.data_connection()
    shows(unhurt, "data/connection", lambda: unhurt.data_connection().close())
    deadline_s = time.monotonic() + CALL_S
    assert other.call(FrameKind.PING, b"x", reply=FrameKind.PONG, deadline_s=deadline_s) == b"x"
    other.close()


# --- the unix socket -------------------------------------------------------------------------------------------------


class Client:
    """A connection to the node's control socket, with a session of its own. Raises EOFError where it is hung up on."""

    def __init__(self, house: House, session: int) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(CALL_S)
        self._socket.connect(str(house.machine.folder("n") / "control"))
        self.ask(Op.HELLO, a=session, body=[control.pack_json({"protocol": control.PROTOCOL})])

    def ask(self, op: Op, **how: Any) -> control.Message:
        self._socket.send(control.encode(op, 1, **how))
        try:
            data = self._socket.recv(control.MESSAGE_BYTES_MAX)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        reply = control.decode(memoryview(data))
        if b"unexpected error" in bytes(reply.body):
            raise InternalError(bytes(reply.body).decode())
        return reply

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("op", [op for op in Op if op is not Op.HELLO], ids=lambda op: op.name)
def test_an_error_in_a_local_request_is_its_answer(unhurt: House, op: Op) -> None:
    client = Client(unhurt, 70 + op)
    shows(unhurt, f"control/{op.name}", lambda: client.ask(op))
    client.close()


def test_an_error_in_a_local_connection_ends_it_alone(unhurt: House) -> None:
    def talk() -> None:
        client = Client(unhurt, 51)
        client.ask(Op.DRAIN)
        client.close()

    shows(unhurt, "control/connection", talk)


def test_an_error_in_a_slow_local_request_ends_its_connection_alone(unhurt: House) -> None:
    def talk() -> None:
        client = Client(unhurt, 52)
        client.ask(Op.ADMIN, body=[control.pack_json({"call": "verify"})])
        client.close()

    shows(unhurt, "control/slow", talk)


def test_a_published_request_that_fails_is_passed_over(unhurt: House) -> None:
    before = unhurt.counted("control/published")
    unhurt.fails("control/published")
    cache = unhurt.store.cache(SMALL)
    cache.put(prompt(3, 4), contents(chain(3, 4)))
    wait_until("it is counted", lambda: unhurt.counted("control/published") > before, ENDED_S)
    unhurt.fails()
    cache.put(prompt(4, 4), contents(chain(4, 4)))
    assert wait_until("later ones are taken in", lambda: cache.lookup(prompt(4, 4)).pages == 4)


# --- tasks -----------------------------------------------------------------------------------------------------------

TASKS = [
    *("main", "tick", "background", "mover", "lane", "control", "announcer", "kv events", "gate", "connections"),
    *("replica survey", "replicator 0", "data accept", "conductor", "ask", "hear", "tokenizers", "engine pool"),
]


@pytest.mark.parametrize("task", TASKS)
def test_a_task_goes_on_after_an_error(unhurt: House, task: str) -> None:
    place = f"task/{task}"
    before = unhurt.counted(place)
    unhurt.fails(place)
    seeds = iter(range(1000, 100_000))

    def fails_twice() -> bool:
        if task == "hear":  # where there is something to hear
            put(unhurt.store, next(seeds), 1)
        return unhurt.counted(place) >= before + 2

    wait_until(f"{task} fails twice", fails_twice, ENDED_S)
    unhurt.fails()

    def rests() -> bool:
        counted = unhurt.counted(place)
        time.sleep(0.1)
        return unhurt.counted(place) == counted

    wait_until(f"{task} fails no more", rests, ENDED_S)
    wait_until("the node's tick goes on", lambda: unhurt.store.stats()["uptime_s"] > 0)


# --- decided state: the last tests, since these processes end --------------------------------------------------------


def test_an_error_in_a_directory_ends_the_data_server_and_its_daemon_starts_another(house: House) -> None:
    before = house.data
    house.fails("state/directory")
    put(house.store, 9, 2)  # which is announced
    wait_until("the data server ends", lambda: not Path(f"/proc/{before.pid}").exists(), ENDED_S)
    house.fails()
    folder = NodeFolder.at(house.machine.folder("n"))
    wait_until("another one serves", lambda: find_data_server(folder) is not None, 60)
    assert house.node.alive and house.data.pid != before.pid


@pytest.mark.parametrize("who", ["conductor", "engine", "node"])
def test_an_error_in_decided_state_ends_its_daemon(house: House, who: str) -> None:
    process = {"conductor": house.conductor, "engine": house.engine, "node": house.node}[who]
    house.fails(f"state/{who}")
    assert process.wait() == 1
    assert f"state/{who}: its state cannot be trusted" in process.errors.read_text()
    house.fails()


# --- all of them -----------------------------------------------------------------------------------------------------

ELSEWHERE = {
    "grpc/": "by the table of methods",
    "control/": "by the table of operations",
    "data/": "by the table of kinds",
    "http/": "by the table of paths",
    "task/": "by the names of threads and members",
    "task/data catalog": "ends when the data server is listed: tests/transfer",
    "membership/election": "stops for a pause: tests/catalog",
    "membership/watch": "the same",
    "membership/presence": "the same",
    "membership/session": "the same",
    "task/copy": "needs a disk: test_lanes",
    "task/relay copy": "a third tier",
    "task/read": "needs a disk: tests/client/test_read_threads.py",
    "task/disk": "the same: tests/nvme/test_patient_disk.py",
    "task/order": "needs a second node",
    "task/drain": "takes its node out of the pool: tests/transfer/test_drain.py",
    "task/handoff": "needs two engines: tests/engine",
    "task/migration": "the same",
    "http/answer": "needs an answer that has begun: tests/conductor",
}


def test_every_place_is_tried_here_or_elsewhere() -> None:
    """Names of places in the source, with what varies cut off."""
    call = re.compile(r'\b(?:RequestGuard|thread_loop|task_loop|StateGuard)\(\s*f?"([^"{]+)')
    files = [file for part in ("kvstore", "engine") for file in (ROOT / part).rglob("*.py")]
    found = {name for file in files for name in call.findall(file.read_text())}
    tried = {f"task/{task}" for task in TASKS} | {"control/connection", "control/slow", "control/published"}
    tried |= {"data/connection", "state/node", "state/engine", "state/conductor", "state/directory"}
    assert found - tried == set(ELSEWHERE), (found - tried) ^ set(ELSEWHERE)
