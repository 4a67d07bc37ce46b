"""Objects that are put, copied, replaced and deleted on the nodes of a pool, while nodes come, go, restart and are cut
off: the later decision holds on every node. A seed, a history.

Thousands of them: ``python -m tests.helpers.worlds.object_world 0 5000``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore.cluster.announce_plan import TombstonePlan
from kvstore.cluster.directory import Placement
from kvstore.cluster.directory_owner import DirectoryOwner
from kvstore.model.tombstones import Tombstone, Tombstones
from tests.helpers.worlds.object_world import ObjectNode, play

SEEDS = 30


def test_the_later_decision_holds_on_every_node() -> None:
    seen = sum((play(seed).counts for seed in range(SEEDS)), Counter[str]())
    assert min(seen[each] for each in ("deleted", "replaced", "die", "join", "daemon", "server", "stall", "cut")) > 5
    assert seen["values"] > 100, "not all values are deleted"


def nothing_for(self: DirectoryOwner, node: str, now_s: float) -> list[Any]:
    return []


def takes_every_copy(self: ObjectNode, key: bytes, stamp: int, store: Any = ObjectNode.store) -> bool:
    tombstones, self.tombstones = self.tombstones, Tombstones()
    stored = bool(store(self, key, stamp))
    self.tombstones = tombstones
    return stored


def by_its_clock(self: ObjectNode, known: int) -> int:
    return int(self.world.now_s * 1e9) + self.skew_ns


@pytest.mark.parametrize(
    ("kind", "method", "broken"),
    [
        (DirectoryOwner, "tombstones_for", nothing_for),
        (ObjectNode, "store", takes_every_copy),
        (ObjectNode, "new_stamp", by_its_clock),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, broken: Any) -> None:
    monkeypatch.setattr(kind, method, broken)
    with pytest.raises(AssertionError, match="seed"):
        for seed in range(100):
            play(seed)


def test_an_owner_that_is_new_gets_all_tombstones_of_its_spans_again() -> None:
    plan, tombstones, before = TombstonePlan(), Tombstones(), Placement("abc")
    for number in range(40):
        tombstones.add(Tombstone(bytes([number]) * 16, bytes(16), 5, 10**9))
    sent = {owner: plan.for_owner(owner, before, tombstones.since(0)) for owner in "abc"}
    assert sum(map(len, sent.values())) == 80, "every span has two owners"
    for owner in "abc":
        plan.note_sent(owner, "1", before, tombstones.last)
    assert [plan.start(owner, "1", before) for owner in "abc"] == [40] * 3
    assert plan.start("a", "2", before) == 0, "another process of the owner"
    after = Placement("abcd")
    assert plan.start("a", "1", after) == 0 and plan.for_owner("d", after, tombstones.since(0))
    tombstones.add(Tombstone(bytes(16), bytes(16), 6, 10**9))
    assert [each.stamp for each in tombstones.since(40)] == [6] and len(tombstones) == 40
    assert not tombstones.add(Tombstone(bytes(16), bytes(16), 6, 10**9)), "as late as the one that is there"
    assert len(tombstones.expire(10**9)) == 40 and not tombstones
