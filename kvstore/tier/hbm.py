"""HbmStore: pages in a device's memory as one of a node's tiers.

Where the bytes of a page lie is told by an arena: our own is page-major, one piece for a page; in a foreign one (a
tensor ``[B, H, N, C]`` for each layer, and the like) a page is gathered from pieces that lie apart.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import numpy as np

from kvstore.model.replica import FrameClass, Tier
from kvstore.tier.base import Bytes
from kvstore.tier.device import Addresses, Device
from kvstore.tier.device_copies import CopyStream, PinnedBounces, places_in

COPY_DEADLINE_S: Final = 10.0  # of one page


class FrameMap(Protocol):
    """Where frames lie in a device's memory: ``positions`` of so many frames of a class."""

    @property
    def extent_bytes(self) -> int:
        """Bytes of one position."""
        ...

    @property
    def positions(self) -> int:
        """How many extents it has room for."""
        ...

    def frames_of(self, frame_class: FrameClass) -> int:
        """Frames in one position; 0 where that class does not fit."""
        ...

    def pieces(self, position: int, frame: int, frame_class: FrameClass) -> tuple[Addresses, Addresses]:
        """Addresses and lengths of the pieces of a page, in the order of its bytes. Together they are the page, or its
        whole frame."""
        ...


class PageMajorFrames:
    """See ``FrameMap``: frames of any class, each contiguous."""

    def __init__(self, address: int, extent_bytes: int, positions: int) -> None:
        self._address, self.extent_bytes, self.positions = address, extent_bytes, positions

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self.extent_bytes // frame_class.frame_bytes

    def pieces(self, position: int, frame: int, frame_class: FrameClass) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``."""
        start = self._address + position * self.extent_bytes + frame * frame_class.frame_bytes
        return np.array([start], np.uint64), np.array([frame_class.frame_bytes], np.uint64)


class StridedFrames:
    """See ``FrameMap``: blocks of another engine, all of one class, as one extent.

    A page's bytes lie in the order ``[layer][dims...][piece]``. A tensor for each layer of shape ``[B, H, N, C]`` is
    ``layers`` = their addresses, ``block_stride`` = ``H*N*C``, no ``dims`` and ``piece_bytes`` = ``H*N*C`` as well; one
    of ``[B, N, H, C]`` has ``dims`` = ``[(H, C), (N, H*C)]`` and ``piece_bytes`` = ``C``. (All in bytes.)

    Args:
        frame_class: whose pages they hold.
        layers: where each layer's tensor begins.
        blocks: frames there are.
        block_stride: bytes from one block of a layer to the next.
        dims: count and stride of each dimension between layer and piece, in the order of the page's bytes.
        piece_bytes: what lies together.
    """

    positions = 1

    def __init__(
        self,
        frame_class: FrameClass,
        layers: Sequence[int],
        blocks: int,
        block_stride: int,
        dims: Sequence[tuple[int, int]],
        piece_bytes: int,
    ) -> None:
        self._frame_class, self._blocks, self._block_stride = frame_class, blocks, block_stride
        self.extent_bytes = blocks * frame_class.frame_bytes
        places = np.asarray(layers, np.uint64)
        for count, stride in dims:
            places = (places[:, None] + (np.arange(count) * stride).astype(np.uint64)).reshape(-1)
        assert len(places) * piece_bytes == frame_class.page_bytes, "the pieces are not a page"
        self._places, self._sizes = _joined(places, piece_bytes)

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self._blocks if frame_class == self._frame_class else 0

    def pieces(self, position: int, frame: int, frame_class: FrameClass) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``."""
        return self._places + np.uint64(frame * self._block_stride), self._sizes


class HbmStore:
    """See ``TierStore``. Frames are named by records that lie elsewhere, as in DRAM; nothing stands before them.

    A page goes through pinned memory of the store's own. So a copy that did not end in time spoils neither the caller's
    buffers nor a later copy: its bounce is used again once its event is over, and by nobody before.

    Args:
        device: whose memory it is.
        arena: where its frames lie; allocated, and freed later than the store is closed, by the caller.
        incarnation: drawn anew for each arena: device memory ends with its process.
        found: what its positions hold already.
        deadline_s: of the copy of one page.
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
        found: Iterable[tuple[int, FrameClass]] = (),
        deadline_s: float = COPY_DEADLINE_S,
    ) -> None:
        self.incarnation = incarnation
        self.extent_bytes, self.positions = arena.extent_bytes, arena.positions
        self._arena, self._deadline_s = arena, deadline_s
        self._carved = dict(found)
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
        assert 0 <= position < self.positions and position not in self._carved and self.frames_of(frame_class)
        self._carved[position] = frame_class

    def drop(self, position: int) -> None:
        """See ``TierStore``."""
        del self._carved[position]

    def open_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def close_for_writing(self, positions: Iterable[int]) -> None:
        """See ``TierStore``."""

    def write_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``. Returns when the copy's event is over.

        Raises:
            DeviceLost: an OSError, as is the next.
            DeadlineExceeded: the frame may still change; later copies of this store come after that.
        """
        places, sizes = self._pieces(position, frame, frame_class)
        deadline_s = time.monotonic() + self._deadline_s
        with self._bounces.borrow(len(page), deadline_s) as bounce:
            bounce.memory[: len(page)] = page
            bounce.event = self._stream.copy(places, places_in(bounce.address, sizes), sizes)
            bounce.event.wait(deadline_s)

    def read_page(self, position: int, frame: int, frame_class: FrameClass, header: Bytes, page: Bytes) -> None:
        """See ``TierStore``. Returns when the copy's event is over.

        Raises:
            DeviceLost: an OSError, as is the next. ``page`` is as it was, and stays so.
            DeadlineExceeded: the same.
        """
        places, sizes = self._pieces(position, frame, frame_class)
        deadline_s, copied = time.monotonic() + self._deadline_s, int(sizes.sum())
        with self._bounces.borrow(len(page), deadline_s) as bounce:
            bounce.event = self._stream.copy(places_in(bounce.address, sizes), places, sizes)
            bounce.event.wait(deadline_s)
            page[:copied] = bounce.memory[:copied]
        page[copied:] = 0  # a foreign arena keeps no padding

    def sync(self) -> None:
        """See ``TierStore``. Device memory survives nothing."""

    def close(self) -> None:
        """See ``TierStore``."""
        self._bounces.close()

    def _pieces(self, position: int, frame: int, frame_class: FrameClass) -> tuple[Addresses, Addresses]:
        frames = self.frames_of(frame_class)
        assert self._carved.get(position) == frame_class and 0 <= frame < frames, (position, frame, frame_class)
        return self._arena.pieces(position, frame, frame_class)


def _joined(places: Addresses, piece_bytes: int) -> tuple[Addresses, Addresses]:
    """Pieces of one length, those that lie behind each other as one."""
    starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1] + np.uint64(piece_bytes)]))
    counts = np.diff(np.append(starts, len(places)))
    return places[starts], (counts * piece_bytes).astype(np.uint64)
