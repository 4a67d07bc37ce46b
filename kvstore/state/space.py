"""Space: takes, seals, evicts and frees frames; the part of a node's decisions that knows prefix closure.

A SEALED frame counts its sealed children and the reservations that hang on it; only frames with a count of zero are
offered to the eviction policy. Under closure the pages that leave are always the tails of chains.
"""

from __future__ import annotations

from array import array
from collections import Counter
from itertools import repeat

import numpy as np

from kvstore.model.replica import Address, FrameState
from kvstore.state import closure
from kvstore.state import events as ev
from kvstore.state.frames import ClassPool, Extent, Segment
from kvstore.state.leases import LeaseTable
from kvstore.state.views import PageIndex, RecordView

FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING = FrameState.RETIRING
_SEALED = int(SEALED)  # a plain number: stored for every page of a put
EVICT_STEP = 16  # pages taken from the coldest class before classes are compared again


class Space:
    """Frames of a segment under closure. Part of ``NodeState``; every change leaves as instructions in ``out``."""

    def __init__(
        self,
        segment: Segment,
        index: PageIndex,
        records: RecordView,
        leases: LeaseTable,
        counters: Counter[str],
        generation: int,
    ) -> None:
        self.segment = segment
        self.index = index
        self.records = records
        self.leases = leases
        self.counters = counters
        self.generation = generation
        self.now_ns = 0
        self._fresh: dict[bytes, Address] = {}  # sealed by this very event, not in the index yet

    def begin(self, now_ns: int) -> None:
        """A new event: all earlier instructions were performed."""
        self.now_ns = now_ns
        self._fresh.clear()

    # --- reading ----------------------------------------------------------------------------------------------------

    def find(self, key: bytes) -> Address | None:
        """The sealed page of that key, as decided so far (this event included)."""
        address = self._fresh.get(key)
        if address is None:
            address = self.index.find(key)
        return address if address is not None and self.sealed(address) else None

    def sealed(self, address: Address) -> bool:
        """The address names a sealed page."""
        extent = self.segment.extents.get(address.extent)
        return (
            extent is not None
            and address.frame < extent.frames
            and extent.generation[address.frame] == address.generation
            and extent.state[address.frame] == SEALED
        )

    def _used_ms(self, pool: ClassPool, slot: int) -> int:
        extent, frame = pool.locate(slot)
        return self.records.last_use_ns(extent.number, frame) // 1_000_000

    # --- sealing and holding ----------------------------------------------------------------------------------------

    def seal(self, address: Address, key: bytes, parent: Address | None) -> None:
        """The frame holds a sealed page now. The caller writes the instruction, and calls ``leaf`` for chain ends."""
        extent = self.segment.extents[address.extent]
        extent.state[address.frame] = SEALED
        extent.sealed += 1
        self._fresh[key] = address
        if parent is not None:
            self.hold(parent)

    def seal_chain(self, addresses: list[Address], parent: Address | None) -> None:
        """Consecutive pages of one chain, sealed at once; the last one is evictable. Not found by this event."""
        extents = self.segment.extents
        for number, frame, _ in addresses:
            extent = extents[number]
            extent.state[frame] = _SEALED
            extent.children[frame] = 1
            extent.sealed += 1
        number, frame, _ = addresses[-1]
        extents[number].children[frame] = 0
        if parent is not None:
            self.hold(parent)
        self.leaf(addresses[-1])

    def show(self, keys: list[bytes], addresses: list[Address]) -> None:
        """Pages of ``seal_chain`` are found by the rest of this event."""
        self._fresh.update(zip(keys, addresses, strict=True))

    def hold(self, address: Address) -> None:
        """Something hangs on this page: it cannot be evicted."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            extent.pool.policy.remove(extent.slot_base + address.frame)
        extent.children[address.frame] += 1

    def unhold(self, address: Address) -> None:
        """One thing less hangs on it; with none left it may be evicted, in the order of its own last use."""
        extent = self.segment.extents[address.extent]
        extent.children[address.frame] -= 1
        if extent.children[address.frame] == 0:
            slot = extent.slot_base + address.frame
            extent.pool.policy.add(slot, self._used_ms(extent.pool, slot))

    def leaf(self, address: Address) -> None:
        """A page just sealed: evictable if nothing hangs on it."""
        extent = self.segment.extents[address.extent]
        if extent.children[address.frame] == 0:
            extent.pool.policy.add(extent.slot_base + address.frame, self.now_ns // 1_000_000)

    # --- freeing ----------------------------------------------------------------------------------------------------

    def free(self, addresses: list[Address], out: list[ev.Instruction]) -> None:
        """These frames hold nothing: new generations, grantable again."""
        if addresses:
            out.append(ev.WriteState([self._renew(address, FREE) for address in addresses], FREE))

    def mark(self, address: Address, state: FrameState) -> None:
        """Another state under the same generation."""
        self.segment.extents[address.extent].state[address.frame] = state

    def free_retired(self, addresses: list[Address], out: list[ev.Instruction]) -> None:
        """Leases on these frames ended: those that were only waiting for that are free."""
        waiting = []
        for address in addresses:
            extent = self.segment.extents.get(address.extent)
            if extent is not None and extent.state[address.frame] == RETIRING:
                waiting.append(address)
        self.free(waiting, out)

    def _renew(self, address: Address, state: FrameState) -> Address:
        extent, frame = self.segment.extents[address.extent], address.frame
        if extent.state[frame] == SEALED:
            extent.sealed -= 1
        extent.children[frame] = 0
        extent.state[frame] = state
        self.generation += 1
        extent.generation[frame] = self.generation
        if state == FREE:
            extent.free.append(frame)
        return Address(extent.number, frame, self.generation)

    # --- taking -----------------------------------------------------------------------------------------------------

    def take(self, pool: ClassPool, count: int, out: list[ev.Instruction]) -> list[Address]:
        """Up to ``count`` frames, RESERVED under new generations: free ones, else a fresh extent, else by eviction."""
        pool.used_ns = self.now_ns
        if pool.frames_per_extent == 0:
            return []
        stolen = False
        while (short := count - pool.free) > 0:
            position = self.segment.next_vacant()
            if position is not None:
                self._carve(pool, position, out)
            elif not stolen and self._steal(pool, out):
                stolen = True  # once per event: what was moved is in no record yet and must not be evicted by it
            else:
                self._evict_from(pool, short, "space", out)
                break
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

    def take_after(self, anchor: bytes, pool: ClassPool, count: int, out: list[ev.Instruction]) -> list[Address]:
        """``take``, and the page of key ``anchor``, on which the new ones will hang, is not evicted to make room."""
        page = self.find(anchor) if anchor else None
        if page is None:
            return self.take(pool, count, out)
        self.hold(page)
        addresses = self.take(pool, count, out)
        page = self.find(anchor)
        assert page is not None  # held; of another class than ``pool`` it may have moved
        self.unhold(page)
        return addresses

    def _carve(self, pool: ClassPool, position: int, out: list[ev.Instruction]) -> None:
        extent = self.segment.carve(pool, position)
        out.append(ev.Carve(extent.number, position, pool.frame_class, extent.frames))

    def _steal(self, pool: ClassPool, out: list[ev.Instruction]) -> bool:
        """Empty one extent of a colder class: evict as many of that class's coldest pages, move what is left."""
        extent = self.segment.donor(pool, self._coldest_ns, self.leases.extents(), self.now_ns)
        if extent is None:
            return False
        giver = extent.pool
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            self._evict_from(giver, extent.sealed - room, "reclaim", out)
        room = giver.free - len(extent.free)
        if extent.sealed > room:
            return False
        for frame in [f for f in range(extent.frames) if extent.state[f] == SEALED]:
            self._move(extent, frame, out)
        self.segment.uncarve(extent)
        out.append(ev.Drop(extent.number))
        self.counters["extents_reclaimed"] += 1
        return True

    def _move(self, source: Extent, frame: int, out: list[ev.Instruction]) -> None:
        (target, (place,)), policy = source.pool.take(1, avoid=source)[0], source.pool.policy
        used = self._used_ms(source.pool, source.slot_base + frame)
        key = self.records.key(source.number, frame)
        children = source.children[frame]
        if children == 0:
            policy.remove(source.slot_base + frame)
            policy.add(target.slot_base + place, used)
        old = Address(source.number, frame, source.generation[frame])
        freed = self._renew(old, FREE)
        self.generation += 1
        target.generation[place], target.state[place] = self.generation, SEALED
        target.children[place] = children
        target.sealed += 1
        new = Address(target.number, place, self.generation)
        self._fresh[key] = new
        out.append(ev.Move(key, old, new, freed))
        self.counters["pages_moved"] += 1

    # --- evicting ---------------------------------------------------------------------------------------------------

    def _coldest_ns(self, pool: ClassPool) -> int | None:
        coldest = pool.policy.coldest_ms()
        return min(coldest * 1_000_000, self.now_ns) if coldest is not None else None

    def evict(self, pages: int, size: int, out: list[ev.Instruction]) -> tuple[int, int]:
        """An operator's wish: that many pages, or bytes, coldest class first. Returns (pages, bytes) gone."""
        gone_pages = gone_bytes = 0
        pools = list(self.segment.pools.values())
        while gone_pages < pages or gone_bytes < size:
            pools = [pool for pool in pools if self._coldest_ns(pool) is not None]
            pool = min(pools, key=lambda pool: self._coldest_ns(pool) or 0, default=None)
            if pool is None:
                break
            page_bytes = pool.frame_class.page_bytes
            want = max(pages - gone_pages, -(-(size - gone_bytes) // page_bytes))
            gone = self._evict_from(pool, min(want, EVICT_STEP if len(pools) > 1 else want), "request", out)
            if not gone:
                pools.remove(pool)  # what is left of it is leased
            gone_pages += gone
            gone_bytes += gone * page_bytes
        return gone_pages, gone_bytes

    def _evict_from(self, pool: ClassPool, count: int, reason: str, out: list[ev.Instruction]) -> int:
        """Up to ``count`` pages without children, by the policy; leased ones are passed over once each."""
        retired: list[Address] = []
        keys: list[bytes] = []
        leased: list[int] = []
        policy = pool.policy
        while len(retired) < count:
            slot = policy.victim(lambda s: self._used_ms(pool, s))
            if slot is None:
                break
            extent, frame = pool.locate(slot)
            policy.remove(slot)
            if self.leases.holds(extent.number, frame):
                leased.append(slot)
                continue
            keys.append(self.records.key(extent.number, frame))
            parent_key = self.records.parent(extent.number, frame)
            at_root = parent_key == self.records.root(extent.number, frame)
            retired.append(self._renew(Address(extent.number, frame, extent.generation[frame]), FREE))
            parent = None if at_root else self.find(parent_key)
            if parent is not None:
                self.unhold(parent)
        for slot in leased:
            policy.add(slot, self.now_ns // 1_000_000)
        if retired:
            out += [ev.WriteState(retired, FREE), ev.Unindex(keys)]
            self.counters[f"evicted_{reason}"] += len(retired)
        return len(retired)

    # --- damage -----------------------------------------------------------------------------------------------------

    def family(self, address: Address, key: bytes) -> dict[Address, bytes]:
        """The page and all its descendants, with their keys. ``key`` is the page's true key (its record may lie)."""
        snapshots = self.records.snapshots()
        for snapshot in snapshots:
            if snapshot.extent == address.extent:
                snapshot.keys[address.frame] = key
        links = closure.link(snapshots)
        seeds = (links.extents == address.extent) & (links.frames == address.frame)
        gone = np.flatnonzero(closure.doomed(links, seeds))
        return {links.address(i): links.key(i) for i in gone.tolist()}

    def drop(self, family: dict[Address, bytes], held: list[bytes], out: list[ev.Instruction]) -> None:
        """Retire these pages whatever hangs on them (leased frames wait for their leases), and recount the rest.

        ``held`` are the keys that reservations hang on, one entry per reservation.
        """
        self.retire(list(family), out)
        out.append(ev.Unindex(list(family.values())))
        self.recount(held)

    def retire(self, pages: list[Address], out: list[ev.Instruction]) -> None:
        """These pages go; leased frames wait for their leases. The caller sees to what hung on them."""
        free: list[Address] = []
        retiring: list[Address] = []
        for address in pages:
            extent = self.segment.extents[address.extent]
            extent.pool.policy.remove(extent.slot_base + address.frame)
            if self.leases.holds(address.extent, address.frame):
                retiring.append(self._renew(address, RETIRING))
            else:
                free.append(self._renew(address, FREE))
        for state, addresses in ((FREE, free), (RETIRING, retiring)):
            if addresses:
                out.append(ev.WriteState(addresses, state))

    def recount(self, held: list[bytes]) -> None:
        """Children counts and evictable pages from the records: for start, and where a lying record was dropped."""
        snapshots = self.records.snapshots()
        for snapshot in snapshots:  # what this event decided is not in the records yet
            extent = self.segment.extents[snapshot.extent]
            generations = np.frombuffer(extent.generation, np.uint64)
            states = np.frombuffer(extent.state, np.uint8)
            snapshot.words = generations << np.uint64(8) | states
        links = closure.link(snapshots)
        counts = np.bincount(links.parent[links.parent >= 0], minlength=len(links.parent)).tolist()
        for extent in self.segment.extents.values():
            extent.children = array("I", bytes(4 * extent.frames))
        addresses = [links.address(i) for i in range(len(counts))]
        for address, count in zip(addresses, counts, strict=True):
            self.segment.extents[address.extent].children[address.frame] = count
        for key in held:
            parent = self.find(key)
            if parent is not None:
                self.segment.extents[parent.extent].children[parent.frame] += 1
        self._relist(addresses)

    def _relist(self, addresses: list[Address]) -> None:
        """Offer exactly the childless pages to eviction, those not listed yet by their last use."""
        missing = []
        for address in addresses:
            extent = self.segment.extents[address.extent]
            slot = extent.slot_base + address.frame
            if extent.children[address.frame]:
                extent.pool.policy.remove(slot)
            elif slot not in extent.pool.policy:
                missing.append((self._used_ms(extent.pool, slot), slot, extent.pool.policy))
        for used, slot, policy in sorted(missing, key=lambda entry: entry[:2]):
            policy.add(slot, used)
