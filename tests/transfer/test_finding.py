"""Nodes that tell a directory what they have, and who asks it: real nodes and sockets in one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.client.local.node import LocalNode
from kvstore.cluster import peer_links
from kvstore.cluster.announce_plan import IDLE_S
from kvstore.cluster.catalog import schema
from kvstore.cluster.catalog.base import boot_s
from kvstore.cluster.catalog.schema import DataEntry, NodeEntry
from kvstore.cluster.data_connection import Caller, Exchange
from kvstore.cluster.data_listener import Server
from kvstore.cluster.directory import AnnounceBatch, Locations
from kvstore.cluster.directory_messages import pack_announce, pack_found, unpack_announce, unpack_announced
from kvstore.cluster.directory_owner import LATE_S
from kvstore.cluster.find_pages import Finder
from kvstore.cluster.lookup_plan import Stretch
from kvstore.cluster.peer_links import PeerLinks, PeersFile, PoolNode
from kvstore.errors import NodeUnavailable, PermissionDenied, TooManyCalls
from kvstore.model.prefix import fingerprints
from kvstore.model.replica import TIERS, Tier
from kvstore.node.cluster import directory_audit, directory_shell
from kvstore.node.cluster.announcer import Announcer
from kvstore.node.cluster.data_server import ViewKeeper
from kvstore.node.cluster.directory_shell import DirectoryShell
from kvstore.node.cluster.page_handlers import HoldHandler
from kvstore.node.node import Node
from kvstore.wire.data import FrameKind, Hello, Namespace
from tests.helpers.inside import node_of
from tests.helpers.processes import wait_until

LAYOUT = Layout(model="found", layers=1, kv_heads=1, head_dim=8, dtype="float16", page_tokens=8)


WHOSE = Namespace(LAYOUT.fingerprint, "", "")
LABELS: dict[str, str] = {}  # what tests call the nodes


class Anyone:
    name, operator = "anyone", True

    def check_salt(self, salt: str) -> None:
        """Any will do."""


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    return Anyone()


class Members:
    """A catalog, as one node sees it."""

    def __init__(self) -> None:
        self.servers: dict[str, DataEntry] = {}
        self.daemons: dict[str, NodeEntry] = {}
        self.secret: bytes | None = b"s" * 16

    @property
    def heard_s(self) -> float:
        return boot_s()

    def nodes(self) -> list[NodeEntry]:
        return list(self.daemons.values())

    def node(self, name: str) -> NodeEntry | None:
        return self.daemons.get(name)

    def data_servers(self) -> list[DataEntry]:
        return list(self.servers.values())


class Machine:
    """One node with its data server and its announcer. ``stop_serving`` is the death of the data server."""

    def __init__(self, name: str, members: Members, store: Store) -> None:
        self.members, self.store = members, store
        self.node = daemon_of(store)
        self.name = self.node.performer.folder.name
        LABELS[self.name] = name
        self.cache = store.cache(LAYOUT)
        folder = self.node.performer.folder
        self.view = ViewKeeper(folder, "pool", members, ())
        self.links = PeerLinks("pool", self.name)
        self.peers = PeersFile(folder.path)
        number, incarnation = schema.new_process(), f"{self.node.incarnation:016x}"
        members.daemons[self.name] = NodeEntry(name=self.name, process=number, incarnation=incarnation)
        self.announcer = Announcer(self.node, self.name, number, members, self.peers, self.links)
        self.ending = threading.Event()
        self.watching = threading.Thread(target=self.watch)
        self.watching.start()
        self.finder = Finder(self.peers, self.links)
        self.local = LocalNode(folder.path)
        self.server: Server | None = None
        self.serve()
        self.announcer.start()

    def serve(self) -> None:
        self.directory = DirectoryShell(1 << 20, self.peers)
        self.directory.members = self.members
        handlers = {**self.directory.handlers, FrameKind.HOLD: HoldHandler(self.local)}
        self.server = Server(self.name, handlers, admit)
        address = self.server.start("127.0.0.1", 0)
        self.members.servers[self.name] = DataEntry(
            name=f"{self.name}.1",
            process=self.server.process,
            node=self.name,
            incarnation=f"{self.node.incarnation:016x}",
            addresses=(address,),
        )

    def stop_serving(self) -> None:
        assert self.server is not None
        self.server.stop()

    def put(self, tokens: np.ndarray) -> None:
        pages = len(tokens) // LAYOUT.page_tokens
        self.cache.put(tokens, np.zeros((pages, LAYOUT.page_bytes), np.uint8), wait=True)

    def find(self, tokens: np.ndarray) -> list[Stretch]:
        self.finder._cache.clear()
        return self.finder.find(WHOSE, self.cache.keys(tokens).hashes, 0, time.monotonic() + 30)

    def watch(self) -> None:
        while not self.ending.wait(0.02):
            self.view.refresh()

    def close(self) -> None:
        self.ending.set()
        self.watching.join()
        self.announcer.stop()
        self.links.close()
        self.stop_serving()
        self.local.close()


def daemon_of(store: Store) -> Node:
    embedded: Any = node_of(store)._resources.embedded
    node: Node = embedded.node
    return node


def prompt(seed: int, pages: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, pages * LAYOUT.page_tokens).astype(np.uint32)


@pytest.fixture
def machines() -> Iterator[dict[str, Machine]]:
    members, made = Members(), dict[str, Machine]()
    with_stores = {name: kvstore.open(dram="8MiB") for name in "abc"}
    for name, store in with_stores.items():
        made[name] = Machine(name, members, store)
    # Else what is told to two owners first looks as if all were told.
    wait_until("all know all", lambda: all(each.announcer.status()["owners"] == 3 for each in made.values()), 30)
    yield made
    for machine in made.values():
        machine.close()
    for store in with_stores.values():
        store.close()


def shape(stretches: list[Stretch]) -> list[tuple[str, int, int]]:
    return [(LABELS[each.node], each.start, each.stop) for each in stretches]


def test_pages_of_other_nodes_are_found_as_long_as_they_are_there(machines: dict[str, Machine]) -> None:
    long, short = prompt(1, 100), prompt(2, 3)
    machines["a"].put(long)
    machines["b"].put(long[: 40 * LAYOUT.page_tokens])
    machines["b"].put(short)
    wait_until("the owners know", lambda: shape(machines["c"].find(long)) == [("a", 0, 100)], 30)
    wait_until("the owners know", lambda: shape(machines["c"].find(short)) == [("b", 0, 3)], 30)
    assert {TIERS[tier] for each in machines["c"].find(long) for tier in each.tiers} == {Tier.DRAM}
    wait_until("of its own pages nobody asks others", lambda: shape(machines["a"].find(long)) == [("b", 0, 40)], 30)
    machines["a"].store.evict(pages=10_000)
    wait_until("the owners know", lambda: shape(machines["c"].find(long)) == [("b", 0, 40)], 30)
    machines["b"].store.evict(pages=10_000)
    wait_until("the owners know", lambda: machines["c"].find(long) == [] and machines["a"].find(short) == [], 30)


def entries(machines: dict[str, Machine]) -> int:
    """What all owners know, together."""
    return sum(each.directory.status()["entries"] for each in machines.values())


def test_an_owner_that_dies_costs_nothing_and_its_heir_knows(machines: dict[str, Machine]) -> None:
    long = prompt(3, 200)
    machines["a"].put(long)
    wait_until("both owners of every page know", lambda: entries(machines) == 400, 30)
    machines["b"].stop_serving()  # the catalog has not noticed: second owners are asked
    assert shape(machines["c"].find(long)) == [("a", 0, 200)]
    del machines["b"].members.servers[machines["b"].name]
    wait_until("b is gone", lambda: len(machines["a"].peers.look().peers) == 2, 30)
    wait_until("its heirs know", lambda: shape(machines["c"].find(long)) == [("a", 0, 200)], 30)
    machines["b"].serve()  # it knows nothing yet; that it is told all again nobody has to ask for
    wait_until("b is back", lambda: len(machines["c"].peers.look().peers) == 3, 30)  # type: ignore[union-attr]
    b = machines["b"].directory
    wait_until("each has its share", lambda: b.status()["entries"] > 0 and entries(machines) == 400, 30)
    wait_until("all of it is found", lambda: shape(machines["c"].find(long)) == [("a", 0, 200)], 30)


def test_a_node_without_its_data_server_is_found_nowhere(machines: dict[str, Machine]) -> None:
    """Nobody could read its pages."""
    long = prompt(4, 50)
    machines["a"].put(long)
    machines["b"].put(long[: 10 * LAYOUT.page_tokens])
    wait_until("the owners know", lambda: shape(machines["c"].find(long)) == [("a", 0, 50)], 30)
    machines["a"].stop_serving()
    del machines["a"].members.servers[machines["a"].name]
    wait_until("a is gone", lambda: shape(machines["c"].find(long)) == [("b", 0, 10)], 30)
    heard = machines["b"].directory.status()["heard_ago_s"]
    wait_until("a is forgotten", lambda: machines["a"].name not in machines["b"].directory.status()["heard_ago_s"], 30)
    assert heard.keys() <= LABELS.keys()


def test_owners_that_do_not_answer_are_waited_for_once(
    machines: dict[str, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(50 + number, 100) for number in range(12)]  # c itself owns what is asked for of some
    for each in prompts:
        machines["a"].put(each)
    for each in prompts:
        wait_until("the owners know", lambda each=each: shape(machines["c"].find(each)) == [("a", 0, 100)], 30)
    asked: list[str] = []
    release = threading.Event()
    monkeypatch.setattr(peer_links, "PROBE_MIN_S", 60.0)  # they would answer HELLO

    def silent(self: DirectoryShell, exchange: Exchange, body: memoryview) -> None:
        asked.append("")
        release.wait(30)
        raise NodeUnavailable("too late")

    for name in "ab":
        server = machines[name].server
        assert server is not None
        server._handlers = {**server._handlers, FrameKind.FIND: partial(silent, machines[name].directory)}  # type: ignore[dict-item]
    for each in prompts * 2:
        assert set(shape(machines["c"].find(each))) <= {("a", 0, stop) for stop in range(101)}
    first = len(asked)
    assert 0 < first <= 2
    for each in prompts * 2:
        machines["c"].find(each)
    assert len(asked) == first, "they are known to be silent"
    release.set()


@pytest.mark.parametrize("deaf", ["b", "ab"])
def test_pages_that_owners_do_not_hear_of_are_found(machines: dict[str, Machine], deaf: str) -> None:
    """Owners that hear nothing from a say so: the other owner is asked, or a itself; for closed chains and others, and
    for no page of another salt."""
    a, c = machines["a"], machines["c"]

    def announce(owner: Machine, exchange: Exchange, body: memoryview) -> None:
        if unpack_announce(body)[0].node == a.name:
            raise NodeUnavailable("did not hear that")
        owner.directory.announce(exchange, body)

    for name in deaf:
        server = machines[name].server
        assert server is not None
        server._handlers = {**server._handlers, FrameKind.ANNOUNCE: partial(announce, machines[name])}
    prompts = [prompt(100 + number, 50) for number in range(12)]
    for each in prompts:
        a.put(each)
    others = prompt(99, 50)
    pages = np.zeros((50, LAYOUT.page_bytes), np.uint8)
    a.store.cache(LAYOUT, salt="others").put(others, pages, wait=True)
    time.sleep(IDLE_S + LATE_S + 1.0)
    for each in prompts:
        keys = c.cache.keys(np.concatenate([each, each])).hashes  # 50 more that nobody has
        for closed in (True, False):
            c.finder._cache.clear()
            found = c.finder.find(WHOSE, keys, 0, time.monotonic() + 30, (), closed)
            assert shape(found) == [("a", 0, 50)]
            assert {TIERS[tier] for tier in found[0].tiers} == {Tier.DRAM}
    keys = a.store.cache(LAYOUT, salt="others").keys(others).hashes
    c.finder._cache.clear()
    assert c.finder.find(WHOSE, keys, 0, time.monotonic() + 30) == []
    c.finder._cache.clear()
    assert shape(c.finder.find(replace(WHOSE, salt="others"), keys, 0, time.monotonic() + 30)) == [("a", 0, 50)]


def nothing(self: HoldHandler, exchange: Exchange, body: memoryview) -> None:
    """A node that says it has no page, so that what is found is what owners list."""
    none = np.zeros(0, np.int64)
    exchange.reply(FrameKind.FOUND, pack_found(Locations(none, none, none.astype(np.uint8), [])))


def test_only_nodes_announce(machines: dict[str, Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HoldHandler, "__call__", nothing)
    monkeypatch.setattr(Anyone, "operator", False)
    machines["a"].put(prompt(7, 5))
    wait_until("a was refused", lambda: machines["a"].announcer.counters["failed"] > 0, 30)
    assert machines["c"].find(prompt(7, 5)) == []


def announced(machine: Machine, told: AnnounceBatch, daemon: int) -> int:
    """What that machine's directory answers to a batch."""
    peer = PoolNode(machine.name, "p", "", machine.members.servers[machine.name].addresses)
    within_s = time.monotonic() + 30
    with machine.links.to(peer, within_s) as connection:
        reply = connection.call(
            FrameKind.ANNOUNCE, pack_announce(told, daemon), reply=FrameKind.ANNOUNCED, deadline_s=within_s
        )
    return unpack_announced(reply)[0]


def test_nobody_announces_for_another_node(machines: dict[str, Machine]) -> None:
    """An operator, too: the number of the node's daemon is in the catalog, and in no file that clients read."""
    a, b = machines["a"], machines["b"]
    b.put(prompt(12, 5))
    wait_until("the owners know", lambda: shape(machines["c"].find(prompt(12, 5))) == [("b", 0, 5)], 30)
    known = b.members.daemons[b.name].process
    false = AnnounceBatch(b.name, 1 << 40, 0, np.arange(9, dtype=np.uint64), np.ones(9, np.uint8), True)
    for daemon in (0, int(a.members.daemons[a.name].process, 16)):
        with pytest.raises(PermissionDenied, match="may announce its pages"):
            announced(a, false, daemon)
    with pytest.raises(PermissionDenied, match="nobody"):
        announced(a, replace(false, node="nobody"), int(known, 16))
    assert shape(machines["c"].find(prompt(12, 5))) == [("b", 0, 5)]
    assert known not in (a.node.folder / "peers").read_text()


def test_a_tenant_finds_pages_under_its_own_salts_alone(
    machines: dict[str, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks under a salt that is his own learns nothing of another's, whatever fingerprints he names."""
    a, c, tokens = machines["a"], machines["c"], prompt(13, 6)
    pages = np.zeros((6, LAYOUT.page_bytes), np.uint8)
    theirs = a.store.cache(LAYOUT, salt="theirs")
    theirs.put(tokens, pages, wait=True)
    mine, others = (Namespace(LAYOUT.fingerprint, salt, "") for salt in ("mine", "theirs"))
    keys = theirs.keys(tokens).hashes

    def found(whose: Namespace) -> list[tuple[str, int, int]]:
        c.finder._cache.clear()
        return shape(c.finder.find(whose, keys, 0, time.monotonic() + 30))

    wait_until("the owners know", lambda: found(others) == [("a", 0, 6)], 30)

    def check_salt(self: Anyone, salt: str) -> None:
        if salt != "mine":
            raise PermissionDenied(salt)

    monkeypatch.setattr(Anyone, "check_salt", check_salt)
    assert found(others) == [] and found(mine) == []
    for machine in machines.values():  # it asks all owners for any page under its own root
        low = np.uint64(0xFFFF)
        asked = fingerprints(b"".join(keys))
        assert not np.isin(machine.directory._owner.directory._table | low, asked | low).any()


def test_a_node_is_told_which_owners_do_not_know_it(
    machines: dict[str, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_audit, "BETWEEN_S", 0.1)
    monkeypatch.setattr(directory_audit, "LISTED_MAX", 16)
    monkeypatch.setattr(directory_shell, "LISTED_MAX", 16)  # so that an answer is not all
    a, b = machines["a"], machines["b"]
    a.put(prompt(11, 100))
    b.put(prompt(11, 70))
    look = directory_audit.DirectoryAudit(a.node, a.name, a.members, a.peers, a.links).run

    def owners() -> dict[str, dict[str, Any]]:
        return dict(look({})["owners"])

    def differ() -> tuple[int, int]:
        now = owners().values()
        return sum(each["missing"] for each in now), sum(each["stale"] for each in now)

    wait_until("both owners of every page know", lambda: entries(machines) == 340, 30)
    assert differ() == (0, 0) and sum(each["entries"] for each in owners().values()) == 200
    a.announcer.stop()  # nobody puts right what comes
    owner = a.announcer._plan._owners[b.name]
    assert owner.stream is not None
    wrong = np.arange(1, 41, dtype=np.uint64) << np.uint64(40)
    batch = AnnounceBatch(a.name, owner.stream, owner.next, wrong, np.full(40, TIERS.index(Tier.NVME), np.uint8))
    assert b.directory._owner.directory.apply(batch) == owner.next + 1
    assert differ() == (0, 40)
    b.directory._owner.directory.forget([a.name])
    lost = owners()[b.name]
    assert (lost["missing"], lost["stale"]) == (lost["entries"], 0) and lost["entries"] > 0
    b.stop_serving()
    assert owners()[b.name]["error"] and differ() == (0, 0)
    del a.members.servers[a.name]
    wait_until("a is no member", lambda: look({})["reason"], 30)


def test_pages_on_nvme_are_found_there(tmp_path: Path) -> None:
    members = Members()
    with kvstore.open(dram="8MiB", nvme=f"{tmp_path}/n:64MiB") as store, kvstore.open(dram="8MiB") as other:
        a, b = Machine("a", members, store), Machine("b", members, other)
        try:
            a.put(prompt(8, 30))
            store.evict(pages=10_000)
            wait_until("all is saved", lambda: a.cache.lookup(prompt(8, 31)).tiers == {Tier.NVME: 30}, 60)
            wait_until(
                "b is told",
                lambda: [set(each.tiers) for each in b.find(prompt(8, 30))] == [{TIERS.index(Tier.NVME)}],
                30,
            )
        finally:
            a.close()
            b.close()


def test_an_owner_that_has_no_connection_for_a_node_is_named_and_told_later(
    machines: dict[str, Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again later and later, not several times a second; and is told everything once it takes us again."""
    a, b = machines["a"], machines["b"]
    refused: list[float] = []
    full = threading.Event()

    def admits(hello: Hello, names: Sequence[str]) -> Caller:
        if hello.caller == a.name and full.is_set():
            refused.append(time.monotonic())
            raise TooManyCalls("128 connections are open")
        return Anyone()

    b.stop_serving()
    monkeypatch.setattr(f"{__name__}.admit", admits)
    full.set()
    b.serve()  # another process: a has no connection to it
    fault = wait_until("a says so", a.announcer.fault, 30)
    assert b.name in fault and "128 connections are open" in fault
    assert "128 connections" in a.announcer.status()["failing"][b.name]["error"]
    wait_until("it is tried a few times", lambda: len(refused) >= 4, 30)
    assert refused[3] - refused[0] > 1.0, "20 tries a second before"
    a.put(prompt(5, 20))
    full.clear()
    wait_until("it is told", lambda: not a.announcer.fault() and not a.announcer.status()["queued"], 30)
    wait_until("b lists the pages of a", lambda: len(b.directory._owner.directory.entries_of(a.name, 0, 100)), 30)
    (name, age_s, failures) = a.announcer.ages()[0]
    assert name == "announcing" and age_s < 30 and failures >= 4
