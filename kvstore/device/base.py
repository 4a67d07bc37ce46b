"""Device: memory that is not the host's, and copies to and from it.

A device has memory, addressed like host memory, which the host must not touch; streams, each of which works in the
order of its calls; and events, which are over when a stream has reached them. There are two implementations.
``CudaDevice`` in ``cuda`` uses the driver. ``HostDevice`` in ``host_device`` is its peer in host memory, for tests: it
copies as late as it may and in any order that it may, so code that does not wait for an event finds wrong bytes.

Rules for users of a device:

- A copy is done only when an event that was recorded after it is over. Until then the target may hold anything, the
  source must not change, and both must stay allocated (and leased).
- The pieces of one copy are copied in any order. A piece must not overlap another piece's target.
- Streams do not wait for each other. ``DeviceStream.wait`` makes one stream wait for another stream's event.
- Memory of another device can be copied only if ``reach`` allows it. Memory of another process can be copied only if
  the stream's device has opened it (``open_export``).
- A lost device raises ``DeviceLost`` from every call except ``owns``, ``free`` and ``unregister``, which cleanup code
  may still call. It stays lost until the process ends.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class DeviceLost(Unavailable, OSError):
    """The device or its driver failed, and the contents of its memory are lost. Only requests that need the device
    fail."""


class DeviceExport(NamedTuple):
    """What another process on the machine needs to open an allocation of a device.

    Attributes:
        device: the device's ``uuid``.
        offset: where the exported memory begins in the allocation.
        nbytes: of the allocation.
        handle: the driver's handle; b"" if there is a ``descriptor``.
        descriptor: a file descriptor. The holder of this object closes it. -1 if there is a ``handle``.
    """

    device: bytes
    offset: int
    nbytes: int
    handle: bytes
    descriptor: int = -1


class DeviceEvent(Protocol):
    """A point in a stream's work."""

    def over(self) -> bool:
        """Return True if the stream has reached this point. Raises DeviceLost."""
        ...

    def wait(self, deadline_s: float) -> None:
        """Wait until the stream has reached this point. ``deadline_s`` is a time of ``time.monotonic``.

        Raises:
            DeadlineExceeded: the stream has not reached it by then. Its work continues, and may still write.
            DeviceLost: the stream never will.
        """
        ...


class DeviceStream(Protocol):
    """A queue of work. One thread at a time uses it. No call waits for the device."""

    @property
    def handle(self) -> int:
        """The stream's handle for other libraries (``cudaStream_t``), or 0."""
        ...

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy ``nbytes[i]`` from ``sources[i]`` to ``targets[i]``, each in host memory or the device's.

        Host memory that is not registered works too, but takes longer, and may be read or written before this returns.
        The device chooses how pieces are copied (by copy engines, or by a kernel).
        """
        ...

    def wait(self, event: DeviceEvent) -> None:
        """Let later work of this stream begin after the event, which may belong to any stream of the device."""
        ...

    def record(self) -> DeviceEvent:
        """Return an event after all work of the stream so far. Raises InvalidRequest if the stream records a graph."""
        ...


class DeviceMemory(Protocol):
    """A piece of the device's memory, from ``Device.allocate`` until ``free``."""

    @property
    def address(self) -> int:
        """The first address, a multiple of 256."""
        ...

    @property
    def nbytes(self) -> int:
        """The length in bytes."""
        ...

    def free(self) -> None:
        """Free the memory. No stream may have pending work that touches it. May be called twice."""
        ...


class Device(Protocol):
    """See the module. Threads may share it.

    Attributes:
        name: in the user's notation, such as ``cuda:0``.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def uuid(self) -> bytes:
        """16 bytes that identify the device in all processes on the machine. (Processes may number devices
        differently.)"""
        ...

    @property
    def in_use(self) -> bool:
        """True if this process already uses the device. The first use takes memory on the device."""
        ...

    def allocate(self, nbytes: int, *, shared: bool = False) -> DeviceMemory:
        """Allocate memory with undefined contents. Raises OutOfSpace, DeviceLost.

        Args:
            shared: allocate memory that can be shared with other processes, if the device supports that.
        """
        ...

    def export(self, address: int) -> DeviceExport:
        """Export the allocation that contains the address to other processes. Raises Unavailable if it cannot be
        exported."""
        ...

    def open_export(self, export: DeviceExport) -> DeviceMemory:
        """Open another process' entire allocation for copies of this device's streams. ``free`` closes it. The caller
        keeps the descriptor.

        Raises:
            Unavailable: this device cannot reach it, or the export is no longer valid.
        """
        ...

    def reach(self, uuid: bytes) -> str:
        """Let this device's streams copy directly to and from memory of that device. Returns why that is impossible, or
        "". Every device can reach itself."""
        ...

    def owns(self, address: int) -> bool:
        """Return True if the address is in this device's memory. Any library can have allocated it."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pin host memory, so that copies to and from it run in parallel with the host's work. Once per range; the
        range must be populated. A read-only array is registered as read-only. Raises Unavailable if the driver refuses.
        """
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undo ``register``. No stream may have pending work that touches it."""
        ...

    def stream(self) -> DeviceStream:
        """Return a new stream, independent of all others."""
        ...

    def stream_of(self, handle: int) -> DeviceStream:
        """Return another library's stream with this handle. Either side can wait for the other."""
        ...
