"""The simulated pool of ``bench.scale``: the real announcers and owners agree about what each node has."""

from __future__ import annotations

from collections import Counter

from bench.scale import SimPool, patched
from kvstore.cluster.announce_plan import IDLE_PER_S, IDLE_S, idle_s, pause_s
from kvstore.cluster.directory import AnnounceBatch, Placement
from kvstore.cluster.directory_owner import LATE_S, DirectoryOwner
from kvstore.model.prefix import fingerprints
from kvstore.node.page_feed import dump
from tests.helpers.placements import owned

MEMBERS, PAGES = 12, 300


def check(pool: SimPool) -> None:
    """Every owner lists exactly what it owns of every member's pages."""
    placement = Placement(pool.members)
    expected: Counter[str] = Counter()
    for member in pool.members.values():
        contents = dump(member.node, None)  # type: ignore[arg-type]
        assert contents is not None
        for name, mine in owned(placement, contents[1].spans).items():
            expected[name] += int(mine.sum())
    actual = {name: len(member.shell._owner.directory) for name, member in pool.members.items()}
    assert actual == dict(expected) and sum(actual.values()) == 2 * PAGES * len(pool.members)


def test_owners_know_all_pages_after_restarts_and_storms_and_a_change_costs_one_dump() -> None:
    pool = SimPool(MEMBERS, PAGES)
    with patched(pool):
        pool.join(range(MEMBERS))
        pool.run(5.0)
        check(pool)
        for number in range(3):
            pool.leave(range(number, number + 1))
            pool.run(4.0)
            check(pool)
            pool.join(range(number, number + 1))
            pool.run(4.0)
            check(pool)
        steady = pool.members["node-00011"].announcer
        before, entries = steady.counters["dumps"], steady.counters["entries"]
        for number in range(4):  # changes close in time become at most two
            pool.leave(range(number, number + 1))
            pool.run(0.01)
        pool.run(5.0)
        check(pool)
        assert steady.counters["dumps"] - before <= 2
        assert steady.counters["entries"] - entries < 2 * PAGES, "only what moved is announced"
        assert not steady.counters["lost"] and not steady.counters["failed"]


def test_a_large_pool_at_rest_sends_a_bounded_number_of_messages() -> None:
    pool = SimPool(MEMBERS, 0)
    with patched(pool):
        pool.join(range(MEMBERS))
        pool.run(5.0)
        pool.counts.clear()
        pool.run(20.0)
        assert pool.counts["exchanges"] <= 1.1 * 20 / IDLE_S * MEMBERS**2
    assert idle_s(10) == IDLE_S
    for owners in (100, 300, 1000, 3000):
        assert owners / idle_s(owners) <= IDLE_PER_S


def test_a_node_of_a_large_pool_is_in_doubt_only_if_its_batch_is_late() -> None:
    names = [f"n{number}" for number in range(300)]
    owner, number = DirectoryOwner(1 << 20), Placement(names).number
    owner.look(names, 0.0)
    nothing = fingerprints(b"")
    for stream, name in enumerate(names, 1):
        owner.apply(AnnounceBatch(name, stream, 0, nothing, nothing.astype("u1"), True, number), 0.0)
    late_s = idle_s(300) + LATE_S + 2 * pause_s(300)
    assert owner.doubts(number, idle_s(300) + 2 * pause_s(300)) == ()
    assert owner.doubts(number, late_s + 0.2), "all of them are late now"
