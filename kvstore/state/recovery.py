"""Recovery: rebuild a ``NodeState`` from the records, after the daemon died at any point.

Recovery keeps sealed pages whose ancestors are all sealed, reservations and granted frames of sessions that may still
be alive, and leases until their deadlines. It drops pages whose record fails its checksum, second copies of a key (an
interrupted move), and all descendants of dropped pages. It trusts nothing that a generation or a checksum contradicts.

No checksum covers a record's state word or its writers. A running daemon has better knowledge of both; at startup,
there is nothing else. So a frame may look free, or sealed with a damaged body, and still name a session that is alive.
Such a frame is quarantined for that session. Frames that became free name no session (``ExtentTable.forget_writers``).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.model.objects import ObjectGroup
from kvstore.model.replica import KEY_BYTES, SHARDS_MAX, Address, FrameClass, FrameState, Tier
from kvstore.state import instructions as do
from kvstore.state import prefix_links
from kvstore.state.directory_spans import find_spans
from kvstore.state.frames import Extent, narrowest
from kvstore.state.interfaces import ClientSession, Snapshot
from kvstore.state.node_state import NodeState
from kvstore.state.space import Space
from kvstore.state.tenants import Tenants
from kvstore.state.tiering.copying import NODE_SESSION
from kvstore.state.writing import Pending, was_granted

Words = npt.NDArray[np.uint64]


@dataclass(slots=True)
class StoredExtent:
    """The tables of one extent as they are at startup. All arrays are ``[frames]``, except ``writers``: ``[frames,
    SHARDS_MAX]``.

    On NVMe ``groups`` and ``writers`` are empty: only the daemon writes there.
    """

    number: int
    position: int
    frame_class: FrameClass
    snapshot: Snapshot
    infos: Words
    leases: Words
    groups: Words
    writers: Words
    sound: npt.NDArray[np.bool_]  # the checksum of the identity matches
    tier: Tier = Tier.DRAM
    memberships: dict[int, ObjectGroup] = field(default_factory=dict)  # of the heads of objects, by frame


_STATE = np.uint64(0xFF)


def quarantine_doubtful(extents: list[StoredExtent], living: Collection[int], out: list[do.Instruction]) -> None:
    """Quarantine frames that look unused but name a living session, in ``extents`` and by an instruction."""
    if not living:
        return
    sessions = np.array(sorted(living), np.uint64)
    for table in extents:
        if not len(table.writers):  # only the node writes there
            continue
        words = table.snapshot.words
        states = words & _STATE
        broken = ~table.sound & ((states == FrameState.SEALED) | (states == FrameState.RETIRING))
        has_writer = np.isin(table.writers, sessions).any(axis=1)
        frames = np.flatnonzero(((states == FrameState.FREE) | broken) & has_writer)
        if len(frames):
            words[frames] = words[frames] & ~_STATE | np.uint64(FrameState.QUARANTINED)
            addresses = [Address(table.number, frame, int(words[frame]) >> 8) for frame in frames.tolist()]
            out.append(do.WriteState(addresses, FrameState.QUARANTINED))


def living_writer(recorded: int, living: Collection[int]) -> int:
    """Return the session that a record names. If it is not alive, return a living session whose number differs in one
    byte, if any."""
    if not recorded or recorded in living:
        return recorded
    return next((session for session in living if _is_one_byte(session ^ recorded)), recorded)


def _is_one_byte(difference: int) -> bool:
    lowest = (difference & -difference).bit_length() - 1
    return difference >> lowest // 8 * 8 <= 0xFF


FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED
UNKNOWN_SESSION = 0  # owner of leases whose session is not recorded: they end at their deadlines


def recover(
    state: NodeState,
    extents: list[StoredExtent],
    next_extent: int,
    now_ns: int,
    living: Collection[int] = (),
    quarantined: Mapping[int, Iterable[int]] | None = None,
) -> list[do.Instruction]:
    """Fill an empty ``state`` and return the instructions that must be performed first.

    The caller performs them, compares the index with the records and rebuilds it if they differ, and calls ``settle``.
    Only then is the state ready for events.

    Args:
        living: sessions that may be alive, because they have a file.
        quarantined: positions that lost their tables, with the sessions that may write there.
    """
    out: list[do.Instruction] = []
    state.segment.numbers.skip(max([next_extent, *(extent.number + 1 for extent in extents)]))
    for space in state.spaces.values():
        space.begin(now_ns)
    quarantine_doubtful(extents, living, out)
    for table in extents:
        space = state.spaces[table.tier]
        _carve(space, space is state.space, state.tenants, table, out)
        if space is state.space:
            _recover_writers(state, table, living, out)
            _recover_leases(state, table, now_ns, out)
    for space in state.spaces.values():
        _drop_unsound(state, space, [table for table in extents if table.tier == space.tier], out)
    _recover_groups(state, extents)
    state.segment.quarantine(quarantined or {})
    for sessions in state.segment.quarantined.values():
        for session in sessions:
            state.sessions.setdefault(session, ClientSession(connected=False))
    return out


def _carve(space: Space, shared: bool, tenants: Tenants, table: StoredExtent, out: list[do.Instruction]) -> None:
    """Carve an extent with the frame states of its records.

    ``shared``: clients write there. Then a frame with an invalid state may belong to a client, and is quarantined. In
    other tiers only the dead daemon wrote: a frame that is neither sealed nor waits for the scan (QUARANTINED) is free.
    """
    segment = space.segment
    extent = segment.carve(segment.pool(table.frame_class), table.position, table.number)
    segment.populated.add(table.position)
    words = table.snapshot.words
    states = (words & np.uint64(0xFF)).astype(np.uint8)
    invalid = np.flatnonzero(states > QUARANTINED)
    states[invalid] = QUARANTINED
    if table.position >= segment.bound:
        extent.close()
    unused = np.zeros(0, int)
    if not shared:
        unused = np.flatnonzero((words & np.uint64(0xFF) > QUARANTINED) | (states == RESERVED) | (states == RETIRING))
    elif len(invalid):
        addresses = [Address(table.number, frame, int(words[frame]) >> 8) for frame in invalid.tolist()]
        out.append(do.WriteState(addresses, QUARANTINED))
    extent.generation = array("Q", (words >> np.uint64(8)).astype(np.uint64).tobytes())
    extent.state[:] = states.tobytes()
    extent.sealed = int((states == SEALED).sum())
    _assign_roots(space, tenants, table, extent)
    extent.restore(np.flatnonzero(states == FREE).tolist())
    space.pages.generation = max(space.pages.generation, int((words >> np.uint64(8)).max(initial=0)))
    space.pages.free([Address(table.number, frame, 0) for frame in unused.tolist()], out)


def _assign_roots(space: Space, tenants: Tenants, table: StoredExtent, extent: Extent) -> None:
    """Count sealed pages for the tenants of the roots that their records name."""

    sealed = np.flatnonzero(np.frombuffer(extent.state, np.uint8) == SEALED)
    if not len(sealed):
        return
    roots, indices, counts = np.unique(table.snapshot.roots[sealed], return_inverse=True, return_counts=True)
    numbers: list[int] = []
    for root, pages in zip(roots, counts.tolist(), strict=True):
        numbers.append(tenants.number(bytes(root).ljust(KEY_BYTES, b"\0"), restored=True))
        # Counted at once, because a root without pages may be forgotten.
        space.pages.holdings.add(numbers[-1], pages, pages * extent.pool.frame_class.frame_bytes)
    owners = np.zeros(extent.frames, np.uint32)
    owners[sealed] = np.array(numbers, np.uint32)[indices]
    extent.owner = narrowest(owners)


def settle(state: NodeState) -> None:
    """Finish ``recover`` once the index is correct: count children, offer leaves for eviction, and find spans."""
    for page in state.pending.by_address.values():
        has_parent = not page.doomed and not page.at_root
        page.holds_parent = has_parent and state.space.pages.find_in(page.root, page.parent) is not None
    for space in state.spaces.values():
        find_spans(space.segment, space.pages.recount(state.writing.held_parents() if space is state.space else []))


def _recover_writers(state: NodeState, table: StoredExtent, living: Collection[int], out: list[do.Instruction]) -> None:
    """Restore granted frames and reservations to their sessions, and free the frames that no session may write to."""
    states = np.frombuffer(state.segment.extents[table.number].state, np.uint8)
    unowned: list[Address] = []
    for frame in np.flatnonzero((states == RESERVED) | (states == QUARANTINED)).tolist():
        address = Address(table.number, frame, int(table.snapshot.words[frame]) >> 8)
        key = bytes(table.snapshot.keys[frame]).ljust(KEY_BYTES, b"\0")
        recorded = {shard: living_writer(int(table.writers[frame, shard]), living) for shard in range(SHARDS_MAX)}
        info = int(table.infos[frame])
        # The shards that had sealed. In a frame without a group (granted ahead), an interrupted seal may have stored
        # the page's place in its chain there instead.
        mask = info >> 40 & 0xFF if int(table.groups[frame]) else 0
        writers = {shard: session for shard, session in recorded.items() if session and not mask >> shard & 1}
        doomed = bool(states[frame] == QUARANTINED)
        if not writers:  # every shard had sealed or revoked, or the mask is damaged
            writers = {shard: session for shard, session in recorded.items() if session in living}
            doomed = True
        if NODE_SESSION in writers.values():  # a thread of the dead daemon was loading a page
            writers = {}
        for session in writers.values():
            state.sessions.setdefault(session, ClientSession(connected=False))
        if not writers:
            unowned.append(address)
            continue
        group, owner = int(table.groups[frame]), min(writers.items())[1]
        # A page in a granted frame is started, or is being saved to NVMe, or its seal was interrupted. Frames of
        # started pages stay reserved. The others are granted again: their writer asks again, and its page is then
        # sealed or saved.
        has_key = was_granted(group, address) and states[frame] == RESERVED
        is_started = has_key and not mask and bool(table.sound[frame])
        if group == 0 or (has_key and not is_started):  # granted ahead; an interrupted seal may have set its key
            state.sessions[owner].granted.add(address)
            state.segment.pool(table.frame_class).granted_ahead += 1
            if has_key:
                out.append(do.WriteGranted([address], owner))
            continue
        doomed |= not table.sound[frame]
        if doomed and states[frame] != QUARANTINED:
            state.space.pages.mark(address, QUARANTINED)
            out.append(do.WriteState([address], QUARANTINED))
        parent = bytes(table.snapshot.parents[frame]).ljust(KEY_BYTES, b"\0")
        root = bytes(table.snapshot.roots[frame]).ljust(KEY_BYTES, b"\0")
        page = Pending(
            key,
            parent,
            parent == root,
            address,
            group,
            max(1, info >> 32 & 0xFF),
            int(table.leases[frame]),
            writers,
            mask,
            doomed=doomed,
            root=root,
            is_started=is_started,
        )
        state.pending.add(page)
        state.space.pages.expect([address], state.tenants.number(root, restored=True))
    state.space.pages.free(unowned, out)


def _recover_leases(state: NodeState, table: StoredExtent, now_ns: int, out: list[do.Instruction]) -> None:
    """Restore leases whose deadline is ahead, and free retired frames without one."""
    states = np.frombuffer(state.segment.extents[table.number].state, np.uint8).copy()
    leased = table.leases > np.uint64(now_ns)
    for frame in np.flatnonzero(leased & ((states == SEALED) | (states == RETIRING))).tolist():
        address = Address(table.number, frame, int(table.snapshot.words[frame]) >> 8)
        until_ns = min(int(table.leases[frame]), now_ns + state.lease_ttl_ns_max)  # a deadline may be damaged
        state.leases.add((UNKNOWN_SESSION, table.number << 32 | frame), [address], until_ns)
    expired = np.flatnonzero(~leased & (states == RETIRING)).tolist()
    state.space.pages.free([Address(table.number, frame, 0) for frame in expired], out)


def _recover_groups(state: NodeState, extents: list[StoredExtent]) -> None:
    """Take in the members of groups that are sealed in any tier."""
    for table in extents:
        states = state.spaces[table.tier].segment.extents[table.number].state
        for frame, group in table.memberships.items():
            if states[frame] == SEALED:
                state.groups.restore(bytes(table.snapshot.keys[frame]).ljust(KEY_BYTES, b"\0"), group)
    state.groups.settle()


def _drop_unsound(state: NodeState, space: Space, extents: list[StoredExtent], out: list[do.Instruction]) -> None:
    """Retire unsound pages, second copies of a key, and pages without a stored ancestor.

    In a lower tier pages without an ancestor are quarantined while the scan may still find it.
    """
    snapshots = [table.snapshot for table in extents]
    if not snapshots:
        return
    links = prefix_links.link(snapshots)
    unsound = np.zeros(len(links.parent), bool)
    for table in extents:
        mine = links.extents == table.number
        unsound[mine] = ~table.sound[links.frames[mine]]
    dropped = prefix_links.doomed(links, links.duplicate | unsound)
    orphaned = prefix_links.doomed(links, (links.parent == -2) & ~dropped) & ~dropped
    is_scanning = any((table.snapshot.words & np.uint64(0xFF) == QUARANTINED).any() for table in extents)
    if space is not state.space and is_scanning:
        waiting = [links.address(i) for i in np.flatnonzero(orphaned).tolist()]
        for address in waiting:
            space.pages.quarantine(address)
        if waiting:
            out.append(do.WriteState(waiting, QUARANTINED))
    else:
        dropped |= orphaned
    addresses = [links.address(i) for i in np.flatnonzero(dropped).tolist()]
    for address in addresses:
        assert space.pages.sealed(address)
    space.pages.retire(addresses, out)
    state.counters["pages_dropped_at_start"] += len(addresses)
