"""The operator's commands about pages, against a real daemon: through shared memory, and over kv:// alike."""

from __future__ import annotations

import io
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Keys, Layout, Store
from kvstore.cli.main import cli, run
from tests.helpers import api
from tests.helpers.content import contents
from tests.helpers.processes import Daemon, Machine, check_laws, wait_until

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


# --- evict ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_the_run_does(store: Store, ask: Run, salt: str) -> None:
    other = f"{salt}-b"
    wishes: list[list[str]] = [
        *(["--pages", "3"], ["--bytes", "5KiB"], ["--percent", "25%"], ["--tenant", other]),
        *(["--tenant", salt, "--pages", "2"], prompt(salt, first=5000), ["--age", "0s", "--tier", "nvme"]),
        ["--percent", "100", "--tier", "all"],
    ]
    for whose in (salt, other):
        put(store, whose)
        put(store, whose, first=5000)
    put(store, salt, first=9000, pages=2 * PAGES)
    store.cache(LAYOUT, salt).get(np.arange(5000, 5000 + 16 * PAGES + 1))
    for wish in wishes:
        wait_until("nothing is being copied", lambda: _at_rest(store))
        before = stored(store)
        would = ask("evict", *wish, "--dry-run")
        assert stored(store) == before
        did = ask("evict", *wish)
        assert (would.pop("dry_run"), did.pop("dry_run")) == (True, False)
        assert would == did and did["pages"] > 0, wish
        dram, nvme = stored(store)
        assert dram == before[0] - did["by_tier"].get("dram", {"pages": 0})["pages"]
        if "nvme" in did["by_tier"]:
            assert nvme == before[1] - did["by_tier"]["nvme"]["pages"]
    assert stored(store) == (0, 0)
    check_laws(store)


def test_what_stays_and_why(store: Store, ask: Run, salt: str) -> None:
    leased, pinned, plain = put(store, salt), put(store, salt, first=5000), put(store, salt, first=9000)
    ask("pin", "--ttl", "1h", *prompt(salt, 3, first=5000))
    with store.cache(LAYOUT, salt).lease(leased[:2]):
        would = ask("evict", "--percent", "100", "--tier", "all", "--dry-run")
        did = ask("evict", "--percent", "100", "--tier", "all")
    assert would["stayed"] == did["stayed"] == {"leased": 2, "pinned": 3}
    assert did["pages"] == 3 * PAGES - 5 and did["by_model"]["m"]["bytes"] == did["bytes"] == did["pages"] * 2048
    lookup = store.cache(LAYOUT, salt).lookup
    assert [lookup(keys).pages for keys in (leased, pinned, plain)] == [2, 3, 0]


def test_a_prompt_shared_in_part(store: Store, ask: Run, salt: str) -> None:
    put(store, salt)
    longer = np.concatenate([np.arange(16 * 4), np.arange(7000, 7000 + 16 * 4)])
    assert store.cache(LAYOUT, salt).put(longer, np.zeros((8, LAYOUT.page_bytes), np.uint8)) == 4
    found = ask("evict", *prompt(salt), "--tier", "all")
    assert found["pages"] == 4 and found["stayed"] == {"children": 4}
    assert store.cache(LAYOUT, salt).get(np.append(longer, 1)).pages == 8


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


def test_many_pins_are_listed_whole(store: Store, ask: Run, salt: str) -> None:
    for first in range(230):  # more than one message tells
        store.pin(put(store, salt, first=first * 1000, pages=1), 60.0)
    assert len({pin["pin"] for pin in ask("pin", "--list")["pins"]}) == 230


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


def test_lookup_of_what_was_damaged(store: Store, ask: Run, node: tuple[str, str], salt: str) -> None:
    keys = put(store, salt)
    store.verify()  # which also gives every page its checksum
    with open(Path(node[0]) / "kvstore-n" / "segment", "r+b") as segment:
        place = segment.read().index(contents(keys[5:6], LAYOUT).tobytes())
        segment.seek(place + 100)
        segment.write(b"damage")
    store.verify()  # finds it, where the scrubber was not faster
    found = ask("lookup", *prompt(salt))
    assert reasons(found) == ["dram"] * 5 + ["dropped"] * 3
    assert found["pages"][5]["detail"]["event"]["reason"] == "data"


def test_lookup_under_the_wrong_salt(store: Store, ask: Run, salt: str) -> None:
    put(store, salt)
    found = ask("lookup", *prompt("nobody"))
    assert reasons(found) == ["elsewhere"] + ["parent"] * (PAGES - 1)
    told = {"salt": salt, "adapter": "", "model": "m", "fingerprint": LAYOUT.fingerprint.hex()}
    assert found["elsewhere"] == [told]
    assert ask("lookup", *prompt("nobody", first=9000))["elsewhere"] == []


def test_prompts_of_every_kind(
    store: Store, ask: Run, salt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a prompt of some words, which fills two pages"
    tokens = np.frombuffer(text.encode(), np.uint8)
    assert store.cache(LAYOUT, salt).put(tokens, np.zeros((2, LAYOUT.page_bytes), np.uint8)) == 2
    np.save(tmp_path / "p.npy", tokens)
    (tmp_path / "p.json").write_text(json.dumps(tokens.tolist()))
    (tmp_path / "p.txt").write_text(text)
    prompts = [["--file", str(tmp_path / name)] for name in ("p.npy", "p.json")]
    prompts += [["--tokens", ",".join(map(str, tokens.tolist()))], ["--text", text, "--tokenizer", "bytes"]]
    prompts += [["--text-file", str(tmp_path / "p.txt"), "--tokenizer", "bytes"]]
    for given in prompts:
        assert ask("lookup", "--salt", salt, *given)["stored_pages"] == 2, given
    for given, said in (
        (["--file", "-"], json.dumps(tokens.tolist())),
        ([*prompts[-1][:1], "-", *prompts[-1][2:]], text),
    ):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(said.encode())))
        assert ask("lookup", "--salt", salt, *given)["stored_pages"] == 2, given
    assert ask("lookup", "--salt", salt, "--text", "short", "--tokenizer", "bytes")["pages"] == []


# --- pages ----------------------------------------------------------------------------------------------------------


def test_pages_are_filtered_ordered_and_paged(store: Store, ask: Run, salt: str) -> None:
    cold, warm = put(store, salt), put(store, "warm", first=5000)
    store.cache(LAYOUT, "warm").get(warm)
    found = ask("pages", "--limit", "3")
    assert found["total"] == 2 * PAGES and found["bytes"] == 2 * PAGES * 2048
    assert {page["key"] for page in found["pages"]} <= {key.hex() for key in cold.hashes}
    assert {page["tenant"] for page in ask("pages", "--order", "recent", "--limit", "3")["pages"]} == {"warm"}
    listed, after = list(found["pages"]), found["next"]
    while after:
        found = ask("pages", "--limit", "3", "--after", after)
        listed, after = listed + found["pages"], found["next"]
    assert {page["key"] for page in listed} == {key.hex() for key in (*cold.hashes, *warm.hashes)}
    assert len(listed) == 2 * PAGES
    assert ask("pages", "--tenant", "warm")["total"] == ask("pages", *prompt(salt))["total"] == PAGES
    assert ask("pages", "--tier", "nvme")["total"] == ask("pages", "--age", "1h")["total"] == 0
    assert ask("pages", "--age", "0s", "--tier", "dram")["total"] == 2 * PAGES


def test_long_prompts(store: Store, ask: Run, salt: str) -> None:
    """More pages than one message of the control socket names."""
    pages = 5000
    asked = prompt(salt, pages)
    keys = put(store, salt, pages=pages)
    assert ask("lookup", *asked)["stored_pages"] == pages
    assert ask("pages", *asked, "--limit", "600")["total"] >= pages
    assert ask("pin", *asked, "--ttl", "1h")["pages"] == pages
    assert ask("evict", *asked, "--dry-run")["stayed"] == {"pinned": pages}
    assert ask("unpin", *asked)["unpinned"] == 1
    assert ask("evict", *asked, "--tier", "all")["pages"] >= pages
    assert store.cache(LAYOUT, salt).lookup(keys).pages == 0


def test_a_prompt_of_a_million_tokens(store: Store, ask: Run, salt: str) -> None:
    """More than one message of the gRPC API names by its tokens: it is named by its keys."""
    put(store, salt)
    asked = prompt(salt, 65536)
    assert ask("pages", *asked)["total"] == PAGES
    assert ask("evict", *asked, "--dry-run")["pages"] == PAGES


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
PAGE = "key root parent tier address position bytes tokens unused_s tenant model holds leased pinned priority ttl_s"
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


def test_refusals_change_nothing(store: Store, where: str, salt: str, capsys: pytest.CaptureFixture[str]) -> None:
    put(store, salt)
    before, mine = stored(store), prompt(salt)
    refused = [
        *(["evict", "--percent", "101"], ["evict", "--tokens", "0-3", "--tier", "all"], ["pages", "--after", "x"]),
        *(["pin", *prompt(salt, first=9000), "--ttl", "1h"], ["unpin", "77"], ["unpin", *mine]),
        *(["evict", *mine, "--layout", "model=m"], ["evict", *mine, "--model", "no"]),
        *(["pin", *prompt(salt, 65537), "--ttl", "1h"], ["evict", *prompt(salt, 65537)]),
    ]
    for command in refused:
        assert run(cli, [*command, "--node", where]) == 2, command
        printed = capsys.readouterr()
        assert printed.err.startswith("kvstore: ") and printed.err.count("\n") == 1 and not printed.out, command
    assert stored(store) == before and store.pins()["pins"] == []


# --- nodes of their own ---------------------------------------------------------------------------------------------


def test_which_layout(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    _, address = serve(machine)
    wide = Layout(model="wide", layers=4, kv_heads=1, head_dim=16, page_tokens=16)
    store, mine = machine.connect("n"), prompt("a")
    put(store, "a")
    put(store, "a", layout=wide)
    for where in ("n", address):
        for which in (["--model", "m"], ["--layout", LAYOUT.fingerprint.hex()[:10]], ["--layout", PAIRS]):
            assert run(cli, ["lookup", *mine, *which, "--node", where, "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert (found["stored_pages"], found["fingerprint"]) == (PAGES, LAYOUT.fingerprint.hex())
        assert run(cli, ["lookup", *mine, "--node", where]) == 2
        said = capsys.readouterr().err
        assert said.startswith("kvstore: --layout: the node has met 2, say which: ") and said.count("\n") == 1


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
