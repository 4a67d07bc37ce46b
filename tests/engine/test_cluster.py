"""Nodes and engines that find each other through a catalog: real daemons, a file or a real etcd between them."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from engine.client import Answer
from engine.model.request import Role
from kvstore.cluster.catalog.schema import DataEntry, NodeEntry, decode, encode, key_of
from tests.helpers.engines.processes import EngineProcess, prompt, serve_engine
from tests.helpers.etcd import Etcd
from tests.helpers.processes import Machine, wait_until

TTL_S = "2"
LONG_S = 60.0


@pytest.fixture(params=["file", "etcd"])
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file:{tmp_path / 'catalog'}"
        return
    servers = Etcd(tmp_path / "etcd")
    yield "etcd://" + ",".join(servers.endpoints)
    servers.close()


def members(machine: Machine, catalog: str, pool: str = "default") -> dict[str, list[dict[str, object]]]:
    """What ``kvstore status --catalog`` tells."""
    told = machine.run("status", "--catalog", catalog, "--pool", pool, "--json")
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout)["members"])


def test_engines_find_each_other_come_and_go(catalog: str, machine: Machine) -> None:
    """A decode engine asks whoever computes prompts now; where nobody does, or one has just died, it does it itself."""
    shared = {"catalog": catalog, "catalog_ttl_s": TTL_S, "local_prefill_tokens": "0"}
    decode_engine = serve_engine(machine, role="decode", **shared)
    stranger = serve_engine(machine, role="prefill", page_tokens="32", **shared)
    assert len(members(machine, catalog)["engines"]) == 2
    with closing(decode_engine.client()) as client:
        seeds = iter(range(1000))

        def answer() -> Answer:
            return client.generate(prompt(200, next(seeds)), max_tokens=4)

        def computed_by(engine: EngineProcess) -> bool:
            return answer().usage.prefill_engine == engine.address

        about = client.status()["membership"]
        assert about.keys() == {"watch", "session", "presence", "fault"} and about["fault"] == ""
        assert about["watch"]["succeeded_ago_s"] < LONG_S and about["watch"]["failing_s"] is None
        alone = answer()
        assert alone.usage.prefill_engine == "", "of another layout: its pages would not fit"
        first = serve_engine(machine, role="prefill", **shared)
        wait_until("the new engine is asked", lambda: computed_by(first), LONG_S)
        first.kill()
        assert len(answer().tokens) == 4, "a death costs a prefill, not an answer"
        second = serve_engine(machine, role="prefill", **shared)
        wait_until("the next one is asked", lambda: computed_by(second), LONG_S)
        assert {second.address, decode_engine.address, stranger.address} >= {
            str(each["addresses"][0])  # type: ignore[index]
            for each in wait_until("the dead one is gone", lambda: gone(machine, catalog, first), LONG_S)
        }
        with closing(second.client()) as its:
            its.set_role(Role.DECODE)
        wait_until("a new role is told", lambda: answer().usage.prefill_engine == "", LONG_S)
        assert second.terminate() == 0 and len(members(machine, catalog)["engines"]) == 2, "it left at once"


def gone(machine: Machine, catalog: str, engine: EngineProcess) -> list[dict[str, object]]:
    """The engines where that one is not among them, else none."""
    engines = members(machine, catalog)["engines"]
    return engines if all(engine.address not in each["addresses"] for each in engines) else []  # type: ignore[operator]


def test_a_catalog_that_is_not_there_is_named(machine: Machine) -> None:
    for url, says in (
        ("etcd://127.0.0.1:1", "--catalog file:PATH serves the daemons of one machine, and --catalog memory"),
        ("redis://x", "catalog: must be memory, file:PATH or etcd"),
        ("file:relative", "an absolute PATH (got 'file:relative')"),
        ("file:/dev/null", "catalog"),
    ):
        refused = machine.spawn("n", dram="16MiB", catalog=url)
        assert refused.wait() not in (0, -signal.SIGKILL)
        text = refused.errors.read_text()
        assert says in text and "Traceback" not in text, text


def test_nonsense_in_a_catalog_is_skipped() -> None:
    from kvstore.cluster.catalog.base import Entry

    right = NodeEntry(name="n", process="ab", incarnation="cd", addresses=("h:1",), capacity_bytes={"dram": 1})
    key, value = key_of("p", right), encode(right)
    assert decode(NodeEntry, Entry(key, value, 1)) == right
    added = value.replace(b'"host"', b'"later":[1],"host"')
    assert decode(NodeEntry, Entry(key, added, 1)) == right, "a field of a later version"
    for wrong in (
        b"",
        b"[]",
        b"\xff",
        b"[" * 60_000,
        value.replace(b'"v":1', b'"v":2'),
        value.replace(b'"n"', b'"m"'),
        value.replace(b'"h:1"', b'"h"'),
        value.replace(b'"h:1"', b'"h:1\\nx"'),
        value.replace(b'"dram":1', b'"dram":-1'),
        value.replace(b'"dram":1', b'"dram":true'),
        value.replace(b'"cd"', b"7"),
        value.replace(b'"process":"ab",', b""),
    ):
        assert decode(NodeEntry, Entry(key, wrong, 1)) is None, wrong[:80]
    server = DataEntry(name="n.7", process="ab", node="n", incarnation="cd", addresses=("h:1",), tls=True)
    key, value = key_of("p", server), encode(server)
    assert decode(DataEntry, Entry(key, value, 1)) == server
    assert decode(DataEntry, Entry(key, value.replace(b'"tls":true', b'"tls":1'), 1)) is None
