"""One suite over every tier's store: DRAM, HBM on a device's peer and on a GPU where one is, one of a test, NVMe in
memory, on files, devices."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.device import cuda
from kvstore.device.base import Addresses, Device, DeviceMemory
from kvstore.device.host_device import HostDevice
from kvstore.model.replica import FrameClass, Tier
from kvstore.model.shard import Strides
from kvstore.node.nvme_pages import NvmePages
from kvstore.shm.folder import NodeFolder
from kvstore.tier.base import Bytes, TierStore
from kvstore.tier.dram import DramStore, SegmentFile
from kvstore.tier.hbm import HbmStore, StridedFrames
from kvstore.tier.nvme.devices import NvmeDevices
from kvstore.tier.nvme.disk import Disk, FileDisk, aligned_buffer
from tests.helpers.memory_store import MemoryStore
from tests.helpers.nvme.faulty_disk import refuse_direct
from tests.helpers.nvme.memory_disk import MemoryDisk
from tests.helpers.page_major import PageMajorFrames

EXTENT_BYTES = 1 << 20
POSITIONS = 4
SMALL = FrameClass(page_bytes=10_000, page_tokens=5, layers=4)  # frames of 12 KiB, the last one padded
LARGE = FrameClass(page_bytes=300_000, page_tokens=512, layers=60)
HUGE = FrameClass(page_bytes=EXTENT_BYTES + 1, page_tokens=1, layers=1)
WHOLE = FrameClass(page_bytes=EXTENT_BYTES - 8192, page_tokens=1, layers=1)


Opener = Callable[[bool], TierStore]
HBM = ["hbm", "hbm in a strided arena"]
GPUS = ["hbm on a GPU"] if cuda.find().devices else []
KINDS = [
    "dram",
    *HBM,
    *GPUS,
    "a test's",
    "memory",
    "file",
    "file through the page cache",
    "tmpfs file",
    "three devices",
]


@pytest.fixture(params=KINDS)
def opener(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens the store; True: makes it anew. Nobody else has it open."""
    kind = request.param
    shm = "/dev/shm" if kind in ("dram", "tmpfs file") else tmp_path
    with tempfile.TemporaryDirectory(dir=shm) as home:
        if kind == "dram":
            yield dram_opener(NodeFolder(home, "n"))
            return
        if kind in HBM:
            yield hbm_opener(HostDevice(seed=3), strided=kind != "hbm")
            return
        if kind in GPUS:
            yield hbm_opener(cuda.find().devices[0], strided=True)
            return
        if kind == "a test's":
            yield memory_opener()
            return
        if kind == "file through the page cache":
            refuse_direct(monkeypatch)
        sizes = [POSITIONS] if kind != "three devices" else [1, 2, POSITIONS - 3]
        memory = [MemoryDisk(device_bytes(positions)) for positions in sizes]

        def disks() -> list[Disk]:
            if kind == "memory":
                return list(memory)
            paths = [Path(home) / f"nvme-{at}" for at in range(len(sizes))]
            return [FileDisk.open(p, device_bytes(n), create=True) for p, n in zip(paths, sizes, strict=True)]

        def open_store(anew: bool) -> TierStore:
            return NvmePages(NvmeDevices.open(disks(), "n", EXTENT_BYTES, format=anew))

        yield open_store


def dram_opener(folder: NodeFolder) -> Opener:
    folder.create()
    incarnations = iter(range(1, 100))
    current = [0]

    def open_store(anew: bool) -> TierStore:
        segment = None if anew else SegmentFile.open(folder, current[0])
        if segment is None:
            current[0] = next(incarnations)
            segment = SegmentFile.create(folder, current[0], EXTENT_BYTES, POSITIONS)
        if anew:
            carved.clear()
        return Remembered(segment, current[0], carved.items())

    carved: dict[int, FrameClass] = {}

    class Remembered(DramStore):
        """As a start finds it: the tables say what is carved."""

        def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
            super().carve(position, number, frame_class)
            carved[position] = frame_class

    return open_store


def hbm_opener(device: Device, *, strided: bool) -> Opener:
    memory = device.allocate(EXTENT_BYTES * POSITIONS)
    arena = StridedByClass(memory) if strided else PageMajorFrames(memory.address, EXTENT_BYTES, POSITIONS)
    incarnations = iter(range(1, 100))
    stores: list[HbmStore] = []
    carved: dict[int, FrameClass] = {}

    class Remembered(HbmStore):
        """As a start finds it: the tables say what is carved."""

        def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
            super().carve(position, number, frame_class)
            carved[position] = frame_class

    def open_store(anew: bool) -> TierStore:
        if anew:
            carved.clear()
        incarnation = next(incarnations) if anew else stores[-1].incarnation
        stores.append(Remembered(device, arena, incarnation, carved.items()))
        return stores[-1]

    return open_store


class StridedByClass:
    """An arena with room for foreign tensors of any class: in each extent ``[layer][block][head][token][content]``, of
    which a page is ``[layer][token][head][content]``."""

    extent_bytes, positions = EXTENT_BYTES, POSITIONS

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def frames_of(self, frame_class: FrameClass) -> int:
        return EXTENT_BYTES // frame_class.frame_bytes

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        block_bytes = frame_class.page_bytes // frame_class.layers
        frames, heads, tokens = self.frames_of(frame_class), 2, block_bytes // 500
        content = block_bytes // (heads * tokens)
        begin = self._memory.address + position * EXTENT_BYTES
        layers = [layer * frames * block_bytes for layer in range(frame_class.layers)]
        dims = [(tokens, content), (heads, tokens * content)]
        arena = StridedFrames(frame_class, begin, frames, Strides(layers, block_bytes, dims, content))
        return arena.pieces(0, frame, frame_class, count)


def memory_opener() -> Opener:
    stores: list[MemoryStore] = []

    def open_store(anew: bool) -> TierStore:
        if anew:
            stores.append(MemoryStore(Tier.HBM, len(stores) + 1, EXTENT_BYTES, POSITIONS))
        return stores[-1]

    return open_store


def device_bytes(positions: int) -> int:
    return 4 * 4096 + positions * EXTENT_BYTES


def page(frame_class: FrameClass, seed: int) -> Bytes:
    """Some page, aligned; padding zero."""
    buffer = aligned_buffer(frame_class.frame_bytes)
    buffer[: frame_class.page_bytes] = np.random.default_rng(seed).integers(0, 256, frame_class.page_bytes, np.uint8)
    return buffer


def write(store: TierStore, position: int, frame: int, frame_class: FrameClass, seed: int) -> None:
    header = aligned_buffer(store.header_bytes(frame_class))
    header[:] = seed % 251
    store.open_for_writing([position])
    store.write_page(position, frame, frame_class, header, page(frame_class, seed))
    store.close_for_writing([position])


def holds(store: TierStore, position: int, frame: int, frame_class: FrameClass, seed: int) -> bool:
    header = aligned_buffer(store.header_bytes(frame_class))
    found = aligned_buffer(frame_class.frame_bytes)
    store.read_page(position, frame, frame_class, header, found)
    return bool((found == page(frame_class, seed)).all() and (header == seed % 251).all())


def test_geometry(opener: Opener) -> None:
    store = opener(True)
    assert (store.extent_bytes, store.positions) == (EXTENT_BYTES, POSITIONS)
    assert store.incarnation != 0
    for frame_class in (SMALL, LARGE):
        frames, header = store.frames_of(frame_class), store.header_bytes(frame_class)
        assert header % 4096 == 0
        assert EXTENT_BYTES * 0.6 < frames * (header + frame_class.frame_bytes) <= EXTENT_BYTES
    assert store.frames_of(HUGE) == 0
    assert store.frames_of(WHOLE) == 1 or store.header_bytes(WHOLE)
    store.close()


@pytest.mark.parametrize("frame_class", [SMALL, LARGE])
def test_frames_do_not_overlap(opener: Opener, frame_class: FrameClass) -> None:
    store = opener(True)
    frames = store.frames_of(frame_class)
    for position in range(POSITIONS):
        store.carve(position, 10 + position, frame_class)
    places = [(position, frame) for position in range(POSITIONS) for frame in range(frames)]
    np.random.default_rng(1).shuffle(places)
    for seed, (position, frame) in enumerate(places):
        write(store, position, frame, frame_class, seed)
    store.sync()
    for seed, (position, frame) in enumerate(places):
        assert holds(store, position, frame, frame_class, seed)
    seed = places.index((1, 0))
    write(store, 1, 0, frame_class, 9999)
    assert holds(store, 1, 0, frame_class, 9999) and not holds(store, 1, 0, frame_class, seed)
    assert holds(store, 1, 1, frame_class, places.index((1, 1)))
    store.close()


def test_pages_are_there_after_opening_again(opener: Opener) -> None:
    store = opener(True)
    store.carve(2, 7, SMALL)
    store.carve(0, 8, LARGE)
    write(store, 2, 5, SMALL, 1)
    write(store, 0, 1, LARGE, 2)
    store.sync()
    store.close()
    again = opener(False)
    assert again.incarnation == store.incarnation
    assert holds(again, 2, 5, SMALL, 1) and holds(again, 0, 1, LARGE, 2)
    again.close()


def test_a_dropped_position_takes_another_extent(opener: Opener) -> None:
    store = opener(True)
    store.carve(1, 7, SMALL)
    store.carve(2, 8, SMALL)
    write(store, 1, 3, SMALL, 1)
    write(store, 2, 3, SMALL, 2)
    store.drop(1)
    assert holds(store, 2, 3, SMALL, 2)
    store.carve(1, 9, LARGE)
    write(store, 1, 0, LARGE, 3)
    store.sync()
    assert holds(store, 1, 0, LARGE, 3) and holds(store, 2, 3, SMALL, 2)
    store.close()


def test_another_incarnation_is_another_store(opener: Opener) -> None:
    store = opener(True)
    store.carve(0, 7, SMALL)
    write(store, 0, 0, SMALL, 1)
    store.sync()
    store.close()
    other = opener(True)
    assert other.incarnation != store.incarnation
    other.carve(0, 1, LARGE)  # nothing is carved in it
    other.close()


@pytest.mark.parametrize(("position", "frame"), [(-1, 0), (POSITIONS, 0), (0, -1), (0, 10_000)])
def test_what_lies_outside_is_a_bug(opener: Opener, position: int, frame: int) -> None:
    store = opener(True)
    store.carve(0, 7, SMALL)
    header, buffer = aligned_buffer(store.header_bytes(SMALL)), page(SMALL, 1)
    with pytest.raises((AssertionError, IndexError)):
        store.write_page(position, frame, SMALL, header, buffer)
    with pytest.raises((AssertionError, IndexError)):
        store.read_page(position, frame, SMALL, header, buffer)
    with pytest.raises((AssertionError, IndexError)):
        store.carve(0, 8, SMALL)
    with pytest.raises((AssertionError, IndexError)):
        store.carve(1, 8, HUGE)
    store.close()


def test_the_last_frame_ends_inside_the_store(opener: Opener) -> None:
    store = opener(True)
    last = POSITIONS - 1
    store.carve(last, 7, SMALL)
    write(store, last, store.frames_of(SMALL) - 1, SMALL, 5)
    assert holds(store, last, store.frames_of(SMALL) - 1, SMALL, 5)
    with pytest.raises(AssertionError):
        write(store, last, store.frames_of(SMALL), SMALL, 5)
    store.close()
