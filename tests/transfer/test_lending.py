"""Loans as messages: they come out as they went in, what makes no sense is refused; strangers are lent nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.client.local.node import LocalNode
from kvstore.errors import KVStoreError, PermissionDenied, Unavailable
from kvstore.model.layout import PAGE_BYTES_MAX
from kvstore.model.replica import FrameClass
from kvstore.node.cluster.page_handlers import LendHandler, ReadHandler
from kvstore.server.identities import Identity
from kvstore.wire.data import (
    ChainQuery,
    FrameKind,
    LentRun,
    Loan,
    ReadRequest,
    WireError,
    pack_lent,
    pack_return,
    unpack_end,
    unpack_lent,
    unpack_return,
)
from tests.helpers.content import SMALL, chain
from tests.helpers.memory_transport import MemoryAgent, MemoryConnection, MemoryOwner
from tests.helpers.nvme.nodes import NODE, configure
from tests.helpers.processes import Machine, put, wait_until

SHAPE = FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers)
WANTED = ChainQuery(SMALL.fingerprint, "", "", SHAPE, True)
REQUEST = ReadRequest(WANTED, chain(1, 5), 0, SMALL.page_bytes)
TRIES = 2000
LOAN = Loan(
    7,
    9,
    [LentRun(1 << 40, 1 << 14, 64, 3, 10, 2), LentRun(1 << 41, 1 << 14, 64, 4, 0, 1)],
    np.array([1, 2, 3], np.uint64),
    np.arange(12, dtype=np.uint32).reshape(3, 4),
    "absent",
)


def test_what_makes_no_sense_is_refused() -> None:
    """Seeded: bits that are flipped and ends that are cut are refused, or give something of the right shape."""
    chance, refused = random.Random(5), 0
    for _ in range(TRIES):
        for good in (pack_lent(LOAN), pack_return(LOAN)):
            body = bytearray(good)
            body[chance.randrange(min(len(body), 48))] ^= 1 << chance.randrange(8)
            if chance.random() < 0.3:
                del body[chance.randrange(len(body)) :]
            try:
                given = good == pack_return(LOAN)
                loan = unpack_return(memoryview(body)) if given else unpack_lent(body, REQUEST)
            except WireError:
                refused += 1
            else:
                assert loan.pages == sum(run.pages for run in loan.runs) <= len(REQUEST.keys)
    assert refused > TRIES / 10


class Lending:
    """A node's handler of loans, asked by ``caller``."""

    def __init__(self, machine: Machine, caller: Identity) -> None:
        self.node = LocalNode(machine.folder("n"), timeout_s=10.0)
        handlers = LendHandler(self.node, lambda: MemoryAgent("owner")).handlers
        self.to = MemoryConnection(MemoryOwner(handlers), 1.0, caller)

    def call(self, kind: FrameKind, *body: bytes, reply: FrameKind) -> bytearray:
        return self.to.call(kind, *body, reply=reply, deadline_s=0.0)


@pytest.fixture
def lending(machine: Machine) -> Iterator[Lending]:
    machine.serve("n", dram="16MiB")
    put(machine.connect("n"), 1, 5)
    found = Lending(machine, Identity("node", frozenset({""}), operator=True))
    yield found
    found.node.close()


def test_who_is_no_operator_is_lent_nothing(machine: Machine, lending: Lending) -> None:
    """An agent reads all of a node's memory, whatever salt pages are under."""
    stranger = Lending(machine, Identity("tenant", frozenset({""})))
    asked = (
        (FrameKind.ATTACH, [], FrameKind.ATTACHED),
        (FrameKind.LEND, REQUEST.pack(), FrameKind.LENT),
        (FrameKind.RETURN, [pack_return(LOAN)], FrameKind.RETURNED),
    )
    try:
        for kind, body, reply in asked:
            with pytest.raises(Unavailable, match="only nodes and operators"):
                stranger.call(kind, *body, reply=reply)
        with pytest.raises(PermissionDenied):
            LendHandler(stranger.node, lambda: MemoryAgent("x")).attach(stranger.to, memoryview(b""))
    finally:
        stranger.node.close()


def test_what_was_not_lent_cannot_be_given_back(lending: Lending) -> None:
    """Addresses that there are not, and generations that were never there: not one page holds."""
    good = unpack_lent(lending.call(FrameKind.LEND, *REQUEST.pack(), reply=FrameKind.LENT), REQUEST)
    assert good.pages == 5
    run = good.runs[0]
    for runs, words in (
        ([run._replace(extent=1 << 20)], good.words),
        ([run._replace(frame=run.frames - 1)], good.words),
        ([run], good.words + np.uint64(256)),
    ):
        body = pack_return(Loan(0, 1, runs, words))
        assert unpack_end(lending.call(FrameKind.RETURN, body, reply=FrameKind.RETURNED), 5) == (0, "generation")
    assert unpack_end(lending.call(FrameKind.RETURN, pack_return(good), reply=FrameKind.RETURNED), 5) == (5, "")


def test_no_memory_is_made_for_pages_of_a_size_that_somebody_claims(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages on NVMe pass through memory of the data server, as large as the class of their frames."""
    machine.serve(NODE, **configure(machine, NODE))
    store = machine.connect(NODE)
    for seed in range(4):
        put(store, seed, 60)
    wait_until("pages are saved", lambda: store.stats()["tiers"]["nvme"]["pages"] >= 120)
    store.evict(pages=1 << 20, tier="dram")
    node = LocalNode(machine.folder(NODE), timeout_s=10.0)
    made: list[object] = []
    monkeypatch.setattr("kvstore.node.cluster.page_handlers.empty", lambda shape: made.append(shape))
    try:
        to = MemoryConnection(MemoryOwner({FrameKind.READ: ReadHandler(node)}), 1.0)
        shape = FrameClass(PAGE_BYTES_MAX, SMALL.page_tokens, SMALL.layers)
        huge = ReadRequest(ChainQuery(SMALL.fingerprint, "", "", shape, True), chain(1, 5), 0, PAGE_BYTES_MAX)
        number = to.send(FrameKind.READ, *huge.pack(), deadline_s=0.0)
        head = to.receive_head(number, FrameKind.END, deadline_s=0.0)
        assert unpack_end(to.receive(head.body_bytes, deadline_s=0.0), 0)[0] == 0 and not made
    except KVStoreError as error:
        raise AssertionError("it is a miss") from error
    finally:
        node.close()
