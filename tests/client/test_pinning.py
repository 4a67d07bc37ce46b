"""What is registered with a device's driver is the memory that lies there now, also where the node gave some back."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import PrefixCache
from kvstore.client import device_link
from kvstore.client.buffers import device_rows_to_read
from kvstore.client.device_link import PINNED, DeviceLink, link_of
from kvstore.device.host_device import HostDevice
from kvstore.errors import DeadlineExceeded, Unavailable
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import Array, InterfaceBuffer, added_device
from tests.helpers.inside import node_of
from tests.helpers.processes import Machine, put, wait_until

MIB = 1 << 20
PAGES = 8  # of 16 KiB: a prompt is 128 KiB
SMALLER, LARGER = 4 * MIB, 16 * MIB
WAYS = ("get", "put", "write_layer")
PROMPTS_PER_WAY = 8  # one after the other: those of an extent


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with added_device() as device:
        yield device


def right(cache: PrefixCache, device: HostDevice, seed: int) -> bool:
    """Whether all pages of a prompt are found, and have their bytes."""
    out = InterfaceBuffer(device, (PAGES, SMALL.page_bytes))
    match = cache.get(chain(seed, PAGES), out)
    found = match.pages == PAGES and bool((out.seen == contents(chain(seed, PAGES))).all())
    out.memory.free()
    return found


@pytest.mark.slow
def test_a_node_that_was_smaller_meanwhile(machine: Machine, device: HostDevice) -> None:
    """One client lives through it: the same mapping, and other memory behind most of it.

    Each of the three ways to use the memory meets extents that no other way has used since.
    """
    daemon = machine.serve("n", eviction="lru", dram="16MiB")
    store = machine.connect("n")
    cache, node = store.cache(SMALL), node_of(store)
    for seed in range(100):
        put(store, seed, PAGES)
        assert right(cache, device, seed)
    mapped = node.mapped()
    assert mapped is not None
    beyond, segment = mapped.dram.segment.data[SMALLER:LARGER], mapped.folder.segment
    assert device.pinned_bytes > SMALLER
    daemon.kill()
    daemon = machine.serve("n", eviction="lru", dram="4MiB")
    wait_until("memory is given back", lambda: segment.stat().st_blocks * 512 <= SMALLER + (64 << 10))
    device.replace_pages(beyond)
    daemon.kill()
    machine.serve("n", eviction="lru", dram="16MiB")
    for seed in range(200, 300):
        data, way = contents(chain(seed, PAGES)), WAYS[seed // PROMPTS_PER_WAY % len(WAYS)]
        if way == "get":
            put(store, seed, PAGES)
            assert right(cache, device, seed), seed
            continue
        pages = InterfaceBuffer(device, (PAGES, SMALL.page_bytes), data)
        if way == "put":
            assert cache.put(chain(seed, PAGES), pages) == PAGES
        else:
            with cache.writer(chain(seed, PAGES)) as writer:
                for layer in range(SMALL.layers):
                    writer.write_layer(layer, pages.part(slice(None), slice(*SMALL.byte_range(layer))))
        np.testing.assert_array_equal(cache.get(chain(seed, PAGES)).data, data)
        pages.memory.free()
    again = node.mapped()
    assert again is not None and again.dram.segment is mapped.dram.segment, "nothing was mapped again"


# --- one range, extent after extent ---------------------------------------------------------------------------------


class Position:
    """A part of a mapping, as the extents that lie there one after the other."""

    def __init__(self, data: Array) -> None:
        self.memory, self.number = data[:], 1
        self.pages = self.memory.reshape(-1, 4096)

    def copy(self, link: DeviceLink, out: InterfaceBuffer) -> Any:
        rows = device_rows_to_read(out, 4096, len(self.pages))
        return link.copy([(self.pages, rows)], [self], to_device=True)


@pytest.fixture
def data() -> Array:
    return np.zeros(4 * 4096, np.uint8)


@pytest.fixture
def registered(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done with the range, in order."""
    done: list[str] = []
    for name in ("register", "unregister"):
        whole = getattr(HostDevice, name)

        def noted(self: HostDevice, memory: Array, name: str = name, whole: Any = whole) -> None:
            whole(self, memory)
            done.append(name)

        monkeypatch.setattr(HostDevice, name, noted)
    return done


def test_a_range_is_pinned_once_for_each_extent(device: HostDevice, data: Array, registered: list[str]) -> None:
    position, out = Position(data), InterfaceBuffer(device, (4, 4096))
    for number in (1, 1, 2, 1, 2, 5):  # who still copies by an older number takes nothing from the others
        position.number = number
        position.copy(link_of(device), out).wait(1e12)
    assert registered == ["register"] + ["unregister", "register"] * 2


def test_a_copy_under_way_keeps_the_range_pinned(
    device: HostDevice, data: Array, registered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_link, "COPY_DEADLINE_S", 0.05)
    position, link = Position(data), link_of(device)
    first, second = InterfaceBuffer(device, (4, 4096)), InterfaceBuffer(device, (4, 4096))
    device.hold()
    event = position.copy(link, first)
    position.number = 2
    with pytest.raises(DeadlineExceeded):
        position.copy(link, second)
    assert registered == ["register"]
    device.let_go()
    position.copy(link, second).wait(1e12)
    assert event.over() and not first.seen.any() and not second.seen.any()
    assert registered == ["register", "unregister", "register"]


def test_another_devices_copies_count_as_well(device: HostDevice, data: Array) -> None:
    """A driver's registration is for all devices of a process: what one has registered, none may find stale."""
    position, out = Position(data), InterfaceBuffer(device, (4, 4096))
    position.copy(link_of(device), out).wait(1e12)
    device.replace_pages(position.memory)
    with added_device("host:1") as other:
        position.number = 2
        position.copy(link_of(other), InterfaceBuffer(other, (4, 4096))).wait(1e12)
        assert (device.pinned_bytes, other.pinned_bytes) == (0, data.nbytes)


def test_what_cannot_be_unregistered_is_not_copied(
    device: HostDevice, data: Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: HostDevice, memory: Array) -> None:
        raise Unavailable("CUDA_ERROR_UNKNOWN")

    position, out = Position(data), InterfaceBuffer(device, (4, 4096))
    position.copy(link_of(device), out).wait(1e12)
    out.seen[:] = 7
    position.number = 2
    with monkeypatch.context() as patch:
        patch.setattr(HostDevice, "unregister", refused)
        for _ in range(2):
            with pytest.raises(Unavailable, match="UNKNOWN"):
                position.copy(link_of(device), out)
    assert (out.seen == 7).all()
    position.copy(link_of(device), out).wait(1e12)
    assert not out.seen.any()


def test_a_lost_device_is_in_nobodys_way(device: HostDevice, data: Array) -> None:
    position = Position(data)
    device.hold()
    position.copy(link_of(device), InterfaceBuffer(device, (4, 4096)))
    device.lose()
    with added_device("host:1") as other:
        position.number = 2
        position.copy(link_of(other), InterfaceBuffer(other, (4, 4096))).wait(1e12)
        assert (device.pinned_bytes, other.pinned_bytes) == (0, data.nbytes)


def test_nothing_is_remembered_of_a_mapping_that_ended(device: HostDevice) -> None:
    known = len(PINNED._ranges)
    position = Position(np.zeros(4 * 4096, np.uint8))
    position.copy(link_of(device), InterfaceBuffer(device, (4, 4096))).wait(1e12)
    assert len(PINNED._ranges) == known + 1 and device.pinned_bytes
    del position
    gc.collect()
    assert len(PINNED._ranges) == known and not device.pinned_bytes
