"""TierPages: what the frames of a tier hold, and the counts that keep the tier prefix-closed.

A SEALED frame counts the sealed children of its page and everything else that holds the page (a reservation, an
unfinished copy). Only pages with a count of zero are offered to the eviction policy, so the pages that leave are always
the tails of chains. A worked example, a chain of two pages with a reservation after them::

    key   state      children
    A     SEALED     1          B is stored
    B     SEALED     1          C is reserved; when C is given up, B counts 0 and is offered
    C     RESERVED   -

When a page leaves, its frame is usually free at once. A frame on NVMe is different if it holds an object's head, or if
one may have been written into it. It has to be erased before another page gets it. Otherwise a reboot might find an
object again that was deleted::

    SEALED, RESERVED ──> FREE
                    └──> RETIRING ──Erase, Erased──> FREE
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kvstore.model.objects import HEAD_TAG, is_object_class
from kvstore.model.replica import Address, FrameState, Tier, address_of, frame_runs, position_of, standing, turns_of
from kvstore.state import instructions as do
from kvstore.state import prefix_links
from kvstore.state.directory_spans import spans_after, spans_at
from kvstore.state.eviction import Page
from kvstore.state.frames import ClassPool, Extent, Segment
from kvstore.state.interfaces import TierParts
from kvstore.state.leases import LeaseTable
from kvstore.state.tenants import Leaf, Share, TierAccounts

Erasing = Callable[[list[tuple[bytes, Address]], list[do.Instruction]], None]
"""Starts to erase RETIRING frames, given as (key of the former page if known, address)."""


@dataclass(slots=True)
class Vacated:
    """Frames without a page, under new generations: ``free`` frames, and frames ``to_erase`` before reuse (with
    keys)."""

    free: list[Address] = field(default_factory=list)
    to_erase: list[tuple[bytes, Address]] = field(default_factory=list)


class Leaving(NamedTuple):
    """The pages that one decision removes.

    ``copies`` are their copies in the tier below, with the last use that they inherit.
    """

    vacated: Vacated
    keys: list[bytes]
    roots: list[bytes]
    spans: list[int]
    copies: list[tuple[Address, int]]


FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED
_SEALED, _SEALED_BYTE = int(SEALED), bytes([SEALED])


def standings_of(position: int, turns: int, count: int, hints: bytes = b"") -> list[int]:
    """Return the ``standing`` of ``count`` pages starting at ``position``. ``hints`` has one hint per page, or is
    empty."""
    if hints:
        return [standing(position + i, turns, hints[i]) for i in range(count)]
    first, last = standing(position, turns), standing(position + count, turns)
    if last - first == count << 32:  # the positions do not saturate
        return list(range(first, last, 1 << 32))
    return [standing(position + i, turns) for i in range(count)]


LEAVES_SPARE = 64  # a tenant's heap may have this many outdated entries, in addition to one per page


class TenantLeaves:
    """The pages without children of each tenant with a quota, in ``Share.leaves``. Part of ``TierPages``.

    They leave first when the tenant stores new pages. A list may still name pages that were removed or have gained
    children; ``has`` is False for these.
    """

    def __init__(self, segment: Segment, holdings: TierAccounts) -> None:
        self._segment = segment
        self._holdings = holdings

    def add(self, extent: Extent, frame: int, page: Page) -> None:
        """List a page that has just lost its last child, if its tenant has a quota."""
        share = self._holdings.roots[extent.owner[frame]].share
        if share.quota is not None and share.has_all_leaves:
            self.push(share, extent, frame, page)
            if sum(map(len, share.leaves.values())) > 2 * share.pages + LEAVES_SPARE:
                for hint, leaves in list(share.leaves.items()):
                    share.leaves[hint] = sorted({leaf for leaf in leaves if self.has(leaf, share)})

    @staticmethod
    def push(share: Share, extent: Extent, frame: int, page: Page) -> None:
        """List a page without children that belongs to this tenant."""
        leaf = page.used_ms, extent.number, frame, extent.generation[frame]
        heapq.heappush(share.leaves.setdefault(page.hint if extent.pool.policy.hinted else 0, []), leaf)

    def has(self, leaf: Leaf, share: Share) -> bool:
        """Return True if the page is stored, has no children, and belongs to this tenant."""
        _, number, frame, generation = leaf
        extent = self._segment.extents.get(number)
        return (
            extent is not None
            and extent.generation[frame] == generation
            and extent.state[frame] == _SEALED
            and extent.children[frame] == 0
            and self._holdings.roots[extent.owner[frame]].share is share
        )


class TierPages:
    """The pages in the frames of one tier. Part of ``Space``; all changes are instructions in ``out``.

    Attributes:
        leaves: the pages without children of each tenant with a quota.
        now_ns: time of the current event.
        fresh: pages sealed by the current event; the index does not have them yet.
        moved: pages moved by the current event, by extent and frame; the new place cannot be read yet.
        erase: on NVMe, starts to erase RETIRING frames, see ``CopyBatches.start_erasing``.
    """

    def __init__(
        self, tier: Tier, parts: TierParts, leases: LeaseTable, counters: Counter[str], holdings: TierAccounts
    ) -> None:
        self.tier = tier
        self.segment, self.index, self.records = parts.segment, parts.index, parts.records
        self.generation = parts.generation
        self.leases = leases
        self.counters = counters
        self.holdings = holdings
        self.leaves = TenantLeaves(parts.segment, holdings)
        self.now_ns = 0
        self.erase: Erasing | None = None
        self.fresh: dict[bytes, Address] = {}
        self._standings: dict[Address, int] = {}  # of fresh pages
        self._roots: dict[Address, bytes] = {}  # of fresh and moved pages
        self.moved: dict[tuple[int, int], Page] = {}

    def begin(self, now_ns: int) -> None:
        """Start an event. All instructions of earlier events have been performed."""
        self.now_ns = now_ns
        self.fresh.clear()
        self._standings.clear()
        self._roots.clear()
        self.moved.clear()

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Address | None:
        """Return the sealed page with this key, including decisions of this event."""
        address = self.fresh.get(key)
        if address is None:
            address = self.index.find(key)
        return address if address is not None and self.sealed(address) else None

    def find_in(self, root: bytes, key: bytes) -> Address | None:
        """Return the sealed page with this key under this root. A key can be forged, so the root is compared."""
        address = self.find(key)
        return address if address is not None and self.root_of(address) == root else None

    def leading(self, root: bytes, parent: bytes, keys: list[bytes]) -> tuple[int, Address | None]:
        """Return how many leading ``keys`` are stored under that root, and the page that the next one follows.

        That page is the last stored one, or the page with key ``parent`` if none of ``keys`` is stored. It is None if
        that page is absent too, or if the chain begins at the root.
        """
        count, last = 0, self.find_in(root, parent) if parent != root else None
        while count < len(keys) and (page := self.find_in(root, keys[count])) is not None:
            count, last = count + 1, page
        return count, last

    def absent(self, keys: list[bytes]) -> int:
        """Return how many leading keys have no sealed page."""
        start, fresh = 0, self.fresh
        keys = keys[: next((i for i, key in enumerate(keys) if key in fresh), len(keys))] if fresh else keys
        while start < len(keys):
            start += self.index.absent(keys[start:])
            if start < len(keys) and self.find(keys[start]) is not None:
                break
            start += start < len(keys)  # the entry belongs to a page that this event has removed
        return start

    def root_of(self, address: Address) -> bytes:
        """Return the root of a sealed page, including decisions of this event."""
        root = self._roots.get(address)
        return root if root is not None else self.records.root(address.extent, address.frame)

    def sealed(self, address: Address) -> bool:
        """Return True if the address names a sealed page."""
        extent = self.segment.extents.get(address.extent)
        return (
            extent is not None
            and address.frame < extent.frames
            and extent.generation[address.frame] == address.generation
            and extent.state[address.frame] == SEALED
        )

    def used_ms(self, pool: ClassPool, slot: int) -> int:
        """Return the last use of the page in a slot, from its mark."""
        extent, frame = pool.locate(slot)
        return self.records.last_use_ns(extent.number, frame) // 1_000_000

    def page(self, pool: ClassPool, slot: int) -> Page:
        """Return what the eviction policy may know about the page in a slot."""
        extent, frame = pool.locate(slot)
        moved = self.moved.get((extent.number, frame)) if self.moved else None
        if moved is not None:
            return moved
        records = self.records
        key = int.from_bytes(records.key(extent.number, frame)[:8], "little")
        info = records.standing(extent.number, frame)
        used_ms = records.last_use_ns(extent.number, frame) // 1_000_000
        return Page.of(used_ms, key, info, extent.owner[frame])

    def standing_after(self, parent: Address | None, continues: bool) -> tuple[int, int]:
        """Return (position, turns) of a page that follows ``parent`` (None: it starts a chain).

        ``continues``: both pages come from one request; otherwise a later request extends the chain.
        """
        if parent is None:
            return 0, 0
        info = self._standings.get(parent)
        if info is None:
            info = self.records.standing(parent.extent, parent.frame)
        return position_of(info) + 1, turns_of(info) + (not continues)

    # --- sealing and holding ----------------------------------------------------------------------------------------

    def grant(self, pool: ClassPool, count: int) -> list[Address]:
        """Take up to ``count`` free frames, RESERVED under new generations."""
        addresses: list[Address] = []
        for extent, frames in pool.take(count):
            first = self.generation + 1
            self.generation += len(frames)
            generations = range(first, self.generation + 1)
            for frame, generation in zip(frames, generations, strict=True):
                extent.generation[frame] = generation
                extent.state[frame] = RESERVED
            addresses += map(address_of, zip(repeat(extent.number), frames, generations, strict=False))
        return addresses

    def seal(self, address: Address, key: bytes, root: bytes, parent: Address | None, info: int) -> None:
        """Seal a page in a frame for which a page of ``root`` was expected. ``info`` is its ``standing``.

        The caller writes the instruction, and calls ``offer_leaf`` for ends of chains.
        """
        extent = self.segment.extents[address.extent]
        extent.state[address.frame] = SEALED
        (extent.span[address.frame],) = spans_after(self.segment, parent, [key], position_of(info), extent.pool)
        extent.sealed += 1
        self.holdings.arrived(extent.owner[address.frame], extent.pool.frame_class.frame_bytes)
        self.fresh[key] = address
        self._standings[address] = info
        self._roots[address] = root
        if parent is not None:
            self.hold(parent)

    def expect(self, addresses: list[Address], number: int) -> None:
        """Charge these frames to the root with this number: its pages will be sealed there, unless the frames are
        freed."""
        for address in addresses:
            extent = self.segment.extents[address.extent]
            size, before = extent.pool.frame_class.frame_bytes, extent.owner[address.frame]
            if before:
                self.holdings.expect(before, -size)
            extent.set_owner(address.frame, number)
            self.holdings.expect(number, size)

    def seal_chain(
        self, addresses: list[Address], spans: list[int], parent: Address | None, page: Page, root: int
    ) -> None:
        """Seal consecutive pages of one chain under root number ``root``. The last one is ``page``, and can be evicted.

        Later lookups of this event do not find them, see ``show``.
        """
        self._seal_all(addresses, spans, root)
        if parent is not None:
            self.hold(parent)
        self._offer(addresses[-1], page)

    def seal_objects(self, addresses: list[Address], spans: list[int], stops: list[int], root: int) -> None:
        """Seal whole objects. The page before each of ``stops`` is a head, which follows its pieces and can be evicted.

        Later lookups of this event do not find them, see ``show``.
        """
        self._seal_all(addresses, spans, root)
        start, used_ms = 0, self.now_ns // 1_000_000
        for stop in stops:
            self._offer(addresses[stop - 1], Page(used_ms, spans[stop - 1], stop - 1 - start, owner=root))
            start = stop

    def _seal_all(self, addresses: list[Address], spans: list[int], root: int) -> None:
        """Mark these frames SEALED, each with one child."""
        extents = self.segment.extents
        size = extents[addresses[0].extent].pool.frame_class.frame_bytes
        for number, first, i, j in frame_runs(addresses):
            extent, count, place = extents[number], j - i, slice(first, first + j - i)
            for before in filter(None, extent.owner[place]):
                self.holdings.expect(before, -size)
            extent.span[place] = array("Q", spans[i:j])
            extent.state[place] = _SEALED_BYTE * count
            extent.children[place] = array(extent.children.typecode, (1,)) * count
            extent.set_owners(place, root)
            extent.sealed += count
        self.holdings.add(root, len(addresses), len(addresses) * size)

    def _offer(self, address: Address, page: Page) -> None:
        """Offer the page sealed in this frame for eviction: it has no children."""
        extent, frame = self.segment.extents[address.extent], address.frame
        extent.children[frame] = 0
        extent.pool.offer(extent.slot_base + frame, page)
        if self.holdings.limited:
            self.leaves.add(extent, frame, page)

    def show(self, keys: list[bytes], root: bytes, addresses: list[Address], standings: list[int]) -> None:
        """Let the rest of this event find pages of ``seal_chain``."""
        self.fresh.update(zip(keys, addresses, strict=True))
        self._standings.update(zip(addresses, standings, strict=True))
        self._roots.update(dict.fromkeys(addresses, root))

    def hold(self, address: Address) -> None:
        """Hold a page: it cannot be evicted until ``unhold``."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            extent.pool.withdraw(extent.slot_base + address.frame)
        extent.set_children(address.frame, extent.children[address.frame] + 1)

    def unhold(self, address: Address, saved_ms: int | None = None) -> None:
        """End one hold. Without any other hold the page may be evicted, in the order of its own last use.

        ``saved_ms``: last use of the page, if it was about to leave when it was held and is now saved.
        """
        extent = self.segment.extents[address.extent]
        extent.children[address.frame] -= 1
        if extent.children[address.frame] == 0:
            page = self.page(extent.pool, slot := extent.slot_base + address.frame)
            if self.holdings.limited:
                self.leaves.add(extent, address.frame, page)
            if saved_ms is not None:
                extent.pool.ready[slot] = saved_ms
            else:
                extent.pool.offer(slot, page)

    def offer_leaf(self, address: Address, key: bytes, used_ms: int) -> None:
        """Offer a page that this event has sealed with ``seal`` for eviction, if it has no children."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            info = self._standings[address]
            page = Page.of(used_ms, int.from_bytes(key[:8], "little"), info, extent.owner[address.frame])
            extent.pool.offer(extent.slot_base + address.frame, page)
            if self.holdings.limited:
                self.leaves.add(extent, address.frame, page)

    def move(self, old: Address, new: Address, out: list[do.Instruction]) -> tuple[bytes, Address]:
        """Move a sealed page into a frame of its class that was RESERVED for it. Return its key and its old frame.

        The old frame is free, or RETIRING if it has to be erased first: then the caller starts the erasure.
        """
        source, target = self.segment.extents[old.extent], self.segment.extents[new.extent]
        frame, place = old.frame, new.frame
        slot = source.slot_base + frame
        page = self.page(source.pool, slot)
        key, root = self.records.key(source.number, frame), self.records.root(source.number, frame)
        children = source.children[frame]
        source.pool.forget(slot, None)
        if children == 0:
            source.pool.offer(target.slot_base + place, page)
        owner = source.owner[frame]
        state = RETIRING if self.must_erase(old) else FREE
        freed = self._renew(old, state)
        target.state[place] = SEALED
        target.span[place] = source.span[frame]
        target.set_children(place, children)
        target.sealed += 1
        target.set_owner(place, owner)
        self.holdings.add(owner, 1, target.pool.frame_class.frame_bytes)
        if children == 0 and self.holdings.limited:
            self.leaves.add(target, place, page)
        self.fresh[key] = new
        self._standings[new] = standing(page.position, page.turns, page.hint)
        self._roots[new] = root
        self.moved[target.number, place] = page
        out.append(do.Move(key, old, new, freed, self.tier, state))
        self.counters["pages_moved"] += 1
        return key, freed

    # --- freeing ----------------------------------------------------------------------------------------------------

    def free(
        self, addresses: list[Address], out: list[do.Instruction], keys: Mapping[Address, bytes] | None = None
    ) -> None:
        """Free frames that hold no page, under new generations. ``keys``: the keys of their pages, where known."""
        vacated = Vacated()
        for address in addresses:
            self.vacate(address, keys[address] if keys is not None else b"", vacated)
        self.write_vacated(vacated, out)

    def vacate(self, address: Address, key: bytes, vacated: Vacated) -> None:
        """Remove the page from this frame. ``write_vacated`` has to follow."""
        if self.must_erase(address):
            vacated.to_erase.append((key, self._renew(address, RETIRING)))
        else:
            vacated.free.append(self._renew(address, FREE))

    def vacate_run(self, extent: Extent, frames: range, vacated: Vacated) -> None:
        """Remove pages of one chain from consecutive frames. None of them is an object's head.

        ``write_vacated`` has to follow.
        """
        place, count = slice(frames.start, frames.stop), len(frames)
        self.holdings.add(extent.owner[frames.start], -count, -count * extent.pool.frame_class.frame_bytes)
        extent.sealed -= count
        extent.owner[place] = array(extent.owner.typecode, bytes(count * extent.owner.itemsize))
        extent.children[place] = array(extent.children.typecode, bytes(count * extent.children.itemsize))
        extent.state[place] = bytes(count)
        generations = range(self.generation + 1, self.generation + count + 1)
        extent.generation[place] = array("Q", generations)
        self.generation += count
        extent.release(frames)
        vacated.free += map(address_of, zip(repeat(extent.number), frames, generations, strict=False))

    def must_erase(self, address: Address) -> bool:
        """Return True if the frame has to be erased before another page gets it."""
        extent = self.segment.extents[address.extent]
        if self.erase is None or not is_object_class(extent.pool.frame_class):
            return False
        state = extent.state[address.frame]
        if state == SEALED:
            return self.records.extra(extent.number, address.frame)[: len(HEAD_TAG)] == HEAD_TAG
        return state in (RESERVED, RETIRING)

    def write_vacated(self, vacated: Vacated, out: list[do.Instruction]) -> None:
        """Write the instructions for vacated frames, in the order of their addresses."""
        if vacated.free:
            out.append(do.WriteState(sorted(vacated.free), FREE))
        if vacated.to_erase:
            assert self.erase is not None
            out.append(do.WriteState([address for _, address in vacated.to_erase], RETIRING))
            self.erase(vacated.to_erase, out)

    def erased(self, addresses: list[Address], out: list[do.Instruction]) -> None:
        """Free these frames, which have been erased."""
        if addresses:
            out.append(do.WriteState([self._renew(address, FREE) for address in addresses], FREE))

    def mark(self, address: Address, state: FrameState) -> None:
        """Set another state under the same generation."""
        self.segment.extents[address.extent].state[address.frame] = state

    def quarantine(self, address: Address) -> None:
        """Quarantine a sealed page that was found at startup, until its parent is found and the page is adopted."""
        extent = self.segment.extents[address.extent]
        extent.sealed -= 1
        extent.state[address.frame] = QUARANTINED
        self.holdings.add(extent.owner[address.frame], -1, -extent.pool.frame_class.frame_bytes)
        extent.owner[address.frame] = 0

    def free_quarantined(self, number: int, out: list[do.Instruction]) -> None:
        """Free the frames of this extent in which no page was adopted."""
        extent = self.segment.extents.get(number)
        if extent is not None:
            frames = [frame for frame in range(extent.frames) if extent.state[frame] == QUARANTINED]
            self.free([Address(number, frame, 0) for frame in frames], out)

    def free_retired(self, addresses: list[Address], out: list[do.Instruction]) -> None:
        """Free the frames among these that only waited for the end of their leases."""
        waiting = []
        for address in addresses:
            extent = self.segment.extents.get(address.extent)
            if extent is not None and extent.state[address.frame] == RETIRING:
                waiting.append(address)
        self.free(waiting, out)

    def _renew(self, address: Address, state: FrameState) -> Address:
        extent, frame = self.segment.extents[address.extent], address.frame
        owner = extent.owner[frame]
        if extent.state[frame] == SEALED:
            extent.sealed -= 1
            self.holdings.add(owner, -1, -extent.pool.frame_class.frame_bytes)
        elif owner:
            self.holdings.expect(owner, -extent.pool.frame_class.frame_bytes)
        extent.owner[frame] = 0
        extent.children[frame] = 0
        extent.state[frame] = state
        self.generation += 1
        extent.generation[frame] = self.generation
        if state == FREE:
            extent.release((frame,))
        return Address(extent.number, frame, self.generation)

    # --- damage -----------------------------------------------------------------------------------------------------

    def with_descendants(self, address: Address, key: bytes) -> dict[Address, bytes]:
        """Return the page and all its descendants, with keys. ``key``: its true key; the record may be damaged."""
        snapshots = self.records.snapshots()
        for snapshot in snapshots:
            if snapshot.extent == address.extent:
                snapshot.keys[address.frame] = key
        links = prefix_links.link(snapshots, across_roots=True)
        seeds = (links.extents == address.extent) & (links.frames == address.frame)
        indices = np.flatnonzero(prefix_links.doomed(links, seeds))
        return {links.address(i): links.key(i) for i in indices.tolist()}

    def drop(
        self, family: dict[Address, bytes], held: list[Address], out: list[do.Instruction], reason: str = "damaged"
    ) -> None:
        """Retire these pages even if they are held, and count the children of all others again.

        ``held`` are pages with holds in addition to their children, one entry per hold. Leased frames are freed when
        their leases end.
        """
        roots = [self.holdings.roots[self.segment.extents[number].owner[frame]].root for number, frame, _ in family]
        self.retire(list(family), out)
        spans = spans_at(self.segment, family)
        out.append(do.Unindex(list(family.values()), self.tier, "dropped", reason, roots, spans))
        self.recount([address for address in held if self.sealed(address)])

    def retire(self, pages: list[Address], out: list[do.Instruction]) -> None:
        """Retire these pages; leased frames are freed when their leases end. The caller handles pages after them."""
        vacated = Vacated()
        retiring: list[Address] = []
        for address in pages:
            extent = self.segment.extents[address.extent]
            extent.pool.forget(extent.slot_base + address.frame, None)
            if self.leases.holds(address.extent, address.frame):
                retiring.append(self._renew(address, RETIRING))
            else:
                self.vacate(address, self.records.key(address.extent, address.frame), vacated)
        self.write_vacated(vacated, out)
        if retiring:
            out.append(do.WriteState(retiring, RETIRING))

    def recount(self, held: list[Address]) -> prefix_links.Links:
        """Count children and list evictable pages from the records: at startup, and after damage."""
        self.holdings.forget_leaves()
        snapshots = self.records.snapshots()
        for snapshot in snapshots:  # the records do not have the decisions of this event yet
            extent = self.segment.extents[snapshot.extent]
            generations, states = np.frombuffer(extent.generation, np.uint64), np.frombuffer(extent.state, np.uint8)
            snapshot.words = generations << np.uint64(8) | states
        links = prefix_links.link(snapshots)
        counts = np.bincount(links.parent[links.parent >= 0], minlength=len(links.parent)).tolist()
        for extent in self.segment.extents.values():
            extent.children = array("B", bytes(extent.frames))
        addresses = [links.address(i) for i in range(len(counts))]
        for address, count in zip(addresses, counts, strict=True):
            self.segment.extents[address.extent].set_children(address.frame, count)
        for address in held:
            extent = self.segment.extents[address.extent]
            extent.set_children(address.frame, extent.children[address.frame] + 1)
        self._relist(addresses)
        return links

    def _relist(self, addresses: list[Address]) -> None:
        """Offer exactly the pages without children for eviction. Pages that are not listed yet are added by their last
        use."""
        unlisted = []
        for address in addresses:
            extent = self.segment.extents[address.extent]
            slot = extent.slot_base + address.frame
            if extent.children[address.frame]:
                extent.pool.withdraw(slot)
            elif not extent.pool.offered(slot):
                unlisted.append((self.page(extent.pool, slot), slot, extent.pool))
        for page, slot, pool in sorted(unlisted, key=lambda entry: entry[:2]):
            pool.offer(slot, page)
