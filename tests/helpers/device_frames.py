"""A device's memory, to be mounted: for tests of who reads it."""

from __future__ import annotations

from kvstore.tier.host_device import HostDevice, HostMemory
from kvstore.tier.mounted import MountedTable
from kvstore.transfer.exported import CUDA, DevicePages, PeerMemory
from tests.helpers.content import SMALL

STRIDE = SMALL.page_bytes + 512


class DeviceFrames:
    """See ``MountedMemory``: a device that copies as late as it may."""

    kind = CUDA
    stride = STRIDE

    def __init__(self, device: HostDevice, memory: HostMemory) -> None:
        self._device, self._memory = device, memory
        self.nbytes = memory.nbytes

    def export(self) -> bytes:
        return b"no handle of any driver"

    def here(self, table: MountedTable) -> PeerMemory:
        return DevicePages(self._device, self._memory.address, table)
