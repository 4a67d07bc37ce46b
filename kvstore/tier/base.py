"""What the tiers of one node have in common: frames in extents, extents in positions.

All tiers keep their pages in the same shape, so that a page is named the same way in each (extent, frame, generation)
and the decisions about them are the same code. What differs stays below: DRAM is mapped and its records prove a page;
NVMe is read and written in whole frames, each with a header that proves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import FrameClass, Tier

Bytes = npt.NDArray[np.uint8]


class TierStore(Protocol):
    """Where the pages of one tier rest: a row of positions of ``extent_bytes`` each. A position's life::

        empty ──carve(number, class)──> carved: its frames may be written and read ──drop──> empty

    Asking for a frame outside a carved extent, or by another class, is a bug (AssertionError). Any thread may call.

    Attributes:
        tier: which it is. A node has at most one store per tier.
        incarnation: drawn when the store was made; what one incarnation stored means nothing to another.
        generation: below every generation that this start may give its frames, above all that earlier ones gave.
        extent_bytes, positions: its geometry.
        mapped: its frames are memory of this process: the decider moves a page itself.
        relayed: pages come and go one by one, through ``read_page`` and ``write_page``, carried by ``upkeep.relay``. A
            tier that is not relayed has a mover that knows it.
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
        """Frames in an extent of that class; 0 where not one fits."""
        ...

    def header_bytes(self, frame_class: FrameClass) -> int:
        """Bytes that stand before each frame; 0 in DRAM, whose records lie elsewhere."""
        ...

    def header_incarnation(self, position: int) -> int:
        """What the headers of frames there carry, see ``frame_header``."""
        ...

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """Make the position hold that extent. What its frames hold means nothing until they are written. Waits for no
        device."""
        ...

    def drop(self, position: int) -> None:
        """Make the position empty. Its pages are gone, also after a restart. Waits for no device."""
        ...

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """From now until ``close_for_writing`` frames may be written there.

        Raises:
            OSError: none is open.
        """
        ...

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """The pages are written, synced, and what the records say of them is said (or they are given up)."""
        ...

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Write one frame, ``header`` ``[header_bytes]`` and ``page`` ``[frame_bytes]``, both page-aligned.

        Raises:
            OSError: the frame may hold anything now.
        """
        ...

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """Read one frame into ``header`` and ``page``. Whether it is the page that was meant, the caller proves.

        Raises:
            OSError: what the buffers hold means nothing.
        """
        ...

    def sync(self) -> None:
        """What was written before survives what the tier survives: DRAM its owner's death, NVMe loss of power.

        Raises:
            OSError: what was written since the last one must be given up.
        """
        ...

    def close(self) -> None:
        """Let go of it; the pages stay."""
        ...
