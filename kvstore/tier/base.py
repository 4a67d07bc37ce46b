"""What the tiers of one node have in common: frames in extents, extents in positions.

DRAM and NVMe keep their pages in the same shape, so that a page is named the same way in both (extent, frame,
generation) and the decisions about them are the same code. What differs stays below: DRAM is mapped and its records
prove a page; NVMe is read and written in whole frames, each with a header that proves it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import FrameClass

Bytes = npt.NDArray[np.uint8]


class FrameStore(Protocol):
    """A row of positions of ``extent_bytes`` each. A position's life::

        empty ──carve(number, class)──> carved: its frames may be written and read ──drop──> empty

    Asking for a frame outside a carved extent, or by another class, is a bug (AssertionError).

    Attributes:
        incarnation: drawn when the store was made; what one incarnation stored means nothing to another.
        extent_bytes, positions: its geometry.
    """

    incarnation: int
    extent_bytes: int
    positions: int

    def frames_of(self, frame_class: FrameClass) -> int:
        """Frames in an extent of that class; 0 where not one fits."""
        ...

    def header_bytes(self, frame_class: FrameClass) -> int:
        """Bytes that stand before each frame; 0 in DRAM, whose records lie elsewhere."""
        ...

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """Make the position hold that extent. What its frames hold means nothing until they are written."""
        ...

    def drop(self, position: int) -> None:
        """Make the position empty. Its pages are gone, also after a restart."""
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
        """What was written before survives what the tier survives: DRAM its owner's death, NVMe loss of power."""
        ...

    def close(self) -> None:
        """Let go of it; the pages stay."""
        ...
