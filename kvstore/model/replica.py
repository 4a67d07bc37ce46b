"""Replica: one page in one frame, its state, its address, and the record that proves it.

A frame's life::

    FREE ──grant──> RESERVED ──seal──> SEALED ──retire──> FREE
                       │                  └──(leased)──> RETIRING ──lease ends──> FREE
                       ├──revoke──> FREE
                       └──writer lost──> QUARANTINED ──writer proven dead, or speaks──> FREE

Every arrow draws a new generation from the segment's counter except seal, so an address (extent, frame, generation)
never names two pages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
ADDRESS_BYTES = 16
WORD_BYTES = 8  # generation and state, what a record begins with
FRAME_ALIGN = 4096  # O_DIRECT and page-table granularity
SHARDS_MAX = 8  # writers of one page (TP x PP ranks)
# An identity row, which says what page a page is. Rows of them come with every put, stand in every record, and in front
# of every page on NVMe: key, root and extra, then the page's token ids.
KEY, ROOT, EXTRA = slice(0, KEY_BYTES), slice(KEY_BYTES, 2 * KEY_BYTES), slice(2 * KEY_BYTES, 3 * KEY_BYTES)
IDENTITY_HEAD_BYTES = EXTRA.stop


class Tier(StrEnum):
    """A latency class."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


class FrameState(IntEnum):
    """State of a frame, kept in the low byte of its record's word."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    RETIRING = 3
    QUARANTINED = 4


class Status(IntEnum):
    """What became of one page or one request."""

    OK = 0  # sealed, granted, leased, renewed, given back, found sound
    PRESENT = 1  # that key is already stored; nothing was written, a granted frame stays granted
    JOINED = 2  # another shard of this write group reserved it; the address is shared
    PARTIAL = 3  # this shard is sealed, others or the parent are not yet
    NO_PARENT = 4  # the page before is not stored; a granted frame stays granted
    NO_SPACE = 5  # no frame could be granted now
    STALE = 6  # that address is not (or no longer) this session's, or names no sealed page
    DAMAGED = 7  # its checksum, or its record, does not hold; the page was dropped
    INVALID = 8  # the request makes no sense; body utf-8 "field\0reason"
    FAILED = 9  # the node could not do it; body utf-8 reason
    OVER_QUOTA = 11  # all that its tenant may have is full of pages that may not leave
    BUSY = 10  # not now, pages are on their way between tiers: ask again in a moment


class Address(NamedTuple):
    """The only address of a page inside one incarnation of a node. ``extent`` numbers are never used twice."""

    extent: int
    frame: int
    generation: int


# An address as index value and on the wire.
ADDRESS = struct.Struct("<IIQ")
ADDRESS_DTYPE = np.dtype([("extent", "<u4"), ("frame", "<u4"), ("generation", "<u8")])
assert ADDRESS_DTYPE.itemsize == ADDRESS_BYTES


def identity_bytes(page_tokens: int) -> int:
    """Length of an identity row."""
    return IDENTITY_HEAD_BYTES + 4 * page_tokens


def keys_of(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """The key of each of these identity rows."""
    return _split(rows[:, KEY])


def roots_of(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """The root of each of these identity rows."""
    return _split(rows[:, ROOT])


def _split(column: npt.NDArray[np.uint8]) -> list[bytes]:
    data = column.tobytes()
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]


def word_of(generation: int, state: FrameState) -> int:
    """A record's first 8 bytes: generation << 8 | state. Written last, invalidated first."""
    return generation << 8 | state


@dataclass(frozen=True)
class FrameClass:
    """Geometry of the frames of one extent: layouts of equal geometry share extents.

    Args:
        page_bytes: bytes of a page; a frame is that rounded up to 4 KiB.
        page_tokens: token ids kept in a record.
        layers: checksums kept in a record.
    """

    page_bytes: int
    page_tokens: int
    layers: int

    @cached_property
    def frame_bytes(self) -> int:
        """``page_bytes`` rounded up to ``FRAME_ALIGN``."""
        return aligned(self.page_bytes)

    @cached_property
    def record(self) -> RecordFormat:
        """Where each field of this class's records is."""
        return RecordFormat(self.page_tokens, self.layers)

    @cached_property
    def lean(self) -> RecordFormat:
        """The format for NVMe: token ids and checksums are in the frame's header on disk, and no client writes
        there."""
        return RecordFormat(page_tokens=0, layers=0, tail=False)


def _after_word(part: slice) -> slice:
    return slice(WORD_BYTES + part.start, WORD_BYTES + part.stop)


@dataclass(frozen=True)
class RecordFormat:
    """Byte offsets inside a record row. The daemon alone writes records; readers map them read-only.

    ``[word 8][identity: key 16, root 16, extra 16, tokens 4*page_tokens (padded to 8)][parent 16][info 8]
    [identity_sum 8][lease_until_ns 8][tail max(4*layers, 72) (padded to 8)]``

    ``info`` is payload_bytes (u32), shards (u8), mask of sealed shards (u8), flags (u8), 0. ``identity_sum`` is
    xxh3_64 over identity and parent. ``lease_until_ns`` is CLOCK_MONOTONIC: for a SEALED frame the end of the longest
    lease, for a RESERVED one the writer's deadline. The tail of a RESERVED or QUARANTINED frame holds its write
    ``group`` and the sessions that may still write it, one u64 per shard (0: none); that of a SEALED frame holds the
    ``checksums`` (low 32 bits of xxh3_64, one per layer) once the flag ``STAMPED`` is set.
    4-byte checksums keep a page of a 32-layer model under 400 bytes of metadata (index, uses and policy included).
    In a SEALED record ``info`` is payload_bytes (u32), position in the chain (u16, saturating), flags (u8), turns (u8,
    saturating). Without ``tail`` (NVMe, ``FrameClass.lean``) a row ends after ``lease_until_ns``: 96 bytes.
    """

    page_tokens: int
    layers: int
    tail: bool = True

    body: ClassVar[slice] = slice(WORD_BYTES, None)  # all but the word, which is stored last
    key: ClassVar[slice] = _after_word(KEY)
    root: ClassVar[slice] = _after_word(ROOT)
    extra: ClassVar[slice] = _after_word(EXTRA)

    @cached_property
    def identity(self) -> slice:
        """Compared on every read: key, root, extra, tokens."""
        return slice(WORD_BYTES, WORD_BYTES + identity_bytes(self.page_tokens))

    @cached_property
    def tokens(self) -> slice:
        """The token ids of ``identity``, little-endian uint32."""
        return slice(self.extra.stop, self.identity.stop)

    @cached_property
    def parent(self) -> slice:
        """16 bytes: the key of the page before, or the root for page 0."""
        start = WORD_BYTES + -(-identity_bytes(self.page_tokens) // 8) * 8
        return slice(start, start + KEY_BYTES)

    @cached_property
    def summed(self) -> slice:
        """What ``identity_sum`` is the sum of: identity and parent."""
        return slice(WORD_BYTES, self.parent.stop)

    @cached_property
    def info(self) -> int:
        """Offset of ``info``; the other words follow, 8 bytes each, in the order of the class docstring."""
        return int(self.parent.stop)

    @cached_property
    def identity_sum(self) -> int:
        """Offset of ``identity_sum``."""
        return self.info + 8

    @cached_property
    def lease_until_ns(self) -> int:
        """Offset of ``lease_until_ns``."""
        return self.info + 16

    @cached_property
    def group(self) -> int:
        """Offset of ``group``: the write group (RESERVED and QUARANTINED frames only)."""
        return self.info + 24

    @cached_property
    def writers(self) -> int:
        """Offset of the first of ``SHARDS_MAX`` session words (RESERVED and QUARANTINED frames only)."""
        return self.info + 32

    @cached_property
    def words(self) -> slice:
        """The words of a frame that is being written: ``info``, ``identity_sum``, ``lease_until_ns`` and
        ``writing``."""
        return slice(self.info, self.writing.stop)

    @cached_property
    def writing(self) -> slice:
        """``group`` and the words of all ``writers``."""
        return slice(self.group, self.writers + 8 * SHARDS_MAX)

    @cached_property
    def before_writing(self) -> slice:
        """From the word up to ``writing``: identity, parent, ``info``, ``identity_sum`` and ``lease_until_ns``."""
        return slice(WORD_BYTES, self.lease_until_ns + 8)

    @cached_property
    def checksums(self) -> slice:
        """``layers`` little-endian uint32 (SEALED frames with ``STAMPED`` only)."""
        return slice(self.info + 24, self.info + 24 + 4 * self.layers)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, a multiple of 8."""
        tail_bytes = -(-max(4 * self.layers, 8 + 8 * SHARDS_MAX) // 8) * 8 if self.tail else 0
        return self.info + 24 + tail_bytes


STAMPED = 1  # flag in info: the checksums are there
POSITION_MAX = 0xFFFF
TURNS_MAX = 0xFF


def info_word(
    payload_bytes: int,
    shards: int = 1,
    sealed_mask: int = 0,
    flags: int = 0,
    *,
    position: int | None = None,
    turns: int = 0,
) -> int:
    """The ``info`` word of a record; with ``position`` (and ``turns``) that of a SEALED one, which has no shards."""
    if position is None:
        return payload_bytes | shards << 32 | sealed_mask << 40 | flags << 48
    return payload_bytes | min(position, POSITION_MAX) << 32 | flags << 48 | min(turns, TURNS_MAX) << 56


_HINT_SHIFT = 49  # the flags of a SEALED record but for ``STAMPED``
_HINT_MASK = 0x7F
_STANDING = POSITION_MAX << 32 | _HINT_MASK << _HINT_SHIFT | TURNS_MAX << 56


def standing(position: int, turns: int, hint: int = 0) -> int:
    """The part of a SEALED record's ``info`` that says where in its chain the page is, after how many turns, and what
    hint came with it (see ``retention``)."""
    return min(position, POSITION_MAX) << 32 | hint << _HINT_SHIFT | min(turns, TURNS_MAX) << 56


def standing_of(info: int) -> int:
    """The ``standing`` in an ``info`` word."""
    return info & _STANDING


def position_of(info: int) -> int:
    """Position in its chain of the page whose SEALED record has this ``info``; ``POSITION_MAX``: that or later."""
    return info >> 32 & POSITION_MAX


def hint_in(info: int) -> int:
    """The hint that the page was stored with; 0: none."""
    return info >> _HINT_SHIFT & _HINT_MASK


def turns_of(info: int) -> int:
    """How often the chain had been extended when this page was sealed; ``TURNS_MAX``: that or more."""
    return info >> 56


def aligned(nbytes: int) -> int:
    """Rounded up to ``FRAME_ALIGN``."""
    return -(-nbytes // FRAME_ALIGN) * FRAME_ALIGN
