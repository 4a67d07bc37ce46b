"""The byte format of tombstones, in requests of clients and between nodes::

    key 16 bytes | root 16 bytes | stamp u64 | milliseconds until it ends u32

Clocks of machines differ, so a message has the time that is left.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final

from kvstore.errors import InvalidRequest
from kvstore.model.replica import KEY_BYTES
from kvstore.model.tombstones import TOMBSTONE_S, Tombstone

_TOMBSTONE: Final = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQI")
TOMBSTONE_BYTES: Final = _TOMBSTONE.size
_MS: Final = 1_000_000


def pack_tombstones(tombstones: Iterable[Tombstone], now_ns: int) -> bytes:
    """Return tombstones as bytes, end to end."""
    return b"".join(
        [
            _TOMBSTONE.pack(key, root, stamp, max(0, min(until_ns - now_ns, TOMBSTONE_S * 10**9)) // _MS)
            for key, root, stamp, until_ns in tombstones
        ]
    )


def unpack_tombstones(body: bytes | bytearray | memoryview, count: int, now_ns: int) -> list[Tombstone]:
    """Return ``count`` tombstones, none of which lasts longer than ``TOMBSTONE_S``.

    Raises:
        InvalidRequest: the body has another size.
    """
    if len(body) != count * TOMBSTONE_BYTES:
        raise InvalidRequest("tombstones", f"must have {count * TOMBSTONE_BYTES} bytes (got {len(body)})")
    return [
        Tombstone(key, root, stamp, now_ns + min(left_ms * _MS, TOMBSTONE_S * 10**9))
        for key, root, stamp, left_ms in _TOMBSTONE.iter_unpack(body)
    ]
