"""Messages that carry data in gRPC streams, as protobuf writes them but without its copies.

``ReadReply``, ``WriteRequest``, ``PutObjectRequest`` and ``GetObjectReply`` of proto/kvstore/v1/store.proto each have a
field of bytes and their xxh3_64. A protobuf object would copy the bytes when it is filled and again when it is sent or
read; here a message is joined once, and what is received is used in place. Any other field, and fields in any
order, are understood all the same: this is the same wire format, and peers use ordinary protobuf.

Worked example: 3 bytes of data in a ``ReadReply`` are ``12 03 <data>`` (field 2, a length, the bytes) and ``19 <sum>``
(field 3, fixed64, little-endian).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import xxhash

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
DATA_FIELD: Final = 2  # of ReadReply, WriteRequest and PutObjectRequest; its digest is in the field after it
OBJECT_DATA_FIELD: Final = 3  # of GetObjectReply

digest_of = xxhash.xxh3_64_intdigest

Buffer = bytes | bytearray | memoryview


class Field(NamedTuple):
    """One field of a message: a number, or a view of bytes."""

    number: int
    integer: int
    view: memoryview | None


def pack_data(data: Buffer, field: int = DATA_FIELD, rest: bytes = b"") -> bytes:
    """A message of ``data`` in ``field``, its digest in the next one, then ``rest``: other fields, packed."""
    if isinstance(data, memoryview):
        data = data.cast("B")
    head = bytes([field << 3 | BYTES]) + pack_varint(len(data))
    tail = bytes([(field + 1) << 3 | FIXED64]) + digest_of(data).to_bytes(8, "little")
    return b"".join((head, data, tail, rest))


def pack_integer(field: int, value: int) -> bytes:
    """A field with an unsigned number; nothing where it is 0, as protobuf does."""
    return bytes([field << 3 | VARINT]) + pack_varint(value) if value else b""


def pack_varint(value: int) -> bytes:
    """Seven bits a byte, the low ones first."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def fields(message: bytes) -> Iterator[Field]:
    """The fields of a message in their order. Bytes are views of ``message``, not copies.

    Raises:
        ValueError: it is not a protobuf message.
    """
    view, at, end = memoryview(message), 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            integer, at = _varint(message, at)
            yield Field(number, integer, None)
            continue
        if kind == BYTES:
            size, at = _varint(message, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + size > end:
            raise ValueError(f"field {number} ends at byte {at + size} of {end}")
        part = view[at : at + size]
        yield Field(number, 0, part) if kind == BYTES else Field(number, int.from_bytes(part, "little"), None)
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"no number at byte {at}")
