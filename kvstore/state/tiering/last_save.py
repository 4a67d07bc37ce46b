"""Last save: when DRAM is about to be lost, the pages that only DRAM has are saved, hottest chains first.

The leaves of DRAM are listed once, by their last use. Each decision then takes the next leaves and saves their chains
from the front, one batch at a time, so that the saved pages are usable whenever the save is cut short::

    last use    chain      NVMe has    batches of three
    now         A B C D    A           B C D | E F
    1 min ago   A B E F

Pages stay in DRAM, and readers continue to use them. The save always comes to an end: each leaf is taken once, and a
page whose save failed is not tried again. The leaves are listed a second time only if a device failed or did not
respond: its pages, and those that follow them, are then saved elsewhere. NVMe evicts pages only for hotter ones.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvstore.model.replica import Address, FrameClass
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state import prefix_links
from kvstore.state.interfaces import RecordView
from kvstore.state.tiering.copying import CopyBatch
from kvstore.state.tiering.demotion import LEAVES_PER_STEP, Climb

if TYPE_CHECKING:
    from kvstore.state.tiering.demotion import Demotion


def leaves_hottest_first(records: RecordView) -> list[Address]:
    """Return all sealed pages without sealed children, the most recently used first."""
    links = prefix_links.link(records.snapshots())
    leaf = np.ones(len(links.parent), bool)
    leaf[links.parent[links.parent >= 0]] = False
    leaves = [links.address(i) for i in np.flatnonzero(leaf).tolist()]
    return sorted(leaves, key=lambda address: records.last_use_ns(*address[:2]), reverse=True)


class LastSave:
    """The save of all pages of DRAM. Part of ``Tiering``.

    Life: made with the node -> the first ``save`` lists the leaves -> further ``save`` calls until no chain is left,
    or until the caller stops.

    Pages that are stored in the meantime are not included. A call after the last page makes a new list.
    """

    def __init__(self, demotion: Demotion) -> None:
        self._demotion = demotion
        self._copies = demotion.copies
        self._upper = demotion.upper
        self._lower = demotion.lower
        self._leaves: deque[Address] | None = None
        self._climb: Climb | None = None  # of a chain that was too long for one batch
        self._full: set[FrameClass] = set()  # classes of which NVMe has only hotter pages
        self._must_repeat = False  # some pages wait for a device, or were being saved to one that failed

    def save(self, event: ev.SaveAll) -> list[do.Instruction]:
        """Handle ``events.SaveAll``. At most one batch is being saved at a time, apart from late ones."""
        out: list[do.Instruction] = []
        self._demotion.begin_day(event.day_bytes_left)
        if self._leaves is None:
            self._leaves = deque(leaves_hottest_first(self._upper.pages.records))
            self._must_repeat = False
        batch = None
        if not self._copies.is_saving(self._upper):
            batch = self._choose(self._leaves, event.bytes_max, out)
            if batch is not None:
                self._copies.start_saving(batch, out)
                self._demotion.charge(batch)
        chains = len(self._leaves) + (self._climb is not None)
        under_way = len(self._copies.staging)
        under_way += sum(batch.source is self._upper for batch in self._copies.saving.values())
        if not chains and not under_way:
            self._leaves = None
            self._full.clear()
            chains = int(self._must_repeat)
        out.append(do.Reply(detail={"chains": chains, "under_way": under_way, "begun": batch is not None}))
        return out

    def device_failed(self) -> None:
        """After a device has failed, list the leaves again to save its pages elsewhere."""
        self._must_repeat = True

    def _choose(self, leaves: deque[Address], bytes_max: int, out: list[do.Instruction]) -> CopyBatch | None:
        """Return a batch of the next chains, all of one class; None if they have nothing to save."""
        batch: CopyBatch | None = None
        for _ in range(LEAVES_PER_STEP):
            leaf = self._climb.leaf if self._climb is not None else leaves[0] if leaves else None
            if leaf is None:
                break
            if not self._upper.pages.sealed(leaf):
                self._drop_next(leaves)
                continue
            frame_class = self._upper.segment.extents[leaf.extent].pool.frame_class
            if batch is not None and batch.frame_class != frame_class:
                break
            pages = len(batch.pages) if batch is not None else 0
            room = self._demotion.pages_max(frame_class, bytes_max) - pages
            if room <= 0 and self._demotion.accepts(frame_class):
                break
            climb = self._next_climb(leaf, frame_class, leaves)
            if climb is None:
                continue
            batch = batch if batch is not None else CopyBatch([], frame_class, self._upper, self._lower)
            self._take(climb, batch, room, out)
            if self._climb is not None and self._lower.departures.waiting:
                break  # an extent is being emptied, and will have room
        return batch if batch is not None and batch.pages else None

    def _drop_next(self, leaves: deque[Address]) -> None:
        """Give up the unfinished climb, or else the next leaf."""
        if self._climb is not None:
            self._climb = None
        else:
            leaves.popleft()

    def _next_climb(self, leaf: Address, frame_class: FrameClass, leaves: deque[Address]) -> Climb | None:
        """Take the next leaf off the list and return its climb; None if there is nothing to save now."""
        climb, self._climb = self._climb, None
        if climb is None:
            leaves.popleft()
            accepted = frame_class not in self._full and self._demotion.accepts(frame_class)
            climb = self._demotion.climb(leaf) if accepted and self._is_admitted(leaf) else None
        elif not climb.is_valid():
            climb = None
        if climb is None:
            return None
        if not climb.proceed():
            self._climb = climb
            return None
        return climb if climb.pages else None

    def _is_admitted(self, leaf: Address) -> bool:
        extent = self._upper.segment.extents[leaf.extent]
        page = self._upper.pages.page(extent.pool, extent.slot_base + leaf.frame)
        return self._demotion.admits(page)

    def _take(self, climb: Climb, batch: CopyBatch, room: int, out: list[do.Instruction]) -> None:
        """Add as many of the topmost ``room`` pages to the batch as NVMe takes; the others wait in ``_climb``."""
        pool, used_ms = self._lower.segment.pool(batch.frame_class), self._used_ms(climb.leaf)
        count = climb.count(room)
        if not count:
            return
        if self._copies.is_behind_late(self._lower, climb.anchor):
            self._must_repeat = True
            return
        free = pool.free + len(self._lower.segment.vacant & self._lower.segment.populated) * pool.frames_per_extent
        if free < count and ((coldest_ms := pool.policy.coldest_ms()) is None or coldest_ms >= used_ms):
            count = free  # pages that could leave there are hotter
            if not count:
                self._full.add(batch.frame_class)
                return
        owner = self._copies.root_number(self._upper, climb.leaf)
        fits = self._lower.quotas.fit(owner, batch.frame_class, count, climb.anchor, out, used_ms)
        targets = self._lower.take_after((climb.anchor,), pool, fits, out) if fits else []
        if not targets and self._lower.departures.waiting:
            self._climb = climb
            return
        if not targets:
            self._demotion.counters["save_refused_space" if fits else "save_refused_quota"] += 1
            return
        self._demotion.add(batch, climb.anchor, climb.take(len(targets)), targets)
        self._climb = climb if climb.pages else None

    def _used_ms(self, leaf: Address) -> int:
        return self._upper.pages.records.last_use_ns(*leaf[:2]) // 1_000_000
