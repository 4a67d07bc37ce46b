"""Mover: copies pages between DRAM and NVMe and within NVMe, and writes the checkpoints of NVMe extents.

The state decides what to copy (``state.tiering.tiering``). The mover copies without the node's mutex and reports the
results. The state protects a page while it is copied. If a page changes all the same, its record's word shows it.

Each device has two lanes, one for writes and one for reads, so that a device that is not responding delays only its own
work. Copies within NVMe have one more lane, because such a copy may wait for two devices. A batch with pages on several
devices has one part in the lane of each.

A device that has not responded for ``LATE_S`` is late. The state is notified, and other copies continue without the
device until it responds or fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import numpy as np

from kvstore import boundary, failpoint
from kvstore.errors import InternalError
from kvstore.model.replica import LEAN_IDENTITY_BYTES, Address, FrameState
from kvstore.node.node import Node
from kvstore.node.nvme_pages import IO, CopyResult, NvmePages
from kvstore.server import tracing
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.tier.nvme.devices import today

LANE_IDLE_S: Final = 1.0  # a thread waits this long for a task, unless it is woken
BATCH_BYTES = 32 << 20  # bytes saved at a time: large enough for the disk, small enough that loads do not wait long
IDLE_S = 0.02
LATE_S = 0.5  # a batch on a healthy device takes less; if one takes longer, other copies continue in the meantime

_COPYING = boundary.RequestGuard("task/copy")

log = logging.getLogger("kvstore.nvme")

Task = Callable[[], None]


class DeviceLane:
    """A queue of tasks, performed one at a time and in order. Any thread may add tasks; one thread calls ``step``.

    A task takes as long as its device does. All later tasks of the lane wait for it, even when the node ends. So two
    threads never perform one task, or two tasks of one lane.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._tasks: deque[Task] = deque()  # the node's decisions limit the length, see ``state.tiering.tiering``
        self._idle_tasks: dict[str, Task] = {}
        self._has_tasks = threading.Event()
        self._started_s: float | None = None  # start of the current task

    def add(self, task: Task) -> None:
        """Add a task after all others."""
        self._tasks.append(task)
        self._has_tasks.set()

    def add_idle_task(self, name: str, task: Task) -> None:
        """Add a task that is performed when there is no other. It replaces an idle task with the same name."""
        self._idle_tasks[name] = task
        self._has_tasks.set()

    def step(self) -> bool:
        """Perform the next task; return False if there is none."""
        self._started_s = time.monotonic()
        try:
            task = self._next()
            if task is not None:
                task()
            return task is not None
        finally:
            self._started_s = None

    def _next(self) -> Task | None:
        if self._tasks:
            return self._tasks.popleft()
        name = next(iter(self._idle_tasks), None)
        return self._idle_tasks.pop(name) if name is not None else None

    @property
    def is_busy(self) -> bool:
        """True if a task is queued or being performed."""
        return bool(self._tasks or self._idle_tasks) or self._started_s is not None

    def is_late(self, late_s: float) -> bool:
        """Return True if the current task has taken longer than ``late_s``."""
        started_s = self._started_s
        return started_s is not None and started_s < time.monotonic() - late_s

    def wait(self) -> None:
        """Wait for a task, at most ``LANE_IDLE_S``."""
        self._has_tasks.wait(LANE_IDLE_S)
        self._has_tasks.clear()

    def wake(self) -> None:
        """End ``wait``."""
        self._has_tasks.set()


class Countdown:
    """Calls ``report`` when all parts of a batch are done, in the thread of the last part."""

    def __init__(self, parts: int, report: Callable[[], None]) -> None:
        self._parts_left = parts
        self._report = report
        self._mutex = threading.Lock()

    def part_done(self) -> None:
        """Count one part as done."""
        with self._mutex:
            self._parts_left -= 1
            is_last = not self._parts_left
        if is_last:
            self._report()


class Mover:
    """The mover of one node.

    One thread calls ``decide`` repeatedly, which waits for no device. Each lane has a thread that calls its ``step``.
    Or one thread does everything with ``Mover.step``. Any thread may call ``wake``.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._woken = threading.Event()
        self._queue_mutex = threading.Lock()  # for the order of copies in the lanes
        self._checkpoint_due_s = time.monotonic() + node.config.checkpoint_s
        devices = range(len(node.nvme.devices.devices)) if node.nvme is not None else ()
        self._saves = [DeviceLane(f"save-{device}") for device in devices]
        self._loads = [DeviceLane(f"load-{device}") for device in devices]
        self._carries = DeviceLane("carry")
        self.lanes = (*self._loads, *self._saves, self._carries) if devices else ()
        self._late: tuple[set[int], set[int]] = set(), set()  # late devices for saves and loads, as the state has them

    def wake(self) -> None:
        """Queue decided copies in the lanes, and end ``wait``."""
        nvme = self._node.nvme
        if nvme is not None:
            self._queue_copies(nvme)  # here, so that a client's load does not wait for the next decision
        self._woken.set()

    def wait(self) -> None:
        """Wait until there may be something to decide, at most ``IDLE_S``."""
        self._woken.wait(IDLE_S)
        self._woken.clear()

    def step(self) -> bool:
        """Decide and perform everything in this thread; return False if there was nothing to do."""
        return self.run_lanes() | self.decide() | self.run_lanes()

    def decide(self) -> bool:
        """Let the state decide, and queue the copies in the lanes; return False if there are none."""
        nvme = self._node.nvme
        if nvme is None:
            return False
        busy = self._queue_copies(nvme)
        self._report_late(nvme)
        self._node.demote(BATCH_BYTES)
        busy |= self._queue_copies(nvme)
        for device in {nvme.devices.device_of(position) for position in nvme.extents.stale}:
            self._saves[device].add_idle_task("drop stale", partial(self._drop_stale, nvme, device))
        if time.monotonic() >= self._checkpoint_due_s:
            self.checkpoint()
        return busy

    def checkpoint(self) -> None:
        """Queue a checkpoint of every extent that was written to since its last one."""
        self._checkpoint_due_s = time.monotonic() + self._node.config.checkpoint_s
        nvme = self._node.nvme
        if nvme is not None:
            for device, lane in enumerate(self._saves):
                lane.add_idle_task("checkpoint", partial(self._checkpoint, nvme, device))

    def save_all(self, bytes_max: int) -> do.Reply | None:
        """Decide what to save next before DRAM is lost, and queue it in the lanes. See ``Node.save_all``."""
        nvme = self._node.nvme
        if nvme is None:
            return None
        self._report_late(nvme)
        reply = self._node.save_all(bytes_max)
        self._queue_copies(nvme)
        return reply

    def run_lanes(self) -> bool:
        """Perform all tasks of the lanes in this thread; return False if there were none."""
        nvme, busy, continues = self._node.nvme, False, True
        while nvme is not None and continues:
            self._queue_copies(nvme)
            continues = sum(lane.step() for lane in self.lanes) > 0
            busy |= continues
        return busy

    def rest(self, deadline_s: float) -> bool:
        """Wait until all lanes are idle, or until ``deadline_s`` (``time.monotonic``); return False if one is not."""
        while (busy := any(lane.is_busy for lane in self.lanes)) and time.monotonic() < deadline_s:
            self.wait()
        return not busy

    # --- queuing ----------------------------------------------------------------------------------------------------

    def _queue_copies(self, nvme: NvmePages) -> bool:
        """Move decided copies from ``node.waiting`` into the lanes; return False if there were none."""
        waiting = self._node.waiting
        with self._queue_mutex:
            busy = bool(waiting.loads or waiting.copies)
            while waiting.loads:
                load = waiting.loads.popleft()
                self._queue_copy(nvme, self._loads, load, [page.source for page in load.pages])
            while waiting.copies:
                copy = waiting.copies.popleft()
                if isinstance(copy, do.Save):
                    self._queue_copy(nvme, self._saves, copy, [page.target for page in copy.pages])
                elif isinstance(copy, do.Carry):
                    self._carries.add(partial(self._carry, nvme, copy))
                else:
                    self._queue_erasure(nvme, copy)
        return busy

    def _queue_copy(
        self, nvme: NvmePages, lanes: list[DeviceLane], copy: do.Save | do.Load, on_nvme: list[Address]
    ) -> None:
        """Queue a copy between the tiers, with one part per device. ``on_nvme``: each page's address on NVMe."""
        frame_class = self._node.contents.extents[copy.pages[0].source.extent].frame_class
        result = CopyResult.empty(frame_class, len(copy.pages))
        parts = self._by_device(nvme, on_nvme)
        countdown = Countdown(len(parts), partial(self._report, nvme, copy, result))
        for device, places in parts.items():
            lanes[device].add(partial(self._copy, nvme, copy, places, result, countdown))

    def _queue_erasure(self, nvme: NvmePages, erasure: do.Erase) -> None:
        failed: set[int] = set()
        parts = self._by_device(nvme, [address for _, address in erasure.pages])
        countdown = Countdown(len(parts), partial(self._report_erasure, erasure, failed))
        for device, places in parts.items():
            self._saves[device].add(partial(self._erase, nvme, erasure, places, failed, countdown))

    def _by_device(self, nvme: NvmePages, addresses: Iterable[Address]) -> dict[int, list[int]]:
        """Return, for each device, the places of its pages in ``addresses``."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        tables = self._node.contents.extents
        for place, address in enumerate(addresses):
            places[nvme.devices.device_of(tables[address.extent].position)].append(place)
        return places

    def _report_late(self, nvme: NvmePages) -> None:
        """Report the late devices to the state if they changed."""
        devices = set(range(len(self._loads)))
        failed = {device for device in devices if nvme.devices.devices[device].disk.path in self._node.nvme_failures}
        saves = late_devices(self._saves, self._late[0], devices - failed)
        loads = late_devices(self._loads, self._late[1], devices)
        if (saves, loads) != self._late:
            self._late = saves, loads
            positions = ([p for device in late for p in nvme.devices.positions_of(device)] for late in self._late)
            self._node.handle(ev.DevicesLate(time.monotonic_ns(), nvme.tier, *positions))

    # --- tasks in a lane --------------------------------------------------------------------------------------------

    def _copy(
        self, nvme: NvmePages, copy: do.Save | do.Load, places: list[int], result: CopyResult, countdown: Countdown
    ) -> None:
        """Copy the pages at these places, which are on one device, and add their result to the batch's ``result``."""
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        contents, pages = self._node.contents, [copy.pages[place] for place in places]
        is_save = isinstance(copy, do.Save)
        with tracing.span("kvstore.demote" if is_save else "kvstore.promote", pages=len(pages)):
            try:
                with _COPYING:
                    part = (nvme.save if is_save else nvme.load)(pages, contents.extents, contents.frames_of)
                    nvme.devices.add_written(today(), part.written_bytes)
                    result.merge(part, places)
            except InternalError:  # counts as a failed copy: the pages stay in their source
                result.failed |= dict.fromkeys(places, IO)
            countdown.part_done()

    def _report(self, nvme: NvmePages, copy: do.Save | do.Load, result: CopyResult) -> None:
        self._node.device_failed(result.broken)  # before the copy ends, so that no new copy uses a failed device
        now_ns = time.monotonic_ns()
        if isinstance(copy, do.Save):
            if failpoint.ACTIVE:
                failpoint.hit("mover.saved")
            heads = result.rows[:, :LEAN_IDENTITY_BYTES].copy()
            self._node.handle(ev.Saved(now_ns, copy.number, heads, result.failed))
            nvme.close_for_writing(result.open_positions)
        else:
            if failpoint.ACTIVE:
                failpoint.hit("mover.loaded")
            self._node.handle(ev.Loaded(now_ns, copy.number, result.rows, result.checksums, result.failed))
        self._end_copy(result)

    def _carry(self, nvme: NvmePages, carry: do.Carry) -> None:
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        tables = self._node.contents.extents
        try:
            with _COPYING:
                result = nvme.carry(carry.pages, tables)
                nvme.devices.add_written(today(), result.written_bytes)
        except InternalError:  # as in ``_copy``
            result = CopyResult.empty(tables[carry.pages[0].source.extent].frame_class, len(carry.pages))
            result.failed = dict.fromkeys(range(len(carry.pages)), IO)
        if failpoint.ACTIVE:
            failpoint.hit("mover.saved")
        self._node.device_failed(result.broken)
        self._node.handle(ev.Carried(time.monotonic_ns(), carry.number, result.failed))
        nvme.close_for_writing(result.open_positions)
        self._end_copy(result)

    def _end_copy(self, result: CopyResult) -> None:
        for address, reason in result.damaged:
            self._node.drop_damaged(address, reason)
        self._wake_decisions()

    def _erase(
        self, nvme: NvmePages, erasure: do.Erase, places: list[int], failed: set[int], countdown: Countdown
    ) -> None:
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        try:
            with _COPYING:
                failed |= self._node.erase(nvme, erasure, places)
        except InternalError:
            failed |= set(places)
        countdown.part_done()

    def _report_erasure(self, erasure: do.Erase, failed: set[int]) -> None:
        self._node.handle(ev.Erased(time.monotonic_ns(), erasure.number, failed))
        self._wake_decisions()

    def _wake_decisions(self) -> None:
        """End ``wait`` after a report: the state may have another copy to decide."""
        if failpoint.ACTIVE:
            failpoint.hit("mover.reported")
        self._woken.set()

    def _drop_stale(self, nvme: NvmePages, device: int) -> None:
        self._node.device_failed(nvme.extents.drop_stale(nvme.devices.positions_of(device)))

    def _checkpoint(self, nvme: NvmePages, device: int) -> None:
        for table in self._node.nvme_tables():
            if nvme.devices.device_of(table.position) != device or nvme.extents.is_clean(table.position):
                continue
            version = nvme.devices.version(table.position)
            rows = self._node.directory_rows(table)
            if rows is None or (np.ascontiguousarray(rows[:, 0]) == FrameState.QUARANTINED).any():
                continue  # the extent was dropped, or is not scanned yet
            if failpoint.ACTIVE:
                failpoint.hit("mover.checkpoint")
            error = nvme.extents.checkpoint(table.position, rows, version)
            if error is not None:
                self._node.device_failed({table.position: error})


def late_devices(lanes: list[DeviceLane], were_late: set[int], usable: set[int]) -> set[int]:
    """Return the devices whose lane is late, but never all ``usable`` ones, since copies need a device to wait for.

    If all usable devices are late, the ones that became late only now do not count as late: they will probably respond
    first. If all of them were late before, none of the usable devices counts as late.
    """
    late = {device for device, lane in enumerate(lanes) if lane.is_late(LATE_S)}
    if usable <= late:
        late -= usable - were_late
    return late - usable if usable <= late else late
