"""Memory of devices between processes of one machine: mounted by one, read by the others.

``store.mount(layout, frames, DeviceFrames(device, memory.address, stride, memory.nbytes))`` shows a page-major arena
in ``memory = device.allocate(nbytes, shared=True)``. Other processes open it by what the device exports: a handle of
its driver, or a descriptor, which its owner passes them (``descriptors``).

A process that opens memory needs a context on a device that reaches it, which takes some hundred megabytes of that. So
it is opened only by devices that this process uses already: by one for reads into host memory, and by each other one
whose memory is to be filled, where that reaches it (``places``).
"""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.model.replica import FrameClass
from kvstore.tier.device import Addresses, Device, DeviceExport
from kvstore.tier.devices import devices
from kvstore.tier.folder import NodeFolder
from kvstore.tier.hbm import HbmStore, StridedFrames
from kvstore.tier.mounted import MountedTable, passing_path
from kvstore.transfer.descriptors import DescriptorServer, received
from kvstore.transfer.exported import DEVICE, NO_INCARNATION, PeerMemory, layer_of

COPY_S: Final = 5.0  # for pages of a device that are on their way to the host at a time

_FORM: Final = struct.Struct("<16sQQ")  # UUID of the device, place in the allocation, its length; its handle follows

_LATE: Final[list[object]] = []  # memory that a copy may still read, which nobody waits for any more


class DeviceFrames:
    """See ``MountedMemory``: frames ``stride`` bytes apart, from ``address`` on, in memory of a device."""

    kind = DEVICE

    def __init__(self, device: Device, address: int, stride: int, nbytes: int) -> None:
        self._device, self._address = device, address
        self.stride, self.nbytes = stride, nbytes
        self._server: DescriptorServer | None = None

    def export(self, folder: NodeFolder, number: int) -> bytes:
        """See ``MountedMemory``."""
        found = self._device.export(self._address)
        if found.descriptor >= 0:
            self._server = DescriptorServer(passing_path(folder, number), folder.file_mode, found.descriptor)
        return _FORM.pack(found.device, found.offset, found.nbytes) + found.handle

    def withdraw(self) -> None:
        """See ``MountedMemory``."""
        if self._server is not None:
            self._server.close()

    def here(self, table: MountedTable) -> PeerMemory:
        """See ``MountedMemory``."""
        device, address, mapped = self._device, self._address, self._server is not None

        def address_for(other: Device) -> int | None:
            if other is device:
                return address
            # Access between devices is to plain allocations: what is mapped is there for whom it was mapped alone.
            return None if mapped or other.reach(device.uuid) else address

        return DevicePages(device, address, table, address_for)


class DevicePages:
    """See ``PeerMemory``: pages that come to the host as they come out of every store of a device's memory.

    Args:
        device, address: by which this process reads them, and where it has them.
        address_for: where another device has them; None: it does not reach them.
    """

    def __init__(
        self, device: Device, address: int, table: MountedTable, address_for: Callable[[Device], int | None]
    ) -> None:
        self._class, self._table = table.frame_class, table
        self._device, self._layers, self._address_for = device, _Layers(table, address), address_for
        arena = StridedFrames(table.frame_class, address, table.frames, table.strides)
        self._store = HbmStore(device, arena, NO_INCARNATION, [(0, table.frame_class)], COPY_S)
        self._by_layer: HbmStore | None = None  # made when first a layer is read
        self._making = threading.Lock()

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """See ``PeerMemory``."""
        try:
            if layer is None:
                self._store.read_pages(0, frame, self._class, rows)
            else:
                self._layer_store().read_pages(layer, frame, self._layers.frame_class, rows)
        except DeadlineExceeded:
            _LATE.append(self)  # to unmap what a device still reads would cost this process the device
            raise

    def places(
        self, device: Device, frame: int, count: int, layer: int | None = None
    ) -> tuple[Addresses, Addresses] | None:
        """See ``PeerMemory``."""
        address = self._address_for(device)
        if address is None:
            return None
        strides = self._table.strides
        if layer is not None:
            strides = layer_of(strides, layer, self._class.layers)
        frame_class = self._class if layer is None else self._layers.frame_class
        arena = StridedFrames(frame_class, address, self._table.frames, strides)
        return arena.pieces(0, frame, frame_class, count)

    def _layer_store(self) -> HbmStore:
        layers = self._layers
        with self._making:
            if self._by_layer is None:
                carved = ((position, layers.frame_class) for position in range(layers.positions))
                self._by_layer = HbmStore(self._device, layers, NO_INCARNATION, carved, COPY_S)
            return self._by_layer


class PeerAllocation:
    """Memory of another process, open as long as this is. Raises Unavailable where no device of ours reads it."""

    def __init__(self, folder: NodeFolder, table: MountedTable) -> None:
        if len(table.export) < _FORM.size:
            raise Unavailable("the export is not memory of a device")
        uuid, self._offset, nbytes = _FORM.unpack_from(table.export)
        if self._offset + table.nbytes > nbytes:  # to copy from beyond its end would cost this process its device
            raise Unavailable("that memory is not as long as it is said to be")
        self._export = DeviceExport(uuid, self._offset, nbytes, table.export[_FORM.size :])
        self._passing: Path = passing_path(folder, table.number)
        self._lock = threading.Lock()
        self._opened: dict[Device, int | None] = {}
        self.device = self._opener(uuid)
        address = self.address_for(self.device)
        if address is None:
            raise Unavailable(f"{self.device.name} cannot open that memory")
        self.address = address

    def address_for(self, device: Device) -> int | None:
        """Where that device has what was exported; None: it does not reach it. It is asked once."""
        with self._lock:
            if device not in self._opened:
                try:
                    self._opened[device] = self._open(device) + self._offset
                except Unavailable:
                    self._opened[device] = None
            return self._opened[device]

    @staticmethod
    def _opener(uuid: bytes) -> Device:
        """The device itself, where this process uses it; else one that reaches it."""
        used = [device for device in devices() if device.in_use]
        used.sort(key=lambda device: device.uuid != uuid)
        for device in used:
            if not device.reach(uuid):
                return device
        raise Unavailable("no device that this process uses reaches that memory")

    def _open(self, device: Device) -> int:
        export = self._export
        if not export.handle:
            export = export._replace(descriptor=received(self._passing))
        try:
            memory = device.open_export(export)
        finally:
            if export.descriptor >= 0:
                os.close(export.descriptor)
        weakref.finalize(self, _close, memory.free).atexit = False
        if memory.nbytes < export.nbytes:
            raise Unavailable("that memory is not as long as it is said to be")
        return memory.address


def opened(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    """The row of ``OPENERS``; None where it cannot be read from here: what is there is a miss."""
    try:
        found = PeerAllocation(folder, table)
    except Unavailable:
        return None
    return DevicePages(found.device, found.address, table, found.address_for)


def _close(free: Callable[[], None]) -> None:
    with contextlib.suppress(Unavailable):  # the device was lost, and the memory with it
        free()


class _Layers:
    """See ``FrameMap``: of a segment's pages each layer is one position."""

    def __init__(self, table: MountedTable, address: int) -> None:
        whole, frames = table.frame_class, table.frames
        self.frame_class = FrameClass(whole.page_bytes // whole.layers, whole.page_tokens, 1)
        self.positions, self.extent_bytes = whole.layers, frames * self.frame_class.frame_bytes
        self._address, self._frames, self._strides = address, frames, table.strides

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self._frames if frame_class == self.frame_class else 0

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``. Raises Unavailable where the layers do not lie apart."""
        strides = layer_of(self._strides, position, self.positions)
        return StridedFrames(frame_class, self._address, self._frames, strides).pieces(0, frame, frame_class, count)
