"""A pool in one process: nodes, owners of the directory, a catalog, and a network that loses, delays and cuts.

What decides is the real thing (``AnnouncePlan``, ``Directory``, ``Placement``, ``Search``), and so are the messages;
the shells around it are modelled, and time is a number. One seed, one history. A seed that fails prints its schedule::

    python -m tests.helpers.worlds.cluster_world 4711           that seed again
    python -m tests.helpers.worlds.cluster_world 0 5000         all of these
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from kvstore.cluster import announce_plan, directory
from kvstore.cluster.directory import Placement
from kvstore.model.prefix import spans_of
from kvstore.model.replica import TIERS, Tier
from tests.helpers.placements import owned
from tests.helpers.worlds.cluster_node import TTL_S, Call, SimNode, Task

ANSWER_S: Final = 0.5  # for an answer
FAULTS_S: Final = 6.0
FOUND_S: Final = 20.0
OLD_S: Final = 2.0  # an owner that has heard nothing of a node for so long says so
SETTLE_S: Final = 4.0  # after the last fault all is found again
CHAINS, CHAIN_PAGES = 7, 70
PARTITIONS: Final = 1 << 10  # for a few nodes


def chains_of(draw: random.Random) -> list[list[bytes]]:
    """Chains that begin alike, and some pages that the directory cannot tell apart."""
    chains: list[list[bytes]] = []
    for _ in range(CHAINS):
        shared = draw.choice(chains)[: draw.randrange(CHAIN_PAGES)] if chains and draw.random() < 0.6 else []
        keys = shared + [draw.randbytes(16) for _ in range(CHAIN_PAGES - len(shared))]
        if chains and draw.random() < 0.5:
            page = draw.randrange(len(shared), CHAIN_PAGES)
            like = draw.choice(draw.choice(chains))
            keys[page] = draw.randbytes(2) + like[2:8] + draw.randbytes(8)
        chains.append(keys)
    return chains


@dataclass
class Waiting:
    """A task that waits for answers; ``source``: its node."""

    source: str
    task: Task
    answers: list[Any]

    def __post_init__(self) -> None:
        self.open = set(range(len(self.answers)))


class ClusterWorld:
    """See the module.

    Attributes:
        schedule: what happened, to be read.
        counts: how often what did.
    """

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now_s = 10.0
        self.counts: Counter[str] = Counter()
        self.schedule: list[str] = []
        self.chains = chains_of(self.draw)
        self.spans = [spans_of(keys, 0, 0) for keys in self.chains]
        looks = Counter(look for look, _ in {(key[2:8], key) for keys in self.chains for key in keys})
        self.alike = [  # of each chain the first page that looks like another
            next((at for at, key in enumerate(keys) if looks[key[2:8]] > 1), CHAIN_PAGES) for keys in self.chains
        ]
        self.nodes: dict[str, SimNode] = {}
        self.catalog: dict[str, int] = {}  # node -> its data server
        self.faults = True
        self.loss = self.draw.choice((0.0, 0.05, 0.3))
        self.late_s = self.draw.choice((0.002, 0.05, 0.4))
        self.cut: set[tuple[str, str]] = set()  # nothing goes from the first to the second; "": the catalog
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0

    # --- time ---------------------------------------------------------------------------------------------------------

    def number(self) -> int:
        """One that was never given before."""
        self._numbers += 1
        return self._numbers

    def at(self, after_s: float, what: Callable[[], None]) -> None:
        """Later."""
        heappush(self._events, (self.now_s + after_s, self.number(), what))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        until_s = self.now_s + seconds
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, what = heappop(self._events)
            what()
        self.now_s = until_s

    # --- tasks and messages -------------------------------------------------------------------------------------------

    def task(self, source: str, task: Task) -> None:
        """Begin one of a node."""
        self.at(0.0, lambda: self._go_on(source, task, None))

    def _go_on(self, source: str, task: Task, answers: list[Any] | None) -> None:
        try:
            wants = next(task) if answers is None else task.send(answers)
        except StopIteration:
            return
        if isinstance(wants, float):
            self.at(wants, lambda: self._go_on(source, task, []))
            return
        waiting = Waiting(source, task, [None] * len(wants))
        if not wants:
            self.at(0.0, lambda: self._go_on(source, task, []))
        for at, call in enumerate(wants):
            self._call(waiting, at, call)

    def _call(self, waiting: Waiting, at: int, call: Call) -> None:
        """A message, what it makes its target do, and the answer: each may be lost, or come too late."""
        name, process, what = call
        source = waiting.source

        def arrives() -> None:
            node = self.nodes.get(name)
            if node is not None and node.process == process and not node.stalled:
                answer = what(node)
                if not self._lost(name, source):
                    self.at(self._delay_s(), lambda: self._settle(waiting, at, answer))

        if not self._lost(source, name):
            self.at(self._delay_s(), arrives)
            if self.faults and self.draw.random() < self.loss / 3:
                self.at(self.draw.uniform(0.0, 2.0), arrives)  # twice, and late
        self.at(ANSWER_S, lambda: self._settle(waiting, at, None))

    def _settle(self, waiting: Waiting, at: int, answer: Any) -> None:
        if at in waiting.open:
            waiting.open.discard(at)
            waiting.answers[at] = answer
            if not waiting.open:
                self._go_on(waiting.source, waiting.task, waiting.answers)

    def _lost(self, source: str, target: str) -> bool:
        return (source, target) in self.cut or (source != target and self.faults and self.draw.random() < self.loss)

    def _delay_s(self) -> float:
        return self.draw.uniform(0.0001, self.late_s if self.faults else 0.001)

    # --- the catalog --------------------------------------------------------------------------------------------------

    def publish(self, node: SimNode) -> None:
        """A data server says that it is there."""
        if ("", node.name) in self.cut:
            self.at(0.5, lambda: self.publish(node) if node.alive else None)
            return
        self.catalog[node.name] = node.process
        self.look()

    def end_sessions(self, name: str) -> None:
        """Of that node's data servers those that are gone are in the catalog no more."""
        node = self.nodes.get(name)
        if name in self.catalog and (node is None or self.catalog[name] != node.process):
            del self.catalog[name]
            self.look()

    def look(self) -> None:
        """All see what the catalog has, a little later, unless it is out of their reach."""
        for node in self.nodes.values():
            self.at(self.draw.uniform(0.0, 0.3), lambda node=node: self._see(node))

    def _see(self, node: SimNode) -> None:
        if ("", node.name) not in self.cut:
            node.see(dict(self.catalog))

    # --- what happens -------------------------------------------------------------------------------------------------

    def say(self, what: str) -> None:
        """For the schedule."""
        self.schedule.append(f"{self.now_s:7.3f} {what}")

    def join(self, name: str) -> None:
        """A node that is new, or comes back with nothing."""
        self.say(f"{name} joins")
        self.nodes[name] = SimNode(self, name)
        self.look()

    def die(self, name: str, leaves: bool) -> None:
        """A machine is gone; the catalog hears of it at once, or when its session ends."""
        self.say(f"{name} dies" + ", and has said so" if leaves else f"{name} dies")
        node = self.nodes.pop(name)
        node.daemon = 0

        self.at(0.0 if leaves else TTL_S, lambda: self.end_sessions(name))

    def step(self) -> None:
        """One thing happens."""
        draw, names = self.draw, sorted(self.nodes)
        name, what = draw.choice(names), draw.random()
        node = self.nodes[name]
        if what < 0.62:
            chain, tier = draw.randrange(CHAINS), draw.choice((Tier.DRAM, Tier.DRAM, Tier.NVME))
            length = draw.choice((0, CHAIN_PAGES, draw.randrange(CHAIN_PAGES + 1), self.alike[chain]))
            self.say(f"{name} has {length} pages of chain {chain} in {tier}")
            node.change(chain, tier, length)
        elif what < 0.74:
            self.task(name, node.get(draw.randrange(CHAINS), lambda pages: None))
        else:
            self._fault(name, node, what)

    def _fault(self, name: str, node: SimNode, what: float) -> None:
        draw = self.draw
        kind = draw.choice(("die", "join", "daemon", "server", "stall", "cut", "catalog", "heal", "heal"))
        self.counts[kind] += 1
        if kind == "die" and len(self.nodes) > 1:
            self.die(name, draw.random() < 0.5)
        elif kind == "join" and len(self.nodes) < 6:
            self.join(draw.choice([each for each in "abcdefgh" if each not in self.nodes]))
        elif kind == "daemon":
            keep = draw.random() < 0.5
            self.say(f"the daemon of {name} starts anew, " + ("with its pages" if keep else "without its pages"))
            node.start_daemon(keep)
        elif kind == "server":
            self.say(f"the data server of {name} starts anew")
            node.start_server()
        elif kind == "stall":
            self.say(f"{name} stands still" if not node.stalled else f"{name} goes on")
            node.stalled = not node.stalled
        elif kind == "cut":
            other = draw.choice(sorted(self.nodes))
            both = draw.random() < 0.5
            if other != name:
                self.say(f"the link from {name} to {other} is cut" + (", and back" if both else ""))
                self.cut |= {(name, other), (other, name)} if both else {(name, other)}
        elif kind == "catalog":
            away = sorted(self.nodes) if draw.random() < 0.3 else [name]
            self.say(f"the catalog is out of reach of {', '.join(away)}")
            self.cut |= {("", each) for each in away}
        elif kind == "heal":
            self._heal()

    def _heal(self) -> None:
        self.say("all links are whole, nobody stands still")
        self.cut.clear()
        for node in self.nodes.values():
            node.stalled = False
        self.look()

    # --- the end ------------------------------------------------------------------------------------------------------

    def play(self) -> None:
        """A history: faults, quiet, and then everything is found; at last a node joins, which costs no more than its
        share. Raises AssertionError with the schedule where something is wrong."""
        for name in "abcdefgh"[: self.draw.randrange(2, 6)]:
            self.join(name)
        self.say(f"of messages {self.loss:.0%} are lost, the others take up to {self.late_s} s")
        while self.now_s < 10.0 + FAULTS_S:
            self.run(self.draw.expovariate(10.0))
            self.step()
        self._heal()
        self.faults = False
        self.run(SETTLE_S)
        self.say("quiet")
        self.check_found()
        self.check_owners()
        self.check_join()

    def check_found(self) -> None:
        """Every node reads what any has, whoever has it; but for pages that look like others to the directory."""
        for name, node in sorted(self.nodes.items()):
            for chain, keys in enumerate(self.chains):
                came: list[int] = []
                self.task(name, node.get(chain, came.append))
                self.run(0.2)
                most = max(each.leading(keys) for each in self.nodes.values())
                right = len(came) == 1 and min(self.alike[chain], most) <= came[0] <= most
                assert right, f"{name} reads {came} pages of chain {chain}, but {most} are there"

    def check_owners(self) -> None:
        """Owners know what nodes have that are there, and nothing of others."""
        placement, keys = Placement(self.nodes), {key for chain in self.chains for key in chain}
        alike = len(keys) - len({key[2:8] for key in keys})
        for name, node in self.nodes.items():
            known = dict[str, int]()
            for other, its in self.nodes.items():
                spans = np.array(list(its.has.values()), np.uint64)
                known[other] = int(owned(placement, spans)[name].sum()) if len(spans) else 0
            assert set(node.owner.directory.nodes) <= set(self.nodes), f"{name} knows of nodes that are gone"
            less = sum(known.values()) - len(node.owner.directory)
            assert 0 <= less <= alike * len(TIERS) * len(self.nodes), f"{name} knows other pages than there are"

    def check_join(self) -> None:
        """Who comes is told its share; the others are told nothing but what they lose."""
        before, members = self.counts["entries"], set(self.nodes)
        self.join(name := next(each for each in "abcdefghi" if each not in self.nodes))
        self.run(SETTLE_S)
        old, new, moved = Placement(members), Placement(self.nodes), 0
        for node in self.nodes.values():
            spans = np.array(list(node.has.values()), np.uint64)
            if len(spans):
                had, has = owned(old, spans), owned(new, spans)
                moved += int(has[name].sum()) + sum(int((had[each] & ~has[each]).sum()) for each in members)
        assert self.counts["entries"] - before == moved, "more was told again than what changed hands"
        self.check_found()

    # --- what is found during faults ----------------------------------------------------------------------------------

    def play_found(self) -> None:
        """A history in which every node is always reachable for the one that reads, and no message between those two is
        lost: links between the others are cut, one way each, data servers start anew, and nodes join. All the time the
        reader looks for chains. ``counts``: pages that were ``stored`` elsewhere, and of these ``found``; the same of
        chains that are ``old``; lookups, and the ``questions`` that they took.
        """
        self.loss, self.late_s = 0.0, 0.002
        reader, *others = "abcdefgh"[: self.draw.randrange(3, 6)]
        for name in (reader, *others):
            self.join(name)
        self.run(1.0)
        self.put_s = [self.now_s] * CHAINS  # by chain
        for _ in range(CHAINS):
            self.put(self.draw.choice(others))
        self.run(SETTLE_S)
        until_s, fault_s, put_s = self.now_s + FOUND_S, self.now_s, self.now_s
        while self.now_s < until_s:
            if self.now_s >= fault_s:
                self._fault_of_others(reader)
                fault_s = self.now_s + self.draw.uniform(0.5, 4.0)
            if self.now_s >= put_s:
                self.put(self.draw.choice([name for name in self.nodes if name != reader]))
                put_s = self.now_s + self.draw.expovariate(0.5)
            self._look_for(reader, self.draw.randrange(CHAINS, len(self.chains)))
            self.run(self.draw.uniform(0.02, 0.1))

    def put(self, name: str) -> None:
        """That node stores a chain that no other has."""
        keys = [self.draw.randbytes(16) for _ in range(self.draw.randrange(1, CHAIN_PAGES + 1))]
        self.chains.append(keys)
        self.spans.append(spans_of(keys, 0, 0))
        self.put_s.append(self.now_s)
        self.say(f"{name} has chain {len(self.chains) - 1}")
        self.nodes[name].change(len(self.chains) - 1, Tier.DRAM, len(keys))

    def _fault_of_others(self, reader: str) -> None:
        others = sorted(name for name in self.nodes if name != reader)
        kind = self.draw.choice(("cut", "cut", "server", "join", "heal"))
        self.counts[kind] += 1
        if kind == "cut":
            source, target = self.draw.sample(others, 2)
            self.say(f"the link from {source} to {target} is cut")
            self.cut.add((source, target))
        elif kind == "server":
            name = self.draw.choice((*others, reader))
            self.say(f"the data server of {name} starts anew")
            self.nodes[name].start_server()
        elif kind == "join" and len(self.nodes) < 7:
            self.join(next(each for each in "abcdefgh" if each not in self.nodes))
        elif kind == "heal":
            self._heal()

    def _look_for(self, reader: str, chain: int) -> None:
        """Count what is stored elsewhere, and what of it the reader finds, where it knows how to reach all nodes."""
        node, keys, came = self.nodes[reader], self.chains[chain], list[int]()
        others = [each for each in self.nodes.values() if each is not node]
        reached = all(node.view.get(each.name) == each.process for each in self.nodes.values())
        most = max(each.leading(keys) for each in others)
        self.task(reader, node.lookup(chain, came.append))
        self.run(0.1)
        if reached and all(node.view.get(each.name) == each.process for each in self.nodes.values()):
            assert len(came) == 1, "a lookup whose questions are all answered ends at once"
            self.counts["lookups"] += 1
            for what in ("", "old ")[: 1 + (self.now_s > self.put_s[chain] + OLD_S)]:
                self.counts[f"{what}stored"] += most
                self.counts[f"{what}found"] += came[0]


def play_found(seed: int) -> ClusterWorld:
    """A seed's history of ``ClusterWorld.play_found``."""
    world = ClusterWorld(seed)
    with patch.multiple(announce_plan, BATCH_PAGES=64), patch.multiple(directory, PARTITIONS=PARTITIONS):
        world.play_found()
    return world


def play(seed: int) -> ClusterWorld:
    """A seed's history, with bounds that a few pages reach; where it goes wrong, its schedule is in the message."""
    world = ClusterWorld(seed)
    try:
        with (
            patch.multiple(announce_plan, BATCH_PAGES=64, QUEUED_MAX=500),
            patch.multiple(directory, CHANGES_MIN=50, MERGED_MAX=seed % 2 * 500, PARTITIONS=PARTITIONS),
        ):
            world.play()
    except AssertionError as error:
        told = "\n".join(world.schedule)
        raise AssertionError(f"{told}\nseed {seed} at {world.now_s:.3f}: {error}") from error
    return world


if __name__ == "__main__":
    first, *last = map(int, sys.argv[1:])
    seen: Counter[str] = Counter()
    for number in range(first, last[0] if last else first + 1):
        seen += play(number).counts
    print(*(f"{what}: {count}" for what, count in sorted(seen.items())), sep="\n")
