"""The fast structures beside naive ones: the eviction order and a sorted dict, closure over arrays and over dicts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.model.replica import Address, FrameState
from kvstore.state import prefix_links
from kvstore.state.eviction import STALE_MAX, Lru, Page
from kvstore.state.interfaces import Snapshot

QUIET = settings(derandomize=True, deadline=None, max_examples=200)
DAY_MS = 86_400_000


class NaiveLru:
    """Uses by slot, sorted anew for every question."""

    def __init__(self) -> None:
        self.uses: dict[int, int] = {}

    def victim(self, marks: dict[int, int]) -> int | None:
        """The least recently used; marks count where they are younger. Of equals the lowest slot."""
        return min(self.uses, key=lambda slot: (max(self.uses[slot], marks[slot]), slot), default=None)


slots = st.integers(0, 12).map(lambda slot: slot * 977)  # the arrays grow in steps
steps = st.lists(
    st.tuples(st.sampled_from(["add", "old", "remove", "use", "victim", "evict", "later"]), slots), max_size=160
)


@QUIET
@given(start_ms=st.sampled_from([1000, 2**32 - 50, 60 * DAY_MS]), steps=steps)
def test_the_eviction_order_is_least_recently_used(start_ms: int, steps: list[tuple[str, int]]) -> None:
    lru, naive = Lru(), NaiveLru()
    marks = dict.fromkeys([slot * 977 for slot in range(13)], start_ms)
    lru.add(13 * 977, Page(start_ms))  # the first page's use is the base of all
    lru.remove(13 * 977)
    now_ms = start_ms
    for what, slot in steps:
        now_ms += 1
        if what == "later":
            now_ms += DAY_MS
        elif what in ("add", "old") and slot not in lru:
            used_ms = now_ms if what == "add" else marks[slot]
            lru.add(slot, Page(used_ms))
            naive.uses[slot] = used_ms
        elif what == "remove":
            lru.remove(slot)
            naive.uses.pop(slot, None)
        elif what == "use":
            marks[slot] = now_ms
        elif what in ("victim", "evict"):
            victim = lru.victim(marks.__getitem__, now_ms)
            assert victim == naive.victim(marks)
            if what == "evict" and victim is not None:
                lru.remove(victim)
                del naive.uses[victim]
        assert {slot for slot in marks if slot in lru} == set(naive.uses)
        assert (lru.coldest_ms() is None) == (not naive.uses)


def test_order_survives_more_uptime_than_its_words_hold() -> None:
    lru = Lru()
    for slot, day in enumerate((0, 40, 49, 50, 120)):
        lru.add(slot, Page(day * DAY_MS))
    left = []
    while (victim := lru.victim(lambda _: 0, 200 * DAY_MS)) is not None:
        lru.remove(victim)
        left.append(victim)
    assert left == [0, 1, 2, 3, 4]


def test_stale_entries_are_bounded() -> None:
    lru = Lru()
    for i in range(50_000):
        lru.add(i % 100, Page(i))
        lru.remove(i % 100)
    assert len(lru._heap) <= STALE_MAX + 200


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
    links, naive = prefix_links.link(snapshots), naive_links(snapshots)
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
    links = prefix_links.link(snapshots)
    pages = len(links.parent)
    seeds = np.array([bool(which >> i & 1) for i in range(pages)], bool)
    gone = {i for i in range(pages) if seeds[i]}
    while more := {i for i in range(pages) if int(links.parent[i]) in gone} - gone:
        gone |= more
    assert set(np.flatnonzero(prefix_links.doomed(links, seeds)).tolist()) == gone
