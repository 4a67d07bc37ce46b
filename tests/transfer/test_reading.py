"""READ: pages of a node read by somebody who shares no memory with it. What arrives was proven at both ends."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import Store
from kvstore.client.local.node import LocalNode
from kvstore.cluster.data_connection import Caller, DataConnection
from kvstore.cluster.data_listener import Server
from kvstore.cluster.transport import CHECKSUM, Pulled, pull, receive_pages
from kvstore.errors import InvalidRequest, PermissionDenied
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys, root_key
from kvstore.model.replica import FrameClass, Tier
from kvstore.node.cluster.page_handlers import ReadHandler
from kvstore.server.identities import Identity
from kvstore.shm.counters import ONE_GET
from kvstore.wire import data
from kvstore.wire.data import FrameKind, Hello, ReadRequest, WantedChain, WireError, unpack_read
from tests.helpers.content import FEW, LARGE, MLA, SMALL, chain, contents, first_wrong, prompt
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
    ) -> tuple[Pulled, np.ndarray[Any, Any]]:
        offset, length = part or (0, layout.page_bytes)
        rows = np.zeros((len(keys), length), np.uint8)
        request = ReadRequest(chain_of(layout, salt), keys, offset, length)
        return pull(self.connection, request, rows, time.monotonic() + LATE_S), rows

    def close(self) -> None:
        self.connection.close()
        self.server.stop()
        self.node.close()


def chain_of(layout: Layout, salt: str = "") -> WantedChain:
    shape = FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)
    return WantedChain(layout.fingerprint, salt, "", shape, layout.attention == "full")


@pytest.fixture
def store(machine: Machine) -> Store:
    machine.serve("n", dram="64MiB")
    return machine.connect("n")


@pytest.fixture
def remote(machine: Machine, store: Store) -> Iterator[Reading]:
    found = Reading(machine, "n")
    yield found
    found.close()


@pytest.mark.parametrize("layout", [SMALL, LARGE, MLA, FEW], ids=lambda layout: layout.model)
def test_pages_arrive(remote: Reading, store: Store, layout: Layout) -> None:
    """Whole pages, whole layers and ranges that are of no layer; of pages that are there, and a tail that is not."""
    keys, want = chain(1, 40, layout), contents(chain(1, 40, layout), layout)
    put(store, 1, 33, layout)
    layer = layout.layer_bytes
    for part in [(0, layout.page_bytes), (layer, 2 * layer), (3, 5), (layer - 1, layer), (layout.page_bytes - 1, 1)]:
        found, rows = remote.pull(keys, layout, part)
        assert (found.pages, found.reason, found.tiers) == (33, "absent", {Tier.DRAM: 33})
        assert first_wrong(rows[:33], want[:33, part[0] : part[0] + part[1]]) == ""
        assert not rows[33:].any()
    found, rows = remote.pull(keys[20:30], layout)  # from the middle of a chain
    assert (found.pages, found.reason) == (10, "") and first_wrong(rows, want[20:30]) == ""


def test_gets_are_counted_without_an_end(remote: Reading, store: Store) -> None:
    """The word that counts them is carried before it is full."""
    put(store, 1, 5)
    keys, mapped = chain(1, 5), remote.node.mapped()
    assert mapped is not None and remote.pull(keys)[0].pages == 5
    row = mapped.counters.row(SMALL.page_bytes, SMALL.page_tokens)
    mapped.counters.words[row] = (1 << 64) - 2 * ONE_GET  # a second get does not fit
    for _ in range(3):
        assert remote.pull(keys)[0].pages == 5
    counts = mapped.counters.tally().counts
    assert (counts["gets"], counts["hit_dram"]) == ((1 << 24) - 2 + 3, 15)


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


def test_a_stopped_and_a_killed_daemon_change_nothing(machine: Machine, remote: Reading, store: Store) -> None:
    put(store, 1, 20)
    keys = chain(1, 20)
    assert remote.pull(keys)[0].pages == 20  # so that the daemon has taken them in
    daemon = machine.processes[0]
    daemon.stop()
    assert first_wrong(remote.pull(keys)[1], contents(keys)) == ""
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    found, rows = remote.pull(keys)
    assert found.pages == 20 and first_wrong(rows, contents(keys)) == ""


def test_a_flipped_bit_in_the_source_is_found_by_the_reader(remote: Reading, store: Store) -> None:
    put(store, 1, 20)
    keys = chain(1, 20)
    store.verify()  # which stamps
    mapped = remote.node.writable()
    address = mapped.index.find(Tier.DRAM, mapped.in_pool(keys).hashes[7])
    assert address is not None
    extent = mapped.dram.extent(address.extent)
    assert extent is not None
    extent.pages[address.frame, 1234] ^= 1
    found, rows = remote.pull(keys)
    assert (found.pages, found.reason) == (7, CHECKSUM)
    assert first_wrong(rows[:7], contents(keys)[:7]) == ""
    # Its descendants leave with it as soon as the daemon hears of it.
    assert not remote.connection.broken and remote.pull(keys[:7])[0].pages == 7


def test_a_page_that_changes_while_it_is_sent_does_not_count(
    remote: Reading, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """END says so, after the bytes have come."""
    put(store, 1, 20)
    keys, real = chain(1, 20), data.pack_range

    def replaced(first: int, tier: Tier, sums: Any) -> bytes:
        store.evict(keys=keys)
        return real(first, tier, sums)

    monkeypatch.setattr("kvstore.node.cluster.page_handlers.pack_range", replaced)
    found, _ = remote.pull(keys)
    assert (found.pages, found.reason, found.touched) == (0, "generation", 20)


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


def test_a_request_comes_out_as_it_went_in() -> None:
    keys = Keys.of(prompt(1, 4)[:-1], SMALL.page_tokens, root_key(SMALL, "s\u2603"), [b"a", b"", b"", b"b"])
    request = ReadRequest(chain_of(SMALL, "s\u2603"), keys, 7, 9)
    found = unpack_read(memoryview(b"".join(request.pack())))
    assert (found.chain, found.offset, found.length) == (request.chain, 7, 9)
    assert found.keys.identity_bytes == keys.identity_bytes


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
