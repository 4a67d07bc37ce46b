"""Tensors of PyTorch on a GPU in get, put, writers, readers and objects, as they are and as other libraries
know them: the pages are still being computed when they are given away, in a stream of the test's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import PrefixCache, Store, Tier
from kvstore.adapters.mooncake import MooncakeDistributedStore
from kvstore.device import cuda
from tests.helpers.content import SMALL, contents
from tests.helpers.processes import Machine, free_port

if cuda.find().missing:
    pytest.skip(f"torch's tensors on a GPU: {cuda.find().missing}", allow_module_level=True)

import torch

DEVICE = "cuda:0"
LATE_CYCLES = 200_000_000  # a tenth of a second
PAGES = 6
WAYS = ("daemon", "kv")


class ByInterface:
    """A tensor as CuPy or Numba would hand it out, with the stream that its work is in."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        told = dict(self._tensor.__cuda_array_interface__)
        return {**told, "version": 3, "stream": torch.cuda.current_stream().cuda_stream or 1}


class ByDLPack:
    """A tensor as any library would hand it out."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **asked: Any) -> Any:
        return self._tensor.__dlpack__(**asked)


def itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Store]]:
    machine, port = Machine(tmp_path_factory.mktemp("logs")), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_SHM_DIR", str(machine.shm_dir))
        try:
            machine.serve("n", dram="64MiB", listen=f"127.0.0.1:{port}")
            with (
                machine.connect("n") as daemon,
                kvstore.connect(f"kv://127.0.0.1:{port}") as tcp,
            ):
                yield {"daemon": daemon, "kv": tcp}
        finally:
            machine.close()


@pytest.fixture(params=WAYS)
def cache(request: pytest.FixtureRequest, stores: dict[str, Store]) -> PrefixCache:
    return stores[request.param].cache(SMALL, salt=request.node.nodeid)


@pytest.fixture
def stream() -> Iterator[torch.cuda.Stream]:
    """The current one meanwhile."""
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        yield torch.cuda.current_stream()


def late(target: torch.Tensor, content: np.ndarray) -> None:
    """The content comes to the target some time from now, in the current stream."""
    given = torch.from_numpy(content.copy()).to(DEVICE)
    torch.cuda._sleep(LATE_CYCLES)
    target.copy_(given)


def blank(pages: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros((pages, SMALL.page_bytes // dtype.itemsize), dtype=dtype, device=DEVICE)


def seen(tensor: torch.Tensor) -> np.ndarray:
    """Its bytes, by a stream that waits for no other."""
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        return tensor.view(torch.uint8).cpu().numpy()


@pytest.mark.parametrize("given", [itself, ByInterface, ByDLPack])
def test_put_and_get(cache: PrefixCache, stream: torch.cuda.Stream, given: Callable[[torch.Tensor], Any]) -> None:
    keys = cache.keys(np.arange(PAGES * 16))
    data, pages, out = contents(keys), blank(PAGES), blank(PAGES + 2)
    late(pages, data)
    assert cache.put(keys, given(pages)) == PAGES
    pages.zero_()  # it may be used again
    np.testing.assert_array_equal(cache.get(keys).data, data)
    match = cache.get(keys, given(out))
    assert (match.pages, match.data) == (PAGES, None)
    found = seen(out)
    np.testing.assert_array_equal(found[:PAGES], data)
    assert not found[PAGES:].any()
    assert cache.get(keys, given(out), verify=True).pages == PAGES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_tensors_of_other_types_are_their_bytes(cache: PrefixCache, dtype: torch.dtype) -> None:
    keys = cache.keys(np.arange(PAGES * 16))
    data, out = contents(keys), blank(PAGES, dtype)
    assert cache.put(keys, torch.from_numpy(data).to(DEVICE).view(dtype)) == PAGES
    assert cache.get(keys, out).pages == PAGES
    np.testing.assert_array_equal(seen(out), data)


def test_layers_while_they_are_computed(cache: PrefixCache, stream: torch.cuda.Stream) -> None:
    """Each layer is given away before its work has begun."""
    keys = cache.keys(np.arange(PAGES * 16))
    data, pages, out = contents(keys), blank(PAGES), blank(PAGES)
    parts = [slice(*SMALL.byte_range(layer)) for layer in range(SMALL.layers)]
    with cache.writer(keys) as writer:
        for layer, part in enumerate(parts):
            late(pages[:, part], data[:, part])
            writer.write_layer(layer, pages[:, part])
    assert writer.sealed == PAGES
    np.testing.assert_array_equal(cache.get(keys).data, data)
    reader = cache.reader(keys)
    for layer in reversed(range(SMALL.layers)):
        reader.read_layer(layer, out[:, parts[layer]])
    np.testing.assert_array_equal(seen(out), data)


def test_pages_of_nvme_and_of_mixed_streams(tmp_path: Path, machine: Machine, stream: torch.cuda.Stream) -> None:
    """Bytes that bounce, into memory that a stream of the caller's is still busy with."""
    settings = {"dram": "8MiB", "nvme": [f"{tmp_path / 'nvme'}:48MiB"], "nvme_extent": "1MiB", "extent": "1MiB"}
    with kvstore.open(**settings, shm_dir=machine.shm_dir) as store:  # type: ignore[arg-type]
        cache = store.cache(SMALL)
        keys = cache.keys(np.arange(16 * 16 * 60))
        data, out = contents(keys), blank(len(keys))
        for begin in range(0, len(keys), 60):  # twice the DRAM in all
            late(part := blank(60), data[begin : begin + 60])
            assert cache.put(keys[begin : begin + 60], part) == 60
        late(out, np.zeros_like(data))
        match = cache.get(keys, out)
        assert match.pages == len(keys) and match.tiers[Tier.NVME]
        np.testing.assert_array_equal(seen(out), data)


# --- opaque objects -------------------------------------------------------------------------------------------------


def flat(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("way", WAYS)
def test_objects_while_they_are_computed(stores: dict[str, Store], stream: torch.cuda.Stream, way: str) -> None:
    """Values of one and of several pages, in tensors, in buffers of both kinds, and at an address."""
    store, salt = stores[way], f"objects-{way}"
    values = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate((5000, 300_001))]
    tensors = [flat(value.size) for value in values]
    for tensor, value in zip(tensors, values, strict=True):
        late(tensor, value)
    mixed = [ByInterface(tensors[1][:100_000]), values[1][100_000:200_000], ByDLPack(tensors[1][200_000:])]
    assert store.put_many(["small", "large", "mixed"], [*tensors, mixed], salt) == [True] * 3
    for tensor in tensors:
        tensor.zero_()  # they may be used again
    keys, expected = ["small", "large", "mixed"], [*values, values[1]]
    assert [store.get(key, salt=salt).tobytes() for key in keys] == [value.tobytes() for value in expected]
    outs = [flat(value.size) for value in expected]
    assert store.get_many(keys, outs, salt) == [value.size for value in expected]
    for out, value in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(seen(out), value)
    pointer = kvstore.DevicePointer(outs[0].data_ptr(), outs[0].nbytes, torch.cuda.current_stream().cuda_stream)
    outs[0].zero_()
    assert store.get("small", pointer, salt) == 5000
    np.testing.assert_array_equal(seen(outs[0]), values[0])


def test_mooncakes_calls_take_pointers_to_a_gpu(stores: dict[str, Store], stream: torch.cuda.Stream) -> None:
    mooncake = MooncakeDistributedStore()
    assert mooncake.setup("localhost", "P2PHANDSHAKE", 0, 0, "rdma", "", "n") == 0
    pool, data = flat(1 << 20), np.random.default_rng(7).integers(0, 256, 1 << 20, np.uint8)
    late(pool, data)
    torch.cuda.synchronize(DEVICE)
    start = pool.data_ptr()
    assert mooncake.register_buffer(start, pool.nbytes) == 0
    layers = [[start + layer * 65536 + page * 4096 for layer in range(8)] for page in range(4)]
    keys, sizes = [f"page{page}" for page in range(4)], [[4096] * 8] * 4
    assert mooncake.batch_put_from_multi_buffers(keys, layers, sizes) == [0] * 4
    targets = [[address + (1 << 19) for address in page] for page in layers]
    pool[1 << 19 :].zero_()
    torch.cuda.synchronize(DEVICE)
    assert mooncake.batch_get_into_multi_buffers(keys, targets, sizes) == [8 * 4096] * 4
    found = seen(pool)
    for page in range(4):
        for layer in range(8):
            at = layer * 65536 + page * 4096
            np.testing.assert_array_equal(found[(1 << 19) + at :][:4096], data[at:][:4096])
    assert mooncake.get_into("page0", start, pool.nbytes + 1) < 0, "beyond the buffer"
    assert mooncake.close() == 0
