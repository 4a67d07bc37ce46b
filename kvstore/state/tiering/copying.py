"""Copies of pages between two tiers, or within one, and the pages that are held for them in the meantime.

A batch exists from the decision (``Save``, ``Load``, ``Carry``) until its report (``Saved``, ``Loaded``, ``Carried``).
Each of its pages ends in one of two ways: it is sealed in the frame that was RESERVED for it, or that frame is free
again. Frames that are being erased are RETIRING from ``Erase`` until ``Erased``; after a restart the erasure is done
again. If the daemon dies before the report, the next start undoes the batch: its frames are in no index.

While a page is copied, nothing may move it or evict its parent. So each source is held, as a reservation's parent is.
The page in the target tier that will be the parent of the first copied page is held too. Damage breaks a hold. So when
a copy arrives, it is sealed only if its source is still the page that was chosen and its parent is still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.model.replica import Address, FrameClass, Tier, keys_of, roots_of
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from kvstore.state.space import Space

NODE_SESSION = (1 << 64) - 1  # writer of frames that pages are copied into: no client has this number


@dataclass(slots=True)
class CopyBatch:
    """Pages of one class that are copied together, parents before their children.

    Attributes:
        source, target: the tiers that the pages are copied from and to.
        held: pages that are held in either tier, one entry per hold.
        leaves: sources that were about to leave their tier -> their last use (ms) at the time they were set aside.
        waits_for: keys of parents that an earlier batch is still loading.
        late: one of its devices is not responding; other batches need not wait for this one.
    """

    pages: list[do.Copying]
    frame_class: FrameClass
    source: Space
    target: Space
    held: list[Address] = field(default_factory=list)
    leaves: dict[Address, int] = field(default_factory=dict)
    waits_for: set[bytes] = field(default_factory=set)
    late: bool = False


@dataclass(slots=True)
class Arrival:
    """The outcome of a batch: place, parent's key and standing of each sealed page, and the unused frames."""

    places: list[int] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    standings: list[int] = field(default_factory=list)
    unused: list[Address] = field(default_factory=list)


class CopyBatches:
    """All unfinished batches of a node. Part of ``Tiering``."""

    def __init__(self, tiers: Iterable[Tier], counters: Counter[str]) -> None:
        self.counters = counters
        self.saving: dict[int, CopyBatch] = {}
        self.loading: dict[int, CopyBatch] = {}
        self.carrying: dict[int, CopyBatch] = {}  # from one extent to others of the same tier
        self.erasing: dict[int, list[tuple[bytes, Address]]] = {}  # frames, and the keys of their former pages
        self.staging: dict[int, CopyBatch] = {}  # saves of pages that are not sealed in their source frames
        self.down: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}  # keys that are being saved there
        self.up: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}  # keys that are being loaded there
        self._late_loads: dict[Tier, set[int]] = {}  # positions of devices that are not responding to reads
        self._next = 1

    def start_saving(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold the sources of these pages and start saving them. Their frames in the lower tier are already taken."""
        # Branches may leave a chain at any page, so each source is held separately.
        self._hold_sources(batch)
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Save(self._register(self.saving, batch), batch.pages))

    def start_staged(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Start saving pages from reserved frames that no longer have a writer. Their frames in the lower tier are
        already taken."""
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Save(self._register(self.staging, batch), batch.pages))

    def start_loading(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold the sources of these pages and start loading them. Their frames in the upper tier are already taken."""
        self._hold_sources(batch)
        for page in batch.pages:
            self.up[batch.target.tier].add(page.key)
            batch.target.pages.expect([page.target], self.root_number(batch.source, page.source))
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Load(self._register(self.loading, batch), batch.pages))

    def start_carrying(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold these pages and start copying them. Their new frames, in the same tier, are already taken."""
        self._hold_sources(batch)
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Carry(self._register(self.carrying, batch), batch.pages))

    @staticmethod
    def _hold_sources(batch: CopyBatch) -> None:
        for page in batch.pages:
            batch.source.pages.hold(page.source)
            batch.held.append(page.source)

    def start_erasing(self, pages: list[tuple[bytes, Address]], out: list[do.Instruction]) -> None:
        """Start erasing these RETIRING frames."""
        number, self._next = self._next, self._next + 1
        self.erasing[number] = pages
        out.append(do.Erase(number, pages))

    def set_late(self, space: Space, saves: set[int], loads: set[int]) -> None:
        """Mark the batches that write to, or read from, these positions of a tier as late. See ``CopyBatch.late``."""
        self._late_loads[space.tier] = loads
        place = {number: extent.position for number, extent in space.segment.extents.items()}
        for batch in (*self.saving.values(), *self.staging.values(), *self.carrying.values()):
            if batch.target is space:
                batch.late = any(place[page.target.extent] in saves for page in batch.pages)
        for batch in self.loading.values():
            if batch.source is space:
                batch.late = any(place.get(page.source.extent) in loads for page in batch.pages)

    def is_unreadable(self, space: Space, source: Address) -> bool:
        """Return True if the page's device is not responding, so that no load of the page may start."""
        extent = space.segment.extents.get(source.extent)
        return extent is not None and extent.position in self._late_loads.get(space.tier, ())

    def is_saving(self, source: Space) -> bool:
        """Return True if a batch that is not late is being saved from this tier."""
        return any(batch.source is source and not batch.late for batch in self.saving.values())

    def is_behind_late(self, target: Space, anchor: bytes) -> bool:
        """Return True if the page with this key is being saved to ``target`` in a late batch."""
        batches = (*self.saving.values(), *self.staging.values())
        late = (batch for batch in batches if batch.target is target and batch.late)
        return anchor in self.down[target.tier] and any(page.key == anchor for batch in late for page in batch.pages)

    def bytes_to(self, target: Space) -> int:
        """Return how many bytes are being written to that tier. Some of them might not yet be counted as written."""
        batches = (*self.saving.values(), *self.staging.values(), *self.carrying.values())
        stride = target.segment.stride
        return sum(len(batch.pages) * stride(batch.frame_class) for batch in batches if batch.target is target)

    @property
    def is_busy(self) -> bool:
        """True if any batch is unfinished."""
        return self.under_way > 0

    @property
    def under_way(self) -> int:
        """Number of batches that were decided and are not reported yet."""
        batches = len(self.saving) + len(self.loading) + len(self.carrying) + len(self.staging)
        return batches + len(self.erasing)

    def touches(self, keys: set[bytes]) -> bool:
        """Return True if one of these pages is being copied, or its old frame is still to be erased.

        If an erasure is repeated after a restart, the page's key is unknown. Until the erasure ends, it could be any
        page.
        """
        carried = {page.key for batch in self.carrying.values() for page in batch.pages}
        erased = {key for pages in self.erasing.values() for key, _ in pages}
        busy_sets = (*self.down.values(), *self.up.values(), carried, erased)
        return b"" in erased or any(not keys.isdisjoint(busy) for busy in busy_sets)

    @staticmethod
    def root_number(space: Space, address: Address) -> int:
        """Return the number of the page's root, see ``Tenants``."""
        return space.segment.extents[address.extent].owner[address.frame]

    def _register(self, table: dict[int, CopyBatch], batch: CopyBatch) -> int:
        number, self._next = self._next, self._next + 1
        table[number] = batch
        return number

    def seal_arrived(self, batch: CopyBatch, heads: Rows, failed: Iterable[int]) -> Arrival:
        """Seal each page that was copied completely, is still the chosen page, and has its parent in the target tier.

        The caller writes the instructions, calls ``TierPages.offer_leaf`` for ends of chains, and then ``finish``.
        """
        source, target = batch.source, batch.target
        arrival = Arrival()
        lost, absent = set(failed), target.pages.absent([page.key for page in batch.pages])
        for i, (page, key, root) in enumerate(zip(batch.pages, keys_of(heads), roots_of(heads), strict=True)):
            parent_key, parent = b"", None
            is_valid = i not in lost and key == page.key and source.pages.sealed(page.source)
            is_valid = is_valid and (i < absent or target.pages.find(key) is None)
            if is_valid:
                parent_key = source.pages.records.parent(*page.source[:2])
                parent = target.pages.find_in(root, parent_key) if parent_key != root else None
            if not is_valid or (parent is None and parent_key != root):
                arrival.unused.append(page.target)
                continue
            info = source.pages.records.standing(*page.source[:2])
            target.pages.seal(page.target, key, root, parent, info)
            arrival.places.append(i)
            arrival.parents.append(parent_key)
            arrival.standings.append(info)
        return arrival

    @staticmethod
    def finish(batch: CopyBatch, unused: list[Address], out: list[do.Instruction]) -> None:
        """Free the frames that were not used, and release all holds of the batch."""
        source, target = batch.source, batch.target
        if unused:
            target.pages.free(unused, out, {page.target: page.key for page in batch.pages})
        for address in batch.held:
            if source.pages.sealed(address):
                key = source.pages.records.key(*address[:2])
                is_saved = address in batch.leaves and target.pages.find(key) is not None
                source.pages.unhold(address, batch.leaves[address] if is_saved else None)
            elif target.pages.sealed(address):
                target.pages.unhold(address)

    def _batches(self) -> tuple[CopyBatch, ...]:
        return (*self.saving.values(), *self.loading.values(), *self.carrying.values(), *self.staging.values())

    # --- what is being copied ---------------------------------------------------------------------------------------

    def is_moving(self, frame_class: FrameClass, space: Space) -> bool:
        """Return True if pages of this class are being copied into that tier, or out of it."""
        batches = (*self.saving.values(), *self.loading.values(), *self.staging.values())
        return any(batch.frame_class == frame_class and space in (batch.source, batch.target) for batch in batches)

    def target_frames(self) -> list[Address]:
        """Return the RESERVED frames, in all tiers, that are targets of copies."""
        return [page.target for batch in self._batches() for page in batch.pages]

    def held_extents(self) -> set[int]:
        """Return the extents with held pages. Their pages keep their addresses."""
        return {address.extent for batch in self._batches() for address in batch.held}

    def held_pages(self, space: Space) -> list[Address]:
        """Return the sealed pages that are held in ``space``, one entry per hold."""
        return [address for batch in self._batches() for address in batch.held if space.pages.sealed(address)]
