"""Copies to and from a device: a stream that threads share, and pinned memory for bounce buffers."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvstore.device.base import Addresses, Bytes, Device, DeviceEvent, DeviceLost
from kvstore.device.host_memory import large_buffer
from kvstore.errors import DeadlineExceeded, Unavailable

BOUNCE_BYTES_MAX: Final = 64 << 20  # pinned memory of one pool; a single larger buffer is allowed
LATE_POLL_S: Final = 0.01


class CopyStream:
    """A stream to which several threads submit copies."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._stream = device.stream()
        self._submit_lock = threading.Lock()  # one thread at a time may use a stream

    def copy(
        self, targets: Addresses, sources: Addresses, nbytes: Addresses, *after: DeviceEvent | None
    ) -> DeviceEvent:
        """Copy after the events ``after``, see ``DeviceStream.copy``. Returns the event after the copy."""
        with self._submit_lock:
            for event in after:
                if event is not None:
                    self._stream.wait(event)
            self._stream.copy(targets, sources, nbytes)
            return self._stream.record()


@dataclass(eq=False)
class PinnedBounce:
    """Pinned memory that a borrower uses until returning it. ``event`` follows the last copy to or from it. The
    borrower sets it as soon as there is a copy."""

    memory: Bytes
    pinned: bool
    event: DeviceEvent | None = None

    @property
    def address(self) -> int:
        """The first address."""
        return self.memory.ctypes.data


class PinnedBounces:
    """A pool of pinned host memory. Life of a bounce::

        free ──borrow──> borrowed ──(waited for its event)──> free
                            └──(the wait failed)──> late ──its event──> free

    A late bounce cannot be used, because the device may still read or write it. The last reference, or ``close``,
    unpins all free ones. Late ones stay until the process ends.
    """

    def __init__(self, device: Device, nbytes_max: int = BOUNCE_BYTES_MAX) -> None:
        self._device, self._nbytes_max = device, nbytes_max
        self._condition = threading.Condition()
        self._free: list[PinnedBounce] = []  # the last used one on top, because it may be in the CPU cache
        self._late: list[PinnedBounce] = []
        self._nbytes = 0
        weakref.finalize(self, _give_up, device, self._free, self._late).atexit = False

    @contextlib.contextmanager
    def borrow(self, nbytes: int, deadline_s: float) -> Iterator[PinnedBounce]:
        """Yield at least ``nbytes``, page-aligned, with undefined contents. Leaving the context without an error means
        that its event is over.

        Raises:
            DeadlineExceeded: other borrowers had all of it for too long.
            DeviceLost: memory can no longer be pinned.
        """
        bounce = self._take(nbytes, deadline_s)
        is_over = False
        try:
            yield bounce
            is_over = True
        finally:
            with self._condition:
                is_late = not is_over and bounce.event is not None
                (self._late if is_late else self._free).append(bounce)
                self._condition.notify()

    def close(self) -> None:
        """Unpin unused memory. Borrowed and late memory stays."""
        with self._condition:
            self._reap()
            self._nbytes -= sum(len(bounce.memory) for bounce in self._free)
            _give_up(self._device, self._free, self._late)

    def _take(self, nbytes: int, deadline_s: float) -> PinnedBounce:
        with self._condition:
            while True:
                for bounce in reversed(self._free):
                    if len(bounce.memory) >= nbytes:
                        self._free.remove(bounce)
                        bounce.event = None
                        return bounce
                while self._free and self._nbytes + nbytes > self._nbytes_max:
                    self._drop(self._free.pop(0))
                if not self._nbytes or self._nbytes + nbytes <= self._nbytes_max:
                    return self._make(nbytes)
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"{self._nbytes} bytes of pinned memory are in use, which is all")
                self._condition.wait(min(left_s, LATE_POLL_S) if self._late else left_s)
                self._reap()

    def _make(self, nbytes: int) -> PinnedBounce:
        memory, is_pinned = large_buffer(nbytes), True
        memory[:: 1 << 12] = 0  # pinned memory must be populated
        try:
            self._device.register(memory)
        except DeviceLost:
            raise
        except Unavailable:
            is_pinned = False  # copies take longer
        self._nbytes += len(memory)
        return PinnedBounce(memory, is_pinned)

    def _reap(self) -> None:
        """Free late bounces whose event is over."""
        with contextlib.suppress(DeviceLost):
            for bounce in list(self._late):
                if bounce.event is not None and bounce.event.over():
                    self._late.remove(bounce)
                    self._free.append(bounce)

    def _drop(self, bounce: PinnedBounce) -> None:
        self._nbytes -= len(bounce.memory)
        if bounce.pinned:
            self._device.unregister(bounce.memory)


# Memory that stays pinned: bounces that were late when their pool ended, which a device may touch, and those that the
# driver does not unpin.
_NOT_UNPINNED: Final[list[PinnedBounce]] = []


def _give_up(device: Device, free: list[PinnedBounce], late: list[PinnedBounce]) -> None:
    """Unpin all memory that can be unpinned when a pool ends."""
    while free:
        bounce = free.pop()
        if bounce.pinned:
            try:
                device.unregister(bounce.memory)
            except Unavailable:
                _NOT_UNPINNED.append(bounce)
    _NOT_UNPINNED.extend(late)
    late.clear()


def places_in(address: int, nbytes: Addresses) -> Addresses:
    """Return the addresses of pieces with these lengths, packed without gaps, starting at ``address``."""
    return np.cumsum(nbytes, dtype=np.uint64) - nbytes + np.uint64(address)
