"""Tiering: what moves between the tiers of a node, and when.

The tiers of a node form a row, the fastest first, and a page moves between neighbours. Each tier is prefix-closed on
its own: it has the first m pages of a chain, and the tier below has the first s. A page moves down in two steps::

    cold above ──save──> in both ──its frame is needed──> below only
              └─not admitted, or below cannot take it─> its frame is needed ──> evicted

A *save* copies a chain from its front (``demotion``). A leaf that is about to leave waits in ``ClassPool.unsaved``
until its chain is saved, then in ``ready``. A caller that needs its frame before that receives BUSY and asks again.
Demotion starts saving cold pages once more than ``demote_at`` of a class's frames are in use, so that eviction normally
finds pages that are ready.

A *load* copies pages up (``promotion``): on request (prefetch), after ``promote_after`` reads from the lower tier, or
because a writer puts a page again. Pages that are being copied are held in the meantime (``copying``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from kvstore.model.replica import Address, FrameState, Status, Tier, keys_of, roots_of
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.directory_spans import spans_at
from kvstore.state.interfaces import TieringRules
from kvstore.state.pins import Pins
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants
from kvstore.state.tiering.copying import NODE_SESSION, CopyBatch, CopyBatches
from kvstore.state.tiering.demotion import ADMISSIONS, Demotion
from kvstore.state.tiering.extent_reclaim import ExtentReclaim
from kvstore.state.tiering.last_save import LastSave
from kvstore.state.tiering.promotion import LOADING_BYTES_MAX, Promotion
from kvstore.state.tiering.write_through import WriteThrough
from kvstore.state.writing import Writing

__all__ = ["ADMISSIONS", "LOADING_BYTES_MAX", "NODE_SESSION", "Pair", "Tiering"]


class Pair:
    """Two neighbouring tiers and the parts that decide what moves between them. Part of ``Tiering``."""

    def __init__(
        self,
        copies: CopyBatches,
        upper: Space,
        lower: Space,
        writing: Writing,
        counters: Counter[str],
        rules: TieringRules,
    ) -> None:
        self.upper = upper
        self.lower = lower
        self.demotion = Demotion(copies, upper, lower, counters, rules)
        self.last_save = LastSave(self.demotion)
        self.promotion = Promotion(copies, upper, lower, writing, counters, rules.promote_after)
        self.reclaim = ExtentReclaim(copies, lower)
        upper.departures.below = self.demotion
        lower.pages.erase, lower.emptier = copies.start_erasing, self.reclaim


class Tiering:
    """The decisions about copies between the tiers of a node. Part of ``NodeState``; a node may have only one tier.

    Attributes:
        pairs: the pairs of neighbours, by the lower tier.
        write_through: decides about pages whose parent only the second tier has.
    """

    def __init__(
        self,
        spaces: Mapping[Tier, Space],
        rules: Mapping[Tier, TieringRules],
        writing: Writing,
        tenants: Tenants,
        counters: Counter[str],
    ) -> None:
        self.spaces = spaces
        self.tenants = tenants
        self.counters = counters
        self.pins: Pins | None = None  # pins wait for pages that the scan finds
        self.copies = copies = CopyBatches(spaces, counters)
        self.pairs = {
            lower.tier: Pair(copies, upper, lower, writing, counters, rules[lower.tier])
            for upper, lower in pairwise(spaces.values())
        }
        if self.pairs:
            first = next(iter(self.pairs.values()))
            writing.write_through = WriteThrough(copies, writing, first.demotion, counters)
        self.write_through = writing.write_through
        for space in spaces.values():
            space.extents_in_flight = copies.held_extents

    def handlers(self) -> dict[type, Callable[[Any], list[do.Instruction]]]:
        """Return the handler of each event."""
        return {
            ev.Demote: self.demote,
            ev.SaveAll: self.save_all,
            ev.Saved: self.saved,
            ev.Prefetch: self.prefetch,
            ev.Loaded: self.loaded,
            ev.Carried: self.carried,
            ev.Erased: self.erased,
            ev.Adopt: self.adopt,
            ev.Adopted: self.adopted,
            ev.TierFailed: self.failed,
            ev.DevicesLate: self.late,
        }

    def _lower_of(self, extent: int) -> Space | None:
        """Return the lower tier that has this extent; None if no lower tier has it."""
        return next((pair.lower for pair in self.pairs.values() if extent in pair.lower.segment.extents), None)

    def lost(self, space: Space, keys: set[bytes]) -> None:
        """Let the tier above save these pages again, which this tier has lost."""
        if space.tier in self.pairs:
            self.pairs[space.tier].upper.reconsider(keys)

    # --- down, up, across -------------------------------------------------------------------------------------------

    def demote(self, event: ev.Demote) -> list[do.Instruction]:
        """Handle ``events.Demote``."""
        out = self._proceed([])
        self.write_through.retry(out)
        return out + self.pairs[event.tier].demotion.demote(event)

    def save_all(self, event: ev.SaveAll) -> list[do.Instruction]:
        """Handle ``events.SaveAll``."""
        return self._proceed([]) + next(iter(self.pairs.values())).last_save.save(event)

    def prefetch(self, event: ev.Prefetch) -> list[do.Instruction]:
        """Handle ``events.Prefetch``: load pages of a tier into the tier above."""
        lower = next(filter(None, (self._lower_of(address.extent) for address in event.addresses)), None)
        if lower is None:
            return [do.Reply(statuses=[int(Status.STALE)] * len(event.addresses))]
        return self.pairs[lower.tier].promotion.prefetch(event)

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """Handle ``events.Saved``."""
        staged = self.copies.staging.get(event.number)
        batch = staged or self.copies.saving[event.number]
        self._forget_reads(batch)
        if staged is not None:
            out = self.write_through.saved(event)
        else:
            out = self.pairs[batch.target.tier].demotion.saved(event)
        return self._proceed(out)

    def loaded(self, event: ev.Loaded) -> list[do.Instruction]:
        """Handle ``events.Loaded``."""
        batch = self.copies.loading[event.number]
        self._forget_reads(batch)
        return self._proceed(self.pairs[batch.source.tier].promotion.loaded(event))

    def carried(self, event: ev.Carried) -> list[do.Instruction]:
        """Handle ``events.Carried``."""
        batch = self.copies.carrying[event.number]
        self._forget_reads(batch)
        return self.pairs[batch.source.tier].reclaim.carried(event)

    def _forget_reads(self, batch: CopyBatch) -> None:
        """Reset the read counts of the frames of this batch: they hold other pages now."""
        if batch.target.tier in self.pairs:
            self.pairs[batch.target.tier].promotion.forget_reads([page.target for page in batch.pages])

    def _proceed(self, out: list[do.Instruction]) -> list[do.Instruction]:
        """Add the next steps of emptying extents to ``out``, since a copy may have ended. Return ``out``."""
        for pair in self.pairs.values():
            pair.reclaim.proceed(out)
        return out

    def erased(self, event: ev.Erased) -> list[do.Instruction]:
        """Handle ``events.Erased``. Frames whose erasure failed stay RETIRING: the next start tries again."""
        out: list[do.Instruction] = []
        pages = self.copies.erasing.pop(event.number)
        erased = [address for i, (_, address) in enumerate(pages) if i not in event.failed]
        for pair in self.pairs.values():
            pair.lower.pages.erased(
                [address for address in erased if address.extent in pair.lower.segment.extents], out
            )
        return self._proceed(out)

    # --- start and failures -----------------------------------------------------------------------------------------

    def adopt(self, event: ev.Adopt) -> list[do.Instruction]:
        """Handle ``events.Adopt``: pages with a parent in the tier join it, under the generation on disk."""
        space = self._lower_of(event.addresses[0].extent) if event.addresses else None
        if space is None:
            self.counters["pages_not_adopted"] += len(event.addresses)
            return []
        out: list[do.Instruction] = []
        adopted: list[int] = []
        keys = keys_of(event.heads)
        for i, (address, key, root) in enumerate(zip(event.addresses, keys, roots_of(event.heads), strict=True)):
            at_root = event.parents[i] == root
            parent = None if at_root else space.pages.find_in(root, event.parents[i])
            has_parent = at_root or parent is not None
            if not self._is_quarantined(space, address) or space.pages.find(key) is not None or not has_parent:
                self.counters["pages_not_adopted"] += 1
                continue
            space.segment.extents[address.extent].generation[address.frame] = address.generation
            space.pages.expect([address], self.tenants.number(root, restored=True))
            space.pages.seal(address, key, root, parent, event.standings[i])
            adopted.append(i)
        for i in adopted:
            space.pages.offer_leaf(event.addresses[i], keys[i], event.now_ns // 1_000_000)
        space.pages.holdings.suspect = space.pages.holdings.limited
        if adopted:
            addresses = [event.addresses[i] for i in adopted]
            out.append(do.WriteUse(addresses, [event.now_ns] * len(adopted)))
            parents, infos = [event.parents[i] for i in adopted], [event.standings[i] for i in adopted]
            adopted_keys, heads = [keys[i] for i in adopted], event.heads[adopted]
            spans = spans_at(space.segment, addresses)
            out.append(do.WriteSealed(addresses, adopted_keys, infos, heads, parents, None, "scan", spans))
            self.counters["pages_adopted"] += len(adopted)
            if self.pins is not None:
                self.pins.adopted(set(adopted_keys))
        return out

    @staticmethod
    def _is_quarantined(space: Space, address: Address) -> bool:
        extent = space.segment.extents.get(address.extent)
        return extent is not None and extent.state[address.frame] == FrameState.QUARANTINED

    def adopted(self, event: ev.Adopted) -> list[do.Instruction]:
        """Handle ``events.Adopted``: frames of the extent in which no page was adopted are free."""
        out: list[do.Instruction] = []
        space = self._lower_of(event.extent)
        if space is not None:
            space.pages.free_quarantined(event.extent, out)
        if self.pins is not None:
            self.pins.scanned()
        return out

    def late(self, event: ev.DevicesLate) -> list[do.Instruction]:
        """Handle ``events.DevicesLate``: mark extents and batches of these devices as late, and all others as not
        late."""
        space = self.pairs[event.tier].lower
        segment, saves = space.segment, set(event.saves)
        segment.populated = set(range(segment.positions)) - saves
        for extent in segment.extents.values():
            if extent.late != (extent.position in saves):
                extent.set_late(not extent.late)
        space.late = bool(saves)
        self.copies.set_late(space, saves, set(event.loads))
        return []

    def failed(self, event: ev.TierFailed) -> list[do.Instruction]:
        """Handle ``events.TierFailed``: pages on these positions are still read, and nothing more is written there."""
        pair = self.pairs[event.tier]
        segment, positions = pair.lower.segment, set(event.positions)
        failed = positions & segment.vacant
        segment.vacant -= failed
        segment.failed |= failed
        for extent in segment.extents.values():
            if extent.position in positions:
                extent.close()
        pair.demotion.device_failed()
        pair.last_save.device_failed()
        self.counters["devices_failed"] += 1
        return self._proceed([])
