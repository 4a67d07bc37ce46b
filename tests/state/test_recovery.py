"""Recovery: what a node keeps and what it gives up when it starts from the records of one that died."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.model.replica import Address, FrameClass, FrameState, Status
from kvstore.state import events as ev
from kvstore.state import instructions as do
from tests.helpers.worlds.world import MS, Chain, World

SMALL, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 2)
EXTENT_BYTES = 32 << 10  # 8 SMALL frames, 2 LARGE ones
CHAIN = Chain(SMALL, (1, 2, 3))
TTL_NS = 1000 * MS
A, B = 1, 2


def node(positions: int = 3) -> World:
    """A node with its memory there, two clients, and CHAIN stored by the first."""
    world = World(EXTENT_BYTES, positions)
    world.populate(list(range(positions)))
    for session in (A, B):
        world.open(session)
    world.grant(A, SMALL, 3)
    world.put(A, CHAIN)
    return world


def state_of(world: World, address: Address) -> FrameState:
    """What the record says of the frame."""
    return world.node.frame_state(address.extent, address.frame)


def test_frames_of_writers_that_may_live_stay_theirs() -> None:
    world = node()
    world.grant(B, SMALL, 2)
    world.reserve(A, 1, 0, 2, Chain(SMALL, (1, 2, 3, 4)), 3, TTL_NS)
    world.restart()
    assert len(world.state.sessions[B].granted) == 2
    assert not world.state.sessions[B].connected
    (page,) = world.state.pending.by_address.values()
    assert (page.group, page.shards, page.writing, page.holds_parent) == (1, 2, {0: A}, True)
    world.check()
    assert world.put(B, Chain(SMALL, (7, 8))) == [Status.OK] * 2
    assert world.reserve(B, 1, 1, 2, Chain(SMALL, (1, 2, 3, 4)), 3, TTL_NS) == [Status.JOINED]
    assert world.seal(A, 0, [page.address]) == [Status.PARTIAL]
    assert world.seal(B, 1, [page.address]) == [Status.OK]
    world.check()


def test_quarantine_outlives_the_daemon() -> None:
    world = node()
    world.reserve(B, 1, 0, 1, Chain(SMALL, (1, 2, 3, 4)), 3, TTL_NS)
    (address,) = world.state.pending.by_address
    world.tick(TTL_NS)
    world.restart()
    assert state_of(world, address) == FrameState.QUARANTINED
    assert not world.node.pend and world.state.pending.by_address[address].doomed
    assert world.seal(B, 0, [address]) == [Status.STALE]
    assert state_of(world, address) == FrameState.FREE
    world.check()


def test_leases_last_until_their_deadlines_without_their_names() -> None:
    world = node()
    key = CHAIN.keys[2]
    address = world.node.index[key]
    world.lease(B, 1, [key], 50 * MS)
    world.restart()
    assert world.evict(pages=3) == 0
    assert not world.renew(B, 1, 50 * MS), "it has to be taken again"
    world.tick(50 * MS)
    assert world.node.is_sealed(address) and world.evict(pages=3) == 3
    world.check()


def test_a_frame_whose_last_lease_ended_without_a_daemon_is_free() -> None:
    world = node()
    key = CHAIN.keys[2]
    address = world.node.index[key]
    world.lease(B, 1, [key], 50 * MS)
    world.damage(key)
    assert state_of(world, address) == FrameState.RETIRING
    world.now_ns += 50 * MS
    world.restart()
    assert state_of(world, address) == FrameState.FREE
    world.check()


def test_a_lease_deadline_is_no_longer_than_the_node_allows() -> None:
    world = node()
    address = world.node.index[CHAIN.keys[2]]
    world.node.leases(address.extent)[address.frame] = 2**63
    world.restart()
    world.tick(world.options["lease_ttl_ns_max"])
    assert world.evict(pages=1) == 1


def test_a_page_whose_record_does_not_hold_goes_with_its_descendants() -> None:
    world = node()
    world.grant(A, SMALL, 1)
    other = Chain(SMALL, (9,))
    world.put(A, other)
    address = world.node.index[CHAIN.keys[1]]
    world.node.tables[address.extent].rows[address.frame, 58] ^= 4
    world.stored -= set(CHAIN.keys[1:])
    world.restart()
    assert set(world.node.index) == {CHAIN.keys[0], other.keys[0]}
    assert world.dropped_at_start == 2
    world.check()


def test_a_word_that_says_nothing_is_a_frame_nobody_gets_while_its_writer_lives() -> None:
    world = node()
    world.grant(B, SMALL, 1)
    (address,) = world.frames(B, SMALL)
    world._claim(B, [address])
    world.node.tables[address.extent].words[address.frame] |= 0x40
    world.restart()
    world.check()
    assert world.grant(A, SMALL, 8) == 7
    world.kill(B)
    world.check()
    assert world.grant(A, SMALL, 1) == 1


@pytest.mark.parametrize("step", range(6))
def test_a_move_cut_short_leaves_one_copy(step: int) -> None:
    world = node(positions=2)
    world.grant(A, SMALL, 6)
    world.put(A, Chain(SMALL, (5, 6, 7, 8, 9, 10)))
    world.now_ns += MS
    for key in CHAIN.keys:
        world.use(key)
    world.evict(pages=3)
    index, keys = dict(world.node.index), set(world.node.index)
    out = world.state.handle(ev.Grant(world.now_ns, B, LARGE, 1))
    moves = [i for i in out if isinstance(i, do.Move)]
    assert moves
    before = out.index(moves[0])
    world.node.perform(out[:before])
    world.node.perform(moves[:1], steps=step)
    copies = [a for a in (moves[0].source, moves[0].target) if world.node.is_sealed(a)]
    assert len(copies) == (1, 1, 1, 2, 1, 1)[step]
    world.restart()
    assert set(world.node.index) == keys
    kept = {key: address for key, address in world.node.index.items() if key != moves[0].key}
    assert kept.items() <= index.items()
    assert world.dropped_at_start == len(copies) - 1
    world.check()


@pytest.mark.parametrize("steps", range(14))
def test_a_put_cut_short_is_all_or_a_prefix(steps: int) -> None:
    world = node()
    chain = Chain(SMALL, (5, 6, 7))
    world.grant(B, SMALL, 3)
    frames = world.frames(B, SMALL)
    sums = np.arange(6, dtype=np.uint32).reshape(3, 2)
    event = ev.SealGranted(world.now_ns, B, SMALL, chain.parents[0], frames, chain.rows, sums)
    world.tried.update(chain.keys)
    world.node.perform(world.state.handle(event), steps)
    world.restart()
    stored = world.stored_pages(chain)
    assert set(world.node.index) == {*CHAIN.keys, *chain.keys[:stored]}
    world.check()
    world.tick(1)
    world.check()


def test_extent_numbers_go_on_even_where_the_last_one_is_gone() -> None:
    world = node()
    world.node.performer.header.next_extent = 7
    world.restart()
    world.populate([1, 2])
    world.grant(A, SMALL, 9)
    assert max(world.node.tables) == 7
