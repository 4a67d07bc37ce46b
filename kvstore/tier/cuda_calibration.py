"""Measuring on a device which pieces go faster by a kernel than by its engines: once, when it is opened."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import numpy as np

from kvstore.errors import DeadlineExceeded, OutOfSpace, Unavailable
from kvstore.tier.cuda_copies import Way, threshold
from kvstore.tier.cuda_driver import DriverError
from kvstore.tier.device import Addresses, Bytes, Device, DeviceLost, DeviceStream
from kvstore.tier.host_memory import empty

LENGTHS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)  # of pieces that are tried
MEASURED_BYTES: Final = 8 << 20  # of one copy
REPEATS: Final = 3  # the fastest counts
DEADLINE_S: Final = 10.0  # for one of them

Pieces = tuple[Addresses, Addresses, Addresses]  # targets, sources, lengths
_STAYING: Final[list[Bytes]] = []  # what a device that hangs may still write to


class TriedStream(DeviceStream, Protocol):
    """A stream that copies either way."""

    def copy_by_kernel(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """By a kernel."""
        ...

    def copy_by_engines(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """By the copy engines."""
        ...


def calibrate(device: Device, stream: TriedStream) -> Mapping[Way, int]:
    """Below which length pieces go by the kernel. Where there is no memory to measure with, none do.

    Raises:
        DeviceLost: the device does not copy.
    """
    host = empty(2 * MEASURED_BYTES)
    host[:] = 0  # what is registered has to be there
    try:
        memory = device.allocate(4 * MEASURED_BYTES)
    except OutOfSpace:
        return dict.fromkeys(Way, 0)
    try:
        device.register(host)
    except (OutOfSpace, DriverError):
        memory.free()
        return dict.fromkeys(Way, 0)
    ends = {
        Way.TO_DEVICE: (memory.address, host.ctypes.data),
        Way.TO_HOST: (host.ctypes.data, memory.address),
        Way.WITHIN: (memory.address, memory.address + 2 * MEASURED_BYTES),
    }
    try:
        found = {way: _measured(stream, *ends[way]) for way in Way}
    except DeadlineExceeded as error:
        _STAYING.append(host)
        raise DeviceLost(str(error)) from None
    except DeviceLost:
        raise
    except Unavailable:  # the kernel cannot reach registered memory here
        found = dict.fromkeys(Way, 0)
    device.unregister(host)
    memory.free()
    return found


def pieces(target: int, source: int, length: int) -> Pieces:
    """As many pieces of that length as are measured at once: every other one of what lies at either end."""
    offsets = np.arange(MEASURED_BYTES // length, dtype=np.uint64) * np.uint64(2 * length)
    return np.uint64(target) + offsets, np.uint64(source) + offsets, np.full(len(offsets), length, np.uint64)


def _measured(stream: TriedStream, target: int, source: int) -> int:
    """The threshold of one way."""
    tried = [pieces(target, source, length) for length in LENGTHS]
    kernel_s = [_fastest(stream, stream.copy_by_kernel, each) for each in tried]
    engines_s = [_fastest(stream, stream.copy_by_engines, each) for each in tried]
    return threshold(LENGTHS, kernel_s, engines_s)


def _fastest(stream: DeviceStream, copy: Callable[[Addresses, Addresses, Addresses], None], each: Pieces) -> float:
    """Seconds of the fastest of some copies; the first of all is not counted."""
    seconds = []
    for _ in range(1 + REPEATS):
        begun_s = time.perf_counter()
        copy(*each)
        stream.record().wait(time.monotonic() + DEADLINE_S)
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds[1:])
