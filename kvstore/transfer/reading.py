"""READ and its reply: which pages a client wants, and how their bytes come. Pure.

A request names one chain by its fingerprint, salt and adapter, and consecutive pages of it by the hashes of the chain,
with the token ids that prove them; of every page the same byte range. The reply has the leading pages that are there::

    RANGE   first page, pages | tier | one checksum per piece | the bytes of all these pages, end to end
    RANGE   ...
    END     how many leading pages held still until they were sent, and why not more

Nothing that a RANGE brought counts before END: pages are sent straight from memory in which they may be replaced, and
END says which were not. ``Piece``: what one checksum (low 32 bits of xxh3_64) is of: each layer, where the range is of
whole layers, so that the sums are those that the page was stored with; else the range.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import InvalidRequest
from kvstore.model.layout import LAYERS_MAX, PAGE_BYTES_MAX, PAGE_TOKENS_MAX
from kvstore.model.prefix import Keys, root_of
from kvstore.model.replica import KEY_BYTES, FrameClass, Tier
from kvstore.transfer.wire import BODY_MAX, FrameKind, WireError

READ_PAGES_MAX: Final = 2048  # of one request
SALT_BYTES_MAX: Final = 4096  # of a salt, or an adapter
RANGE_BYTES: Final = 1 << 23  # of the pages of one RANGE, where a page is not larger

_FIXED: Final = struct.Struct("<16sIIIIIIIIHHI")  # see ``ReadRequest.pack``
_RANGE: Final = struct.Struct("<IIII")  # first page, pages, checksums of a page, tier
_END: Final = struct.Struct("<I")
_CLOSED, _EXTRAS = 1, 2
_TIERS: Final = (Tier.DRAM, Tier.NVME, Tier.HBM)
RANGE_HEAD_BYTES: Final = _RANGE.size

Sums = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Whose:
    """The owner of pages: what their root is made of. ``fingerprint``: of the layout."""

    fingerprint: bytes
    salt: str
    adapter: str

    @cached_property
    def root(self) -> bytes:
        """16 bytes that start every chain of this owner."""
        return root_of(self.fingerprint, self.salt, self.adapter)


@dataclass(frozen=True)
class WantedChain(Whose):
    """The owner of pages, and all else that a node needs, besides their keys, to find and prove them.

    Attributes:
        closed: whether a stored page has its parents stored, so that a search may skip some (full attention).
    """

    frame_class: FrameClass
    closed: bool


@dataclass(frozen=True)
class ReadRequest:
    """Bytes ``offset`` to ``offset + length`` of each of these pages."""

    chain: WantedChain
    keys: Keys
    offset: int
    length: int

    @property
    def pieces(self) -> int:
        """How many checksums come with each page."""
        return pieces_of(self.chain.frame_class, self.offset, self.length)

    def pack(self) -> list[bytes]:
        """The body of READ, in parts."""
        chain, keys, shape = self.chain, self.keys, self.chain.frame_class
        salt, adapter = chain.salt.encode(), chain.adapter.encode()
        flags = (_CLOSED if chain.closed else 0) | (_EXTRAS if keys.extras is not None else 0)
        fixed = _FIXED.pack(
            chain.fingerprint,
            *(shape.page_bytes, shape.page_tokens, shape.layers),
            *(len(keys), self.offset, self.length, flags, 0),
            *(len(salt), len(adapter), 0),
        )
        return [fixed, salt, adapter, b"".join(keys.links), b"".join(keys.extras or ()), keys.tokens.tobytes()]


def request_bytes(page_tokens: int, extras: bool) -> int:
    """What one page adds to the body of READ."""
    return KEY_BYTES + (KEY_BYTES if extras else 0) + 4 * page_tokens


def pages_per_request(chain: WantedChain, extras: bool) -> int:
    """How many pages one READ may name."""
    room = BODY_MAX[FrameKind.READ] - _FIXED.size - 2 * SALT_BYTES_MAX
    return min(READ_PAGES_MAX, room // request_bytes(chain.frame_class.page_tokens, extras))


def unpack_read(body: memoryview) -> ReadRequest:
    """The request in this body; its keys have no tag.

    Raises:
        InvalidRequest: it makes no sense; names the field.
    """
    if len(body) < _FIXED.size:
        raise InvalidRequest("read", f"has {len(body)} bytes, at least {_FIXED.size} are needed")
    fields = _FIXED.unpack_from(body)
    fingerprint, page_bytes, page_tokens, layers, pages, offset, length, flags, _, salt_bytes, adapter_bytes, _ = fields
    _check("page_bytes", 0 < page_bytes <= PAGE_BYTES_MAX, page_bytes)
    _check("page_tokens", 0 < page_tokens <= PAGE_TOKENS_MAX, page_tokens)
    _check("layers", 0 < layers <= LAYERS_MAX and page_bytes % layers == 0, layers)
    _check("pages", 0 < pages <= READ_PAGES_MAX, pages)
    _check("length", 0 < length <= page_bytes, length)
    _check("offset", offset + length <= page_bytes, offset)
    _check("salt", salt_bytes <= SALT_BYTES_MAX, salt_bytes)
    _check("adapter", adapter_bytes <= SALT_BYTES_MAX, adapter_bytes)
    with_extras = bool(flags & _EXTRAS)
    wanted = _FIXED.size + salt_bytes + adapter_bytes + pages * request_bytes(page_tokens, with_extras)
    _check("read", len(body) == wanted, f"{len(body)} bytes where {wanted} are due")
    parts, at = [], _FIXED.size
    extras_bytes = pages * KEY_BYTES if with_extras else 0
    for size in (salt_bytes, adapter_bytes, pages * KEY_BYTES, extras_bytes, pages * page_tokens * 4):
        parts.append(bytes(body[at : at + size]))
        at += size
    try:
        salt, adapter = parts[0].decode(), parts[1].decode()
    except UnicodeDecodeError:
        raise InvalidRequest("salt", "salt and adapter are UTF-8") from None
    chain = WantedChain(
        fingerprint, salt, adapter, FrameClass(page_bytes, page_tokens, layers), closed=bool(flags & _CLOSED)
    )
    tokens, root = np.frombuffer(parts[4], "<u4"), chain.root
    extras = _split(parts[3]) if with_extras else None
    return ReadRequest(chain, Keys(page_tokens, root, root, _split(parts[2]), tokens, extras), offset, length)


def pack_range(first: int, tier: Tier, sums: Sums) -> bytes:
    """The head of a RANGE: its pages' bytes follow. ``sums``: ``[pages, pieces]``."""
    return _RANGE.pack(first, sums.shape[0], sums.shape[1], _TIERS.index(tier)) + sums.tobytes()


@dataclass(frozen=True)
class RangeHead:
    """What stands in front of the bytes of a RANGE, but for the checksums."""

    first: int
    pages: int
    tier: Tier


def unpack_range(raw: bytearray, body_bytes: int, request: ReadRequest, due: int) -> RangeHead:
    """The head of a RANGE. ``due``: the page that comes next.

    Raises:
        WireError: it is not what was asked for.
    """
    first, pages, pieces, tier = _RANGE.unpack(raw)
    wanted = RANGE_HEAD_BYTES + pages * (4 * request.pieces + request.length)
    if first != due or not 0 < pages <= len(request.keys) - due or pieces != request.pieces or tier >= len(_TIERS):
        raise WireError(f"range: pages {first} to {first + pages}, {pieces} checksums, where page {due} was due")
    if body_bytes != wanted:
        raise WireError(f"range: has {body_bytes} bytes where {wanted} are due")
    return RangeHead(first, pages, _TIERS[tier])


def pack_end(pages: int, reason: str) -> bytes:
    """END: how many leading pages were sent unchanged; why not more, as ``Match.reason`` gives it."""
    return _END.pack(pages) + reason.encode()


def unpack_end(body: bytearray, sent: int) -> tuple[int, str]:
    """The fields of END after ``sent`` pages. Raises WireError where they are impossible."""
    if len(body) < _END.size:
        raise WireError(f"end: has {len(body)} bytes")
    (pages,) = _END.unpack_from(body)
    if pages > sent:
        raise WireError(f"end: {pages} pages where {sent} came")
    return pages, body[_END.size :].decode("ascii", "replace")


def pieces_of(shape: FrameClass, offset: int, length: int) -> int:
    """How many checksums a range of a page of this class has."""
    layer = shape.page_bytes // shape.layers
    return length // layer if offset % layer == 0 and length % layer == 0 else 1


def sums_of(rows: npt.NDArray[np.uint8], pieces: int) -> Sums:
    """Checksums of each piece of each of these rows, ``[rows, pieces]``."""
    digest: Any = xxhash.xxh3_64_intdigest  # takes arrays, too
    count = rows.shape[0] * pieces
    if rows.flags.c_contiguous:
        sums = np.fromiter(map(digest, rows.reshape(count, -1)), np.uint64, count)
    else:
        parts = (part for row in rows for part in row.reshape(pieces, -1))
        sums = np.fromiter(map(digest, parts), np.uint64, count)
    return sums.astype("<u4").reshape(rows.shape[0], pieces)  # the low half of each


def _split(data: bytes) -> list[bytes]:
    return [data[i : i + KEY_BYTES] for i in range(0, len(data), KEY_BYTES)]


def _check(name: str, holds: bool, value: object) -> None:
    if not holds:
        raise InvalidRequest(name, f"{value} makes no sense here")
