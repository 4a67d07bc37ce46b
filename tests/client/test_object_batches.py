"""Batches of opaque objects: what one call does for many is what as many calls would have done, whatever happens."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.client.local import object_finding, object_reading
from kvstore.client.local.object_parts import find_head
from kvstore.errors import InvalidRequest
from kvstore.model import objects
from tests.helpers.inside import node_of
from tests.helpers.nvme.nodes import NODE, configure, nvme
from tests.helpers.processes import Machine, evict_all, frames, wait_until

SIZES = (0, 1, 4096, 5000, 65536, 65537, 300_000, 1 << 20, (2 << 20) + 3)


@pytest.fixture
def store() -> Iterator[Store]:
    with kvstore.open(dram="128MiB") as store:
        yield store


def cut(chance: random.Random, size: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Buffers of this size together, of any lengths, at any place of a memory page."""
    cuts = sorted(chance.randrange(size + 1) for _ in range(chance.randrange(6)))
    lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
    return [np.zeros(length + 31, np.uint8)[(skip := chance.randrange(32)) : skip + length] for length in lengths]


@pytest.mark.parametrize("seed", range(3))
def test_batches_of_all_sizes_come_back_from_and_into_any_buffers(store: Store, seed: int) -> None:
    chance = random.Random(seed)
    values = {f"k{i}": os.urandom(chance.choice(SIZES)) for i in range(24)}
    sources: list[Any] = []
    for value in values.values():
        sources.append(cut(chance, len(value)))
        at = 0
        for part in sources[-1]:
            part[:] = np.frombuffer(value[at : at + part.size], np.uint8)
            at += part.size
    assert store.put_many(list(values), sources) == [True] * len(values)
    asked = [*values, "none", "k3"]
    chance.shuffle(asked)
    outs: list[Any] = [cut(chance, len(values.get(key, b"")) + chance.randrange(3)) for key in asked]
    lengths = store.get_many(asked, outs)
    assert lengths == [len(values[key]) if key in values else -1 for key in asked]
    for key, parts, length in zip(asked, outs, lengths, strict=True):
        found = b"".join(part.tobytes() for part in parts)
        assert length < 0 or found[:length] == values[key], key
        assert not any(found[max(length, 0) :]), "nothing is written behind the value"
    assert store.contains(asked) == [key in values for key in asked]
    assert store.delete(["none", *list(values)[:20]]) == 20 and len(store.object_keys()) == 4
    assert store.verify()["findings"] == []


def test_what_is_replaced_while_a_batch_is_read_is_never_mixed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {f"k{i}": bytes([i]) * (100_000 if i % 2 else 1_200_000) for i in range(6)}
    assert all(store.put_many(list(old), list(old.values())))
    copies, genuine = [0], object_reading.copy

    def copy(target: Any, source: Any) -> None:
        genuine(target, source)
        copies[0] += 1
        if copies[0] == 5:  # some are copied, others are not
            assert store.put("k0", bytes([200]) * 900_000, replace=True) and store.delete("k1") == 1
            assert store.put("k5", bytes([205]) * 70_000, replace=True)

    monkeypatch.setattr(object_reading, "copy", copy)
    outs = [bytearray(1_200_000) for _ in old]
    lengths = store.get_many(list(old), outs)
    assert lengths == [900_000, -1, 1_200_000, 100_000, 1_200_000, 70_000]
    for i, (out, length) in enumerate(zip(outs, lengths, strict=True)):
        assert length < 0 or out[:length] == bytes([200 + i if i in (0, 5) else i]) * length, i


def test_one_target_too_small_and_nothing_is_copied(store: Store) -> None:
    assert all(store.put_many(["a", "b"], [b"aaaa", b"bbbb"]))
    first = bytearray(4)
    with pytest.raises(InvalidRequest, match="out"):
        store.get_many(["a", "b"], [first, bytearray(3)])
    assert first == bytes(4)


def test_an_empty_value_into_no_buffers(store: Store) -> None:
    assert store.put("empty", b"")
    assert store.get("empty", []) == 0 and store.get_many(["empty", "none"], [[], []]) == [0, -1]


@pytest.mark.parametrize(("value_bytes", "pieces"), [(5000, 0), (1 << 40, 0), (10, 1), (10, 1 << 31), (5000, 1 << 31)])
def test_a_damaged_length_is_a_miss(store: Store, value_bytes: int, pieces: int) -> None:
    """Nothing beyond a page is copied, and no pieces are counted that no value of that length has."""
    assert store.put_many(["k", "sound"], [b"0123456789", b"sound"]) == [True, True]
    mapped = node_of(store).mapped()
    found = find_head(mapped, objects.object_root(""), b"k") if mapped is not None else None
    assert mapped is not None and found is not None and found.extent is not None
    records = mapped.folder.records(found.extent.number)
    width = found.frame_class.page_tokens
    sound, damaged = (
        about.words(0, width) for about in (found.about, found.about._replace(value_bytes=value_bytes, pieces=pieces))
    )
    with open(records, "r+b") as file:
        at = file.read().find(sound)
        assert at > 0
        file.seek(at)
        file.write(damaged)
    outs = [bytearray(10_000) for _ in range(2)]
    assert store.get_many(["k", "sound"], outs) == [-1, 5] and outs[0] == bytes(10_000)
    assert store.get("k") is None and store.get("k", out=outs[0]) is None
    assert store.delete(["k", "sound"]) == 2


def test_a_head_that_leaves_memory_while_it_is_looked_at_is_found_below(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its frame has another page by then: that is no other string's object under its key."""
    flags = configure(machine, demote_at=0.0, dram="16MiB", extent="2MiB", nvme_extent="4MiB", promote_after=100)
    machine.serve(NODE, **flags)
    store = machine.connect(NODE)
    assert store.put("k", b"value")
    wait_until("it is saved", lambda: nvme(store)["pages"] == 1)
    gather = object_finding.gather

    def late(*given: Any) -> list[object_finding.GatheredFrames]:
        found = gather(*given)
        evict_all(store)
        return [frames._replace(rows=np.zeros_like(frames.rows)) for frames in found]

    with monkeypatch.context() as patch:
        patch.setattr(object_finding, "gather", late)
        assert store.contains(["k"]) == [True]
    assert store.delete(["k"]) == 1


def test_a_batch_is_read_wherever_its_objects_are(machine: Machine) -> None:
    """Some in memory, some on NVMe, some of which only pieces are in memory, one nowhere."""
    flags = configure(machine, demote_at=0.0, dram="16MiB", extent="2MiB", nvme_extent="4MiB", promote_after=100)
    machine.serve(NODE, **flags)
    store = machine.connect(NODE)
    values = {f"k{i}": os.urandom(size) for i, size in enumerate((1, 5000, 300_000, 1_500_000, 40_000))}
    assert all(store.put_many(list(values), list(values.values())))
    stored = frames(store)["sealed"]
    wait_until("all is saved", lambda: nvme(store)["pages"] == stored)
    evict_all(store)
    values["new"] = os.urandom(70_000)
    assert store.put("new", values["new"])
    keys = [*list(values)[::-1], "none"]
    assert store.contains(keys) == [True] * len(values) + [False]
    outs = [bytearray(len(values.get(key, b"1"))) for key in keys]
    assert store.get_many(keys, outs) == [*(len(value) for value in list(values.values())[::-1]), -1]
    assert [bytes(out) for out in outs[:-1]] == list(values.values())[::-1]
    assert store.put_many(["k1", "k9"], [b"other", b"ninth"]) == [False, True], "what is on NVMe is there"
    assert store.delete(keys) == len(values)


def test_with_checksums_wanted_a_batch_is_verified(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text("[node]\nverify_reads = true\n")
    machine.serve(NODE, config=str(machine.logs / "node.toml"))
    store = machine.connect(NODE)
    values = {f"k{i}": os.urandom(size) for i, size in enumerate((10, 70_000, 1_500_000))}
    assert all(store.put_many(list(values), list(values.values())))
    outs = [bytearray(len(value)) for value in values.values()]
    assert store.get_many(list(values), outs) == [len(value) for value in values.values()]
    assert [bytes(out) for out in outs] == list(values.values())
