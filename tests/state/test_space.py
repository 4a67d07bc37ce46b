"""Frames: taken, leased, evicted, moved between classes; what leaves first, and at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kvstore.model.replica import FrameClass, FrameState, Status
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.eviction import Lru
from kvstore.state.eviction.base import Page, UsedMs
from kvstore.state.frames import CLASSES_MAX, IDLE_NS, ClassPool, Segment, narrowest
from tests.helpers.worlds.world import MS, Chain, World, root_of

SMALL, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 2)
EXTENT_BYTES = 32 << 10  # 8 SMALL frames, 2 LARGE ones
A, B = 1, 2
DAY_NS = 86_400 * 10**9


def node(positions: int = 4, extent_bytes: int = EXTENT_BYTES, now_ns: int = 10**12) -> World:
    """A node with its memory there and two clients."""
    world = World(extent_bytes, positions, now_ns=now_ns)
    world.populate(list(range(positions)))
    for session in (A, B):
        world.open(session)
    return world


def put(world: World, *path: int, frame_class: FrameClass = SMALL) -> list[bytes]:
    """Store a chain a millisecond later, each page marked as used then; returns its keys."""
    chain = Chain(frame_class, path)
    world.now_ns += MS
    stored = world.stored_pages(chain)
    world.grant(A, frame_class, len(path) - stored, anchor=chain.keys[stored - 1] if stored else b"")
    assert world.put(A, chain, stored) == [Status.OK] * (len(path) - stored)
    for key in chain.keys:
        world.use(key)
    return chain.keys


def gone(instructions: list[do.Instruction]) -> list[bytes]:
    """Keys that a decision takes out of the index, in order."""
    return [key for i in instructions if isinstance(i, do.Unindex) for key in i.keys]


def evict(world: World, pages: int = 0, size: int = 0) -> list[bytes]:
    """An operator evicts; returns the keys that left, in order."""
    return gone(world.decide(ev.Evict(world.now_ns, pages, size)))


# --- order -----------------------------------------------------------------------------------------------------------


def test_chains_leave_from_their_tails() -> None:
    world = node()
    keys = put(world, 1, 2, 3, 4)
    assert evict(world, 2) == [keys[3], keys[2]]
    world.check()
    assert evict(world, 9) == [keys[1], keys[0]]
    world.check()


def test_a_shared_prefix_leaves_after_its_last_branch() -> None:
    world = node()
    left, right = put(world, 1, 2, 3), put(world, 1, 2, 4)
    assert evict(world, 1) == [left[2]]
    assert evict(world, 1) == [right[2]]
    assert evict(world, 1) == [left[1]]


def test_the_least_recently_used_leaves_first_by_its_mark() -> None:
    world = node()
    tails = [put(world, i)[0] for i in range(6)]
    for i in (0, 3):
        world.now_ns += MS
        world.use(tails[i])
    assert evict(world, 6) == [tails[i] for i in (1, 2, 4, 5, 0, 3)]


def test_an_old_trunk_leaves_right_after_its_branch() -> None:
    world = node()
    old, young = put(world, 1, 2, 3), put(world, 4)
    assert evict(world, 4) == [*old[::-1], *young]


def test_a_trunk_in_use_stays_when_its_branch_leaves() -> None:
    world = node()
    old, young = put(world, 1, 2), put(world, 4)
    world.now_ns += MS
    world.use(old[0])
    assert evict(world, 3) == [old[1], young[0], old[0]]


def test_putting_more_than_fits_evicts_exactly_what_is_short() -> None:
    world = node(positions=1)
    chains = [put(world, i) for i in range(8)]
    world.now_ns += MS
    out = world.decide(ev.Grant(world.now_ns, A, SMALL, 3))
    assert gone(out) == [key for chain in chains[:3] for key in chain]
    assert [type(i) for i in out] == [do.WriteState, do.Unindex, do.WriteGranted, do.Reply]
    world.check()


def test_the_page_to_hang_on_is_not_evicted_for_its_children() -> None:
    world = node(positions=1)
    chains = [put(world, i) for i in range(8)]
    out = world.decide(ev.Grant(world.now_ns, A, SMALL, 8, anchor=chains[0][0]))
    assert chains[0][0] in world.node.index and len(gone(out)) == 7
    world.check()


def test_an_anchor_whose_extent_is_taken_away_is_still_found() -> None:
    """A client may name any page: also one of another class, which moves to make room."""
    world = node(positions=3)
    for i in range(4):
        put(world, i)
    keys = [put(world, 10 + i, frame_class=LARGE)[0] for i in range(4)]
    world.now_ns += 1000 * MS
    for i in range(4, 8):
        put(world, i)
    for key in keys:
        world.decide(ev.Grant(world.now_ns, B, SMALL, 20, anchor=key))
        world.check()


@pytest.mark.parametrize(("pages", "size", "left"), [(3, 0, 5), (0, 4096 * 3 - 1, 5), (1, 4096 * 4, 4), (99, 0, 0)])
def test_evict_means_that_many_pages_and_bytes(pages: int, size: int, left: int) -> None:
    world = node()
    for i in range(8):
        put(world, i)
    evict(world, pages, size)
    assert len(world.node.index) == left


def test_evict_takes_the_coldest_class_first() -> None:
    world = node()
    small, large = put(world, 1), put(world, 1, frame_class=LARGE)
    assert evict(world, 1) == small
    assert evict(world, 1) == large


# --- leases ----------------------------------------------------------------------------------------------------------


def test_a_leased_page_stays_and_the_others_leave() -> None:
    world = node()
    keys = [put(world, i)[0] for i in range(4)]
    world.lease(A, 1, [keys[0], keys[2]], 50 * MS)
    assert evict(world, 99) == [keys[1], keys[3]]
    assert evict(world, 99) == []
    world.tick(50 * MS)
    assert evict(world, 99) == [keys[0], keys[2]]
    world.check()


def test_leased_pages_do_not_end_an_eviction_early() -> None:
    """A trunk that becomes evictable on the way is offered behind the leased pages that were passed over."""
    world = node()
    leased, chain = put(world, 1), put(world, 2, 3)
    world.use(leased[0])
    world.node.tables[1].last_use[:] = 0
    world.now_ns += MS
    world.use(chain[0])
    world.lease(A, 1, leased, 50 * MS)
    assert evict(world, 2) == [chain[1], chain[0]]


def test_a_damaged_page_retires_while_it_is_leased() -> None:
    world = node()
    keys = put(world, 1, 2, 3)
    addresses = [world.node.index[key] for key in keys]
    world.lease(A, 1, keys[1:2], 50 * MS)
    world.lease(B, 1, keys[1:2], 80 * MS)
    out = world.decide(ev.Damaged(world.now_ns, addresses[0], "data", keys[0]))
    states = {state: [a[:2] for a in i.addresses] for i in out if isinstance(i, do.WriteState) for state in [i.state]}
    assert states == {
        FrameState.FREE: [addresses[0][:2], addresses[2][:2]],
        FrameState.RETIRING: [addresses[1][:2]],
    }
    assert not world.node.index
    world.release(A, 1)
    assert world.node.frame_state(*addresses[1][:2]) == FrameState.RETIRING
    world.tick(80 * MS)
    assert world.node.frame_state(*addresses[1][:2]) == FrameState.FREE
    assert world.state.counters["damaged_data"] == 1 and world.state.counters["pages_dropped"] == 3
    world.check()


def test_damage_goes_by_the_true_key_where_the_record_lies() -> None:
    world = node()
    keys, other = put(world, 1, 2, 3), put(world, 7)
    address = world.node.index[keys[1]]
    world.node.tables[address.extent].rows[address.frame, 8] ^= 1
    world.decide(ev.Damaged(world.now_ns, address, "record", keys[1]))
    assert set(world.node.index) == {keys[0], other[0]}
    world.check()


def test_a_record_promises_the_longest_lease() -> None:
    world = node()
    (key,) = put(world, 1)
    address = world.node.index[key]
    world.lease(A, 1, [key], 50 * MS)
    world.lease(B, 1, [key], 10 * MS)
    assert world.node.leases(address.extent)[address.frame] == world.now_ns + 50 * MS
    assert world.renew(B, 1, 90 * MS)
    assert world.node.leases(address.extent)[address.frame] == world.now_ns + 90 * MS
    assert not world.renew(B, 2, 90 * MS)
    for session in (A, B):
        world.release(session, 1)
    assert world.node.leases(address.extent)[address.frame] == 0


# --- classes and extents ----------------------------------------------------------------------------------------------


def test_positions_are_carved_as_they_are_populated() -> None:
    world = World(EXTENT_BYTES, 2)
    world.open(A)
    assert world.grant(A, SMALL, 1) == 0
    world.populate([1])
    assert world.grant(A, SMALL, 9) == 8
    world.populate([0], failed=True)
    assert world.grant(A, SMALL, 1) == 0
    assert world.state.segment.extents[1].position == 1
    world.check()


@pytest.mark.parametrize("now_ns", [10**12, 30 * DAY_NS, 60 * DAY_NS, 200 * DAY_NS])
def test_a_new_class_takes_an_extent_of_a_colder_one(now_ns: int) -> None:
    world = node(positions=2, now_ns=now_ns)
    for i in range(16):
        put(world, i)
    out = world.decide(ev.Grant(world.now_ns, B, LARGE, 1))
    assert [type(i) for i in out][-4:] == [do.Drop, do.Carve, do.WriteGranted, do.Reply]
    assert world.state.counters["extents_reclaimed"] == 1
    assert len(world.node.index) == 8
    world.check()
    assert world.grant(B, LARGE, 3) == 1, "one extent is kept for every class in use"


@pytest.mark.parametrize("now_ns", [10**12, 60 * DAY_NS])
def test_a_busy_class_takes_from_one_whose_coldest_page_is_much_older(now_ns: int) -> None:
    world = node(positions=4, now_ns=now_ns)
    for i in range(24):
        put(world, i)
    put(world, 1, frame_class=LARGE)
    world.now_ns += 10_000 * MS
    for i in range(2, 5):
        put(world, i, frame_class=LARGE)
        world.check()
    assert world.state.counters["extents_reclaimed"] == 1
    assert world.state.counters["evicted_space"] == 1, "its own page that was as old as the others'"


def test_extents_in_which_nothing_lies_are_taken_before_anything_leaves() -> None:
    """As many as are needed, however short ago their class, and what is left of it, was used."""
    world = node(positions=4)
    for i in range(30):
        put(world, i)
    evict(world, 24)
    left = set(world.node.index)
    assert len(left) == 6 and world.grant(B, LARGE, 6) == 6
    assert set(world.node.index) == left
    counters = world.state.counters
    assert (counters["extents_reclaimed"], counters["evicted_space"], counters["pages_moved"]) == (3, 0, 0)
    world.check()


@pytest.mark.parametrize("now_ns", [10**12, 60 * DAY_NS])
def test_classes_in_like_use_do_not_trade_extents(now_ns: int) -> None:
    world = node(positions=4, now_ns=now_ns)
    for i in range(60):
        put(world, i)
        put(world, i, frame_class=LARGE)
        world.now_ns += 200 * MS
    assert world.state.counters["extents_reclaimed"] <= 2
    world.check()


@pytest.mark.parametrize("first", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("stalls", [False, True])
def test_classes_with_equal_puts_hold_equal_parts_whichever_comes_first(first: FrameClass, stalls: bool) -> None:
    """As many bytes of each class per step; one has filled the pool before, and one may pause for a whole turnover."""
    world = node(positions=16)
    capacity = 16 * EXTENT_BYTES
    step_bytes, number = capacity // 16, iter(range(1 << 20))

    def step(*classes: FrameClass) -> None:
        for frame_class in classes:
            for _ in range(step_bytes // 2 // frame_class.page_bytes):
                put(world, next(number), frame_class=frame_class)
        world.now_ns += 50 * MS

    for _ in range(64):
        step(first)
    for _ in range(64):
        step(SMALL, LARGE)
    if stalls:
        for _ in range(32):
            step(first)
        for _ in range(64):
            step(SMALL, LARGE)
    world.check()
    for _ in range(32):
        step(SMALL, LARGE)
        for pool in world.state.segment.pools.values():
            sealed = sum(extent.sealed for extent in pool.extents.values())
            assert sealed * pool.frame_class.page_bytes >= capacity // 4, "a class holds less than half of its part"
    world.check()


def test_the_last_extent_of_an_idle_class_is_given_up() -> None:
    world = node(positions=1)
    put(world, 1)
    assert world.grant(B, LARGE, 1) == 0
    world.now_ns += IDLE_NS + 1
    assert world.grant(B, LARGE, 1) == 1
    assert not world.node.index
    world.check()


def test_what_is_still_wanted_moves() -> None:
    world = node(positions=2)
    keys = [put(world, i)[0] for i in range(16)]
    evict(world, 10)
    world.lease(A, 1, keys[15:], 50 * MS)
    out = world.decide(ev.Grant(world.now_ns, B, LARGE, 1))
    moves = [i for i in out if isinstance(i, do.Move)]
    assert not gone(out) and set(world.node.index) == set(keys[10:])
    for move in moves:
        assert world.node.index[move.key] == move.target
        assert move.freed.generation > move.source.generation
    world.check()


# --- cost ------------------------------------------------------------------------------------------------------------


class CountingLru(Lru):
    """Counts its operations."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()

    def add(self, slot: int, page: Page) -> None:
        """See ``Lru``."""
        self.operations["add"] += 1
        super().add(slot, page)

    def remove(self, slot: int) -> None:
        """See ``Lru``."""
        self.operations["remove"] += 1
        super().remove(slot)

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """See ``Lru``."""
        self.operations["victim"] += 1
        return super().victim(used_ms, now_ms)


def crowded(pages: int) -> World:
    """A node full of two-page chains, made without a client's help."""
    frames = 4096
    world = World(frames * 4096, -(-pages // frames))
    world.populate(list(range(world.node.positions)))
    world.state.segment.pools[SMALL] = ClassPool(SMALL, frames, CountingLru())
    reply = world.decide(ev.Grant(world.now_ns, A, SMALL, pages))[-1]
    assert isinstance(reply, do.Reply) and len(reply.addresses) == pages
    rows = np.zeros((2, 56), np.uint8)
    rows[:, 16:32] = np.frombuffer(root_of(SMALL), np.uint8)
    for i in range(0, pages, 2):
        for j in range(2):
            rows[j, :16] = np.frombuffer((2 * i + j + 1).to_bytes(16, "big"), np.uint8)
        event = ev.SealGranted(world.now_ns, A, SMALL, root_of(SMALL), reply.addresses[i : i + 2], rows.copy())
        world.decide(event)
    return world


def counting(world: World) -> Counter[str]:
    """From here on, what the state reads back is counted."""
    reads: Counter[str] = Counter()

    def counted(name: str, read: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            reads[name] += 1
            return read(*args)

        return call

    view = world.state.space.pages.records
    for name in ("key", "parent", "root", "standing", "last_use_ns", "snapshots", "find"):
        setattr(view, name, counted(name, getattr(view, name)))
    return reads


def test_the_cost_of_an_eviction_does_not_depend_on_how_many_pages_there_are() -> None:
    costs = []
    for pages in (8192, 32_768):
        world = crowded(pages)
        policy = world.state.segment.pools[SMALL].policy
        assert isinstance(policy, CountingLru)
        reads = counting(world)
        policy.operations.clear()
        out = world.state.handle(ev.Grant(world.now_ns, A, SMALL, 100))
        assert len(gone(out)) == 100
        costs.append((dict(policy.operations), dict(reads)))
    assert costs[0] == costs[1]
    assert max(max(counts.values()) for counts in costs[0]) <= 400, "a few steps per page"


def test_of_very_many_classes_those_without_extents_are_forgotten() -> None:
    """Clients may ask for frames of any geometry: what that leaves behind is bounded, and those in use stay."""
    segment = Segment(1 << 20, 8)
    classes = [FrameClass(4096 * (1 + number % 16), 16 * (1 + number // 16), 1) for number in range(3 * CLASSES_MAX)]
    used = [segment.pool(frame_class) for frame_class in classes[:4]]
    extents = [segment.carve(pool, position) for position, pool in enumerate(used)]
    for frame_class in classes:
        assert segment.pool(frame_class).frame_class == frame_class
        assert len(segment.pools) <= CLASSES_MAX
    assert [segment.pool(frame_class) for frame_class in classes[:4]] == used
    assert segment.pool(classes[-1]) is segment.pool(classes[-1])
    segment.uncarve(extents[0])
    for frame_class in classes:
        segment.pool(frame_class)
    assert used[0] not in segment.pools.values() and used[1] in segment.pools.values()


def test_a_class_that_is_only_named_costs_no_memory() -> None:
    segment = Segment(128 << 20, 512)  # 64 GiB: sixteen million of the smallest frames

    def size() -> int:
        return sum(len(pool.policy._ghosts._places) for pool in segment.pools.values())  # type: ignore[attr-defined]

    for tokens in range(1, 2001):
        segment.pool(FrameClass(4096, tokens, 1))
    assert len(segment.pools) <= CLASSES_MAX and size() < 4 << 20


# --- what a frame takes ----------------------------------------------------------------------------------------------


def test_counts_and_owners_are_as_wide_as_their_largest() -> None:
    segment = Segment(EXTENT_BYTES, 1)
    segment.populated = {0}
    extent = segment.carve(segment.pool(SMALL), 0)
    for largest, width in ((255, 1), (256, 2), (1 << 16, 4), (7, 4)):
        extent.set_children(3, largest)
        extent.set_owner(5, largest)
        assert list(extent.children) == [0, 0, 0, largest, 0, 0, 0, 0]
        assert list(extent.owner) == [0, 0, 0, 0, 0, largest, 0, 0]
        assert extent.children.itemsize == extent.owner.itemsize == width
        found = narrowest(np.array([0, largest], np.uint32))
        assert list(found) == [0, largest] and found.itemsize == {255: 1, 256: 2, 1 << 16: 4, 7: 1}[largest]


def test_a_page_that_very_many_follow_leaves_after_all_of_them() -> None:
    world = node(positions=40)
    first = put(world, 0)[0]
    for other in range(1, 300):
        put(world, 0, other)
    evict(world, pages=298)
    assert world.state.space.pages.find(first) is not None
    assert evict(world, pages=2)[-1] == first
