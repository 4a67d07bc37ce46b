"""Uses: what clients write in addition to the records of an extent: last uses, and the progress of writers.

``uses-<extent>`` is a head and columns, a row per frame in each: when its page was used last (8 bytes), the generation
that its progress is about (8), and the progress of each shard (a byte). Progress is the number of leading layers that a
shard has finished; it counts under the frame's own generation alone, so that an earlier page's is never mistaken. A
byte counts to 255: deeper layers of a page are not shown before it is sealed. Extents where clients do not write pages
have the first column alone: ``shards`` is 0.
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
from kvstore.tier.folder import NodeFolder
from kvstore.tier.header import unknown_version
from kvstore.tier.plain_files import open_plain

Words = npt.NDArray[np.uint64]
Frames = slice

_VERSION: Final = 2
_MAGIC: Final = int.from_bytes(b"KVUSES01", "little")
_HEAD = struct.Struct("<6Q16x")  # magic, version, incarnation of the segment, extent, frames, shards
_LEVEL_MAX: Final = 0xFF


class Uses:
    """A mapped ``uses-<extent>``. Made by ``open``; ends with ``close``.

    Attributes:
        last_use: ``[frames]``, on the clock of ``time.monotonic_ns``; writable for everyone.
    """

    def __init__(self, map_: mmap.mmap, frames: int, shards: int) -> None:
        self._map = map_
        self.last_use: Words = np.frombuffer(map_, "<u8", frames, _HEAD.size)
        if shards:
            self._generations: Words = np.frombuffer(map_, "<u8", frames, _HEAD.size + 8 * frames)
            progress = np.frombuffer(map_, np.uint8, shards * frames, _HEAD.size + 16 * frames)
            self._progress = progress.reshape(frames, shards)

    @staticmethod
    def bytes_of(frames: int, shards: int) -> int:
        """Length of the file."""
        return _HEAD.size + frames * (8 + 8 + shards if shards else 8)

    @staticmethod
    def head(incarnation: int, extent: int, frames: int, shards: int) -> bytes:
        """What the file begins with."""
        return _HEAD.pack(_MAGIC, _VERSION, incarnation, extent, frames, shards)

    @classmethod
    def open(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int, shards: int) -> Uses | None:
        """Map the file; None where it is absent, cut, or another extent's.

        Raises:
            VersionMismatch: it is of another version of the file format.
        """
        try:
            map_ = map_whole(folder.uses(extent), True)
        except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
            return None
        if len(map_) >= _HEAD.size:
            magic, version, *named = _HEAD.unpack_from(map_)
            if magic == _MAGIC and version != _VERSION:
                map_.close()
                raise unknown_version(folder, f"uses-{extent}", version, _VERSION)
            whole = len(map_) == cls.bytes_of(frames, shards)
            if whole and magic == _MAGIC and named == [incarnation, extent, frames, shards]:
                return cls(map_, frames, shards)
        map_.close()
        return None

    @classmethod
    def make(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int, shards: int) -> Uses | None:
        """The file for an extent that has none, or none that is sound: nothing was used yet. None: there is no memory
        for it."""
        try:
            head = cls.head(incarnation, extent, frames, shards)
            folder.new_file(folder.uses(extent), cls.bytes_of(frames, shards), head)
        except OutOfSpace:
            return None
        return cls.open(folder, extent, incarnation, frames, shards)

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
        """What to store for each of these pages after 0, 1, ... ``layers`` layers: ``[layers + 1, pages]``."""
        counts = np.minimum(np.arange(layers + 1), _LEVEL_MAX).astype(np.uint8)
        return counts.repeat(len(generations)).reshape(layers + 1, -1)  # broadcast_to takes longer

    def shown(self, frames: Frames, shard: int) -> npt.NDArray[Any]:
        """Where a shard stores that."""
        return self._progress[frames, shard]

    def leading(self, frames: Frames, generations: Words) -> npt.NDArray[np.int64]:
        """How many leading layers of these pages each shard has shown, ``[pages, shards]``."""
        begun = self._generations[frames] == generations  # before the progress is read: that was reset first
        return np.where(begun[:, None], self._progress[frames], 0).astype(np.int64)

    def close(self) -> None:
        """Unmap. Where a caller still holds a view, the map lives until that view is gone."""
        for name in ("last_use", "_generations", "_progress"):
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
