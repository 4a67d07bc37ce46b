"""Naming: clients say whose a root is once, and again when the node has forgotten it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.state import tenants

LAYOUT = Layout(model="naming", layers=1, kv_heads=1, head_dim=64, page_tokens=16)
PAGES = 4
QUOTA = 2 * PAGES * LAYOUT.page_bytes


def put(store: Store, adapter: str, seed: int = 0) -> int:
    tokens = np.arange(PAGES * LAYOUT.page_tokens, dtype=np.uint32) + 1000 * seed
    rows = np.zeros((PAGES, LAYOUT.page_bytes), np.uint8)
    return store.cache(LAYOUT, salt="t", adapter=adapter).put(tokens, rows)


def test_a_root_that_was_forgotten_still_counts_for_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants, "ROOTS_MAX", 16)
    monkeypatch.setattr(tenants, "FORGET_AT_ONCE", 4)
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


def test_a_name_is_said_once_while_the_node_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with kvstore.open(dram="16MiB") as store:
        mapped = store._node.writable()
        calls: list[str] = []
        call = mapped.channel._dispatcher.admin.call  # type: ignore[attr-defined]

        def counted(request: dict[str, Any]) -> dict[str, Any]:
            calls.append(request["call"])
            return dict(call(request))

        monkeypatch.setattr(mapped.channel._dispatcher.admin, "call", counted)  # type: ignore[attr-defined]
        for seed in range(5):
            put(store, "mine", seed)
        assert calls == ["root"]
