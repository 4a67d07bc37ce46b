"""Identifies the contents of an NVMe target: ours, blank, half formatted, damaged at one end, or foreign.

A target is formatted only if nothing can be lost: it is blank, or power failed while it was being formatted, or the
operator gave ``--format``. Each step is durable before the next::

    1. superblock in front, not complete    from here on: half formatted, and the next start begins again
    2. table, superblock at the end
    3. superblock in front, complete        from here on: ours

A kill before step 1 changes nothing. If ``--format`` was given for a target that was not blank, a torn block can leave
an unrecognisable front. Then ``--format`` must be given again.

A truncated target is a file that is shorter than the superblock in front says. The file is extended to its old length
with zeros, which also cover the superblock at the end. ``NvmeDevice.open`` writes that superblock as its last step.
After a kill before that step the target counts as truncated again.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from kvstore import failpoint
from kvstore.errors import InvalidRequest
from kvstore.shm.folder import new_secret
from kvstore.tier.nvme.disk import BLOCK_BYTES, Disk, aligned_buffer
from kvstore.tier.nvme.table import OWNER_BYTES, VERSION, Bytes, ExtentOnDisk, Superblock, Table, frame_offset

# Other systems put their signatures after the first blocks (btrfs at 64 KiB, ISO 9660 at 32 KiB, RAID at
# 4 KiB, ZFS at 16 KiB and at the end). A target is blank only if this much is zero at either end.
BLANK_BYTES: Final = 1 << 20
# If the two superblocks differ in more bytes than this, one was overwritten on purpose. Otherwise one is damaged.
DAMAGED_BYTES_MAX: Final = 16
_REMEDY: Final = "; --format reformats it and drops what is stored there"

log = logging.getLogger("kvstore.nvme")


def open_target(
    disk: Disk, owner: str, extent_bytes: int, make: bool, secret: bytes | None = None, is_file: bool = False
) -> Superblock:
    """Return the superblock of ``owner``'s target. If the target is blank or half formatted, or with ``make``, it is a
    new one.

    Args:
        secret: the pool's secret. A new target gets it, and a target with another secret is refused. None accepts any,
            and draws one for a new target.
        is_file: the target is a file, so zeros at its end are a tail that was cut off. On a device they mean that it
            was wiped.

    Raises:
        InvalidRequest: field "nvme". The target is foreign, has another geometry, or is too small. Nothing was changed.
        OSError: the disk fails.
    """
    assert extent_bytes > 0 and extent_bytes % BLOCK_BYTES == 0, extent_bytes
    if len(owner.encode()) > OWNER_BYTES:
        raise InvalidRequest("nvme", f"owner: must have at most {OWNER_BYTES} bytes (got {owner!r})")
    front, back = (_block(disk, offset) for offset in (0, disk.size_bytes - BLOCK_BYTES))
    first, last = Superblock.unpacked(front), Superblock.unpacked(back)
    half_formatted = first is not None and not first.complete and (first.owner, first.version) == (owner, VERSION)
    superblock = first or last
    if make or half_formatted or (superblock is None and _is_blank(disk)):
        return _make(disk, owner, extent_bytes, secret or new_secret())
    if superblock is None:
        raise InvalidRequest("nvme", f"{disk.path}: must be blank or a kvstore target{_REMEDY}")
    _check(disk, superblock, owner, extent_bytes)
    if secret is not None and superblock.secret != secret:
        remedy = f", purge what the node has in memory, or{_REMEDY[1:]}"
        raise InvalidRequest("nvme", f"{disk.path} has pages of a pool with another secret{remedy}")
    if np.array_equal(front, back):
        return superblock
    if is_file and first is not None and not back.any():
        return superblock
    # Both ends are written with the same bytes. If many differ, another program has overwritten one end.
    if (first is not None and last is not None) or int(np.count_nonzero(front != back)) > DAMAGED_BYTES_MAX:
        raise InvalidRequest("nvme", f"{disk.path} is a kvstore target at one end only{_REMEDY}")
    log.warning("%s: its superblock %s was damaged and is repaired", disk.path, "at the end" if first else "in front")
    disk.write(disk.size_bytes - BLOCK_BYTES if first else 0, [superblock.packed()])
    disk.sync()
    return superblock


def read_superblock(disk: Disk) -> Superblock | None:
    """Return the complete superblock at either end, for processes that only read the device; None if neither is valid.

    Raises:
        OSError: the disk fails.
    """
    failure: OSError | None = None
    for offset in (0, disk.size_bytes - BLOCK_BYTES):
        try:
            block = Superblock.unpacked(_block(disk, offset))
        except OSError as error:
            failure = error
            continue
        if block is not None and (block.version, block.size_bytes, block.complete) == (VERSION, disk.size_bytes, True):
            return block
    if failure is not None:
        raise failure
    return None


def read_table(disk: Disk, superblock: Superblock) -> tuple[Table, int]:
    """Return the newest valid table, and its slot.

    Raises:
        InvalidRequest: both tables are damaged, which a loss of power cannot cause.
        OSError: the disk fails.
    """
    tables = []
    for slot in (0, 1):
        block = aligned_buffer(superblock.table_bytes)
        disk.read(superblock.slot(slot), [block])
        table = Table.unpacked(block, superblock)
        if table is not None:
            tables.append((table.sequence, slot, table))
    if not tables:
        raise InvalidRequest("nvme", f"{disk.path}: both copies of its extent table are damaged{_REMEDY}")
    _, slot, table = max(tables, key=lambda each: each[0])
    return table, slot


def _check(disk: Disk, has: Superblock, owner: str, extent_bytes: int) -> None:
    """Raise InvalidRequest if the kvstore target is not the requested one."""
    path = disk.path
    if has.version != VERSION:
        raise InvalidRequest("nvme", f"{path}: must have format {VERSION} (got {has.version}){_REMEDY}")
    if has.owner != owner:
        name = f"node {has.owner!r}" if has.owner else "an embedded store"
        raise InvalidRequest("nvme", f"{path} belongs to {name}{_REMEDY}")
    if has.size_bytes != disk.size_bytes:
        size = f"must have {has.size_bytes} bytes, as when it was formatted (got {disk.size_bytes})"
        raise InvalidRequest("nvme", f"{path}: {size}{_REMEDY}")
    if has.extent_bytes != extent_bytes:
        size = f"extents must have {has.extent_bytes} bytes, as when it was formatted (got {extent_bytes})"
        raise InvalidRequest("nvme", f"{path}: {size}{_REMEDY}")
    if not has.complete or has != Superblock.plan(has.incarnation, owner, disk.size_bytes, extent_bytes):
        raise InvalidRequest("nvme", f"{path} is not completely formatted{_REMEDY}")


def _make(disk: Disk, owner: str, extent_bytes: int, secret: bytes) -> Superblock:
    superblock = Superblock.plan(secrets.randbits(63) | 1, owner, disk.size_bytes, extent_bytes, secret)
    if superblock.positions == 0:
        least = extent_bytes + 2 * BLOCK_BYTES + 2 * superblock.table_bytes
        raise InvalidRequest("nvme", f"{disk.path}: must have at least {least} bytes (got {disk.size_bytes})")
    empty = Table.empty(superblock.positions)
    _write(disk, 0, replace(superblock, complete=False).packed())
    disk.sync()
    _write(disk, superblock.slot(0), empty.packed(superblock))
    _write(disk, disk.size_bytes - BLOCK_BYTES, superblock.packed())
    disk.sync()
    _write(disk, 0, superblock.packed())
    disk.sync()
    return superblock


def _write(disk: Disk, offset: int, block: Bytes) -> None:
    if failpoint.ACTIVE:
        failpoint.hit("nvme.format")
    disk.write(offset, [block])
    if failpoint.ACTIVE:
        failpoint.hit("nvme.format")


def _block(disk: Disk, offset: int) -> Bytes:
    block = aligned_buffer(BLOCK_BYTES)
    disk.read(offset, [block])
    return block


def _is_blank(disk: Disk) -> bool:
    part = min(BLANK_BYTES, disk.size_bytes)
    ends = aligned_buffer(2 * part)
    disk.read(0, [ends[:part]])
    disk.read(disk.size_bytes - part, [ends[part:]])
    return not ends.any()


NO_EXTENTS: Final = frozenset[int]()


def is_truncated(fd: int, size_bytes: int, *, owner: str, extent_bytes: int, secret: bytes | None) -> bool:
    """Return whether ``fd`` is a truncated target of ``size_bytes`` that is ours (``open_target``), and long enough to
    hold an extent.

    Raises:
        OSError: it cannot be read.
    """
    has_bytes = os.fstat(fd).st_size
    front = os.pread(fd, BLOCK_BYTES, 0)
    superblock = Superblock.unpacked(np.frombuffer(front, np.uint8)) if len(front) == BLOCK_BYTES else None
    if superblock is None or secret not in (None, superblock.secret):
        return False
    plan = Superblock.plan(superblock.incarnation, owner, size_bytes, extent_bytes)
    return superblock == plan and superblock.data_start <= has_bytes < size_bytes


def tail_is_absent(disk: Disk) -> bool:
    """Return whether there are zeros in place of the superblock at the end.

    Raises:
        OSError: the disk fails.
    """
    return not _block(disk, disk.size_bytes - BLOCK_BYTES).any()


def extents_in_tail(disk: Disk, superblock: Superblock, extents: Mapping[int, ExtentOnDisk]) -> frozenset[int]:
    """Return the positions of the extents that may have lost frames with the tail.

    Everything after one point is missing. So if a directory or first header is present, all earlier extents are
    complete.

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
