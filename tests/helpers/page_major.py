"""PageMajorFrames: a device's memory as our own engine lays it out, one piece for a page."""

from __future__ import annotations

import numpy as np

from kvstore.device.base import Addresses
from kvstore.device.copies import places_in
from kvstore.model.replica import FrameClass


class PageMajorFrames:
    """See ``FrameMap``: frames of any class, each contiguous."""

    def __init__(self, address: int, extent_bytes: int, positions: int) -> None:
        self._address, self.extent_bytes, self.positions = address, extent_bytes, positions

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self.extent_bytes // frame_class.frame_bytes

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``."""
        start = self._address + position * self.extent_bytes + frame * frame_class.frame_bytes
        sizes = np.full(count, frame_class.frame_bytes, np.uint64)
        return places_in(start, sizes), sizes
