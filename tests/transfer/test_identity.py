"""Nodes that come back with what they had, and two that have one name: what is read is right, and is the node's own."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore import Store
from kvstore.model.replica import Tier
from kvstore.shm.data_server_file import find_data_server
from kvstore.shm.folder import NodeFolder
from tests.helpers.content import chain
from tests.helpers.inside import node_of
from tests.helpers.pool import PAGES, Pool
from tests.helpers.processes import Machine, check_right, put, stopped, wait_until

TTL_S = "2"
BACK_S = 60.0


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Machine]:
    """Another machine."""
    made = Machine(tmp_path)
    yield made
    made.close()


def data_server(machine: Machine, name: str) -> int:
    found = find_data_server(NodeFolder.at(machine.folder(name)))
    assert found is not None
    return found.pid


def listed(machine: Machine, catalog: str) -> set[str]:
    """Nodes whose daemon or data server the catalog lists."""
    told = machine.run("status", "--catalog", catalog, "--json")
    members = json.loads(told.stdout)["members"]
    return {each["name"] for each in members["nodes"]} | {each["node"] for each in members["data"]}


def there(store: Store, seed: int) -> int:
    """Pages of that chain that are read, all of them right."""
    return check_right(store, {seed: PAGES})


def test_the_second_of_a_name_is_read_from_and_the_first_harms_nobody(
    machine: Machine, other: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one stood still until everybody had forgotten it. It wakes up, and thinks that it lives."""
    flags = {"dram": "16MiB", "catalog": f"file:{tmp_path / 'catalog'}", "catalog_ttl_s": TTL_S}
    first = machine.serve("n", **flags)
    machine.serve("c", **flags)
    store = machine.connect("c")
    put(machine.connect("n"), 1, PAGES)
    wait_until("c reads it", lambda: there(store, 1) == PAGES, BACK_S)
    first.stop()
    with stopped(data_server(machine, "n")):
        wait_until("it is missed", lambda: listed(machine, flags["catalog"]) == {"c"}, BACK_S)
        second = other.serve("n", **flags)
        with monkeypatch.context() as there_too:
            there_too.setenv("KVSTORE_SHM_DIR", str(other.shm_dir))
            put(kvstore.connect("n"), 2, PAGES)
        wait_until("c reads what the second has", lambda: there(store, 2) == PAGES, BACK_S)
    first.resume()
    wait_until("it is told", lambda: "another process has it" in first.errors.read_text(), BACK_S)

    def findings() -> str:
        told = machine.run("verify", "--cluster", "--catalog", flags["catalog"])
        return told.stdout if told.returncode == 1 else ""

    wait_until("both have data servers", lambda: "another node has the same name" in findings(), BACK_S)
    store.evict(pages=1 << 20)
    wait_until("the second is read from", lambda: there(store, 2) == PAGES, BACK_S)
    put(machine.connect("n"), 3, PAGES)  # its own programs have it
    assert there(machine.connect("n"), 3) == PAGES and there(store, 3) == 0
    assert second.terminate() == 0
    wait_until("the name is the first one's again", lambda: there(store, 3) == PAGES, BACK_S)
    wait_until("and all is well", lambda: findings() == "", BACK_S)


def test_old_segments_serve_what_they_prove(machine: Machine, tmp_path: Path) -> None:
    """Killed with its data server, changed meanwhile, started again: right pages or none. Purged: none."""
    pool = Pool(machine, f"file:{tmp_path / 'catalog'}")
    put(pool.stores["a"], 1, PAGES)
    put(pool.stores["a"], 2, PAGES)
    pool.stores["a"].verify()  # which stamps
    pool.known("c", 1)
    mapped = node_of(pool.stores["a"]).writable()
    address = mapped.index.find(Tier.DRAM, mapped.in_pool(chain(1, PAGES)).hashes[7])
    assert address is not None
    extent = mapped.dram.extent(address.extent)
    assert extent is not None

    def die() -> None:
        process = data_server(machine, "a")
        pool.daemons["a"].kill()
        os.kill(process, signal.SIGKILL)
        began_s = time.monotonic()
        assert pool.get("c", 2).pages in range(PAGES + 1) and time.monotonic() - began_s < 15

    die()
    extent.pages[address.frame, 1234] ^= 1
    pool.daemons["a"] = machine.serve("a")
    wait_until("c reads a again", lambda: pool.get("c", 2).pages == PAGES, BACK_S)
    assert pool.get("c", 1).pages <= 7
    die()
    assert machine.run("purge", "a").returncode == 0
    pool.daemons["a"] = machine.serve("a")
    put(machine.connect("a"), 3, PAGES)
    wait_until("c reads what is there", lambda: pool.get("c", 3).pages == PAGES, BACK_S)
    pool.stores["c"].evict(pages=1 << 20)
    assert pool.get("c", 1).pages == 0 and pool.get("c", 2).pages == 0
    pool.well()
