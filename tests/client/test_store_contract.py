"""One contract for every kind of store: embedded, a daemon through shared memory, that daemon over gRPC."""

from __future__ import annotations

import importlib
import inspect
import itertools
import pickle
import pkgutil
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import kvstore
from kvstore import Keys, Layout, PrefixCache, Retention, Store, Tier, client
from kvstore.device.host_memory import PAGE_BYTES
from kvstore.errors import DeadlineExceeded, InvalidRequest, OutOfSpace
from kvstore.model.shard import Shard
from tests.helpers.content import SMALL, contents, layer_of
from tests.helpers.processes import Machine, free_port

WAYS = ("embedded", "daemon", "kv", "kv+unix")
MLA = Layout(model="contract-mla", layers=3, mla_latent=64, mla_rope=16, page_tokens=8)
WINDOW = replace(SMALL, model="contract-window", attention="window", window=64)
TINY = Layout(model="contract-tiny", layers=1, kv_heads=1, head_dim=8, dtype="uint8", page_tokens=16)
LONG = Layout(model="contract-long", layers=2, kv_heads=2, head_dim=2048, dtype="float16", page_tokens=64)
assert LONG.page_bytes == 2 << 20  # more than one message

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    """One store of every kind; tests use prompts of their own."""
    machine = Machine(tmp_path_factory.mktemp("logs"))
    patch = pytest.MonkeyPatch()
    patch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
    folder = tempfile.mkdtemp(prefix="kvtest-")  # a socket's path is short
    address, port = f"{folder}/s", free_port()
    try:
        config = Path(folder) / "node.toml"
        config.write_text(f'[node]\nlisten = ["127.0.0.1:{port}", "unix:{address}"]\n')
        machine.serve("n", dram="96MiB", config=str(config))
        with (
            kvstore.open(dram="96MiB", shm_dir=machine.shm_dir) as embedded,
            kvstore.connect("n") as daemon,
            kvstore.connect(f"kv://127.0.0.1:{port}") as tcp,
            kvstore.connect(f"kv+unix://{address}") as unix,
        ):
            yield {"embedded": embedded, "daemon": daemon, "kv": tcp, "kv+unix": unix}
    finally:
        machine.close()
        patch.undo()
        shutil.rmtree(folder)


@pytest.fixture(params=WAYS)
def store(request: pytest.FixtureRequest, stores: dict[str, Store]) -> Store:
    return stores[request.param]


@pytest.fixture
def salt(request: pytest.FixtureRequest) -> str:
    """One of the test's own, so that no test finds what another one stored."""
    return str(request.node.nodeid)


@pytest.fixture
def cache(store: Store, salt: str) -> PrefixCache:
    return store.cache(SMALL, salt=salt)


def tokens(pages: int, start: int = 0, layout: Layout = SMALL) -> Array:
    return np.arange(start, start + pages * layout.page_tokens, dtype=np.uint32)


# --- put, get, lookup -----------------------------------------------------------------------------------------------


def test_put_get_and_lookup(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(7))
    data = contents(keys)
    assert (cache.get(keys).pages, cache.lookup(keys).reason) == (0, "absent")
    assert (cache.put(keys, data), cache.put(keys, data)) == (7, 0)
    out = np.zeros((9, SMALL.page_bytes), np.uint8)
    match = cache.get(keys, out)
    assert (match.pages, match.tokens, match.reason, match.data) == (7, 7 * 16, "", None)
    assert match.tiers == {Tier.DRAM: 7}
    np.testing.assert_array_equal(out[:7], data)
    assert not out[7:].any()
    found = cache.get(keys, verify=True).data
    np.testing.assert_array_equal(found, data)
    assert found.ctypes.data % PAGE_BYTES == 0, "what the store allocates starts at a memory page"
    match = cache.lookup(keys)
    assert (match.pages, match.tokens, match.reason, match.tiers) == (7, 7 * 16, "", {Tier.DRAM: 7})


def test_retention_is_kept_with_the_page(cache: PrefixCache, store: Store) -> None:
    """Of ranges of a prompt, by put, an asynchronous one and a writer; the hint a page came with stays."""
    keys = cache.keys(tokens(6))
    data = contents(keys)
    said = [Retention(3, stop=40), Retention(-2, 300, start=40, stop=4 * 16)]
    assert cache.put(keys, data, retention=said) == 6
    assert cache.put(keys, data, retention=Retention(1)) == 0
    other = cache.keys(tokens(2, start=1000))
    assert cache.put_async(other, contents(other), retention=Retention(2, ttl_s=4)).result() == 2
    written = cache.keys(tokens(2, start=2000))
    with cache.writer(written, retention=[Retention(-1, start=16)]) as writer:
        for layer in range(SMALL.layers):
            writer.write_layer(layer, layer_of(contents(written), layer))

    def kept(some: Keys) -> list[tuple[int, int | None]]:
        told = sorted(store.pages(keys=some)["pages"], key=lambda page: page["position"])
        return [(page["priority"], page["ttl_s"]) for page in told]

    assert kept(keys) == [(3, None), (3, None), (-2, 512), (-2, 512), (0, None), (0, None)]
    assert kept(other) == [(2, 4), (2, 4)]
    assert kept(written) == [(0, None), (-1, None)]
    np.testing.assert_array_equal(cache.get(keys).data, data)


@pytest.mark.parametrize("retention", [Ellipsis, "high", [3], [Retention(1)] * 65, {Retention(1)}])
def test_retention_of_other_shapes_is_refused(cache: PrefixCache, retention: Any) -> None:
    keys = cache.keys(tokens(1))
    with pytest.raises(InvalidRequest) as refused:
        cache.put(keys, contents(keys), retention=retention)
    assert refused.value.field == "retention"
    with pytest.raises(InvalidRequest):
        cache.writer(keys, retention=retention)
    assert cache.lookup(keys).pages == 0


def test_large_pages_and_buffers_of_other_types(store: Store, salt: str) -> None:
    cache = store.cache(LONG, salt=salt)
    keys = cache.keys(tokens(3, layout=LONG))
    data = contents(keys, LONG)
    assert cache.put(keys, data.view(np.float16).reshape(3, 2, 2, 64, -1)) == 3
    out = bytearray(3 * LONG.page_bytes)
    assert cache.get(keys, out).pages == 3
    assert bytes(out) == data.tobytes()


def test_buffers_of_every_kind(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(4))
    data = contents(keys)
    flat = data.reshape(-1)
    given = (
        data[:1],
        torch.from_numpy(data[1:2].copy()).view(torch.bfloat16).reshape(16, -1),
        memoryview(data[2:3].tobytes()),
        bytearray(data[3:4].tobytes()),
    )
    for page, pages in enumerate(given):
        assert cache.put(keys[page : page + 1], pages) == 1
    size = data.nbytes
    outs: tuple[Any, ...] = (
        np.zeros(size // 4, np.float32),
        torch.zeros(size // 2, dtype=torch.bfloat16),
        memoryview(bytearray(size)),
        bytearray(size + 5),
    )
    for out in outs:
        assert cache.get(keys, out).pages == 4
        raw = out.view(torch.uint8).numpy() if isinstance(out, torch.Tensor) else np.frombuffer(out, np.uint8)
        np.testing.assert_array_equal(raw[:size], flat)
    with pytest.raises(InvalidRequest, match="^out: "):
        cache.get(keys, data[:, ::2])
    with pytest.raises(InvalidRequest, match="^pages: "):
        cache.put(keys, np.repeat(data, 2, axis=1)[:, ::2])


def test_layouts_with_a_window(store: Store, salt: str) -> None:
    cache = store.cache(WINDOW, salt=salt)
    keys = cache.keys(tokens(8))
    data = contents(keys, WINDOW)
    assert cache.put(keys[4:], data[4:]) == 0
    assert cache.put(keys[:6], data[:6]) == 6
    assert (cache.lookup(keys).pages, cache.lookup(keys[4:]).pages, cache.lookup(keys[6:]).pages) == (6, 2, 0)
    np.testing.assert_array_equal(cache.get(keys[4:]).data, data[4:6])
    with cache.lease(keys[4:]) as lease:
        assert len(lease.pages) == 2


def test_a_prompt_keeps_its_last_token_out(cache: PrefixCache) -> None:
    prompt = tokens(3)
    cache.put(prompt, contents(cache.keys(prompt)))
    assert cache.lookup(prompt).pages == cache.get(prompt).pages == 2
    longer = [*prompt.tolist(), 5]
    assert cache.lookup(longer).pages == 3 and cache.get(longer).tokens == 48
    for short in (cache.lookup(prompt[:5]), cache.get(prompt[:5]), cache.prefetch(prompt[:5])):
        assert (short.pages, short.reason) == (0, "")
    for empty in (cache.get(prompt[:5]), cache.get_shard(prompt[:5]), cache.get(tokens(2, 7000))):
        assert empty.data.shape == (0, SMALL.page_bytes)


def test_partial_hits_leave_the_rest_alone(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(5))
    data = contents(keys)
    cache.put(keys[:3], data[:3])
    out = np.full((5, SMALL.page_bytes), 7, np.uint8)
    match = cache.get(keys, out)
    assert (match.pages, match.reason, cache.lookup(keys).pages) == (3, "absent", 3)
    np.testing.assert_array_equal(out[:3], data[:3])
    assert (out[3:] == 7).all()
    assert len(cache.get(keys).data) == 3
    assert cache.prefetch(keys).pages == 3


def test_slices_of_keys(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(6))
    data = contents(keys)
    assert cache.put(keys[3:], data[3:]) == 0  # without its parents
    assert cache.put(keys[:2], data[:2]) == 2
    assert cache.put(keys[2:], data[2:]) == 4
    assert cache.put(keys[4:], data[4:]) == 0
    assert cache.lookup(keys[4:]).pages == 2
    np.testing.assert_array_equal(cache.get(keys[4:]).data, data[4:])
    with cache.lease(keys[1:3]) as lease:
        np.testing.assert_array_equal(np.stack(lease.pages), data[1:3])


def test_salts_adapters_layouts_and_media_are_apart(store: Store, salt: str) -> None:
    prompt, extras = tokens(2), [b"", b"image-1"]
    caches = [
        store.cache(SMALL, salt),
        store.cache(SMALL, salt + "b"),
        store.cache(SMALL, salt, "adapter"),
        store.cache(MLA, salt),
    ]
    for i, cache in enumerate(caches):
        used = prompt[: 2 * cache.layout.page_tokens]
        assert not cache.lookup(cache.keys(used))
        rows = np.full((2, cache.page_bytes), i, np.uint8)
        assert cache.put(used, rows) == 2
        assert cache.put(used, rows + 50, extras) == 1  # page 0 has no media: shared
    for i, cache in enumerate(caches):
        used = prompt[: 2 * cache.layout.page_tokens]
        assert (cache.get(cache.keys(used)).data == i).all()
        assert (cache.get(cache.keys(used, extras)).data[1] == i + 50).all()
        assert (cache.get(cache.keys(used, extras)[1:]).data == i + 50).all()
        assert cache.get(cache.keys(used, [b"", b"image-2"])).pages == 1
        assert cache.lookup([*used.tolist(), 1], extras).pages == 2


def test_async_forms(cache: PrefixCache) -> None:
    keys = [cache.keys(tokens(4, 1000 * i)) for i in range(20)]
    buffer = np.empty((4, SMALL.page_bytes), np.uint8)
    puts = []
    for named in keys:
        buffer[:] = contents(named)  # free again as soon as put_async returns
        puts.append(cache.put_async(named, buffer))
    assert [put.result() for put in puts] == [4] * 20
    assert puts[3].result() == 4
    futures = [cache.get_async(named) for named in keys]
    for named, future in zip(keys, futures, strict=True):
        np.testing.assert_array_equal(future.result(10).data, contents(named))


# --- lease, writer, reader ------------------------------------------------------------------------------------------


def test_lease(cache: PrefixCache, store: Store) -> None:
    keys = cache.keys(tokens(5))
    data = contents(keys[:3])
    cache.put(keys[:3], data)
    before = store.stats()["leases"]
    with cache.lease(keys) as lease:
        assert (lease.match.pages, lease.match.reason) == (3, "absent")
        for page, view in zip(data, lease.pages, strict=True):
            np.testing.assert_array_equal(view, page)
            with pytest.raises(ValueError):
                view[0] = 1
        assert store.stats()["leases"] == before + 1
        lease.renew(60)
        lease.check()
        with pytest.raises(InvalidRequest, match="^lease: "):
            lease.__enter__()
    assert lease.pages == []
    with cache.lease(tokens(2, 9000)) as empty:
        assert (empty.pages, empty.match.reason) == ([], "absent")
        empty.renew(5)


def test_writer_in_any_order(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(6))
    data = contents(keys)
    cache.put(keys[:2], data[:2])
    with cache.writer(keys) as writer:
        assert writer.pages_new == [2, 3, 4, 5]
        for layer in (2, 0, 3, 1):
            assert cache.lookup(keys).pages == 2
            writer.write_layer(layer, layer_of(data, layer))
    assert writer.sealed == 4
    np.testing.assert_array_equal(cache.get(keys).data, data)
    with cache.writer(keys) as writer:
        assert writer.pages_new == []
    assert writer.sealed == 0


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 3, 2), (2, 0, 1, 3), (0, 0, 1, 2, 3)], ids=str)
def test_writer_of_pages_that_come_to_lie_somewhere(cache: PrefixCache, order: tuple[int, ...]) -> None:
    """Some are stored already, and what is to come lies in several arrays."""
    keys = cache.keys(tokens(7))
    data, shape = contents(keys), (7, SMALL.layers, SMALL.layer_bytes)
    cache.put(keys[:2], data[:2])
    place = np.zeros_like(data)
    with cache.writer(keys) as writer:
        write = writer.prepared([place[:1], place[1:4].reshape(-1), place[4:]])
        for layer in order:
            place.reshape(shape)[:, layer] = data.reshape(shape)[:, layer]
            write(layer)
        for wrong in (-1, SMALL.layers):
            with pytest.raises(InvalidRequest, match="^layer"):
                write(wrong)
        for pages in (place[:6], [place[:4], place[4:6], place[:0]], [place.reshape(-1)[:-1], place.reshape(-1)[-1:]]):
            with pytest.raises(InvalidRequest, match="^pages"):
                writer.prepared(pages)
    assert writer.sealed == 5
    np.testing.assert_array_equal(cache.get(keys, verify=True).data, data)


def test_writer_by_pages(store: Store, salt: str) -> None:
    cache = store.cache(LONG, salt=salt)
    keys = cache.keys(tokens(2, layout=LONG))
    data = contents(keys, LONG)
    with cache.writer(keys) as writer:
        for page in (1, 0):
            writer.write_page(page, data[page])
    assert writer.sealed == 2
    np.testing.assert_array_equal(cache.get(keys).data, data)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_of_one_group_share_pages(cache: PrefixCache, ranks: int) -> None:
    keys = cache.keys(tokens(3))
    data = contents(keys)
    writers = [cache.writer(keys, group="request-1", rank=rank, ranks=ranks) for rank in range(ranks)]
    for writer in writers:
        writer.__enter__()
    for rank, writer in enumerate(writers):
        assert not cache.lookup(keys)
        heads = SMALL.shard_heads(rank, ranks)
        if rank % 2:
            shares = [layer_of(data, layer, SMALL, heads or (0, 1)) for layer in range(SMALL.layers)]
            for page in range(3):
                writer.write_page(page, np.stack([share[page] for share in shares]))
        else:
            for layer in range(SMALL.layers):
                writer.write_layer(layer, layer_of(data, layer, SMALL, heads or (0, 1)))
        writer.__exit__(None, None, None)
        assert writer.sealed == 3
    np.testing.assert_array_equal(cache.get(keys).data, data)


@pytest.mark.parametrize("cut", [(1, 2), (2, 2), (4, 2), (8, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("layout", [SMALL, MLA], ids=["small", "mla"])
def test_shards_of_one_group_share_pages(store: Store, salt: str, layout: Layout, cut: tuple[int, int]) -> None:
    """Heads x layers, by layers, by pages and prepared; read as a whole and in any other cut."""
    cache = store.cache(layout, salt=salt)
    keys = cache.keys(tokens(3, layout=layout))
    data = contents(keys, layout)
    shards = shards_of(layout, cut)
    writers = [cache.writer(keys, group="request-1", **shard.cut) for shard in shards]
    for writer in writers:
        writer.__enter__()
    for shard, writer in zip(shards, writers, strict=True):
        assert not cache.lookup(keys) and not cache.get_shard(keys, **shard.cut)
        part = shard.part(data)
        if shard.number % 3 == 1:
            for page in range(3):
                writer.write_page(page, part[page])
        elif shard.number % 3 == 2:
            write = writer.prepared(np.ascontiguousarray(part).reshape(3, -1))
            for layer in range(*shard.layers):
                write(layer)
        else:
            for i, layer in enumerate(range(*shard.layers)):
                writer.write_layer(layer, part[:, i])
        writer.__exit__(None, None, None)
        assert writer.sealed == 3
    np.testing.assert_array_equal(cache.get(keys, verify=True).data, data)
    for shard in itertools.chain.from_iterable(shards_of(layout, read) for read in ((1, 1), (2, 1), (1, 2), (2, 2))):
        match = cache.get_shard(keys, **shard.cut)
        assert (match.pages, match.reason, match.tiers) == (3, "", {Tier.DRAM: 3})
        np.testing.assert_array_equal(match.data, shard.part(data).reshape(3, -1))


def shards_of(layout: Layout, cut: tuple[int, int]) -> list[Shard]:
    return [Shard(layout, rank, cut[0], stage, cut[1]) for stage in range(cut[1]) for rank in range(cut[0])]


def test_a_shard_of_more_pages_than_are_stored(cache: PrefixCache) -> None:
    """Into buffers of every kind; rows beyond the match stay."""
    keys = cache.keys(tokens(7))
    data = contents(keys)
    assert cache.put(keys[:5], data[:5]) == 5
    shard = Shard(SMALL, 1, 2, 1, 2)
    expected = shard.part(data).reshape(7, -1)
    apart = np.full((9, 3, shard.nbytes), 7, np.uint8)
    for out in (np.full((9, shard.nbytes), 7, np.uint8), apart[:, 1], torch.full((8, 2, shard.nbytes), 7).byte()[:, 0]):
        for verify in (False, True):
            match = cache.get_shard(keys, out, **shard.cut, verify=verify)
            assert (match.pages, match.tokens, match.reason, match.data) == (5, 5 * 16, "absent", None)
            np.testing.assert_array_equal(np.asarray(out)[:5], expected[:5])
            assert (np.asarray(out)[5:] == 7).all()
    assert (apart[:, ::2] == 7).all()
    match = cache.get_shard(keys, **shard.cut)
    assert (match.pages, match.reason) == (5, "absent") and np.array_equal(match.data, expected[:5])
    missing = cache.get_shard(tokens(3, 7000), **shard.cut)
    assert (missing.pages, missing.reason, missing.data.shape) == (0, "absent", (0, shard.nbytes))


def test_layers_of_an_arena(cache: PrefixCache) -> None:
    """Written from a page-major arena and read into one, numpy or torch, without laying a layer's pages together."""
    keys = cache.keys(tokens(5))
    data = contents(keys).reshape(5, *SMALL.shape)
    arena = np.zeros((12, *SMALL.shape), np.uint8)
    arena[3:8] = data
    other = torch.zeros((9, *SMALL.shape), dtype=torch.int8)
    with cache.writer(keys) as writer:
        for layer in range(SMALL.layers):
            writer.write_layer(layer, (arena if layer % 2 else torch.from_numpy(arena))[3:8, layer])
    reader, read = cache.reader(keys, timeout_s=10), np.zeros_like(arena)
    for layer in range(SMALL.layers):
        reader.read_layer(layer, other[4:9, layer])
        for head in range(SMALL.kv_heads):
            reader.read_layer(layer, read[7:12, layer, head], heads=(head, head + 1))
    np.testing.assert_array_equal(other.numpy().view(np.uint8)[4:9], data)
    np.testing.assert_array_equal(read[7:12], data)
    assert not other[:4].any() and not read[:7].any()


def test_an_exception_or_a_missing_layer_revokes(cache: PrefixCache, store: Store) -> None:
    keys = cache.keys(tokens(3))
    data = contents(keys)
    with pytest.raises(RuntimeError), cache.writer(keys) as writer:
        writer.write_layer(0, layer_of(data, 0))
        raise RuntimeError("engine died")
    with pytest.raises(InvalidRequest, match="^layer: layer 1 of page 0 was not written"), cache.writer(keys) as writer:
        writer.write_layer(0, layer_of(data, 0))
    assert not cache.lookup(keys)
    assert cache.put(keys, data) == 3


def test_reader(cache: PrefixCache) -> None:
    keys = cache.keys(tokens(6))
    data = contents(keys)
    cache.put(keys[:2], data[:2])
    reader, out = cache.reader(keys, timeout_s=0.05), np.zeros((6, SMALL.layer_bytes), np.uint8)
    assert (reader.pages, cache.reader(tokens(3)).pages) == (6, 2)
    with pytest.raises(DeadlineExceeded, match="^layer 2 of page 2 did not arrive"):
        reader.read_layer(2, out)
    np.testing.assert_array_equal(out[:2], layer_of(data[:2], 2))
    cache.put(keys, data)
    for layer in (3, 0):
        reader.read_layer(layer, out)
        np.testing.assert_array_equal(out, layer_of(data, layer))


class _Enough(Exception):
    """Ends writers without sealing."""


def test_no_room_is_said(store: Store, salt: str) -> None:
    """A writer gets what can be had, until everything is reserved; then it is told so, and a put stores nothing."""
    cache = store.cache(LONG, salt=salt)
    other = cache.keys(tokens(1, 99_000_000, LONG))
    with pytest.raises(_Enough), ExitStack() as writers:
        with pytest.raises(OutOfSpace):
            for number in range(100):
                writers.enter_context(cache.writer(cache.keys(tokens(64, number * 100_000, LONG))))
        assert cache.put(other, contents(other, LONG)) == 0
        raise _Enough
    with cache.writer(cache.keys(tokens(64, layout=LONG))) as writer:
        assert 0 < len(writer.pages_new) < 64
        for layer in range(LONG.layers):
            writer.write_layer(layer, np.zeros((64, LONG.layer_bytes), np.uint8))
    assert writer.sealed == len(writer.pages_new)
    assert store.evict(pages=len(writer.pages_new))["pages"] > 0


def test_a_prompt_of_128k_tokens(store: Store, salt: str) -> None:
    """8192 pages, and their tokens, in one call of every verb."""
    cache = store.cache(TINY, salt=salt)
    prompt = np.random.default_rng(5).integers(0, 150_000, 131_073, np.uint32)
    rows = np.random.default_rng(6).integers(0, 256, (8192, TINY.page_bytes), np.uint8)
    assert cache.put(prompt, rows) == 8192
    assert cache.lookup(prompt).pages == cache.lookup(cache.keys(prompt)).pages == 8192
    match = cache.get(prompt)
    assert (match.pages, match.reason) == (8192, "")
    np.testing.assert_array_equal(match.data, rows)
    with cache.lease(prompt) as lease:
        assert len(lease.pages) == 8192
    with cache.writer(prompt) as writer:
        assert writer.pages_new == []
    keys = cache.keys(prompt)
    assert store.evict(keys=keys[8000:], tier="all")["pages"] == 192
    assert cache.get(prompt).pages == cache.prefetch(prompt).pages == 8000


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [[], [-1], [2**32], [1.5], "text", [[1, 2]], None, 7])
def test_bad_tokens(cache: PrefixCache, bad: Any) -> None:
    calls = (cache.keys, cache.lookup, cache.get, cache.lease, cache.reader, cache.writer, cache.prefetch)
    for call in (*calls, lambda bad: cache.put(bad, b"")):
        with pytest.raises(InvalidRequest, match="^tokens: "):
            call(bad)


def test_bad_arguments_name_their_field(cache: PrefixCache, store: Store, salt: str) -> None:
    keys, rows = cache.keys(tokens(2)), np.zeros((2, SMALL.page_bytes), np.uint8)
    other = store.cache(SMALL, salt + "else")
    huge = Layout(model="m", layers=64, kv_heads=16, head_dim=256, page_tokens=256)
    for field, call in (
        ("pages", lambda: cache.put(keys, rows[:1])),
        ("pages", lambda: cache.put(keys, object())),
        ("out", lambda: cache.get(keys, rows[:1])),
        ("out", lambda: cache.get(keys, bytes(rows.nbytes))),
        ("extras", lambda: cache.put(tokens(2), rows, [b"only one"])),
        ("extras", lambda: cache.get(tokens(2), extras=[b"only one"])),
        ("extras", lambda: cache.lookup(keys, [b"", b""])),
        ("tokens", lambda: other.get(keys)),
        ("ttl_s", lambda: cache.lease(keys, 0)),
        ("ttl_s", lambda: cache.writer(keys, float("inf"))),
        ("timeout_s", lambda: cache.reader(keys, -1)),
        ("timeout_s", lambda: cache.prefetch(keys, float("nan"))),
        ("rank", lambda: cache.writer(keys, rank=2, ranks=2)),
        ("ranks", lambda: cache.writer(keys, ranks=3)),
        ("ranks", lambda: cache.writer(keys, ranks=0)),
        ("stage", lambda: cache.writer(keys, stage=2, stages=2)),
        ("stages", lambda: cache.writer(keys, stages=SMALL.layers + 1)),
        ("stages", lambda: cache.writer(keys, ranks=4, stages=3)),
        ("stage", lambda: cache.get_shard(keys, stage=1)),
        ("ranks", lambda: cache.get_shard(keys, ranks=3)),
        ("out", lambda: cache.get_shard(keys, rows[:, :5], stages=2)),
        ("heads", lambda: cache.reader(keys).read_layer(0, rows, heads=(0, 5))),
        ("group", lambda: cache.writer(keys, group=-5)),
        ("group", lambda: cache.writer(keys, group=1.5)),  # type: ignore[arg-type]
        ("writer", lambda: cache.writer(keys).write_layer(0, rows)),
        ("layer", lambda: cache.reader(keys).read_layer(SMALL.layers, rows)),
        ("out", lambda: cache.reader(keys).read_layer(0, bytearray(3))),
        ("layout", lambda: store.cache(5)),  # type: ignore[arg-type]
        ("layout", lambda: store.cache(huge)),
        ("salt", lambda: store.cache(SMALL, 5)),  # type: ignore[arg-type]
        ("adapter", lambda: store.cache(SMALL, "", b"x")),  # type: ignore[arg-type]
        ("pages", lambda: store.evict(pages=0)),
        ("evict", lambda: store.evict()),
        ("evict", lambda: store.evict(pages=1, percent=5)),
        ("tier", lambda: store.evict(pages=1, tier="tape")),
        ("percent", lambda: store.evict(percent=101)),
        ("age_s", lambda: store.evict(age_s=-1)),
        ("ttl_s", lambda: store.pin(keys, 0)),
        ("pin", lambda: store.unpin()),
        ("limit", lambda: store.pages(limit=-1)),
        ("order", lambda: store.pages(order="odd")),
        ("tier", lambda: store.pages(tier="tape")),
        ("after", lambda: store.events(after=-1)),
        ("limit", lambda: store.events(limit=0)),
        ("wait_s", lambda: store.events(wait_s=60)),
        ("key", lambda: store.put("", b"x")),
        ("data", lambda: store.put("x", object())),
        ("prefix", lambda: store.clear(3, salt)),  # type: ignore[arg-type]
        ("prefix", lambda: store.clear("k" * 1001, salt)),
        ("prefix", lambda: store.clear("\ud800", salt)),
        ("salt", lambda: store.clear("k", 5)),  # type: ignore[arg-type]
        ("values", lambda: store.put_many(["a", "b"], [b"x"])),
        ("keys", lambda: store.put_many(["a", "a"], [b"x", b"x"])),
        ("out", lambda: store.get("x", bytes(3))),
        ("key", lambda: store.get("k" * 1001)),
        ("key", lambda: store.size(b"x")),  # type: ignore[arg-type]
        ("key", lambda: store.delete([""])),
        ("keys", lambda: store.contains(5)),  # type: ignore[arg-type]
        ("salt", lambda: store.put("x", b"x", salt=5)),  # type: ignore[arg-type]
        ("outs", lambda: store.get_many(["a"], [])),
        ("buffer", lambda: store.register(b"read-only")),
    ):
        with pytest.raises(InvalidRequest) as caught:
            call()
        assert caught.value.field == field, caught.value
    assert not cache.lookup(keys)


def test_bad_writes_write_nothing(cache: PrefixCache) -> None:
    data = contents(cache.keys(tokens(2)))
    with cache.writer(tokens(2)) as writer:
        for layer, rows, field in (
            (4, layer_of(data, 0), "layer"),
            (-1, layer_of(data, 0), "layer"),
            (0, data, "data"),
        ):
            with pytest.raises(InvalidRequest, match=f"^{field}: "):
                writer.write_layer(layer, rows)
        for page, rows, field in ((2, data[0], "page"), (0, data, "data")):
            with pytest.raises(InvalidRequest, match=f"^{field}: "):
                writer.write_page(page, rows)
        for page in (0, 1):
            writer.write_page(page, data[page])
    assert writer.sealed == 2


# --- objects, operators ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 5000, 3 << 20])
def test_objects(store: Store, salt: str, size: int) -> None:
    value = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    assert store.get("a", salt=salt) is None and store.size("a", salt) is None
    assert store.put("a", value, salt) and not store.put("a", b"other", salt)
    np.testing.assert_array_equal(store.get("a", salt=salt), value)
    assert store.size("a", salt) == size
    halves = [np.zeros(size // 2, np.uint8), bytearray(size - size // 2 + 3)]
    assert store.get("a", halves, salt) == size
    assert (halves[0].tobytes() + bytes(halves[1]))[:size] == value.tobytes()
    if size:
        with pytest.raises(InvalidRequest, match="^out: "):
            store.get("a", bytearray(size - 1), salt)
    assert store.put("a", [b"new ", b"value"], salt, replace=True)
    assert bytes(store.get("a", salt=salt)) == b"new value"
    assert store.contains(["a", "b"], salt) == [True, False] and store.contains("a", salt) is True
    assert store.contains("a", salt + "x") is False
    assert store.delete(["a", "b"], salt) == 1 and store.contains("a", salt) is False


def test_many_objects(store: Store, salt: str) -> None:
    names = [f"layer/{i}" for i in range(12)]
    values = [bytes([i]) * (100 * i + 1) for i in range(12)]
    assert store.put_many(names, values, salt) == [True] * 12
    outs = [bytearray(5000) for _ in range(13)]
    assert store.get_many([*names, "none"], outs, salt) == [len(value) for value in values] + [-1]
    assert all(bytes(out[: len(value)]) == value for out, value in zip(outs, values, strict=False))
    assert (store.contains([], salt), store.delete([], salt), store.put_many([], [], salt)) == ([], 0, [])
    assert store.put_many([names[3], "new"], [b"other", b"n"], salt) == [False, True]
    assert store.delete(["new", "new", "none"], salt) == 1
    some = [f"k{i}" for i in range(2000)]
    assert store.contains([names[0], *some, names[1]], salt) == [True, *[False] * 2000, True]
    assert store.clear("layer/1", salt) == 3
    assert store.contains(names, salt) == [True, False, *[True] * 8, False, False]


def test_members_of_a_group_are_found_once_all_are_stored(store: Store, salt: str) -> None:
    names, group = [f"rank/{i}" for i in range(4)], {"group": "prompt 1", "count": 4}
    values = [bytes([i]) * (9000 * i**3 + 1) for i in range(4)]  # of one page and of several
    outs = [bytearray(len(value)) for value in values]
    assert store.put_many(names[:2], values[:2], salt, **group) == [True, True]
    assert store.put(names[2], values[2], salt, wait=False, **group)
    assert not any(store.contains(names, salt)) and store.get_many(names, outs, salt) == [-1] * 4
    assert store.get(names[0], salt=salt) is None and store.size(names[0], salt) is None
    with pytest.raises(InvalidRequest, match=r"^count: must be 4, as for other members .* .got 5."):
        store.put(names[3], values[3], salt, group="prompt 1", count=5)
    assert store.put_many(names, values, salt, **group) == [False, False, False, True]
    assert store.contains(names, salt) == [True] * 4 and store.contains("rank/3", salt) is True
    assert store.get_many(names, outs, salt) == [len(value) for value in values]
    assert [bytes(out) for out in outs] == values and bytes(store.get(names[3], salt=salt)) == values[3]
    with pytest.raises(InvalidRequest, match="^group: must have room"):
        store.put("rank/4", b"a fifth one", salt, **group)
    assert store.put(names[1], b"new", salt, replace=True, **group)
    assert not any(store.contains(names, salt)), "a group is never found with old and new values"
    assert store.put_many(names, values, salt, **group) == [True, False, True, True]
    assert bytes(store.get(names[1], salt=salt)) == b"new" and store.size(names[3], salt) == len(values[3])
    assert store.delete(names[2], salt) == 1 and not any(store.contains(names, salt))


def test_one_call_puts_members_of_several_groups(store: Store, salt: str) -> None:
    pages = [f"page {i}" for i in range(6)]
    ranks = [[f"{page}/{rank}" for page in pages] for rank in range(2)]
    groups = [*pages[:4], None, None]
    assert store.put_many(ranks[0], [b"0"] * 6, salt, group=groups, count=2) == [True] * 6
    assert store.contains(ranks[0], salt) == [False] * 4 + [True] * 2
    chosen = [0, 2, 3, 5]
    new, names = [ranks[1][i] for i in chosen], [groups[i] for i in chosen]
    assert store.put_many(new, [b"1" * 5000] * 4, salt, group=names, count=2, wait=False) == [True] * 4
    assert store.contains(ranks[0], salt) == [True, False, True, True, True, True]
    assert store.contains(ranks[1], salt) == [i in chosen for i in range(6)]
    with pytest.raises(InvalidRequest, match="^group: must have one entry per key"):
        store.put_many(["x", "y"], [b"1"] * 2, salt, group=["g"], count=2)
    with pytest.raises(InvalidRequest, match="^keys: must be at most 2"):
        store.put_many(["x", "y", "z"], [b"1"] * 3, salt, group=["g"] * 3, count=2)


def test_groups_of_other_names_and_salts_are_others(store: Store, salt: str) -> None:
    for name, group, count in (("a", "g", 2), ("b", "h", 2), ("c", None, 0)):
        assert store.put(name, b"1", salt, group=group, count=count)
    assert store.put("d", b"1", salt + "x", group="g", count=2)
    assert store.contains(["a", "b", "c"], salt) == [False, False, True] and not store.contains("d", salt + "x")
    assert store.put("e", b"1", salt, group="h", count=2)
    assert store.contains(["a", "b", "e"], salt) == [False, True, True]
    assert store.put("a", b"2", salt), "no reader finds it, so it gives way"
    assert bytes(store.get("a", salt=salt)) == b"2" and not store.put("a", b"3", salt, group="g", count=2)
    assert store.put("alone", b"1", salt, group="one", count=1) and store.contains("alone", salt)
    assert store.clear("a", salt) == 2 and store.clear("", salt) == 3


@pytest.mark.parametrize(
    ("group", "count", "field"), [("g", 0, "count"), (None, 2, "count"), ("g", 4097, "count"), ("", 1, "group")]
)
def test_a_group_needs_a_name_and_a_count(store: Store, salt: str, group: Any, count: int, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        store.put("k", b"1", salt, group=group, count=count)
    with pytest.raises(InvalidRequest, match="^keys: must be at most 1, the count of their group"):
        store.put_many(["a", "b"], [b"1", b"2"], salt, group="g", count=1)
    assert store.contains(["k", "a", "b"], salt) == [False] * 3


def test_objects_are_cleared_by_prefix(store: Store, cache: PrefixCache, salt: str) -> None:
    """All of the salt whose key begins so, byte by byte; nothing else, no pages, and nothing of another salt."""
    keys = cache.keys(tokens(2))
    assert cache.put(keys, contents(keys)) == 2
    names = ["a", "a/1", "a/" + "x" * 998, "ab", "a.c", "é1", "e", "b\0a"]
    values = [name.encode() * 900 for name in names]
    other = f"{salt}-other"
    assert store.put_many(names, values, salt) == store.put_many(names, values, other) == [True] * len(names)
    assert store.clear("none", salt) == store.clear("a/1/", salt) == 0
    assert store.clear(prefix="a/", salt=salt) == 2
    assert store.contains(names, salt) == [name not in names[1:3] for name in names]
    assert store.clear("a.", salt) == 1, "a sign is a sign"
    assert store.clear("é", salt) == 1 and store.contains("e", salt)
    assert store.put("a/1", b"again", salt) and bytes(store.get("a/1", salt=salt)) == b"again"
    assert store.clear("", salt) == 5 and store.clear("", salt) == 0
    assert not any(store.contains(names, salt)) and all(store.contains(names, other))
    assert store.clear("", other) == len(names)
    assert cache.lookup(keys).pages == 2


def test_operators_verbs(cache: PrefixCache, store: Store, salt: str) -> None:
    keys = cache.keys(tokens(4))
    cache.put(keys, contents(keys))
    stats = store.stats()
    assert stats["tiers"]["dram"]["pages"] >= 4 and isinstance(stats["tiers"]["dram"]["pages"], int)
    cache.get(cache.keys(tokens(1, 77_000)))
    assert store.stats()["client"]["misses"]["absent"] >= 1
    found = store.verify()
    assert (found["findings"], found["pages_damaged"]) == ([], 0) and found["pages_verified"] >= 4
    assert store.evict(pages=1)["pages"] == 1
    store.wait_ready(5)


def test_numbers_of_pins_are_drawn(cache: PrefixCache, store: Store) -> None:
    """They tell nobody how many pins others have made."""
    keys = cache.keys(tokens(3))
    cache.put(keys, contents(keys))
    numbers = [store.pin(keys[:pages], 60)["pin"] for pages in (1, 2, 3)]
    for number in numbers:
        store.unpin(number)
    gaps = {abs(one - other) for one in numbers for other in numbers if one is not other}
    assert min(gaps) > 1000, numbers


def test_pages_pins_and_events(cache: PrefixCache, store: Store, salt: str) -> None:
    keys = cache.keys(tokens(4))
    after = store.events()["next"]
    cache.put(keys, contents(keys))
    listed = store.pages(salt=salt, order="place")
    ours = {key.hex()[:16] for key in keys}  # the other half is the pool's: who calls over gRPC does not know it
    assert listed["total"] == 4 and {page["key"][:16] for page in listed["pages"]} == ours
    assert store.pages(limit=1, keys=keys[:2], tier="dram")["total"] == 2
    pin = store.pin(keys[:2], 30.0)
    assert pin["pages"] == 2 and isinstance(pin["pages"], int)
    assert [other["pages"] for other in store.pins()["pins"] if other["pin"] == pin["pin"]] == [2]
    assert store.evict(keys=keys, tier="all", dry_run=True)["pages"] == 2
    assert store.evict(salt=salt, percent=100, tier="all")["pages"] == 2 == cache.lookup(keys).pages
    store.unpin(keys=keys[:2])
    assert store.evict(salt=salt, tier="all")["by_tier"]["dram"]["pages"] == 2
    seen = store.events(after, wait_s=0.5)
    kinds = [event["kind"] for event in seen["events"] if ours & {key[:16] for key in event["keys"]}]
    assert kinds[0] == "sealed" and kinds[-1] == "evicted" and seen["lost"] == 0
    assert store.events(seen["next"])["events"] == []


# --- the store itself -----------------------------------------------------------------------------------------------


def test_pickling_is_refused(store: Store, cache: PrefixCache) -> None:
    keys = cache.keys(tokens(1))
    for thing in (store, cache, cache.lease(keys), cache.writer(keys), cache.reader(keys)):
        with pytest.raises(InvalidRequest):
            pickle.dumps(thing)
    assert repr(store).startswith("<kvstore.Store") and isinstance(store, Store) and isinstance(cache, PrefixCache)


def test_no_constructor_skips_its_parents() -> None:
    """What the interface's constructor sets up is there in every implementation."""
    modules = [
        importlib.import_module(name) for _, name, _ in pkgutil.walk_packages(client.__path__, "kvstore.client.")
    ]
    classes = {one for module in modules for one in vars(module).values() if isinstance(one, type)}
    heirs = [
        one
        for one in classes
        if one.__module__.startswith("kvstore.client.") and "__init__" in vars(one)
        if any(parent.__module__.startswith("kvstore.") and "__init__" in vars(parent) for parent in one.__mro__[1:])
    ]
    assert {"LocalStore", "RemoteWriter", "RemoteLease"} <= {one.__name__ for one in heirs}
    assert [one for one in heirs if "super().__init__(" not in inspect.getsource(one.__init__)] == []
