"""Opaque objects in one process: sizes around every border, keys, buffers, replacing, deleting, forged keys."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.client.local.object_batches import find_head
from kvstore.errors import InvalidRequest, LeaseBroken
from kvstore.model import objects
from kvstore.model.replica import ADDRESS, OBJECT_PAGE_BYTES, Status, Tier
from tests.helpers.inside import node_of

SIZES = [0, 1, *(size + step for size in OBJECT_PAGE_BYTES for step in (-1, 0, 1)), 3 << 20, 50 << 20]


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


def test_keys_of_any_text_and_length(store: Store) -> None:
    keys = ["a", "x" * 104, "x" * 105, "y" * 1000, "schlüssel/日本", "a\0b"]
    assert store.put_many(keys, [key.encode() for key in keys]) == [True] * len(keys)
    assert [store.get(key).tobytes().decode() for key in keys] == keys
    assert store.object_keys() == sorted(keys, key=str.encode)
    assert store.clear("x") == 2 and store.contains(keys) == [True, False, False, True, True, True]


def test_equal_hashes_of_two_strings_are_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "key_hash", lambda root, name: b"collision-of-all")
    monkeypatch.setattr("kvstore.client.local.object_batches.key_hash", lambda root, name: b"collision-of-all")
    monkeypatch.setattr("kvstore.client.local.object_batches.key_hash", lambda root, name: b"collision-of-all")
    assert store.put("mine", b"1")
    assert store.get("other") is None and not store.contains("other") and store.delete("other") == 0
    assert not store.put("other", b"2") and store.get("mine").tobytes() == b"1"


def test_registered_buffers(store: Store) -> None:
    buffer = np.zeros(4096, np.uint8)
    with store.register(buffer):
        assert store.registered(buffer[10:20]) and not store.registered(bytearray(5))
        with pytest.raises(InvalidRequest, match="overlap"):
            store.register(buffer[:1])
        assert store.put("k", buffer) and store.get("k", out=buffer) == 4096
    assert not store.registered(buffer)
    for bad in (b"read only", buffer[::2], bytearray()):
        with pytest.raises(InvalidRequest, match="buffer"):
            store.register(bad)


def test_pages_of_a_layout_that_looks_like_an_objects_cannot_be_deleted(store: Store) -> None:
    """A model with one layer may have pages of the same shape, in the same extents."""
    layout = Layout(model="small", layers=1, head_dim=64, dtype="uint8", page_tokens=32)
    assert layout.page_bytes == 4096 and store.put("k", b"1")
    cache = store.cache(layout)
    keys = cache.keys(np.arange(64), extras=[objects.HEAD_TAG, objects.PIECE_TAG])
    assert cache.put(keys, np.ones((2, 4096), np.uint8)) == 2
    mapped = node_of(store).writable()
    head = find_head(mapped, objects.object_root(""), b"k")
    pages = [raw for raw in mapped.index.find_many(Tier.DRAM, keys.hashes) if raw is not None]
    assert head is not None and ADDRESS.unpack(head.address)[0] == ADDRESS.unpack(pages[1])[0], "in one extent"
    assert store._delete_pages(pages) == bytes([Status.STALE] * 2) and cache.lookup(keys).pages == 2
    assert store._delete_pages([head.address]) == bytes([Status.OK]) and store.get("k") is None
    assert cache.get(keys).pages == 2


def test_only_a_head_is_sealed_as_one(store: Store) -> None:
    """The node checks what the key says it is: nobody replaces an object with a page of a prompt, or another key's."""
    from kvstore.client.local import object_batches

    assert store.put("k", b"1")
    genuine = object_batches.About.row
    forged = {
        "other key": lambda about, root, width, key: genuine(about, root, width, b"x" * 16),
        "no tag": lambda *of: genuine(*of).replace(objects.HEAD_TAG, bytes(8)),
        "too long": lambda about, *of: genuine(about._replace(value_bytes=1 << 40), *of),
        "pieces of nothing": lambda about, *of: genuine(about._replace(pieces=1 << 31), *of),
    }
    for what, row in forged.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(object_batches.About, "row", row)
            with pytest.raises(InvalidRequest, match="object's head"):
                store.put("k2", b"2")
        assert store.get("k").tobytes() == b"1" and not store.contains("k2"), what
    assert store.put("k2", b"2") and store.verify()["findings"] == []


@pytest.mark.parametrize("gone", [lambda store: store.delete("k"), lambda store: store.clear("k")])
def test_a_deleted_object_stays_for_who_leased_it(gone: Callable[[Store], int], store: Store) -> None:
    assert store.put("k", b"leased")
    mapped = node_of(store).writable()
    found = find_head(mapped, objects.object_root(""), b"k")
    assert found is not None
    cache = store._object_cache("", found.frame_class, False)
    keys = found.about.head_keys(cache.root, found.frame_class.page_tokens)
    with pytest.raises(LeaseBroken), cache.lease(keys) as lease:  # its holder hears that the page is no more
        assert gone(store) == 1 and store.get("k") is None
        assert store.put("k", b"later") and store.get("k").tobytes() == b"later"
        assert lease.pages[0][:6].tobytes() == b"leased"
        assert store.stats()["tiers"]["dram"]["frames"]["retiring"] == 1
    assert store.stats()["tiers"]["dram"]["frames"]["retiring"] == 0
    assert store.verify()["findings"] == []
