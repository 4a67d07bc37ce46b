"""What decisions need from outside: views of stored pages, the parts of a tier, and sessions of clients.

The node's performer implements the views over shared memory and NVMe; tests implement them in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.objects import ObjectGroup
from kvstore.model.replica import Address
from kvstore.state.frames import Segment

Rows = npt.NDArray[np.uint8]
"""Identity rows ``[pages, 48 + 4 * page_tokens]``: key, root, extra and token ids, as in a record."""


@dataclass(slots=True)
class Snapshot:
    """Records of one extent: ``words`` ``[frames]`` uint64, ``keys``, ``parents`` and ``roots`` ``[frames]`` S16."""

    extent: int
    words: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.bytes_]
    parents: npt.NDArray[np.bytes_]
    roots: npt.NDArray[np.bytes_]


class ChainRun(NamedTuple):
    """Fields of the records of consecutive frames: joined keys and parents, and one number per frame."""

    keys: bytes
    parents: bytes
    standings: list[int]
    used_ns: list[int]


class PageIndex(Protocol):
    """The index of sealed pages, as of the last performed instruction."""

    def find(self, key: bytes) -> Address | None:
        """Return the address of the sealed page with this key; None if there is none."""
        ...

    def absent(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys have no entry."""
        ...


class RecordView(Protocol):
    """Fields of the records of SEALED frames, and the last use of their pages."""

    def key(self, extent: int, frame: int) -> bytes:
        """Return the page's key."""
        ...

    def lineage(self, extent: int, frame: int) -> tuple[bytes, bytes, bytes]:
        """Return the page's key, root and parent, in one read."""
        ...

    def parent(self, extent: int, frame: int) -> bytes:
        """Return the key of the preceding page; for page 0, the root."""
        ...

    def root(self, extent: int, frame: int) -> bytes:
        """Return the root of the page's chain."""
        ...

    def extra(self, extent: int, frame: int) -> bytes:
        """Return the field for digests of media. In an object's page it marks the object's head."""
        ...

    def standing(self, extent: int, frame: int) -> int:
        """Return the page's place in its chain and its turns, see ``replica.standing``."""
        ...

    def last_use_ns(self, extent: int, frame: int) -> int:
        """Return when a client last read or wrote the page (a hint)."""
        ...

    def run(self, extent: int, frames: slice) -> ChainRun:
        """Return ``key``, ``parent``, ``standing`` and ``last_use_ns`` of these frames."""
        ...

    def memberships(self) -> list[tuple[bytes, ObjectGroup]]:
        """Return the key and the group of each sealed head that has a group, for integrity checks."""
        ...

    def snapshots(self) -> list[Snapshot]:
        """Return all records at once, for the rare work that needs every page (recovery, damage)."""
        ...


@dataclass(frozen=True, slots=True)
class TieringRules:
    """The rules by which a node uses a tier below its first one.

    Args:
        demote_at: once this share of a class's frames in the upper tier is in use, cold pages are saved ahead of need.
            With 0, all pages are saved at once.
        promote_after: number of reads after which a page is loaded into the tier above.
        admission: "all" saves every page that leaves the tier above, "reused" only pages of chains that a later
            request used.
        write_bytes_per_day: limit of bytes written per day; 0: no limit.
    """

    demote_at: float = 0.5
    promote_after: int = 2
    admission: str = "all"
    write_bytes_per_day: int = 0


@dataclass(frozen=True, slots=True)
class TierParts:
    """A tier of a node, as its state needs it.

    Attributes:
        generation: a number between all earlier generations of frames and all later ones.
        rules: how pages reach this tier from the upper tier.
    """

    segment: Segment
    index: PageIndex
    records: RecordView
    generation: int = 1
    rules: TieringRules = field(default_factory=TieringRules)


@dataclass(slots=True)
class ClientSession:
    """A client process.

    Attributes:
        granted: frames that were granted to it and are not used yet.
        connected: its connection is up.
        tail: number and key of the last page that it published.
    """

    granted: set[Address] = field(default_factory=set)
    connected: bool = True
    tail: tuple[int, bytes] = 0, b""
