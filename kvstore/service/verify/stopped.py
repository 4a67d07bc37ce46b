"""Verification of a node whose daemon is not running: records, index, checksums and laws, from its files alone.

Nothing is changed: files are mapped for reading, and the node's lock is not shared with a writer, so that no
daemon starts in the meantime. Two kinds of things are told apart. *Findings* are damage: a sealed page that does not
hold, a law that is broken. *Repairs* are what the next start puts right as it always does: an index that a kill left a
decision behind the records, frames that were being written, one of two copies of a superblock.

The index of a node that was killed may name pages that have gone, or miss those that came last; the index of a node
that was stopped must not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.config import NvmeTarget
from kvstore.errors import InvalidRequest, NodeUnavailable
from kvstore.model.replica import ADDRESS, STAMPED, Address, FrameState, Tier
from kvstore.service.node.index_keeper import snapshot
from kvstore.service.node.nvme_start import LOADING
from kvstore.service.verify.report import Report
from kvstore.service.verify.stopped_nvme import verify_targets
from kvstore.state import closure
from kvstore.state.views import Snapshot
from kvstore.tier.dram import SEGMENT_HEAD_BYTES, SegmentFile, SegmentMap
from kvstore.tier.folder import NodeFolder
from kvstore.tier.frame_header import layer_sums
from kvstore.tier.header import DaemonState, Header, boot_id
from kvstore.tier.index import Index, IndexDamaged
from kvstore.tier.nvme_map import NvmeMap
from kvstore.tier.put_log import LogDamaged, PutLog
from kvstore.tier.records import ExtentTable


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
        report.findings.append("header: is absent or damaged: the next start begins anew, without these pages")
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
        report.repairs.append("nvme: the tables in shared memory were just being filled: they are made anew")
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
    links = closure.link(snapshots)
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
        report.findings.append(f"index: epoch {header.epoch} is absent or damaged: the next start makes it anew")
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
    links = closure.link(snapshots)
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
