"""Pages written by several devices (heads x layers) and read by as many or others: whole and right, or not there."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import Layout, PrefixCache
from kvstore.errors import DeadlineExceeded
from kvstore.model.shard import Shard
from tests.helpers.content import FEW, MLA, SMALL, chain, contents, layer_of
from tests.helpers.nvme.nodes import configure, save_all
from tests.helpers.processes import (
    Machine,
    Worker,
    check_laws,
    check_pages,
    evict_all,
    free_port,
    put,
    wait_settled,
)

PAGES = 6
Cut = tuple[int, int]  # ranks, stages


def shards(layout: Layout, cut: Cut) -> list[Shard]:
    """All shards of a cut, in the order of their numbers."""
    return [Shard(layout, rank, cut[0], stage, cut[1]) for stage in range(cut[1]) for rank in range(cut[0])]


@pytest.mark.parametrize("layout", [SMALL, MLA, FEW], ids=["small", "mla", "few"])
def test_any_cut_read_by_any_cut(layout: Layout) -> None:
    """What all readers see, laid together, is what all writers wrote; in one process, with cuts drawn at random."""
    rng = random.Random(layout.model)
    ranks = [n for n in (1, 2, 4, 8) if n % layout.kv_heads == 0 or layout.kv_heads % n == 0]
    cuts = list(itertools.product(ranks, range(1, layout.layers + 1)))
    with kvstore.open(dram="32MiB") as store:
        cache = store.cache(layout)
        for seed in range(25):
            keys = chain(seed, rng.randint(1, 5), layout)
            data = contents(keys, layout)
            write = rng.choice([cut for cut in cuts if cut[0] * cut[1] <= 8])
            writers = [cache.writer(keys, group="g", **shard.cut) for shard in shards(layout, write)]
            rng.shuffle(writers)
            for writer in writers:
                writer.__enter__()
            for writer in writers:
                _write(writer, data, rng)
                assert not cache.lookup(keys)
                writer.__exit__(None, None, None)
            for read in rng.sample(cuts, 3):
                seen = np.zeros_like(data)
                for shard in shards(layout, read):
                    match = cache.get_shard(keys, **shard.cut, verify=rng.random() < 0.5)
                    assert match.pages == len(keys) and match.data is not None
                    shard.part(seen)[:] = shard.unpacked(match.data)
                np.testing.assert_array_equal(seen, data, f"{write} {read}")
        assert store.verify()["findings"] == []


def _write(writer: Any, data: np.ndarray[Any, Any], rng: random.Random, how: str = "") -> None:
    """A shard's part, by layers in any order, by pages, or by pieces of pages."""
    shard, how = writer._shard, how or rng.choice(["layers", "pages", "pieces"])
    part = shard.part(data)
    first = shard.layers[0]
    if how == "layers":
        for i in rng.sample(range(part.shape[1]), part.shape[1]):
            writer.write_layer(first + i, part[:, i])
    for page in range(len(data)) if how == "pages" else ():
        writer.write_page(page, part[page])
    for page, i in itertools.product(range(len(data)), range(part.shape[1])) if how == "pieces" else ():
        start = shard.layout.byte_range(first + i, *shard.heads)[0]
        cut = rng.randint(1, shard.width - 1)
        for begin, end in ((cut, shard.width), (0, cut)):
            writer.write_range(page, start + begin, part[page, i, begin:end])


def test_shards_on_this_machine_and_another(machine: Machine) -> None:
    """Stage 0 through shared memory, stage 1 over gRPC: one group, by its text."""
    address = f"127.0.0.1:{free_port()}"
    machine.serve("n", dram="16MiB", listen=address)
    keys = chain(1, PAGES)
    data = contents(keys)
    with machine.connect("n") as here, kvstore.connect(f"kv://{address}") as there:
        caches = here.cache(SMALL), there.cache(SMALL)
        writers = [cache.writer(keys, group="g", stage=stage, stages=2) for stage, cache in enumerate(caches)]
        for writer in writers:
            writer.__enter__()
        for writer in writers:
            assert not caches[0].lookup(keys)
            _write(writer, data, random.Random(1), "layers")
            writer.__exit__(None, None, None)
        for cache in caches:
            assert np.array_equal(cache.get(keys, verify=True).data, data)


# --- incomplete sets ------------------------------------------------------------------------------------------------


def test_the_daemon_is_killed_between_the_seals_of_shards(machine: Machine) -> None:
    """Two shards of four have sealed; after the restart the others do, and the pages are whole."""
    daemon = machine.serve("n", dram="4MiB")
    store = machine.connect("n")
    options = {"seed": 1, "pages": PAGES, "group": "g", "ranks": 2, "stages": 2, "step": True}
    workers = [machine.worker("layers", "n", rank=n % 2, stage=n // 2, **options) for n in range(4)]
    for worker in workers:
        worker.wait_for("reserved")
    for worker in (workers[0], workers[3]):
        for _ in range(3):
            worker.tell()
        assert worker.wait_for("sealed")["seen"] == 0
    put(store, 2, PAGES)
    store.stats()  # by now it is taken in: what is only published is a miss without a daemon
    daemon.kill()
    for shard in shards(SMALL, (2, 2)):  # reading needs no daemon
        match = store.cache(SMALL).get_shard(chain(2, PAGES), **shard.cut)
        assert match.pages == PAGES
        assert np.array_equal(match.data, shard.part(contents(chain(2, PAGES))).reshape(PAGES, -1))
    machine.serve("n")
    assert store.cache(SMALL).lookup(chain(1, PAGES)).pages == 0
    for worker in (workers[2], workers[1]):
        for _ in range(3):
            worker.tell()
        assert worker.wait_for("sealed")["pages"] == PAGES
    check_pages(store, {1: PAGES})
    for worker in workers:
        worker.tell()
        worker.wait_well()
    check_laws(store)
    wait_settled(store)
    evict_all(store)


def test_a_reader_follows_stages(machine: Machine) -> None:
    """A layer comes as soon as both ranks of its stage have written it and the stages before are through with theirs,
    though the later stage has written nothing."""
    machine.serve("n")
    store = machine.connect("n")
    options = {"layout": "few", "seed": 1, "pages": PAGES, "group": "g", "ranks": 2, "stages": 2, "step": True}
    workers = [machine.worker("layers", "n", rank=n % 2, stage=n // 2, **options) for n in range(4)]
    cache, keys = store.cache(FEW), chain(1, PAGES, FEW)
    data = contents(keys, FEW)
    for worker in workers:
        worker.wait_for("reserved")
    for layer, ready in ((0, {0}), (1, {0, 1}), (3, {0, 1}), (2, {0, 1, 2, 3}), (4, {0, 1, 2, 3, 4})):
        one, other = workers[:2] if layer < 3 else workers[2:]
        assert not follows(cache, keys, data, layer)
        write_next(one)
        assert not follows(cache, keys, data, layer)
        write_next(other)
        assert {seen for seen in range(FEW.layers) if follows(cache, keys, data, seen)} == ready
        assert cache.lookup(keys).pages == 0
    for worker in workers:
        worker.tell()
        assert worker.wait_for("sealed")["pages"] == PAGES
    check_pages(store, {1: PAGES}, FEW)


def write_next(worker: Worker) -> None:
    """Its next layer, and wait until it has been written."""
    written = len(worker.events("layer"))
    worker.tell()
    worker.wait_for("layer", written + 1)


def follows(cache: PrefixCache, keys: kvstore.Keys, data: np.ndarray[Any, Any], layer: int) -> bool:
    """Whether a reader gets this layer, all of it or one head; what it gets is right."""
    out = np.zeros((len(keys), 3, FEW.head_bytes), np.uint8)
    try:
        cache.reader(keys, timeout_s=0.03).read_layer(layer, out[:, :2])
    except DeadlineExceeded:
        return False
    cache.reader(keys, timeout_s=0.03).read_layer(layer, out[:, 2], heads=(1, 2))
    assert np.array_equal(out[:, :2].reshape(len(keys), -1), layer_of(data, layer, FEW))
    assert np.array_equal(out[:, 2], layer_of(data, layer, FEW, (1, 2)))
    return True


def test_shards_of_pages_on_nvme(machine: Machine) -> None:
    """The first pages in DRAM, the others on NVMe alone."""
    machine.serve("n", **configure(machine, "n"))
    store = machine.connect("n")
    cache = store.cache(SMALL)
    for seed in range(4):
        put(store, seed, 20)
    save_all(store, 80)
    for seed, shard in enumerate(shards(SMALL, (2, 2))):
        keys = chain(seed, 20)
        assert cache.prefetch(keys[:5]).pages == 5
        match = cache.get_shard(keys, **shard.cut, verify=seed % 2 == 1)
        assert (match.pages, match.reason, match.tiers) == (20, "", {kvstore.Tier.DRAM: 5, kvstore.Tier.NVME: 15})
        assert np.array_equal(match.data, shard.part(contents(keys)).reshape(20, -1))
    check_laws(store)
