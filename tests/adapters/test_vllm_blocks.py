"""A worker of vLLM whose cache is in memory of a device: blocks are written and read in the order of the device's work.

The device is a peer in host memory that does its work as late as it may, torch's work as well. The store is a real one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from kvstore.adapters.vllm import blocks
from kvstore.adapters.vllm import worker as moving
from kvstore.adapters.vllm.blocks import NO_BLOCK, BlockMove, GroupMove, PagedGroup, PagedModel, Work, device_rows
from kvstore.adapters.vllm.worker import BlockMover
from kvstore.client.buffers import DeviceRows
from kvstore.device.base import DeviceLost
from kvstore.device.host_device import HostDevice, HostStream
from kvstore.model.shard import Shard
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import added_device, finish
from tests.helpers.device_waits import WaitSite, forget, wait_sites
from tests.helpers.processes import wait_until

BLOCK = 8  # tokens
PAGE_BLOCKS = SMALL.page_tokens // BLOCK
PAGES = 7
BUFFER_PAGES = 2


class LateTensors:
    """See ``Tensors``: torch's work is done in its turn of the device's streams, and no sooner."""

    is_deferred = True

    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.computing = device.stream()

    def current(self) -> HostStream:
        return self.computing

    def stream(self) -> HostStream:
        return self.device.stream()

    def run(self, work: Work, stream: Any = None) -> None:
        (stream or self.computing).launch(work)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        memory = self.device.allocate(int(np.prod(shape)) * dtype.itemsize)
        return torch.from_numpy(memory.view()).view(dtype).reshape(shape)

    def rows(self, pages: torch.Tensor, stream: Any = None) -> DeviceRows:
        return device_rows(self.device, pages, stream)


class Worker:
    """One of ``ranks`` workers: its heads of all layers, in blocks of no order."""

    def __init__(self, store: kvstore.Store, device: HostDevice, rank: int = 0, ranks: int = 1) -> None:
        shard = Shard(SMALL, rank, ranks)
        first, stop = shard.heads
        self.shape = (stop - first, BLOCK, SMALL.shape[-1])
        self.store = store
        self.tensors = LateTensors(device)
        self.layers = [self.tensors.empty((40, *self.shape), torch.uint8) for _ in range(SMALL.layers)]
        names = tuple(f"layer.{number}" for number in range(SMALL.layers))
        group = PagedGroup(SMALL, names, (0,) * SMALL.layers, BLOCK, PAGE_BLOCKS, shard)
        model = PagedModel((group,), SMALL.page_tokens, True, False)
        self.mover = BlockMover(store, model, "", dict(zip(names, self.layers, strict=True)), self.tensors)
        self.heads = slice(first, stop)

    def close(self) -> None:
        self.mover.close()

    def table(self, seed: int) -> list[int]:
        """Blocks of a request."""
        return (np.random.default_rng(seed).permutation(39)[: PAGES * PAGE_BLOCKS] + 1).tolist()

    def move(self, seed: int, table: list[int], name: str = "r") -> BlockMove:
        return BlockMove(name, "", [GroupMove([chain(seed, PAGES)], {0: table})])

    def pages(self, seed: int) -> np.ndarray[Any, Any]:
        """This worker's part of the pages ``[pages, layers, heads, page_blocks, block, content]``."""
        whole = contents(chain(seed, PAGES)).reshape(PAGES, SMALL.layers, SMALL.kv_heads, PAGE_BLOCKS, BLOCK, -1)
        return whole[:, :, self.heads]

    def compute(self, table: list[int], pages: np.ndarray[Any, Any] | int) -> None:
        """A step that writes these pages into their blocks: given now, done late."""

        def step() -> None:
            index = np.array(table)
            for layer, tensor in enumerate(self.layers):
                each = pages if isinstance(pages, int) else _by_block(pages, layer)
                tensor.numpy()[index] = each

        self.tensors.computing.launch(step)

    def holds(self, table: list[int], pages: np.ndarray[Any, Any]) -> bool:
        """What is in the blocks at this moment, whatever the device still has to do."""
        index = np.array(table)
        return all((t.numpy()[index] == _by_block(pages, layer)).all() for layer, t in enumerate(self.layers))

    def load(self, seed: int, table: list[int]) -> None:
        """Load them, and return when the load counts as done."""
        self.mover.load(self.move(seed, table))
        wait_until("the load has ended", lambda: self.mover.take_loaded(True) == {"r"})


def _by_block(pages: np.ndarray[Any, Any], layer: int) -> np.ndarray[Any, Any]:
    return pages[:, layer].swapaxes(1, 2).reshape(-1, pages.shape[2], BLOCK, pages.shape[-1])


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with added_device() as device:
        yield device


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BUFFER_BYTES", BUFFER_PAGES * SMALL.page_bytes)
    monkeypatch.setattr(moving, "SAVING_BYTES", 8 * BUFFER_PAGES * SMALL.page_bytes)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        yield store


@pytest.fixture
def worker(store: kvstore.Store, device: HostDevice) -> Iterator[Worker]:
    worker = Worker(store, device)
    yield worker
    device.let_go()
    worker.close()


def pages_stored(store: kvstore.Store, seed: int) -> int:
    """How many are stored, each as it was computed."""
    match = store.cache(SMALL).get(chain(seed, PAGES))
    assert match.data is not None
    assert (match.data == contents(chain(seed, PAGES))[: match.pages]).all(), "other bytes are stored"
    return match.pages


def stored(store: kvstore.Store, seed: int) -> None:
    wait_until("pages are stored", lambda: store.cache(SMALL).lookup(chain(seed, PAGES)).pages == PAGES)
    assert pages_stored(store, seed) == PAGES


def loads(worker: Worker) -> None:
    """While the step is under way that computed the blocks' former owner."""
    worker.store.cache(SMALL).put(chain(1, PAGES), contents(chain(1, PAGES)))
    table = worker.table(1)
    worker.compute(table, 1)
    worker.load(1, table)
    assert worker.holds(table, worker.pages(1)), "it counts as done and is not there"
    finish(worker.tensors.device)
    assert worker.holds(table, worker.pages(1)), "it was written over by the step before"
    assert not worker.mover.take_failed_blocks()


def saves(worker: Worker) -> None:
    """What a step computes, whose blocks the next one writes into."""
    table = worker.table(2)
    worker.compute(table, worker.pages(2))
    worker.mover.save([worker.move(2, table)])
    worker.compute(table, 2)
    stored(worker.store, 2)
    finish(worker.tensors.device)


def test_load_is_behind_the_step_before_and_there_when_it_counts_as_done(worker: Worker) -> None:
    for _ in range(2):
        loads(worker)


def test_save_is_what_its_step_computed_though_the_next_one_is_given(worker: Worker) -> None:
    saves(worker)


@pytest.mark.parametrize("site", wait_sites(blocks, moving), ids=str)
def test_without_one_of_its_waits_bytes_are_wrong(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, site: WaitSite
) -> None:
    with monkeypatch.context() as patch:
        left_out = forget(patch, site)
        with pytest.raises(AssertionError):
            loads(worker)
            saves(worker)
        assert left_out
    finish(worker.tensors.device)


def test_all_waits_are_tried() -> None:
    assert sorted(site.function for site in wait_sites(blocks, moving)) == ["_wait_for_stream", "load", "wait"]


def test_without_the_order_of_its_buffer_a_load_is_wrong(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next pages come into the buffer behind what is read from it."""
    monkeypatch.setattr(LateTensors, "rows", lambda self, pages, stream=None: device_rows(self.device, pages, None))
    with pytest.raises(AssertionError):
        loads(worker)


def test_without_the_order_of_the_step_a_save_is_wrong(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy out of the blocks is work of the stream that computes."""
    own = worker.tensors.stream()
    monkeypatch.setattr(LateTensors, "run", lambda self, work, stream=None: (stream or own).launch(work))
    with pytest.raises(AssertionError):
        saves(worker)


def test_no_step_waits_for_what_it_saves(
    worker: Worker, store: kvstore.Store, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BUFFER_WAIT_S", 3600.0)  # a step that waits for a buffer never ends
    device.hold()
    table = worker.table(2)
    worker.compute(table, worker.pages(2))
    worker.mover.save([worker.move(2, table)])
    assert store.cache(SMALL).lookup(chain(2, PAGES)).pages == 0
    device.let_go()
    stored(store, 2)
    wait_until("it is counted", lambda: worker.mover._counts["saved_pages"] == PAGES)
    counts = worker.mover.take_counts()
    assert counts["saved_bytes"] == PAGES * SMALL.page_bytes and not worker.mover.take_counts()


def test_saves_beyond_the_buffers_are_given_up_in_time(
    store: kvstore.Store, device: HostDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two buffers of two pages; of the pages in them the first may be stored."""
    monkeypatch.setattr(moving, "SAVING_BYTES", 1)
    monkeypatch.setattr(blocks, "BUFFER_WAIT_S", 0.05)
    worker = Worker(store, device)
    device.hold()
    table = worker.table(2)
    worker.compute(table, worker.pages(2))
    with caplog.at_level(logging.WARNING):
        worker.mover.save([worker.move(2, table)])
    assert "are not stored yet" in caplog.text
    device.let_go()
    worker.close()
    assert worker.mover.take_counts()["failed_saves"] == 1
    assert pages_stored(store, 2) <= 2 * BUFFER_PAGES


def test_a_load_that_does_not_end_ends_the_engine(
    worker: Worker, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may still write into the blocks, so that nobody may have them."""
    run = LateTensors.run

    def runs(self: LateTensors, work: Work, stream: Any = None) -> None:
        run(self, work, stream)
        device.hold()

    monkeypatch.setattr(LateTensors, "run", runs)
    monkeypatch.setattr(moving, "COMPUTE_S", 0.05)
    worker.store.cache(SMALL).put(chain(1, 1), contents(chain(1, 1)))
    with pytest.raises(DeviceLost, match="were not loaded within"):
        worker.load(1, worker.table(1))


def test_blocks_of_a_window_that_has_passed_are_left_alone(worker: Worker) -> None:
    worker.store.cache(SMALL).put(chain(1, PAGES), contents(chain(1, PAGES)))
    table = worker.table(1)
    worker.compute([NO_BLOCK, *table], 5)
    gone = [NO_BLOCK if at < 3 else block for at, block in enumerate(table)]
    worker.load(1, gone)
    assert worker.holds(table[4:], worker.pages(1)[2:])
    assert all((tensor.numpy()[[NO_BLOCK, *table[:3]]] == 5).all() for tensor in worker.layers)


def test_shares_of_ranks_make_whole_pages(store: kvstore.Store, device: HostDevice) -> None:
    workers = [Worker(store, device, rank, 2) for rank in range(2)]
    for each in workers:
        table = each.table(2)
        each.compute(table, each.pages(2))
        each.mover.save([each.move(2, table)])
        each.compute(table, 2)
    stored(store, 2)
    for each in workers:
        table = each.table(3)
        each.compute(table, 3)
        each.load(2, table)
        assert each.holds(table, each.pages(2))
        each.close()


def test_pages_that_are_gone_are_told_by_their_blocks(worker: Worker) -> None:
    worker.store.cache(SMALL).put(chain(1, 3), contents(chain(1, 3)))
    table = worker.table(1)
    worker.load(1, table)
    assert worker.holds(table[: 3 * PAGE_BLOCKS], worker.pages(1)[:3])
    assert worker.mover.take_failed_blocks() == set(table[3 * PAGE_BLOCKS :])


def test_cache_on_a_device_that_the_store_cannot_use_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^KVStoreConnector: the cache is on meta, which the store cannot use: "):
        blocks.tensors_of(torch.empty(4, device="meta"))
