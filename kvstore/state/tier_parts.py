"""TierParts: a tier of a node, as its state needs it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.state.frames import Segment
from kvstore.state.views import PageIndex, RecordView


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
