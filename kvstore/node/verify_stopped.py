"""Verification of a node whose daemon is not running: records, index, checksums, prefix closure, and NVMe targets.

It reads the node's files and changes nothing. It holds the node's lock, so that no daemon starts in the meantime. A
report has two lists. *Findings* are damage: a damaged sealed page, or a violated invariant. *Repairs* are what the next
start fixes: an index that is one decision behind the records after a kill, frames that were being written, or one
damaged copy of a superblock.

The index of a killed node may list pages that were removed, and lack the latest pages. The index of a stopped node must
equal the records.

On NVMe, the tables in shared memory say which pages are stored. After a reboot those are gone, and the directories of
clean extents say it instead. In other extents every frame is verified. A torn page there is not damage, because its
writer has received no reply that it is stored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config import NvmeTarget
from kvstore.errors import InvalidRequest, NodeBusy, NodeUnavailable
from kvstore.model.replica import ADDRESS, STAMPED, Address, FrameState, RecordFormat, Tier, in_state
from kvstore.node.index_keeper import snapshot
from kvstore.node.nvme_start import LOADING
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import DaemonState, Header, boot_id
from kvstore.shm.index import Index, IndexDamaged
from kvstore.shm.put_log import LogDamaged, PutLog
from kvstore.shm.records import ExtentTable
from kvstore.state import prefix_links
from kvstore.state.interfaces import Snapshot
from kvstore.tier.dram import SEGMENT_HEAD_BYTES, SegmentFile, SegmentMap
from kvstore.tier.nvme import frame_header, geometry
from kvstore.tier.nvme.disk import BLOCK_BYTES, FileDisk, aligned_buffer
from kvstore.tier.nvme.frame_header import FrameHeader, layer_sums
from kvstore.tier.nvme.map import NvmeMap, named_devices, runs
from kvstore.tier.nvme.table import ExtentOnDisk, Superblock, Table, frame_offset, unpack_directory
from kvstore.tier.nvme.target import read_superblock

LISTED_MAX = 1000  # number of findings, and of repairs, that are listed
RUN_BYTES = 1 << 20  # bytes read at a time
OTHER_KEY = "has a page with another key"


@dataclass
class Report:
    """The result of a verification.

    Attributes:
        state: state of the node, "stopped" or "killed".
        verified: number of verified pages, by tier.
        damaged: tier, extent and frame of each damaged page.
        unstamped: number of pages that have no checksums yet.
        findings, repairs: lines of text, see the module.
    """

    state: str = "stopped"
    verified: Counter[str] = field(default_factory=Counter)
    damaged: set[tuple[Any, ...]] = field(default_factory=set)
    unstamped: int = 0
    findings: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    def add_damage(self, tier: Tier, extent: int, frame: int, key: bytes, part: str) -> None:
        """Add a damaged sealed page. ``part``: what is damaged, or a reason of ``frame_header``."""
        self.damaged.add((tier, extent, frame))
        self.findings.append(f"{tier}: extent {extent} frame {frame}, page {key.hex()}: damaged ({part})")

    def document(self, name: str) -> dict[str, Any]:
        """Return the report for JSON, with the fields of ``Store.verify`` and more."""
        return {
            "name": name,
            "state": self.state,
            "pages_verified": sum(self.verified.values()),
            "pages_by_tier": dict(self.verified),
            "pages_without_checksums": self.unstamped,
            "pages_damaged": len(self.damaged),
            "findings": _listed(self.findings),
            "repairs": _listed(self.repairs),
        }


def _listed(lines: list[str]) -> list[str]:
    more = len(lines) - LISTED_MAX
    return lines if more <= 0 else [*lines[:LISTED_MAX], f"and {more} more"]


# --- NVMe -----------------------------------------------------------------------------------------------------------


def verify_targets(
    folder: NodeFolder | None, targets: Sequence[NvmeTarget], tables: Mapping[int, ExtentTable], report: Report
) -> None:
    """Verify the targets that the folder names, and ``targets``.

    Args:
        tables: their extents' tables in shared memory.

    Raises:
        NodeBusy: a target is in use.
    """
    expected = dict(named_devices(folder)) if folder is not None else {}
    sizes = {path: superblock.size_bytes for path, superblock in expected.items()}
    sizes |= {str(target.path): target.size for target in targets}
    extents: set[int] = set()
    for path, size_bytes in sizes.items():
        try:
            with _open_target(path, size_bytes) as disk:
                extents |= _verify_target(disk, expected.get(path), tables, report)
        except (OSError, InvalidRequest) as error:
            report.findings.append(f"nvme: {path}: cannot be read: {error}")
    for number, table in tables.items():
        pages = len(_sealed(table))
        if pages and number not in extents:
            report.findings.append(f"nvme: extent {number}: is on no target, {pages} pages are lost")


@contextlib.contextmanager
def _open_target(path: str, size_bytes: int) -> Iterator[FileDisk]:
    """Open a target for reading, under a lock that keeps nodes from opening it."""
    disk = FileDisk.open(path, size_bytes, writable=False)
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield disk
    except BlockingIOError:
        raise NodeBusy(f"{path} is in use by a running node") from None
    finally:
        if fd >= 0:
            os.close(fd)
        disk.close()


def _verify_target(
    disk: FileDisk, expected: Superblock | None, tables: Mapping[int, ExtentTable], report: Report
) -> set[int]:
    """Verify a target. Returns the numbers of its extents."""
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
    copies = [
        Table.unpacked(_read(disk, superblock.slot(which), superblock.table_bytes), superblock) for which in (0, 1)
    ]
    valid = [copy for copy in copies if copy is not None]
    if not valid:
        report.findings.append(f"nvme: {disk.path}: both copies of its extent table are damaged")
        return set()
    newest = max(valid, key=lambda copy: copy.sequence)
    if len(valid) == 1 and newest.sequence > 0:
        report.repairs.append(f"nvme: {disk.path}: one copy of its extent table is damaged, or was never written")
    extents = newest.extents()
    for extent in extents.values():
        _verify_extent(disk, superblock, extent, tables.get(extent.number), report)
    return {extent.number for extent in extents.values()}


def _verify_extent(
    disk: FileDisk, superblock: Superblock, extent: ExtentOnDisk, table: ExtentTable | None, report: Report
) -> None:
    """Verify the pages of an extent. ``table``: its table in shared memory, if there is one."""
    rows: npt.NDArray[np.uint8] | None = None
    if extent.clean:
        offset = superblock.data_start + extent.position * superblock.extent_bytes
        blocks = _read(disk, offset, geometry.directory_bytes(extent.frame_class, extent.frames))
        rows = unpack_directory(superblock.incarnation, extent, blocks)
        if rows is None:
            reason = f"the directory of extent {extent.number} is damaged, so the next start scans it"
            report.repairs.append(f"nvme: {disk.path}: {reason}")
    if table is not None:
        rows = table.rows
    if rows is None:
        pages = _pages(disk, superblock, extent, np.arange(extent.frames), None)
        count = sum(1 for _, page in pages if isinstance(page, FrameHeader))
        report.repairs.append(f"nvme: {disk.path}: extent {extent.number}: is scanned, {count} pages are sound")
        report.verified[str(Tier.NVME)] += count
        return
    words = np.ascontiguousarray(rows[:, :8]).view("<u8").reshape(-1)
    frames = np.flatnonzero(in_state(words, FrameState.SEALED))
    for frame, page in _pages(disk, superblock, extent, frames, words >> np.uint64(8)):
        key = rows[frame, RecordFormat.key].tobytes()
        if isinstance(page, FrameHeader) and page.key != key:
            page = "swapped"
        if isinstance(page, str):
            report.add_damage(Tier.NVME, extent.number, frame, key, page)
        report.verified[str(Tier.NVME)] += 1


def _pages(
    disk: FileDisk,
    superblock: Superblock,
    extent: ExtentOnDisk,
    frames: npt.NDArray[np.intp],
    generations: npt.NDArray[np.uint64] | None,
) -> Iterator[tuple[int, FrameHeader | str]]:
    """Read these frames. Yield each frame with the header of its page, or the reason why the page is damaged.

    ``generations`` has the expected generation of each frame. If it is None, any generation is valid.
    """
    frame_class, incarnation = extent.frame_class, superblock.incarnation
    stride, head = geometry.stride_bytes(frame_class), geometry.header_bytes(frame_class)
    places = [(extent.number, frame) for frame in frames.tolist()]
    for run in runs(places, stride, RUN_BYTES):
        first, count = places[run.start][1], run.stop - run.start
        slots = aligned_buffer(count * stride)
        try:
            disk.read(frame_offset(superblock, extent.position, frame_class, first, count), [slots])
        except OSError as error:
            yield from ((frame, f"io ({error})") for frame in range(first, first + count))
            continue
        for frame, slot in enumerate(slots.reshape(count, stride), first):
            generation = None if generations is None else int(generations[frame])
            page = frame_header.unpack(slot[:head], frame_class, incarnation, extent.number, frame, generation)
            if isinstance(page, FrameHeader) and not frame_header.is_payload_sound(
                slot[head:], frame_class, page.payload_sum
            ):
                page = "payload"
            yield frame, page


def _read(disk: FileDisk, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    block = aligned_buffer(size_bytes)
    disk.read(offset, [block])
    return block


# --- shared memory --------------------------------------------------------------------------------------------------


def verify_folder(path: Path, targets: Sequence[NvmeTarget] = ()) -> dict[str, Any]:
    """Verify the node in this folder and its NVMe targets. Returns the report, see ``Report.document``.

    Args:
        targets: further targets, if the folder does not name them.

    Raises:
        NodeUnavailable: there is no such folder.
        NodeBusy: the node's daemon is running.
        InvalidRequest: ``path`` is not a node's folder, or belongs to another user.
        VersionMismatch: the node's files are from another version.
    """
    folder = NodeFolder.at(path)
    if not folder.path.is_dir():
        raise NodeUnavailable(f"there is no node in {path}")
    if not folder.is_trusted():
        raise InvalidRequest("folder", f"{path} belongs to another user")
    with folder.block_starts():
        report = Report()
        tables = _verify_shm(folder, report)
        verify_targets(folder, targets, tables, report)
        return report.document(folder.name)


def verify_devices(targets: Sequence[NvmeTarget]) -> dict[str, Any]:
    """Verify targets without a node's folder, after a reboot or on another machine."""
    report = Report()
    verify_targets(None, targets, {}, report)
    return report.document("")


def _verify_shm(folder: NodeFolder, report: Report) -> dict[int, ExtentTable]:
    """Verify everything in shared memory. Returns the tables of extents on NVMe."""
    header = Header.open(folder)
    if header is None:
        report.findings.append(
            "header: absent or damaged; the next start recreates it, and all pages in memory are lost"
        )
        return {}
    if header.boot_id != boot_id():
        report.repairs.append("shared memory: from an earlier boot; the next start recreates it")
        return {}
    stopped = header.state == DaemonState.STOPPED
    report.state = "stopped" if stopped else "killed"
    segment = SegmentMap.open(folder, header.incarnation)
    if segment is None:
        is_cut = SegmentFile.cut_to(folder, header.incarnation) is not None
        loss = "its tail was cut off; some" if is_cut else "absent, damaged or from another incarnation; the"
        report.findings.append(f"segment: {loss} pages in DRAM are lost")
        return {}
    mapped, lower = _tables(folder, header, segment, report)
    if (folder.path / LOADING).exists():
        report.repairs.append("nvme: the tables in shared memory are incomplete; the next start recreates them")
        lower = {}
    for tier in dict.fromkeys((Tier.DRAM, Tier.NVME, *(table.tier for table in lower.values()))):
        tables = [table for table in (*mapped.values(), *lower.values()) if table.tier == tier]
        snapshots = [snapshot(table) for table in tables]
        for table in tables:
            _verify_records(table, report)
        _verify_closure(tier, snapshots, report)
        _verify_index(folder, header, tier, snapshots, report)
    _verify_puts(folder, header, report)
    data = np.memmap(folder.segment, np.uint8, "r")
    for table in mapped.values():
        _verify_pages(table, data, segment.extent_bytes, report)
    return lower


Tables = dict[int, ExtentTable]


def _tables(folder: NodeFolder, header: Header, segment: SegmentMap, report: Report) -> tuple[Tables, Tables]:
    """Map the tables of the segment's extents, and the tables of the devices' extents."""
    devices = NvmeMap.open(folder)
    mapped: Tables = {}
    lower: Tables = {}
    places: set[tuple[Tier, int]] = set()
    for number in folder.extents():
        table, tables, positions = ExtentTable.open(folder, number, header.incarnation), mapped, segment.positions
        if table is None and devices is not None:
            table, tables, positions = ExtentTable.open(folder, number, devices.incarnation), lower, sys.maxsize
        if table is None:
            report.findings.append(f"records-{number}: is damaged: the extent is lost with its pages")
            continue
        place = table.tier, table.position
        if place in places or table.position >= positions:
            reason = f"position {table.position} is another extent's, or does not exist"
            report.findings.append(f"{table.tier}: extent {number}: {reason}")
            continue
        places.add(place)
        tables[number] = table
    if devices is not None:
        devices.close()
    return mapped, lower


def _sealed(table: ExtentTable) -> npt.NDArray[np.intp]:
    return np.flatnonzero(in_state(table.words, FrameState.SEALED))


def _verify_records(table: ExtentTable, report: Report) -> None:
    """Verify the states of all records, and the identity sums of sealed ones."""
    states = (table.words & np.uint64(0xFF)).astype(np.uint8)
    for frame in np.flatnonzero(states > max(FrameState)).tolist():
        reason = f"there is no state {states[frame]}"
        report.findings.append(f"{table.tier}: extent {table.extent} frame {frame}: {reason}")
    sealed = states == FrameState.SEALED
    sums = np.array(table.identity_sums(slice(0, table.frames)), np.uint64)
    for frame in np.flatnonzero(sealed & (sums != table.column(table.fmt.identity_sum))).tolist():
        report.add_damage(table.tier, table.extent, frame, table.key(frame), "record")
    for state in (FrameState.RESERVED, FrameState.RETIRING, FrameState.QUARANTINED):
        count = int((states == state).sum())
        if count:
            report.repairs.append(f"{table.tier}: extent {table.extent}: {count} frames are {state.name.lower()}")


def _verify_closure(tier: Tier, snapshots: list[Snapshot], report: Report) -> None:
    """Verify that every page's parent is stored in the tier, and that no two pages have the same key."""
    links = prefix_links.link(snapshots)
    for i in np.flatnonzero(links.parent == -2).tolist():
        report.findings.append(f"{tier}: {links.address(i)}, page {links.key(i).hex()}: its parent is not stored")
    for i in np.flatnonzero(links.duplicate).tolist():
        report.findings.append(f"{tier}: {links.address(i)}: a second page has the key {links.key(i).hex()}")


def _verify_index(folder: NodeFolder, header: Header, tier: Tier, snapshots: list[Snapshot], report: Report) -> None:
    """Compare the index with the sealed records. After a kill most differences are repairs."""
    index = Index.open_reader(folder, header.epoch)
    try:
        entries = None if index is None else dict(index.scan(tier))
    except IndexDamaged:
        entries = None
    finally:
        if index is not None:
            index.close()
    if entries is None:
        report.findings.append(f"index: epoch {header.epoch} is absent or damaged; the next start recreates it")
        return
    differences = report.findings if report.state == "stopped" else report.repairs
    by_extent = {extent.extent: extent for extent in snapshots}
    for key, raw in entries.items():
        address = Address(*ADDRESS.unpack(raw))
        fault = _entry_fault(key, address, by_extent.get(address.extent))
        if fault:
            # Each generation belongs to exactly one page, so a different key cannot be the result of a kill.
            lines = report.findings if fault == OTHER_KEY else differences
            lines.append(f"{tier}: index {key.hex()}: {address} {fault}")
    links = prefix_links.link(snapshots)
    for i, key in enumerate(links.keys.tolist()):
        if key.ljust(16, b"\0") not in entries:
            differences.append(f"{tier}: {links.address(i)}, page {links.key(i).hex()}: is not in the index")


def _entry_fault(key: bytes, address: Address, extent: Snapshot | None) -> str:
    """Return why an index entry is wrong, or "" if it is right."""
    if extent is None or address.frame >= len(extent.words):
        return "is not a frame"
    if int(extent.words[address.frame]) != address.generation << 8 | FrameState.SEALED:
        return "is not sealed under that generation"
    return "" if bytes(extent.keys[address.frame]).ljust(16, b"\0") == key else OTHER_KEY


def _verify_puts(folder: NodeFolder, header: Header, report: Report) -> None:
    """Report published puts that no daemon has applied yet. The next start applies them."""
    puts = PutLog.open(folder, header.puts_id, writable=False)
    if puts is None:
        if header.puts_id:
            report.findings.append("puts: is absent or damaged: puts that were not taken in are lost")
        return
    for slot in puts.waiting():
        session, count = puts.session(slot), 0
        try:
            for _ in puts.records(slot) if session else ():
                count += 1
        except LogDamaged as error:
            report.findings.append(f"puts: session {session:016x}: {error}: its later puts are lost")
        if count:
            report.repairs.append(f"puts: session {session:016x}: {count} puts are published and not taken in")


def _verify_pages(table: ExtentTable, data: npt.NDArray[np.uint8], extent_bytes: int, report: Report) -> None:
    """Verify the checksums of an extent in DRAM."""
    frame_class, fmt = table.frame_class, table.fmt
    start = SEGMENT_HEAD_BYTES + table.position * extent_bytes
    stamped = table.column(fmt.info) >> np.uint64(48) & np.uint64(STAMPED)
    sums = table.rows[:, fmt.checksums].view("<u4")
    for frame in _sealed(table).tolist():
        if not stamped[frame]:
            report.unstamped += 1
            continue
        offset = start + frame * frame_class.frame_bytes
        page = data[offset : offset + frame_class.page_bytes]
        is_whole = len(page) == frame_class.page_bytes
        if not is_whole or not np.array_equal(layer_sums(page, frame_class.layers), sums[frame]):
            report.add_damage(table.tier, table.extent, frame, table.key(frame), "data")
        report.verified[str(table.tier)] += 1
