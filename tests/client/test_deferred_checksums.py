"""Pages that come out of a device's memory are sealed without checksums: demotion, the network and the scrubber each
compute theirs from the bytes that are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import Store, Tier
from kvstore.client.local.copying import checksums_of
from kvstore.client.local.verify_hit import Run, prove
from kvstore.model.prefix import Keys
from kvstore.model.replica import STAMPED
from kvstore.node.cluster.page_handlers import sums_for
from kvstore.wire.data import ChainQuery, ReadRequest, sums_of
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import InterfaceBuffer, added_device
from tests.helpers.inside import node_of
from tests.helpers.nvme.files import flip
from tests.helpers.nvme.nodes import save_all

PAGES = 8


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "device"


@pytest.fixture
def store(target: Path, tmp_path: Path) -> Iterator[Store]:
    """With a prompt out of a device's memory, and no scrubber but on demand."""
    with (
        added_device() as device,
        kvstore.open(dram="8MiB", nvme=f"{target}:64MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store,
    ):
        data = contents(chain(1, PAGES))
        pages = InterfaceBuffer(device, data.shape, data)
        assert store.cache(SMALL).put(chain(1, PAGES), pages, wait=True) == PAGES
        assert not stamps(store).any(), "the records say that there are none"
        yield store


def run_of(store: Store, expected: int = PAGES) -> tuple[Keys, Run]:
    """Its pages in DRAM: one run of frames."""
    mapped = node_of(store).writable()
    keys = mapped.in_pool(chain(1, PAGES))
    runs, pages, _ = prove(mapped, keys, SMALL.page_bytes, True)
    assert pages == expected and len(runs) == 1
    return keys, runs[0]


def check_sums(store: Store, pages: int) -> None:
    """The records of these pages have the right ones."""
    run = run_of(store, pages)[1]
    sums = run.extent.checksums[run.frame : run.frame + pages]
    assert (sums == checksums_of(contents(chain(1, pages)), SMALL.layers)).all()


def stamps(store: Store) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Of which pages the record has checksums."""
    run = run_of(store)[1]
    flags = run.extent.info[run.frame : run.frame + PAGES] >> np.uint64(48)
    return np.asarray(flags & np.uint64(STAMPED) != 0)


def test_the_scrubber_computes_them(store: Store) -> None:
    store.verify()
    assert stamps(store).all()
    check_sums(store, PAGES)
    run = run_of(store)[1]
    run.extent.pages[run.frame + 5, 100] ^= 1
    store.verify()
    assert store.stats()["scrubber"]["pages_damaged"] == 1
    assert store.cache(SMALL).get(chain(1, PAGES)).pages == 5


def test_demotion_computes_them(store: Store, target: Path) -> None:
    save_all(store, PAGES)
    cache, keys, data = store.cache(SMALL), chain(1, PAGES), contents(chain(1, PAGES))
    match = cache.get(keys)
    assert match.tiers == {Tier.NVME: PAGES} and (match.data == data).all()
    flip(target, target.read_bytes().index(data[5].tobytes()) + 100)
    assert cache.get(keys).pages == 5, "that page is found out by what was computed when it was demoted"
    assert cache.prefetch(keys).pages == 5
    check_sums(store, 5)


def test_the_network_computes_them(store: Store) -> None:
    keys, run = run_of(store)
    cache = store.cache(SMALL)
    request = ReadRequest(ChainQuery(SMALL.fingerprint, "", "", cache.frame_class, True), keys, 0, SMALL.page_bytes)
    sums = sums_for(request, run, slice(run.frame, run.frame + PAGES))
    assert (sums == sums_of(contents(chain(1, PAGES)), SMALL.layers)).all()
