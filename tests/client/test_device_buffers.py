"""Buffers in a device's memory, given to every kind of store: the calls and the bytes are those of host buffers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import PrefixCache, Store
from kvstore.client import buffers, device_link, prefix_cache
from kvstore.client.device_link import link_of
from kvstore.client.local import frame_copies
from kvstore.client.local import writer as layer_copies
from kvstore.client.local.lease import RunLease
from kvstore.device import copies
from kvstore.device.base import DeviceLost
from kvstore.device.host_device import FALSE_ANSWERS_MAX, HostDevice
from kvstore.errors import DeadlineExceeded, InvalidRequest
from kvstore.model.shard import Shard
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import Array, DLPackBuffer, InterfaceBuffer, added_device, finish
from tests.helpers.device_waits import WaitSite, forget, wait_sites

WAYS = ("embedded", "daemon", "kv")
LOCAL = ("embedded", "daemon")


@pytest.fixture(params=WAYS)
def cache(request: pytest.FixtureRequest, stores: dict[str, Store]) -> PrefixCache:
    return stores[request.param].cache(SMALL, salt=request.node.nodeid)


@pytest.fixture(params=LOCAL)
def near(request: pytest.FixtureRequest, stores: dict[str, Store]) -> PrefixCache:
    return stores[request.param].cache(SMALL, salt=request.node.nodeid)


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with added_device() as device:
        yield device


def buffer(device: HostDevice, pages: int, content: Array | None = None) -> InterfaceBuffer:
    return InterfaceBuffer(device, (pages, SMALL.page_bytes), content)


# --- every kind of store --------------------------------------------------------------------------------------------


def test_put_and_get(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(7 * 16))
    data = contents(keys)
    assert cache.put(keys, buffer(device, 7, data)) == 7
    np.testing.assert_array_equal(cache.get(keys).data, data)
    out = buffer(device, 9)
    match = cache.get(keys, out)
    assert (match.pages, match.tokens, match.reason, match.data) == (7, 7 * 16, "", None)
    np.testing.assert_array_equal(out.seen[:7], data)
    assert out.part(slice(7, None)).untouched
    again = buffer(device, 7)
    assert cache.get(keys, again, verify=True).pages == cache.get_async(keys, buffer(device, 7)).result(30).pages == 7
    np.testing.assert_array_equal(again.seen, data)


def test_by_dlpack(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(3 * 16))
    data, out = contents(keys), buffer(device, 3)
    given = DLPackBuffer(buffer(device, 3, data))
    assert cache.put(keys, given) == 3
    assert cache.get(keys, DLPackBuffer(out)).pages == 3
    np.testing.assert_array_equal(out.seen, data)
    assert set(given.streams) == {1}, "it was asked to have its work done before a stream that we wait for"


def test_a_shards_part(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(4 * 16))
    data, shard = contents(keys), Shard(SMALL, 1, 2)
    cache.put(keys, data)
    out = InterfaceBuffer(device, (4, 2 * shard.nbytes))
    assert cache.get_shard(keys, out.part(slice(None), slice(0, shard.nbytes)), rank=1, ranks=2).pages == 4
    np.testing.assert_array_equal(shard.unpacked(out.seen[:, : shard.nbytes].copy()), shard.part(data))
    assert out.part(slice(None), slice(shard.nbytes, None)).untouched


def test_what_is_no_buffer_for_it(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(4 * 16))
    small, wide = buffer(device, 3), InterfaceBuffer(device, (4, 2 * SMALL.page_bytes))
    locked, strange = buffer(device, 4), InterfaceBuffer(HostDevice("host:7"), (4, SMALL.page_bytes))
    locked.read_only = True
    columns = wide.part(slice(None), slice(0, SMALL.page_bytes))
    for out, why in (
        (small, "got 3"),
        (columns, "contiguous"),
        (locked, "writable"),
        (strange, "must be memory of"),
    ):
        with pytest.raises(InvalidRequest, match=f"^out: .*{why}"):
            cache.get(keys, out)
    for pages, why in ((small, "got 3"), (wide, "got 8"), (columns, "contiguous"), (strange, "must be memory of")):
        with pytest.raises(InvalidRequest, match=f"^pages: .*{why}"):
            cache.put(keys, pages)
    assert cache.lookup(keys).pages == 0


def test_a_lost_device_fails_its_calls_alone(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(4 * 16))
    data, lost = contents(keys), buffer(device, 4)
    cache.put(keys[:2], data[:2])
    device.lose()
    for call in (lambda: cache.get(keys, lost), lambda: cache.put(keys, lost)):
        with pytest.raises(DeviceLost, match="host:0 is lost"):
            call()
    with added_device() as other:
        out = buffer(other, 4)
        assert cache.put(keys, buffer(other, 4, data)) == 2 and cache.get(keys, out).pages == 4
        np.testing.assert_array_equal(out.seen, data)


# --- layer by layer -------------------------------------------------------------------------------------------------


def test_a_layer_is_shown_when_it_has_arrived(near: PrefixCache, device: HostDevice) -> None:
    keys = near.keys(np.arange(3 * 16))
    data = contents(keys)
    layers = [slice(*SMALL.byte_range(layer)) for layer in range(SMALL.layers)]
    pages = buffer(device, 3, data)
    found = np.zeros((3, SMALL.layer_bytes), np.uint8)
    with near.writer(keys) as writer:
        device.hold()
        writer.write_layer(0, pages.part(slice(None), layers[0]))
        writer.write_layer(1, data[:, layers[1]])  # the host's is there, and waits for it
        with pytest.raises(DeadlineExceeded, match="layer 0 of page 0"):
            near.reader(keys, timeout_s=0.05).read_layer(0, found)
        device.let_go()
        for layer in (2, 3):
            for _ in range(FALSE_ANSWERS_MAX + 1):
                writer.write_layer(layer, data[:, layers[layer]])
        near.reader(keys).read_layer(0, found)
        np.testing.assert_array_equal(found, data[:, layers[0]])
    assert writer.sealed == 3


def test_a_writer_is_given_what_a_lost_device_had(cache: PrefixCache, device: HostDevice) -> None:
    keys = cache.keys(np.arange(3 * 16))
    data, lost = contents(keys), buffer(device, 3)
    device.lose()
    with pytest.raises(DeviceLost), cache.writer(keys) as writer:
        writer.write_layer(0, lost.part(slice(None), slice(*SMALL.byte_range(0))))
    assert cache.lookup(keys).pages == 0 and cache.put(keys, data) == 3


@pytest.mark.parametrize("layers", [2, SMALL.layers])
def test_a_device_is_lost_with_layers_on_their_way(near: PrefixCache, device: HostDevice, layers: int) -> None:
    """Before the last layer is given, and after that."""
    keys = near.keys(np.arange(3 * 16))
    data = contents(keys)
    device.hold()
    with pytest.raises(DeviceLost), near.writer(keys) as writer:
        for layer in range(SMALL.layers):
            if layer == layers:
                device.lose()
            writer.write_layer(layer, buffer(device, 3, data).part(slice(None), slice(*SMALL.byte_range(layer))))
        device.lose()
    assert near.lookup(keys).pages == 0 and near.put(keys, data) == 3


# --- straight from and to a node's frames ---------------------------------------------------------------------------


def test_frames_are_pinned_once_and_as_long_as_they_are_mapped(tmp_path: Path, device: HostDevice) -> None:
    with kvstore.open(dram="16MiB", shm_dir=tmp_path) as store:
        cache = store.cache(SMALL)
        keys = cache.keys(np.arange(8 * 16))
        cache.put(keys, contents(keys))
        for _ in range(2):
            assert cache.get(keys, buffer(device, 8)).pages == 8
        assert device.pinned_bytes
        pinned = device.pinned_bytes
        cache.put(cache.keys(np.arange(1000, 1000 + 8 * 16)), buffer(device, 8))
        assert device.pinned_bytes == pinned
    del cache, store
    import gc

    gc.collect()
    assert device.pinned_bytes == 0


def test_a_device_that_is_late_writes_into_nobodys_frames(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_link, "COPY_DEADLINE_S", 0.05)
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        cache = store.cache(SMALL)
        lost, keys = cache.keys(np.arange(8 * 16)), chain(5, 100)
        device.hold()
        with pytest.raises(DeadlineExceeded):
            cache.put(lost, buffer(device, 8, contents(lost)))
        assert cache.put(keys, contents(keys), wait=True) == 100
        device.let_go()
        monkeypatch.undo()
        finish(device)
        assert cache.get(keys, buffer(device, 100)).pages == 100
        assert cache.lookup(lost).pages == 0
        np.testing.assert_array_equal(cache.get(keys, verify=True).data, contents(keys))


@pytest.mark.parametrize("leased", [True, False])
def test_pages_that_leave_while_they_are_read(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, leased: bool
) -> None:
    """Under the lease they stay; without it (it was overstayed) they are a miss."""
    if not leased:
        monkeypatch.setattr(RunLease, "take", lambda self, runs: sum(run.length for run in runs))
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        cache = store.cache(SMALL)
        keys, data = chain(1, 32), contents(chain(1, 32))
        assert cache.put(keys, data, wait=True) == 32
        out, begun = buffer(device, 32), threading.Event()
        whole = device_link.DeviceLink.wait

        def wait(link: device_link.DeviceLink, event: device_link.DeviceEvent, memory: object) -> None:
            if not begun.is_set():
                begun.set()
                for seed in range(2, 10):  # twice the capacity
                    cache.put(chain(seed, 64), contents(chain(seed, 64)), wait=True)
            whole(link, event, memory)

        monkeypatch.setattr(device_link.DeviceLink, "wait", wait)
        match = cache.get(keys, out)
        assert begun.is_set()
        assert match.pages == (32 if leased else 0)
        np.testing.assert_array_equal(out.seen[: match.pages], data[: match.pages])


# --- every wait is needed -------------------------------------------------------------------------------------------


def right_get(cache: PrefixCache, device: HostDevice) -> bool:
    """Whether pages are there when a get from frames returns."""
    keys = cache.keys(np.arange(8 * 16))
    cache.put(keys, contents(keys))
    out = buffer(device, 8)
    return cache.get(keys, out).pages == 8 and bool((out.seen == contents(keys)).all())


def right_get_by_bounce(cache: PrefixCache, device: HostDevice) -> bool:
    keys = cache.keys(np.arange(8 * 16))
    cache.put(keys, contents(keys))
    out = buffer(device, 8)
    return cache.get(keys, out, verify=True).pages == 8 and bool((out.seen == contents(keys)).all())


def right_put(cache: PrefixCache, device: HostDevice) -> bool:
    keys = cache.keys(np.arange(5000, 5000 + 8 * 16))
    cache.put(keys, buffer(device, 8, contents(keys)))
    return bool((cache.get(keys).data == contents(keys)).all())


def right_download(cache: PrefixCache, device: HostDevice) -> bool:
    """Whether rows are there when they have come by a bounce."""
    data = contents(chain(3, 8))
    found = np.zeros_like(data)
    rows = buffers.device_rows_to_read(buffer(device, 8, data), SMALL.page_bytes, 8)
    link_of(device).download(rows, found)
    return bool((found == data).all())


def right_behind_the_callers_stream(cache: PrefixCache, device: HostDevice) -> bool:
    """Whether what a kernel of the caller's stream writes is what is put."""
    keys, stream = cache.keys(np.arange(9000, 9000 + 8 * 16)), device.stream()
    pages = buffer(device, 8)
    pages.stream = stream.handle

    def kernel() -> None:
        pages.seen[...] = contents(keys)

    stream.launch(kernel)
    cache.put(keys, pages)
    return bool((cache.get(keys).data == contents(keys)).all())


def right_layers(cache: PrefixCache, device: HostDevice) -> bool:
    """Whether pages that are sealed have what the layers' kernels wrote."""
    keys, stream = cache.keys(np.arange(7000, 7000 + 8 * 16)), device.stream()
    pages = buffer(device, 8)
    pages.stream = stream.handle
    with cache.writer(keys) as writer:
        for layer in range(SMALL.layers):
            part = slice(*SMALL.byte_range(layer))
            stream.launch(partial(pages.seen[:, part].__setitem__, ..., contents(keys)[:, part]))
            writer.write_layer(layer, pages.part(slice(None), part))
    return bool((cache.get(keys).data == contents(keys)).all())


WAITS: dict[tuple[str, str], Callable[[PrefixCache, HostDevice], bool]] = {
    ("device_link", "wait"): right_get,
    ("device_link", "_bounce"): right_download,
    ("frame_copies", "to_device"): right_get,
    ("frame_copies", "from_device"): right_put,
    ("writer", "finish"): right_layers,
    ("prefix_cache", "_get_to_device"): right_get_by_bounce,
    ("copies", "copy"): right_behind_the_callers_stream,
}
ELSEWHERE = {
    ("device_link", "copy"): "waits before a range is pinned again: see test_pinning",
    ("device_link", "finish"): "copies of objects: see test_device_objects",
}


def where(site: WaitSite) -> tuple[str, str]:
    return Path(site.path).stem, site.function


SITES = [
    site
    for site in wait_sites(device_link, frame_copies, layer_copies, prefix_cache, copies)
    if where(site) not in ELSEWHERE
]


@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_this_wait_bytes_are_wrong(
    near: PrefixCache, device: HostDevice, site: WaitSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_out = forget(monkeypatch, site)
    assert not WAITS[where(site)](near, device)
    assert left_out


@pytest.mark.parametrize("right", WAITS.values(), ids=lambda right: right.__name__)
def test_with_all_waits_bytes_are_right(
    near: PrefixCache, device: HostDevice, right: Callable[[PrefixCache, HostDevice], bool]
) -> None:
    assert right(near, device)


def test_every_wait_is_tried() -> None:
    assert sorted(map(where, SITES)) == sorted(WAITS)
