"""MountedTable: the records of memory that an engine has mounted. Only that engine writes them.

They are in the file ``mounted-<number>`` of a node's folder. The number is an extent number, and is never reused::

        0        head    magic, version, incarnation of the node, number, session, geometry, how the memory is exported,
                     where pages are in it (``model.shard``), checksum
    4 KiB    held    a word per frame, written by readers: until when a process reads there (CLOCK_MONOTONIC)
    ...      rows    a row per frame (``model.replica.RecordFormat`` without a tail), written by the engine

A row goes through these steps:

1. The word is 0: the frame is empty.
2. ``fill`` writes the body, then SEALED into the word.
3. ``retire`` writes RETIRING under the same generation. No new read begins; reads in progress may end.
4. ``clear`` writes 0, and the frame may be written again.

Generations come from one counter and are never reused. A row has the page's span (see ``model.prefix``) where other
records have a lease's deadline.

A reader stores ``held`` before it looks at a word, and looks at the word again after the read. So ``held`` only makes
wasted reads rarer. What makes a read valid is that the generation has not changed after it. The engine waits for
``held`` no longer than ``HOLD_NS``, whatever value is written there.

If the engine's memory is shared memory, it is the file ``mounted-<number>-data``. If other processes need a descriptor
of it, the engine passes one at the socket ``mounted-<number>-pass``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, FrameState, RecordFormat, info_word, word_of
from kvstore.model.shard import DIMS_MAX, LAYERS_MAX, Strides
from kvstore.safe_files import open_plain, remove
from kvstore.shm.folder import NodeFolder
from kvstore.shm.records import Words

HOLD_NS: Final = 200_000_000  # longest time that a retired frame is kept for its readers
EXPORT_BYTES_MAX: Final = 1024

_MAGIC: Final = int.from_bytes(b"KVMOUNT1", "little")
_VERSION: Final = 2
_PREFIX: Final = "mounted-"
_HEAD_BYTES: Final = 4096  # enough for the longest export and strides with the maximum number of layers and dimensions
_PAGE: Final = 4096
# magic, version, incarnation, number, session, page_bytes, page_tokens, layers, frames, kind of export, its length,
# number of layers and of dimensions of the strides. The strides themselves follow the export.
_HEAD: Final = struct.Struct("<13Q")
_SEALED, _RETIRING = int(FrameState.SEALED), int(FrameState.RETIRING)
_STATE: Final = np.uint64(0xFF)
_GENERATION_BITS: Final = np.uint64(8)


def mounted_path(folder: NodeFolder, number: int) -> Path:
    """Return the path of a segment's records."""
    return folder.path / f"{_PREFIX}{number}"


def data_path(folder: NodeFolder, number: int) -> Path:
    """Return the path of a segment's memory, if that is shared memory."""
    return folder.path / f"{_PREFIX}{number}-data"


def passing_path(folder: NodeFolder, number: int) -> Path:
    """Return the path of the socket at which a segment's engine passes a descriptor of the memory, if readers need
    one."""
    return folder.path / f"{_PREFIX}{number}-pass"


def mounted_numbers(folder: NodeFolder) -> list[int]:
    """Return the numbers of all segments with a file in the folder, even a damaged one."""
    try:
        names = os.listdir(folder.path)
    except FileNotFoundError:
        return []
    tails = [name.removeprefix(_PREFIX).partition("-")[0] for name in names if name.startswith(_PREFIX)]
    return sorted({int(tail) for tail in tails if tail.isdecimal()})


def remove_mounted(folder: NodeFolder, number: int) -> None:
    """Remove the files of a segment whose engine has ended or does not need it. Can be repeated.

    From then on, every lookup by a process that still maps them is a miss.
    """
    with contextlib.suppress(OSError):
        fd = open_plain(mounted_path(folder, number), os.O_RDWR)
        with open(fd, "r+b", buffering=0) as file:
            size = os.fstat(fd).st_size
            for at in range(0, size, 1 << 20):
                file.write(bytes(min(1 << 20, size - at)))
    for path in (mounted_path(folder, number), data_path(folder, number), passing_path(folder, number)):
        with contextlib.suppress(OSError):
            remove(path)


class MountedTable:
    """The mapped records of one segment. Made by ``create`` (the engine) or ``open``; unmapped with the last reference.

    Attributes:
        number, session, frame_class, frames: number of the segment, its owner, and the class and number of frames.
        strides: where pages are in the memory.
        kind, export: how readers open the memory: see ``tier.peer_memory``.
        words: ``[frames]``, strided; read-only for readers.
        held: ``[frames]``, every process may write it.
        identity: ``[frames, bytes]``: key, root, extra and tokens of each page; read-only for readers.
    """

    def __init__(
        self, head: tuple[int, ...], export: bytes, strides: Strides, records: mmap.mmap, held: mmap.mmap | None
    ) -> None:
        _, _, _, self.number, self.session, *geometry, self.frames, self.kind, _, _, _ = head
        self.frame_class = FrameClass(*geometry)
        self.export, self.strides = export, strides
        self.fmt = record_format(self.frame_class)
        rows_at = _rows_at(self.frames)
        self.rows = np.frombuffer(records, np.uint8, self.frames * self.fmt.row_bytes, rows_at).reshape(self.frames, -1)
        columns = self.rows.view("<u8")
        self.words: Words = columns[:, 0]
        self.infos: Words = columns[:, self.fmt.info // 8]
        self.sums: Words = columns[:, self.fmt.identity_sum // 8]
        self.spans: Words = columns[:, self.fmt.lease_until_ns // 8]
        self.identity = self.rows[:, self.fmt.identity]
        shared, at = (held, 0) if held is not None else (records, _HEAD_BYTES)
        self.held: Words = np.frombuffer(shared, "<u8", self.frames, at)

    @property
    def nbytes(self) -> int:
        """Size of the memory in bytes, up to the end of the last page."""
        return self.strides.nbytes(self.frames)

    @classmethod
    def create(
        cls,
        folder: NodeFolder,
        incarnation: int,
        number: int,
        session: int,
        frame_class: FrameClass,
        frames: int,
        strides: Strides,
        kind: int,
        export: bytes,
    ) -> MountedTable:
        """Make the engine's table with empty frames. Readers see the whole file or none.

        Raises:
            OutOfSpace: no memory for it; nothing is left behind.
        """
        assert len(export) <= EXPORT_BYTES_MAX
        geometry = frame_class.page_bytes, frame_class.page_tokens, frame_class.layers
        lengths = len(export), len(strides.layers), len(strides.dims)
        head = _HEAD.pack(_MAGIC, _VERSION, incarnation, number, session, *geometry, frames, kind, *lengths)
        head += export + b"".join(number.to_bytes(8, "little") for number in strides.numbers())
        path = mounted_path(folder, number)
        size = _rows_at(frames) + frames * record_format(frame_class).row_bytes
        folder.new_file(path, size, head + xxhash.xxh3_64_digest(head))
        fd = open_plain(path, os.O_RDWR)
        try:
            records = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        return cls(_HEAD.unpack_from(head), export, strides, records, None)

    @classmethod
    def open(cls, folder: NodeFolder, number: int, incarnation: int) -> MountedTable | None:
        """Open a reader's table. Return None if it is absent, damaged, or from another node: each is a miss."""
        try:
            fd = open_plain(mounted_path(folder, number), os.O_RDWR)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            parsed = _parse_head(os.pread(fd, _HEAD_BYTES, 0), size, number, incarnation)
            if parsed is None:
                return None
            head, export, strides = parsed
            held = mmap.mmap(fd, _rows_at(head[8]) - _HEAD_BYTES, offset=_HEAD_BYTES)
            return cls(head, export, strides, mmap.mmap(fd, size, access=mmap.ACCESS_READ), held)
        except (OSError, ValueError):  # it was truncated in the meantime
            return None
        finally:
            os.close(fd)

    # --- for the engine ---------------------------------------------------------------------------------------------

    def fill(self, frames: Sequence[int], generation: int, keys: Keys, position: int, spans: Sequence[int]) -> None:
        """Write pages into these empty frames, under consecutive generations starting at ``generation``.

        ``position``: place of the first page in its chain.
        """
        fmt, identity = self.fmt, keys.identity_bytes
        width = len(identity) // len(keys)
        parents = [keys.parent, *keys.hashes]
        pad = bytes(fmt.parent.start - fmt.identity.stop)
        for i, frame in enumerate(frames):
            summed = identity[i * width : (i + 1) * width] + pad + parents[i]
            self.rows[frame, fmt.summed] = np.frombuffer(summed, np.uint8)
            self.infos[frame] = info_word(self.frame_class.page_bytes, position=position + i)
            self.sums[frame] = xxhash.xxh3_64_intdigest(summed)
            self.spans[frame] = spans[i]
            self.words[frame] = word_of(generation + i, FrameState.SEALED)

    def retire(self, frame: int) -> int:
        """Forbid new reads of the frame. Return the generation of its page; 0 if it has none."""
        generation, state = divmod(int(self.words[frame]), 256)
        if state == _SEALED:
            self.words[frame] = generation << 8 | _RETIRING
        return generation

    def is_held(self, frame: int, retired_ns: int) -> bool:
        """Return True if a process still reads in that frame, which was retired at ``retired_ns``."""
        now_ns = time.monotonic_ns()
        return now_ns < min(int(self.held[frame]), retired_ns + HOLD_NS)

    def clear(self, frame: int) -> None:
        """Mark the frame as empty. Reads in progress there become invalid."""
        self.words[frame] = 0

    # --- for the node's startup -------------------------------------------------------------------------------------

    def sealed(self) -> npt.NDArray[np.int64]:
        """Return the frames with a sealed page whose record is sound."""
        frames = np.flatnonzero((self.words & _STATE) == _SEALED)
        digest, summed = xxhash.xxh3_64_intdigest, self.fmt.summed
        sound = [digest(self.rows[frame, summed].tobytes()) == int(self.sums[frame]) for frame in frames.tolist()]
        sealed: npt.NDArray[np.int64] = frames[np.array(sound, bool)]
        return sealed

    def generation(self, frame: int) -> int:
        """Return the generation of the last page in this frame."""
        return int(self.words[frame] >> _GENERATION_BITS)

    def is_sealed(self, frame: int) -> bool:
        """Return True if readers find a page in this frame now."""
        return int(self.words[frame]) & 0xFF == _SEALED

    def span(self, frame: int) -> int:
        """Return the span of the page in this frame."""
        return int(self.spans[frame])

    def key(self, frame: int) -> bytes:
        """Return the key of the page in this frame."""
        return self.rows[frame, self.fmt.key].tobytes()

    def root(self, frame: int) -> bytes:
        """Return the root of the page in this frame."""
        return self.rows[frame, self.fmt.root].tobytes()


def record_format(frame_class: FrameClass) -> RecordFormat:
    """Return the format of rows without checksums, and without the fields that only the node writes."""
    return RecordFormat(frame_class.page_tokens, layers=0, tail=False)


def _rows_at(frames: int) -> int:
    return _HEAD_BYTES + -(-8 * frames // _PAGE) * _PAGE


def _parse_head(data: bytes, size: int, number: int, incarnation: int) -> tuple[tuple[int, ...], bytes, Strides] | None:
    """Return the words of the head, the export and the strides; None unless all of them are sound."""
    if len(data) < _HEAD_BYTES:
        return None
    head = _HEAD.unpack_from(data)
    length, layers, dims = head[-3:]
    if head[:4] != (_MAGIC, _VERSION, incarnation, number) or length > EXPORT_BYTES_MAX:
        return None
    if layers > LAYERS_MAX or dims > DIMS_MAX:
        return None
    strides_at = _HEAD.size + length
    stop = strides_at + 8 * (2 + layers + 2 * dims)
    if data[stop : stop + 8] != xxhash.xxh3_64_digest(data[:stop]):
        return None
    page_bytes, page_tokens, page_layers, frames = head[5:9]
    if not (page_bytes and page_layers and frames) or page_tokens > 0xFFFF or frames > 1 << 32:
        return None
    strides = _strides(struct.unpack_from(f"<{2 + layers + 2 * dims}Q", data, strides_at), layers)
    if strides is None or strides.page_bytes != page_bytes:
        return None
    # A row beyond the end of the file would raise SIGBUS, not miss.
    if size != _rows_at(frames) + frames * record_format(FrameClass(page_bytes, page_tokens, page_layers)).row_bytes:
        return None
    return head, data[_HEAD.size : strides_at], strides


def _strides(numbers: tuple[int, ...], layers: int) -> Strides | None:
    """Return the strides that these numbers describe; None if they are not valid."""
    piece, block, *rest = numbers
    dims = rest[layers:]
    try:
        return Strides(rest[:layers], block, list(zip(dims[::2], dims[1::2], strict=True)), piece)
    except InvalidRequest:
        return None
