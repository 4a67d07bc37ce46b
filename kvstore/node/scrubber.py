"""Scrubber: computes checksums of newly sealed pages and verifies checksums of stored pages, at a limited byte rate.

The scrubber reads records and data without the node's mutex, and compares the record's word before and after. A page
that changed in the meantime is skipped. A page that gets checksums becomes the event ``Stamped``, a damaged page the
event ``Damaged``.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.replica import Address, FrameState, Status, in_state
from kvstore.node.node import Node
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.state.interfaces import Rows

SLICE_S = 0.05  # one call of ``step`` may process as many bytes as the byte rate allows in this time
WORK_S, PAUSE_S = 40e-6, 60e-6
VERIFY_S = 0.004  # longest work per slice, with pauses: small pages take more time than their bytes suggest
STAMP_RATE_FACTOR = 4  # newly sealed pages are stamped this many times faster than stored pages are verified


class GilPauses:
    """Pauses between short pieces of work, so that other threads can run.

    Hashing releases the GIL only for more than about 100 KiB. So after ``WORK_S`` of work, ``pause`` sleeps for
    ``PAUSE_S``. Releasing the GIL without a sleep would not help: this thread would take it again before a waiting
    thread wakes up. With the pauses, a client's request waits tens of microseconds, and not a switch interval.
    """

    def __init__(self) -> None:
        self._since_s = 0.0

    def pause(self) -> None:
        """Sleep if a pause is due. Call this between two short pieces of work."""
        now_s = time.perf_counter()
        if now_s - self._since_s > WORK_S:
            time.sleep(PAUSE_S)
            self._since_s = time.perf_counter()


class Scrubber:
    """The scrubber of a node. The node's background thread calls ``step``; any thread may call the other methods.

    Newly sealed pages wait for checksums in a bounded queue. After a burst or a restart, some are not in the queue; the
    next sweep stamps them.
    """

    def __init__(self, node: Node, bytes_per_s: int) -> None:
        self._node = node
        self._bytes_per_s = bytes_per_s
        self._pauses = GilPauses()
        self._mutex = threading.Lock()
        # The remaining extents of this sweep, the next one last: number, number of pages, and the frames once it was
        # started.
        self._sweep: list[tuple[int, int, npt.NDArray[np.uint32] | None]] = []
        self._sweeps = 0  # completed
        self._sweeps_requested = 0  # ``_sweeps`` after the requested sweep
        self._pages_scrubbed = 0
        self._pages_stamped = 0
        self._pages_damaged = 0
        self._current_pages = 0  # verified by the current sweep
        self._sweep_pages = 0  # verified by the last completed sweep
        self._asked_pages = 0  # verified by the last requested sweep that is completed, on NVMe too

    def stats(self) -> dict[str, Any]:
        """Return the number of completed sweeps, how many pages the last ones verified, and totals since startup."""
        return {
            "sweeps": self._sweeps,
            "sweep_pages": self._sweep_pages,
            "asked_pages": self._asked_pages,
            "sweep_pages_left": sum(pages for _, pages, _ in list(self._sweep)),
            "pages_scrubbed": self._pages_scrubbed,
            "pages_stamped": self._pages_stamped,
            "pages_damaged": self._pages_damaged,
        }

    def request_sweep(self) -> int:
        """Start verifying all pages once, at full speed. Return the value that ``sweeps`` has once this is
        completed."""
        with self._mutex:
            self._sweep = []
            self._sweeps_requested = self._sweeps + 1
            return self._sweeps_requested

    def step(self) -> bool:
        """Stamp new pages, then verify stored ones, for one slice each. Returns True while a requested sweep runs."""
        if self._bytes_per_s == 0 and self._sweeps >= self._sweeps_requested:
            return False
        is_requested = self._sweeps < self._sweeps_requested
        rate = 1 << 40 if is_requested else self._bytes_per_s
        self._stamp(int(rate * SLICE_S * STAMP_RATE_FACTOR))
        self._verify(int(rate * SLICE_S), time.monotonic() + (SLICE_S if is_requested else VERIFY_S))
        return is_requested

    def _stamp(self, budget_bytes: int) -> None:
        """Stamp newly sealed pages, the oldest first."""
        unstamped = self._node.waiting.unstamped
        deadline_s = time.monotonic() + SLICE_S
        while unstamped and budget_bytes > 0 and time.monotonic() < deadline_s:
            address = unstamped.popleft()
            self.scrub(address)
            frame_class = self._node.contents.class_of(address.extent)
            budget_bytes -= frame_class.page_bytes if frame_class is not None else 0

    def _verify(self, budget_bytes: int, deadline_s: float) -> None:
        """Continue the sweep, or start a new one."""
        contents = self._node.contents
        with self._mutex:
            if not self._sweep:
                self._pages_damaged += self._node.check_words()
                self._current_pages = 0
                # Only a requested sweep reads pages that are not mapped, since every other read verifies them anyway.
                is_requested = self._sweeps < self._sweeps_requested
                tables = [table for table in contents.tables() if is_requested or contents.mapped(table.extent)]
                tables.sort(key=lambda table: table.extent, reverse=True)
                self._sweep = [(table.extent, len(_sealed(table)), None) for table in tables]
            sweep = self._sweep
        while sweep and budget_bytes > 0 and time.monotonic() < deadline_s:
            number, _, frames = sweep.pop()
            table = contents.table(number)
            if table is None:
                continue
            if frames is None:
                frames = _sealed(table)
            if not len(frames):
                continue
            frame = int(frames[-1])
            sweep.append((number, len(frames) - 1, frames[:-1]))
            self._current_pages += self.scrub(Address(number, frame, int(table.words[frame]) >> 8)) != Status.STALE
            budget_bytes -= table.frame_class.page_bytes
        with self._mutex:
            if not sweep and sweep is self._sweep:  # not replaced by a request in the meantime
                self._sweep_pages = self._current_pages
                if self._sweeps < self._sweeps_requested:
                    self._asked_pages = self._current_pages
                self._sweeps += 1

    def scrub(self, address: Address) -> Status:
        """Verify one page: its record, its index entry, and its checksums. Compute the checksums if it has none.

        Returns DAMAGED after a damaged page and its descendants were dropped, STALE if no page is sealed there, or OK.
        """
        table = self._node.contents.table(address.extent)
        if table is None or address.frame >= table.frames:
            return Status.STALE
        word = int(table.words[address.frame])
        if word != address.generation << 8 | FrameState.SEALED:
            return Status.STALE
        check = self._check_mapped if self._node.contents.mapped(address.extent) else self._check_unmapped
        damage, sums = check(table, address)
        if int(table.words[address.frame]) != word:
            return Status.STALE  # the page changed during the check
        self._pages_scrubbed += 1
        if damage:
            self._pages_damaged += 1
            self._node.drop_damaged(address, damage)
            return Status.DAMAGED
        if sums is not None:
            self._pages_stamped += 1
            self._node.handle(ev.Stamped(time.monotonic_ns(), address, sums))
        return Status.OK

    def _check_mapped(self, table: ExtentTable, address: Address) -> tuple[str, Any]:
        """Return (what is damaged or "", the new checksums if the page had none or None)."""
        record = table.record(address.frame)
        if not record.is_sound():
            return "record", None
        self._node.check_indexed(address, record.key)
        page = self._node.contents.page(table, address.frame)
        sums = self._checksums(page, table.frame_class.layers)
        if not record.stamped:
            return "", sums
        return ("" if np.array_equal(sums, record.checksums) else "data"), None

    def _check_unmapped(self, table: ExtentTable, address: Address) -> tuple[str, None]:
        """Do what ``_check_mapped`` does for a page that was written with its checksums. Pages on NVMe are read."""
        record = table.record(address.frame)
        if not record.is_sound():
            return "record", None
        self._node.check_indexed(address, record.key)
        nvme = self._node.nvme
        if nvme is None or nvme.tier != table.tier:
            return "", None
        try:
            return nvme.verify(table, address), None
        except OSError as error:  # the device is not responding, which says nothing about the page
            self._node.device_failed({table.position: error})
            return "", None

    def _checksums(self, page: Rows, layers: int) -> npt.NDArray[np.uint32]:
        """Return ``[layers]``: the low 32 bits of xxh3_64 of each layer of ``page`` ``[page_bytes]``."""
        digest, pause, step = xxhash.xxh3_64_intdigest, self._pauses.pause, len(page) // layers
        sums = np.empty(layers, np.uint32)
        for layer in range(layers):
            sums[layer] = digest(page[layer * step : (layer + 1) * step].data) & 0xFFFFFFFF
            pause()
        return sums


def _sealed(table: ExtentTable) -> npt.NDArray[np.uint32]:
    """Return the sealed frames of an extent, the last one first."""
    return np.flatnonzero(in_state(table.words, FrameState.SEALED))[::-1].astype(np.uint32)
