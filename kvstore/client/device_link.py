"""DeviceLink: copies between host memory and one device, with its streams, pinned bounce buffers and pinned segments.

Mapped pages are copied directly from and to their frames, whose memory is pinned at the first copy (``pins``). All
other memory goes through a bounce buffer. The first copy makes the one link per device and process.

Pins: registers extents of a node's segment with the drivers of devices, in this process.

A driver pins the memory behind a range when the range is registered. The node may free the memory of an empty extent,
and a later extent gets other memory at the same range. The driver does not notice that: it would keep using the old
memory, which nothing else maps. But memory is freed only where there is no extent, and no extent number is used twice.
So a range is pinned under the number of its extent::

    unknown ──copy of extent n──> pinned under n ──copy of extent m > n──> pinned under m ──the mapping ends──> unknown

Before the second step every copy that was started under n is over. A copy under an older number than that of the range
reads pages that have left, which their words show. Such a copy never writes: reserved and leased frames keep their
extent in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from kvstore.client.buffers import DeviceRows, Rows, device_rows_to_read, on_device, rows_to_read
from kvstore.device.base import Addresses, Bytes, Device, DeviceEvent, DeviceLost
from kvstore.device.copies import CopyStream, PinnedBounces
from kvstore.device.host_memory import copy, empty
from kvstore.errors import Unavailable


class PinnedExtent(Protocol):
    """Memory to be pinned: ``memory``, a part of a mapping, and the number of its extent."""

    @property
    def number(self) -> int:
        """The extent's number, higher than that of every earlier extent at this range."""
        ...

    @property
    def memory(self) -> Bytes:
        """The extent's whole range of the segment."""
        ...


class PinnedRanges:
    """The pinned ranges of this process; see the module. Threads and devices share it: a driver registers a range for
    all its devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held from the check of a range until its copy has an event
        self._ranges: dict[int, _Range] = {}  # by start address

    def copy(
        self,
        device: Device,
        extents: Sequence[PinnedExtent],
        stream: object,
        begin: Callable[[], DeviceEvent],
        deadline_s: float,
    ) -> DeviceEvent:
        """Begin a copy in that stream of ``device`` from or to these extents, after pinning their memory if the driver
        can. ``begin`` starts it and returns its event.

        Raises:
            DeadlineExceeded: a range must be registered again, and an older copy there is not over. Nothing was
                started.
            Unavailable: such a range cannot be unregistered. Nothing was started. DeviceLost, and what ``begin``
            raises.
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
            with contextlib.suppress(DeviceLost):  # then the copy is over as well
                event.wait(deadline_s)

    def _range(self, memory: Bytes) -> _Range:
        start = memory.ctypes.data
        found = self._ranges.get(start)
        if found is None:
            found = self._ranges[start] = _Range(start, memory.nbytes)
            weakref.finalize(memory.base, self._unmapped, start).atexit = False
        return found

    def _unmapped(self, start: int) -> None:
        """Note the end of a mapping. Takes no lock: garbage collection may call it anywhere."""
        found = self._ranges.pop(start, None)
        if found is not None:
            found.unpin()


class _Range:
    """A range that holds one extent after another.

    Attributes:
        last: by stream, the event of its last copy here, which comes after all its other copies.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.last: dict[object, DeviceEvent] = {}
        self._start, self._nbytes = start, nbytes
        self._number = -1
        self._pinned: dict[Device, bool] = {}  # False: the driver refused, and is not asked again

    def under_way(self, number: int) -> DeviceEvent | None:
        """Return the event of a copy that must be over before extent ``number`` is pinned here."""
        if number <= self._number:
            return None
        return next((event for event in self.last.values() if not is_over(event)), None)

    def pin(self, device: Device, extent: PinnedExtent) -> None:
        """Register the extent once for each device. If the driver refuses, copies take longer."""
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
        """Unregister the range for all devices. No copy is in progress."""
        # Does not keep the memory alive: this is also called while the mapping ends.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._start))
        for device, pinned in list(self._pinned.items()):
            if pinned:
                with contextlib.suppress(DeviceLost):
                    device.unregister(memory)
            del self._pinned[device]
        self.last.clear()


def is_over(event: DeviceEvent) -> bool:
    """Return whether everything before this event has ended."""
    try:
        return event.over()
    except DeviceLost:
        return True


PINNED: Final = PinnedRanges()


COPY_DEADLINE_S: Final = 10.0
Pieces = tuple[Addresses, Addresses, Addresses]
"""Targets, sources, lengths."""
BOUNCE_BYTES: Final = 8 << 20  # at a time, where a row is not larger


class DeviceLink:
    """See the module. Threads may share it. Lives as long as its device.

    Copies to the device and from it have a stream each, so both can run at the same time. Copies of layers have a third
    stream: they are queued before the layer is computed, and everything queued after them waits for it.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._to, self._from, self._layers = CopyStream(device), CopyStream(device), CopyStream(device)
        self.bounces = PinnedBounces(device)
        self._lock = threading.Lock()
        self._late: list[tuple[DeviceEvent, Any]] = []  # abandoned copies, and their memory

    def copy(
        self,
        pairs: Sequence[tuple[Rows, DeviceRows]],
        extents: Sequence[PinnedExtent] = (),
        *,
        to_device: bool,
        layer: bool = False,
    ) -> DeviceEvent:
        """Begin to copy rows between host and device, ordered after the work of the caller's stream. Returns the copy's
        event: until it is over, nothing has been copied for certain, and the memory of both sides must stay allocated.

        Args:
            extents: the extents that hold the host's rows, if they are in a node's segment.
            layer: this is a layer of a writer, whose end is not awaited soon.

        Raises:
            Unavailable: see ``PinnedRanges.copy``. Nothing was started.
        """
        hosts, theirs, sizes = [], [], []
        for host, rows in pairs:
            assert host.shape == (rows.rows, rows.row_bytes) and host.strides[1] == 1
            whole = rows.stride == host.strides[0] == rows.row_bytes
            hosts.append(np.array([host.ctypes.data], np.uint64) if whole else _addresses(host))
            theirs.append(rows.addresses[:1] if whole else rows.addresses)
            sizes.append(np.full(len(hosts[-1]), host.nbytes if whole else rows.row_bytes, np.uint64))
        here, there, nbytes = np.concatenate(hosts), np.concatenate(theirs), np.concatenate(sizes)
        targets, sources = (there, here) if to_device else (here, there)
        stream = self._layers if layer else self._to if to_device else self._from
        begin = partial(stream.copy, targets, sources, nbytes, after=pairs[0][1].ready())
        if not extents:
            return begin()
        return PINNED.copy(self.device, extents, stream, begin, time.monotonic() + COPY_DEADLINE_S)

    def copy_pieces(self, pieces: Sequence[Pieces], after: DeviceEvent | None) -> DeviceEvent:
        """Begin one copy between memory of this device and of others that it can access, ordered after ``after``.
        Returns the copy's event, as ``copy`` does."""
        targets, sources, nbytes = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return self._to.copy(targets, sources, nbytes, after=after)

    def wait(self, event: DeviceEvent, memory: Any, deadline_s: float | None = None) -> None:
        """Wait for the event of a copy. If that fails, ``memory`` is kept alive until the event comes.

        Raises:
            DeadlineExceeded: it did not come in time, and still may. The target memory must not be used again.
            DeviceLost: it will not come.
        """
        with self._lock:
            late, self._late = self._late, []
            self._late = [(each, kept) for each, kept in late if not is_over(each)]
        try:
            event.wait(time.monotonic() + COPY_DEADLINE_S if deadline_s is None else deadline_s)
        except DeviceLost:
            raise
        except Unavailable:
            with self._lock:
                self._late.append((event, memory))
            raise

    def upload(self, host: Rows, rows: DeviceRows) -> None:
        """Copy rows of any host memory to the device. Returns when the copy is over."""
        self._bounce(host, rows, to_device=True)

    def download(self, rows: DeviceRows, host: Rows) -> None:
        """Copy rows of the device to the host. Returns when the copy is over."""
        self._bounce(host, rows, to_device=False)

    def _bounce(self, host: Rows, rows: DeviceRows, *, to_device: bool) -> None:
        step = max(1, BOUNCE_BYTES // rows.row_bytes)
        for start in range(0, len(host), step):
            part, theirs = host[start : start + step], rows[start : start + step]
            deadline_s = time.monotonic() + COPY_DEADLINE_S
            with self.bounces.borrow(part.size, deadline_s) as bounce:
                between = bounce.memory[: part.size].reshape(part.shape)
                if to_device:
                    copy(between, part)
                bounce.event = event = self.copy([(between, theirs)], to_device=to_device)
                event.wait(deadline_s)
                if not to_device:
                    copy(part, between)


_links: dict[Device, DeviceLink] = {}
_making = threading.Lock()


def link_of(device: Device) -> DeviceLink:
    """Return the one link of that device in this process. Raises DeviceLost."""
    with _making:
        link = _links.get(device)
        if link is None:
            link = _links[device] = DeviceLink(device)
        return link


def host_rows(buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False) -> Rows:
    """As ``buffers.rows_to_read``; rows in a device's memory are copied to new host memory first."""
    if not on_device(buffer):
        return rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    theirs = device_rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    found: Rows = empty((rows, row_bytes))
    link_of(theirs.device).download(theirs, found)
    return found


def _addresses(rows: Rows) -> Addresses:
    return (rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]).astype(np.uint64)
