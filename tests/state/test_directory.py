"""The directory of a cluster: spans, owners, what an owner knows, and what a node tells it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from kvstore.cluster import directory
from kvstore.cluster.directory import AGAIN, GONE, AnnounceBatch, Directory, Placement
from kvstore.model.prefix import fingerprint, fingerprints, span_start, spans_of, starts_span
from kvstore.model.replica import POSITION_MAX, TIERS, Tier
from tests.helpers.placements import owned

Entry = tuple[int, str, Tier]


def keys_of_chain(draw: random.Random, pages: int) -> list[bytes]:
    return [draw.randbytes(16) for _ in range(pages)]


def test_spans_are_short_where_chains_branch() -> None:
    starts = [span_start(page) for page in range(200)]
    assert sorted(set(starts)) == [0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192]
    assert [page for page in range(200) if starts_span(page)] == sorted(set(starts))
    assert [span_start(page) for page in (65_503, 65_504, 70_000, 10**9)] == [65_472, 65_504, 65_504, 65_504]
    assert not starts_span(POSITION_MAX), "a position that is no more than a bound names no span"


def test_a_page_has_the_span_of_its_chain_from_wherever_it_is_told() -> None:
    keys = keys_of_chain(random.Random(1), 200)
    spans = spans_of(keys, 0, 7)
    assert spans == [fingerprint(keys[span_start(page)]) for page in range(200)]
    assert fingerprints(b"".join(keys)).tolist() == [fingerprint(key) for key in keys]
    for page in (1, 2, 3, 31, 32, 33, 100):
        assert spans_of(keys[page:], page, spans[page - 1]) == spans[page:]


def test_two_owners_who_share_evenly_and_move_little() -> None:
    spans = np.random.default_rng(2).integers(0, 1 << 63, 20_000).astype(np.uint64)
    nodes = [f"n{number}" for number in range(8)]
    eight, seven = Placement(nodes), Placement(nodes[:-1])
    owners = eight.owners(spans)
    assert owners.shape == (20_000, 2) and (owners[:, 0] != owners[:, 1]).all()
    share = np.bincount(owners.ravel(), minlength=8) / owners.size
    assert share.min() > 0.11 and share.max() < 0.14
    assert (Placement(reversed(nodes)).owners(spans) == owners).all(), "whoever asks gets the same answer"
    before, after = owned(seven, spans), owned(eight, spans)
    assert all((after[name] <= before[name]).all() for name in seven.nodes), "only the new node gains spans"
    assert abs(after["n7"].mean() - 0.25) < 0.02
    assert Placement(["a"]).owners(spans[:3]).tolist() == [[0], [0], [0]]
    assert Placement([]).owners(spans[:3]).shape == (3, 0)


def entries(told: dict[tuple[int, Tier], bool]) -> tuple[np.ndarray, np.ndarray]:
    marks = [TIERS.index(tier) | (0 if there else GONE) for (_, tier), there in told.items()]
    return np.array([page << 16 for page, _ in told], np.uint64), np.array(marks, np.uint8)


def known(at: Directory, most: int = 100, pages: int = 64) -> set[Entry]:
    found = at.find(np.arange(pages, dtype=np.uint64) << np.uint64(16), most)
    assert (np.diff(found.pages) >= 0).all()
    rows = zip(found.pages.tolist(), found.nodes.tolist(), found.tiers.tolist(), strict=True)
    return {(page, found.names[node], TIERS[tier]) for page, node, tier in rows}


def changes(draw: random.Random, most: int = 9) -> dict[tuple[int, Tier], bool]:
    return {(draw.randrange(64), draw.choice(TIERS)): draw.random() < 0.6 for _ in range(draw.randrange(most))}


class Teller:
    """A node, as a set of what it has, and what the owner must know of it: per stream that counts, what it told."""

    def __init__(self, name: str, numbers: Iterator[int]) -> None:
        self.name, self.numbers = name, numbers
        self.has: set[tuple[int, Tier]] = set()
        self.told: list[set[tuple[int, Tier]]] = []
        self.stream, self.next = next(numbers), 0

    def tell(self, at: Directory, told: dict[tuple[int, Tier], bool], whole: bool = False) -> int:
        answer = at.apply(AnnounceBatch(self.name, self.stream, self.next, *entries(told), whole))
        if answer == self.next + 1:
            if self.next == 0:
                self.told = [*self.told[:1], set()]
            self.next = answer
            for page, there in told.items():
                (self.told[-1].add if there else self.told[-1].discard)(page)
            if whole:
                self.told = self.told[-1:]
        return answer

    def change(self, told: dict[tuple[int, Tier], bool]) -> None:
        for page, there in told.items():
            (self.has.add if there else self.has.discard)(page)

    def begin(self) -> None:
        self.stream, self.next = next(self.numbers), 0

    @property
    def seen(self) -> set[Entry]:
        return {(page, self.name, tier) for told in self.told for page, tier in told}


@pytest.mark.parametrize("seed", range(40))
def test_an_owner_knows_what_it_was_told(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of several nodes, again and out of order, new streams in the middle, and nodes that go, beside sets."""
    monkeypatch.setattr(directory, "CHANGES_MIN", 7)
    monkeypatch.setattr(directory, "MERGED_MAX", seed % 3 * 20)
    draw, numbers = random.Random(seed), itertools.count(1)
    at = Directory(1 << 20)
    tellers = [Teller(name, numbers) for name in "abcd"]
    for _ in range(150):
        teller, what = draw.choice(tellers), draw.random()
        told = changes(draw)
        if what < 0.04:
            at.forget([teller.name])
            teller.told = []
            assert teller.next == 0 or teller.tell(at, told) == AGAIN
            teller.begin()
        elif what < 0.12:
            teller.begin()
        elif what < 0.3 and teller.next:
            late = AnnounceBatch(teller.name, teller.stream, draw.randrange(teller.next), *entries(told), True)
            assert at.apply(late) == teller.next, "what came before changes nothing"
            early = AnnounceBatch(teller.name, teller.stream, teller.next + 1, *entries(told))
            assert at.apply(early) == teller.next, "what is missing is asked for"
        elif teller.next == 0:
            teller.change(told)
            assert teller.tell(at, dict.fromkeys(teller.has, True), whole=draw.random() < 0.5) == 1
        else:
            teller.change(told)
            assert teller.tell(at, told, whole=draw.random() < 0.3) == teller.next
        seen = set().union(*(each.seen for each in tellers))
        assert known(at) == seen
    assert len(at) >= len(seen) and known(at) == seen, "changes are in the table now"


def test_of_a_page_that_everybody_has_an_answer_names_some() -> None:
    at = Directory(1 << 20)
    for number in range(20):
        at.apply(AnnounceBatch(f"n{number}", number, 0, *entries({(5, Tier.DRAM): True}), True))
    assert len(known(at, directory.PER_PAGE_MAX)) == directory.PER_PAGE_MAX and len(at) == 20


def test_memory_is_bounded_and_small() -> None:
    at = Directory(1_600_000)
    keys = np.random.default_rng(3).integers(0, 1 << 63, 150_000).astype(np.uint64)
    for number, start in enumerate(range(0, len(keys), 5000)):
        part = keys[start : start + 5000]
        assert at.apply(AnnounceBatch("a", 1, number, part, np.ones(len(part), np.uint8))) == number + 1
        assert at.nbytes <= 1_600_000
    assert len(at) == 100_000 and at.refused == 50_000
    assert at.nbytes / len(at) <= 16
    assert len(at.find(keys[:5000]).pages) == 5000 and not len(at.find(keys[-5000:]).pages)
    at.forget(["a"])
    assert len(at) == 0 and at.nodes == []


def test_an_answer_names_no_more_where_changes_are_not_in_the_table_yet() -> None:
    at = Directory(1 << 24)
    keys = np.random.default_rng(3).integers(1 << 20, 1 << 63, directory.MERGED_MAX + 10_000).astype(np.uint64)
    at.apply(AnnounceBatch("many", 0, 0, keys, np.ones(len(keys), np.uint8)))
    for number in range(1, 21):  # the first of these come into the table, the others wait beside it
        pages, marks = entries({(5, Tier.DRAM): True, (5, Tier.NVME): True})
        at.apply(AnnounceBatch(f"n{number}", number, 0, pages, marks, True))
        if number == 10:
            assert len(at) == len(keys) + 20
    for most in (1, directory.PER_PAGE_MAX):
        found = at.find(np.full(1 << 16, pages[0], np.uint64), most)
        assert np.bincount(found.pages).tolist() == [most] * (1 << 16), "each page that is asked for, also once more"


def unknown_partitions(placement: Placement) -> np.ndarray:
    """Partitions that it has not computed."""
    return placement._table == np.uint32((1 << 32) - 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_placement_made_from_an_earlier_one_has_the_same_owners(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes join and leave, one or many at a time; what was not computed before is computed when it is needed."""
    monkeypatch.setattr(directory, "PARTITIONS", 4096)
    draw, place = random.Random(seed), np.arange(directory.PARTITIONS, dtype=np.uint64)
    nodes = {f"n{number}" for number in range(draw.choice((1, 2, 3, 9, 40)))}
    placement = Placement(nodes)
    for step in range(6):
        for _ in range(draw.choice((1, 1, 5))):
            if draw.random() < 0.5 or len(nodes) < 2:
                nodes.add(f"n{draw.randrange(100)}")
            else:
                nodes.discard(draw.choice(sorted(nodes)))
        some = place if step % 2 else place[: draw.randrange(len(place))]
        placement.owners(some)
        unknown = unknown_partitions(placement)
        before, placement = placement, Placement(nodes, placement)
        fresh = Placement(nodes)
        assert placement.number == fresh.number
        assert (placement.owners(some) == fresh.owners(some)).all()
        assert placement.owners_of(some[:50].tolist()) == [tuple(row) for row in fresh.owners(some[:50]).tolist()]
        old, new = owned(Placement(before.nodes), place), owned(fresh, place)
        none = np.zeros(len(place), bool)
        moved = [old.get(name, none) ^ new.get(name, none) for name in {*old, *new}]
        unknown &= min(len(before.nodes), len(nodes)) > 1
        assert (placement.partitions_moved(before) == (np.any(moved, axis=0) | unknown)).all()
        names = draw.sample(sorted(nodes), draw.randrange(len(nodes) + 1))
        wanted = np.any([none, *(new[name] for name in names)], axis=0)
        if names:
            wanted |= unknown_partitions(placement)
        assert (placement.partitions_of(names) == wanted).all()


def test_a_change_of_members_costs_what_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A join looks at one weight per partition; a departure computes only the partitions of the node that left."""
    computed: list[int] = []
    heaviest = Placement._heaviest
    monkeypatch.setattr(
        Placement, "_heaviest", lambda self, which: (computed.append(len(which)), heaviest(self, which))[1]
    )
    place, nodes = np.arange(directory.PARTITIONS, dtype=np.uint64), [f"n{number}" for number in range(100)]
    all_nodes = Placement(nodes)
    all_nodes.owners(place)
    assert sum(computed) == len(place)
    computed.clear()
    fewer = Placement(nodes[:-1], all_nodes)
    share = int(fewer.partitions_moved(all_nodes).sum())
    assert sum(computed) == share == int(all_nodes.partitions_of([nodes[-1]]).sum()) < len(place) / 40
    computed.clear()
    assert int(Placement(nodes, fewer).partitions_moved(fewer).sum()) == share and not computed


def test_many_nodes_that_leave_are_forgotten_at_once_and_their_places_are_used_again() -> None:
    at = Directory(1 << 20)
    for number in range(60):
        at.apply(AnnounceBatch(f"n{number}", number, 0, *entries({(number, Tier.DRAM): True}), True))
    answer = at.find(np.arange(64, dtype=np.uint64) << np.uint64(16), 4)
    at.forget([f"n{number}" for number in range(50)] + ["unknown"])
    assert known(at) == {(number, f"n{number}", Tier.DRAM) for number in range(50, 60)}
    assert {answer.names[node] for node in answer.nodes.tolist()} == {f"n{number}" for number in range(60)}
    for number in range(60, 110):
        at.apply(AnnounceBatch(f"n{number}", number, 0, *entries({(number % 50, Tier.DRAM): True}), True))
    assert len(at) == 60 and len(at.find(np.zeros(1, np.uint64)).names) == 60
