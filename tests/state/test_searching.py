"""Who is asked for the pages of a chain, and what is found: owners that know everything, some of whom do not answer."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from kvstore.cluster.directory import AnnounceBatch, Directory, Doubt, Locations, Placement
from kvstore.cluster.lookup_plan import ASKED_MAX, Question, Search, Stretch, fewest, owned_spans, spread, stretches
from kvstore.model.prefix import fingerprint, fingerprints, span_start, spans_between, spans_of
from kvstore.model.replica import POSITION_MAX, TIERS, Tier
from tests.helpers.placements import owned


@dataclass
class Pool:
    """Owners, and what nodes have of one chain: leading pages, or any."""

    nodes: int
    pages: int
    draw: random.Random
    has: dict[str, set[int]] = field(default_factory=dict)
    messages: int = 0
    rounds: int = 0
    unsure: dict[str, list[Doubt]] = field(default_factory=dict)
    older: dict[int, Placement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = [self.draw.randbytes(16) for _ in range(self.pages)]
        self.placement = Placement(f"n{number}" for number in range(self.nodes))
        self.directories = {name: Directory(1 << 20) for name in self.placement.nodes}

    def give(self, name: str, pages: set[int], deaf: dict[str, Placement | None] | None = None) -> None:
        """Owners that are ``deaf`` were told nothing, or only what they owned in an older placement."""
        self.has[name] = pages
        those = sorted(pages)
        names = fingerprints(b"".join(self.keys[page] for page in those))
        spans = np.array(spans_of(self.keys, 0, 0), np.uint64)[those]
        for owner, mine in owned(self.placement, spans).items():
            if owner in (deaf or {}):
                old = (deaf or {})[owner]
                before = owned(old, spans).get(owner) if old else None
                mine &= before if before is not None else False
                self.unsure.setdefault(owner, []).append(Doubt(name, old.number if old else 0))
            told = AnnounceBatch(name, 1 + len(self.has), 0, names[mine], np.full(int(mine.sum()), 1, np.uint8), True)
            self.directories[owner].apply(told)

    def find(self, first: int, nodes: set[str], closed: bool = True, dead: set[str] | None = None) -> list[Stretch]:
        """Whoever is dead is asked once."""
        search, silent = Search(self.placement, self.keys, first, nodes, closed, 3, self.older), set[str]()
        self.messages = self.rounds = 0
        while questions := search.ask(silent):
            self.rounds += 1
            assert self.rounds <= 4 + len(dead or ()) + 4 * bool(self.unsure), "it ends"
            assert len({each.owner for each in questions}) == len(questions), "one question each"
            for question in questions:
                self.messages += 1
                if question.owner in (dead or ()):
                    assert question.owner not in silent
                    silent.add(question.owner)
                else:
                    search.take_answer(question, self.answer(question))
        return search.result()

    def answer(self, question: Question) -> Locations:
        if question.keys is None:
            assert question.pages.tolist() == [fingerprint(self.keys[page]) for page in question.places]
            unsure = tuple(self.unsure.get(question.owner, ()))
            return replace(self.directories[question.owner].find(question.pages), doubts=unsure)
        assert question.keys == [self.keys[page] for page in question.places]
        has = self.has.get(question.owner, set())
        pages = np.array([at for at, page in enumerate(question.places) if page in has], np.int64)
        return Locations(pages, np.zeros_like(pages), np.ones(len(pages), np.uint8), [question.owner])

    def leading(self, first: int, nodes: set[str]) -> int:
        return max([len(self.has[name]) for name in nodes if name in self.has], default=0) - first


def test_spans_between_two_pages() -> None:
    draw = random.Random(1)
    for _ in range(300):
        first = draw.choice((0, 1, draw.randrange(70), draw.randrange(POSITION_MAX - 40, POSITION_MAX + 40)))
        stop = first + 1 + draw.randrange(200)
        its = spans_between(first, stop)
        assert [page for begin, end in zip(its.firsts, its.lasts, strict=True) for page in range(begin, end + 1)] == [
            *range(first, stop)
        ]
        for start, begin, end in zip(its.starts, its.firsts, its.lasts, strict=True):
            assert {span_start(page) for page in range(begin, end + 1)} == {start}
        assert len(set(its.starts)) == len(its.starts) == len(its)


@pytest.mark.parametrize("seed", range(60))
def test_the_furthest_is_found_whoever_does_not_answer(seed: int) -> None:
    """As long as one owner of each span answers; else what is found is there, only less of it."""
    draw = random.Random(seed)
    pool = Pool(draw.choice((2, 3, 5, 8, 64)), draw.choice((1, 2, 7, 40, 150, 600)), draw)
    holders = draw.sample(pool.placement.nodes, min(pool.nodes, 1 + draw.randrange(3)))
    for name in holders:
        pool.give(name, set(range(draw.randrange(pool.pages + 1))))
    for _ in range(20):
        first = draw.randrange(pool.pages)
        nodes = set(draw.sample(holders, draw.randrange(len(holders) + 1)))
        dead = set(draw.sample(pool.placement.nodes, draw.choice((0, 0, 1, 2, pool.nodes // 2))))
        found, most = pool.find(first, nodes, dead=dead), pool.leading(first, nodes)
        owners = pool.placement.owners(np.array(spans_of(pool.keys, 0, 0), np.uint64)).tolist()
        answers = all(any(pool.placement.nodes[place] not in dead for place in row) for row in owners)
        if most <= 0:
            assert found == []
        elif answers or not nodes & dead:
            assert len(found) == 1 and found[0].start == 0 and found[0].stop == most
        for each in found:
            assert each.node in nodes and each.stop <= len(pool.has[each.node]) - first
            assert each.tiers == bytes([TIERS.index(Tier.DRAM)]) * each.stop


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_pages_that_owners_have_not_heard_of_are_found(seed: int, closed: bool) -> None:
    """Owners were told nothing by some nodes, or nothing since the members changed, and say so."""
    draw = random.Random(seed)
    pool = Pool(draw.choice((2, 3, 5, 8)), draw.choice((2, 7, 40, 150)), draw)
    names = list(pool.placement.nodes)
    old = Placement([*names[1:], "gone"])
    pool.older = {old.number: old}
    for name in draw.sample(names, min(pool.nodes, 1 + draw.randrange(3))):
        deaf = {owner: draw.choice((None, old, old)) for owner in names if draw.random() < 0.6}
        pages = draw.randrange(pool.pages + 1)
        pool.give(name, {page for page in range(pages) if closed or draw.random() < 0.9}, deaf)
    for _ in range(20):
        first = draw.randrange(pool.pages)
        nodes = set(draw.sample(names, draw.randrange(pool.nodes + 1)))
        found = pool.find(first, nodes, closed)
        has = set[int]().union(*(pool.has.get(name, set()) for name in nodes))
        most = next(page for page in range(first, pool.pages + 1) if page not in has) - first
        assert sum(each.stop - each.start for each in found) == most
        assert pool.messages <= 4 * pool.nodes + ASKED_MAX


def test_few_are_asked_where_many_nodes_are_in_doubt() -> None:
    """A node of which an owner has not heard, and an owner that has just been started, cost a few messages; owners that
    are all unsure of all nodes a bounded number."""
    for nodes in (8, 64):
        for seed in range(10):
            pool = Pool(nodes, 512, random.Random(seed))
            pool.find(0, {"n0"})
            messages = pool.messages
            pool.give("n0", set(range(512)), {"n1": None})
            pool.find(0, {"n0"})
            assert pool.messages <= messages + 4
            pool.unsure = {"n2": [Doubt("", 0)]}
            pool.find(0, {"n3", "n4", "n5"})
            assert pool.messages <= messages + 4
            pool.unsure = {name: [Doubt("", 0)] for name in pool.placement.nodes}
            pool.find(0, set(pool.placement.nodes) - {"n0"})
            assert pool.messages <= messages + 2 * ASKED_MAX + 2
            older = Placement([*pool.placement.nodes[:-1]])
            pool.older, pool.unsure = {older.number: older}, {"n1": [Doubt("", older.number)]}
            pool.find(0, {"n3"})
            assert pool.messages <= messages + 4


@pytest.mark.parametrize("seed", range(20))
def test_chains_with_holes_are_pieced_together(seed: int) -> None:
    draw = random.Random(seed)
    pool = Pool(draw.choice((2, 5)), 80, draw)
    names = list(pool.placement.nodes)
    for name in names:
        pool.give(name, {page for page in range(80) if draw.random() < 0.9})
    for _ in range(10):
        first, nodes = draw.randrange(80), set(draw.sample(names, 2))
        found = pool.find(first, nodes, closed=False)
        stop = next((page for page in range(first, 80) if not any(page in pool.has[name] for name in nodes)), 80)
        assert [each.start for each in found] == [0, *(each.stop for each in found)][: len(found)]
        assert (found[-1].stop if found else 0) == stop - first
        for each in found:
            assert {first + page for page in range(each.start, each.stop)} <= pool.has[each.node]


def test_few_are_asked_however_many_nodes_there_are() -> None:
    """A chain of 512 pages that is somewhere takes an answer or two, with 64 nodes five; and one round more where its
    end is not."""
    for nodes, whole, part in ((2, 1, 2), (3, 2, 4), (8, 4, 8), (64, 6, 12), (200, 6, 12)):
        for seed in range(10):
            pool = Pool(nodes, 512, random.Random(seed))
            pool.give("n0", set(range(512)))
            pool.find(0, {"n0"})
            assert pool.rounds == 1 and pool.messages <= whole
            pool.give("n1", set(range(301)))
            pool.find(0, {"n1"})
            assert pool.rounds == 2 and pool.messages <= part
            pool.find(0, {"n2"})
            assert pool.rounds == 2 and pool.messages <= part


def test_those_who_have_the_same_are_asked_in_turn() -> None:
    pool, named = Pool(3, 40, random.Random(2)), set[str]()
    for name in ("n0", "n1"):
        pool.give(name, set(range(40)))
    for turn in range(4):
        search = Search(pool.placement, pool.keys, 0, {"n0", "n1"}, True, turn)
        for question in search.ask(set()):
            search.take_answer(question, pool.directories[question.owner].find(question.pages))
        (found,) = search.result()
        named.add(found.node)
        assert {found.node, *found.others} == {"n0", "n1"}, "it knows both"
    assert named == {"n0", "n1"}


def test_the_fewest_nodes_cover_what_is_found() -> None:
    rows = [(0, 0, 1), (1, 0, 1), (0, 1, 2), (1, 1, 2), (2, 1, 1), (4, 0, 1), (3, 2, 1), (2, 2, 0)]
    rows.sort()
    pages, nodes, tiers = (np.array(column) for column in zip(*rows, strict=True))
    found = Locations(pages, nodes, tiers.astype(np.uint8), ["x", "y", "z"])
    assert stretches(found, 6, {"x", "y", "z"}) == [
        Stretch("y", 0, 3, bytes([2, 2, 1])),
        Stretch("z", 3, 4, bytes([1])),
        Stretch("x", 4, 5, bytes([1])),
    ]
    assert stretches(found, 6, {"x", "z"}) == [
        Stretch("x", 0, 2, bytes([1, 1])),
        Stretch("z", 2, 4, bytes([0, 1])),
        Stretch("x", 4, 5, bytes([1])),
    ]
    assert stretches(found, 6, set()) == []


def test_each_span_has_one_of_its_owners_asked_and_few_are() -> None:
    spans_of_owner = {0: 0b1101, 1: 0b0011, 2: 0b0110, 3: 0}
    chosen = fewest(spans_of_owner, 0b11111)
    assert len(chosen) == 2 and sum(chosen.values()) == 0b1111
    assert all(spans & spans_of_owner[place] == spans for place, spans in chosen.items())
    assert fewest({}, 0b11) == {}


@pytest.mark.parametrize("seed", range(20))
def test_no_long_run_of_spans_is_unknown(seed: int) -> None:
    draw = random.Random(seed)
    names = np.array([draw.randrange(1 << 64) for _ in range(30)], np.uint64)
    spans_of_owner = owned_spans(Placement(f"n{number}" for number in range(draw.choice((2, 4, 64)))), names)
    spans, told = (1 << 30) - (1 << draw.randrange(30)), draw.randrange(1 << 30)
    chosen = spread(spans_of_owner, spans, told, 4)
    assert all(theirs & ~(spans_of_owner[place] & spans & ~told) == 0 for place, theirs in chosen.items())
    unknown = spans & ~told & ~sum(chosen.values())
    assert not unknown >> 29 & 1 and "11111" not in f"{unknown:b}"
    assert sum(chosen.values()).bit_count() == sum(theirs.bit_count() for theirs in chosen.values()), "nothing twice"
