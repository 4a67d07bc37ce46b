"""Rows of what the directory costs a large pool: messages and bytes per put and get, with few nodes and with many.

Nothing is sent: what decides runs in this process, and what it would send is packed and counted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np

from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, result
from kvstore.bench.stage import Stage
from kvstore.model.replica import KEY_BYTES
from kvstore.model.span import fingerprints, spans_of
from kvstore.state.announcing import Announcing, Entries, pause_s
from kvstore.state.directory import Directory
from kvstore.state.placement import Placement
from kvstore.state.searching import Search
from kvstore.transfer.find_messages import pack_announce, pack_announced, pack_find, pack_found
from kvstore.transfer.reading import Whose
from kvstore.transfer.wire import HEAD

FEW, MANY = 2, 64
PUTS_PER_S = 40  # of each node
PAGES = (8, 160)  # of a conversation, whose first page is everybody's
TURNS = 2
WHOSE = Whose(bytes(KEY_BYTES), "tenant", "")
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
        self.nodes = {name: Announcing(name, lambda: next(numbers)) for name in self.placement.nodes}
        self.first, self.chains = self.draw.randbytes(16), list[list[bytes]]()
        self.counts: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        nothing = np.zeros(0, np.uint64)
        for its in self.nodes.values():
            its.members(self.placement.nodes)
            its.dumped(Entries(nothing, nothing, np.zeros(0, np.uint8)))
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
            its.changed(Entries(np.array(spans, np.uint64), fingerprints(b"".join(keys)), np.ones(len(keys), np.uint8)))
            self._tell(its)

    def _tell(self, its: Announcing) -> None:
        for owner in its.owners:
            while (batch := its.batch(owner)) is not None:
                wanted = self.directories[owner].told(batch)
                its.answered(owner, batch, wanted)
                self._count("put", pack_announce(batch, 0), pack_announced(wanted))

    def get(self) -> None:
        """A node looks for the pages of a conversation beyond the first one, which all nodes have."""
        keys = self.draw.choice(self.chains)
        search = Search(self.placement, keys, 1, self.placement.nodes, True, self.draw.randrange(1 << 20))
        while questions := search.ask(()):
            for each in questions:
                found = self.directories[each.owner].find(each.pages)
                search.answered(each, found)
                self._count("get", pack_find(WHOSE, each.pages, self.placement.number), pack_found(found))
                self.asked[each.owner] += 1
        self.counts["gets"] += 1
        if sum(each.stop for each in search.found()) != len(keys) - 1:
            raise BenchFailed(f"of {len(keys) - 1} pages {search.found()} were found")

    def _count(self, what: str, *bodies: bytes) -> None:
        self.counts[f"{what} messages"] += len(bodies)
        self.counts[f"{what} bytes"] += sum(HEAD.size + len(body) for body in bodies)

    def per(self, what: str, unit: str) -> float:
        """Messages or bytes per put or get."""
        return self.counts[f"{what} {unit}"] / self.counts[f"{what}s"]


def played(nodes: int, seed: int, turns: int = TURNS, gets: int = GETS) -> CountedPool:
    """A pool of so many nodes after some puts and gets."""
    pool = CountedPool(nodes, seed)
    for _ in range(turns):
        pool.turn(PUTS_PER_S)
    for _ in range(gets):
        pool.get()
    return pool


def flatness(stage: Stage, name: str, bar: Bar) -> list[Result]:
    """Messages of the directory per get of conversations that share their first page: 64 nodes / 2; and bytes, per put
    as well. A put's messages have no bar: its spans have more owners then."""
    rounds = range(1 if stage.settings.quick else stage.settings.rounds)
    pools = {nodes: [played(nodes, seed) for seed in rounds] for nodes in (FEW, MANY)}
    lines = []
    for line, what, unit in (
        (name, "get", "messages"),
        (f"{name}.get_bytes", "get", "bytes"),
        (f"{name}.put_messages", "put", "messages"),
        (f"{name}.put_bytes", "put", "bytes"),
    ):
        few, many = ([pool.per(what, unit) for pool in pools[nodes]] for nodes in (FEW, MANY))
        held = None if line.endswith("put_messages") else bar
        lines.append(result(line, Kind.COUNT, many, few, bar=held, limit_is=f"{FEW} nodes"))
    return lines
