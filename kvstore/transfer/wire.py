"""The wire between nodes: frames over a plain or an encrypted stream of bytes. Pure.

Every frame is a head of 16 bytes and a body, little-endian::

    magic and version u32 | kind u16 | flags u16, 0 so far | request u32 | body bytes u32 | body

The client says HELLO first and gets WELCOME, or ERROR and the end. Then it sends requests, as many as it likes before
their replies come; the server answers them one by one, in order, and its replies carry the request's number:

    PING -> PONG                READ -> RANGE ... END
    STATUS -> STATE             FIND -> FOUND             ANNOUNCE -> ANNOUNCED
    LIST -> LISTED              CHECK -> CHECKED          HOLD -> FOUND
    PULL -> PIECE ... END       (engines: the KV of a prompt that is being computed)
    ATTACH -> ATTACHED          LEND -> LENT              RETURN -> RETURNED      (see ``lending``)

Any request may get ERROR instead of its reply, or in the middle of it. Each kind's body has a bound (``BODY_MAX``), and
no body is read before it was held against that. A frame that breaks a rule ends the connection with ERROR in words.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any, Final, NamedTuple

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

VERSION: Final = 2
MAGIC: Final = int.from_bytes(b"KVT", "little") | VERSION << 24
HEAD: Final = struct.Struct("<IHHII")
KIB: Final = 1 << 10
TEXT_MAX: Final = 512  # characters of a text in HELLO, but for the token


class FrameKind(IntEnum):
    """What a frame is."""

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


BODY_MAX: Final[dict[FrameKind, int]] = {
    FrameKind.HELLO: 8 * KIB,
    FrameKind.WELCOME: 4 * KIB,
    FrameKind.ERROR: 4 * KIB,
    FrameKind.PING: 64,
    FrameKind.PONG: 64,
    FrameKind.STATUS: 4 * KIB,
    FrameKind.STATE: 64 * KIB,
    FrameKind.READ: 1024 * KIB,
    FrameKind.RANGE: (1 << 32) - 1,  # is received in place, never as a whole: see ``reading.RangeHead``
    FrameKind.END: 64,
    FrameKind.ATTACH: 64,
    FrameKind.ATTACHED: 256 * KIB,
    FrameKind.LEND: 1024 * KIB,
    FrameKind.LENT: 1024 * KIB,
    FrameKind.RETURN: 256 * KIB,
    FrameKind.RETURNED: 64,
    FrameKind.FIND: 1024 * KIB,
    FrameKind.FOUND: 4096 * KIB,
    FrameKind.HOLD: 1024 * KIB,
    FrameKind.ANNOUNCE: 1024 * KIB,
    FrameKind.ANNOUNCED: 4 * KIB,
    FrameKind.LIST: 4 * KIB,
    FrameKind.LISTED: 1024 * KIB,
    FrameKind.CHECK: 4 * KIB,
    FrameKind.CHECKED: 256 * KIB,
    FrameKind.PULL: 4 * KIB,
    FrameKind.PIECE: (1 << 32) - 1,  # in place as well
}
"""The largest body of each kind. Sums of these bound what a connection holds: one request at a time, one reply."""

REQUESTS: Final = frozenset(
    (
        *(FrameKind.PING, FrameKind.STATUS, FrameKind.READ, FrameKind.FIND, FrameKind.ANNOUNCE, FrameKind.LIST),
        *(FrameKind.CHECK, FrameKind.HOLD, FrameKind.PULL, FrameKind.ATTACH, FrameKind.LEND, FrameKind.RETURN),
    )
)


class WireError(Unavailable):
    """The other end broke a rule of the wire. The connection is of no use any more."""


class Head(NamedTuple):
    """The head of a frame that holds."""

    kind: FrameKind
    flags: int
    request: int
    body_bytes: int


def pack_head(kind: FrameKind, request: int, body_bytes: int, flags: int = 0) -> bytes:
    """The head of a frame."""
    assert body_bytes <= BODY_MAX[kind], f"{kind.name} of {body_bytes} bytes"
    return HEAD.pack(MAGIC, kind, flags, request, body_bytes)


def unpack_head(raw: bytes | bytearray | memoryview) -> Head:
    """The head in these 16 bytes.

    Raises:
        WireError: it is not a head of this protocol, or its body is too large.
        VersionMismatch: it has another version.
    """
    magic, number, flags, request, body_bytes = HEAD.unpack(raw)
    if magic & 0xFFFFFF != MAGIC & 0xFFFFFF:
        raise WireError("magic: not a frame of a kvstore data connection")
    if magic != MAGIC:
        raise VersionMismatch(f"the other end speaks version {magic >> 24} of the data protocol, this one {VERSION}")
    try:
        kind = FrameKind(number)
    except ValueError:
        raise WireError(f"kind: unknown (got {number})") from None
    if body_bytes > BODY_MAX[kind]:
        raise WireError(f"body: {body_bytes} bytes of {kind.name}, at most {BODY_MAX[kind]} are read")
    return Head(kind, flags, request, body_bytes)


# --- HELLO and WELCOME: JSON objects, unknown names ignored --------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """What a client says first.

    Attributes:
        pool: the pool that it belongs to.
        node: the node that it takes the server for; "": any.
        caller: what it calls itself, for the server's log.
        token: shows who it is; "" where it has none.
        process: the server's own number (``Welcome.process``), as the catalog or the node's folder told it; "" where it
            is not known.
        version_min, version_max: of the protocol, what it speaks.
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
    """What the server answers.

    Attributes:
        version: of the protocol, what both speak from here on.
        node: its name.
        process: drawn anew whenever the server starts, 16 hex digits.
    """

    version: int = VERSION
    node: str = ""
    process: str = ""


def pack_hello(message: Hello | Welcome) -> bytes:
    """As the body of its frame."""
    return json.dumps(asdict(message), separators=(",", ":")).encode()


def unpack_hello(body: bytes | bytearray | memoryview) -> Hello:
    """The body of HELLO.

    Raises:
        WireError: it makes no sense.
        VersionMismatch: we speak none of its versions.
    """
    hello: Hello = _unpack(Hello, body)
    if not hello.version_min <= VERSION <= hello.version_max:
        spoken = f"{hello.version_min} to {hello.version_max}"
        raise VersionMismatch(f"the caller speaks versions {spoken} of the data protocol, this node {VERSION}")
    return hello


def unpack_welcome(body: bytes | bytearray | memoryview) -> Welcome:
    """The body of WELCOME. Raises WireError where it makes no sense."""
    welcome: Welcome = _unpack(Welcome, body)
    return welcome


def _unpack(kind: type[Any], body: bytes | bytearray | memoryview) -> Any:
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise WireError(f"{kind.__name__}: not valid JSON") from None
    if not isinstance(found, dict):
        raise WireError(f"{kind.__name__}: must be a JSON object")
    values = {each.name: found[each.name] for each in fields(kind) if each.name in found}
    for name, value in values.items():
        wanted = type(getattr(kind, name))
        if type(value) is not wanted:
            raise WireError(f"{kind.__name__}: {name} must be a {wanted.__name__}")
        if wanted is str and not value.isascii():  # what is compared has to be bytes, and surrogates have none
            raise WireError(f"{kind.__name__}: {name} must be ASCII")
        if wanted is str and len(value) > TEXT_MAX and name != "token":
            raise WireError(f"{kind.__name__}: {name} has more than {TEXT_MAX} characters")
    return kind(**values)


# --- ERROR ---------------------------------------------------------------------------------------------------------

# Which error a number stands for; of its subclasses the first that fits is sent.
_ERRORS: Final[tuple[tuple[int, type[KVStoreError]], ...]] = (
    (1, WireError),
    (2, InvalidRequest),
    (3, Unauthenticated),
    (4, PermissionDenied),
    (5, VersionMismatch),
    (6, TooManyCalls),
    (7, DeadlineExceeded),
    (8, NodeUnavailable),
    (10, InternalError),  # an older caller takes it for Unavailable
    (9, Unavailable),
)
_CODE: Final = struct.Struct("<H")


def pack_error(error: KVStoreError) -> bytes:
    """An error as the body of its frame: a number, and its words; ``field\\0reason`` of an InvalidRequest."""
    code = next((code for code, kind in _ERRORS if isinstance(error, kind)), 9)
    text = f"{error.field}\0{error.reason}" if isinstance(error, InvalidRequest) else str(error)
    return _CODE.pack(code) + text.encode(errors="replace")[: BODY_MAX[FrameKind.ERROR] - _CODE.size]


def unpack_error(body: bytes | bytearray | memoryview) -> KVStoreError:
    """The error that the other end sent, for the caller to raise."""
    if len(body) < _CODE.size:
        return WireError("the other end sent an error without words")
    kind = dict(_ERRORS).get(_CODE.unpack_from(body)[0], Unavailable)
    text = bytes(body[_CODE.size :]).decode(errors="replace")
    if kind is InvalidRequest:
        field, _, reason = text.partition("\0")
        return InvalidRequest(field, reason)
    return kind(text)
