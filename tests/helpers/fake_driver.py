"""A driver of CUDA that carries its calls out in host memory: for tests of ``kvstore.device.cuda``.

It is the package's module (``cuda.bindings.driver``) with the calls replaced. Each of them is first shown to the
package's own, which refuses arguments of wrong types; then it is held to the driver's rules (a context is current, the
thread does not mind that another one records a graph), and done by a ``HostDevice``, which copies as late as it may.

A breach of the rules that a real driver would answer with an error is answered with that error. What would do damage
without one (a kernel that writes anywhere, memory that is freed while it is copied) fails the test: AssertionError, or
an entry in ``mistakes`` where the caller is C.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from cuda.bindings import driver as package

from kvstore.device import cuda
from kvstore.device.base import Addresses
from kvstore.device.host_device import HostEvent, HostStream, Span, _Work
from kvstore.errors import Unavailable
from tests.helpers.fake_memory import INVALID, RESULT, SEEN_AT, FakeMemory, Refused, found

PIECES_MAX: Final = 128  # of a kernel

_OK: Final = RESULT.CUDA_SUCCESS
_RELAXED: Final = package.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_GLOBAL: Final = package.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
_MISSING: Final = (RuntimeError, OSError)  # what the package raises where there is no driver

# These need no context. All others do.
_FREE: Final = ("cuInit", "cuDriver", "cuDevice", "cuCtxPush", "cuCtxPop", "cuThread", "cuGetProcAddress")

# cuMemcpyBatchAsync(dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx, hStream), as CUDA 12.8 has it
_words, _number = ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t
_BATCH: Final = ctypes.CFUNCTYPE(
    ctypes.c_int, _words, _words, _words, _number, ctypes.POINTER(ctypes.c_uint32), _words, _number, _words, _number
)


def package_takes(name: str, given: tuple[object, ...]) -> None:
    """The package's call takes these arguments: it fails for want of a driver alone. Raises TypeError."""
    with contextlib.suppress(*_MISSING):
        getattr(package, name)(*given)
        raise AssertionError(f"{name} was carried out")


def has_driver() -> bool:
    """Whether calls of the package would be carried out."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


_HAS_DRIVER: Final = has_driver()


class FakeDriver(FakeMemory):
    """See the module.

    Attributes:
        batches, kernels: whether this driver takes many pieces in one call, and kernels.
        batch_answer: what it says of a batch, which is done where that is success. A function of the pieces' spans.
        unknown: what it says to every call from now on; None: nothing is wrong.
        capturing: streams whose work is recorded as a graph.
        said: the names of all calls, in order.
        mistakes: what its C callers did wrong.
        clock_s: the device's own time, by ``rate``: how long it takes over so many pieces of so many bytes each.
    """

    def __init__(self, seed: int = 0, *, batches: bool = True, kernels: bool = True) -> None:
        super().__init__(seed)
        self.batches, self.kernels = batches, kernels
        self.batch_answer: Callable[[list[Span]], Any] = lambda spans: _OK
        self.unknown: Any = None
        self.capturing: set[int] = set()
        self.said: list[str] = []
        self.mistakes: list[BaseException] = []
        self.clock_s = 0.0
        self.rate: Callable[[str, str, int, int], float] = lambda how, way, count, nbytes: 0.0
        self._here = threading.local()
        self._events: dict[int, HostEvent | None] = {}
        self._streams: set[int] = {0, 1, 2}
        self._retained = False
        self._batch = _BATCH(self._batch_called)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(package, name)
        function = getattr(type(self), f"_{name}")

        def called(*given: Any) -> tuple[Any, ...]:
            if not _HAS_DRIVER:
                package_takes(name, given)
            self.said.append(name)
            try:
                self._check(name)
                return _OK, *(function(self, *given) or ())
            except Refused as refused:
                return refused.code, *(None for _ in range(_ON_ERROR.get(name, 0)))

        called.__name__ = name
        return called

    def _check(self, name: str) -> None:
        """Raises Refused where no such call is done now."""
        if not name.startswith(_FREE):
            if not self.stack:
                raise Refused(RESULT.CUDA_ERROR_INVALID_CONTEXT)
            if self.mode != _RELAXED:  # as if another thread recorded a graph all the while
                raise Refused(RESULT.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
            if self.unknown is not None:
                raise Refused(self.unknown)

    def lose(self) -> None:
        """From now on every call in a context fails, and memory holds poison."""
        self.unknown = RESULT.CUDA_ERROR_ECC_UNCORRECTABLE
        self.device.lose()

    # --- Devices and contexts ---------------------------------------------------------------------------------------

    @property
    def stack(self) -> list[int]:
        """The contexts of this thread."""
        return self._here.__dict__.setdefault("stack", [])

    @property
    def mode(self) -> Any:
        """What this thread says to the recording of graphs."""
        return self._here.__dict__.setdefault("mode", _GLOBAL)

    def _cuDeviceGetCount(self) -> tuple[int]:
        return (1,)

    def _cuDeviceGet(self, ordinal: int) -> tuple[Any]:
        assert ordinal == 0
        return (package.CUdevice(ordinal),)

    def _cuDeviceGetName(self, length: int, device: Any) -> tuple[bytes]:
        return (b"Fake\0".ljust(length, b"?"),)

    def _cuDeviceGetUuid(self, device: Any) -> tuple[Any]:
        found = package.CUuuid()
        ctypes.memmove(int(found.getPtr()), self.device.uuid, 16)
        return (found,)

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[int]:
        known = {"READ_ONLY_HOST_REGISTER": int(self.reads_only), "MULTIPROCESSOR": 3, "MAJOR": 9, "MINOR": 0}
        return (next((value for part, value in known.items() if part in attribute.name), 1),)

    def _cuStreamIsCapturing(self, stream: Any) -> tuple[Any]:
        status = package.CUstreamCaptureStatus
        capturing = int(stream) in self.capturing
        return (status.CU_STREAM_CAPTURE_STATUS_ACTIVE if capturing else status.CU_STREAM_CAPTURE_STATUS_NONE,)

    def _cuDriverGetVersion(self) -> tuple[int]:
        return (package.CUDA_VERSION,)

    def _cuDeviceCanAccessPeer(self, device: Any, peer: Any) -> tuple[int]:
        return (0,)  # a device is not its own peer, and there is no other

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any]:
        self._retained = True
        return (package.CUcontext(0xC0),)

    def _cuDevicePrimaryCtxGetState(self, device: Any) -> tuple[int, int]:
        return 0, int(self._retained)

    def _cuCtxPushCurrent(self, context: Any) -> None:
        self.stack.append(int(context))

    def _cuCtxPopCurrent(self) -> tuple[Any]:
        if not self.stack:
            raise Refused(RESULT.CUDA_ERROR_INVALID_CONTEXT)
        return (package.CUcontext(self.stack.pop()),)

    def _cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any]:
        before, self._here.mode = self.mode, mode
        return (before,)

    # --- Streams and events -----------------------------------------------------------------------------------------

    def _stream_at(self, handle: Any) -> HostStream:
        if int(handle) not in self._streams:
            raise Refused(RESULT.CUDA_ERROR_INVALID_HANDLE)
        return self.device.stream_of(int(handle))

    def _cuStreamCreate(self, flags: int) -> tuple[Any]:
        assert flags == package.CUstream_flags.CU_STREAM_NON_BLOCKING, "it would wait for the default stream"
        handle = self.device.stream().handle
        self._streams.add(handle)
        return (package.CUstream(handle),)

    def _cuStreamDestroy(self, stream: Any) -> None:
        self._stream_at(stream)
        self._streams.remove(int(stream))

    def _cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> None:
        behind = found(self._events, int(event))
        if behind is not None:
            self._stream_at(stream).wait(behind)

    def _cuEventCreate(self, flags: int) -> tuple[Any]:
        handle = next(self._numbers)
        self._events[handle] = None
        return (package.CUevent(handle),)

    def _cuEventDestroy(self, event: Any) -> None:
        found(self._events, int(event))
        self._events.pop(int(event))

    def _cuEventRecord(self, event: Any, stream: Any) -> None:
        found(self._events, int(event))
        self._events[int(event)] = self._stream_at(stream).record()

    def _cuEventQuery(self, event: Any) -> None:
        recorded = found(self._events, int(event))
        if recorded is not None and not recorded.over():  # one that was never recorded is over
            raise Refused(RESULT.CUDA_ERROR_NOT_READY)

    # --- Copies -----------------------------------------------------------------------------------------------------

    def _cuMemcpyAsync(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        to, of, length = (np.array([each], np.uint64) for each in (target, source, nbytes))
        self._copy("engines", stream, to, of, length)

    def _cuGetProcAddress(self, symbol: bytes, version: int, flags: int) -> tuple[int, Any]:
        assert symbol == b"cuMemcpyBatchAsync"
        if not self.batches:
            raise Refused(RESULT.CUDA_ERROR_NOT_FOUND)
        assert version == 12080, "its form is another one in other versions"
        address = ctypes.cast(self._batch, ctypes.c_void_p).value or 0
        return address, package.CUdriverProcAddressQueryResult.CU_GET_PROC_ADDRESS_SUCCESS

    def _batch_called(self, *given: Any) -> int:
        """What lies behind the address. No exception passes C."""
        self.said.append("cuMemcpyBatchAsync")
        try:
            self._check("cuMemcpyBatchAsync")
            self._batched(*given)
        except Refused as refused:
            return int(refused.code)
        except BaseException as error:
            self.mistakes.append(error)
        return int(_OK)

    def _batched(
        self, targets: Any, sources: Any, sizes: Any, count: int, about: Any, firsts: Any, abouts: int, failed: Any,
        stream: int,
    ) -> None:  # fmt: skip
        assert count and abouts == 1 and firsts[0] == 0 and failed, "all pieces are of the first kind"
        assert about[:6] == [1, 0, 0, 0, 0, 0], "sources are read when the stream comes to them"
        assert stream > 2, "a default stream takes no batch"
        columns = [np.array(each[:count], np.uint64) for each in (targets, sources, sizes)]
        spans = [(start, start + n) for at in columns[:2] for start, n in zip(at.tolist(), sizes[:count], strict=True)]
        code = self.batch_answer(spans) if columns[2].all() else INVALID
        if code != _OK:
            raise Refused(code)
        self._copy("engines", stream, *columns)

    def _cuModuleLoadData(self, cubin: bytes) -> tuple[Any]:
        if not self.kernels:
            raise Refused(RESULT.CUDA_ERROR_NO_BINARY_FOR_GPU)
        return (package.CUmodule(next(self._numbers)),)

    def _cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any]:
        return (package.CUfunction(next(self._numbers)),)

    def _cuLaunchKernel(self, function: Any, *given: Any) -> None:
        *shape, shared, stream, arguments, _ = given
        assert shape[1:3] == [1, 1] == shape[4:] and shape[0] > 0 and shared == 0
        at, count_at, _ = (ctypes.c_uint64 * 3).from_address(arguments)
        count = ctypes.c_uint32.from_address(count_at).value
        pieces = np.array((ctypes.c_uint64 * (3 * PIECES_MAX)).from_address(at), np.uint64).reshape(3, -1)[:, :count]
        targets, sources, nbytes = pieces
        self._copy("kernel", stream, self._reached(targets, nbytes), self._reached(sources, nbytes), nbytes)

    def _reached(self, at: Addresses, nbytes: Addresses) -> Addresses:
        """Where that lies for the host. A kernel reaches memory of the device, and registered memory as it sees it."""
        places = []
        for start, length in zip(at.tolist(), nbytes.tolist(), strict=True):
            if not self.device.owns(start):
                start -= SEEN_AT
                of = next((a for a, (size, _) in self.registered.items() if a <= start <= a + size - length), None)
                assert of is not None, "a kernel touches what the device does not reach"
                assert self.registered[of][1] & package.CU_MEMHOSTREGISTER_DEVICEMAP
            places.append(start)
        return np.array(places, np.uint64)

    def _copy(self, how: str, stream: Any, targets: Addresses, sources: Addresses, nbytes: Addresses) -> None:
        for begin, (size, flags) in self.registered.items():
            if flags & package.CU_MEMHOSTREGISTER_READ_ONLY:
                there = (targets < begin + size) & (targets + nbytes > begin)
                assert not there.any(), "memory that is registered read-only is written to"
        queue, owns = self._stream_at(stream), self.device.owns
        to, of = owns(int(targets[0])), owns(int(sources[0]))
        way = "within" if to and of else "to the device" if to else "to the host"
        taken_s = self.rate(how, way, len(nbytes), int(nbytes.max()))
        queue.copy(targets, sources, nbytes)
        queue.work.append(_Work(lambda: self._pass(taken_s), [], []))

    def _pass(self, taken_s: float) -> None:
        self.clock_s += taken_s


_ON_ERROR: Final = {"cuGetProcAddress": 2, "cuThreadExchangeStreamCaptureMode": 1}  # how much is returned all the same


@contextlib.contextmanager
def faked(patch: pytest.MonkeyPatch, fake: FakeDriver, *, measured: int = 1 << 12) -> Iterator[cuda.CudaDevice]:
    """The one device of this driver, as ``cuda.find`` finds it. What the driver was done wrong fails behind.

    Args:
        measured: bytes of a copy whose time is taken when the device is opened, on the driver's own clock.
    """

    def cubin(arch: int, folder: object) -> bytes:
        if not fake.kernels:
            raise Unavailable("NVRTC is not installed")
        return b"a cubin"

    patch.setattr(cuda, "begin", lambda: fake)
    patch.setattr(cuda, "is_loaded", lambda: True)
    patch.setattr(cuda, "cubin_for", cubin)
    patch.setattr(cuda, "MEASURED_BYTES", measured)
    patch.setattr(cuda, "LENGTHS", tuple(x for x in cuda.LENGTHS if x <= measured))
    clock = SimpleNamespace(perf_counter=lambda: fake.clock_s, monotonic=time.monotonic, sleep=time.sleep)
    patch.setattr(cuda, "time", clock)
    cuda._devices.cache_clear()
    try:
        (device,) = cuda.find().devices
        yield device
    finally:
        cuda._devices.cache_clear()
    assert not fake.mistakes, fake.mistakes
    assert not fake.stack and fake.mode == _GLOBAL, "contexts are left as they were found"
