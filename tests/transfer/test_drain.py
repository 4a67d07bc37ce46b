"""A real node is drained: its pages are elsewhere, it is in no pool any more, and says what it leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import InvalidRequest
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.pool import PAGES, Pool, patient
from tests.helpers.processes import Machine, put, stopped, wait_until


@pytest.fixture
def pool(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    patient(monkeypatch)
    settings = tmp_path / "kvstore.toml"
    settings.write_text("[node]\nreplicas_same_machine = true\n")
    yield Pool(machine, f"file:{tmp_path / 'catalog'}", config=str(settings))


def members(pool: Pool) -> dict[str, list[dict[str, object]]]:
    shown = pool.machine.run("status", "--catalog", pool.catalog, "--json")
    return dict(json.loads(shown.stdout)["members"])


def test_a_drained_node_leaves_its_pages_to_the_others_and_the_pool(pool: Pool) -> None:
    for seed in (1, 2):
        put(pool.stores["a"], seed, PAGES)
    put(pool.stores["b"], 2, PAGES)
    pool.known("c", 2)
    shown = pool.machine.run("drain", "a", "--deadline", "60s", "--json")
    assert shown.returncode == 0, shown.stderr
    report = json.loads(shown.stdout)
    assert report["state"] == "left" and (report["left_pages"], report["reasons"]) == (0, {})
    assert report["moved_pages"] == PAGES, "b has the others already"
    left = members(pool)
    assert {each["name"] for each in left["nodes"]} == {each["node"] for each in left["data"]} == {"b", "c"}
    pool.known("b", 1)
    assert pool.get("c", 1).pages == pool.get("c", 2).pages == PAGES
    cache, keys = pool.stores["a"].cache(SMALL), chain(3, 4)
    assert cache.put(keys, contents(keys), wait=True) == 4 and cache.get(keys).pages == 4, "it serves its machine"
    with pytest.raises(InvalidRequest, match="is in no pool"):
        cache.put(keys, contents(keys), replicas=2)
    pool.daemons["a"].terminate()
    pool.machine.serve("a")
    wait_until("it joins again", lambda: len(members(pool)["data"]) == 3)
    assert not any(each["draining"] for each in members(pool)["nodes"])


def test_a_drain_says_what_it_leaves_and_takes_no_copies(pool: Pool) -> None:
    put(pool.stores["a"], 4, PAGES)
    wait_until("a sees the others", lambda: pool.stores["a"].stats()["replicas"]["surveys"])
    with stopped(pool.data_server("b")), stopped(pool.data_server("c")):
        shown = pool.machine.run("drain", "a", "--deadline", "2s")
    assert shown.returncode == 0, shown.stderr
    assert "moved 0 pages" in shown.stdout and f"{PAGES} pages" in shown.stdout and "are only on a" in shown.stdout
    alone = pool.machine.serve("alone", dram="8MiB")
    refused = pool.machine.run("drain", "alone")
    assert refused.returncode == 2 and "node: must be in a pool" in refused.stderr and alone.alive
    for wrong in (0, -1, True, 1e9):
        with pytest.raises(InvalidRequest, match="deadline_s: must be above 0"):
            pool.stores["b"].drain(wrong)
