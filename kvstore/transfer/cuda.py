"""Memory of GPUs between processes of one machine: mounted by one, read by the others through the driver's handles.

``store.mount(layout, frames, CudaFrames(device, memory.address, stride, memory.nbytes))`` shows a page-major arena. Has
never run on a GPU.
"""

from __future__ import annotations

from kvstore.errors import Unavailable
from kvstore.tier.cuda import CudaDevice
from kvstore.tier.cuda_ipc import PeerAllocation, exported
from kvstore.tier.folder import NodeFolder
from kvstore.tier.mounted import MountedTable
from kvstore.transfer.exported import CUDA, DevicePages, PeerMemory


class CudaFrames:
    """See ``MountedMemory``: a plain allocation of a GPU, with frames ``stride`` bytes apart from ``address`` on."""

    kind = CUDA

    def __init__(self, device: CudaDevice, address: int, stride: int, nbytes: int) -> None:
        self._device, self._address = device, address
        self.stride, self.nbytes = stride, nbytes

    def export(self) -> bytes:
        """See ``MountedMemory``."""
        return exported(self._device, self._address)

    def here(self, table: MountedTable) -> PeerMemory:
        """See ``MountedMemory``."""
        return DevicePages(self._device, self._address, table)


class PeerPages(DevicePages):
    """See ``PeerMemory``: pages of another process, open as long as this is."""

    def __init__(self, allocation: PeerAllocation, table: MountedTable) -> None:
        super().__init__(allocation.device, allocation.address, table)
        self._allocation = allocation


def opened(folder: NodeFolder, table: MountedTable) -> PeerMemory | None:
    """The row of ``OPENERS``; None where it cannot be read from here: what is there is a miss."""
    try:
        return PeerPages(PeerAllocation(table.export, table.nbytes), table)
    except Unavailable:
        return None
