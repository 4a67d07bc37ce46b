"""TierPages: which frames of a tier hold what, and what hangs on it; the part of a node's decisions that knows closure.

A SEALED frame counts its sealed children and whatever else hangs on it (a reservation, a copy on its way between
tiers); only frames with a count of zero are offered to the eviction policy. Under closure the pages that leave are
always the tails of chains. A worked example, one chain of two pages with a reservation behind them::

    key   state      children
    A     SEALED     1          B is stored
    B     SEALED     1          C is reserved; once it is given up B counts 0, and is offered
    C     RESERVED   -

Vacating: what becomes of a frame that its page leaves.

Most are free at once. A frame of NVMe that has an object's head, or into which one was perhaps written, has to be
erased before another page gets it, or a reboot might bring an object back that was deleted since::

    SEALED, RESERVED ──> FREE
                    └──> RETIRING ──Erase, Erased──> FREE
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

import numpy as np

from kvstore.model.objects import HEAD_TAG, is_object_class
from kvstore.model.replica import Address, FrameState, Tier, position_of, standing, turns_of
from kvstore.state import instructions as do
from kvstore.state import prefix_links
from kvstore.state.directory_spans import spans_after, spans_at
from kvstore.state.eviction import Page
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.interfaces import TierParts
from kvstore.state.leases import LeaseTable
from kvstore.state.tenant_leaves import TenantLeaves
from kvstore.state.tenants import TierAccounts

Erasing = Callable[[list[tuple[bytes, Address]], list[do.Instruction]], None]
"""Has these frames erased, that are RETIRING: the keys of what was there, where known, and where."""


@dataclass(slots=True)
class Vacated:
    """Frames that pages left, renewed: those that are free at once, and those (with keys) that must be erased first."""

    free: list[Address] = field(default_factory=list)
    wiped: list[tuple[bytes, Address]] = field(default_factory=list)


class Leaving(NamedTuple):
    """Pages that leave by one decision: their frames; keys; roots; spans; copies below, with the use they inherit."""

    vacated: Vacated
    keys: list[bytes]
    roots: list[bytes]
    spans: list[int]
    copies: list[tuple[Address, int]]


FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED
_SEALED = int(SEALED)  # a plain number: stored for every page of a put


def standings_of(position: int, turns: int, count: int, hints: bytes = b"") -> list[int]:
    """``standing`` of ``count`` consecutive pages of a chain, from ``position`` on. ``hints``: of each, or empty."""
    if hints:
        return [standing(position + i, turns, hints[i]) for i in range(count)]
    first, last = standing(position, turns), standing(position + count, turns)
    if last - first == count << 32:  # not so far down that positions saturate
        return list(range(first, last, 1 << 32))
    return [standing(position + i, turns) for i in range(count)]


class TierPages:
    """What the frames of one tier hold. Part of ``Space``; every change leaves as instructions in ``out``.

    Attributes:
        leaves: the pages without children of each tenant that has a quota.
        now_ns: the time of this event.
        fresh: pages sealed by this event, which the index does not have yet.
        moved: pages moved by this event, by extent and frame; nothing can be read at the new place yet.
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
        # Of NVMe: has frames erased that are RETIRING, see ``Copies.start_erasing``.
        self.erase: Erasing | None = None
        self.fresh: dict[bytes, Address] = {}
        self._standings: dict[Address, int] = {}  # of those
        self._roots: dict[Address, bytes] = {}  # of those, and of what was moved by this event
        self.moved: dict[tuple[int, int], Page] = {}

    def begin(self, now_ns: int) -> None:
        """A new event: all earlier instructions were performed."""
        self.now_ns = now_ns
        self.fresh.clear()
        self._standings.clear()
        self._roots.clear()
        self.moved.clear()

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Address | None:
        """The sealed page of that key, as decided so far (this event included)."""
        address = self.fresh.get(key)
        if address is None:
            address = self.index.find(key)
        return address if address is not None and self.sealed(address) else None

    def find_in(self, root: bytes, key: bytes) -> Address | None:
        """Like ``find``, for a page of this root only. Keys can be forged: a page of another root is another page."""
        address = self.find(key)
        return address if address is not None and self.root_of(address) == root else None

    def leading(self, root: bytes, parent: bytes, keys: list[bytes]) -> tuple[int, Address | None]:
        """How many of these keys, from the front, pages of that root have; and the last of them, or where there is none
        the page of key ``parent``: None where that one is absent too, or the chain begins at the root."""
        count, last = 0, self.find_in(root, parent) if parent != root else None
        while count < len(keys) and (found := self.find_in(root, keys[count])) is not None:
            count, last = count + 1, found
        return count, last

    def absent(self, keys: list[bytes]) -> int:
        """How many of these keys, from the front, no sealed page has."""
        start, fresh = 0, self.fresh
        keys = keys[: next((i for i, key in enumerate(keys) if key in fresh), len(keys))] if fresh else keys
        while start < len(keys):
            start += self.index.absent(keys[start:])
            if start < len(keys) and self.find(keys[start]) is not None:
                break
            start += start < len(keys)  # an entry that this very event has ended
        return start

    def root_of(self, address: Address) -> bytes:
        """Root of a sealed page, as decided so far."""
        root = self._roots.get(address)
        return root if root is not None else self.records.root(address.extent, address.frame)

    def sealed(self, address: Address) -> bool:
        """The address names a sealed page."""
        extent = self.segment.extents.get(address.extent)
        return (
            extent is not None
            and address.frame < extent.frames
            and extent.generation[address.frame] == address.generation
            and extent.state[address.frame] == SEALED
        )

    def used_ms(self, pool: ClassPool, slot: int) -> int:
        """When the page in a slot was last used, as its mark says."""
        extent, frame = pool.locate(slot)
        return self.records.last_use_ns(extent.number, frame) // 1_000_000

    def page(self, pool: ClassPool, slot: int) -> Page:
        """What the eviction policy may know of the page in a slot."""
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
        """(position, turns) of a page that follows ``parent`` (None: starts a chain).

        ``continues``: both come from one request; otherwise a later one extends what an earlier one left.
        """
        if parent is None:
            return 0, 0
        info = self._standings.get(parent)
        if info is None:
            info = self.records.standing(parent.extent, parent.frame)
        return position_of(info) + 1, turns_of(info) + (not continues)

    # --- sealing and holding ----------------------------------------------------------------------------------------

    def grant(self, pool: ClassPool, count: int) -> list[Address]:
        """Up to ``count`` of the frames that are free, RESERVED under new generations."""
        addresses: list[Address] = []
        for extent, frames in pool.take(count):
            first = self.generation + 1
            self.generation += len(frames)
            drawn = range(first, self.generation + 1)
            for frame, generation in zip(frames, drawn, strict=True):
                extent.generation[frame] = generation
                extent.state[frame] = RESERVED
            addresses += map(Address, repeat(extent.number), frames, drawn)
        return addresses

    def seal(self, address: Address, key: bytes, root: bytes, parent: Address | None, info: int) -> None:
        """The frame, for which a page of ``root`` was expected, holds it now, sealed.

        The caller writes the instruction, and calls ``leaf`` for chain ends.

        ``info`` is the page's ``standing``.
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
        """A page of root ``number`` alone will be sealed in each of these frames, unless they are freed before."""
        for address in addresses:
            extent = self.segment.extents[address.extent]
            size, before = extent.pool.frame_class.frame_bytes, extent.owner[address.frame]
            if before:
                self.holdings.expect(before, -size)
            extent.own(address.frame, number)
            self.holdings.expect(number, size)

    def seal_chain(
        self, addresses: list[Address], spans: list[int], parent: Address | None, page: Page, root: int
    ) -> None:
        """Consecutive pages of one chain, whose root has that number, sealed at once; the last, ``page``, is evictable.
        Not found by this event."""
        self._seal_all(addresses, spans, root)
        if parent is not None:
            self.hold(parent)
        self._offer(addresses[-1], page)

    def seal_objects(self, addresses: list[Address], spans: list[int], stops: list[int], root: int) -> None:
        """Seal whole objects at once: the page before each of ``stops`` is a head, which is evictable, and follows its
        pieces. Not found by this event."""
        self._seal_all(addresses, spans, root)
        start, used_ms = 0, self.now_ns // 1_000_000
        for stop in stops:
            self._offer(addresses[stop - 1], Page(used_ms, spans[stop - 1], stop - 1 - start, owner=root))
            start = stop

    def _seal_all(self, addresses: list[Address], spans: list[int], root: int) -> None:
        """Mark these frames SEALED, each with one child."""
        extents = self.segment.extents
        size = extents[addresses[0].extent].pool.frame_class.frame_bytes
        for (number, frame, _), span in zip(addresses, spans, strict=True):
            extent = extents[number]
            extent.span[frame] = span
            extent.state[frame] = _SEALED
            extent.children[frame] = 1
            if before := extent.owner[frame]:
                self.holdings.expect(before, -size)
            extent.own(frame, root)
            extent.sealed += 1
        self.holdings.add(root, len(addresses), len(addresses) * size)

    def _offer(self, address: Address, page: Page) -> None:
        """The page sealed in this frame has no children: it may be evicted."""
        extent, frame = self.segment.extents[address.extent], address.frame
        extent.children[frame] = 0
        extent.pool.offer(extent.slot_base + frame, page)
        if self.holdings.limited:
            self.leaves.add(extent, frame, page)

    def show(self, keys: list[bytes], root: bytes, addresses: list[Address], standings: list[int]) -> None:
        """Pages of ``seal_chain`` are found by the rest of this event."""
        self.fresh.update(zip(keys, addresses, strict=True))
        self._standings.update(zip(addresses, standings, strict=True))
        self._roots.update(dict.fromkeys(addresses, root))

    def hold(self, address: Address) -> None:
        """Something hangs on this page: it cannot be evicted."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            extent.pool.withdraw(extent.slot_base + address.frame)
        extent.hang(address.frame, extent.children[address.frame] + 1)

    def unhold(self, address: Address, saved_ms: int | None = None) -> None:
        """One thing less hangs on it; with none left it may be evicted, in the order of its own last use.

        ``saved_ms``: it was about to leave when it was held, and is saved now; its last use when it was set aside.
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

    def leaf(self, address: Address, key: bytes, used_ms: int) -> None:
        """A page sealed by this event with ``seal``: evictable if nothing hangs on it."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            info = self._standings[address]
            page = Page.of(used_ms, int.from_bytes(key[:8], "little"), info, extent.owner[address.frame])
            extent.pool.offer(extent.slot_base + address.frame, page)
            if self.holdings.limited:
                self.leaves.add(extent, address.frame, page)

    def move(self, old: Address, new: Address, out: list[do.Instruction]) -> tuple[bytes, Address]:
        """A sealed page is in another frame of its class from now on, which was RESERVED for it. Returns its key, and
        the frame where it was; that is free, or RETIRING where it has to be erased first: the caller sees to that."""
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
        target.hang(place, children)
        target.sealed += 1
        target.own(place, owner)
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
        """These frames hold nothing: new generations, grantable again. ``keys``: what was to be there, where known."""
        vacated = Vacated()
        for address in addresses:
            self.vacate(address, keys[address] if keys is not None else b"", vacated)
        self.vacated(vacated, out)

    def vacate(self, address: Address, key: bytes, vacated: Vacated) -> None:
        """What is in this frame leaves it. ``vacated`` has to follow."""
        if self.must_erase(address):
            vacated.wiped.append((key, self._renew(address, RETIRING)))
        else:
            vacated.free.append(self._renew(address, FREE))

    def vacate_run(self, extent: Extent, frames: range, vacated: Vacated) -> None:
        """Pages of one chain, in none of which an object's head is, leave consecutive frames. ``vacated`` has to
        follow."""
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
        vacated.free += map(Address, repeat(extent.number), frames, generations)

    def must_erase(self, address: Address) -> bool:
        """What is in this frame has to be made unreadable before another page has the frame."""
        extent = self.segment.extents[address.extent]
        if self.erase is None or not is_object_class(extent.pool.frame_class):
            return False
        state = extent.state[address.frame]
        if state == SEALED:
            return self.records.extra(extent.number, address.frame)[: len(HEAD_TAG)] == HEAD_TAG
        return state in (RESERVED, RETIRING)

    def vacated(self, vacated: Vacated, out: list[do.Instruction]) -> None:
        """Write down what ``vacate`` decided, in the order in which it lies."""
        if vacated.free:
            out.append(do.WriteState(sorted(vacated.free), FREE))
        if vacated.wiped:
            assert self.erase is not None
            out.append(do.WriteState([address for _, address in vacated.wiped], RETIRING))
            self.erase(vacated.wiped, out)

    def erased(self, addresses: list[Address], out: list[do.Instruction]) -> None:
        """What lay in these frames is unreadable now: they are free."""
        if addresses:
            out.append(do.WriteState([self._renew(address, FREE) for address in addresses], FREE))

    def mark(self, address: Address, state: FrameState) -> None:
        """Another state under the same generation."""
        self.segment.extents[address.extent].state[address.frame] = state

    def quarantine(self, address: Address) -> None:
        """A sealed page found at start whose parent may yet be found: it counts as nothing until it is adopted."""
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
        """Leases on these frames ended: those that were only waiting for that are free."""
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

    def family(self, address: Address, key: bytes) -> dict[Address, bytes]:
        """The page and all its descendants, with their keys. ``key`` is the page's true key (its record may lie)."""
        snapshots = self.records.snapshots()
        for snapshot in snapshots:
            if snapshot.extent == address.extent:
                snapshot.keys[address.frame] = key
        links = prefix_links.link(snapshots, across_roots=True)
        seeds = (links.extents == address.extent) & (links.frames == address.frame)
        gone = np.flatnonzero(prefix_links.doomed(links, seeds))
        return {links.address(i): links.key(i) for i in gone.tolist()}

    def drop(
        self, family: dict[Address, bytes], held: list[Address], out: list[do.Instruction], reason: str = "damaged"
    ) -> None:
        """Retire these pages whatever hangs on them (leased frames wait for their leases), and recount the rest.

        ``held`` are pages that something hangs on in addition to their children, one entry per hold.
        """
        roots = [self.holdings.roots[self.segment.extents[number].owner[frame]].root for number, frame, _ in family]
        self.retire(list(family), out)
        spans = spans_at(self.segment, family)
        out.append(do.Unindex(list(family.values()), self.tier, "dropped", reason, roots, spans))
        self.recount([address for address in held if self.sealed(address)])

    def retire(self, pages: list[Address], out: list[do.Instruction]) -> None:
        """These pages go; leased frames wait for their leases. The caller sees to what hung on them."""
        vacated = Vacated()
        retiring: list[Address] = []
        for address in pages:
            extent = self.segment.extents[address.extent]
            extent.pool.forget(extent.slot_base + address.frame, None)
            if self.leases.holds(address.extent, address.frame):
                retiring.append(self._renew(address, RETIRING))
            else:
                self.vacate(address, self.records.key(address.extent, address.frame), vacated)
        self.vacated(vacated, out)
        if retiring:
            out.append(do.WriteState(retiring, RETIRING))

    def recount(self, held: list[Address]) -> prefix_links.Links:
        """Children counts and evictable pages from the records: for start, and where a lying record was dropped."""
        self.holdings.recount()
        snapshots = self.records.snapshots()
        for snapshot in snapshots:  # what this event decided is not in the records yet
            extent = self.segment.extents[snapshot.extent]
            generations, states = np.frombuffer(extent.generation, np.uint64), np.frombuffer(extent.state, np.uint8)
            snapshot.words = generations << np.uint64(8) | states
        links = prefix_links.link(snapshots)
        counts = np.bincount(links.parent[links.parent >= 0], minlength=len(links.parent)).tolist()
        for extent in self.segment.extents.values():
            extent.children = array("B", bytes(extent.frames))
        addresses = [links.address(i) for i in range(len(counts))]
        for address, count in zip(addresses, counts, strict=True):
            self.segment.extents[address.extent].hang(address.frame, count)
        for address in held:
            extent = self.segment.extents[address.extent]
            extent.hang(address.frame, extent.children[address.frame] + 1)
        self._relist(addresses)
        return links

    def _relist(self, addresses: list[Address]) -> None:
        """Offer exactly the childless pages to eviction, those not listed yet by their last use."""
        missing = []
        for address in addresses:
            extent = self.segment.extents[address.extent]
            slot = extent.slot_base + address.frame
            if extent.children[address.frame]:
                extent.pool.withdraw(slot)
            elif not extent.pool.offered(slot):
                missing.append((self.page(extent.pool, slot), slot, extent.pool))
        for page, slot, pool in sorted(missing, key=lambda entry: entry[:2]):
            pool.offer(slot, page)
