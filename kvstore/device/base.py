"""Device: memory that is not the host's, and the ways of bytes to and from it.

A device has memory of its own, addressed like host memory but not to be touched by the host; streams, each of which
does its work in the order in which it was given; and events, which tell when a stream has come to them. Two implement
it: ``CudaDevice`` in ``cuda`` (the driver), and ``HostDevice`` in ``host_device``, a peer in host memory that copies as
late as it may and in any order that it may, so that code that does not wait for an event finds the wrong bytes.

Rules for users of a device:

- A copy has happened once an event that was recorded behind it is over, and not a moment before: until then the target
  holds anything, the source must stay as it is, and both must stay allocated (and leased).
- Pieces of one copy come in any order; a piece must not overlap another's target.
- Streams know nothing of each other. ``DeviceStream.wait`` makes one begin its later work behind another's event.
- Memory of another device, or of another process, is copied from only where ``reach`` says that it can be, or where it
  was opened (``open_export``) by the device whose stream it is.
- A device that was lost raises ``DeviceLost`` from every call but ``owns``, ``free`` and ``unregister``, which
  cleanup code may still call; it never comes back within a process.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class DeviceLost(Unavailable, OSError):
    """The device or its driver failed: what it holds is gone. Fails the requests that needed it, and nothing else."""


class DeviceExport(NamedTuple):
    """By what other processes of the machine open an allocation of a device.

    Attributes:
        device: whose it is (``Device.uuid``).
        offset: where in the allocation lies what was exported.
        nbytes: of the allocation.
        handle: what the driver calls it; b"": ``descriptor`` names it.
        descriptor: a file descriptor, which the holder of this closes; -1: ``handle`` names it.
    """

    device: bytes
    offset: int
    nbytes: int
    handle: bytes
    descriptor: int = -1


class DeviceEvent(Protocol):
    """A place in a stream's work."""

    def over(self) -> bool:
        """Whether the stream has come here. Raises DeviceLost."""
        ...

    def wait(self, deadline_s: float) -> None:
        """Return when it has; ``deadline_s`` is a time of ``time.monotonic``.

        Raises:
            DeadlineExceeded: it has not by then. The work goes on, and may still write.
            DeviceLost: it never will.
        """
        ...


class DeviceStream(Protocol):
    """A queue of work. Used by one thread at a time; no call waits for the device."""

    @property
    def handle(self) -> int:
        """What other libraries know it by (``cudaStream_t``); 0 where there is none."""
        ...

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy ``nbytes[i]`` from ``sources[i]`` to ``targets[i]``, each host memory or the device's, all in one go.

        Host memory that is not registered is copied as well, but may be read or written before this returns, and takes
        longer. Which way the pieces go (a copy engine each, or one kernel) is the device's matter.
        """
        ...

    def wait(self, event: DeviceEvent) -> None:
        """What comes later in this stream begins after that event, of whichever stream of the device."""
        ...

    def record(self) -> DeviceEvent:
        """An event behind all that was given to the stream so far. Raises InvalidRequest: it records a graph."""
        ...


class DeviceMemory(Protocol):
    """A piece of the device's memory, from ``Device.allocate`` until ``free``."""

    @property
    def address(self) -> int:
        """Where it begins; a multiple of 256."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length."""
        ...

    def free(self) -> None:
        """Give it back. No stream may have work left that touches it. Twice is fine."""
        ...


class Device(Protocol):
    """See the module. Threads may share it.

    Attributes:
        name: as a user says it: ``cuda:0``.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def uuid(self) -> bytes:
        """By which every process of the machine knows it, 16 bytes: they number devices as they like."""
        ...

    @property
    def in_use(self) -> bool:
        """Whether anybody in this process uses it: to begin with that costs memory of the device."""
        ...

    def allocate(self, nbytes: int, *, shared: bool = False) -> DeviceMemory:
        """Memory that holds anything. Raises OutOfSpace, DeviceLost.

        Args:
            shared: so that it can be shown to other processes, where the device has a way for that.
        """
        ...

    def export(self, address: int) -> DeviceExport:
        """What other processes open the allocation by in which that address lies. Raises Unavailable: nothing does."""
        ...

    def open_export(self, export: DeviceExport) -> DeviceMemory:
        """An allocation of another process, all of it, for copies of this device's streams. ``free`` closes it. The
        descriptor stays its owner's.

        Raises:
            Unavailable: this device does not reach it, or it is not (any more) what the export says.
        """
        ...

    def reach(self, uuid: bytes) -> str:
        """Have copies of this device's streams go straight to and from memory of that one. Why they cannot; "": they
        do from now on. Every device reaches itself."""
        ...

    def owns(self, address: int) -> bool:
        """Whether memory there is this device's, by whichever library it was allocated."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pin host memory, so that copies to and from it run in parallel with the host's work. Once for a range; it
        must be populated. A read-only array is registered as such. Raises Unavailable where the driver refuses."""
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undo ``register``. No stream may have work left that touches it."""
        ...

    def stream(self) -> DeviceStream:
        """A new stream, independent of all others."""
        ...

    def stream_of(self, handle: int) -> DeviceStream:
        """The stream that another library knows by this handle, to wait for it or to make it wait."""
        ...
