"""Objects in a pool in one process: puts, copies, replacements and deletions over the network of ``cluster_world``.

What decides about tombstones is the real thing (``Tombstones``, ``TombstonePlan``, ``DirectoryOwner``), as are the
messages and the announcements; clients and the tiers of nodes are modelled. The clocks of nodes differ::

    python -m tests.helpers.worlds.object_world 4711            that seed again
    python -m tests.helpers.worlds.object_world 0 5000          all of these
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from kvstore.cluster import announce_plan
from kvstore.cluster.announce_plan import TombstonePlan
from kvstore.cluster.directory import GONE, Placement
from kvstore.cluster.directory_messages import pack_find, pack_hold, unpack_found
from kvstore.cluster.lookup_plan import Question, Search
from kvstore.model.prefix import fingerprint, fingerprints, separate_spans
from kvstore.model.replica import Tier
from kvstore.model.tombstones import TOMBSTONE_S, Tombstone, Tombstones
from kvstore.wire.object_messages import pack_bury, unpack_bury
from kvstore.wire.tombstones import TOMBSTONE_BYTES, pack_tombstones, unpack_tombstones
from tests.helpers.worlds.cluster_node import WHOSE, Call, SimNode, Task, entries
from tests.helpers.worlds.cluster_world import ClusterWorld

KEYS: Final = 12
STEPS_S: Final = 8.0
STATED_S: Final = 3.0  # after the last fault a decision holds on every node
SKEW_S: Final = 0.5
ROOT: Final = bytes(16)


class ObjectNode(SimNode):
    """A node of the pool with objects.

    Attributes:
        values: key -> stamp of the value that it has.
    """

    world: ObjectWorld

    def __init__(self, world: ObjectWorld, name: str) -> None:
        self.values: dict[bytes, int] = {}
        self.skew_ns = int(world.draw.uniform(-SKEW_S, SKEW_S) * 1e9)
        super().__init__(world, name)

    def start_daemon(self, keep: bool) -> None:
        """A daemon has lost its tombstones, but not what clients read in its header."""
        self.tombstones = Tombstones()
        self.plan = TombstonePlan()
        self.latest = getattr(self, "latest", 0)
        if not keep:
            self.values = {}
        super().start_daemon(keep)

    def new_stamp(self, known: int) -> int:
        """As ``object_batches.new_stamp``."""
        wall_ns = int(self.world.now_s * 1e9) + self.skew_ns
        self.latest = max(wall_ns, self.latest + 1, known + 1)
        return self.latest

    def store(self, key: bytes, stamp: int) -> bool:
        """As ``state.objects`` seals: the first value stays, and no value is older than a tombstone."""
        if self.tombstones.stamp(key) > stamp or key in self.values:
            return False
        self.values[key] = stamp
        self._list(key, 0)
        return True

    def keep(self, tombstones: list[Tombstone]) -> None:
        """As ``state.objects`` buries."""
        for each in tombstones:
            self.tombstones.add(each)
            self.latest = max(self.latest, each.stamp)
            if self.values.get(each.key, each.stamp) < each.stamp:
                del self.values[each.key]
                self._list(each.key, GONE)

    def _list(self, key: bytes, mark: int) -> None:
        page = key, Tier.DRAM
        spans = {**self.has, page: fingerprint(key)}
        self.has = {each: span for each, span in spans.items() if mark != GONE or each != page}
        self.seq += 1
        self.log = [*self.log, (self.seq, entries([(page, mark)], spans))][-4:]

    # --- the announcer and the owner ----------------------------------------------------------------------------------

    def tell(self, daemon: int) -> Task:
        """Then tombstones, as ``node.cluster.announcer`` does."""
        yield from super().tell(daemon)
        placement, last = self.announcing.placement, self.tombstones.last
        for owner in self.announcing.owners:
            process = self.view.get(owner, 0)
            start = self.plan.start(owner, str(process), placement)
            if not process or (start == last and not self.offered.get(owner)):
                continue
            mine = self.plan.for_owner(owner, placement, self.tombstones.since(start))
            body = pack_bury(self.name, 0, mine, self.now_ns)
            (answer,) = yield [(owner, process, lambda node, body=body: node.hear_tombstones(body))]
            if answer is not None and self.daemon == daemon:
                self.keep(unpack_tombstones(answer, len(answer) // TOMBSTONE_BYTES, self.now_ns))
                self.plan.note_sent(owner, str(process), placement, last)
                self.offered[owner] = 0

    def hear_tombstones(self, body: bytes) -> bytes:
        """Answer BURY."""
        node, _, tombstones = unpack_bury(memoryview(body), self.now_ns)
        self.owner.bury(tombstones, [fingerprint(each.key) for each in tombstones], node)
        return pack_tombstones(self.owner.tombstones_for(node, self.world.now_s), self.now_ns)

    def forget(self, tombstone: Tombstone) -> int:
        """Answer FORGET: the stamp of the value that it has then."""
        if tombstone.stamp:
            self.owner.bury([tombstone], [fingerprint(tombstone.key)], "")
            self.keep([tombstone])
        return self.values.get(tombstone.key, 0)

    @property
    def now_ns(self) -> int:
        return int(self.world.now_s * 1e9)

    # --- clients ------------------------------------------------------------------------------------------------------

    def holders(self, key: bytes) -> Generator[Any, Any, list[str]]:
        """As ``cluster.find_pages`` finds objects."""
        placement, silent = Placement(self.view), set[str]()
        nodes = set(self.view) - {self.name}
        search = Search(placement, [key], 0, nodes, False, 0, self.older, separate_spans(1))

        def call(question: Question) -> Call:
            holds = question.keys
            body = pack_hold(WHOSE, holds, False) if holds else pack_find(WHOSE, question.pages, placement.number)
            ask = SimNode.hold if holds else SimNode.find
            return question.owner, self.view.get(question.owner, 0), lambda node: ask(node, body)

        while questions := search.ask(silent):
            answers = yield [call(each) for each in questions]
            for question, answer in zip(questions, answers, strict=True):
                if answer is None:
                    silent.add(question.owner)
                else:
                    search.take_answer(question, unpack_found(answer, len(question.places)))
        return search.holders()[0]

    def copy(self, key: bytes) -> Task:
        """Read the value of another node, and store it here too."""
        nothing = Tombstone(key, ROOT, 0, 0)
        for name in (yield from self.holders(key)):
            (stamp,) = yield [(name, self.view.get(name, 0), lambda node: node.forget(nothing))]
            if stamp:
                self.store(key, stamp)
                return

    def decide(self, key: bytes, replaces: bool) -> Task:
        """Delete or replace a value of all nodes."""
        holders = yield from self.holders(key)
        nothing = Tombstone(key, ROOT, 0, 0)
        stamps = yield [(name, self.view.get(name, 0), lambda node: node.forget(nothing)) for name in holders]
        if not self.alive:
            return
        known = max([self.values.get(key, 0), *(stamp or 0 for stamp in stamps)])
        tombstone = Tombstone(key, ROOT, self.new_stamp(known), self.now_ns + TOMBSTONE_S * 10**9)
        assert tombstone.stamp > known, "a decision is later than the values that it replaces"
        self.keep([tombstone])
        if replaces:
            self.store(key, tombstone.stamp)
        self.world.decisions[key] = max(self.world.decisions.get(key, 0), tombstone.stamp)
        if self.world.draw.random() < 0.5:
            return  # the client is killed
        placement = Placement(self.view)
        row = placement.owners(fingerprints(key))[0] if len(placement.nodes) > 1 else np.zeros(0, np.int64)
        targets = {*holders, *(placement.nodes[place] for place in row)} - {self.name}
        yield [(name, self.view.get(name, 0), lambda node: node.forget(tombstone)) for name in sorted(targets)]


class ObjectWorld(ClusterWorld):
    """See the module.

    Attributes:
        decisions: key -> stamp of the latest deletion or replacement.
    """

    nodes: dict[str, ObjectNode]  # type: ignore[assignment]

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.keys = [self.draw.randbytes(16) for _ in range(KEYS)]
        self.decisions: dict[bytes, int] = {}

    def join(self, name: str) -> None:
        """A node that is new, or comes back with nothing."""
        self.say(f"{name} joins")
        self.nodes[name] = ObjectNode(self, name)
        self.look()

    def step(self) -> None:
        """One thing happens."""
        draw, names = self.draw, sorted(self.nodes)
        name, number, what = draw.choice(names), draw.randrange(KEYS), draw.random()
        node, key = self.nodes[name], self.keys[number]
        if what < 0.3:
            self.say(f"{name} puts {number}")
            node.store(key, node.new_stamp(0))
        elif what < 0.55:
            self.say(f"{name} copies {number}")
            self.task(name, node.copy(key))
        elif what < 0.75:
            replaces = draw.random() < 0.5
            self.counts["replaced" if replaces else "deleted"] += 1
            self.say(f"{name} {'replaces' if replaces else 'deletes'} {number}")
            self.task(name, node.decide(key, replaces))
        else:
            self._fault(name, node, what)

    def _fault(self, name: str, node: SimNode, what: float) -> None:
        """No fault takes the last process that has a tombstone: that may lose a decision."""
        if self._keeps_alone(name):
            self.counts["kept alone"] += 1
            return
        super()._fault(name, node, what)

    def _keeps_alone(self, name: str) -> bool:
        others = [node for other, node in self.nodes.items() if other != name]
        kept = ((key, max([node.tombstones.stamp(key) for node in others], default=0)) for key in self.decisions)
        return any(stamp < self.decisions[key] for key, stamp in kept)

    def play(self) -> None:
        """A history: faults, quiet, and then no node has a value that is older than the latest decision about its key.
        Raises AssertionError with the schedule where something is wrong."""
        for name in "abcdefgh"[: self.draw.randrange(2, 6)]:
            self.join(name)
        while self.now_s < 10.0 + STEPS_S:
            self.run(self.draw.expovariate(10.0))
            self.step()
        self._heal()
        self.faults = False
        self.run(STATED_S)
        self.say("quiet")
        self.check()

    def check(self) -> None:
        """The later decision holds everywhere."""
        for name, node in sorted(self.nodes.items()):
            for key, stamp in self.decisions.items():
                number, its = self.keys.index(key), node.values.get(key, stamp)
                assert its >= stamp, f"{name} has {number} of {its}, but it was deleted or replaced at {stamp}"
            self.counts["values"] += len(node.values)


def play(seed: int) -> ObjectWorld:
    """A seed's history; where it goes wrong, its schedule is in the message."""
    world = ObjectWorld(seed)
    try:
        with patch.multiple(announce_plan, BATCH_PAGES=8):
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
