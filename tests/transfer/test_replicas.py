"""Second copies between real nodes: what was put with ``wait`` survives the loss of a node, and of a second one once
nothing is owed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvstore
from kvstore.client.local.cache import LocalCache
from kvstore.errors import InvalidRequest, NodeUnavailable
from tests.helpers.api import address_of
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.pool import PAGES, Pool, patient
from tests.helpers.processes import Machine, evict_all, put, stopped, wait_until


@pytest.fixture
def pool(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    patient(monkeypatch)
    settings = tmp_path / "kvstore.toml"
    target = f"{tmp_path}/nvme-"
    settings.write_text("[node]\nreplicas_same_machine = true\ndemote_at = 0\n")
    pool = Pool.__new__(Pool)
    pool.machine, pool.catalog = machine, f"file:{tmp_path / 'catalog'}"
    options = {"dram": "32MiB", "catalog": pool.catalog, "config": str(settings), "catalog_ttl_s": "3"}
    listen = {"a": {"listen": "127.0.0.1:0"}}
    pool.daemons = {
        name: machine.serve(name, nvme=f"{target}{name}:64MiB", **options, **listen.get(name, {})) for name in "abc"
    }
    pool.stores = {name: machine.connect(name) for name in "abc"}
    yield pool


def put_twice(pool: Pool, name: str, seed: int, pages: int = PAGES, wait: bool = True) -> int:
    keys = chain(seed, pages)
    return pool.stores[name].cache(SMALL, replicas=2).put(keys, contents(keys), wait=wait)


def local(pool: Pool, name: str, seed: int, pages: int = PAGES) -> int:
    """How many leading pages the node itself has."""
    match = pool.lookup(name, seed, pages)
    return match.pages - sum(match.nodes.values())


def owed(pool: Pool, name: str) -> dict[str, Any]:
    return dict(pool.stores[name].stats()["replicas"])


def hang(pool: Pool, name: str) -> None:
    """SIGSTOP of a node and of its data server, until the end of the test."""
    pool.daemons[name].stop()
    os.kill(pool.data_server(name), signal.SIGSTOP)


def lose(pool: Pool, name: str) -> None:
    """kill -9 of a node and of its data server."""
    data_server = pool.data_server(name)
    pool.daemons[name].kill()
    os.kill(data_server, signal.SIGKILL)


def test_what_was_put_with_wait_survives_one_loss_and_another_once_nothing_is_owed(pool: Pool) -> None:
    assert put_twice(pool, "a", 1) == PAGES
    assert sorted(local(pool, name, 1) for name in "bc") == [0, PAGES], "one other node has them when the put returns"
    second = next(name for name in "bc" if local(pool, name, 1))
    longer = PAGES + 9
    assert put_twice(pool, "a", 1, longer) == 9
    assert local(pool, second, 1, longer) == longer, "pages follow the page before them"
    assert owed(pool, "a")["owed_pages"] == 0 and owed(pool, "a")["copied_pages"] == longer
    put(pool.stores["a"], 5, 7)
    put(pool.stores["b"], 5, 7)
    put(pool.stores["c"], 5, 7)
    assert put_twice(pool, "a", 5, 7) == 0, "they are stored, and get a second replica"
    wanted = {name: pool.stores[name].pages(keys=chain(5, 7), tier="dram")["pages"] for name in "abc"}
    counts = {name: [page["replicas"] for page in pages] for name, pages in wanted.items()}
    assert counts["a"] == [2] * 7 and sorted([counts["b"], counts["c"]]) == [[1] * 7, [2] * 7]
    with kvstore.connect(f"kv://{address_of(pool.daemons['a'].output())}") as far:
        keys = chain(6, 5)
        assert far.cache(SMALL, replicas=2).put(keys, contents(keys)) == 5
        assert sorted(local(pool, name, 6, 5) for name in "bc") == [0, 5], "over gRPC a put always waits"
    hang(pool, "a")
    third = "c" if second == "b" else "b"
    wait_until("two nodes have all pages again", lambda: local(pool, third, 1, longer) == longer, 60)
    wait_until("nothing is owed", lambda: owed(pool, second)["owed_pages"] == 0, 60)
    lose(pool, second)
    assert pool.get(third, 1, longer).pages == longer


def test_a_silent_target_delays_a_put_and_a_restart_forgets_no_owed_copy(pool: Pool) -> None:
    wait_until("a sees the others", lambda: owed(pool, "a")["surveys"] and len(pool.stores["a"].stats()["peers"]) == 2)
    with stopped(pool.data_server("b")):
        assert put_twice(pool, "a", 2) == PAGES
        assert local(pool, "c", 2) == PAGES, "another node takes the copy"
        with stopped(pool.data_server("c")):
            assert put_twice(pool, "a", 3, wait=False) == PAGES
            wait_until("the copies are owed", lambda: owed(pool, "a")["owed_pages"] == PAGES)
            wait_until("the pages are on NVMe", lambda: pool.stores["a"].stats()["tiers"]["nvme"]["pages"] == 2 * PAGES)
            evict_all(pool.stores["a"])
            pool.daemons["a"].kill()
            pool.daemons["a"] = pool.machine.serve("a")
    wait_until("the copies are stored", lambda: PAGES in (local(pool, "b", 3), local(pool, "c", 3)), 60)
    wait_until("nothing is owed", lambda: not owed(pool, "a")["owed_pages"], 60)


def test_replicas_that_cannot_be_stored_are_refused_or_owed(machine: Machine, tmp_path: Path) -> None:
    machine.serve("alone", dram="16MiB")
    alone, keys = machine.connect("alone"), chain(4, 3)
    for wrong in (0, 3, True, "2"):
        with pytest.raises(InvalidRequest, match="replicas: must be 1 or 2"):
            alone.cache(SMALL, replicas=wrong)  # type: ignore[call-overload]
    with pytest.raises(InvalidRequest, match="replicas: must be 1, because node alone is in no pool"):
        alone.cache(SMALL).put(keys, contents(keys), replicas=2)
    assert put(alone, 4, 3) == 3
    catalog = f"file:{tmp_path / 'catalog'}"
    for name in "ab":
        machine.serve(name, dram="16MiB", catalog=catalog, replicas="2")
    cache = machine.connect("a").cache(SMALL)
    assert isinstance(cache, LocalCache)
    with pytest.raises(NodeUnavailable, match="replicas: no other node can store a copy of 3 pages; they are owed"):
        cache.put(keys, contents(keys), wait=True)
    assert cache.lookup(keys).pages == 3
    status = machine.run("status", "--node", "a")
    assert "3 pages are owed: no node of another machine can store a copy" in status.stdout
