"""LastSave: DRAM is about to go, so what only DRAM holds is saved, hottest chain first. Part of ``Tiering``.

The leaves of DRAM are listed once, by their last use. Then each decision takes the next of them, and saves their chains
from the front, a batch at a time, so that whatever ends it, what was saved is usable::

    last use    chain      NVMe has    batches of three
    now         A B C D    A           B C D | E F
    1 min ago   A B E F

Nothing leaves DRAM for it: readers go on. It comes to an end whatever happens: a leaf is taken once, and a page whose
save failed is not tried again. Only where a device did not answer, or failed, the leaves are listed once more: what was
to be stored there, or to hang on it, goes elsewhere. NVMe makes room for what is hotter than what leaves there, and for
nothing else.
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
    """All sealed pages that no sealed page hangs on, those used last in front."""
    links = prefix_links.link(records.snapshots())
    leaf = np.ones(len(links.parent), bool)
    leaf[links.parent[links.parent >= 0]] = False
    leaves = [links.address(i) for i in np.flatnonzero(leaf).tolist()]
    return sorted(leaves, key=lambda address: records.last_use_ns(*address[:2]), reverse=True)


class LastSave:
    """Life: made with the node -> ``save`` lists the leaves -> ``save`` until no chain is left, or the caller stops
    asking.

    Pages that are stored in the meantime are not in it. A call after the last page starts a new list.
    """

    def __init__(self, demotion: Demotion) -> None:
        self._demotion = demotion
        self._copies = demotion.copies
        self._upper = demotion.upper
        self._lower = demotion.lower
        self._leaves: deque[Address] | None = None
        self._climb: Climb | None = None  # of a chain that was too long for one batch
        self._full: set[FrameClass] = set()  # NVMe holds only hotter pages of these
        self._again = False  # some pages wait for a device, or were to go to one that failed

    def save(self, event: ev.SaveAll) -> list[do.Instruction]:
        """See ``events.SaveAll``; at most one batch is on its way down, but for those that are late."""
        out: list[do.Instruction] = []
        self._demotion.begin_day(event.day_bytes_left)
        if self._leaves is None:
            self._leaves = deque(leaves_hottest_first(self._upper.pages.records))
            self._again = False
        batch = None
        if not self._copies.is_saving(self._upper):
            batch = self._choose(self._leaves, event.bytes_max, out)
            if batch is not None:
                self._copies.start_saving(batch, out)
                self._demotion.began(batch)
        left = len(self._leaves) + (self._climb is not None)
        under_way = len(self._copies.staging)
        under_way += sum(batch.source is self._upper for batch in self._copies.saving.values())
        if not left and not under_way:
            self._leaves = None
            self._full.clear()
            left = int(self._again)
        out.append(do.Reply(detail={"chains": left, "under_way": under_way, "begun": batch is not None}))
        return out

    def device_failed(self) -> None:
        """What is on its way there has to go elsewhere."""
        self._again = True

    def _choose(self, leaves: deque[Address], bytes_max: int, out: list[do.Instruction]) -> CopyBatch | None:
        """A batch of the next chains, as far as they are of one class; None where these have nothing to save."""
        batch: CopyBatch | None = None
        for _ in range(LEAVES_PER_STEP):
            leaf = self._climb.leaf if self._climb is not None else leaves[0] if leaves else None
            if leaf is None:
                break
            if not self._upper.pages.sealed(leaf):
                self._next(leaves)
                continue
            frame_class = self._upper.segment.extents[leaf.extent].pool.frame_class
            if batch is not None and batch.frame_class != frame_class:
                break
            there = len(batch.pages) if batch is not None else 0
            room = self._demotion.pages_max(frame_class, bytes_max) - there
            if room <= 0 and self._demotion.takes(frame_class):
                break
            climb = self._climbed(leaf, frame_class, leaves)
            if climb is None:
                continue
            batch = batch if batch is not None else CopyBatch([], frame_class, self._upper, self._lower)
            self._take(climb, batch, room, out)
            if self._climb is not None and self._lower.departures.waiting:
                break  # an extent is being emptied: there is room when that is done
        return batch if batch is not None and batch.pages else None

    def _next(self, leaves: deque[Address]) -> None:
        """Nothing more of this chain."""
        if self._climb is not None:
            self._climb = None
        else:
            leaves.popleft()

    def _climbed(self, leaf: Address, frame_class: FrameClass, leaves: deque[Address]) -> Climb | None:
        """The way up from the next leaf, which is taken off the list; None where there is nothing to save of it now."""
        climb, self._climb = self._climb, None
        if climb is None:
            leaves.popleft()
            wanted = frame_class not in self._full and self._demotion.takes(frame_class) and self._is_admitted(leaf)
            climb = self._demotion.climb(leaf) if wanted else None
        elif not climb.still_holds():
            climb = None
        if climb is None:
            return None
        if not climb.go_on():
            self._climb = climb
            return None
        return climb if climb.pages else None

    def _is_admitted(self, leaf: Address) -> bool:
        extent = self._upper.segment.extents[leaf.extent]
        page = self._upper.pages.page(extent.pool, extent.slot_base + leaf.frame)
        return self._demotion.admits(page)

    def _take(self, climb: Climb, batch: CopyBatch, room: int, out: list[do.Instruction]) -> None:
        """Add to the batch what NVMe takes of the topmost ``room`` pages; the rest of a chain waits in ``_climb``."""
        pool, used_ms = self._lower.segment.pool(batch.frame_class), self._used_ms(climb.leaf)
        wanted = climb.count(room)
        if not wanted:
            return
        if self._copies.behind(self._lower, climb.anchor):
            self._again = True
            return
        there = pool.free + len(self._lower.segment.vacant & self._lower.segment.populated) * pool.frames_per_extent
        if there < wanted and ((coldest_ms := pool.policy.coldest_ms()) is None or coldest_ms >= used_ms):
            wanted = there  # what could leave there is hotter
            if not wanted:
                self._full.add(batch.frame_class)
                return
        owner = self._copies.owner(self._upper, climb.leaf)
        fits = self._lower.quotas.fit(owner, batch.frame_class, wanted, climb.anchor, out, used_ms)
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
