"""NixlAgent: NIXL in this process, as far as we use it: memory is registered, and read out of other processes.

The package is optional. Its agent has no calls with a deadline, and what was posted cannot be taken back for certain:
callers wait here, and keep what does not end.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import threading
import time
from collections import OrderedDict
from functools import cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import Unavailable
from kvstore.transfer.lending import LentRun

PACKAGES: Final = ("nixl", "nixl_cu12", "nixl_cu13")
BACKEND: Final = "UCX"
DRAM, VRAM = "DRAM", "VRAM"  # kinds of memory, as NIXL has them
PREPARED_MAX: Final = 256  # descriptor lists of other nodes' extents that are kept
PAUSE_S: Final = 50e-6  # between two looks whether a read has ended

Rows = npt.NDArray[np.uint8]


@cache
def missing() -> str:
    """Why there is none on this machine; "": there is."""
    if any(importlib.util.find_spec(name) is not None for name in PACKAGES):
        return ""
    return "not installed"


class NixlAgent:
    """One agent. Threads share it; one of them at a time is in NIXL.

    Life: made, which takes half a second -> memory is registered, others are known -> dropped, with all of that.

    Args:
        name: no other agent that it meets has it.

    Raises:
        Unavailable: the package is missing, or cannot be used.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._kept: list[Rows] = []  # what is registered may not be unmapped
        self._prepared: OrderedDict[tuple[object, ...], Any] = OrderedDict()
        api = _api()
        errors = vars(importlib.import_module(f"{api.__package__}._bindings"))
        found = [kind for kind in errors.values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self._errors: tuple[type[Exception], ...] = (*found, RuntimeError)
        with self._saying("no agent"):
            self._agent: Any = api.nixl_agent(name, api.nixl_agent_config(True, False, 0, backends=[BACKEND]))
            if BACKEND not in self._agent.backends:
                raise Unavailable(f"nixl: there is no {BACKEND}")

    def register(self, rows: Rows) -> None:
        """Let other nodes read this memory, and us read into it, as long as the agent lives. Raises Unavailable."""
        with self._saying("cannot register memory"):
            self._agent.register_memory([(rows.ctypes.data, rows.nbytes, 0, "")], DRAM)
            self._kept.append(rows)

    def register_at(self, address: int, nbytes: int, device: int, kind: str) -> None:
        """Register memory that the caller keeps, of a device if its kind is VRAM. Raises Unavailable: the backend does
        not reach it."""
        with self._saying(f"cannot register memory of kind {kind}"):
            self._agent.register_memory([(address, nbytes, device, "")], kind)

    def metadata(self) -> bytes:
        """What another agent has to know of this one. Raises Unavailable."""
        with self._saying("has no metadata"):
            return bytes(self._agent.get_agent_metadata())

    def meet(self, metadata: bytes) -> str:
        """The name of another agent, whose memory can be read from now on. Raises Unavailable."""
        with self._saying("the other end's metadata makes no sense"):
            found = self._agent.add_remote_agent(metadata)
            return found.decode() if isinstance(found, bytes) else str(found)

    def part_from(self, name: str) -> None:
        """Forget another agent."""
        with self._lock:
            for key in [key for key in self._prepared if key[0] == name]:
                del self._prepared[key]
            try:
                self._agent.remove_remote_agent(name)
            except self._errors as error:
                logging.getLogger("kvstore.data").debug("nixl: %s", error)

    def post(
        self,
        name: str,
        runs: list[LentRun],
        offset: int,
        length: int,
        places: list[int],
        kind: str = DRAM,
        device: int = 0,
    ) -> NixlRead:
        """Begin to read bytes ``offset`` to ``offset + length`` of each page of these runs into memory at ``places``.

        Args:
            kind, device: what memory the runs are in.

        Raises:
            Unavailable: nothing was posted.
        """
        with self._saying("cannot read"):
            local = np.array([(place, length, 0) for place in places], np.uint64)
            into, at, reads = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, DRAM), 0, []
            for run in runs:
                here = np.arange(at, at + run.pages, dtype=np.int32)
                there = np.arange(run.frame, run.frame + run.pages, dtype=np.int32)
                frames = self._frames_of(name, run, offset, length, kind, device)
                reads.append(self._agent.make_prepped_xfer("READ", into, here, frames, there))
                at += run.pages
        return NixlRead(self, into, reads)

    def _frames_of(self, name: str, run: LentRun, offset: int, length: int, kind: str, device: int) -> Any:
        """The prepared list of that part of every frame of an extent."""
        key = name, run.address, run.frames, run.stride, offset, length, kind, device
        if key not in self._prepared:
            row = np.array([[run.address + offset, length, device, run.stride, run.frames]], np.uint64)
            self._prepared[key] = self._agent.prep_xfer_dlist(name, row, kind)
            while len(self._prepared) > PREPARED_MAX:
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return self._prepared[key]

    def transfer(self, read: Any) -> str:
        """Post one; as ``state``. Raises Unavailable: it may have been posted, or not."""
        with self._saying("cannot read"):
            return str(self._agent.transfer(read))

    def state(self, read: Any) -> str:
        """DONE or PROC; ERR: nobody knows whether its bytes may still land. Raises Unavailable, which is the same."""
        with self._saying("the read failed"):
            return str(self._agent.check_xfer_state(read))

    def _saying(self, what: str) -> _Saying:
        return _Saying(self, what)


class _Saying:
    """The agent's lock, and an error of NIXL as one of ours."""

    def __init__(self, agent: NixlAgent, what: str) -> None:
        self._agent = agent
        self._what = what

    def __enter__(self) -> None:
        self._agent._lock.acquire()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._agent._lock.release()
        if isinstance(error, self._agent._errors):
            raise Unavailable(f"nixl: {self._what} ({error})") from None


class NixlRead:
    """Reads that were prepared together. Life: ``begin`` -> ``wait``, until it is over; one that never is is kept."""

    def __init__(self, agent: NixlAgent, into: Any, reads: list[Any]) -> None:
        self._agent = agent
        self._into = into  # is in use as long as they are
        self._reads = reads

    def begin(self) -> None:
        """Post them. Raises Unavailable: some may have been."""
        self._reads = [read for read in self._reads if self._agent.transfer(read) != "DONE"]

    def over(self) -> bool:
        """Whether all have brought their bytes. Raises Unavailable: they will not, and some may land all the same."""
        while self._reads:
            state = self._agent.state(self._reads[-1])
            if state == "PROC":
                return False
            if state != "DONE":
                raise Unavailable(f"nixl: the read ended with {state}")
            self._reads.pop()
        return True

    def wait(self, until_s: float) -> bool:
        """Wait until ``over`` is true, at most until ``until_s``; returns whether it is. Raises as ``over``."""
        while not self.over():
            if time.monotonic() >= until_s:
                return False
            time.sleep(PAUSE_S)
        return True


def _api() -> Any:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            found = importlib.import_module(f"{name}._api")
        except ImportError as error:
            raise Unavailable(f"nixl: cannot be used ({error})") from None
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it tells stdout of every agent
        return found
    raise Unavailable(f"nixl: {missing()}")
