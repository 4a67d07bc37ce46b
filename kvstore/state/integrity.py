"""Integrity: runnable checks of the conservation laws over a node's state, records and index.

They run when the node is idle, after every simulated step, and in ``kvstore verify``. Each finding is one line of text;
an empty list means that the node is sound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from kvstore.model.replica import Address, FrameState, Tier
from kvstore.state import prefix_links
from kvstore.state.directory_spans import spans_by_chain
from kvstore.state.interfaces import Snapshot
from kvstore.state.node_state import NodeState
from kvstore.state.space import Space

SEALED = FrameState.SEALED


def check_all(
    state: NodeState,
    entries: Callable[[Tier], Iterable[tuple[bytes, Address]]],
    groups: Callable[[], Iterable[bytes]],
) -> list[str]:
    """Check all laws of a whole node. ``entries`` returns the current index entries of a tier, and ``groups`` the
    groups that the index lists."""
    findings = [
        line
        for tier, space in state.spaces.items()
        for line in check(state, tier, space.pages.records.snapshots(), entries(tier))
    ]
    findings += state.groups.findings(groups())
    return findings if Tier.HBM in state.spaces else [*findings, *check_mounts(state, entries(Tier.HBM))]


def check_mounts(state: NodeState, index: Iterable[tuple[bytes, Address]]) -> list[str]:
    """Check the laws of mounted memory.

    The index lists one replica of every page. Pages and bytes are counted for the roots that have them. Every segment
    belongs to a known session.
    """
    mounts, accounts = state.mounts, state.tenants.holdings[Tier.HBM]
    wrong: list[str] = []
    replicas: dict[bytes, set[Address]] = {}
    pages: Counter[bytes] = Counter()
    sizes: Counter[bytes] = Counter()
    for key, address, root, _ in mounts.replicas():
        replicas.setdefault(key, set()).add(address)
        pages[root] += 1
        sizes[root] += mounts.segments[address.extent].frame_class.frame_bytes
    listed = dict(index)
    if listed.keys() != replicas.keys():
        wrong.append(f"{len(listed)} pages are listed, {len(replicas)} are mounted, and they are not the same")
    wrong += [
        f"index {key.hex()}: {address} holds another page, or none"
        for key, address in listed.items()
        if address not in replicas.get(key, ())
    ]
    for account in accounts.roots:
        counted = account.pages, account.bytes, account.expected_bytes
        if counted != (pages[account.root], sizes[account.root], 0):
            wrong.append(
                f"root {account.root.hex()}: counts {account.pages} pages, {account.bytes} bytes, "
                f"has {pages[account.root]}"
            )
    for segment in mounts.segments.values():
        published = segment.frames - segment.generation.count(0)
        if segment.pages != published:
            wrong.append(f"segment {segment.number}: counts {segment.pages} pages, has {published}")
        if segment.session not in state.sessions:
            wrong.append(f"segment {segment.number}: its session {segment.session:016x} is not known")
        if segment.number in state.segment.extents:
            wrong.append(f"segment {segment.number}: an extent has its number")
    return [f"{Tier.HBM}: {finding}" for finding in wrong]


def check(state: NodeState, tier: Tier, snapshots: list[Snapshot], index: Iterable[tuple[bytes, Address]]) -> list[str]:
    """Check all laws of one tier of a node. ``snapshots`` and ``index`` are current."""
    space = state.spaces[tier]
    tables = _tables(state) if space is state.space else _copies(state, space)
    findings = [
        *_frames(space, snapshots),
        *_tenants(state, space, snapshots),
        *tables,
        *_closure(state, space, snapshots),
        *_index(snapshots, index),
    ]
    return [f"{tier}: {finding}" for finding in findings]


def _frames(space: Space, snapshots: list[Snapshot]) -> list[str]:
    """Check each extent: every frame has one state, the free list has exactly the free frames, records agree."""
    wrong: list[str] = []
    by_extent = {snapshot.extent: snapshot for snapshot in snapshots}
    if by_extent.keys() != space.segment.extents.keys():
        wrong.append(f"extents: records of {sorted(by_extent)}, state of {sorted(space.segment.extents)}")
    for number, extent in space.segment.extents.items():
        counts = {frame_state: extent.count(frame_state) for frame_state in FrameState}
        if sum(counts.values()) != extent.frames:
            wrong.append(f"extent {number}: frames by state {counts} do not add up to {extent.frames}")
        free = set(extent.free)
        if len(free) != len(extent.free) or len(free) != counts[FrameState.FREE]:
            wrong.append(f"extent {number}: {counts[FrameState.FREE]} frames are free, the free list has {len(free)}")
        wrong += [f"extent {number} frame {f}: listed free, is not" for f in free if extent.state[f] != FrameState.FREE]
        if extent.sealed != counts[SEALED]:
            wrong.append(f"extent {number}: counts {extent.sealed} sealed, has {counts[SEALED]}")
        if (number in extent.pool.extents_with_free) != (bool(free) and extent.grants):
            wrong.append(f"extent {number}: {len(free)} frames are free, and its class does not list it accordingly")
        if number in by_extent:
            words = np.frombuffer(extent.generation, np.uint64) << np.uint64(8)
            words = words | np.frombuffer(extent.state, np.uint8)
            for frame in np.flatnonzero(words != by_extent[number].words).tolist():
                recorded = int(by_extent[number].words[frame])
                wrong.append(f"extent {number} frame {frame}: state {int(words[frame]):#x}, record {recorded:#x}")
    carved = {extent.position for extent in space.segment.extents.values()}
    if carved & space.segment.vacant or len(carved) != len(space.segment.extents):
        wrong.append("positions: one is carved twice, or both carved and vacant")
    segment = space.segment
    others = sum(map(len, (segment.vacant, segment.failed, segment.beyond, segment.quarantined)))
    if len(carved) + others != space.segment.positions:
        wrong.append("positions: carved + vacant + failed + given back + quarantined are not all")
    return wrong


def _tables(state: NodeState) -> list[str]:
    """Check that exactly the granted, pending and loading frames are reserved or quarantined, and no leased frame is
    free."""
    wrong: list[str] = []
    granted = [a for session in state.sessions.values() for a in session.granted]
    copied = state.tiering.copies.target_frames()
    loading = [address for address in copied if address.extent in state.segment.extents]
    owned = granted + list(state.pending.by_address) + loading
    if len(set(owned)) != len(owned):
        wrong.append("a frame is both granted ahead and pending, or twice so")
    for address in owned:
        extent = state.segment.extents.get(address.extent)
        if extent is None or extent.generation[address.frame] != address.generation:
            wrong.append(f"{address}: granted or pending under a generation the frame does not have")
    reserved = sum(
        extent.count(FrameState.RESERVED) + extent.count(FrameState.QUARANTINED)
        for extent in state.segment.extents.values()
    )
    if reserved != len(owned):
        wrong.append(
            f"{reserved} frames are reserved or quarantined, {len(owned)} are granted, pending or being loaded"
        )
    ahead = sum(pool.granted_ahead for pool in state.segment.pools.values())
    if ahead != len(granted):
        wrong.append(f"{len(granted)} frames are granted ahead, pools count {ahead}")
    for number, frame in state.leases.frames():
        if state.segment.extents[number].state[frame] not in (SEALED, FrameState.RETIRING):
            wrong.append(f"extent {number} frame {frame}: leased, yet neither sealed nor retiring")
    wrong += [f"{page.address}: complete and not sealed" for page in state.writing.overdue()]
    return wrong


def _tenants(state: NodeState, space: Space, snapshots: list[Snapshot]) -> list[str]:
    """Check that the tenants' bytes sum to the tier's, and that each sealed page counts for the root in its record."""
    wrong: list[str] = []
    holdings, by_extent = space.pages.holdings, {snapshot.extent: snapshot for snapshot in snapshots}
    pages: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    expected: Counter[int] = Counter()
    for number, extent in space.segment.extents.items():
        size = extent.pool.frame_class.frame_bytes
        roots = by_extent[number].roots if number in by_extent else None
        for frame, owner in enumerate(extent.owner):
            if extent.state[frame] == SEALED:
                pages[owner] += 1
                sizes[owner] += size
                root = bytes(roots[frame]).ljust(16, b"\0") if roots is not None else b""
                if not owner or holdings.roots[owner].root != root:
                    wrong.append(f"extent {number} frame {frame}: counts for root number {owner}, is {root.hex()}'s")
            elif owner:
                expected[owner] += size
    shares: dict[str | None, Counter[str]] = {}
    for number, account in enumerate(holdings.roots):
        counted = account.pages, account.bytes, account.expected_bytes
        true = pages[number], sizes[number], expected[number]
        if counted != true:
            wrong.append(f"root {account.root.hex()}: counts (pages, bytes, expected bytes) {counted}, has {true}")
        if number and (account.share.salt or "") != state.tenants.salt(account.root) and any(true):
            wrong.append(f"root {account.root.hex()}: counts for {account.share.salt!r}, belongs to another tenant")
        sums = shares.setdefault(account.share.salt, Counter())
        sums.update(pages=account.pages, bytes=account.bytes, expected=account.expected_bytes)
    for salt, share in holdings.shares.items():
        sums = shares.get(salt, Counter())
        if (share.pages, share.bytes, share.expected_bytes) != (sums["pages"], sums["bytes"], sums["expected"]):
            wrong.append(f"tenant {salt!r}: {share.pages} pages, {share.bytes} bytes are not the sum of its roots'")
    used = sum(extent.sealed * extent.pool.frame_class.frame_bytes for extent in space.segment.extents.values())
    if used != sum(share.bytes for share in holdings.shares.values()):
        wrong.append("bytes per tenant do not sum to the tier's")
    return wrong


def _copies(state: NodeState, space: Space) -> list[str]:
    """Check that in a lower tier exactly the targets of copies are reserved, and exactly the frames being erased are
    retiring."""
    copied = state.tiering.copies.target_frames()
    saving = [address for address in copied if address.extent in space.segment.extents]
    reserved = sum(extent.count(FrameState.RESERVED) for extent in space.segment.extents.values())
    wrong = [f"{reserved} frames are reserved, {len(saving)} are being copied into"] if reserved != len(saving) else []
    erasures = state.tiering.copies.erasing.values()
    erasing = {address for pages in erasures for _, address in pages}
    for number, extent in space.segment.extents.items():
        for frame in (f for f in range(extent.frames) if extent.state[f] == FrameState.RETIRING and not extent.closed):
            if Address(number, frame, extent.generation[frame]) not in erasing:
                wrong.append(f"extent {number} frame {frame}: retiring, and not being erased")
    for address in saving:
        extent = space.segment.extents[address.extent]
        if extent.generation[address.frame] != address.generation:
            wrong.append(f"{address}: copied into under a generation the frame does not have")
    return wrong


def _closure(state: NodeState, space: Space, snapshots: list[Snapshot]) -> list[str]:
    """Check that parents are sealed, counts of children are correct, and exactly the pages without children can be
    evicted."""
    wrong: list[str] = []
    links = prefix_links.link(snapshots) if snapshots else None
    if links is None:
        return wrong
    for i in np.flatnonzero(links.parent == -2).tolist():
        wrong.append(f"{links.address(i)}: its parent is not sealed")
    for i in np.flatnonzero(links.duplicate).tolist():
        wrong.append(f"{links.address(i)}: a second sealed page has its key")
    counts = np.bincount(links.parent[links.parent >= 0], minlength=len(links.parent))
    holds = Counter(state.writing.held_parents() if space is state.space else ())
    holds.update(state.tiering.copies.held_pages(space))
    holds.update(state.pins.held_pages(space))
    for i, count in enumerate(counts.tolist()):
        address = links.address(i)
        extent = space.segment.extents[address.extent]
        have, want = extent.children[address.frame], count + holds[address]
        if have != want:
            wrong.append(f"{address}: counts {have} children and holds, has {want}")
        slot, pool = extent.slot_base + address.frame, extent.pool
        listed = (slot in pool.policy) + (slot in pool.ready) + (slot in pool.unsaved)
        if listed != (want == 0):
            wrong.append(f"{address}: {want} children, offered {listed} times to eviction")
    return wrong + _spans(space, links)


def _spans(space: Space, links: prefix_links.Links) -> list[str]:
    """Check that every page has the span that its place in its chain implies."""
    wrong: list[str] = []
    true_spans = spans_by_chain(space.segment, links)
    for number, extent in space.segment.extents.items():
        mine = links.extents == number
        spans = np.frombuffer(extent.span, np.uint64)[links.frames[mine]]
        for i in np.flatnonzero(mine)[spans != true_spans[mine]].tolist():
            wrong.append(f"{links.address(i)}: its span does not match its place in its chain")
    return wrong


def _index(snapshots: list[Snapshot], index: Iterable[tuple[bytes, Address]]) -> list[str]:
    """Check that every index entry names a sealed frame with that key, and that the index has every sealed frame."""
    wrong: list[str] = []
    by_extent = {snapshot.extent: snapshot for snapshot in snapshots}
    entries = 0
    for key, address in index:
        entries += 1
        snapshot = by_extent.get(address.extent)
        if snapshot is None or address.frame >= len(snapshot.words):
            wrong.append(f"index {key.hex()}: {address} is not a frame")
        elif int(snapshot.words[address.frame]) != address.generation << 8 | SEALED:
            wrong.append(f"index {key.hex()}: {address} is not sealed under that generation")
        elif bytes(snapshot.keys[address.frame]).ljust(16, b"\0") != key:
            wrong.append(f"index {key.hex()}: {address} holds another key")
    sealed = sum(int(((s.words & np.uint64(0xFF)) == SEALED).sum()) for s in snapshots)
    if sealed != entries:
        wrong.append(f"{sealed} pages are sealed, the index has {entries}")
    return wrong
