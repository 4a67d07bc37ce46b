"""NVMe devices: who may be made anew, headers, the order of durable steps, sets of devices, and clients' maps."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import InvalidRequest, NodeBusy
from kvstore.model.replica import Address, FrameClass, position_of, turns_of
from kvstore.shm.folder import NodeFolder
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.device import NvmeDevice
from kvstore.tier.nvme.devices import NvmeDevices
from kvstore.tier.nvme.disk import FileDisk, aligned_buffer
from kvstore.tier.nvme.map import NvmeMap
from kvstore.tier.nvme.table import Superblock
from tests.helpers.nvme.faulty_disk import FaultyDisk, PowerCut
from tests.helpers.nvme.memory_disk import MemoryDisk
from tests.helpers.nvme.pages import (
    CLASS,
    CLASSES,
    EXTENT_BYTES,
    WIDE,
    device_bytes,
    find,
    header,
    identity,
    is_page,
    lean_rows,
    parent,
    payload,
    write,
)

MIB = 1 << 20


def open_device(disk: Any, owner: str = "n", format: bool = False, extent_bytes: int = EXTENT_BYTES) -> NvmeDevice:
    return NvmeDevice.open(disk, owner, extent_bytes, format)


# --- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [1, 4096, 4097, 65536, 262144, 2 << 20, 8 << 20, 63 << 20])
@pytest.mark.parametrize("extent_bytes", [4096, 1 * MIB, 16 * MIB, 64 * MIB])
def test_an_extent_holds_as_many_frames_as_fit(page_bytes: int, extent_bytes: int) -> None:
    shape = FrameClass(page_bytes, 64, 32)
    frames = geometry.frames_in(extent_bytes, shape)

    def needs(count: int) -> int:
        return geometry.directory_bytes(shape, count) + count * geometry.stride_bytes(shape)

    assert frames == 0 or needs(frames) <= extent_bytes
    assert needs(frames + 1) > extent_bytes
    assert (
        geometry.header_bytes(shape) % 4096
        == geometry.stride_bytes(shape) % 4096
        == geometry.directory_bytes(shape, frames) % 4096
        == 0
    )
    assert shape.lean.row_bytes == 96


# --- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", CLASSES)
def test_a_header_says_what_was_packed(shape: FrameClass) -> None:
    address = Address(7, 3, 5 << 32 | 9)
    found = frame_header.unpack(header(shape, 99, address, seed=300), shape, 99, 7, 3, 5 << 32 | 9)
    assert not isinstance(found, str)
    assert (found.address, found.parent) == (address, parent(300))
    assert found.key + found.root + found.extra + found.tokens.tobytes() == identity(shape, 300).tobytes()
    assert found.info & 0xFFFFFFFF == shape.page_bytes
    assert (position_of(found.info), turns_of(found.info)) == (300, 0)
    page = payload(shape, 300).copy()
    assert frame_header.is_payload_sound(page, shape, found.payload_sum)
    page[shape.page_bytes - 1] ^= 1
    assert not frame_header.is_payload_sound(page, shape, found.payload_sum)


@pytest.mark.parametrize("shape", CLASSES)
def test_every_flipped_byte_of_a_header_is_noticed(shape: FrameClass) -> None:
    address = Address(7, 3, 9)
    sound = header(shape, 99, address, seed=1)
    expected = np.array([9], np.uint64), identity(shape, 1)[None]
    for at in range(0, frame_header._used_bytes(shape), 1 if shape is CLASS else 7):
        damaged = sound.copy()
        damaged[at] ^= 0x40
        reason = frame_header.unpack(damaged, shape, 99, 7, 3, 9)
        assert reason == ("version" if 8 <= at < 12 else "header")
        assert frame_header.faults(damaged[None], shape, 99, 7, 3, *expected) == [reason]
    assert (sound[frame_header._used_bytes(shape) :] == 0).all()


def test_a_sound_header_of_something_else_has_a_reason() -> None:
    sound = header(CLASS, 99, Address(7, 3, 9), seed=1)
    unpack = frame_header.unpack
    assert unpack(sound, CLASS, 98, 7, 3, 9) == "foreign"
    assert unpack(sound, CLASS, 99, 8, 3, 9) == "swapped"
    assert unpack(sound, CLASS, 99, 7, 4, 9) == "swapped"
    assert unpack(sound, CLASS, 99, 7, 3, 8) == "swapped"
    assert not isinstance(unpack(sound, CLASS, 99, 7, 3), str)
    other = FrameClass(CLASS.page_bytes, CLASS.page_tokens - 1, CLASS.layers + 1)
    assert unpack(sound, other, 99, 7, 3, 9) == "header"
    assert unpack(sound, FrameClass(100, 5, 4), 99, 7, 3, 9) == "header"  # more payload than such a page has
    assert unpack(np.zeros(4096, np.uint8), CLASS, 99, 7, 3) == "header"
    newer = sound.copy()
    newer[8] = frame_header.VERSION + 1
    assert unpack(newer, CLASS, 99, 7, 3, 9) == "version"


def test_a_run_of_headers_is_checked_at_once() -> None:
    count = 9
    heads = np.stack([header(CLASS, 99, Address(7, 20 + i, 100 + i), seed=i) for i in range(count)])
    generations = np.arange(100, 100 + count, dtype=np.uint64)
    identities = np.stack([identity(CLASS, i) for i in range(count)])
    assert frame_header.faults(heads, CLASS, 99, 7, 20, generations, identities) == [""] * count
    assert frame_header.payload_sums_in(heads) == [
        frame_header.payload_sum(payload(CLASS, i), CLASS) for i in range(count)
    ]
    heads[1, 300:] = 0x55  # beyond what is used: harmless
    heads[2, 100] ^= 1
    heads[3] = header(CLASS, 98, Address(7, 23, 103), seed=3)
    heads[4] = header(CLASS, 99, Address(7, 25, 104), seed=4)
    heads[5] = header(CLASS, 99, Address(7, 25, 104), seed=5)
    heads[6, 8] = 9
    identities[7, 48] ^= 1  # another token
    assert frame_header.faults(heads, CLASS, 99, 7, 20, generations, identities) == [
        *("", "", "header", "foreign", "swapped", "swapped", "version", "swapped", "")
    ]
    spread = aligned_buffer(count * geometry.stride_bytes(CLASS)).reshape(count, -1)
    spread[:, :4096] = heads
    strided = spread[:, :4096]
    assert frame_header.faults(strided, CLASS, 99, 7, 20, generations, identities)[2:4] == ["header", "foreign"]


# --- whose it is ----------------------------------------------------------------------------------------------------


def foreign(disk: MemoryDisk, what: str) -> None:
    """Put something on the disk that is not ours to take."""
    if what == "user data":
        disk.data[:] = np.random.default_rng(1).integers(1, 256, len(disk.data), np.uint8)
    elif what == "a signature at 64 KiB":
        disk.data[65536 + 64] = 1
    elif what == "something at the end":
        disk.data[-1] = 1
    else:
        open_device(disk).close()
        if what == "front overwritten":
            disk.data[:4096] = 7
        elif what == "front wiped":
            disk.data[:4096] = 0
        elif what == "end overwritten":
            disk.data[-4096:] = 7
        elif what == "end wiped":
            disk.data[-4096:] = 0
        elif what == "a file system made over it":
            disk.data[1024:2048] = 7
        elif what == "another's end":
            other = MemoryDisk(disk.size_bytes)
            open_device(other).close()
            disk.data[-4096:] = other.data[-4096:]
        elif what == "both tables":
            disk.data[4096 : 4096 + 8] = 7
            disk.data[8192 : 8192 + 8] = 7
        else:
            assert what == "next version"
            for start in (0, disk.size_bytes - 4096):
                block = Superblock.unpacked(disk.data[start : start + 4096])
                assert block is not None
                newer = Superblock(1, "n", block.size_bytes, EXTENT_BYTES, 4, 4096, version=9)
                disk.data[start : start + 4096] = newer.packed()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("user data", "must be blank or a kvstore target"),
        ("a signature at 64 KiB", "must be blank or a kvstore target"),
        ("something at the end", "must be blank or a kvstore target"),
        ("front overwritten", "is a kvstore target at one end only"),
        ("front wiped", "is a kvstore target at one end only"),
        ("end overwritten", "is a kvstore target at one end only"),
        ("end wiped", "is a kvstore target at one end only"),
        ("a file system made over it", "is a kvstore target at one end only"),
        ("another's end", "is a kvstore target at one end only"),
        ("both tables", "both copies of its extent table are damaged"),
        ("next version", "must have format 4 .got 9."),
    ],
)
def test_what_is_not_ours_is_left_alone(what: str, reason: str) -> None:
    disk = MemoryDisk(device_bytes(4))
    foreign(disk, what)
    before = disk.data.copy()
    with pytest.raises(InvalidRequest, match=f"{reason}.*; --format reformats it") as caught:
        open_device(disk)
    assert caught.value.field == "nvme" and "memory" in caught.value.reason
    assert (disk.data == before).all()
    assert open_device(disk, format=True).starts == 1


def test_another_owner_size_or_extent_is_left_alone() -> None:
    disk = MemoryDisk(device_bytes(4))
    open_device(disk, "a").close()
    before = disk.data.copy()
    with pytest.raises(InvalidRequest, match="belongs to node 'a'.*--format"):
        open_device(disk, "b")
    with pytest.raises(
        InvalidRequest, match=f"extents must have {EXTENT_BYTES} bytes, .*got {2 * EXTENT_BYTES}.*--format"
    ):
        open_device(disk, "a", extent_bytes=2 * EXTENT_BYTES)
    longer = MemoryDisk(device_bytes(5))
    longer.data[: disk.size_bytes - 4096] = disk.data[:-4096]
    longer.data[-4096:] = disk.data[-4096:]
    with pytest.raises(InvalidRequest, match=f"must have {disk.size_bytes} bytes, .*got {longer.size_bytes}"):
        open_device(longer, "a")
    assert (disk.data == before).all()
    embedded = MemoryDisk(device_bytes(4))
    open_device(embedded, "").close()
    with pytest.raises(InvalidRequest, match="belongs to an embedded store"):
        open_device(embedded, "a")
    assert open_device(embedded, "").starts == 2


@pytest.mark.parametrize("at", [0, 9, 30, 300, 505, 4095])
@pytest.mark.parametrize("end", [False, True])
def test_a_damaged_superblock_is_repaired_from_the_other(at: int, end: bool, caplog: pytest.LogCaptureFixture) -> None:
    disk = MemoryDisk(device_bytes(4))
    device = open_device(disk)
    device.carve(1, 5, CLASS)
    device.close()
    disk.data[at - 4096 if end else at] ^= 0x10
    with caplog.at_level(logging.WARNING):
        again = open_device(disk)
    assert again.incarnation == device.incarnation and again.extents[1].number == 5
    assert (disk.data[:4096] == disk.data[-4096:]).all()
    assert "was damaged and is repaired" in caplog.text


@pytest.mark.parametrize("start", ["blank", "ours", "user data"])
def test_power_lost_at_any_step_of_making_one(start: str) -> None:
    """Afterwards it is as before, or is made anew without asking again, or is done."""
    for seed in range(15):
        for cut_at in range(1, 12):
            disk = FaultyDisk(device_bytes(4), seed)
            if start == "ours":
                open_device(disk).close()
            elif start == "user data":
                foreign(disk, "user data")
            disk.sync()
            before, disk.steps, disk.cut_at = disk.data.copy(), 0, cut_at
            try:
                open_device(disk, format=start != "blank")
                finished = True
            except PowerCut:
                finished = False
            after = disk.power_loss()
            try:
                device = open_device(after)
            except InvalidRequest:
                # Blocks that tore over something else: the operator is asked again, nothing but one block is gone.
                assert start == "user data" and not finished
                assert (after.data[4096:-4096] == before[4096:-4096]).all()
                continue
            assert device.extents == {} and device.positions == 4
            assert device.starts >= 1 and (not finished or device.starts == 2)


# --- extents and checkpoints ----------------------------------------------------------------------------------------


def checkpoint(device: NvmeDevice, position: int, sealed: dict[int, tuple[int, int]]) -> set[int]:
    extent, version = device.extents[position], device.version(position)
    device.write_directory(position, lean_rows(extent.frame_class, extent.frames, sealed))
    return device.mark_clean({position: version})


def test_only_what_nobody_touched_becomes_clean() -> None:
    device = open_device(MemoryDisk(device_bytes(4)))
    for position in range(4):
        device.carve(position, 10 + position, CLASS)
    rows = lean_rows(CLASS, geometry.frames_in(EXTENT_BYTES, CLASS), {})
    device.open_for_writing([0])
    versions = {position: device.version(position) for position in range(4)}
    device.close_for_writing([0])  # a page was sealed after the snapshot
    device.open_for_writing([1])  # and here one is on its way
    for position in range(3):
        device.write_directory(position, rows)
    assert device.mark_clean(versions) == {2}  # 3 has no directory
    device.close_for_writing([1])
    assert device.mark_clean({1: device.version(1)}) == set()  # its directory is older than that
    device.write_directory(1, rows)
    assert device.mark_clean({1: device.version(1)}) == {1}
    assert device.mark_clean({1: device.version(1)}) == {1}
    assert sorted(p for p, extent in device.extents.items() if extent.clean) == [1, 2]
    device.drop(2)
    assert device.mark_clean({2: device.version(2)}) == set()
    before = device.version(3)
    device.write_directory(3, rows)
    device.open_for_writing([3])
    assert device.mark_clean({3: before}) == set()
    device.close_for_writing([3])
    assert device.mark_clean({3: before}) == set()
    device.open_for_writing([3])
    device.write_directory(3, rows)
    assert device.mark_clean({3: device.version(3)}) == set(), "who is writing is not done"


@pytest.mark.parametrize("slot", [0, 1])
def test_the_loss_of_a_table_brings_no_number_back(slot: int) -> None:
    disk = MemoryDisk(device_bytes(2))
    device = open_device(disk)
    disk.data[device.superblock.slot(slot) + 30] ^= 1
    again = open_device(disk)
    assert again.starts > device.starts
    disk.data[device.superblock.slot(1 - slot) + 30] ^= 1
    assert open_device(disk).starts > again.starts


def test_writing_needs_an_open_extent_of_that_class() -> None:
    device = open_device(MemoryDisk(device_bytes(4)))
    device.carve(0, 10, CLASS)
    page, head = payload(CLASS, 1), aligned_buffer(4096)
    with pytest.raises(AssertionError, match="not open"):
        device.write_page(0, 0, CLASS, head, page)
    device.open_for_writing([0, 0])
    device.write_page(0, 0, CLASS, head, page)
    with pytest.raises(AssertionError):
        device.write_page(0, 0, WIDE, aligned_buffer(8192), payload(WIDE, 1))
    with pytest.raises(AssertionError):
        device.write_page(0, 0, CLASS, head, page[:8192])
    with pytest.raises(AssertionError):
        device.drop(0)
    with pytest.raises(AssertionError):
        device.open_for_writing([1])
    device.close_for_writing([0])
    with pytest.raises(AssertionError):
        device.close_for_writing([0])


def test_runs_of_frames_in_one_request() -> None:
    disk = MemoryDisk(device_bytes(2))
    device = open_device(disk)
    device.carve(1, 10, CLASS)
    device.open_for_writing([1])
    count, incarnation = 6, device.incarnation
    frames = aligned_buffer(count * geometry.stride_bytes(CLASS)).reshape(count, -1)
    for i in range(count):
        frames[i, :4096] = header(CLASS, incarnation, Address(10, 4 + i, 50 + i), seed=i)
        frames[i, 4096:] = payload(CLASS, i)
    device.write_run(1, 4, CLASS, frames)
    assert all(is_page(*find(device, 1, 4 + i, 50 + i), CLASS, i) for i in range(count))
    found = aligned_buffer(frames.nbytes).reshape(count, -1)
    device.read_run(1, 4, CLASS, found)
    assert (found == frames).all()
    one = aligned_buffer(4096)
    device.read_header(1, 5, CLASS, one)
    assert (one == frames[1, :4096]).all()
    with pytest.raises(AssertionError):
        device.read_run(1, device.extents[1].frames - 2, CLASS, found)
    with pytest.raises(AssertionError):
        device.read_run(1, 4, CLASS, found.reshape(-1)[4096:])


def test_writers_in_many_threads_and_checkpoints_between() -> None:
    disk = MemoryDisk(device_bytes(4))
    device = open_device(disk)
    for position in range(4):
        device.carve(position, 10 + position, CLASS)
    failures: list[BaseException] = []

    def writer(position: int) -> None:
        try:
            for generation in range(1, 30):
                device.open_for_writing([position, 3])
                write(device, position, generation % 5, generation, seed=position)
                device.sync()
                device.close_for_writing([position, 3])
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=writer, args=(position,)) for position in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for position in range(4):
            checkpoint(device, position, {})
    for thread in threads:
        thread.join()
    assert not failures
    assert all(checkpoint(device, position, {}) for position in range(4))
    assert all(extent.clean for extent in open_device(disk).extents.values())


# --- failures of the disk -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["fail_writes", "fail_sync"])
def test_a_failing_disk_changes_nothing(kind: str) -> None:
    disk = FaultyDisk(device_bytes(4), 1)
    device = open_device(disk)
    device.carve(0, 10, CLASS)
    checkpoint(device, 0, {})
    device.carve(1, 11, CLASS)
    before = dict(device.extents)
    setattr(disk, kind, errno.EIO)
    for verb in (
        lambda: device.carve(2, 12, CLASS),
        lambda: device.drop(0),
        lambda: device.open_for_writing([0, 1]),
        lambda: device.raise_starts(99),
    ):
        with pytest.raises(OSError) as caught:
            verb()
        assert caught.value.errno == errno.EIO and caught.value.filename == disk.path
    assert device.extents == before and device.starts == 1
    with pytest.raises(AssertionError, match="not open"):
        write(device, 0, 0, 1, 1)
    device.add_written(1, 1)
    device.close()  # says so in the log


def test_after_a_failed_sync_nothing_is_called_durable() -> None:
    """The kernel tells of lost writes once; whoever syncs next must not believe that his are there."""
    disk = FaultyDisk(device_bytes(4), 1)
    device = open_device(disk)
    device.carve(0, 10, CLASS)
    device.open_for_writing([0])
    write(device, 0, 0, 1, 1)
    disk.fail_sync = errno.EIO
    with pytest.raises(OSError):
        device.carve(1, 11, CLASS)
    disk.fail_sync = None
    with pytest.raises(OSError, match="a sync failed before"):
        device.sync()


# --- several devices ------------------------------------------------------------------------------------------------


def memory_disks(*positions: int) -> list[MemoryDisk]:
    return [MemoryDisk(device_bytes(n), f"disk {at}") for at, n in enumerate(positions)]


def test_a_set_is_one_row() -> None:
    disks = memory_disks(4, 2)
    devices = NvmeDevices.open(disks, "n", EXTENT_BYTES)
    assert devices.positions == 6 and devices.neighbours(1) == [1, 4]
    for position in range(6):
        devices.carve(position, 10 + position, CLASS)
    assert {p: e.number for p, e in devices.extents.items()} == {p: 10 + p for p in range(6)}
    assert all(extent.position == position for position, extent in devices.extents.items())
    assert devices.place(4) == (devices.devices[1], 1)
    assert devices.header_incarnation(4) == devices.devices[1].incarnation != devices.incarnation
    devices.open_for_writing(range(6))
    devices.close_for_writing(range(6))
    rows = lean_rows(CLASS, geometry.frames_in(EXTENT_BYTES, CLASS), {})
    for position in range(6):
        devices.write_directory(position, rows)
    assert devices.mark_clean({p: devices.version(p) for p in (0, 1, 5)}) == {0, 1, 5}
    assert devices.directory(1) is not None and devices.directory(2) is None
    devices.add_written(5, 10)
    devices.close()
    again = NvmeDevices.open(disks, "n", EXTENT_BYTES)
    assert again.written_today(5) == 10 and again.incarnation == devices.incarnation
    again.close()
    other = NvmeDevices.open(disks[::-1], "n", EXTENT_BYTES)
    assert other.incarnation != devices.incarnation, "positions are others now"


# --- what clients see -----------------------------------------------------------------------------------------------


def test_a_device_may_be_away_and_come_back() -> None:
    disks = memory_disks(3, 3)
    both = NvmeDevices.open(disks, "n", EXTENT_BYTES)
    for position in range(6):
        both.carve(position, 10 + position, CLASS)
    both.open_for_writing([0, 1])
    for position in (0, 1):
        device, local = both.place(position)
        write(device, local, 2, 1 << 32, seed=position)
    both.sync()
    both.close()
    for _ in range(3):
        one = NvmeDevices.open(disks[:1], "n", EXTENT_BYTES)
        assert one.incarnation != both.incarnation
        assert sorted(extent.number for extent in one.extents.values()) == [10, 12, 14]
        device, local = one.place(0)
        assert is_page(*find(device, local, 2), CLASS, 0)
        one.close()
    one = NvmeDevices.open(disks[:1], "n", EXTENT_BYTES)
    one.drop(1)
    one.carve(1, 11, CLASS)  # the node has forgotten that 11 was used
    one.close()
    back = NvmeDevices.open(disks, "n", EXTENT_BYTES)
    assert back.starts == 6 and {device.starts for device in back.devices} == {6}
    numbers = {extent.number: back.place(extent.position)[0] for extent in back.extents.values()}
    assert sorted(numbers) == [10, 11, 13, 14, 15]
    assert numbers[11] is back.devices[0] and numbers[13] is back.devices[1]
    assert NvmeDevices.open(disks, "n", EXTENT_BYTES).starts == 7


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    folder = NodeFolder(tmp_path, "n")
    folder.create()
    return folder


def file_devices(tmp_path: Path, *positions: int, format: bool = False) -> NvmeDevices:
    disks = [FileDisk.open(tmp_path / f"nvme-{at}", device_bytes(n), create=True) for at, n in enumerate(positions)]
    return NvmeDevices.open(disks, "n", EXTENT_BYTES, format)


def read_one(map_: NvmeMap, position: int, number: int, frame: int, generation: int) -> Any:
    head, page = aligned_buffer(4096), aligned_buffer(CLASS.frame_bytes)
    place = map_.place(position, CLASS, frame)
    if place is None:
        return None
    place.disk.read(place.offset, [head, page])
    return frame_header.unpack(head, CLASS, place.incarnation, number, frame, generation), page


def test_clients_read_what_the_owner_wrote(tmp_path: Path, folder: NodeFolder) -> None:
    assert NvmeMap.open(folder) is None
    devices = file_devices(tmp_path, 3, 1)
    for position in range(4):
        devices.carve(position, 10 + position, CLASS)
    devices.open_for_writing(range(4))
    for position in range(4):
        device, local = devices.place(position)
        write(device, local, 5, 77, seed=position)
    devices.write_map(folder)
    map_ = NvmeMap.open(folder)
    assert map_ is not None
    assert (map_.incarnation, map_.positions) == (devices.incarnation, 4)
    for position in range(4):
        assert is_page(*read_one(map_, position, 10 + position, 5, 77), CLASS, position)
        place = map_.place(position, CLASS, 5)
        assert place is not None and place.incarnation == devices.header_incarnation(position)
        head = aligned_buffer(4096)
        place.disk.read(place.offset, [head])
        assert frame_header.unpack(head, CLASS, place.incarnation, 10 + position, 5, 78) == "swapped"
    assert map_.place(4, CLASS, 0) is None
    with pytest.raises(AssertionError):
        map_.place(0, CLASS, geometry.frames_in(EXTENT_BYTES, CLASS))
    with pytest.raises(NodeBusy):
        FileDisk.open(tmp_path / "nvme-0", device_bytes(3))
    map_.close()
    assert map_.place(0, CLASS, 0) is None
    devices.close()


@pytest.mark.parametrize("damage", ["absent", "cut", "empty", "no JSON", "version", "flipped"])
def test_a_doubtful_map_is_none(tmp_path: Path, folder: NodeFolder, damage: str) -> None:
    devices = file_devices(tmp_path, 1)
    devices.write_map(folder)
    text = folder.nvme.read_bytes()
    if damage == "absent":
        folder.nvme.unlink()
    else:
        folder.nvme.write_bytes(
            {
                "cut": text[:-3],
                "empty": b"",
                "no JSON": b"\xff\x00",
                "version": text.replace(b'"version": 1', b'"version": 2'),
                "flipped": text.replace(str(EXTENT_BYTES).encode(), str(EXTENT_BYTES + 1).encode()),
            }[damage]
        )
    assert NvmeMap.open(folder) is None
    devices.close()


@pytest.mark.parametrize("damage", ["absent", "made anew", "not allowed"])
def test_a_device_that_is_not_the_one_meant_has_no_place(tmp_path: Path, folder: NodeFolder, damage: str) -> None:
    devices = file_devices(tmp_path, 2, 2)
    devices.write_map(folder)
    devices.close()
    path = tmp_path / "nvme-1"
    if damage == "absent":
        path.unlink()
    elif damage == "made anew":
        open_device(FileDisk.open(path, device_bytes(2)), format=True).close()
    elif os.geteuid() == 0:
        pytest.skip("root may read everything")
    else:
        path.chmod(0)
    map_ = NvmeMap.open(folder)
    assert map_ is not None and map_.positions == 4
    assert [map_.place(position, CLASS, 0) is None for position in range(4)] == [False, True, False, True]
    assert read_one(map_, 1, 10, 0, 1) is None


def test_pages_made_before_the_device_was_made_anew_are_foreign(tmp_path: Path) -> None:
    devices = file_devices(tmp_path, 1)
    devices.carve(0, 10, CLASS)
    devices.open_for_writing([0])
    write(devices.devices[0], 0, 3, 7, seed=1)
    devices.close()
    anew = file_devices(tmp_path, 1, format=True)
    anew.carve(0, 10, CLASS)
    assert find(anew.devices[0], 0, 3)[0] == "foreign"
    anew.drop(0)
    anew.close()
