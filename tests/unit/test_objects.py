"""Opaque objects in one process: sizes around every border, keys, buffers, replacing, deleting, forged keys."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.errors import InvalidRequest
from kvstore.model import objects

SIZES = [0, 1, *(size + step for size in objects.PAGE_SIZES for step in (-1, 0, 1)), 3 << 20, 50 << 20]


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="128MiB") as store:
        yield store


@pytest.mark.parametrize("size", SIZES)
def test_a_value_of_any_size_comes_back(store: Store, size: int) -> None:
    data = os.urandom(size)
    assert store.put("key", data)
    assert not store.put("key", b"other"), "the first one stays"
    out = bytearray(size + 1)
    assert store.get("key").tobytes() == data
    assert store.get("key", out=out) == size and out[:size] == data
    assert store.size("key") == size and store.contains("key")
    assert store.delete("key") == 1 and store.get("key") is None
    assert store.stats()["tiers"]["dram"]["frames"]["sealed"] == 0, "its pieces went with it"
    assert store.verify()["findings"] == []


@pytest.mark.parametrize("key", ["", "x" * 1001, "é" * 501, "\ud800", 3, b"x"])
def test_what_is_no_key_is_refused_by_name(store: Store, key: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        store.put(key, b"1")  # type: ignore[arg-type]
    assert refused.value.field == "key" and store.object_keys() == []


def test_keys_of_any_text_and_length(store: Store) -> None:
    keys = ["a", "x" * 104, "x" * 105, "y" * 1000, "schlüssel/日本", "a\0b"]
    assert store.put_many(keys, [key.encode() for key in keys]) == [True] * len(keys)
    assert [store.get(key).tobytes().decode() for key in keys] == keys
    assert store.object_keys() == sorted(keys, key=str.encode)
    assert store.remove("x+") == 2 and store.contains(keys) == [True, False, False, True, True, True]


def test_salts_keep_objects_apart(store: Store) -> None:
    assert store.put("k", b"one", salt="a") and store.put("k", b"two", salt="b")
    assert store.get("k") is None and store.delete("k", salt="a") == 1
    assert store.get("k", salt="b").tobytes() == b"two" and store.object_keys("a") == []


def test_values_from_and_into_several_buffers(store: Store) -> None:
    data = os.urandom((3 << 20) + 7)
    assert store.put_many(["k"], [[data[:5], data[5 : 1 << 20], data[1 << 20 :]]]) == [True]
    outs = [np.zeros(3, np.uint8), np.zeros(1_500_000, np.uint8), np.zeros(2 << 20, np.uint8)]
    assert store.get_many(["k", "none"], [outs, [bytearray(1)]]) == [len(data), -1]
    assert b"".join(out.tobytes() for out in outs)[: len(data)] == data


def test_replace_puts_the_new_value_in_place_of_the_old(store: Store) -> None:
    for size in (10, 3 << 20, 0, 5000):
        assert store.put("k", bytes([size % 251]) * size, replace=True)
        assert store.get("k").tobytes() == bytes([size % 251]) * size
    assert store.stats()["tiers"]["dram"]["frames"]["sealed"] == 2, "of the last one alone"


def test_equal_hashes_of_two_strings_are_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "key_hash", lambda root, name: b"collision-of-all")
    monkeypatch.setattr("kvstore.client.object_parts.key_hash", lambda root, name: b"collision-of-all")
    assert store.put("mine", b"1")
    assert store.get("other") is None and not store.contains("other") and store.delete("other") == 0
    assert not store.put("other", b"2") and store.get("mine").tobytes() == b"1"


def test_out_too_small_or_read_only_is_refused(store: Store) -> None:
    store.put("k", b"12345")
    for out in (bytearray(4), b"12345", [bytearray(2), bytearray(2)]):
        with pytest.raises(InvalidRequest) as refused:
            store.get("k", out=out)
        assert refused.value.field == "out"


def test_registered_buffers(store: Store) -> None:
    buffer = np.zeros(4096, np.uint8)
    with store.register(buffer):
        assert store.registered(buffer[10:20]) and not store.registered(bytearray(5))
        with pytest.raises(InvalidRequest, match="overlaps"):
            store.register(buffer[:1])
        assert store.put("k", buffer) and store.get("k", out=buffer) == 4096
    assert not store.registered(buffer)
    for bad in (b"read only", buffer[::2], bytearray()):
        with pytest.raises(InvalidRequest, match="buffer"):
            store.register(bad)
