"""GPUDirect Storage: NVIDIA's cuFile reads bytes of a file into device memory without a copy in host memory.

By default cuFile falls back to host memory and still reports success. Here that fallback is off: ``why_not`` finds out
whether the bytes of a file arrive directly, and unchanged. A call may hang or end the process, because the driver may,
so ``device_paths`` makes it in a process of its own.

The store does not read pages this way; it only reports whether the path works. Every page read from NVMe is proven by
its checksums (xxh3, which is sequential over the bytes), and the host computes them. A page in device memory would have
to be copied back for that, over the same bus that the copy through host memory takes. So reads from NVMe go through
pinned memory.
"""

from __future__ import annotations

import importlib
import os
import time
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.device.cuda import CudaDevice
from kvstore.device.host_memory import empty
from kvstore.errors import Unavailable
from kvstore.tier.base import Bytes

PROBE_BYTES: Final = 64 << 10  # read from the start of the file
PROBES: Final = 3  # another process may write to the file between the two reads of a probe
PROBE_S: Final = 5.0


class DirectFile:
    """A file that is registered with cuFile until ``close``.

    Raises:
        Unavailable: cuFile is not installed, or cannot read this file directly.
    """

    def __init__(self, device: CudaDevice, path: Path) -> None:
        self._device = device
        self._cufile = _open_cufile()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from None
        descriptor = self._cufile.Descr()
        descriptor.type = int(self._cufile.FileHandleType.OPAQUE_FD)
        descriptor.handle.fd, descriptor.fs_ops = self._fd, 0
        try:
            with device.current():  # cuFile calls the driver in the current context
                self._handle = self._cufile.handle_register(descriptor.ptr)
        except self._cufile.cuFileError as error:
            os.close(self._fd)
            raise Unavailable(f"{path}: {_first_line(error)}") from None

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Read bytes of the file into device memory, and return when they are there. The call has no deadline.

        ``address``, ``nbytes`` and ``offset`` are multiples of 4096.

        Raises:
            Unavailable: cuFile failed, or the file is too short.
        """
        done = 0
        while done < nbytes:  # a read may return fewer bytes than requested
            try:
                with self._device.current():
                    count = self._cufile.read(self._handle, address, nbytes - done, offset + done, done)
            except self._cufile.cuFileError as error:
                raise Unavailable(_first_line(error)) from None
            if count <= 0:
                raise Unavailable(f"cuFile read only {done} of {nbytes} bytes")
            done += count

    def read_by_host(self, out: Bytes) -> int:
        """Read the start of the file into host memory and return the number of bytes read. Raises Unavailable."""
        try:
            return os.preadv(self._fd, [out.data], 0)
        except OSError as error:
            raise Unavailable(str(error.strerror)) from None

    def close(self) -> None:
        """End the registration. No read may be in progress."""
        self._cufile.handle_deregister(self._handle)
        os.close(self._fd)


def why_not(device: CudaDevice, path: Path) -> str:
    """Return why bytes of this file do not reach the device directly, or "" if they do. May never return."""
    try:
        file = DirectFile(device, path)
    except Unavailable as error:
        return str(error)
    memory, stream = device.allocate(PROBE_BYTES), device.stream()
    actual, expected = empty(PROBE_BYTES), empty(PROBE_BYTES)
    try:
        for _ in range(PROBES):
            file.read(memory.address, PROBE_BYTES, 0)
            stream.copy(*(np.array([n], np.uint64) for n in (actual.ctypes.data, memory.address, PROBE_BYTES)))
            stream.record().wait(time.monotonic() + PROBE_S)
            if file.read_by_host(expected) == PROBE_BYTES and (actual == expected).all():
                return ""
    except Unavailable as error:
        return str(error)
    finally:
        file.close()
        memory.free()
    return f"{path}: the device received other bytes than the file has"


@cache
def _open_cufile() -> Any:
    """Return the cuFile module, opened without the fallback to host memory. Raises Unavailable."""
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError:
        raise Unavailable("cuda-python has no cuFile here") from None
    try:
        cufile.set_parameter_bool(int(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE), False)
        cufile.driver_open()
    except cufile.cuFileError as error:
        raise Unavailable(_first_line(error)) from None
    except RuntimeError:  # the first call loads the library
        raise Unavailable("cuFile is not installed") from None
    return cufile


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
