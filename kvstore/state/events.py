"""What a node is told (events) and what it decides to do (instructions).

Instructions are performed by one shell, in order, each on a whole batch. The order inside one decision is what makes
kill -9 harmless at every point between two of them: a record's body before its word, the word before the index, the
index before the reply; on the way out the word first, then the index, then the frame's reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address, FrameClass, FrameState, Status
from kvstore.state.views import Rows

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SessionOpened:
    """A client said hello (again, after a restart of the daemon)."""

    now_ns: int
    session: int


@dataclass(slots=True)
class SessionLost:
    """A client's connection ended; its process may live on."""

    now_ns: int
    session: int


@dataclass(slots=True)
class SessionDead:
    """A client's session lock is free: its process is gone and can write nothing more."""

    now_ns: int
    session: int


@dataclass(slots=True)
class Grant:
    """Frames wanted ahead of need, not bound to keys yet."""

    now_ns: int
    session: int
    frame_class: FrameClass
    count: int
    ahead: bool = False  # beyond what is needed now: only a small share of the class
    anchor: bytes = b""  # key of the page that the new ones will hang on: not to be evicted for them


@dataclass(slots=True)
class SealGranted:
    """Consecutive pages of one chain were written into granted frames. ``rows`` are identity rows ``[n, ...]``."""

    now_ns: int
    session: int
    frame_class: FrameClass
    parent: bytes
    addresses: list[Address]
    rows: Rows
    checksums: npt.NDArray[np.uint32] | None = None


@dataclass(slots=True)
class Reserve:
    """Frames for consecutive pages of one chain, to be written by ``shards`` writers of one group."""

    now_ns: int
    session: int
    frame_class: FrameClass
    group: int
    shard: int
    shards: int
    ttl_ns: int
    parent: bytes
    rows: Rows


@dataclass(slots=True)
class Seal:
    """One shard has written its part of these reserved pages."""

    now_ns: int
    session: int
    shard: int
    addresses: list[Address]


@dataclass(slots=True)
class Revoke:
    """A writer gives frames back unsealed, and will not write into them again."""

    now_ns: int
    session: int
    addresses: list[Address]


@dataclass(slots=True)
class TakeLease:
    """Keep these pages' frames until ``now_ns + ttl_ns``."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int
    addresses: list[Address]


@dataclass(slots=True)
class RenewLease:
    """Move a lease's deadline."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int


@dataclass(slots=True)
class ReleaseLease:
    """End a lease now."""

    now_ns: int
    session: int
    lease: int


@dataclass(slots=True)
class Damaged:
    """Something about this sealed page does not hold. It and its descendants must go.

    ``key`` is what the index calls it: the record itself may be what is damaged.
    """

    now_ns: int
    address: Address
    reason: str
    key: bytes


@dataclass(slots=True)
class Stamped:
    """The checksums of this sealed page were computed."""

    now_ns: int
    address: Address
    checksums: npt.NDArray[np.uint32]


@dataclass(slots=True)
class Evict:
    """An operator wants space: that many pages or bytes, coldest first."""

    now_ns: int
    pages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Tick:
    """Time went on."""

    now_ns: int


@dataclass(slots=True)
class Populated:
    """The memory of these positions is allocated; frames may lie there."""

    now_ns: int
    positions: list[int]


@dataclass(slots=True)
class PopulationFailed:
    """The memory of these positions cannot be had: the node goes on with less."""

    now_ns: int
    positions: list[int]


# --- instructions ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Carve:
    """Make the record and mark tables of a new extent, all frames FREE."""

    extent: int
    position: int
    frame_class: FrameClass
    frames: int


@dataclass(slots=True)
class Drop:
    """Zero and remove an extent's tables: its position will be carved anew."""

    extent: int


@dataclass(slots=True)
class WriteGranted:
    """Records say RESERVED for this session, with no key."""

    addresses: list[Address]
    session: int


@dataclass(slots=True)
class WriteReserved:
    """Records say RESERVED with identity; the pending table names them."""

    addresses: list[Address]
    rows: Rows
    parents: list[bytes]
    session: int
    group: int
    shard: int
    shards: int
    until_ns: int


@dataclass(slots=True)
class WriteWriter:
    """A shard of these reserved pages is written by this session (0: by nobody any more)."""

    addresses: list[Address]
    shard: int
    session: int


@dataclass(slots=True)
class WriteSealed:
    """Records say SEALED, the index names them. ``rows`` None: the identity is there since the reservation."""

    addresses: list[Address]
    keys: list[bytes]
    rows: Rows | None = None
    parents: list[bytes] | None = None
    checksums: npt.NDArray[np.uint32] | None = None


@dataclass(slots=True)
class WriteShards:
    """A reserved page's mask of sealed shards."""

    address: Address
    shards: int
    mask: int


@dataclass(slots=True)
class WriteState:
    """Records get this state under a (new) generation, so that nobody reads the old address any more."""

    addresses: list[Address]
    state: FrameState


@dataclass(slots=True)
class Unindex:
    """The index forgets these keys."""

    keys: list[bytes]


@dataclass(slots=True)
class Unpend:
    """The pending table forgets a key, or names the next reservation of it (``heir``)."""

    key: bytes
    heir: Address | None


@dataclass(slots=True)
class WriteLease:
    """Records get this lease deadline (never an earlier one than they promise someone else)."""

    addresses: list[Address]
    until_ns: list[int]


@dataclass(slots=True)
class WriteStamp:
    """A record gets its checksums."""

    address: Address
    checksums: npt.NDArray[np.uint32]


@dataclass(slots=True)
class Move:
    """Copy a sealed page into another frame; index and record follow; the source is then FREE (``freed``)."""

    key: bytes
    source: Address
    target: Address
    freed: Address


@dataclass(slots=True)
class CheckSession:
    """Find out whether this session's process lives; its death comes back as ``SessionDead``."""

    session: int


@dataclass(slots=True)
class Reply:
    """The answer to the event, sent after everything before it was performed.

    With ``Status.INVALID`` nothing was decided; ``detail`` has the ``field`` and the ``reason``.
    """

    status: Status = Status.OK
    statuses: list[int] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)


Event = (
    SessionOpened
    | SessionLost
    | SessionDead
    | Grant
    | SealGranted
    | Reserve
    | Seal
    | Revoke
    | TakeLease
    | RenewLease
    | ReleaseLease
    | Damaged
    | Stamped
    | Evict
    | Tick
    | Populated
    | PopulationFailed
)
Instruction = (
    Carve
    | Drop
    | WriteGranted
    | WriteReserved
    | WriteWriter
    | WriteSealed
    | WriteShards
    | WriteState
    | Unindex
    | Unpend
    | WriteLease
    | WriteStamp
    | Move
    | CheckSession
    | Reply
)
