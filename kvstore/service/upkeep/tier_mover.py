"""Mover: carries pages between DRAM and NVMe, and on NVMe, and writes the checkpoints of what is there.

The state decides what to copy (``state.tiering``); the copies are made here, outside the node's mutex, and reported
back. A page is held by the state while it is on its way; what changed all the same is noticed by its record's word.
"""

from __future__ import annotations

import logging
import threading
import time

import numpy as np

from kvstore import failpoint
from kvstore.model.replica import FrameState
from kvstore.service.node.erasing import erase
from kvstore.service.node.node import Node
from kvstore.service.node.nvme_pages import Copied, NvmePages
from kvstore.serving import tracing
from kvstore.state import events as ev
from kvstore.tier.nvme_devices import today

log = logging.getLogger("kvstore.nvme")

BATCH_BYTES = 32 << 20  # saved at a time: large enough for the disk, small enough that loads need not wait long
IDLE_S = 0.02


class Mover:
    """Lives with its node; ``wake`` is called by anyone.

    ``write_step`` is called by one thread, again and again, and ``load_step`` by another, so that a device that takes
    long to write keeps nobody from what another one has; or ``step``, which is both, by one.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._woken = threading.Event()  # by something to write
        self._wanted = threading.Event()  # something to load
        self._checkpoint_due_s = time.monotonic() + node.config.checkpoint_s

    def wake(self) -> None:
        """There may be something to do."""
        self._woken.set()
        self._wanted.set()

    def wait(self) -> None:
        """Until there may be something to do."""
        self._woken.wait(IDLE_S)
        self._woken.clear()

    def wait_for_loads(self) -> None:
        """Until there may be something to load."""
        self._wanted.wait(IDLE_S)
        self._wanted.clear()

    def step(self) -> bool:
        """Carry out what was decided, and ask for more; False where there was nothing to do."""
        return self.load_step() | self.write_step() | self.load_step()

    def load_step(self) -> bool:
        """Load what was decided; False where there was nothing."""
        nvme = self._node.nvme
        return nvme is not None and self._load_all(nvme)

    def write_step(self) -> bool:
        """The rest of ``step``."""
        nvme = self._node.nvme
        if nvme is None:
            return False
        busy = self._copy(nvme)
        self._node.demote(BATCH_BYTES, self._day_bytes_left(nvme))
        busy |= self._copy(nvme)
        self._node.device_failed(nvme.extents.tidy())
        if time.monotonic() >= self._checkpoint_due_s:
            self.checkpoint()
        return busy

    def save_all(self, bytes_max: int) -> int | None:
        """DRAM is about to go: decide what to save next, for ``carry``. See ``Node.save_all``."""
        nvme = self._node.nvme
        return self._node.save_all(bytes_max, self._day_bytes_left(nvme)) if nvme is not None else None

    def carry(self) -> bool:
        """Make the copies that were decided; False where there were none."""
        nvme = self._node.nvme
        return nvme is not None and self._load_all(nvme) | self._copy(nvme)

    def _copy(self, nvme: NvmePages) -> bool:
        copies = self._node.performer.copies
        busy = bool(copies)
        while copies:
            copy = copies.popleft()
            if failpoint.ACTIVE:
                failpoint.hit("mover.copy")
            if isinstance(copy, ev.Save):
                with tracing.span("kvstore.demote", pages=len(copy.pages)):
                    self._save(nvme, copy)
            elif isinstance(copy, ev.Carry):
                self._carry(nvme, copy)
            else:
                erase(self._node, nvme, copy)
            if failpoint.ACTIVE:
                failpoint.hit("mover.reported")
        return busy

    def _load_all(self, nvme: NvmePages) -> bool:
        loads = self._node.performer.loads
        busy = bool(loads)
        while loads:
            load = loads.popleft()
            if failpoint.ACTIVE:
                failpoint.hit("mover.copy")
            with tracing.span("kvstore.promote", pages=len(load.pages)):
                self._load(nvme, load)
            if failpoint.ACTIVE:
                failpoint.hit("mover.reported")
        return busy

    def _save(self, nvme: NvmePages, save: ev.Save) -> None:
        performer = self._node.performer
        written = nvme.bytes_written
        done = nvme.save(save.pages, performer.tables, performer.frames_of)
        nvme.devices.add_written(today(), nvme.bytes_written - written)
        if failpoint.ACTIVE:
            failpoint.hit("mover.saved")
        heads = done.rows[:, :48].copy()
        self._node.handle(ev.Saved(time.monotonic_ns(), save.number, heads, done.failed))
        nvme.reported(done)
        self._report(done)

    def _carry(self, nvme: NvmePages, carry: ev.Carry) -> None:
        written = nvme.bytes_written
        done = nvme.carry(carry.pages, self._node.performer.tables)
        nvme.devices.add_written(today(), nvme.bytes_written - written)
        if failpoint.ACTIVE:
            failpoint.hit("mover.saved")
        self._node.handle(ev.Carried(time.monotonic_ns(), carry.number, done.failed))
        nvme.reported(done)
        self._report(done)

    def _load(self, nvme: NvmePages, load: ev.Load) -> None:
        performer = self._node.performer
        done = nvme.load(load.pages, performer.tables, performer.frames_of)
        if failpoint.ACTIVE:
            failpoint.hit("mover.loaded")
        self._node.handle(ev.Loaded(time.monotonic_ns(), load.number, done.rows, done.checksums, done.failed))
        self._report(done)

    def _report(self, done: Copied) -> None:
        if done.broken:
            self._node.device_failed(done.broken)
        for address, reason in done.damaged:
            self._node.drop_damaged(address, reason)

    def _day_bytes_left(self, nvme: NvmePages) -> int:
        cap = self._node.config.nvme_write_bytes_per_day
        return max(0, cap - nvme.devices.written_today(today())) if cap else 0

    def checkpoint(self) -> None:
        """Write the directory of every extent that was written to since its last one."""
        self._checkpoint_due_s = time.monotonic() + self._node.config.checkpoint_s
        nvme = self._node.nvme
        if nvme is None:
            return
        for table in self._node.nvme_tables():
            if nvme.extents.is_clean(table.position):
                continue
            version = nvme.devices.version(table.position)
            rows = self._node.directory_rows(table)
            if rows is None or (np.ascontiguousarray(rows[:, 0]) == FrameState.QUARANTINED).any():
                continue  # gone, or not scanned yet
            if failpoint.ACTIVE:
                failpoint.hit("mover.checkpoint")
            error = nvme.extents.checkpoint(table.position, rows, version)
            if error is not None:
                self._node.device_failed({table.position: error})
