"""GPUDirect Storage: bytes of a file into a device's memory past the host's, by NVIDIA's cuFile, where that works.

cuFile on its own goes through host memory where it cannot do better, and says that it works. That mode is off here:
``why_not`` tells whether bytes of a file really come directly, and come right. It may hang or end the process, as its
driver may: ``device_paths`` asks it in a process of its own.

Pages do not come this way. Every page read from NVMe is proven by its checksums (xxh3, one after the other over its
bytes), and the host computes those. A page that came past the host would have to be copied back to be proven, over the
same bus that its bounce would have taken. So reads from NVMe go through pinned memory, as everywhere else, and this way
is tried and shown alone.
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

PROBE_BYTES: Final = 64 << 10  # are read of a file, from its start
PROBES: Final = 3  # the file may be written to in the meantime
PROBE_S: Final = 5.0


class DirectFile:
    """A file as cuFile reads it, from when it is made until ``close``.

    Raises:
        Unavailable: there is no cuFile, or it cannot read this file directly.
    """

    def __init__(self, device: CudaDevice, path: Path) -> None:
        self._device = device
        self._cufile = _begun()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"{path}: {error.strerror}") from None
        about = self._cufile.Descr()
        about.type, about.handle.fd, about.fs_ops = int(self._cufile.FileHandleType.OPAQUE_FD), self._fd, 0
        try:
            with device.current():  # cuFile asks the driver on its own
                self._handle = self._cufile.handle_register(about.ptr)
        except self._cufile.cuFileError as error:
            os.close(self._fd)
            raise Unavailable(f"{path}: {_first_line(error)}") from None

    def read(self, address: int, nbytes: int, offset: int) -> None:
        """Bring bytes of the file to this address; all are multiples of 4096. When it returns they are there. It knows
        no deadline. Raises Unavailable."""
        done = 0
        while done < nbytes:  # as with all files, less than what was asked for may come at once
            try:
                with self._device.current():
                    more = self._cufile.read(self._handle, address, nbytes - done, offset + done, done)
            except self._cufile.cuFileError as error:
                raise Unavailable(_first_line(error)) from None
            if more <= 0:
                raise Unavailable(f"{done} of {nbytes} bytes came")
            done += more

    def by_host(self, out: Bytes) -> int:
        """Its first bytes, read into host memory: how many came. Raises Unavailable."""
        try:
            return os.preadv(self._fd, [out.data], 0)
        except OSError as error:
            raise Unavailable(str(error.strerror)) from None

    def close(self) -> None:
        """Nothing may be under way."""
        self._cufile.handle_deregister(self._handle)
        os.close(self._fd)


def why_not(device: CudaDevice, path: Path) -> str:
    """Why bytes of this file do not come to the device directly; "": they do. It may never return."""
    try:
        file = DirectFile(device, path)
    except Unavailable as error:
        return str(error)
    memory, stream, found, wanted = (
        device.allocate(PROBE_BYTES),
        device.stream(),
        empty(PROBE_BYTES),
        empty(PROBE_BYTES),
    )
    try:
        for _ in range(PROBES):
            file.read(memory.address, PROBE_BYTES, 0)
            stream.copy(*(np.array([n], np.uint64) for n in (found.ctypes.data, memory.address, PROBE_BYTES)))
            stream.record().wait(time.monotonic() + PROBE_S)
            if file.by_host(wanted) == PROBE_BYTES and (found == wanted).all():
                return ""
    except Unavailable as error:
        return str(error)
    finally:
        file.close()
        memory.free()
    return f"{path}: other bytes came than are in the file"


@cache
def _begun() -> Any:
    """cuFile, begun without its mode through host memory. Raises Unavailable."""
    try:
        cufile = importlib.import_module("cuda.bindings.cufile")
    except ImportError:
        raise Unavailable("cuda-python has no cuFile here") from None
    try:
        cufile.set_parameter_bool(int(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE), False)
        cufile.driver_open()
    except cufile.cuFileError as error:
        raise Unavailable(_first_line(error)) from None
    except RuntimeError:  # the library itself is loaded by the first call
        raise Unavailable("cuFile is not installed") from None
    return cufile


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
