"""HbmStore: a tier in device memory, with the interface of other tiers.

It reads memory that engines have mounted (``tier.peer_memory``). The engine's records name the frames, and only the
engine writes them and decides about them. A ``FrameMap`` says where the bytes of a page are. Our own arenas are
page-major: a page is one piece. In a foreign arena (for example a tensor ``[B, H, N, C]`` per layer) a page consists of
separate pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Final, Protocol

import numpy as np

from kvstore.device.base import Addresses, Device
from kvstore.device.copies import CopyStream, PinnedBounces, places_in
from kvstore.device.host_memory import copy
from kvstore.model.replica import FrameClass, Tier
from kvstore.model.shard import Strides
from kvstore.tier.base import Bytes

COPY_DEADLINE_S: Final = 10.0  # time for the copy of one page
BOUNCE_BYTES: Final = 8 << 20  # bytes copied at a time; at least one page


class FrameMap(Protocol):
    """Where frames are in device memory. There are ``positions``, and each holds a number of frames of one class."""

    @property
    def extent_bytes(self) -> int:
        """Bytes of one position."""
        ...

    @property
    def positions(self) -> int:
        """The number of positions for extents."""
        ...

    def frames_of(self, frame_class: FrameClass) -> int:
        """Return the number of frames in one position; 0 if the class does not fit."""
        ...

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """Return addresses and lengths of the pieces of ``count`` pages, in the order of their bytes. They cover each
        page, or each page's entire frame."""
        ...


class StridedFrames:
    """See ``FrameMap``: blocks of another engine, all of one class, as one extent.

    Args:
        frame_class: the class of the pages.
        address: the start of their memory.
        blocks: the number of frames.
        strides: the layout of pages in the memory.
    """

    positions = 1

    def __init__(self, frame_class: FrameClass, address: int, blocks: int, strides: Strides) -> None:
        assert strides.page_bytes == frame_class.page_bytes, "the pieces are not a page"
        self._frame_class, self._blocks, self._block = frame_class, blocks, np.uint64(strides.block)
        self.extent_bytes = blocks * frame_class.frame_bytes
        places, self._sizes = strides.pieces()
        self._places = places + np.uint64(address)

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self._blocks if frame_class == self._frame_class else 0

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``."""
        starts = np.arange(frame, frame + count, dtype=np.uint64) * self._block
        return (starts[:, None] + self._places).reshape(-1), np.tile(self._sizes, count)


class HbmStore:
    """See ``TierStore``. Records elsewhere name its frames, as in DRAM, and frames have no headers.

    A page is copied through the store's own pinned memory. So a copy that did not end in time affects neither the
    caller's buffers nor a later copy: its bounce buffer is reused only after its event.

    Args:
        device: the device that has the memory.
        arena: where its frames are. The caller allocates the memory, and frees it after the store is closed.
        incarnation: a random number of the arena, because device memory ends with its process.
        extents: the extents that are already carved: position -> class.
        deadline_s: the time for the copy of one page.
    """

    tier = Tier.HBM
    generation = 1
    mapped = False
    relayed = False

    def __init__(
        self,
        device: Device,
        arena: FrameMap,
        incarnation: int,
        extents: Iterable[tuple[int, FrameClass]] = (),
        deadline_s: float = COPY_DEADLINE_S,
    ) -> None:
        self.incarnation = incarnation
        self.extent_bytes, self.positions = arena.extent_bytes, arena.positions
        self._arena, self._deadline_s = arena, deadline_s
        self._extents = dict(extents)
        self._stream = CopyStream(device)
        self._bounces = PinnedBounces(device)

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return self._arena.frames_of(frame_class)

    def header_bytes(self, frame_class: FrameClass) -> int:
        """See ``TierStore``."""
        return 0

    def header_incarnation(self, position: int) -> int:
        """See ``TierStore``."""
        return self.incarnation

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """See ``TierStore``."""
        assert 0 <= position < self.positions and position not in self._extents and self.frames_of(frame_class)
        self._extents[position] = frame_class

    def drop(self, position: int) -> None:
        """See ``TierStore``."""
        del self._extents[position]

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``. Returns after the copy's event.

        Raises:
            DeviceLost: an OSError; the device failed.
            DeadlineExceeded: also an OSError. The frame may still change, but not after later copies of this store.
        """
        places, sizes = self._pieces(position, frame, frame_class)
        deadline_s = time.monotonic() + self._deadline_s
        with self._bounces.borrow(len(page), deadline_s) as bounce:
            bounce.memory[: len(page)] = page
            bounce.event = self._stream.copy(places, places_in(bounce.address, sizes), sizes)
            bounce.event.wait(deadline_s)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``. Returns after the copy's event.

        Raises:
            DeviceLost: an OSError; the device failed. ``page`` is unchanged, and will not change later.
            DeadlineExceeded: also an OSError. ``page`` is unchanged, and will not change later.
        """
        self.read_pages(position, frame, frame_class, page[None])

    def read_pages(self, position: int, frame: int, frame_class: FrameClass, rows: Bytes) -> None:
        """Read the pages in the frames starting at ``frame`` into ``rows`` ``[pages, page_bytes or more]``; the rest of
        each row is set to zero. The deadline applies to each ``BOUNCE_BYTES``. Raises as ``read_page``."""
        step = max(1, BOUNCE_BYTES // frame_class.frame_bytes)
        for first in range(0, len(rows), step):
            some = rows[first : first + step]
            places, sizes = self._pieces(position, frame + first, frame_class, len(some))
            deadline_s, nbytes = time.monotonic() + self._deadline_s, int(sizes.sum())
            with self._bounces.borrow(nbytes, deadline_s) as bounce:
                bounce.event = self._stream.copy(places_in(bounce.address, sizes), places, sizes)
                bounce.event.wait(deadline_s)
                pages = bounce.memory[:nbytes].reshape(len(some), -1)
                width = min(pages.shape[1], some.shape[1])
                copy(some[:, :width], pages[:, :width])
            some[:, width:] = 0  # a foreign arena keeps no padding

    def sync(self) -> None:
        """See ``TierStore``. Does nothing, because device memory is never durable."""

    def close(self) -> None:
        """See ``TierStore``."""
        self._bounces.close()

    def _pieces(
        self, position: int, frame: int, frame_class: FrameClass, count: int = 1
    ) -> tuple[Addresses, Addresses]:
        assert self._extents.get(position) == frame_class, (position, frame_class)
        assert frame >= 0 and frame + count <= self.frames_of(frame_class), (frame, count, frame_class)
        return self._arena.pieces(position, frame, frame_class, count)
