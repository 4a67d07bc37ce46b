"""Mover: carries pages between DRAM and NVMe, and on NVMe, and writes the checkpoints of what is there.

The state decides what to copy (``state.tiering.tiering``); the copies are made here, outside the node's mutex, and
reported back. The state holds a page while it is on its way; what changed all the same is noticed by its record's word.

Each device has its own lanes (``device_lanes``). A batch that lies on several devices has a part in the lane of each. A
device that does not answer for ``LATE_S`` is late: the state is told, and others go on without it, until it answers or
has failed.

Lanes: the work on NVMe, device by device, so that a device that does not answer holds up nothing of another.

A device has one lane for what is written there and one for what is read. Pages that are carried from one extent to
others have a lane of their own, since such a copy may wait for two devices.
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
from kvstore.model.replica import IDENTITY_HEAD_BYTES, Address, FrameState
from kvstore.node.node import Node
from kvstore.node.nvme_pages import IO, CopyResult, NvmePages
from kvstore.server import tracing
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.tier.nvme.devices import today

LANE_IDLE_S: Final = 1.0  # a caller that adds a piece ends the wait

Piece = Callable[[], None]


class DeviceLane:
    """Pieces of work, one at a time, in order. Any thread may add some; one thread calls ``step``.

    A piece takes as long as its device does. Whatever comes after it in this lane waits, also at the node's end: so no
    two threads ever carry out one piece, or two pieces of one lane.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._pieces: deque[Piece] = deque()  # bounded by what the node decides: see ``state.tiering.tiering``
        self._chores: dict[str, Piece] = {}
        self._some = threading.Event()
        self._began_s: float | None = None  # the piece under way

    def put(self, piece: Piece) -> None:
        """Add a piece behind those that are there."""
        self._pieces.append(piece)
        self._some.set()

    def put_chore(self, name: str, piece: Piece) -> None:
        """Add a piece for when there is nothing else to do; once, however often it is asked for."""
        self._chores[name] = piece
        self._some.set()

    def step(self) -> bool:
        """Carry out the next piece; False where there is none."""
        self._began_s = time.monotonic()
        try:
            piece = self._next()
            if piece is not None:
                piece()
            return piece is not None
        finally:
            self._began_s = None

    def _next(self) -> Piece | None:
        if self._pieces:
            return self._pieces.popleft()
        name = next(iter(self._chores), None)
        return self._chores.pop(name) if name is not None else None

    @property
    def is_busy(self) -> bool:
        """Something is under way, or waits."""
        return bool(self._pieces or self._chores) or self._began_s is not None

    def is_late(self, late_s: float) -> bool:
        """The piece under way has taken longer than that."""
        began_s = self._began_s
        return began_s is not None and began_s < time.monotonic() - late_s

    def wait(self) -> None:
        """Return when there may be something to do."""
        self._some.wait(LANE_IDLE_S)
        self._some.clear()

    def wake(self) -> None:
        """End ``wait``."""
        self._some.set()


class Joint:
    """Work of which several lanes do a part each: the lane that is done last reports it."""

    def __init__(self, parts: int, report: Callable[[], None]) -> None:
        self._left = parts
        self._report = report
        self._mutex = threading.Lock()

    def done(self) -> None:
        """One part is done."""
        with self._mutex:
            self._left -= 1
            last = not self._left
        if last:
            self._report()


log = logging.getLogger("kvstore.nvme")

BATCH_BYTES = 32 << 20  # saved at a time: large enough for the disk, small enough that loads need not wait long
IDLE_S = 0.02
LATE_S = (
    0.5  # a batch takes a healthy device less; where it takes more, others continue in the meantime: no harm is done
)

_COPYING = boundary.RequestGuard("task/copy")


class Mover:
    """Lives with its node; ``wake`` is called by anyone.

    One thread calls ``decide`` again and again, and waits for no device; each lane has a thread that calls its
    ``step``. Or one thread does it all, by calling ``step`` here.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._woken = threading.Event()
        self._sharing = threading.Lock()
        self._checkpoint_due_s = time.monotonic() + node.config.checkpoint_s
        devices = range(len(node.nvme.devices.devices)) if node.nvme is not None else ()
        self._saves = [DeviceLane(f"save-{device}") for device in devices]
        self._loads = [DeviceLane(f"load-{device}") for device in devices]
        self._carries = DeviceLane("carry")
        self.lanes = (*self._loads, *self._saves, self._carries) if devices else ()
        self._late: tuple[set[int], set[int]] = set(), set()  # devices written to, and read, as the state knows it

    def wake(self) -> None:
        """There may be something to do."""
        nvme = self._node.nvme
        if nvme is not None:
            self._share_out(nvme)  # at once: a client that waits for a load does not wait for what is decided next
        self._woken.set()

    def wait(self) -> None:
        """Return when there may be something to decide."""
        self._woken.wait(IDLE_S)
        self._woken.clear()

    def step(self) -> bool:
        """Carry out what was decided, and ask for more; False where there was nothing to do."""
        return self.carry() | self.decide() | self.carry()

    def decide(self) -> bool:
        """Ask what to do, and give it to the lanes; False where there is nothing. Waits for no device."""
        nvme = self._node.nvme
        if nvme is None:
            return False
        busy = self._share_out(nvme)
        self._tell_late(nvme)
        self._node.demote(BATCH_BYTES)
        busy |= self._share_out(nvme)
        for device in {nvme.devices.device_of(position) for position in nvme.extents.stale}:
            self._saves[device].put_chore("tidy", partial(self._tidy, nvme, device))
        if time.monotonic() >= self._checkpoint_due_s:
            self.checkpoint()
        return busy

    def checkpoint(self) -> None:
        """Have the directory written of every extent that was written to since its last one."""
        self._checkpoint_due_s = time.monotonic() + self._node.config.checkpoint_s
        nvme = self._node.nvme
        if nvme is not None:
            for device, lane in enumerate(self._saves):
                lane.put_chore("checkpoint", partial(self._checkpoint, nvme, device))

    def save_all(self, bytes_max: int) -> do.Reply | None:
        """DRAM is about to go: decide what to save next, and give it to the lanes. See ``Node.save_all``."""
        nvme = self._node.nvme
        if nvme is None:
            return None
        self._tell_late(nvme)
        reply = self._node.save_all(bytes_max)
        self._share_out(nvme)
        return reply

    def carry(self) -> bool:
        """Carry out all that the lanes have, where they have no threads; False where that is nothing."""
        nvme, busy, went_on = self._node.nvme, False, True
        while nvme is not None and went_on:
            self._share_out(nvme)
            went_on = sum(lane.step() for lane in self.lanes) > 0
            busy |= went_on
        return busy

    def rest(self, until_s: float) -> bool:
        """Wait until no lane has anything to do, at most until that time (``time.monotonic``); False: some has."""
        while (busy := any(lane.is_busy for lane in self.lanes)) and time.monotonic() < until_s:
            self.wait()
        return not busy

    # --- sharing out ------------------------------------------------------------------------------------------------

    def _share_out(self, nvme: NvmePages) -> bool:
        """Give what was decided to the lanes."""
        waiting = self._node.waiting
        with self._sharing:
            busy = bool(waiting.loads or waiting.copies)
            while waiting.loads:
                load = waiting.loads.popleft()
                self._begin(nvme, self._loads, load, [page.source for page in load.pages])
            while waiting.copies:
                copy = waiting.copies.popleft()
                if isinstance(copy, do.Save):
                    self._begin(nvme, self._saves, copy, [page.target for page in copy.pages])
                elif isinstance(copy, do.Carry):
                    self._carries.put(partial(self._carry, nvme, copy))
                else:
                    self._begin_erasing(nvme, copy)
        return busy

    def _begin(self, nvme: NvmePages, lanes: list[DeviceLane], copy: do.Save | do.Load, below: list[Address]) -> None:
        """A copy between the tiers, in parts. ``below``: where each page is, or will be, on NVMe."""
        whole = CopyResult.empty(self._node.contents.extents[copy.pages[0].source.extent].frame_class, len(copy.pages))
        parts = self._by_device(nvme, below)
        joint = Joint(len(parts), partial(self._report, nvme, copy, whole))
        for device, places in parts.items():
            lanes[device].put(partial(self._copy, nvme, copy, places, whole, joint))

    def _begin_erasing(self, nvme: NvmePages, erase: do.Erase) -> None:
        failed: set[int] = set()
        parts = self._by_device(nvme, [address for _, address in erase.pages])
        joint = Joint(len(parts), partial(self._erased, erase, failed))
        for device, places in parts.items():
            self._saves[device].put(partial(self._erase, nvme, erase, places, failed, joint))

    def _by_device(self, nvme: NvmePages, addresses: Iterable[Address]) -> dict[int, list[int]]:
        """Places in ``addresses``, by the device that each lies on."""
        parts: defaultdict[int, list[int]] = defaultdict(list)
        tables = self._node.contents.extents
        for place, address in enumerate(addresses):
            parts[nvme.devices.device_of(tables[address.extent].position)].append(place)
        return parts

    def _tell_late(self, nvme: NvmePages) -> None:
        """Tell the state which devices do not answer now."""
        everyone = set(range(len(self._loads)))
        failed = {device for device in everyone if nvme.devices.devices[device].disk.path in self._node.nvme_failures}
        saves = _late_ones(self._saves, self._late[0], everyone - failed)
        loads = _late_ones(self._loads, self._late[1], everyone)
        if (saves, loads) != self._late:
            self._late = saves, loads
            places = ([p for device in found for p in nvme.devices.positions_of(device)] for found in self._late)
            self._node.handle(ev.DevicesLate(time.monotonic_ns(), nvme.tier, *places))

    # --- pieces of work: in a lane ----------------------------------------------------------------------------------

    def _copy(
        self, nvme: NvmePages, copy: do.Save | do.Load, places: list[int], whole: CopyResult, joint: Joint
    ) -> None:
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        contents, pages = self._node.contents, [copy.pages[place] for place in places]
        down = isinstance(copy, do.Save)
        with tracing.span("kvstore.demote" if down else "kvstore.promote", pages=len(pages)):
            try:
                with _COPYING:
                    done = (nvme.save if down else nvme.load)(pages, contents.extents, contents.frames_of)
                    nvme.devices.add_written(today(), done.written_bytes)
                    whole.merge(done, places)
            except InternalError:  # nothing is claimed: the pages stay where they are
                whole.failed |= dict.fromkeys(places, IO)
            joint.done()

    def _report(self, nvme: NvmePages, copy: do.Save | do.Load, done: CopyResult) -> None:
        self._node.device_failed(done.broken)  # first: when nothing is on its way any more, that is known
        now_ns = time.monotonic_ns()
        if isinstance(copy, do.Save):
            if failpoint.ACTIVE:
                failpoint.hit("mover.saved")
            heads = done.rows[:, :IDENTITY_HEAD_BYTES].copy()
            self._node.handle(ev.Saved(now_ns, copy.number, heads, done.failed))
            nvme.close_for_writing(done.open_positions)
        else:
            if failpoint.ACTIVE:
                failpoint.hit("mover.loaded")
            self._node.handle(ev.Loaded(now_ns, copy.number, done.rows, done.checksums, done.failed))
        self._reported(done)

    def _carry(self, nvme: NvmePages, carry: do.Carry) -> None:
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        tables = self._node.contents.extents
        try:
            with _COPYING:
                done = nvme.carry(carry.pages, tables)
                nvme.devices.add_written(today(), done.written_bytes)
        except InternalError:  # as above
            done = CopyResult.empty(tables[carry.pages[0].source.extent].frame_class, len(carry.pages))
            done.failed = dict.fromkeys(range(len(carry.pages)), IO)
        if failpoint.ACTIVE:
            failpoint.hit("mover.saved")
        self._node.device_failed(done.broken)
        self._node.handle(ev.Carried(time.monotonic_ns(), carry.number, done.failed))
        nvme.close_for_writing(done.open_positions)
        self._reported(done)

    def _reported(self, done: CopyResult) -> None:
        for address, reason in done.damaged:
            self._node.drop_damaged(address, reason)
        self._over()

    def _erase(self, nvme: NvmePages, erase: do.Erase, places: list[int], failed: set[int], joint: Joint) -> None:
        if failpoint.ACTIVE:
            failpoint.hit("mover.copy")
        try:
            with _COPYING:
                failed |= self._node.erase(nvme, erase, places)
        except InternalError:
            failed |= set(places)
        joint.done()

    def _erased(self, erase: do.Erase, failed: set[int]) -> None:
        self._node.handle(ev.Erased(time.monotonic_ns(), erase.number, failed))
        self._over()

    def _over(self) -> None:
        """A copy was reported: there may be another one to decide on."""
        if failpoint.ACTIVE:
            failpoint.hit("mover.reported")
        self._woken.set()

    def _tidy(self, nvme: NvmePages, device: int) -> None:
        self._node.device_failed(nvme.extents.drop_stale(nvme.devices.positions_of(device)))

    def _checkpoint(self, nvme: NvmePages, device: int) -> None:
        for table in self._node.nvme_tables():
            if nvme.devices.device_of(table.position) != device or nvme.extents.is_clean(table.position):
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


def _late_ones(lanes: list[DeviceLane], known: set[int], usable: set[int]) -> set[int]:
    """Devices whose lane has been at one piece for long, but never all that are ``usable``: others could go nowhere.

    Where all are, those that were not ``known`` to be late are likely to come first, and are waited for; else all are.
    """
    late = {device for device, lane in enumerate(lanes) if lane.is_late(LATE_S)}
    if usable <= late:
        late -= usable - known
    return late - usable if usable <= late else late
