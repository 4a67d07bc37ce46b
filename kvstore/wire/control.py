"""Codec of the local control socket: fixed binary records, one message per datagram of a SOCK_SEQPACKET unix socket.

A request is ``HEAD`` (op, flags, count, request_id, a, b) and a body. A reply has the same head, with the status in
place of op. Requests of one connection are answered in order. A body consists of arrays without gaps, described next
to each ``Op``. Identity rows are exactly the bytes of a record, so the daemon stores them without parsing them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest
from kvstore.model.replica import (
    ADDRESS,
    ADDRESS_BYTES,
    EXTRA,
    IDENTITY_HEAD_BYTES,
    KEY,
    KEY_BYTES,
    ROOT,
    Address,
    FrameClass,
    address_of,
    identity_bytes,
)

PROTOCOL = 5
HEAD = struct.Struct("<BBHIQQ")
WRITER = struct.Struct("<QII")  # start of RESERVE's body: write group, shard, shards
CHAINED = struct.Struct("<QQ")  # in the body of PUBLISH: position of the first page, span of the page before it
# One datagram: less than Linux' default send buffer of 208 KiB. Also bounds the memory that a client can make us use.
MESSAGE_BYTES_MAX = 128 * 1024
BATCH_MAX = 512  # pages or addresses in one request
NO_REPLY = 1  # flag
CHECKSUMS = 2  # flag: SEAL_GRANTED carries checksums, [count, layers] uint32 at the end of its body
AHEAD = 4  # flag: GRANT asks for more than is needed now, and may get less
CONTINUES = 16  # flag: SEAL_GRANTED continues a put whose first pages came in an earlier message
OBJECT = 32  # flag: SEAL_GRANTED has the head of an object; its body ends with the address that the head replaces
HINTS = 64  # flag: SEAL_GRANTED and RESERVE end with one byte per page: its retention hint (``retention``), and
#             ``retention.REPLICATED`` if a second copy on another node is wanted
IN_POOL = 1  # number b of a request that seals objects: they replace those of other nodes too
HINT = 8  # flag: PREFETCH reports pages that were just read from NVMe; the node decides whether they go to DRAM

_CLASS = struct.Struct("<IHH")


class Op(IntEnum):
    """A client's request. ``a`` and ``b`` are the header's two numbers; [n] means ``count`` of them."""

    HELLO = 1  # a=session id, b=pid; body utf-8 JSON {"protocol": 5}. Reply: JSON about the node
    GRANT = 2  # a=frame class, count=frames. Body: key of the new pages' parent, or nothing; then the root whose
    #            tenant is charged for these frames now, or nothing: it is charged when the pages are sealed.
    #            b: keep the last page that the session sealed under log number b or later; 0 for no page
    #            Reply: addresses [<= count], RESERVED for this session, unkeyed; or BUSY and none
    SEAL_GRANTED = (
        3  # a=frame class, b=``IN_POOL`` or 0; body parent key, addresses [n], and the columns of the identity
    )
    #                rows: keys [n], the root of all pages, extras [n], token ids [n, page_tokens]. Reply: statuses [n]
    RESERVE = 4  # a=frame class, b=ttl_ms; body group u64, shard u32, shards u32, parent key, identity rows [n]
    #              Reply: statuses [n] padded to 8, addresses [n] (zero where none); BUSY from one page onward
    SEAL = 5  # a=shard; body addresses [n]. Reply: statuses [n]
    REVOKE = 6  # a=shard + 1, or 0 for all shards; body addresses [n]: reserved or granted frames to give back.
    #             Reply: statuses [n]
    LEASE = 7  # a=lease id (chosen by the client), b=ttl_ms; body addresses [n]. Reply: statuses [n]
    RENEW = 8  # a=lease id, b=ttl_ms. Reply: status
    RELEASE = 9  # a=lease id; usually NO_REPLY
    SCRUB = 10  # body addresses [n] to verify now. Reply: statuses [n]
    ADMIN = 11  # body JSON {"call": ..., ...}: stats, evict, verify. Reply: JSON
    PREFETCH = 12  # body addresses [n] of NVMe pages of one chain, in order, to copy to DRAM. a=0: optional, usually
    #                NO_REPLY, with HINT or without. a=1: required; the client repeats it while pages are being copied.
    #                Reply: statuses [n]: OK (it is in DRAM now), BUSY (on its way), NO_SPACE, STALE, DAMAGED, FAILED
    DELETE = 13  # body addresses [n] of objects' heads. Reply: statuses [n]: OK, STALE, BUSY (ask again), FAILED
    BEGIN = 15  # a=frame class, b=ttl_ms; body as of SEAL_GRANTED: these pages are being written into granted frames,
    #                and readers may follow the writer. Usually published, not sent
    MOUNT = 16  # a=frame class, b=frames of the engine's own memory. Reply: a=number of the segment; NO_SPACE
    PUBLISH = 17  # a=segment; body root, ``CHAINED``, addresses [n], keys [n]: consecutive pages of one chain, in its
    #                frames. Usually published, not sent. Reply: statuses [n]
    RETRACT = 18  # a=segment; body addresses [n]: these frames' pages must not be read now. Usually published, not
    #                sent. Reply: statuses [n]
    UNMOUNT = 19  # a=segment. Reply: status
    SEAL_OBJECTS = 20  # a=frame class; body addresses [n], identity rows [n], replaced addresses [n]: whole objects of
    #                one root, each with its pieces first and its head last. A head's replaced address is the
    #                address of the head that it replaces; zero if there is none, and for pieces. b: ``IN_POOL`` or 0.
    #                Reply: statuses [n], one value per object
    BURY = 21  # body tombstones [n] (``wire.tombstones``): keep them, and delete older objects of their keys.
    #            Reply: statuses [n]: OK (an object was deleted), STALE (there is no older one), BUSY (ask again)
    OWED = 22  # body keys [n] of sealed pages. Reply: statuses [n]: OK (no copy is owed), BUSY (a second copy on
    #            another node is owed, and may be stored soon), NO_SPACE (it is owed, and no node can store it now)
    DRAIN = 14  # process all that sessions have published (``shm.put_log``). Reply, if requested: when that is done


class Message(NamedTuple):
    """A decoded request or reply. ``body`` is valid only until the next message is received."""

    op: int
    flags: int
    entries: int  # the header's count
    request_id: int
    a: int
    b: int
    body: memoryview


def encode(
    op: int, request_id: int, *, count: int = 0, a: int = 0, b: int = 0, flags: int = 0, body: Iterable[bytes] = ()
) -> bytes:
    """Return one datagram. Asserts that it is within ``MESSAGE_BYTES_MAX``; callers split batches with
    ``batch_pages``."""
    message = b"".join((HEAD.pack(op, flags, count, request_id, a, b), *body))
    assert len(message) <= MESSAGE_BYTES_MAX, len(message)
    return message


def decode(data: memoryview) -> Message:
    """Decode a datagram. Raises InvalidRequest if it is too short for a header."""
    if len(data) < HEAD.size:
        raise InvalidRequest("message", f"must have at least {HEAD.size} bytes (got {len(data)})")
    op, flags, entries, request_id, a, b = HEAD.unpack_from(data)
    return Message(op, flags, entries, request_id, a, b, data[HEAD.size :])


def batch_pages(page_tokens: int, layers: int) -> int:
    """Return how many pages of a class fit in one request (identity row, address and checksums for each)."""
    row = identity_bytes(page_tokens) + ADDRESS_BYTES + 4 * layers + 1  # a hint
    return max(1, min(BATCH_MAX, (MESSAGE_BYTES_MAX - HEAD.size - 64) // row))


def batch_objects(page_tokens: int) -> int:
    """Return how many pages of objects fit in one request (identity row and two addresses for each)."""
    row = identity_bytes(page_tokens) + 2 * ADDRESS_BYTES
    return max(1, min(BATCH_MAX, (MESSAGE_BYTES_MAX - HEAD.size) // row))


def pack_class(frame_class: FrameClass) -> int:
    """Return a frame class as the header number ``a``."""
    packed = _CLASS.pack(frame_class.page_bytes, frame_class.page_tokens, frame_class.layers)
    return int.from_bytes(packed, "little")


@lru_cache(maxsize=256)
def unpack_class(number: int) -> FrameClass:
    """Return the frame class in the header number ``a``. Raises InvalidRequest if its geometry is impossible."""
    page_bytes, page_tokens, layers = _CLASS.unpack(number.to_bytes(8, "little"))
    if page_bytes == 0 or layers == 0 or page_bytes % layers:
        problem = "page_bytes must be a multiple of layers, and both above 0"
        raise InvalidRequest("frame_class", f"{problem} (got {page_bytes} bytes, {layers} layers)")
    return FrameClass(page_bytes, page_tokens, layers)


def pack_addresses(addresses: Iterable[Address]) -> bytes:
    """Pack addresses without gaps, 16 bytes each."""
    numbers = list(chain.from_iterable(addresses))
    return _numbers(len(numbers) // 3).pack(*numbers)


@lru_cache(maxsize=BATCH_MAX)
def _numbers(count: int) -> struct.Struct:
    return struct.Struct("<" + "IIQ" * count)


def unpack_addresses(body: memoryview | bytes, count: int, offset: int = 0) -> list[Address]:
    """Return ``count`` addresses from ``body`` at ``offset``. Raises InvalidRequest if the body is too short."""
    stop = offset + count * ADDRESS_BYTES
    _need(body, stop)
    return list(map(address_of, ADDRESS.iter_unpack(body[offset:stop])))


def unpack_rows(body: memoryview, count: int, page_tokens: int, offset: int) -> npt.NDArray[np.uint8]:
    """Return a view of the identity rows ``[count, 48 + 4 * page_tokens]`` in ``body`` at ``offset``."""
    width = identity_bytes(page_tokens)
    _need(body, offset + count * width)
    return np.frombuffer(body, np.uint8, count * width, offset).reshape(count, width)


def unpack_columns(body: memoryview, count: int, page_tokens: int, offset: int) -> npt.NDArray[np.uint8]:
    """Return new identity rows ``[count, 48 + 4 * page_tokens]`` of pages with one root, from their columns in ``body``
    at ``offset``."""
    size = columns_bytes(count, page_tokens)
    _need(body, offset + size)
    columns = np.frombuffer(body, np.uint8, size, offset)
    rows = np.empty((count, identity_bytes(page_tokens)), np.uint8)
    extras_at = count * KEY_BYTES + KEY_BYTES
    tokens_at = extras_at + count * KEY_BYTES
    rows[:, KEY] = columns[: count * KEY_BYTES].reshape(count, KEY_BYTES)
    rows[:, ROOT] = columns[count * KEY_BYTES : extras_at]
    rows[:, EXTRA] = columns[extras_at:tokens_at].reshape(count, KEY_BYTES)
    rows[:, IDENTITY_HEAD_BYTES:] = columns[tokens_at:].reshape(count, -1)
    return rows


def columns_bytes(count: int, page_tokens: int) -> int:
    """Return the length of the columns of ``count`` identity rows."""
    return count * (identity_bytes(page_tokens) - KEY_BYTES) + KEY_BYTES


def unpack_hints(message: Message) -> bytes:
    """Return the hints at the end of the body, a byte per page; empty without the flag. Raises InvalidRequest if hints
    are missing."""
    if not message.flags & HINTS:
        return b""
    _need(message.body, message.entries)
    return bytes(message.body[len(message.body) - message.entries :])


def unpack_key(body: memoryview, offset: int) -> bytes:
    """Return the 16-byte key at ``offset``."""
    _need(body, offset + KEY_BYTES)
    return bytes(body[offset : offset + KEY_BYTES])


def unpack_keys(body: memoryview, count: int, offset: int) -> list[bytes]:
    """Return ``count`` keys from ``body`` at ``offset``."""
    stop = offset + count * KEY_BYTES
    _need(body, stop)
    raw = bytes(body[offset:stop])
    return [raw[at : at + KEY_BYTES] for at in range(0, len(raw), KEY_BYTES)]


def pack_statuses(statuses: Iterable[int]) -> bytes:
    """Pack statuses as one byte each, padded to a multiple of 8 bytes."""
    raw = bytes(statuses)
    return raw + b"\0" * (-len(raw) % 8)


def statuses_bytes(count: int) -> int:
    """Return the size in bytes of ``count`` packed statuses."""
    return count + -count % 8


def pack_json(value: Any) -> bytes:
    """Return a JSON body."""
    return json.dumps(value, separators=(",", ":")).encode()


def unpack_json(body: memoryview) -> dict[str, Any]:
    """Return the JSON object in ``body``. Raises InvalidRequest if there is none."""
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:  # the latter: thousands of brackets
        raise InvalidRequest("message", f"must be JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidRequest("message", f"must be a JSON object (got {repr(value)[:80]})")
    return value


def _need(body: memoryview | bytes, size: int) -> None:
    if len(body) < size:
        raise InvalidRequest("message", f"must have a body of at least {size} bytes (got {len(body)})")
