"""Groups of objects over whole histories: puts, deletes, evictions, moves between the tiers, kills and reboots.

A kill may come before any change that outlives the node. A reader that finds a member at any moment finds a group of
which all members are stored (``GroupWorld``).
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.state import events as ev
from kvstore.state.interfaces import TieringRules
from tests.helpers.worlds.copying import WorldDisk
from tests.helpers.worlds.group_world import CLASS, PAGES_MAX, GroupWorld
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.world import MS

EXTENT_BYTES, POSITIONS = 128 << 10, 4  # DRAM has 128 frames of 4 KiB
NVME_EXTENT_BYTES = 256 << 10  # 31 of them
STEPS = 250
NAMES = [f"group {i}" for i in range(14)]


class History:
    """One seed, one history."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        disk = WorldDisk(NVME_EXTENT_BYTES, self.chance.choice((3, 12)), seed)
        rules = TieringRules(demote_at=self.chance.choice((0.0, 0.5, 0.9)), promote_after=self.chance.choice((1, 2)))
        self.world = GroupWorld(EXTENT_BYTES, POSITIONS, Nvme(disk, rules, self.chance.choice(("lru", "gittins"))))
        self.world.chance = self.chance
        self.crash_every = (0, 25, 8)[seed % 3]
        self.counts = {name: self.chance.choice((1, 2, 3, 5, 8)) for name in NAMES}
        self.happened: Counter[str] = Counter()

    def run(self) -> None:
        world, chance = self.world, self.chance
        for step in range(STEPS):
            if missing := [at for at in range(POSITIONS) if at not in world.state.segment.populated]:
                world.populate(missing)
            if self.crash_every and chance.randrange(self.crash_every) == 0:
                world.crash_at = [chance.random() for _ in range(chance.choice((1, 1, 2)))]
            self.something()
            world.now_ns += chance.randrange(20) * MS
            if step % 5 == 0:
                world.tick(0)
            if step % 25 == 0:
                world.check()
            self.happened["found"] += len(world.check_found())
            counters, names = world.state.counters, ("pages_saved", "pages_promoted", "objects_evicted_group")
            self.happened.update({name: 1 for name in names if counters[name]})
        world.crash_at = []
        while world.scan_on(20):
            pass
        world.settle()
        for _ in range(10):
            world.tick(0)
            world.settle()
        world.check()
        assert not world.state.groups.broken_members(1), "the rest of a group that lost a member stays"
        self.happened["kills"] += world.crashes

    def something(self) -> None:
        kinds = {
            self.put: 40,
            self.delete: 3,
            self.evict: 4,
            self.prefetch: 5,
            self.read: 10,
            self.damage: 1,
            self.reboot: 0.3,
            self.forget_tables: 0.3,
        }
        self.chance.choices(list(kinds), list(kinds.values()))[0]()
        for _ in range(self.chance.randrange(5)):
            self.world.move_on()
        if self.chance.random() < 0.5:
            self.world.demote(self.chance.choice((1, 60_000, 1 << 20)))
        if self.chance.random() < 0.5:
            self.world.scan_on()

    def session(self) -> int:
        session = self.chance.randint(1, 3)
        known = self.world.state.sessions.get(session)
        if session not in self.world.clients or known is None or not known.connected:
            self.world.open(session)
        return session

    def put(self) -> None:
        """Some members of a group, all of them, or objects without a group; sometimes with a wrong count."""
        name = self.chance.choice(NAMES)
        count = self.counts[name]
        keys = [f"{name}/{i}" for i in range(count)]
        chosen = keys if self.chance.random() < 0.4 else self.chance.sample(keys, self.chance.randint(1, count))
        sizes = {key: self.chance.choice((1, 1, 2, PAGES_MAX)) for key in chosen}
        how = self.chance.random()
        told = 0 if how < 0.05 else count + 1 if how < 0.1 else count
        publish, replace = self.chance.random() < 0.5, self.chance.random() < 0.1
        session = self.session()
        statuses = self.world.put_objects(session, sizes, name, told, replace=replace, publish=publish)
        self.happened["stored"] += statuses.count(0)
        client = self.world.clients.get(session)
        if client is not None and client.forfeited:
            self.world.revoke(session, list(client.forfeited))

    def delete(self) -> None:
        name = self.chance.choice(NAMES)
        members = [f"{name}/{i}" for i in range(self.counts[name])]
        chosen = self.chance.sample(members, self.chance.randint(1, len(members)))
        groups = {self.world.group_at(head) for head in map(self.world.head, chosen) if head is not None}
        statuses = self.world.delete_objects(chosen)
        if statuses and not any(statuses):
            left = self.world.sealed_members().keys()
            assert left.isdisjoint(groups) or self.world.scan, "a group is deleted as a whole"
            self.happened["deleted"] += 1

    def evict(self) -> None:
        self.world.evict(self.chance.randint(1, 20))

    def read(self) -> None:
        for key in self.chance.sample(sorted(self.world.node.index), min(3, len(self.world.node.index))):
            self.world.use(key)

    def prefetch(self) -> None:
        """A client has read an object from NVMe."""
        below = sorted(self.world.node.nvme_index.keys() - self.world.node.index.keys())
        if below:
            address = self.world.node.nvme_index[self.chance.choice(below)]
            self.world.send(ev.Prefetch(self.world.now_ns, self.session(), [address], hint=self.chance.random() < 0.5))

    def damage(self) -> None:
        index = sorted(self.world.node.index)
        if index:
            self.world.damage(self.chance.choice(index))

    def forget_tables(self) -> None:
        """The daemon is killed, and NVMe has to be scanned."""
        if self.world.scan is None:
            self.world.forget_tables()

    def reboot(self) -> None:
        self.world.reboot()


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_finds_all_members_of_a_group_or_none(seed: int) -> None:
    history = History(seed)
    try:
        history.run()
    except BaseException as error:
        error.add_note(f"seed {seed}: {dict(history.happened)}")
        raise
    assert history.happened["found"] > STEPS and history.happened["stored"] > 100, history.happened
    assert CLASS.page_bytes == 4096
