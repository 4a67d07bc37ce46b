"""DeviceLink: the way between host memory and one device: streams, pinned bounces, and pinned segments.

Pages that are mapped go straight from and to their frames, whose memory is pinned when the first of them is copied
(``pins``). All others bounce. There is one link per device and process, made by the first copy.

Pins: extents of a node's segment that are registered with the drivers of devices, in this process.

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
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from kvstore.client.buffers import Rows, rows_to_read
from kvstore.client.device_rows import DeviceRows, device_rows_to_read, on_device
from kvstore.device.base import Addresses, Bytes, Device, DeviceEvent, DeviceLost
from kvstore.device.copies import CopyStream, PinnedBounces
from kvstore.device.host_memory import copy, empty
from kvstore.errors import Unavailable


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


COPY_DEADLINE_S: Final = 10.0
Pieces = tuple[Addresses, Addresses, Addresses]
"""Targets, sources, lengths."""
BOUNCE_BYTES: Final = 8 << 20  # at a time, where a row is not larger


class DeviceLink:
    """See the module. Threads may share it. Lives as long as its device.

    Copies to the device have a stream, and so have those from it: both go on at a time. Layers have one more: they are
    given before they are computed, and whatever is behind them in their stream waits for that.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._to, self._from, self._layers = CopyStream(device), CopyStream(device), CopyStream(device)
        self.bounces = PinnedBounces(device)
        self._lock = threading.Lock()
        self._late: list[tuple[DeviceEvent, Any]] = []  # copies nobody waits for any more, and their memory

    def copy(
        self,
        pairs: Sequence[tuple[Rows, DeviceRows]],
        extents: Sequence[PinnedExtent] = (),
        *,
        to_device: bool,
        layer: bool = False,
    ) -> DeviceEvent:
        """Begin to copy rows of the host to as many of the device, or back, behind what the caller's stream does. The
        event behind it: until it is over nothing has happened, and all of the memory has to stay.

        Args:
            extents: where the host's rows lie, if that is a node's segment.
            layer: nobody waits for it soon.

        Raises:
            Unavailable: see ``PinnedRanges.copy``. Nothing was begun.
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
        """Begin to copy between memory of this device and of others that it reaches, all of it in one go, behind
        ``after``. The event behind it, as of ``copy``."""
        targets, sources, nbytes = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return self._to.copy(targets, sources, nbytes, after=after)

    def wait(self, event: DeviceEvent, memory: Any, deadline_s: float | None = None) -> None:
        """Wait for the event of a copy. Where that fails ``memory`` is kept until it comes.

        Raises:
            DeadlineExceeded: it did not come in time, and still may. What is written to is not to be used again.
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
        """Copy rows of any host memory to as many of the device. Returns when they are there."""
        self._bounce(host, rows, to_device=True)

    def download(self, rows: DeviceRows, host: Rows) -> None:
        """Copy rows of the device to as many of the host. Returns when they are there."""
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
    """The one link of that device in this process. Raises DeviceLost."""
    with _making:
        link = _links.get(device)
        if link is None:
            link = _links[device] = DeviceLink(device)
        return link


def host_rows(buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False) -> Rows:
    """As ``buffers.rows_to_read``; what is in a device's memory comes into new memory of the host first."""
    if not on_device(buffer):
        return rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    theirs = device_rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    found: Rows = empty((rows, row_bytes))
    link_of(theirs.device).download(theirs, found)
    return found


def _addresses(rows: Rows) -> Addresses:
    return (rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]).astype(np.uint64)
