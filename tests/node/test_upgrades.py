"""This version beside the one before: files, messages and programs of it go on working, and nothing stored is lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.engines.processes import prompt
from tests.helpers.processes import ROOT, Machine, check_laws, wait_until
from tests.helpers.versions import Client, Version, grpc_of, unpack, wait_saved

PROMPTS, PAGES = 6, 8
FLAGS = {"dram": "16MiB"}
LISTEN = {"listen": "127.0.0.1:0"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(tmp_path_factory.mktemp("old") / "tree")


@pytest.fixture
def old(machine: Machine, tree: Path) -> Iterator[Version]:
    """The version before."""
    return Version(machine, tree)


@pytest.fixture
def new(machine: Machine) -> Version:
    """This one."""
    return Version(machine, ROOT)


def fill(client: Client, first: int = 0) -> None:
    for seed in range(first, first + PROMPTS):
        assert client.ask("put", seed=seed, pages=PAGES) == {"new": PAGES}
    assert client.ask("store_object", seed=first) == {"stored": True}


def check(client: Client, first: int = 0, tier: str = "") -> None:
    """All that was filled is there, byte for byte."""
    for seed in range(first, first + PROMPTS):
        assert client.ask("lookup", seed=seed, pages=PAGES) == {"pages": PAGES}, seed
        found = client.ask("get", seed=seed, pages=PAGES)
        assert (found["pages"], found["wrong"]) == (PAGES, 0), f"prompt {seed}: {found}"
        assert not tier or found["tiers"] == {tier: PAGES}
    assert client.ask("read_object", seed=first) == {"there": True, "wrong": False}


def every_verb(client: Client) -> None:
    """Each thing that a client may ask of a node."""
    fill(client)
    check(client)
    assert client.ask("put", seed=0, pages=PAGES) == {"new": 0}, "it is there already"
    assert client.ask("hold", seed=1, pages=PAGES) == {"pages": PAGES, "wrong": 0}
    assert client.ask("write", seed=50, pages=PAGES) == {"sealed": PAGES}
    assert client.ask("get", seed=50, pages=PAGES)["wrong"] == 0
    client.ask("evict")
    assert client.ask("look", seed=1, pages=PAGES) == {"pages": PAGES, "wrong": 0}, "a lease holds what it names"
    assert client.ask("release") == {}
    assert client.ask("store_object", seed=70) == {"stored": True}
    assert client.ask("delete_object", seed=70) == {"deleted": 1}
    assert client.ask("read_object", seed=70) == {"there": False, "wrong": False}
    fill(client, first=100)
    check(client, first=100)


@pytest.mark.parametrize("way", ["shared memory", "gRPC"])
@pytest.mark.parametrize("node", ["this", "before"])
def test_clients_of_one_version_and_nodes_of_the_other(
    node: str, way: str, old: Version, new: Version, machine: Machine
) -> None:
    server, client = (new, old) if node == "this" else (old, new)
    daemon = server.serve(**FLAGS, **(LISTEN if way == "gRPC" else {}))
    every_verb(client.client(grpc_of(daemon) if way == "gRPC" else "n"))
    check_laws(machine.connect("n"))
    assert daemon.terminate() == 0


def test_a_node_is_taken_over_with_its_pages_and_its_clients(old: Version, new: Version, machine: Machine) -> None:
    """The old daemon is killed; its clients live on: one reads, one is writing, one holds a lease."""
    daemon = old.serve(**FLAGS)
    reader, writer, holder = old.client(), old.client(), old.client()
    fill(reader)
    assert holder.ask("hold", seed=1, pages=PAGES) == {"pages": PAGES, "wrong": 0}
    assert writer.ask("write", seed=50, pages=PAGES, seal=False, whole=False) == {"new": PAGES}
    daemon.kill()
    check(reader)  # nobody is asked for it
    new.serve(**FLAGS)
    check(reader)
    fresh = new.client()
    check(fresh)
    assert fresh.ask("put", seed=0, pages=PAGES) == {"new": 0}, "its pages are found under its keys"
    assert "error" in writer.ask("seal") or fresh.ask("get", seed=50, pages=PAGES)["wrong"] == 0
    fresh.ask("evict")
    assert holder.ask("look", seed=1, pages=PAGES) == {"pages": PAGES, "wrong": 0}
    assert holder.ask("release") == {}
    for client, first in ((reader, 200), (fresh, 300)):
        fill(client, first)
        check(client, first)
    check(fresh, 200)
    check(reader, 300)
    check_laws(machine.connect("n"))


def test_the_version_before_takes_over_again(old: Version, new: Version, machine: Machine) -> None:
    """An upgrade that is taken back costs nothing either: what this one added is in nobody's way."""
    daemon = old.serve(**FLAGS)
    client = old.client()
    fill(client)
    assert daemon.terminate() == 0
    daemon = new.serve(**FLAGS)
    fill(client, 100)
    assert daemon.terminate() == 0
    old.serve(**FLAGS)
    check(client)
    check(client, 100)
    check_laws(machine.connect("n"))


def test_what_was_published_is_told_to_a_node_of_the_version_before(
    old: Version, new: Version, machine: Machine
) -> None:
    """The daemon was stopped, so it took nothing in, and then killed; the next one has no log of puts."""
    daemon = new.serve(dram="256MiB")
    client, other = new.client(), new.client()
    fill(client)
    assert client.ask("write", seed=510, pages=2, seal=False) == {"new": 2}
    assert client.ask("stats")["dram"]
    daemon.stop()
    assert client.ask("seal") == {"sealed": 2}, "the node knew that it was being written"
    for seed in range(500, 504):
        assert client.ask("put", seed=seed, pages=2) == {"new": 2}
    assert client.ask("write", seed=511, pages=2) == {"sealed": 2}, "the node never heard of this one"
    daemon.kill()
    daemon = old.serve(dram="256MiB")
    assert client.ask("put", seed=600, pages=2) == {"new": 2}
    for seed in (*range(500, 504), 510, 511, 600):
        for asked in (client, other):
            found = asked.ask("get", seed=seed, pages=2)
            assert (found["pages"], found["wrong"]) == (2, 0), seed
    check(other)
    assert daemon.terminate() == 0
    new.serve(dram="256MiB")  # finds records of what is stored long since
    fill(client, 700)
    check(client, 700)
    check_laws(machine.connect("n"))


@pytest.mark.parametrize("end", ["terminated", "killed"])
def test_pages_on_nvme_outlive_a_reboot_with_an_upgrade(
    end: str, old: Version, new: Version, machine: Machine, tmp_path: Path
) -> None:
    flags = {**FLAGS, "nvme": f"{tmp_path / 'kv'}:64MiB"}
    daemon = old.serve(**flags)
    client = old.client()
    fill(client)
    stored = PROMPTS * PAGES + 2  # an object of two pieces
    wait_saved(client, stored)
    assert daemon.kill() if end == "killed" else not daemon.terminate()
    shutil.rmtree(machine.folder("n"))
    new.serve(**flags)
    fresh = new.client()
    wait_until("all are found", lambda: fresh.ask("stats")["nvme"] == stored)
    check(fresh, tier="nvme")
    fill(fresh, 100)
    check(fresh, 100)
    check_laws(machine.connect("n"))


def from_the_pool(client: Client, address: str, asks: dict[str, Any]) -> dict[str, Any] | None:
    """What an engine answers that found the prompt's pages. The version before does not see those that are published
    until the node has taken them in."""
    answer = client.ask("generate", address=address, prefill=[], **asks)
    return answer if answer["cached"] >= 64 else None


def test_engines_of_both_versions_share_a_node(old: Version, new: Version, machine: Machine) -> None:
    """Each answers what the other answers, over the same node, asked by a client of the other version. They hand no
    prompts over, since the old one knows no data connections: each computes its own, and none fails."""
    new.serve(**FLAGS)
    flags = {"threads": "1", "arena": "16MiB", "page_tokens": "16", "node": "n", "listen": "127.0.0.1:0"}
    engines = [version.engine("tiny-llama", local_prefill_tokens="0", **flags) for version in (old, new)]
    clients = [new.client(), old.client()]
    one, two = (engine.wait_ready().address for engine in engines)
    for seed, source in enumerate(["arena", "dram"]):
        for client, here, other in zip(clients, (one, two), (two, one), strict=True):
            tokens = prompt(75, seed=2 * seed + (here == two)).tolist()
            asks = {"tokens": tokens, "max_tokens": 6}
            alone = client.ask("generate", address=other, prefill=[], **asks)
            answer = client.ask("generate", address=here, prefill=[other], source=source, **asks)
            assert (answer["tokens"], answer["prefill"]) == (alone["tokens"], "")
            again = wait_until("its pages are found", partial(from_the_pool, client, here, asks))
            assert again["tokens"] == alone["tokens"]
