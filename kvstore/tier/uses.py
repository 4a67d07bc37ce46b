"""Uses: what clients write beside the records of an extent: last uses, and how far the writers of pages are.

``uses-<extent>`` is a head and three columns, a row per frame in each: when its page was used last (8 bytes), the
generation that its progress is about (8), and the progress of each shard (a byte). Progress is the number of leading
layers that a shard is through with; it counts under the frame's own generation alone, so that an earlier page's is
never mistaken. A byte counts to 255: deeper layers of a page are not shown before it is sealed.

Programs of the version before write ``marks-<extent>``, of 72 bytes per frame. That file is still made, at its length
and without memory, so that they find it. What they have written counts when the daemon looks there (``heed``), which
gives its memory back. Extents that only such a daemon knew have no other file, and those of NVMe keep nothing but a
last use per frame in it: ``Marks``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import OutOfSpace
from kvstore.model.replica import MARKS_ROW_BYTES, SHARDS_MAX
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import unknown_version
from kvstore.tier.plain_files import open_plain

Words = npt.NDArray[np.uint64]
Frames = slice

_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"KVUSES01", "little")
_HEAD = struct.Struct("<5Q24x")  # magic, version, incarnation of the segment, extent, frames
_FRAME_BYTES: Final = 8 + 8 + SHARDS_MAX
_LEVEL_MAX: Final = 0xFF
_32, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


class Uses:
    """A mapped ``uses-<extent>``. Made by ``open``; ends with ``close``.

    Attributes:
        last_use: ``[frames]``, on the clock of ``time.monotonic_ns``; writable for everyone.
    """

    def __init__(self, map_: mmap.mmap, frames: int) -> None:
        self._map = map_
        self.last_use: Words = np.frombuffer(map_, "<u8", frames, _HEAD.size)
        self._generations: Words = np.frombuffer(map_, "<u8", frames, _HEAD.size + 8 * frames)
        progress = np.frombuffer(map_, np.uint8, SHARDS_MAX * frames, _HEAD.size + 16 * frames)
        self._progress = progress.reshape(frames, SHARDS_MAX)

    @staticmethod
    def bytes_of(frames: int) -> int:
        """Length of the file."""
        return _HEAD.size + frames * _FRAME_BYTES

    @staticmethod
    def head(incarnation: int, extent: int, frames: int) -> bytes:
        """What the file begins with."""
        return _HEAD.pack(_MAGIC, _VERSION, incarnation, extent, frames)

    @classmethod
    def open(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int) -> Uses | None:
        """Map the file; None where it is absent, cut, or another extent's.

        Raises:
            VersionMismatch: it is of another version of the file format.
        """
        try:
            map_ = map_whole(folder.uses(extent), True)
        except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
            return None
        if len(map_) == cls.bytes_of(frames):
            magic, version, *named = _HEAD.unpack_from(map_)
            if magic == _MAGIC and version != _VERSION:
                map_.close()
                raise unknown_version(folder, f"uses-{extent}", version, _VERSION)
            if magic == _MAGIC and named == [incarnation, extent, frames]:
                return cls(map_, frames)
        map_.close()
        return None

    @classmethod
    def make(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int) -> Uses | None:
        """The file for an extent that has none, or none that is sound: nothing was used yet. None: there is no memory
        for it."""
        try:
            folder.new_file(folder.uses(extent), cls.bytes_of(frames), cls.head(incarnation, extent, frames))
        except OutOfSpace:
            return None
        return cls.open(folder, extent, incarnation, frames)

    @staticmethod
    def rename(folder: NodeFolder, extent: int, old: int, new: int) -> None:
        """A file of incarnation ``old`` is one of ``new`` from here on; any other stays as it is."""
        try:
            fd = open_plain(folder.uses(extent), os.O_RDWR)
        except OSError:
            return
        try:
            head = _HEAD.unpack(os.pread(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
            if head[2] == old:
                os.pwrite(fd, _HEAD.pack(*head[:2], new, *head[3:]), 0)
        finally:
            os.close(fd)

    def begin(self, frames: Frames, generations: Words) -> None:
        """Pages of these generations are about to be written there. What was shown of them stays."""
        begun = self._generations[frames]
        if (begun != generations).any():
            self._progress[frames][begun != generations] = 0
            begun[:] = generations

    def levels(self, generations: Words, layers: int) -> npt.NDArray[Any]:
        """What to store for each of these pages after so many layers: ``[layers + 1, pages]``."""
        counts = np.minimum(np.arange(layers + 1), _LEVEL_MAX).astype(np.uint8)
        return counts.repeat(len(generations)).reshape(layers + 1, -1)  # broadcast_to takes longer

    def shown(self, frames: Frames, shard: int) -> npt.NDArray[Any]:
        """Where a shard stores that."""
        return self._progress[frames, shard]

    def leading(self, frames: Frames, generations: Words) -> npt.NDArray[np.int64]:
        """How many leading layers of these pages each shard has shown, ``[pages, SHARDS_MAX]``."""
        begun = self._generations[frames] == generations  # before the progress is read: that was reset first
        return np.where(begun[:, None], self._progress[frames], 0).astype(np.int64)

    def heed(self, path: Path) -> None:
        """What programs of the version before have written into the marks at ``path`` counts here, and their memory is
        given back. They show their progress again with the next layer."""
        with contextlib.suppress(OSError):  # there is none, or no descriptor is left: it is asked again
            fd = open_plain(path, os.O_RDWR)
            with open(fd, "r+b", buffering=0) as file:
                status = os.fstat(fd)
                if status.st_blocks and status.st_size == len(self.last_use) * MARKS_ROW_BYTES:
                    # Not through a map: that would take memory for the holes.
                    rows = np.frombuffer(file.readall(), "<u8").reshape(len(self.last_use), -1)
                    np.maximum(self.last_use, rows[:, 0], out=self.last_use)
                    with mmap.mmap(fd, 0) as map_:
                        map_.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap. Where a caller still holds a view, the map lives until that view is gone."""
        for name in ("last_use", "_generations", "_progress"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):
            self._map.close()


class Marks:
    """The same out of a mapped ``marks-<extent>``: of each frame its last use, and where pages are written a word per
    shard, low 32 bits of the generation << 32 | leading layers."""

    def __init__(self, map_: mmap.mmap, frames: int) -> None:
        self._map = map_
        self._rows: Words = np.frombuffer(map_, "<u8").reshape(frames, -1)
        self.last_use = self._rows[:, 0]

    def begin(self, frames: Frames, generations: Words) -> None:
        """See ``Uses``: every word says its generation."""

    def levels(self, generations: Words, layers: int) -> npt.NDArray[Any]:
        """See ``Uses``."""
        levels: Words = generations << _32 | np.arange(layers + 1, dtype=np.uint64)[:, None]
        return levels

    def shown(self, frames: Frames, shard: int) -> npt.NDArray[Any]:
        """See ``Uses``."""
        return self._rows[frames, 1 + shard]

    def leading(self, frames: Frames, generations: Words) -> npt.NDArray[np.int64]:
        """See ``Uses``."""
        words = self._rows[frames, 1:]
        return np.where(words >> _32 == (generations & _LOW)[:, None], words & _LOW, 0).astype(np.int64)

    def heed(self, path: Path) -> None:
        """See ``Uses``: nothing is written elsewhere."""

    def close(self) -> None:
        """See ``Uses``."""
        for name in ("last_use", "_rows"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):
            self._map.close()


def map_whole(path: Path, writable: bool) -> mmap.mmap:
    """Map a plain file. Raises as ``open_plain``, and ValueError where it is empty."""
    fd = open_plain(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)
