"""NvmeExtents: which extents are carved where, as the node decides it and as its devices come to know it.

The node decides with its mutex held, so nothing here that it calls then touches a device: an extent is *planned* until
something is copied there, and *stale* from its drop until its device forgets it::

    carve ──> planned ──make──> known to the device ──drop──> stale ──tidy, or make of the next one──> gone

A kill forgets what is planned or stale, and nothing else: a planned extent holds no page yet. A stale one may be found
again, with right pages in it, but no object: those are erased before their extent can be dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

from kvstore.model.replica import FrameClass
from kvstore.state.views import Rows
from kvstore.tier.nvme_devices import NvmeDevices
from kvstore.tier.records import ExtentTable

log = logging.getLogger("kvstore.nvme")


class NvmeExtents:
    """Lives with its ``NvmePages``. ``carve``, ``drop`` and ``is_clean`` wait for no device; all others may."""

    def __init__(self, devices: NvmeDevices) -> None:
        self._devices = devices
        self._making = {device: threading.Lock() for device in devices.devices}
        self._planned: dict[int, tuple[int, FrameClass]] = {}
        self._stale: set[int] = set()

    def carve(self, position: int, number: int, frame_class: FrameClass) -> None:
        """An extent begins."""
        device, local = self._devices.place(position)
        known = position in self._planned or (local in device.extents and position not in self._stale)
        assert not known and self._devices.frames_of(frame_class), (position, frame_class)
        self._planned[position] = number, frame_class

    def drop(self, position: int) -> None:
        """An extent ends: all its frames are free, and nobody copies there."""
        if self._planned.pop(position, None) is None:
            self._stale.add(position)

    def make(self, position: int) -> None:
        """Make an extent known on its device, where it is not. Raises OSError where that cannot be."""
        with self._making[self._devices.place(position)[0]]:
            planned = self._planned.get(position)
            if planned is None:
                return
            self._forget(position)
            self._devices.carve(position, *planned)
            del self._planned[position]

    @property
    def stale(self) -> list[int]:
        """Positions that are to be tidied."""
        return list(self._stale)

    def tidy(self, positions: Iterable[int]) -> dict[int, OSError]:
        """Let the devices forget what was dropped of these; positions where that failed."""
        failed: dict[int, OSError] = {}
        for position in self._stale.intersection(positions):
            try:
                with self._making[self._devices.place(position)[0]]:
                    self._forget(position)
            except OSError as error:
                log.error("an extent could not be dropped: %s", error)
                failed[position] = error
                self._stale.discard(position)  # what is found there later is of an extent that nobody knows
        return failed

    def _forget(self, position: int) -> None:
        device, local = self._devices.place(position)
        if local in device.extents:
            device.drop(local)
        self._stale.discard(position)

    def distrust(self, table: ExtentTable) -> dict[int, OSError]:
        """A page of this extent does not hold: the next start scans it, unless there is a checkpoint before that.

        Its directory still names that page, and might keep a sound copy in another extent from being adopted. Returns
        its position where that failed.
        """
        device, local = self._devices.place(table.position)
        try:
            device.withdraw(local, table.extent)
        except OSError as error:
            log.error("an extent's checkpoint could not be withdrawn: %s", error)
            return {table.position: error}
        return {}

    def erase(self, frames: Iterable[tuple[ExtentTable, int]]) -> dict[int, OSError]:
        """Overwrite the headers of these frames, which nobody else has, durably; positions where that failed.

        An extent's checkpoint is withdrawn first: its directory names the frames.
        """
        by_position: dict[int, list[tuple[FrameClass, int]]] = {}
        for table, frame in frames:
            if table.position not in self._planned:  # there nothing was ever written
                by_position.setdefault(table.position, []).append((table.frame_class, frame))
        failed: dict[int, OSError] = {}
        for position, here in by_position.items():
            device, local = self._devices.place(position)
            try:
                self._devices.open_for_writing([position])
                try:
                    for frame_class, frame in here:
                        device.erase_header(local, frame, frame_class)
                    device.sync()
                finally:
                    self._devices.close_for_writing([position])
            except OSError as error:
                log.error("objects could not be erased: %s", error)
                failed[position] = error
        return failed

    def is_clean(self, position: int) -> bool:
        """The extent's last checkpoint is younger than the last write there."""
        device, local = self._devices.place(position)
        extent = device.extents.get(local)
        return extent is None or extent.clean or position in self._planned

    def checkpoint(self, position: int, rows: Rows, version: int) -> OSError | None:
        """Make an extent's directory durable; it then counts as clean where nobody wrote since ``version``.

        Returns the error where it cannot be written: the next start will scan the extent.
        """
        try:
            self._devices.write_directory(position, rows)
            self._devices.mark_clean({position: version})
        except OSError as error:
            return error
        return None
