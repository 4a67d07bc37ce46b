"""The CUDA driver in this process: whether there is one, its primary contexts, and its errors as ours.

Only the modules ``cuda*`` of this folder call it. All of them import it late: without the package, without a driver and
with an old one the same install works, and ``begin`` says in one line why there is none.

A primary context is what every library of a process shares on a device, PyTorch among them. A call is made with it on
top of the calling thread's stack of contexts, and the stack is left as it was found.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from kvstore.errors import KVStoreError, OutOfSpace, Unavailable
from kvstore.tier.device import DeviceLost

VERSION_MIN: Final = 12000  # of CUDA, as the driver counts: that of the oldest driver whose calls all of this has
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
    """The driver refused a call, and goes on. ``code``: its name of the error."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


def fault(code: str, call: str) -> KVStoreError:
    """An error of the driver, by its name, as one of ours."""
    reason = f"cuda: {call}: {code}"
    if code in LOST:
        return DeviceLost(reason)
    return OutOfSpace(reason) if code == OUT_OF_MEMORY else DriverError(reason, code)


def call(function: Callable[..., Any], *arguments: object) -> Any:
    """What a call of the driver returns in addition to its code: nothing, a thing, or a tuple. Raises as ``fault``."""
    code, *found = answered(function, *arguments)
    if code != SUCCESS:
        raise fault(code, function.__name__)
    return found[0] if len(found) == 1 else tuple(found) or None


def answered(function: Callable[..., Any], *arguments: object) -> tuple[Any, ...]:
    """What a call of the driver returns, the name of its code first.

    Raises:
        DriverError: the driver has no such call, or its code is one that the package does not know.
    """
    try:
        code, *found = function(*arguments)
    except (RuntimeError, ValueError, KeyError) as error:
        raise DriverError(f"cuda: {function.__name__}: {str(error).partition(chr(10))[0]}") from None
    return code.name, *found


def absent() -> str:
    """Why there can be no driver, seen without asking it for anything; "": ``begin`` would tell."""
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


@cache
def begin() -> Any:
    """The package's module of the driver, which has begun. Raises Unavailable: one line why there is none."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError:
        raise Unavailable(NO_PACKAGE) from None
    if why := absent():  # by cuInit it would be an error of a kind that differs between versions of the package
        raise Unavailable(why)
    try:
        (code,) = answered(driver.cuInit, 0)
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
    """Why a driver of that version is not used; "": it is."""
    if version >= VERSION_MIN:
        return ""
    return f"the NVIDIA driver is too old (CUDA {_shown(version)}, not {_shown(VERSION_MIN)} or later)"


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


class PrimaryContext:
    """A device's primary context. Kept until the process ends, as it is others' as well.

    Attributes:
        lost: why nothing works any more; "" while it does.
        context: the driver's.
    """

    def __init__(self, driver: Any, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self.device = call(driver.cuDeviceGet, ordinal)
        self.lost = ""
        self.context = call(driver.cuDevicePrimaryCtxRetain, self.device)

    def attribute(self, name: str) -> int:
        """What the driver says of the device, by the name after ``CU_DEVICE_ATTRIBUTE_``."""
        attribute = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(call(self.driver.cuDeviceGetAttribute, attribute, self.device))

    def current(self) -> CurrentContext:
        """``with``: calls of this thread are to this device. Raises DeviceLost."""
        return CurrentContext(self)

    def let_go(self, function: Callable[..., Any], handle: object) -> None:
        """Give up an event or a stream: when nobody knows it any more, in whichever thread."""
        with contextlib.suppress(Unavailable), self.current():  # where the device is lost, they are as well
            function(handle)


class CurrentContext:
    """See ``PrimaryContext.current``.

    Another thread may be recording a CUDA graph; while one does, the driver refuses some calls of all threads, and ends
    the recording. Nothing of ours belongs to a recording, so that ours are exempt.
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
