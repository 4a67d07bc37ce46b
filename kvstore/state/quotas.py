"""Quotas: a tenant that has all it may have makes room for its own pages only.

Its own coldest tails leave first, never what the new pages will hang on. How long a page was not used counts as its
hint weighs it, where the tier's policy follows hints. Where a tail has to be saved to the tier below first, it is set
aside for that and the caller is told to ask again (``Departures.waiting``). What still does not fit is refused.

A tenant can come to have more than it may without storing anything: the node was started with a smaller quota, a scan
found pages again, or a client named their owner late. Then its tails leave by and by (``trim``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvstore.model.replica import Address, FrameClass, FrameState
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.departures import Departures
from kvstore.state.eviction.base import HINT_MS, HINT_WEIGHTS
from kvstore.state.tenants import Leaf, Share
from kvstore.state.tier_pages import TierPages

TRIM_LOOKS = 256  # leaves of a tenant that are looked at by one ``trim``
SEALED = int(FrameState.SEALED)


class Quotas:
    """What tenants may add to one tier. Part of ``Space``."""

    def __init__(self, pages: TierPages, departures: Departures) -> None:
        self.pages = pages
        self.departures = departures

    def fit(
        self,
        number: int,
        frame_class: FrameClass,
        count: int,
        anchor: bytes,
        out: list[do.Instruction],
        used_ms: int | None = None,
    ) -> int:
        """How many of ``count`` pages the tenant of root ``number`` may add, when its own coldest tails have left.

        ``anchor``: key of the page that they will hang on, which stays. ``used_ms``: when the new pages were last used,
        where that is not now: what was used later does not leave for them.
        """
        pages, departures, share = self.pages, self.departures, self.pages.holdings.roots[number].share
        if share.quota is None:
            return count
        size = frame_class.frame_bytes
        wanted = min(count, share.quota // size)
        short = share.bytes + share.coming + wanted * size - share.quota
        if wanted and short > 0:
            held = pages.find(anchor) if anchor else None
            if held is not None:
                pages.hold(held)
            self._shrink(share, short, out, before_ms=used_ms)
            if held is not None:
                pages.unhold(held)
        room = (share.quota - share.bytes - share.coming) // size
        fits = max(0, min(wanted, room))
        if fits < wanted and not departures.waiting and departures.below is not None:
            departures.waiting = any(self._is_its(address, share) for address in departures.below.held())
        if fits < count and not departures.waiting:
            share.refused += count - fits
        return fits

    def _is_its(self, address: Address, share: Share) -> bool:
        owner = self.pages.segment.extents[address.extent].owner[address.frame]
        return self.pages.holdings.roots[owner].share is share

    def spare(self, number: int, frame_class: FrameClass, count: int, part: int) -> int:
        """How many of ``count`` pages it may add without anything leaving, and without more than one ``part`` of its
        quota being of pages to come."""
        share = self.pages.holdings.roots[number].share
        if share.quota is None:
            return count
        room = min(share.quota - share.bytes, share.quota // part) - share.coming
        return max(0, min(count, room // frame_class.frame_bytes))

    def admit(
        self,
        number: int,
        event: ev.SealGranted | ev.SealObjects,
        pages: Sequence[int],
        anchor: bytes,
        out: list[do.Instruction],
    ) -> int:
        """How many of these pages of the request the tenant of root ``number`` may have: the pages in frames that it is
        charged with already, and further ones as far as its quota goes.

        All that were published, since a refusal would not reach their writer. What exceeds the quota leaves gradually
        (``trim``).
        """
        roots, extents = self.pages.holdings.roots, self.pages.segment.extents
        share = roots[number].share
        owners = (extents[a.extent].owner[a.frame] for a in (event.addresses[i] for i in pages))
        others = [i for i, owner in enumerate(owners) if not owner or roots[owner].share is not share]
        if event.number:
            self.pages.holdings.suspect |= bool(others)
            return len(pages)
        fits = self.fit(number, event.frame_class, len(others), anchor, out) if others else 0
        return others[fits] if fits < len(others) else len(pages)

    def trim(self, out: list[do.Instruction]) -> None:
        """Bring tenants that have more than their quota nearer to it, a bounded step each."""
        holdings = self.pages.holdings
        if not holdings.suspect:
            return
        holdings.suspect = False
        for share in holdings.shares.values():
            over = share.bytes + share.coming - share.quota if share.quota is not None else 0
            if over > 0:
                holdings.suspect = True
                self._shrink(share, over, out, TRIM_LOOKS)

    def _scan(self, share: Share) -> None:
        """List all leaves of a tenant: after a start, damage, or when one of its roots is named late."""
        pages = self.pages
        numbers = [number for number, held in enumerate(pages.holdings.roots) if held.share is share]
        share.leaves = {}
        for extent in pages.segment.extents.values():
            mask = np.isin(np.asarray(extent.owner), numbers) & (np.frombuffer(extent.state, np.uint8) == SEALED)
            mask &= np.asarray(extent.children) == 0
            for frame in np.flatnonzero(mask).tolist():
                pages.leaves.push(share, extent, frame, pages.page(extent.pool, extent.slot_base + frame))
        share.complete = True

    def _next(self, share: Share, passed: set[int]) -> int | None:
        """The hint whose coldest page is to leave next: the one that has not been used for longest, as its hint weighs
        that time. Not one that was ``passed``."""
        now_ms = self.pages.now_ns // 1_000_000

        def age(hint: int) -> float:
            unused_ms = max(0, now_ms - share.leaves[hint][0][0]) + 1
            return unused_ms / HINT_WEIGHTS[hint] if unused_ms <= HINT_MS[hint] else unused_ms

        return max((hint for hint in share.leaves if share.leaves[hint] and hint not in passed), key=age, default=None)

    def _shrink(
        self,
        share: Share,
        size: int,
        out: list[do.Instruction],
        looks: int | None = None,
        before_ms: int | None = None,
    ) -> None:
        """Have ``size`` bytes of a tenant's own coldest pages leave, as far as they may.

        ``looks``: at most this many pages are looked at. ``before_ms``: only pages last used before then.
        """
        pages, departures = self.pages, self.departures
        if not share.complete:
            self._scan(share)
        leaving = departures.leaving()
        aside: list[tuple[list[Leaf], Leaf]] = []
        passed: set[int] = set()
        waits = 0
        while size > 0 and waits < size and looks != 0 and (hint := self._next(share, passed)) is not None:
            looks = looks - 1 if looks is not None else None
            leaves = share.leaves[hint]
            leaf = heapq.heappop(leaves)
            if not pages.leaves.has(leaf, share):
                continue
            used_ms, number, frame, _ = leaf
            extent = pages.segment.extents[number]
            slot, pool = extent.slot_base + frame, extent.pool
            frame_bytes = pool.frame_class.frame_bytes
            now_used_ms = pages.used_ms(pool, slot)
            if (number, frame) in pages.moved or pages.leases.holds(number, frame):
                aside.append((leaves, (pages.now_ns // 1_000_000, *leaf[1:])))
            elif now_used_ms > used_ms:
                heapq.heappush(leaves, (now_used_ms, *leaf[1:]))
            elif before_ms is not None and used_ms >= before_ms:
                aside.append((leaves, leaf))
                passed.add(hint)
            elif not departures.may_leave(pool, slot):
                waits += frame_bytes
                aside.append((leaves, leaf))
            else:
                departures.leave(extent, frame, leaving)
                size -= frame_bytes
                share.evicted += 1
        for leaves, leaf in aside:
            heapq.heappush(leaves, leaf)
        departures.left(leaving, "quota", out)
        if waits:
            departures.waiting = True
