"""Bytes of a device's frames to and from the host: every wait on the way is needed, and a device may be lost."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch

import kvstore
from engine.memory import device_staging
from engine.memory.arena import Arena
from engine.memory.device_staging import FLYING_MAX, DeviceStaging
from kvstore.client.buffers import DeviceRows
from kvstore.client.device_link import link_of
from kvstore.device.base import DeviceLost
from kvstore.device.copies import CopyStream, PinnedBounces
from kvstore.device.host_device import HostDevice

LAYOUT = kvstore.Layout(model="m", layers=3, kv_heads=2, head_dim=4, dtype="float32", page_tokens=8)
FRAMES = 40


class Stage:
    """An arena on a device, and a stream that computes in it as late as it may."""

    def __init__(self, seed: int = 0) -> None:
        self.device = HostDevice(seed=seed)
        self.arena = Arena(LAYOUT, FRAMES, LAYOUT.head_dim)
        self.compute = self.device.stream_of(0)
        self.staging = DeviceStaging(self.arena, self.device, self.compute)
        self.draw = np.random.default_rng(seed)

    def values(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.draw.standard_normal((*shape, *LAYOUT.shape[1:]), np.float32))

    def write(self, frames: slice, layer: int | slice, values: torch.Tensor) -> None:
        """A kernel that puts values into frames."""

        def kernel() -> None:
            self.arena.pages[frames, layer] = values

        self.compute.launch(kernel)

    def read(self, frames: slice, layer: int | slice) -> Callable[[], torch.Tensor]:
        """A kernel that looks at frames. What it saw."""
        seen: list[torch.Tensor] = []
        self.compute.launch(lambda: seen.append(self.arena.pages[frames, layer].clone()))

        def done() -> torch.Tensor:
            self.compute.record().wait(time.monotonic() + 60)
            return seen[0]

        return done


def as_rows(values: torch.Tensor) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = values.contiguous().view(len(values), -1).view(torch.uint8).numpy()
    return rows


def leaves(stage: Stage) -> None:
    """What is sent is what was computed, by whichever call."""
    for layer in range(LAYOUT.layers):
        wanted = stage.values(4)
        stage.write(slice(2, 6), layer, wanted)
        stage.staging.mark_computed(layer)
        rows = stage.staging.start_send_layer([(0, 2, 2), (2, 4, 2)], layer)
        if layer != 1:
            assert (rows() == as_rows(wanted)).all()
        else:
            rows()
        again = stage.values(4)
        stage.write(slice(2, 6), layer, again)
        stage.staging.mark_computed(layer)
        assert (stage.staging.send_layer(2, 4, layer) == as_rows(again)).all()
        tail = stage.values(1)
        stage.write(slice(9, 10), layer, tail)
        stage.staging.mark_computed(layer)
        assert (stage.staging.send_tail(9, layer, 3) == as_rows(tail[:, :, :3])).all()
    pages = stage.values(2, LAYOUT.layers).view(2, *LAYOUT.shape)
    stage.write(slice(7, 9), slice(None), pages)
    assert (stage.staging.send(7, 2) == as_rows(pages)).all()


def enters_behind_others(stage: Stage) -> None:
    """Frames are another one's until all that was given to the device before is over."""
    old, new = stage.values(2, LAYOUT.layers).view(2, *LAYOUT.shape), stage.values(2, LAYOUT.layers).view(2, -1)
    stage.arena.pages[4:6] = old
    saw = stage.read(slice(4, 6), slice(None))
    with stage.staging.receive(4, 2) as rows:
        rows[:] = as_rows(new)
    assert torch.equal(stage.arena.pages[4:6].view(2, -1), new), "whole pages are there at once"
    assert torch.equal(saw(), old), "who had the frames saw what was not his"


def is_seen(stage: Stage) -> None:
    """What is computed behind the gate sees the layers that came before; more of them than there may be on the way."""
    wanted = [stage.values(2) for _ in range(3 * FLYING_MAX)]
    for at, values in enumerate(wanted):
        frame = at % 12 * 3
        with stage.staging.layer_target(frame, 2, at % 3) as rows:
            rows[:] = as_rows(values)
        gate = stage.staging.arrival_gate()
        assert gate is not None
        gate()
        saw = stage.read(slice(frame, frame + 2), at % 3)
        if at % 5 == 0:
            assert torch.equal(saw(), values)
    tail = stage.values(1)[:, :, :5].contiguous()
    stage.staging.receive_tail(38, 2, 5, as_rows(tail))
    gate = stage.staging.arrival_gate()
    assert gate is not None
    gate()
    assert torch.equal(stage.read(slice(38, 39), 2)()[:, :, :5], tail)


def is_settled(stage: Stage) -> None:
    """Nothing is on its way any more; without a gate, and though pinned memory was used again and again."""
    wanted = [stage.values(1) for _ in range(3 * FLYING_MAX)]
    for at, values in enumerate(wanted):
        stage.staging.receive_layer(at, 1, as_rows(values))
    stage.staging.settle()
    for at, values in enumerate(wanted):
        assert torch.equal(stage.arena.pages[at : at + 1, 1], values), at


def fills_behind_others(stage: Stage) -> None:
    """The same of frames that are filled where they are."""
    old, new = stage.values(2, LAYOUT.layers).view(2, *LAYOUT.shape), stage.values(2, LAYOUT.layers).view(2, -1)
    stage.arena.pages[4:6] = old
    saw = stage.read(slice(4, 6), slice(None))
    with stage.staging.page_target(4, 2) as rows:
        assert isinstance(rows, DeviceRows)
        link_of(stage.device).upload(as_rows(new), rows)
    assert torch.equal(stage.arena.pages[4:6].view(2, -1), new) and torch.equal(saw(), old)


STORIES = [leaves, enters_behind_others, is_seen, is_settled, fills_behind_others]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("story", STORIES)
def test_bytes_are_those_that_were_computed_or_received(story: Callable[[Stage], None], seed: int) -> None:
    story(Stage(seed))


@pytest.fixture(params=["rows", "_copy_out", "_finish_oldest", "_start_copy_out", "_copy_in", "gate", "_wait_computed"])
def forgotten(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The function of ``DeviceStaging`` that does not wait: for an event, or has a stream not do so."""
    name: str = request.param
    left_out: list[str] = []

    def forgets() -> bool:
        caller = sys._getframe(2).f_code
        forgets = caller.co_filename == device_staging.__file__ and caller.co_name == name
        left_out.extend([name] * forgets)
        return forgets

    wait, copy, stream_wait = DeviceStaging._wait, CopyStream.copy, Stage().compute.__class__.wait
    event_wait = Stage().compute.record().__class__.wait
    monkeypatch.setattr(DeviceStaging, "_wait", lambda self, *events: None if forgets() else wait(self, *events))
    monkeypatch.setattr(
        CopyStream, "copy", lambda self, *pieces, **after: copy(self, *(pieces[:3] if forgets() else pieces), **after)
    )
    monkeypatch.setattr(
        Stage().compute.__class__, "wait", lambda self, event: None if forgets() else stream_wait(self, event)
    )
    monkeypatch.setattr(
        Stage().compute.record().__class__, "wait", lambda self, at: None if forgets() else event_wait(self, at)
    )
    yield name
    assert left_out, "nobody waits there any more"


def finishes(stage: Stage) -> None:
    """What was computed is there."""
    wanted = stage.values(1)
    stage.write(slice(0, 1), 0, wanted)
    stage.staging.finish()
    assert torch.equal(stage.arena.pages[:1, 0], wanted)


def test_whoever_forgets_a_wait_is_found(forgotten: str) -> None:
    failed = []
    for story in [*STORIES, finishes]:
        stage = Stage(1)
        try:
            story(stage)
        except AssertionError:
            failed.append(story.__name__)
        stage.device.lose()  # with the copies that nobody waited for
    assert failed, f"nothing is wrong without the wait in {forgotten}"


def test_a_device_that_is_lost_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    rows = stage.staging.start_send_layer([(0, 0, 1)], 0)
    stage.device.lose()
    for call in (
        rows,
        lambda: stage.staging.send(0, 1),
        lambda: stage.staging.receive_layer(0, 0, np.zeros((1, LAYOUT.layer_bytes), np.uint8)),
        lambda: stage.staging.mark_computed(0),
        stage.staging.finish,
    ):
        with pytest.raises(DeviceLost, match="host:0"):
            call()


@pytest.mark.parametrize("way", ["send", "send_layer", "sending", "settle", "borrow"])
def test_the_time_of_a_copy_begins_when_what_it_is_behind_was_computed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_staging, "COPY_S", 0.1)
    stage = Stage()
    staging, row = stage.staging, np.zeros((1, LAYOUT.layer_bytes), np.uint8)
    stage.device.hold()
    stage.write(slice(0, 1), 0, stage.values(1))
    staging.mark_computed(0)
    later = threading.Timer(0.5, stage.device.let_go)
    later.start()
    try:
        if way == "send":
            staging.send(0, 1)
        elif way == "send_layer":
            staging.send_layer(0, 1, 0)
        elif way == "sending":
            staging.start_send_layer([(0, 0, 1)], 0)()
        elif way == "settle":
            staging.receive_layer(1, 0, row)
            staging.settle()
        else:
            staging._bounces = PinnedBounces(stage.device, 1 << 16)
            with ExitStack() as taken:
                taken.enter_context(staging._bounces.borrow(1 << 16, time.monotonic() + 1))
                threading.Timer(0.5, taken.pop_all().close).start()
                staging.receive_layer(1, 0, row)
        assert not stage.device.held
    finally:
        later.join()


def test_whoever_has_others_compute_behind_layers_uses_the_stream_alone() -> None:
    """A stream is of one thread at a time: the gate waits for the thread that computes, and so does a record."""
    stage, lock = Stage(), threading.Lock()
    staging = DeviceStaging(stage.arena, stage.device, stage.compute, lock)
    staging.receive_layer(0, 0, np.zeros((1, LAYOUT.layer_bytes), np.uint8))
    gate = staging.arrival_gate()
    assert gate is not None
    for use in (gate, lambda: staging.mark_computed(0)):
        other = threading.Thread(target=use)
        with lock:
            other.start()
            other.join(0.1)
            assert other.is_alive(), "it uses the stream of another thread"
        other.join(10)
        assert not other.is_alive()
    staging.settle()


def test_pinned_memory_of_copies_that_are_over_is_there_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mover that waits for its next layer does not keep it from who loads: that would count as a lost device."""
    stage = Stage()
    monkeypatch.setattr(device_staging, "COPY_S", 5.0)
    stage.staging._bounces._nbytes_max = 1  # so that one has all of it
    for layer in range(2):
        with stage.staging.layer_target(0, 2, layer) as rows:
            rows[:] = as_rows(stage.values(2))
    with stage.staging.receive(4, 2) as pages:
        pages[:] = 7
    assert (stage.staging.send(4, 2) == 7).all()
