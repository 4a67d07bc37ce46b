"""Copies of a world: the product copies pages to and from NVMe, over a disk in memory, one stage at a time.

A copy runs in a thread of its own, and never at the same time as anything else: ``Flight.step`` lets it go on to its
next pause. A copy pauses before it writes frames, before it makes them durable, and after it has read frames.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from kvstore.model.replica import FrameClass
from kvstore.node.nvme_pages import NvmePages
from kvstore.state import instructions as do
from kvstore.tier.base import Bytes
from kvstore.tier.nvme.devices import NvmeDevices
from kvstore.tier.nvme.disk import BLOCK_BYTES
from kvstore.tier.nvme.table import Superblock
from tests.helpers.nvme.faulty_disk import FaultyDisk
from tests.helpers.nvme.inline_io import InlineIo

STEP_S_MAX = 60.0  # of a copy, however slow the machine is


class WorldDisk(FaultyDisk):
    """A disk with room for ``positions`` extents. ``failed``: positions that take no more writes."""

    def __init__(self, extent_bytes: int, positions: int, seed: int = 1) -> None:
        size = 2 * BLOCK_BYTES + positions * extent_bytes
        while (planned := Superblock.plan(1, "", size, extent_bytes, bytes(16))).positions < positions:
            size += BLOCK_BYTES
        super().__init__(size, seed, "/world")
        self.extent_bytes, self.positions = extent_bytes, positions
        self.failed: set[int] = set()
        self._start = planned.data_start

    def write(self, offset: int, buffers: Sequence[Bytes]) -> None:
        """See ``Disk``."""
        if (offset - self._start) // self.extent_bytes in self.failed:
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
        super().write(offset, buffers)


class Stopped(BaseException):
    """Raised in a copy whose node is dead."""


class _Worker(threading.Thread):
    """Runs flights, one after another: a thread takes longer to start than most copies take."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._next = threading.Semaphore(0)
        self._run: Callable[[], None] = lambda: None
        self.start()

    def begin(self, run: Callable[[], None]) -> None:
        """Run this next."""
        self._run = run
        self._next.release()

    def run(self) -> None:
        """See ``Thread``."""
        while True:
            self._next.acquire()
            self._run()


_idle: list[_Worker] = []


class Flight:
    """A copy under way. Once it is ``over``, ``done`` is what came of it, which the state has yet to hear."""

    def __init__(self, copy: do.Save | do.Load | do.Carry | do.Erase) -> None:
        self.copy = copy
        self.over = False
        self.done: Any = None
        self.look: Callable[[], None] = lambda: None
        self._error: BaseException | None = None
        self._begun = self._stopped = False
        self._go, self._here = threading.Semaphore(0), threading.Semaphore(0)

    def step(self, work: Callable[[], Any]) -> None:
        """Begin ``work``, or go on with it, up to its next pause or its end."""
        if self._begun:
            self._go.release()
        else:
            self._begun = True
            worker = _idle.pop() if _idle else _Worker()
            worker.begin(lambda: self._run(work, worker))
        assert self._here.acquire(timeout=STEP_S_MAX), "a copy does not go on"
        if self._error is not None:
            raise self._error

    def _run(self, work: Callable[[], Any], worker: _Worker) -> None:
        try:
            self.done = work()
        except Stopped:
            pass
        except BaseException as error:  # of whoever steps
            self._error = error
        self.over = True
        _idle.append(worker)
        self._here.release()

    def pause(self) -> None:
        """Let others go on; then ``look`` checks that this copy may."""
        self._here.release()
        self._go.acquire()
        if self._stopped:
            raise Stopped
        self.look()

    def stop(self) -> None:
        """End the copy where it is."""
        if self._begun and not self.over:
            self._stopped = True
            self.step(lambda: None)


class StagedDevices(NvmeDevices):
    """Devices that let others go on around what a ``flight`` reads and writes."""

    flight: Flight | None = None

    def pause(self) -> None:
        """Let others go on where the caller is a copy."""
        if self.flight is not None:
            self.flight.pause()

    def write_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """See ``NvmeDevices``."""
        self.pause()
        super().write_run(position, first, frame_class, frames)

    def read_run(self, position: int, first: int, frame_class: FrameClass, frames: Bytes) -> None:
        """See ``NvmeDevices``."""
        super().read_run(position, first, frame_class, frames)
        self.pause()


class StagedPages(NvmePages):
    """The node's NVMe tier, without threads of its own."""

    devices: StagedDevices

    def __init__(self, devices: StagedDevices) -> None:
        super().__init__(devices)
        io: Any = InlineIo()
        self._io, self._carry_io = dict.fromkeys(devices.devices, io), io
        writes: Any = nullcontext()
        self._writes = dict.fromkeys(devices.devices, writes)

    def _sync(self, positions: Iterable[int]) -> dict[int, OSError]:
        self.devices.pause()
        return super()._sync(positions)
