"""The fast structures beside naive ones: the eviction list and a Python list, closure over arrays and over dicts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.replica import Address, FrameState
from kvstore.state import closure
from kvstore.state.eviction import Lru
from kvstore.state.views import Snapshot

QUIET = settings(derandomize=True, deadline=None, max_examples=200)
DAY_MS = 86_400_000


class NaiveLru:
    """A list of (slot, stamp), coldest first."""

    def __init__(self) -> None:
        self.order: list[tuple[int, int]] = []

    def add(self, slot: int, used_ms: int, cold: bool) -> None:
        """See ``EvictionPolicy``."""
        self.order.insert(0 if cold else len(self.order), (slot, used_ms))

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy``."""
        self.order = [entry for entry in self.order if entry[0] != slot]

    def victim(self, marks: dict[int, int]) -> int | None:
        """See ``EvictionPolicy``."""
        while self.order:
            slot, stamp = self.order[0]
            if marks[slot] <= stamp:
                return slot
            self.order.append((slot, marks[slot]))
            del self.order[0]
        return None


slots = st.integers(0, 12).map(lambda slot: slot * 97)  # the arrays grow in steps
steps = st.lists(st.tuples(st.sampled_from(["add", "cold", "remove", "use", "victim", "evict"]), slots), max_size=120)


@QUIET
@given(start_ms=st.sampled_from([1000, 2**31 - 50, 2**32 - 50, 60 * DAY_MS]), steps=steps)
def test_the_eviction_list_is_a_list(start_ms: int, steps: list[tuple[str, int]]) -> None:
    lru, naive = Lru(), NaiveLru()
    marks = dict.fromkeys([slot * 97 for slot in range(13)], start_ms)
    now_ms = start_ms
    for what, slot in steps:
        now_ms += 1
        if what in ("add", "cold") and slot not in lru:
            lru.add(slot, now_ms, cold=what == "cold")
            naive.add(slot, now_ms, what == "cold")
        elif what == "remove":
            lru.remove(slot)
            naive.remove(slot)
        elif what == "use":
            marks[slot] = now_ms
        elif what in ("victim", "evict"):
            victim = lru.victim(marks.__getitem__)
            assert victim == naive.victim(marks)
            if what == "evict" and victim is not None:
                lru.remove(victim)
                naive.remove(victim)
        assert {slot for slot in marks if slot in lru} == {slot for slot, _ in naive.order}
        assert lru.coldest_ms() == (naive.order[0][1] & 0xFFFFFFFF if naive.order else None)


@QUIET
@given(st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_who_was_used_leaves_after_all_who_were_not(uses: list[int]) -> None:
    """Each read moves a page once, when it is found at the cold end: pages used since keep the order of the list."""
    lru = Lru()
    for slot in range(31):
        lru.add(slot, 1000)
    marks = dict.fromkeys(range(31), 1000)
    for now_ms, slot in enumerate(uses, 1001):
        marks[slot] = now_ms
    left = []
    while (victim := lru.victim(marks.__getitem__)) is not None:
        lru.remove(victim)
        left.append(victim)
    used = set(uses)
    assert left == [slot for slot in range(31) if slot not in used] + [slot for slot in range(31) if slot in used]


# --- closure ----------------------------------------------------------------------------------------------------------

ROOT = b"r" * 16


def key_of(i: int) -> bytes:
    """A key; some end in zero bytes, which numpy strips."""
    return bytes([i + 1]) * 8 + bytes(7) + bytes([i % 3])


@st.composite
def tables(draw: st.DrawFn) -> list[Snapshot]:
    """A few extents of frames in any state, with keys that may repeat and parents that may be missing."""
    found = []
    for extent in draw(st.lists(st.integers(1, 9), unique=True, max_size=3)):
        frames = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(-1, 9)), max_size=8))
        words = [(1 + i) << 8 | state for i, (state, _, _) in enumerate(frames)]
        keys = [key_of(key) for _, key, _ in frames]
        # a page's parent has a smaller key: the hash chain has no cycles
        parents = [ROOT if parent < 0 else key_of(min(parent, key - 1)) if key else ROOT for _, key, parent in frames]
        roots = [ROOT] * len(frames)
        columns = [np.array(values, "S16") for values in (keys, parents, roots)]
        found.append(Snapshot(extent, np.array(words, np.uint64), *columns))
    return found


def naive_links(snapshots: list[Snapshot]) -> list[tuple[Address, bytes, bytes]]:
    """(address, key, parent) of every sealed page, by key and then in the order of the tables."""
    pages = [
        (Address(s.extent, frame, int(word) >> 8), bytes(s.keys[frame]).ljust(16, b"\0"), bytes(s.parents[frame]))
        for s in snapshots
        for frame, word in enumerate(s.words)
        if int(word) & 0xFF == FrameState.SEALED
    ]
    return [(address, key, parent.ljust(16, b"\0")) for address, key, parent in sorted(pages, key=lambda p: p[1])]


@QUIET
@given(tables())
def test_link_joins_every_page_with_its_parent(snapshots: list[Snapshot]) -> None:
    links, naive = closure.link(snapshots), naive_links(snapshots)
    assert [links.address(i) for i in range(len(links.parent))] == [address for address, _, _ in naive]
    assert [links.key(i) for i in range(len(links.parent))] == [key for _, key, _ in naive]
    keys = [key for _, key, _ in naive]
    for i, (_, key, parent) in enumerate(naive):
        assert links.duplicate[i] == (key in keys[:i])
        expected = -1 if parent == ROOT else keys.index(parent) if parent in keys else -2
        assert links.parent[i] == expected


@QUIET
@given(tables(), st.integers(0, 2**24 - 1))
def test_doomed_are_the_seeds_and_all_their_descendants(snapshots: list[Snapshot], which: int) -> None:
    links = closure.link(snapshots)
    pages = len(links.parent)
    seeds = np.array([bool(which >> i & 1) for i in range(pages)], bool)
    gone = {i for i in range(pages) if seeds[i]}
    while more := {i for i in range(pages) if int(links.parent[i]) in gone} - gone:
        gone |= more
    assert set(np.flatnonzero(closure.doomed(links, seeds)).tolist()) == gone
    assert closure.orphans(links).tolist() == closure.doomed(links, (links.parent == -2) | links.duplicate).tolist()
