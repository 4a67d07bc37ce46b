"""A store in memory: what the contract of all stores leaves open. Closure under eviction, its bound, its ends."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, Store
from kvstore.errors import DeadlineExceeded, InvalidRequest, LeaseBroken, OutOfSpace
from kvstore.model import prefix
from tests.helpers.content import SMALL, chain, contents, layer_of
from tests.helpers.processes import wait_until

FRAME = -(-SMALL.page_bytes // 4096) * 4096
PAGES = 12  # that a small store holds


@pytest.fixture
def store() -> Store:
    return kvstore.memory(dram=PAGES * FRAME)


def test_it_makes_no_file_and_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    monkeypatch.setattr("builtins.open", None)
    monkeypatch.setattr("os.open", None)
    with kvstore.memory(dram="1MiB") as store:
        cache, keys = store.cache(SMALL), chain(1, 4)
        assert cache.put_async(keys, contents(keys)).result() == 4
        assert cache.get_async(keys).result(0).pages == 4
        assert store.reads_without_node and store.name == "memory"
        assert threading.active_count() == threads
    for bad in (0, "much", None):
        with pytest.raises(InvalidRequest, match="^dram: "):
            kvstore.memory(dram=bad)  # type: ignore[arg-type]


def test_the_longest_unused_chain_leaves_from_its_end(store: Store) -> None:
    cache = store.cache(SMALL)
    old, used, new = (chain(seed, 4) for seed in (1, 2, 3))
    for keys in (used, old, new):
        assert cache.put(keys, contents(keys)) == 4
    cache.get(used)
    more = chain(4, 3)
    assert cache.put(more, contents(more)) == 3
    assert [cache.lookup(keys).pages for keys in (old, used, new, more)] == [1, 4, 4, 3]
    for keys, pages in ((old, 1), (used, 4), (more, 3)):
        np.testing.assert_array_equal(cache.get(keys).data, contents(keys)[:pages])
    assert store.verify()["findings"] == []


def test_a_chain_longer_than_the_store_stays_a_prefix(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2 * PAGES)
    assert cache.put(keys, contents(keys)) == PAGES
    np.testing.assert_array_equal(cache.get(keys).data, contents(keys)[:PAGES])


def test_what_is_leased_pinned_or_being_written_stays(store: Store) -> None:
    cache = store.cache(SMALL)
    leased, pinned, parent = (chain(seed, 2) for seed in (1, 2, 3))
    for keys in (leased, pinned, parent):
        cache.put(keys, contents(keys))
    pin = store.pin(pinned, 60)
    big = chain(9, PAGES)
    with cache.lease(leased) as lease, cache.writer(chain(3, 3)) as writer:
        assert (writer.pages_new, store.stats()["reservations"]) == ([2], 1)
        assert cache.put(big, contents(big)) == PAGES - 7
        assert [cache.lookup(keys).pages for keys in (leased, pinned, parent)] == [2, 2, 2]
        stayed = store.evict(percent=100, tier="all")["stayed"]
        assert stayed == {"leased": 2, "pinned": 2, "held": 1, "children": 1}
        np.testing.assert_array_equal(np.stack(lease.pages), contents(leased))
        writer.write_page(0, contents(chain(3, 3))[0])  # stored already: nothing is done
        writer.write_page(2, contents(chain(3, 3))[2])
    assert writer.sealed == 1 and cache.lookup(chain(3, 3)).pages == 3
    store.unpin(pin["pin"])
    assert store.evict(percent=100, tier="all")["pages"] == 7
    assert store.verify()["findings"] == [] and store.stats()["tiers"]["dram"]["used_bytes"] == 0


def test_leases_pins_and_reservations_end_by_themselves(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2)
    cache.put(keys, contents(keys))
    store.pin(keys, 0.05)
    lease = cache.lease(keys, ttl_s=0.05)
    late = cache.writer(chain(2, 2), ttl_s=0.05)
    with lease, late:
        wait_until("all have ended", lambda: not any(store.stats()[name] for name in ("leases", "reservations")))
        wait_until("the pin has ended", lambda: not store.pins()["pins"])
        assert store.evict(percent=100)["pages"] == 2
        np.testing.assert_array_equal(np.stack(lease.pages), contents(keys))  # nobody writes there
        with pytest.raises(LeaseBroken):
            lease.renew(60)
        for layer in range(SMALL.layers):
            late.write_layer(layer, layer_of(contents(chain(2, 2)), layer))
    assert late.sealed == 0 and not cache.lookup(chain(2, 2))
    assert store.verify()["findings"] == []


def test_readers_follow_writers_of_all_shards(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 3)
    data, out = contents(keys), np.zeros((3, SMALL.layer_bytes), np.uint8)
    writers = [cache.writer(keys, group="g", rank=rank, ranks=2) for rank in range(2)]
    reader = cache.reader(keys, timeout_s=0.02)
    for number, writer in enumerate(writers):
        writer.__enter__()
        writer.write_layer(0, layer_of(data, 0, SMALL, SMALL.shard_heads(number, 2) or (0, 0)))
        if number == 0:
            with pytest.raises(DeadlineExceeded):
                reader.read_layer(0, out)  # the other one has not entered
    reader.read_layer(0, out)
    np.testing.assert_array_equal(out, layer_of(data, 0))
    with pytest.raises(DeadlineExceeded):
        reader.read_layer(1, out)
    with pytest.raises(OutOfSpace):
        cache.writer(keys, group="g", rank=1, ranks=2).__enter__()  # it has a writer already
    writers[0].__exit__(KeyError, KeyError(), None)
    writers[1].__exit__(KeyError, KeyError(), None)
    assert not cache.lookup(keys) and store.verify()["findings"] == []


def test_the_first_writer_that_seals_wins(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 3)
    data = contents(keys)
    with cache.writer(keys) as first, cache.writer(keys) as second:
        for layer in range(SMALL.layers):
            first.write_layer(layer, np.zeros((3, SMALL.layer_bytes), np.uint8))
            second.write_layer(layer, layer_of(data, layer))
        assert store.stats()["reservations"] == 6
    assert (second.sealed, first.sealed) == (3, 0)  # the inner one is left first
    np.testing.assert_array_equal(cache.get(keys).data, data)
    assert store.verify()["findings"] == []


def test_equal_keys_of_other_tokens_are_a_miss(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "page_hash", lambda data: b"same-key" + len(data).to_bytes(8, "little"))
    cache = store.cache(SMALL)
    ours, theirs = (cache.keys(np.arange(start, start + 16, dtype=np.uint32)) for start in (0, 500))
    assert ours.hashes == theirs.hashes
    assert cache.put(ours, contents(ours)) == 1 and cache.put(theirs, contents(theirs)) == 0
    assert (cache.get(theirs).reason, cache.get(ours).pages) == ("identity", 1)
    assert store.cache(SMALL, "another").put(np.arange(500, 517, dtype=np.uint32), contents(theirs)) == 1


def test_objects_leave_like_pages(store: Store) -> None:
    value = bytes(PAGES * FRAME // 2)
    assert store.put_many(["a", "b"], [value, value]) == [True, True]
    assert store.get("a") is not None and store.put("c", value)
    assert store.contains(["a", "b", "c"]) == [True, False, True]
    with pytest.raises(InvalidRequest, match="^data: "):
        store.put("d", bytes(PAGES * FRAME + 1))
    with pytest.raises(OutOfSpace):
        store.put("a", bytes(PAGES * FRAME), replace=True)  # the old value makes room for no new one
    assert store.put("a", b"small", replace=True) and bytes(store.get("a")) == b"small"
    assert store.object_keys() == ["a"]  # the other left for the one that did not fit
    assert store.verify()["findings"] == []


@pytest.mark.parametrize("seed", range(6))
def test_the_laws_hold_whatever_is_done(seed: int) -> None:
    """Puts, writers, leases, pins, objects and evictions under one seed, in a store that is always full."""
    rng = random.Random(seed)
    store = kvstore.memory(dram=PAGES * FRAME)
    caches = [store.cache(SMALL, salt) for salt in ("a", "b")]
    open_: list[Any] = []
    for step in range(400):
        cache = rng.choice(caches)
        keys = cache.keys(np.arange(rng.randrange(3), 5 * 16 + 3, dtype=np.uint32))[: rng.randrange(1, 6)]
        do = rng.randrange(8)
        if do < 2:
            cache.put(keys, contents(keys))
        elif do == 2:
            open_.append(cache.lease(keys))
            open_[-1].__enter__()
        elif do == 3:
            writer = cache.writer(keys, group=rng.randrange(1, 4))
            try:
                writer.__enter__()
            except OutOfSpace:
                continue
            for page in range(len(keys)):
                writer.write_page(page, contents(keys)[page])
            open_.append(writer)
        elif do == 4 and open_:
            open_.pop(rng.randrange(len(open_))).__exit__(None, None, None)
        elif do == 5:
            store.evict(pages=rng.randrange(1, 4))
        elif do == 6 and cache.lookup(keys):
            store.unpin(store.pin(keys, 60)["pin"])
        else:
            try:
                store.put(f"o{step % 3}", bytes(rng.randrange(3 * FRAME)), replace=True)
            except OutOfSpace:
                pass
        match = cache.get(keys)
        np.testing.assert_array_equal(match.data, contents(keys)[: match.pages])
        assert store.verify()["findings"] == [], f"step {step}"
    for held in open_:
        held.__exit__(None, None, None)
    store.evict(percent=100, tier="all")
    assert store.stats()["tiers"]["dram"]["used_bytes"] == 0


def test_threads_share_it(store: Store) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        cache, keys = store.cache(SMALL), chain(seed, 3)
        try:
            for _ in range(60):
                cache.put(keys, contents(keys))
                match = cache.get(keys)
                np.testing.assert_array_equal(match.data, contents(keys)[: match.pages])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and store.verify()["findings"] == []


def test_closed_and_forked(store: Store) -> None:
    cache, keys = store.cache(SMALL), chain(1, 2)
    cache.put(keys, contents(keys))
    view = cache.lease(keys)
    view.__enter__()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            cache.get(keys)
        except InvalidRequest as error:
            os.write(write, str(error).encode())
        os._exit(0)
    wait_until("the child ends", lambda: os.waitpid(child, os.WNOHANG)[0] == child)
    assert b"open or connect again after fork" in os.read(read, 1000)
    os.close(read), os.close(write)
    pages = view.pages
    store.close()
    store.close()
    np.testing.assert_array_equal(np.stack(pages), contents(keys))
    view.release()
    calls = (lambda: cache.get(keys), lambda: cache.put(keys, contents(keys)), store.stats, lambda: store.get("k"))
    for call in (*calls, lambda: store.cache(SMALL), lambda: store.register(bytearray(5)), store.wait_ready):
        with pytest.raises(InvalidRequest, match="^store: is closed"):
            call()


def test_what_a_store_in_memory_has_not_is_refused_in_words(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="^call: a store in memory has no 'kv_dump'"):
        next(store.kv_dump())
    with pytest.raises(InvalidRequest, match="^layout: a page of"):
        store.cache(Layout(model="m", layers=64, kv_heads=16, head_dim=256, page_tokens=256))


def test_operators_see_what_is_there(store: Store) -> None:
    cache, keys = store.cache(SMALL, salt="team", adapter="x"), chain(1, 3)
    keys = cache.keys(keys.tokens)
    after = store.events()["next"]
    cache.put(keys, contents(keys))
    assert [layout["pages"] for layout in store.layouts(SMALL.model)] == [3] and store.layouts("other") == []
    assert [page["tiers"] for page in store.explain(keys)["pages"]] == [["dram"]] * 3
    listed = store.pages(limit=2, order="place")
    assert (listed["total"], [page["position"] for page in listed["pages"]]) == (3, [0, 1])
    assert store.pages(after=listed["next"], order="place")["pages"][0]["key"] == keys.hashes[2].hex()
    assert store.pages(tier="nvme")["total"] == 0 == store.pages(age_s=1000)["total"]
    gone = store.evict(pages=1)
    assert gone["by_tenant"] == {"team": {"pages": 1, "bytes": SMALL.page_bytes}} and list(gone["by_tier"]) == ["dram"]
    told = store.events(after)["events"]
    assert [(event["kind"], event["tenants"]) for event in told] == [("sealed", ["team"])] * 3 + [("evicted", ["team"])]
    start = time.monotonic()
    assert store.events(told[-1]["seq"], wait_s=0.05)["events"] == [] and time.monotonic() - start >= 0.05
    store.cache(SMALL, salt="team").put(keys.tokens, contents(keys))
    assert [(one["tenants"], one["pages"]) for one in store.layouts()] == [(1, 5)], "two adapters of one tenant"
