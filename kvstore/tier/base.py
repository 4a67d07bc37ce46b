"""The interface of a node's tiers: frames in extents, extents in positions.

All tiers keep pages in the same structure. A page has the same kind of address in each (extent, frame, generation), and
the same code decides about it. The difference is behind this interface: DRAM is mapped, and its records prove a page.
NVMe is read and written in frames, each with a header that proves the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import FrameClass, Tier

Bytes = npt.NDArray[np.uint8]


class TierStore(Protocol):
    """The store of one tier's pages: a row of positions of ``extent_bytes`` each. Life of a position::

        empty ──carve(number, class)──> carved: its frames may be written and read ──drop──> empty

    It is a bug (AssertionError) to name a frame outside a carved extent, or a frame of another class. Any thread may
    call.

    Attributes:
        tier: the tier. A node has at most one store per tier.
        incarnation: a random number of the store. Pages from another incarnation cannot be read.
        generation: a number between all generations of earlier starts and all generations that frames get in this
            start.
        extent_bytes, positions: the geometry.
        mapped: frames are memory of this process, so the node's state moves pages itself.
        relayed: ``node.relay`` moves pages one by one with ``read_page`` and ``write_page``. A tier that is not
            relayed has its own mover.
    """

    @property
    def tier(self) -> Tier:
        """See the class."""
        ...

    @property
    def incarnation(self) -> int:
        """See the class."""
        ...

    @property
    def generation(self) -> int:
        """See the class."""
        ...

    @property
    def extent_bytes(self) -> int:
        """See the class."""
        ...

    @property
    def positions(self) -> int:
        """See the class."""
        ...

    @property
    def mapped(self) -> bool:
        """See the class."""
        ...

    @property
    def relayed(self) -> bool:
        """See the class."""
        ...

    def frames_of(self, frame_class: FrameClass) -> int:
        """Return how many frames of this class fit in an extent; 0 if not even one fits."""
        ...

    def header_bytes(self, frame_class: FrameClass) -> int:
        """Return the size in bytes of the header before each frame; 0 in DRAM, whose records are elsewhere."""
        ...

    def header_incarnation(self, position: int) -> int:
        """Return the incarnation in the headers of frames at this position, see ``frame_header``."""
        ...

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """Put an extent into the position. Its frames have no valid contents until they are written. This does not wait
        for a device."""
        ...

    def drop(self, position: int) -> None:
        """Make the position empty. Its pages are gone, even after a restart. Does not wait for a device."""
        ...

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """Allow writes to frames there, until ``close_for_writing``.

        Raises:
            OSError: none of the positions is open.
        """
        ...

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """End writing. The pages are written and synced and their records are stored, or the pages were given up."""
        ...

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Write one frame: ``header`` ``[header_bytes]`` and ``page`` ``[frame_bytes]``, both page-aligned.

        Raises:
            OSError: the frame may now hold anything.
        """
        ...

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Read one frame into ``header`` and ``page``. The caller proves that it is the expected page.

        Raises:
            OSError: the contents of the buffers are undefined.
        """
        ...

    def sync(self) -> None:
        """Make earlier writes as durable as the tier is: in DRAM they survive the death of the owner, on NVMe a loss of
        power.

        Raises:
            OSError: everything written since the last sync must be given up.
        """
        ...

    def close(self) -> None:
        """Close the store. The pages stay."""
        ...
