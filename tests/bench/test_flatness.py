"""What the directory costs a large pool, against a small one. Nothing is timed."""

from __future__ import annotations

from kvstore.bench.flatness import played


def test_a_large_pool_costs_a_put_and_a_get_little_more() -> None:
    """Conversations that share their first page: 64 nodes beside 2, and the busiest owner beside the mean."""
    few, many = played(2, seed=1, turns=1), played(64, seed=1, turns=1)
    assert many.per("get", "messages") <= 2 * few.per("get", "messages")
    assert many.per("get", "bytes") <= few.per("get", "bytes")
    assert many.per("put", "bytes") <= 1.5 * few.per("put", "bytes")
    assert max(many.asked.values()) <= 2 * many.asked.total() / 64
    entries = [len(each) for each in many.directories.values()]
    assert max(entries) <= 2 * sum(entries) / 64
