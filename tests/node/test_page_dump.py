"""A node's pages as its announcer tells them, seen some frames at a time while the node goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.cluster.announce_plan import Entries
from kvstore.node import page_feed
from kvstore.node.node import Node
from tests.helpers.inside import node_of

SECRET = b"s" * 16
PAGE_TOKENS = 8


def layout(width: int) -> Layout:
    return Layout(model="dumped", layers=1, kv_heads=1, head_dim=width, dtype="float16", page_tokens=PAGE_TOKENS)


def put(store: Store, seed: int, pages: int, width: int = 512) -> None:
    content = np.zeros((pages, layout(width).page_bytes), np.uint8)
    store.cache(layout(width), salt=f"tenant-{seed % 3}").put(prompt(seed, pages), content, wait=True)


def prompt(seed: int, pages: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, pages * PAGE_TOKENS).astype(np.uint32)


def told(dumped: tuple[int, Entries] | None) -> set[tuple[int, int, int]]:
    assert dumped is not None
    return set(zip(*(column.tolist() for column in dumped[1]), strict=True))


class Between:
    """A node to which something happens after each look at it."""

    def __init__(self, node: Node, happens: Iterator[Callable[[], object]]) -> None:
        self._node, self._happens = node, happens
        self.events = node.events
        self.looks = 0

    def look(self, at: Callable[..., Any]) -> Any:
        seen = self._node.look(at)
        self.looks += 1
        next(self._happens, lambda: None)()
        return seen


@pytest.mark.parametrize("seed", range(3))
def test_what_happens_between_two_looks_is_in_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages come, go and move; what is told at the end is what a node that holds still has."""
    monkeypatch.setattr(page_feed, "SLICE_FRAMES", 64)
    draw = np.random.default_rng(seed)
    with closing(kvstore.open(dram="16MiB", eviction="lru")) as store:
        node: Any = node_of(store)._resources.embedded
        for number in range(12):
            put(store, number, int(draw.integers(20, 100)))

        def happens() -> Iterator[Callable[[], object]]:
            for number in range(100, 100 + int(draw.integers(4, 12))):
                yield lambda number=number: put(store, number, int(draw.integers(1, 60)))
                yield lambda: store.evict(pages=int(draw.integers(1, 90)))
                if number % 3 == 0:  # another class needs an extent: what is in one of ours moves, or leaves
                    yield lambda number=number: put(store, number, 40, width=1024)

        between: Any = Between(node.node, itertools.islice(happens(), 12))
        seen = page_feed.dump(between, SECRET)
        quiet = page_feed.dump(node.node, SECRET)
        assert seen is not None and quiet is not None
        assert between.looks > 12 and seen[0] == quiet[0], "nothing happened after the last look"
        assert told(seen) == told(quiet) and told(quiet)


def test_a_dump_of_some_spans_has_their_pages_and_no_other() -> None:
    with closing(kvstore.open(dram="16MiB")) as store:
        node: Any = node_of(store)._resources.embedded
        for number in range(12):
            put(store, number, 60)
        everything = page_feed.dump(node.node, SECRET)
        some = page_feed.dump(node.node, SECRET, lambda spans: spans % np.uint64(3) == 0)
        assert told(some) == {each for each in told(everything) if each[0] % 3 == 0}
        assert 0 < len(told(some)) < len(told(everything))


def test_a_log_that_has_forgotten_is_no_dump(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(kvstore.open(dram="8MiB")) as store:
        node: Any = node_of(store)._resources.embedded
        put(store, 1, 50)

        assert told(page_feed.dump(node.node, SECRET))
        monkeypatch.setattr("kvstore.node.event_log.PAGES_MAX", 3)
        between: Any = Between(node.node, iter([lambda: put(store, 2, 9)]))
        assert page_feed.dump(between, SECRET) is None
