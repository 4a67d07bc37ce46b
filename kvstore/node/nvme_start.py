"""Start of the NVMe tier: from the targets of the configuration to extents that the recovery can read.

After a kill the tables in shared memory are the truth. After a reboot, or for devices that come from elsewhere, they
are made again: from an extent's directory where its checkpoint is younger than its last write, else with every frame
QUARANTINED, for the scanner to look at. A target that fails is left out: the node goes on with less, and says so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from kvstore import failpoint
from kvstore.config import MIB, NodeConfig, NvmeTarget
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.model.replica import FRAME_ALIGN, FrameState, word_of
from kvstore.node.nvme_pages import NvmePages
from kvstore.safe_files import remove
from kvstore.shm.folder import EMBEDDED_PREFIX, NodeFolder
from kvstore.shm.records import ExtentTable
from kvstore.tier.nvme.device import ExtentOnDisk, NvmeDevice
from kvstore.tier.nvme.devices import NvmeDevices
from kvstore.tier.nvme.disk import Disk, FileDisk, open_patiently
from kvstore.tier.nvme.table import Superblock
from kvstore.tier.nvme.target import is_truncated, read_superblock

log = logging.getLogger("kvstore.nvme")

LOADING = "nvme-loading"  # a file that is there while tables are being filled
EXTENTS_AIMED_AT = 64  # of a device: few enough to keep tables of, enough for several classes of frames
EXTENT_BYTES_MIN, EXTENT_BYTES_MAX = 16 * MIB, 4096 * MIB

Mine = tuple[str, bytes | None]
"""Whose a target is to be: owner, and secret of the pool."""


def secret_on_nvme(config: NodeConfig, folder: NodeFolder) -> bytes | None:
    """The secret of the pool that the first target which is this node's has pages of; None: no target is."""
    return next((block.secret for block in _superblocks(config) if block.owner == _owner(config, folder)), None)


def _superblocks(config: NodeConfig) -> Iterator[Superblock]:
    """The superblocks of targets that a kvstore uses already, ours or another's."""
    for target in config.nvme:
        with contextlib.suppress(InvalidRequest, OSError):
            look = partial(_to_look_at, target.path, target.size)
            disk = open_patiently(str(target.path), target.size, config.nvme_answer_s, look)
            try:
                superblock = read_superblock(disk)
            finally:
                disk.close()
            if superblock is not None:
                yield superblock


def _owner(config: NodeConfig, folder: NodeFolder) -> str:
    return "" if folder.path.name.startswith(EMBEDDED_PREFIX) else config.name


def open_nvme(
    config: NodeConfig, folder: NodeFolder, failures: dict[str, str], secret: bytes | None = None
) -> NvmePages | None:
    """Open all targets; None where there are none, or none that works. Those that fail are added to ``failures``.
    New ones get the pool's ``secret``.

    Raises:
        InvalidRequest: field "nvme"; a target holds something else, or is another node's or pool's, and --format is
            not given.
        NodeBusy: a target is in use.
    """
    devices: list[NvmeDevice] = []
    extent_bytes = extent_bytes_of(config)
    mine = _owner(config, folder), secret
    try:
        for target in config.nvme:
            try:
                devices.append(_open_device(config, target, mine, extent_bytes, folder.file_mode))
            except (OutOfSpace, OSError) as error:
                _leave_out(str(target.path), error, failures)
        return _joined(devices, failures)
    except BaseException:
        for device in devices:
            device.close()
        raise


def _open_device(config: NodeConfig, target: NvmeTarget, mine: Mine, extent_bytes: int, mode: int) -> NvmeDevice:
    """Open one target; reformat it, if ``format`` allows it, only where it is of no use as it is: a unit file that
    keeps the flag must not drop everything at every start."""
    try:
        return _open_or_make(config, target, mine, extent_bytes, mode, format=False)
    except InvalidRequest:
        if not config.nvme_format:
            raise
    return _open_or_make(config, target, mine, extent_bytes, mode, format=True)


def _open_or_make(
    config: NodeConfig, target: NvmeTarget, mine: Mine, extent_bytes: int, mode: int, format: bool
) -> NvmeDevice:
    def open_it() -> Disk:
        is_ours = partial(is_truncated, owner=owner, extent_bytes=extent_bytes, secret=secret)
        return FileDisk.open(target.path, target.size, create=True, resize=format, is_truncated=is_ours, mode=mode)

    owner, secret = mine
    disk = open_patiently(str(target.path), target.size, config.nvme_answer_s, open_it)
    try:
        return NvmeDevice.open(disk, owner, extent_bytes, format, secret, is_file=target.path.is_file())
    except BaseException:
        disk.close()
        raise


def _joined(devices: list[NvmeDevice], failures: dict[str, str]) -> NvmePages | None:
    """All of ``devices`` but those that fail now, which are taken out of the list."""
    while devices:
        try:
            return NvmePages(NvmeDevices.join(devices))
        except OSError as error:
            failed = next((device for device in devices if device.disk.path == error.filename), devices[-1])
            devices.remove(failed)
            failed.close()
            _leave_out(failed.disk.path, error, failures)
    return None


def _leave_out(path: str, error: Exception, failures: dict[str, str]) -> None:
    failures[path] = str(error)
    log.warning("NVMe target left out, the node goes on without it: %s", error)


def extent_bytes_of(config: NodeConfig) -> int:
    """Size of the extents, the same on all devices: as configured, as of a target that has some, or a share of the
    smallest one."""
    if config.nvme_extent or not config.nvme:
        return config.nvme_extent
    for superblock in _superblocks(config):
        if superblock.complete and superblock.extent_bytes:
            return superblock.extent_bytes
    size_bytes = min(target.size for target in config.nvme)
    share = min(max(size_bytes // EXTENTS_AIMED_AT, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX, size_bytes // 4)
    unit = MIB if share >= MIB else FRAME_ALIGN
    return max(FRAME_ALIGN, share // unit * unit)


def _to_look_at(path: Path, size_bytes: int) -> Disk:
    return FileDisk.open(path, size_bytes, writable=False)


def open_tables(folder: NodeFolder, nvme: NvmePages, tables: dict[int, ExtentTable]) -> None:
    """Add the NVMe extents' tables to ``tables``: those in shared memory that the devices know; the others are
    recreated.

    ``tables`` holds what is mapped so far, NVMe's included; those of extents that no device knows, or that lost frames
    with a device's tail, are taken out.
    """
    known = {extent.number: extent for extent in nvme.devices.extents.values()}
    loading = folder.path / LOADING  # tables that are only half filled must not be taken for the truth
    for number, table in list(tables.items()):
        doubted = loading.exists() or number in nvme.devices.doubted
        if table.tier == nvme.tier and (doubted or not _is_same(table, known.get(number))):
            tables.pop(number).unlink()
            table.close()
    missing = [extent for number, extent in sorted(known.items()) if number not in tables]
    if missing:
        folder.new_file(loading, 1, b"", sparse=True)
        for extent in missing:
            tables[extent.number] = _from_disk(folder, nvme, extent)
            if failpoint.ACTIVE:
                failpoint.hit("nvme.loaded")
        remove(loading)


def _is_same(table: ExtentTable, extent: ExtentOnDisk | None) -> bool:
    return extent is not None and (table.position, table.frame_class, table.frames) == (
        extent.position,
        extent.frame_class,
        extent.frames,
    )


def _from_disk(folder: NodeFolder, nvme: NvmePages, extent: ExtentOnDisk) -> ExtentTable:
    place = extent.number, extent.position, extent.frame_class, nvme.incarnation, extent.frames
    table = ExtentTable.create(folder, *place, tier=nvme.tier)
    directory = None
    if extent.clean:
        try:
            directory = nvme.devices.directory(extent.position)
        except OSError as error:
            log.error("a directory could not be read: %s", error)
    if directory is None:
        table.words[:] = word_of(0, FrameState.QUARANTINED)
        return table
    table.rows[:, 8:] = directory[:, 8:]
    words = np.ascontiguousarray(directory[:, :8]).view(np.uint64).reshape(-1)
    sealed = (words & np.uint64(0xFF)) == FrameState.SEALED
    table.words[:] = np.where(sealed, words, words & ~np.uint64(0xFF))
    return table
