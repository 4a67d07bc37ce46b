"""What a node says of itself: counts of clients over an embedded node, and the shape of both tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.node.operator.stats import age_quantile
from kvstore.state.eviction import POLICY_DEFAULT

LAYOUT = kvstore.Layout(model="m", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8)
PAGE = LAYOUT.page_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store:
        yield store


def prompt(pages: int) -> np.ndarray[Any, Any]:
    return np.arange(pages * LAYOUT.page_tokens, dtype=np.uint32)


def pages(count: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, PAGE), np.uint8)


# --- counts ---------------------------------------------------------------------------------------------------------


def test_every_verb_of_a_client_is_counted(store: kvstore.Store) -> None:
    cache = store.cache(LAYOUT)
    keys, more = cache.keys(prompt(16)), cache.keys(prompt(20))
    assert cache.get(keys).pages == 0
    cache.put(keys, pages(16))
    cache.put(keys, pages(16))  # nothing new
    assert cache.lookup(keys).pages == cache.get(more).pages == 16
    with cache.lease(more) as lease:
        assert len(lease.pages) == 16
    with cache.writer(more) as writer:
        for layer in range(LAYOUT.layers):
            writer.write_layer(layer, np.zeros((20, PAGE // LAYOUT.layers), np.uint8))
    stats = store.stats()
    assert stats["clients"] == {
        "lookups": 1,
        "gets": 2,
        "leases": 1,
        "puts": 2,  # the layer-wise writer is none, its pages count below
        "puts_async": 0,
        "pages_asked": 16 + 20 + 20,
        "hit_dram": 32,
        "hit_nvme": 0,
        "hit_dram_tokens": 32 * LAYOUT.page_tokens,
        "hit_nvme_tokens": 0,
        "missed_tokens": 24 * LAYOUT.page_tokens,
        "missed_absent": 16 + 4 + 4,
        "missed_generation": 0,
        "missed_identity": 0,
        "missed_checksum": 0,
        "missed_extent": 0,
        "missed_io": 0,
        "read_dram_bytes": 32 * PAGE,
        "read_nvme_bytes": 0,
        "hit_hbm": 0,
        "read_hbm_bytes": 0,
        "pages_put": 20,
        "put_bytes": 20 * PAGE,
    }
    dram = stats["tiers"]["dram"]
    assert (dram["bytes_in"], dram["bytes_out"]) == (20 * PAGE, 32 * PAGE)
    assert dram["hit_ratio"] == pytest.approx(32 / 56)
    assert stats["tiers"].keys() == {"dram"}


def test_nothing_asked_has_no_ratio(store: kvstore.Store) -> None:
    dram = store.stats()["tiers"]["dram"]
    assert dram["hit_ratio"] is None
    assert dram["age_at_eviction_s"] == {"p50": None, "p90": None}
    assert dram["evicted"] == {} and dram["eviction"] == POLICY_DEFAULT


# --- ages -----------------------------------------------------------------------------------------------------------


def test_age_quantile_is_right_to_a_factor_of_two() -> None:
    ages_s = sorted(int(2 ** (i % 17 * 0.9)) for i in range(1000))
    counted = Counter(age.bit_length() for age in ages_s)
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = ages_s[int(share * 1000) - 1]
        found = age_quantile(counted, share)
        assert found is not None and max(exact, 1) / 2 <= found <= 2 * max(exact, 1)
