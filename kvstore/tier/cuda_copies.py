"""How the pieces of a copy go: by a device's copy engines, all with one call, or by its processors, in a kernel.

Engines move large pieces at the full speed of the link, and leave the processors to computation. Each piece costs them
a microsecond or two, so that small ones go faster by a kernel, which costs processors. The length from which engines
are better is measured when a device is opened (``threshold``).

A kernel must only be given what the device can reach: memory of its own, and host memory that is registered. A wrong
address costs the process its device, where an engine's copy is merely refused. So each address is looked up before.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.tier.cuda_driver import INVALID_VALUE, NOT_SUPPORTED, SUCCESS, DriverError, PrimaryContext, call, fault
from kvstore.tier.cuda_kernels import Kernel
from kvstore.tier.device import Addresses

KERNEL_GAIN_MIN: Final = 1.25  # a kernel has to be this much faster: it takes processors from computation
HOST_BLOCKS: Final = 32  # blocks of a kernel over the link: they have half a megabyte under way, which fills it
DEFAULT_STREAMS: Final = 2  # handles up to this are not of streams that somebody made
ALLOCATIONS_MAX: Final = 8  # of the device that one copy's pieces may lie in, to go by a kernel

BATCH_VERSION: Final = 12080  # of CUDA, the first with a batched call; it is asked for in the form that it had then
_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # bytes
    ctypes.c_size_t,  # how many
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # from which piece on each of them holds
    ctypes.c_size_t,  # how many attributes
    ctypes.c_void_p,  # is told which piece was refused
    ctypes.c_void_p,  # stream
)

Mask = npt.NDArray[np.bool_]


class Way(Enum):
    """Between which memories pieces go."""

    TO_DEVICE = "to the device"
    TO_HOST = "to the host"
    WITHIN = "within the device"


ALWAYS: Final[Mapping[Way, int]] = dict.fromkeys(Way, 1 << 62)
"""For ``CudaCopies.by_kernel``: pieces of every length."""


def threshold(lengths: Sequence[int], kernel_s: Sequence[float], engines_s: Sequence[float]) -> int:
    """Below which length pieces go by a kernel, from measurements of ascending lengths; 0: none do."""
    for length, kernel, engines in zip(lengths, kernel_s, engines_s, strict=True):
        if engines < kernel * KERNEL_GAIN_MIN:
            return length if length > lengths[0] else 0
    return 2 * lengths[-1]


class BatchCall:
    """``cuMemcpyBatchAsync``, called with arrays as they are: what it costs does not grow with Python's objects.

    Later versions of the call lack an argument; a request for that of 12.8 succeeds in all drivers since.
    """

    def __init__(self, driver: Any, address: int) -> None:
        self._driver = driver
        self._function = _BATCH(address)
        self._attributes = attributes(driver)
        self._first = ctypes.c_size_t(0)

    @classmethod
    def find(cls, driver: Any) -> BatchCall | None:
        """None where the driver is older."""
        code, address, _ = driver.cuGetProcAddress(b"cuMemcpyBatchAsync", BATCH_VERSION, 0)
        return cls(driver, int(address)) if code.name == SUCCESS and address else None

    def copy(self, stream: int, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """One batch. Raises as ``fault``."""
        failed = ctypes.c_size_t(0)
        code = self._function(
            targets.ctypes.data,
            sources.ctypes.data,
            nbytes.ctypes.data,
            len(nbytes),
            int(self._attributes.getPtr()),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if code:
            raise fault(named(self._driver, code), "cuMemcpyBatchAsync")


def attributes(driver: Any) -> Any:
    """The attributes of every piece: its source is read when its stream comes to it, not before."""
    found = driver.CUmemcpyAttributes()
    found.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    return found


def named(driver: Any, code: int) -> str:
    """The driver's name of an error."""
    try:
        return str(driver.CUresult(code).name)
    except ValueError:
        return f"error {code}"


# --- Where addresses lie --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegisteredRange:
    """Host memory that is registered. ``there``: where the device sees it."""

    start: int
    stop: int
    there: int
    writable: bool


class RegisteredRanges:
    """All of them. They overlap nowhere. Threads share it.

    A finalizer may say that a range is not registered any more, and the collector runs finalizers wherever memory is
    allocated: also in the midst of a change that this very thread makes. That one takes both in, then.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changing = False  # by the thread that has the lock
        self._changes: deque[RegisteredRange | int] = deque()  # a new range, or the start of one that is gone
        self._all: dict[int, RegisteredRange] = {}
        self._columns = np.zeros((4, 0), np.uint64)  # by address

    def add(self, one: RegisteredRange) -> None:
        """Note a range that is registered now."""
        self._changes.append(one)
        self._take_in()

    def remove(self, start: int) -> None:
        """Note that the range from ``start`` is not registered any more."""
        self._changes.append(start)
        self._take_in()

    def _take_in(self) -> None:
        with self._lock:
            while self._changes and not self._changing:
                self._changing = True
                try:
                    self._change(self._changes.popleft())
                finally:
                    self._changing = False

    def _change(self, change: RegisteredRange | int) -> None:
        if isinstance(change, int):
            self._all.pop(change, None)
        else:
            self._all[change.start] = change
        rows = [(each.start, each.stop, each.there, each.writable) for _, each in sorted(self._all.items())]
        self._columns = np.array(rows, np.uint64).reshape(-1, 4).T.copy()

    def seen(self, at: Addresses, nbytes: Addresses, write: bool) -> tuple[Mask, Addresses]:
        """Which pieces lie in one of them (that may be written to), and where the device sees these."""
        starts, stops, there, writable = self._columns
        if not len(starts):
            return np.zeros(len(at), np.bool_), at
        which = np.searchsorted(starts, at, "right").astype(np.int64) - 1
        first = np.maximum(which, 0)
        inside = (which >= 0) & (at < stops[first]) & (nbytes <= stops[first] - np.minimum(at, stops[first]))
        if write:
            inside &= writable[first] != 0
        return inside, np.where(inside, at - starts[first] + there[first], at)


def in_allocations(at: Addresses, nbytes: Addresses, allocation: Callable[[int], tuple[int, int] | None]) -> bool:
    """Whether all pieces lie in memory of the device, asking for as few of its allocations as can be."""
    for _ in range(ALLOCATIONS_MAX):
        if not len(at):
            return True
        found = allocation(int(at[0]))
        if found is None:
            return False
        start, stop = np.uint64(found[0]), np.uint64(found[1])
        inside = (at >= start) & (at < stop) & (nbytes <= stop - np.minimum(at, stop))
        if not inside[0]:
            return False
        at, nbytes = at[~inside], nbytes[~inside]
    return not len(at)


# --- Copying --------------------------------------------------------------------------------------------------------


class CudaCopies:
    """The ways of pieces to, from and on one device. Threads share it; the context is current in each call.

    Attributes:
        kernel_below: by way, below which length pieces go by the kernel.
    """

    def __init__(
        self, primary: PrimaryContext, ranges: RegisteredRanges, batch: BatchCall | None, kernel: Kernel | None
    ) -> None:
        self._driver = primary.driver
        self._ordinal = primary.ordinal
        self._ranges = ranges
        self._batch = batch
        self._kernel = kernel
        self._blocks_within = 4 * primary.attribute("MULTIPROCESSOR_COUNT")
        self.kernel_below: Mapping[Way, int] = dict.fromkeys(Way, 0)

    @property
    def batches(self) -> bool:
        """Whether the driver takes many pieces with one call."""
        return self._batch is not None

    def copy(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """See ``DeviceStream.copy``."""
        small = nbytes < max(self.kernel_below.values())
        if self._kernel is None or not small.any():
            self.by_engines(stream, targets, sources, nbytes)
        elif small.all():
            self._small(stream, targets, sources, nbytes)
        else:
            self.by_engines(stream, targets[~small], sources[~small], nbytes[~small])
            self._small(stream, targets[small], sources[small], nbytes[small])

    def _small(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        if not self.by_kernel(stream, targets, sources, nbytes, self.kernel_below):
            self.by_engines(stream, targets, sources, nbytes)

    def by_kernel(
        self,
        stream: Any,
        targets: Addresses,
        sources: Addresses,
        nbytes: Addresses,
        below: Mapping[Way, int],
    ) -> bool:
        """Copy them by the kernel, where the device can reach all of them and they are short enough; else False."""
        to_host, target_there = self._ranges.seen(targets, nbytes, write=True)
        from_host, source_there = self._ranges.seen(sources, nbytes, write=False)
        if (to_host & from_host).any():
            return False
        way = Way.TO_HOST if to_host.any() else Way.TO_DEVICE if from_host.any() else Way.WITHIN
        if int(nbytes.max()) >= below[way]:
            return False
        on_device = np.concatenate([targets[~to_host], sources[~from_host]])
        lengths = np.concatenate([nbytes[~to_host], nbytes[~from_host]])
        if self._kernel is None or not in_allocations(on_device, lengths, self.allocation):
            return False
        blocks = self._blocks_within if way is Way.WITHIN else HOST_BLOCKS
        self._kernel.launch(stream, target_there, source_there, nbytes, blocks)
        return True

    def by_engines(self, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        """Copy them in one batch; with a call for each where the driver has no batches, the stream is a default one,
        which takes none, or the driver does not take one of these pieces in a batch."""
        if self._batch is not None and int(stream) > DEFAULT_STREAMS:
            some = nbytes > 0  # an empty piece is an error there
            if not some.all():
                targets, sources, nbytes = targets[some], sources[some], nbytes[some]
            try:
                if len(nbytes):
                    self._batch.copy(int(stream), *(np.ascontiguousarray(each) for each in (targets, sources, nbytes)))
                return
            except DriverError as error:
                if error.code not in (NOT_SUPPORTED, INVALID_VALUE):
                    raise
                # Memory that is not registered may be the reason: then the next batch may do. Else it is this device or
                # this system, whatever the driver's version.
                if error.code == NOT_SUPPORTED and self._registered(targets, sources, nbytes):
                    self._batch = None
        for target, source, length in zip(targets.tolist(), sources.tolist(), nbytes.tolist(), strict=True):
            if length:
                call(self._driver.cuMemcpyAsync, target, source, length, stream)

    def _registered(self, targets: Addresses, sources: Addresses, nbytes: Addresses) -> bool:
        """True where each piece has one end in memory of the host that is registered."""
        to_host, _ = self._ranges.seen(targets, nbytes, write=True)
        from_host, _ = self._ranges.seen(sources, nbytes, write=False)
        return bool((to_host | from_host).all())

    def allocation(self, address: int) -> tuple[int, int] | None:
        """From where to where the device's memory goes in which that address lies; None: it lies in none."""
        if not self.owns(address):
            return None
        start, nbytes = call(self._driver.cuMemGetAddressRange, address)
        return int(start), int(start) + int(nbytes)

    def owns(self, address: int) -> bool:
        """See ``Device.owns``."""
        kinds, driver = self._driver.CUpointer_attribute, self._driver
        try:
            memory = call(driver.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
            ordinal = call(driver.cuPointerGetAttribute, kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address)
        except DriverError:  # it knows nothing of that address
            return False
        return int(memory) == int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE) and int(ordinal) == self._ordinal
