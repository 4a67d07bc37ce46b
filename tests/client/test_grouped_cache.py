"""One cache over several groups: the longest boundary that every group has, in every kind of store."""

from __future__ import annotations

import random
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvstore
from kvstore import GroupedCache, GroupedKeys, GroupedMatch, Layout, Store, Tier
from kvstore.errors import InvalidRequest
from tests.helpers.content import SMALL, contents

WAYS = ("embedded", "daemon", "kv")
FULL = replace(SMALL, model="grouped", group="full")
WINDOW = replace(SMALL, model="grouped", group="window", layers=3, attention="window", window=40)
WIDE = replace(WINDOW, group="wide", page_tokens=32, window=97)
NARROW = replace(WINDOW, group="narrow", page_tokens=8, window=1 + 8)
STATE = Layout(model="grouped", layers=2, kv_heads=3, head_dim=100, dtype="uint8", page_tokens=16, attention="state")
MODELS = {
    "window": [FULL, WINDOW],
    "state": [FULL, STATE],
    "all": [FULL, WIDE, NARROW, STATE],
    "two windows": [WINDOW, replace(WINDOW, group="other", window=100)],
    "one": [FULL],
}
LENGTH = 200

Array = npt.NDArray[Any]


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(params=WAYS)
def store(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    return stores[request.param]


@pytest.fixture
def cache(request: pytest.FixtureRequest, store: Store) -> GroupedCache:
    return store.cache([FULL, WINDOW, STATE], salt=request.node.nodeid)


def needed(layout: Layout, boundary: int) -> list[int]:
    """The pages a boundary needs, told from the tokens that are attended to."""
    if layout.attention == "state":
        attended = range(max(0, boundary - 1), boundary)
    else:
        attended = range(max(0, boundary - (layout.window or boundary + 1) + 1), boundary)
    return sorted({token // layout.page_tokens for token in attended})


def page_bytes(keys: GroupedKeys, group: int, page: int) -> Array:
    """What belongs into a page."""
    return contents(keys.parts(group, range(page, page + 1))[0], keys.layouts[group])[0]


def all_bytes(keys: GroupedKeys, group: int, pages: range) -> Array:
    rows = [page_bytes(keys, group, page) for page in pages]
    return np.stack(rows) if rows else np.zeros((0, keys.layouts[group].page_bytes), np.uint8)


def put_all(cache: GroupedCache, tokens: Any) -> GroupedKeys:
    keys = cache.keys(tokens)
    cache.put(keys, [all_bytes(keys, group, range(keys.pages(group))) for group in range(len(cache.groups))])
    return keys


class Stored:
    """The naive model: which pages of which prompts are stored, and what that makes of a lookup."""

    def __init__(self, cache: GroupedCache) -> None:
        self.cache = cache
        self.pages: set[tuple[int, bytes]] = set()  # of a group, all tokens up to the end of the page

    def name(self, tokens: Array, group: int, page: int) -> tuple[int, bytes]:
        return group, tokens[: (page + 1) * self.cache.layouts[group].page_tokens].tobytes()

    def has(self, tokens: Array, group: int, page: int) -> bool:
        return self.name(tokens, group, page) in self.pages

    def longest(self, tokens: Array, limit: int) -> int:
        step = lcm(*(layout.page_tokens for layout in self.cache.layouts))
        for boundary in range(limit // step * step, 0, -step):
            if all(
                self.has(tokens, group, page)
                for group, layout in enumerate(self.cache.layouts)
                for page in needed(layout, boundary)
            ):
                return boundary
        return 0

    def put(self, tokens: Array, given: list[range]) -> list[int]:
        new = []
        for group, pages in enumerate(given):
            before = len(self.pages)
            for page in pages:
                chained = self.cache.layouts[group].attention == "full"
                if chained and page and not self.has(tokens, group, page - 1):
                    break
                self.pages.add(self.name(tokens, group, page))
            new.append(len(self.pages) - before)
        return new

    def lose(self, tokens: Array, group: int, pages: range) -> None:
        """They leave, the last one first; of a chain those on which nothing hangs."""
        for page in reversed(pages):
            lost = self.name(tokens, group, page)
            longer = any(one != lost and one[0] == group and one[1].startswith(lost[1]) for one in self.pages)
            if not longer or self.cache.layouts[group].attention != "full":
                self.pages.discard(lost)


def check(match: GroupedMatch, keys: GroupedKeys, expected: int, rows: list[Array] | None) -> None:
    """Every byte of what the boundary needs is there, and nothing else is said to be."""
    assert match.tokens == expected, match
    for group, (pages, layout) in enumerate(zip(match.pages, keys.layouts, strict=True)):
        assert list(pages) == needed(layout, expected)
        if rows is not None and pages:
            np.testing.assert_array_equal(rows[group][: len(pages)], all_bytes(keys, group, pages))
    assert sum(match.tiers.values()) == sum(map(len, match.pages))


@pytest.mark.parametrize("model", MODELS)
def test_random_calls_beside_a_naive_model(store: Store, model: str, request: pytest.FixtureRequest) -> None:
    """Puts of any pages of chains that part, pages that leave, gets and leases of what is left."""
    choice = random.Random(model)
    cache = store.cache(MODELS[model], salt=request.node.nodeid)
    stored = Stored(cache)
    prompts = [np.arange(LENGTH, dtype=np.uint32) for _ in range(3)]
    prompts[1][120:] += 1000
    prompts[2][17:] += 2000
    found = []
    for _ in range(24):
        tokens = choice.choice(prompts)[: choice.randrange(40, LENGTH)]
        keys = cache.keys(tokens)
        given = []
        for group, layout in enumerate(cache.layouts):
            count = keys.pages(group)
            start = 0 if layout.attention == "full" and choice.random() < 0.8 else choice.randrange(count + 1)
            given.append(range(start, choice.randrange(start, count + 1) if choice.random() < 0.3 else count))
        new = cache.put(keys, [(pages, all_bytes(keys, group, pages)) for group, pages in enumerate(given)], wait=True)
        assert list(new) == stored.put(tokens, given)
        group = choice.randrange(len(given))
        if choice.random() < 0.6 and given[group]:
            first = choice.choice(given[group])
            pages = range(first, min(keys.pages(group), first + choice.randrange(1, 4)))
            for part in keys.parts(group, pages):
                store.evict(keys=part, tier="all")
            stored.lose(tokens, group, pages)
        tokens = choice.choice(prompts)[: choice.randrange(2, LENGTH)]
        expected = stored.longest(tokens, len(tokens) - 1)
        keys = cache.keys(tokens)
        assert cache.lookup(keys).tokens == stored.longest(tokens, len(tokens))
        check(cache.lookup(tokens), keys, expected, None)
        match = cache.get(tokens)
        assert match.data is not None
        check(match, keys, expected, match.data)
        with cache.lease(tokens) as lease:
            assert lease.match is not None
            check(lease.match, keys, expected, [np.array(views) for views in lease.pages])
        found.append(expected)
    assert len(set(found)) > 2, found


def test_windows_need_only_their_pages(cache: GroupedCache) -> None:
    """After 96 tokens: all pages of full attention, those of tokens 57 to 95, the state behind token 95."""
    keys = cache.keys(range(100))
    ranges = keys.needed(96)
    assert ranges == (range(6), range(3, 6), range(5, 6))
    assert cache.put(keys, [(pages, all_bytes(keys, group, pages)) for group, pages in enumerate(ranges)]) == (6, 3, 1)
    out = [
        np.full((rows + 1, layout.page_bytes), 7, np.uint8)
        for rows, layout in zip((6, 3, 1), cache.layouts, strict=True)
    ]
    assert cache.rows(range(100)) == cache.rows(keys) == (6, 3, 1)
    match = cache.get(range(100), out)
    check(match, keys, 96, out)
    assert (match.reason, match.group, match.data, match.tiers) == ("", None, None, {Tier.DRAM: 10})
    assert all((rows[-1] == 7).all() for rows in out), "what is not needed is not written"
    shorter = cache.lookup(range(90))
    assert (shorter.tokens, shorter.reason, shorter.group) == (0, "absent", 1), "its window has no pages"
    assert cache.lookup(range(5)).tokens == 0 and cache.get(keys.upto(96)).tokens == 96


def test_one_page_less_is_the_boundary_before(cache: GroupedCache, store: Store) -> None:
    keys = put_all(cache, np.arange(100, dtype=np.uint32))
    assert (cache.lookup(keys).tokens, cache.lookup(keys).reason) == (96, "")
    store.evict(keys=keys.parts(2, range(5, 6))[0], tier="all")
    match = cache.get(keys)
    assert (match.tokens, match.reason, match.group, cache.prefetch(keys).tokens) == (80, "absent", 2, 80)
    store.evict(keys=keys.parts(1, range(3, 4))[0], tier="all")
    match = cache.get(keys)
    assert (match.tokens, match.group, match.pages[1]) == (48, 1, range(3))


def test_media_and_tokens_before_a_page_are_part_of_it(cache: GroupedCache) -> None:
    """Pages with the same tokens behind another prefix, or behind another picture, are other pages."""
    tokens = np.arange(64, dtype=np.uint32)
    other = tokens.copy()
    other[0] = 99
    pictures = [[b"cat", b"", b"", b""]] * 3
    for keys in (cache.keys(tokens), cache.keys(other), cache.keys(tokens, pictures)):
        pages = [(range(3, 4), all_bytes(keys, group, range(3, 4))) for group in (1, 2)]
        assert cache.put(keys, [None, *pages]) == (0, 1, 1)
    assert cache.put(cache.keys(tokens), [None, *pages]) == (0, 0, 0)
    full = all_bytes(keys, 0, range(4))
    cache.put(keys, [full, None, None])
    assert cache.lookup(keys).tokens == 0, "the window needs three pages"
    cache.put(keys, [None, (range(1, 3), all_bytes(keys, 1, range(1, 3))), None])
    assert [cache.lookup(tokens, extras).tokens for extras in (None, [[b"cat", b"", b"", b""]] * 3)] == [0, 0]
    longer = np.append(tokens, 1)
    assert cache.lookup(longer, pictures).tokens == 64 and cache.lookup(longer).tokens == 0


def test_a_lease_keeps_every_group(cache: GroupedCache, store: Store) -> None:
    keys = put_all(cache, range(64))
    parts = [part for group, pages in enumerate(keys.needed(64)) for part in keys.parts(group, pages)]

    def evicted() -> int:
        return sum(store.evict(keys=part, tier="all")["pages"] for part in parts)

    with cache.lease(keys, ttl_s=20) as lease:
        assert [len(views) for views in lease.pages] == [4, 3, 1] and not lease.pages[1][0].flags.writeable
        lease.renew(30)
        lease.check()
        assert evicted() == 0 and cache.lookup(keys).tokens == 64
        lease.release()
        assert evicted() == 8
    with cache.lease(keys) as lease:
        assert lease.match is not None and not lease.match
    with pytest.raises(InvalidRequest, match="^lease: "):
        lease.__enter__()


def test_bad_input(store: Store, cache: GroupedCache) -> None:
    keys = cache.keys(range(64))
    rows = [all_bytes(keys, group, range(4)) for group in range(3)]
    for field, call in (
        ("layout", lambda: store.cache([])),
        ("layout", lambda: store.cache([FULL, FULL])),
        ("layout", lambda: store.cache([FULL, None])),  # type: ignore[list-item]
        ("salt", lambda: store.cache([FULL], salt=5)),  # type: ignore[call-overload]
        ("tokens", lambda: cache.lookup([])),
        ("tokens", lambda: store.cache([FULL, WINDOW, STATE], "other").get(keys)),
        ("extras", lambda: cache.lookup(range(64), [[b""] * 4])),
        ("extras", lambda: cache.keys(range(64), [[b""] * 4, [b""] * 3, [b""] * 4])),
        ("extras", lambda: cache.get(keys, extras=[[b""] * 4] * 3)),
        ("out", lambda: cache.get(keys, rows[:2])),
        ("out", lambda: cache.get(keys, [rows[0], rows[1][:2], rows[2]])),
        ("pages", lambda: cache.put(keys, rows[:2])),
        ("pages", lambda: cache.put(keys, [rows[0], rows[1], rows[2][:3]])),
        ("pages", lambda: cache.put(keys, [rows[0], (range(3, 5), rows[1][:2]), None])),
        ("pages", lambda: cache.put(keys, [rows[0], (3, rows[1][:2]), None])),
        ("pages", lambda: keys.parts(1, range(3, 5))),
        ("ttl_s", lambda: cache.lease(keys, 0)),
        ("timeout_s", lambda: cache.prefetch(keys, -1)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field, caught.value
    assert not cache.lookup(keys)


def test_a_page_that_is_not_proven_is_the_boundary_before(shm: Path) -> None:
    """A flipped bit is seen by the get alone, after the lookup found the page."""
    with kvstore.open("flip", dram="8MiB", shm_dir=shm, scrub_bytes_per_s=0) as store:
        cache = store.cache([FULL, WINDOW])
        keys = cache.keys(range(100))
        rows = [all_bytes(keys, group, range(6)) for group in range(2)]
        cache.put(keys, rows, checksum=True, wait=True)
        with open(shm / "kvstore-flip" / "segment", "r+b") as segment:
            where = segment.read().index(rows[1][4].tobytes())
            segment.seek(where + 5)
            segment.write(bytes([int(rows[1][4][5]) ^ 1]))
        match = cache.get(keys, verify=True)
        check(match, keys, 64, match.data)
        assert (match.reason, match.group) == ("checksum", 1)


def test_pages_on_nvme(shm: Path, tmp_path: Path) -> None:
    """They leave memory one by one, and are found, read and brought back where they went."""
    with kvstore.open(dram="8MiB", nvme=f"{tmp_path}/kv:64MiB", shm_dir=shm) as store:
        cache = store.cache([FULL, WINDOW, STATE])
        keys = put_all(cache, range(100))
        assert store.evict(pages=18)["pages"] == 18  # to NVMe
        assert cache.lookup(keys).tiers == {Tier.NVME: 10}
        match = cache.get(keys)
        check(match, keys, 96, match.data)
        assert match.tiers == {Tier.NVME: 10} and cache.prefetch(keys, 10).tokens == 96
        assert cache.lookup(keys).tiers == {Tier.DRAM: 10}
