"""Copies from a device into frames that end too late, or never: whose frames those are then."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore.client import device_link
from kvstore.client.device_link import DeviceLink
from kvstore.errors import DeadlineExceeded
from kvstore.tier.device import DeviceLost
from kvstore.tier.host_device import HostDevice
from tests.helpers.content import SMALL, chain, contents
from tests.helpers.device_buffers import InterfaceBuffer, added_device
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
    for stream in list(device._streams.values()):
        stream.record().wait(1e12)
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
