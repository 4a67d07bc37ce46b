"""Staging: bytes of frames to and from the host, the same whether they are there already or come through a buffer."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore
from engine.memory.arena import Arena
from engine.memory.device_staging import DeviceStaging
from engine.memory.staging import HostStaging, Staging
from kvstore.device.host_device import HostDevice
from kvstore.errors import InvalidRequest

LAYOUT = kvstore.Layout(model="m", layers=3, kv_heads=2, head_dim=4, dtype="float32", page_tokens=8)


@pytest.fixture(params=[HostStaging, DeviceStaging])
def staging(request: pytest.FixtureRequest) -> Staging:
    """Both ways, each over an arena of its own; the device is one in host memory."""
    arena = Arena(LAYOUT, 6, LAYOUT.shape[-1] // 2)
    if request.param is HostStaging:
        return HostStaging(arena)
    device = HostDevice()
    return DeviceStaging(arena, device, device.stream_of(0))


def rows(count: int, width: int = LAYOUT.page_bytes) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, width), np.uint8)


def test_pages_go_in_and_come_out(staging: Staging) -> None:
    data = rows(3)
    with staging.receive(2, 3) as target:
        assert target.shape == data.shape
        target[:] = data
    assert (staging.send(2, 3) == data).all()
    assert not staging.send(0, 2).any() and not staging.send(5, 1).any()


def test_layers_go_in_and_come_out(staging: Staging) -> None:
    data = [rows(4, LAYOUT.layer_bytes) + layer for layer in range(LAYOUT.layers)]
    staging.receive_layer(1, 0, data[0])
    for layer in (1, 2):
        with staging.layer_target(1, 4, layer) as target:
            target[:] = data[layer]
    staging.settle()
    for layer in range(LAYOUT.layers):
        assert (staging.send_layer(1, 4, layer) == data[layer]).all()
    pages = staging.send(1, 4)
    assert all((pages[:, slice(*LAYOUT.byte_range(layer))] == data[layer]).all() for layer in range(LAYOUT.layers))


def test_what_is_sent_in_place_shows_what_is_computed_later(staging: Staging) -> None:
    pages, data = staging.send(0, 2), rows(2, LAYOUT.layer_bytes)
    staging.receive_layer(0, 1, data)
    assert not staging.in_place or (pages[:, slice(*LAYOUT.byte_range(1))] == data).all()


def test_a_tail_has_its_tokens_and_no_others(staging: Staging) -> None:
    with staging.receive(0, 1) as target:
        target[:] = rows(1)
    tail = staging.send_tail(0, 1, 3)
    assert tail.shape == (1, 3 * LAYOUT.layer_bytes // LAYOUT.page_tokens)
    staging.receive_tail(4, 1, 3, tail)
    staging.settle()
    assert (staging.send_tail(4, 1, 3) == tail).all()
    assert np.count_nonzero(staging.send(4, 1)) <= tail.size, "nothing beside those tokens"
    with pytest.raises(InvalidRequest):
        staging.receive_tail(4, 1, 3, tail[:, 1:])
