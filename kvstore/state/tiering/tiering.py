"""Tiering: what moves between the tiers of a node, and when.

The tiers of a node are a row, the fastest first; a page moves between neighbours. Each is prefix-closed on its own, so
of a chain a tier holds the first m pages and the one below it the first s. A page goes down in two steps::

    cold above ──save──> in both ──its frame is needed──> below only
              └─not admitted, or below cannot─> its frame is needed ──> gone

*Save* copies a chain from its front (``demotion``). A leaf that is about to leave waits in ``ClassPool.unsaved`` until
that is done, then in ``ready``; a caller that needs its frame before that is told to ask again. Looking ahead starts
when more than ``demote_at`` of a class's frames are in use, so that eviction normally finds pages that are ready. A
page goes up by *load* (``promotion``), on request (prefetch), after ``promote_after`` reads below, or because a writer
puts it again. What is being copied is held in the meantime (``copying``).
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
from kvstore.state.tiering.extent_reclaim import Clearing
from kvstore.state.tiering.last_save import LastSave
from kvstore.state.tiering.promotion import LOADING_BYTES_MAX, Promotion
from kvstore.state.tiering.write_through import Through
from kvstore.state.writing import Writing

__all__ = ["ADMISSIONS", "LOADING_BYTES_MAX", "NODE_SESSION", "Pair", "Tiering"]


class Pair:
    """Two neighbouring tiers, and the parts that decide what moves between them. Part of ``Tiering``."""

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
        self.clearing = Clearing(copies, lower)
        upper.departures.below = self.demotion
        lower.pages.erase, lower.clears = copies.start_erasing, self.clearing


class Tiering:
    """Decides about copies between the tiers of a node, of which there may be one. Part of ``NodeState``.

    Attributes:
        pairs: neighbours, by the tier of the lower one.
        through: for pages whose parent only the second tier has.
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
        self.pins: Pins | None = None  # they wait for what the scan finds
        self.copies = copies = CopyBatches(spaces, counters)
        self.pairs = {
            lower.tier: Pair(copies, upper, lower, writing, counters, rules[lower.tier])
            for upper, lower in pairwise(spaces.values())
        }
        if self.pairs:
            first = next(iter(self.pairs.values()))
            writing.through = Through(copies, writing, first.demotion, counters)
        self.through = writing.through
        for space in spaces.values():
            space.in_flight = copies.extents

    def handlers(self) -> dict[type, Callable[[Any], list[do.Instruction]]]:
        """The handler of each event."""
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
        """The tier below the first one that has this extent; None where none has."""
        return next((pair.lower for pair in self.pairs.values() if extent in pair.lower.segment.extents), None)

    def lost(self, space: Space, keys: set[bytes]) -> None:
        """A tier lost these pages, which the one above it took for saved."""
        if space.tier in self.pairs:
            self.pairs[space.tier].upper.reconsider(keys)

    # --- down, up, across -------------------------------------------------------------------------------------------

    def demote(self, event: ev.Demote) -> list[do.Instruction]:
        """See ``events.Demote``."""
        again = self._gone_on([])
        self.through.again(again)
        return again + self.pairs[event.tier].demotion.demote(event)

    def save_all(self, event: ev.SaveAll) -> list[do.Instruction]:
        """See ``events.SaveAll``."""
        return self._gone_on([]) + next(iter(self.pairs.values())).last_save.save(event)

    def prefetch(self, event: ev.Prefetch) -> list[do.Instruction]:
        """See ``events.Prefetch``. Pages of a tier go to the one above it."""
        lower = next(filter(None, (self._lower_of(address.extent) for address in event.addresses)), None)
        if lower is None:
            return [do.Reply(statuses=[int(Status.STALE)] * len(event.addresses))]
        return self.pairs[lower.tier].promotion.prefetch(event)

    def saved(self, event: ev.Saved) -> list[do.Instruction]:
        """See ``events.Saved``."""
        staged = self.copies.staging.get(event.number)
        batch = staged or self.copies.saving[event.number]
        self._other_pages(batch)
        if staged is not None:
            out = self.through.saved(event)
        else:
            out = self.pairs[batch.target.tier].demotion.saved(event)
        return self._gone_on(out)

    def loaded(self, event: ev.Loaded) -> list[do.Instruction]:
        """See ``events.Loaded``."""
        batch = self.copies.loading[event.number]
        self._other_pages(batch)
        return self._gone_on(self.pairs[batch.source.tier].promotion.loaded(event))

    def carried(self, event: ev.Carried) -> list[do.Instruction]:
        """See ``events.Carried``."""
        batch = self.copies.carrying[event.number]
        self._other_pages(batch)
        return self.pairs[batch.source.tier].clearing.carried(event)

    def _other_pages(self, batch: CopyBatch) -> None:
        """Other pages are in the frames of this batch now, and were not read there yet."""
        if batch.target.tier in self.pairs:
            self.pairs[batch.target.tier].promotion.forget_reads([page.target for page in batch.pages])

    def _gone_on(self, out: list[do.Instruction]) -> list[do.Instruction]:
        """``out``, and what can be emptied now that a copy has ended."""
        for pair in self.pairs.values():
            pair.clearing.go_on(out)
        return out

    def erased(self, event: ev.Erased) -> list[do.Instruction]:
        """See ``events.Erased``. Where that failed, the frames stay RETIRING: the next start tries again."""
        out: list[do.Instruction] = []
        pages = self.copies.erasing.pop(event.number)
        done = [address for i, (_, address) in enumerate(pages) if i not in event.failed]
        for pair in self.pairs.values():
            pair.lower.pages.erased([address for address in done if address.extent in pair.lower.segment.extents], out)
        return self._gone_on(out)

    # --- start and failures -----------------------------------------------------------------------------------------

    def adopt(self, event: ev.Adopt) -> list[do.Instruction]:
        """See ``events.Adopt``: pages whose parents are there become pages of their tier, under the generation on
        disk."""
        space = self._lower_of(event.addresses[0].extent) if event.addresses else None
        if space is None:
            self.counters["pages_not_adopted"] += len(event.addresses)
            return []
        out: list[do.Instruction] = []
        kept: list[int] = []
        keys = keys_of(event.heads)
        for i, (address, key, root) in enumerate(zip(event.addresses, keys, roots_of(event.heads), strict=True)):
            at_root = event.parents[i] == root
            parent = None if at_root else space.pages.find_in(root, event.parents[i])
            if not self._waits(space, address) or space.pages.find(key) is not None or (parent is None and not at_root):
                self.counters["pages_not_adopted"] += 1
                continue
            space.segment.extents[address.extent].generation[address.frame] = address.generation
            space.pages.expect([address], self.tenants.number(root, found=True))
            space.pages.seal(address, key, root, parent, event.standings[i])
            kept.append(i)
        for i in kept:
            space.pages.leaf(event.addresses[i], keys[i], event.now_ns // 1_000_000)
        space.pages.holdings.suspect = space.pages.holdings.limited
        if kept:
            addresses = [event.addresses[i] for i in kept]
            out.append(do.WriteUse(addresses, [event.now_ns] * len(kept)))
            parents, infos = [event.parents[i] for i in kept], [event.standings[i] for i in kept]
            kept_keys, heads = [keys[i] for i in kept], event.heads[kept]
            spans = spans_at(space.segment, addresses)
            out.append(do.WriteSealed(addresses, kept_keys, infos, heads, parents, None, "scan", spans))
            self.counters["pages_adopted"] += len(kept)
            if self.pins is not None:
                self.pins.adopted(set(kept_keys))
        return out

    @staticmethod
    def _waits(space: Space, address: Address) -> bool:
        extent = space.segment.extents.get(address.extent)
        return extent is not None and extent.state[address.frame] == FrameState.QUARANTINED

    def adopted(self, event: ev.Adopted) -> list[do.Instruction]:
        """See ``events.Adopted``."""
        out: list[do.Instruction] = []
        space = self._lower_of(event.extent)
        if space is not None:
            space.pages.free_quarantined(event.extent, out)
        if self.pins is not None:
            self.pins.scanned()
        return out

    def late(self, event: ev.DevicesLate) -> list[do.Instruction]:
        """See ``events.DevicesLate``."""
        space = self.pairs[event.tier].lower
        segment, saves = space.segment, set(event.saves)
        segment.populated = set(range(segment.positions)) - saves
        for extent in segment.extents.values():
            if extent.late != (extent.position in saves):
                extent.wait(not extent.late)
        space.late = bool(saves)
        self.copies.late(space, saves, set(event.loads))
        return []

    def failed(self, event: ev.TierFailed) -> list[do.Instruction]:
        """See ``events.TierFailed``: what is there is read on, nothing is written there any more."""
        pair = self.pairs[event.tier]
        segment, positions = pair.lower.segment, set(event.positions)
        gone = positions & segment.vacant
        segment.vacant -= gone
        segment.failed |= gone
        for extent in segment.extents.values():
            if extent.position in positions:
                extent.close()
        pair.demotion.device_failed()
        pair.last_save.device_failed()
        self.counters["devices_failed"] += 1
        return self._gone_on([])
