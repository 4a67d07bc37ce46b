"""Memory of a GPU: plain allocations, allocations that are mapped page by page, and both as other processes have them.

Other processes of the machine open a plain allocation (``cuMemAlloc``) by the driver's IPC handle. One that the driver
maps (``cuMemCreate``) has no such handle, but a file descriptor, which has to be passed through a socket; and it stays
as long as a process has it mapped, whereas a handle must be closed by all openers before its owner frees the memory.
So memory that is to be shared is mapped, and plain where the driver, or its container, cannot do that.

Mapped memory of other libraries (expandable segments of PyTorch) cannot be exported: it consists of many pieces, and
each of them has to have been made for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from typing import Any, Final

from kvstore.errors import OutOfSpace, Unavailable
from kvstore.tier.cuda_driver import PrimaryContext, call
from kvstore.tier.device import DeviceExport, DeviceLost

HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


class CudaMemory:
    """See ``DeviceMemory``. All of them may be given back from any thread.

    Args:
        undo: calls that give it back, one after the other.
        handle: of memory that is mapped; None: it is plain, or another process's.
    """

    def __init__(
        self, primary: PrimaryContext, address: int, nbytes: int, undo: list[Callable[[], object]], handle: Any = None
    ) -> None:
        self._primary = primary
        self._undo = undo
        self.address, self.nbytes, self.handle = address, nbytes, handle

    def free(self) -> None:
        """See ``DeviceMemory``."""
        undo, self._undo = self._undo, []
        if undo and not self._primary.lost:
            with contextlib.suppress(DeviceLost), self._primary.current():  # it may turn out to be lost
                for each in undo:
                    each()


def plain(primary: PrimaryContext, nbytes: int) -> CudaMemory:
    """An allocation. The context is current here and in each of the next ones. Raises OutOfSpace, DeviceLost."""
    driver = primary.driver
    address = int(call(driver.cuMemAlloc, nbytes))
    return CudaMemory(primary, address, nbytes, [lambda: call(driver.cuMemFree, address)])


def mapped(primary: PrimaryContext, nbytes: int) -> CudaMemory:
    """One that others can be passed a descriptor of. Raises OutOfSpace, DeviceLost; Unavailable where there is none."""
    for needed in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not primary.attribute(needed):
            raise Unavailable(f"cuda: {needed} is not set")
    driver, properties = primary.driver, properties_of(primary)
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    step = int(call(driver.cuMemGetAllocationGranularity, properties, least))
    size = -(-nbytes // step) * step
    handle = call(driver.cuMemCreate, size, properties, 0)
    memory = _at_an_address(primary, handle, size)
    memory.handle = handle
    return memory


def properties_of(primary: PrimaryContext) -> Any:
    """What ``cuMemCreate`` is asked for."""
    driver = primary.driver
    found = driver.CUmemAllocationProp()
    found.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    found.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = primary.ordinal
    if primary.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):  # so that it can be registered with a network card
        found.allocFlags.gpuDirectRDMACapable = 1
    return found


def access_of(primary: PrimaryContext) -> Any:
    """What ``cuMemSetAccess`` is told: this device reads and writes. Reading alone some drivers refuse."""
    driver = primary.driver
    found = driver.CUmemAccessDesc()
    found.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    found.location.id = primary.ordinal
    found.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return found


def exported(primary: PrimaryContext, device: bytes, memory: CudaMemory | None, address: int) -> DeviceExport:
    """See ``Device.export``. ``memory``: the mapped allocation in which that address lies; None: a plain one."""
    driver = primary.driver
    if memory is None:
        base, nbytes = call(driver.cuMemGetAddressRange, address)
        handle = call(driver.cuIpcGetMemHandle, base)
        return DeviceExport(device, address - int(base), int(nbytes), handle_bytes(handle))
    kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    descriptor = int(call(driver.cuMemExportToShareableHandle, memory.handle, kind, 0))
    os.set_inheritable(descriptor, False)
    return DeviceExport(device, address - memory.address, memory.nbytes, b"", descriptor)


def handle_bytes(handle: Any) -> bytes:
    """The bytes of a ``CUipcMemHandle``. Some versions of the package name them, others do not."""
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def handle_of(driver: Any, raw: bytes) -> Any:
    """The ``CUipcMemHandle`` in these bytes."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), raw, HANDLE_BYTES)
    return handle


def opened(primary: PrimaryContext, export: DeviceExport) -> CudaMemory:
    """See ``Device.open_export``."""
    driver = primary.driver
    if export.descriptor >= 0:
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        theirs = call(driver.cuMemImportFromShareableHandle, export.descriptor, kind)
        return _at_an_address(primary, theirs, export.nbytes)
    if len(export.handle) != HANDLE_BYTES:
        raise Unavailable("cuda: the export is not a handle")
    handle = handle_of(driver, export.handle)
    # Where the memory is another device's, this gives the device of the context access to it.
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    base = int(call(driver.cuIpcOpenMemHandle, handle, flags))
    memory = CudaMemory(primary, base, 0, [lambda: call(driver.cuIpcCloseMemHandle, base)])
    try:
        _, size = call(driver.cuMemGetAddressRange, base)
    except Unavailable:
        memory.free()
        raise
    memory.nbytes = int(size)  # of a copy from beyond its end this process would lose its device
    return memory


def _at_an_address(primary: PrimaryContext, handle: Any, size: int) -> CudaMemory:
    """Map an allocation, for this device to read and write. Where that fails the handle is given back."""
    driver = primary.driver
    undo: list[Callable[[], object]] = [lambda: call(driver.cuMemRelease, handle)]
    try:
        address = int(call(driver.cuMemAddressReserve, size, 0, 0, 0))
        undo.append(lambda: call(driver.cuMemAddressFree, address, size))
        call(driver.cuMemMap, address, size, 0, handle, 0)
        undo.insert(0, lambda: call(driver.cuMemUnmap, address, size))
        call(driver.cuMemSetAccess, address, size, [access_of(primary)], 1)
    except (Unavailable, OutOfSpace) as error:
        if not isinstance(error, DeviceLost):
            for each in undo:
                with contextlib.suppress(Unavailable):
                    each()
        raise
    return CudaMemory(primary, address, size, undo)
