"""Lease, Writer and Reader over a real embedded node."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.errors import DeadlineExceeded, InvalidRequest, LeaseBroken, OutOfSpace
from kvstore.model.replica import FrameState

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


def test_lease_gives_readonly_views(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    data = content(GQA, 5)
    cache.put(prompt(5), data)
    with cache.lease(cache.keys(prompt(6))) as lease:
        assert (lease.match.pages, lease.match.reason) == (5, "absent")
        for page, view in zip(data, lease.pages, strict=True):
            np.testing.assert_array_equal(view, page.reshape(-1))
            with pytest.raises(ValueError):
                view[0] = 1
            with pytest.raises(ValueError):
                view.flags.writeable = True
        assert store.evict(pages=100)["pages"] == 0  # what is leased stays
        lease.renew(60)
        lease.check()
    assert lease.pages == []
    assert store.evict(pages=100)["pages"] == 5


def test_empty_lease(cache: kvstore.PrefixCache) -> None:
    with cache.lease(prompt(3)) as lease:
        assert lease.pages == [] and not lease.match and lease.match.reason == "absent"
        lease.renew(5)


def test_overstayed_lease_raises(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    cache.put(prompt(3), content(GQA, 3))
    with pytest.raises(LeaseBroken, match="page 2 changed"), cache.lease(cache.keys(prompt(3)), ttl_s=0.01) as lease:
        deadline = time.monotonic() + 10
        while not store.evict(pages=1)["pages"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with pytest.raises(LeaseBroken):
            lease.renew(5)


def test_another_exception_wins_with_a_note(cache: kvstore.PrefixCache) -> None:
    cache.put(prompt(1), content(GQA, 1))
    with pytest.raises(KeyError) as caught, cache.lease(cache.keys(prompt(1))) as lease:
        lease._runs = [lease._runs[0]._replace(words=bytes(8))]
        raise KeyError("user's")
    assert "page 0 changed" in caught.value.__notes__[0]


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf")])
def test_bad_ttl(cache: kvstore.PrefixCache, ttl_s: float) -> None:
    for call in (cache.lease, cache.writer):
        with pytest.raises(InvalidRequest, match="^ttl_s: "):
            call(prompt(1), ttl_s)
    with pytest.raises(InvalidRequest, match="^timeout_s: "):
        cache.reader(prompt(1), ttl_s)


# --- writer ---------------------------------------------------------------------------------------------------------


def test_layers_in_any_order(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(5)), content(GQA, 5)
    with cache.writer(keys) as writer:
        assert writer.pages_new == [0, 1, 2, 3, 4]
        for layer in (2, 0, 3, 1):
            assert not cache.lookup(keys)
            writer.write_layer(layer, layer_of(data, layer).view(np.float16))
    assert writer.sealed == 5
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(5, -1))


def test_pages_stored_are_skipped_and_single_pages_can_be_written(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(6)), content(GQA, 6)
    cache.put(keys[:2], data[:2])
    with cache.writer(keys) as writer:
        assert writer.pages_new == [2, 3, 4, 5]
        for page in range(6):
            writer.write_page(page, data[page])
    assert writer.sealed == 4
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(6, -1))
    with cache.writer(keys) as writer:
        assert writer.pages_new == []
    assert writer.sealed == 0


def test_exception_or_missing_layer_revokes(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    keys, data = cache.keys(prompt(3)), content(GQA, 3)
    with pytest.raises(RuntimeError), cache.writer(keys) as writer:
        writer.write_layer(0, layer_of(data, 0))
        raise RuntimeError("engine died")
    with pytest.raises(InvalidRequest, match="^layer: layer 1 of page 0 was not written"), cache.writer(keys) as writer:
        writer.write_layer(0, layer_of(data, 0))
    assert not cache.lookup(keys)
    frames = store.stats()["tiers"]["dram"]["frames"]
    assert frames.get("reserved", 0) == frames.get("quarantined", 0) == 0
    assert cache.put(keys, data) == 3


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_one_group_share_pages(cache: kvstore.PrefixCache, ranks: int) -> None:
    keys, data = cache.keys(prompt(4)), content(GQA, 4)
    writers = [cache.writer(keys, group="request-1", rank=rank, ranks=ranks) for rank in range(ranks)]
    for writer in writers:
        writer.__enter__()
    for rank, writer in enumerate(writers):
        heads = GQA.shard_heads(rank, ranks)
        mine = data[:, :, slice(*heads)] if heads is not None else data[:, :, :1]
        for layer in range(4):
            writer.write_layer(layer, layer_of(mine, layer))
        assert not cache.lookup(keys)
        writer.__exit__(None, None, None)
        assert writer.sealed == 4
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(4, -1))


def test_mla_has_one_writing_rank(store: kvstore.Store) -> None:
    cache = store.cache(MLA)
    keys, data = cache.keys(prompt(2)), content(MLA, 2)
    for rank in (1, 0):
        with cache.writer(keys, group=77, rank=rank, ranks=2) as writer:
            for layer in range(3):
                writer.write_layer(layer, layer_of(data, layer) if rank == 0 else layer_of(data * 0, layer))
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(2, -1))


def test_two_writers_of_one_chain_make_one_copy(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    keys, data = cache.keys(prompt(3)), content(GQA, 3)
    with cache.writer(keys) as first, cache.writer(keys) as second:
        for writer in (first, second):
            for layer in range(4):
                writer.write_layer(layer, layer_of(data, layer))
    assert second.sealed == 3 and first.sealed == 0
    np.testing.assert_array_equal(cache.get(keys).data, data.reshape(3, -1))
    frames = store.stats()["tiers"]["dram"]["frames"]
    assert frames["sealed"] == 3 and frames.get("reserved", 0) == frames.get("quarantined", 0) == 0


def test_no_room_is_said(cache: kvstore.PrefixCache) -> None:
    frames = (8 << 20) // cache.frame_class.frame_bytes
    cache.put(prompt(frames), np.zeros((frames, GQA.page_bytes), np.uint8))
    stored = cache.lookup(cache.keys(prompt(frames))).pages
    with (
        cache.lease(cache.keys(prompt(stored))) as lease,
        pytest.raises(OutOfSpace),
    ):
        assert lease.match.pages == stored
        while True:  # a few frames may still be granted ahead
            cache.writer(prompt(1, 10**6)).__enter__()


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"rank": 2, "ranks": 2}, "rank"),
        ({"rank": -1, "ranks": 2}, "rank"),
        ({"ranks": 3}, "ranks"),
        ({"ranks": 16}, "ranks"),
        ({"ranks": 0}, "ranks"),
        ({"group": -5}, "group"),
        ({"group": 1.5}, "group"),
    ],
)
def test_bad_writers(cache: kvstore.PrefixCache, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        cache.writer(prompt(1), **arguments)


def test_bad_writes_write_nothing(cache: kvstore.PrefixCache) -> None:
    data = content(GQA, 2)
    with pytest.raises(InvalidRequest, match="^writer: "):
        cache.writer(prompt(2)).write_layer(0, layer_of(data, 0))
    with cache.writer(prompt(2)) as writer:
        for layer, rows, field in ((4, data[:, 0], "layer"), (-1, data[:, 0], "layer"), (0, data, "data")):
            with pytest.raises(InvalidRequest, match=f"^{field}: "):
                writer.write_layer(layer, np.ascontiguousarray(rows))
        for page, rows, field in ((2, data[0], "page"), (0, data, "data")):
            with pytest.raises(InvalidRequest, match=f"^{field}: "):
                writer.write_page(page, rows)
        for page in (0, 1):
            writer.write_page(page, data[page])
    assert writer.sealed == 2


# --- reader ---------------------------------------------------------------------------------------------------------


def test_reader_follows_a_writer(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(6)), content(GQA, 6)
    cache.put(keys[:2], data[:2])
    reader = cache.reader(keys, timeout_s=10)
    out = np.zeros((6, GQA.layer_bytes), np.uint8)
    with cache.writer(keys) as writer:
        for layer in range(4):
            writer.write_layer(layer, layer_of(data, layer))
            out[:] = 0
            reader.read_layer(layer, out)
            np.testing.assert_array_equal(out, layer_of(data, layer))
    for layer in (3, 1):  # sealed by now
        reader.read_layer(layer, out)
        np.testing.assert_array_equal(out, layer_of(data, layer))


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


def test_reader_waits_for_another_writer_when_one_gives_up(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(3)), content(GQA, 3)
    out = np.zeros((3, GQA.layer_bytes), np.uint8)
    reader = cache.reader(keys, timeout_s=10)
    with pytest.raises(RuntimeError), cache.writer(keys) as writer:
        writer.write_layer(0, layer_of(content(GQA, 3, 1), 0))
        reader.read_layer(0, out)
        raise RuntimeError
    timer = threading.Timer(0.1, cache.put, (keys, data))
    timer.start()
    reader.read_layer(1, out)
    np.testing.assert_array_equal(out, layer_of(data, 1))
    timer.join()


def test_reader_in_a_thread_streams(cache: kvstore.PrefixCache) -> None:
    keys, data = cache.keys(prompt(8)), content(GQA, 8)
    wrong: list[int] = []

    def read() -> None:
        reader = cache.reader(keys, timeout_s=20)
        out = np.zeros((8, GQA.layer_bytes), np.uint8)
        for layer in range(4):
            reader.read_layer(layer, out)
            if (out != layer_of(data, layer)).any():
                wrong.append(layer)

    thread = threading.Thread(target=read)
    thread.start()
    with cache.writer(keys) as writer:
        for layer in range(4):
            time.sleep(0.01)
            writer.write_layer(layer, layer_of(data, layer))
    thread.join(60)
    assert not thread.is_alive() and not wrong


def test_reader_deadline_and_bad_arguments(cache: kvstore.PrefixCache) -> None:
    keys = cache.keys(prompt(3))
    cache.put(keys[:1], content(GQA, 1))
    reader = cache.reader(keys, timeout_s=0.05)
    assert reader.pages == 3 and cache.reader(prompt(3)).pages == 2
    with pytest.raises(DeadlineExceeded, match="layer 2 of page 1 did not arrive"):
        reader.read_layer(2, np.zeros((3, GQA.layer_bytes), np.uint8))
    with pytest.raises(InvalidRequest, match="^layer: "):
        reader.read_layer(4, bytearray(3 * GQA.layer_bytes))
    with pytest.raises(InvalidRequest, match="^out: "):
        reader.read_layer(0, bytearray(GQA.layer_bytes))


def test_states_are_what_the_arrays_assume() -> None:
    assert (FrameState.RESERVED, FrameState.SEALED) == (1, 2)
