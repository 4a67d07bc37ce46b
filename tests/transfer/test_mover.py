"""What moves pages goes on with the next transport where one fails, and measures aside which is faster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore.cluster.page_mover import PageMover
from kvstore.cluster.peer_links import PeerLinks, PoolNode
from kvstore.cluster.transport import LateBytes, PlaceHolder, Places, PullResult, TransportKind
from kvstore.errors import KVStoreError, NodeUnavailable, PermissionDenied
from kvstore.model.replica import FrameClass, Tier
from kvstore.wire.data import ChainQuery, ReadRequest
from tests.helpers.content import LARGE, chain
from tests.helpers.processes import wait_until

PAGES = 40
PEER = PoolNode("n", "process", "", (), transports=("tcp", "other"))
SHAPE = FrameClass(LARGE.page_bytes, LARGE.page_tokens, LARGE.layers)
REQUEST = ReadRequest(ChainQuery(LARGE.fingerprint, "", "", SHAPE, True), chain(1, PAGES, LARGE), 0, LARGE.page_bytes)


class Told:
    """A transport that brings what it is told to, and fills places with its number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pages = PAGES
        self.took_s = 0.0
        self.fails: KVStoreError | None = None
        self.read_by: list[str] = []
        self.closed = False

    def read(
        self,
        peer: PoolNode,
        request: ReadRequest,
        places: Places,
        deadline_s: float,
        silence_s: float,
        held: PlaceHolder | None = None,
        second: PoolNode | None = None,
    ) -> PullResult:
        self.read_by.append(threading.current_thread().name)
        time.sleep(self.took_s)
        for place in places:
            place[:] = self.number
        if self.fails is not None:
            raise self.fails
        pages = min(self.pages, len(request.keys))
        return PullResult(pages, "" if pages == len(request.keys) else "absent", {Tier.DRAM: pages}, pages)

    def close(self) -> None:
        self.closed = True


class Moving:
    """A mover with two transports: tcp, and another one of which nothing is known."""

    def __init__(self, other_is: float = 0.0, missing: str = "") -> None:
        self.tcp, self.other = Told(1), Told(2)
        kinds = {
            "tcp": TransportKind(lambda links: self.tcp, lambda: "", bytes_per_s=2e9),
            "other": TransportKind(lambda links: self.other, lambda: missing, bytes_per_s=other_is),
        }
        self.links = PeerLinks("pool", "test")
        self.mover = PageMover(kinds, self.links)
        self.rows = np.zeros((PAGES, LARGE.page_bytes), np.uint8)

    def read(self, peer: PoolNode = PEER) -> int:
        """By which transport the pages came."""
        self.rows[:] = 0
        until_s = time.monotonic() + 10.0
        assert self.mover.read(peer, REQUEST, self.rows, until_s, 1.0).pages == PAGES
        return int(self.rows[0, 0])

    def close(self) -> None:
        self.mover.close()
        self.links.close()


@pytest.fixture
def moving() -> Iterator[Callable[..., Moving]]:
    made: list[Moving] = []

    def make(other_is: float = 0.0, missing: str = "") -> Moving:
        made.append(Moving(other_is, missing))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_faster_transport_is_found_aside_and_taken(moving: Callable[..., Moving]) -> None:
    found = moving()
    found.tcp.took_s = 0.05
    assert found.read() == 1
    wait_until("the other one is taken", lambda: found.read() == 2)
    assert set(found.other.read_by[:2]) == {"kvstore-measure"}, "nobody waits for what is measured"


def test_where_one_fails_the_next_brings_the_pages_and_it_is_left_out(moving: Callable[..., Moving]) -> None:
    found = moving(other_is=9e9)
    found.other.fails = NodeUnavailable("gone")
    assert [found.read(), found.read()] == [1, 1]
    assert len(found.other.read_by) == 1


def test_what_is_not_here_or_not_offered_there_is_not_tried(moving: Callable[..., Moving]) -> None:
    absent, alone = moving(other_is=9e9, missing="not installed"), moving(other_is=9e9)
    assert absent.read() == 1 and not absent.other.read_by
    assert alone.read(PoolNode("n", "p", "", ())) == 1 and not alone.other.read_by
    assert alone.read(PoolNode("n", "q", "", (), transports=("other",))) == 2


@pytest.mark.parametrize("error", [PermissionDenied("not yours"), LateBytes("may land")])
def test_what_no_other_transport_cures_is_told_at_once(moving: Callable[..., Moving], error: KVStoreError) -> None:
    """Into places where bytes may land late, nobody else may bring pages."""
    found = moving(other_is=9e9)
    found.other.fails = error
    with pytest.raises(type(error)):
        found.read()
    assert not found.tcp.read_by
