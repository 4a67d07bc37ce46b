"""Store and PrefixCache over a real embedded node: what users call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client.local.verify_hit import prove
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.model import prefix
from kvstore.shm.folder import purge
from tests.helpers.inside import node_of

LAYOUT = kvstore.Layout(model="m", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8)
PAGE = LAYOUT.page_bytes


@pytest.fixture
def shm(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def store(shm: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=shm, scrub_bytes_per_s=0) as store:
        yield store


@pytest.fixture
def cache(store: kvstore.Store) -> kvstore.PrefixCache:
    return store.cache(LAYOUT)


def prompt(pages: int, start: int = 0) -> np.ndarray[Any, Any]:
    return np.arange(start, start + pages * LAYOUT.page_tokens, dtype=np.uint32)


def content(pages: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, (pages, PAGE), np.uint8)


# --- put and get ----------------------------------------------------------------------------------------------------


def test_chain_grown_in_pieces_lies_in_several_runs(cache: kvstore.PrefixCache) -> None:
    data = content(24)
    for pages in (1, 4, 5, 11, 24):
        cache.put(prompt(1, 10_000 * pages), content(1))  # others in between
        cache.put(prompt(pages), data[:pages])
    keys = cache.keys(prompt(24))
    mapped = node_of(cache).mapped()
    assert mapped is not None
    runs, pages_proven, reason = prove(mapped, keys, PAGE)
    assert len(runs) > 1 and (pages_proven, reason) == (24, "")
    np.testing.assert_array_equal(cache.get(keys).data, data)
    np.testing.assert_array_equal(cache.get(keys[3:20]).data, data[3:20])


def test_a_forged_collision_is_a_miss(cache: kvstore.PrefixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "page_hash", lambda data: b"same-key" + len(data).to_bytes(8, "little"))
    ours, theirs = prompt(1), prompt(1, 500)
    assert cache.put(ours, content(1)) == 1
    assert cache.keys(ours).hashes == cache.keys(theirs).hashes
    out = np.full((1, PAGE), 9, np.uint8)
    match = cache.get(cache.keys(theirs), out)
    assert (match.pages, match.reason) == (0, "identity") and (out == 9).all()
    with cache.lease(cache.keys(theirs)) as lease:
        assert lease.pages == [] and lease.match.reason == "identity"


def test_verified_reads(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    keys, data = cache.keys(prompt(5)), content(5)
    cache.put(keys, data, checksum=True)
    assert cache.get(keys, verify=True).pages == 5
    more = cache.keys(prompt(5, 5000))
    cache.put(more, data)  # stamped on demand
    assert cache.get(more, verify=True).pages == 5
    mapped = node_of(cache).mapped()
    assert mapped is not None
    runs, _, _ = prove(mapped, keys, PAGE)
    runs[0].extent.pages[runs[0].frame + 3, 17] ^= 1
    match = cache.get(keys, verify=True)
    assert (match.pages, match.reason) == (3, "checksum")
    assert cache.lookup(keys).pages == 3  # the node dropped it with its descendants
    assert store.stats()["client"]["misses"]["checksum"] == 1


def test_a_full_store_takes_what_fits(cache: kvstore.PrefixCache, store: kvstore.Store) -> None:
    frames = (8 << 20) // cache.frame_class.frame_bytes
    pages = frames + 100
    stored = cache.put(prompt(pages), np.zeros((pages, PAGE), np.uint8))
    assert 0 < stored <= frames
    assert 0 < cache.lookup(cache.keys(prompt(pages))).pages <= stored
    assert cache.put(prompt(1, 10**6), content(1)) == 1  # the tail leaves for it
    assert store.verify()["findings"] == []


def test_threads_share_a_cache(cache: kvstore.PrefixCache) -> None:
    wrong: list[str] = []

    def work(me: int) -> None:
        out = np.empty((6, PAGE), np.uint8)
        for i in range(40):
            start = 1000 * (i % 5) + 100_000 * (me % 2)
            data = content(6, start)
            cache.put(prompt(6, start), data)
            match = cache.get(cache.keys(prompt(6, start)), out)
            if match.pages != 6 or (out != data).any():
                wrong.append(f"{me} {i} {match}")

    threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["arc", "fifo"])
def test_a_policy_that_no_node_runs(shm: str, name: str) -> None:
    """The refusal names those that a node runs; what only the simulator runs is not among them."""
    with pytest.raises(InvalidRequest, match=rf"^eviction: must be one of lru, gittins \(got '{name}'\)$"):
        kvstore.open(dram="8MiB", shm_dir=shm, eviction=name)


# --- store ----------------------------------------------------------------------------------------------------------


def test_closed_store_refuses_and_leaves_nothing(shm: Path) -> None:
    store = kvstore.open(dram="8MiB", shm_dir=shm)
    cache = store.cache(LAYOUT)
    cache.put(prompt(2), content(2))
    store.close()
    store.close()
    assert list(shm.iterdir()) == []
    for call in (
        lambda: cache.lookup(prompt(2)),
        lambda: cache.get(prompt(2)),
        lambda: cache.put(prompt(2), content(2)),
        lambda: cache.get_async(prompt(2)),
        lambda: cache.lease(prompt(2)).__enter__(),
        store.stats,
        lambda: store.evict(pages=1),
        lambda: store.cache(LAYOUT),
    ):
        with pytest.raises(InvalidRequest, match="^store: is closed"):
            call()


def test_a_dropped_store_ends_its_node_but_a_cache_keeps_it(shm: Path) -> None:
    cache = kvstore.open(dram="8MiB", shm_dir=shm).cache(LAYOUT)
    assert cache.put(prompt(1), content(1)) == 1
    assert list(shm.iterdir())
    del cache
    assert list(shm.iterdir()) == []


# --- connect --------------------------------------------------------------------------------------------------------


def test_connect_reads_an_embedded_node_of_this_machine(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(shm))
    with kvstore.open("here", dram="8MiB", shm_dir=shm) as owner:
        owner.cache(LAYOUT).put(prompt(3), content(3))
        for address in ("here", None):
            with kvstore.connect(address) as reader:
                assert reader.name == "here"
                np.testing.assert_array_equal(
                    reader.cache(LAYOUT).get(reader.cache(LAYOUT).keys(prompt(3))).data, content(3)
                )
        reader = kvstore.connect("here")
    assert reader.cache(LAYOUT).lookup(prompt(3)).pages == 2  # a named pool outlives its process
    purge(shm / "kvstore-here")
    assert not reader.cache(LAYOUT).get(prompt(3))
    with pytest.raises(NodeUnavailable):
        reader.cache(LAYOUT).put(prompt(3), content(3))
    reader.close()


def test_stores_without_a_name_are_private_and_leave_nothing() -> None:
    """As many tests of one machine open them: with no arguments, and whatever other nodes there are."""
    with kvstore.open() as one, kvstore.open() as other:
        folders = [Path("/dev/shm") / f"kvstore-{store.name}" for store in (one, other)]
        one.cache(LAYOUT).put(prompt(3), content(3))
        assert one.cache(LAYOUT).get(prompt(3)).pages == 2 and not other.cache(LAYOUT).lookup(prompt(3))
        assert all(folder.is_dir() for folder in folders)
    assert not any(folder.exists() for folder in folders)


def test_connect_says_what_is_wrong(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(shm))
    monkeypatch.delenv("KVSTORE_NODE", raising=False)
    with pytest.raises(NodeUnavailable, match="start one with `kvstore serve`"):
        kvstore.connect()
    with pytest.raises(NodeUnavailable, match="no node named 'x'"):
        kvstore.connect("x")
    monkeypatch.setenv("KVSTORE_NODE", "y")
    with pytest.raises(NodeUnavailable, match="no node named 'y'"):
        kvstore.connect()
    for address in ("kv://host", "kv://:7070", "other://host:7070", "", "../etc", "a/b", 5):
        with pytest.raises(InvalidRequest, match="^address: "):
            kvstore.connect(address)
    monkeypatch.delenv("KVSTORE_NODE")
    with (
        kvstore.open("one", dram="8MiB", shm_dir=shm),
        kvstore.open("two", dram="8MiB", shm_dir=shm),
        pytest.raises(InvalidRequest, match="^address: must name one of the nodes on this machine: one, two"),
    ):
        kvstore.connect()


def test_public_names() -> None:
    """What programs may rely on: a name that comes, goes or moves is a change of the interface."""
    classes = {"Keys", "Layout", "Lease", "Match", "PrefixCache", "Reader", "Retention", "Store", "Tier", "Writer"}
    classes |= {"DevicePointer", "GroupedCache", "GroupedKeys", "GroupedLease", "GroupedMatch"}
    assert set(kvstore.__all__) == classes | {"__version__", "connect", "empty", "errors", "open"}
    assert {name: getattr(kvstore, name).__name__ for name in classes} == {name: name for name in classes}
    assert callable(kvstore.connect) and callable(kvstore.open) and kvstore.__version__[0].isdecimal()
    assert issubclass(kvstore.errors.InvalidRequest, kvstore.errors.KVStoreError)
    with pytest.raises(AttributeError):
        kvstore.no_such_name  # noqa: B018


def test_a_node_can_ask_its_clients_to_verify_every_read(shm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_SHM_DIR", str(shm))
    for asked in (True, False):
        name = f"asked-{asked}"
        with kvstore.open(name, dram="8MiB", shm_dir=shm, verify_reads=asked, scrub_bytes_per_s=0) as owner:
            owner.cache(LAYOUT).put(prompt(3), content(3), checksum=True)
            with open(shm / f"kvstore-{name}" / "segment", "r+b") as segment:
                where = segment.read().index(content(3)[1].tobytes())
                segment.seek(where)
                segment.write(bytes([content(3)[1].reshape(-1).view(np.uint8)[0] ^ 1]))
            with kvstore.connect(name) as reader:
                match = reader.cache(LAYOUT).get(reader.cache(LAYOUT).keys(prompt(3)))
                assert (match.pages, match.reason) == ((1, "checksum") if asked else (3, ""))


def test_verify_counts_the_pages_of_its_own_sweep(shm: Path) -> None:
    with kvstore.open(dram="8MiB", shm_dir=shm) as store:
        store.cache(LAYOUT).put(prompt(3), content(3))
        for _ in range(3):
            found = store.verify(30.0)
            assert (found["pages_verified"], found["pages_damaged"], found["findings"]) == (3, 0, [])


def test_verify_counts_both_tiers(shm: Path, tmp_path: Path) -> None:
    """Also where sweeps of the background, over DRAM alone, end between the one asked for and the answer."""
    with kvstore.open(dram="8MiB", nvme=f"{tmp_path}/kv:64MiB", shm_dir=shm) as store:
        store.cache(LAYOUT).put(prompt(3), content(3))
        assert store.evict(pages=3)["pages"] == 3  # to NVMe
        store.cache(LAYOUT).put(prompt(3), content(3))  # a copy in DRAM
        assert [store.verify(30.0)["pages_verified"] for _ in range(5)] == [6] * 5
