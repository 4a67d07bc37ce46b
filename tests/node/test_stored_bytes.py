"""What is stored keeps its bytes: records in shared memory, headers, directories and geometry on NVMe.

The sums below were taken of what version 0.1's code wrote for the same instructions, but for
uses, which it did not have. Whoever changes one of them breaks
every pool that is there: a new format needs a new version number in its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvstore.model.replica import Address, FrameClass, FrameState, Tier, info_word, standing
from kvstore.node.performer import Performer
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import Header
from kvstore.shm.index import Index
from kvstore.shm.records import ExtentTable
from kvstore.state import instructions as do
from kvstore.tier.dram import DramStore, SegmentFile
from kvstore.tier.nvme import frame_header, geometry

CLASS = FrameClass(page_bytes=12_000, page_tokens=15, layers=3)
FRAMES, INCARNATION, INDEX_BYTES = 8, 7, 4 << 20
DRAM, NVME = 1, 2  # extents
STORED = {
    "records of DRAM": "3849b138c8af10a7",
    "uses of DRAM": "32c1e272ae55f471",
    "records of NVMe": "a97fb1eebe7832af",
    "uses of NVMe": "9f01cf2dd714c2dc",
    "header on NVMe": "4bd728deac3d4527",
}


def rows_of(first: int, count: int) -> np.ndarray:
    """Identity rows that are all different."""
    width = 48 + 4 * CLASS.page_tokens
    return ((np.arange(count * width) * 31 + first) % 251).astype(np.uint8).reshape(count, width)


def names(seed: int, count: int) -> list[bytes]:
    return [bytes((seed + i + j) % 256 for j in range(16)) for i in range(count)]


@pytest.fixture
def performer(tmp_path: Path) -> Iterator[Performer]:
    folder = NodeFolder(tmp_path, "n")
    folder.lock()
    header = Header.create(folder, INCARNATION, 1 << 20, 2)
    segment = SegmentFile.create(folder, INCARNATION, 1 << 20, 2)
    index = Index.open_writer(folder, header.epoch, INDEX_BYTES, fresh=True)
    stores = {Tier.DRAM: DramStore(segment, INCARNATION)}
    performer = Performer(folder, header, stores, index, INDEX_BYTES, lambda: 1 << 60)
    performer.perform([do.Carve(DRAM, 0, CLASS, FRAMES)])
    performer.tables[NVME] = ExtentTable.create(folder, NVME, 1, CLASS, INCARNATION, FRAMES, Tier.NVME)
    yield performer
    performer.close()


def at(extent: int, *frames: int) -> list[Address]:
    return [Address(extent, frame, 100 + 10 * extent + frame) for frame in frames]


def everything() -> list[do.Instruction]:
    """Each instruction that writes into records or uses, in a batch that is one run and in one that is none."""
    sums = np.arange(6, dtype=np.uint32).reshape(2, 3) + 77
    keys = [row[:16].tobytes() for row in rows_of(1, 2)]
    granted = [row[:16].tobytes() for row in rows_of(5, 2)]
    return [
        do.WriteGranted(at(DRAM, 0, 1, 2), 11),
        do.WriteGranted(at(DRAM, 5, 3), 12),
        do.WriteReserved(at(DRAM, 6, 4), rows_of(1, 2), names(9, 2), 13, 0xABCDEF, 1, 4, 99_000),
        do.WriteWriter(at(DRAM, 6), 3, 14),
        do.WriteShards(at(DRAM, 6)[0], 4, 0b1010),
        do.WriteSealed(at(DRAM, 4), keys[1:], [standing(3, 2)]),
        do.WriteSealed(at(DRAM, 0, 1), granted, [standing(0, 1), standing(1, 1)], rows_of(5, 2), names(40, 2), sums),
        do.WriteSealed(at(DRAM, 5, 3), names(70, 2), [standing(70_000, 300)] * 2, rows_of(9, 2), names(50, 2)),
        do.WriteStamp(at(DRAM, 3)[0], sums[1] + np.uint32(5)),
        do.WriteLease(at(DRAM, 0, 5), [123_456, 234_567]),
        do.WriteUse(at(DRAM, 1, 3), [17, 18]),
        do.WriteState(at(DRAM, 2), FrameState.FREE),
        do.Move(granted[0], at(DRAM, 0)[0], at(DRAM, 7)[0], Address(DRAM, 0, 500)),
        do.WriteSealed(at(NVME, 1, 2), names(80, 2), [standing(5, 0)] * 2, rows_of(3, 2)[:, :48], names(60, 2)),
        do.WriteUse(at(NVME, 2), [19]),
        do.WriteState(at(NVME, 6), FrameState.QUARANTINED),
    ]


def packed_header() -> bytes:
    """A page's header on NVMe."""
    header = np.zeros(geometry.header_bytes(CLASS), np.uint8)
    place = CLASS, 0xFEDC_BA98, Address(3, 4, 5)
    info = info_word(CLASS.page_bytes, flags=1, position=6, turns=7)
    sums = np.arange(3, dtype=np.uint32) + 9
    frame_header.pack(header, *place, rows_of(8, 1)[0], names(90, 1)[0], info, sums, 0x1234_5678_9ABC_DEF0)
    return header.tobytes()


def test_what_is_stored_keeps_its_bytes(performer: Performer) -> None:
    performer.perform(everything())
    folder = performer.folder
    stored = {
        "records of DRAM": folder.records(DRAM).read_bytes(),
        "uses of DRAM": folder.uses(DRAM).read_bytes(),
        "records of NVMe": folder.records(NVME).read_bytes(),
        "uses of NVMe": folder.uses(NVME).read_bytes(),
        "header on NVMe": packed_header(),
    }
    assert {name: xxhash.xxh3_64_hexdigest(data) for name, data in stored.items()} == STORED


def test_geometry_of_nvme() -> None:
    assert (geometry.header_bytes(CLASS), geometry.stride_bytes(CLASS)) == (4096, 16_384)
    assert CLASS.lean.row_bytes == 96
