"""OBJECTS: values of a node read over a data connection, by a client that shares no memory with it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.client.local.node import LocalNode
from kvstore.client.local.object_batches import ObjectsPut
from kvstore.client.local.objects import bury
from kvstore.client.local.peer_reads import FetchHistory, TimeBudget
from kvstore.client.local.pool_objects import PoolObjects
from kvstore.client.value_buffers import Scattered
from kvstore.cluster.data_connection import Caller, DataConnection
from kvstore.cluster.data_listener import Server
from kvstore.errors import InvalidRequest, KVStoreError, PermissionDenied
from kvstore.limits import ThreadShares
from kvstore.model.objects import NO_GROUP, key_hash, object_root, stamp_of
from kvstore.model.replica import Status
from kvstore.model.tombstones import Tombstone
from kvstore.node.cluster.object_handlers import ForgetHandler, ObjectsHandler
from kvstore.server.identities import Identity
from kvstore.wire import object_messages
from kvstore.wire.data import FrameKind, Hello, Namespace, WireError
from kvstore.wire.object_messages import (
    NamesState,
    ObjectFacts,
    ObjectPart,
    ObjectsReply,
    ObjectsRequest,
    pack_bury,
    pack_forgotten,
    pack_heads,
    pack_keys,
    pack_names,
    pack_parts,
    unpack_bury,
    unpack_forgotten,
    unpack_heads,
    unpack_keys,
    unpack_names,
    unpack_objects,
)
from tests.helpers.inside import node_of
from tests.helpers.processes import wait_until
from tests.helpers.workers.objects import value_of

FUZZ_S = float(os.environ.get("KVSTORE_TEST_FUZZ_S", "4")) / 8
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
LATE_S = 30.0
SIZES = (0, 5, 4096, 5000, 300_000, 2_500_000)
NAMES = [b"value %d" % size for size in SIZES]
VALUES = [np.frombuffer(value_of(number, size), np.uint8) for number, size in enumerate(SIZES)]


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    return Identity("tenant", frozenset({"", "ours"}))


class OneNode:
    """What ``PoolObjects`` asks of a ``PeerReader``: one other node, which is believed to have every object."""

    has_peers = True
    nodes = ("n",)
    history = FetchHistory(None)

    def __init__(self, address: str) -> None:
        self.connection = DataConnection.open(address, Hello(), deadline_s=time.monotonic() + LATE_S, silence_s=LATE_S)
        self.refused: list[KVStoreError] = []

    def find_objects(
        self,
        namespace: Namespace,
        keys: list[bytes],
        without: Collection[str],
        budget: TimeBudget,
        fresh: bool = False,
    ) -> list[list[str]]:
        return [[] if without else ["n"] for _ in keys]

    def owners(self, keys: list[bytes]) -> list[list[str]]:
        return [[] for _ in keys]

    def call(self, node: str, deadline_s: float, silence_s: float, use: Any) -> Any:
        try:
            return use(self.connection)
        except KVStoreError as error:
            self.refused.append(error)
            raise


class Remote:
    """A node's objects over a data connection. Its server is in this process, and maps the node as another would."""

    def __init__(self, store: Store) -> None:
        self.node = LocalNode(node_of(store).folder.path, timeout_s=2.0)
        self.kept: list[Tombstone] = []
        turns = ThreadShares("turns", "turns", 1)
        forget = ForgetHandler(node_of(store), lambda exchange, tombstones: self.kept.extend(tombstones), turns)
        handlers = {FrameKind.OBJECTS: ObjectsHandler(self.node, turns), FrameKind.FORGET: forget}
        self.server = Server("n", handlers, admit)
        self.peer = OneNode(self.server.start("127.0.0.1", 0))
        self.pool = PoolObjects(self.peer)  # type: ignore[arg-type]

    def read(self, names: Sequence[bytes], salt: str = "") -> list[bytes | None]:
        targets: dict[int, Scattered] = {}

        def target_of(position: int, facts: ObjectFacts) -> Scattered:
            targets[position] = Scattered([np.zeros(facts.value_bytes, np.uint8)])
            return targets[position]

        found = self.pool.read(salt, names, [1 << 30] * len(names), target_of)
        return [targets[at].parts[0].tobytes() if its is not None else None for at, its in enumerate(found)]

    def close(self) -> None:
        self.peer.connection.close()
        self.server.stop()
        self.node.close()


def test_members_are_read_while_their_group_is_complete(store: Store, remote: Remote) -> None:
    group = {"group": "g", "count": 3}
    sizes = {"a": 5, "b": 300_000, "c": 5000}
    values = {name: os.urandom(size) for name, size in sizes.items()}
    names = [name.encode() for name in sizes]
    assert store.put_many(["a", "b"], [values["a"], values["b"]], **group) == [True, True]
    assert remote.read(names) == remote.pool.find("", names) == [None] * 3
    assert store.put("c", values["c"], **group)
    assert remote.read(names) == list(values.values())
    facts = remote.pool.find("", names)
    assert len({its.group for its in facts if its is not None}) == 1 and facts[0].group.members == 3
    assert store.delete("c") == 1 and remote.read(names) == [None] * 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with kvstore.open(dram="16MiB", nvme=f"{tmp_path}/n:64MiB") as store:
        yield store


@pytest.fixture
def remote(store: Store) -> Iterator[Remote]:
    remote = Remote(store)
    yield remote
    remote.close()


def test_values_are_read_from_memory_and_from_nvme(store: Store, remote: Remote) -> None:
    store.put_many([name.decode() for name in NAMES], VALUES)
    wanted = [*NAMES, b"none"]
    expected = [*(value.tobytes() for value in VALUES), None]
    assert remote.read(wanted) == expected
    facts = remote.pool.find("", wanted)
    assert [its.value_bytes if its is not None else None for its in facts] == [*SIZES, None]
    store.evict(pages=10_000)
    wait_until("all is on NVMe alone", lambda: store.stats()["tiers"]["nvme"]["pages"] > len(SIZES), 60)
    assert remote.read(wanted) == expected


def test_another_salt_is_refused_and_an_unknown_one_is_a_miss(store: Store, remote: Remote) -> None:
    store.put("k", VALUES[3], salt="theirs")
    store.put("k", VALUES[2], salt="ours")
    assert remote.read([b"k"], "theirs") == [None]
    assert isinstance(remote.peer.refused.pop(), PermissionDenied)
    assert remote.read([b"k"], "ours") == [VALUES[2].tobytes()] and remote.read([b"k"]) == [None]


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_value_that_is_replaced_while_it_is_sent_is_a_miss(store: Store, remote: Remote, number: int) -> None:
    key = NAMES[number].decode()
    store.put(key, VALUES[number])
    connection, request = remote.peer.connection, ObjectsRequest("", [NAMES[number]], [1 << 30])
    sent = connection.send(FrameKind.OBJECTS, request.pack(), deadline_s=time.monotonic() + LATE_S)
    mixture = 0
    for _ in range(20):
        store.put(key, np.zeros(SIZES[number], np.uint8), replace=True)
        store.put(key, VALUES[number], replace=True)
    for kind in (FrameKind.HEADS, FrameKind.PARTS, FrameKind.VALID):
        head = connection.receive_head(sent, kind, FrameKind.VALID, deadline_s=time.monotonic() + LATE_S)
        body = connection.receive(head.body_bytes, deadline_s=time.monotonic() + LATE_S)
        if head.kind is FrameKind.VALID:
            break
        if head.kind is FrameKind.PARTS:
            value = np.frombuffer(body, np.uint8)[-SIZES[number] :]
            mixture = int(not (np.array_equal(value, VALUES[number]) or not value.any()))
    assert body[0] == 0 or not mixture
    assert remote.read([NAMES[number]]) == [VALUES[number].tobytes()]


def test_wrong_bytes_are_a_miss(store: Store, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put_many([name.decode() for name in NAMES], VALUES)
    monkeypatch.setattr("kvstore.node.cluster.object_handlers._stored_sum", lambda *page: 1)
    assert remote.read(NAMES) == [None] * len(NAMES)
    monkeypatch.undo()
    assert remote.read(NAMES[:5]) == [value.tobytes() for value in VALUES[:5]]


def tombstone(name: bytes, stamp: int, salt: str = "") -> Tombstone:
    root = object_root(salt)
    return Tombstone(key_hash(root, name), root, stamp, time.monotonic_ns() + 10**12)


def test_a_tombstone_deletes_older_values_and_refuses_older_copies(store: Store, remote: Remote) -> None:
    store.put_many([name.decode() for name in NAMES], VALUES)
    keys, local = [name.decode() for name in NAMES], node_of(store)
    facts = remote.pool.find("", NAMES)
    stamps = [stamp_of(its.nonce) for its in facts if its is not None]
    assert bury(local, [tombstone(NAMES[0], stamps[0]), tombstone(b"none", 5)]) == bytes([Status.STALE] * 2)
    assert bury(local, [tombstone(NAMES[1], stamps[1] + 1, "other")]) == bytes([Status.STALE])
    assert all(store.contains(keys)), "the same value, and another salt"
    later = max(stamps) + 10**15
    assert bury(local, [tombstone(name, later) for name in NAMES]) == bytes([Status.OK] * len(NAMES))
    assert not any(store.contains(keys))
    old = [its.nonce for its in facts if its is not None]
    sources = [Scattered([value]) for value in VALUES]
    put = ObjectsPut(local.writable(), object_root(""), NAMES, sources, False, True, [NO_GROUP] * len(NAMES), old)
    assert put.result() == [False] * len(NAMES) and not any(store.contains(keys))
    assert store.put_many(keys, VALUES) == [True] * len(NAMES), "a new put is later than every tombstone of the node"
    now = [its for its in remote.pool.find("", NAMES) if its is not None]
    assert min(stamp_of(its.nonce) for its in now) > later
    assert store.put_many(keys, VALUES, replace=True) == [True] * len(NAMES)
    assert remote.read(NAMES) == [value.tobytes() for value in VALUES]


def test_values_are_forgotten_over_a_data_connection(store: Store, remote: Remote) -> None:
    store.put_many(["a", "b"], VALUES[:2])
    ask = remote.pool.forget("", [b"a", b"none"], [0, 0])
    assert ask[0][1] > 0 and ask == [(False, ask[0][1]), (False, 0)]
    assert remote.pool.forget("", [b"a", b"b"], [ask[0][1] + 10**6, 1]) == [(True, 0), (False, ask[0][1])]
    assert store.contains(["a", "b"]) == [False, True]
    assert [each.key for each in remote.kept] == [key_hash(object_root(""), name) for name in (b"a", b"b")]
    assert remote.pool.forget("theirs", [b"b"], [5]) == [(False, 0)]
    assert isinstance(remote.peer.refused.pop(), PermissionDenied)
    assert remote.pool.forget("", [b"b"], [time.time_ns() + 10**13]) == [(False, 0)]
    assert "must not be in the future" in str(remote.peer.refused.pop()) and store.contains("b")


def test_requests_and_replies_come_out_as_they_went_in() -> None:
    request = ObjectsRequest("sält", NAMES, list(range(len(NAMES))))
    assert unpack_objects(memoryview(request.pack())) == request
    facts = [ObjectFacts(5, 4096, bytes(range(12))), None]
    assert unpack_heads(pack_heads(facts), 2) == facts
    assert unpack_forgotten(pack_forgotten([True, False], [0, 7]), 2) == [(True, 0), (False, 7)]
    assert unpack_keys(memoryview(pack_keys("sält", b"k"))) == ("sält", b"k")
    many = [b"%01000d" % number for number in range(3000)]
    bodies = [unpack_names(body) for body in pack_names(many, NamesState.CUT)]
    assert [name for names, _ in bodies for name in names] == many
    assert [state for _, state in bodies] == [NamesState.CONTINUES, NamesState.CONTINUES, NamesState.CUT]
    tombstones = [Tombstone(bytes(16), bytes(range(16)), 9, 5 * 10**9)]
    assert unpack_bury(memoryview(pack_bury("n", 3, tombstones, 0)), 0) == ("n", 3, tombstones)
    assert object_messages.objects_per_request([b"k" * 1000] * 2000) * 1010 < 1 << 20
    assert object_messages.objects_per_request([b"k"] * 5000) == object_messages.OBJECTS_MAX


def test_random_bytes_are_refused_and_never_more() -> None:
    """Seeded; valid messages with some bytes changed."""
    chance, until_s = random.Random(SEED), time.monotonic() + FUZZ_S
    request = ObjectsRequest("salt", NAMES, [1 << 20] * len(NAMES))
    facts = [ObjectFacts(size, 4096, bytes(12)) for size in SIZES]
    parts = pack_parts([ObjectPart(at, 0, its.pages) for at, its in enumerate(facts)], [0])[:-4]
    tombstones = [Tombstone(bytes(16), bytes(16), 9, 5 * 10**9)] * 3
    bodies = [request.pack(), pack_heads(facts), parts, pack_bury("n", 3, tombstones, 0)]
    bodies += [pack_keys("salt", b"prefix"), *pack_names(NAMES, NamesState.COMPLETE)]
    refused = 0
    while time.monotonic() < until_s:
        packed, heads, raw, buried, keys, names = (bytearray(body) for body in bodies)
        for body in (packed, heads, raw, buried, keys, names):
            for _ in range(chance.randrange(4)):
                body[chance.randrange(len(body))] = chance.randrange(256)
            if chance.random() < 0.3:
                del body[chance.randrange(len(body) + 1) :]
        try:
            found = unpack_objects(memoryview(packed))
            assert len(found.names) <= object_messages.OBJECTS_MAX and all(found.names)
        except InvalidRequest:
            refused += 1
        try:
            reply = ObjectsReply(request, unpack_heads(heads, len(SIZES)))
            size = object_messages.parts_bytes(raw[: object_messages.PARTS_HEAD_BYTES].ljust(4, b"\0"))
            found_parts = object_messages.unpack_parts(raw[4 : 4 + size].ljust(size, b"\0"))
            reply.take(found_parts, chance.randrange(1 << 32))
        except WireError:
            refused += 1
        for unpack, *arguments in (
            (unpack_bury, memoryview(buried), 0),
            (unpack_forgotten, buried, 6),
            (unpack_keys, memoryview(keys)),
            (unpack_names, names),
        ):
            try:
                unpack(*arguments)
            except (WireError, InvalidRequest):
                refused += 1
    assert refused > 100, f"KVSTORE_TEST_SEED={SEED}"
