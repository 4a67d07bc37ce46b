"""Events that a node handles. Each decision returns a list of ``instructions``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.model.tombstones import Tombstone
from kvstore.state.interfaces import Rows

ClassOf = Callable[[Address], FrameClass | None]
"""A function that returns the class of the frame at an address, or None if there is no such frame."""


class BaseEvent:
    """Base of all events.

    Attributes:
        joins: the previous event's instructions are not performed yet; they are performed together with this event's.
    """

    __slots__ = ()
    joins = False

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """Return the class and number of frames that the decision may take in the first tier; None if it takes none.

        Their memory is allocated before the decision, see ``node.node``.
        """
        return None


@dataclass(slots=True)
class SessionOpened(BaseEvent):
    """A client has registered its session, possibly again after a restart of the daemon.

    Attributes:
        granted: the highest generation of a frame whose grant has reached the client; None if the caller knows all.
            Frames with a higher one were granted in replies that were lost.
    """

    now_ns: int
    session: int
    granted: int | None = None


@dataclass(slots=True)
class ConnectionLost(BaseEvent):
    """A client's connection has ended; its process may still be alive."""

    now_ns: int
    session: int


@dataclass(slots=True)
class SessionDead(BaseEvent):
    """A client's session lock is free: its process has ended and can no longer write."""

    now_ns: int
    session: int


@dataclass(slots=True)
class Grant(BaseEvent):
    """A client asks for frames that are not bound to keys yet.

    Attributes:
        ahead: the frames are not needed now, so that only a small share of the class may be granted.
        anchor: key of the page that the new pages will follow. It is not evicted to make room for them.
        since: the last page that the session sealed under this ``number`` or a later one is not evicted either; 0: no
            such page.
        root: root of the pages to come. Its tenant is charged for the frames now, or at the seal if ``root`` is empty.
    """

    now_ns: int
    session: int
    frame_class: FrameClass
    count: int
    ahead: bool = False
    anchor: bytes = b""
    since: int = 0
    root: bytes = b""

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """Return the requested frames."""
        return self.frame_class, self.count


@dataclass(slots=True)
class Begin(BaseEvent):
    """A client announces consecutive pages of one chain that it writes into these granted frames, layer by layer.

    Readers may follow the pages until they are sealed or given up, or until ``ttl_ns`` have passed.
    """

    now_ns: int
    session: int
    frame_class: FrameClass
    ttl_ns: int
    parent: bytes
    addresses: list[Address]
    rows: Rows


@dataclass(slots=True)
class SealGranted(BaseEvent):
    """Consecutive pages of one chain were written into granted frames.

    Attributes:
        rows: identity rows ``[n, ...]``.
        continues: the pages continue a put whose first pages came earlier; they do not belong to a later request.
        replaces: for the head of an object, the address of the head that it replaces (all zero if it replaces none).
            None for pages that are not objects.
        hints: how long each page is worth keeping (``kvstore.model.retention``), or empty.
        number: an increasing number of the session's published events, see ``Grant.since``; 0 if the event was sent,
            not published.
        joins: set only for published events: the previous event was also published, or is an event of ``mounts``.
        in_pool: the head replaces those of other nodes too, so the node keeps a tombstone.
    """

    now_ns: int
    session: int
    frame_class: FrameClass
    parent: bytes
    addresses: list[Address]
    rows: Rows
    checksums: npt.NDArray[np.uint32] | None = None
    continues: bool = False
    replaces: Address | None = None
    hints: bytes = b""
    number: int = 0
    joins: bool = False
    in_pool: bool = False


@dataclass(slots=True)
class SealObjects(BaseEvent):
    """Whole objects of one root were written into granted frames: for each object its pieces, then its head.

    ``rows`` are identity rows ``[n, ...]``. ``replaces`` has, for each head, the address of the head that it replaces,
    or all zeros.
    """

    now_ns: int
    session: int
    frame_class: FrameClass
    addresses: list[Address]
    rows: Rows
    replaces: list[Address]
    number: int = 0  # as in ``SealGranted``; published objects replace nothing
    joins: bool = False  # as in ``SealGranted``
    in_pool: bool = False  # as in ``SealGranted``


@dataclass(slots=True)
class Delete(BaseEvent):
    """Delete the objects with heads at these addresses from all tiers."""

    now_ns: int
    addresses: list[Address]


@dataclass(slots=True)
class Bury(BaseEvent):
    """Keep these tombstones, and delete the objects of their keys with older stamps from all tiers."""

    now_ns: int
    tombstones: list[Tombstone]


@dataclass(slots=True)
class Reserve(BaseEvent):
    """Reserve frames for consecutive pages of one chain, to be written by ``shards`` writers of one group."""

    now_ns: int
    session: int
    frame_class: FrameClass
    group: int
    shard: int
    shards: int
    ttl_ns: int
    parent: bytes
    rows: Rows
    hints: bytes = b""  # as in ``SealGranted``

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """Return one frame per page."""
        return self.frame_class, len(self.rows)


@dataclass(slots=True)
class Seal(BaseEvent):
    """One shard has written its part of these reserved pages."""

    now_ns: int
    session: int
    shard: int
    addresses: list[Address]


@dataclass(slots=True)
class Revoke(BaseEvent):
    """A writer gives up frames without sealing them, and does not write into them again."""

    now_ns: int
    session: int
    addresses: list[Address]
    shard: int | None = None  # the only shard of reserved pages to give up; None: all shards of the session


@dataclass(slots=True)
class TakeLease(BaseEvent):
    """Keep the frames of these pages until ``now_ns + ttl_ns``."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int
    addresses: list[Address]


@dataclass(slots=True)
class RenewLease(BaseEvent):
    """Move a lease's deadline."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int


@dataclass(slots=True)
class ReleaseLease(BaseEvent):
    """End a lease now."""

    now_ns: int
    session: int
    lease: int


@dataclass(slots=True)
class Damaged(BaseEvent):
    """A sealed page was found damaged. It and its descendants must be dropped.

    ``key`` is the page's key in the index, because the record itself may be damaged.
    """

    now_ns: int
    address: Address
    reason: str
    key: bytes


@dataclass(slots=True)
class Stamped(BaseEvent):
    """The checksums of this sealed page were computed."""

    now_ns: int
    address: Address
    checksums: npt.NDArray[np.uint32]


@dataclass(slots=True)
class WantCopies(BaseEvent):
    """Sealed pages, consecutive in one chain, want a second copy on another node from now on.

    Attributes:
        owe: the copies are owed; otherwise another node has them.
    """

    now_ns: int
    keys: list[bytes]
    owe: bool = True


@dataclass(slots=True)
class Evict(BaseEvent):
    """Evict this number of pages or bytes for an operator, coldest first."""

    now_ns: int
    pages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class EvictChosen(BaseEvent):
    """Evict these pages of one tier for an operator. The addresses come leaves first, children before their parents.

    ``save``: evict a page from DRAM only if the tier below has it or would not take it. Other pages are set aside to be
    saved.
    """

    now_ns: int
    addresses: list[Address]
    save: bool = True


@dataclass(slots=True)
class Demote(BaseEvent):
    """Decide what to save to ``tier`` now.

    Attributes:
        bytes_max: limit of the batch.
        day_bytes_left: how many bytes may still be written today, given the writes that are counted as done.
    """

    now_ns: int
    tier: Tier
    bytes_max: int
    day_bytes_left: int = 0


@dataclass(slots=True)
class SaveAll(BaseEvent):
    """The first tier is about to be lost: decide which of the pages that only it has to save next, hottest chains
    first.

    The reply's detail has ``chains`` (number of chains that are not fully examined), ``under_way`` (number of
    unfinished batches), and ``begun`` (whether a batch started now). Nothing is left to save once ``chains`` and
    ``under_way`` are 0.
    """

    now_ns: int
    bytes_max: int
    day_bytes_left: int = 0


@dataclass(slots=True)
class Saved(BaseEvent):
    """A ``Save`` was performed, and what it wrote is durable.

    Attributes:
        heads: identities of the pages that were written, as their records below have them (``FrameClass.lean``).
        failed: place in the batch -> why that page was not written.
    """

    now_ns: int
    number: int
    heads: Rows
    failed: dict[int, str]


@dataclass(slots=True)
class Prefetch(BaseEvent):
    """Load these pages of one chain, in order, into the tier above. ``hint``: the pages were only read, no prefetch was
    requested."""

    now_ns: int
    session: int
    addresses: list[Address]
    hint: bool = False

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """Return one frame per page."""
        frame_class = class_of(self.addresses[0]) if self.addresses else None
        return (frame_class, len(self.addresses)) if frame_class is not None else None


@dataclass(slots=True)
class Loaded(BaseEvent):
    """A ``Load`` was performed. ``rows`` and ``checksums`` are those of the pages that were read, ``[pages, ...]``."""

    now_ns: int
    number: int
    rows: Rows
    checksums: npt.NDArray[np.uint32]
    failed: dict[int, str]  # place in the batch -> why that page was not loaded


@dataclass(slots=True)
class Carried(BaseEvent):
    """A ``Carry`` was performed. Pages in ``failed`` (as in ``Saved``) are still at their old place."""

    now_ns: int
    number: int
    failed: dict[int, str]


@dataclass(slots=True)
class Erased(BaseEvent):
    """An ``Erase`` was performed. Places in ``failed`` were not erased: their device accepts no more writes."""

    now_ns: int
    number: int
    failed: set[int]


@dataclass(slots=True)
class Adopt(BaseEvent):
    """The scan at startup found these pages on disk, in frames that are QUARANTINED. Parents come before their
    children.

    ``heads`` are ``[pages, LEAN_IDENTITY_BYTES]``. The addresses have the generations under which the pages were
    written.
    """

    now_ns: int
    addresses: list[Address]
    heads: Rows
    parents: list[bytes]
    standings: list[int]


@dataclass(slots=True)
class Adopted(BaseEvent):
    """All pages that were found in this extent have been offered: the remaining frames hold no page."""

    now_ns: int
    extent: int


@dataclass(slots=True)
class TierFailed(BaseEvent):
    """The device behind these positions of a tier accepts no more writes."""

    now_ns: int
    tier: Tier
    positions: list[int]


@dataclass(slots=True)
class NameRoot(BaseEvent):
    """A client describes a root: ``about`` has its salt, adapter, model, fingerprint and layout."""

    now_ns: int
    root: bytes
    about: dict[str, Any]


@dataclass(slots=True)
class Pin(BaseEvent):
    """Keep the stored leading pages of these consecutive pages until ``until_ns``.

    Attributes:
        pin: requested number. If another pin has it, the next free number is used. 0 requests the next new number.
        until_s: the deadline by the wall clock.
        asked: key of the last page of the original request, which names the pin. If empty, it is the last of ``keys``.
    """

    now_ns: int
    pin: int
    keys: list[bytes]
    root: bytes
    until_ns: int
    until_s: float
    asked: bytes = b""


@dataclass(slots=True)
class RestorePins(BaseEvent):
    """At startup, restore the pins that an earlier daemon granted, under their numbers.

    The scan of NVMe might find pages that are not known yet. The pins wait for them.
    """

    now_ns: int
    pins: list[Pin]


@dataclass(slots=True)
class Unpin(BaseEvent):
    """End the pin with this number, or the pin that has this root and these pages."""

    now_ns: int
    pin: int = 0
    keys: list[bytes] = field(default_factory=list)
    root: bytes = b""


@dataclass(slots=True)
class Mount(BaseEvent):
    """An engine mounts a segment of its own memory, see ``mounts``."""

    now_ns: int
    session: int
    frame_class: FrameClass
    frames: int


@dataclass(slots=True)
class RestoreMount(BaseEvent):
    """At startup, the node found the records of a segment whose engine is alive, and these pages in it."""

    now_ns: int
    session: int
    segment: int
    frame_class: FrameClass
    frames: int
    addresses: list[Address]
    keys: list[bytes]
    roots: list[bytes]
    spans: list[int]


@dataclass(slots=True)
class Publish(BaseEvent):
    """Consecutive pages of one chain are in these frames of a mounted segment.

    Attributes:
        position: place of the first page in its chain.
        before: span of the page before the first one, see ``model.prefix``.
    """

    now_ns: int
    session: int
    segment: int
    root: bytes
    position: int
    before: int
    addresses: list[Address]
    keys: list[bytes]
    joins: bool = False


@dataclass(slots=True)
class Retract(BaseEvent):
    """The pages in these frames of a mounted segment must no longer be read."""

    now_ns: int
    session: int
    segment: int
    addresses: list[Address]
    joins: bool = False


@dataclass(slots=True)
class Unmount(BaseEvent):
    """An engine ends a segment."""

    now_ns: int
    session: int
    segment: int


@dataclass(slots=True)
class DevicesLate(BaseEvent):
    """Exactly these positions of a tier are on devices that are not responding.

    ``saves`` are the positions with late writes, ``loads`` those with late reads. Other work continues without them.
    ``saves`` never covers all devices that accept writes, and ``loads`` never all devices that are read.
    """

    now_ns: int
    tier: Tier
    saves: list[int]
    loads: list[int]


@dataclass(slots=True)
class Tick(BaseEvent):
    """Time has passed: end what is past its deadline at ``now_ns``."""

    now_ns: int


@dataclass(slots=True)
class Populated(BaseEvent):
    """The memory of these positions is allocated: they can be carved."""

    now_ns: int
    positions: list[int]


@dataclass(slots=True)
class PopulationFailed(BaseEvent):
    """The memory of these positions cannot be allocated, or was given back: the node continues with less."""

    now_ns: int
    positions: list[int]


Event = (
    SessionOpened
    | ConnectionLost
    | SessionDead
    | Grant
    | Begin
    | SealGranted
    | SealObjects
    | Delete
    | Bury
    | Reserve
    | Seal
    | Revoke
    | TakeLease
    | RenewLease
    | ReleaseLease
    | Damaged
    | Stamped
    | WantCopies
    | Evict
    | EvictChosen
    | Demote
    | SaveAll
    | Saved
    | Prefetch
    | Loaded
    | Carried
    | Erased
    | Adopt
    | Adopted
    | TierFailed
    | DevicesLate
    | Tick
    | NameRoot
    | Pin
    | RestorePins
    | Unpin
    | Mount
    | RestoreMount
    | Publish
    | Retract
    | Unmount
    | Populated
    | PopulationFailed
)
