"""How a process of the node's machine reads each tier: what every reader can tell, and what one below memory does.

The fastest tier is mapped (``DramReader``): its pages are proven, copied, lent and written where they lie. Pages of the
tiers below are read into the caller's rows, by one ``LowerReader`` per tier. A tier more is such a class, and a row of
``LOWER_READERS`` (``client.local.lower_tiers``).

The index names addresses; all of them are hints. A reader opens what it needs when it is first asked, and again when
the node says that it is another one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvstore.client.local.mapped_extent import MappedExtent
from kvstore.model.prefix import Keys
from kvstore.model.replica import FrameClass, Tier
from kvstore.tier.base import Bytes


class ObjectHead(NamedTuple):
    """What an object's head says of itself, proven. ``extent`` None: it is not in memory."""

    frame_class: FrameClass
    row: bytes  # its identity row
    extent: MappedExtent | None = None
    frame: int = 0
    word: int = 0


class TierReader(Protocol):
    """The pages of one tier as one process finds them. Threads may share it. Holds no page and no lease."""

    @property
    def tier(self) -> Tier:
        """Which it is: under this name the index lists its pages."""
        ...

    def root_at(self, raw: bytes) -> bytes | None:
        """The root of the page at a raw address, as its record says now; None where there is no such record."""
        ...

    def class_at(self, raw: bytes) -> FrameClass | None:
        """The class of the frames at a raw address, as the node says now; None where there are none."""
        ...

    def object_head(self, raw: bytes) -> ObjectHead | None:
        """The object's head at that address, proven; None where it is not."""
        ...


class PendingRead(Protocol):
    """Pages on their way into the caller's rows. Ends with ``result``.

    Attributes:
        addresses: raw ones of the pages that are read, end to end.
        damaged: after ``result``, the raw address of the page whose bytes do not hold, b"" where there is none.
    """

    damaged: bytes

    @property
    def addresses(self) -> bytes:
        """See the class."""
        ...

    def result(self, silence_s: float) -> tuple[int, str]:
        """How many leading pages are in the rows and proven, and why not more ("" where all); marks them as used.

        A tier that brings nothing for ``silence_s`` is not waited for: reason "io".
        """
        ...


class LowerReader(TierReader, Protocol):
    """A tier whose pages are read, not mapped.

    Attributes:
        closed: of a layout that is prefix-closed a page is there only with those before it.
    """

    @property
    def closed(self) -> bool:
        """See the class."""
        ...

    def readable(self) -> bool:
        """Whether the node has that tier, and this process may read it."""
        ...

    def start(self, located: list[bytes], keys: Keys, frame_class: FrameClass, rows: Bytes) -> PendingRead:
        """Begin to read the leading pages of ``keys``, at these raw addresses, into ``rows`` ``[pages, page_bytes]``.

        Every page is proven before it counts: key, root, extra, tokens and checksum, and its generation afterwards.
        """
        ...
