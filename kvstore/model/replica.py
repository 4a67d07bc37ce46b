"""Replica: one page in one frame. This module has its states, its address, and the format of its record.

The lifecycle of a frame::

    FREE ──grant──> RESERVED ──seal──> SEALED ──retire──> FREE
                       │                  └──(leased)──> RETIRING ──lease ends──> FREE
                       ├──revoke──> FREE
                       └──writer lost──> QUARANTINED ──writer proven dead, or heard from──> FREE

Every arrow except seal draws a new generation from the segment's counter, so an address (extent, frame, generation)
never names two pages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property, partial
from typing import ClassVar, NamedTuple, cast

import numpy as np
import numpy.typing as npt

KEY_BYTES = 16
ADDRESS_BYTES = 16
WORD_BYTES = 8  # generation and state, at the start of a record
FRAME_ALIGN = 4096  # O_DIRECT and page-table granularity
SHARDS_MAX = 8  # writers of one page (TP ranks times PP stages)
FETCH_GROUP = int.from_bytes(b"bring it", "big")  # the write group of all processes that copy pages of other nodes
# An identity row proves which page is stored: key, root, extra, then the page's token ids. Clients send one per page of
# a put. Records and the headers of NVMe frames contain one.
KEY, ROOT, EXTRA = slice(0, KEY_BYTES), slice(KEY_BYTES, 2 * KEY_BYTES), slice(2 * KEY_BYTES, 3 * KEY_BYTES)
IDENTITY_HEAD_BYTES = EXTRA.stop
# Frames of these sizes, with records of these widths (in words), hold opaque objects, see ``model.objects``.
OBJECT_PAGE_BYTES = (4096, 16384, 65536, 262144, 1048576)
OBJECT_WIDTHS = (32, 256, 512)
OBJECT_LEAN_WORDS = 10  # words of an object's head that its record has on every tier: they name its group
LEAN_IDENTITY_BYTES = IDENTITY_HEAD_BYTES + 4 * OBJECT_LEAN_WORDS  # the longest identity in a lean record


class Tier(StrEnum):
    """A latency class."""

    HBM = "hbm"
    DRAM = "dram"
    NVME = "nvme"


TIERS = tuple(Tier)  # by number: in records, on the wire and in the directory. Append only


class FrameState(IntEnum):
    """State of a frame, in the low byte of its record's word."""

    FREE = 0
    RESERVED = 1
    SEALED = 2
    RETIRING = 3
    QUARANTINED = 4


class Status(IntEnum):
    """The result for one page or one request."""

    OK = 0  # sealed, granted, leased, renewed, returned, or verified
    PRESENT = 1  # the key is already stored; nothing was written, a granted frame stays granted
    JOINED = 2  # another shard of this write group reserved the page; both use the same address
    PARTIAL = 3  # this shard is sealed; other shards or the parent are not
    NO_PARENT = 4  # the preceding page is not stored; a granted frame stays granted
    NO_SPACE = 5  # no frame can be granted now
    STALE = 6  # the address is not (or no longer) this session's, or does not name a sealed page
    DAMAGED = 7  # the checksum or the record is wrong; the page was dropped
    INVALID = 8  # the request is not valid; body utf-8 "field\0reason"
    FAILED = 9  # the node could not do what was requested; body utf-8 reason
    OVER_QUOTA = 11  # the tenant's quota is full of pages that must not be evicted
    BUSY = 10  # pages are being copied between tiers; try again in a moment


class Address(NamedTuple):
    """The address of a page inside one incarnation of a node. The number of an ``extent`` is never reused."""

    extent: int
    frame: int
    generation: int


# Makes an address of a tuple of its numbers, in a quarter of the time of ``Address._make``.
address_of = cast("Callable[[tuple[int, int, int]], Address]", partial(tuple.__new__, Address))


def frame_runs(addresses: Sequence[Address]) -> list[tuple[int, int, int, int]]:
    """Return ``(extent, first frame, i, j)`` for each run ``addresses[i:j]`` of consecutive frames of one extent."""
    if not addresses:
        return []
    numbers, frames, _ = zip(*addresses, strict=True)
    number, first, count = numbers[0], frames[0], len(frames)
    if frames == (*range(first, first + count),) and numbers.count(number) == count:  # the usual case
        return [(number, first, 0, count)]
    runs, start = [], 0
    for place in range(1, count + 1):
        if place == count or frames[place] - place != frames[start] - start or numbers[place] != numbers[start]:
            runs.append((numbers[start], frames[start], start, place))
            start = place
    return runs


# An address in the index and on the wire.
ADDRESS = struct.Struct("<IIQ")
ADDRESS_DTYPE = np.dtype([("extent", "<u4"), ("frame", "<u4"), ("generation", "<u8")])
assert ADDRESS_DTYPE.itemsize == ADDRESS_BYTES


def identity_bytes(page_tokens: int) -> int:
    """Return the length of an identity row."""
    return IDENTITY_HEAD_BYTES + 4 * page_tokens


def keys_of(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the key of each identity row."""
    return _split(rows[:, KEY])


def roots_of(rows: npt.NDArray[np.uint8]) -> list[bytes]:
    """Return the root of each identity row."""
    return _split(rows[:, ROOT])


def _split(column: npt.NDArray[np.uint8]) -> list[bytes]:
    data = column.tobytes()
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]


def word_of(generation: int, state: FrameState) -> int:
    """Return the first 8 bytes of a record: generation << 8 | state. They are written last and invalidated first."""
    return generation << 8 | state


def in_state(words: npt.NDArray[np.uint64], state: FrameState) -> npt.NDArray[np.bool_]:
    """Return a boolean array ``[frames]``: True where the record word has this state."""
    matches: npt.NDArray[np.bool_] = (words & np.uint64(0xFF)) == state
    return matches


@dataclass(frozen=True)
class FrameClass:
    """Geometry of the frames of one extent. Layouts of equal geometry share extents.

    Args:
        page_bytes: bytes of a page; a frame has this size rounded up to 4 KiB.
        page_tokens: token ids in a record.
        layers: checksums in a record.
    """

    page_bytes: int
    page_tokens: int
    layers: int

    @cached_property
    def frame_bytes(self) -> int:
        """``page_bytes`` rounded up to ``FRAME_ALIGN``."""
        return aligned(self.page_bytes)

    @cached_property
    def numbers(self) -> tuple[int, int, int]:
        """The three numbers, as the key of a table."""
        return self.page_bytes, self.page_tokens, self.layers

    @cached_property
    def record(self) -> RecordFormat:
        """The format of this class's records."""
        return RecordFormat(self.page_tokens, self.layers)

    @cached_property
    def holds_objects(self) -> bool:
        """True if frames of this class are for objects, or for pages of a layout with the same geometry."""
        has_width = self.page_tokens in OBJECT_WIDTHS
        return self.layers == 1 and has_width and self.page_bytes in OBJECT_PAGE_BYTES

    @cached_property
    def lean(self) -> RecordFormat:
        """The format for NVMe, without token ids, checksums and writers: the header on disk has the first two, and
        clients do not write to NVMe. Records of objects keep ``OBJECT_LEAN_WORDS`` words."""
        return RecordFormat(OBJECT_LEAN_WORDS if self.holds_objects else 0, layers=0, tail=False)


def _after_word(part: slice) -> slice:
    return slice(WORD_BYTES + part.start, WORD_BYTES + part.stop)


@dataclass(frozen=True)
class RecordFormat:
    """Byte offsets inside a record row. The daemon alone writes records; readers map them read-only.

    ``[word 8][identity: key 16, root 16, extra 16, tokens 4*page_tokens (padded to 8)][parent 16][info 8]
    [identity_sum 8][lease_until_ns 8][tail max(4*layers, 72) (padded to 8)]``

    ``identity_sum`` is xxh3_64 over identity and parent. ``lease_until_ns`` is CLOCK_MONOTONIC. Three fields depend on
    the frame's state:

    - RESERVED or QUARANTINED: ``info`` is payload_bytes (u32), shards (u8), mask of sealed shards (u8), flags (u8), 0.
      ``lease_until_ns`` is the writer's deadline. The tail has the write ``group``, and the session that may still
      write each shard, one u64 per shard (0: none).
    - SEALED: ``info`` is payload_bytes (31 bits), 1 if a second copy on another node is wanted (1 bit), position in
      the chain (u16, saturating), flags (u8), turns (u8, saturating). ``lease_until_ns`` is the end of the longest
      lease. The tail has the ``checksums`` (low 32 bits of xxh3_64, one per layer) once the flag ``STAMPED`` is set.

    4-byte checksums keep the metadata of a page of a 32-layer model under 400 bytes, index, uses and policy included.
    Without ``tail`` (NVMe, ``FrameClass.lean``) a row ends after ``lease_until_ns`` and has 96 bytes, or 136 in classes
    of objects.
    """

    page_tokens: int
    layers: int
    tail: bool = True

    body: ClassVar[slice] = slice(WORD_BYTES, None)  # everything after the word; the word is stored last
    key: ClassVar[slice] = _after_word(KEY)
    root: ClassVar[slice] = _after_word(ROOT)
    extra: ClassVar[slice] = _after_word(EXTRA)

    @cached_property
    def identity(self) -> slice:
        """The range of key, root, extra and tokens. Every read compares these."""
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
        """The range of identity and parent. ``identity_sum`` is its checksum."""
        return slice(WORD_BYTES, self.parent.stop)

    @cached_property
    def info(self) -> int:
        """Offset of ``info``. The other words follow, 8 bytes each, in the order of the class docstring."""
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
        """Everything between the word and ``writing``: identity, parent, ``info``, ``identity_sum`` and
        ``lease_until_ns``."""
        return slice(WORD_BYTES, self.lease_until_ns + 8)

    @cached_property
    def checksums(self) -> slice:
        """``layers`` little-endian uint32 (SEALED frames with ``STAMPED`` only)."""
        return slice(self.info + 24, self.info + 24 + 4 * self.layers)

    @cached_property
    def row_bytes(self) -> int:
        """The size in bytes of one row, a multiple of 8."""
        tail_bytes = -(-max(4 * self.layers, 8 + 8 * SHARDS_MAX) // 8) * 8 if self.tail else 0
        return self.info + 24 + tail_bytes


STAMPED = 1  # flag in info: the record has checksums
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
    """Return the ``info`` word of a record. With ``position`` (and ``turns``) it is a SEALED record, which has no
    shards."""
    if position is None:
        return payload_bytes | shards << 32 | sealed_mask << 40 | flags << 48
    return payload_bytes | min(position, POSITION_MAX) << 32 | flags << 48 | min(turns, TURNS_MAX) << 56


_HINT_SHIFT = 49  # the flags of a SEALED record above ``STAMPED``
_HINT_MASK = 0x7F
_REPLICATED_SHIFT = 31  # above the payload's bytes
REPLICATED_INFO = 1 << _REPLICATED_SHIFT  # flag in info: a second copy of the page on another node is wanted
PAYLOAD_MASK = REPLICATED_INFO - 1
_STANDING = POSITION_MAX << 32 | _HINT_MASK << _HINT_SHIFT | TURNS_MAX << 56 | REPLICATED_INFO


def standing(position: int, turns: int, hint: int = 0) -> int:
    """Return the part of a SEALED record's ``info`` that a page has in every tier: its position in its chain, the
    chain's turns, its retention hint, and whether a second copy is wanted (``retention.REPLICATED`` in ``hint``)."""
    place = min(position, POSITION_MAX) << 32 | min(turns, TURNS_MAX) << 56
    return place | (hint & _HINT_MASK) << _HINT_SHIFT | (hint > _HINT_MASK) << _REPLICATED_SHIFT


def standing_of(info: int) -> int:
    """Return the ``standing`` in an ``info`` word."""
    return info & _STANDING


def position_of(info: int) -> int:
    """Return the page's position in its chain from the ``info`` of a SEALED record; ``POSITION_MAX`` means that or
    later."""
    return info >> 32 & POSITION_MAX


def hint_in(info: int) -> int:
    """Return the retention hint of the page, or 0."""
    return info >> _HINT_SHIFT & _HINT_MASK


def hint_byte_in(info: int) -> int:
    """Return the hint byte of the page as its writer sent it: the retention hint, and ``retention.REPLICATED``."""
    return hint_in(info) | (info & REPLICATED_INFO) >> _REPLICATED_SHIFT - 7


def turns_of(info: int) -> int:
    """Return how often the chain had been extended when the page was sealed; ``TURNS_MAX`` means that or more."""
    return info >> 56


def aligned(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``FRAME_ALIGN``."""
    return -(-nbytes // FRAME_ALIGN) * FRAME_ALIGN
