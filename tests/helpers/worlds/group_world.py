"""GroupWorld: a node with NVMe, and clients that put objects in groups. A reader finds all members of a group, or none.

A reader is simulated as it is: it finds a head in the index, compares the head's word, and then looks for the head's
group in the index's list of complete groups. That is checked between the instructions that change the list and its
members, after every event, and after every kill before the node starts again.
"""

from __future__ import annotations

import numpy as np

from kvstore.model.objects import (
    About,
    ObjectGroup,
    class_for,
    group_hash,
    groups_in,
    key_hash,
    object_root,
    pieces_of,
)
from kvstore.model.replica import Address, FrameClass, FrameState, Status, Tier
from kvstore.shm.index import GROUP_ENTRY
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.objects import NOWHERE
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.tiered_world import TieredWorld

ROOT = object_root("")
PAGES_MAX = 4  # of an object; they have 4 KiB each
CLASS = class_for(b"k", PAGES_MAX * 4096, 4096)


class GroupWorld(TieredWorld):
    """See the module."""

    may_lose = (ev.Grant, ev.SealObjects, ev.Delete, ev.Evict, ev.Damaged, ev.Prefetch, ev.Tick, ev.Demote)
    nvme_may_lose = (*TieredWorld.nvme_may_lose, ev.Grant, ev.SealObjects, ev.Delete, ev.Tick)

    def __init__(self, extent_bytes: int, positions: int, nvme: Nvme) -> None:
        super().__init__(extent_bytes, positions, nvme)
        self._looks = False  # between the instructions of this event
        hit = self.node._hit

        def hit_and_look(name: str) -> None:
            hit(name)
            if self._looks and name in ("node.instruction", "node.commit") and not self.node.killed:
                self.check_found()

        self.node._hit = hit_and_look  # type: ignore[method-assign]

    # --- what clients do --------------------------------------------------------------------------------------------

    def put_objects(
        self, session: int, sizes: dict[str, int], name: str, count: int, *, replace: bool, publish: bool
    ) -> list[int]:
        """Put objects of these numbers of pages into one group (none for a count of 0). Returns the status of each."""
        members = ObjectGroup(group_hash(ROOT, name.encode()), count) if count else ObjectGroup()
        heads = {key: self.head(key) for key in sizes}
        new = {key: pages for key, pages in sizes.items() if heads[key] is None or (replace and not publish)}
        pages = sum(new.values())
        client = self.clients[session]
        short = pages - len(client.granted.get(CLASS, []))
        if short > 0:
            self.grant(session, CLASS, short)
        frames = client.granted.get(CLASS, [])
        if not new or len(frames) < pages:
            return []
        addresses = sorted(frames[:pages])
        del frames[:pages]
        rows, keys, replaces = b"", list[bytes](), list[Address]()
        for key, count_pages in new.items():
            size = count_pages * CLASS.page_bytes
            about = About(key.encode(), size, pieces_of(size, CLASS.page_bytes), self.chance.randbytes(12), members)
            assert about.pieces == count_pages - 1 and class_for(key.encode(), size, 4096, members) == CLASS
            if about.pieces:
                pieces = about.piece_keys(ROOT, CLASS.page_tokens)
                rows += pieces.identity_bytes
                keys += pieces.hashes
            rows += about.row(ROOT, CLASS.page_tokens, key_hash(ROOT, key.encode()))
            keys.append(key_hash(ROOT, key.encode()))
            replaces += [NOWHERE] * about.pieces + [heads[key] or NOWHERE]
        self.tried.update(keys)
        self._unclaim(session, addresses)
        for address, page_key in zip(addresses, keys, strict=True):
            self.node.write(address, page_key)
        table = np.frombuffer(rows, np.uint8).reshape(pages, -1)
        event = ev.SealObjects(self.now_ns, session, CLASS, addresses, table, replaces, int(publish))
        reply = self.send(event)
        if reply is None:
            client.forfeited += addresses
            return []
        statuses = reply.statuses or [int(reply.status)] * pages
        for address, page_key, status in zip(addresses, keys, statuses, strict=True):
            if status == Status.OK:
                self.stored.add(page_key)
            elif self.node.is_sealed(address, FrameState.RESERVED):
                self._claim(session, [address])
                client.granted[CLASS].append(address)
        return statuses

    def delete_objects(self, names: list[str]) -> list[int]:
        """Delete objects as a client does that finds their heads, members of incomplete groups too."""
        addresses = [head for head in map(self.head, names) if head is not None]
        reply = self.send(ev.Delete(self.now_ns, addresses)) if addresses else None
        return reply.statuses if reply is not None else []

    def head(self, name: str) -> Address | None:
        """Where an object's head is, whether or not a reader finds it."""
        key = key_hash(ROOT, name.encode())
        return self.node.index.get(key) or self.node.nvme_index.get(key)

    # --- what readers find ------------------------------------------------------------------------------------------

    def found(self) -> dict[ObjectGroup, set[bytes]]:
        """The members that readers find, by group."""
        listed = dict(self.node.performer.index._index.scan_groups())
        found: dict[ObjectGroup, set[bytes]] = {}
        for entries in (self.node.index, self.node.nvme_index):
            for key, address in entries.items():
                group = self.group_at(address) if self.node.is_sealed(address) else None
                entry = listed.get(group.hash) if group is not None else None
                if group is not None and entry is not None and GROUP_ENTRY.unpack(entry)[0] == group.members:
                    found.setdefault(group, set()).add(key)
        return found

    def group_at(self, address: Address) -> ObjectGroup | None:
        """The group of the head at this address; None if it has none."""
        table = self.node.tables[address.extent]
        row = np.asarray(table.rows[address.frame : address.frame + 1, table.fmt.identity])
        return groups_in(row).get(0) if table.frame_class.holds_objects else None

    def sealed_members(self) -> dict[ObjectGroup, set[bytes]]:
        """The members whose heads are sealed in any tier, whatever the index says: it follows a page that moves."""
        sealed: dict[ObjectGroup, set[bytes]] = {}
        for tier in (Tier.DRAM, Tier.NVME):
            for table in self.node.tables.values():
                if table.tier != tier or not table.frame_class.holds_objects:
                    continue
                frames = np.flatnonzero((np.asarray(table.words) & np.uint64(0xFF)) == FrameState.SEALED).tolist()
                groups = groups_in(np.asarray(table.rows[:, table.fmt.identity]))
                for frame in frames:
                    if frame in groups:
                        sealed.setdefault(groups[frame], set()).add(table.key(frame))
        return sealed

    def check_found(self) -> dict[ObjectGroup, set[bytes]]:
        """Where a reader finds a member, all members are stored."""
        found, sealed = self.found(), self.sealed_members()
        for group, keys in found.items():
            stored = sealed.get(group, set())
            assert keys <= stored and len(stored) == group.members, f"{len(stored)} of {group.members} members are left"
        return found

    def send(self, event: ev.Event) -> object:  # type: ignore[override]
        """See ``World.send``."""
        handle = self.state.handle

        def handled(event: ev.Event) -> list[do.Instruction]:
            instructions = handle(event)
            self._looks = any(type(each) in (do.ListGroups, do.UnlistGroups) for each in instructions)
            return instructions

        self.state.handle = handled  # type: ignore[method-assign]
        try:
            reply = super().send(event)
        finally:
            self._looks = False
            self.state.__dict__.pop("handle", None)
        self.check_found()
        return reply

    def restart(self) -> None:
        """See ``World.restart``."""
        if self.node.killed:
            self.check_found()
        self._looks = True  # a start drops pages too
        super().restart()
        self._looks = False
        self.check_found()


__all__ = ["CLASS", "PAGES_MAX", "FrameClass", "GroupWorld"]
