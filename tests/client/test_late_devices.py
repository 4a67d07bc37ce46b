"""Copies from a device into frames that end too late, or never: whose frames those are then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import device_link
from kvstore.client.buffers import device_rows_to_read
from kvstore.client.device_link import DeviceLink, link_of
from kvstore.device.base import DeviceLost
from kvstore.device.host_device import HostDevice
from kvstore.errors import DeadlineExceeded
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import InterfaceBuffer, added_device, finish
from tests.helpers.processes import Machine, put

PAGES = 8


@pytest.fixture
def device() -> Iterator[HostDevice]:
    with added_device() as device:
        yield device


@pytest.mark.parametrize("way", ["put", "write_layer"])
def test_no_session_ends_beneath_a_late_copy(
    machine: Machine, device: HostDevice, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A store that is closed meanwhile keeps the frames from others as long as its process lives."""
    machine.serve("n", dram="4MiB")
    store, other = machine.connect("n"), machine.connect("n")
    keys = chain(1, PAGES)
    pages = InterfaceBuffer(device, (PAGES, SMALL.page_bytes), np.full((PAGES, SMALL.page_bytes), 7, np.uint8))
    cache = store.cache(SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(device_link, "COPY_DEADLINE_S", 0.05)
        device.hold()
        if way == "put":
            with pytest.raises(DeadlineExceeded):
                cache.put(keys, pages)
        else:
            with pytest.raises(DeadlineExceeded), cache.writer(keys) as writer:
                for layer in range(SMALL.layers):
                    writer.write_layer(layer, pages.part(slice(None), slice(*SMALL.byte_range(layer))))
    store.close()
    for seed in range(10, 70):  # nearly twice the capacity
        put(other, seed, PAGES)
    device.let_go()
    finish(device)
    for seed in range(10, 70):
        match = other.cache(SMALL).get(chain(seed, PAGES))
        assert match.data is not None and (match.data == contents(chain(seed, PAGES))[: match.pages]).all(), seed


def test_frames_of_a_lost_devices_puts_are_free_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such puts would fill the store several times over."""
    wait, lost = DeviceLink.wait, list[HostDevice]()

    def without_it(self: DeviceLink, *given: Any) -> None:
        lost[-1].lose()
        wait(self, *given)

    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store:
        cache = store.cache(SMALL)
        with monkeypatch.context() as patch:
            patch.setattr(DeviceLink, "wait", without_it)
            for seed in range(12):
                with added_device() as device:
                    lost.append(device)
                    keys = chain(seed, 64)
                    with pytest.raises(DeviceLost):
                        cache.put(keys, InterfaceBuffer(device, (64, SMALL.page_bytes), contents(keys)))
        keys = chain(100, 100)
        assert cache.put(keys, contents(keys), wait=True) == 100


@pytest.mark.parametrize("way", ["write_layer", "put"])
def test_nobodys_get_waits_for_what_another_caller_computes(
    tmp_path: Path, device: HostDevice, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A layer is given before it is computed, and so may be the pages of a put. The device does what a waiter needs."""
    monkeypatch.setattr(HostDevice, "falses", lambda self: 1 << 30)  # whoever only looks has nothing done
    keys, others, computed = chain(1, PAGES), chain(2, PAGES), list[str]()
    pages, out = (InterfaceBuffer(device, (PAGES, SMALL.page_bytes)) for _ in range(2))
    stream = device.stream()
    stream.launch(lambda: computed.append(way))
    pages.stream = stream.handle
    with kvstore.open(dram="4MiB", shm_dir=tmp_path) as store, contextlib.ExitStack() as writing:
        cache = store.cache(SMALL)
        cache.put(others, contents(others))
        host = np.empty((PAGES, SMALL.page_bytes), np.uint8)
        if way == "put":
            rows = device_rows_to_read(pages, SMALL.page_bytes, PAGES)
            link_of(device).copy([(host, rows)], to_device=False)
        else:
            writer = writing.enter_context(cache.writer(keys))
            for layer in range(SMALL.layers):
                writer.write_layer(layer, pages.part(slice(None), slice(*SMALL.byte_range(layer))))
            more = InterfaceBuffer(device, (PAGES, SMALL.page_bytes), contents(chain(3, PAGES)))
            assert cache.put(chain(3, PAGES), more) == PAGES
        assert cache.get(others, out).pages == PAGES and (out.seen == contents(others)).all()
        assert not computed
        finish(device)
        assert computed == [way]
