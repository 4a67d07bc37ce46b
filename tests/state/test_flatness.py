"""What the directory costs a large pool, against a small one: messages are packed and counted, none is sent."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np

from kvstore.cluster.announce_plan import AnnouncePlan, Entries, pause_s
from kvstore.cluster.directory import Directory, Placement
from kvstore.cluster.directory_messages import pack_announce, pack_announced, pack_find, pack_found
from kvstore.cluster.lookup_plan import Search
from kvstore.model.prefix import fingerprints, spans_of
from kvstore.model.replica import KEY_BYTES
from kvstore.wire.data import HEAD, Namespace

PUTS_PER_S = 40  # of each node
PAGES = (8, 160)  # of a conversation, whose first page is everybody's
WHOSE = Namespace(bytes(KEY_BYTES), "tenant", "")
GETS = 3000


class CountedPool:
    """Nodes that tell each other what they put, and find it.

    Attributes:
        counts: puts and gets, messages and bytes of each.
        asked: messages by the owner that was asked.
    """

    def __init__(self, nodes: int, seed: int) -> None:
        self.draw, numbers = random.Random(seed), itertools.count(1)
        self.placement = Placement(f"node-{number:02}" for number in range(nodes))
        self.directories = {name: Directory(64 << 20) for name in self.placement.nodes}
        self.nodes = {name: AnnouncePlan(name, lambda: next(numbers)) for name in self.placement.nodes}
        self.first, self.chains = self.draw.randbytes(16), list[list[bytes]]()
        self.counts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        nothing = np.zeros(0, np.uint64)
        for its in self.nodes.values():
            its.members(self.placement.nodes)
            wanted = its.wanted()
            assert wanted is not None
            its.add_pages(wanted, Entries(nothing, nothing, np.zeros(0, np.uint8)))
            self._tell(its)
        self.counts.clear()

    def turn(self, puts_per_s: float) -> None:
        """Every node puts for as long as announcers wait, and tells."""
        for its in self.nodes.values():
            keys, spans = list[bytes](), list[int]()
            for _ in range(round(puts_per_s * pause_s(len(self.nodes)))):
                pages = self.draw.randrange(*PAGES)
                chain = [self.first, *(self.draw.randbytes(16) for _ in range(pages))]
                self.chains.append(chain)
                keys += chain[1:]  # the first one was told long ago
                spans += spans_of(chain, 0, 0)[1:]
                self.counts["puts"] += 1
            its.apply(Entries(np.array(spans, np.uint64), fingerprints(b"".join(keys)), np.ones(len(keys), np.uint8)))
            self._tell(its)

    def _tell(self, its: AnnouncePlan) -> None:
        for owner in its.owners:
            while (batch := its.batch(owner)) is not None:
                wanted = self.directories[owner].apply(batch)
                its.take_answer(owner, batch, wanted)
                self._count("put", pack_announce(batch, 0), pack_announced(wanted))

    def get(self) -> None:
        """A node looks for the pages of a conversation beyond the first one, which all nodes have."""
        keys = self.draw.choice(self.chains)
        search = Search(self.placement, keys, 1, self.placement.nodes, True, self.draw.randrange(1 << 20))
        while questions := search.ask(()):
            for each in questions:
                found = self.directories[each.owner].find(each.pages)
                search.take_answer(each, found)
                self._count("get", pack_find(WHOSE, each.pages, self.placement.number), pack_found(found))
                self.asked[each.owner] += 1
        self.counts["gets"] += 1
        assert sum(each.stop for each in search.result()) == len(keys) - 1

    def _count(self, what: str, *bodies: bytes) -> None:
        self.counts[f"{what} messages"] += len(bodies)
        self.counts[f"{what} bytes"] += sum(HEAD.size + len(body) for body in bodies)

    def per(self, what: str, unit: str) -> float:
        """Messages or bytes per put or get."""
        return self.counts[f"{what} {unit}"] / self.counts[f"{what}s"]


def pool_of(nodes: int, seed: int) -> CountedPool:
    """A pool of so many nodes after some puts and gets."""
    pool = CountedPool(nodes, seed)
    pool.turn(PUTS_PER_S)
    for _ in range(GETS):
        pool.get()
    return pool


def test_a_large_pool_costs_a_put_and_a_get_little_more() -> None:
    """Conversations that share their first page: 64 nodes beside 2, and the busiest owner beside the mean."""
    few, many = pool_of(2, seed=1), pool_of(64, seed=1)
    assert many.per("get", "messages") <= 2 * few.per("get", "messages")
    assert many.per("get", "bytes") <= few.per("get", "bytes")
    assert many.per("put", "bytes") <= 1.5 * few.per("put", "bytes")
    assert max(many.asked.values()) <= 2 * many.asked.total() / 64
    entries = [len(each) for each in many.directories.values()]
    assert max(entries) <= 2 * sum(entries) / 64
