"""Recovery: a NodeState from what the records say, after the daemon died at any point.

What is kept: every sealed page whose ancestors are sealed; reservations and granted frames of sessions that may still
be alive; leases until their deadlines. What goes: pages whose record does not hold, second copies of a key (a move
was cut short), descendants of what went. Nothing is trusted that a generation or a sum contradicts.

Doubts: frames that a record gives away at a start, though a session that lives may still write there.

No sum covers a record's word, nor the sessions named behind it. While a daemon runs it knows better than they; one that
starts has nothing else. So a frame that looks free, or sealed with a body that does not hold, and still names a session
that lives, is held for that session: frames that became free name no session (``ExtentTable.forget_writers``).

ExtentFound: an extent's tables as a start finds them, for recovery to judge.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
class ExtentFound:
    """One extent's tables as found on start; all arrays ``[frames]``, ``writers`` ``[frames, SHARDS_MAX]``.

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
    sound: npt.NDArray[np.bool_]  # the identity sum holds
    tier: Tier = Tier.DRAM


_STATE = np.uint64(0xFF)


def hold_back(found: list[ExtentFound], living: Collection[int], out: list[do.Instruction]) -> None:
    """Such frames are QUARANTINED from here on, in ``found`` and by what is written."""
    if not living:
        return
    known = np.array(sorted(living), np.uint64)
    for table in found:
        if not len(table.writers):  # only the node writes there
            continue
        words = table.snapshot.words
        states = words & _STATE
        broken = ~table.sound & ((states == FrameState.SEALED) | (states == FrameState.RETIRING))
        named = np.isin(table.writers, known).any(axis=1)
        frames = np.flatnonzero(((states == FrameState.FREE) | broken) & named)
        if len(frames):
            words[frames] = words[frames] & ~_STATE | np.uint64(FrameState.QUARANTINED)
            addresses = [Address(table.number, frame, int(words[frame]) >> 8) for frame in frames.tolist()]
            out.append(do.WriteState(addresses, FrameState.QUARANTINED))


def writer_of(named: int, living: Collection[int]) -> int:
    """The session that a record means: the one it names, or the living one that differs from it in one byte."""
    if not named or named in living:
        return named
    return next((session for session in living if _in_one_byte(session ^ named)), named)


def _in_one_byte(difference: int) -> bool:
    lowest = (difference & -difference).bit_length() - 1
    return difference >> lowest // 8 * 8 <= 0xFF


FREE, RESERVED, SEALED = FrameState.FREE, FrameState.RESERVED, FrameState.SEALED
RETIRING, QUARANTINED = FrameState.RETIRING, FrameState.QUARANTINED
UNKNOWN_SESSION = 0  # holds leases whose owner is not recorded: they end at their deadlines


def recover(
    state: NodeState,
    found: list[ExtentFound],
    next_extent: int,
    now_ns: int,
    living: Collection[int] = (),
    quarantined: Mapping[int, Iterable[int]] | None = None,
) -> list[do.Instruction]:
    """Fill an empty ``state``; returns what must be written first.

    Args:
        living: sessions that may live: those that have a file.
        quarantined: positions that lost their tables, with the sessions that may write there.

    The caller performs it, makes the index agree with the records (it is compared, and rebuilt where it does not),
    and calls ``settle``. Only then is the state ready for events.
    """
    out: list[do.Instruction] = []
    state.segment.numbers.skip(max([next_extent, *(extent.number + 1 for extent in found)]))
    for space in state.spaces.values():
        space.begin(now_ns)
    hold_back(found, living, out)
    for table in found:
        space = state.spaces[table.tier]
        _carve(space, space is state.space, state.tenants, table, out)
        if space is state.space:
            _writers(state, table, living, out)
            _retiring_and_leased(state, table, now_ns, out)
    for space in state.spaces.values():
        _drop_unsound(state, space, [table for table in found if table.tier == space.tier], out)
    state.segment.quarantine(quarantined or {})
    for sessions in state.segment.quarantined.values():
        for session in sessions:
            state.sessions.setdefault(session, ClientSession(connected=False))
    return out


def _carve(space: Space, shared: bool, tenants: Tenants, table: ExtentFound, out: list[do.Instruction]) -> None:
    """An extent as its words say. Where clients write (``shared``), a frame whose word says nothing may belong to a
    client; elsewhere only the dead daemon wrote: one that is neither sealed nor waits for the scan (QUARANTINED) holds
    nothing."""
    segment = space.segment
    extent = segment.carve(segment.pool(table.frame_class), table.position, table.number)
    segment.populated.add(table.position)
    words = table.snapshot.words
    states = (words & np.uint64(0xFF)).astype(np.uint8)
    unclear = np.flatnonzero(states > QUARANTINED)
    states[unclear] = QUARANTINED
    if table.position >= segment.bound:
        extent.close()
    ended = np.zeros(0, int)
    if not shared:
        ended = np.flatnonzero((words & np.uint64(0xFF) > QUARANTINED) | (states == RESERVED) | (states == RETIRING))
    elif len(unclear):
        addresses = [Address(table.number, frame, int(words[frame]) >> 8) for frame in unclear.tolist()]
        out.append(do.WriteState(addresses, QUARANTINED))
    extent.generation = array("Q", (words >> np.uint64(8)).astype(np.uint64).tobytes())
    extent.state[:] = states.tobytes()
    extent.sealed = int((states == SEALED).sum())
    _own(space, tenants, table, extent)
    extent.restore(np.flatnonzero(states == FREE).tolist())
    space.pages.generation = max(space.pages.generation, int((words >> np.uint64(8)).max(initial=0)))
    space.pages.free([Address(table.number, frame, 0) for frame in ended.tolist()], out)


def _own(space: Space, tenants: Tenants, table: ExtentFound, extent: Extent) -> None:
    """Sealed pages belong to the tenants of the roots that their records name."""
    sealed = np.flatnonzero(np.frombuffer(extent.state, np.uint8) == SEALED)
    if not len(sealed):
        return
    roots, which, counts = np.unique(table.snapshot.roots[sealed], return_inverse=True, return_counts=True)
    numbers: list[int] = []
    for root, pages in zip(roots, counts.tolist(), strict=True):  # counted at once: a root without pages is forgotten
        numbers.append(tenants.number(bytes(root).ljust(KEY_BYTES, b"\0"), found=True))
        space.pages.holdings.add(numbers[-1], pages, pages * extent.pool.frame_class.frame_bytes)
    owners = np.zeros(extent.frames, np.uint32)
    owners[sealed] = np.array(numbers, np.uint32)[which]
    extent.owner = narrowest(owners)


def settle(state: NodeState) -> None:
    """Second half of ``recover``, with a true index: what hangs on what, what may leave, and the pages' spans."""
    for page in state.pending.by_address.values():
        hangs = not page.doomed and not page.at_root
        page.holds_parent = hangs and state.space.pages.find_in(page.root, page.parent) is not None
    for space in state.spaces.values():
        find_spans(space.segment, space.pages.recount(state.writing.held() if space is state.space else []))


def _writers(state: NodeState, table: ExtentFound, living: Collection[int], out: list[do.Instruction]) -> None:
    states = np.frombuffer(state.segment.extents[table.number].state, np.uint8)
    unowned: list[Address] = []
    for frame in np.flatnonzero((states == RESERVED) | (states == QUARANTINED)).tolist():
        address = Address(table.number, frame, int(table.snapshot.words[frame]) >> 8)
        key = bytes(table.snapshot.keys[frame]).ljust(KEY_BYTES, b"\0")
        named = {shard: writer_of(int(table.writers[frame, shard]), living) for shard in range(SHARDS_MAX)}
        info = int(table.infos[frame])
        # Shards that had sealed. In a frame without a group (granted ahead), a seal that was cut short may have left
        # the page's place in its chain there.
        mask = info >> 40 & 0xFF if int(table.groups[frame]) else 0
        writers = {shard: session for shard, session in named.items() if session and not mask >> shard & 1}
        doomed = bool(states[frame] == QUARANTINED)
        if not writers:  # every shard had sealed or revoked, or the mask is damaged
            writers = {shard: session for shard, session in named.items() if session in living}
            doomed = True
        if NODE_SESSION in writers.values():  # a page was being loaded, by a thread of the dead daemon
            writers = {}
        for session in writers.values():
            state.sessions.setdefault(session, ClientSession(connected=False))
        if not writers:
            unowned.append(address)
            continue
        group, owner = int(table.groups[frame]), min(writers.items())[1]
        # Written into a granted frame: either begun, or on its way to NVMe, or its seal was cut short. All but the
        # first are merely granted again: the writer that published the page, or asks again, gets it sealed or saved.
        keyed = was_granted(group, address) and states[frame] == RESERVED
        begun = keyed and not mask and bool(table.sound[frame])
        if group == 0 or (keyed and not begun):  # granted ahead; it may have its key already, from a seal cut short
            state.sessions[owner].granted.add(address)
            state.segment.pool(table.frame_class).granted_ahead += 1
            if keyed:
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
            begun=begun,
        )
        state.pending.add(page)
        state.space.pages.expect([address], state.tenants.number(root, found=True))
    state.space.pages.free(unowned, out)


def _retiring_and_leased(state: NodeState, table: ExtentFound, now_ns: int, out: list[do.Instruction]) -> None:
    states = np.frombuffer(state.segment.extents[table.number].state, np.uint8).copy()
    leased = table.leases > np.uint64(now_ns)
    for frame in np.flatnonzero(leased & ((states == SEALED) | (states == RETIRING))).tolist():
        address = Address(table.number, frame, int(table.snapshot.words[frame]) >> 8)
        until_ns = min(int(table.leases[frame]), now_ns + state.lease_ttl_ns_max)  # a damaged deadline is bounded
        state.leases.add((UNKNOWN_SESSION, table.number << 32 | frame), [address], until_ns)
    done = np.flatnonzero(~leased & (states == RETIRING)).tolist()
    state.space.pages.free([Address(table.number, frame, 0) for frame in done], out)


def _drop_unsound(state: NodeState, space: Space, found: list[ExtentFound], out: list[do.Instruction]) -> None:
    snapshots = [table.snapshot for table in found]
    if not snapshots:
        return
    links = prefix_links.link(snapshots)
    unsound = np.zeros(len(links.parent), bool)
    for table in found:
        mine = links.extents == table.number
        unsound[mine] = ~table.sound[links.frames[mine]]
    gone = prefix_links.doomed(links, links.duplicate | unsound)
    orphaned = prefix_links.doomed(links, (links.parent == -2) & ~gone) & ~gone
    scanning = any((table.snapshot.words & np.uint64(0xFF) == QUARANTINED).any() for table in found)
    if space is not state.space and scanning:  # the scan may find what they hang on
        waiting = [links.address(i) for i in np.flatnonzero(orphaned).tolist()]
        for address in waiting:
            space.pages.quarantine(address)
        if waiting:
            out.append(do.WriteState(waiting, QUARANTINED))
    else:
        gone |= orphaned
    addresses = [links.address(i) for i in np.flatnonzero(gone).tolist()]
    for address in addresses:
        assert space.pages.sealed(address)
    space.pages.retire(addresses, out)
    state.counters["pages_dropped_at_start"] += len(addresses)
