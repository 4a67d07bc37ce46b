"""Device: memory that is not the host's, and the ways of bytes to and from it.

A device has memory of its own, addressed like host memory but not to be touched by the host; streams, each of which
does its work in the order in which it was given; and events, which tell when a stream has come to them. Two implement
it: ``CudaDevice`` in ``cuda`` (the driver), and ``HostDevice`` in ``host_device``, a peer in host memory that copies as
late as it may and in any order that it may, so that whoever does not wait for an event finds the wrong bytes.

Rules for whoever uses one:

- A copy has happened once an event that was recorded behind it is over, and not a moment before: until then the target
  holds anything, the source must stay as it is, and both must stay allocated (and leased).
- Pieces of one copy come in any order; a piece must not overlap another's target.
- Streams know nothing of each other. ``DeviceStream.wait`` makes one begin its later work behind another's event.
- A device that was lost raises ``DeviceLost`` from every call but ``owns``, ``free`` and ``unregister``, which whoever
  gives things back may still call; it never comes back within a process.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable

Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class DeviceLost(Unavailable, OSError):
    """The device or its driver failed: what it holds is gone. Fails the requests that needed it, and nothing else."""


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
    """A queue of work. Of one thread at a time; no call waits for the device."""

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
        """An event behind all that was given to the stream so far."""
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

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Memory that holds anything. Raises OutOfSpace, DeviceLost."""
        ...

    def owns(self, address: int) -> bool:
        """Whether memory there is this device's, by whichever library it was allocated."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pin host memory, so that copies to and from it run beside the host's work. Once for a range; it must be
        populated. A read-only array is registered as such. Raises Unavailable where the driver refuses."""
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undo ``register``. No stream may have work left that touches it."""
        ...

    def stream(self) -> DeviceStream:
        """A stream of our own, beside all others."""
        ...

    def stream_of(self, handle: int) -> DeviceStream:
        """The stream that another library knows by this handle, to wait for it or to make it wait."""
        ...
