"""The byte formats of data connections for opaque objects: OBJECTS, FORGET, BURY, KEYS, and their replies. No I/O.

OBJECTS names objects of one salt by their keys, and for each one the largest value that the caller takes. The server
sends first what it knows about each object, then the bytes of the values that are within their limits::

    OBJECTS   length of the salt u32, objects u32 | salt | limits u64[objects] | lengths of keys u16[objects] | keys
    HEADS     per object: bytes of the value i64 (-1: there is none), bytes of a page u32, members of its group u32 (0:
              none), the hash of the group, nonce
    PARTS     parts u32 | per part: object u32, first page u32, pages u32 | one checksum u32 per page | the bytes of
              all these pages, end to end
    PARTS     ...
    VALID     per object u8: 1 if it did not change until all of its bytes were sent

A limit of 0 asks for the facts about a value only. The last page of a value, its head, has only the rest of the value's
bytes. Parts of one object are in order, and objects may be in any order. Parts are sent directly from memory, where
other pages may replace them at any time, so a value counts only after VALID. All pages of a value have the one nonce in
HEADS, so a value is never a mixture of two.

FORGET deletes objects of one salt. A node drops those whose stamps are smaller than the given ones, and keeps
tombstones (see ``model.tombstones``). A stamp of 0 deletes nothing, and only asks for the stamp of the stored value.
BURY announces the tombstones of a node to an owner of the directory, which answers with those that the node needs::

    FORGET     as OBJECTS, with stamps in place of limits
    FORGOTTEN  per object u8: 1 if a value was deleted | per object u64: the stamp of the value that remains, or 0
    BURY       number of the node's daemon u64, tombstones u32, length of the node's name u8 | name | tombstones
    BURIED     tombstones (``wire.tombstones``)

KEYS lists the keys of a salt that begin with a prefix. A NAMES is sent for every part of the node that was examined,
also without keys, so that the caller sees progress::

    KEYS       length of the salt u32, length of the prefix u32 | salt | prefix
    NAMES      keys u32, state u8: 0 if another NAMES follows, 1 if this is the last, 2 if there may be more keys |
               lengths of keys u16[keys] | keys
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.objects import KEY_BYTES_MAX, MEMBERS_MAX, NO_GROUP, NONCE_BYTES, ObjectGroup, pieces_of
from kvstore.model.replica import KEY_BYTES, OBJECT_PAGE_BYTES
from kvstore.model.tombstones import Tombstone
from kvstore.wire.data import BODY_MAX, SALT_BYTES_MAX, FrameKind, WireError
from kvstore.wire.tombstones import TOMBSTONE_BYTES, pack_tombstones, unpack_tombstones

OBJECTS_MAX: Final = 1024  # in one request
VALUE_BYTES_MAX: Final = 1 << 36  # a larger value is not read from other nodes
PARTS_MAX: Final = 4096  # in one PARTS
_REQUEST: Final = struct.Struct("<II")
_HEAD: Final = struct.Struct(f"<qII{KEY_BYTES}s{NONCE_BYTES}s")
_PARTS: Final = struct.Struct("<I")
_PART: Final = struct.Struct("<III")

assert OBJECTS_MAX * _HEAD.size <= BODY_MAX[FrameKind.HEADS]
assert BODY_MAX[FrameKind.VALID] >= OBJECTS_MAX
NAMES_MAX: Final = 1 << 16  # keys in one reply to KEYS
_NAMES: Final = struct.Struct("<IB")
BURIED_MAX: Final = 1024  # tombstones in one BURY, and in one BURIED
_BURY: Final = struct.Struct("<QIB")
assert BODY_MAX[FrameKind.FORGOTTEN] >= 9 * OBJECTS_MAX
assert BODY_MAX[FrameKind.BURIED] >= BURIED_MAX * TOMBSTONE_BYTES

PARTS_HEAD_BYTES: Final = _PARTS.size
Body = bytes | bytearray | memoryview
Sums = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class ObjectsRequest:
    """A request for objects of one salt.

    Attributes:
        names: the keys, in UTF-8.
        limits: for each object, the largest value to send; 0 for the facts about it only.
    """

    salt: str
    names: Sequence[bytes]
    limits: Sequence[int]

    def pack(self) -> bytes:
        """Return the body of OBJECTS."""
        salt, count = self.salt.encode(), len(self.names)
        limits = np.array(self.limits, "<u8").tobytes()
        lengths = np.array([len(name) for name in self.names], "<u2").tobytes()
        return b"".join((_REQUEST.pack(len(salt), count), salt, limits, lengths, *self.names))


def objects_per_request(names: Sequence[bytes]) -> int:
    """Return how many of the first ``names`` fit one request, at least one."""
    room, count = BODY_MAX[FrameKind.OBJECTS] - _REQUEST.size - SALT_BYTES_MAX, 0
    for name in names[:OBJECTS_MAX]:
        room -= len(name) + 10
        if room < 0:
            break
        count += 1
    return count


def unpack_objects(body: memoryview) -> ObjectsRequest:
    """Return the request in the body of OBJECTS.

    Raises:
        InvalidRequest: it is not valid. The error names the field.
    """
    if len(body) < _REQUEST.size:
        raise InvalidRequest("objects", f"must have at least {_REQUEST.size} bytes (got {len(body)})")
    salt_bytes, count = _REQUEST.unpack_from(body)
    if salt_bytes > SALT_BYTES_MAX:
        raise InvalidRequest("salt", f"must have at most {SALT_BYTES_MAX} bytes (got {salt_bytes})")
    if not 0 < count <= OBJECTS_MAX:
        raise InvalidRequest("objects", f"must be 1 to {OBJECTS_MAX} objects (got {count})")
    limits_at = _REQUEST.size + salt_bytes
    lengths_at, names_at = limits_at + 8 * count, limits_at + 10 * count
    if len(body) < names_at:
        raise InvalidRequest("objects", f"must have at least {names_at} bytes (got {len(body)})")
    lengths: list[int] = np.frombuffer(body, "<u2", count, lengths_at).tolist()
    if min(lengths) < 1 or max(lengths) > KEY_BYTES_MAX or len(body) != names_at + sum(lengths):
        raise InvalidRequest("keys", f"must be keys of 1 to {KEY_BYTES_MAX} bytes, in {sum(lengths)} bytes")
    names: list[bytes] = []
    for length in lengths:
        names.append(bytes(body[names_at : names_at + length]))
        names_at += length
    try:
        salt = bytes(body[_REQUEST.size : limits_at]).decode()
    except UnicodeDecodeError:
        raise InvalidRequest("salt", "must be UTF-8") from None
    return ObjectsRequest(salt, names, np.frombuffer(body, "<u8", count, limits_at).tolist())


class ObjectFacts(NamedTuple):
    """The facts about a stored value.

    Attributes:
        page_bytes: the size of its pages; the last one has only the rest of the value.
        nonce, group: see ``model.objects``. A member of a group that is not complete is not stored for other nodes.
    """

    value_bytes: int
    page_bytes: int
    nonce: bytes
    group: ObjectGroup = NO_GROUP

    @property
    def pages(self) -> int:
        """The number of its pages."""
        return pieces_of(self.value_bytes, self.page_bytes) + 1

    def page_range(self, first: int, pages: int) -> tuple[int, int]:
        """Return the first byte of these pages in the value, and the byte after them."""
        return first * self.page_bytes, min(self.value_bytes, (first + pages) * self.page_bytes)


def pack_heads(facts: Sequence[ObjectFacts | None]) -> bytes:
    """Return the body of HEADS; None for an object that is not stored."""
    packed = [_HEAD.pack(-1, 0, 0, b"", b"")] * len(facts)
    for position, each in enumerate(facts):
        if each is not None:
            hash_, members = each.group
            packed[position] = _HEAD.pack(each.value_bytes, each.page_bytes, members, hash_, each.nonce)
    return b"".join(packed)


def unpack_heads(body: Body, count: int) -> list[ObjectFacts | None]:
    """Return the facts in a HEADS about ``count`` objects. Raises WireError if they are not valid."""
    if len(body) != count * _HEAD.size:
        raise WireError(f"heads: must have {count * _HEAD.size} bytes (got {len(body)})")
    facts: list[ObjectFacts | None] = []
    for value_bytes, page_bytes, members, hash_, nonce in _HEAD.iter_unpack(body):
        if value_bytes < 0:
            facts.append(None)
            continue
        if value_bytes > VALUE_BYTES_MAX or page_bytes not in OBJECT_PAGE_BYTES:
            raise WireError(f"heads: must be a possible value (got {value_bytes} bytes in pages of {page_bytes})")
        if members > MEMBERS_MAX:
            raise WireError(f"heads: must have at most {MEMBERS_MAX} members in a group (got {members})")
        group = ObjectGroup(hash_, members) if members else NO_GROUP
        facts.append(ObjectFacts(value_bytes, page_bytes, nonce, group))
    return facts


class ObjectPart(NamedTuple):
    """Consecutive pages of one object, by its position in the request."""

    position: int
    first: int
    pages: int


def pack_parts(parts: Sequence[ObjectPart], sums: Sequence[int]) -> bytes:
    """Return the start of PARTS; the bytes of all pages follow it. ``sums`` has a checksum per page."""
    assert len(parts) <= PARTS_MAX
    return b"".join((_PARTS.pack(len(parts)), *[_PART.pack(*part) for part in parts], np.array(sums, "<u4").tobytes()))


def parts_bytes(raw: Body) -> int:
    """Return the size of the descriptions of the parts that follow the first ``PARTS_HEAD_BYTES`` of a PARTS.

    Raises:
        WireError: their number is not valid.
    """
    (count,) = _PARTS.unpack(raw)
    if not 0 < count <= PARTS_MAX:
        raise WireError(f"parts: must be 1 to {PARTS_MAX} (got {count})")
    return int(count) * _PART.size


def unpack_parts(raw: Body) -> list[ObjectPart]:
    """Return the descriptions of parts, which ``parts_bytes`` has measured."""
    return [ObjectPart(*part) for part in _PART.iter_unpack(raw)]


class ObjectsReply:
    """What has arrived of a reply to OBJECTS: checks that parts are those of requested values, in order.

    Attributes:
        facts: as in HEADS.
    """

    def __init__(self, request: ObjectsRequest, facts: list[ObjectFacts | None]) -> None:
        self.facts = facts
        self._next_page = [0] * len(facts)
        self._limits = request.limits

    def take(self, parts: Sequence[ObjectPart], data_bytes: int) -> int:
        """Note parts that arrive, and return the number of their pages.

        Raises:
            WireError: they do not belong to the reply, or their pages and checksums do not have ``data_bytes``.
        """
        pages = size = 0
        for position, first, count in parts:
            facts = self.facts[position] if position < len(self.facts) else None
            if facts is None or facts.value_bytes > self._limits[position]:
                raise WireError(f"parts: must be of an object that is wanted (got object {position})")
            if first != self._next_page[position] or not 0 < count <= facts.pages - first:
                raise WireError(f"parts: must begin with page {self._next_page[position]} (got {count} from {first})")
            self._next_page[position] += count
            start, stop = facts.page_range(first, count)
            pages, size = pages + count, size + stop - start
        if data_bytes != size + 4 * pages:
            raise WireError(f"parts: must have {size + 4 * pages} bytes (got {data_bytes})")
        return pages

    def whole(self, valid: Body) -> list[bool]:
        """Return, after VALID, which values have arrived as a whole. A value above its limit counts if its facts are
        valid. Raises WireError if VALID is not valid."""
        if len(valid) != len(self.facts):
            raise WireError(f"valid: must have {len(self.facts)} bytes (got {len(valid)})")
        return [
            facts is not None and flag == 1 and (pages == facts.pages or facts.value_bytes > limit)
            for facts, flag, pages, limit in zip(self.facts, valid, self._next_page, self._limits, strict=True)
        ]


def pack_forgotten(deleted: Sequence[bool], stamps: Sequence[int]) -> bytes:
    """Return the body of FORGOTTEN."""
    return bytes(deleted) + np.array(stamps, "<u8").tobytes()


def unpack_forgotten(body: Body, count: int) -> list[tuple[bool, int]]:
    """Return, for each object, whether a value was deleted, and the stamp of the value that is stored. Raises WireError
    if the body is not valid."""
    if len(body) != 9 * count or (count and max(body[:count]) > 1):
        raise WireError(f"forgotten: must be about {count} objects (got {len(body)} bytes)")
    return list(zip(map(bool, body[:count]), np.frombuffer(body, "<u8", count, count).tolist(), strict=True))


def pack_bury(node: str, daemon: int, tombstones: Sequence[Tombstone], now_ns: int) -> bytes:
    """Return the body of BURY. ``daemon`` is the number in the node's catalog entry."""
    assert len(tombstones) <= BURIED_MAX
    name = node.encode()
    return _BURY.pack(daemon, len(tombstones), len(name)) + name + pack_tombstones(tombstones, now_ns)


def unpack_bury(body: memoryview, now_ns: int) -> tuple[str, int, list[Tombstone]]:
    """Return the node, the number of its daemon, and its tombstones. Raises WireError if the body is not valid."""
    try:
        daemon, count, size = _BURY.unpack_from(body)
        start = _BURY.size + size
        if count > BURIED_MAX or not size:
            raise ValueError(f"{count} tombstones of a name with {size} bytes")
        node = bytes(body[_BURY.size : start]).decode()
        return node, daemon, unpack_tombstones(body[start:], count, now_ns)
    except (struct.error, ValueError, InvalidRequest) as error:
        raise WireError(f"bury: {error}") from None


class NamesState(IntEnum):
    """Whether a NAMES is the last one of its reply, and the list is complete."""

    CONTINUES = 0
    COMPLETE = 1
    CUT = 2


def pack_keys(salt: str, prefix: bytes) -> bytes:
    """Return the body of KEYS."""
    raw = salt.encode()
    return _REQUEST.pack(len(raw), len(prefix)) + raw + prefix


def unpack_keys(body: memoryview) -> tuple[str, bytes]:
    """Return the salt and the prefix in a KEYS.

    Raises:
        InvalidRequest: it is not valid. The error names the field.
    """
    if len(body) < _REQUEST.size:
        raise InvalidRequest("keys", f"must have at least {_REQUEST.size} bytes (got {len(body)})")
    salt_bytes, prefix_bytes = _REQUEST.unpack_from(body)
    prefix_at = _REQUEST.size + salt_bytes
    if salt_bytes > SALT_BYTES_MAX or prefix_bytes > KEY_BYTES_MAX or len(body) != prefix_at + prefix_bytes:
        raise InvalidRequest("keys", f"must be a salt and a prefix (got {len(body)} bytes)")
    try:
        return bytes(body[_REQUEST.size : prefix_at]).decode(), bytes(body[prefix_at:])
    except UnicodeDecodeError:
        raise InvalidRequest("salt", "must be UTF-8") from None


def pack_names(names: Sequence[bytes], state: NamesState) -> list[bytes]:
    """Return the bodies of one or more NAMES with these keys. The last one has ``state``."""
    bodies, start = list[bytes](), 0
    while True:
        room, stop = BODY_MAX[FrameKind.NAMES] - _NAMES.size, start
        while stop < len(names) and room >= len(names[stop]) + 2:
            room -= len(names[stop]) + 2
            stop += 1
        part = names[start:stop]
        lengths = np.array([len(name) for name in part], "<u2").tobytes()
        head = _NAMES.pack(len(part), state if stop == len(names) else NamesState.CONTINUES)
        bodies.append(b"".join((head, lengths, *part)))
        start = stop
        if start == len(names):
            return bodies


def unpack_names(body: Body) -> tuple[list[bytes], NamesState]:
    """Return the keys and the state in a NAMES. Raises WireError if it is not valid."""
    try:
        count, state = _NAMES.unpack_from(body)
        lengths: list[int] = np.frombuffer(body, "<u2", count, _NAMES.size).tolist()
        start, names = _NAMES.size + 2 * count, list[bytes]()
        if len(body) != start + sum(lengths) or any(not 0 < length <= KEY_BYTES_MAX for length in lengths):
            raise ValueError(f"{len(body)} bytes")
        for length in lengths:
            names.append(bytes(body[start : start + length]))
            start += length
        return names, NamesState(state)
    except (struct.error, ValueError) as error:
        raise WireError(f"names: {error}") from None


def page_sum(*parts: npt.NDArray[np.uint8]) -> int:
    """Return the checksum of a page whose bytes are in these arrays, one after the other."""
    if len(parts) == 1:
        return int(xxhash.xxh3_64_intdigest(parts[0].data)) & 0xFFFFFFFF
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return int(digest.intdigest()) & 0xFFFFFFFF
