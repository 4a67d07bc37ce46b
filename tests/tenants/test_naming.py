"""Whose pages are, as a node counts and tells it: names that are forgotten, tiny pages, pins of tails, many tenants."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.errors import InvalidRequest
from kvstore.state import tenants
from tests.helpers.inside import admin

LAYOUT = Layout(model="naming", layers=1, kv_heads=1, head_dim=64, page_tokens=16)
PAGES = 4
QUOTA = 2 * PAGES * LAYOUT.page_bytes


def put(store: Store, adapter: str, seed: int = 0, salt: str = "t") -> int:
    tokens = np.arange(PAGES * LAYOUT.page_tokens, dtype=np.uint32) + 1000 * seed
    rows = np.zeros((PAGES, LAYOUT.page_bytes), np.uint8)
    return store.cache(LAYOUT, salt=salt, adapter=adapter).put(tokens, rows)


def test_a_root_that_was_forgotten_still_counts_for_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "NAMES_BYTES_MAX", 16 << 10)
    with kvstore.open(dram="16MiB", quotas=[f"t dram={QUOTA}"]) as store:
        assert put(store, "mine") == PAGES
        assert store.put("object", b"1", salt="t") and store.delete("object", salt="t") == 1
        store.evict(percent=100, salt="t")
        for number in range(40):  # named, and without pages at the end: mine is forgotten with others
            assert put(store, f"other-{number}") == PAGES
            store.evict(percent=100, salt="t")
        for seed in range(8):
            put(store, "mine", seed)
            store.put(f"object-{seed}", bytes(1000), salt="t")
        found = store.stats()["tenants"]
        assert found["t"]["dram"]["evicted_quota"] > 0 and "" not in found
        assert found["t"]["dram"]["bytes"] <= QUOTA


def test_a_pin_of_a_tail_would_keep_more_than_it_counts() -> None:
    with kvstore.open(dram="16MiB", pins_share_max=0.001) as store:
        cache = store.cache(LAYOUT, salt="t")
        tokens = np.arange(8 * LAYOUT.page_tokens)
        cache.put(tokens, np.zeros((8, LAYOUT.page_bytes), np.uint8))
        for keys in (cache.keys(tokens), cache.keys(tokens)[7:]):
            with pytest.raises(InvalidRequest, match="pins_share_max|first page"):
                store.pin(keys, 60)
        assert store.pin(cache.keys(tokens)[:2], 60)["pages"] == 2


def test_tenants_are_told_in_parts() -> None:
    with kvstore.open(dram="16MiB") as store:
        salts = [f"{number:04}-{'x' * 900}" for number in range(300)]
        for salt in salts:
            put(store, "", salt=salt)
        told: list[str] = []
        found = admin(store, "tenants")
        while True:
            told += found["tenants"]
            if "next" not in found:
                break
            found = admin(store, "tenants", after=found["next"], limit=100)
        assert told == salts and "pins" in admin(store, "pins", limit=1, after=None)
        for wrong in ({"after": 3}, {"limit": 0}):
            with pytest.raises(InvalidRequest):
                admin(store, "tenants", **wrong)
