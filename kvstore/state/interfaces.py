"""What decisions need from outside: views of stored pages, the parts of a tier, and sessions of clients.

Views: what a decision reads back of the pages at rest. The shell provides them; so does a test, in memory.

TierParts: a tier of a node, as its state needs it.

ClientSession: what a node knows of a client process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Address
from kvstore.state.frames import Segment

Rows = npt.NDArray[np.uint8]
"""Identity rows ``[pages, 48 + 4 * page_tokens]``: key, root, extra, token ids, as a record keeps them."""


@dataclass(slots=True)
class Snapshot:
    """One extent's records: ``words`` ``[frames]`` uint64, ``keys``, ``parents`` and ``roots`` ``[frames]`` S16."""

    extent: int
    words: npt.NDArray[np.uint64]
    keys: npt.NDArray[np.bytes_]
    parents: npt.NDArray[np.bytes_]
    roots: npt.NDArray[np.bytes_]


class ChainRun(NamedTuple):
    """What the records of consecutive frames say: keys and parents one after another, and one number per frame."""

    keys: bytes
    parents: bytes
    standings: list[int]
    used_ns: list[int]


class PageIndex(Protocol):
    """key -> address of the SEALED page, as of the last performed instruction."""

    def find(self, key: bytes) -> Address | None:
        """None where no sealed page has that key."""
        ...

    def absent(self, keys: Sequence[bytes]) -> int:
        """How many of these, from the front, have no entry."""
        ...


class RecordView(Protocol):
    """What the decision needs to read back of a SEALED frame's record, and its last use."""

    def key(self, extent: int, frame: int) -> bytes:
        """The page's key."""
        ...

    def lineage(self, extent: int, frame: int) -> tuple[bytes, bytes, bytes]:
        """The page's key, its root, and its parent, in one look."""
        ...

    def parent(self, extent: int, frame: int) -> bytes:
        """Key of the page before; the root for page 0."""
        ...

    def root(self, extent: int, frame: int) -> bytes:
        """Root of the page's chain."""
        ...

    def extra(self, extent: int, frame: int) -> bytes:
        """The field for media digests of a page; of an object's page what says so."""
        ...

    def standing(self, extent: int, frame: int) -> int:
        """The page's place in its chain and turns; see ``replica.standing``."""
        ...

    def last_use_ns(self, extent: int, frame: int) -> int:
        """When a client last read or wrote the page (a hint)."""
        ...

    def run(self, extent: int, frames: slice) -> ChainRun:
        """``key``, ``parent``, ``standing`` and ``last_use_ns`` of these frames."""
        ...

    def snapshots(self) -> list[Snapshot]:
        """All records at once, for the rare work that must see every page (recovery, damage)."""
        ...


@dataclass(frozen=True, slots=True)
class TieringRules:
    """How a node uses a tier below its first one.

    Args:
        demote_at: share of a class's frames above in use from which on cold pages are saved ahead; 0: all pages at
            once.
        promote_after: reads after which a page is loaded into the tier above.
        admission: "all" saves every page that leaves the tier above, "reused" only those of chains used by a later
            request.
        write_bytes_per_day: bytes that may be written per day; 0: no limit.
    """

    demote_at: float = 0.5
    promote_after: int = 2
    admission: str = "all"
    write_bytes_per_day: int = 0


@dataclass(frozen=True, slots=True)
class TierParts:
    """A tier of a node as its state needs it. ``generation``: none below this one was used; ``rules``: how pages come
    there from the tier above."""

    segment: Segment
    index: PageIndex
    records: RecordView
    generation: int = 1
    rules: TieringRules = field(default_factory=TieringRules)


@dataclass(slots=True)
class ClientSession:
    """A client process: what it was granted ahead, and whether its connection is up.

    ``tail``: the last page that it published, and under which number.
    """

    granted: set[Address] = field(default_factory=set)
    connected: bool = True
    tail: tuple[int, bytes] = 0, b""
