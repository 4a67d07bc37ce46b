"""The memory of ``FakeDriver``: of its device, of the host where it is registered, and such as is mapped by a file."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any, Final

import numpy as np
from cuda.bindings import driver as package

from kvstore.device.host_device import HostDevice, HostMemory, check_mapped
from kvstore.errors import OutOfSpace

SEEN_AT: Final = 1 << 48  # so much further the device sees registered memory
STEP: Final = 2 << 20  # of mapped memory

RESULT: Final = package.CUresult
INVALID: Final = RESULT.CUDA_ERROR_INVALID_VALUE
_DEVICE: Final = package.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED: Final = 0x10


class Refused(Exception):
    """A call that ends with an error."""

    def __init__(self, code: Any) -> None:
        self.code = code


class _Reserved(HostMemory):
    """Addresses, behind which allocations are mapped."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.nbytes, self.descriptor, self.theirs, self.live = nbytes, -1, False, False

    def show(self, descriptor: int) -> None:
        """Have this file's bytes here, or with -1 nobody's."""
        flags = _MAP_FIXED | (mmap.MAP_SHARED if descriptor >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found = _LIBC.mmap(self.address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
        assert found == self.address


class FakeMemory:
    """That part of the driver.

    Attributes:
        device: what carries the calls out.
        reads_only: whether memory that is mapped read-only can be registered.
        registered: by address, the length and flags of host memory.
    """

    def __init__(self, seed: int) -> None:
        self.device = HostDevice("fake:0", seed=seed)
        self.reads_only = True
        self.registered: dict[int, tuple[int, int]] = {}
        self._numbers = iter(range(0x5000, 1 << 30))  # handles
        self._plain: dict[int, HostMemory] = {}
        self._reserved: dict[int, _Reserved] = {}
        self._files: dict[int, tuple[int, int]] = {}  # of allocations to map, by their handle: descriptor, bytes

    def _cuMemAlloc(self, nbytes: int) -> tuple[Any]:
        try:
            memory = self.device.allocate(nbytes)
        except OutOfSpace:
            raise Refused(RESULT.CUDA_ERROR_OUT_OF_MEMORY) from None
        self._plain[memory.address] = memory
        return (package.CUdeviceptr(memory.address),)

    def _cuMemFree(self, address: int) -> None:
        found(self._plain, address).free()
        self._plain.pop(address)

    def _cuPointerGetAttribute(self, attribute: Any, address: int) -> tuple[int]:
        kinds = package.CUmemorytype
        if self.device.owns(address):
            kind = kinds.CU_MEMORYTYPE_DEVICE
        elif any(start <= address < start + nbytes for start, (nbytes, _) in self.registered.items()):
            kind = kinds.CU_MEMORYTYPE_HOST
        else:
            raise Refused(INVALID)
        asked = attribute == package.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return (int(kind) if asked else 0,)

    def _cuMemGetAddressRange(self, address: int) -> tuple[Any, int]:
        memory = self.device._memory_at(address)
        if memory is None or not memory.live:
            raise Refused(INVALID)
        return package.CUdeviceptr(memory.address), memory.nbytes

    def _cuMemHostRegister(self, start: int, nbytes: int, flags: int) -> None:
        read_only = flags & package.CU_MEMHOSTREGISTER_READ_ONLY
        if read_only and not self.reads_only:
            raise Refused(RESULT.CUDA_ERROR_NOT_SUPPORTED)
        if any(start < other + length and other < start + nbytes for other, (length, _) in self.registered.items()):
            raise Refused(RESULT.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        try:
            check_mapped([(start, start + nbytes)], writable=not read_only)
        except AssertionError:
            raise Refused(INVALID) from None
        self.device.register(_array(start, nbytes))
        self.registered[start] = nbytes, flags

    def _cuMemHostGetDevicePointer(self, start: int, flags: int) -> tuple[Any]:
        if not self.registered.get(start, (0, 0))[1] & package.CU_MEMHOSTREGISTER_DEVICEMAP:
            raise Refused(INVALID)
        return (package.CUdeviceptr(start + SEEN_AT),)

    def _cuMemHostUnregister(self, start: int) -> None:
        if start not in self.registered:
            raise Refused(RESULT.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        self.device.unregister(_array(start, self.registered[start][0]))
        self.registered.pop(start)

    # --- Memory that is mapped --------------------------------------------------------------------------------------

    def _cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[int]:
        return (STEP,)

    def _cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any]:
        kind = package.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        assert properties.requestedHandleTypes == kind and properties.location.type == _DEVICE and nbytes % STEP == 0
        if nbytes > self.device._bytes_free:
            raise Refused(RESULT.CUDA_ERROR_OUT_OF_MEMORY)
        descriptor = os.memfd_create("fake", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        return self._allocation(descriptor, nbytes)

    def _allocation(self, descriptor: int, nbytes: int) -> tuple[Any]:
        handle = next(self._numbers)
        self._files[handle] = descriptor, nbytes
        return (package.CUmemGenericAllocationHandle(handle),)

    def _cuMemExportToShareableHandle(self, handle: Any, kind: Any, flags: int) -> tuple[int]:
        return (os.dup(found(self._files, int(handle))[0]),)

    def _cuMemImportFromShareableHandle(self, descriptor: int, kind: Any) -> tuple[Any]:
        return self._allocation(os.dup(descriptor), os.fstat(descriptor).st_size)

    def _cuMemRelease(self, handle: Any) -> None:
        os.close(found(self._files, int(handle))[0])
        self._files.pop(int(handle))

    def _cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any]:
        reserved = _Reserved(nbytes)
        self.device._add(reserved)
        self._reserved[reserved.address] = reserved
        return (package.CUdeviceptr(reserved.address),)

    def _cuMemAddressFree(self, address: int, nbytes: int) -> None:
        assert not found(self._reserved, address).live, "addresses are given back while memory is mapped there"
        self._reserved.pop(address)

    def _cuMemMap(self, address: int, nbytes: int, offset: int, handle: Any, flags: int) -> None:
        descriptor, size = found(self._files, int(handle))
        reserved = found(self._reserved, address)
        assert nbytes == size == reserved.nbytes and offset == 0 and not reserved.live
        reserved.show(descriptor)

    def _cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> None:
        (told,) = access
        assert count == 1 and told.location.type == _DEVICE and told.location.id == 0
        found(self._reserved, address).live = True  # before that nobody may touch it

    def _cuMemUnmap(self, address: int, nbytes: int) -> None:
        reserved = found(self._reserved, address)
        self.device._check_idle((address, address + nbytes), "unmapped")
        reserved.show(-1)
        reserved.live = False


def found(all: dict[int, Any], key: int) -> Any:
    """What the driver knows by that number. Raises Refused."""
    if key not in all:
        raise Refused(INVALID)
    return all[key]


def _array(start: int, nbytes: int) -> Any:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(start), np.uint8)
