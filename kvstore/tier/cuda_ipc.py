"""Memory of a GPU that other processes of the machine read: the driver's handles for plain allocations.

A handle names a whole allocation (of ``cuMemAlloc``). So what is shown is its handle, the place in it, and the device
by its UUID: processes number the devices that they see as they like. Memory that was mapped page by page (``cuMemMap``,
as expandable segments of PyTorch are) has no such handle, and the driver refuses.

Whoever opens a handle needs a context on that device, which takes some hundred megabytes of it. So it is opened only
where this process uses the device already.
"""

from __future__ import annotations

import struct
import weakref
from typing import Final

from kvstore.errors import Unavailable
from kvstore.tier.cuda import CudaDevice, find
from kvstore.tier.cuda_driver import absent, begin, call

_FORM: Final = struct.Struct("<16sQ64s")  # UUID of the device, place in the allocation, handle


def exported(device: CudaDevice, address: int) -> bytes:
    """What another process opens this memory by. Raises Unavailable where the driver has no handle for it."""
    driver = begin()
    with device.current():
        base, _ = call(driver.cuMemGetAddressRange, address)
        handle = call(driver.cuIpcGetMemHandle, base)
    return _FORM.pack(device.uuid, address - int(base), bytes(handle.reserved))


class PeerAllocation:
    """Memory of another process, open until this is dropped.

    Attributes:
        device: whose memory it is.
        address: where it lies for this process.
    """

    def __init__(self, export: bytes, nbytes: int) -> None:
        """Raises Unavailable: it cannot be read from here, or has not so many bytes. (A copy from beyond its end would
        cost this process its device.)"""
        if why := absent():
            raise Unavailable(why)
        if len(export) != _FORM.size:
            raise Unavailable("cuda: that is no handle")
        uuid, offset, raw = _FORM.unpack(export)
        driver = begin()
        device = next((device for device in find().devices if device.uuid == uuid and device.in_use), None)
        if device is None:
            raise Unavailable("cuda: this process does not use that device")
        handle = driver.CUipcMemHandle()
        handle.reserved = raw
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        with device.current():
            base = call(driver.cuIpcOpenMemHandle, handle, flags)
            _, size = call(driver.cuMemGetAddressRange, base)
        self.device, self.address = device, int(base) + offset
        weakref.finalize(self, device.close_peer, base).atexit = False
        if offset + nbytes > int(size):
            raise Unavailable("cuda: that memory is not as long as it is said to be")
