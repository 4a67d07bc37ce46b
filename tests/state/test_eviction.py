"""Eviction policies: one suite over all, each beside a naive model; then what each promises by itself."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.simulator.policies import POLICIES, S3Fifo, Slru, make_policy
from kvstore.model.replica import standing
from kvstore.model.retention import Retention
from kvstore.state.eviction import EvictionPolicy, Page
from kvstore.state.eviction import gittins as policy_worth
from kvstore.state.eviction.base import STALE_MAX, Lru, Tail, heap_pop, heap_push
from kvstore.state.eviction.gittins import BINS, CLASSES, PRIOR, Ghosts, Gittins, WorthLedger, bin_of, bins_of, gittins

QUIET = settings(derandomize=True, deadline=None, max_examples=60)
SLOTS = 40
DAY_MS = 86_400_000

every_policy = pytest.mark.parametrize("name", POLICIES)


class Tree:
    """A closed cache of pages in a few chains, as a node keeps it: the naive side of what a policy is told."""

    def __init__(self, policy: EvictionPolicy, seed: int, slots: int = SLOTS) -> None:
        self.policy = policy
        self.random = random.Random(seed)
        self.now_ms = 10**6
        self.marks = [0] * slots
        self.parent: dict[int, int | None] = {}  # by slot, of the stored pages
        self.pages: dict[int, Page] = {}
        self.listed: set[int] = set()
        self.left: list[int] = []  # keys, in order

    def leaves(self) -> set[int]:
        return set(self.parent) - set(self.parent.values())

    def offer(self) -> None:
        """Tell the policy which pages became leaves, and which are no more."""
        for slot in sorted(self.listed - self.leaves()):
            self.policy.remove(slot)
            self.listed.discard(slot)
        for slot in sorted(self.leaves() - self.listed):
            self.policy.add(slot, self.pages[slot]._replace(used_ms=self.marks[slot]))
            self.listed.add(slot)

    def use(self, slot: int) -> None:
        """A read: of the page and all before it."""
        walk: int | None = slot
        while walk is not None:
            self.marks[walk] = self.now_ms
            walk = self.parent[walk]

    def store(self) -> None:
        """A page at the end of some chain, or the first of a new one."""
        free = sorted(set(range(len(self.marks))) - set(self.parent))
        if not free:
            return
        slot, stored = self.random.choice(free), sorted(self.parent)
        parent = self.random.choice([*stored, None])
        before = self.pages[parent] if parent is not None else None
        self.parent[slot] = parent
        self.marks[slot] = self.now_ms
        position, turns = (before.position + 1, before.turns + 1) if before is not None else (0, 0)
        self.pages[slot] = Page(self.now_ms, self.random.getrandbits(64), position, turns)
        self.offer()

    def drop(self, slot: int, key: int | None) -> None:
        """The page is gone."""
        self.policy.forget(slot, key)
        self.listed.discard(slot)
        del self.parent[slot], self.pages[slot]
        self.offer()

    def evict(self) -> None:
        victim = self.policy.victim(self.marks.__getitem__, self.now_ms)
        assert (victim is None) == (not self.listed)
        if victim is not None:
            assert victim in self.listed and victim in self.policy, "still listed"
            assert self.policy.victim(self.marks.__getitem__, self.now_ms) == victim, "asking changes nothing"
            chain = self.chain(victim)
            gone = chain[-1 - self.policy.forget_tail(self.tail(chain)) :][::-1]
            assert not any(slot in self.policy for slot in gone)
            for slot in gone:
                self.left.append(self.pages[slot].key)
                self.listed.discard(slot)
                del self.parent[slot], self.pages[slot]
            self.offer()

    def chain(self, leaf: int) -> list[int]:
        """The leaf, last, and the pages before it that nothing else follows."""
        parents, chain = [*self.parent.values()], [leaf]
        while (before := self.parent[chain[0]]) is not None and parents.count(before) == 1:
            chain.insert(0, before)
        return chain

    def tail(self, chain: list[int]) -> Tail:
        pages = [self.pages[slot] for slot in chain]
        return Tail(
            chain,
            [page.key for page in pages],
            [self.marks[slot] for slot in chain],
            [standing(page.position, page.turns, page.hint) for page in pages],
        )

    def step(self) -> None:
        self.now_ms += self.random.choice((0, 1, 50, 3000))
        stored = sorted(self.parent)
        match self.random.randrange(8):
            case 0 | 1 | 2:
                self.store()
            case 3 | 4 if stored:
                self.use(self.random.choice(stored))
            case 5 | 6:
                self.evict()
            case 7 if self.listed:
                slot = self.random.choice(sorted(self.listed))
                if self.random.random() < 0.5:
                    self.drop(slot, None)
                else:  # held and let go
                    self.policy.remove(slot)
                    self.listed.discard(slot)
                    self.offer()

    def check(self) -> None:
        assert {slot for slot in range(len(self.marks)) if slot in self.policy} == self.listed == self.leaves()
        assert (self.policy.coldest_ms() is None) == (not self.listed)


@every_policy
@QUIET
@given(seed=st.integers(0, 2**32))
def test_a_policy_lists_what_it_was_told(name: str, seed: int) -> None:
    tree = Tree(make_policy(name, SLOTS), seed)
    for _ in range(150):
        tree.step()
        tree.check()
    while tree.listed:
        tree.evict()
    assert not tree.parent, "chains leave from their tails until nothing is left"


@every_policy
def test_equal_histories_evict_equally(name: str) -> None:
    first, second = (Tree(make_policy(name, SLOTS), 7) for _ in range(2))
    for tree in (first, second):
        for _ in range(2000):
            tree.step()
    assert first.left == second.left and len(first.left) > 200


@every_policy
def test_calls_for_unknown_slots_do_nothing(name: str) -> None:
    policy = make_policy(name, 10)
    policy.remove(5)
    policy.forget(5, 77)
    policy.forget(100_000, None)
    policy.resize(0)
    policy.resize(1000)
    assert 5 not in policy and 100_000 not in policy
    assert policy.victim(lambda _: 0, 1000) is None and policy.coldest_ms() is None


def sizes_of(held: object) -> dict[str, int]:
    """Entries of every collection behind a policy, by attribute."""
    found = {}
    for name, value in vars(held).items():
        if hasattr(value, "__len__"):
            found[name] = len(value)
        elif hasattr(value, "__dict__"):
            found |= {f"{name}.{inner}": size for inner, size in sizes_of(value).items()}
    return found


@every_policy
def test_memory_does_not_grow_with_time(name: str) -> None:
    policy = make_policy(name, 1000)
    marks = array("q", bytes(8 * 1000))
    sizes = []
    for turn in range(30_000):
        slot = turn % 1000
        if turn >= 1000:
            victim = policy.victim(marks.__getitem__, turn)
            assert victim is not None
            slot = victim
            policy.forget(slot, hash((turn, 1)) & (1 << 64) - 1)
        marks[slot] = turn
        policy.add(slot, Page(turn, hash((turn, 2)) & (1 << 64) - 1, position=turn % 7))
        policy.remove(slot)
        policy.add(slot, Page(turn, hash((turn, 2)) & (1 << 64) - 1, position=turn % 7))
        if turn in (12_000, 29_999):
            sizes.append(sizes_of(policy))
    for what, size in sizes[1].items():
        assert size <= max(1.1 * sizes[0][what], 8192), what


@every_policy
def test_a_leaf_that_was_read_is_not_the_next_to_go(name: str) -> None:
    """Of four leaves stored together, those that were not read since leave first."""
    policy, marks = make_policy(name, 100), [5000, 1000, 1000, 1000]
    fill(policy, range(4), 1000)
    assert sorted(out(policy, 2, marks.__getitem__, 5001)) in ([1, 2], [1, 3], [2, 3])


@QUIET
@given(st.lists(st.integers(0, 2**64 - 1)))
def test_a_heap_in_an_array_sorts(numbers: list[int]) -> None:
    heap, popped = array("Q"), []
    for number in numbers:
        heap_push(heap, number)
    while heap:
        popped.append(heap[0])
        heap_pop(heap)
    assert popped == sorted(numbers)


# --- tails -----------------------------------------------------------------------------------------------------------

NOW_MS = 10**6
CHAIN = [Page(NOW_MS - 5000, key=(slot + 1) << 40 | slot, position=slot) for slot in range(12)]


def tail_of(pages: list[Page], slots: range) -> Tail:
    return Tail(
        slots,
        [page.key for page in pages],
        [page.used_ms for page in pages],
        [standing(page.position, page.turns, page.hint) for page in pages],
    )


def leaf_of(pages: list[Page], others: int = 20) -> Gittins:
    """A policy whose next victim is the leaf of this chain. The others are of the same worth."""
    policy = Gittins(100)
    policy.add(len(pages) - 1, pages[-1])
    for slot in range(others):
        policy.add(50 + slot, Page(pages[-1].used_ms + 1, key=slot))
    assert policy.victim(lambda slot: pages[-1].used_ms, NOW_MS) == len(pages) - 1
    return policy


def test_a_tail_leaves_as_if_its_pages_were_offered_one_after_another() -> None:
    together, single = leaf_of(CHAIN), leaf_of(CHAIN)
    for policy in (together, single):
        policy._worth_max = 1.0  # nothing is worth more
    assert together.forget_tail(tail_of(CHAIN[3:], range(3, 12))) == 8
    for slot in range(11, 2, -1):
        if slot < 11:
            single.add(slot, CHAIN[slot])
        single.forget(slot, CHAIN[slot].key)
    for policy in (together, single):
        policy.add(2, CHAIN[2])
    for name in ("_use", "_word"):
        mine, theirs = ([*getattr(policy, name)[:3], *getattr(policy, name)[12:]] for policy in (together, single))
        assert mine == theirs, name
    assert together._evicted == single._evicted == 9
    assert together._ghosts._places == single._ghosts._places
    assert together._ledger.chances().tolist() == single._ledger.chances().tolist()


@pytest.mark.parametrize(
    ("differs", "goes"),
    [
        ({"used_ms": NOW_MS}, 3),  # a later request used it
        ({"turns": 1}, 3),  # an earlier request stored what comes after
        ({"hint": Retention(2).hint}, 3),
        ({"used_ms": NOW_MS - 9000}, 11),  # older than the leaf: it goes too
    ],
)
def test_a_tail_ends_at_a_page_that_differs(differs: dict[str, int], goes: int) -> None:
    pages = [page._replace(**differs) if place == 7 else page for place, page in enumerate(CHAIN)]
    policy = leaf_of(pages)
    policy._worth_max = 1.0
    assert policy.forget_tail(tail_of(pages, range(12))) == goes


def test_a_tail_ends_at_a_page_that_came_back_or_was_a_leaf() -> None:
    policy = leaf_of(CHAIN)
    policy._worth_max = 1.0
    policy._ghosts.remember(CHAIN[5].key, 1)
    assert policy.forget_tail(tail_of(CHAIN, range(12))) == 5
    policy = Gittins(100)
    policy.add(8, CHAIN[8])
    policy.remove(8)  # extended since
    policy.add(11, CHAIN[11])
    policy._worth_max = 1.0
    assert policy.victim(lambda slot: CHAIN[11].used_ms, NOW_MS) == 11
    policy._worth_max = 1.0
    assert policy.forget_tail(tail_of(CHAIN, range(12))) == 2


def test_a_tail_ends_where_other_leaves_are_worth_less() -> None:
    policy = leaf_of(CHAIN)
    assert policy._worth_max < float(policy._table.max())
    policy._worth_max = 0.0
    assert policy.forget_tail(tail_of(CHAIN, range(12))) == 0


def test_the_tail_of_the_least_recently_used_is_what_was_used_no_later() -> None:
    policy, pages = (
        Lru(),
        [page._replace(used_ms=NOW_MS - 1) if place == 4 else page for place, page in enumerate(CHAIN)],
    )
    policy.add(11, pages[11])
    assert policy.forget_tail(tail_of(pages, range(12))) == 6
    assert 11 not in policy and len(policy) == 0


# --- the queues ------------------------------------------------------------------------------------------------------


def fill(policy: EvictionPolicy, slots: range, used_ms: int = 0) -> None:
    for slot in slots:
        policy.add(slot, Page(used_ms, key=slot))


def out(
    policy: EvictionPolicy, count: int, marks: Callable[[int], int] = lambda _: 0, now_ms: int = 10**6
) -> list[int]:
    """The next pages to go, gone."""
    left = []
    for _ in range(count):
        victim = policy.victim(marks, now_ms)
        assert victim is not None
        policy.forget(victim, victim)
        left.append(victim)
    return left


def test_slru_protects_what_was_read_again() -> None:
    policy = Slru(10)
    fill(policy, range(10))
    assert out(policy, 7, lambda slot: 5 if slot in (0, 3) else 0) == [1, 2, 4, 5, 6, 7, 8]
    assert out(policy, 3, lambda slot: 5 if slot in (0, 3) else 0) == [9, 0, 3]


def test_s3fifo_remembers_what_left_its_small_queue() -> None:
    policy = S3Fifo(10)
    fill(policy, range(4))
    assert out(policy, 2) == [0, 1]
    policy.add(7, Page(20, key=0))  # comes back: into the main queue
    assert out(policy, 3) == [2, 3, 7]


# --- worth -----------------------------------------------------------------------------------------------------------


def test_bins_are_half_octaves() -> None:
    ages = [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 1000, 99_999, 2**31, 3 * 2**30 - 1000, 2**32 - 1]
    assert bins_of(np.array(ages)).tolist() == [bin_of(age) for age in ages]
    assert [bin_of(age) for age in (0, 1, 2, 3, 4, 5, 6, 8, 12)] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    assert bin_of(2**32 - 1) == BINS - 1 and bin_of(2**40) == BINS - 1


def naive_index(chances: list[float], start: int) -> float:
    """The best of all times to give up, tried one by one."""
    best = survives = uses = time_ms = 0.0
    survives = 1.0
    for b in range(start, BINS):
        uses += survives * chances[b]
        time_ms += survives * policy_worth._WIDTHS_MS[b] * (1 - chances[b] / 2)
        survives *= 1 - chances[b]
        best = max(best, uses / time_ms)
    return best


@QUIET
@given(st.lists(st.floats(0, 0.95), min_size=BINS, max_size=BINS))
def test_the_index_looks_ahead_as_far_as_it_pays(chances: list[float]) -> None:
    assert gittins(chances) == pytest.approx([naive_index(chances, b) for b in range(BINS)])


def test_without_experience_the_oldest_is_worth_least() -> None:
    chances = WorthLedger().chances()
    assert chances == pytest.approx(np.tile(PRIOR, (CLASSES, 1)))
    assert all(older <= younger for younger, older in pairwise(gittins(PRIOR.tolist())))


def test_chances_are_what_was_seen_though_pages_leave() -> None:
    """Used at ages of about 1 s with a chance of one in two; half of all are evicted before that, at 0.1 s."""
    ledger = WorthLedger()
    for i in range(20_000):
        if i % 2:
            ledger.watched(1, 0, bin_of(100), used=False)
        else:
            ledger.watched(1, 0, bin_of(1000 if i % 4 else 50_000), used=bool(i % 4))
    chances = ledger.chances()
    assert chances[1, bin_of(1000)] == pytest.approx(0.5, abs=0.05)
    assert chances[1, bin_of(100)] < 0.01 and chances[1, bin_of(10_000)] < 0.05
    before = chances[1, bin_of(1000)]
    ledger.fade(0.001)
    assert ledger.chances()[1, bin_of(1000)] < before / 2


def test_what_is_still_there_counts_as_unused() -> None:
    ledger = WorthLedger()
    for _ in range(500):
        ledger.watched(1, 0, bin_of(1000), used=True)
    kept = np.full(100, 1), np.zeros(100, np.int64), np.full(100, bin_of(60_000))
    assert ledger.chances(*kept, 25.0)[1, bin_of(1000)] < ledger.chances()[1, bin_of(1000)] / 3


# --- the default -----------------------------------------------------------------------------------------------------


def test_gittins_is_lru_until_it_knows_better() -> None:
    policy = Gittins(100)
    for slot, used_ms in enumerate((500, 90_000, 7000, 40_000, 300)):
        policy.add(slot, Page(used_ms))
    assert out(policy, 5, now_ms=100_000) == [4, 0, 2, 3, 1]


def hits_a_minute_later(policy: EvictionPolicy, pages: int) -> int:
    """A page comes every 100 ms and is used once more after 60 s: how often it is still there."""
    hits, marks, turn_in, slot_of = 0, [0] * pages, [0] * pages, dict[int, int]()
    for turn in range(60_000):
        now_ms = 1000 + 100 * turn
        if turn - 600 in slot_of:
            marks[slot_of[turn - 600]] = now_ms
            hits += 1
        if turn < pages:
            slot = turn
        else:
            victim = policy.victim(marks.__getitem__, now_ms)
            assert victim is not None
            slot = victim
            policy.forget(slot, turn_in[slot])
            del slot_of[turn_in[slot]]
        marks[slot], turn_in[slot], slot_of[turn] = now_ms, turn, slot
        policy.add(slot, Page(now_ms, turn * 0x9E3779B97F4A7C15 & (1 << 64) - 1))
    return hits


def test_gittins_keeps_what_experience_tells_it_to() -> None:
    """With room for 20 s, least recently used never has what is asked for; a third of it could be had."""
    assert hits_a_minute_later(Lru(200), 200) == 0
    assert hits_a_minute_later(Gittins(200), 200) > 60_000 / 7


def test_ghosts_know_keys_that_left() -> None:
    ghosts = Ghosts(100_000)
    keys = random.Random(1)
    gone = [keys.getrandbits(64) for _ in range(1000)]
    for key in gone:
        ghosts.remember(key, key % 4)
    known = sum(ghosts.recall(key) == key % 4 for key in gone)
    assert known > 980, "a later key may take a place"
    assert sum(ghosts.recall(keys.getrandbits(64)) is not None for _ in range(10_000)) < 5
    ghosts.resize(150_000)
    assert ghosts.recall(gone[-1]) is not None
    ghosts.resize(1000)
    assert ghosts.recall(gone[-1]) is None


def test_gittins_takes_13_bytes_per_leaf_and_9_per_page() -> None:
    pages = 200_000
    policy = Gittins(pages)
    for slot in range(pages):
        policy.add(slot, Page(slot, slot))
    tables = (policy._use, policy._word, policy._order, policy._ghosts._places)
    assert sum(len(table) * table.itemsize for table in tables) / pages <= 13.2
    for slot in range(pages):
        policy.remove(slot)
    tables = (policy._use, policy._word, policy._order, policy._ghosts._places)
    assert sum(len(table) * table.itemsize for table in tables) / pages <= 9.2


def test_gittins_lists_a_slot_once_however_often_it_comes_and_goes() -> None:
    policy, pages = Gittins(1000), 20_000
    fill(policy, range(pages))
    for turn in range(3):
        for slot in range(turn, pages, 2):
            policy.remove(slot)
        for slot in range(turn, pages, 4):
            policy.add(slot, Page(1000, slot))
        for slot in range(turn + 2, pages, 4):
            policy.forget(slot, None)
            policy.add(slot, Page(1000, slot + 1))
    assert len(policy) == pages and sorted(out(policy, pages)) == list(range(pages))
    assert policy.victim(lambda _: 0, 2000) is None and len(policy._order) <= STALE_MAX


def test_gittins_outlives_its_words() -> None:
    policy = Gittins(10)
    for slot, day in enumerate((0, 40, 49, 50, 120)):
        policy.victim(lambda _: 0, day * DAY_MS)
        policy.add(slot, Page(day * DAY_MS))
    policy.victim(lambda _: 0, 200 * DAY_MS)
    policy.add(5, Page(199 * DAY_MS))
    policy.add(6, Page(190 * DAY_MS))
    left = out(policy, 7, now_ms=200 * DAY_MS)
    assert left[5:] == [6, 5] and sorted(left) == list(range(7)), "what is older than a month is equally old"


def test_a_mark_from_nowhere_moves_no_clock() -> None:
    policy = Gittins(10)
    policy.add(0, Page(1000))
    policy.add(1, Page(1000 * 365 * DAY_MS))
    assert policy.victim(lambda _: 0, 100_000) == 0
    policy.add(2, Page(90_000))
    policy.forget(0, None)
    assert policy.victim(lambda _: 0, 200_000) == 2


def _two_owners(hint_of: Callable[[int, int], int], pages: int = 3000) -> list[int]:
    """Slots in the order in which they leave: of two owners, slot by slot in turn, all of one age and more."""
    policy = Gittins(pages)
    marks = [10**6 + 10 * slot for slot in range(pages)]
    for slot in range(pages):
        owner = slot % 2 + 1
        policy.add(slot, Page(marks[slot], slot, 0, 0, hint_of(slot, owner), owner))
    left = []
    for _ in range(pages // 2):
        slot = policy.victim(marks.__getitem__, 10**6 + 20 * pages)
        assert slot is not None
        policy.forget(slot, slot)
        left.append(slot)
    return left


def test_hints_order_pages_of_their_owner_alone() -> None:
    """One owner's hints: its worse half leaves first. It loses no fewer pages than without, so the other no more."""
    low, high = Retention(-2).hint, Retention(2).hint
    without = _two_owners(lambda slot, owner: 0)
    hinted = _two_owners(lambda slot, owner: (low if slot % 4 == 0 else high) if owner == 1 else 0)

    def of(left: list[int], owner: int) -> list[int]:
        return [slot for slot in left if slot % 2 + 1 == owner]

    assert sum(slot % 4 == 0 for slot in of(without, 1)) == pytest.approx(len(of(without, 1)) / 2, rel=0.1)
    assert sum(slot % 4 == 0 for slot in of(hinted, 1)) > 0.9 * min(len(of(hinted, 1)), 750)
    assert len(of(hinted, 1)) >= len(of(without, 1))


def test_who_says_the_same_of_every_page_says_nothing() -> None:
    """The highest priority for all of an owner's pages, and the lowest: every page leaves when it would have."""
    without = _two_owners(lambda slot, owner: 0)
    for lie in (Retention(3).hint, Retention(-3).hint):
        assert sorted(_two_owners(lambda slot, owner, lie=lie: lie if owner == 1 else 0)) == sorted(without)


def test_a_hint_counts_until_its_time_is_over() -> None:
    """All pages are older than four seconds: only what lasts longer orders them."""
    over, lasts = Retention(-3, 4).hint, Retention(-3, 60).hint
    without = _two_owners(lambda slot, owner: 0)
    early = _two_owners(lambda slot, owner: over if slot % 4 == 0 else 0)
    late = _two_owners(lambda slot, owner: lasts if slot % 4 == 0 else 0)
    assert sorted(early) == sorted(without) != sorted(late)
    assert sum(slot % 4 == 0 for slot in late) > sum(slot % 4 == 0 for slot in without)
