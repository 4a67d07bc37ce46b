"""What tenants of a data server can do to each other: reads from NVMe, slow readers, floods of FIND. Real processes."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvstore.cluster.data_connection import SILENCE_S, DataConnection
from kvstore.cluster.directory_messages import pack_find, unpack_found
from kvstore.cluster.transport import PullResult, pull, send_read
from kvstore.errors import TooManyCalls, Unavailable
from kvstore.model.prefix import veil_of
from kvstore.model.replica import FrameClass, Tier
from kvstore.node.cluster.page_handlers import NVME_REPLIES_MAX, SLOW_S
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import ChainQuery, FrameKind, Hello, Namespace, ReadRequest
from tests.helpers import api
from tests.helpers.beacon import Beacon
from tests.helpers.content import LARGE, chain, contents, first_wrong
from tests.helpers.nvme.nodes import NODE, configure, save_all
from tests.helpers.processes import Machine, Worker, put, wait_until

PAGES = 32  # of 512 KiB: more than sockets hold
WARM = 4
LATE_S = 30.0
OWNER_S = 0.3  # a reader takes an owner that says nothing for so long for dead
DIRECTORY = (sys.executable, "-m", "tests.helpers.workers.directory")


def later() -> float:
    return time.monotonic() + LATE_S


# --- reads from NVMe --------------------------------------------------------------------------------------------------


class Node:
    """A daemon whose data server has, for tenants a and b, pages on NVMe alone, and others in memory."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        settings = {"dram": "64MiB", "extent": "8MiB", "nvme_extent": "8MiB", "promote_after": 255}
        settings |= {"catalog": f"file:{folder / 'catalog'}", "identities": api.identities_file(folder)}
        machine.serve(NODE, **configure(machine, NODE, **settings))
        store = machine.connect(NODE)
        for salt in "ab":
            assert put(store, 1, PAGES, LARGE, salt) == PAGES
        save_all(store, 2 * PAGES)
        for salt in "ab":
            assert put(store, 2, WARM, LARGE, salt) == WARM
        found = find_data_server(NodeFolder.at(machine.folder(NODE)))
        assert found is not None
        self.address, self.pid = found.address, found.pid

    def open(self, tenant: str, silence_s: float = SILENCE_S) -> DataConnection:
        hello = Hello(token=f"{tenant}-token", caller=tenant)
        return DataConnection.open(self.address, hello, deadline_s=later(), silence_s=silence_s)

    def read(self, connection: DataConnection, tenant: str, seed: int = 1, pages: int = PAGES) -> PullResult:
        """What comes is right."""
        rows = np.zeros((pages, LARGE.page_bytes), np.uint8)
        pulled = pull(connection, wanted(tenant, seed, pages), rows, later())
        keys = chain(seed, pages, LARGE, tenant)
        assert first_wrong(rows[: pulled.pages : 7], contents(keys, LARGE)[: pulled.pages : 7]) == ""
        return pulled


def wanted(tenant: str, seed: int, pages: int) -> ReadRequest:
    shape = FrameClass(LARGE.page_bytes, LARGE.page_tokens, LARGE.layers)
    chain_of = ChainQuery(LARGE.fingerprint, tenant, "", shape, closed=True)
    return ReadRequest(chain_of, chain(seed, pages, LARGE, tenant), 0, LARGE.page_bytes)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("fair")
    machine = Machine(folder)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
        made = Node(machine, folder)
    yield made
    machine.close()


@contextmanager
def slow_readers(node: Node, tenant: str, count: int) -> Iterator[None]:
    """Readers of all pages, which take a few KiB now and then."""
    over = threading.Event()
    with ExitStack() as opened:
        connections = [opened.enter_context(closing(node.open(tenant, LATE_S))) for _ in range(count)]
        for each in connections:
            send_read(each, wanted(tenant, 1, PAGES), later())

        def dawdle() -> None:
            while not over.wait(0.1):
                for each in connections:
                    if not each.broken:
                        try:
                            each.receive(4096, deadline_s=time.monotonic() + 0.02)
                        except Unavailable:
                            pass

        thread = threading.Thread(target=dawdle)
        thread.start()
        time.sleep(2 * SLOW_S)  # sockets are full
        try:
            yield
        finally:
            over.set()
            thread.join(LATE_S)


def test_slow_readers_of_one_tenant_cost_another_nothing(node: Node) -> None:
    """Neither its pages on NVMe, nor those in memory: no reply is late so that the reader takes the server for dead."""
    with (
        slow_readers(node, "b", NVME_REPLIES_MAX),
        closing(node.open("a", LATE_S)) as a,
        Beacon(threads=True) as beacon,
    ):
        for _ in range(5):
            pulled = node.read(a, "a")
            assert (pulled.pages, pulled.reason) == (PAGES, "") and pulled.tiers == {Tier.NVME: PAGES}
            began_s = time.monotonic()
            assert node.read(a, "a", 2, WARM).tiers == {Tier.DRAM: WARM}
            assert time.monotonic() - began_s - beacon.stall_s(began_s) < SILENCE_S


def test_a_slow_reader_loses_its_turn_to_another_of_its_tenant(node: Node) -> None:
    with slow_readers(node, "b", NVME_REPLIES_MAX), closing(node.open("b", LATE_S)) as connection:
        wait_until("there is a turn", lambda: node.read(connection, "b").pages == PAGES, 20 * SLOW_S + LATE_S)


def test_without_a_turn_a_reply_ends_short_and_soon(node: Node) -> None:
    """Pages of memory come all the same, and the connection stays good."""
    with slow_readers(node, "b", NVME_REPLIES_MAX), closing(node.open("b", LATE_S)) as connection, Beacon() as beacon:
        began_s = time.monotonic()
        pulled = node.read(connection, "b")
        took_s = time.monotonic() - began_s - beacon.stall_s(began_s)
        assert pulled.pages == PAGES or (pulled.reason == "busy" and took_s < SILENCE_S)
        assert node.read(connection, "b", 2, WARM).pages == WARM


def test_two_tenants_at_full_load_have_equal_parts_of_nvme(node: Node) -> None:
    pages, over = Counter[str](), threading.Event()

    def work(tenant: str) -> None:
        with closing(node.open(tenant, LATE_S)) as connection:
            rows = np.zeros((PAGES, LARGE.page_bytes), np.uint8)
            while not over.is_set():
                got = pull(connection, wanted(tenant, 1, PAGES), rows, later()).pages
                if not over.is_set():
                    pages[tenant] += got

    threads = [threading.Thread(target=work, args=(tenant,)) for tenant in "a" * 6 + "b" * 18]
    for thread in threads:
        thread.start()
    wait_until("there is enough to judge by", lambda: pages.total() >= 400 * PAGES, 60)
    over.set()
    for thread in threads:
        thread.join(60)
    assert_fair(pages)


def assert_fair(counts: Counter[str]) -> None:
    assert 0.4 <= counts["a"] / counts.total() <= 0.6, counts


# --- time under the directory's lock ----------------------------------------------------------------------------------


class Directory:
    """A data server of its own, whose directory has five million entries."""

    def __init__(self, machine: Machine) -> None:
        self.process = machine.start(Worker, "directory", DIRECTORY)
        wait_until("it serves", lambda: self.process.events("serves"), 60)
        self.address = str(self.process.events("serves")[0]["address"])
        self.pages = np.random.default_rng(1).integers(0, 1 << 63, 1 << 16, dtype=np.uint64)

    def open(self, tenant: str) -> DataConnection:
        return DataConnection.open(self.address, Hello(caller=tenant), deadline_s=later(), silence_s=LATE_S)

    def find(self, connection: DataConnection, tenant: str, pages: int) -> None:
        whose = Namespace(bytes(16), tenant, "")
        body = pack_find(whose, self.pages[:pages] ^ np.uint64(veil_of(bytes(32), whose.root)), 0)
        reply = connection.call(FrameKind.FIND, body, reply=FrameKind.FOUND, deadline_s=later())
        unpack_found(reply, pages)

    @contextmanager
    def flooded(self, tenant: str, count: int, pages: int, found: Counter[str] | None = None) -> Iterator[None]:
        """With that many connections of this tenant, each of which asks for as many pages again and again."""
        over = threading.Event()

        def ask() -> None:
            with closing(self.open(tenant)) as connection:
                while not over.is_set():
                    try:
                        self.find(connection, tenant, pages)
                    except TooManyCalls:
                        continue
                    if found is not None and not over.is_set():
                        found[tenant] += pages

        threads = [threading.Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join(60)


@pytest.fixture
def directory(machine: Machine) -> Directory:
    return Directory(machine)


def test_a_flood_of_find_by_one_tenant_does_not_hold_up_another(directory: Directory) -> None:
    with (
        closing(directory.open("a")) as connection,
        directory.flooded("b", 24, 1 << 16),
        Beacon(threads=True) as beacon,
    ):
        time.sleep(0.5)
        for _ in range(30):
            began_s = time.monotonic()
            directory.find(connection, "a", 512)
            took_s = time.monotonic() - began_s
            assert took_s - beacon.stall_s(began_s) < OWNER_S


def test_two_tenants_at_full_load_have_equal_parts_of_the_directory(directory: Directory) -> None:
    found = Counter[str]()
    with directory.flooded("a", 6, 4096, found), directory.flooded("b", 18, 4096, found):
        wait_until("there is enough to judge by", lambda: found.total() >= 300 * 4096, 60)
        counts = Counter(found)
    assert_fair(counts)
