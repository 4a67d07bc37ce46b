"""A test of whether NIXL can read device memory on this machine: one agent registers memory, another one reads it.

The result depends on how NIXL's backend was built and on kernel modules, so only a trial shows it. An agent whose
registration was refused may hang, or crash when its process ends (NIXL 1.5 does). So the test runs in a process of its
own, with a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from kvstore.cluster.nixl import VRAM, NixlAgent
from kvstore.device import cuda
from kvstore.device.host_memory import empty
from kvstore.errors import Unavailable
from kvstore.tier.base import Bytes
from kvstore.wire.data import LentRun

PROBE_S: Final = 20.0
READ_S: Final = 5.0
NBYTES: Final = 1 << 20

COMMAND: Final = (sys.executable, "-m", "kvstore.node.operator.nixl_probe")


def why_not(command: Sequence[str] = COMMAND, deadline_s: float = PROBE_S) -> str:
    """Return in one line why NIXL cannot read the memory of the first device, or "" if it can."""
    devnull = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, stdin=devnull, stdout=subprocess.PIPE, stderr=devnull)
    except OSError as error:
        return f"the test did not start ({error.strerror})"
    try:
        output, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()  # without waiting: a process that hangs in a driver may never end
        return f"the test did not answer in {deadline_s:g} s"
    try:
        return " ".join(str(json.loads(output)).split())
    except ValueError:
        return f"the test ended with {child.returncode}"


def try_read(address: int, ordinal: int, kind: str, expected: Bytes) -> str:
    """Return why one agent cannot read what another one registered at ``address``, or "" if it can.

    Raises:
        Unavailable: NIXL refused the registration or the read.
    """
    owner, reader = (NixlAgent(f"kvstore-{os.getpid()}-{role}") for role in ("owner", "reader"))
    owner.register_at(address, len(expected), ordinal, kind)
    actual = empty(len(expected))
    actual[:] = 0
    reader.register(actual)
    run = LentRun(address, len(expected), 1, 0, 0, 1)
    places = [actual.ctypes.data]
    read = reader.post(reader.meet(owner.metadata()), [run], 0, len(expected), places, kind, ordinal)
    read.begin()
    if not read.wait(time.monotonic() + READ_S):
        return "no bytes arrived in time"
    return "" if (actual == expected).all() else "the reader received other bytes"


def probe_first_device() -> str:
    """Return why NIXL cannot read the memory of the first device, or "" if it can. May never return."""
    devices, missing = cuda.find()
    if missing:
        return missing
    device, expected = devices[0], empty(NBYTES)
    expected[:] = np.random.default_rng(2).integers(0, 256, NBYTES, np.uint8)
    try:
        memory, stream = device.allocate(NBYTES, shared=True), device.stream()
        stream.copy(*(np.array([n], np.uint64) for n in (memory.address, expected.ctypes.data, NBYTES)))
        stream.record().wait(time.monotonic() + READ_S)
        return try_read(memory.address, 0, VRAM, expected)
    except Unavailable as error:
        return str(error)


if __name__ == "__main__":
    signal.setitimer(signal.ITIMER_REAL, PROBE_S)  # the process ends itself: its parent may have ended before
    sys.stdout.write(json.dumps(probe_first_device()))
    sys.stdout.flush()
    os._exit(0)  # without NIXL's cleanup, which may crash after the answer is written
