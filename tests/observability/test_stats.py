"""What a node says of itself: counts of clients over an embedded node, and the shape of both tiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import kvstore
from kvstore.config import NodeConfig, NvmeTarget
from kvstore.model.replica import FrameClass, FrameState, Tier
from kvstore.node.node import Scan
from kvstore.node.operator import stats as module
from kvstore.node.operator.device_paths import DevicePaths
from kvstore.node.operator.stats import age_quantile
from kvstore.state.eviction import POLICY_DEFAULT
from kvstore.state.frames import Segment
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.devices import NvmeDevices, today
from tests.helpers.inside import node_of
from tests.helpers.nvme.memory_disk import MemoryDisk

LAYOUT = kvstore.Layout(model="m", layers=4, kv_heads=2, head_dim=16, dtype="float16", page_tokens=8)
PAGE = LAYOUT.page_bytes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[kvstore.Store]:
    with kvstore.open(dram="8MiB", shm_dir=tmp_path, scrub_bytes_per_s=0) as store:
        yield store


def prompt(pages: int) -> np.ndarray[Any, Any]:
    return np.arange(pages * LAYOUT.page_tokens, dtype=np.uint32)


def pages(count: int) -> np.ndarray[Any, Any]:
    return np.zeros((count, PAGE), np.uint8)


def test_devices_are_told_where_there_is_no_driver(store: kvstore.Store) -> None:
    assert store.stats()["devices"] == DevicePaths([]).look()


# --- counts ---------------------------------------------------------------------------------------------------------


def test_every_verb_of_a_client_is_counted(store: kvstore.Store) -> None:
    cache = store.cache(LAYOUT)
    keys, more = cache.keys(prompt(16)), cache.keys(prompt(20))
    assert cache.get(keys).pages == 0
    cache.put(keys, pages(16))
    cache.put(keys, pages(16))  # nothing new
    assert cache.lookup(keys).pages == cache.get(more).pages == 16
    with cache.lease(more) as lease:
        assert len(lease.pages) == 16
    with cache.writer(more) as writer:
        for layer in range(LAYOUT.layers):
            writer.write_layer(layer, np.zeros((20, PAGE // LAYOUT.layers), np.uint8))
    stats = store.stats()
    assert stats["clients"] == {
        "lookups": 1,
        "gets": 2,
        "leases": 1,
        "puts": 2,  # the layer-wise writer is none, its pages count below
        "puts_async": 0,
        "pages_asked": 16 + 20 + 20,
        "hit_dram": 32,
        "hit_nvme": 0,
        "hit_dram_tokens": 32 * LAYOUT.page_tokens,
        "hit_nvme_tokens": 0,
        "missed_tokens": 24 * LAYOUT.page_tokens,
        "missed_absent": 16 + 4 + 4,
        "missed_generation": 0,
        "missed_identity": 0,
        "missed_checksum": 0,
        "missed_extent": 0,
        "missed_io": 0,
        "read_dram_bytes": 32 * PAGE,
        "read_nvme_bytes": 0,
        "hit_hbm": 0,
        "read_hbm_bytes": 0,
        "pages_put": 20,
        "put_bytes": 20 * PAGE,
    }
    dram = stats["tiers"]["dram"]
    assert (dram["bytes_in"], dram["bytes_out"]) == (20 * PAGE, 32 * PAGE)
    assert dram["hit_ratio"] == pytest.approx(32 / 56)
    assert stats["tiers"].keys() == {"dram"}


def test_nothing_asked_has_no_ratio(store: kvstore.Store) -> None:
    dram = store.stats()["tiers"]["dram"]
    assert dram["hit_ratio"] is None
    assert dram["age_at_eviction_s"] == {"p50": None, "p90": None}
    assert dram["evicted"] == {} and dram["eviction"] == POLICY_DEFAULT


def test_a_checksum_that_does_not_hold_is_the_reason(store: kvstore.Store) -> None:
    cache = store.cache(LAYOUT)
    keys = cache.keys(prompt(4))
    cache.put(keys, pages(4), checksum=True)
    mapped = node_of(store).mapped()
    assert mapped is not None
    assert cache.get(keys).pages == 4
    extent = next(iter(mapped.dram.extents.values()))
    extent.pages[np.flatnonzero(extent.words & np.uint64(0xFF) == 2)[2], 5] ^= 1
    assert cache.get(keys, verify=True).pages == 2
    assert store.stats()["clients"]["missed_checksum"] == 2


def test_what_an_operator_evicts(store: kvstore.Store) -> None:
    cache = store.cache(LAYOUT)
    cache.put(prompt(9), pages(9))
    store.evict(pages=4)
    dram = store.stats()["tiers"]["dram"]
    assert dram["evicted"] == {"request": 4}
    assert 0 < dram["age_at_eviction_s"]["p50"] <= dram["age_at_eviction_s"]["p90"] <= 60.0


# --- ages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ages", "share", "age_s"),
    [
        ({}, 0.5, None),
        ({0: 1}, 0.5, 0.5),
        ({0: 50, 3: 50}, 0.5, 1.0),
        ({0: 50, 3: 50}, 0.9, 7.2),
        ({3: 50, 0: 50}, 0.9, 7.2),
        ({1: 10}, 1.0, 2.0),
        ({0: 1, 20: 0}, 0.9, 0.9),
        ({10: 4}, 0.25, 512 + 128),
    ],
)
def test_age_quantile(ages: dict[int, int], share: float, age_s: float | None) -> None:
    assert age_quantile(Counter(ages), share) == pytest.approx(age_s)


def test_age_quantile_is_right_to_a_factor_of_two() -> None:
    ages_s = sorted(int(2 ** (i % 17 * 0.9)) for i in range(1000))
    counted = Counter(age.bit_length() for age in ages_s)
    for share in (0.1, 0.5, 0.9, 0.99):
        exact = ages_s[int(share * 1000) - 1]
        found = age_quantile(counted, share)
        assert found is not None and max(exact, 1) / 2 <= found <= 2 * max(exact, 1)


# --- NVMe -----------------------------------------------------------------------------------------------------------

EXTENT = 64 << 10
FRAMES = geometry.frames_in(EXTENT, FrameClass(4096, 8, 4))


class FakeNode:
    """What ``node_stats`` looks at of a node with NVMe targets /d0 and /d1: pages on the first one, 3 in a chain."""

    def __init__(self, **failures: str) -> None:
        disks = [MemoryDisk(1 << 20, f"/d{i}") for i in range(2) if f"d{i}" not in failures]
        disks[-1].direct = len(disks) == 1
        self.nvme_failures = {f"/{name}": reason for name, reason in failures.items()}
        self.scan = Scan()
        targets = NvmeTarget(Path("/d0"), 1 << 20), NvmeTarget(Path("/d1"), 1 << 20)
        self.config = NodeConfig(nvme=targets, nvme_write_bytes_per_day=1 << 30)
        devices = NvmeDevices.open(disks, "n", EXTENT)
        self.nvme: Any = SimpleNamespace(devices=devices)
        segment = Segment(EXTENT, devices.positions, frames_in=geometry.frames_in)
        position = next(p for p in range(devices.positions) if devices.place(p)[0] is devices.devices[0])
        extent = segment.carve(segment.pool(FrameClass(4096, 8, 4)), position)
        for frame in range(3):
            extent.state[frame] = FrameState.SEALED
        extent.sealed = 3
        extent.restore(list(range(3, extent.frames)))
        counted = {"counters": Counter(evicted_space=2, other=1), "ages": Counter({0: 2}), "ages_sum_s": 0}
        space = SimpleNamespace(segment=segment, **counted)
        counters = Counter(pages_saved=5, bytes_saved=5 * 4096, pages_promoted=1, bytes_promoted=4096)
        self.state: Any = SimpleNamespace(spaces={Tier.NVME: space}, counters=counters)

    def stats(self) -> dict[str, Any]:
        clients = {"read_nvme_bytes": 8192, "hit_nvme": 2, "pages_asked": 8}
        return dict(module._nvme(cast(Any, self), clients)["nvme"])


def test_nvme() -> None:
    node = FakeNode()
    node.nvme.devices.add_written(today(), 777)
    found = node.stats()
    positions = node.nvme.devices.positions
    wanted = {
        "capacity_bytes": positions * EXTENT,
        "used_bytes": 3 * 4096,
        "pages": 3,
        "extents": 1,
        "extents_vacant": positions - 1,
        "extents_quarantined": 0,
        "evicted": {"space": 2},
        "age_at_eviction_s": {"p50": 0.5, "p90": 0.9},
        "state": "ready",
        "demoted_pages": 5,
        "demoted_bytes": 5 * 4096,
        "promoted_pages": 1,
        "promoted_bytes": 4096,
        "bytes_in": 5 * 4096,
        "bytes_out": 8192 + 4096,
        "hit_ratio": 0.25,
        "write_bytes_per_day": 1 << 30,
        "written_today_bytes": 777,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["frames"] == {"free": FRAMES - 3, "reserved": 0, "sealed": 3, "retiring": 0, "quarantined": 0}
    first, second = found["devices"]
    assert first == {
        "path": "/d0",
        "state": "ready",
        "direct": True,
        "capacity_bytes": positions // 2 * EXTENT,
        "size_bytes": 1 << 20,
        "used_bytes": 3 * 4096,
        "pages": 3,
    }
    assert (second["path"], second["state"], second["pages"]) == ("/d1", "ready, buffered (no O_DIRECT)", 0)
    node.nvme.devices.add_written(today(), 1 << 30)
    assert node.stats()["state"] == "ready; today's writes are used up"


@pytest.mark.parametrize(
    ("done", "finished", "text"),
    [(0, False, "scanning 0 %"), (379, False, "scanning 37 %"), (1000, False, "scanning 100 %"), (1000, True, "ready")],
)
def test_nvme_scanning(done: int, finished: bool, text: str) -> None:
    node = FakeNode()
    node.scan = Scan(1000, done, finished)
    assert node.stats()["state"] == text
    node.scan.pages = 0  # nothing to do: it has not said so yet
    assert node.stats()["state"] == "ready"


def test_nvme_target_left_out_at_start() -> None:
    found = FakeNode(d1="Input/output error").stats()
    assert found["state"] == "ready; /d1 failed: Input/output error"
    first, second = found["devices"]
    assert (first["state"], first["pages"]) == ("ready", 3)
    assert (second["state"], second["capacity_bytes"]) == ("failed: Input/output error", 0)


def test_nvme_target_that_takes_no_more_writes() -> None:
    node = FakeNode()
    node.nvme_failures["/d0"] = "No space left"
    found = node.stats()
    assert found["devices"][0]["state"] == "failed: No space left"
    assert found["devices"][0]["pages"] == 3, "they are read on"


def test_no_nvme_target_works() -> None:
    node = FakeNode()
    node.nvme = None
    node.state.spaces.clear()
    node.nvme_failures = {"/d0": "gone", "/d1": "gone, too"}
    found = node.stats()
    assert found["state"] == "/d0 failed: gone; /d1 failed: gone, too"
    assert (found["capacity_bytes"], found["pages"], found["evicted"]) == (0, 0, {})
    assert found.keys() == FakeNode().stats().keys()


def test_no_nvme_at_all() -> None:
    node = FakeNode()
    node.config = NodeConfig()
    assert module._nvme(cast(Any, node), {}) == {}
