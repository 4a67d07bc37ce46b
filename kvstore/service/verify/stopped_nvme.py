"""Verification of NVMe targets that no daemon uses: superblocks, extent tables, directories, and every stored page.

What is stored is what the tables in shared memory say; without them (after a reboot) the directories of the extents
that are clean. In the others each frame is checked, and a torn one is not damage: no writer was told that it is stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvstore.config import NvmeTarget
from kvstore.errors import InvalidRequest, NodeBusy
from kvstore.model.replica import FrameState, RecordFormat, Tier
from kvstore.service.verify.report import Report
from kvstore.tier import frame_header, nvme_geometry
from kvstore.tier.disk import BLOCK_BYTES, FileDisk, aligned_buffer
from kvstore.tier.folder import NodeFolder
from kvstore.tier.frame_header import FrameHeader
from kvstore.tier.nvme_map import named_devices, runs
from kvstore.tier.nvme_table import ExtentOnDisk, Superblock, Table, frame_offset, unpack_directory
from kvstore.tier.nvme_target import read_superblock
from kvstore.tier.records import ExtentTable

RUN_BYTES = 1 << 20  # read at a time


def verify_targets(
    folder: NodeFolder | None, targets: Sequence[NvmeTarget], tables: Mapping[int, ExtentTable], report: Report
) -> None:
    """Verify the targets that the folder names and those given. ``tables``: of their extents in shared memory.

    Raises:
        NodeBusy: a target is in use.
    """
    expected = dict(named_devices(folder)) if folder is not None else {}
    sizes = {path: superblock.size_bytes for path, superblock in expected.items()}
    sizes |= {str(target.path): target.size for target in targets}
    known: set[int] = set()
    for path, size_bytes in sizes.items():
        try:
            with _opened(path, size_bytes) as disk:
                known |= _verify_target(disk, expected.get(path), tables, report)
        except (OSError, InvalidRequest) as error:
            report.findings.append(f"nvme: {path}: cannot be read: {error}")
    for number, table in tables.items():
        stored = int(((table.words & np.uint64(0xFF)) == FrameState.SEALED).sum())
        if stored and number not in known:
            report.findings.append(f"nvme: extent {number}: {stored} pages are on no target")


@contextlib.contextmanager
def _opened(path: str, size_bytes: int) -> Iterator[FileDisk]:
    """For reading, while nobody writes."""
    disk = FileDisk.open(path, size_bytes, writable=False)
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield disk
    except BlockingIOError:
        raise NodeBusy(f"{path} is in use by a node that runs") from None
    finally:
        if fd >= 0:
            os.close(fd)
        disk.close()


def _verify_target(
    disk: FileDisk, expected: Superblock | None, tables: Mapping[int, ExtentTable], report: Report
) -> set[int]:
    """Numbers of the extents that it holds."""
    superblock = read_superblock(disk)
    if superblock is None:
        report.findings.append(f"nvme: {disk.path}: has no sound superblock at either end")
        return set()
    if expected is not None and superblock.incarnation != expected.incarnation:
        report.findings.append(f"nvme: {disk.path}: is not the target that the node used")
        return set()
    for where, offset in (("in front", 0), ("at the end", disk.size_bytes - BLOCK_BYTES)):
        if Superblock.unpacked(_read(disk, offset, BLOCK_BYTES)) != superblock:
            report.repairs.append(f"nvme: {disk.path}: the superblock {where} is damaged")
    slots = [
        Table.unpacked(_read(disk, superblock.slot(which), superblock.table_bytes), superblock) for which in (0, 1)
    ]
    sound = [slot for slot in slots if slot is not None]
    if not sound:
        report.findings.append(f"nvme: {disk.path}: both copies of its extent table are damaged")
        return set()
    newest = max(sound, key=lambda slot: slot.sequence)
    if len(sound) == 1 and newest.sequence > 0:
        report.repairs.append(f"nvme: {disk.path}: one copy of its extent table is damaged, or was never written")
    extents = newest.extents()
    for extent in extents.values():
        _verify_extent(disk, superblock, extent, tables.get(extent.number), report)
    return {extent.number for extent in extents.values()}


def _verify_extent(
    disk: FileDisk, superblock: Superblock, extent: ExtentOnDisk, table: ExtentTable | None, report: Report
) -> None:
    rows: npt.NDArray[np.uint8] | None = None
    if extent.clean:
        at = superblock.data_start + extent.position * superblock.extent_bytes
        blocks = _read(disk, at, nvme_geometry.directory_bytes(extent.frames))
        rows = unpack_directory(superblock.incarnation, extent, blocks)
        if rows is None:
            report.repairs.append(f"nvme: {disk.path}: extent {extent.number}: its directory is damaged: it is scanned")
    if table is not None:
        rows = table.rows
    if rows is None:
        pages = _pages(disk, superblock, extent, np.arange(extent.frames), None)
        sound = sum(1 for _, found in pages if isinstance(found, FrameHeader))
        report.repairs.append(f"nvme: {disk.path}: extent {extent.number}: is scanned, {sound} pages are sound")
        report.verified[str(Tier.NVME)] += sound
        return
    words = np.ascontiguousarray(rows[:, :8]).view("<u8").reshape(-1)
    frames = np.flatnonzero((words & np.uint64(0xFF)) == FrameState.SEALED)
    for frame, found in _pages(disk, superblock, extent, frames, words >> np.uint64(8)):
        key = rows[frame, RecordFormat.key].tobytes()
        if isinstance(found, FrameHeader) and found.key != key:
            found = "swapped"
        if isinstance(found, str):
            report.damage(Tier.NVME, extent.number, frame, key, found)
        report.verified[str(Tier.NVME)] += 1


def _pages(
    disk: FileDisk,
    superblock: Superblock,
    extent: ExtentOnDisk,
    frames: npt.NDArray[np.intp],
    generations: npt.NDArray[np.uint64] | None,
) -> Iterator[tuple[int, FrameHeader | str]]:
    """Each frame's header, or why it or its page does not hold; ``generations`` by frame, None: any."""
    about = extent.frame_class
    stride, head = nvme_geometry.stride_bytes(about), nvme_geometry.header_bytes(about)
    places = [(extent.number, frame) for frame in frames.tolist()]
    for part in runs(places, stride, RUN_BYTES):
        first, count = places[part.start][1], part.stop - part.start
        slots = aligned_buffer(count * stride)
        try:
            disk.read(frame_offset(superblock, extent.position, about, first, count), [slots])
        except OSError as error:
            yield from ((frame, f"io ({error})") for frame in range(first, first + count))
            continue
        for i, slot in enumerate(slots.reshape(count, stride)):
            generation = None if generations is None else int(generations[first + i])
            found = frame_header.unpack(
                slot[:head], about, superblock.incarnation, extent.number, first + i, generation
            )
            if isinstance(found, FrameHeader) and not frame_header.is_payload_sound(
                slot[head:], about, found.payload_sum
            ):
                found = "payload"
            yield first + i, found


def _read(disk: FileDisk, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    block = aligned_buffer(size_bytes)
    disk.read(offset, [block])
    return block
