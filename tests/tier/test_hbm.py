"""HbmStore beside the suite over all tiers: what its callers may rely on when a device is slow or lost, and that
every wait for an event is needed."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kvstore.device import copies
from kvstore.device.copies import CopyStream, PinnedBounces
from kvstore.device.host_device import POISON, HostDevice
from kvstore.errors import DeadlineExceeded
from kvstore.model.replica import FrameClass
from kvstore.model.shard import Strides
from kvstore.tier import hbm
from kvstore.tier.base import Bytes
from kvstore.tier.hbm import HbmStore, StridedFrames
from tests.helpers.device_waits import WaitSite, forget, wait_sites
from tests.helpers.page_major import PageMajorFrames

PAGE = FrameClass(page_bytes=8192, page_tokens=4, layers=2)
NO_HEADER = np.empty(0, np.uint8)
FRAMES = 8
NOBODY = 30.0  # nobody waits so long


class Fixture:
    """A store of one extent."""

    def __init__(self, deadline_s: float = NOBODY) -> None:
        self.device = HostDevice(seed=1)
        self.memory = self.device.allocate(FRAMES * PAGE.frame_bytes)
        arena = PageMajorFrames(self.memory.address, FRAMES * PAGE.frame_bytes, 1)
        self.store = HbmStore(self.device, arena, 1, [(0, PAGE)], deadline_s)

    def write(self, frame: int, value: int) -> None:
        self.store.write_page(0, frame, PAGE, NO_HEADER, np.full(PAGE.frame_bytes, value, np.uint8))

    def read(self, frame: int) -> Bytes:
        page = np.zeros(PAGE.frame_bytes, np.uint8)
        self.store.read_page(0, frame, PAGE, NO_HEADER, page)
        return page

    def frame(self, frame: int) -> Bytes:
        """What another would find in it now."""
        return self.memory.view().reshape(FRAMES, -1)[frame]


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


def wrote(fixture: Fixture) -> bool:
    """Whether pages are there when ``write_page`` returns."""
    right = []
    for frame in range(FRAMES):
        fixture.write(frame, frame)
        right.append(bool((fixture.frame(frame) == frame).all()))
    return all(right)


def found(fixture: Fixture) -> bool:
    """Whether pages are there when ``read_page`` returns."""
    for frame in range(FRAMES):
        fixture.frame(frame)[:] = frame
    return all(bool((fixture.read(frame) == frame).all()) for frame in range(FRAMES))


def began_behind(fixture: Fixture) -> bool:
    """Whether a copy begins behind the event of another stream that it was given."""
    source, target = np.full(64, 1, np.uint8), np.zeros(64, np.uint8)
    place, size = fixture.memory.address, np.array([64], np.uint64)

    def at(address: int) -> hbm.Addresses:
        return np.array([address], np.uint64)

    written = CopyStream(fixture.device).copy(at(place), at(source.ctypes.data), size)
    event = CopyStream(fixture.device).copy(at(target.ctypes.data), at(place), size, written)
    event.wait(time.monotonic() + NOBODY)
    return bool((target == source).all())


WAITS = {"write_page": wrote, "read_pages": found, "copy": began_behind}


@pytest.mark.parametrize("site", wait_sites(hbm, copies), ids=str)
def test_without_this_wait_bytes_are_wrong(fixture: Fixture, site: WaitSite, monkeypatch: pytest.MonkeyPatch) -> None:
    right = WAITS[site.function]
    assert right(Fixture())
    left_out = forget(monkeypatch, site)
    assert not right(fixture)
    assert left_out
    fixture.device.lose()  # with the copies that nobody waited for


def test_every_wait_is_tried() -> None:
    assert sorted(site.function for site in wait_sites(hbm, copies)) == sorted(WAITS)


def test_a_copy_that_is_late_spoils_nothing() -> None:
    fixture = Fixture(deadline_s=0.05)
    fixture.write(0, 1)
    fixture.write(1, 2)
    fixture.device.hold()
    page = np.full(PAGE.frame_bytes, 9, np.uint8)
    with pytest.raises(DeadlineExceeded):
        fixture.store.read_page(0, 0, PAGE, NO_HEADER, page)
    with pytest.raises(OSError, match="did not do its work in time"):
        fixture.write(2, 3)
    fixture.device.let_go()
    fixture.store._deadline_s = NOBODY  # type: ignore[misc]  # the patience of later calls
    assert (fixture.read(1) == 2).all() and (fixture.read(2) == 3).all()
    assert (page == 9).all()


def test_a_late_bounce_is_nobodys() -> None:
    device = HostDevice(seed=2)
    memory, stream = device.allocate(2 << 20), CopyStream(device)
    bounces = PinnedBounces(device, nbytes_max=2 << 20)
    size, place = np.array([2 << 20], np.uint64), np.array([memory.address], np.uint64)
    device.hold()
    with pytest.raises(DeadlineExceeded), bounces.borrow(2 << 20, time.monotonic() + NOBODY) as bounce:
        bounce.memory[:] = 7
        bounce.event = stream.copy(place, np.array([bounce.address], np.uint64), size)
        bounce.event.wait(time.monotonic())
    with pytest.raises(DeadlineExceeded), bounces.borrow(1, time.monotonic() + 0.05):
        raise AssertionError("the device may read it yet")
    device.let_go()
    with bounces.borrow(1, time.monotonic() + NOBODY) as again:
        assert again is bounce
    assert (memory.view() == 7).all()
    bounces.close()


def test_pages_of_a_foreign_arena() -> None:
    """Keys and values of two layers, each ``[block][token][head][16]``, as pages ``[layer][head][token][2][16]``."""
    layers, blocks, tokens, heads, content = 2, 3, 4, 2, 16
    half = blocks * tokens * heads * content
    device = HostDevice()
    memory = device.allocate(layers * 2 * half)
    theirs = memory.view().reshape(layers, 2, blocks, tokens, heads, content)
    theirs[...] = np.random.default_rng(0).integers(0, 256, theirs.shape, np.uint8)
    wanted = theirs.transpose(2, 0, 4, 3, 1, 5).reshape(blocks, -1).copy()
    page = FrameClass(wanted.shape[1], tokens, layers)
    dims = [(heads, content), (tokens, heads * content), (2, half)]
    strides = Strides([layer * 2 * half for layer in range(layers)], tokens * heads * content, dims, content)
    arena = StridedFrames(page, memory.address, blocks, strides)
    store = HbmStore(device, arena, 1, [(0, page)])
    assert store.frames_of(page) == blocks and store.frames_of(PAGE) == 0
    for block in range(blocks):
        found = np.full(page.frame_bytes, 1, np.uint8)
        store.read_page(0, block, page, NO_HEADER, found)
        assert (found[: page.page_bytes] == wanted[block]).all() and not found[page.page_bytes :].any()
    rows = np.zeros((blocks, page.page_bytes), np.uint8)
    store.read_pages(0, 0, page, rows)
    assert (rows == wanted).all()
    memory.view()[:] = POISON
    for block in range(blocks):
        written = np.zeros(page.frame_bytes, np.uint8)
        written[: page.page_bytes] = wanted[block]
        store.write_page(0, block, page, NO_HEADER, written)
    assert (theirs.transpose(2, 0, 4, 3, 1, 5).reshape(blocks, -1) == wanted).all()
