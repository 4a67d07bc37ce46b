"""The data server as a process: who starts it, who finds it again, who ends it; and what the deaths of others cost."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import time
import urllib.request
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.file import FileCatalog
from kvstore.cluster.catalog.schema import DataEntry
from kvstore.cluster.data_connection import DataConnection
from kvstore.cluster.transport import PullResult, pull
from kvstore.errors import Unauthenticated
from kvstore.model.replica import FrameClass
from kvstore.shm.data_server_file import DataFile, RunningDataServer, find_data_server
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import ChainQuery, FrameKind, Hello, ReadRequest
from tests.helpers.content import SMALL, chain, contents, first_wrong
from tests.helpers.etcd import told
from tests.helpers.processes import CLI, Daemon, Machine, put, wait_until

PAGES = 20
LATE_S = 30.0
SHAPE = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)


@pytest.fixture
def catalog(tmp_path: Path) -> str:
    return f"file:{tmp_path / 'catalog'}"


def serve(machine: Machine, catalog: str, **flags: str) -> tuple[Daemon, Store]:
    daemon = machine.serve("n", dram="16MiB", catalog=catalog, **flags)
    return daemon, machine.connect("n")


def server_of(machine: Machine) -> RunningDataServer | None:
    return find_data_server(NodeFolder.at(machine.folder("n")))


def living(machine: Machine) -> RunningDataServer:
    found = server_of(machine)
    assert found is not None
    return found


def read(server: RunningDataServer, pages: int = PAGES, silence_s: float = LATE_S) -> PullResult:
    """Read the pages of chain 1 over a new connection; they are right."""
    deadline_s = time.monotonic() + LATE_S
    keys, rows = chain(1, pages), np.zeros((pages, SMALL.page_bytes), np.uint8)
    wanted = ChainQuery(SMALL.fingerprint, "", "", SHAPE, True)
    hello = Hello(process=server.process)
    opened = DataConnection.open(server.address, hello, deadline_s=deadline_s, silence_s=silence_s)
    with contextlib.closing(opened) as to:
        found = pull(to, ReadRequest(wanted, keys, 0, SMALL.page_bytes), rows, deadline_s)
    assert first_wrong(rows[: found.pages], contents(keys)[: found.pages]) == ""
    return found


def members(machine: Machine, catalog: str) -> list[dict[str, Any]]:
    told = machine.run("status", "--catalog", catalog, "--json")
    assert told.returncode == 0, told.stderr
    return list(json.loads(told.stdout)["members"]["data"])


def dead(pid: int) -> bool:
    """Gone, or a zombie of a parent that has not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_who_has_not_read_where_it_is_gets_nothing(machine: Machine, catalog: str) -> None:
    """Another user of this machine, who reaches loopback."""
    _, store = serve(machine, catalog)
    put(store, 1, PAGES)
    server = living(machine)
    for process in ("", "0" * 16, server.process[:-1]):
        with pytest.raises(Unauthenticated):
            read(replace(server, process=process))
    assert read(server).pages == PAGES


def test_it_outlives_the_daemon_and_is_found_again(machine: Machine, catalog: str) -> None:
    daemon, store = serve(machine, catalog)
    put(store, 1, PAGES)
    server = living(machine)
    assert read(server).pages == PAGES
    daemon.stop()
    assert read(server).pages == PAGES
    daemon.kill()
    assert read(server).pages == PAGES
    again, _ = serve(machine, catalog)
    assert living(machine) == server
    assert read(server).pages == PAGES
    assert again.terminate() == 0
    wait_until("the daemon that found it has ended it", lambda: dead(server.pid))


def test_a_killed_one_is_replaced(machine: Machine, catalog: str) -> None:
    _, store = serve(machine, catalog)
    put(store, 1, PAGES)
    server = living(machine)
    (entry,) = wait_until("it is in the catalog", lambda: members(machine, catalog))
    assert entry["name"] == f"n.{server.process[:12]}", "no pid, which is the same again in a container"
    os.kill(server.pid, signal.SIGKILL)
    wait_until("the next one serves", lambda: server_of(machine) not in (None, server))
    assert read(living(machine)).pages == PAGES
    name = f"n.{living(machine).process[:12]}"
    wait_until("it alone is in the catalog", lambda: [each["name"] for each in members(machine, catalog)] == [name])
    assert living(machine).process != server.process


def test_one_of_its_own_is_taken_as_it_is(machine: Machine, catalog: str) -> None:
    """``kvstore data`` before the daemon: it waits for the node; the daemon finds it, and does not end it."""
    command = [*CLI, "data", "--node", "n", "--listen", "127.0.0.1:0", "--catalog", catalog]
    own = machine.start(Daemon, "data", command)
    daemon, store = serve(machine, catalog, data="none")
    put(store, 1, PAGES)
    assert "ready" in own.wait_ready()
    server = living(machine)
    assert server.pid == own.pid and not server.child
    assert daemon.terminate() == 0 and own.alive
    assert read(server).pages == PAGES
    second = machine.run("data", "--node", "n")
    assert second.returncode == 1 and "has a data server already" in second.stderr
    assert own.terminate() == 0


def test_a_data_server_removes_the_entry_of_the_dead_one_before_it(
    machine: Machine, catalog: str, tmp_path: Path
) -> None:
    """At once, though the other one's session would live for an hour yet, and whatever its process id was."""
    serve(machine, catalog, data="none")

    async def test() -> None:
        before = DataFile(NodeFolder.at(machine.folder("n")))
        before.take()
        before.write(RunningDataServer(os.getpid(), "0123456789abcdef", "127.0.0.1:1", False))
        async with FileCatalog(tmp_path / "catalog") as known:
            session = await known.open_session(3600.0)
            entry = DataEntry(name="n.0123456789ab", process="0123456789abcdef", node="n", incarnation="")
            await known.publish(schema.key_of("default", entry), schema.encode(entry), session)
            before.close()  # as its death does
            command = [*CLI, "data", "--node", "n", "--listen", "127.0.0.1:0", "--catalog", catalog]
            machine.start(Daemon, "data", command)
            async with asyncio.timeout(LATE_S), aclosing(known.watch(schema.folder("default", DataEntry))) as updates:
                await told(updates, lambda known: len(known) == 1 and schema.key_of("default", entry) not in known)
            assert session.alive

    asyncio.run(test())


def test_readers_that_take_nothing_cost_no_memory(machine: Machine, catalog: str) -> None:
    """Many ask for much and read nothing of it, and vanish: others are served, and the server grows by no reply."""
    _, store = serve(machine, catalog)
    pages, readers, asked = 600, 40, 3
    put(store, 1, pages)
    server = living(machine)
    assert read(server, pages).pages == pages
    before = private_bytes(server.pid)
    wanted = ChainQuery(SMALL.fingerprint, "", "", SHAPE, True)
    request = b"".join(ReadRequest(wanted, chain(1, pages), 0, SMALL.page_bytes).pack())
    deadline_s, hello = time.monotonic() + LATE_S, Hello(process=server.process)
    slow = [DataConnection.open(server.address, hello, deadline_s=deadline_s, silence_s=LATE_S) for _ in range(readers)]
    for each in slow:
        for _ in range(asked):
            each.send(FrameKind.READ, request, deadline_s=deadline_s)
    assert read(server, pages).pages == pages
    grown = private_bytes(server.pid) - before
    assert grown < readers * asked * pages * SMALL.page_bytes / 10, f"{grown} bytes more"
    for each in slow:
        each.close()
    assert read(server, pages).pages == pages and living(machine) == server


def private_bytes(pid: int) -> int:
    """Memory of its own that a process has."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))


async def opened(folder: Path) -> None:
    async with FileCatalog(folder):
        pass


def test_readiness_says_what_keeps_a_node_from_its_pool(machine: Machine, catalog: str, tmp_path: Path) -> None:
    """Ready all the same: what it knows it serves. Status, metrics and the data server say so as well."""
    daemon, _ = serve(machine, catalog, catalog_ttl_s="1", http="127.0.0.1:0")
    http = daemon.wait_ready().partition("http on ")[2].split(",")[0].split()[0]
    wait_until("it is in the catalog", lambda: members(machine, catalog))
    wait_until("all is well", lambda: get(http, "/readyz") == "ready\n")
    (tmp_path / "catalog").chmod(0o777)  # open to all: refused, whoever opens it again
    (tmp_path / "catalog" / "catalog.sqlite").rename(tmp_path / "catalog" / "away")
    said = wait_until("both say so", lambda: both_faults(get(http, "/readyz")))
    assert said.startswith("ready, but ") and "belongs to another user" in said
    stats = json.loads(machine.run("status", "--node", "n", "--json").stdout)
    assert stats["membership"]["watch"]["failing_s"] > 1 and "membership: watch" in stats["membership"]["fault"]
    ages = re.findall(r'^kvstore_membership_success_age_seconds\{task="(\w+)"\} (\S+)', get(http, "/metrics"), re.M)
    assert {name for name, _ in ages} == {"watch", "session", "presence", "announcing"}
    assert float(dict(ages)["watch"]) > 1
    (tmp_path / "catalog" / "away").rename(tmp_path / "catalog" / "catalog.sqlite")
    (tmp_path / "catalog").chmod(0o700)
    wait_until("all is well again", lambda: get(http, "/readyz") == "ready\n")


def both_faults(said: str) -> str:
    """The daemon's own, and that of its data server."""
    return said if "membership: watch has failed" in said and "its data server has not" in said else ""


def get(http: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{http}{path}", timeout=LATE_S) as answer:
        return str(answer.read().decode())
