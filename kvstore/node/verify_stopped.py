"""Verification of a node whose daemon is not running: records, index, checksums and laws, from its files alone.

Nothing is changed: files are mapped for reading, and the node's lock is not shared with a writer, so that no
daemon starts in the meantime. Two kinds of things are told apart. *Findings* are damage: a sealed page that does not
hold, a law that is broken. *Repairs* are what the next start puts right as it always does: an index that a kill left a
decision behind the records, frames that were being written, one of two copies of a superblock.

The index of a node that was killed may name pages that have gone, or miss those that came last; the index of a node
that was stopped must not.

Verification of NVMe targets that no daemon uses: superblocks, extent tables, directories, and every stored page.

What is stored is what the tables in shared memory say; without them (after a reboot) the directories of the extents
that are clean. In the others each frame is checked, and a torn one is not damage: no writer was told that it is stored.

Report: what a verification of a stopped node found.
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
from kvstore.model.replica import ADDRESS, STAMPED, Address, FrameState, RecordFormat, Tier
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

LISTED_MAX = 1000  # findings, and repairs, that are told one by one


@dataclass
class Report:
    """What was found. ``verified`` pages by tier, ``damaged`` ones by address, ``unstamped``: without checksums yet."""

    state: str = "stopped"
    verified: Counter[str] = field(default_factory=Counter)
    damaged: set[tuple[Any, ...]] = field(default_factory=set)
    unstamped: int = 0
    findings: list[str] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)

    def damage(self, tier: Tier, extent: int, frame: int, key: bytes, reason: str) -> None:
        """A sealed page does not hold."""
        self.damaged.add((tier, extent, frame))
        self.findings.append(f"{tier}: extent {extent} frame {frame}, page {key.hex()}: {reason} does not hold")

    def document(self, name: str) -> dict[str, Any]:
        """As ``Store.verify`` tells it, and more."""
        return {
            "name": name,
            "state": self.state,
            "pages_verified": sum(self.verified.values()),
            "pages_by_tier": dict(self.verified),
            "pages_without_checksums": self.unstamped,
            "pages_damaged": len(self.damaged),
            "findings": _some(self.findings),
            "repairs": _some(self.repairs),
        }


def _some(lines: list[str]) -> list[str]:
    more = len(lines) - LISTED_MAX
    return lines if more <= 0 else [*lines[:LISTED_MAX], f"and {more} more"]


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
    """Open it for reading, while nothing writes."""
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
        blocks = _read(disk, at, geometry.directory_bytes(extent.frames))
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
    stride, head = geometry.stride_bytes(about), geometry.header_bytes(about)
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


def verify_folder(path: Path, targets: Sequence[NvmeTarget] = ()) -> dict[str, Any]:
    """Verify the node in this folder, and its NVMe targets; ``targets`` where the folder names none.

    Raises:
        NodeUnavailable: there is no such folder.
        NodeBusy: its daemon runs.
        InvalidRequest: ``path`` is not a node's folder, or is another user's.
        VersionMismatch: its files are of another version.
    """
    folder = NodeFolder.at(path)
    if not folder.path.is_dir():
        raise NodeUnavailable(f"there is no node in {path}")
    if not folder.trusted():
        raise InvalidRequest("folder", f"{path} belongs to another user")
    with folder.kept_from_starting():
        report = Report()
        tables = _verify_shm(folder, report)
        verify_targets(folder, targets, tables, report)
        return report.document(folder.name)


def verify_devices(targets: Sequence[NvmeTarget]) -> dict[str, Any]:
    """Verify targets without a node's folder: after a reboot, or from elsewhere."""
    report = Report()
    verify_targets(None, targets, {}, report)
    return report.document("")


def _verify_shm(folder: NodeFolder, report: Report) -> dict[int, ExtentTable]:
    """Everything in shared memory. The tables of extents on NVMe, for their frames to be compared with."""
    header = Header.open(folder)
    if header is None:
        report.findings.append("header: is absent or damaged: the next start recreates it, without these pages")
        return {}
    if header.boot_id != boot_id():
        report.repairs.append("shared memory: is of an earlier boot and counts for nothing")
        return {}
    stopped = header.state == DaemonState.STOPPED
    report.state = "stopped" if stopped else "killed"
    segment = SegmentMap.open(folder, header.incarnation)
    if segment is None:
        cut = SegmentFile.cut_to(folder, header.incarnation) is not None
        said = "its tail was cut off: some" if cut else "is absent, damaged or of another incarnation: the"
        report.findings.append(f"segment: {said} pages in DRAM are lost")
        return {}
    mapped, lower = _tables(folder, header, segment, report)
    if (folder.path / LOADING).exists():
        report.repairs.append("nvme: the tables in shared memory were just being filled: they are recreated")
        lower = {}
    for tier in dict.fromkeys((Tier.DRAM, Tier.NVME, *(table.tier for table in lower.values()))):
        mine = [table for table in (*mapped.values(), *lower.values()) if table.tier == tier]
        snapshots = [snapshot(table) for table in mine]
        for table in mine:
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
    """The tables of the segment's extents, and those of the devices' extents."""
    devices = NvmeMap.open(folder)
    mapped: Tables = {}
    lower: Tables = {}
    places: set[tuple[Tier, int]] = set()
    for number in folder.extents():
        table, tables, positions = ExtentTable.open(folder, number, header.incarnation), mapped, segment.positions
        if table is None and devices is not None:
            table, tables, positions = ExtentTable.open(folder, number, devices.incarnation), lower, sys.maxsize
        if table is None:
            report.findings.append(f"records-{number}: cannot be believed: the extent is lost with its pages")
            continue
        place = table.tier, table.position
        if place in places or table.position >= positions:
            report.findings.append(f"{table.tier}: extent {number}: position {table.position} is not its own")
            continue
        places.add(place)
        tables[number] = table
    if devices is not None:
        devices.close()
    return mapped, lower


def _sealed(table: ExtentTable) -> npt.NDArray[np.intp]:
    return np.flatnonzero((table.words & np.uint64(0xFF)) == FrameState.SEALED)


def _verify_records(table: ExtentTable, report: Report) -> None:
    """States that there are, and sums of what is sealed."""
    states = (table.words & np.uint64(0xFF)).astype(np.uint8)
    for frame in np.flatnonzero(states > max(FrameState)).tolist():
        report.findings.append(f"{table.tier}: extent {table.extent} frame {frame}: is in no state, {states[frame]}")
    written = states == FrameState.SEALED
    sums = np.array(table.identity_sums(slice(0, table.frames)), np.uint64)
    for frame in np.flatnonzero(written & (sums != table.column(table.fmt.identity_sum))).tolist():
        report.damage(table.tier, table.extent, frame, table.key(frame), "record")
    for state in (FrameState.RESERVED, FrameState.RETIRING, FrameState.QUARANTINED):
        count = int((states == state).sum())
        if count:
            report.repairs.append(f"{table.tier}: extent {table.extent}: {count} frames are {state.name.lower()}")


def _verify_closure(tier: Tier, snapshots: list[Snapshot], report: Report) -> None:
    """Every page's parent is there, and no page twice."""
    links = prefix_links.link(snapshots)
    for i in np.flatnonzero(links.parent == -2).tolist():
        report.findings.append(f"{tier}: {links.address(i)}, page {links.key(i).hex()}: its parent is not stored")
    for i in np.flatnonzero(links.duplicate).tolist():
        report.findings.append(f"{tier}: {links.address(i)}: a second page has the key {links.key(i).hex()}")


def _verify_index(folder: NodeFolder, header: Header, tier: Tier, snapshots: list[Snapshot], report: Report) -> None:
    """Entries and sealed records are the same; of a killed node, as far as both are there."""
    index = Index.open_reader(folder, header.epoch)
    try:
        entries = None if index is None else dict(index.scan(tier))
    except IndexDamaged:
        entries = None
    finally:
        if index is not None:
            index.close()
    if entries is None:
        report.findings.append(f"index: epoch {header.epoch} is absent or damaged: the next start recreates it")
        return
    differ = report.findings if report.state == "stopped" else report.repairs
    by_extent = {one.extent: one for one in snapshots}
    for key, raw in entries.items():
        address = Address(*ADDRESS.unpack(raw))
        fault = _entry_fault(key, address, by_extent.get(address.extent))
        if fault:
            # A sound word under another key does not depend on when it was read.
            wrong = report.findings if fault == "holds another key" else differ
            wrong.append(f"{tier}: index {key.hex()}: {address} {fault}")
    links = prefix_links.link(snapshots)
    for i, key in enumerate(links.keys.tolist()):
        if key.ljust(16, b"\0") not in entries:
            differ.append(f"{tier}: {links.address(i)}, page {links.key(i).hex()}: is not in the index")


def _entry_fault(key: bytes, address: Address, found: Snapshot | None) -> str:
    if found is None or address.frame >= len(found.words):
        return "is not a frame"
    if int(found.words[address.frame]) != address.generation << 8 | FrameState.SEALED:
        return "is not sealed under that generation"
    return "" if bytes(found.keys[address.frame]).ljust(16, b"\0") == key else "holds another key"


def _verify_puts(folder: NodeFolder, header: Header, report: Report) -> None:
    """What clients published and no daemon has taken in: the next start does."""
    puts = PutLog.open(folder, header.puts_id, writable=False)
    if puts is None:
        if header.puts_id:
            report.findings.append("puts: is absent or damaged: what was published there and not taken in is lost")
        return
    for slot in puts.waiting():
        session, count = puts.session(slot), 0
        try:
            for _ in puts.records(slot) if session else ():
                count += 1
        except LogDamaged as error:
            report.findings.append(f"puts: session {session:016x}: {error}: what it published from there on is lost")
        if count:
            report.repairs.append(f"puts: session {session:016x}: {count} puts are published and not taken in")


def _verify_pages(table: ExtentTable, data: npt.NDArray[np.uint8], extent_bytes: int, report: Report) -> None:
    """Checksums of the pages in DRAM."""
    about, fmt = table.frame_class, table.fmt
    start = SEGMENT_HEAD_BYTES + table.position * extent_bytes
    stamped = table.column(fmt.info) >> np.uint64(48) & np.uint64(STAMPED)
    sums = table.rows[:, fmt.checksums].view("<u4")
    for frame in _sealed(table).tolist():
        if not stamped[frame]:
            report.unstamped += 1
            continue
        at = start + frame * about.frame_bytes
        page = data[at : at + about.page_bytes]
        if len(page) != about.page_bytes or not np.array_equal(layer_sums(page, about.layers), sums[frame]):
            report.damage(table.tier, table.extent, frame, table.key(frame), "data")
        report.verified[str(table.tier)] += 1
