"""Reads from several nodes that have the same pages: at once, and from a second one if the first one is late."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client.local import peer_reads
from kvstore.client.local.peer_reads import PeerReader, TimeBudget
from kvstore.cluster import peer_links
from kvstore.cluster.data_listener import Server
from kvstore.cluster.lookup_plan import Stretch
from kvstore.cluster.peer_links import PeerLinks, PoolNode, PoolView
from kvstore.cluster.transport import DELAYS_MIN, HEDGES_CREDIT_MAX, HEDGES_PART, Hedges, TcpTransport
from kvstore.errors import NodeUnavailable
from kvstore.model.replica import FrameClass, Tier
from kvstore.server.identities import LOCAL
from kvstore.shm.folder import NodeFolder
from kvstore.wire.data import ChainQuery, FrameKind, ReadRequest, pack_end, pack_range, sums_of, unpack_read
from tests.helpers.content import SMALL, chain, contents, first_wrong

PAGES = 64
LATE_S = 30.0
CHAIN = ChainQuery(SMALL.fingerprint, "", "", FrameClass(SMALL.page_bytes, SMALL.page_tokens, SMALL.layers), True)


class Source:
    """A data server with all pages of chain 1.

    Attributes:
        delay_s: pause before a reply.
        page_s: pause before each page.
        pages_max: pages after which it is gone.
        sent: pages that it has sent.
        requests: how often it was asked.
    """

    def __init__(self, name: str) -> None:
        self.delay_s = self.page_s = 0.0
        self.pages_max = 1 << 30
        self.sent = self.requests = 0
        self._places = {link: page for page, link in enumerate(chain(1, PAGES).links)}
        self._content = contents(chain(1, PAGES))
        self.server = Server(name, {FrameKind.READ: self.read}, lambda hello, names: LOCAL)
        self.peer = PoolNode(name, self.server.process, "0", (self.server.start("127.0.0.1", 0),))

    def read(self, exchange: Any, body: memoryview) -> None:
        request = unpack_read(body)
        self.requests += 1
        time.sleep(self.delay_s)
        for number, link in enumerate(request.keys.links):
            time.sleep(self.page_s)
            if self.sent >= self.pages_max:
                raise NodeUnavailable("it is gone")
            page = self._content[self._places[link]][None]
            self.sent += 1
            exchange.reply(FrameKind.RANGE, pack_range(number, Tier.DRAM, sums_of(page, request.pieces)), page.data)
        exchange.reply(FrameKind.END, pack_end(len(request.keys), ""))


@pytest.fixture
def sources() -> Iterator[list[Source]]:
    with ExitStack() as opened:
        made = [Source(name) for name in "pqr"]
        for each in made:
            opened.callback(each.server.stop)
        yield made


class Reader(PeerReader):
    """All nodes have all pages."""

    def find(
        self, chain: Any, keys: Any, pages: int, without: Collection[str] = (), budget: TimeBudget | None = None
    ) -> list[Stretch]:
        view = self._peers.look()
        assert view is not None
        self._connect(view)
        rest = sorted(set(view.peers) - set(without) - {view.node})
        pages = len(keys) - pages
        return [Stretch(rest[0], 0, pages, bytes(pages), tuple(rest[1:]))] if rest else []


@pytest.fixture
def reader(tmp_path: Path, sources: list[Source]) -> Iterator[Reader]:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    peers = {"n": PoolNode("n", "1", "0"), **{each.peer.name: each.peer for each in sources[:2]}}
    peer_links.write(folder, PoolView("pool", "n", 0.0, peers))
    made = Reader(folder.path)
    yield made
    made.close()


@pytest.fixture
def striped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts. The speeds are measured wrongly: they are equal."""
    monkeypatch.setattr(peer_reads, "STRIPE_BYTES", 2 * SMALL.page_bytes)
    monkeypatch.setattr(peer_reads, "STRIPE_BYTES_MIN", 8 * SMALL.page_bytes)
    monkeypatch.setattr(peer_reads.PageMover, "speed", lambda self, peer: 1e9)


def get(reader: Reader) -> tuple[peer_reads.FetchResult, float]:
    """Pages that arrive are right."""
    rows = np.zeros((PAGES, SMALL.page_bytes), np.uint8)
    began_s = time.monotonic()
    result = reader.read(CHAIN, chain(1, PAGES), rows, 0, TimeBudget(LATE_S))
    took_s = time.monotonic() - began_s
    assert first_wrong(rows[: result.pages], contents(chain(1, PAGES))[: result.pages]) == ""
    return result, took_s


@pytest.mark.usefixtures("striped")
def test_two_nodes_send_parts_in_the_ratio_of_their_speeds(reader: Reader, sources: list[Source]) -> None:
    sources[0].page_s, sources[1].page_s = 0.005, 0.015
    result, took_s = get(reader)
    assert result.pages == PAGES and result.nodes == {"p": sources[0].sent, "q": sources[1].sent}
    assert result.tiers == {Tier.DRAM: PAGES}
    assert 1.5 * sources[1].sent < sources[0].sent < PAGES
    alone_s = PAGES * sources[0].page_s
    assert took_s < 1.2 * alone_s, "the slower one does not hold the faster one up"


@pytest.mark.usefixtures("striped")
def test_a_node_that_fails_in_the_middle_costs_no_page(reader: Reader, sources: list[Source]) -> None:
    sources[0].page_s = sources[1].page_s = 0.002
    sources[1].pages_max = 10
    result, _ = get(reader)
    assert result.pages == PAGES and result.nodes.total() == PAGES


@pytest.mark.parametrize("speed", [0.0, 2 * peer_reads.STRIPE_SPEED_MAX, peer_reads.RATE_MIN])
def test_one_node_is_read_where_two_are_no_gain(
    reader: Reader, sources: list[Source], monkeypatch: pytest.MonkeyPatch, speed: float
) -> None:
    """Its speed is unknown; this process is the limit; or the link of this machine is, which two would share."""
    monkeypatch.setattr(peer_reads, "STRIPE_BYTES_MIN", 8 * SMALL.page_bytes)
    monkeypatch.setattr(peer_reads.PageMover, "speed", lambda self, peer: speed)
    assert get(reader)[0].nodes == {"p": PAGES}
    assert not sources[1].requests


def test_small_reads_come_from_one_node(reader: Reader, sources: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_reads.PageMover, "speed", lambda self, peer: 1e9)
    assert get(reader)[0].nodes == {"p": PAGES}
    assert not sources[1].requests


class Reading:
    """A transport that reads two pages of ``sources[0]``, and may ask ``sources[1]``."""

    def __init__(self, sources: list[Source]) -> None:
        self.links = PeerLinks("pool", "test")
        self.transport = TcpTransport(self.links)
        self._peers = [each.peer for each in sources]

    def read(self) -> float:
        """Read, and return the seconds. The pages are right."""
        keys, rows = chain(1, 2), np.zeros((2, SMALL.page_bytes), np.uint8)
        request, began_s = ReadRequest(CHAIN, keys, 0, SMALL.page_bytes), time.monotonic()
        result = self.transport.read(self._peers[0], request, rows, began_s + LATE_S, 5.0, second=self._peers[1])
        assert result.pages == 2 and first_wrong(rows, contents(keys)) == ""
        return time.monotonic() - began_s


def test_a_late_node_costs_a_second_request_to_another_one(sources: list[Source]) -> None:
    reading = Reading(sources)
    for _ in range(2 * DELAYS_MIN):
        reading.read()
    before = sources[1].requests
    sources[0].delay_s = 2.0
    assert reading.read() < 1.5 and sources[1].requests == before + 1
    sources[0].delay_s = 0.0
    reading.read()
    reading.links.close()


def test_if_the_second_node_fails_the_first_one_is_read(sources: list[Source]) -> None:
    reading = Reading(sources)
    for _ in range(2 * DELAYS_MIN):
        reading.read()
    sources[0].delay_s, sources[1].pages_max = 0.3, sources[1].sent
    assert reading.read() >= 0.3
    sources[1].server.stop()
    reading.read()
    reading.links.close()


def test_second_requests_are_a_few_percent(sources: list[Source]) -> None:
    """Also if all replies are later than they usually were."""
    hedges, taken, requests = Hedges(), 0, 2000
    assert hedges.wait_s("p") is None
    for number in range(requests):
        wait_s = hedges.wait_s("p")
        taken += wait_s is not None and 0.001 * number > wait_s and hedges.take()
        hedges.note("p", 0.001 * number)
    assert 0 < taken <= HEDGES_CREDIT_MAX + HEDGES_PART * requests
