"""Copies: pages on their way between two tiers, or within one, and what is held for them in the meantime.

A batch lives from the decision (``Save``, ``Load``, ``Carry``) to its report (``Saved``, ``Loaded``, ``Carried``), and
its pages end in one of two ways: *arrived*, sealed under the frame that was RESERVED for them; or not, that frame free
again. Frames that are being erased are RETIRING from ``Erase`` to ``Erased``, or to the next start, which goes on.
A batch whose report never comes (the daemon died) is undone by the next start: its frames are in no index.

While pages are copied nothing may move them or take away what they hang on. So every source is held, like the parent
of a reservation, and so is the page in the other tier that the first new ones will hang on. Damage breaks a hold: what
arrives is judged by whether its source is still the page that was chosen, and its parent still there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore.model.replica import Address, FrameClass, Tier, keys_of, roots_of
from kvstore.state import instructions as do
from kvstore.state.interfaces import Rows
from kvstore.state.space import Space

NODE_SESSION = (1 << 64) - 1  # writer of frames that pages are copied into: no client has it, and it dies with the node


@dataclass(slots=True)
class CopyBatch:
    """Pages of one class on their way, parents before their children. See the module.

    Attributes:
        source, target: the tiers they are copied from and to.
        held: what is held in either tier, one entry per hold.
        leaves: sources that were about to leave their tier, with their last use (ms) when they were set aside.
        waits_for: keys that loaded pages will hang on, which are on their way themselves, in an earlier batch.
        late: a device of it does not answer now: others need not wait for it.
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
    """The pages of a batch that are sealed now: places, parents' keys and standings; and the frames left unused."""

    places: list[int] = field(default_factory=list)
    parents: list[bytes] = field(default_factory=list)
    standings: list[int] = field(default_factory=list)
    unused: list[Address] = field(default_factory=list)


class CopyBatches:
    """All batches under way between the tiers of a node, or within one. Part of ``Tiering``."""

    def __init__(self, tiers: Iterable[Tier], counters: Counter[str]) -> None:
        self.counters = counters
        self.saving: dict[int, CopyBatch] = {}
        self.loading: dict[int, CopyBatch] = {}
        self.carrying: dict[int, CopyBatch] = {}  # from one extent of a tier to others
        self.erasing: dict[int, list[tuple[bytes, Address]]] = {}  # frames, and the keys of what was there
        self.staging: dict[int, CopyBatch] = {}  # pages that are saved out of frames they were never sealed in
        self.down: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}  # keys of what is being saved there
        self.up: dict[Tier, set[bytes]] = {tier: set() for tier in tiers}  # and loaded there
        self._late_loads: dict[Tier, set[int]] = {}  # positions
        self._next = 1

    def start_saving(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold the sources of these pages and have them saved; their frames below were just taken."""
        # A branch may leave a chain anywhere, so each source is held separately.
        self._hold_sources(batch)
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Save(self._enter(self.saving, batch), batch.pages))

    def start_staged(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Save pages whose reserved frames are not written to any more; their frames below were just taken."""
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Save(self._enter(self.staging, batch), batch.pages))

    def start_loading(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold the sources of these pages and have them loaded; their frames above were just taken."""
        self._hold_sources(batch)
        for page in batch.pages:
            self.up[batch.target.tier].add(page.key)
            batch.target.pages.expect([page.target], self.owner(batch.source, page.source))
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Load(self._enter(self.loading, batch), batch.pages))

    def start_carrying(self, batch: CopyBatch, out: list[do.Instruction]) -> None:
        """Hold these pages and have them copied; their new frames, in the same tier, were just taken."""
        self._hold_sources(batch)
        out.append(do.WriteGranted([page.target for page in batch.pages], NODE_SESSION))
        out.append(do.Carry(self._enter(self.carrying, batch), batch.pages))

    @staticmethod
    def _hold_sources(batch: CopyBatch) -> None:
        for page in batch.pages:
            batch.source.pages.hold(page.source)
            batch.held.append(page.source)

    def start_erasing(self, pages: list[tuple[bytes, Address]], out: list[do.Instruction]) -> None:
        """Have these frames erased, which are RETIRING."""
        number, self._next = self._next, self._next + 1
        self.erasing[number] = pages
        out.append(do.Erase(number, pages))

    def late(self, space: Space, saves: set[int], loads: set[int]) -> None:
        """What is written to, or read from, these positions of a tier takes long: see ``CopyBatch.late``."""
        self._late_loads[space.tier] = loads
        place = {number: extent.position for number, extent in space.segment.extents.items()}
        for batch in (*self.saving.values(), *self.staging.values(), *self.carrying.values()):
            if batch.target is space:
                batch.late = any(place[page.target.extent] in saves for page in batch.pages)
        for batch in self.loading.values():
            if batch.source is space:
                batch.late = any(place.get(page.source.extent) in loads for page in batch.pages)

    def is_late(self, space: Space, source: Address) -> bool:
        """The device of this page of a tier does not answer: no load of it begins."""
        extent = space.segment.extents.get(source.extent)
        return extent is not None and extent.position in self._late_loads.get(space.tier, ())

    def is_saving(self, source: Space) -> bool:
        """A batch of pages of this tier is on its way down that others wait for."""
        return any(batch.source is source and not batch.late for batch in self.saving.values())

    def behind(self, target: Space, anchor: bytes) -> bool:
        """A page of this key is on its way down to that tier in a batch that is late."""
        batches = (*self.saving.values(), *self.staging.values())
        late = (batch for batch in batches if batch.target is target and batch.late)
        return anchor in self.down[target.tier] and any(page.key == anchor for batch in late for page in batch.pages)

    def bytes_to(self, target: Space) -> int:
        """What is being written to that tier, and may not be counted as written there yet."""
        batches = (*self.saving.values(), *self.staging.values(), *self.carrying.values())
        stride = target.segment.stride
        return sum(len(batch.pages) * stride(batch.frame_class) for batch in batches if batch.target is target)

    @property
    def busy(self) -> bool:
        """Anything is on its way."""
        return self.under_way > 0

    @property
    def under_way(self) -> int:
        """Batches decided and not reported yet."""
        batches = len(self.saving) + len(self.loading) + len(self.carrying) + len(self.staging)
        return batches + len(self.erasing)

    def touches(self, keys: set[bytes]) -> bool:
        """True where one of these pages is being copied, or is not erased yet at its source. What a start erases has no
        known key: until it is erased, it may be any page."""
        moved = {page.key for batch in self.carrying.values() for page in batch.pages}
        wiped = {key for pages in self.erasing.values() for key, _ in pages}
        copied = (*self.down.values(), *self.up.values(), moved, wiped)
        return b"" in wiped or any(not keys.isdisjoint(busy) for busy in copied)

    @staticmethod
    def owner(space: Space, address: Address) -> int:
        """Number of the root of a page."""
        return space.segment.extents[address.extent].owner[address.frame]

    def _enter(self, table: dict[int, CopyBatch], batch: CopyBatch) -> int:
        number, self._next = self._next, self._next + 1
        table[number] = batch
        return number

    def arrive(self, batch: CopyBatch, heads: Rows, failed: Iterable[int]) -> Arrival:
        """Seal what was copied whole, still is the page that was chosen, and has its parent in the target tier.

        The caller writes the instructions, offers chain ends (``TierPages.leaf``), and calls ``end``.
        """
        source, target = batch.source, batch.target
        arrival = Arrival()
        lost, absent = set(failed), target.pages.absent([page.key for page in batch.pages])
        for i, (page, key, root) in enumerate(zip(batch.pages, keys_of(heads), roots_of(heads), strict=True)):
            parent_key, parent = b"", None
            wanted = i not in lost and key == page.key and source.pages.sealed(page.source)
            wanted = wanted and (i < absent or target.pages.find(key) is None)
            if wanted:
                parent_key = source.pages.records.parent(*page.source[:2])
                parent = target.pages.find_in(root, parent_key) if parent_key != root else None
            if not wanted or (parent is None and parent_key != root):
                arrival.unused.append(page.target)
                continue
            info = source.pages.records.standing(*page.source[:2])
            target.pages.seal(page.target, key, root, parent, info)
            arrival.places.append(i)
            arrival.parents.append(parent_key)
            arrival.standings.append(info)
        return arrival

    @staticmethod
    def end(batch: CopyBatch, unused: list[Address], out: list[do.Instruction]) -> None:
        """Frames that came to nothing are free again, and nothing is held any more."""
        source, target = batch.source, batch.target
        if unused:
            target.pages.free(unused, out, {page.target: page.key for page in batch.pages})
        for address in batch.held:
            if source.pages.sealed(address):
                left = address in batch.leaves and target.pages.find(source.pages.records.key(*address[:2])) is not None
                source.pages.unhold(address, batch.leaves[address] if left else None)
            elif target.pages.sealed(address):
                target.pages.unhold(address)

    def _batches(self) -> tuple[CopyBatch, ...]:
        return (*self.saving.values(), *self.loading.values(), *self.carrying.values(), *self.staging.values())

    # --- what is on its way -----------------------------------------------------------------------------------------

    def moving(self, frame_class: FrameClass, space: Space) -> bool:
        """Pages of this class are on their way into that tier, or out of it."""
        batches = (*self.saving.values(), *self.loading.values(), *self.staging.values())
        return any(batch.frame_class == frame_class and space in (batch.source, batch.target) for batch in batches)

    def frames(self) -> list[Address]:
        """RESERVED frames of all tiers that pages are being copied into."""
        return [page.target for batch in self._batches() for page in batch.pages]

    def extents(self) -> set[int]:
        """Extents with pages that are held: their pages keep their addresses."""
        return {address.extent for batch in self._batches() for address in batch.held}

    def held(self, space: Space) -> list[Address]:
        """Sealed pages that are held in ``space``, one entry per hold."""
        return [address for batch in self._batches() for address in batch.held if space.pages.sealed(address)]
