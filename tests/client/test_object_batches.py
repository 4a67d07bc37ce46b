"""Batches of opaque objects: what one call does for many is what as many calls would have done, whatever happens."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Store
from kvstore.client.local import object_batches
from kvstore.client.local.grants import GrantPool, Purpose
from kvstore.client.local.node import MappedNode
from kvstore.client.local.object_batches import find_head
from kvstore.client.local.publisher import Channel
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable, QuotaExceeded
from kvstore.model import objects
from kvstore.model.objects import About, class_for, object_root
from kvstore.model.replica import Address, Status
from kvstore.wire.control import Op, pack_addresses, pack_class
from tests.helpers.inside import node_of
from tests.helpers.nursery import of_nodes
from tests.helpers.nvme.nodes import NODE, configure, nvme
from tests.helpers.processes import (
    Machine,
    Worker,
    armed,
    check_laws,
    evict_all,
    frames,
    wait_settled,
    wait_until,
)
from tests.helpers.workers.objects import value_of

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


def test_one_target_too_small_and_nothing_is_copied(store: Store) -> None:
    assert all(store.put_many(["a", "b"], [b"aaaa", b"bbbb"]))
    first = bytearray(4)
    with pytest.raises(InvalidRequest, match="out"):
        store.get_many(["a", "b"], [first, bytearray(3)])
    assert first == bytes(4)


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
    gather = object_batches.gather

    def late(*given: Any) -> list[object_batches.GatheredFrames]:
        found = gather(*given)
        evict_all(store)
        return [frames._replace(rows=np.zeros_like(frames.rows)) for frames in found]

    with monkeypatch.context() as patch:
        patch.setattr(object_batches, "gather", late)
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


# --- putting --------------------------------------------------------------------------------------------------------


def test_one_bad_name_or_value_and_nothing_is_stored(store: Store) -> None:
    bad = {"key": (["a", "x" * 1001], [b"1", b"2"]), "data": (["a", "b"], [b"1", np.zeros(200 << 20, np.uint8)])}
    for field, (keys, values) in bad.items():
        with pytest.raises(InvalidRequest) as refused:
            store.put_many(keys, values)
        assert refused.value.field == field
    assert store.object_keys() == [] and store.stats()["tiers"]["dram"]["pages"] == 0


def request(root: bytes, names: list[bytes], size: int, addresses: list[Address], told: int | None = None) -> Any:
    """A request to seal these frames as objects of so many bytes (or that many are told), of two pieces and a head."""
    frame_class = class_for(names[0], size, 1 << 30)
    rows, width = b"", frame_class.page_tokens
    for name in names:
        about = About(name, size if told is None else told, 2, os.urandom(objects.NONCE_BYTES))
        rows += about.piece_keys(root, width).identity_bytes + about.head_keys(root, width).identity_bytes
    count = 3 * len(names)
    body = (pack_addresses(addresses), rows, bytes(16 * count))
    return Op.SEAL_OBJECTS, {"count": count, "a": pack_class(frame_class), "body": body}


def granted(mapped: MappedNode, count: int, size: int) -> list[Address]:
    frame_class = class_for(b"n", size, 1 << 30)
    frames = mapped.pool(frame_class).take_granted(count, Purpose(object_root("")), mapped.timeout_s)
    assert len(frames) == count
    return frames


def test_the_node_seals_each_object_whole_or_not_at_all(store: Store) -> None:
    size, root = 3 << 20, object_root("")
    assert store.put("b", b"there")
    mapped = node_of(store).writable()
    ours = granted(mapped, 9, size)
    stolen = [*ours[:7], Address(*ours[7][:2], ours[7].generation + 1), ours[8]]
    op, told = request(root, [b"a", b"b", b"c"], size, stolen)
    reply = mapped.exchange(op, **told)
    expected = [Status.OK] * 3 + [Status.PRESENT] * 3 + [Status.STALE] * 3
    assert list(bytes(reply.body[:9])) == [int(status) for status in expected]
    assert store.contains(["a", "b", "c"]) == [True, True, False] and store.get("b").tobytes() == b"there"
    assert store.stats()["tiers"]["dram"]["frames"]["sealed"] == 3 + 1
    again = list(bytes(mapped.exchange(op, **told).body[:9]))
    assert again[:3] == [int(Status.PRESENT)] * 3, "what was carried out is not carried out twice"
    assert store.delete(["a", "b"]) == 2 and store.verify()["findings"] == []


def test_a_request_that_makes_no_sense_is_refused_and_changes_nothing(store: Store) -> None:
    size, root = 3 << 20, object_root("")
    mapped = node_of(store).writable()
    ours = granted(mapped, 6, size)
    op, good = request(root, [b"a", b"b"], size, ours)
    untrue = {told: request(root, [b"a", b"b"], size, ours, told)[1]["body"] for told in (0, 10, 2 << 20, 1 << 40)}
    places, rows, replaced = good["body"]
    width = len(rows) // 6
    row = [rows[i * width : (i + 1) * width] for i in range(6)]
    forged = row[2][:16] + object_root("b") + row[2][32:]
    bodies = {
        "no head at the end": (places[:80], rows[: 5 * width], replaced[:80]),
        "a piece too few": (places[:80], b"".join(row[1:]), replaced[:80]),
        "no pieces": (places[:32], row[2] + row[5], replaced[:32]),
        "another's key": (places, b"".join([*row[:2], row[5][:16] + row[2][16:], *row[3:]]), replaced),
        "another root": (places, b"".join([*row[:2], forged, *row[3:]]), replaced),
        "a page named twice": (places, b"".join([*row[:3], row[0], *row[4:]]), replaced),
        "a frame named twice": (places[:16] * 6, rows, replaced),
        "no pages of objects": (places, bytes(len(rows)), replaced),
        "cut short": (places, rows[:-1], b""),
        **{f"two pieces for {told} bytes": body for told, body in untrue.items()},
    }
    for what, body in bodies.items():
        with pytest.raises(InvalidRequest):
            mapped.exchange(op, **{**good, "count": len(body[0]) // 16, "body": body})
        assert store.stats()["tiers"]["dram"]["pages"] == 0, what
    with pytest.raises(InvalidRequest):
        mapped.exchange(op, **{**good, "count": 0})
    with pytest.raises(InvalidRequest):
        mapped.exchange(op, **{**good, "a": good["a"] + (1 << 48)})
    assert set(bytes(mapped.exchange(op, **good).body[:6])) == {int(Status.OK)} and store.contains(["a", "b"])
    assert store.verify()["findings"] == []


def test_a_head_that_a_page_hangs_on_is_not_replaced(store: Store) -> None:
    """No client does this: a page whose parent is an object's head, as if that were a page of a prompt."""
    assert store.put_many(["k", "sound"], [b"old", b"old"]) == [True, True]
    mapped, root = node_of(store).writable(), object_root("")
    frame_class = class_for(b"k", 3, 1 << 30)
    address, row = granted(mapped, 1, 3), os.urandom(16) + root + bytes(16) + bytes(4 * frame_class.page_tokens)
    body = (objects.key_hash(root, b"k"), pack_addresses(address), row)
    hung = mapped.exchange(Op.SEAL_GRANTED, count=1, a=pack_class(frame_class), body=body)
    assert hung.body[0] == Status.OK
    mapped.timeout_s = 0.2
    with pytest.raises(DeadlineExceeded):
        store.put_many(["k", "sound"], [b"new", b"new"], replace=True)
    assert (store.get("k").tobytes(), store.get("sound").tobytes()) == (b"old", b"new")
    assert store.verify()["findings"] == []


def reserved(store: Store) -> int:
    return int(store.stats()["tiers"]["dram"]["frames"]["reserved"])


def test_of_a_batch_that_fails_between_requests_every_frame_is_given_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel_type = type(node_of(store).writable().channel)
    sent, genuine = [0], channel_type.request

    def request(channel: Channel, op: Op, *args: Any, **kwargs: Any) -> Any:
        sent[0] += op == Op.SEAL_OBJECTS
        if op == Op.SEAL_OBJECTS and sent[0] == 2:
            raise NodeUnavailable("away")
        return genuine(channel, op, *args, **kwargs)

    values = {f"k{i}": value_of(i, 9 << 20) for i in range(3)}
    with monkeypatch.context() as patch:
        patch.setattr(channel_type, "request", request)
        with pytest.raises(NodeUnavailable):
            store.put_many(list(values), list(values.values()))
    wait_until("all frames are given back", lambda: reserved(store) == 0)
    assert store.contains(list(values)) == [True, False, False], "what was sent is stored"
    assert store.put_many(list(values), list(values.values())) == [False, True, True]
    assert {key: store.get(key).tobytes() for key in values} == values and store.verify()["findings"] == []


def test_a_frame_that_the_node_took_back_is_not_written_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, lost = GrantPool.take_granted, list[Address]()

    def take_granted(pool: GrantPool, *args: Any) -> list[Address]:
        frames = genuine(pool, *args)
        if not lost:
            lost.append(frames[1])
            body = (pack_addresses(lost),)
            assert node_of(store).writable().exchange(Op.REVOKE, count=1, body=body).body[0] == Status.OK
        return frames

    monkeypatch.setattr(GrantPool, "take_granted", take_granted)
    values = {f"k{i}": value_of(i, size) for i, size in enumerate((2_100_000, 2_100_000))}
    assert store.put_many(list(values), list(values.values())) == [True, True], "the first one by itself"
    assert {key: store.get(key).tobytes() for key in values} == values
    wait_until("all frames are given back", lambda: reserved(store) == 0)
    assert store.verify()["findings"] == []


def test_a_batch_that_is_more_than_its_tenant_may_have(machine: Machine) -> None:
    (machine.logs / "node.toml").write_text('[node]\nquotas = ["t dram=1MiB"]\n')
    machine.serve(NODE, dram="32MiB", config=str(machine.logs / "node.toml"))
    store = machine.connect(NODE)
    with pytest.raises(QuotaExceeded):
        store.put_many(["large", "small"], [bytes(2 << 20), bytes(1000)], salt="t")
    assert not store.contains("large", salt="t")
    assert store.put_many(["large", "small"], [b"1", b"2"], salt="t", replace=True) == [True, True]
    keys = [f"k{i}" for i in range(40)]
    assert all(store.put_many(keys[i : i + 8], [bytes([i]) * 60_000] * 8, salt="t") for i in range(0, 40, 8))
    about = store.stats()["tenants"]["t"]["dram"]
    assert about["bytes"] <= 1 << 20 and about["evicted_quota"] > 0
    assert store.get("k39", salt="t").tobytes() == bytes([32]) * 60_000
    check_laws(store)


# --- and what goes wrong --------------------------------------------------------------------------------------------

BATCH = [10, 300_000, 1_500_000, 0, 70_000, 9 << 20, 9 << 20, 3 << 20, 5000]  # several requests


def start(machine: Machine, verb: str, *, failpoint: str = "", **arguments: Any) -> Worker:
    command = [sys.executable, "-m", "tests.helpers.workers.objects", verb, json.dumps({"node": NODE, **arguments})]
    return machine.start(Worker, f"objects-{verb}", command, of_nodes(), **armed(failpoint))


@pytest.mark.parametrize("failpoint", ["client.granted:2", "client.copied:4", "client.sealing:1", "client.sealing:3"])
def test_of_a_writer_that_is_killed_each_value_is_whole_or_not_there(machine: Machine, failpoint: str) -> None:
    machine.serve(NODE, dram="128MiB")
    store = machine.connect(NODE)
    olds = {f"k{i}": value_of(100 + i, 200_000) for i in range(0, len(BATCH), 2)}
    assert all(store.put_many(list(olds), list(olds.values())))
    dead = start(machine, "put_many", failpoint=failpoint, key="k", number=1, sizes=BATCH, replace=True)
    assert dead.wait() == -9
    wait_settled(store)
    for i, size in enumerate(BATCH):
        found, key = store.get(f"k{i}"), f"k{i}"
        may_be = [value_of(1 + i, size), olds.get(key)]
        assert (found.tobytes() if found is not None else None) in may_be, key
    assert all(store.put_many([f"k{i}" for i in range(len(BATCH))], [bytes(size) for size in BATCH], replace=True))
    assert store.delete([f"k{i}" for i in range(len(BATCH))]) == len(BATCH)
    wait_until("nothing is left of the dead writer's", lambda: frames(store)["sealed"] == 0)
    check_laws(store)


STEPS = ["node.word:1", "node.word:3", "node.commit:1", "node.commit:2", "node.reply:4", "node.instruction:6"]


@pytest.mark.parametrize("failpoint", STEPS)
def test_of_a_node_that_is_killed_each_value_is_whole_and_the_writer_is_told_the_truth(
    machine: Machine, failpoint: str
) -> None:
    daemon, store = machine.serve(NODE, dram="64MiB"), machine.connect(NODE)
    sizes = [10, 300_000, 1_500_000, 0, 70_000, 70_000, 300_001]
    olds = {f"k{i}": value_of(100 + i, 200_000) for i in range(0, len(sizes), 2)}
    assert all(store.put_many(list(olds), list(olds.values())))
    daemon.kill()
    dying = machine.serve(NODE, dram="64MiB", failpoint=failpoint)
    writer = start(machine, "put_many", key="k", number=1, sizes=sizes, replace=True)
    assert dying.wait() == -9, "it came to that step"
    for i, size in enumerate(sizes):
        found = store.get(f"k{i}")
        assert (found.tobytes() if found is not None else None) in (value_of(1 + i, size), olds.get(f"k{i}"), None)
    machine.serve(NODE, dram="64MiB")
    assert writer.wait() == 0, writer.trace()
    assert writer.events("put")[0]["stored"] == [True] * len(sizes)
    for i, size in enumerate(sizes):
        assert store.get(f"k{i}").tobytes() == value_of(1 + i, size)
    check_laws(store)
