"""Tiering: what moves between DRAM and NVMe, and when.

Both tiers are prefix-closed, each by itself, so of a chain DRAM holds the first m pages and NVMe the first s. A page
goes down in two steps::

    cold in DRAM ──save──> in both ──its frame is needed──> in NVMe only
                 └─not admitted, or NVMe cannot─> its frame is needed ──> gone

*Save* copies a chain from its front (``demotion``). A leaf that is about to leave waits in ``ClassPool.unsaved`` until
that is done, then in ``ready``; whoever needs its frame before that is told to ask again. Looking ahead starts when
more than ``demote_at`` of a class's frames are in use, so that eviction normally finds pages that are ready. A page
goes up by *load* (``promotion``), on request (prefetch), after ``promote_after`` reads from NVMe, or because somebody
puts it again. What is being copied is held meanwhile (``copying``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state.clearing import Clearing
from kvstore.state.copying import NODE_SESSION, Copies
from kvstore.state.demotion import ADMISSIONS, Demotion, TieringRules
from kvstore.state.last_save import LastSave
from kvstore.state.pins import Pins
from kvstore.state.promotion import LOADING_BYTES_MAX, Promotion
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants
from kvstore.state.through import Through
from kvstore.state.writing import Writing

__all__ = ["ADMISSIONS", "LOADING_BYTES_MAX", "NODE_SESSION", "Tiering", "TieringRules"]


class Tiering:
    """Decides about copies between ``dram`` and ``nvme``. Part of ``NodeState``."""

    def __init__(
        self, dram: Space, nvme: Space, writing: Writing, tenants: Tenants, counters: Counter[str], rules: TieringRules
    ) -> None:
        self.dram = dram
        self.nvme = nvme
        self.tenants = tenants
        self.counters = counters
        self.rules = rules
        self.pins: Pins | None = None  # they wait for what the scan finds
        self.copies = Copies(dram, nvme, tenants, counters)
        self.demotion = Demotion(self.copies, counters, rules)
        self.last_save = LastSave(self.demotion)
        self.promotion = Promotion(self.copies, writing, counters, rules.promote_after)
        self.through = writing.through = Through(self.copies, writing, self.demotion, counters)
        dram.below = self.demotion
        self.clearing = Clearing(self.copies, nvme)
        dram.in_flight = nvme.in_flight = self.copies.extents
        nvme.erase, nvme.clears = self.copies.start_erasing, self.clearing

    def handlers(self) -> dict[type, Callable[[Any], list[ev.Instruction]]]:
        """Who decides about which event."""
        return {
            ev.Demote: self.demote,
            ev.SaveAll: self.last_save.save,
            ev.Saved: self.saved,
            ev.Prefetch: self.promotion.prefetch,
            ev.Loaded: self.loaded,
            ev.Carried: self.carried,
            ev.Erased: self.erased,
            ev.Adopt: self.adopt,
            ev.Adopted: self.adopted,
            ev.TierFailed: self.failed,
            ev.DevicesLate: self.late,
        }

    @property
    def writable(self) -> bool:
        """NVMe takes pages: a device is up, and today's writes are not used up."""
        return self.demotion.writable

    def saved(self, event: ev.Saved) -> list[ev.Instruction]:
        """See ``events.Saved``."""
        staged = self.copies.staging.get(event.number)
        self.promotion.forget_reads([page.target for page in (staged or self.copies.saving[event.number]).pages])
        out = self.through.saved(event) if staged is not None else self.demotion.saved(event)
        self.clearing.go_on(out)
        return out

    def loaded(self, event: ev.Loaded) -> list[ev.Instruction]:
        """See ``events.Loaded``."""
        out = self.promotion.loaded(event)
        self.clearing.go_on(out)
        return out

    def carried(self, event: ev.Carried) -> list[ev.Instruction]:
        """See ``events.Carried``."""
        self.promotion.forget_reads([page.target for page in self.copies.carrying[event.number].pages])
        return self.clearing.carried(event)

    def erased(self, event: ev.Erased) -> list[ev.Instruction]:
        """See ``events.Erased``. Where that failed, the frames stay RETIRING: the next start tries again."""
        out: list[ev.Instruction] = []
        pages = self.copies.erasing.pop(event.number)
        self.nvme.erased([address for i, (_, address) in enumerate(pages) if i not in event.failed], out)
        self.clearing.go_on(out)
        return out

    def demote(self, event: ev.Demote) -> list[ev.Instruction]:
        """See ``events.Demote``."""
        again: list[ev.Instruction] = []
        self.through.again(again)
        return again + self.demotion.demote(event)

    # --- start and failures -----------------------------------------------------------------------------------------

    def adopt(self, event: ev.Adopt) -> list[ev.Instruction]:
        """See ``events.Adopt``: pages whose parents are there become pages of NVMe, under the generation on disk."""
        out: list[ev.Instruction] = []
        kept: list[int] = []
        keys = [row[:16].tobytes() for row in event.heads]
        for i, (address, key) in enumerate(zip(event.addresses, keys, strict=True)):
            root = event.heads[i, 16:32].tobytes()
            at_root = event.parents[i] == root
            parent = None if at_root else self.nvme.find_in(root, event.parents[i])
            if not self._waits(address) or self.nvme.find(key) is not None or (parent is None and not at_root):
                self.counters["pages_not_adopted"] += 1
                continue
            self.nvme.segment.extents[address.extent].generation[address.frame] = address.generation
            self.nvme.expect([address], self.tenants.number(root, found=True))
            self.nvme.seal(address, key, root, parent, event.standings[i])
            kept.append(i)
        for i in kept:
            self.nvme.leaf(event.addresses[i], keys[i], event.now_ns // 1_000_000)
        self.nvme.holdings.suspect = self.nvme.holdings.limited
        if kept:
            addresses = [event.addresses[i] for i in kept]
            out.append(ev.WriteUse(addresses, [event.now_ns] * len(kept)))
            parents, infos = [event.parents[i] for i in kept], [event.standings[i] for i in kept]
            kept_keys, heads = [keys[i] for i in kept], event.heads[kept]
            out.append(ev.WriteSealed(addresses, kept_keys, infos, heads, parents, cause="scan"))
            self.counters["pages_adopted"] += len(kept)
            if self.pins is not None:
                self.pins.adopted(set(kept_keys))
        return out

    def _waits(self, address: Address) -> bool:
        extent = self.nvme.segment.extents.get(address.extent)
        return extent is not None and extent.state[address.frame] == FrameState.QUARANTINED

    def adopted(self, event: ev.Adopted) -> list[ev.Instruction]:
        """See ``events.Adopted``."""
        out: list[ev.Instruction] = []
        self.nvme.free_quarantined(event.extent, out)
        if self.pins is not None:
            self.pins.scanned()
        return out

    def late(self, event: ev.DevicesLate) -> list[ev.Instruction]:
        """See ``events.DevicesLate``."""
        segment, saves = self.nvme.segment, set(event.saves)
        segment.populated = set(range(segment.positions)) - saves
        for extent in segment.extents.values():
            if extent.late != (extent.position in saves):
                extent.wait(not extent.late)
        self.nvme.late = bool(saves)
        self.copies.late(saves, set(event.loads))
        return []

    def failed(self, event: ev.TierFailed) -> list[ev.Instruction]:
        """See ``events.TierFailed``: what is there is read on, nothing is written there any more."""
        segment, positions = self.nvme.segment, set(event.positions)
        gone = positions & segment.vacant
        segment.vacant -= gone
        segment.failed |= gone
        for extent in segment.extents.values():
            if extent.position in positions:
                extent.close()
        self.demotion.device_failed()
        self.counters["devices_failed"] += 1
        out: list[ev.Instruction] = []
        self.clearing.go_on(out)
        return out
