"""The byte formats of data connections: frames, READ and its reply, LEND and RETURN. No I/O.

**Frames.** Every frame is a head of 16 bytes and a body, little-endian::

    magic and version u32 | kind u16 | flags u16, always 0 | request u32 | body bytes u32 | body

The client first sends HELLO, and receives WELCOME, or ERROR and the end. Then it sends requests, and need not wait for
replies in between. The server answers them one by one, in order. A reply carries the request's number::

    PING -> PONG                READ -> RANGE ... END
    STATUS -> STATE             FIND -> FOUND             ANNOUNCE -> ANNOUNCED
    LIST -> LISTED              CHECK -> CHECKED          HOLD -> FOUND
    PULL -> PIECE ... END       (engines: the KV of a prompt that is being computed)
    COPY -> COPIED              (see ``wire.copy_order``)
    OBJECTS -> HEADS PARTS ... VALID    FORGET -> FORGOTTEN    BURY -> BURIED    KEYS -> NAMES ...
                                        (see ``wire.object_messages``)
    ATTACH -> ATTACHED          LEND -> LENT              RETURN -> RETURNED      (see below)

Instead of a reply, or in the middle of it, the server may send ERROR. Each kind's body has a bound (``BODY_MAX``),
which is checked before the body is read. A frame that breaks a rule ends the connection with an ERROR that says why.

**READ** names one chain by its fingerprint, salt and adapter; consecutive pages of it by their links, with the token
ids that prove them; and one byte range, the same for every page. The reply has the leading pages that are stored::

    RANGE   first page, pages | tier | one checksum per piece | the bytes of all these pages, end to end
    RANGE   ...
    END     how many leading pages were unchanged until they were sent, and why no more

The pages of a RANGE are valid only after END. They are sent directly from memory, where another page may replace them
at any time. END says how many were unchanged. A *piece* is the part of a page that has one checksum (low 32 bits of
xxh3_64). If the range consists of entire layers, each layer is a piece, and the checksums are those that the page was
stored with. Otherwise the range is one piece.

**LEND** makes pages of a node's memory readable for another process, one-sidedly. The node proves the pages, leases
their frames, and sends their addresses and checksums. The reader returns them after reading, and learns which were
unchanged until then. The pages are valid only after that::

    ATTACH     -
    ATTACHED   incarnation of the memory u64 | metadata of the node's agent
    LEND       as READ
    LENT       incarnation u64, lease u64, runs u32, pages u32, checksums of a page u32 | runs | words u64[pages] |
               checksums u32[pages, ...] | why no more
    RETURN     lease u64, runs u32, pages u32 | runs | words u64[pages]
    RETURNED   as END

A run is: address of its extent's first frame u64, bytes from frame to frame u32, frames of the extent u32, extent u32,
first frame u32, pages u32. The reader returns ``words`` (generation and state of each frame) unchanged, so the node has
to remember only the lease.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    KVStoreError,
    NodeUnavailable,
    PermissionDenied,
    TooManyCalls,
    Unauthenticated,
    Unavailable,
    VersionMismatch,
)
from kvstore.model.layout import LAYERS_MAX, PAGE_BYTES_MAX, PAGE_TOKENS_MAX
from kvstore.model.objects import object_root
from kvstore.model.prefix import Keys, root_of
from kvstore.model.replica import KEY_BYTES, TIERS, FrameClass, Tier

VERSION: Final = 6
MAGIC: Final = int.from_bytes(b"KVT", "little") | VERSION << 24
HEAD: Final = struct.Struct("<IHHII")
KIB: Final = 1 << 10
TEXT_MAX: Final = 512  # characters of a string in HELLO, except the token


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    WELCOME = 2
    ERROR = 3
    PING = 4
    PONG = 5
    STATUS = 6
    STATE = 7
    READ = 16
    RANGE = 17
    END = 18
    ATTACH = 20
    ATTACHED = 21
    LEND = 22
    LENT = 23
    RETURN = 24
    RETURNED = 25
    FOUND = 33
    ANNOUNCED = 35
    LIST = 36
    LISTED = 37
    FIND = 38
    ANNOUNCE = 39
    CHECK = 40
    CHECKED = 41
    HOLD = 42
    PULL = 48
    PIECE = 49
    COPY = 50
    COPIED = 51
    OBJECTS = 56
    HEADS = 57
    PARTS = 58
    VALID = 59
    FORGET = 60
    FORGOTTEN = 61
    BURY = 62
    BURIED = 63
    KEYS = 64
    NAMES = 65


BODY_MAX: Final[dict[FrameKind, int]] = {
    FrameKind.HELLO: 8 * KIB,
    FrameKind.WELCOME: 4 * KIB,
    FrameKind.ERROR: 4 * KIB,
    FrameKind.PING: 64,
    FrameKind.PONG: 64,
    FrameKind.STATUS: 4 * KIB,
    FrameKind.STATE: 64 * KIB,
    FrameKind.READ: 1024 * KIB,
    FrameKind.RANGE: (1 << 32) - 1,  # received in place, never as one body: see ``RangeHead``
    FrameKind.END: 64,
    FrameKind.ATTACH: 64,
    FrameKind.ATTACHED: 256 * KIB,
    FrameKind.LEND: 1024 * KIB,
    FrameKind.LENT: 1024 * KIB,
    FrameKind.RETURN: 256 * KIB,
    FrameKind.RETURNED: 64,
    FrameKind.FIND: 1024 * KIB,
    FrameKind.FOUND: 5120 * KIB,
    FrameKind.HOLD: 1024 * KIB,
    FrameKind.ANNOUNCE: 1024 * KIB,
    FrameKind.ANNOUNCED: 4 * KIB,
    FrameKind.LIST: 4 * KIB,
    FrameKind.LISTED: 1024 * KIB,
    FrameKind.CHECK: 4 * KIB,
    FrameKind.CHECKED: 256 * KIB,
    FrameKind.PULL: 4 * KIB,
    FrameKind.PIECE: (1 << 32) - 1,  # received in place too
    FrameKind.COPY: 1088 * KIB,  # a READ, and what the pages are
    FrameKind.COPIED: 64,
    FrameKind.OBJECTS: 1024 * KIB,
    FrameKind.HEADS: 64 * KIB,
    FrameKind.PARTS: (1 << 32) - 1,  # received in place too
    FrameKind.VALID: 1 * KIB,
    FrameKind.FORGET: 1024 * KIB,
    FrameKind.FORGOTTEN: 16 * KIB,
    FrameKind.BURY: 64 * KIB,
    FrameKind.BURIED: 64 * KIB,
    FrameKind.KEYS: 8 * KIB,
    FrameKind.NAMES: 1024 * KIB,
}
"""The largest body of each kind. It bounds a connection's memory, because there is one request and one reply at a
time."""

REQUESTS: Final = frozenset(
    (
        *(FrameKind.PING, FrameKind.STATUS, FrameKind.READ, FrameKind.FIND, FrameKind.ANNOUNCE, FrameKind.LIST),
        *(FrameKind.CHECK, FrameKind.HOLD, FrameKind.PULL, FrameKind.ATTACH, FrameKind.LEND, FrameKind.RETURN),
        *(FrameKind.COPY, FrameKind.OBJECTS, FrameKind.FORGET, FrameKind.BURY, FrameKind.KEYS),
    )
)


class WireError(Unavailable):
    """The other end broke a rule of the wire. The connection must no longer be used."""


class Head(NamedTuple):
    """The head of a valid frame."""

    kind: FrameKind
    flags: int
    request: int
    body_bytes: int


def pack_head(kind: FrameKind, request: int, body_bytes: int, flags: int = 0) -> bytes:
    """Return the head of a frame."""
    assert body_bytes <= BODY_MAX[kind], f"{kind.name} of {body_bytes} bytes"
    return HEAD.pack(MAGIC, kind, flags, request, body_bytes)


def unpack_head(raw: bytes | bytearray | memoryview) -> Head:
    """Return the head in these 16 bytes.

    Raises:
        WireError: it is not a head of this protocol, or its body is too large.
        VersionMismatch: it has another version.
    """
    magic, number, flags, request, body_bytes = HEAD.unpack(raw)
    if magic & 0xFFFFFF != MAGIC & 0xFFFFFF:
        raise WireError(f"magic: must be that of a kvstore data connection (got {magic:#x})")
    if magic != MAGIC:
        raise VersionMismatch(f"version: must be {VERSION} of the data protocol (got {magic >> 24})")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise WireError(f"kind: is unknown (got {number})") from None
    if body_bytes > BODY_MAX[kind]:
        raise WireError(f"body: {kind.name} must have at most {BODY_MAX[kind]} bytes (got {body_bytes})")
    return Head(kind, flags, request, body_bytes)


# --- HELLO and WELCOME: JSON objects, unknown names ignored --------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """A client's first message.

    Attributes:
        pool: the client's pool.
        node: the node that it expects; "" means any.
        caller: the client's name in the server's log.
        token: identifies the client; "" if there is none.
        process: the expected ``Welcome.process``, from the catalog or the node's folder; "" if unknown.
        version_min, version_max: the versions of the protocol that the client speaks.
    """

    pool: str = ""
    node: str = ""
    caller: str = ""
    token: str = ""
    process: str = ""
    version_min: int = VERSION
    version_max: int = VERSION

    def __repr__(self) -> str:
        return f"Hello(pool={self.pool!r}, node={self.node!r}, caller={self.caller!r})"


@dataclass(frozen=True)
class Welcome:
    """The server's answer to HELLO.

    Attributes:
        version: of the protocol, for the rest of the connection.
        node: its name.
        process: a random number of the server's process, 16 hex digits.
    """

    version: int = VERSION
    node: str = ""
    process: str = ""


def pack_hello(message: Hello | Welcome) -> bytes:
    """Return the message as the body of its frame."""
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def unpack_hello(body: bytes | bytearray | memoryview) -> Hello:
    """Parse the body of HELLO.

    Raises:
        WireError: it is not valid.
        VersionMismatch: this program supports none of the versions in it.
    """
    hello: Hello = _unpack(Hello, body)
    if not hello.version_min <= VERSION <= hello.version_max:
        versions = f"{hello.version_min} to {hello.version_max}"
        raise VersionMismatch(f"version: must include {VERSION} of the data protocol (got {versions})")
    return hello


def unpack_welcome(body: bytes | bytearray | memoryview) -> Welcome:
    """Parse the body of WELCOME. Raises WireError if it is not valid."""
    welcome: Welcome = _unpack(Welcome, body)
    return welcome


def _unpack(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise WireError(f"{kind.__name__}: must be valid JSON") from None
    if not isinstance(document, dict):
        raise WireError(f"{kind.__name__}: must be a JSON object (got {repr(document)[:80]})")
    values = {each.name: document[each.name] for each in fields(kind) if each.name in document}
    for name, value in values.items():
        field_type = type(getattr(kind, name))
        if type(value) is not field_type:
            raise WireError(f"{kind.__name__}: {name} must be a {field_type.__name__} (got a {type(value).__name__})")
        if field_type is str and not value.isascii():  # names are compared as bytes, and surrogates have none
            raise WireError(f"{kind.__name__}: {name} must be ASCII (got {ascii(value)[:80]})")
        if field_type is str and len(value) > TEXT_MAX and name != "token":
            raise WireError(f"{kind.__name__}: {name} must have at most {TEXT_MAX} characters (got {len(value)})")
    return kind(**values)


# --- ERROR ---------------------------------------------------------------------------------------------------------

# The number of each error. For an error that has no number, the first parent in this table is sent.
_ERRORS: Final[tuple[tuple[int, type[KVStoreError]], ...]] = (
    (1, WireError),
    (2, InvalidRequest),
    (3, Unauthenticated),
    (4, PermissionDenied),
    (5, VersionMismatch),
    (6, TooManyCalls),
    (7, DeadlineExceeded),
    (8, NodeUnavailable),
    (10, InternalError),  # an older caller treats it as Unavailable
    (9, Unavailable),
)
_CODE: Final = struct.Struct("<H")


def pack_error(error: KVStoreError) -> bytes:
    """Return an error as the body of its frame: a number and a message (``field\\0reason`` for InvalidRequest)."""
    code = next((code for code, kind in _ERRORS if isinstance(error, kind)), 9)
    text = f"{error.field}\0{error.reason}" if isinstance(error, InvalidRequest) else str(error)
    return _CODE.pack(code) + text.encode(errors="replace")[: BODY_MAX[FrameKind.ERROR] - _CODE.size]


def unpack_error(body: bytes | bytearray | memoryview) -> KVStoreError:
    """Return the error that the other end sent, for the caller to raise."""
    if len(body) < _CODE.size:
        return WireError("the other end sent an error without a message")
    kind = dict(_ERRORS).get(_CODE.unpack_from(body)[0], Unavailable)
    text = bytes(body[_CODE.size :]).decode(errors="replace")
    if kind is InvalidRequest:
        field, _, reason = text.partition("\0")
        return InvalidRequest(field, reason)
    return kind(text)


READ_PAGES_MAX: Final = 2048  # in one request
SALT_BYTES_MAX: Final = 4096  # of a salt, or an adapter
RANGE_BYTES: Final = 1 << 23  # of the pages of one RANGE; at least one page

_FIXED: Final = struct.Struct("<16sIIIIIIIIHHI")  # see ``ReadRequest.pack``
_RANGE: Final = struct.Struct("<IIII")  # first page, pages, checksums of a page, tier
_END: Final = struct.Struct("<I")
_CLOSED, _EXTRAS = 1, 2
RANGE_HEAD_BYTES: Final = _RANGE.size

Sums = npt.NDArray[np.uint32]
OBJECTS_FINGERPRINT: Final = b"kvstore.objects\0"  # in place of a layout's fingerprint, which is a hash


@dataclass(frozen=True)
class Namespace:
    """The values from which the root of a chain is computed. Only pages of one namespace share chains.

    Attributes:
        fingerprint: of the layout; ``OBJECTS_FINGERPRINT`` for opaque objects.
    """

    fingerprint: bytes
    salt: str
    adapter: str

    @property
    def holds_objects(self) -> bool:
        """True if this is the namespace of a salt's opaque objects, whose keys have no tag."""
        return self.fingerprint == OBJECTS_FINGERPRINT

    @cached_property
    def root(self) -> bytes:
        """The root of these chains or objects, 16 bytes."""
        return object_root(self.salt) if self.holds_objects else root_of(self.fingerprint, self.salt, self.adapter)


@dataclass(frozen=True)
class ChainQuery(Namespace):
    """A namespace, and everything except keys that a node needs to find and prove its pages.

    Attributes:
        closed: whether a stored page has its parents stored, so that a search may skip some (full attention).
    """

    frame_class: FrameClass
    closed: bool


@dataclass(frozen=True)
class ReadRequest:
    """A request for the bytes ``offset`` to ``offset + length`` of each page."""

    chain: ChainQuery
    keys: Keys
    offset: int
    length: int

    @property
    def pieces(self) -> int:
        """How many checksums each page has."""
        return pieces_of(self.chain.frame_class, self.offset, self.length)

    def pack(self) -> list[bytes]:
        """Return the body of READ, in parts."""
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
    """Return how many bytes each page adds to the body of READ."""
    return KEY_BYTES + (KEY_BYTES if extras else 0) + 4 * page_tokens


def pages_per_request(chain: ChainQuery, extras: bool) -> int:
    """Return how many pages one READ may name."""
    room = BODY_MAX[FrameKind.READ] - _FIXED.size - 2 * SALT_BYTES_MAX
    return min(READ_PAGES_MAX, room // request_bytes(chain.frame_class.page_tokens, extras))


def unpack_read(body: memoryview) -> ReadRequest:
    """Return the request in this body. Its keys have no tag.

    Raises:
        InvalidRequest: it is not valid. The error names the field.
    """
    if len(body) < _FIXED.size:
        raise InvalidRequest("read", f"must have at least {_FIXED.size} bytes (got {len(body)})")
    fields = _FIXED.unpack_from(body)
    fingerprint, page_bytes, page_tokens, layers, pages, offset, length, flags, _, salt_bytes, adapter_bytes, _ = fields
    _check_range("page_bytes", page_bytes, 1, PAGE_BYTES_MAX)
    _check_range("page_tokens", page_tokens, 1, PAGE_TOKENS_MAX)
    _check_range("layers", layers, 1, LAYERS_MAX)
    _check("layers", page_bytes % layers == 0, f"must divide page_bytes, {page_bytes}", layers)
    _check_range("pages", pages, 1, READ_PAGES_MAX)
    _check_range("length", length, 1, page_bytes)
    _check_range("offset", offset, 0, page_bytes - length)
    _check_range("salt", salt_bytes, 0, SALT_BYTES_MAX)
    _check_range("adapter", adapter_bytes, 0, SALT_BYTES_MAX)
    with_extras = bool(flags & _EXTRAS)
    size = _FIXED.size + salt_bytes + adapter_bytes + pages * request_bytes(page_tokens, with_extras)
    _check("read", len(body) == size, f"must have {size} bytes", len(body))
    parts, at = [], _FIXED.size
    extras_bytes = pages * KEY_BYTES if with_extras else 0
    for size in (salt_bytes, adapter_bytes, pages * KEY_BYTES, extras_bytes, pages * page_tokens * 4):
        parts.append(bytes(body[at : at + size]))
        at += size
    try:
        salt, adapter = parts[0].decode(), parts[1].decode()
    except UnicodeDecodeError:
        raise InvalidRequest("salt", "must be UTF-8, as the adapter must") from None
    chain = ChainQuery(
        fingerprint, salt, adapter, FrameClass(page_bytes, page_tokens, layers), closed=bool(flags & _CLOSED)
    )
    tokens, root = np.frombuffer(parts[4], "<u4"), chain.root
    extras = _split(parts[3]) if with_extras else None
    return ReadRequest(chain, Keys(page_tokens, root, root, _split(parts[2]), tokens, extras), offset, length)


def pack_range(first: int, tier: Tier, sums: Sums) -> bytes:
    """Return the head of a RANGE; the bytes of the pages follow it. ``sums``: ``[pages, pieces]``."""
    return _RANGE.pack(first, sums.shape[0], sums.shape[1], TIERS.index(tier)) + sums.tobytes()


@dataclass(frozen=True)
class RangeHead:
    """The head of a RANGE without the checksums."""

    first: int
    pages: int
    tier: Tier


def unpack_range(raw: bytearray, body_bytes: int, request: ReadRequest, next_page: int) -> RangeHead:
    """Return the head of a RANGE. The range must begin with the page ``next_page``.

    Raises:
        WireError: it does not answer the request.
    """
    first, pages, pieces, tier = _RANGE.unpack(raw)
    size = RANGE_HEAD_BYTES + pages * (4 * request.pieces + request.length)
    if (
        first != next_page
        or not 0 < pages <= len(request.keys) - next_page
        or pieces != request.pieces
        or tier >= len(TIERS)
    ):
        raise WireError(f"range: must begin with page {next_page} (got {pages} pages from {first}, {pieces} checksums)")
    if body_bytes != size:
        raise WireError(f"range: must have {size} bytes (got {body_bytes})")
    return RangeHead(first, pages, TIERS[tier])


def pack_end(pages: int, reason: str) -> bytes:
    """Return the body of END: how many leading pages were sent unchanged, and why no more, in the words of
    ``Match.reason``."""
    return _END.pack(pages) + reason.encode()


def unpack_end(body: bytearray, sent: int) -> tuple[int, str]:
    """Return the fields of END after ``sent`` pages. Raises WireError if they are impossible."""
    if len(body) < _END.size:
        raise WireError(f"end: must have at least {_END.size} bytes (got {len(body)})")
    (pages,) = _END.unpack_from(body)
    if pages > sent:
        raise WireError(f"end: must count at most {sent} pages (got {pages})")
    return pages, body[_END.size :].decode("ascii", "replace")


def pieces_of(shape: FrameClass, offset: int, length: int) -> int:
    """Return how many checksums a range of a page of this class has."""
    layer = shape.page_bytes // shape.layers
    return length // layer if offset % layer == 0 and length % layer == 0 else 1


def sums_of(rows: npt.NDArray[np.uint8], pieces: int) -> Sums:
    """Return the checksum of each piece of each row, ``[rows, pieces]``."""
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


def _check(name: str, holds: bool, problem: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(name, f"{problem} (got {value})")


def _check_range(name: str, value: int, least: int, most: int) -> None:
    _check(name, least <= value <= most, f"must be {least} to {most}", value)


LOAN_MS: Final = 30_000  # the lease of lent pages ends after this time

_ATTACHED: Final = struct.Struct("<Q")
_LENT: Final = struct.Struct("<QQIII")
_RETURN: Final = struct.Struct("<QII")
_RUN: Final = struct.Struct("<QIIIII")

Words = npt.NDArray[np.uint64]


class LentRun(NamedTuple):
    """Consecutive frames of an extent."""

    address: int
    stride: int
    frames: int
    extent: int
    frame: int
    pages: int


@dataclass(frozen=True)
class Loan:
    """Pages that were lent.

    Attributes:
        words: the word of each page's frame.
        sums: the checksums of each page, as in a RANGE.
        reason: why there are not more pages, or "".
    """

    incarnation: int
    lease: int
    runs: list[LentRun] = field(default_factory=list)
    words: Words = field(default_factory=lambda: np.zeros(0, np.uint64))
    sums: Sums = field(default_factory=lambda: np.zeros((0, 1), np.uint32))
    reason: str = ""

    @property
    def pages(self) -> int:
        """The number of pages."""
        return len(self.words)


def pages_lent_max(request: ReadRequest) -> int:
    """Return how many pages one LENT can name."""
    return (BODY_MAX[FrameKind.LENT] - (64 << 10)) // (_RUN.size + 8 + 4 * request.pieces)


def pack_attached(incarnation: int, metadata: bytes) -> bytes:
    """Return the body of ATTACHED."""
    return _ATTACHED.pack(incarnation) + metadata


def unpack_attached(body: bytearray) -> tuple[int, bytes]:
    """Return the fields of ATTACHED. Raises WireError if they are not valid."""
    if len(body) <= _ATTACHED.size:
        raise WireError(f"attached: must have more than {_ATTACHED.size} bytes (got {len(body)})")
    return _ATTACHED.unpack_from(body)[0], bytes(body[_ATTACHED.size :])


def pack_lent(loan: Loan) -> bytes:
    """Return the body of LENT."""
    head = _LENT.pack(loan.incarnation, loan.lease, len(loan.runs), loan.pages, loan.sums.shape[1])
    runs = b"".join(_RUN.pack(*run) for run in loan.runs)
    return b"".join((head, runs, loan.words.tobytes(), loan.sums.astype("<u4").tobytes(), loan.reason.encode()))


def unpack_lent(body: bytearray, request: ReadRequest) -> Loan:
    """Return the fields of LENT. Raises WireError if they do not answer the request."""
    try:
        incarnation, lease, count, pages, pieces = _LENT.unpack_from(body)
        runs, at = _runs(body, _LENT.size, count, pages)
        if pages > len(request.keys) or pieces != request.pieces:
            raise ValueError(f"{pages} pages of {pieces} checksums")
        words = np.frombuffer(body, "<u8", pages, at).astype(np.uint64)
        sums = np.frombuffer(body, "<u4", pages * pieces, at + 8 * pages).reshape(pages, pieces)
    except (struct.error, ValueError) as error:
        raise WireError(f"lent: {error}") from None
    end = at + pages * (8 + 4 * pieces)
    return Loan(incarnation, lease, runs, words, sums, body[end:].decode("ascii", "replace"))


def pack_return(loan: Loan) -> bytes:
    """Return the body of RETURN."""
    runs = b"".join(_RUN.pack(*run) for run in loan.runs)
    return _RETURN.pack(loan.lease, len(loan.runs), loan.pages) + runs + loan.words.tobytes()


def unpack_return(body: memoryview) -> Loan:
    """Return the fields of RETURN: lease, runs and words. Raises WireError if they are not valid."""
    try:
        lease, count, pages = _RETURN.unpack_from(body)
        runs, at = _runs(body, _RETURN.size, count, pages)
        if len(body) != at + 8 * pages:
            raise ValueError(f"{len(body)} bytes")
        return Loan(0, lease, runs, np.frombuffer(body, "<u8", pages, at).astype(np.uint64))
    except (struct.error, ValueError) as error:
        raise WireError(f"return: {error}") from None


def _runs(body: bytearray | memoryview, at: int, count: int, pages: int) -> tuple[list[LentRun], int]:
    """Return ``count`` runs with ``pages`` pages in total, and where they end. Raises ValueError, struct.error."""
    if count > READ_PAGES_MAX:
        raise ValueError(f"{count} runs")
    runs = [LentRun(*_RUN.unpack_from(body, at + i * _RUN.size)) for i in range(count)]
    if sum(run.pages for run in runs) != pages or any(not run.pages for run in runs):
        raise ValueError(f"{pages} pages that are not in its runs")
    return runs, at + count * _RUN.size
