"""Groups of objects with real daemons: members of several processes, kills, and memory that is too small."""

from __future__ import annotations

import os

import pytest

from kvstore import Store
from tests.helpers.processes import Machine, check_laws, wait_settled, wait_until

SIZE = 64 << 10


def members(group: int, count: int) -> list[str]:
    return [f"{group}/{i}" for i in range(count)]


def found(store: Store, groups: int, count: int) -> list[bool]:
    """Which groups are found. Checks that no group is found in part."""
    contained = store.contains([key for group in range(groups) for key in members(group, count)])
    parts = [contained[at : at + count] for at in range(0, len(contained), count)]
    assert all(any(part) == all(part) for part in parts), "a group is found in part"
    return [any(part) for part in parts]


@pytest.mark.parametrize("killed", ["before", "after"])
def test_members_that_several_writers_publish_survive(machine: Machine, killed: str) -> None:
    """The daemon is killed before it takes in the last members, or after that. None of them waited for it."""
    daemon = machine.serve("n", dram="32MiB")
    one, other, reader = (machine.connect("n", timeout_s=2.0) for _ in range(3))
    value = os.urandom(5000)
    group = {"group": "a", "count": 8, "wait": False}
    for store, name in ((one, "warm"), (other, "warmer")):
        assert all(store.put_many([f"{name}/{i}" for i in range(24)], [value] * 24, wait=False))
    assert one.put_many(members(0, 4), [value] * 4, **group) == [True] * 4
    assert found(reader, 1, 8) == [False] and reader.get("0/1") is None
    if killed == "before":
        daemon.stop()
    assert other.put_many([f"0/{i}" for i in range(4, 8)], [value] * 4, **group) == [True] * 4
    if killed == "after":
        assert found(reader, 1, 8) == [True], "what is only published is asked for"
    daemon.kill()
    assert found(reader, 1, 8) == [killed == "after"], "readers need no daemon"
    machine.serve("n", dram="32MiB")
    wait_until("the group is complete", lambda: found(reader, 1, 8) == [True])
    outs = [bytearray(5000) for _ in range(8)]
    assert reader.get_many(members(0, 8), outs) == [5000] * 8 and set(map(bytes, outs)) == {value}
    assert one.put_many(members(0, 8), [value] * 8, **group) == [False] * 8
    wait_settled(one)
    check_laws(one)


def test_groups_leave_full_memory_as_a_whole(machine: Machine) -> None:
    machine.serve("n", dram="16MiB", extent="2MiB")
    store = machine.connect("n")
    groups, count = 80, 5
    for group in range(groups):
        keys = members(group, count)
        first = {"group": str(group), "count": count, "wait": group % 2 == 0}
        stored = store.put_many(keys[:3], [os.urandom(SIZE)] * 3, **first)
        assert stored + store.put_many(keys[3:], [os.urandom(SIZE)] * 2, **first) == [True] * count
        assert found(store, group + 1, count)[group], "what was put last is there"
    wait_until("the rest of broken groups is removed", lambda: sum(found(store, groups, count)) * count == pages(store))
    assert 20 < sum(found(store, groups, count)) < groups
    assert store.stats()["counters"]["objects_evicted_group"] > 20
    check_laws(store)


def pages(store: Store) -> int:
    return int(store.stats()["tiers"]["dram"]["pages"])
