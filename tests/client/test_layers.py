"""Lease, Writer and Reader over a real embedded node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import DeadlineExceeded

GQA = kvstore.Layout(model="m", layers=4, kv_heads=4, head_dim=16, dtype="float16", page_tokens=8)
MLA = kvstore.Layout(model="m", layers=3, mla_latent=64, mla_rope=16, page_tokens=8)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store:
        yield store


@pytest.fixture
def cache(store: kvstore.Store) -> kvstore.PrefixCache:
    return store.cache(GQA)


def prompt(pages: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + pages * 8, dtype=np.uint32)


def content(layout: kvstore.Layout, pages: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """``[pages, layers, kv_heads, head_bytes]``"""
    shape = pages, layout.layers, layout.kv_heads, layout.head_bytes
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def layer_of(data: np.ndarray[Any, Any], layer: int, heads: slice = slice(None)) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(data[:, layer, heads]).reshape(len(data), -1)


# --- lease ----------------------------------------------------------------------------------------------------------


def test_another_exception_wins_with_a_note(cache: kvstore.PrefixCache) -> None:
    cache.put(prompt(1), content(GQA, 1))
    with pytest.raises(KeyError) as caught, cache.lease(cache.keys(prompt(1))) as lease:
        lease._runs = [lease._runs[0]._replace(words=bytes(8))]
        raise KeyError("user's")
    assert "page 0 changed" in caught.value.__notes__[0]


# --- writer ---------------------------------------------------------------------------------------------------------


def test_mla_has_one_writing_rank(store: kvstore.Store) -> None:
    cache = store.cache(MLA)
    keys, data = cache.keys(prompt(2)), content(MLA, 2)
    for rank in (1, 0):
        with cache.writer(keys, group=77, rank=rank, ranks=2) as writer:
            for layer in range(3):
                writer.write_layer(layer, layer_of(data, layer) if rank == 0 else layer_of(data * 0, layer))
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(2, -1))


# --- reader ---------------------------------------------------------------------------------------------------------


def test_reader_waits_for_every_rank(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(2)), content(GQA, 2)
    out = np.zeros((2, GQA.layer_bytes), np.uint8)
    with cache.writer(keys, group=9, rank=0, ranks=2) as one, cache.writer(keys, group=9, rank=1, ranks=2) as two:
        one.write_layer(0, layer_of(data, 0, slice(0, 2)))
        with pytest.raises(DeadlineExceeded, match="layer 0 of page 0"):
            cache.reader(keys, timeout_s=0.05).read_layer(0, out)
        two.write_layer(0, layer_of(data, 0, slice(2, 4)))
        cache.reader(keys, timeout_s=5).read_layer(0, out)
        np.testing.assert_array_equal(out, layer_of(data, 0))
        for layer in (1, 2, 3):
            one.write_layer(layer, layer_of(data, layer, slice(0, 2)))
            two.write_layer(layer, layer_of(data, layer, slice(2, 4)))
