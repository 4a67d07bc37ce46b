"""The tail of an NVMe target that was cut off: a file that is shorter than its superblock in front says.

The file is made as long as it was; the space that is new holds zeros. So does the superblock at the end, until
``NvmeDevice.open`` writes it, as the last step: a kill before that is a tail that was cut off.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

import numpy as np

from kvstore.tier.disk import BLOCK_BYTES, Disk, aligned_buffer
from kvstore.tier.nvme_table import Bytes, ExtentOnDisk, Superblock, frame_offset

NOTHING: Final = frozenset[int]()


def is_cut(fd: int, size_bytes: int, *, owner: str, extent_bytes: int, secret: bytes | None) -> bool:
    """Whether ``fd`` is a target that had ``size_bytes``, and that could be opened if it still had (``open_target``);
    and long enough for anything to be whole.

    Raises:
        OSError: it cannot be read.
    """
    has_bytes = os.fstat(fd).st_size
    front = os.pread(fd, BLOCK_BYTES, 0)
    found = Superblock.unpacked(np.frombuffer(front, np.uint8)) if len(front) == BLOCK_BYTES else None
    if found is None or secret not in (None, found.secret):
        return False
    planned = Superblock.planned(found.incarnation, owner, size_bytes, extent_bytes)
    return found == planned and found.data_start <= has_bytes < size_bytes


def tail_is_absent(disk: Disk) -> bool:
    """Whether there are zeros where the superblock at the end should be.

    Raises:
        OSError: the disk fails.
    """
    return not _block(disk, disk.size_bytes - BLOCK_BYTES).any()


def reaching_beyond(disk: Disk, superblock: Superblock, extents: Mapping[int, ExtentOnDisk]) -> frozenset[int]:
    """Positions of the extents that may have lost frames with the tail.

    All that was cut off lies behind one place: where a directory or first header stands, extents in front are whole.

    Raises:
        OSError: the disk fails.
    """
    beyond: set[int] = set()
    for position in sorted(extents, reverse=True):
        beyond.add(position)
        start = superblock.data_start + position * superblock.extent_bytes
        first = frame_offset(superblock, position, extents[position].frame_class, 0)
        if _block(disk, start).any() or _block(disk, first).any():
            break
    return frozenset(beyond)


def restore_tail(disk: Disk, superblock: Superblock) -> None:
    """Write the superblock at the end; durable.

    Raises:
        OSError: the disk fails.
    """
    disk.write(disk.size_bytes - BLOCK_BYTES, [superblock.packed()])
    disk.sync()


def _block(disk: Disk, offset: int) -> Bytes:
    block = aligned_buffer(BLOCK_BYTES)
    disk.read(offset, [block])
    return block
