"""NVMe under seeded loss of power, failing calls and damage: what was promised holds, and nothing wrong is believed."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvstore.model.replica import FrameClass
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.device import NvmeDevice
from kvstore.tier.nvme.disk import FileDisk, aligned_buffer
from kvstore.tier.nvme.frame_header import REASONS
from kvstore.tier.nvme.table import frame_offset
from tests.helpers.nvme.faulty_disk import FaultyDisk, PowerCut
from tests.helpers.nvme.memory_disk import MemoryDisk
from tests.helpers.nvme.pages import (
    CLASS,
    CLASSES,
    EXTENT_BYTES,
    claimed,
    device_bytes,
    find,
    identity,
    is_page,
    lean_rows,
    write,
)

POSITIONS = 4
Place = tuple[int, int]  # extent number, frame


@dataclass
class Model:
    """What a node knows of its device, and what it may rely on after loss of power."""

    numbers: int = 0
    generations: int = 0
    seeds: int = 0
    shapes: dict[int, FrameClass] = field(default_factory=dict)  # extent number -> class
    sealed: dict[Place, tuple[int, int]] = field(default_factory=dict)  # synced and said so: (generation, seed)
    touched: dict[Place, set[tuple[int, int]]] = field(default_factory=dict)  # every page ever written there
    clean: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)  # number -> claims of its directory
    doubtful: set[int] = field(default_factory=set)  # their carve or drop was under way: there or not


def play(device: NvmeDevice, model: Model, chance: random.Random, steps: int) -> None:
    """Random work, in the order the owner keeps. ``PowerCut`` or OSError may end it anywhere."""
    for _ in range(steps):
        free = [p for p in range(POSITIONS) if p not in device.extents]
        carved = sorted(device.extents)
        verb = chance.choice(["carve", "drop", "save", "save", "save", "save", "checkpoint", "free", "count"])
        if verb == "carve" and free:
            model.numbers += 1
            shape = chance.choice(CLASSES)
            model.shapes[model.numbers] = shape
            model.doubtful.add(model.numbers)
            device.carve(chance.choice(free), model.numbers, shape)
            model.doubtful.discard(model.numbers)
        elif verb == "drop" and carved and chance.random() < 0.5:
            drop(device, model, chance.choice(carved))
        elif verb == "save" and carved:
            save(device, model, chance, chance.sample(carved, chance.randint(1, min(2, len(carved)))))
        elif verb == "checkpoint" and carved:
            checkpoint(device, model, chance.sample(carved, chance.randint(1, len(carved))))
        elif verb == "free" and model.sealed:
            # Evicted: the record says FREE; on the disk the page may well still be found.
            del model.sealed[chance.choice(sorted(model.sealed))]
        else:
            device.add_written(chance.randint(1, 2), 100)


def drop(device: NvmeDevice, model: Model, position: int) -> None:
    number = device.extents[position].number
    model.doubtful.add(number)
    model.sealed = {place: page for place, page in model.sealed.items() if place[0] != number}
    device.drop(position)
    model.doubtful.discard(number)
    del model.shapes[number]
    model.clean.pop(number, None)


def save(device: NvmeDevice, model: Model, chance: random.Random, positions: list[int]) -> None:
    for position in positions:
        model.clean.pop(device.extents[position].number, None)  # from here on nobody may rely on it
    device.open_for_writing(positions)
    written = {}
    for position in positions:
        extent = device.extents[position]
        for frame in chance.sample(range(extent.frames), chance.randint(1, 3)):
            place = extent.number, frame
            model.generations += 1
            model.seeds += 1
            model.sealed.pop(place, None)  # the frame was free before
            page = (device.starts << 32) + model.generations, model.seeds
            model.touched.setdefault(place, set()).add(page)
            write(device, position, frame, *page)
            written[place] = page
    if chance.random() < 0.9:  # else it is given up
        device.sync()
        model.sealed.update(written)
    device.close_for_writing(positions)


def checkpoint(device: NvmeDevice, model: Model, positions: list[int]) -> None:
    versions, claims = {}, {}
    for position in positions:
        extent = device.extents[position]
        versions[position] = device.version(position)
        pages = {frame: page for (number, frame), page in model.sealed.items() if number == extent.number}
        model.clean.pop(extent.number, None)
        claims[extent.number] = pages
        device.write_directory(position, lean_rows(extent.frame_class, extent.frames, pages))
    for position in device.mark_clean(versions):
        number = device.extents[position].number
        model.clean[number] = claims[number]


def check(device: NvmeDevice, model: Model) -> None:
    """What the next start finds is what the model may rely on, and nothing else."""
    found = {extent.number: (position, extent) for position, extent in device.extents.items()}
    assert set(model.shapes) - model.doubtful <= found.keys() <= set(model.shapes) | model.doubtful
    for (number, frame), page in model.sealed.items():
        position, extent = found[number]
        assert extent.frame_class == model.shapes[number]
        assert is_page(*find(device, position, frame, page[0]), extent.frame_class, page[1])
    for number, (position, extent) in found.items():
        rows = device.directory(position)
        if number in model.clean:
            assert extent.clean and rows is not None
            keys = {f: (g, identity(CLASS, s)[:16].tobytes()) for f, (g, s) in model.clean[number].items()}
            assert claimed(rows) == keys
        if rows is not None:  # whatever a believed directory claims is there
            for frame, (generation, key) in claimed(rows).items():
                header, page = find(device, position, frame, generation)
                assert not isinstance(header, str) and header.key == key
        for frame in range(extent.frames):
            header, page = find(device, position, frame)
            if isinstance(header, str):
                assert header in REASONS
                continue
            seeds = dict(model.touched.get((number, frame), ()))  # generation -> seed
            assert is_page(header, page, extent.frame_class, seeds[header.address.generation])


@pytest.mark.parametrize("batch", range(10))
def test_power_is_lost_between_steps(batch: int) -> None:
    for seed in range(batch * 25, batch * 25 + 25):
        chance, model = random.Random(seed), Model()
        disk = FaultyDisk(device_bytes(POSITIONS), seed)
        for _ in range(4):
            device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
            check(device, model)
            play(device, model, chance, chance.randint(3, 20))
            disk = disk.power_loss()
            model.doubtful.clear()
        check(NvmeDevice.open(disk, "n", EXTENT_BYTES), model)


@pytest.mark.parametrize("batch", range(10))
def test_power_is_lost_in_the_middle_of_a_step(batch: int) -> None:
    for seed in range(batch * 25, batch * 25 + 25):
        chance, model = random.Random(1000 + seed), Model()
        disk = FaultyDisk(device_bytes(POSITIONS), seed)
        for _ in range(4):
            starts = 0
            try:
                disk.cut_at = disk.steps + chance.randint(1, 60)
                device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
                starts = device.starts
                play(device, model, chance, 30)
            except PowerCut:
                pass
            disk = disk.power_loss()
            device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
            assert device.starts > starts, "numbers would be used twice"
            check(device, model)
            settle(device, model)
            disk = disk.power_loss()


def settle(device: NvmeDevice, model: Model) -> None:
    """What was under way is now known to be there or not; extents the node knows nothing of are dropped."""
    there = {extent.number for extent in device.extents.values()}
    model.shapes = {number: shape for number, shape in model.shapes.items() if number in there}
    model.clean = {number: claims for number, claims in model.clean.items() if number in there}
    model.doubtful.clear()


@pytest.mark.parametrize("kind", ["fail_writes", "fail_sync", "fail_reads"])
def test_calls_that_fail_are_reported_and_nothing_else_changes(kind: str) -> None:
    for seed in range(60):
        chance, model = random.Random(seed), Model()
        disk = FaultyDisk(device_bytes(POSITIONS), seed)
        device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
        setattr(disk, kind, chance.choice([errno.EIO, errno.ENOSPC]))
        disk.fail_after = chance.randint(0, 30)
        try:
            play(device, model, chance, 40)
            if kind == "fail_reads":
                check(device, model)
        except OSError as error:
            assert error.filename == disk.path
        disk.fail_reads = disk.fail_writes = disk.fail_sync = None
        disk = disk.power_loss()
        check(NvmeDevice.open(disk, "n", EXTENT_BYTES), model)


def test_who_wrote_before_a_sync_that_failed_is_told_by_his_own() -> None:
    """Two write side by side. The first one's sync was to make the second one's pages durable as well."""
    disk = FaultyDisk(device_bytes(POSITIONS), seed=1)
    device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
    device.carve(0, 1, CLASSES[0])
    device.open_for_writing([0])
    blank = aligned_buffer(geometry.stride_bytes(CLASSES[0]))
    for frame in range(2):
        device.write_run(0, frame, CLASSES[0], blank)
    disk.fail_sync = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError):
            device.sync()
        disk.fail_sync = None


# --- damage ---------------------------------------------------------------------------------------------------------


def full_device(disk: FaultyDisk | MemoryDisk | FileDisk, chance: random.Random) -> tuple[NvmeDevice, Model]:
    """A device with pages in all positions, half of its extents clean."""
    device, model = NvmeDevice.open(disk, "n", EXTENT_BYTES), Model()
    for position in range(POSITIONS):
        model.numbers += 1
        model.shapes[model.numbers] = CLASSES[position % 2]
        device.carve(position, model.numbers, CLASSES[position % 2])
        for _ in range(4):
            save(device, model, chance, [position])
    checkpoint(device, model, [0, 1])
    return device, model


def sound_pages(device: NvmeDevice, model: Model) -> tuple[int, list[str]]:
    """How many of the sealed pages are found, and why the others are not. None is ever wrong."""
    numbers = {extent.number: position for position, extent in device.extents.items()}
    sound, reasons = 0, []
    for (number, frame), (generation, seed) in model.sealed.items():
        if number not in numbers:
            reasons.append("extent")
            continue
        header, page = find(device, numbers[number], frame, generation)
        if isinstance(header, str):
            reasons.append(header)
        else:
            assert is_page(header, page, device.extents[numbers[number]].frame_class, seed)
            sound += 1
    return sound, reasons


@pytest.mark.parametrize("batch", range(4))
def test_flipped_bytes_are_never_a_wrong_page(batch: int, tmp_path: Path) -> None:
    """One byte anywhere costs one page, one directory or nothing, and it is said what."""
    disk = MemoryDisk(device_bytes(POSITIONS))
    device, model = full_device(disk, random.Random(batch))
    pages, image = len(model.sealed), disk.data.copy()
    chance = random.Random(100 + batch)
    directories_before = {position: device.directory(position) for position in (0, 1)}
    heads = [frame_offset(device.superblock, p, e.frame_class, f) for p, e in device.extents.items() for f in range(3)]
    directories = [device.superblock.data_start + p * EXTENT_BYTES for p in (0, 1)]
    kinds = {
        "superblock": lambda: chance.choice([0, disk.size_bytes - 4096]) + chance.randrange(4096),
        "tables": lambda: 4096 + chance.randrange(2 * device.superblock.table_bytes),
        "directory": lambda: chance.choice(directories) + chance.randrange(64 + 96 * 10),
        "header": lambda: chance.choice(heads) + chance.randrange(200),
        "anywhere": lambda: chance.randrange(disk.size_bytes),
    }
    for turn in range(100):
        kind = list(kinds)[turn % len(kinds)]
        disk.data[:] = image
        disk.data[kinds[kind]()] ^= 1 << chance.randrange(8)
        again = NvmeDevice.open(disk, "n", EXTENT_BYTES)
        assert again.starts > device.starts
        sound, reasons = sound_pages(again, model)
        assert sound >= pages - 1 and sound + len(reasons) == pages
        assert all(reason in REASONS for reason in reasons)
        assert kind not in ("superblock", "tables", "directory") or sound == pages
        believed = [position for position in again.extents if again.directory(position) is not None]
        assert len(believed) >= 1 or kind == "tables"
        for position in believed:
            assert np.array_equal(again.directory(position), directories_before[position])  # type: ignore[arg-type]


def test_swapped_frames_and_those_of_other_extents_are_not_believed() -> None:
    disk = MemoryDisk(device_bytes(POSITIONS))
    device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
    device.carve(0, 1, CLASS)
    device.carve(1, 2, CLASS)
    device.open_for_writing([0, 1])
    for position in (0, 1):
        for frame in range(4):
            write(device, position, frame, 1 << 32 | frame, seed=10 * position + frame)
    stride = geometry.stride_bytes(CLASS)
    at = [frame_offset(device.superblock, p, CLASS, f) for p in (0, 1) for f in range(4)]
    first, second = disk.data[at[0] : at[0] + stride].copy(), disk.data[at[1] : at[1] + stride].copy()
    disk.data[at[0] : at[0] + stride], disk.data[at[1] : at[1] + stride] = second, first
    disk.data[at[6] : at[6] + stride] = disk.data[at[2] : at[2] + stride]  # the same frame of another extent
    disk.data[at[3] + 4096 : at[3] + stride] = disk.data[at[7] + 4096 : at[7] + stride]  # another page's payload
    found = [find(device, p, f, 1 << 32 | f)[0] for p in (0, 1) for f in range(4)]
    reasons = [reason if isinstance(reason, str) else "" for reason in found]
    assert reasons == ["swapped", "swapped", "", "payload", "", "", "swapped", ""]
    assert [find(device, p, f)[0] for p, f in ((0, 0), (0, 1), (1, 2))] == ["swapped"] * 3, "nor by a scan"


def test_pages_of_a_dropped_extent_do_not_come_back() -> None:
    disk = MemoryDisk(device_bytes(POSITIONS))
    device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
    device.carve(0, 1, CLASS)
    device.open_for_writing([0])
    write(device, 0, 3, 1 << 32, seed=1)
    device.close_for_writing([0])
    device.drop(0)
    device.carve(0, 2, CLASS)
    assert find(device, 0, 3)[0] == "swapped"


def test_an_old_table_is_believed_no_further_than_headers_go() -> None:
    """The newer table is damaged, the older one calls an extent clean that was written to since."""
    disk = MemoryDisk(device_bytes(POSITIONS))
    device = NvmeDevice.open(disk, "n", EXTENT_BYTES)
    device.carve(0, 1, CLASS)
    device.open_for_writing([0])
    write(device, 0, 0, 7, seed=1)
    device.close_for_writing([0])
    device.write_directory(0, lean_rows(CLASS, device.extents[0].frames, {0: (7, 1)}))
    assert device.mark_clean({0: device.version(0)}) == {0}
    device.open_for_writing([0])
    write(device, 0, 0, 8, seed=2)
    disk.data[device.superblock.slot(device._slot) + 100] ^= 1
    again = NvmeDevice.open(disk, "n", EXTENT_BYTES)
    rows = again.directory(0)
    assert rows is not None and set(claimed(rows)) == {0}
    assert find(again, 0, 0, 7)[0] == "swapped"
    assert again.starts > device.starts
    assert np.array_equal(disk.data[:4096], disk.data[-4096:])
