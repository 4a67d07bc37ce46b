"""Instructions: what a node decides to do.

The node's performer performs them in order, each on a whole batch. Their order within a decision makes kill -9 harmless
between any two of them. When a page is stored, its record's body is written before the state word, the word before the
index, and the index before the reply. When it is removed, the word is written first, then the index, and then the frame
is used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.objects import ObjectGroup
from kvstore.model.replica import Address, FrameClass, FrameState, Status, Tier
from kvstore.state.interfaces import Rows


@dataclass(slots=True)
class Carve:
    """Make the tables of a new extent with all frames FREE."""

    extent: int
    position: int
    frame_class: FrameClass
    frames: int
    tier: Tier = Tier.DRAM


@dataclass(slots=True)
class Drop:
    """Zero and remove an extent's tables. Its position can then be carved again."""

    extent: int


@dataclass(slots=True)
class WriteGranted:
    """Write records as RESERVED for this session, without a key."""

    addresses: list[Address]
    session: int


@dataclass(slots=True)
class WriteReserved:
    """Write records as RESERVED with identity, and add the pages to the pending table."""

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
    """Record which session writes a shard of these reserved pages. 0 means that no session writes it any longer."""

    addresses: list[Address]
    shard: int
    session: int


@dataclass(slots=True)
class WriteSealed:
    """Write records as SEALED, and add the pages to the index.

    Attributes:
        standings: place in the chain and turns of each page, see ``replica.standing``.
        rows: identity rows; None if the records have had them since the reservation.
        cause: put, copy (of a page of another node), save, load, scan or through; for page events.
        spans: span of each page; for page events.
    """

    addresses: list[Address]
    keys: list[bytes]
    standings: list[int]
    rows: Rows | None = None
    parents: list[bytes] | None = None
    checksums: npt.NDArray[np.uint32] | None = None
    cause: str = field(default="put", compare=False)
    spans: list[int] = field(default_factory=list, compare=False)


@dataclass(slots=True)
class WriteShards:
    """Write a reserved page's mask of sealed shards."""

    address: Address
    shards: int
    mask: int


@dataclass(slots=True)
class WriteState:
    """Write this state with a new generation into records, so that readers no longer use the old address."""

    addresses: list[Address]
    state: FrameState


@dataclass(slots=True)
class Unindex:
    """Remove these keys of this tier from the index.

    ``kind`` (evicted or dropped), ``reason``, ``roots`` and ``spans`` (of each page) are for page events.
    """

    keys: list[bytes]
    tier: Tier = Tier.DRAM
    kind: str = field(default="evicted", compare=False)
    reason: str = field(default="space", compare=False)
    roots: list[bytes] = field(default_factory=list, compare=False)
    spans: list[int] = field(default_factory=list, compare=False)


@dataclass(slots=True)
class ListGroups:
    """List these complete groups in the index, from ``since_ns``. All earlier changes of the index come before."""

    groups: list[ObjectGroup]
    since_ns: int


@dataclass(slots=True)
class UnlistGroups:
    """Remove the groups with these hashes from the index now, before the instructions that follow."""

    hashes: list[bytes]


@dataclass(slots=True)
class Unpend:
    """Remove a key from the pending table, or name the next reservation of the key (``heir``)."""

    key: bytes
    heir: Address | None


@dataclass(slots=True)
class WriteLease:
    """Write this lease deadline into records. It is the latest deadline of all leases of a frame."""

    addresses: list[Address]
    until_ns: list[int]


@dataclass(slots=True)
class WriteStamp:
    """Write a record's checksums."""

    address: Address
    checksums: npt.NDArray[np.uint32]


@dataclass(slots=True)
class WriteReplicated:
    """Write into the records of these sealed pages that a second copy on another node is wanted.

    ``keys`` are those of which the copy is owed now.
    """

    addresses: list[Address]
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class WriteObjectStamp:
    """Write the latest stamp of a tombstone into the header, so that clients use later ones."""

    stamp: int


@dataclass(slots=True)
class Move:
    """Copy a sealed page into another frame, and update its index entry and record.

    The source frame is then ``freed``, in ``state``. On NVMe the page itself has been copied before, see ``Carry``.
    """

    key: bytes
    source: Address
    target: Address
    freed: Address
    tier: Tier = Tier.DRAM
    state: FrameState = FrameState.FREE


@dataclass(slots=True)
class Copying:
    """One page that is copied between tiers.

    ``state`` is the state of the source frame. ``standing`` is set only if the page is not sealed there; otherwise it
    is 0.
    """

    key: bytes
    source: Address
    target: Address
    state: FrameState = FrameState.SEALED
    standing: int = 0


@dataclass(slots=True)
class Save:
    """Write these pages to the tier below, parents first, make them durable, and report ``Saved``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Load:
    """Copy these pages into their frames in the tier above, and report ``Loaded``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Carry:
    """Copy these pages into other frames of their tier, make them durable, and report ``Carried``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Erase:
    """Make the content of these frames of a lower tier durably unreadable, and report ``Erased``.

    ``pages`` has the address of each, with the key of its former page if that is known.
    """

    number: int
    pages: list[tuple[bytes, Address]]


@dataclass(slots=True)
class WriteUse:
    """Write the last use of these pages into their marks."""

    addresses: list[Address]
    used_ns: list[int]


@dataclass(slots=True)
class WriteName:
    """Write the name of a root, a line of JSON, so that it outlives the daemon."""

    line: bytes


@dataclass(slots=True)
class WriteNames:
    """Some names were forgotten: replace all written names by these lines."""

    lines: list[bytes]


@dataclass(slots=True)
class ForgetNames:
    """Names that need not outlive the daemon were forgotten: clients have to register theirs again."""


@dataclass(slots=True)
class WritePin:
    """Write this pin, so that it outlives the daemon. The fields are described in ``state.pins``."""

    number: int
    keys: list[bytes]
    root: bytes
    asked: bytes
    until_ns: int
    until_s: float


@dataclass(slots=True)
class WritePins:
    """Replace all written pins with these. Either all of them are written, or nothing changes."""

    pins: list[WritePin]


@dataclass(slots=True)
class ErasePins:
    """Remove these pins, which have ended."""

    numbers: list[int]


@dataclass(slots=True)
class WriteQuarantine:
    """Replace the list of positions that must not be carved, each with the sessions that might write there."""

    held: dict[int, set[int]]


@dataclass(slots=True)
class ShowPages:
    """List these pages of mounted segments in the index.

    All pages belong to ``root``. If ``root`` is empty, the pages are other replicas of keys that were already listed,
    and no page event is reported.
    """

    keys: list[bytes]
    addresses: list[Address]
    root: bytes = b""
    spans: list[int] = field(default_factory=list)


@dataclass(slots=True)
class WriteMounts:
    """Record the number of mounted segments, and that all extent numbers lower than ``next_extent`` were used."""

    count: int
    next_extent: int = 0


@dataclass(slots=True)
class EndMount:
    """Remove a segment's records. From then on, every lookup by a process that still maps them is a miss."""

    segment: int


@dataclass(slots=True)
class CheckSession:
    """Find out whether this session's process is alive. Its end is reported as ``SessionDead``."""

    session: int


@dataclass(slots=True)
class Reply:
    """Answer the event, after all instructions before this one were performed.

    ``Status.INVALID`` means that nothing was decided; ``detail`` then has the ``field`` and the ``reason``.
    """

    status: Status = Status.OK
    statuses: list[int] = field(default_factory=list)
    addresses: list[Address] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)


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
    | ListGroups
    | UnlistGroups
    | Unpend
    | WriteLease
    | WriteStamp
    | WriteReplicated
    | WriteObjectStamp
    | Move
    | Save
    | Load
    | Carry
    | Erase
    | WriteUse
    | WriteName
    | WriteNames
    | ForgetNames
    | WritePin
    | WritePins
    | ErasePins
    | WriteQuarantine
    | ShowPages
    | WriteMounts
    | EndMount
    | CheckSession
    | Reply
)
