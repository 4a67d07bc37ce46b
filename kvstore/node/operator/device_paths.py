"""DevicePaths: the devices of this machine, by which ways bytes come to and from them, and why not by others.

A call to a driver may take seconds, may never return, and may end its process. So a process of its own asks, once,
where there is a driver at all; until it answers, readers get a report that says so. The report::

    missing    why there are no devices, "" where there are some
    devices    by name, what the maker calls it
    paths      by name, why bytes do not go that way, "": they do
      engines  between DRAM and HBM by copy engines, many pieces with one call
      kernel   the same by a kernel, which is faster for small pieces
      peers    from memory of a device that another process has, to a device that reaches it
      gds      from NVMe to HBM past DRAM
      nixl     between HBM of two machines

GPUDirect Storage: bytes of a file into a device's memory past the host's, by NVIDIA's cuFile, where that works.

cuFile on its own goes through host memory where it cannot do better, and says that it works. That mode is off here:
``why_not`` tells whether bytes of a file really come directly, and come right. It may hang or end the process, as its
driver may: ``device_paths`` asks it in a process of its own.

Pages do not come this way. Every page read from NVMe is proven by its checksums (xxh3, one after the other over its
bytes), and the host computes those. A page that came past the host would have to be copied back to be proven, over the
same bus that its bounce would have taken. So reads from NVMe go through pinned memory, as everywhere else, and this way
is tried and shown alone.

Whether NIXL reads a device's memory here: tried by one agent that registers some, and another one that reads it.

That depends on how its backend was built and on the system's modules: only trying tells. An agent that was refused may
crash when its process ends (that of NIXL 1.5 does), or hang. So a process of its own tries it, within a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore.cluster import nixl as nixl_agent
from kvstore.device import cuda
from kvstore.device.base import Device, DeviceLost
from kvstore.device.cuda_driver import absent
from kvstore.device.host_memory import empty
from kvstore.errors import Unavailable
from kvstore.tier.base import Bytes
from kvstore.wire.data import LentRun

PROBE_BYTES: Final = 64 << 10  # are read of a file, from its start
PROBES: Final = 3  # the file may be written to in the meantime
GDS_PROBE_S: Final = 5.0


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


def gds_why_not(device: CudaDevice, path: Path) -> str:
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
            stream.record().wait(time.monotonic() + GDS_PROBE_S)
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


NIXL_PROBE_S: Final = 20.0
READ_S: Final = 5.0
NBYTES: Final = 1 << 20

COMMAND: Final = (sys.executable, "-m", "kvstore.node.operator.device_paths")


def nixl_why_not(command: Sequence[str] = COMMAND, deadline_s: float = NIXL_PROBE_S) -> str:
    """Why NIXL does not read the memory of the first device, in one line; "": it does."""
    nowhere = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere)
    except OSError as error:
        return f"it cannot be tried ({error.strerror})"
    try:
        said, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()  # one that hangs in a driver cannot even be waited for
        return f"it did not answer in {deadline_s:g} s"
    try:
        return " ".join(str(json.loads(said)).split())
    except ValueError:
        return f"trying it ended with {child.returncode}"


def reads(address: int, ordinal: int, kind: str, expected: Bytes) -> str:
    """Why one agent does not read what another one has at that address; "": it does. Raises Unavailable."""
    owner, reader = (NixlAgent(f"kvstore-{os.getpid()}-{role}") for role in ("owner", "reader"))
    owner.register_at(address, len(expected), ordinal, kind)
    found = empty(len(expected))
    found[:] = 0
    reader.register(found)
    run = LentRun(address, len(expected), 1, 0, 0, 1)
    places = [found.ctypes.data]
    read = reader.post(reader.meet(owner.metadata()), [run], 0, len(expected), places, kind, ordinal)
    read.begin()
    if not read.wait(time.monotonic() + READ_S):
        return "no bytes came in time"
    return "" if (found == expected).all() else "other bytes came than were there"


def tried() -> str:
    """Try the first device: why no bytes go this way, "" where they do."""
    devices, missing = cuda.find()
    if missing:
        return missing
    device, expected = devices[0], empty(NBYTES)
    expected[:] = np.random.default_rng(2).integers(0, 256, NBYTES, np.uint8)
    try:
        memory, stream = device.allocate(NBYTES, shared=True), device.stream()
        stream.copy(*(np.array([n], np.uint64) for n in (memory.address, expected.ctypes.data, NBYTES)))
        stream.record().wait(time.monotonic() + READ_S)
        return reads(memory.address, 0, VRAM, expected)
    except Unavailable as error:
        return str(error)


if __name__ == "__main__":
    signal.setitimer(signal.ITIMER_REAL, NIXL_PROBE_S)  # no process may be left to end it
    sys.stdout.write(json.dumps(tried()))
    sys.stdout.flush()
    os._exit(0)  # what was said is not to be lost where agents do not end well


PROBE_S: Final = 60.0  # for all of it
COPY_S: Final = 10.0
COPIED_BYTES: Final = 1 << 20

UNUSED: Final = "it works, and no page goes that way yet"

Report = dict[str, Any]


class DevicePaths:
    """For one process. Threads share it.

    Args:
        nvme: files or block devices that NVMe pages lie in.
    """

    def __init__(self, nvme: Sequence[str]) -> None:
        self._nvme = list(nvme)
        self._lock = threading.Lock()
        self._report: Report | None = None

    def look(self) -> Report:
        """What is known now; the first look begins to ask. Waits for nothing."""
        with self._lock:
            if self._report is None:
                why = absent()
                self._report = nothing(why or "the NVIDIA driver is being asked")
                if not why:
                    threading.Thread(target=self._ask, name="kvstore-devices", daemon=True).start()
            return self._report

    def _ask(self) -> None:
        command = [sys.executable, "-m", "kvstore.node.operator.device_paths", *self._nvme]
        self._report = asked(command, PROBE_S)


@lru_cache(maxsize=8)
def paths_of(nvme: tuple[str, ...]) -> DevicePaths:
    """The device paths of this process, shared by its nodes."""
    return DevicePaths(nvme)


def asked(command: Sequence[str], deadline_s: float) -> Report:
    """What a process says that asks."""
    nowhere = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=nowhere, stdout=subprocess.PIPE, stderr=nowhere)
    except OSError as error:
        return nothing(f"the NVIDIA driver cannot be asked ({error.strerror})")
    try:
        said, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()  # one that hangs in its driver cannot even be waited for
        return nothing(f"the NVIDIA driver did not answer in {deadline_s:g} s")
    return understood(said, child.returncode)


def nothing(why: str) -> Report:
    """There are no devices."""
    return {"missing": why, "devices": {}, "paths": {}}


def understood(said: bytes, code: int) -> Report:
    """What the process said that asked, and how it ended."""
    if code < 0:
        return nothing(f"asking the NVIDIA driver ended with {signal.Signals(-code).name}")
    try:
        found = json.loads(said)
        return {part: found[part] for part in ("missing", "devices", "paths")}
    except (ValueError, KeyError, TypeError):
        return nothing(f"asking the NVIDIA driver ended with {code}")


# --- In a process of its own ----------------------------------------------------------------------------------------


def ask(nvme: Sequence[str]) -> Report:
    """Try each way. It may never return."""
    devices, missing = cuda.find()
    if missing:
        return nothing(missing)
    first = devices[0]
    try:
        wrong = copies(first)
        kernel = first.kernel_missing
        many = "" if first.batches else "the driver is older than CUDA 12.8: each piece is a call"
        peers = peers_of(devices)
        direct = "; ".join(filter(None, (gds.why_not(first, Path(path)) for path in nvme))) if nvme else "no NVMe here"
        direct = direct or UNUSED
    except Unavailable as error:
        return nothing(str(error))
    nixl = nixl_agent.missing() or nixl_probe.why_not() or UNUSED
    paths = {"engines": wrong or many, "kernel": wrong or kernel, "peers": peers, "gds": direct, "nixl": nixl}
    return {"missing": "", "devices": {device.name: device.model for device in devices}, "paths": paths}


def copies(device: Device) -> str:
    """Why bytes do not come to a device and back as they were; "": they do. Raises Unavailable."""
    source, back, memory, stream = (
        empty(COPIED_BYTES),
        empty(COPIED_BYTES),
        device.allocate(COPIED_BYTES),
        device.stream(),
    )
    source[:] = np.random.default_rng(1).integers(0, 256, COPIED_BYTES, np.uint8)
    for target, origin in ((memory.address, source.ctypes.data), (back.ctypes.data, memory.address)):
        stream.copy(*(np.array([n], np.uint64) for n in (target, origin, COPIED_BYTES)))
    stream.record().wait(time.monotonic() + COPY_S)
    memory.free()
    return "" if (source == back).all() else "other bytes came back than were sent"


def peers_of(devices: Sequence[Device]) -> str:
    """Why memory does not go from device to device; "": it does, between all of them, and between processes."""
    first = devices[0]
    memory = first.allocate(COPIED_BYTES, shared=True)
    try:
        found = first.export(memory.address)
        if found.descriptor >= 0:
            os.close(found.descriptor)
    except DeviceLost:
        raise
    except Unavailable as error:
        return f"memory cannot be shown to other processes ({error})"
    finally:
        memory.free()
    apart = [f"{to.name} from {of.name}" for to in devices for of in devices if to.reach(of.uuid)]
    return f"by way of the host where it would be to {', '.join(apart)}" if apart else ""


if __name__ == "__main__":
    signal.setitimer(signal.ITIMER_REAL, PROBE_S)  # no process may be left to end it
    paths = [os.path.abspath(path) for path in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # cuFile leaves its log where it is asked
        sys.stdout.write(json.dumps(ask(paths)))
