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
from kvstore.node.operator import gds, nixl_probe

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
