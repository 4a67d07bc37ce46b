"""Memory that the processes of one machine share with each other: exported by its owner, opened by readers.

An engine mounts its memory at the node: ``store.mount(layout, frames, DeviceFrames(device, memory.address, stride,
memory.nbytes))`` shares a page-major arena in ``memory = device.allocate(nbytes, shared=True)``. The segment's records
say how other processes open the memory: a ``kind``, and bytes for that kind. A reader opens it with the row of
``OPENERS``. Memory that cannot be opened is a miss.

Memory of a device is opened by the device's export: a handle of the driver, or a file descriptor, which
``DescriptorServer`` passes through a unix socket in the node's folder. A process that may connect gets the descriptor;
the socket has the mode of the folder's other files.

To open memory of a device, a process needs a context on a device that can reach it, and a context takes some hundred
megabytes of device memory. So the memory is opened only by devices that the process already uses: by one for reads into
host memory, and by each device whose memory is to be filled, if it can reach the memory (``places``).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.device.base import Addresses, Device, DeviceExport
from kvstore.device.cuda import devices_in_use
from kvstore.device.host_memory import copy
from kvstore.errors import DeadlineExceeded, Unavailable
from kvstore.model.replica import FrameClass
from kvstore.model.shard import Strides
from kvstore.safe_files import chmod_socket, open_plain, remove
from kvstore.shm.folder import NodeFolder
from kvstore.shm.mounted import MountedTable, data_path, passing_path
from kvstore.shm.unix_sockets import short
from kvstore.tier.hbm import HbmStore, StridedFrames

HOST: Final = 1  # shared memory: the file next to the records
DEVICE: Final = 3  # memory of a device, by its export; 2 was an earlier form
NO_INCARNATION: Final = 0  # the owner's records prove the pages instead


class PeerMemory(Protocol):
    """The frames of another process' segment. Threads may share it. It is unmapped with the last reference."""

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """Copy pages into ``rows`` ``[pages, page_bytes]``, starting with ``frame``. Returns when the copy is done. The
        caller must check the records before and after.

        Args:
            layer: copy only this layer of each page, into ``[pages, layer_bytes]``.

        Raises:
            Unavailable: the memory or the device is gone or too slow, or the layers are not separate.
        """
        ...

    def places(
        self, device: Device, frame: int, count: int, layer: int | None = None
    ) -> tuple[Addresses, Addresses] | None:
        """Return addresses of these pages' pieces for streams of that device, and their lengths, in the order of the
        pages' bytes. None if the device cannot copy from there; then use ``read``. Keep this object until such a copy
        has ended. Raises Unavailable as ``read``."""
        ...


class SharedFrames:
    """Shared memory that is mapped: see ``PeerMemory``."""

    def __init__(self, memory: npt.NDArray[np.uint8], table: MountedTable) -> None:
        self._memory, self._frames, self._strides = memory, table.frames, table.strides
        self._page_layers = table.frame_class.layers
        self._pages = table.strides.views(memory, table.frames)

    @classmethod
    def open(cls, folder: NodeFolder, table: MountedTable) -> SharedFrames | None:
        """Return None if the file is shorter than the records say, because a read beyond its end would be a SIGBUS."""
        try:
            fd = open_plain(data_path(folder, table.number), os.O_RDONLY)
        except OSError:
            return None
        try:
            nbytes = table.nbytes
            if os.fstat(fd).st_size < nbytes:
                return None
            map_ = mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ)
        except (OSError, ValueError):  # it was truncated
            return None
        finally:
            os.close(fd)
        try:
            return cls(np.frombuffer(map_, np.uint8), table)
        except ValueError:  # pages so large that there are none
            return None

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """See ``PeerMemory``."""
        views = self._pages
        if layer is not None:
            views = layer_of(self._strides, layer, self._page_layers).views(self._memory, self._frames)
        targets = rows.reshape(len(rows), len(views), *views[0].shape[1:])
        for number, pages in enumerate(views):
            copy(targets[:, number], pages[frame : frame + len(rows)])

    def places(
        self, device: Device, frame: int, count: int, layer: int | None = None
    ) -> tuple[Addresses, Addresses] | None:
        """See ``PeerMemory``: host memory cannot be copied from directly by a device."""
        return None


def layer_of(strides: Strides, layer: int, layers: int) -> Strides:
    """Return the strides of one layer of the pages. Raises Unavailable."""
    part = strides.part(layer, layers)
    if part is None:
        raise Unavailable("the layers of that memory are not separate")
    return part


class MountedMemory(Protocol):
    """Memory of this process to be mounted. It must not move while the segment is open.

    Attributes:
        kind: the row of ``OPENERS`` by which other processes read it.
        stride: bytes from one frame to the next, if pages are contiguous.
    """

    @property
    def kind(self) -> int:
        """See the class."""
        ...

    @property
    def stride(self) -> int:
        """See the class."""
        ...

    @property
    def nbytes(self) -> int:
        """The length of the memory in bytes."""
        ...

    def export(self, folder: NodeFolder, number: int) -> bytes:
        """Return the bytes with which other processes open the memory, as the segment ``number``. Raises Unavailable if
        it cannot be shared."""
        ...

    def withdraw(self) -> None:
        """Let no more processes open it: the segment is closed."""
        ...

    def here(self, table: MountedTable) -> PeerMemory:
        """Return the memory as this process reads it."""
        ...


def _open_device(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    """Return the row of ``OPENERS`` for devices. None if the memory cannot be read from here; its pages are misses."""
    try:
        memory = PeerAllocation(folder, table)
    except Unavailable:
        return None
    return DevicePages(memory.device, memory.address, table, memory.address_for)


OPENERS: Final[dict[int, Callable[[NodeFolder, MountedTable], PeerMemory | None]]] = {
    HOST: SharedFrames.open,
    DEVICE: _open_device,
}
"""For each kind of memory, the function that opens it in another process on the machine."""


PASS_S: Final = 0.5  # for one caller, at either end
PAUSE_S: Final = 0.01
LOOK_S: Final = 0.5  # between two checks whether the server was closed

_WORD: Final = b"\1"  # a descriptor is sent with at least one byte


class DescriptorServer:
    """Passes one descriptor, which it owns from now on, to every process that connects. Life: made -> ``close``.

    Raises:
        Unavailable: the socket cannot be made.
    """

    def __init__(self, path: Path, mode: int, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            os.close(descriptor)
            raise Unavailable(f"cannot pass descriptors at {path}: {error.strerror}") from None
        try:
            remove(path)
            with short(path) as name:
                self._listener.bind(name)
            chmod_socket(path, mode)
            self._listener.listen()
        except OSError as error:
            self._listener.close()
            os.close(descriptor)
            raise Unavailable(f"cannot pass descriptors at {path}: {error.strerror}") from None
        self._listener.settimeout(LOOK_S)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kvstore-descriptors", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop passing the descriptor. Processes that have it keep it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            remove(self._path)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2 * PASS_S + LOOK_S)

    def _serve(self) -> None:
        with contextlib.closing(self._listener):
            while not self._closed:
                try:
                    caller, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError:  # it was shut down, or there are too many open files
                    time.sleep(PAUSE_S)
                    continue
                with caller, contextlib.suppress(OSError):  # it has gone, or does not receive
                    caller.settimeout(PASS_S)
                    socket.send_fds(caller, [_WORD], [self._descriptor])
        os.close(self._descriptor)


def receive_descriptor(path: Path) -> int:
    """Receive the descriptor that is passed at ``path``. The caller closes it.

    Raises:
        Unavailable: no descriptor was passed in time.
    """
    deadline_s = time.monotonic() + PASS_S
    try:
        with short(path) as name, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.settimeout(PASS_S)
            server.connect(name)
            server.settimeout(max(deadline_s - time.monotonic(), 0.01))
            _, descriptors, _, _ = socket.recv_fds(server, len(_WORD), 1)
    except OSError as error:
        raise Unavailable(f"no descriptor is passed at {path}: {error.strerror or error}") from None
    if not descriptors:
        raise Unavailable(f"no descriptor is passed at {path}")
    os.set_inheritable(descriptors[0], False)
    return int(descriptors[0])


COPY_S: Final = 5.0  # for one copy of pages from a device to the host

_FORM: Final = struct.Struct(
    "<16sQQ"
)  # UUID of the device, offset in the allocation, length of the allocation; its handle follows

_IN_USE: Final[list[object]] = []  # memory that an abandoned copy may still read


class DeviceFrames:
    """See ``MountedMemory``: frames ``stride`` bytes apart, starting at ``address``, in memory of a device."""

    kind = DEVICE

    def __init__(self, device: Device, address: int, stride: int, nbytes: int) -> None:
        self._device, self._address = device, address
        self.stride, self.nbytes = stride, nbytes
        self._server: DescriptorServer | None = None

    def export(self, folder: NodeFolder, number: int) -> bytes:
        """See ``MountedMemory``."""
        export = self._device.export(self._address)
        if export.descriptor >= 0:
            self._server = DescriptorServer(passing_path(folder, number), folder.file_mode, export.descriptor)
        return _FORM.pack(export.device, export.offset, export.nbytes) + export.handle

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
            # Devices may access each other's plain allocations. Mapped memory is accessible only to its own device.
            return None if mapped or other.reach(device.uuid) else address

        return DevicePages(device, address, table, address_for)


class DevicePages:
    """See ``PeerMemory``: pages in device memory, which ``HbmStore`` copies to the host.

    Args:
        device, address: the device that reads the pages in this process, and their address for it.
        address_for: returns their address for another device; None if it cannot reach them.
    """

    def __init__(
        self, device: Device, address: int, table: MountedTable, address_for: Callable[[Device], int | None]
    ) -> None:
        self._class, self._table = table.frame_class, table
        self._device, self._layers, self._address_for = device, _Layers(table, address), address_for
        arena = StridedFrames(table.frame_class, address, table.frames, table.strides)
        self._store = HbmStore(device, arena, NO_INCARNATION, [(0, table.frame_class)], COPY_S)
        self._layer_hbm: HbmStore | None = None  # made when a layer is read for the first time
        self._mutex = threading.Lock()

    def read(self, frame: int, rows: npt.NDArray[np.uint8], layer: int | None = None) -> None:
        """See ``PeerMemory``."""
        try:
            if layer is None:
                self._store.read_pages(0, frame, self._class, rows)
            else:
                self._layer_store().read_pages(layer, frame, self._layers.frame_class, rows)
        except DeadlineExceeded:
            _IN_USE.append(self)  # the device may still read it, and unmapping it would cost this process the device
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
        with self._mutex:
            if self._layer_hbm is None:
                extents = ((position, layers.frame_class) for position in range(layers.positions))
                self._layer_hbm = HbmStore(self._device, layers, NO_INCARNATION, extents, COPY_S)
            return self._layer_hbm


class PeerAllocation:
    """Another process' allocation, open as long as this object exists. Raises Unavailable if no device of this process
    can read it."""

    def __init__(self, folder: NodeFolder, table: MountedTable) -> None:
        if len(table.export) < _FORM.size:
            raise Unavailable("the export is not memory of a device")
        uuid, self._offset, nbytes = _FORM.unpack_from(table.export)
        if self._offset + table.nbytes > nbytes:  # a copy from beyond its end would cost this process its device
            raise Unavailable("that memory is shorter than its records say")
        self._export = DeviceExport(uuid, self._offset, nbytes, table.export[_FORM.size :])
        self._socket_path: Path = passing_path(folder, table.number)
        self._lock = threading.Lock()
        self._addresses: dict[Device, int | None] = {}
        self.device = self._opener(uuid)
        address = self.address_for(self.device)
        if address is None:
            raise Unavailable(f"{self.device.name} cannot open that memory")
        self.address = address

    def address_for(self, device: Device) -> int | None:
        """Return the address of the memory for that device; None if the device cannot reach it. Each device is tried
        once."""
        with self._lock:
            if device not in self._addresses:
                try:
                    self._addresses[device] = self._open(device) + self._offset
                except Unavailable:
                    self._addresses[device] = None
            return self._addresses[device]

    @staticmethod
    def _opener(uuid: bytes) -> Device:
        """Return the device itself if this process uses it, otherwise a device that can reach it."""
        candidates = devices_in_use()
        candidates.sort(key=lambda device: device.uuid != uuid)
        for device in candidates:
            if not device.reach(uuid):
                return device
        raise Unavailable("no device that this process uses can reach that memory")

    def _open(self, device: Device) -> int:
        export = self._export
        if not export.handle:
            export = export._replace(descriptor=receive_descriptor(self._socket_path))
        try:
            memory = device.open_export(export)
        finally:
            if export.descriptor >= 0:
                os.close(export.descriptor)
        weakref.finalize(self, _close, memory.free).atexit = False
        if memory.nbytes < export.nbytes:
            raise Unavailable("that memory is shorter than its records say")
        return memory.address


def _close(free: Callable[[], None]) -> None:
    with contextlib.suppress(Unavailable):  # the device was lost, and the memory with it
        free()


class _Layers:
    """See ``FrameMap``: each layer of a segment's pages is one position."""

    def __init__(self, table: MountedTable, address: int) -> None:
        pages, frames = table.frame_class, table.frames
        self.frame_class = FrameClass(pages.page_bytes // pages.layers, pages.page_tokens, 1)
        self.positions, self.extent_bytes = pages.layers, frames * self.frame_class.frame_bytes
        self._address, self._frames, self._strides = address, frames, table.strides

    def frames_of(self, frame_class: FrameClass) -> int:
        """See ``FrameMap``."""
        return self._frames if frame_class == self.frame_class else 0

    def pieces(self, position: int, frame: int, frame_class: FrameClass, count: int = 1) -> tuple[Addresses, Addresses]:
        """See ``FrameMap``. Raises Unavailable if the layers are not separate."""
        strides = layer_of(self._strides, position, self.positions)
        return StridedFrames(frame_class, self._address, self._frames, strides).pieces(0, frame, frame_class, count)
