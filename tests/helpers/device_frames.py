"""A device's memory, to be mounted: for tests of who reads it."""

from __future__ import annotations

from kvstore.tier.host_device import HostDevice
from kvstore.tier.host_device_memory import HostMemory
from kvstore.transfer.device_memory import DeviceFrames
from tests.helpers.content import SMALL

STRIDE = SMALL.page_bytes + 512


def shown(device: HostDevice, memory: HostMemory) -> DeviceFrames:
    """Frames ``STRIDE`` bytes apart, in memory that others open by a descriptor."""
    return DeviceFrames(device, memory.address, STRIDE, memory.nbytes)
