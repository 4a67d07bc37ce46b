"""Start of the NVMe tier: opens the configured targets, and provides the tables of their extents for the recovery.

After a kill, the tables in shared memory are valid. After a reboot, or for devices from elsewhere, they are created
again. If nothing was written to an extent after its checkpoint, its directory has the records. Otherwise every frame of
the extent becomes QUARANTINED, for the scanner to read. The node starts without a target that fails, and logs it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import partial

import numpy as np

from kvstore import failpoint
from kvstore.config import MIB, NodeConfig, NvmeTarget
from kvstore.errors import InvalidRequest, OutOfSpace
from kvstore.model.replica import FRAME_ALIGN, FrameState, in_state, word_of
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

LOADING = "nvme-loading"  # a file that exists while tables are being filled
EXTENTS_AIMED_AT = 64  # per device: few tables, but enough extents for several classes of frames
EXTENT_BYTES_MIN, EXTENT_BYTES_MAX = 16 * MIB, 4096 * MIB

Ownership = tuple[str, bytes | None]
"""The owner and the pool's secret that a target must have."""


def secret_on_nvme(config: NodeConfig, folder: NodeFolder) -> bytes | None:
    """Return the pool's secret from the first target that this node owns; None if it owns none."""
    return next((block.secret for block in _superblocks(config) if block.owner == _owner(config, folder)), None)


def _superblocks(config: NodeConfig) -> Iterator[Superblock]:
    """Yield the superblocks of all targets that a node has formatted."""
    for target in config.nvme:
        with contextlib.suppress(InvalidRequest, OSError):
            open_disk = partial(FileDisk.open, target.path, target.size, writable=False)
            disk = open_patiently(str(target.path), target.size, config.nvme_answer_s, open_disk)
            try:
                superblock = read_superblock(disk)
            finally:
                disk.close()
            if superblock is not None:
                yield superblock


def _owner(config: NodeConfig, folder: NodeFolder) -> str:
    return "" if folder.path.name.startswith(EMBEDDED_PREFIX) else config.name  # "": a pool without a name


def open_nvme(
    config: NodeConfig, folder: NodeFolder, failures: dict[str, str], secret: bytes | None = None
) -> NvmePages | None:
    """Open all targets. Returns None if there are no targets, or if none of them works.

    Adds targets that fail to ``failures``. New targets get the pool's ``secret``.

    Raises:
        InvalidRequest: field "nvme"; a target has other data, or belongs to another node or pool, and --format is not
            given.
        NodeBusy: a target is in use.
    """
    devices: list[NvmeDevice] = []
    extent_bytes = extent_bytes_of(config)
    ownership = _owner(config, folder), secret
    try:
        for target in config.nvme:
            try:
                devices.append(_open_device(config, target, ownership, extent_bytes, folder.file_mode))
            except (OutOfSpace, OSError) as error:
                _log_failure(str(target.path), error, failures)
        return _join(devices, failures)
    except BaseException:
        for device in devices:
            device.close()
        raise


def _open_device(
    config: NodeConfig, target: NvmeTarget, ownership: Ownership, extent_bytes: int, mode: int
) -> NvmeDevice:
    """Open one target. Reformat it only if ``nvme_format`` is set and it cannot be used as it is.

    So a unit file can always have the flag without dropping all pages at every start.
    """
    try:
        return _open_or_create(config, target, ownership, extent_bytes, mode, format=False)
    except InvalidRequest:
        if not config.nvme_format:
            raise
    return _open_or_create(config, target, ownership, extent_bytes, mode, format=True)


def _open_or_create(
    config: NodeConfig, target: NvmeTarget, ownership: Ownership, extent_bytes: int, mode: int, format: bool
) -> NvmeDevice:
    def open_disk() -> Disk:
        is_ours = partial(is_truncated, owner=owner, extent_bytes=extent_bytes, secret=secret)
        return FileDisk.open(target.path, target.size, create=True, resize=format, is_truncated=is_ours, mode=mode)

    owner, secret = ownership
    disk = open_patiently(str(target.path), target.size, config.nvme_answer_s, open_disk)
    try:
        return NvmeDevice.open(disk, owner, extent_bytes, format, secret, is_file=target.path.is_file())
    except BaseException:
        disk.close()
        raise


def _join(devices: list[NvmeDevice], failures: dict[str, str]) -> NvmePages | None:
    """Join the devices into one tier. Closes devices that fail, and removes them from the list."""
    while devices:
        try:
            return NvmePages(NvmeDevices.join(devices))
        except OSError as error:
            failed = next((device for device in devices if device.disk.path == error.filename), devices[-1])
            devices.remove(failed)
            failed.close()
            _log_failure(failed.disk.path, error, failures)
    return None


def _log_failure(path: str, error: Exception, failures: dict[str, str]) -> None:
    failures[path] = str(error)
    log.warning("NVMe target left out, the node goes on without it: %s", error)


def extent_bytes_of(config: NodeConfig) -> int:
    """Return the size of the extents, which is the same on all devices.

    It is the configured size, or the size on a target with pages, or a share of the smallest target.
    """
    if config.nvme_extent or not config.nvme:
        return config.nvme_extent
    for superblock in _superblocks(config):
        if superblock.complete and superblock.extent_bytes:
            return superblock.extent_bytes
    size_bytes = min(target.size for target in config.nvme)
    share = min(max(size_bytes // EXTENTS_AIMED_AT, EXTENT_BYTES_MIN), EXTENT_BYTES_MAX, size_bytes // 4)
    unit = MIB if share >= MIB else FRAME_ALIGN
    return max(FRAME_ALIGN, share // unit * unit)


def open_tables(folder: NodeFolder, nvme: NvmePages, tables: dict[int, ExtentTable]) -> None:
    """Add the missing tables of NVMe extents to ``tables``, which has all tables that could be mapped.

    Removes the tables of extents that are on no device, and of extents that lost frames with a device's tail.
    """
    extents = {extent.number: extent for extent in nvme.devices.extents.values()}
    loading = folder.path / LOADING  # if it exists, tables are only partly filled because of a kill
    for number, table in list(tables.items()):
        is_doubtful = loading.exists() or number in nvme.devices.doubted
        if table.tier == nvme.tier and (is_doubtful or not _is_same(table, extents.get(number))):
            tables.pop(number).unlink()
            table.close()
    missing = [extent for number, extent in sorted(extents.items()) if number not in tables]
    if missing:
        folder.new_file(loading, 1, b"", sparse=True)
        for extent in missing:
            tables[extent.number] = _create_table(folder, nvme, extent)
            if failpoint.ACTIVE:
                failpoint.hit("nvme.loaded")
        remove(loading)


def _is_same(table: ExtentTable, extent: ExtentOnDisk | None) -> bool:
    return extent is not None and (table.position, table.frame_class, table.frames) == (
        extent.position,
        extent.frame_class,
        extent.frames,
    )


def _create_table(folder: NodeFolder, nvme: NvmePages, extent: ExtentOnDisk) -> ExtentTable:
    """Create an extent's table from its directory. Without a directory, all its frames are QUARANTINED."""
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
    table.words[:] = np.where(in_state(words, FrameState.SEALED), words, words & ~np.uint64(0xFF))
    return table
