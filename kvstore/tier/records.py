"""ExtentTable: records and marks of one extent, as arrays over shared memory.

``records-<extent>`` is one page of header and then a row per frame (``model.replica.RecordFormat``), written by the
daemon alone. ``marks-<extent>`` is a row of words per frame, written by clients. On x86-64 stores become visible in
their order, so the protocol of a record is: body first, its word last; and to end it, the word first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import OutOfSpace
from kvstore.model.replica import MARKS_ROW_BYTES, FrameClass, RecordFormat
from kvstore.tier.folder import NodeFolder

RECORDS_HEAD_BYTES: Final = 4096
_VERSION: Final = 1
_MAGIC: Final = int.from_bytes(b"KVRECRD1", "little")
# magic, version, incarnation, extent, position, page_bytes, page_tokens, layers, frames, sum of what is before it
_HEAD = struct.Struct("<10Q")
_SUMMED_BYTES: Final = _HEAD.size - 8

Words = npt.NDArray[np.uint64]


class ExtentTable:
    """The mapped tables of one extent. Made by ``create`` (the daemon) or ``open``; ends with ``close`` or ``unlink``.

    Attributes:
        extent, position, frame_class, frames: what this extent is and where in the segment it lies.
        fmt: byte offsets inside a row.
        rows: ``[frames, row_bytes]`` uint8, read-only except for the daemon.
        words: ``[frames]``, strided: generation << 8 | state of each frame (``model.replica.word_of``).
        marks: ``[frames, 1 + SHARDS_MAX]``, writable for everyone; ``last_use`` is its first column.
    """

    extent: int
    position: int
    frame_class: FrameClass
    frames: int
    fmt: RecordFormat
    rows: npt.NDArray[np.uint8]
    words: Words
    marks: Words
    last_use: Words

    def __init__(self, folder: NodeFolder, head: tuple[int, ...], maps: tuple[mmap.mmap, mmap.mmap]) -> None:
        _, _, _, self.extent, self.position, page_bytes, page_tokens, layers, self.frames, _ = head
        self.frame_class = FrameClass(page_bytes, page_tokens, layers)
        self.fmt = self.frame_class.record
        self._files = folder.records(self.extent), folder.marks(self.extent)
        self._maps = maps
        flat = np.frombuffer(maps[0], np.uint8, self.frames * self.fmt.row_bytes, RECORDS_HEAD_BYTES)
        self.rows = flat.reshape(self.frames, self.fmt.row_bytes)
        self._columns = self.rows.view("<u8")  # [frames, row_bytes / 8]
        self.words = self._columns[:, 0]
        self.marks = np.frombuffer(maps[1], "<u8").reshape(self.frames, -1)
        self.last_use = self.marks[:, 0]

    @classmethod
    def create(
        cls, folder: NodeFolder, extent: int, position: int, frame_class: FrameClass, incarnation: int, frames: int
    ) -> ExtentTable:
        """Make both files, all frames FREE with generation 0, and map them writable.

        Files of that number which a dead daemon left are replaced. Readers see a whole table or none: the marks are
        there before the records, whose header is summed.

        Raises:
            OutOfSpace: no memory for the tables; nothing is left behind.
        """
        assert frames >= 1, "an extent holds at least one frame"
        folder.new_file(folder.marks(extent), frames * MARKS_ROW_BYTES, b"")
        head = (
            *(_MAGIC, _VERSION, incarnation, extent, position),
            *(frame_class.page_bytes, frame_class.page_tokens, frame_class.layers, frames),
        )
        packed = _HEAD.pack(*head, 0)[:_SUMMED_BYTES]
        packed += xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")
        records_bytes = RECORDS_HEAD_BYTES + frames * frame_class.record.row_bytes
        try:
            folder.new_file(folder.records(extent), records_bytes, packed)
        except (OSError, OutOfSpace):
            folder.marks(extent).unlink(missing_ok=True)
            raise
        table = cls.open(folder, extent, incarnation, writable=True)
        assert table is not None, "made just now"
        return table

    @classmethod
    def open(cls, folder: NodeFolder, extent: int, incarnation: int, writable: bool = False) -> ExtentTable | None:
        """Map the tables of ``extent``. ``writable`` maps the records for writing too (the daemon's view).

        None where a file is absent, of another size, version or incarnation, or its header is damaged: a doubt is a
        miss. Nothing is changed.
        """
        with contextlib.ExitStack() as stack:
            try:
                records = _map(folder.records(extent), writable)
                stack.callback(records.close)
                marks = _map(folder.marks(extent), True)
                stack.callback(marks.close)
            except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
                return None
            head = _sound_head(records, len(marks), extent, incarnation)
            if head is None:
                return None
            stack.pop_all()
            return cls(folder, head, (records, marks))

    def column(self, offset: int) -> Words:
        """The 8-byte word at byte ``offset`` of every row, as a strided view ``[frames]`` (no copy)."""
        assert offset % 8 == 0, offset
        return self._columns[:, offset // 8]

    def identity_sums(self, frames: slice) -> list[int]:
        """What ``identity_sum`` of each of these frames should be: xxh3_64 over identity and parent."""
        end = self.fmt.parent.stop
        data = self.rows[frames, 8:end].tobytes()
        width, digest = end - 8, xxhash.xxh3_64_intdigest
        return [digest(data[i : i + width]) for i in range(0, len(data), width)]

    def close(self) -> None:
        """Drop the arrays and unmap. Where a caller still holds a view, the map lives until that view is gone."""
        for name in ("rows", "_columns", "words", "marks", "last_use"):
            self.__dict__.pop(name, None)
        for map_ in self._maps:
            with contextlib.suppress(BufferError):
                map_.close()

    def unlink(self) -> None:
        """The daemon gives the extent up: the files go, and every word becomes 0, so that whoever maps it misses.

        In this order: a restart must never find generations that start again. Call ``close`` afterwards.
        """
        for path in self._files:
            path.unlink(missing_ok=True)
        self.words[:] = 0


def _sound_head(records: mmap.mmap, marks_bytes: int, extent: int, incarnation: int) -> tuple[int, ...] | None:
    """The header's words where everything about both files fits together, else None."""
    if len(records) < RECORDS_HEAD_BYTES:
        return None
    head: tuple[int, ...] = _HEAD.unpack_from(records)
    if head[:4] != (_MAGIC, _VERSION, incarnation, extent):
        return None
    if xxhash.xxh3_64_intdigest(records[:_SUMMED_BYTES]) != head[9]:
        return None
    _, page_tokens, layers, frames = head[5:9]
    row_bytes = RecordFormat(page_tokens, layers).row_bytes
    # The sizes too: a row beyond the end of a file would be a SIGBUS, not a miss.
    if frames < 1 or len(records) != RECORDS_HEAD_BYTES + frames * row_bytes or marks_bytes != frames * MARKS_ROW_BYTES:
        return None
    return head


def _map(path: Path, writable: bool) -> mmap.mmap:
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)
