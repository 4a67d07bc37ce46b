"""Copies between host memory and one device, with its streams, pinned bounce buffers and pinned segments.

Mapped pages are copied directly from and to their frames. Their memory is pinned at the first copy. All other memory
goes through a bounce buffer. There is one link per device and process, made by the first copy.

A driver pins the memory behind a range when the range is registered. The node may free the memory of an empty extent,
and a later extent gets other memory at the same range. The driver does not notice that: it would keep using the old
memory, which nothing else maps. But memory is freed only where there is no extent, and no extent number is reused.
So a range is pinned under the number of its extent::

    unknown ──copy of extent n──> pinned under n ──copy of extent m > n──> pinned under m ──the mapping ends──> unknown

All copies that were started under n have ended before the second step. A copy of an earlier extent might start later.
It reads pages that were removed, which their words show. Such a copy never writes, because the extents of reserved and
leased frames stay in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Protocol

import numpy as np

from kvstore.client.buffers import DevicePart, DeviceRows, Rows, device_rows_to_read, on_device, rows_to_read
from kvstore.device import cuda
from kvstore.device.base import Addresses, Bytes, Device, DeviceEvent, DeviceLost
from kvstore.device.copies import CopyStream, PinnedBounces
from kvstore.device.host_memory import copy, empty
from kvstore.errors import Unavailable


class PinnedExtent(Protocol):
    """Memory to pin: ``memory``, a part of a mapping, and the number of its extent."""

    @property
    def number(self) -> int:
        """The extent's number. Later extents at the same range have higher numbers."""
        ...

    @property
    def memory(self) -> Bytes:
        """The extent's range in the segment."""
        ...


class PinnedRanges:
    """The pinned ranges of this process. Threads and devices share them, since a driver registers a range for all its
    devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held from the check of a range until its copy has an event
        self._ranges: dict[int, _Range] = {}  # by start address

    def copy(
        self,
        device: Device,
        extents: Collection[PinnedExtent],
        stream: object,
        begin: Callable[[], DeviceEvent],
        deadline_s: float,
    ) -> DeviceEvent:
        """Begin a copy in ``stream`` of ``device`` from or to these extents, and return its event. Their memory is
        pinned first, if the driver can do so. ``begin`` starts the copy and returns its event.

        Raises:
            DeadlineExceeded: a range must be registered again, and an older copy there has not ended. Nothing was
                started.
            Unavailable: such a range cannot be unregistered. Nothing was started.
            DeviceLost: the device has failed. ``begin`` may raise other errors.
        """
        while True:
            with self._lock:
                pairs = [(self._range(extent.memory), extent) for extent in extents]
                event = next(filter(None, (span.copy_in_progress(extent.number) for span, extent in pairs)), None)
                if event is None:
                    for span, extent in pairs:
                        span.pin(device, extent)
                    event = begin()
                    for span, _ in pairs:
                        span.last[stream] = event
                    return event
            with contextlib.suppress(DeviceLost):  # the copy has ended then as well
                event.wait(deadline_s)

    def _range(self, memory: Bytes) -> _Range:
        start = memory.ctypes.data
        span = self._ranges.get(start)
        if span is None:
            span = self._ranges[start] = _Range(start, memory.nbytes)
            weakref.finalize(memory.base, self._unmapped, start).atexit = False
        return span

    def _unmapped(self, start: int) -> None:
        """Note that a mapping has ended. Takes no lock, because garbage collection may call it anywhere."""
        span = self._ranges.pop(start, None)
        if span is not None:
            span.unpin()


class _Range:
    """A range of memory that holds one extent after another.

    Attributes:
        last: stream -> event of its last copy in this range. The event comes after all earlier copies of the stream.
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self.last: dict[object, DeviceEvent] = {}
        self._start, self._nbytes = start, nbytes
        self._number = -1
        self._pinned: dict[Device, bool] = {}  # False: the driver refused, and is not called again

    def copy_in_progress(self, number: int) -> DeviceEvent | None:
        """Return the event of a copy that must end before extent ``number`` is pinned here."""
        if number <= self._number:
            return None
        return next((event for event in self.last.values() if not is_over(event)), None)

    def pin(self, device: Device, extent: PinnedExtent) -> None:
        """Register the extent once per device. If the driver refuses, copies are slower."""
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
        # Does not keep the memory alive, because this is also called when the mapping ends.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * self._nbytes).from_address(self._start))
        for device, pinned in list(self._pinned.items()):
            if pinned:
                with contextlib.suppress(DeviceLost):
                    device.unregister(memory)
            del self._pinned[device]
        self.last.clear()


def is_over(event: DeviceEvent) -> bool:
    """Return whether all work before this event has ended."""
    try:
        return event.over()
    except DeviceLost:
        return True


PINNED: Final = PinnedRanges()


COPY_DEADLINE_S: Final = 10.0
Pieces = tuple[Addresses, Addresses, Addresses]
"""Targets, sources, lengths."""
BOUNCE_BYTES: Final = 8 << 20  # bytes per step, or one row if that is larger


class DeviceLink:
    """The copies of one device, for any number of threads. The link exists as long as its device.

    Copies to the device and copies from the device have separate streams, so both run at the same time. Copies of
    layers have a third stream: they are queued before the layer is computed, and everything queued after them waits for
    it.
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
        """Begin to copy rows between host and device, after the work in the caller's stream. Return the copy's event.
        Until the event has come, the copy may be incomplete, and the memory of both sides must stay allocated.

        Args:
            extents: the extents with the host's rows, if these are in a node's segment.
            layer: the rows are a layer from a writer, and the caller does not wait for them soon.

        Raises:
            Unavailable: see ``PinnedRanges.copy``. Nothing was started.
        """
        host_addresses, device_addresses, sizes = [], [], []
        for host, rows in pairs:
            assert host.shape == (rows.rows, rows.row_bytes) and host.strides[1] == 1
            is_whole = rows.stride == host.strides[0] == rows.row_bytes  # one piece instead of one per row
            host_addresses.append(np.array([host.ctypes.data], np.uint64) if is_whole else _addresses(host))
            device_addresses.append(rows.addresses[:1] if is_whole else rows.addresses)
            sizes.append(np.full(len(host_addresses[-1]), host.nbytes if is_whole else rows.row_bytes, np.uint64))
        hosts, devices, nbytes = (np.concatenate(column) for column in (host_addresses, device_addresses, sizes))
        pieces = (devices, hosts, nbytes) if to_device else (hosts, devices, nbytes)
        stream = self._layers if layer else self._to if to_device else self._from
        return self._begin(stream, pieces, extents, pairs[0][1].ready())

    def copy_parts(
        self,
        parts: Collection[DevicePart],
        pieces: Pieces,
        extents: Collection[PinnedExtent],
        *,
        to_device: bool,
    ) -> DeviceEvent:
        """Begin to copy pieces of these parts, after the work in the stream of each part. Return the copy's event.
        Otherwise like ``copy``."""
        streams = {part.stream for part in parts if part.stream is not None}
        after = [self.device.stream_of(handle).record() for handle in streams]
        return self._begin(self._to if to_device else self._from, pieces, extents, *after)

    def _begin(
        self, stream: CopyStream, pieces: Pieces, extents: Collection[PinnedExtent], *after: DeviceEvent | None
    ) -> DeviceEvent:
        """Begin a copy in ``stream`` after the events ``after``. Return its event."""
        begin = partial(stream.copy, *pieces, *after)
        if not extents:
            return begin()
        return PINNED.copy(self.device, extents, stream, begin, time.monotonic() + COPY_DEADLINE_S)

    def copy_pieces(self, pieces: Sequence[Pieces], after: DeviceEvent | None) -> DeviceEvent:
        """Begin one copy between memory of this device and of others that it can access, after the event ``after``.
        Return the copy's event, as ``copy`` does."""
        targets, sources, nbytes = (np.concatenate(column) for column in zip(*pieces, strict=True))
        return self._to.copy(targets, sources, nbytes, after)

    def wait(self, event: DeviceEvent, memory: Any, deadline_s: float | None = None) -> None:
        """Wait for the event of a copy. If it does not come in time, ``memory`` is kept alive until it comes.

        Raises:
            DeadlineExceeded: the event did not come in time, and may still come. The target memory must never be
                reused.
            DeviceLost: the event will not come.
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
        """Copy rows of any host memory to the device. Returns when the copy has ended."""
        self._bounce(host, rows, to_device=True)

    def download(self, rows: DeviceRows, host: Rows) -> None:
        """Copy rows of the device to the host. Returns when the copy has ended."""
        self._bounce(host, rows, to_device=False)

    def _bounce(self, host: Rows, rows: DeviceRows, *, to_device: bool) -> None:
        step = max(1, BOUNCE_BYTES // rows.row_bytes)
        for start in range(0, len(host), step):
            part, device_rows = host[start : start + step], rows[start : start + step]
            deadline_s = time.monotonic() + COPY_DEADLINE_S
            with self.bounces.borrow(part.size, deadline_s) as bounce:
                pinned = bounce.memory[: part.size].reshape(part.shape)
                if to_device:
                    copy(pinned, part)
                bounce.event = event = self.copy([(pinned, device_rows)], to_device=to_device)
                event.wait(deadline_s)
                if not to_device:
                    copy(part, pinned)


_links: dict[Device, DeviceLink] = {}
_making = threading.Lock()


def link_of(device: Device) -> DeviceLink:
    """Return the one link of that device in this process. Raises DeviceLost."""
    with _making:
        link = _links.get(device)
        if link is None:
            link = _links[device] = DeviceLink(device)
        return link


class DeviceCopies:
    """Copies between host memory and parts in device memory. ``add`` collects them, and ``finish`` makes them, with one
    call for each device."""

    def __init__(self, *, to_device: bool) -> None:
        self._to_device = to_device
        self._by_device: dict[Device, tuple[list[DevicePart], list[int], list[int], list[int]]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_device)

    def add(self, part: DevicePart, start: int, host_address: int, nbytes: int) -> None:
        """Add a copy of ``nbytes`` between ``host_address`` and byte ``start`` of a part."""
        parts, devices, hosts, sizes = self._by_device.setdefault(part.device, ([], [], [], []))
        parts.append(part)
        devices.append(part.address + start)
        hosts.append(host_address)
        sizes.append(nbytes)

    def finish(self, extents: Collection[PinnedExtent]) -> None:
        """Make the copies, and return when they have ended. One device copies after the other, so if a copy fails, no
        other copy is in progress.

        Args:
            extents: the extents with the host's side of all copies.

        Raises:
            DeviceLost, DeadlineExceeded: see ``DeviceLink.wait``.
            InvalidRequest: the stream of a part records a graph.
        """
        for device, (parts, *addresses) in self._by_device.items():
            link = link_of(device)
            devices, hosts, nbytes = (np.array(column, np.uint64) for column in addresses)
            pieces = (devices, hosts, nbytes) if self._to_device else (hosts, devices, nbytes)
            event = link.copy_parts(parts, pieces, extents, to_device=self._to_device)
            link.wait(event, (parts, extents))


def pin(memory: Rows) -> Callable[[], None] | None:
    """Register host memory with the driver, if this process uses a device. Return a function that undoes it, and keeps
    the memory alive; None if nothing was registered."""
    for device in cuda.devices_in_use():
        try:
            device.register(memory)
        except Unavailable:  # for example, the program has registered the memory itself
            return None
        return partial(_unpin, device, memory)
    return None


def _unpin(device: Device, memory: Rows) -> None:
    with contextlib.suppress(Unavailable):  # the driver unregisters the memory when the process ends
        device.unregister(memory)


def host_rows(buffer: Any, row_bytes: int, rows: int, field: str = "pages", *, apart: bool = False) -> Rows:
    """Return ``buffer`` as ``buffers.rows_to_read`` does. Rows in device memory are first copied to new host memory."""
    if not on_device(buffer):
        return rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    source = device_rows_to_read(buffer, row_bytes, rows, field, apart=apart)
    host: Rows = empty((rows, row_bytes))
    link_of(source.device).download(source, host)
    return host


def _addresses(rows: Rows) -> Addresses:
    return (rows.ctypes.data + np.arange(len(rows), dtype=np.int64) * rows.strides[0]).astype(np.uint64)
