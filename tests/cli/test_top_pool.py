"""``kvstore top --catalog``: a line for each node, engine and conductor of a pool, dead and hostile ones among them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.struct_pb2 import Struct
from rich.console import Group

from kvstore.cli import top
from kvstore.cli.cluster import ASK_S
from kvstore.cli.main import cli, run
from kvstore.cli.top import new_console, pool_frames, pool_view
from kvstore.cluster.catalog.connect import to_catalog
from kvstore.cluster.catalog.schema import AnyEntry, EngineEntry, NodeEntry, encode, key_of
from kvstore.config import load
from tests.helpers.beacon import Beacon
from tests.helpers.conductors import client_of, serve_conductor
from tests.helpers.engines.processes import prompt, spawn_engine
from tests.helpers.etcd import Etcd
from tests.helpers.processes import Machine, free_port, stopped, wait_until

SLACK = 10  # a machine that is so much slower


def publish(url: str, *values: AnyEntry) -> None:
    """Into a catalog; nobody keeps them alive."""

    async def put() -> None:
        async with to_catalog(url, load().node) as catalog:
            for value in values:
                await catalog.publish(key_of("default", value), encode(value))

    asyncio.run(put())


def by_name(frame: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Members; engines and conductors without the number of their process."""
    return {each["name"].rpartition("-")[0] or each["name"]: each for each in frame["members"]}


def lines_of(view: Group) -> list[str]:
    """The lines of a view in a pipe."""
    console = new_console()
    with console.capture() as capture:
        console.print(view)
    return capture.get().splitlines()


@pytest.fixture
def etcd_url(tmp_path: Path) -> Iterator[str]:
    servers = Etcd(tmp_path / "etcd")
    yield "etcd://" + ",".join(servers.endpoints)
    servers.close()


def test_a_pool_with_an_engine_that_hangs_and_one_that_dies(machine: Machine, etcd_url: str) -> None:
    url = etcd_url  # a folder's catalog drops who died as soon as somebody looks
    catalog = {"catalog": url, "catalog_ttl_s": "600"}  # who dies stays listed: it is asked, and does not answer
    machine.serve("n0", dram="32MiB", listen="127.0.0.1:0", **catalog)
    engine = spawn_engine(machine, name="e", node="n0", keep_pages="0", **catalog)
    engine.wait_ready()
    conductor = serve_conductor(machine, name="c", **catalog)
    with client_of(conductor) as client, closing(pool_frames(url, "default")) as frames:
        client.knows(1, 1)
        first = by_name(next(frames))
        assert {name: each["member"] for name, each in first.items()} == {"c": "conductor", "e": "engine", "n0": "node"}
        assert first["e"]["prefill_tokens_per_s"] is None, "no rate without an earlier answer"

        def busy() -> dict[str, dict[str, Any]] | None:
            client.answer(prompt(100))
            told = by_name(next(frames))
            reused = told["e"]["reused_pages_per_s"]["dram"], told["n0"]["tiers"]["dram"]["reused_pages_per_s"]
            return told if all(reused) else None

        found = wait_until("pages are reused", busy)
        assert found["e"]["prefill_tokens_per_s"] > 0 and found["e"]["decode_tokens_per_s"] > 0
        assert (found["e"]["role"], found["e"]["running"], found["c"]["leads"]) == ("both", 0, True)
        assert found["c"]["routed"] >= 2 and (found["c"]["open"], found["c"]["refused"]) == (0, 0)
        told = machine.run("top", "--catalog", url, "--once", "--interval", "0.1")
        assert told.returncode == 0 and [line.split()[0] for line in told.stdout.split("\n\n")[1:]] == [
            "conductor",
            "engine",
            "node",
        ], (told.stdout, told.stderr)
        with Beacon(threads=True) as beacon, stopped(engine.pid):
            began_s = time.monotonic()
            hung = by_name(next(frames))
            assert time.monotonic() - began_s - beacon.stall_s(began_s) < SLACK * ASK_S
            assert hung["e"]["state"] == "no answer" and hung["e"]["heard_ago_s"] > 0
            assert (hung["n0"]["state"], hung["c"]["state"]) == ("ready", "serving")
        wait_until("it is heard of again", lambda: by_name(next(frames))["e"]["state"] == "serving")
        engine.kill()
        dead = next(frames)
        assert by_name(dead)["e"]["state"] == "no answer" and by_name(dead)["e"]["error"]
        assert any("no answer" in line for line in lines_of(pool_view(dead)))
        json.dumps(dead, allow_nan=False)


class Hostile(grpc.GenericRpcHandler):
    """Answers every call with this document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document

    def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        def answer(_: bytes, __: grpc.ServicerContext) -> bytes:
            said = Struct()
            said.update(self.document)
            return said.SerializeToString()

        return grpc.unary_unary_rpc_method_handler(answer)


BAD = "\x1b[2J\n" + "x" * 300
NONSENSE: list[dict[str, Any]] = [
    {},
    {"state": BAD, "role": BAD, "model": BAD, "policy": BAD, "draining": "x", "engines": 3, "tiers": {"dram": BAD}},
    {"requests": [1], "done": 7, "layout": {"page_tokens": -1}, "tiers": {"dram": {"capacity_bytes": float("nan")}}},
    {"done": {"cached_tokens": {f"{BAD}{n}": 1e300 for n in range(50)}}, "requests": {BAD: float("inf")}},
    {"layout": {"page_tokens": 0}, "done": {"prefill_tokens": True}, "tiers": {"dram": {"capacity_bytes": 0}}},
]


@pytest.mark.parametrize("document", NONSENSE)
def test_what_members_say_cannot_harm_a_terminal(document: dict[str, Any], tmp_path: Path) -> None:
    url, text = f"file:{tmp_path / 'catalog'}", BAD[:80]
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((Hostile(document),))
    at = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        publish(
            url,
            NodeEntry(name="n", process="1", incarnation="1", addresses=(at,), host=text),
            NodeEntry(name="alone", process="2", incarnation="2"),
            EngineEntry(name="e", process="3", role=text, model=text, layout="", addresses=(at,), node=text),
            EngineEntry(
                name="dead", process="4", role="both", model="m", layout="", addresses=(f"127.0.0.1:{free_port()}",)
            ),
        )
        with closing(pool_frames(url, "default")) as frames:
            for _, frame in zip(range(2), frames, strict=False):
                states = {each["name"]: each["state"] for each in frame["members"]}
                assert (states["dead"], states["alone"]) == ("no answer", "no address")
                assert states["e"] == "serving"
                shown = lines_of(pool_view(frame))
                assert all(line.isprintable() for line in shown) and max(map(len, shown)) < 1200
                json.dumps(frame, allow_nan=False)
    finally:
        server.stop(None)


def test_members_that_are_too_many_are_left_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "MEMBERS_MAX", 3)
    url = f"file:{tmp_path / 'catalog'}"
    publish(url, *(NodeEntry(name=f"n{n}", process=f"{n}", incarnation="1") for n in range(5)))
    with closing(pool_frames(url, "default")) as frames:
        frame = next(frames)
    assert (
        len(frame["members"]) == 3 and frame["members_left_off"] == 2 and lines_of(pool_view(frame))[-1] == "and 2 more"
    )


def test_a_catalog_that_goes_is_told_of_and_one_that_never_was_is_an_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "catalog"
    publish(f"file:{path}", NodeEntry(name="n", process="1", incarnation="1"))
    with closing(pool_frames(f"file:{path}", "default")) as frames:
        assert len(next(frames)["members"]) == 1
        path.rename(tmp_path / "away")
        path.write_bytes(b"no catalog" * 1000)
        frame = next(frames)
        assert len(frame["members"]) == 1 and frame["catalog_error"] and "catalog" in lines_of(pool_view(frame))[1]
    assert run(cli, ["top", "--catalog", "redis://x", "--once"]) == 2
    assert run(cli, ["top", "--catalog", f"file:{tmp_path}/c", "--node", "n", "--once"]) == 2
    errors = capfd.readouterr().err.splitlines()
    assert errors[0].startswith("kvstore: catalog:") and errors[1].startswith("kvstore: --node:"), errors
