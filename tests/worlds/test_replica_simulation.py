"""A pool of nodes that lose each other, full targets and lost orders, under one seed: what was acknowledged with two
copies survives each loss, and two copies exist again once nothing is owed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

import pytest

from kvstore.cluster.replicas import NO_NODE, OwedCopies, OwedRun, Site, choose_target

PAGE: Final = 1 << 16
STEPS: Final = 250
PUT_RUN_MAX: Final = 6


@dataclass
class SimNode:
    site: Site
    pages: dict[bytes, bytes] = field(default_factory=dict)  # key -> parent
    owed: OwedCopies = field(default_factory=OwedCopies)


class ReplicaWorld:
    """``acknowledged``: the pages of which two copies existed when their put returned, or later."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 0.0
        self.count = 0
        self.nodes: dict[str, SimNode] = {}
        self.acknowledged: set[bytes] = set()
        self.parent_of: dict[bytes, bytes] = {}
        for _ in range(self.draw.randrange(3, 6)):
            self.join()

    def join(self) -> None:
        self.count += 1
        machine, zone = f"m{self.count % 5 + 5 * (self.count // 9)}", self.draw.choice(("z1", "z2"))
        site = Site(f"n{self.count}", machine, zone, self.draw.choice((1, 2, 8)) << 30)
        self.nodes[site.name] = SimNode(site)
        for node in self.nodes.values():
            node.owed.retry_all(self.now_s)

    def put(self) -> None:
        node = self.draw.choice(list(self.nodes.values()))
        first = parent = self.draw.choice([b"root", *node.pages])
        keys = [self.draw.randbytes(16) for _ in range(self.draw.randint(1, PUT_RUN_MAX))]
        for key in keys:
            node.pages[key] = self.parent_of[key] = parent
            parent = key
        node.owed.owe(first, keys, PAGE, self.now_s)

    def lose(self) -> None:
        """One node goes; the others survey their pages. The next loss comes only once nothing is owed."""
        if len(self.nodes) <= 2 or any(len(node.owed) for node in self.nodes.values()):
            return
        del self.nodes[self.draw.choice(list(self.nodes))]
        for name, node in self.nodes.items():
            counted = [
                other
                for other in self.nodes.values()
                if other is not node and choose_target(node.site, [other.site], b"") is not None
            ]
            for key in node.pages:
                if not any(key in other.pages for other in counted):
                    node.owed.owe(node.pages[key], [key], PAGE, self.now_s)
            assert all(choose_target(node.site, [other.site], b"") != name for other in counted)

    def copy(self, node: SimNode) -> None:
        """One order of a node: lost, refused for space, or carried out."""
        run = node.owed.next(self.now_s)
        if run is None:
            return
        others = [other.site for other in self.nodes.values() if other.site.name not in run.refused]
        target = choose_target(node.site, others, run.keys[0])
        if target is None:
            node.owed.postpone(run, NO_NODE, self.now_s)
            return
        assert self.nodes[target].site.machine != node.site.machine
        fate = self.draw.random()
        if fate < 0.15:
            node.owed.postpone(run, "lost", self.now_s)
        elif fate < 0.25:
            node.owed.postpone(run, "space", self.now_s, refused_by=target)
        else:
            self.arrive(node, self.nodes[target], run)

    def arrive(self, node: SimNode, target: SimNode, run: OwedRun) -> None:
        chain, key = list[bytes](), run.keys[0]
        while (parent := self.parent_of[key]) != b"root":
            chain.append(key := parent)
        count = self.draw.randint(1, len(run.keys))
        for key in [*reversed(chain), *run.keys[:count]]:
            target.pages[key] = self.parent_of[key]
        node.owed.settle(run, count, self.now_s)

    def check(self) -> None:
        for node in self.nodes.values():
            for key, parent in node.pages.items():
                assert parent == b"root" or parent in node.pages, "a page is stored only after its parent"
                copies = sum(key in other.pages for other in self.nodes.values())
                assert copies >= 2 or node.owed.owes(key), "one copy alone is owed"
                if copies >= 2:
                    self.acknowledged.add(key)
        stored = set[bytes]().union(*(node.pages for node in self.nodes.values()))
        assert self.acknowledged <= stored

    def step(self) -> None:
        self.now_s += self.draw.choice((0.0, 0.05, 1.0))
        verb = self.draw.choices((self.put, self.lose, self.join), (6, 1, 1))[0]
        if verb != self.join or len(self.nodes) < 8:
            verb()
        for node in list(self.nodes.values()):
            for _ in range(self.draw.randrange(4)):
                self.copy(node)
        self.check()

    def settle(self) -> None:
        """Without faults nothing stays owed, but where there is no other machine."""
        for _ in range(2000):
            self.now_s += 1.0
            for node in self.nodes.values():
                self.copy(node)
        machines = {node.site.machine for node in self.nodes.values()}
        assert len(machines) == 1 or not any(len(node.owed) + node.owed.nbytes for node in self.nodes.values())


@pytest.mark.parametrize("seed", range(12))
def test_what_has_two_copies_survives_each_loss(seed: int) -> None:
    world = ReplicaWorld(seed)
    for _ in range(STEPS):
        world.step()
    world.settle()
    assert world.acknowledged


def test_a_full_queue_drops_pages_and_says_so() -> None:
    owed = OwedCopies(pages_max=3)
    owed.owe(b"r", [b"a", b"b"], PAGE, 0.0)
    owed.owe(b"r", [b"b", b"c", b"d", b"e"], PAGE, 0.0)
    assert (len(owed), owed.nbytes, owed.dropped) == (3, 3 * PAGE, 2)
    assert [owed.owes(key) for key in (b"a", b"c", b"d")] == [True, True, False]


def test_a_run_waits_for_its_parent_and_a_failure_for_a_growing_pause() -> None:
    owed = OwedCopies()
    owed.owe(b"r", [b"a", b"b"], PAGE, 0.0)
    owed.owe(b"b", [b"c"], PAGE, 0.0)
    owed.owe(b"r", [b"x"], PAGE, 0.0)
    first, other = owed.next(0.0), owed.next(0.0)
    assert first is not None and other is not None and [first.keys, other.keys] == [[b"a", b"b"], [b"x"]]
    assert owed.next(0.0) is None, "the page before c is under way"
    owed.postpone(other, NO_NODE, 0.0)
    owed.settle(first, 1, 0.05)
    assert [owed.owes(key) for key in (b"a", b"b")] == [False, True]
    again = owed.next(0.05)
    assert again is first and owed.next(0.05) is None
    owed.settle(again, 1, 0.06)
    last = owed.next(0.06)
    assert last is not None and last.keys == [b"c"]
    owed.settle(last, 1, 0.07)
    pauses, now_s = [], 0.1
    for _ in range(9):
        now_s = max(now_s, owed.due_s())
        run = owed.next(now_s)
        assert run is other
        owed.postpone(run, NO_NODE, now_s)
        assert owed.refuses(b"x") == (len(pauses) >= 2), "it is refused after some tries"
        pauses.append(owed.due_s() - now_s)
    assert pauses == sorted(pauses) and pauses[-1] == pytest.approx(5.0)
    owed.retry_all(now_s)
    assert owed.next(now_s) is other
    assert (len(owed), owed.copied) == (1, 3)
