"""A device's memory, to be mounted: for tests of who reads it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore.device import cuda
from kvstore.device.base import Addresses, Device, DeviceMemory
from kvstore.device.host_device import HostDevice
from kvstore.tier.peer_memory import DeviceFrames
from tests.helpers.content import SMALL

STRIDE = SMALL.page_bytes + 512


def shown(device: Device, memory: DeviceMemory) -> DeviceFrames:
    """Frames ``STRIDE`` bytes apart, in memory that others open."""
    return DeviceFrames(device, memory.address, STRIDE, memory.nbytes)


def device_named(name: str) -> Device:
    """A GPU of this machine, or a peer of one in host memory."""
    if name.startswith("host:"):
        return HostDevice(name)
    return next(device for device in cuda.find().devices if device.name == name)


def fill_frames(
    device: Device, memory: DeviceMemory, frames: Sequence[int], pages: npt.NDArray[np.uint8], stride: int = STRIDE
) -> None:
    """Have these pages in these frames when it returns."""
    _copy(device, memory.address + np.array(frames, np.uint64) * np.uint64(stride), _rows(pages), pages.shape[1])


def frames_of(device: Device, memory: DeviceMemory, count: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """What is in the first frames, which lie end to end."""
    found = np.empty((count, nbytes), np.uint8)
    places = memory.address + np.arange(count, dtype=np.uint64) * np.uint64(nbytes)
    _copy(device, _rows(found), places, nbytes)
    return found


def _rows(pages: npt.NDArray[np.uint8]) -> Addresses:
    assert pages.flags.c_contiguous
    return pages.ctypes.data + np.arange(len(pages), dtype=np.uint64) * np.uint64(pages.shape[1])


def _copy(device: Device, targets: Addresses, sources: Addresses, nbytes: int) -> None:
    stream = device.stream()
    stream.copy(targets.astype(np.uint64), sources.astype(np.uint64), np.full(len(targets), nbytes, np.uint64))
    stream.record().wait(time.monotonic() + 30)
