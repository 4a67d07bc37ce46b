"""CudaDevice: a GPU through its driver, and the list of this process' devices.

``find`` returns the GPUs, or the reason why there are none. ``devices`` returns them together with devices that were
added. A device is opened at its first use, because that takes some hundred megabytes of its memory. At the same time
it is measured up to which length a kernel copies pieces faster than the copy engines. This takes some tenths of a
second.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from kvstore.device import cuda_driver
from kvstore.device.base import Addresses, Bytes, Device, DeviceEvent, DeviceExport, DeviceLost, DeviceStream
from kvstore.device.cuda_copies import (
    ALWAYS,
    BatchCall,
    CudaCopies,
    Kernel,
    RegisteredRange,
    RegisteredRanges,
    Way,
    cache_folder,
    cubin_for,
    threshold,
)
from kvstore.device.cuda_driver import (
    NOT_READY,
    PEER_ACCESS_ALREADY_ENABLED,
    SUCCESS,
    CudaMemory,
    CurrentContext,
    DriverError,
    PrimaryContext,
    begin,
    call,
    call_driver,
    fault,
    is_loaded,
)
from kvstore.device.host_memory import empty
from kvstore.errors import DeadlineExceeded, InvalidRequest, OutOfSpace, Unavailable

LENGTHS: Final = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)  # of pieces that are measured
MEASURED_BYTES: Final = 8 << 20  # of one copy
REPEATS: Final = 3  # the fastest counts
DEADLINE_S: Final = 10.0  # for one copy

Pieces = tuple[Addresses, Addresses, Addresses]  # targets, sources, lengths
_IN_USE: Final[list[Bytes]] = []  # memory that a hanging device may still write to


class MeasurableStream(DeviceStream, Protocol):
    """A stream whose two ways of copying can be measured separately."""

    def copy_by_kernel(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy pieces of any length with a kernel."""
        ...

    def copy_by_engines(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy pieces of any length with the copy engines."""
        ...


def calibrate(device: Device, stream: MeasurableStream) -> Mapping[Way, int]:
    """For each way, the length below which a kernel copies pieces faster. 0 if there is no memory to measure with.

    Raises:
        DeviceLost: the device does not copy.
    """
    host = empty(2 * MEASURED_BYTES)
    host[:] = 0  # registered memory must be populated
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
        thresholds = {way: _measure(stream, *ends[way]) for way in Way}
    except DeadlineExceeded as error:
        _IN_USE.append(host)
        raise DeviceLost(str(error)) from None
    except DeviceLost:
        raise
    except Unavailable:  # the kernel cannot reach registered memory here
        thresholds = dict.fromkeys(Way, 0)
    device.unregister(host)
    memory.free()
    return thresholds


def pieces(target: int, source: int, length: int) -> Pieces:
    """Return the pieces for one measurement: every other piece of this length at ``target`` and ``source``."""
    offsets = np.arange(MEASURED_BYTES // length, dtype=np.uint64) * np.uint64(2 * length)
    return np.uint64(target) + offsets, np.uint64(source) + offsets, np.full(len(offsets), length, np.uint64)


def _measure(stream: MeasurableStream, target: int, source: int) -> int:
    """Measure the threshold of one way."""
    batches = [pieces(target, source, length) for length in LENGTHS]
    kernel_s = [_fastest(stream, stream.copy_by_kernel, each) for each in batches]
    engines_s = [_fastest(stream, stream.copy_by_engines, each) for each in batches]
    return threshold(LENGTHS, kernel_s, engines_s)


def _fastest(stream: DeviceStream, copy: Callable[[Addresses, Addresses, Addresses], None], each: Pieces) -> float:
    """Return the seconds of the fastest of ``REPEATS`` copies. A first copy before them is not counted."""
    seconds = []
    for _ in range(1 + REPEATS):
        begun_s = time.perf_counter()
        copy(*each)
        stream.record().wait(time.monotonic() + DEADLINE_S)
        seconds.append(time.perf_counter() - begun_s)
    return min(seconds[1:])


SPIN_S: Final = 50e-6  # how long a wait for an event polls without a pause; a sleep takes about as long
PAUSE_PART: Final = 1 / 32  # of the time waited so far: how late a wait may end after its event
PAUSE_MAX_S: Final = 1e-3  # upper bound of that


class CudaDevices(NamedTuple):
    """The devices that this process may use. ``missing`` says in one line why there are none; "" if there are some."""

    devices: tuple[CudaDevice, ...]
    missing: str


def find() -> CudaDevices:
    """Find the devices of this machine without opening any."""
    try:
        devices = _devices()
    except Unavailable as error:
        return CudaDevices((), str(error))
    usable = tuple(device for device in devices if not device.lost)
    return CudaDevices(usable, "" if usable else f"{devices[0].name} was lost ({devices[0].lost})")


@cache
def _devices() -> tuple[CudaDevice, ...]:
    """Return all devices. Raises Unavailable if there are none."""
    driver = begin()
    devices = tuple(CudaDevice(driver, ordinal) for ordinal in range(int(call(driver.cuDeviceGetCount))))
    if not devices:
        raise Unavailable("no CUDA device")
    return devices


class CudaDevice:
    """See ``Device``. Life: constructed, not open -> opened by the first use -> open until the process ends.

    Attributes:
        model: the name that its maker gave it.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self._driver = driver
        self._ordinal = ordinal
        device = call(driver.cuDeviceGet, ordinal)
        name = bytes(call(driver.cuDeviceGetName, 128, device))
        self._uuid = bytes(call(driver.cuDeviceGetUuid, device).bytes)
        self.model = name.partition(b"\0")[0].decode(errors="replace")
        self._lock = threading.Lock()
        self._ranges = RegisteredRanges()
        self._open_device: _OpenDevice | None = None
        # address -> memory that can be passed to other processes as a descriptor
        self._shared: weakref.WeakValueDictionary[int, CudaMemory] = weakref.WeakValueDictionary()
        self._peers: set[bytes] = set()  # devices whose memory in this process this device may access

    @property
    def name(self) -> str:
        """See ``Device``."""
        return f"cuda:{self._ordinal}"

    @property
    def lost(self) -> str:
        """Why the device no longer works, or ""."""
        return "" if self._open_device is None else self._open_device.primary.lost

    @property
    def kernel_missing(self) -> str:
        """Why no kernel copies small pieces, or "". Opens the device."""
        return self._open().kernel_missing

    @property
    def kernel_below(self) -> Mapping[Way, int]:
        """For each way, the length below which a kernel copies pieces, as measured. Opens the device."""
        return self._open().copies.kernel_below

    @property
    def batches(self) -> bool:
        """True if one call of the driver copies many pieces. Opens the device."""
        return self._open().copies.batches

    def _open(self) -> _OpenDevice:
        with self._lock:
            if self._open_device is not None:
                return self._open_device
            opened = self._open_device = _OpenDevice(self._driver, self._ordinal, self._ranges)
        if not opened.kernel_missing:  # during the measurement, other threads copy with engines only
            opened.copies.kernel_below = calibrate(self, self.stream())
        return opened

    def current(self) -> CurrentContext:
        """Direct other libraries' calls in this thread to this device while the context lasts."""
        return self._open().primary.current()

    def allocate(self, nbytes: int, *, shared: bool = False) -> CudaMemory:
        """See ``Device``. Shared memory is mapped; or plain, if the driver has no descriptors."""
        primary = self._open().primary
        with primary.current():
            if not shared:
                return cuda_driver.allocate_plain(primary, nbytes)
            try:
                memory = cuda_driver.allocate_mapped(primary, nbytes)
            except DeviceLost:
                raise
            except Unavailable:
                return cuda_driver.allocate_plain(primary, nbytes)
        self._shared[memory.address] = memory
        return memory

    def export(self, address: int) -> DeviceExport:
        """See ``Device``."""
        primary = self._open().primary
        shared = [each for start, each in self._shared.items() if start <= address < start + each.nbytes]
        with primary.current():
            return cuda_driver.export(primary, self.uuid, shared[0] if shared else None, address)

    def open_export(self, export: DeviceExport) -> CudaMemory:
        """See ``Device``."""
        if why := self.reach(export.device):
            raise Unavailable(why)
        primary = self._open().primary
        with primary.current():
            return cuda_driver.open_export(primary, export)

    def reach(self, uuid: bytes) -> str:
        """See ``Device``. Memory of this process on the other device is accessible as soon as this process uses that
        device."""
        if uuid == self._uuid:
            return ""
        other = next((device for device in _devices() if device.uuid == uuid), None)
        if other is None:
            return f"{self.name}: this process does not see the device of that memory"
        ours, theirs = (call(self._driver.cuDeviceGet, device._ordinal) for device in (self, other))
        if not call(self._driver.cuDeviceCanAccessPeer, ours, theirs):
            return f"{self.name} cannot read the memory of {other.name}"
        if other.in_use and uuid not in self._peers:
            try:
                with self._open().primary.current():
                    call(self._driver.cuCtxEnablePeerAccess, other._open().primary.context, 0)
            except DriverError as error:
                if error.code != PEER_ACCESS_ALREADY_ENABLED:  # by PyTorch, say
                    return str(error)
            self._peers.add(uuid)
        return ""

    def owns(self, address: int) -> bool:
        """See ``Device``. A process that has not opened the device has no memory on it, and a lost device has none
        either."""
        try:
            if self._open_device is None and not self.in_use:
                return False
            opened = self._open()
            with opened.primary.current():
                return opened.copies.owns(address)
        except DeviceLost:
            return False

    @property
    def uuid(self) -> bytes:
        """See ``Device``."""
        return self._uuid

    @property
    def in_use(self) -> bool:
        """See ``Device``."""
        _, active = call(self._driver.cuDevicePrimaryCtxGetState, call(self._driver.cuDeviceGet, self._ordinal))
        return bool(active)

    def register(self, memory: Bytes) -> None:
        """See ``Device``. Takes a second for a few gigabytes, and other calls of the process wait during that time. The
        memory is registered for all devices, so a second device of this process refuses it."""
        opened, driver = self._open(), self._driver
        start, flags = memory.ctypes.data, driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        if not memory.flags.writeable:
            if not opened.registers_read_only:
                raise Unavailable(f"{self.name}: the driver cannot register memory that is mapped read-only")
            flags |= driver.CU_MEMHOSTREGISTER_READ_ONLY
        with opened.primary.current():
            call(driver.cuMemHostRegister, start, memory.nbytes, flags)
            try:
                device_address = int(call(driver.cuMemHostGetDevicePointer, start, 0))
            except DriverError:  # engines can still copy; the kernel does not get this range
                return
        self._ranges.add(RegisteredRange(start, start + memory.nbytes, device_address, memory.flags.writeable))

    def unregister(self, memory: Bytes) -> None:
        """See ``Device``. Takes no lock: a finalizer may call this in a thread that is opening the device."""
        self._ranges.remove(memory.ctypes.data)
        if self._open_device is not None and not self.lost:
            with contextlib.suppress(DeviceLost), self._open_device.primary.current():  # it may turn out to be lost
                call(self._driver.cuMemHostUnregister, memory.ctypes.data)

    def stream(self) -> CudaStream:
        """See ``Device``. The stream does not wait for any other stream, not even for the default one."""
        opened, driver = self._open(), self._driver
        with opened.primary.current():
            handle = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = CudaStream(opened, handle)
        weakref.finalize(stream, opened.primary.let_go, driver.cuStreamDestroy, handle).atexit = False
        return stream

    def stream_of(self, handle: int) -> CudaStream:
        """See ``Device``. The stream belongs to the other library, which must keep it while this object is used."""
        return CudaStream(self._open(), self._driver.CUstream(handle))


class _OpenDevice:
    """The state of a device after it was opened."""

    def __init__(self, driver: Any, ordinal: int, ranges: RegisteredRanges) -> None:
        self.driver = driver
        self.primary = PrimaryContext(driver, ordinal)
        self.kernel_missing = ""
        with self.primary.current():
            self.registers_read_only = bool(self.primary.attribute("READ_ONLY_HOST_REGISTER_SUPPORTED"))
            self.copies = CudaCopies(self.primary, ranges, BatchCall.find(driver), self._kernel())

    def _kernel(self) -> Kernel | None:
        major, minor = (self.primary.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        try:
            return Kernel(self.driver, cubin_for(10 * major + minor, cache_folder()))
        except DeviceLost:
            raise
        except Unavailable as error:  # there is no NVRTC, or an older driver that cannot load its output
            self.kernel_missing = str(error)
        return None


class CudaStream:
    """See ``DeviceStream``."""

    def __init__(self, opened: _OpenDevice, handle: Any) -> None:
        self._open_device = opened
        self._handle = handle

    @property
    def handle(self) -> int:
        """See ``DeviceStream``. 0: the default stream of this process."""
        return int(self._handle)

    def copy(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream``."""
        if len(nbytes):
            with self._open_device.primary.current():
                self._open_device.copies.copy(self._handle, targets, sources, nbytes)

    def copy_by_kernel(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy pieces of any length with the kernel. Raises Unavailable if the device cannot reach a piece."""
        with self._open_device.primary.current():
            if not self._open_device.copies.by_kernel(self._handle, targets, sources, nbytes, ALWAYS):
                raise Unavailable("cuda: the kernel cannot reach that memory")

    def copy_by_engines(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy pieces of any length with the copy engines."""
        with self._open_device.primary.current():
            self._open_device.copies.by_engines(self._handle, targets, sources, nbytes)

    def wait(self, event: DeviceEvent) -> None:
        """See ``DeviceStream``. The event may be another CUDA device's."""
        assert isinstance(event, CudaEvent)
        with self._open_device.primary.current():
            call(self._open_device.driver.cuStreamWaitEvent, self._handle, event.handle, 0)

    def record(self) -> CudaEvent:
        """See ``DeviceStream``."""
        primary, driver = self._open_device.primary, self._open_device.driver
        with primary.current():
            if (
                call(driver.cuStreamIsCapturing, self._handle)
                != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
            ):
                # A stream that waits for the event would become part of the recording, and fail until it ends.
                raise InvalidRequest(
                    "stream", f"records a CUDA graph: copy outside of it (got stream {self.handle:#x})"
                )
            handle = call(driver.cuEventCreate, driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
            event = CudaEvent(primary, handle)
            weakref.finalize(event, primary.let_go, driver.cuEventDestroy, handle).atexit = False
            call(driver.cuEventRecord, handle, self._handle)
        return event


class CudaEvent:
    """See ``DeviceEvent``."""

    def __init__(self, primary: PrimaryContext, handle: Any) -> None:
        self._primary = primary
        self.handle = handle

    def over(self) -> bool:
        """See ``DeviceEvent``."""
        with self._primary.current():
            (code,) = call_driver(self._primary.driver.cuEventQuery, self.handle)
            if code not in (SUCCESS, NOT_READY):
                raise fault(code, "cuEventQuery")
        return bool(code == SUCCESS)

    def wait(self, deadline_s: float) -> None:
        """See ``DeviceEvent``. The driver cannot wait with a deadline. So this polls, at first without a pause."""
        begun_s = time.monotonic()
        while not self.over():
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise DeadlineExceeded("cuda: a copy did not end in time")
            waited_s = now_s - begun_s
            if waited_s > SPIN_S:
                time.sleep(min(PAUSE_MAX_S, waited_s * PAUSE_PART, deadline_s - now_s))


_lock = threading.Lock()
_added: list[Device] = []


def devices() -> list[Device]:
    """Return the devices of this process. Does not open any."""
    return [*_added, *find().devices]


def missing() -> str:
    """Return in one line why there is no GPU; "" if there is one."""
    return find().missing


def devices_in_use() -> list[Device]:
    """Return the devices that this process uses. Does not load the driver: a process without it uses none."""
    found = find().devices if is_loaded() else ()
    return [device for device in (*_added, *found) if device.in_use]


def device_of(address: int) -> Device | None:
    """Return the device that has this address; None for host memory."""
    return next((device for device in devices_in_use() if device.owns(address)), None)


def add(device: Device) -> None:
    """Add a device to this process, such as a ``HostDevice`` in tests."""
    with _lock:
        _added.append(device)


def remove(device: Device) -> None:
    """Undo ``add``."""
    with _lock:
        _added.remove(device)
