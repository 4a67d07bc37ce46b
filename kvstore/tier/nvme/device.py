"""NvmeDevice: one NVMe device (a file or a block device), as its owner uses it. Pages survive a loss of power.

``table`` has the layout of the device, ``frame_header`` the headers of frames, and ``map`` how clients read it. The
node uses several devices as one row of positions, ``devices.NvmeDevices``.

Durability, in the order in which the owner calls::

    open_for_writing(positions)         from now on, the next start ignores their directories
    write_run(...), write_page(...)     any number, from any threads
    sync()                              the pages are durable; now records and index may name them
    close_for_writing(positions)        after records and index do

    v = version(p)                      a checkpoint: the next start need not scan this extent
    write_directory(p, snapshot of its records)
    mark_clean({p: v})                  only if nothing was written since; durable when it returns

A call that raises OSError does not change anything that was stored before. A frame that was being written then has
undefined contents, and its header or checksums show it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from kvstore import failpoint
from kvstore.model.replica import FrameClass
from kvstore.tier.base import Bytes
from kvstore.tier.nvme import geometry
from kvstore.tier.nvme.disk import Disk, aligned_buffer
from kvstore.tier.nvme.table import ExtentOnDisk, Superblock, Table, frame_offset, pack_directory, unpack_directory
from kvstore.tier.nvme.target import NO_EXTENTS, extents_in_tail, open_target, read_table, restore_tail, tail_is_absent

__all__ = ["ExtentOnDisk", "NvmeDevice"]

CONTACT_MINUTES = 10  # between two notes of a contact
log = logging.getLogger("kvstore.nvme")


class NvmeDevice:
    """One device, from ``open`` until ``close``, which keeps the pages. Methods may be called from any thread.

    Life of an extent on the device::

        empty ──carve──> being written ──mark_clean──> clean ──open_for_writing──> being written
          ^─────────────────────────────drop────────────────────────────────────────────┘

    Attributes:
        incarnation, extent_bytes, positions: as in ``TierStore``.
        disk: the file or device.
        starts: how often an owner has opened it, including this time. Generations have it in their high bits,
            which makes them unique across starts.
        extents: the carved extents by position. Replaced, never changed in place.
        doubted: numbers of the extents that might have lost frames when the device's tail was cut off. Only a scan can
            show which frames are lost.
    """

    def __init__(self, disk: Disk, superblock: Superblock, table: Table, slot: int) -> None:
        self.disk = disk
        self.superblock = superblock
        self.incarnation = superblock.incarnation
        self.extent_bytes = superblock.extent_bytes
        self.positions = superblock.positions
        self.extents = table.extents()
        self.doubted: frozenset[int] = NO_EXTENTS
        self._slot = slot  # the slot of the newest table
        self._table = table
        self._table_mutex = threading.Lock()  # admits one writer of tables; held during their I/O
        self._sync_mutex = threading.Lock()
        self._mutex = threading.Lock()  # guards all following attributes; never held during I/O
        self._needs_sync = False
        self._versions: Counter[int] = Counter()
        self._writers: Counter[int] = Counter()
        self._directories: dict[int, tuple[int, int]] = {}  # (version, sum) of the last directory at each position
        self._day, self._day_bytes = table.day, table.day_bytes
        self._has_failed = False  # a sync failed, so writes may be lost

    @classmethod
    def open(
        cls,
        disk: Disk,
        owner: str,
        extent_bytes: int,
        format: bool = False,
        secret: bytes | None = None,
        is_file: bool = False,
    ) -> NvmeDevice:
        """Become the owner of the device. Formats the disk if it is blank, or if ``format`` is true.

        ``owner`` is the node's name, "" for an embedded store. ``secret`` and ``is_file``: see ``open_target``. After a
        failure the caller closes the disk.

        Raises:
            InvalidRequest: field "nvme". The disk belongs to another owner, has another size or version, is too small,
                or holds other data. Nothing was changed. The reason names ``--format``.
            OSError: the disk fails.
        """
        superblock = open_target(disk, owner, extent_bytes, format, secret, is_file)
        table, slot = read_table(disk, superblock)
        device = cls(disk, superblock, table, slot)
        device.raise_starts(table.starts + 1)
        if tail_is_absent(disk):
            device._restore_tail()
        return device

    @property
    def starts(self) -> int:
        """See the class."""
        return self._table.starts

    def raise_starts(self, starts: int) -> None:
        """Raise ``starts`` to at least this number, durably. Both slots are written, so that the loss of one slot
        cannot bring back old numbers."""
        with self._table_mutex:
            if self._table.starts < starts:
                self._store(replace(self._table, starts=starts))
                self._store(self._table)

    def _restore_tail(self) -> None:
        positions = extents_in_tail(self.disk, self.superblock, self.extents)
        log.warning(
            "%s: its tail was cut off and now reads as zeros; %d of its %d extents are scanned for remaining pages",
            *(self.disk.path, len(positions), len(self.extents)),
        )
        with self._table_mutex:
            clean = {p: replace(self.extents[p], clean=False) for p in positions if self.extents[p].clean}
            if clean:
                self._change(dict(clean))
        self.doubted = frozenset(self.extents[position].number for position in positions)
        restore_tail(self.disk, self.superblock)

    # --- extents ----------------------------------------------------------------------------------------------------

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return geometry.frames_in(self.extent_bytes, frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return geometry.header_bytes(frame_class)

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``. Durable when it returns. The position is not yet open for writing.

        Raises:
            OSError: the extent is not carved. The next start may find it carved and empty.
        """
        frames = self.frames_of(frame_class)
        with self._table_mutex:
            assert 0 <= position < self.positions and position not in self.extents and frames, (position, frames)
            self._change({position: ExtentOnDisk(position, number, frame_class, frames, clean=False)})

    def drop(self, position: int) -> None:
        """See ``TierStore``. Durable when it returns.

        Raises:
            OSError: the extent is still carved. The next start might or might not find it.
        """
        with self._table_mutex:
            assert position in self.extents and not self._writers[position], position
            self._change({position: None})
            self._directories.pop(position, None)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """Allow writes to frames there, until ``close_for_writing``. Waits for the disk if an extent was clean.

        Raises:
            OSError: none of the positions is open.
        """
        chosen = set(positions)
        with self._table_mutex:
            assert chosen <= self.extents.keys(), chosen
            stale = {p: replace(self.extents[p], clean=False) for p in chosen if self.extents[p].clean}
            if stale:
                self._change(dict(stale))
            with self._mutex:
                self._versions.update(chosen)
                self._writers.update(chosen)

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """End writing. Call this once the pages are synced and their records stored, or once they are given up."""
        chosen = set(positions)
        with self._mutex:
            assert all(self._writers[position] > 0 for position in chosen), chosen
            self._versions.update(chosen)
            self._writers.subtract(chosen)

    def withdraw(self, position: int, number: int) -> None:
        """Make the directory of this extent invalid. Does nothing if the position has another extent now.

        Raises:
            OSError: the next start may still use the directory.
        """
        with self._table_mutex:
            extent = self.extents.get(position)
            if extent is not None and extent.number == number:
                with self._mutex:
                    self._versions.update([position])
                if extent.clean:
                    self._change({position: replace(extent, clean=False)})

    def version(self, position: int) -> int:
        """Return a number that changes when a write there begins or ends, or the directory is withdrawn.

        Read it before the records of a checkpoint.
        """
        with self._mutex:
            return self._versions[position]

    # --- frames -----------------------------------------------------------------------------------------------------

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self._write(position, frame, frame_class, [header, page])

    def write_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """Write consecutive frames in one request. Durable after ``sync``.

        ``frames`` is contiguous, ``[count, stride_bytes]``; each row is a header followed by its page.

        Raises:
            OSError: these frames may now hold anything.
        """
        self._write(position, first, frame_class, [frames])

    def _write(self, position: int, first: int, frame_class: FrameClass, buffers: list[Bytes]) -> None:
        assert self._writers[position] and self.extents[position].frame_class == frame_class, "not open for writing"
        self.disk.write(self._offset(position, first, frame_class, buffers), buffers)
        self._needs_sync = True  # after the write, because a sync during the write might not cover it

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        buffers = [header, page]
        self.disk.read(self._offset(position, frame, frame_class, buffers), buffers)

    def read_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """Read consecutive frames in one request, in the form that ``write_run`` takes.

        Raises:
            OSError: the contents of ``frames`` are undefined.
        """
        self.disk.read(self._offset(position, first, frame_class, [frames]), [frames])

    def _offset(self, position: int, first: int, frame_class: FrameClass, buffers: list[Bytes]) -> int:
        """Return the offset on the device where these frames begin. ``buffers`` must have entire frames."""
        count, excess = divmod(sum(buffer.nbytes for buffer in buffers), geometry.stride_bytes(frame_class))
        assert count and not excess, "not entire frames"
        return frame_offset(self.superblock, position, frame_class, first, count)

    def read_header(self, position: int, frame: int, frame_class: FrameClass, header: Bytes) -> None:
        """Read only a frame's header ``[header_bytes]``.

        Raises:
            OSError: the contents of the buffer are undefined.
        """
        assert header.nbytes == geometry.header_bytes(frame_class), header.nbytes
        self.disk.read(frame_offset(self.superblock, position, frame_class, frame), [header])

    def erase_header(self, position: int, frame: int, frame_class: FrameClass) -> None:
        """Overwrite a frame's header with zeros, so that its contents are not mistaken for a page. Durable after
        ``sync``.

        Raises:
            OSError: the header might or might not be erased.
        """
        assert self._writers[position] and self.extents[position].frame_class == frame_class, "not open for writing"
        blank = aligned_buffer(geometry.header_bytes(frame_class))
        self.disk.write(frame_offset(self.superblock, position, frame_class, frame), [blank])
        self._needs_sync = True

    def sync(self) -> None:
        """See ``TierStore``. Free if nothing was written since the last sync.

        Raises:
            OSError: everything written since the last sync must be given up. The device accepts no more writes.
        """
        with self._sync_mutex:  # a second thread waits for the sync that covers its writes
            if self._needs_sync or self._has_failed:  # fail even if another thread's sync has lost our writes
                self._needs_sync = False  # first, since later writes need another sync
                self._flush()

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def write_directory(self, position: int, rows: Bytes) -> None:
        """Write an extent's records ``[frames, 96]``. Without effect before ``mark_clean``.

        Raises:
            OSError: the next start scans the extent.
        """
        extent = self.extents[position]
        blocks, total = pack_directory(self.incarnation, extent, rows)
        version = self.version(position)
        start = self.superblock.data_start + position * self.extent_bytes
        self.disk.write(start, [blocks])
        self._needs_sync = True
        self._directories[position] = version, total

    def mark_clean(self, versions: dict[int, int]) -> set[int]:
        """Let the next start use the directories of these extents, if their ``version`` has not changed and no write is
        in progress. Return the extents that are now clean. The change is durable.

        Raises:
            OSError: the next start may scan them.
        """
        with self._table_mutex:
            clean = {}
            for position, version in versions.items():
                extent, directory = self.extents.get(position), self._directories.get(position)
                if extent is None or directory is None or directory[0] != version or self._writers[position]:
                    continue
                if self.version(position) == version:
                    clean[position] = replace(extent, clean=True, directory_sum=directory[1])
            if any(self.extents[position] != extent for position, extent in clean.items()):
                # One sync for both. If only the table is durable, the sum that it names does not match the directory.
                self._change(dict(clean))
            return set(clean)

    def directory(self, position: int) -> Bytes | None:
        """Return the records ``[frames, row_bytes]`` of a clean extent, as of its checkpoint.

        None if the extent is not clean, or its directory is damaged. Then it has to be scanned.

        Raises:
            OSError: the disk fails.
        """
        extent = self.extents.get(position)
        if extent is None or not extent.clean:
            return None
        blocks = aligned_buffer(geometry.directory_bytes(extent.frame_class, extent.frames))
        self.disk.read(self.superblock.data_start + position * self.extent_bytes, [blocks])
        return unpack_directory(self.incarnation, extent, blocks)

    # --- contact of the owner with its pool -------------------------------------------------------------------------

    @property
    def contact(self) -> int | None:
        """When the owner last had contact with its pool, in minutes since the epoch; 0 for never. None if the device
        has no extents, so that nothing on it can be outdated."""
        return self._table.contact if self.extents else None

    def note_contact(self, minute: int) -> None:
        """Store the time of a contact durably, unless the stored one is nearly as late. Raises OSError."""
        with self._table_mutex:
            if minute - self._table.contact >= CONTACT_MINUTES:
                self._store(replace(self._table, contact=minute))

    # --- daily writes -----------------------------------------------------------------------------------------------

    def add_written(self, day: int, nbytes: int) -> None:
        """Count bytes written on that day. A kill loses the bytes that were counted since the table was last
        written."""
        with self._mutex:
            self._day_bytes = nbytes + (self._day_bytes if day == self._day else 0)
            self._day = day

    def written_today(self, day: int) -> int:
        """Return how many bytes were counted on that day."""
        with self._mutex:
            return self._day_bytes if day == self._day else 0

    def close(self) -> None:
        """Store the counted bytes, and close the disk. No other call may be in progress."""
        try:
            with self._table_mutex:
                if (self._day, self._day_bytes) != (self._table.day, self._table.day_bytes):
                    self._store(self._table)
        except OSError as error:
            log.warning("%s: bytes written today could not be stored: %s", self.disk.path, error)
        self.disk.close()

    def _change(self, changes: dict[int, ExtentOnDisk | None]) -> None:
        """Make these changes durable, then visible."""
        self._store(self._table.with_extents(changes))
        extents = {**self.extents, **changes}
        self.extents = {position: extent for position, extent in extents.items() if extent is not None}

    def _store(self, table: Table) -> None:
        """Write the next table over the older slot. When this returns, the new table is valid; when it raises, the old
        one."""
        with self._mutex:
            day, day_bytes = self._day, self._day_bytes
        table = replace(table, sequence=self._table.sequence + 1, day=day, day_bytes=day_bytes)
        slot = 1 - self._slot
        self.disk.write(self.superblock.slot(slot), [table.packed(self.superblock)])
        if failpoint.ACTIVE:
            failpoint.hit("nvme.table")
        self._flush()
        self._slot, self._table = slot, table

    def _flush(self) -> None:
        """Sync the disk. Fails after any failed sync: the kernel reports lost writes to one sync only, so a later sync
        would succeed although writes are lost."""
        if self._has_failed:
            raise OSError(errno.EIO, "a sync failed before", self.disk.path)
        try:
            self.disk.sync()
        except OSError:
            self._has_failed = True
            raise
