"""The choice of the node that receives the second copy of a page: machine, zone, parent, capacity."""

from __future__ import annotations

from collections import Counter

import pytest

from kvstore.cluster.catalog.base import Entry
from kvstore.cluster.catalog.schema import NodeEntry, decode, encode, key_of
from kvstore.cluster.replicas import Site, choose_target

ANCHORS = [number.to_bytes(16, "little") for number in range(4000)]


def node(name: str, machine: str, zone: str = "", size: int = 1 << 30, draining: bool = False) -> Site:
    return Site(name, machine, zone, size, draining)


MINE = node("n", "m1", "z1")


def test_a_copy_goes_to_another_machine_and_another_zone_if_there_is_one() -> None:
    a, b, c = node("a", "m1", "z2"), node("b", "m2", "z1"), node("c", "m3", "z2")
    d = node("d", "m4", "z2", draining=True)
    chosen = {choose_target(MINE, [MINE, a, b, c, d], anchor) for anchor in ANCHORS[:100]}
    assert chosen == {"c"}
    assert choose_target(MINE, [MINE, a, b, d], ANCHORS[0]) == "b"
    assert choose_target(MINE, [MINE, a, d], ANCHORS[0]) is None
    assert choose_target(MINE, [MINE, a, d], ANCHORS[0], same_machine=True) == "a"
    assert choose_target(MINE, [a, b], ANCHORS[0], same_machine=True) == "b", "only if there is no other machine"
    assert choose_target(MINE, [MINE], ANCHORS[0], same_machine=True) is None
    unknown = node("old", "")
    assert choose_target(MINE, [unknown], ANCHORS[0]) is None, "an unknown machine may be this one"


def test_a_node_that_has_the_parent_is_preferred_within_the_other_zone() -> None:
    b, c, d = node("b", "m2", "z1"), node("c", "m3", "z2"), node("d", "m4", "z2")
    for anchor in ANCHORS[:50]:
        assert choose_target(MINE, [b, c, d], anchor, parent_nodes={"d"}) == "d"
        assert choose_target(MINE, [b, c, d], anchor, parent_nodes={"b"}) in "cd", "the zone counts more"


def test_copies_are_divided_by_capacity_and_a_new_node_takes_only_its_share() -> None:
    nodes = [node("a", "m2"), node("b", "m3", size=2 << 30), node("c", "m4", size=3 << 30)]
    before = {anchor: choose_target(MINE, nodes, anchor) for anchor in ANCHORS}
    counts = Counter(before.values())
    for name, share in (("a", 1 / 6), ("b", 2 / 6), ("c", 3 / 6)):
        assert counts[name] / len(ANCHORS) == pytest.approx(share, abs=0.03)
    after = {anchor: choose_target(MINE, [*nodes, node("new", "m5", size=6 << 30)], anchor) for anchor in ANCHORS}
    moved = [anchor for anchor in ANCHORS if after[anchor] != before[anchor]]
    assert {after[anchor] for anchor in moved} == {"new"}
    assert len(moved) / len(ANCHORS) == pytest.approx(1 / 2, abs=0.03)


def test_a_node_says_where_it_is_in_the_catalog() -> None:
    entry = NodeEntry(name="a", process="1", incarnation="2", machine="ab" * 16, zone="rack-7", draining=True)
    key = key_of("pool", entry)
    assert decode(NodeEntry, Entry(key, encode(entry), 1)) == entry
    wrong = encode(entry).replace(b'"draining":true', b'"draining":1')
    assert decode(NodeEntry, Entry(key, wrong, 1)) is None
