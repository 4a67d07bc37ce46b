"""What a node decides to do.

Instructions are performed by one shell, in order, each on a whole batch. The order inside one decision is what makes
kill -9 harmless at every point between two of them: a record's body before its word, the word before the index, the
index before the reply; on the way out the word first, then the index, then the frame's reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address, FrameClass, FrameState, Status, Tier
from kvstore.state.interfaces import Rows


@dataclass(slots=True)
class Carve:
    """Make the tables of a new extent, all frames FREE."""

    extent: int
    position: int
    frame_class: FrameClass
    frames: int
    tier: Tier = Tier.DRAM


@dataclass(slots=True)
class Drop:
    """Zero and remove an extent's tables: its position will be carved again."""

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
    """A shard of these reserved pages is written by this session (0: by no session any more)."""

    addresses: list[Address]
    shard: int
    session: int


@dataclass(slots=True)
class WriteSealed:
    """Records say SEALED, the index names them. ``rows`` None: the identity is there since the reservation.

    ``standings``: place in the chain and turns of each page, see ``replica.standing``.
    """

    addresses: list[Address]
    keys: list[bytes]
    standings: list[int]
    rows: Rows | None = None
    parents: list[bytes] | None = None
    checksums: npt.NDArray[np.uint32] | None = None
    cause: str = field(default="put", compare=False)  # or save, load, scan: what page events tell
    spans: list[int] = field(default_factory=list, compare=False)  # of each page: what page events tell, too


@dataclass(slots=True)
class WriteShards:
    """A reserved page's mask of sealed shards."""

    address: Address
    shards: int
    mask: int


@dataclass(slots=True)
class WriteState:
    """Records get this state under a (new) generation, so that no reader uses the old address any more."""

    addresses: list[Address]
    state: FrameState


@dataclass(slots=True)
class Unindex:
    """The index forgets that these keys are in this tier."""

    keys: list[bytes]
    tier: Tier = Tier.DRAM
    kind: str = field(default="evicted", compare=False)  # or dropped: what page events tell
    reason: str = field(default="space", compare=False)
    roots: list[bytes] = field(default_factory=list, compare=False)  # of each page
    spans: list[int] = field(default_factory=list, compare=False)  # of each page


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
    """Copy a sealed page into another frame; index and record follow; the source then has ``state`` (``freed``).

    On NVMe the page itself is there already: see ``Carry``.
    """

    key: bytes
    source: Address
    target: Address
    freed: Address
    tier: Tier = Tier.DRAM
    state: FrameState = FrameState.FREE


@dataclass(slots=True)
class Copying:
    """One page on its way between tiers. ``state``: of its source; ``standing``: of a page not sealed there, else 0."""

    key: bytes
    source: Address
    target: Address
    state: FrameState = FrameState.SEALED
    standing: int = 0


@dataclass(slots=True)
class Save:
    """Write these pages to the tier below, parents before children, make them durable, and report ``Saved``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Load:
    """Copy these pages into their frames in the tier above and report ``Loaded``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Carry:
    """Copy these pages into other frames of their tier, make them durable, and report ``Carried``."""

    number: int
    pages: list[Copying]


@dataclass(slots=True)
class Erase:
    """Make the content of these frames of a lower tier (key, where known, and address) unreadable, durably.

    Report ``Erased``.
    """

    number: int
    pages: list[tuple[bytes, Address]]


@dataclass(slots=True)
class WriteUse:
    """The marks of these pages say when they were last used."""

    addresses: list[Address]
    used_ns: list[int]


@dataclass(slots=True)
class WriteName:
    """A root has this name, as a line of JSON: it has to outlive the daemon."""

    line: bytes


@dataclass(slots=True)
class WriteNames:
    """Names were forgotten; these lines are all there are."""

    lines: list[bytes]


@dataclass(slots=True)
class ForgetNames:
    """Names were forgotten that did not have to outlive the daemon: clients have to say theirs again."""


@dataclass(slots=True)
class WritePin:
    """This pin has to outlive the daemon. Its fields are as in ``state.pins``."""

    number: int
    keys: list[bytes]
    root: bytes
    asked: bytes
    until_ns: int
    until_s: float


@dataclass(slots=True)
class WritePins:
    """These pins have to outlive the daemon, and no others: either all of this is written down, or nothing changes."""

    pins: list[WritePin]


@dataclass(slots=True)
class ErasePins:
    """These pins are over."""

    numbers: list[int]


@dataclass(slots=True)
class WriteQuarantine:
    """A position may be carved again: these are all that may not, each with the sessions that may write there."""

    held: dict[int, set[int]]


@dataclass(slots=True)
class ShowPages:
    """The index lists these pages of mounted segments, all of that root. ``root`` empty: other replicas of pages that
    it listed before, which are not reported."""

    keys: list[bytes]
    addresses: list[Address]
    root: bytes = b""
    spans: list[int] = field(default_factory=list)


@dataclass(slots=True)
class WriteMounts:
    """Write down that ``count`` segments are mounted and that extent numbers below ``next_extent`` were used."""

    count: int
    next_extent: int = 0


@dataclass(slots=True)
class EndMount:
    """Remove a segment's records: readers that have them mapped miss from now on."""

    segment: int


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
