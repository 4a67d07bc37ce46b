"""Tiering: what a node saves to NVMe, loads from there, adopts after a reboot; what is held, and in what order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore.model.replica import Address, FrameClass, FrameState, Status, Tier, standing, turns_of
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state import integrity, space
from kvstore.state.interfaces import TieringRules
from kvstore.state.tier_pages import standings_of
from kvstore.state.tiering import demotion, extent_reclaim, promotion
from kvstore.tier.nvme import geometry
from tests.helpers.worlds.copying import Flight, WorldDisk
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.tiered_world import TieredWorld
from tests.helpers.worlds.world import MS, Chain

SMALL, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 2)
EXTENT_BYTES = 32 << 10  # of DRAM: 8 SMALL frames, 2 LARGE ones
NVME_EXTENT_BYTES = 136 << 10  # 16 SMALL frames, 6 LARGE ones
STRIDE = geometry.stride_bytes(SMALL)
A, B = 1, 2


def node(positions: int = 4, nvme_positions: int = 8, **rules: Any) -> TieredWorld:
    """A node with its memory there and two clients. It does not look ahead unless told to."""
    disk = WorldDisk(NVME_EXTENT_BYTES, nvme_positions, 1)
    world = TieredWorld(EXTENT_BYTES, positions, Nvme(disk, TieringRules(**{"demote_at": 1.0, **rules})))
    world.populate(list(range(positions)))
    for session in (A, B):
        world.open(session)
    return world


def put(world: TieredWorld, *path: int, frame_class: FrameClass = SMALL) -> list[bytes]:
    """Store a chain a millisecond later, each page marked as used then; returns its keys."""
    chain = Chain(frame_class, path)
    world.now_ns += MS
    stored = world.stored_pages(chain)
    anchor = chain.keys[stored - 1] if stored else b""
    for _ in range(6):
        missing = len(path) - stored - len(world.clients[A].granted.get(frame_class, []))
        if missing <= 0:
            break
        if not world.grant(A, frame_class, missing, anchor=anchor):
            world.settle()
    assert world.put(A, chain, stored) == [Status.OK] * (len(path) - stored)
    for key in chain.keys:
        world.use(key)
    return chain.keys


def demote(world: TieredWorld, bytes_max: int = 1 << 20, day_bytes_left: int = 0) -> list[do.Instruction]:
    """What the mover is told to save."""
    return world.decide(ev.Demote(world.now_ns, Tier.NVME, bytes_max, day_bytes_left))


def saves(instructions: list[do.Instruction]) -> list[list[bytes]]:
    """Keys of what is to be saved."""
    return [[page.key for page in i.pages] for i in instructions if isinstance(i, do.Save)]


def standing_in(world: TieredWorld, extent: int, frame: int) -> int:
    """What the record says of a page's place in its chain."""
    return world.state.space.pages.records.standing(extent, frame)


def fly(world: TieredWorld) -> None:
    """The mover finishes what it has, and asks for nothing."""
    while world.move_on():
        pass
    world.check()


def evict(world: TieredWorld, pages: int) -> int:
    """An operator wants pages to leave DRAM; returns how many did at once."""
    (reply,) = (i for i in world.decide(ev.Evict(world.now_ns, pages)) if isinstance(i, do.Reply))
    return int(reply.detail["pages"])


def save_all(world: TieredWorld) -> None:
    """Everything in DRAM is saved, and still there."""
    for _ in range(2 * len(world.state.segment.pools)):
        world.decide(ev.SaveAll(world.now_ns, 1 << 30))
        fly(world)
    assert world.node.index.keys() <= world.node.nvme_index.keys()


def leave(world: TieredWorld, pages: int) -> None:
    """So many pages leave DRAM for NVMe."""
    save_all(world)
    assert evict(world, pages) == pages


def extent_of(world: TieredWorld, key: bytes) -> int:
    """Where a page is in DRAM."""
    return world.node.index[key].extent


def pool_of(world: TieredWorld, frame_class: FrameClass = SMALL) -> Any:
    """The class's pages of DRAM."""
    return world.state.segment.pools[frame_class]


# --- down -------------------------------------------------------------------------------------------------------------


def test_a_chain_is_saved_whole_and_from_its_front() -> None:
    world = node()
    keys = put(world, 1, 2, 3, 4, 5)
    evict(world, 1)
    assert saves(demote(world, 2 * STRIDE)) == [keys[:2]]
    assert saves(demote(world, 2 * STRIDE)) == [], "one batch at a time"
    fly(world)
    assert saves(demote(world, 1)) == [keys[2:3]], "at least one page"
    fly(world)
    assert evict(world, 1) == 0
    assert saves(demote(world)) == [keys[3:]]
    fly(world)
    assert evict(world, 9) == 5
    assert set(world.node.nvme_index) == set(keys) and not world.node.index


def test_a_shared_prefix_is_saved_once() -> None:
    world = node()
    left, right = put(world, 1, 2, 3), put(world, 1, 2, 4)
    evict(world, 2)
    assert saves(demote(world)) == [[*left, right[2]]]
    fly(world)
    third = put(world, 1, 2, 5)
    evict(world, 9)
    assert saves(demote(world)) == [third[2:]]
    fly(world)
    assert world.state.counters["pages_saved"] == 5


def test_a_chain_that_is_saved_in_parts_is_looked_up_once() -> None:
    world = node(positions=8, nvme_positions=8)
    keys = put(world, *range(40))
    evict(world, 1)
    reads = 0
    records = world.state.space.pages.records
    lineage = records.lineage

    def counted(extent: int, frame: int) -> tuple[bytes, bytes, bytes]:
        nonlocal reads
        reads += 1
        return lineage(extent, frame)

    records.lineage = counted  # type: ignore[method-assign]
    saved: list[bytes] = []
    while len(saved) < 40:
        (part,) = saves(demote(world, 2 * STRIDE))
        saved += part
        fly(world)
    assert saved == keys
    assert reads == 40


# --- before the memory goes -------------------------------------------------------------------------------------------


def test_a_chain_whose_front_went_meanwhile_is_looked_up_again() -> None:
    """Below, by damage; or in DRAM, by being moved."""
    world = node()
    keys = put(world, *range(6))
    evict(world, 1)
    assert saves(demote(world, 2 * STRIDE)) == [keys[:2]]
    fly(world)
    world.damage_below(keys[0])
    assert saves(demote(world, 2 * STRIDE)) == [keys[:2]]
    fly(world)

    world = node(positions=2)
    cold = put(world, *range(100, 107))
    keys = put(world, *range(4))
    for key in cold[:4:-1]:
        world.damage(key)
    world.decide(ev.SaveAll(world.now_ns, 3 * STRIDE))
    fly(world)
    world.now_ns += 1000 * MS
    evict(world, 9)
    world.settle()
    world.check()
    assert set(keys) <= world.readable()


def test_a_last_save_begins_with_the_hottest_chain_and_at_its_front() -> None:
    world = node()
    cold, hot = put(world, 1, 2), put(world, 3, 4, 5)
    assert saves(world.decide(ev.SaveAll(world.now_ns, 2 * STRIDE))) == [hot[:2]]
    assert saves(world.decide(ev.SaveAll(world.now_ns, 2 * STRIDE))) == [], "one batch at a time"
    fly(world)
    assert saves(world.decide(ev.SaveAll(world.now_ns, 2 * STRIDE))) == [[hot[2], cold[0]]]
    fly(world)
    last = world.decide(ev.SaveAll(world.now_ns, 2 * STRIDE))
    assert saves(last) == [[cold[1]]]
    assert last[-1] == do.Reply(detail={"chains": 0, "under_way": 1, "begun": True})
    fly(world)
    assert world.node.nvme_index.keys() == world.node.index.keys(), "and nothing has left DRAM"


def test_a_last_save_lets_nothing_leave_for_what_is_colder() -> None:
    world = node(nvme_positions=1)
    keys = [put(world, i)[0] for i in range(20)]
    world.last_save(3 * STRIDE)
    assert world.node.nvme_index.keys() == set(keys[4:]), "the hottest that it holds"
    assert world.state.counters["pages_saved"] == 16


def test_a_last_save_keeps_what_is_not_worth_a_write() -> None:
    world = node(admission="reused")
    put(world, 1, 2)
    put(world, 3)
    again = put(world, 3, 4)
    world.last_save()
    assert world.node.nvme_index.keys() == set(again)


def test_what_the_first_chain_of_a_batch_hangs_on_is_not_evicted_for_the_second() -> None:
    world = node(nvme_positions=1)
    trunk = put(world, 1)
    others = [put(world, i)[0] for i in range(20, 35)]
    save_all(world)
    evict(world, 99)  # NVMe is full, and the trunk is its coldest leaf
    used = world.node.tables[world.node.nvme_index[trunk[0]].extent].last_use
    used[world.node.nvme_index[trunk[0]].frame] = 0
    world.prefetch(A, Chain(SMALL, (1,)))
    fly(world)
    branch = put(world, 1, 2)
    used[world.node.nvme_index[trunk[0]].frame] = 0
    other = put(world, 50)
    evict(world, 2)
    assert saves(demote(world)) == [[branch[1], other[0]]]
    assert trunk[0] in world.node.nvme_index and others[0] not in world.node.nvme_index
    fly(world)
    assert branch[1] in world.node.nvme_index


def test_an_extended_chain_is_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demotion, "CLIMB_MAX", 4)
    world = node()
    put(world, *range(10))
    evict(world, 1)
    assert saves(demote(world)) == []
    keys = put(world, *range(11))
    assert not pool_of(world).unsaved, "it is no leaf any more"
    evict(world, 1)
    for _ in range(3):
        saved = saves(demote(world))
    assert saved == [keys]
    fly(world)


def test_only_chains_that_were_used_again_are_saved() -> None:
    world = node(admission="reused")
    once = put(world, 1, 2)
    assert evict(world, 9) == 2, "nobody came back for it"
    trunk = put(world, 3, 4)
    again = put(world, 3, 4, 5)
    assert [turns_of(standing_in(world, *world.node.index[key][:2])) for key in again] == [0, 0, 1]
    assert evict(world, 9) == 0
    assert saves(demote(world)) == [again]
    fly(world)
    assert evict(world, 9) == 3
    assert set(world.node.nvme_index) == {*trunk, *again} and once[0] not in world.node.nvme_index


@pytest.mark.parametrize("left", [0, STRIDE - 1])
def test_what_the_daily_cap_keeps_out_leaves_as_it_is(left: int) -> None:
    world = node(write_bytes_per_day=10 * STRIDE)
    front, _ = put(world, 1, 2)
    put(world, 3)
    world.now_ns += MS
    world.use(front)
    assert evict(world, 9) == 0
    assert demote(world, day_bytes_left=left) == []
    assert evict(world, 2) == 2 and not world.node.nvme_index
    assert demote(world, day_bytes_left=STRIDE) == []
    assert evict(world, 1) == 0, "it is another day"
    assert saves(demote(world, day_bytes_left=STRIDE)) == [[Chain(SMALL, (1,)).keys[0]]]
    fly(world)


def test_what_is_on_its_way_counts_for_the_daily_cap() -> None:
    """A device that is late is passed by others, and a report may come after the day was looked at."""
    world = node(demote_at=0.0, write_bytes_per_day=3 * STRIDE)
    first, second = put(world, 1, 2), put(world, 11, 12)
    assert saves(demote(world, 2 * STRIDE, day_bytes_left=3 * STRIDE)) == [first]
    world.answer_late({position_of_page(world, first[0])}, set())
    assert saves(demote(world, day_bytes_left=3 * STRIDE)) == [second[:1]]
    assert evict(world, 9) == 0, "some of it may fail: the others wait for the reports"
    world.answer_late(set(), set())
    fly(world)
    assert demote(world, day_bytes_left=0) == []
    assert evict(world, 9) == 4 and set(world.node.nvme_index) == {*first, second[0]}


def test_looking_ahead_starts_at_its_share_and_keeps_to_its_part() -> None:
    world = node(demote_at=0.5)
    for i in range(16):
        put(world, i)
    assert demote(world) == [], "half of the frames, not more"
    keys = [put(world, i)[0] for i in range(16, 24)]
    (saved,) = saves(demote(world))
    assert saved == [Chain(SMALL, (i,)).keys[0] for i in range(len(saved))], "coldest first"
    assert 0 < len(saved) <= pool_of(world).frames // demotion.AHEAD_SHARE
    fly(world)
    assert demote(world) == [], "that many are kept ready"
    assert set(world.node.index) >= set(keys)
    assert world.grant(B, SMALL, 10) == 10, "eight that were free and two that were ready"


def test_pages_that_wait_for_being_saved_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "UNSAVED_MAX", 5)
    world = node()
    for i in range(20):
        put(world, i)
    assert evict(world, 20) == 0
    assert len(pool_of(world).unsaved) == 5
    world.check()
    world.settle()
    assert evict(world, 20) == 5
    world.check()


def test_a_put_sets_no_more_aside_than_it_needs() -> None:
    world = node(positions=12)
    for i in range(96):
        put(world, i)
    assert world.grant(B, SMALL, 2) == 0 and world.status == Status.BUSY
    assert len(pool_of(world).unsaved) <= 2 + space.EVICT_STEP


def test_a_page_used_while_it_waits_stays() -> None:
    """Before it is saved, while it is being copied, and when it is ready."""
    for when in ("unsaved", "flying", "ready"):
        world = node()
        hot, cold = put(world, 1), put(world, 2)
        evict(world, 2)
        for step in ("unsaved", "flying", "ready"):
            if when == step:
                world.now_ns += MS
                world.use(hot[0])
            if step == "unsaved":
                demote(world)
            elif step == "flying":
                fly(world)
        assert evict(world, 1) == 1
        assert set(world.node.index) == set(hot), when
        assert set(world.node.nvme_index) == {*hot, *cold}
        assert evict(world, 1) == 1, "it has its copy"
        world.check()


def test_a_put_is_told_to_ask_again_until_a_frame_is_free() -> None:
    world = node(positions=1)
    keys = [put(world, i)[0] for i in range(8)]
    assert world.grant(B, SMALL, 1) == 0 and world.status == Status.BUSY
    demote(world)
    assert world.grant(B, SMALL, 1) == 0 and world.status == Status.BUSY, "on its way"
    fly(world)
    assert world.grant(B, SMALL, 1) == 1
    chain = Chain(SMALL, (77, 78))
    assert world.put(B, Chain(SMALL, (77,))) == [Status.OK]
    event = ev.Reserve(world.now_ns, B, SMALL, 1, 0, 1, 10**9, chain.parents[1], chain.rows[1:])
    (reply,) = (i for i in world.decide(event) if isinstance(i, do.Reply))
    assert reply.statuses[0] in (Status.OK, Status.BUSY)
    assert set(keys) <= world.readable()


def test_a_put_of_a_class_without_extents_waits_for_the_other_class() -> None:
    world = node(positions=2)
    for i in range(16):
        put(world, i)
    assert world.grant(B, LARGE, 1) == 0 and world.status == Status.BUSY
    demote(world)
    assert world.grant(B, LARGE, 1) == 0 and world.status == Status.BUSY
    fly(world)
    assert world.grant(B, LARGE, 1) == 1
    assert world.state.counters["evicted_reclaim"] == 0 and world.state.counters["demoted"] == 8
    world.check()


@pytest.mark.parametrize("both", [False, True])
def test_pages_being_copied_are_not_moved(both: bool) -> None:
    world = node(positions=2)
    keys = [put(world, i)[0] for i in range(16)]
    save_all(world)
    by_extent = {extent: [key for key in keys if extent_of(world, key) == extent] for extent in (1, 2)}
    for extent in (1, 2) if both else (1,):
        world.damage(by_extent[extent].pop())  # its frame is the only free one
        new = put(world, 100 + extent)[0]
        assert extent_of(world, new) == extent
    for extent in (1, 2):
        for key in by_extent[extent][:4] if extent == 1 else by_extent[extent][:2]:
            world.damage(key)
    world.decide(ev.SaveAll(world.now_ns, 1 << 20))
    flying = {page.key: page.source for copy in world.node.copies for page in copy.pages}
    assert {address.extent for address in flying.values()} == ({1, 2} if both else {1})
    world.now_ns += 1000 * MS
    granted = world.grant(B, LARGE, 1)
    assert (granted, world.status) == ((0, Status.BUSY) if both else (1, Status.OK))
    assert {key: world.node.index[key] for key in flying} == flying, "the emptier extent was passed over"
    fly(world)
    assert world.node.nvme_index.keys() >= flying.keys()
    assert not both or world.grant(B, LARGE, 1) == 1


def test_classes_take_turns() -> None:
    world = node(positions=6)
    for i in range(16):
        put(world, i)
    large = [put(world, i, frame_class=LARGE)[0] for i in range(4)]
    evict(world, 99)
    order = []
    for _ in range(4):
        order.append(saves(demote(world, 2 * geometry.stride_bytes(LARGE)))[0])
        fly(world)
    classes = ["large" if key in large else "small" for (key, *_) in order]
    assert classes in (["small", "large"] * 2, ["large", "small"] * 2)


def test_nvme_evicts_its_own_tails_for_what_comes() -> None:
    world = node(positions=4, nvme_positions=1)
    first = [put(world, i)[0] for i in range(16)]
    leave(world, 16)
    second = put(world, 50, 51)
    evict(world, 9)
    out = demote(world)
    assert [i.keys for i in out if isinstance(i, do.Unindex)] == [first[:2]]
    assert [i.tier for i in out if isinstance(i, do.Unindex)] == [Tier.NVME]
    fly(world)
    assert set(world.node.nvme_index) == {*first[2:], *second}
    assert world.state.spaces[Tier.NVME].pages.counters["evicted_space"] == 2


def test_what_a_save_hangs_on_stays_in_nvme() -> None:
    world = node(positions=4, nvme_positions=1)
    trunk = put(world, 1)
    save_all(world)
    others = [put(world, i)[0] for i in range(20, 35)]
    save_all(world)
    branch = put(world, 1, 2)
    evict(world, 99)
    out = demote(world)
    assert branch[1:] in saves(out)
    assert trunk[0] in world.node.nvme_index and len(world.node.nvme_index) == 15
    for i in range(60, 80):
        put(world, i)  # no more room is made meanwhile by evicting the trunk
    fly(world)
    assert branch[1] in world.node.nvme_index
    assert len([key for key in others if key in world.node.nvme_index]) >= 13


def test_pages_that_an_event_has_moved_are_not_evicted_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extent of NVMe is emptied in steps, and others take the room meanwhile: pages that have just been carried are
    the coldest then, and have no record yet where they are now."""
    monkeypatch.setattr(extent_reclaim, "CARRY_BYTES_MAX", 2 * STRIDE)
    world = node(positions=6, nvme_positions=2)
    first = [put(world, i)[0] for i in range(16)]
    leave(world, 16)
    second = [put(world, i)[0] for i in range(16, 32)]
    leave(world, 16)
    for key in (*first[8:], *second[12:]):
        world.damage_below(key)
    put(world, 900, frame_class=LARGE)
    demote_all(world)
    reclaim = world.state.tiering.pairs[Tier.NVME].reclaim
    (carry,) = world.node.copies
    assert reclaim.taker is not None and isinstance(carry, do.Carry) and len(carry.pages) == 2
    new = [put(world, i)[0] for i in range(40, 42)]
    for key in world.node.nvme_index.keys() - {page.key for page in carry.pages}:
        world.use(key)
    demote_all(world)
    assert saves(list(world.node.copies)) == [new], "they take what was free beside the extent"
    while world.node.copies or world.flights:
        world.move_on()
    world.check()
    world.settle()
    assert reclaim.taker is None and world.node.nvme_index.keys() >= {*second[:12], *new}


def demote_all(world: TieredWorld) -> None:
    """Everything in DRAM is to leave; returns when it is decided what is copied for that."""
    evict(world, 99)
    demote(world)


def test_what_nvme_has_no_room_for_leaves_as_it_is() -> None:
    """All of NVMe is held by copies on their way up: nothing may leave there."""
    world = node(positions=4, nvme_positions=1)
    chains = [put(world, i, i)[0:] for i in range(8)]
    leave(world, 16)
    for keys in chains:
        world.prefetch(A, Chain(SMALL, (chains.index(keys),) * 2))
    assert len(world.state.tiering.copies.loading) == 8
    extra = put(world, 90, 91, 92)
    evict(world, 9)
    assert saves(demote(world)) == []
    assert world.state.counters["save_refused_space"] == 1
    assert evict(world, 3) == 3, "the whole chain, at once"
    assert world.state.counters["evicted_request"] == 3
    fly(world)
    assert not world.readable() & set(extra)
    put(world, 90)
    assert demote(world) == []
    assert evict(world, 99) == 16, "the others have their copies; there is room again, so the new page waits"
    world.settle()
    assert world.node.nvme_index.keys() >= {extra[0]}


def test_of_a_batch_that_failed_in_the_middle_the_front_is_kept() -> None:
    world = node()
    keys = put(world, 1, 2, 3)
    evict(world, 1)
    demote(world)
    (save,) = world.node.copies
    world.node.copies.clear()
    heads = np.stack([world.node.tables[page.source.extent].rows[page.source.frame, 8:56] for page in save.pages])
    out = world.decide(ev.Saved(world.now_ns, save.number, heads, {1: "io"}))
    assert [i.keys for i in out if isinstance(i, do.WriteSealed)] == [keys[:1]]
    freed = [i.addresses for i in out if isinstance(i, do.WriteState)]
    assert [[a[:2] for a in addresses] for addresses in freed] == [[page.target[:2] for page in save.pages[1:]]]


def test_a_record_that_changed_its_mind_is_not_sealed() -> None:
    world = node()
    put(world, 1)
    evict(world, 1)
    demote(world)
    (save,) = world.node.copies
    world.node.copies.clear()
    heads = np.zeros((1, 48), np.uint8)
    out = world.decide(ev.Saved(world.now_ns, save.number, heads, {}))
    assert not any(isinstance(i, do.WriteSealed) for i in out) and not world.node.nvme_index


# --- damage while copies are under way --------------------------------------------------------------------------------


def test_a_page_dropped_after_it_was_written_is_not_sealed_below() -> None:
    """It may be the copy that is damaged."""
    world = node()
    keys = put(world, 1, 2, 3)
    evict(world, 1)
    demote(world)
    for _ in range(3):
        world.move_on()
    world.damage(keys[1])
    fly(world)
    assert set(world.node.nvme_index) == set(keys[:1])


def test_a_page_whose_copy_was_damaged_is_saved_again() -> None:
    world = node()
    keys = put(world, 1, 2)
    save_all(world)
    world.damage_below(keys[0])
    assert not world.node.nvme_index
    assert evict(world, 9) == 0, "they were ready, and are not any more"
    world.settle()
    assert set(world.node.nvme_index) == set(keys) and evict(world, 9) == 2


# --- up ---------------------------------------------------------------------------------------------------------------


def prefetch(world: TieredWorld, *keys: bytes, hint: bool = False) -> tuple[list[int], list[do.Instruction]]:
    """Ask for these pages of NVMe; statuses and everything before them."""
    addresses = [world.node.nvme_index[key] for key in keys]
    *out, reply = world.decide(ev.Prefetch(world.now_ns, A, addresses, hint))
    assert isinstance(reply, do.Reply)
    return reply.statuses, out


def below(world: TieredWorld, *path: int) -> list[bytes]:
    """A chain that is on NVMe only."""
    keys = put(world, *path)
    leave(world, len(world.node.index))
    return keys


def test_why_a_page_is_not_loaded() -> None:
    world = node(positions=1)
    keys = below(world, 1, 2, 3)
    gone = world.node.nvme_index[keys[2]]._replace(generation=1)
    *_, reply = world.decide(ev.Prefetch(world.now_ns, A, [gone]))
    assert isinstance(reply, do.Reply) and reply.statuses == [Status.STALE]
    assert prefetch(world, keys[1])[0] == [Status.NO_PARENT]
    assert world.grant(B, SMALL, 8) == 8
    assert prefetch(world, *keys)[0] == [Status.NO_SPACE] * 3
    world.revoke(B, world.clients[B].granted[SMALL][:2])
    assert prefetch(world, *keys)[0] == [Status.BUSY] * 3, "two are on their way, the third may ask again"
    fly(world)
    assert len(world.node.index) == 2
    world.check()


def test_pages_of_another_class_and_named_twice_do_no_harm() -> None:
    world = node()
    small, large = put(world, 1, 2), put(world, 1, frame_class=LARGE)
    save_all(world)
    evict(world, 9)
    statuses, out = prefetch(world, small[0], small[0], large[0], small[1])
    assert statuses == [Status.BUSY, Status.BUSY, Status.NO_PARENT, Status.BUSY]
    assert [page.key for i in out if isinstance(i, do.Load) for page in i.pages] == small
    fly(world)
    assert set(world.node.index) == set(small)


def test_a_page_is_promoted_after_so_many_reads() -> None:
    world = node(promote_after=3)
    keys = below(world, 1, 2)
    for _ in range(2):
        assert prefetch(world, *keys, hint=True) == ([Status.PARTIAL] * 2, [])
    assert prefetch(world, *keys, hint=True)[0] == [Status.BUSY] * 2
    fly(world)
    evict(world, 9)
    assert not world.node.index
    assert prefetch(world, *keys, hint=True)[0] == [Status.PARTIAL] * 2, "it is counted anew"


def test_reads_of_what_was_in_a_frame_before_do_not_count() -> None:
    world = node(nvme_positions=1, promote_after=2)
    keys = below(world, 1)
    prefetch(world, *keys, hint=True)
    world.damage_below(keys[0])
    for i in range(2, 18):
        new = below(world, i)
        assert prefetch(world, *new, hint=True)[0] == [Status.PARTIAL]


def test_what_is_loaded_at_a_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "LOADING_BYTES_MAX", 2 * SMALL.page_bytes)
    world = node()
    keys = below(world, 1, 2, 3)
    statuses, out = prefetch(world, *keys)
    assert statuses == [Status.BUSY] * 3
    assert [page.key for i in out if isinstance(i, do.Load) for page in i.pages] == keys[:2]
    fly(world)
    monkeypatch.setattr(promotion, "LOADING_BYTES_MAX", 1)
    prefetch(world, *keys)
    fly(world)
    assert set(world.node.index) == set(keys), "a page larger than the bound is loaded alone"


def test_what_a_load_hangs_on_stays_until_the_load_has_ended() -> None:
    world = node(positions=1)
    keys = below(world, 1, 2, 3)
    prefetch(world, *keys[:1])
    fly(world)
    prefetch(world, *keys[:2])
    prefetch(world, *keys)
    assert evict(world, 9) == 0, "the second page hangs on the first"
    number = world.node.copies[0].number
    while number in world.state.tiering.copies.loading:
        world.move_on()
    assert evict(world, 9) == 0, "the third page hangs on the second, which has just arrived"
    fly(world)
    assert set(world.node.index) == set(keys)


def test_reservations_follow_what_is_loaded() -> None:
    world = node()
    chain = Chain(SMALL, (1, 2))
    below(world, 1)
    prefetch(world, chain.keys[0])
    other = Chain(SMALL, (1, 9))
    assert world.reserve(B, 1, 0, 1, other, 0, 10**9) == [Status.OK] * 2
    addresses = [address for address, _ in world.clients[B].writing]
    assert world.seal(B, 0, addresses[1:]) == [Status.PARTIAL]
    fly(world)
    assert other.keys[1] in world.node.index, "its parent came from NVMe"
    assert world.seal(B, 0, addresses[:1]) == [Status.PRESENT]
    world.check()


# --- devices that fail ------------------------------------------------------------------------------------------------


def test_a_failed_device_is_read_on_and_dram_goes_on() -> None:
    world = node(positions=1)
    keys = below(world, 1, 2)
    new = [put(world, i)[0] for i in range(10, 18)]
    assert evict(world, 3) == 0
    world.fail(set(range(8)))
    world.check()
    assert evict(world, 3) == 3, "nobody can save them"
    assert demote(world) == [] and evict(world, 1) == 1
    world.prefetch(A, Chain(SMALL, (1, 2)))
    fly(world)
    assert set(keys) <= world.node.index.keys()
    assert len(set(new) & world.node.index.keys()) == 4
    assert not world.state.tiering.pairs[Tier.NVME].demotion.writable


def test_pages_of_a_failed_device_leave_in_their_turn() -> None:
    world = node(positions=4, nvme_positions=2)
    for i in range(32):
        put(world, i)
    leave(world, 32)
    world.fail({0})
    keys = [put(world, i)[0] for i in range(40, 60)]
    evict(world, 99)
    assert len(saves(demote(world))[0]) == 16, "those of the failed one are the colder ones, and make no room"
    world.settle()
    assert world.state.counters["save_refused_space"] == 0
    assert len([key for key in keys if key in world.node.nvme_index]) == 16, "what the other device holds"
    assert world.state.tiering.pairs[Tier.NVME].demotion.writable
    world.check()


# --- starting again ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_believed_until_somebody_writes() -> None:
    world = node(positions=8)
    keys = [put(world, i)[0] for i in range(20)]  # of two extents on NVMe
    save_all(world)
    for position in sorted(world.node.pages.devices.extents):
        taken = world.snapshot(position)
        assert taken is not None and world.checkpoint(taken)
    fresh = put(world, 100)
    save_all(world)
    world.reboot()
    assert len(world.node.nvme_index) == 16
    while world.scan_on():
        pass
    assert set(world.node.nvme_index) == {*keys, *fresh}
    world.check()


def test_only_frames_that_wait_are_adopted() -> None:
    world = node()
    (key,) = below(world, 1)
    chain = Chain(SMALL, (7,))
    row = np.frombuffer(chain.rows[0, :48].tobytes(), np.uint8).reshape(1, 48)
    for address in (world.node.nvme_index[key], Address(99, 0, 5)):
        event = ev.Adopt(world.now_ns, [address], row, [chain.parents[0]], [standing(0, 0)])
        assert world.decide(event) == []
    assert set(world.node.nvme_index) == {key}


# --- laws and costs ---------------------------------------------------------------------------------------------------


def test_integrity_sees_what_is_wrong_below() -> None:
    world = node()
    keys = below(world, 1, 2)
    shell = world.node
    address = shell.nvme_index[keys[1]]

    def findings() -> list[str]:
        return integrity.check(world.state, Tier.NVME, shell.snapshots(Tier.NVME), shell.nvme_index.items())

    assert findings() == []
    extent = world.state.spaces[Tier.NVME].segment.extents[address.extent]
    extent.children[address.frame] += 1
    assert any("children" in finding for finding in findings())
    extent.children[address.frame] -= 1
    del shell.nvme_index[keys[1]]
    assert any("the index has 1" in finding for finding in findings())
    shell.nvme_index[keys[1]] = address
    extent.state[next(f for f in range(extent.frames) if extent.state[f] == FrameState.FREE)] = FrameState.RESERVED
    assert any("reserved" in finding for finding in findings())


def test_the_cost_of_a_save_does_not_depend_on_how_many_pages_there_are() -> None:
    costs = []
    for pages in (200, 800):
        world = node(positions=pages // 8, nvme_positions=pages // 8)
        for i in range(0, pages, 4):
            put(world, i, i + 1, i + 2, i + 3)
        save_all(world)
        put(world, 7000, 1)
        reads = 0
        records = world.state.space.pages.records
        key = records.key

        def counted(extent: int, frame: int, key: Callable[[int, int], bytes] = key) -> bytes:
            nonlocal reads
            reads += 1
            return key(extent, frame)

        records.key = counted  # type: ignore[method-assign]
        world.state.handle(ev.Grant(world.now_ns, A, SMALL, 4))
        world.state.handle(ev.Demote(world.now_ns, Tier.NVME, 1 << 20))
        costs.append(reads)
    assert abs(costs[0] - costs[1]) <= 4  # frees at most one frame in 256 more


@pytest.mark.parametrize("position", [0, 3, 65_500, 65_535, 70_000])
def test_standings_of_a_chain_are_those_of_its_pages(position: int) -> None:
    for turns in (0, 2, 300):
        expected = [standing(position + i, turns) for i in range(64)]
        assert standings_of(position, turns, 64) == expected


# --- pages that go through ------------------------------------------------------------------------------------------


def test_a_page_waits_no_longer_than_the_copy_of_one_that_was_given_up() -> None:
    """Two writers of one page behind what only NVMe has: the deadline of the first passes while its page is saved."""
    world = node(demote_at=0.0)
    keys = put(world, 1, 2, 3)
    world.settle()
    assert world.evict(pages=3) == 3 and world.nvme_pages(Chain(SMALL, (1, 2, 3))) == 3
    chain = Chain(SMALL, (1, 2, 3, 4, 5))
    for session, group, ttl_ns in ((A, 7, 10 * MS), (B, 8, 1000 * MS)):
        assert world.reserve(session, group, 0, 1, chain, 3, ttl_ns) == [Status.OK] * 2
    pages = {session: [a for a, _ in world.clients[session].writing] for session in (A, B)}
    assert world.seal(A, 0, pages[A]) == [Status.BUSY] * 2
    assert world.move_on(), "A's pages are on their way"
    world.tick(20 * MS)
    assert world.seal(B, 0, pages[B]) == [Status.BUSY] * 2
    world.settle()
    assert chain.keys[:3] == keys and world.nvme_pages(chain) == 5, "B's pages wait for their deadline"
    assert not world.state.pending
    world.check()


def test_a_page_waits_no_longer_than_the_second_copy_of_its_parent() -> None:
    """A writer seals a page that NVMe has by now: it is saved again, for nothing. What hangs on it waits for that."""
    world = node(demote_at=0.0)
    put(world, 1, 2)
    world.settle()
    assert world.evict(pages=2) == 2 and world.nvme_pages(Chain(SMALL, (1, 2))) == 2
    chain, longer = Chain(SMALL, (1, 2, 3)), Chain(SMALL, (1, 2, 3, 4))
    for session, group in ((A, 7), (B, 8)):
        assert world.reserve(session, group, 0, 1, chain, 2, 10**15) == [Status.OK]
    pages = {session: [a for a, _ in world.clients[session].writing] for session in (A, B)}
    assert world.seal(A, 0, pages[A]) == [Status.BUSY]
    world.settle()
    assert world.nvme_pages(chain) == 3
    assert world.seal(B, 0, pages[B]) == [Status.BUSY]
    assert world.move_on(), "B's copy is on its way"
    assert world.reserve(A, 9, 0, 1, longer, 3, 10**15) == [Status.OK]
    assert world.seal(A, 0, [a for a, _ in world.clients[A].writing]) == [Status.BUSY]
    world.settle()
    assert world.nvme_pages(longer) == 4
    assert not world.state.pending
    world.check()


# --- devices that do not answer -------------------------------------------------------------------------------------


def position_of_page(world: TieredWorld, key: bytes) -> int:
    """Where on NVMe this page is, or is about to be."""
    assert world.state.tiering is not None
    copies = world.state.tiering.copies
    targets = {page.key: page.target for batch in copies.saving.values() for page in batch.pages}
    return world.node.tables[(targets.get(key) or world.node.nvme_index[key]).extent].position


def go_on(world: TieredWorld) -> None:
    """The mover does what devices that answer let it do."""
    for _ in range(4):
        world.demote()
        while world.move_on():
            pass


def two_devices() -> tuple[TieredWorld, dict[int, list[bytes]]]:
    """A node with a device per position, and a chain of four pages on each, which DRAM does not have."""
    world, found = node(demote_at=0.0, nvme_positions=2), dict[int, list[bytes]]()
    for number in (100, 200):
        keys = put(world, *range(number, number + 4))
        go_on(world)
        found[position_of_page(world, keys[0])] = keys
        other = next(iter(found))
        world.answer_late({other}, set())  # so that the next chain lies on the other one
        assert world.evict(pages=4) == 4
    world.answer_late(set(), set())
    assert sorted(found) == [0, 1] and all(position_of_page(world, k) == at for at, keys in found.items() for k in keys)
    return world, found


def test_saves_go_on_beside_a_device_that_does_not_answer() -> None:
    world, found = two_devices()
    first = put(world, 1, 2)
    world.demote()
    silent = position_of_page(world, first[0])
    second = put(world, 11, 12)
    world.demote()
    assert not world.node.nvme_index.keys() & {*first, *second}, "one batch at a time"
    world.answer_late({silent}, set())
    hanging = put(world, 1, 2, 3)
    go_on(world)
    assert all(position_of_page(world, key) == 1 - silent for key in second)
    assert not world.node.nvme_index.keys() & set(hanging), "what hangs on a late page waits for it"
    world.check()
    world.settle()
    assert {*hanging, *second} <= world.node.nvme_index.keys()
    assert sorted(found) == [0, 1]


def test_nothing_is_given_up_while_only_a_late_device_has_room() -> None:
    world, found = two_devices()
    for at in (0, 1):
        world.fail({at})
        world.answer_late({at}, set())
    keys = put(world, 1, 2)
    world.demote()
    assert not world.node.copies
    assert world.evict(pages=2) == 2, "no device takes writes: they leave as they are"
    assert not world.node.nvme_index.keys() & set(keys)
    world, found = two_devices()
    world.fail({0})
    world.answer_late({1}, set())
    keys = put(world, 1, 2)
    world.demote()
    assert not world.node.copies and world.evict(pages=2) == 0, "they wait until the device answers"
    assert all(key in world.node.nvme_index for there in found.values() for key in there), "nothing makes room for them"
    world.settle()
    assert set(keys) <= world.node.nvme_index.keys() and sorted(found) == [0, 1]


def test_a_last_save_goes_on_beside_a_late_device_and_comes_back_for_what_hangs_there() -> None:
    world, _ = two_devices()
    others, keys = put(world, 11, 12), put(world, 1, 2, 3)
    world.decide(ev.SaveAll(world.now_ns, 2 * STRIDE))
    world.answer_late({position_of_page(world, keys[0])}, set())
    world.last_save()
    assert {*others, *keys} & world.node.nvme_index.keys() == set(others)
    world.answer_late(set(), set())
    world.last_save()
    assert {*others, *keys} <= world.node.nvme_index.keys()
    world.check()


def test_pages_of_a_late_device_make_no_room() -> None:
    """They are the coldest, and stay: their frames could be had only when it answers."""
    world, found = two_devices()
    (late, theirs), (at, others) = found.items()  # the first was stored first
    world.answer_late({late}, set())
    for number in range(300, 340, 4):  # more than the other one holds
        keys = put(world, *range(number, number + 4))
        go_on(world)
        assert {position_of_page(world, key) for key in keys} == {at}
        assert world.evict(pages=4) == 4
    assert set(theirs) <= world.node.nvme_index.keys() and not set(others) & world.node.nvme_index.keys()
    world.check()
    world.settle()


def test_loads_of_another_device_come_first_where_one_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotion, "LOADING_BYTES_MAX", 4 * SMALL.page_bytes)
    world, found = two_devices()
    (silent, theirs), (_, others) = sorted(found.items())
    assert prefetch(world, *theirs)[0] == [Status.BUSY] * 4
    assert prefetch(world, *others)[0] == [Status.BUSY] * 4
    while world.node.copies:  # taken up, and nothing read yet
        world.flights.append(Flight(world.node.copies.popleft()))
    assert world.state.tiering is not None and len(world.state.tiering.copies.loading) == 1, "there is no room for more"
    world.answer_late(set(), {silent})
    assert prefetch(world, *others)[0] == [Status.BUSY] * 4
    while world.move_on():
        pass
    assert set(others) <= world.node.index.keys() and not set(theirs) & world.node.index.keys()
    assert prefetch(world, *others)[0] == [Status.OK] * 4
    world.check()
    world.settle()
    assert set(theirs) <= world.node.index.keys()


def test_a_load_that_is_done_before_the_one_it_hangs_on_waits_for_it() -> None:
    world, found = two_devices()
    keys = next(iter(found.values()))
    assert prefetch(world, *keys[:2])[0] == [Status.BUSY] * 2
    assert prefetch(world, *keys)[0] == [Status.BUSY] * 4
    while world.node.copies:
        world.flights.append(Flight(world.node.copies.popleft()))
    first, second = world.flights
    world.flights = [second]
    while world.flights:
        world.move_on()
    assert not set(keys) & world.node.index.keys()
    world.flights = [first]
    while world.flights:
        world.move_on()
    assert set(keys) <= world.node.index.keys()
    world.check()
