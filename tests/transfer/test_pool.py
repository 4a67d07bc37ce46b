"""Three nodes as one pool: real daemons and data servers with a catalog, and programs on each that ask and read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.local.cache import LocalCache
from kvstore.model.replica import Tier
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.pool import PAGES, Pool, patient
from tests.helpers.processes import Machine, evict_all, put, stopped, wait_until


def catalog_in(folder: Path) -> str:
    return f"file:{folder / 'catalog'}"


@pytest.fixture
def pool(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    patient(monkeypatch)
    yield Pool(machine, catalog_in(tmp_path))


def test_pages_are_read_wherever_they_are(pool: Pool) -> None:
    put(pool.stores["a"], 1, PAGES)
    put(pool.stores["c"], 1, 10)
    put(pool.stores["b"], 1, 30)
    pool.known("c", 1)
    match = pool.lookup("c", 1)
    assert match.nodes == {"a": PAGES - 10} and match.tiers == {Tier.DRAM: PAGES} and match.reason == ""
    read = pool.get("c", 1)
    assert (read.pages, read.nodes) == (PAGES, {"a": PAGES - 10})
    cache = pool.stores["c"].cache(SMALL)
    allocated = cache.get(prompt(1, PAGES))
    assert allocated.data is not None and first_wrong(allocated.data, contents(chain(1, PAGES))) == ""
    put(pool.stores["a"], 3, PAGES)
    pool.known("c", 3)
    middle = cache.get(chain(3, PAGES)[15:])  # they know what lies before them
    assert middle.nodes == {"a": PAGES - 15} and middle.data is not None
    assert first_wrong(middle.data, contents(chain(3, PAGES))[15:]) == ""
    assert pool.get("a", 1).nodes == {}, "who has it asks nobody"
    for command in ("status", "tiers"):
        told = json.loads(pool.machine.run(command, "--node", "c", "--json").stdout)["peers"]
        assert told.keys() == {"a", "b"} and told["a"]["tcp"] == ""
        assert "pages from a" in pool.machine.run(command, "--node", "c").stdout
    more = pool.lookup("c", 1, PAGES + 20)
    assert (more.pages, more.reason) == (PAGES, "absent")


def test_pages_of_several_groups_are_read_wherever_they_are(pool: Pool) -> None:
    """Those of full attention are a chain, each of a window is found alone: here, or on another node."""
    window = replace(SMALL, group="window", attention="window", window=40)
    on_a, on_b, on_c = (pool.stores[name].cache([SMALL, window]) for name in "abc")
    keys = on_a.keys(prompt(11, PAGES))
    boundary = PAGES * SMALL.page_tokens
    parts = keys.parts(1, keys.needed(boundary)[1])
    rows = [contents(part)[0] for part in parts]
    on_a.put(keys, [contents(chain(11, PAGES)), (range(PAGES - 3, PAGES - 1), np.stack(rows[:2]))])
    on_b.put(keys, [None, (range(PAGES - 1, PAGES), rows[2])])
    wait_until("c knows them", lambda: on_c.lookup(keys).tokens == boundary, 60)
    match = on_c.get(keys)
    assert match.data is not None and (match.tokens, match.nodes) == (boundary, {"a": PAGES + 2, "b": 1})
    assert first_wrong(match.data[0], contents(chain(11, PAGES))) == "" == first_wrong(match.data[1], np.stack(rows))
    evict_all(pool.stores["b"])
    wait_until("b's is gone", lambda: on_c.lookup(keys).tokens == 0, 60)


def test_another_replica_is_read_where_one_fails(pool: Pool) -> None:
    put(pool.stores["a"], 2, PAGES)
    put(pool.stores["b"], 2, PAGES - 5)
    pool.known("c", 2)
    cache = pool.stores["c"].cache(SMALL)
    assert isinstance(cache, LocalCache) and cache.node.peer_reader is not None
    others = partial(cache.node.peer_reader.find, cache._chain, chain(2, PAGES), 0, {"a"})
    wait_until("b's are found, too", lambda: [each.stop for each in others()] == [PAGES - 5], 60)
    with stopped(pool.data_server("a")):
        began_s = time.monotonic()
        assert pool.get("c", 2).pages == PAGES - 5
        first_s = time.monotonic() - began_s
        for _ in range(5):
            assert pool.get("c", 2).pages == PAGES - 5
        assert first_s < 20, "it is waited for once, and not for ever"


def test_a_stopped_daemon_keeps_its_pages_readable(pool: Pool) -> None:
    put(pool.stores["a"], 3, PAGES)
    pool.known("c", 3)
    pool.daemons["a"].stop()
    pool.daemons["c"].stop()
    assert pool.get("c", 3).pages == PAGES
    assert pool.get("b", 3).pages == PAGES
    pool.daemons["a"].resume()
    pool.daemons["c"].resume()


def test_a_pool_is_verified(pool: Pool, tmp_path: Path) -> None:
    put(pool.stores["a"], 11, PAGES)
    put(pool.stores["b"], 11, 5)
    catalog = catalog_in(tmp_path)

    def settled() -> dict[str, Any] | None:
        """Each owner says what it lists before nodes are asked for theirs, so a page may be announced in between."""
        nodes = {each["node"]: each for each in pool.well()["nodes"]}
        entries = sum(each["directory"]["entries"] for each in nodes.values())
        return nodes if entries == 2 * (PAGES + 5) else None

    nodes = wait_until("every page is listed by two owners, once each", settled)
    assert {name: each["verified"]["pages_verified"] for name, each in nodes.items()} == {"a": PAGES, "b": 5, "c": 0}
    assert sum(each["entries"] for each in nodes["a"]["heard"]["owners"].values()) == 2 * PAGES
    assert all(each["directory"]["catalog_heard_ago_s"] < 60 for each in nodes.values())
    shown = pool.machine.run("verify", "--cluster", "--catalog", catalog)
    assert shown.returncode == 0 and "3 nodes, 0 findings" in shown.stdout
    pool.daemons["a"].stop()
    with stopped(pool.data_server("b")):
        time.sleep(3.1)  # signs of life are told apart from their want after three seconds
        document = pool.verified()
        says = " ".join(document["findings"])
        assert "a: its daemon is not running, or hangs" in says and "b: its data server is not responding" in says
        assert "c: b did not return its list" in says
    pool.daemons["a"].resume()
    pool.well()
    for wrong in (["--cluster", "--node", "a"], ["--catalog", catalog], ["--cluster"]):
        refused = pool.machine.run("verify", *wrong)
        assert refused.returncode == 2 and "--c" in refused.stderr, refused.stderr
