"""The tables of an extent in shared memory: records, which the daemon writes, and uses, which clients write.

``records-<extent>`` (``ExtentTable``) is one page of header and then a row per frame (``model.replica.RecordFormat``).
Only the daemon writes it. On x86-64, stores become visible in their order. So the body of a record is written first and
the state word last; to end a record, the word is written first. An extent belongs to one tier. Frames on NVMe have
their token ids and checksums in front of them on the device, so the tables of such an extent are lean: 96 bytes of
record (136 in classes of objects) and the last use per frame.

``uses-<extent>`` (``Uses``) is a head and columns, with a row per frame in each: when its page was last used (8 bytes),
the generation that its progress belongs to (8), and the progress of each shard (a byte). Progress is the number of
leading layers that a shard has finished. It counts only under the frame's own generation, so it is never mistaken for
that of an earlier page. A byte counts to 255: deeper layers become visible with the seal. Extents into which clients do
not write pages have only the first column: ``shards`` is 0.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import OutOfSpace
from kvstore.model.replica import KEY_BYTES, SHARDS_MAX, STAMPED, TIERS, FrameClass, RecordFormat, Tier
from kvstore.safe_files import open_plain, remove
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import unknown_version


class Record(NamedTuple):
    """A copy of one frame's record. It is current as long as the word in the table is the same."""

    raw: bytes
    fmt: RecordFormat

    @property
    def word(self) -> int:
        """Generation and state, see ``model.replica.word_of``."""
        return self._word(0)

    @property
    def key(self) -> bytes:
        """The page's key."""
        return self.raw[RecordFormat.key]

    @property
    def root(self) -> bytes:
        """The root of the page's chain."""
        return self.raw[RecordFormat.root]

    @property
    def extra(self) -> bytes:
        """The digest of media in the page, see ``model.prefix``."""
        return self.raw[RecordFormat.extra]

    @property
    def tokens(self) -> bytes:
        """Token ids, little-endian uint32; in a lean record only those of its format."""
        return self.raw[self.fmt.tokens]

    @property
    def identity(self) -> bytes:
        """Key, root, extra and token ids, as bytes."""
        return self.raw[self.fmt.identity]

    @property
    def parent(self) -> bytes:
        """The key of the page before, or the root."""
        return self.raw[self.fmt.parent]

    @property
    def info(self) -> int:
        """See ``RecordFormat``."""
        return self._word(self.fmt.info)

    @property
    def checksums(self) -> npt.NDArray[np.uint32]:
        """One checksum per layer, valid once ``stamped``."""
        return np.frombuffer(self.raw[self.fmt.checksums], "<u4")

    @property
    def stamped(self) -> bool:
        """True once the checksums are written."""
        return bool(self.info >> 48 & STAMPED)

    def is_sound(self) -> bool:
        """Return True if identity and parent match their checksum."""
        return xxhash.xxh3_64_intdigest(self.raw[self.fmt.summed]) == self._word(self.fmt.identity_sum)

    def _word(self, offset: int) -> int:
        return int.from_bytes(self.raw[offset : offset + 8], "little")


Words = npt.NDArray[np.uint64]
Frames = slice

_VERSION: Final = 5
_MARKS_MAGIC: Final = int.from_bytes(b"KVUSES01", "little")
_MARKS_HEAD = struct.Struct("<6Q16x")  # magic, version, incarnation of the segment, extent, frames, shards
_LEVEL_MAX: Final = 0xFF


class Uses:
    """A mapped ``uses-<extent>``. Made by ``open``; ends with ``close``.

    Attributes:
        last_use: ``[frames]``, on the clock of ``time.monotonic_ns``; every process may write it.
    """

    def __init__(self, map_: mmap.mmap, frames: int, shards: int) -> None:
        self._map = map_
        self.last_use: Words = np.frombuffer(map_, "<u8", frames, _MARKS_HEAD.size)
        if shards:
            self._generations: Words = np.frombuffer(map_, "<u8", frames, _MARKS_HEAD.size + 8 * frames)
            progress = np.frombuffer(map_, np.uint8, shards * frames, _MARKS_HEAD.size + 16 * frames)
            self._progress = progress.reshape(frames, shards)

    @staticmethod
    def bytes_of(frames: int, shards: int) -> int:
        """Return the length of the file."""
        return _MARKS_HEAD.size + frames * (8 + 8 + shards if shards else 8)

    @staticmethod
    def head(incarnation: int, extent: int, frames: int, shards: int) -> bytes:
        """Return the first bytes of the file."""
        return _MARKS_HEAD.pack(_MARKS_MAGIC, _VERSION, incarnation, extent, frames, shards)

    @classmethod
    def open(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int, shards: int) -> Uses | None:
        """Map the file. Return None if it is absent, cut short, or belongs to another extent.

        Raises:
            VersionMismatch: it has another version of the file format.
        """
        try:
            map_ = map_whole(folder.uses(extent), True)
        except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
            return None
        if len(map_) >= _MARKS_HEAD.size:
            magic, version, *named = _MARKS_HEAD.unpack_from(map_)
            if magic == _MARKS_MAGIC and version != _VERSION:
                map_.close()
                raise unknown_version(folder, f"uses-{extent}", version, _VERSION)
            is_whole = len(map_) == cls.bytes_of(frames, shards)
            if is_whole and magic == _MARKS_MAGIC and named == [incarnation, extent, frames, shards]:
                return cls(map_, frames, shards)
        map_.close()
        return None

    @classmethod
    def make(cls, folder: NodeFolder, extent: int, incarnation: int, frames: int, shards: int) -> Uses | None:
        """Make and map a new file without any use. Return None if there is no memory for it."""
        try:
            head = cls.head(incarnation, extent, frames, shards)
            folder.new_file(folder.uses(extent), cls.bytes_of(frames, shards), head)
        except OutOfSpace:
            return None
        return cls.open(folder, extent, incarnation, frames, shards)

    @staticmethod
    def rename(folder: NodeFolder, extent: int, old: int, new: int) -> None:
        """Change the incarnation of a file from ``old`` to ``new``. Any other file stays as it is."""
        try:
            fd = open_plain(folder.uses(extent), os.O_RDWR)
        except OSError:
            return
        try:
            head = _MARKS_HEAD.unpack(os.pread(fd, _MARKS_HEAD.size, 0).ljust(_MARKS_HEAD.size, b"\0"))
            if head[2] == old:
                os.pwrite(fd, _MARKS_HEAD.pack(*head[:2], new, *head[3:]), 0)
        finally:
            os.close(fd)

    def begin(self, frames: Frames, generations: Words) -> None:
        """Prepare frames for pages of these generations. If progress of these pages is already stored, it stays."""
        stored = self._generations[frames]
        if (stored != generations).any():
            self._progress[frames][stored != generations] = 0
            stored[:] = generations

    def levels(self, generations: Words, layers: int) -> npt.NDArray[Any]:
        """Return what to store for these pages after 0, 1, ... ``layers`` layers: ``[layers + 1, pages]``."""
        counts = np.minimum(np.arange(layers + 1), _LEVEL_MAX).astype(np.uint8)
        return counts.repeat(len(generations)).reshape(layers + 1, -1)  # broadcast_to takes longer

    def progress(self, frames: Frames, shard: int) -> npt.NDArray[Any]:
        """Return the view in which a shard stores its progress."""
        return self._progress[frames, shard]

    def leading(self, frames: Frames, generations: Words) -> npt.NDArray[np.int64]:
        """Return how many leading layers of these pages each shard has finished, ``[pages, shards]``."""
        is_current = self._generations[frames] == generations  # read first: progress is reset before the generation
        return np.where(is_current[:, None], self._progress[frames], 0).astype(np.int64)

    def close(self) -> None:
        """Unmap. If a caller still has a view, the map stays until the view is gone."""
        for name in ("last_use", "_generations", "_progress"):
            self.__dict__.pop(name, None)
        with contextlib.suppress(BufferError):
            self._map.close()


def map_whole(path: Path, writable: bool) -> mmap.mmap:
    """Map a plain file. Raises as ``open_plain``, and ValueError if it is empty."""
    fd = open_plain(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        return mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    finally:
        os.close(fd)


RECORDS_HEAD_BYTES: Final = 4096

_MAGIC: Final = int.from_bytes(b"KVRECRD1", "little")
# magic, version, incarnation, extent, position, page_bytes, page_tokens, layers, frames, tier, sum of the words before
_HEAD = struct.Struct("<11Q")
_SUMMED_BYTES: Final = _HEAD.size - 8
_COPIES_AT: Final = (0, 2048)  # where the two copies of the head begin
_KEY_AND_ROOT: Final = struct.Struct(f"<{RecordFormat.key.start}x{KEY_BYTES}s{KEY_BYTES}s")
_HEADLESS: Final = (Tier.DRAM,)  # tiers without a header before each frame: their records are complete
_SHARDS: Final = {tier: SHARDS_MAX if tier is Tier.DRAM else 0 for tier in TIERS}  # clients write only to DRAM


class ExtentTable:
    """The mapped tables of one extent. Made by ``create`` (the daemon) or ``open``; ends with ``close`` or ``unlink``.

    Attributes:
        extent, position, frame_class, frames: number, position in the tier's segment, and geometry.
        tier: where its frames are.
        fmt: byte offsets inside a row; for an NVMe extent ``frame_class.lean``.
        rows: ``[frames, row_bytes]`` uint8, read-only except for the daemon.
        words: ``[frames]``, strided: generation << 8 | state of each frame (``model.replica.word_of``).
        uses: the table that clients write; ``last_use`` is its column of that name.
    """

    extent: int
    position: int
    frame_class: FrameClass
    frames: int
    tier: Tier
    fmt: RecordFormat
    rows: npt.NDArray[np.uint8]
    words: Words
    uses: Uses
    last_use: Words

    def __init__(self, folder: NodeFolder, head: tuple[int, ...], map_: mmap.mmap, uses: Uses) -> None:
        _, _, _, self.extent, self.position, page_bytes, page_tokens, layers, self.frames, tier, _ = head
        self.frame_class = FrameClass(page_bytes, page_tokens, layers)
        self.tier = TIERS[tier]
        self.fmt = _format(self.frame_class, self.tier)
        self._folder = folder
        self._map = map_
        self._row_bytes, self._parent, self._info = self.fmt.row_bytes, self.fmt.parent, self.fmt.info // 8
        self._whole = slice(0, self._row_bytes)
        flat = np.frombuffer(map_, np.uint8, self.frames * self.fmt.row_bytes, RECORDS_HEAD_BYTES)
        self.rows = flat.reshape(self.frames, self.fmt.row_bytes)
        self._columns = self.rows.view("<u8")  # [frames, row_bytes / 8]
        self.words = self._columns[:, 0]
        self.uses, self.last_use = uses, uses.last_use
        self._used = uses.last_use.data  # reading one value takes half as long as from an array

    @classmethod
    def create(
        cls,
        folder: NodeFolder,
        extent: int,
        position: int,
        frame_class: FrameClass,
        incarnation: int,
        frames: int,
        tier: Tier = Tier.DRAM,
        files: TableFiles | None = None,
    ) -> ExtentTable:
        """Make the files, with all frames FREE and generation 0, and map them writable.

        Files of that number that a dead daemon left are replaced. Readers see a complete table or none: the uses file
        appears first, and the records have a header with a checksum.

        Args:
            incarnation: incarnation of the tier's segment (on NVMe: of the devices). Tables from another one are never
                trusted.
            files: files that were made earlier for this class and tier, so that no memory or descriptor is needed now.

        Raises:
            OutOfSpace: no memory for the tables; nothing is left behind.
        """
        assert frames >= 1, "an extent holds at least one frame"
        files = files or TableFiles.make(folder, -extent, frame_class, frames, tier)
        head = (
            *(_MAGIC, _VERSION, incarnation, extent, position),
            *(frame_class.page_bytes, frame_class.page_tokens, frame_class.layers, frames, TIERS.index(tier)),
        )
        packed = _HEAD.pack(*head, 0)[:_SUMMED_BYTES]
        packed += xxhash.xxh3_64_intdigest(packed).to_bytes(8, "little")
        both = b"".join(packed.ljust(_COPIES_AT[1], b"\0") for _ in _COPIES_AT)
        records, uses = files.assign(folder, extent, both, Uses.head(incarnation, extent, frames, _SHARDS[tier]))
        return cls(folder, _HEAD.unpack_from(records, _COPIES_AT[0]), records, uses)

    @classmethod
    def open(cls, folder: NodeFolder, extent: int, incarnation: int, writable: bool = False) -> ExtentTable | None:
        """Map the tables of ``extent``. ``writable``: map the records for writing too (the daemon's view).

        Return None if records or uses are absent or of another size or incarnation, or if both copies of the header
        are damaged. Each of these is a miss. Readers change nothing. The daemon repairs a damaged copy of the header,
        and makes new uses if they are absent or damaged.

        Raises:
            VersionMismatch: the file is sound, but from another version of the file format.
        """
        with contextlib.ExitStack() as stack:
            try:
                records = map_whole(folder.records(extent), writable)
                stack.callback(records.close)
            except (FileNotFoundError, ValueError):  # ValueError: an empty file cannot be mapped
                return None
            head = _sound_head(folder, records, extent, incarnation)
            uses = _open_uses(folder, head, writable) if head is not None else None
            if head is None or uses is None:
                return None
            stack.pop_all()
            if writable:
                _repair(records)
            return cls(folder, head, records, uses)

    def forget_writers(self, frames: Any) -> None:
        """Remove the writers from the records of these free frames."""
        if self.fmt.tail:
            self.rows[frames, self.fmt.writing] = 0

    @staticmethod
    def rename(folder: NodeFolder, extent: int, old: int, new: int) -> None:
        """Change the incarnation of a table from ``old`` to ``new``. Any other table stays as it is. Can be
        repeated."""
        Uses.rename(folder, extent, old, new)
        try:
            fd = open_plain(folder.records(extent), os.O_RDWR)
        except OSError:
            return
        try:
            data = os.pread(fd, RECORDS_HEAD_BYTES, 0).ljust(RECORDS_HEAD_BYTES, b"\0")
            for at in _COPIES_AT:
                head = _HEAD.unpack_from(data, at)
                if _sum_holds(data, at) and head[2] == old:
                    summed = _HEAD.pack(*head[:2], new, *head[3:])[:_SUMMED_BYTES]
                    os.pwrite(fd, summed + xxhash.xxh3_64_intdigest(summed).to_bytes(8, "little"), at)
        finally:
            os.close(fd)

    def lineage(self, frame: int) -> tuple[bytes, bytes, bytes]:
        """Return key, root and parent of the page in that frame."""
        start, map_ = RECORDS_HEAD_BYTES + frame * self._row_bytes, self._map
        key, root = _KEY_AND_ROOT.unpack_from(map_, start)
        parent = start + self._parent.start
        return key, root, map_[parent : parent + KEY_BYTES]

    def chain(self, frames: slice) -> tuple[Words, Words, Words]:
        """Return views of the keys ``[frames, 2]``, parents ``[frames, 2]`` and infos ``[frames]`` of these frames."""
        columns, key, parent = self._columns[frames], RecordFormat.key.start // 8, self._parent.start // 8
        return columns[:, key : key + 2], columns[:, parent : parent + 2], columns[:, self._info]

    def used_ns(self, frame: int) -> int:
        """Return the last use of the page in that frame."""
        return self._used[frame]

    def key(self, frame: int) -> bytes:
        """Return the key of the page in that frame."""
        return self._part(frame, RecordFormat.key)

    def root(self, frame: int) -> bytes:
        """Return the root of the page's chain."""
        return self._part(frame, RecordFormat.root)

    def extra(self, frame: int) -> bytes:
        """Return the digest of media in the page, see ``model.prefix``."""
        return self._part(frame, RecordFormat.extra)

    def parent(self, frame: int) -> bytes:
        """Return the key of the page before, or the root."""
        return self._part(frame, self._parent)

    def info(self, frame: int) -> int:
        """Return the info word, see ``RecordFormat``."""
        return int(self._columns[frame, self._info])

    def record(self, frame: int) -> Record:
        """Return a copy of the whole record."""
        return Record(self._part(frame, self._whole), self.fmt)

    def _part(self, frame: int, part: slice) -> bytes:
        """Return these bytes of a row. They are read from the map, which takes half as long as from an array."""
        start = RECORDS_HEAD_BYTES + frame * self._row_bytes
        return self._map[start + part.start : start + part.stop]

    def column(self, offset: int) -> Words:
        """Return the 8-byte word at byte ``offset`` of every row, as a strided view ``[frames]`` (no copy)."""
        assert offset % 8 == 0, offset
        return self._columns[:, offset // 8]

    def identity_sums(self, frames: slice) -> list[int]:
        """Return the ``identity_sum`` that each of these frames should have: xxh3_64 over identity and parent."""
        summed, digest = self.fmt.summed, xxhash.xxh3_64_intdigest
        data, width = self.rows[frames, summed].tobytes(), summed.stop - summed.start
        return [digest(data[i : i + width]) for i in range(0, len(data), width)]

    def close(self) -> None:
        """Drop the arrays and unmap. If a caller still has a view, the map stays until the view is gone."""
        for name in ("rows", "_columns", "words", "last_use", "_used"):
            self.__dict__.pop(name, None)
        self.uses.close()
        with contextlib.suppress(BufferError):
            self._map.close()

    def invalidate(self) -> None:
        """Give up a damaged extent, but keep its position occupied. Can be repeated.

        Processes that map the table miss. Later starts do not trust it, and treat it like damage from outside.
        """
        for at in _COPIES_AT:
            self._map[at + _SUMMED_BYTES : at + _HEAD.size] = bytes(8)
        self.words[:] = 0

    def unlink(self) -> None:
        """Give up the extent: remove the files, then set every word to 0, so that processes that map it miss.

        The order matters: a restart must never find generations that start again. Call ``close`` afterwards.
        """
        remove_tables(self._folder, self.extent)
        self.words[:] = 0


class TableFiles:
    """The files of a table without an extent yet: zeros, with all the memory that they need.

    Made by ``make``; ends with ``assign``, with ``remove``, or with the next start of the node.
    """

    def __init__(self, records: Path, uses: Path) -> None:
        self._records = records
        self._uses = uses
        self._maps: list[mmap.mmap] = []  # of the records and of the uses

    @classmethod
    def make(
        cls, folder: NodeFolder, number: int, frame_class: FrameClass, frames: int, tier: Tier = Tier.DRAM
    ) -> TableFiles:
        """Make the files. Raises OutOfSpace if there is no memory for them; no file is left behind."""
        records, uses = (folder.temporary(f"table-{tier}-{number}-{what}") for what in ("records", "uses"))
        files = cls(records, uses)
        try:
            folder.new_file(files._uses, Uses.bytes_of(frames, _SHARDS[tier]), b"")
            records_bytes = RECORDS_HEAD_BYTES + frames * _format(frame_class, tier).row_bytes
            folder.new_file(files._records, records_bytes, b"")
            for mapped in (files._records, files._uses):
                files._maps.append(map_whole(mapped, True))
        except (OSError, OutOfSpace):
            files.remove()
            raise
        return files

    def assign(self, folder: NodeFolder, extent: int, head: bytes, uses_head: bytes) -> tuple[mmap.mmap, Uses]:
        """Give the files to an extent, and return its records and uses."""
        records, uses = self._maps
        records[: len(head)] = head
        uses[: len(uses_head)] = uses_head
        os.rename(self._uses, folder.uses(extent))
        os.rename(self._records, folder.records(extent))
        frames, tier = _HEAD.unpack_from(head)[8:10]
        return records, Uses(uses, frames, _SHARDS[TIERS[tier]])

    def remove(self) -> None:
        """Remove the files, which are not needed."""
        for mapped in self._maps:
            mapped.close()
        for path in (self._records, self._uses):
            remove(path)


def remove_tables(folder: NodeFolder, extent: int) -> None:
    """Remove the files of an extent, if there are any. The records are removed first, because startup looks for
    them."""
    for path in (folder.records(extent), folder.uses(extent)):
        remove(path)


def _open_uses(folder: NodeFolder, head: tuple[int, ...], make: bool) -> Uses | None:
    """Open the uses of an extent whose records have this head. Return None if there are none.

    ``make``: make them if they are absent or damaged, or return None if there is no memory for them.
    """
    incarnation, extent, frames, tier = head[2], head[3], head[8], TIERS[head[9]]
    about = folder, extent, incarnation, frames, _SHARDS[tier]
    uses = Uses.open(*about)
    return Uses.make(*about) if uses is None and make else uses


def _repair(records: mmap.mmap) -> None:
    """Make both copies of the head equal again."""
    first, second = (records[at : at + _HEAD.size] for at in _COPIES_AT)
    if first != second:
        sound = first if _sum_holds(records, _COPIES_AT[0]) else second
        for at in reversed(_COPIES_AT):
            records[at : at + _HEAD.size] = sound


def claimed_positions(folder: NodeFolder, extent: int, incarnation: int) -> set[int] | None:
    """Return the positions that an extent with unreadable tables could have had; None means any position.

    The positions are in the segment of ``incarnation``. The set is empty if a sound head says that the extent belongs
    to another tier, or to another incarnation's segment.
    """
    try:
        fd = open_plain(folder.records(extent), os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        data = file.read(RECORDS_HEAD_BYTES).ljust(RECORDS_HEAD_BYTES, b"\0")
    heads = [_HEAD.unpack_from(data, at) for at in _COPIES_AT]
    for at, head in zip(_COPIES_AT, heads, strict=True):
        if _sum_holds(data, at):
            is_ours = (head[2], head[9]) == (incarnation, TIERS.index(Tier.DRAM))
            return {head[4]} if is_ours else set()
    # Both copies are damaged somewhere. A position that they agree on was not damaged.
    return {heads[0][4]} if heads[0][4] == heads[1][4] and any(heads[0][:4]) and any(heads[1][:4]) else None


def _sum_holds(data: mmap.mmap | bytes, at: int) -> bool:
    """Return True if the copy of a head at byte ``at`` of a file is sound."""
    magic, total = int.from_bytes(data[at : at + 8], "little"), data[at + _SUMMED_BYTES : at + _HEAD.size]
    summed = xxhash.xxh3_64_intdigest(data[at : at + _SUMMED_BYTES])
    return magic == _MAGIC and summed == int.from_bytes(total, "little")


def _sound_head(folder: NodeFolder, records: mmap.mmap, extent: int, incarnation: int) -> tuple[int, ...] | None:
    """Return the words of the header if they match the file, else None."""
    if len(records) < RECORDS_HEAD_BYTES:
        return None
    at = next((at for at in _COPIES_AT if _sum_holds(records, at)), None)
    if at is None:
        return None
    head: tuple[int, ...] = _HEAD.unpack_from(records, at)
    if head[2:4] != (incarnation, extent):
        return None
    if head[1] != _VERSION:
        raise unknown_version(folder, f"records-{extent}", head[1], _VERSION)
    page_bytes, page_tokens, layers, frames, number = head[5:10]
    if number >= len(TIERS):
        return None
    tier = TIERS[number]
    row_bytes = _format(FrameClass(page_bytes, page_tokens, layers), tier).row_bytes
    # The size matters too: a row beyond the end of a file would raise SIGBUS, not miss.
    return head if frames >= 1 and len(records) == RECORDS_HEAD_BYTES + frames * row_bytes else None


def _format(frame_class: FrameClass, tier: Tier) -> RecordFormat:
    return frame_class.record if tier in _HEADLESS else frame_class.lean
