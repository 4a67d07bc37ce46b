"""DRAM tier: the segment file that holds the pages of one node, as its owner and as a client maps it.

``segment`` is 2 MiB of head and then ``positions * extent_bytes`` of data. An extent is in one position; its frame
``f`` starts at ``SEGMENT_HEAD_BYTES + position * extent_bytes + f * frame_bytes``. The file has its full length from
the start and never shrinks, but a position's memory is allocated when an extent is carved there (``populate``). Worked
example: extents of 64 MiB, frames of 256 KiB: frame 3 of the extent in position 2 is at 2 MiB + 128 MiB + 768 KiB.

``DramStore`` is the segment of a node as one of its tiers. Frames are mapped, and have no headers.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.model.replica import FrameClass, Tier
from kvstore.safe_files import open_plain
from kvstore.shm.folder import NodeFolder, allocate, list_nodes, purge, reap_embedded
from kvstore.shm.header import DaemonState, Header, unknown_version
from kvstore.shm.records import ExtentTable
from kvstore.tier.base import Bytes

__all__ = [
    "SEGMENT_HEAD_BYTES",
    "DaemonState",
    "ExtentTable",
    "Header",
    "NodeFolder",
    "SegmentFile",
    "SegmentMap",
    "check_space",
    "list_nodes",
    "purge",
    "reap_embedded",
]

SEGMENT_HEAD_BYTES: Final = 2 << 20  # so that every position is 2 MiB aligned
_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"KVSEGMT1", "little")
_HEAD = struct.Struct("<5Q")  # magic, version, incarnation, extent_bytes, positions
_MADV_REMOVE: Final = 9  # punches a hole into a tmpfs file
_MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; Python 3.11 has no name for it
# madvise keeps the interpreter's lock: steps of about a millisecond let other threads run in between.
_POPULATE_STEP_BYTES: Final = 16 << 20
# A cgroup with a higher limit than this has no limit (v1 says 2**63 rounded down to a page).
_NO_LIMIT: Final = 1 << 60


class _Segment:
    """The common part of owner and client: the whole segment, mapped shared and writable."""

    def __init__(self, path: Path, map_: mmap.mmap, extent_bytes: int, positions: int) -> None:
        self.path = path
        self.extent_bytes = extent_bytes
        self.positions = positions
        self._map = map_
        self._data: Bytes | None = np.frombuffer(map_, np.uint8, positions * extent_bytes, SEGMENT_HEAD_BYTES)

    @property
    def data(self) -> Bytes:
        """All positions, end to end, ``[positions * extent_bytes]`` uint8, writable."""
        assert self._data is not None, "closed"
        return self._data

    def close(self) -> None:
        """Unmap. If a view is still in use, the map stays until that view is gone. The file stays."""
        self._data = None
        with contextlib.suppress(BufferError):
            self._map.close()

    def _view(self, data: Bytes, position: int, frame_bytes: int, frames: int) -> Bytes:
        used = frames * frame_bytes
        assert 0 <= position < self.positions and 0 < used <= self.extent_bytes, (position, frame_bytes, frames)
        start = position * self.extent_bytes
        return data[start : start + used].reshape(frames, frame_bytes)

    def _populate_tables(self, position: int) -> None:
        """Fill this process's page tables for an allocated position, if the kernel can (5.14 or later)."""
        start = SEGMENT_HEAD_BYTES + position * self.extent_bytes
        stop = start + self.extent_bytes
        try:
            for step in range(start, stop, _POPULATE_STEP_BYTES):
                self._map.madvise(_MADV_POPULATE_WRITE, step, min(_POPULATE_STEP_BYTES, stop - step))
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOMEM, errno.EFAULT):
                raise


class SegmentFile(_Segment):
    """The owner's segment. Made by ``create`` or ``open``; ends with ``close()``, which keeps the file."""

    def __init__(self, path: Path, fd: int, extent_bytes: int, positions: int) -> None:
        super().__init__(path, _map(fd), extent_bytes, positions)
        self._fd = fd

    @classmethod
    def create(cls, folder: NodeFolder, incarnation: int, extent_bytes: int, positions: int) -> SegmentFile:
        """Make a new, sparse segment. It replaces an older one, whose maps keep the old bytes.

        ``extent_bytes`` is a multiple of 4 KiB. No memory is allocated but the head's.
        """
        assert extent_bytes > 0 and extent_bytes % mmap.PAGESIZE == 0 and positions > 0, (extent_bytes, positions)
        head = _HEAD.pack(_MAGIC, _VERSION, incarnation, extent_bytes, positions)
        folder.new_file(folder.segment, SEGMENT_HEAD_BYTES + positions * extent_bytes, head, sparse=True)
        segment = cls.open(folder, incarnation)
        assert segment is not None, "made just now"
        return segment

    @classmethod
    def open(cls, folder: NodeFolder, incarnation: int) -> SegmentFile | None:
        """Map the existing segment. Return None if it is absent, damaged or from another incarnation.

        Raises:
            VersionMismatch: the segment is from another version of the file format.
        """
        opened = _open(folder, incarnation)
        return cls(folder.segment, *opened) if opened else None

    @staticmethod
    def cut_to(folder: NodeFolder, incarnation: int) -> tuple[int, int] | None:
        """Return ``(extent_bytes, remaining bytes of data)`` of a segment whose tail was cut off; None for any other
        segment. Raises as ``open``."""
        try:
            fd = open_plain(folder.segment, os.O_RDWR)
        except FileNotFoundError:
            return None
        try:
            head, left = _head(folder, fd, incarnation), os.fstat(fd).st_size - SEGMENT_HEAD_BYTES
            return (head[0], left) if head is not None and left < head[0] * head[1] else None
        finally:
            os.close(fd)

    @staticmethod
    def lengthen(folder: NodeFolder, positions: int = 0) -> None:
        """Make room in the file for ``positions``, and for the positions that its head names. Existing maps keep their
        length.

        Raises:
            OSError: the file cannot be made longer.
        """
        fd = open_plain(folder.segment, os.O_RDWR)
        try:
            head = _HEAD.unpack(os.pread(fd, _HEAD.size, 0))
            positions = max(positions, head[4])
            os.ftruncate(fd, max(os.fstat(fd).st_size, SEGMENT_HEAD_BYTES + positions * head[3]))
            os.pwrite(fd, _HEAD.pack(*head[:4], positions), 0)
        finally:
            os.close(fd)

    @staticmethod
    def rename(folder: NodeFolder, old: int, new: int) -> None:
        """Change a segment's incarnation from ``old`` to ``new``. Any other segment stays as it is."""
        try:
            fd = open_plain(folder.segment, os.O_RDWR)
        except OSError:
            return
        try:
            head = _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
            if head[2] == old:
                os.pwrite(fd, _HEAD.pack(*head[:2], new, *head[3:]), 0)
        finally:
            os.close(fd)

    def populate(self, position: int) -> None:
        """Allocate a position's memory and this process's page tables. Stored data stays. This takes a while.

        Raises:
            OutOfSpace: there is not enough memory. The error names the remedy. The position must not be used.
        """
        assert 0 <= position < self.positions, position
        start = SEGMENT_HEAD_BYTES + position * self.extent_bytes
        allocate(self._fd, start, self.extent_bytes, str(self.path))
        self._populate_tables(position)

    def give_back(self, position: int) -> None:
        """Free a position's memory. No extent may be there. ``populate`` allocates the memory again."""
        start = SEGMENT_HEAD_BYTES + position * self.extent_bytes
        self._map.madvise(_MADV_REMOVE, start, self.extent_bytes)

    def frame_view(self, position: int, frame_bytes: int, frames: int) -> Bytes:
        """Return the frames of the extent in ``position``: ``[frames, frame_bytes]``, writable, not a copy."""
        return self._view(self.data, position, frame_bytes, frames)

    def close(self) -> None:
        """Unmap and close. If a view is still in use, the map stays until that view is gone. The file stays."""
        super().close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SegmentMap(_Segment):
    """A client's segment. Made by ``open``; ends with ``close()``.

    Callers may only ask for frames of carved extents (whose ``ExtentTable`` could be opened), because only their memory
    is allocated.
    """

    def __init__(self, path: Path, map_: mmap.mmap, extent_bytes: int, positions: int) -> None:
        super().__init__(path, map_, extent_bytes, positions)
        # Made over a read-only buffer, so that no caller can make it writable again.
        self._data_readonly: Bytes | None = np.frombuffer(
            memoryview(map_).toreadonly(), np.uint8, positions * extent_bytes, SEGMENT_HEAD_BYTES
        )
        self._populated: set[int] = set()

    @classmethod
    def open(cls, folder: NodeFolder, incarnation: int) -> SegmentMap | None:
        """Map the segment. Return None if it is absent, damaged or from another incarnation. Raises as
        ``SegmentFile.open``.

        A process that truncates the file while it is mapped ends processes that touch the missing part, by SIGBUS.
        """
        opened = _open(folder, incarnation)
        if opened is None:
            return None
        fd, extent_bytes, positions = opened
        try:
            map_ = _map(fd)
            if len(map_) < SEGMENT_HEAD_BYTES + positions * extent_bytes:  # it was cut off at this moment
                return None
            return cls(folder.segment, map_, extent_bytes, positions)
        finally:
            os.close(fd)

    def frames(self, position: int, frame_bytes: int, frames: int) -> Bytes:
        """Return the frames of the extent in ``position``: ``[frames, frame_bytes]``, writable, not a copy.

        A client writes only into frames granted to it.
        """
        self._populate_once(position)
        return self._view(self.data, position, frame_bytes, frames)

    def frames_readonly(self, position: int, frame_bytes: int, frames: int) -> Bytes:
        """Return the bytes of ``frames`` as a read-only view, which can be passed to users."""
        assert self._data_readonly is not None, "closed"
        self._populate_once(position)
        return self._view(self._data_readonly, position, frame_bytes, frames)

    def close(self) -> None:
        """Unmap. If a view is still in use, the map stays until that view is gone."""
        self._data_readonly = None
        super().close()

    def _populate_once(self, position: int) -> None:
        if position not in self._populated:
            self._populated.add(position)
            self._populate_tables(position)


def _map(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)


def _open(folder: NodeFolder, incarnation: int) -> tuple[int, int, int] | None:
    """Return ``(fd, extent_bytes, positions)`` of a sound segment, else None."""
    try:
        fd = open_plain(folder.segment, os.O_RDWR)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        head = _head(folder, fd, incarnation)
        # The size is checked too: a read beyond the end would be a SIGBUS, not a miss.
        if head is None or os.fstat(fd).st_size < SEGMENT_HEAD_BYTES + head[0] * head[1]:
            return None
        stack.pop_all()
        return fd, *head


def _head(folder: NodeFolder, fd: int, incarnation: int) -> tuple[int, int] | None:
    """Return ``(extent_bytes, positions)`` from a segment's head, if the head is sound and has this incarnation."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, version, found, extent_bytes, positions = _HEAD.unpack(head)
    if magic == _MAGIC and version != _VERSION:
        raise unknown_version(folder, "segment", version, _VERSION)
    sound = (magic, found) == (_MAGIC, incarnation) and extent_bytes > 0 and positions > 0
    return (extent_bytes, positions) if sound else None


def check_space(shm_dir: str | os.PathLike[str], size_bytes: int) -> None:
    """Refuse a segment of ``size_bytes`` that could not be filled. Reserves nothing.

    Looks at the file system's free bytes, at the memory limits of this process's cgroups and at the machine's available
    memory. The caller subtracts the part of ``size_bytes`` that is already allocated.

    Raises:
        InvalidRequest (field ``dram``): the message says how much is needed, how much is free, and the remedy.
    """
    try:
        status = os.statvfs(shm_dir)
    except FileNotFoundError:
        raise InvalidRequest("shm_dir", f"{os.fspath(shm_dir)} does not exist") from None
    free = status.f_bavail * status.f_frsize
    if status.f_blocks and free < size_bytes:  # no blocks at all: a tmpfs without a limit
        total_mib = -(-((status.f_blocks * status.f_frsize) - free + size_bytes) >> 20) + 1
        raise InvalidRequest(
            "dram",
            f"needs {_size(size_bytes)}, {os.fspath(shm_dir)} has {_size(free)} free; remedy: `mount -o remount,"
            f"size={total_mib}M {os.fspath(shm_dir)}` (docker: --shm-size) or a smaller --dram",
        )
    for what, free in _memory_free():
        if free < size_bytes:
            raise InvalidRequest(
                "dram",
                f"needs {_size(size_bytes)}, {what} leaves {_size(free)}; remedy: more memory for this machine or "
                "container (docker: --memory) or a smaller --dram",
            )


def _memory_free() -> list[tuple[str, int]]:
    """Return ``(what limits, remaining bytes)`` for every memory limit that can be read."""
    limits = []
    for limit, usage, stat in _cgroup_files():
        allowed = _number(limit)
        if allowed is not None and allowed < _NO_LIMIT:
            used = _number(usage) or 0
            limits.append((f"the memory limit in {limit}", max(0, allowed - used + _reclaimable(stat))))
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(("this machine's memory", int(line.split()[1]) << 10))
    return limits


def _cgroup_files() -> list[tuple[Path, Path, Path]]:
    """Return the files with limit, usage and statistics of this process's memory cgroup and its ancestors, v2 and
    v1."""
    files = []
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        # Inside a container the path may be the host's and absent here; the root then is our own group.
        below = Path(path.lstrip("/"))
        for part in (below, *below.parents):
            group = root / part
            files.append((group / names[0], group / names[1], group / "memory.stat"))
    return files


def _reclaimable(stat: Path) -> int:
    """Return how many bytes of file cache a cgroup would give up on its own: files, but not shared memory."""
    values: dict[str, int] = {}
    for line in _read(stat).splitlines():
        name, _, value = line.partition(" ")
        if value.isdecimal():
            values[name] = int(value)
    if "file" in values:  # v2
        return max(0, values["file"] - values.get("shmem", 0))
    return max(0, values.get("total_cache", 0) - values.get("total_shmem", 0))


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None  # "max" and absent: no limit


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(size_bytes: int) -> str:
    unit = 30 if size_bytes >= 1 << 30 else 20
    return f"{size_bytes / (1 << unit):.1f} {'GiB' if unit == 30 else 'MiB'}"


class DramStore:
    """See ``TierStore``. Made over an open segment, with the extents in ``found``. ``close`` closes the segment."""

    tier = Tier.DRAM
    generation = 1
    mapped = True
    relayed = False

    def __init__(self, segment: SegmentFile, incarnation: int, found: Iterable[tuple[int, FrameClass]] = ()) -> None:
        self.segment = segment
        self.incarnation = incarnation
        self.extent_bytes = segment.extent_bytes
        self.positions = segment.positions
        self._carved = dict(found)

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self.extent_bytes // frame_class.frame_bytes

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return 0

    def header_incarnation(self, position: int) -> int:
        """See ``TierStore``."""
        return self.incarnation

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``. The memory was allocated earlier, see ``node.node``."""
        assert 0 <= position < self.positions and position not in self._carved and self.frames_of(frame_class)
        self._carved[position] = frame_class

    def drop(self, position: int) -> None:
        """See ``TierStore``. Its memory is kept for the next extent."""
        del self._carved[position]

    def give_back(self, position: int) -> None:
        """Free the memory of a position without an extent. By an extent's number, clients notice whether its memory is
        still the same (``client.device_link``)."""
        assert position not in self._carved, f"an extent lies in position {position}"
        self.segment.give_back(position)

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        self._frame(position, frame, frame_class)[:] = page

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``."""
        page[:] = self._frame(position, frame, frame_class)

    def sync(self) -> None:
        """See ``TierStore``."""

    def close(self) -> None:
        """See ``TierStore``."""
        self.segment.close()

    def _frame(self, position: int, frame: int, frame_class: FrameClass) -> Bytes:
        frames = self.frames_of(frame_class)
        assert self._carved.get(position) == frame_class and 0 <= frame < frames, (position, frame, frame_class)
        return self.segment.frame_view(position, frame_class.frame_bytes, frames)[frame]
