"""The CUDA driver in this process: whether there is one, its primary contexts, its errors, and memory of GPUs.

Only the modules ``cuda*`` of this folder call the driver. They import it late. So one installation works without the
package, without a driver, and with an old driver. ``begin`` says in one line why the driver cannot be used.

All libraries of a process, PyTorch among them, share a device's primary context. A call pushes that context onto the
calling thread's stack of contexts, and pops it afterwards.

Memory can be shared with other processes in two ways. A plain allocation (``cuMemAlloc``) is opened by the driver's IPC
handle; all openers must close it before its owner frees it. A mapped allocation (``cuMemCreate``) has a file descriptor
instead, which is passed through a socket, and exists as long as a process maps it. So memory to be shared is mapped,
and plain if the driver or its container cannot map.

Mapped memory of other libraries (expandable segments of PyTorch) cannot be exported: it consists of many pieces, which
were not made for export.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from kvstore.device.base import DeviceExport, DeviceLost
from kvstore.errors import KVStoreError, OutOfSpace, Unavailable

VERSION_MIN: Final = 12000  # CUDA version of the oldest driver that has all calls used here
NO_PACKAGE: Final = "cuda-python is not installed"
NO_DRIVER: Final = "no NVIDIA driver"
SUCCESS: Final = "CUDA_SUCCESS"
NOT_READY: Final = "CUDA_ERROR_NOT_READY"
OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
NO_DEVICE: Final = "CUDA_ERROR_NO_DEVICE"
PEER_ACCESS_ALREADY_ENABLED: Final = "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
NOT_SUPPORTED: Final = "CUDA_ERROR_NOT_SUPPORTED"
INVALID_VALUE: Final = "CUDA_ERROR_INVALID_VALUE"

# After one of these every later call fails, until the process ends.
LOST: Final = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "DEINITIALIZED",
        "ECC_UNCORRECTABLE",
        "NVLINK_UNCORRECTABLE",
        "CONTAINED",
        "ILLEGAL_ADDRESS",
        "LAUNCH_TIMEOUT",
        "CONTEXT_IS_DESTROYED",
        "ASSERT",
        "HARDWARE_STACK_ERROR",
        "ILLEGAL_INSTRUCTION",
        "MISALIGNED_ADDRESS",
        "INVALID_ADDRESS_SPACE",
        "INVALID_PC",
        "LAUNCH_FAILED",
        "TENSOR_MEMORY_LEAK",
        "MPS_CLIENT_TERMINATED",
        "EXTERNAL_DEVICE",
        "UNKNOWN",
    )
)


class DriverError(Unavailable):
    """The driver refused a call, and still works. ``code``: the driver's name of the error."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


def fault(code: str, call: str) -> KVStoreError:
    """Return the KVStoreError for an error of the driver with this name."""
    reason = f"cuda: {call}: {code}"
    if code in LOST:
        return DeviceLost(reason)
    return OutOfSpace(reason) if code == OUT_OF_MEMORY else DriverError(reason, code)


def call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call the driver, and return its results without the code: None, a value, or a tuple. Raises as ``fault``."""
    code, *results = call_driver(function, *arguments)
    if code != SUCCESS:
        raise fault(code, function.__name__)
    return results[0] if len(results) == 1 else tuple(results) or None


def call_driver(function: Callable[..., Any], *arguments: object) -> tuple[Any, ...]:
    """Call the driver, and return the name of the code and the results.

    Raises:
        DriverError: the driver has no such call, or its code is unknown to the package.
    """
    try:
        code, *results = function(*arguments)
    except (RuntimeError, ValueError, KeyError) as error:
        raise DriverError(f"cuda: {function.__name__}: {str(error).partition(chr(10))[0]}") from None
    return code.name, *results


def absent() -> str:
    """Return why there cannot be a driver; "" if ``begin`` has to try. Does not call the driver."""
    try:
        if importlib.util.find_spec("cuda.bindings.driver") is None:
            return NO_PACKAGE
    except ModuleNotFoundError:
        return NO_PACKAGE
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NO_DRIVER
    return ""


def is_loaded() -> bool:
    """Return True if this process has loaded the driver's library. Does not load it."""
    try:
        ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


@cache
def begin() -> Any:
    """Return the package's module of the initialised driver. Raises Unavailable with one line if there is none."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Unavailable(NO_PACKAGE) from None
    if why := absent():  # otherwise cuInit fails, with an error that depends on the version of the package
        raise Unavailable(why)
    try:
        (code,) = call_driver(driver.cuInit, 0)
        if code == SUCCESS:
            version = int(call(driver.cuDriverGetVersion))
            if why := too_old(version):
                raise Unavailable(why)
            return driver
    except DriverError as error:
        raise Unavailable(f"the NVIDIA driver cannot be used ({error})") from None
    if code == NO_DEVICE:
        raise Unavailable("no CUDA device")
    raise Unavailable(f"the NVIDIA driver does not begin ({code})")


def too_old(version: int) -> str:
    """Return why a driver with this version cannot be used, or ""."""
    if version >= VERSION_MIN:
        return ""
    return f"the NVIDIA driver is too old (CUDA {_shown(version)}, not {_shown(VERSION_MIN)} or later)"


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class PrimaryContext:
    """A device's primary context. Kept until the process ends, because other libraries use it too.

    Attributes:
        lost: why the device no longer works, or "".
        context: the driver's object.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.device = call(driver.cuDeviceGet, ordinal)
        self.lost = ""
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.device)

    def attribute(self, name: str) -> int:
        """Return the device's attribute ``CU_DEVICE_ATTRIBUTE_<name>``."""
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self.driver.cuDeviceGetAttribute, attribute, self.device))

    def current(self) -> CurrentContext:
        """Direct this thread's calls to this device while the context lasts. Raises DeviceLost."""
        return CurrentContext(self)

    def let_go(self, function: Callable[..., Any], handle: object) -> None:
        """Destroy an event or a stream that is no longer referenced. Any thread may call it."""
        with contextlib.suppress(Unavailable), self.current():  # a lost device has lost them too
            function(handle)


class CurrentContext:
    """See ``PrimaryContext.current``.

    While a thread records a CUDA graph, the driver refuses some calls of all threads, and ends the recording. Our calls
    never belong to a recording, so this context exempts them.
    """

    __slots__ = ("_mode", "_primary")

    def __init__(self, primary: PrimaryContext) -> None:
        self._primary = primary
        self._mode: Any = None

    def __enter__(self) -> None:
        primary, driver = self._primary, self._primary.driver
        if primary.lost:
            raise DeviceLost(primary.lost)
        call(driver.cuCtxPushCurrent, primary.context)
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)[-1]

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        primary, driver = self._primary, self._primary.driver
        if isinstance(error, DeviceLost):
            primary.lost = primary.lost or str(error)
        if self._mode is not None:
            driver.cuThreadExchangeStreamCaptureMode(self._mode)
        driver.cuCtxPopCurrent()


HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


class CudaMemory:
    """See ``DeviceMemory``.

    Args:
        undo: calls that free it, in order.
        handle: of mapped memory; None if it is plain, or another process's.
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
            with contextlib.suppress(DeviceLost), self._primary.current():  # the device may turn out to be lost
                for each in undo:
                    each()


def allocate_plain(primary: PrimaryContext, nbytes: int) -> CudaMemory:
    """Allocate plain memory. The context must be current here and in the next functions. Raises OutOfSpace,
    DeviceLost."""
    driver = primary.driver
    address = int(call(driver.cuMemAlloc, nbytes))
    return CudaMemory(primary, address, nbytes, [lambda: call(driver.cuMemFree, address)])


def allocate_mapped(primary: PrimaryContext, nbytes: int) -> CudaMemory:
    """Allocate mapped memory, which has a descriptor for other processes. Raises OutOfSpace, DeviceLost; Unavailable if
    the driver cannot map."""
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
    """Return the argument of ``cuMemCreate``."""
    driver = primary.driver
    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = primary.ordinal
    if primary.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):  # so that it can be registered with a network card
        made.allocFlags.gpuDirectRDMACapable = 1
    return made


def access_of(primary: PrimaryContext) -> Any:
    """Return the argument of ``cuMemSetAccess`` for reads and writes. Some drivers refuse read access alone."""
    driver = primary.driver
    made = driver.CUmemAccessDesc()
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = primary.ordinal
    made.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def export(primary: PrimaryContext, device: bytes, memory: CudaMemory | None, address: int) -> DeviceExport:
    """See ``Device.export``. ``memory``: the mapped allocation that has this address; None means a plain one."""
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
    """Return the bytes of a ``CUipcMemHandle``. Some versions of the package name them, others do not."""
    return ctypes.string_at(int(handle.getPtr()), HANDLE_BYTES)


def handle_of(driver: Any, raw: bytes) -> Any:
    """Return the ``CUipcMemHandle`` in these bytes."""
    handle = driver.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), raw, HANDLE_BYTES)
    return handle


def open_export(primary: PrimaryContext, export: DeviceExport) -> CudaMemory:
    """See ``Device.open_export``."""
    driver = primary.driver
    if export.descriptor >= 0:
        kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        theirs = call(driver.cuMemImportFromShareableHandle, export.descriptor, kind)
        return _at_an_address(primary, theirs, export.nbytes)
    if len(export.handle) != HANDLE_BYTES:
        raise Unavailable("cuda: the export is not a handle")
    handle = handle_of(driver, export.handle)
    # If the memory is another device's, this gives the context's device access to it.
    flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    base = int(call(driver.cuIpcOpenMemHandle, handle, flags))
    memory = CudaMemory(primary, base, 0, [lambda: call(driver.cuIpcCloseMemHandle, base)])
    try:
        _, size = call(driver.cuMemGetAddressRange, base)
    except Unavailable:
        memory.free()
        raise
    memory.nbytes = int(size)  # a copy from beyond the end would cost this process its device
    return memory


def _at_an_address(primary: PrimaryContext, handle: Any, size: int) -> CudaMemory:
    """Map an allocation, for this device to read and write. If that fails, the handle is released."""
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
