"""The formats that gRPC services share: layouts and hints, streams of data, and errors.

**Streams of data.** ``ReadReply``, ``WriteRequest``, ``PutObjectRequest`` and ``GetObjectReply`` of
proto/kvstore/v1/store.proto each have a field of bytes and the xxh3_64 of these bytes. A protobuf object would copy the
bytes when it is filled, and again when it is sent or read. Here a message to send is joined once, and a received
message is used in place. It is the ordinary wire format, with any other fields in any order, and peers use ordinary
protobuf. Worked example: 3 bytes of data in a ``ReadReply`` are ``12 03 <data>`` (field 2, a length, the bytes) and
``19 <sum>`` (field 3, fixed64, little-endian).

**Errors.** One table serves both directions. A refused call ends with a status code, the message as its details, and
trailing metadata: ``kvstore-error`` names the class, ``kvstore-field`` the field of InvalidRequest, and
``retry-after-ms`` when to retry. From these a client makes the error that a local store would raise. Codes are strings,
so this module does not need gRPC.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final, NamedTuple

import xxhash
from google.protobuf import struct_pb2

from kvstore import errors
from kvstore.errors import InvalidRequest, KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.retention import Retention
from kvstore.pb import store_pb2 as pb

MESSAGE_BYTES_MAX: Final = 4 << 20  # of a request, and of a reply
CACHED_LAYOUT_BYTES_MAX: Final = 8 << 10  # larger messages of layouts, which have unknown fields, are not cached
CACHED_LAYOUTS_MAX: Final = 256  # cached, because checking and hashing one costs as much as a short lookup
TEXT_BYTES_MAX: Final = 1024  # of a salt, an adapter, a model's name

_TEXTS: Final = ("model", "dtype", "revision", "weights_digest", "attention", "rope", "group")


def layout_message(layout: Layout) -> pb.Layout:
    """Return a layout as a message."""
    return pb.Layout(**asdict(layout))


def layout_of(message: pb.Layout) -> Layout:
    """Return the layout in a message. Raises InvalidRequest with the name of the field."""
    raw = message.SerializeToString()
    return _layout_of(raw) if len(raw) <= CACHED_LAYOUT_BYTES_MAX else _layout_of.__wrapped__(raw)


@lru_cache(maxsize=CACHED_LAYOUTS_MAX)
def _layout_of(raw: bytes) -> Layout:
    message = pb.Layout.FromString(raw)
    for name in _TEXTS:
        check_text(f"layout.{name}", getattr(message, name))
    return Layout(
        model=message.model,
        layers=message.layers,
        kv_heads=message.kv_heads or 1,
        head_dim=message.head_dim,
        dtype=message.dtype or "bfloat16",
        page_tokens=message.page_tokens or 64,
        revision=message.revision,
        weights_digest=message.weights_digest,
        mla_latent=message.mla_latent,
        mla_rope=message.mla_rope,
        attention=message.attention or "full",
        window=message.window,
        rope=message.rope,
        group=message.group,
    )


def retention_messages(ranges: Iterable[Retention]) -> list[pb.Retention]:
    """Return hints as messages."""
    return [
        pb.Retention(priority=part.priority, ttl_s=part.ttl_s or 0, start=part.start, stop=part.stop or 0)
        for part in ranges
    ]


def retention_of(messages: Iterable[pb.Retention]) -> list[Retention]:
    """Return the hints in messages. Raises InvalidRequest with the name of the field."""
    return [Retention(part.priority, part.ttl_s or None, part.start, part.stop or None) for part in messages]


def document(value: dict[str, Any]) -> bytes:
    """Return a JSON document as a packed Struct. Numbers that are keys become text, as in JSON.

    If the document is too large for a message, a note that says so replaces it, as over the local socket.
    """
    packed = struct_pb2.Struct()
    packed.update(json.loads(json.dumps(value)))  # several times faster than json_format
    data = packed.SerializeToString()
    if len(data) <= MESSAGE_BYTES_MAX:
        return data
    return document({"findings": ["too many to list"], "truncated": True})


def check_text(field: str, text: str) -> None:
    """Raise InvalidRequest if the text is longer than a salt, an adapter or a name may be, because some are cached."""
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise InvalidRequest(field, f"must have at most {TEXT_BYTES_MAX} bytes (got {len(text.encode())})")


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


def pack_data(data: Buffer, field: int = DATA_FIELD, other_fields: bytes = b"") -> bytes:
    """Pack a message with ``data`` in ``field``, its checksum in the next field, then ``other_fields``."""
    if isinstance(data, memoryview):
        data = data.cast("B")
    head = bytes([field << 3 | BYTES]) + pack_varint(len(data))
    tail = bytes([(field + 1) << 3 | FIXED64]) + digest_of(data).to_bytes(8, "little")
    return b"".join((head, data, tail, other_fields))


def pack_integer(field: int, value: int) -> bytes:
    """Return a field with an unsigned number; empty for 0, as in protobuf."""
    return bytes([field << 3 | VARINT]) + pack_varint(value) if value else b""


def pack_varint(value: int) -> bytes:
    """Return the number with seven bits per byte, the low bits first."""
    packed = bytearray()
    while value > 0x7F:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)


def fields(message: bytes) -> Iterator[Field]:
    """Yield the fields of a message in their order. Bytes are views of ``message``, not copies.

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
            raise ValueError(f"wire type: is unknown (got {kind} at byte {at})")
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


ERROR_KEY: Final = "kvstore-error"
FIELD_KEY: Final = "kvstore-field"
RETRY_KEY: Final = "retry-after-ms"
_TOO_LARGE: Final = "message larger than max"
RETRY_AFTER_S: Final = (
    1.0  # used if the error has none; by then, leases might have ended and pages might have been saved
)
DETAILS_BYTES_MAX: Final = 1024  # trailing metadata may have 8 KiB in total


class NotServed(errors.VersionMismatch):
    """This node does not support the call; a later version does."""


# An error that is not in the table is sent as its nearest parent in the table.
CODES: Final[Mapping[type[KVStoreError], str]] = {
    errors.InvalidRequest: "INVALID_ARGUMENT",
    errors.NodeUnavailable: "UNAVAILABLE",
    errors.DeadlineExceeded: "DEADLINE_EXCEEDED",
    errors.InternalError: "INTERNAL",
    errors.TooManyCalls: "RESOURCE_EXHAUSTED",
    errors.OutOfSpace: "RESOURCE_EXHAUSTED",
    errors.Unavailable: "UNAVAILABLE",
    errors.Unauthenticated: "UNAUTHENTICATED",
    errors.PermissionDenied: "PERMISSION_DENIED",
    errors.LeaseBroken: "ABORTED",
    NotServed: "UNIMPLEMENTED",
    errors.VersionMismatch: "FAILED_PRECONDITION",
    errors.NodeBusy: "ALREADY_EXISTS",
    errors.KVStoreError: "UNKNOWN",
}

# For statuses from gRPC itself, a proxy or a node with another version. All other statuses become KVStoreError.
CLASSES: Final[Mapping[str, type[KVStoreError]]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.InvalidRequest,
    "UNAVAILABLE": errors.NodeUnavailable,
    "CANCELLED": errors.NodeUnavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "INTERNAL": errors.InternalError,
    "RESOURCE_EXHAUSTED": errors.TooManyCalls,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "ABORTED": errors.LeaseBroken,
    "FAILED_PRECONDITION": errors.VersionMismatch,
    "UNIMPLEMENTED": errors.VersionMismatch,  # a node with another version does not know the call
    "ALREADY_EXISTS": errors.NodeBusy,
}


def status_of(error: KVStoreError) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Return the status code's name, the details and the trailing metadata for ``error``."""
    code = next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)
    metadata = [(ERROR_KEY, type(error).__name__)]
    details = str(error)
    if isinstance(error, InvalidRequest):
        metadata.append((FIELD_KEY, _printable(error.field)))
    retry_after_s = getattr(error, "retry_after_s", RETRY_AFTER_S if code == "RESOURCE_EXHAUSTED" else None)
    if retry_after_s is not None:
        metadata.append((RETRY_KEY, str(max(1, int(retry_after_s * 1000)))))
    return code, details.encode(errors="replace")[:DETAILS_BYTES_MAX].decode(errors="ignore"), tuple(metadata)


def error_of(code: str, details: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> KVStoreError:
    """Return the error for a call's status. ``code`` is a status code's name."""
    fields = {key: value for key, value in metadata if isinstance(value, str)}
    kind = CLASSES.get(code, KVStoreError)
    if code == "RESOURCE_EXHAUSTED" and _TOO_LARGE in details:  # from gRPC itself; a retry would not help
        kind = InvalidRequest
    error_class = getattr(errors, fields.get(ERROR_KEY, ""), None)
    if isinstance(error_class, type) and issubclass(error_class, KVStoreError):
        kind = error_class
    if issubclass(kind, InvalidRequest):
        field = fields.get(FIELD_KEY, "request")
        return kind(field, details.removeprefix(f"{field}: "))
    error = kind(details or code)
    retry_ms = fields.get(RETRY_KEY, "")
    if retry_ms.isdecimal():
        error.__dict__["retry_after_s"] = int(retry_ms) / 1000
    return error


def from_rpc(error: Any) -> KVStoreError:
    """Return the error for a client's ``grpc.RpcError``."""
    code = error.code() if hasattr(error, "code") else None
    if code is None:
        return KVStoreError(str(error))
    return error_of(code.name, error.details() or "", error.trailing_metadata() or ())


def _printable(field: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in field)[:100]
