"""Disk: where a row's files lie, what the disk does without a store, and where on it a node's pages are.

The limit of an NVMe row is O_DIRECT in the same process, with as many threads as the store has, into and out of
page-aligned buffers, in two ways of which the faster one counts: pieces of 1 MiB, which the threads take one by one, or
one piece per thread. The buffers are of large memory pages where the kernel has them: a request then has few segments,
which on some disks (virtual ones above all) makes it two to three times as fast.

Worked example: 32 pages of 256 KiB lie, each behind its header, in two runs of 20 and 12 frames: 5.1 and 3.0 MiB. That
is six pieces of 1 MiB or less and four such pieces, or two and two quarters: every way reads the same bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from kvstore.bench.content import Rows
from kvstore.bench.harness import BenchFailed
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.replica import ADDRESS_BYTES, ADDRESS_DTYPE, FrameClass, Tier
from kvstore.tier import nvme_geometry
from kvstore.tier.bounces import large_buffer
from kvstore.tier.disk import BLOCK_BYTES
from kvstore.tier.folder import PREFIX, NodeFolder
from kvstore.tier.header import Header
from kvstore.tier.index import Index, IndexDamaged
from kvstore.tier.io_threads import IO_THREADS, IoThreads
from kvstore.tier.nvme_map import NvmeMap
from kvstore.tier.records import ExtentTable

MIB = 1 << 20
PIECE_BYTES = MIB
LIMITS = ("pieces_1m", "piece_per_thread")
IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
TABLES_BYTES = MIB  # of a target, for what is not pages
SPARE_BYTES = 64 * MIB  # left to others on the file system

Range = tuple[int, int]  # offset, bytes
Task = Callable[[], int]


class Scratch:
    """A folder of a row's own, removed with everything in it by the end of its ``with``.

    Raises:
        BenchFailed: there is no such place, it is no disk, or it has not ``needed_bytes`` free.
    """

    def __init__(self, folder: Path, needed_bytes: int, *, quick: bool = False) -> None:
        try:
            free = os.statvfs(folder)
        except OSError as error:
            raise BenchFailed(f"{folder}: {error.strerror}; --dir names another folder") from None
        free_bytes = free.f_bavail * free.f_frsize
        if free_bytes < needed_bytes + SPARE_BYTES:
            raise BenchFailed(
                f"{folder} has {free_bytes >> 20} MiB free, this row's files take {needed_bytes + SPARE_BYTES >> 20} "
                "MiB; --dir names another folder"
            )
        kind = file_system(folder)
        if kind in IN_MEMORY and not quick:
            raise BenchFailed(f"{folder} is in memory ({kind}); --dir names a folder on a disk")
        try:
            self.path = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=folder)).absolute()
        except OSError as error:
            raise BenchFailed(f"{folder}: {error.strerror}; --dir names another folder") from None

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def file_system(folder: Path) -> str:
    """Its kind, such as ``ext4``; "" where the kernel does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = os.stat(folder).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            if line.split()[2] == wanted:
                return line.partition(" - ")[2].split()[0]
    return ""


def target_bytes(pages: int, layout: Layout, extent_bytes: int) -> int:
    """Size of an NVMe target with room for so many pages, and an extent more."""
    frames = nvme_geometry.frames_in(extent_bytes, frame_class_of(layout))
    return (-(-pages // frames) + 1) * extent_bytes + TABLES_BYTES


def frame_class_of(layout: Layout) -> FrameClass:
    """The frames that pages of this layout lie in."""
    return FrameClass(layout.page_bytes, layout.page_tokens, layout.layers)


def warm_buffer(nbytes: int) -> Rows:
    """Memory in large pages, as far as the kernel has them, that was written to before."""
    rows = large_buffer(nbytes)[:nbytes]
    rows[:] = 1
    return rows


class RawFile:
    """A file read or written past the page cache by ``IO_THREADS`` threads. Ends with ``with``.

    Args:
        create_bytes: make it, with all its space, and without a name, so that it goes with the process; 0: it is there.

    Attributes:
        buffer: what is read into and written from.
    """

    def __init__(self, path: Path, buffer_bytes: int, *, create_bytes: int = 0) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL if create_bytes else os.O_RDONLY
        try:
            self._fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise BenchFailed(f"{path}: {error.strerror} (O_DIRECT); --dir names another folder") from None
        try:
            if create_bytes:
                path.unlink()
                os.posix_fallocate(self._fd, 0, create_bytes)
                os.fsync(self._fd)
        except OSError as error:
            os.close(self._fd)
            raise BenchFailed(f"{path}: {error.strerror}") from None
        self._io = IoThreads(IO_THREADS)
        self.buffer = warm_buffer(buffer_bytes)

    def reads(self, ranges: Sequence[Range], how: str) -> list[Task]:
        """What ``run`` needs to read these ranges, end to end into ``buffer``."""
        return [partial(self._pieces, os.preadv, pieces) for pieces in self._cut(ranges, how)]

    def writes(self, ranges: Sequence[Range], how: str, source: Rows | None = None) -> list[Task]:
        """What ``run`` needs to write these ranges out of the start of ``source``, or of ``buffer``."""
        return [partial(self._pieces, os.pwritev, pieces) for pieces in self._cut(ranges, how, source)]

    def run(self, tasks: Sequence[Task]) -> int:
        """Bytes that were moved. Raises BenchFailed."""
        total = 0
        for moved in self._io.run(tasks):
            if isinstance(moved, OSError | KVStoreError):
                raise BenchFailed(f"the disk failed: {moved}")
            total += moved
        return total

    def sync(self) -> None:
        """Written data survives power loss."""
        os.fdatasync(self._fd)

    def _cut(self, ranges: Sequence[Range], how: str, buffer: Rows | None = None) -> list[list[tuple[Rows, int]]]:
        """Pieces ``(part of the buffer, offset)`` of every task."""
        memory, total = self.buffer if buffer is None else buffer, sum(nbytes for _, nbytes in ranges)
        per_thread = -(-total // (IO_THREADS * BLOCK_BYTES)) * BLOCK_BYTES
        share = {"pieces_1m": PIECE_BYTES, "piece_per_thread": per_thread}[how]
        tasks: list[list[tuple[Rows, int]]] = []
        at, left = 0, 0  # in the buffer; of the task's share
        for offset, nbytes in ranges:
            while nbytes:
                if not left:
                    tasks.append([])
                    left = share
                step = min(nbytes, left)
                tasks[-1].append((memory[at : at + step], offset))
                at, offset, nbytes, left = at + step, offset + step, nbytes - step, left - step
                if how == "pieces_1m" and step < PIECE_BYTES:
                    left = 0  # a run's end: no task has two pieces
        return tasks

    def _pieces(self, call: Callable[[int, list[Any], int], int], pieces: list[tuple[Rows, int]]) -> int:
        total = 0
        for view, offset in pieces:
            moved = call(self._fd, [view], offset)
            if moved != view.nbytes:
                raise OSError(errno.EIO, f"moved {moved} of {view.nbytes} bytes")
            total += moved
        return total

    def __enter__(self) -> RawFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._io.close()
        os.close(self._fd)


@dataclass(frozen=True)
class Where:
    """A node's NVMe pages as its files name them. For nodes with one target whose pages rest."""

    folder: NodeFolder
    index: Index
    frame_class: FrameClass

    @classmethod
    def of(cls, shm_dir: Path, node: str, layout: Layout) -> Where:
        """Raises BenchFailed where the node is not there."""
        folder = NodeFolder.at(shm_dir / f"{PREFIX}{node}")
        header = Header.open(folder)
        index = Index.open_reader(folder, header.epoch) if header is not None else None
        if index is None:
            raise BenchFailed(f"{node} has no index")
        return cls(folder, index, frame_class_of(layout))

    def saved(self, hashes: Sequence[bytes]) -> bool:
        """Whether all of these are on NVMe, durably."""
        try:
            return None not in self.index.find_many(Tier.NVME, hashes)
        except IndexDamaged as error:
            raise BenchFailed(f"the index was replaced meanwhile: {error}") from None

    def ranges(self, chains: Sequence[Sequence[bytes]]) -> list[list[Range]]:
        """Where each chain's pages lie, headers included; consecutive frames are one range.

        Raises:
            BenchFailed: a page is not on NVMe, or its device cannot be read.
        """
        map_ = NvmeMap.open(self.folder)
        if map_ is None:
            raise BenchFailed(f"{self.folder.name} has no NVMe to read")
        tables: dict[int, ExtentTable] = {}
        found: list[list[Range]] = []
        try:
            for hashes in chains:
                found.append([])
                for raw in self.index.find_many(Tier.NVME, hashes):
                    if raw is None:
                        raise BenchFailed("a page is not on NVMe")
                    number, frame, _ = np.frombuffer(raw[:ADDRESS_BYTES], ADDRESS_DTYPE)[0].tolist()
                    table = tables.get(number) or ExtentTable.open(self.folder, number, map_.incarnation)
                    place = map_.place(table.position, self.frame_class, frame) if table is not None else None
                    if table is None or place is None:
                        raise BenchFailed(f"extent {number} cannot be read")
                    tables[number] = table
                    _append(found[-1], place.offset, nvme_geometry.stride_bytes(self.frame_class))
        finally:
            map_.close()
        return found

    def close(self) -> None:
        """Let go of the index."""
        self.index.close()


def _append(ranges: list[Range], offset: int, nbytes: int) -> None:
    if ranges and sum(ranges[-1]) == offset:
        offset, nbytes = ranges[-1][0], ranges[-1][1] + nbytes
        ranges.pop()
    ranges.append((offset, nbytes))
