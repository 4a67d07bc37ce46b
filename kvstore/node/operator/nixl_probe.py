"""Whether NIXL reads a device's memory here: tried by one agent that registers some, and another one that reads it.

That depends on how its backend was built and on the system's modules: only trying tells. An agent that was refused may
crash when its process ends (that of NIXL 1.5 does), or hang. So a process of its own tries it, within a deadline.
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
    signal.setitimer(signal.ITIMER_REAL, PROBE_S)  # no process may be left to end it
    sys.stdout.write(json.dumps(tried()))
    sys.stdout.flush()
    os._exit(0)  # what was said is not to be lost where agents do not end well
