"""READ: pages of a node read by somebody who shares no memory with it. What arrives was proven at both ends."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.client.local.node import LocalNode
from kvstore.cluster.data_connection import Caller, DataConnection
from kvstore.cluster.data_listener import Server
from kvstore.cluster.transport import PullResult, pull, receive_pages
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, Tier
from kvstore.node.cluster.page_handlers import ReadHandler
from kvstore.server.identities import Identity
from kvstore.wire import data
from kvstore.wire.data import ChainQuery, FrameKind, Hello, ReadRequest, WireError, unpack_read
from tests.helpers.content import SMALL, chain, contents, first_wrong, prompt
from tests.helpers.inside import node_of
from tests.helpers.nvme.nodes import NODE, configure
from tests.helpers.processes import Machine, put, wait_until

FUZZ_S = float(os.environ.get("KVSTORE_TEST_FUZZ_S", "4")) / 4
SEED = int(os.environ.get("KVSTORE_TEST_SEED", "1"))
LATE_S = 30.0
CALLER = Identity("tenant", frozenset({"", "ours"}))


def admit(hello: Hello, names: Sequence[str]) -> Caller:
    return CALLER


class Reading:
    """A node's pages over a data connection. Its server lives here, and maps the node as another process would."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.node = LocalNode(machine.folder(name), timeout_s=2.0)
        self.server = Server(name, {FrameKind.READ: ReadHandler(self.node)}, admit)
        self.address = self.server.start("127.0.0.1", 0)
        self.connection = self.open()

    def open(self) -> DataConnection:
        return DataConnection.open(self.address, Hello(), deadline_s=time.monotonic() + LATE_S, silence_s=LATE_S)

    def pull(
        self, keys: Keys, layout: Layout = SMALL, part: tuple[int, int] | None = None, salt: str = ""
    ) -> tuple[PullResult, np.ndarray[Any, Any]]:
        offset, length = part or (0, layout.page_bytes)
        rows = np.zeros((len(keys), length), np.uint8)
        request = ReadRequest(chain_of(layout, salt), keys, offset, length)
        return pull(self.connection, request, rows, time.monotonic() + LATE_S), rows

    def close(self) -> None:
        self.connection.close()
        self.server.stop()
        self.node.close()


def chain_of(layout: Layout, salt: str = "") -> ChainQuery:
    shape = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
    return ChainQuery(layout.fingerprint, salt, "", shape, layout.attention == "full")


@pytest.fixture
def store(machine: Machine) -> Store:
    machine.serve("n", dram="64MiB")
    return machine.connect("n")


@pytest.fixture
def remote(machine: Machine, store: Store) -> Iterator[Reading]:
    found = Reading(machine, "n")
    yield found
    found.close()


def test_pages_of_another_salt_are_refused_and_unknown_ones_are_a_miss(remote: Reading, store: Store) -> None:
    put(store, 1, 5, salt="theirs")
    keys = chain(1, 5, salt="theirs")
    with pytest.raises(PermissionDenied, match="theirs"):
        remote.pull(keys, salt="theirs")
    found, _ = remote.pull(keys, salt="ours")  # the root is made by the node, of the salt that was named
    assert (found.pages, found.reason) == (0, "absent")
    assert remote.pull(chain(9, 5))[0].reason == "absent"


def test_media_in_a_page_are_part_of_what_it_is(remote: Reading, store: Store) -> None:
    cache, tokens = store.cache(SMALL), prompt(1, 3)
    media = [b"", b"cat", b""]
    keys = cache.keys(tokens[:-1], media)
    cache.put(keys, contents(keys))
    found, rows = remote.pull(keys)
    assert found.pages == 3 and first_wrong(rows, contents(keys)) == ""
    other = cache.keys(tokens[:-1], [b"", b"dog", b""])
    forged = Keys(keys.page_tokens, keys.root, keys.before, keys.links, keys.tokens, other.extras)
    assert remote.pull(forged)[0].pages == 1


def test_tokens_prove_a_page(remote: Reading, store: Store) -> None:
    """The hashes of a stored chain with the token ids of another one are no hit."""
    put(store, 1, 5)
    keys, tokens = chain(1, 5), chain(2, 5).tokens
    forged = Keys(keys.page_tokens, keys.root, keys.before, keys.links, tokens, None)
    found, rows = remote.pull(forged)
    assert (found.pages, found.reason) == (0, "identity") and not rows.any()


def test_pages_on_nvme_arrive(machine: Machine) -> None:
    """Also where some are in memory, and some on NVMe only."""
    machine.serve(NODE, **configure(machine, NODE, promote_after=255))  # so that no page moves while it is read
    store = machine.connect(NODE)
    for seed in range(4):
        put(store, seed, 60)
    wait_until("pages are saved", lambda: store.stats()["tiers"]["nvme"]["pages"] >= 120)
    remote = Reading(machine, NODE)
    try:
        tiers: dict[Tier, int] = {}
        for seed in range(4):
            keys = chain(seed, 60)
            found, rows = remote.pull(keys)
            assert first_wrong(rows[: found.pages], contents(keys)[: found.pages]) == ""
            tiers = {tier: tiers.get(tier, 0) + found.tiers.get(tier, 0) for tier in Tier}
            part, rows = remote.pull(keys, part=(5, 100))
            assert first_wrong(rows[: part.pages], contents(keys)[: part.pages, 5:105]) == ""
            assert part.pages >= found.pages > 0
        assert tiers[Tier.NVME] >= 60 and sum(tiers.values()) >= 120
    finally:
        remote.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"page_bytes": 0}, "page_bytes"),
        ({"page_tokens": 1 << 30}, "page_tokens"),
        ({"layers": 3}, "layers"),
        ({"pages": 1_000_000}, "pages"),
        ({"pages": 3}, "read"),
        ({"length": 0}, "length"),
        ({"offset": SMALL.page_bytes}, "offset"),
        ({"salt": 60_000}, "salt"),
        ({"adapter": 1}, "read"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_by_name(change: dict[str, int], field: str) -> None:
    names = ("fingerprint", "page_bytes", "page_tokens", "layers", "pages", "offset", "length", "flags", "zero")
    body = b"".join(ReadRequest(chain_of(SMALL), chain(1, 2), 0, SMALL.page_bytes).pack())
    fixed = data._FIXED
    values = dict(zip((*names, "salt", "adapter", "last"), fixed.unpack_from(body), strict=True)) | change
    with pytest.raises(InvalidRequest) as refused:
        unpack_read(memoryview(fixed.pack(*values.values()) + body[fixed.size :]))
    assert refused.value.field == field


def test_a_changed_request_is_refused_or_answered(remote: Reading, store: Store) -> None:
    """Seeded: what somebody may send on a connection that was welcomed harms neither it nor the node."""
    put(store, 1, 8)
    chance, until_s = random.Random(SEED), time.monotonic() + FUZZ_S
    good = b"".join(ReadRequest(chain_of(SMALL), chain(1, 8), 0, SMALL.page_bytes).pack())
    refused = answered = 0
    while time.monotonic() < until_s:
        body = bytearray(good)
        for _ in range(chance.randrange(1, 3)):
            size = len(body) if chance.random() < 0.5 else data._FIXED.size
            body[chance.randrange(size)] ^= 1 << chance.randrange(8)
        if chance.random() < 0.2:
            del body[chance.randrange(len(body)) :]
        try:
            kind = remote.connection.send(FrameKind.READ, body, deadline_s=time.monotonic() + LATE_S)
            request = unpack_read(memoryview(body))
            rows = np.zeros((len(request.keys), request.length), np.uint8)
            receive_pages(remote.connection, kind, request, rows, time.monotonic() + LATE_S)
            answered += 1
        except InvalidRequest:
            refused += 1
            with pytest.raises((InvalidRequest, WireError)):
                remote.connection.receive_head(kind, FrameKind.END, deadline_s=time.monotonic() + LATE_S)
        except PermissionDenied:
            refused += 1
    assert refused > 10 and answered > 10, f"KVSTORE_TEST_SEED={SEED}"
    assert remote.pull(chain(1, 8))[0].pages == 8
    assert node_of(store).writable() is not None
