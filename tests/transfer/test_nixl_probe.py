"""Whether NIXL reads a device's memory: what is asked of it, how long it may take, and what it says where it cannot."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict

import numpy as np
import pytest

from kvstore.cluster import nixl as nixl_agent
from kvstore.cluster.nixl import DRAM, VRAM, NixlAgent
from kvstore.device.host_memory import empty
from kvstore.node.operator import nixl_probe
from kvstore.node.operator.nixl_probe import try_read, why_not
from kvstore.tier.base import Bytes
from kvstore.wire.data import LentRun

with_nixl = pytest.mark.skipif(bool(nixl_agent.missing()), reason=f"NIXL: {nixl_agent.missing()}")


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def some(nbytes: int) -> Bytes:
    found = empty(nbytes)
    found[:] = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
    return found


class RecordingNixl:
    """What stands for NIXL's own agent: notes what it is given."""

    def __init__(self) -> None:
        self.said: list[tuple[object, ...]] = []

    def register_memory(self, *given: object) -> None:
        self.said.append(("register", *given))

    def prep_xfer_dlist(self, name: str, rows: np.ndarray, kind: str) -> object:
        self.said.append((name, rows.tolist(), kind))
        return object()

    def make_prepped_xfer(self, *given: object) -> object:
        return object()


def test_descriptors_of_a_devices_memory() -> None:
    """Kind and number of the device stand in what is registered and in what is read; where bytes go is the host's."""
    agent, nixl = object.__new__(NixlAgent), RecordingNixl()
    agent._lock, agent._errors = threading.Lock(), (RuntimeError,)
    agent._frame_lists, agent._agent = OrderedDict(), nixl
    agent.register_at(4096, 8192, 3, VRAM)
    run = LentRun(4096, 512, 8, 0, 2, 2)
    for kind, device in ((VRAM, 3), (DRAM, 0)):
        agent.post("owner", [run], 16, 100, [70_000, 80_000], kind, device)
    into = ("NIXL_INIT_AGENT", [[70_000, 100, 0], [80_000, 100, 0]], DRAM)
    assert nixl.said == [
        ("register", [(4096, 8192, 3, "")], VRAM),
        into,
        ("owner", [[4112, 100, 3, 512, 8]], VRAM),
        into,
        ("owner", [[4112, 100, 0, 512, 8]], DRAM),
    ], "one list for each kind of memory at an address"


def test_a_process_that_hangs_ends_itself() -> None:
    """Whoever began it may be gone by then."""
    code = """
import runpy, signal, time
from kvstore.device import cuda
setitimer = signal.setitimer
signal.setitimer = lambda which, seconds: setitimer(which, seconds / 100)
cuda.find = lambda: time.sleep(100)
runpy.run_module("kvstore.node.operator.nixl_probe", run_name="__main__")
"""
    assert why_not(python(code), 50) == "the test ended with -14"


@with_nixl
def test_one_agent_reads_what_another_one_has() -> None:
    memory = some(nixl_probe.NBYTES)
    assert try_read(memory.ctypes.data, 0, DRAM, memory) == ""
    assert try_read(memory.ctypes.data, 0, DRAM, memory[::-1].copy()) == "the reader received other bytes"


@with_nixl
def test_memory_that_is_no_devices_is_refused() -> None:
    """In a process of its own, which may crash when it ends."""
    code = """
import json, os
from kvstore.errors import Unavailable
from kvstore.device.host_memory import empty
from kvstore.node.operator.nixl_probe import try_read
memory = empty(1 << 20)
memory[:] = 1
try:
    found = try_read(memory.ctypes.data, 0, "VRAM", memory)
except Unavailable as error:
    found = str(error)
print(json.dumps(found), flush=True)
os._exit(0)
"""
    assert why_not(python(code), 100).startswith("nixl: cannot register memory of kind VRAM (")
