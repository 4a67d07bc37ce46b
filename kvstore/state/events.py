"""Events that a node handles. The instructions that follow are in ``instructions``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address, FrameClass, Tier
from kvstore.state.interfaces import Rows

ClassOf = Callable[[Address], FrameClass | None]
"""The class of the frame at an address; None where there is no such frame."""


class Happening:
    """What every event is.

    Attributes:
        joins: what was decided just before is not performed yet: it will be with this, at once.
    """

    __slots__ = ()
    joins = False

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """The class and number of frames that the decision may take where clients write; None: it takes none.

        Their memory is had before the decision, see ``node.node``.
        """
        return None


@dataclass(slots=True)
class SessionOpened(Happening):
    """A client said hello (again, after a restart of the daemon)."""

    now_ns: int
    session: int


@dataclass(slots=True)
class ConnectionLost(Happening):
    """A client's connection ended; its process may live on."""

    now_ns: int
    session: int


@dataclass(slots=True)
class SessionDead(Happening):
    """A client's session lock is free: its process is gone and can write nothing more."""

    now_ns: int
    session: int


@dataclass(slots=True)
class Grant(Happening):
    """Frames wanted ahead of need, not bound to keys yet."""

    now_ns: int
    session: int
    frame_class: FrameClass
    count: int
    ahead: bool = False  # beyond what is needed now: only a small share of the class
    anchor: bytes = b""  # key of the page that the new ones will hang on: not to be evicted for them
    since: int = 0  # nor the last page that the session sealed under a ``number`` from this one on; 0: under none
    root: bytes = b""  # of the pages that are to come: its tenant is charged with the frames; nothing: when they come

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """See ``Happening``."""
        return self.frame_class, self.count


@dataclass(slots=True)
class Begin(Happening):
    """Consecutive pages of one chain are being written into these granted frames, layer by layer: readers may follow.
    Until they are sealed, given up, or ``ttl_ns`` have passed."""

    now_ns: int
    session: int
    frame_class: FrameClass
    ttl_ns: int
    parent: bytes
    addresses: list[Address]
    rows: Rows


@dataclass(slots=True)
class SealGranted(Happening):
    """Consecutive pages of one chain were written into granted frames. ``rows`` are identity rows ``[n, ...]``."""

    now_ns: int
    session: int
    frame_class: FrameClass
    parent: bytes
    addresses: list[Address]
    rows: Rows
    checksums: npt.NDArray[np.uint32] | None = None
    continues: bool = False  # more of a put whose first pages came before, not a later request
    replaces: Address | None = None  # it is the head of an object, and replaces this one; all zero: none
    hints: bytes = b""  # of each page how long it is worth keeping (``kvstore.model.retention``); or nothing
    number: int = 0  # of what the session published, growing: see ``Grant.since``; 0: it was sent
    joins: bool = False  # only what is published may have been decided just before: others of these, and of ``mounts``


@dataclass(slots=True)
class SealObjects(Happening):
    """Whole objects of one root were written into granted frames: of each its pieces, then its head. ``rows`` are
    identity rows ``[n, ...]``; ``replaces``: for a head the one that it replaces, all zero: none."""

    now_ns: int
    session: int
    frame_class: FrameClass
    addresses: list[Address]
    rows: Rows
    replaces: list[Address]
    number: int = 0  # as in ``SealGranted``; published objects replace nothing
    joins: bool = False  # as in ``SealGranted``


@dataclass(slots=True)
class Delete(Happening):
    """Objects whose heads are at these addresses are deleted, from all tiers."""

    now_ns: int
    addresses: list[Address]


@dataclass(slots=True)
class Reserve(Happening):
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
    hints: bytes = b""  # as of ``SealGranted``

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """See ``Happening``."""
        return self.frame_class, len(self.rows)


@dataclass(slots=True)
class Seal(Happening):
    """One shard has written its part of these reserved pages."""

    now_ns: int
    session: int
    shard: int
    addresses: list[Address]


@dataclass(slots=True)
class Revoke(Happening):
    """A writer gives frames back unsealed, and will not write into them again."""

    now_ns: int
    session: int
    addresses: list[Address]
    shard: int | None = None  # of reserved ones; None: all that are this session's


@dataclass(slots=True)
class TakeLease(Happening):
    """Keep these pages' frames until ``now_ns + ttl_ns``."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int
    addresses: list[Address]


@dataclass(slots=True)
class RenewLease(Happening):
    """Move a lease's deadline."""

    now_ns: int
    session: int
    lease: int
    ttl_ns: int


@dataclass(slots=True)
class ReleaseLease(Happening):
    """End a lease now."""

    now_ns: int
    session: int
    lease: int


@dataclass(slots=True)
class Damaged(Happening):
    """Something about this sealed page does not hold. It and its descendants must go.

    ``key`` is what the index calls it: the record itself may be what is damaged.
    """

    now_ns: int
    address: Address
    reason: str
    key: bytes


@dataclass(slots=True)
class Stamped(Happening):
    """The checksums of this sealed page were computed."""

    now_ns: int
    address: Address
    checksums: npt.NDArray[np.uint32]


@dataclass(slots=True)
class Evict(Happening):
    """An operator wants space: that many pages or bytes, coldest first."""

    now_ns: int
    pages: int = 0
    bytes: int = 0


@dataclass(slots=True)
class EvictChosen(Happening):
    """An operator wants these pages of one tier to leave: leaves first, children before their parents.

    ``save``: of DRAM only what the tier below has, or would not take; the rest is set aside to be saved.
    """

    now_ns: int
    addresses: list[Address]
    save: bool = True


@dataclass(slots=True)
class Demote(Happening):
    """Decide what to save to ``tier`` now: at most ``bytes_max``; of today's writes there ``day_bytes_left``
    are not counted as done."""

    now_ns: int
    tier: Tier
    bytes_max: int
    day_bytes_left: int = 0


@dataclass(slots=True)
class SaveAll(Happening):
    """The first tier is about to go: decide what to save next of all that is only there, as ``Demote``, hottest chains
    first.

    The reply's detail tells how many ``chains`` have not been looked at, or not to their end; how many batches are
    ``under_way``, and whether one was ``begun`` now. Nothing is left to save where ``chains`` and ``under_way`` are 0.
    """

    now_ns: int
    bytes_max: int
    day_bytes_left: int = 0


@dataclass(slots=True)
class Saved(Happening):
    """A ``Save`` was carried out and what it wrote is durable. ``failed``: why a page was not written, by its place.

    ``heads`` ``[pages, 48]`` are the identity heads (key, root, extra) of what was written.
    """

    now_ns: int
    number: int
    heads: Rows
    failed: dict[int, str]


@dataclass(slots=True)
class Prefetch(Happening):
    """Pages of one chain, in order, are wanted in the tier above; ``hint``: they were just read."""

    now_ns: int
    session: int
    addresses: list[Address]
    hint: bool = False

    def frames_needed(self, class_of: ClassOf) -> tuple[FrameClass, int] | None:
        """See ``Happening``."""
        frame_class = class_of(self.addresses[0]) if self.addresses else None
        return (frame_class, len(self.addresses)) if frame_class is not None else None


@dataclass(slots=True)
class Loaded(Happening):
    """A ``Load`` was carried out: ``rows`` and ``checksums`` of the pages read, ``[pages, ...]``; see ``Saved``."""

    now_ns: int
    number: int
    rows: Rows
    checksums: npt.NDArray[np.uint32]
    failed: dict[int, str]


@dataclass(slots=True)
class Carried(Happening):
    """A ``Carry`` was carried out; see ``Saved``. What is in ``failed`` is where it was."""

    now_ns: int
    number: int
    failed: dict[int, str]


@dataclass(slots=True)
class Erased(Happening):
    """An ``Erase`` was carried out, but for the places in ``failed``, whose device takes no more writes."""

    now_ns: int
    number: int
    failed: set[int]


@dataclass(slots=True)
class Adopt(Happening):
    """Pages that a start found on the disk, in frames that wait QUARANTINED; parents before their children.

    ``heads`` ``[pages, 48]``; the addresses have the generations that the pages were written under.
    """

    now_ns: int
    addresses: list[Address]
    heads: Rows
    parents: list[bytes]
    standings: list[int]


@dataclass(slots=True)
class Adopted(Happening):
    """Everything that was found in this extent has been offered: what is left holds nothing."""

    now_ns: int
    extent: int


@dataclass(slots=True)
class TierFailed(Happening):
    """The device behind these positions of a tier takes no more writes."""

    now_ns: int
    tier: Tier
    positions: list[int]


@dataclass(slots=True)
class NameRoot(Happening):
    """A client said whose a root is: ``about`` has its salt, adapter, model, fingerprint and layout."""

    now_ns: int
    root: bytes
    about: dict[str, Any]


@dataclass(slots=True)
class Pin(Happening):
    """Keep what is stored of these consecutive pages, from the first on, until ``until_ns``.

    ``pin``: its number, or one above it where another pin has that; 0: one above all there were. ``asked``: its last
    page when it was asked for, which names it.
    """

    now_ns: int
    pin: int
    keys: list[bytes]
    root: bytes
    until_ns: int
    until_s: float
    asked: bytes = b""


@dataclass(slots=True)
class RestorePins(Happening):
    """For start: these were granted by the daemon before, under their numbers. What of their pages is not there, and
    may be found by the scan of NVMe, is waited for."""

    now_ns: int
    pins: list[Pin]


@dataclass(slots=True)
class Unpin(Happening):
    """End this pin, or the one of that root and these pages."""

    now_ns: int
    pin: int = 0
    keys: list[bytes] = field(default_factory=list)
    root: bytes = b""


@dataclass(slots=True)
class Mount(Happening):
    """An engine mounts its own memory: a segment of frames, see ``mounts``."""

    now_ns: int
    session: int
    frame_class: FrameClass
    frames: int


@dataclass(slots=True)
class FoundMount(Happening):
    """For start: a segment of the daemon before, whose engine lives, and what is in it."""

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
class Publish(Happening):
    """Consecutive pages of one chain, the first at ``position``, are in these frames of a mounted segment.

    ``before``: the span of the page before the first one, see ``model.prefix``.
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
class Retract(Happening):
    """What these frames of a mounted segment hold may not be read any more."""

    now_ns: int
    session: int
    segment: int
    addresses: list[Address]
    joins: bool = False


@dataclass(slots=True)
class Unmount(Happening):
    """An engine has no more use for a segment."""

    now_ns: int
    session: int
    segment: int


@dataclass(slots=True)
class DevicesLate(Happening):
    """These positions of a tier, and no others, are of devices that do not answer now: those that are being written to
    (``saves``), and those that are read (``loads``). Others go on without what is there. Never of all devices that
    take writes, or of all that are read."""

    now_ns: int
    tier: Tier
    saves: list[int]
    loads: list[int]


@dataclass(slots=True)
class Tick(Happening):
    """Do what is due at ``now_ns``: end what is past its deadline."""

    now_ns: int


@dataclass(slots=True)
class Populated(Happening):
    """The memory of these positions is allocated; frames may be there."""

    now_ns: int
    positions: list[int]


@dataclass(slots=True)
class PopulationFailed(Happening):
    """The memory of these positions cannot be had, or was given back: the node goes on with less."""

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
    | Reserve
    | Seal
    | Revoke
    | TakeLease
    | RenewLease
    | ReleaseLease
    | Damaged
    | Stamped
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
    | FoundMount
    | Publish
    | Retract
    | Unmount
    | Populated
    | PopulationFailed
)
