"""Pins: extents of a node's segment that are registered with the drivers of devices, in this process.

A driver pins the memory that lies behind a range when it is registered. The node may give the memory of an extent back
once nothing lies there, and another extent gets other memory in the same place. A driver does not see that: it would
go on with pages that nobody else has. But memory is given back where there is no extent alone, and no number of an
extent is used twice. So a range is pinned under the number of its extent::

    unknown ──copy of extent n──> pinned under n ──copy of extent m > n──> pinned under m ──the mapping ends──> unknown

Before the second step every copy is over that was begun under n. Who still copies by an older number than the range has
reads pages that have turned over, which their words tell. Nobody writes there: frames that are reserved, or leased,
keep their extent where it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from kvstore.errors import Unavailable
from kvstore.tier.device import Bytes, Device, DeviceEvent, DeviceLost


class PinnedExtent(Protocol):
    """What is pinned: ``memory``, a part of a mapping, and the number that says whose it is."""

    @property
    def number(self) -> int:
        """Higher than that of every extent that was here before."""
        ...

    @property
    def memory(self) -> Bytes:
        """The whole position of the segment."""
        ...


class PinnedRanges:
    """See the module. Threads and devices share it: what is registered with a driver is so for all of its devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # from the look at a range until the copy there has its event
        self._ranges: dict[int, _Range] = {}  # by where they begin

    def copy(
        self,
        device: Device,
        extents: Sequence[PinnedExtent],
        stream: object,
        begin: Callable[[], DeviceEvent],
        deadline_s: float,
    ) -> DeviceEvent:
        """Begin a copy in that stream of ``device`` from or to these extents, whose memory is pinned, where the driver
        does that. What ``begin`` returns: the event behind it.

        Raises:
            DeadlineExceeded: another copy in a range that is to be registered anew is not over. Nothing was begun.
            Unavailable: such a range cannot be unregistered. Nothing was begun.
            DeviceLost, and what ``begin`` raises.
        """
        while True:
            with self._lock:
                pairs = [(self._range(extent.memory), extent) for extent in extents]
                event = next(filter(None, (found.under_way(extent.number) for found, extent in pairs)), None)
                if event is None:
                    for found, extent in pairs:
                        found.pin(device, extent)
                    event = begin()
                    for found, _ in pairs:
                        found.last[stream] = event
                    return event
            with contextlib.suppress(DeviceLost):  # then it is over as well
                event.wait(deadline_s)

    def _range(self, memory: Bytes) -> _Range:
        start = memory.ctypes.data
        found = self._ranges.get(start)
        if found is None:
            found = self._ranges[start] = _Range(start, memory.nbytes)
            weakref.finalize(memory.base, self._unmapped, start).atexit = False
        return found

    def _unmapped(self, start: int) -> None:
        """Takes no lock: a collection of garbage may call it anywhere."""
        found = self._ranges.pop(start, None)
        if found is not None:
            found.unpin()


class _Range:
    """Where one extent after the other lies.

    Attributes:
        last: by stream the event behind its last copy here, which is behind all others of that stream.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.last: dict[object, DeviceEvent] = {}
        self._start, self._nbytes = start, nbytes
        self._number = -1
        self._pinned: dict[Device, bool] = {}  # False: it refused, and is not asked again

    def under_way(self, number: int) -> DeviceEvent | None:
        """The event of a copy that has to be over before extent ``number`` is pinned here."""
        if number <= self._number:
            return None
        return next((event for event in self.last.values() if not is_over(event)), None)

    def pin(self, device: Device, extent: PinnedExtent) -> None:
        """Register it, once for each device that does not refuse: then copies take longer."""
        if extent.number > self._number:
            self.unpin()
            self._number = extent.number
        if device in self._pinned:
            return
        try:
            device.register(extent.memory)
            self._pinned[device] = True
        except DeviceLost:
            raise
        except Unavailable:
            self._pinned[device] = False

    def unpin(self) -> None:
        """For all devices. No copy is under way."""
        # Without holding the memory: this is called as well while the mapping ends.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._start))
        for device, pinned in list(self._pinned.items()):
            if pinned:
                with contextlib.suppress(DeviceLost):
                    device.unregister(memory)
            del self._pinned[device]
        self.last.clear()


def is_over(event: DeviceEvent) -> bool:
    """Whether nothing before it goes on any more."""
    try:
        return event.over()
    except DeviceLost:
        return True


PINNED: Final = PinnedRanges()
