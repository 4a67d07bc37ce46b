"""The devices of this machine, and which copy paths to and from them work.

A call to a driver may take seconds, never return, or end its process. So if there is a driver, a separate process tests
it, once. Until that process answers, the report says that the driver is being asked. The report::

    missing    why there are no devices, or "" if there are some
    devices    device name -> the maker's name for it
    paths      path name -> why it does not work, or "" if it does
      engines  between DRAM and HBM by copy engines, many pieces per call
      kernel   between DRAM and HBM by a kernel, which is faster for small pieces
      peers    from device memory of another process to a device that can access it
      gds      from NVMe to HBM without DRAM
      nixl     between the HBM of two machines
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

PROBE_S: Final = 60.0  # for all tests together
COPY_S: Final = 10.0
COPIED_BYTES: Final = 1 << 20

UNUSED: Final = "works, but no page uses it yet"

Report = dict[str, Any]


class DevicePaths:
    """The report of one process, for any number of threads.

    Args:
        nvme: the files or block devices with the NVMe pages.
    """

    def __init__(self, nvme: Sequence[str]) -> None:
        self._nvme = list(nvme)
        self._lock = threading.Lock()
        self._report: Report | None = None

    def look(self) -> Report:
        """Return the current report without waiting. The first call starts the tests."""
        with self._lock:
            if self._report is None:
                why = absent()
                self._report = no_devices(why or "the NVIDIA driver is being asked")
                if not why:
                    threading.Thread(target=self._probe, name="kvstore-devices", daemon=True).start()
            return self._report

    def _probe(self) -> None:
        command = [sys.executable, "-m", "kvstore.node.operator.device_paths", *self._nvme]
        self._report = probe_in_process(command, PROBE_S)


@lru_cache(maxsize=8)
def paths_of(nvme: tuple[str, ...]) -> DevicePaths:
    """Return the device paths of this process. Nodes with the same targets share them."""
    return DevicePaths(nvme)


def probe_in_process(command: Sequence[str], deadline_s: float) -> Report:
    """Run ``command``, which prints a report, and return that report."""
    devnull = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=devnull, stdout=subprocess.PIPE, stderr=devnull)
    except OSError as error:
        return no_devices(f"the NVIDIA driver cannot be asked ({error.strerror})")
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: a process that hangs in a driver may never end
        return no_devices(f"the NVIDIA driver did not answer in {deadline_s:g} s")
    if child.returncode < 0:
        return no_devices(f"asking the NVIDIA driver ended with {signal.Signals(-child.returncode).name}")
    try:
        report = json.loads(output)
        return {part: report[part] for part in ("missing", "devices", "paths")}
    except (ValueError, KeyError, TypeError):
        return no_devices(f"asking the NVIDIA driver ended with {child.returncode}")


def no_devices(why: str) -> Report:
    """Return the report of a machine without usable devices."""
    return {"missing": why, "devices": {}, "paths": {}}


# --- In a process of its own ----------------------------------------------------------------------------------------


def probe(nvme: Sequence[str]) -> Report:
    """Test each path and return the report. May never return."""
    devices, missing = cuda.find()
    if missing:
        return no_devices(missing)
    first = devices[0]
    try:
        copy_fault = copy_both_ways(first)
        kernel = first.kernel_missing
        engines = "" if first.batches else "the driver is older than CUDA 12.8: each piece is a call"
        peers = peers_of(devices)
        direct = "; ".join(filter(None, (gds.why_not(first, Path(path)) for path in nvme))) if nvme else "no NVMe here"
    except Unavailable as error:
        return no_devices(str(error))
    paths = {
        "engines": copy_fault or engines,
        "kernel": copy_fault or kernel,
        "peers": peers,
        "gds": direct or UNUSED,
        "nixl": nixl_agent.missing() or nixl_probe.why_not() or UNUSED,
    }
    return {"missing": "", "devices": {device.name: device.model for device in devices}, "paths": paths}


def copy_both_ways(device: Device) -> str:
    """Copy bytes to the device and back. Return what is wrong with them, or "" if they are equal. Raises
    Unavailable."""
    source, back = empty(COPIED_BYTES), empty(COPIED_BYTES)
    memory, stream = device.allocate(COPIED_BYTES), device.stream()
    source[:] = np.random.default_rng(1).integers(0, 256, COPIED_BYTES, np.uint8)
    for target, origin in ((memory.address, source.ctypes.data), (back.ctypes.data, memory.address)):
        stream.copy(*(np.array([n], np.uint64) for n in (target, origin, COPIED_BYTES)))
    stream.record().wait(time.monotonic() + COPY_S)
    memory.free()
    return "" if (source == back).all() else "the device returned other bytes"


def peers_of(devices: Sequence[Device]) -> str:
    """Return why memory cannot be copied between all devices and between processes, or "" if it can."""
    first = devices[0]
    memory = first.allocate(COPIED_BYTES, shared=True)
    try:
        exported = first.export(memory.address)
        if exported.descriptor >= 0:
            os.close(exported.descriptor)
    except DeviceLost:
        raise
    except Unavailable as error:
        return f"the driver does not export memory to other processes ({error})"
    finally:
        memory.free()
    apart = [f"{to.name} from {of.name}" for to in devices for of in devices if to.reach(of.uuid)]
    return f"through the host for {', '.join(apart)}" if apart else ""


if __name__ == "__main__":
    signal.setitimer(signal.ITIMER_REAL, PROBE_S)  # the process ends itself: its parent may have ended before
    paths = [os.path.abspath(path) for path in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # cuFile writes its log to the current folder
        sys.stdout.write(json.dumps(probe(paths)))
