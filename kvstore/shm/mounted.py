"""MountedTable: the records of memory that an engine has mounted, written by that engine alone.

The file ``mounted-<number>`` of a node's folder; the number is one of its extents', and names no other ever::

    0        head    magic, version, incarnation of the node, number, session, geometry, how the memory is exported,
                     where pages lie in it (``model.shard``), sum
    4 KiB    held    a word per frame, written by readers: until when a process reads there (CLOCK_MONOTONIC) ..
    rows    a row per frame (``model.replica.RecordFormat`` without a tail), written by the engine

A row's life, all of it the engine's: its word is 0 (nothing is there) -> ``fill``: body first, the word SEALED last ->
``retire``: the word RETIRING under the same generation, so that no reader begins there, and those that read may end ->
``clear``: 0, and the frame may be written into. Generations are drawn from one counter and are never used again.
In place of a lease's deadline a row has the page's span, see ``model.prefix``.

A reader stores ``held`` before it looks at a word, and looks at the word again when it has read. So ``held`` is a
courtesy, which spares a reader a useless read: what makes its read right is that the generation is the same. The engine
waits for it no longer than ``HOLD_NS``, whatever is written there.

Where the engine's memory is shared memory, that is the file ``mounted-<number>-data``. Where others need a descriptor
of it, the engine passes that at the socket ``mounted-<number>-pass``.
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

HOLD_NS: Final = 200_000_000  # that a frame which is taken back is kept for those who read there, at most
EXPORT_BYTES_MAX: Final = 1024

_MAGIC: Final = int.from_bytes(b"KVMOUNT1", "little")
_VERSION: Final = 2
_PREFIX: Final = "mounted-"
_HEAD_BYTES: Final = 4096  # enough for the longest export, and for strides of most layers and dimensions
_PAGE: Final = 4096
# magic, version, incarnation, number, session, page_bytes, page_tokens, layers, frames, kind of export, its length,
# layers and dimensions of the strides, whose numbers follow the export
_HEAD: Final = struct.Struct("<13Q")
_SEALED, _RETIRING = int(FrameState.SEALED), int(FrameState.RETIRING)
_STATE: Final = np.uint64(0xFF)
_GENERATION_BITS: Final = np.uint64(8)


def mounted_path(folder: NodeFolder, number: int) -> Path:
    """Where the records of a segment are."""
    return folder.path / f"{_PREFIX}{number}"


def data_path(folder: NodeFolder, number: int) -> Path:
    """Where its memory is, if that is shared memory."""
    return folder.path / f"{_PREFIX}{number}-data"


def passing_path(folder: NodeFolder, number: int) -> Path:
    """Where its engine passes a descriptor of its memory, if that is what others open it by."""
    return folder.path / f"{_PREFIX}{number}-pass"


def mounted_numbers(folder: NodeFolder) -> list[int]:
    """Segments that have a file here, sound or not."""
    try:
        names = os.listdir(folder.path)
    except FileNotFoundError:
        return []
    tails = [name.removeprefix(_PREFIX).partition("-")[0] for name in names if name.startswith(_PREFIX)]
    return sorted({int(tail) for tail in tails if tail.isdecimal()})


def remove_mounted(folder: NodeFolder, number: int) -> None:
    """Remove a segment's files; processes that have it mapped miss from here on. Its engine is dead, or does not need
    it. May be repeated."""
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
    """One segment's records, mapped. Made by ``create`` (the engine) or ``open``; unmapped with the last reference.

    Attributes:
        number, session, frame_class, frames: which segment it is, whose, and what its frames are.
        strides: where pages lie in the memory.
        kind, export: how readers come to the memory: see ``tier.peer_memory``.
        words: ``[frames]``, strided; of readers read-only.
        held: ``[frames]``, writable for everyone.
        identity: ``[frames, bytes]``: key, root, extra and tokens of each page; of readers read-only.
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
        """Bytes of the memory, as far as it contains pages."""
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
        """The engine's; all frames are empty. Readers see the whole file or none.

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
        """A reader's. None where there is none, or one that is not sound, or of another node: a doubt is a miss."""
        try:
            fd = open_plain(mounted_path(folder, number), os.O_RDWR)
        except OSError:
            return None
        try:
            size = os.fstat(fd).st_size
            found = _sound(os.pread(fd, _HEAD_BYTES, 0), size, number, incarnation)
            if found is None:
                return None
            head, export, strides = found
            held = mmap.mmap(fd, _rows_at(head[8]) - _HEAD_BYTES, offset=_HEAD_BYTES)
            return cls(head, export, strides, mmap.mmap(fd, size, access=mmap.ACCESS_READ), held)
        except (OSError, ValueError):  # it was truncated
            return None
        finally:
            os.close(fd)

    # --- for the engine ---------------------------------------------------------------------------------------------

    def fill(self, frames: Sequence[int], generation: int, keys: Keys, position: int, spans: Sequence[int]) -> None:
        """These pages are in these frames, which are empty; the first under ``generation``, each other one under the
        next. ``position``: of the first in its chain."""
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
        """Forbid new reads of the frame; return the generation of the page, 0 where there is none."""
        generation, state = divmod(int(self.words[frame]), 256)
        if state == _SEALED:
            self.words[frame] = generation << 8 | _RETIRING
        return generation

    def is_held(self, frame: int, retired_ns: int) -> bool:
        """Return whether a process still reads in that frame, which was retired then."""
        now_ns = time.monotonic_ns()
        return now_ns < min(int(self.held[frame]), retired_ns + HOLD_NS)

    def clear(self, frame: int) -> None:
        """The frame is empty: running reads there are void."""
        self.words[frame] = 0

    # --- for a start of the node ------------------------------------------------------------------------------------

    def sealed(self) -> npt.NDArray[np.int64]:
        """Frames whose records say that a page is there, and are sound."""
        frames = np.flatnonzero((self.words & _STATE) == _SEALED)
        digest, summed = xxhash.xxh3_64_intdigest, self.fmt.summed
        sound = [digest(self.rows[frame, summed].tobytes()) == int(self.sums[frame]) for frame in frames.tolist()]
        kept: npt.NDArray[np.int64] = frames[np.array(sound, bool)]
        return kept

    def generation(self, frame: int) -> int:
        """Under which a page was last there."""
        return int(self.words[frame] >> _GENERATION_BITS)

    def is_sealed(self, frame: int) -> bool:
        """Return whether a page is there now, for all readers."""
        return int(self.words[frame]) & 0xFF == _SEALED

    def span(self, frame: int) -> int:
        """The span of the page that is there."""
        return int(self.spans[frame])

    def key(self, frame: int) -> bytes:
        """The key of the page in this frame."""
        return self.rows[frame, self.fmt.key].tobytes()

    def root(self, frame: int) -> bytes:
        """The root of the chain of the page in this frame."""
        return self.rows[frame, self.fmt.root].tobytes()


def record_format(frame_class: FrameClass) -> RecordFormat:
    """Rows without checksums, and without what only the node writes."""
    return RecordFormat(frame_class.page_tokens, layers=0, tail=False)


def _rows_at(frames: int) -> int:
    return _HEAD_BYTES + -(-8 * frames // _PAGE) * _PAGE


def _sound(data: bytes, size: int, number: int, incarnation: int) -> tuple[tuple[int, ...], bytes, Strides] | None:
    """The head's words, the export, and where pages lie, where all of it fits together."""
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
    # A row beyond the end of the file would be a SIGBUS, not a miss.
    if size != _rows_at(frames) + frames * record_format(FrameClass(page_bytes, page_tokens, page_layers)).row_bytes:
        return None
    return head, data[_HEAD.size : strides_at], strides


def _strides(numbers: tuple[int, ...], layers: int) -> Strides | None:
    """The strides in these numbers; None where they are not valid."""
    piece, block, *rest = numbers
    dims = rest[layers:]
    try:
        return Strides(rest[:layers], block, list(zip(dims[::2], dims[1::2], strict=True)), piece)
    except InvalidRequest:
        return None
