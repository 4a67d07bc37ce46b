"""What a node reports before anything was asked of it, and the ages of evicted pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvstore
from kvstore.node.operator.stats import age_quantile
from kvstore.state.eviction import POLICY_DEFAULT


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store:
        yield store


def test_nothing_asked_has_no_ratio(store: kvstore.Store) -> None:
    dram = store.stats()["tiers"]["dram"]
    assert dram["hit_ratio"] is None
    assert dram["age_at_eviction_s"] == {"p50": None, "p90": None}
    assert dram["evicted"] == {} and dram["eviction"] == POLICY_DEFAULT


def test_age_quantile_is_right_to_a_factor_of_two() -> None:
    ages_s = sorted(int(2 ** (i % 17 * 0.9)) for i in range(1000))
    counted = Counter(age.bit_length() for age in ages_s)
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = ages_s[int(share * 1000) - 1]
        found = age_quantile(counted, share)
        assert found is not None and max(exact, 1) / 2 <= found <= 2 * max(exact, 1)
