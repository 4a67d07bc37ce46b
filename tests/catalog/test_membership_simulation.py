"""Members of a pool over a catalog that fails, in a loop whose time is virtual: every order of five faults."""

from __future__ import annotations

import asyncio
import itertools
import random
import selectors
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstore import boundary
from kvstore.cluster import membership as module
from kvstore.cluster.catalog import base, memory, task_health
from kvstore.cluster.catalog.base import Catalog, Session
from kvstore.cluster.catalog.memory import Hub, Ledger, MemoryCatalog
from kvstore.cluster.catalog.schema import NodeEntry
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.membership import Membership
from kvstore.config.daemon import ClusterConfig
from kvstore.errors import InvalidRequest, KVStoreError, Unauthenticated, Unavailable, VersionMismatch
from tests.helpers.etcd_faults import FAULTS

TTL_S = 2.0
WELL_S = 3 * TTL_S + 2 * task_health.PAUSE_MAX_S
CALLS_PER_S_MAX = 30.0  # of one member
STEP_S = 1e-7  # else a timer may fire for ever at the same moment, by the rounding of its time
ODD = 0.02  # of calls that fail for no reason
ODD_ERRORS = Unavailable("odd"), InvalidRequest("catalog_cert", "odd"), AssertionError("odd")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes when all wait, and only then."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now_s


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "nothing will ever happen"
        self._loop.now_s += max(timeout, STEP_S)
        return super().select(0)


class World:
    """What fails now, and how often it is asked."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.loop, self.random, self.hub = loop, random.Random(seed), Hub()
        self.faults: set[str] = set()
        self.calls: Counter[int] = Counter()
        self.bugs = 0

    def break_(self, fault: str) -> None:
        if fault == "compaction":
            self.hub.ledger._changes.clear()
        else:
            self.faults.add(fault)
            if fault == "restart":
                self.loop.call_later(self.random.uniform(0.1, 2 * TTL_S), self.faults.discard, fault)

    def mend(self, fault: str) -> None:
        if fault != "restart":
            self.faults.discard(fault)


class FaultyCatalog(MemoryCatalog):
    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.hub, world.loop.time)
        self._world, self._number = world, number

    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        self._check_space()
        return await super().publish(key, value, session, only_if)

    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        self._check_space()
        return await super().open_session(ttl_s, health)

    def _check_space(self) -> None:
        if "quota" in self._world.faults:
            raise Unavailable("quota is used up")

    def _ledger(self) -> Ledger:
        world = self._world
        world.calls[self._number] += 1
        if "restart" in world.faults or "certificate" in world.faults:
            raise Unavailable("certificate or restart")
        if "password" in world.faults:
            raise Unauthenticated("password")
        if world.faults and world.random.random() < ODD:
            error = world.random.choice(ODD_ERRORS)
            world.bugs += isinstance(error, AssertionError)
            raise error
        return super()._ledger()


Simulation = Callable[[Callable[[World], Coroutine[Any, Any, None]], int], None]


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    def run(play: Callable[[World], Coroutine[Any, Any, None]], seed: int) -> None:
        loop = VirtualLoop()
        random.seed(seed)  # of back-off
        for each in (base, memory, task_health, module):
            monkeypatch.setattr(each, "boot_s", loop.time)
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(play(World(loop, seed)))

    return run


async def joined(world: World, number: int, **more: Any) -> Membership:
    member = Membership(ClusterConfig(catalog="memory", catalog_ttl_s=TTL_S))
    member._loop = asyncio.get_running_loop()
    member._on_final = more.get("on_final", member._on_final)
    mine = NodeEntry(name=f"n{number}", process=f"{number:016x}", incarnation="00" * 8)
    catalog: Catalog = FaultyCatalog(world, number)
    member._catalog = catalog
    await member._start(catalog, mine, b"", "")
    return member


async def until(holds: Callable[[], bool], within_s: float) -> bool:
    ends_s = asyncio.get_running_loop().time() + within_s
    while not (so := holds()) and asyncio.get_running_loop().time() < ends_s:
        await asyncio.sleep(0.1)
    return so


def names(member: Membership) -> list[str]:
    return [each.name for each in member.nodes()]


async def well(world: World, members: list[Membership], late: int) -> None:
    """A node that joins is seen and missed again; sessions live, the leader leads, nothing fails."""
    other = await joined(world, late)
    assert await until(lambda: all(f"n{late}" in names(each) for each in members), WELL_S)
    await other._stop()
    assert await until(lambda: all(names(each) == ["n0", "n1"] for each in members), WELL_S)
    assert await until(lambda: all(each.published for each in members) and members[0].leading is not None, WELL_S)

    def fails() -> list[Any]:
        return [each.name for member in members for each in member._health.values() if each.failing_since_s]

    assert await until(lambda: not fails(), WELL_S), fails()
    assert not any(each.fault() for each in members)


@pytest.mark.parametrize("part", range(4))
def test_members_come_back_after_every_order_of_faults(simulate: Simulation, part: int) -> None:
    """All begin in one order and are mended in another one, with pauses in between; calls fail oddly meanwhile."""

    async def play(world: World, orders: list[tuple[str, ...]]) -> None:
        members = [await joined(world, number) for number in (0, 1)]
        members[0].lead("n0")
        for late, order in enumerate(orders, 2):
            began_s, before = world.loop.time(), world.calls.copy()
            for fault in order:
                world.break_(fault)
                await asyncio.sleep(world.random.choice((0.0, 0.3, 3.0, 10.0)))
            if "certificate" in world.faults or "password" in world.faults:
                assert await until(lambda: all(each.fault() for each in members), WELL_S), "status says so"
            for fault in world.random.sample(order, len(order)):
                world.mend(fault)
                await asyncio.sleep(world.random.choice((0.0, 0.3, 3.0)))
            assert await until(lambda: not world.faults, WELL_S)
            await asyncio.sleep(WELL_S)
            await well(world, members, late)
            took_s = world.loop.time() - began_s
            for number in (0, 1):
                assert (world.calls[number] - before[number]) / took_s < CALLS_PER_S_MAX, "it spins"
        for each in members:
            await each._stop()
        assert sum(boundary.counts().values()) - unexpected == world.bugs, "all other errors were expected"

    unexpected = sum(boundary.counts().values())
    simulate(lambda world: play(world, list(itertools.permutations(FAULTS))[part::4]), part)


def test_a_change_that_could_not_be_written_is_written_later(simulate: Simulation) -> None:
    async def play(world: World) -> None:
        member, other = await joined(world, 0), await joined(world, 1)
        world.break_("quota")
        (mine,) = (each for each in member.nodes() if each.name == "n0")
        member.update(NodeEntry(name="n0", process=mine.process, incarnation="11" * 8))
        assert await until(lambda: "presence has failed" in member.fault() and "quota" in member.fault(), WELL_S)
        assert not other.fault(), "it had nothing to write"
        world.mend("quota")
        assert await until(lambda: other.nodes()[0].incarnation == "11" * 8, WELL_S)
        for each in (member, other):
            await each._stop()

    simulate(play, 0)


def test_entries_that_were_deleted_are_published_again_and_the_leader_is_elected_again(
    simulate: Simulation,
) -> None:
    async def play(world: World) -> None:
        members = [await joined(world, number) for number in (0, 1)]
        members[0].lead("n0")
        assert await until(lambda: members[0].leading is not None, WELL_S)
        catalog = FaultyCatalog(world, 9)
        first = members[0].leading
        for entry in (await catalog.listing("/")).entries:
            await catalog.retract(entry.key)
        assert await until(lambda: members[0].leading not in (None, first), WELL_S), "it won another election"
        assert await until(lambda: all(names(each) == ["n0", "n1"] for each in members), WELL_S)
        for each in members:
            await each._stop()

    simulate(play, 0)


def test_a_catalog_of_another_version_is_final(simulate: Simulation) -> None:
    async def play(world: World) -> None:
        ended: list[KVStoreError] = []
        member = await joined(world, 0, on_final=ended.append)
        world.hub.ledger = NewerLedger()
        world.hub.ring()
        assert await until(lambda: bool(ended), WELL_S)
        assert len(ended) == 1 and isinstance(ended[0], VersionMismatch)
        await member._stop()

    simulate(play, 0)


class NewerLedger(Ledger):
    def expire(self, now_s: float) -> None:
        raise VersionMismatch("catalog format 2")


def test_a_bug_in_a_task_is_counted_and_the_task_goes_on(simulate: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(world: World) -> None:
        member = await joined(world, 0)
        before = boundary.counts().get("membership/watch", 0)
        monkeypatch.setattr(member, "_on_change", lambda: 1 / 0)
        other = await joined(world, 1)
        assert await until(lambda: boundary.counts().get("membership/watch", 0) > before + 2, WELL_S)
        monkeypatch.setattr(member, "_on_change", lambda: None)
        late = await joined(world, 2)
        assert await until(lambda: names(member) == ["n0", "n1", "n2"], WELL_S)
        for each in (member, other, late):
            await each._stop()

    simulate(play, 0)
