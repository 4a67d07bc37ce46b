"""Scrubber: computes the checksums of newly sealed pages and verifies those of stored ones, within a byte rate.

It reads records and data without the node's mutex (hashing releases the GIL) and compares the record's word before and
after; what it finds becomes an event: ``Stamped`` or ``Damaged``. A page that changed in the meantime is simply
skipped.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.replica import Address, FrameState, Status
from kvstore.node.node import Node
from kvstore.shm.records import ExtentTable
from kvstore.state import events as ev
from kvstore.state.interfaces import Rows

SLICE_S = 0.05  # the rate is kept over slices of this length
WORK_S, PAUSE_S = 40e-6, 60e-6
VERIFY_S = 0.004  # at most, of each slice, pauses counted: small pages cost more time than their bytes suggest
STAMP_RATE_FACTOR = 4  # newly sealed pages are stamped this many times faster than stored ones are verified


class Breather:
    """Lets other threads have the interpreter: hashing less than about 100 KiB does not release it.

    After ``WORK_S`` of work it sleeps for ``PAUSE_S``. A mere release would not do: a waiting thread takes longer to
    wake than we take to come back. So a client's request waits tens of microseconds for us, not a switch interval.
    """

    def __init__(self) -> None:
        self._since = 0.0

    def breathe(self) -> None:
        """Call between two short pieces of work."""
        now = time.perf_counter()
        if now - self._since > WORK_S:
            time.sleep(PAUSE_S)
            self._since = time.perf_counter()


class Scrubber:
    """Lives with its node; ``step`` is called by the node's background thread, ``scrub`` by anyone.

    Pages sealed without checksums are stamped as they come; those that the bounded queue forgot (after a burst, or a
    restart) when the sweep meets them.
    """

    def __init__(self, node: Node, bytes_per_s: int) -> None:
        self._node = node
        self._bytes_per_s = bytes_per_s
        self._breather = Breather()
        self._mutex = threading.Lock()
        # Left in this sweep, last first: extent, how many pages, and which frames, of the one that was begun.
        self._walk: list[tuple[int, int, npt.NDArray[np.uint32] | None]] = []
        self._sweep_wanted = 0
        self._sweeps = 0
        self._pages_scrubbed = 0
        self._pages_stamped = 0
        self._pages_damaged = 0
        self._walk_pages = 0  # verified by the sweep that is going on
        self._sweep_pages = 0  # verified by the last sweep that ended
        self._asked_pages = 0  # verified by the last one that ended of those asked for, which also read NVMe

    def stats(self) -> dict[str, Any]:
        """Sweeps ended, pages of the last one and of the last asked for; pages verified, stamped and damaged so far."""
        return {
            "sweeps": self._sweeps,
            "sweep_pages": self._sweep_pages,
            "asked_pages": self._asked_pages,
            "sweep_pages_left": sum(pages for _, pages, _ in list(self._walk)),
            "pages_scrubbed": self._pages_scrubbed,
            "pages_stamped": self._pages_stamped,
            "pages_damaged": self._pages_damaged,
        }

    def request_sweep(self) -> int:
        """Verify everything once, at full speed, starting now. Returns the number ``sweeps`` will have reached."""
        with self._mutex:
            self._walk = []
            self._sweep_wanted = self._sweeps + 1
            return self._sweep_wanted

    def step(self) -> bool:
        """Stamp what was sealed lately, then verify: a slice's worth of bytes each. True while a sweep is asked for."""
        if self._bytes_per_s == 0 and self._sweeps >= self._sweep_wanted:
            return False
        hurried = self._sweeps < self._sweep_wanted
        rate = 1 << 40 if hurried else self._bytes_per_s
        self._stamp(int(rate * SLICE_S * STAMP_RATE_FACTOR))
        self._verify(int(rate * SLICE_S), time.monotonic() + (SLICE_S if hurried else VERIFY_S))
        return hurried

    def _stamp(self, budget_bytes: int) -> None:
        """Newly sealed pages, in the order they came."""
        unstamped = self._node.waiting.unstamped
        deadline = time.monotonic() + SLICE_S
        while unstamped and budget_bytes > 0 and time.monotonic() < deadline:
            address = unstamped.popleft()
            self.scrub(address)
            frame_class = self._node.contents.class_of(address.extent)
            budget_bytes -= frame_class.page_bytes if frame_class is not None else 0

    def _verify(self, budget_bytes: int, deadline: float) -> None:
        contents = self._node.contents
        with self._mutex:
            if not self._walk:
                self._pages_damaged += self._node.check_words()
                self._walk_pages = 0
                # Pages that are not mapped only on request: every read of them is verified anyway.
                asked = self._sweeps < self._sweep_wanted
                tables = [table for table in contents.tables() if asked or contents.mapped(table.extent)]
                tables.sort(key=lambda table: table.extent, reverse=True)
                self._walk = [(table.extent, len(_sealed(table)), None) for table in tables]
            walk = self._walk
        while walk and budget_bytes > 0 and time.monotonic() < deadline:
            number, _, frames = walk.pop()
            table = contents.table(number)
            if table is None:
                continue
            if frames is None:
                frames = _sealed(table)
            if not len(frames):
                continue
            frame = int(frames[-1])
            walk.append((number, len(frames) - 1, frames[:-1]))
            self._walk_pages += self.scrub(Address(number, frame, int(table.words[frame]) >> 8)) != Status.STALE
            budget_bytes -= table.frame_class.page_bytes
        with self._mutex:
            if not walk and walk is self._walk:  # a sweep that was requested since then starts separately
                self._sweep_pages = self._walk_pages
                if self._sweeps < self._sweep_wanted:
                    self._asked_pages = self._walk_pages
                self._sweeps += 1

    def scrub(self, address: Address) -> Status:
        """Verify one page now: record, index entry, and checksums (computed where there are none yet).

        A damaged page is dropped with its descendants before this returns DAMAGED. STALE: nothing is sealed there.
        """
        table = self._node.contents.table(address.extent)
        if table is None or address.frame >= table.frames:
            return Status.STALE
        word = int(table.words[address.frame])
        if word != address.generation << 8 | FrameState.SEALED:
            return Status.STALE
        look = self._look if self._node.contents.mapped(address.extent) else self._look_below
        damage, sums = look(table, address)
        if int(table.words[address.frame]) != word:
            return Status.STALE  # it changed while we looked: whatever we saw means nothing
        self._pages_scrubbed += 1
        if damage:
            self._pages_damaged += 1
            self._node.drop_damaged(address, damage)
            return Status.DAMAGED
        if sums is not None:
            self._pages_stamped += 1
            self._node.handle(ev.Stamped(time.monotonic_ns(), address, sums))
        return Status.OK

    def _look(self, table: ExtentTable, address: Address) -> tuple[str, Any]:
        """(what is damaged or "", checksums where they have to be stamped or None)."""
        record = table.record(address.frame)
        if not record.is_sound():
            return "record", None
        self._node.check_indexed(address, record.key)
        page = self._node.contents.page(table, address.frame)
        sums = self._checksums(page, table.frame_class.layers)
        if not record.stamped:
            return "", sums
        return ("" if np.array_equal(sums, record.checksums) else "data"), None

    def _look_below(self, table: ExtentTable, address: Address) -> tuple[str, None]:
        """Check a page that is not mapped and has its checksums since it was written; on NVMe it is read."""
        record = table.record(address.frame)
        if not record.is_sound():
            return "record", None
        self._node.check_indexed(address, record.key)
        nvme = self._node.nvme
        if nvme is None or nvme.tier != table.tier:
            return "", None
        try:
            return nvme.verify(table, address), None
        except OSError as error:  # it does not answer: that says nothing about the page
            self._node.device_failed({table.position: error})
            return "", None

    def _checksums(self, page: Rows, layers: int) -> npt.NDArray[np.uint32]:
        """Low 32 bits of xxh3_64 of each of the ``layers`` equal parts of ``page`` ``[page_bytes]``; ``[layers]``."""
        digest, breathe, step = xxhash.xxh3_64_intdigest, self._breather.breathe, len(page) // layers
        sums = np.empty(layers, np.uint32)
        for layer in range(layers):
            sums[layer] = digest(page[layer * step : (layer + 1) * step].data) & 0xFFFFFFFF
            breathe()
        return sums


def _sealed(table: ExtentTable) -> npt.NDArray[np.uint32]:
    """Sealed frames of an extent, the last one first."""
    return np.flatnonzero((table.words & np.uint64(0xFF)) == FrameState.SEALED)[::-1].astype(np.uint32)
