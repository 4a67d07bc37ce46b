"""Which pages fit a description, which of those leave, and that a dry run says the same and changes nothing."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.node.node import Node
from kvstore.node.operator import page_calls
from kvstore.node.tier_mover import Mover
from kvstore.state import events as ev
from kvstore.state import instructions as do

LAYOUT = Layout(model="m", layers=2, kv_heads=1, head_dim=16, page_tokens=16)


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="16MiB") as opened:
        yield opened


def put(store: Store, first: int, pages: int, salt: str = "") -> Any:
    cache = store.cache(LAYOUT, salt=salt)
    tokens = np.arange(first * 10_000, first * 10_000 + pages * 16)
    assert cache.put(tokens, np.zeros((pages, LAYOUT.page_bytes), np.uint8)) == pages
    return cache.keys(tokens)


def stored(store: Store) -> int:
    return int(store.stats()["tiers"]["dram"]["pages"])


def test_a_dry_run_says_what_leaves_and_changes_nothing(store: Store) -> None:
    cold, warm = put(store, 1, 4), put(store, 2, 4)
    store.cache(LAYOUT).get(warm)
    would = store.evict(pages=3, dry_run=True)
    assert stored(store) == 8
    did = store.evict(pages=3)
    assert did["listed"] == would["listed"] and did["by_tier"] == would["by_tier"]
    assert [page["key"] for page in did["listed"]] == [key.hex() for key in reversed(cold.hashes[1:])]
    assert store.cache(LAYOUT).lookup(cold).pages == 1 and store.cache(LAYOUT).lookup(warm).pages == 4
    assert store.verify()["findings"] == []


def test_a_prompt_leaves_but_for_what_other_pages_hang_on(store: Store) -> None:
    keys = put(store, 1, 4)
    gone = store.evict(keys=keys[:2])
    assert gone["pages"] == 0 and gone["stayed"] == {"children": 2}
    assert store.evict(keys=keys[2:])["pages"] == 2
    assert store.cache(LAYOUT).lookup(keys).pages == 2


def test_leased_and_pinned_pages_stay(store: Store) -> None:
    leased, pinned = put(store, 1, 3), put(store, 2, 3)
    pin = store.pin(pinned, 60.0)
    with store.cache(LAYOUT).lease(leased):
        gone = store.evict(percent=100.0)
        assert gone["pages"] == 0 and sum(gone["stayed"].values()) == 6, gone
    store.unpin(pin["pin"])
    assert store.evict(percent=50.0)["pages"] == 3 and stored(store) == 3


@pytest.mark.parametrize("order", ["coldest", "recent", "place"])
def test_pages_of_one_age_are_each_told_once(order: str, store: Store) -> None:
    chains = [put(store, first, 25) for first in range(8)]
    for keys in chains if order == "recent" else reversed(chains):  # those last in place come first
        assert store.cache(LAYOUT).get(keys).pages == 25  # all at one time
    told, after = [], None
    while after is not None or not told:
        found = store.pages(limit=3, order=order, after=after)
        told, after = told + [page["key"] for page in found["pages"]], found.get("next")
    assert sorted(told) == sorted(key.hex() for keys in chains for key in keys.hashes)


def test_age_and_bytes(store: Store) -> None:
    put(store, 1, 4)
    assert store.evict(age_s=3600.0)["pages"] == 0
    assert store.evict(bytes=LAYOUT.page_bytes + 1)["pages"] == 2
    assert store.evict(age_s=0.0)["pages"] == 2


def test_a_call_ends_in_time_and_says_what_it_left(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1, 5)
    monkeypatch.setattr(page_calls, "EVICT_STEP", 2)
    monkeypatch.setattr(page_calls, "EVICT_S", -1.0)
    found = store.evict(percent=100.0)
    assert (found["pages"], found["by_tier"], found["stayed"]) == (0, {}, {"time": 5}) and stored(store) == 5
    monkeypatch.setattr(page_calls, "EVICT_S", 40.0)
    assert store.evict(percent=100.0)["pages"] == 5


def test_an_eviction_from_dram_is_saved_first_and_from_all_is_gone(tmp_path: Path) -> None:
    name = f"b{secrets.token_hex(4)}"
    with kvstore.open(dram="16MiB", nvme=f"{tmp_path}/{name}:64MiB") as store:
        keys = put(store, 1, 6)
        gone = store.evict(percent=100.0)
        assert gone["pages"] == 6 and stored(store) == 0, gone
        assert store.cache(LAYOUT).get(keys).pages == 6
        assert store.evict(keys=keys, tier="all")["by_tier"]["nvme"]["pages"] == 6
        assert store.cache(LAYOUT).lookup(keys).pages == 0
        assert store.verify()["findings"] == []


def test_what_waits_for_its_children_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While chains wait to be saved only their ends are tried again: to ask for all would keep the node busy."""
    chains, pages, passes = 4, 32, 20
    asked: list[int] = []
    handle, decide = Node.handle, Mover.decide

    def counted(node: Node, event: ev.Event) -> do.Reply:
        if isinstance(event, ev.EvictChosen):
            asked.append(len(event.addresses))
        return handle(node, event)

    monkeypatch.setattr(Node, "handle", counted)
    monkeypatch.setattr(Mover, "decide", lambda mover: len(asked) >= passes and decide(mover))
    monkeypatch.setattr(page_calls, "SAVE_LOOK_S", 0.001)
    name = f"b{secrets.token_hex(4)}"
    with kvstore.open(dram="16MiB", nvme=f"{tmp_path}/{name}:64MiB") as store:
        keys = [put(store, first, pages) for first in range(chains)]
        assert store.evict(percent=100.0)["pages"] == chains * pages and stored(store) == 0
        assert all(store.cache(LAYOUT).get(each).pages == pages for each in keys)
    waited = asked[2:passes]
    assert waited == [chains] * len(waited), asked
