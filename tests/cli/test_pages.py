"""The operator's commands about pages, against a real daemon: through shared memory, and over kv:// alike."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Keys, Layout, Store
from kvstore.cli.main import cli, run
from tests.helpers import api
from tests.helpers.content import contents
from tests.helpers.processes import Daemon, Machine, wait_until

LAYOUT = Layout(model="m", layers=2, kv_heads=1, head_dim=16, page_tokens=16)
PAIRS = "model=m,layers=2,kv_heads=1,head_dim=16,page_tokens=16"
PAGES = 8

Run = Callable[..., dict[str, Any]]


def serve(machine: Machine, name: str = "n") -> tuple[Daemon, str]:
    """A daemon with NVMe and the API on loopback; and its address."""
    nvme = f"{machine.logs}/{name}.nvme:64MiB"
    daemon = machine.spawn(name, dram="64MiB", nvme=nvme, listen="127.0.0.1:0")
    return daemon, f"kv://{api.address_of(daemon.wait_ready())}"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A daemon shared by these tests, each with a tenant of its own: its folder in shared memory, and its address."""
    machine = Machine(tmp_path_factory.mktemp("logs"))
    try:
        yield str(machine.shm_dir), serve(machine)[1]
    finally:
        machine.close()


@pytest.fixture
def salt() -> str:
    """A tenant that nobody was before."""
    return f"tenant-{secrets.token_hex(4)}"


@pytest.fixture
def store(node: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The node through shared memory; empty before and after."""
    monkeypatch.setenv("KVSTORE_SHM_DIR", node[0])
    monkeypatch.delenv("KVSTORE_NODE", raising=False)
    with kvstore.connect("n") as store:
        yield store
        for pin in store.pins()["pins"]:
            store.unpin(pin["pin"])
        wait_until("it is empty", lambda: _emptied(store))


def _at_rest(store: Store) -> bool:
    return "held" not in store.evict(percent=100.0, tier="all", dry_run=True)["stayed"]


def _emptied(store: Store) -> bool:
    store.evict(percent=100.0, tier="all")  # but for what is on its way between tiers
    return stored(store) == (0, 0)


@pytest.fixture(params=["shared memory", "gRPC"])
def where(request: pytest.FixtureRequest, node: tuple[str, str]) -> str:
    """The node's address, of either kind."""
    return "n" if request.param == "shared memory" else node[1]


@pytest.fixture
def ask(where: str, store: Store, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command against the node; its document."""

    def asked(*command: str) -> dict[str, Any]:
        assert run(cli, [*command, "--node", where, "--json"]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return asked


def prompt(salt: str, pages: int = PAGES, first: int = 0, more: int = 0) -> list[str]:
    """Options that name a prompt of consecutive tokens: so many pages and so many tokens more."""
    return ["--salt", salt, "--tokens", f"{first}-{first + 16 * pages + more - 1}"]


def put(store: Store, salt: str, first: int = 0, pages: int = PAGES, layout: Layout = LAYOUT) -> Keys:
    """Store a prompt of consecutive tokens; every page has bytes of its own."""
    keys = store.cache(layout, salt).keys(np.arange(first, first + pages * layout.page_tokens))
    assert store.cache(layout, salt).put(keys, contents(keys, layout)) == pages
    return keys


def stored(store: Store) -> tuple[int, int]:
    """Pages in DRAM and on NVMe."""
    tiers = store.stats()["tiers"]
    return tiers["dram"]["pages"], tiers["nvme"]["pages"]


# --- pins -----------------------------------------------------------------------------------------------------------


def test_pins(store: Store, ask: Run, salt: str) -> None:
    keys = put(store, salt)
    made = ask("pin", *prompt(salt), "--ttl", "1h")
    assert (made["pages"], made["asked_pages"], made["bytes"]) == (PAGES, PAGES, PAGES * 4096)
    assert 3500 < made["until"] - time.time() <= 3600
    again = ask("pin", *prompt(salt), "--ttl", "2h")
    listed = ask("pin", "--list")
    assert [pin["pin"] for pin in listed["pins"]] == [again["pin"]] and listed["pins"][0]["salt"] == salt
    assert listed["bytes"]["dram"] == PAGES * 4096
    assert ask("evict", "--percent", "100", "--tier", "all")["pages"] == 0
    assert all(page["detail"]["pinned"] for page in ask("lookup", *prompt(salt))["pages"])
    assert ask("unpin", str(again["pin"]))["unpinned"] == 1
    ask("pin", *prompt(salt), "--ttl", "1h")
    assert ask("unpin", *prompt(salt))["unpinned"] == 1
    assert ask("pin", "--list")["pins"] == []
    assert ask("evict", "--percent", "100", "--tier", "all")["pages"] == PAGES
    assert store.cache(LAYOUT, salt).lookup(keys).pages == 0


# --- lookup ---------------------------------------------------------------------------------------------------------


def reasons(found: dict[str, Any]) -> list[str]:
    return [page["reason"] or "+".join(page["tiers"]) for page in found["pages"]]


def test_lookup_page_by_page(store: Store, ask: Run, salt: str) -> None:
    keys = put(store, salt)
    asked = prompt(salt, PAGES + 2, more=5)
    found = ask("lookup", *asked)
    assert reasons(found) == ["dram"] * PAGES + ["absent", "parent"]
    assert (found["stored_pages"], found["match_pages"], found["full_pages"]) == (PAGES, PAGES, PAGES + 2)
    halves = [page["key"][:16] for page in found["pages"][:PAGES]]  # the other half is the pool's
    assert halves == [key.hex()[:16] for key in keys.hashes]
    assert store.evict(pages=3)["pages"] == 3  # saved to NVMe first
    wait_until("nothing is being copied", lambda: _at_rest(store))
    assert reasons(ask("lookup", *asked))[4:] == ["dram+nvme"] + ["nvme"] * 3 + ["absent", "parent"]
    store.evict(2, tier="all", keys=keys[6:])
    found = ask("lookup", *prompt(salt))
    assert reasons(found)[5:] == ["nvme", "evicted", "evicted"]
    event = found["pages"][7]["detail"]["event"]
    assert (event["kind"], event["tier"], event["reason"]) == ("evicted", "nvme", "request")
    assert 0 <= event["ago_s"] < 60
    assert (found["dram_pages"], found["nvme_only_pages"], found["reason"]) == (5, 1, "evicted")
    exact = ask("lookup", *prompt(salt, 6))
    assert (exact["stored_pages"], exact["match_pages"]) == (6, 5)  # its last token has to be computed


def test_lookup_of_what_is_being_written(store: Store, ask: Run, salt: str) -> None:
    keys = put(store, salt, pages=2)
    cache = store.cache(LAYOUT, salt)
    with pytest.raises(RuntimeError), cache.writer(np.arange(16 * 4), ttl_s=20.0):
        found = ask("lookup", *prompt(salt, 5))
        assert reasons(found) == ["dram"] * 2 + ["writing"] * 2 + ["parent"]
        writing = found["pages"][2]["detail"]["writing"]
        assert writing["shards"] == 1 and 10 < writing["left_s"] <= 20
        raise RuntimeError  # so that it is given up
    assert reasons(ask("lookup", *prompt(salt, 4))) == ["dram"] * 2 + ["absent", "parent"]
    with cache.lease(keys):
        leased = ask("lookup", *prompt(salt, 2))["pages"]
        assert [page["detail"].get("leased") for page in leased] == [True, True]


# --- what all commands have in common -------------------------------------------------------------------------------

SCHEMAS = {
    "lookup": "node layout fingerprint salt adapter root tokens page_tokens full_pages stored_pages stored_tokens "
    "other_nodes_pages dram_pages nvme_only_pages match_pages match_tokens reason explained events_s "
    "scanning elsewhere pages",
    "pages": "node total bytes pages next",
    "evict": "node pages bytes by_tier by_tenant by_model listed stayed dry_run",
    "pin": "node asked_pages pin pages bytes until",
    "pin --list": "node pins bytes",
    "unpin": "node unpinned",
}
PAGE = (
    "key root parent tier address position bytes tokens unused_s tenant model holds leased pinned "
    "priority ttl_s replicas"
)
TEXTS = {
    "lookup": "8 of 8 pages are stored",
    "pages": "2 of 8 pages",
    "evict": "would evict 1 pages",
    "pin": ": 8 of 8 pages (32 KiB) until ",
    "pin --list": "1 pin, keeping 32 KiB of dram",
    "unpin": "1 pin ended",
}


def test_documents_and_tables(
    store: Store, ask: Run, where: str, salt: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(store, salt)
    commands = {
        "lookup": ["lookup", *prompt(salt)],
        "pages": ["pages", "--limit", "2"],
        "evict": ["evict", "--pages", "1", "--dry-run"],
        "pin": ["pin", *prompt(salt), "--ttl", "1h"],
        "pin --list": ["pin", "--list"],
        "unpin": ["unpin", *prompt(salt)],
    }
    for name, command in commands.items():
        found = ask(*command)
        assert set(found) == set(SCHEMAS[name].split()), name
        assert found["node"] == "n"
        if name == "pages":
            assert set(found["pages"][0]) == set(PAGE.split())
        if name == "unpin":
            ask("pin", *prompt(salt), "--ttl", "1h")
        assert run(cli, [*command, "--node", where]) == 0
        assert TEXTS[name] in capsys.readouterr().out, name
    for name in ("status", "tiers"):
        assert ask(name)["tiers"]["dram"]["pages"] == PAGES
        assert run(cli, [name, "--node", where]) == 0
        assert "dram" in capsys.readouterr().out


# --- nodes of their own ---------------------------------------------------------------------------------------------


def test_who_is_no_operator(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tenant learns of its own pages whether they are found, and may pin them; operators do the rest."""
    _, where = api.serve_api(machine, "o", identities=api.identities_file(tmp_path))
    node = ["--layout", PAIRS, "--node", f"kv://{where}"]
    with machine.connect("o") as store:
        put(store, "a")
        put(store, "b")

    def said(*command: str, code: int) -> str:
        assert run(cli, list(command)) == code, capsys.readouterr()
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    monkeypatch.setenv("KVSTORE_TOKEN", "a-token")
    longer = ["lookup", *prompt("a", PAGES + 1), *node, "--json"]
    mine, theirs = [*prompt("a"), *node], [*prompt("b"), *node]
    found = json.loads(said(*longer, code=0))
    assert (found["explained"], found["stored_pages"], found["pages"][-1]["reason"]) == (False, PAGES, "unknown")
    assert "pin " in said("pin", *mine, "--ttl", "1h", code=0) and "1 pin ended" in said("unpin", *mine, code=0)
    for command in (["lookup", *theirs], ["pin", *theirs, "--ttl", "1h"], ["evict", *mine], ["pages", *mine]):
        said(*command, code=1)
    said("lookup", *prompt("a"), *node[2:], code=2)  # which layouts there are is for operators
    monkeypatch.setenv("KVSTORE_TOKEN", "op-token")
    assert json.loads(said(*longer, code=0))["explained"]
    assert f"evicted {PAGES} pages" in said("evict", *mine, code=0)


def test_while_the_daemon_is_down(machine: Machine) -> None:
    """Reading needs no daemon; and layouts are known again afterwards. The command itself, with its exit codes."""
    daemon, address = serve(machine)
    store = machine.connect("n")
    put(store, "a")
    assert stored(store)[0] == PAGES  # taken in: what is only published is found again after the next start
    daemon.kill()
    done = machine.run("lookup", "--node", "n", *prompt("a"), "--layout", PAIRS, "--json")
    found = json.loads(done.stdout)
    assert (found["stored_pages"], found["explained"], done.returncode) == (PAGES, False, 0)
    done = machine.run("evict", "--node", address, "--pages", "1")
    assert done.returncode == 1 and done.stderr.startswith("kvstore: kv://") and done.stderr.count("\n") == 1
    machine.serve("n")
    wait_until("it serves again", lambda: store.stats()["state"] == "ready")
    known = [LAYOUT.fingerprint.hex()]
    wait_until("its layout is told again", lambda: [found["fingerprint"] for found in store.layouts()] == known)
    assert "1 pages" in machine.run("evict", "--node", "n", "--pages", "1", "--dry-run").stdout
