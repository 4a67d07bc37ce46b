"""Reserve, seal, revoke: what the node decides about pages that several may write, event by event."""

from __future__ import annotations

from kvstore.model.replica import FETCH_GROUP, Address, FrameClass, FrameState, Status, hint_byte_in, hint_in
from kvstore.model.retention import REPLICATED
from kvstore.state import events as ev
from kvstore.state import instructions as do
from tests.helpers.worlds.world import MS, Chain, World

SMALL = FrameClass(4096, 2, 2)
CHAIN = Chain(SMALL, (1, 2, 3))
KEYS = CHAIN.keys
TTL_NS = 1000 * MS
A, B = 1, 2  # sessions


def node(positions: int = 4, extent_bytes: int = 32 << 10) -> World:
    """A node with its memory there and two clients."""
    world = World(extent_bytes, positions)
    world.populate(list(range(positions)))
    for session in (A, B):
        world.open(session)
    return world


def reserve(world: World, session: int, group: int, shard: int = 0, shards: int = 1, start: int = 0) -> do.Reply:
    """Reserve pages ``start ..`` of CHAIN."""
    parent, rows = CHAIN.parents[start], CHAIN.rows[start:]
    event = ev.Reserve(world.now_ns, session, SMALL, group, shard, shards, TTL_NS, parent, rows)
    return reply_of(world.decide(event))


def reply_of(instructions: list[do.Instruction]) -> do.Reply:
    """The reply, which is always the last."""
    assert isinstance(instructions[-1], do.Reply)
    return instructions[-1]


def seal(world: World, session: int, shard: int, addresses: list[Address]) -> list[int]:
    """Seal and return the statuses."""
    return reply_of(world.decide(ev.Seal(world.now_ns, session, shard, addresses))).statuses


def revoke(world: World, session: int, addresses: list[Address]) -> list[int]:
    """Revoke and return the statuses."""
    return reply_of(world.decide(ev.Revoke(world.now_ns, session, addresses))).statuses


def tick(world: World, elapsed_ns: int) -> list[do.Instruction]:
    """Time goes on."""
    world.now_ns += elapsed_ns
    return world.decide(ev.Tick(world.now_ns))


def state_of(world: World, address: Address) -> FrameState:
    """What the record says of the frame."""
    return world.node.frame_state(address.extent, address.frame)


# --- one writer ------------------------------------------------------------------------------------------------------


def test_a_deadline_is_no_longer_than_the_node_allows() -> None:
    world = node()
    event = ev.Reserve(world.now_ns, A, SMALL, 1, 0, 1, 10**18, CHAIN.parents[0], CHAIN.rows)
    reserved = next(i for i in world.decide(event) if isinstance(i, do.WriteReserved))
    assert reserved.until_ns == world.now_ns + world.options["lease_ttl_ns_max"]


def test_pages_without_a_parent_are_refused() -> None:
    world = node()
    assert reserve(world, A, 1, start=1).statuses == [Status.NO_PARENT] * 2
    assert not world.state.pending
    world.grant(A, SMALL, 2)
    assert world.put(A, CHAIN, 1) == [Status.NO_PARENT] * 2
    assert len(world.state.sessions[A].granted) == 2, "a granted frame stays granted"
    world.check()


def test_only_the_writer_of_a_shard_can_seal_it() -> None:
    world = node()
    addresses = reserve(world, A, 1).addresses
    assert seal(world, B, 0, addresses) == [Status.STALE] * 3
    assert seal(world, A, 1, addresses) == [Status.STALE] * 3
    assert revoke(world, B, addresses) == [Status.STALE] * 3
    assert seal(world, A, 0, addresses) == [Status.OK] * 3
    assert seal(world, A, 0, addresses) == [Status.STALE] * 3


# --- several writers of one key ---------------------------------------------------------------------------------------


def test_independent_writers_get_separate_frames_and_the_first_seal_wins() -> None:
    world = node()
    first, second = reserve(world, A, 1), reserve(world, B, 2)
    assert second.statuses == [Status.OK] * 3
    assert not set(first.addresses) & set(second.addresses)
    assert world.node.pend[KEYS[0]] == first.addresses[0], "readers follow the earliest"

    assert seal(world, B, 0, second.addresses) == [Status.OK] * 3
    assert world.node.pend[KEYS[0]] == first.addresses[0]
    assert seal(world, A, 0, first.addresses) == [Status.PRESENT] * 3
    assert [world.node.index[key] for key in KEYS] == second.addresses
    assert all(state_of(world, address) == FrameState.FREE for address in first.addresses)
    assert not world.node.pend
    world.check()


def test_a_reservation_does_not_evict_what_it_hangs_on() -> None:
    world = node(positions=1, extent_bytes=16 << 10)  # 4 frames
    world.grant(A, SMALL, 4)
    world.put(A, Chain(SMALL, (1, 9)))
    world.put(A, Chain(SMALL, (5, 6)))
    world.use(Chain(SMALL, (5, 6)).keys[1])  # the page to hang on is by far the colder one
    rows, parent = Chain(SMALL, (1, 9, 3, 4)).rows[2:], Chain(SMALL, (1, 9)).keys[1]
    reply = reply_of(world.decide(ev.Reserve(world.now_ns, B, SMALL, 1, 0, 1, TTL_NS, parent, rows)))
    assert reply.statuses == [Status.OK, Status.OK]
    assert parent in world.node.index and len(world.node.index) == 2
    world.check()


# --- write groups ----------------------------------------------------------------------------------------------------


def test_ranks_of_a_group_join_the_same_frames() -> None:
    world = node()
    first, second = reserve(world, A, 1, 0, 2), reserve(world, B, 1, 1, 2)
    assert second.statuses == [Status.JOINED] * 3
    assert second.addresses == first.addresses

    out = world.decide(ev.Seal(world.now_ns, A, 0, first.addresses))
    assert out[:-1] == [do.WriteShards(address, 2, 0b01) for address in first.addresses]
    assert reply_of(out).statuses == [Status.PARTIAL] * 3
    assert not world.node.index, "not readable until every rank has sealed"
    assert seal(world, B, 1, first.addresses) == [Status.OK] * 3
    assert set(world.node.index) == set(KEYS)
    world.check()


def test_a_rank_of_another_number_of_ranks_is_refused() -> None:
    world = node()
    reserve(world, A, 1, 0, 2)
    assert reserve(world, B, 1, 1, 4).statuses == [Status.NO_PARENT] * 3
    world.check()


def test_a_shard_has_one_writer() -> None:
    """Else the one that was forgotten could still write after the other's seal, into whatever the frame is then."""
    world = node()
    first = reserve(world, A, 1)
    assert reserve(world, A, 1).statuses == [Status.JOINED] * 3, "asked again by the same session: a retry"
    assert set(reserve(world, B, 1).statuses).isdisjoint({Status.OK, Status.JOINED})
    assert seal(world, A, 0, first.addresses) == [Status.OK] * 3


def test_a_sealed_shard_is_not_written_again() -> None:
    """Else the last rank's seal would make a page readable that someone is writing."""
    world = node()
    first, _ = reserve(world, A, 1, 0, 2), reserve(world, B, 1, 1, 2)
    seal(world, A, 0, first.addresses)
    assert set(reserve(world, A, 1, 0, 2).statuses).isdisjoint({Status.OK, Status.JOINED})
    assert seal(world, B, 1, first.addresses) == [Status.OK] * 3
    world.check()


def test_a_rank_that_never_comes_costs_the_page_at_its_deadline() -> None:
    world = node()
    addresses = reserve(world, A, 1, 0, 2).addresses
    assert seal(world, A, 0, addresses) == [Status.PARTIAL] * 3
    assert not any(isinstance(i, do.WriteState) for i in tick(world, TTL_NS - 1))
    tick(world, 1)
    assert not world.state.pending and not world.node.pend
    assert all(state_of(world, address) == FrameState.FREE for address in addresses)
    assert reserve(world, B, 1, 1, 2).statuses == [Status.OK] * 3, "the late rank starts anew"
    world.check()


# --- PARTIAL: waiting for the parent ----------------------------------------------------------------------------------


def test_pages_that_wait_follow_a_parent_that_somebody_else_seals() -> None:
    for other in ("ahead", "reserved"):
        world = node()
        addresses = reserve(world, A, 1).addresses
        assert seal(world, A, 0, addresses[1:]) == [Status.PARTIAL] * 2
        if other == "ahead":
            world.grant(B, SMALL, 1)
            assert world.put(B, Chain(SMALL, (1,))) == [Status.OK]
        else:
            assert seal(world, B, 0, reserve(world, B, 2).addresses[:1]) == [Status.OK]
        assert set(KEYS) <= world.node.index.keys(), other
        assert seal(world, A, 0, addresses[:1]) == [Status.PRESENT]
        world.check()


def test_a_parent_that_somebody_else_seals_is_held() -> None:
    world = node()
    addresses = reserve(world, A, 1).addresses
    world.grant(B, SMALL, 1)
    world.put(B, Chain(SMALL, (1,)))
    assert world.evict(pages=1) == 0
    assert seal(world, A, 0, addresses) == [Status.PRESENT, Status.OK, Status.OK]
    world.check()


def test_a_chain_of_any_length_follows_its_first_page() -> None:
    world = World(4096 * 3000, 1)
    world.populate([0])
    world.open(A)
    chain = Chain(SMALL, tuple(range(3000)))
    event = ev.Reserve(world.now_ns, A, SMALL, 1, 0, 1, TTL_NS, chain.parents[0], chain.rows)
    addresses = reply_of(world.decide(event)).addresses
    assert set(seal(world, A, 0, addresses[1:])) == {Status.PARTIAL}
    assert seal(world, A, 0, addresses[:1]) == [Status.OK]
    assert len(world.node.index) == 3000


def test_a_page_whose_parent_is_given_up_waits_for_another_or_its_deadline() -> None:
    world = node()
    addresses = reserve(world, A, 1).addresses
    seal(world, A, 0, addresses[1:2])
    revoke(world, A, addresses[:1])
    assert seal(world, A, 0, addresses[2:]) == [Status.PARTIAL]
    world.grant(B, SMALL, 1)
    world.put(B, Chain(SMALL, (1,)))
    assert set(world.node.index) == set(KEYS)
    world.check()


# --- QUARANTINED ------------------------------------------------------------------------------------------------------


def test_a_late_writer_keeps_its_frame_in_quarantine_until_it_speaks() -> None:
    for word in ("seal", "revoke", "die"):
        world = node(positions=1, extent_bytes=12 << 10)  # 3 frames
        addresses = reserve(world, A, 1).addresses
        out = tick(world, TTL_NS)
        assert [i.state for i in out if isinstance(i, do.WriteState)] == [FrameState.QUARANTINED] * 3
        assert [i.addresses for i in out if isinstance(i, do.WriteState)] == [[address] for address in addresses]
        assert not world.node.pend
        assert reserve(world, B, 2).statuses == [Status.NO_SPACE] * 3, "a paused writer could write into these"
        if word == "seal":
            assert seal(world, A, 0, addresses) == [Status.STALE] * 3
        elif word == "revoke":
            assert revoke(world, A, addresses) == [Status.OK] * 3
        else:
            world.decide(ev.SessionDead(world.now_ns, A))
        assert reserve(world, B, 2).statuses == [Status.OK] * 3, word
        world.check()


def test_quarantine_lasts_until_every_rank_has_spoken() -> None:
    world = node()
    addresses = reserve(world, A, 1, 0, 2).addresses[:1]
    reserve(world, B, 1, 1, 2)
    tick(world, TTL_NS)
    assert seal(world, A, 0, addresses) == [Status.STALE]
    assert state_of(world, addresses[0]) == FrameState.QUARANTINED
    world.restart()
    assert state_of(world, addresses[0]) == FrameState.QUARANTINED
    assert world.state.pending.by_address[addresses[0]].writing == {1: B}, "who has spoken is in the record"
    assert revoke(world, B, addresses) == [Status.OK]
    assert state_of(world, addresses[0]) == FrameState.FREE
    world.check()


def test_a_lost_connection_takes_nothing_away() -> None:
    world = node()
    addresses = reserve(world, A, 1).addresses
    world.grant(A, SMALL, 2)
    assert world.decide(ev.ConnectionLost(world.now_ns, A)) == [do.CheckSession(A)]
    assert do.CheckSession(A) in tick(world, 1), "asked again and again: it may die later"
    assert len(world.state.sessions[A].granted) == 2
    assert seal(world, A, 0, addresses) == [Status.OK] * 3
    world.open(A)
    assert do.CheckSession(A) not in tick(world, 1)


# --- put ahead --------------------------------------------------------------------------------------------------------


def test_frames_of_another_session_or_freed_ones_are_stale() -> None:
    world = node()
    world.grant(A, SMALL, 2)
    frames = world.frames(A, SMALL)
    event = ev.SealGranted(world.now_ns, B, SMALL, CHAIN.parents[0], frames, CHAIN.rows[:2])
    assert reply_of(world.decide(event)).statuses == [Status.STALE] * 2
    revoke(world, A, frames)
    event = ev.SealGranted(world.now_ns, A, SMALL, CHAIN.parents[0], frames, CHAIN.rows[:2])
    assert reply_of(world.decide(event)).statuses == [Status.STALE] * 2
    assert not world.node.index
    world.check()


def test_what_is_granted_ahead_is_a_small_share() -> None:
    world = node()
    assert world.grant(A, SMALL, 100, ahead=True) == 0, "nothing is carved for what nobody needs yet"
    world.grant(A, SMALL, 16)
    world.put(A, Chain(SMALL, tuple(range(16))))
    assert world.grant(A, SMALL, 100, ahead=True) == 2  # an eighth of 16 frames
    assert world.grant(A, SMALL, 100, ahead=True) == 2  # of 24 by now, and 8 that there is room for
    assert world.grant(A, SMALL, 100, ahead=True) == 0
    world.check()


def test_sessions_are_bounded() -> None:
    world = World(4096, 1, sessions_max=2)
    assert [world.decide(ev.SessionOpened(0, session))[0].status for session in (1, 2, 3, 1)] == [
        Status.OK,
        Status.OK,
        Status.NO_SPACE,
        Status.OK,
    ]


def test_a_session_that_opens_again_gives_back_what_was_granted_in_a_lost_reply() -> None:
    """HELLO names the highest generation that reached the client; frames of an earlier reply stay its own."""
    world = node()
    world.grant(A, SMALL, 4)
    known = set(world.state.sessions[A].granted)
    world.send(ev.Grant(world.now_ns, A, SMALL, 4))  # its reply never arrives
    assert len(world.state.sessions[A].granted) == 8
    world.open(A)
    assert world.state.sessions[A].granted == known and world.state.counters["grants_lost"] == 4
    world.check()


# --- second copies on other nodes -------------------------------------------------------------------------------------


def test_pages_want_a_second_copy_from_their_seal_on_or_later() -> None:
    world = node()
    event = ev.Reserve(world.now_ns, A, SMALL, FETCH_GROUP, 0, 1, TTL_NS, CHAIN.parents[0], CHAIN.rows)
    event.hints = bytes([REPLICATED, REPLICATED | 3, 0])
    sealed = world.decide(ev.Seal(world.now_ns, A, 0, reply_of(world.decide(event)).addresses))
    written = [each for each in sealed if isinstance(each, do.WriteSealed)]
    assert [each.cause for each in written] == ["copy"] * 3, "a copy is not owed a copy"
    infos = [each.standings[0] for each in written]
    assert [hint_byte_in(info) for info in infos] == list(event.hints) and [hint_in(info) for info in infos] == [
        0,
        3,
        0,
    ]

    addresses = [world.node.index[key] for key in KEYS]
    asked, *_ = world.decide(ev.WantCopies(world.now_ns, [*KEYS, bytes(16)]))
    assert asked == do.WriteReplicated(addresses[2:], KEYS[2:]), "the others wanted one before"
    assert len(world.decide(ev.WantCopies(world.now_ns, KEYS))) == 1, "there is nothing to write"
    world.check()


def test_pages_that_another_node_has_want_a_copy_that_is_not_owed() -> None:
    world = node()
    world.grant(A, SMALL, 3)
    world.put(A, CHAIN)
    asked, *_ = world.decide(ev.WantCopies(world.now_ns, KEYS, owe=False))
    assert isinstance(asked, do.WriteReplicated) and len(asked.addresses) == 3 and not asked.keys
    world.check()
