"""KV events over ZMQ, followed from another process than the daemon's: what is told equals what is stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

import kvstore
from kvstore import Store
from kvstore.errors import InvalidRequest
from kvstore.node import event_log, kv_events
from kvstore.node.kv_events import MEDIUMS
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.inside import admin, node_of
from tests.helpers.kv_follower import END, Follower, dump
from tests.helpers.processes import Daemon, Machine, free_port, wait_until

SEEDS = range(40)
PAGES = 8
# By the first half of their keys: the other is the pool's.
FACTS = {
    key[:8]: (parent and parent[:8], tuple(keys.tokens[i * SMALL.page_tokens : (i + 1) * SMALL.page_tokens].tolist()))
    for keys in (chain(seed, PAGES) for seed in SEEDS)
    for i, (key, parent) in enumerate(zip(keys.hashes, [None, *keys.hashes], strict=False))
}


@pytest.fixture
def addresses() -> dict[str, str]:
    return {name: f"tcp://127.0.0.1:{free_port()}" for name in ("kv_events", "kv_events_replay")}


@pytest.fixture
def follower(addresses: dict[str, str]) -> Iterator[Follower]:
    here = Follower(*addresses.values())
    yield here
    here.close()


def serve(machine: Machine, addresses: dict[str, str], nvme: Path | None = None) -> Daemon:
    """A node of 64 pages in DRAM, and of a few more on NVMe."""
    return machine.serve("kv", dram="1MiB", **addresses, **({"nvme": f"{nvme}:3MiB"} if nvme is not None else {}))


def stored(store: Store) -> dict[str, set[bytes]]:
    """What the node's index says is in either tier."""
    mapped = node_of(store).mapped()
    assert mapped is not None
    here = {medium: {key for key, _ in mapped.index.scan(tier)} for tier, medium in MEDIUMS.items()}
    return {medium: keys for medium, keys in here.items() if keys}


def told(follower: Follower) -> dict[str, set[bytes]]:
    return {medium: set(pages) for medium, pages in follower.held.items() if pages}


def agrees(follower: Follower, store: Store) -> bool:
    return told(follower) == stored(store)


def check_facts(follower: Follower) -> None:
    """Every page was told of with its own parent and token ids."""
    for pages in follower.held.values():
        for key, facts in pages.items():
            parent, tokens = facts
            assert (parent and parent[:8], tokens) == FACTS[key[:8]]
            assert parent is None or parent[8:] == key[8:]


def put_at_random(store: Store, count: int, chance: random.Random) -> None:
    cache = store.cache(SMALL)
    for _ in range(count):
        keys = chain(chance.choice(SEEDS), chance.randint(1, PAGES))
        cache.put(keys, contents(keys))
        if chance.random() < 0.1:
            store.evict(chance.randint(1, 8))
    store.stats()  # takes in what is only published: what is told of is whole


def test_what_is_told_is_what_is_stored(machine: Machine, addresses: dict[str, str], follower: Follower) -> None:
    serve(machine, addresses)
    store = machine.connect("kv")
    chance = random.Random(1)
    for _ in range(3):
        put_at_random(store, 60, chance)
        follower.follow_until(lambda: agrees(follower, store))
        check_facts(follower)
    assert {"BlockStored", "BlockRemoved", "AllBlocksCleared"} == set(follower.kinds)
    store.evict(10_000)
    follower.follow_until(lambda: told(follower) == {})


def test_missed_events_are_replayed_to_a_dealer_and_to_a_req(
    machine: Machine, addresses: dict[str, str], follower: Follower
) -> None:
    serve(machine, addresses)
    store = machine.connect("kv")
    put_at_random(store, 60, random.Random(3))
    late = Follower(*addresses.values())
    try:
        follower.follow_until(lambda: agrees(follower, store))
        late.catch_up()
        wait_until("a late one has caught up", lambda: late.catch_up() or agrees(late, store))
        assert late.held == follower.held
        numbers = [number for number, _ in late.ask(0, delimiter=False)]
        assert numbers == list(range(numbers[0], late.last + 1))
        middle = numbers[len(numbers) // 2]
        assert [number for number, _ in late.ask(middle)] == numbers[len(numbers) // 2 :]
        assert late.ask(late.last + 1) == []
    finally:
        late.close()
    with zmq.Context() as context, context.socket(zmq.REQ) as req:
        req.setsockopt(zmq.LINGER, 0)
        req.connect(addresses["kv_events_replay"])
        req.send((follower.last + 1).to_bytes(8, "big"))
        assert req.poll(10_000)
        assert req.recv_multipart() == [END, b""]


def test_nonsense_is_no_replay_and_harms_nobody(
    machine: Machine, addresses: dict[str, str], follower: Follower
) -> None:
    daemon = serve(machine, addresses)
    store = machine.connect("kv")
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(addresses["kv_events_replay"])
        for frames in ([b"x" * 9], [b"a", b"b"], [b"", b"", b""], [b"", b"y" * 500]):
            dealer.send_multipart(frames)
        assert not dealer.poll(200)
    put_at_random(store, 20, random.Random(4))
    follower.follow_until(lambda: agrees(follower, store))
    assert daemon.alive


def test_a_subscriber_that_never_reads_stops_nobody(machine: Machine) -> None:
    """More is published than waits for it: it misses messages, and those who read miss none."""
    # Unix sockets: the kernel keeps some 200 KiB of what nobody reads, where TCP may keep megabytes.
    addresses = {name: f"ipc://{machine.logs}/{name}" for name in ("kv_events", "kv_events_replay")}
    serve(machine, addresses)
    store = machine.connect("kv")
    follower = Follower(*addresses.values())
    with zmq.Context() as context, context.socket(zmq.SUB) as stuck, context.socket(zmq.DEALER) as greedy:
        for idle in (stuck, greedy):
            idle.setsockopt(zmq.RCVHWM, 1)
            idle.setsockopt(zmq.LINGER, 0)
        stuck.setsockopt(zmq.SUBSCRIBE, b"")
        stuck.connect(addresses["kv_events"])
        greedy.connect(addresses["kv_events_replay"])
        put_at_random(store, 20, random.Random(5))
        assert stuck.poll(20_000), "it does not even subscribe"
        first = int.from_bytes(stuck.recv_multipart()[1], "big")
        for number in range(100):
            greedy.send((0).to_bytes(8, "big"))
            put_at_random(store, 20, random.Random(number))
            follower.follow_until(lambda: agrees(follower, store))
            if follower.last - first > 2 * kv_events.QUEUED_MAX:
                break
        taken = [first]
        while taken[-1] < follower.last and stuck.poll(500):
            taken.append(int.from_bytes(stuck.recv_multipart()[1], "big"))
        assert len(taken) > kv_events.QUEUED_MAX // 2, "it was not sent what could wait for it"
        published = list(range(first, follower.last + 1))
        assert len(taken) < len(published), "nothing was too much for it: nobody was ever stuck"
    assert [last for last, _ in follower.jumps] == [-1], "who reads misses nothing"
    missed = min(set(published) - set(taken))
    replayed = [number for number, _ in follower.ask(missed)]
    assert replayed == list(range(missed, replayed[-1] + 1)), "a replay has no gap"
    assert replayed[-1] >= follower.last, "a replay brings all that it missed"
    follower.close()


@pytest.mark.parametrize("nvme", [False, True])
def test_after_a_kill_a_subscriber_sees_a_gap_and_is_told_everything_anew(
    machine: Machine,
    addresses: dict[str, str],
    follower: Follower,
    tmp_path: Path,
    nvme: bool,
) -> None:
    daemon = serve(machine, addresses, tmp_path / "kv" if nvme else None)
    store = machine.connect("kv")
    put_at_random(store, 100, random.Random(7))
    follower.follow_until(lambda: agrees(follower, store))
    before = follower.last
    cleared = follower.cleared
    daemon.kill()
    machine.serve("kv")
    keys = chain(SEEDS[0], 3)
    store.cache(SMALL).put(keys, contents(keys))
    store.evict(1)
    put_at_random(store, 5, random.Random(8))
    follower.follow_until(lambda: follower.cleared > cleared and agrees(follower, store))
    assert follower.last > before
    assert [last for last, _ in follower.jumps] == [-1, before]  # all of both runs, and nothing between
    assert sum(map(len, told(follower).values())) > 20  # what was kept was told again
    check_facts(follower)


def test_a_dump_is_what_is_stored_and_says_where_to_go_on(
    machine: Machine, addresses: dict[str, str], follower: Follower, tmp_path: Path
) -> None:
    serve(machine, addresses, tmp_path / "kv")
    store = machine.connect("kv")
    put_at_random(store, 150, random.Random(9))

    def dumped_at_rest() -> tuple[bytes, dict[str, Any]] | None:
        """Pages are being saved for a while yet."""
        stream, about = dump(store)
        follower.follow_until(lambda: agrees(follower, store))
        return (stream, about) if about["after"] == store.events()["next"] else None

    stream, about = wait_until("the node rests", dumped_at_rest)
    found = Follower.of_dump(stream)
    assert found.held == follower.held
    assert found.kinds[0] == "AllBlocksCleared" and found.cleared == 1
    assert about["seq"] <= follower.last
    with pytest.raises(InvalidRequest) as error:
        admin(store, "kv_dump", dump="no such")
    assert error.value.field == "dump"


def test_a_large_dump_comes_in_parts_and_abandoned_ones_are_bounded() -> None:
    with kvstore.open(dram="16MiB") as store:
        cache = store.cache(SMALL)
        expected = set()
        for seed in range(30):
            keys = chain(1000 + seed, 30)
            cache.put(keys, contents(keys))
            expected |= set(store.in_pool(keys))
        names = [admin(store, "kv_dump")["dump"] for _ in range(kv_events.DUMPS_MAX + 1)]
        assert all(names)
        with pytest.raises(InvalidRequest):
            admin(store, "kv_dump", dump=names[0])  # the oldest was given up
        stream, about = dump(store)
        assert len(stream) > kv_events.DUMP_PART_BYTES
        assert set(Follower.of_dump(stream).held["CPU"]) == expected
        assert set(Follower.of_dump(b"".join(store.kv_dump())).held["CPU"]) == expected
        assert about["seq"] is None


def test_a_publisher_that_fell_behind_tells_everything_anew(
    addresses: dict[str, str], follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "PAGES_MAX", 40)
    monkeypatch.setattr(kv_events, "RESYNC_EVERY_S", 0.2)
    with kvstore.open(dram="4MiB", **addresses) as store:
        follower.follow_until(lambda: follower.cleared == 1)
        keys = chain(SEEDS[1], PAGES)
        for seed in SEEDS:  # all at once, from one thread: more than the log keeps
            keys = chain(seed, PAGES)
            store.cache(SMALL).put(keys, contents(keys))
        follower.follow_until(lambda: agrees(follower, store))
        assert follower.cleared >= 2
        check_facts(follower)


def test_objects_are_not_blocks(addresses: dict[str, str], follower: Follower) -> None:
    with kvstore.open(dram="4MiB", **addresses) as store:
        store.put("weights/1", np.zeros(10_000, np.uint8))
        keys = chain(SEEDS[2], 2)
        store.cache(SMALL).put(keys, contents(keys))
        follower.follow_until(lambda: len(follower.held.get("CPU", {})) == 2)
        store.delete("weights/1")
        store.evict(1)
        follower.follow_until(lambda: len(follower.held.get("CPU", {})) == 1)
        check_facts(follower)
