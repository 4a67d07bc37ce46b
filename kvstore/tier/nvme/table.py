"""The metadata of an NVMe device: superblock, extent table, and the directory of an extent. Bytes only, no I/O.

::

    0                      superblock                                                        4096 bytes
    4096                   slot A of the extent table      table_bytes
    4096 + table_bytes     slot B                          table_bytes
    data_start             positions * extent_bytes
    ...                    unused, less than an extent
    size_bytes - 4096      the superblock again

    an extent:  directory (head 64, then a lean record row per frame) | header, frame | header, frame | ...

A new table is written to the slot that does not have the newest one, so a torn write leaves the previous table. Worked
example: 1 GiB in extents of 64 MiB has 15 positions, a table of one block, and data from 12 KiB on. Frame 2 of an
extent of 256 KiB pages starts at 24 + 2 * 260 KiB in the extent.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.prefix import SECRET_BYTES
from kvstore.model.replica import FrameClass
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.disk import BLOCK_BYTES, aligned_buffer

VERSION: Final = 4
OWNER_BYTES: Final = 64  # size of a node's name
TABLE_AT: Final = BLOCK_BYTES
_SUPER_MAGIC: Final = b"KVNVME01"
_TABLE_MAGIC: Final = b"KVTABLE1"
_DIRECTORY_MAGIC: Final = b"KVDIREC1"
# magic, version, complete, incarnation, owner, size, extent, positions, table bytes. The sum covers the entire block,
# so that a file system made over it is noticed. It is in the same sector as these fields, so both are written or none.
_SUPER = struct.Struct("<8sIIQ64sQQQQ")
# magic, incarnation, sequence, starts, day, minute of the last contact, bytes of the day, positions, sum
_TABLE_HEAD = struct.Struct("<8s3QII2QQ")
_DIRECTORY_HEAD = struct.Struct("<8sQQQ24xQ")  # magic, incarnation, extent, frames, sum
_SECRET_AT: Final = 128
_SUM_AT: Final = 512 - 8
_IN_USE: Final = 1
_CLEAN: Final = 2
ENTRY: Final = np.dtype(
    {
        "names": ["number", "flags", "page_bytes", "page_tokens", "layers", "frames", "directory_sum"],
        "formats": ["<u4", "<u4", "<u8", "<u4", "<u4", "<u4", "<u8"],
        "offsets": [0, 4, 8, 16, 20, 24, 32],
        "itemsize": 64,
    }
)
assert _SUPER.size <= _SECRET_AT and _SECRET_AT + SECRET_BYTES <= _SUM_AT
assert _DIRECTORY_HEAD.size == geometry.DIRECTORY_HEAD_BYTES and _TABLE_HEAD.size == ENTRY.itemsize

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Superblock:
    """Geometry and owner of a device. ``complete`` is False while the device is being formatted and stores nothing."""

    incarnation: int
    owner: str
    size_bytes: int
    extent_bytes: int
    positions: int
    table_bytes: int
    version: int = VERSION
    complete: bool = True
    secret: bytes = field(default=bytes(SECRET_BYTES), repr=False, compare=False)  # the pool's; zeros if unknown

    @classmethod
    def plan(
        cls, incarnation: int, owner: str, size_bytes: int, extent_bytes: int, secret: bytes = bytes(SECRET_BYTES)
    ) -> Superblock:
        """Return the geometry of a new device with as many positions as fit, possibly none."""
        space = size_bytes - 2 * BLOCK_BYTES
        positions = max(0, space // extent_bytes)
        while positions and positions * extent_bytes + 2 * _table_bytes(positions) > space:
            positions -= 1
        return cls(incarnation, owner, size_bytes, extent_bytes, positions, _table_bytes(positions), secret=secret)

    @property
    def data_start(self) -> int:
        """The offset of position 0."""
        return TABLE_AT + 2 * self.table_bytes

    def slot(self, number: int) -> int:
        """Return the offset of a slot of the table."""
        return TABLE_AT + number * self.table_bytes

    def packed(self) -> Bytes:
        """Return the block in its format on disk, page-aligned."""
        block = aligned_buffer(BLOCK_BYTES)
        head = _SUPER.pack(
            *(_SUPER_MAGIC, self.version, int(self.complete), self.incarnation, os.fsencode(self.owner)),
            *(self.size_bytes, self.extent_bytes, self.positions, self.table_bytes),
        )
        block[: len(head)] = np.frombuffer(head, np.uint8)
        block[_SECRET_AT : _SECRET_AT + SECRET_BYTES] = np.frombuffer(self.secret, np.uint8)
        block[_SUM_AT : _SUM_AT + 8] = _word(_super_sum(block))
        return block

    @classmethod
    def unpacked(cls, block: Bytes) -> Superblock | None:
        """Parse a block; return None if it is not a sound superblock. A superblock from another version keeps only its
        version."""
        magic, version, complete, incarnation, owner, size, extent, positions, table = _SUPER.unpack_from(block.data)
        if magic != _SUPER_MAGIC or _super_sum(block) != _word_at(block, _SUM_AT):
            return None
        if version != VERSION:
            return cls(0, "", 0, 0, 0, 0, version)
        name = os.fsdecode(owner.rstrip(b"\0"))
        secret = block[_SECRET_AT : _SECRET_AT + SECRET_BYTES].tobytes()
        return cls(incarnation, name, size, extent, positions, table, version, bool(complete), secret)


@dataclass(frozen=True)
class ExtentOnDisk:
    """An extent in the table.

    Attributes:
        position: its position on the device, or in the row of devices.
        number: the extent's number in addresses.
        clean: nothing was written to the extent since its directory was written.
        directory_sum: the checksum of that directory; 0 if there is none.
    """

    position: int
    number: int
    frame_class: FrameClass
    frames: int
    clean: bool
    directory_sum: int = 0


@dataclass(frozen=True)
class Table:
    """One version of the extent table. Changed by replacing it; ``entries`` is never written into."""

    sequence: int
    starts: int
    day: int
    day_bytes: int
    entries: npt.NDArray[np.void]
    contact: int = 0  # when the owner last had contact with its pool, in minutes since the epoch; 0 for never

    @classmethod
    def empty(cls, positions: int) -> Table:
        """Return the table of a new device, before its first start."""
        return cls(0, 0, 0, 0, np.zeros(positions, ENTRY))

    def extents(self) -> dict[int, ExtentOnDisk]:
        """Return the carved extents, by position."""
        positions = np.flatnonzero(self.entries["flags"] & _IN_USE)
        extents = {}
        for position, entry in zip(positions.tolist(), self.entries[positions].tolist(), strict=True):
            number, flags, page_bytes, page_tokens, layers, frames, directory_sum = entry
            shape = FrameClass(page_bytes, page_tokens, layers)
            extents[position] = ExtentOnDisk(position, number, shape, frames, bool(flags & _CLEAN), directory_sum)
        return extents

    def with_extents(self, changes: dict[int, ExtentOnDisk | None]) -> Table:
        """Return a copy with these positions changed; None removes an extent."""
        entries = self.entries.copy()
        for position, extent in changes.items():
            if extent is None:
                entries[position] = np.zeros((), ENTRY)
                continue
            flags = _IN_USE | _CLEAN * extent.clean
            shape = extent.frame_class
            sizes = shape.page_bytes, shape.page_tokens, shape.layers, extent.frames
            entries[position] = (extent.number, flags, *sizes, extent.directory_sum)
        return replace(self, entries=entries)

    def packed(self, superblock: Superblock) -> Bytes:
        """Return one slot in its format on disk, page-aligned."""
        block = aligned_buffer(superblock.table_bytes)
        head = _TABLE_HEAD.pack(
            *(_TABLE_MAGIC, superblock.incarnation, self.sequence, self.starts, self.day, self.contact),
            *(self.day_bytes, len(self.entries), 0),
        )
        entries = np.ascontiguousarray(self.entries).view(np.uint8)
        block[: len(head)] = np.frombuffer(head, np.uint8)
        block[len(head) : len(head) + len(entries)] = entries
        block[len(head) - 8 : len(head)] = _word(_table_sum(block, len(head) + len(entries)))
        return block

    @classmethod
    def unpacked(cls, block: Bytes, superblock: Superblock) -> Table | None:
        """Parse a slot; return None if it is torn, damaged or from another incarnation."""
        head = _TABLE_HEAD.unpack_from(block.data)
        magic, incarnation, sequence, starts, day, contact, day_bytes, positions, total = head
        if magic != _TABLE_MAGIC or (incarnation, positions) != (superblock.incarnation, superblock.positions):
            return None
        end = _TABLE_HEAD.size + positions * ENTRY.itemsize
        if _table_sum(block, end) != total:
            return None
        return cls(sequence, starts, day, day_bytes, block[_TABLE_HEAD.size : end].copy().view(ENTRY), contact)


def pack_directory(incarnation: int, extent: ExtentOnDisk, rows: Bytes) -> tuple[Bytes, int]:
    """Return ``(blocks, sum)`` of a directory with these rows ``[frames, row_bytes]``; page-aligned."""
    width = extent.frame_class.lean.row_bytes
    assert rows.shape == (extent.frames, width) and rows.dtype == np.uint8, rows.shape
    blocks = aligned_buffer(geometry.directory_bytes(extent.frame_class, extent.frames))
    head = _DIRECTORY_HEAD.pack(_DIRECTORY_MAGIC, incarnation, extent.number, extent.frames, 0)
    blocks[: len(head)] = np.frombuffer(head, np.uint8)
    end = len(head) + extent.frames * width
    blocks[len(head) : end] = rows.reshape(-1)
    total = _directory_sum(blocks, end)
    blocks[len(head) - 8 : len(head)] = _word(total)
    return blocks, total


def unpack_directory(incarnation: int, extent: ExtentOnDisk, blocks: Bytes) -> Bytes | None:
    """Return a directory's rows ``[frames, row_bytes]``; None if it is not exactly the directory that the table
    names."""
    width = extent.frame_class.lean.row_bytes
    end = _DIRECTORY_HEAD.size + extent.frames * width
    *head, total = _DIRECTORY_HEAD.unpack_from(blocks.data)
    if head != [_DIRECTORY_MAGIC, incarnation, extent.number, extent.frames] or total != extent.directory_sum:
        return None
    if _directory_sum(blocks, end) != total:
        return None
    return blocks[_DIRECTORY_HEAD.size : end].reshape(extent.frames, width)


@lru_cache(maxsize=256)
def extent_shape(extent_bytes: int, frame_class: FrameClass) -> tuple[int, int]:
    """Return ``(frames, offset of frame 0's header)`` of an extent of that class."""
    frames = geometry.frames_in(extent_bytes, frame_class)
    return frames, geometry.directory_bytes(frame_class, frames)


def frame_offset(superblock: Superblock, position: int, frame_class: FrameClass, first: int, frames: int = 1) -> int:
    """Return the device offset of the header of frame ``first``; the frames must be in the extent."""
    shape, start = extent_shape(superblock.extent_bytes, frame_class)
    assert 0 <= position < superblock.positions and 0 <= first < first + frames <= shape, (position, first, frames)
    extent_start = superblock.data_start + position * superblock.extent_bytes
    return extent_start + start + first * geometry.stride_bytes(frame_class)


def interleave(counts: list[int]) -> list[tuple[int, int]]:
    """Merge the positions of several devices into one row of ``(device, position there)``, in proportion to their
    sizes.

    Worked example: devices of 4 and 2 positions make 0.0, 1.0, 0.1, 0.2, 1.1, 0.3 (device.position).
    """
    places = ((2 * at + 1, count, device) for device, count in enumerate(counts) for at in range(count))
    order = sorted((odd / count, device, odd // 2) for odd, count, device in places)
    return [(device, at) for _, device, at in order]


def _table_bytes(positions: int) -> int:
    return -(-(_TABLE_HEAD.size + positions * ENTRY.itemsize) // BLOCK_BYTES) * BLOCK_BYTES


def _super_sum(block: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(block[_SUM_AT + 8 :].data, xxhash.xxh3_64_intdigest(block[:_SUM_AT].data))


def _table_sum(block: Bytes, end: int) -> int:
    return xxhash.xxh3_64_intdigest(block[_TABLE_HEAD.size : end].data, xxhash.xxh3_64_intdigest(block[:56].data))


def _directory_sum(blocks: Bytes, end: int) -> int:
    head_sum = xxhash.xxh3_64_intdigest(blocks[: geometry.DIRECTORY_HEAD_BYTES - 8].data)
    return xxhash.xxh3_64_intdigest(blocks[geometry.DIRECTORY_HEAD_BYTES : end].data, head_sum)


def _word(value: int) -> Bytes:
    return np.frombuffer(value.to_bytes(8, "little"), np.uint8)


def _word_at(block: Bytes, offset: int) -> int:
    return int.from_bytes(block[offset : offset + 8].tobytes(), "little")
