"""Quotas: a tenant that has reached its quota makes room only with its own pages.

Its coldest tails leave first, but never the page that the new pages will follow. The time since the last use is
weighted by the page's hint, if the eviction policy of the tier follows hints. A tail that must be saved to the tier
below first is set aside for that, and the caller is asked to try again (``Departures.waiting``). Pages that still do
not fit are refused.

A tenant may exceed its quota without storing anything: the node was started with a smaller quota, a scan found pages,
or a client named the tenant of a root late. Then its tails leave step by step (``trim``).
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

TRIM_LOOKS = 256  # leaves of a tenant that one ``trim`` may look at
SEALED = int(FrameState.SEALED)


class Quotas:
    """Limits of what tenants may add to one tier. Part of ``Space``."""

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
        """Return how many of ``count`` pages the tenant of a root may add, after its coldest tails were evicted.

        Args:
            number: number of the root.
            anchor: key of the page that the new pages will follow; it stays.
            used_ms: last use of the new pages, if that is not now. Pages used later are not evicted for them.
        """
        pages, departures, share = self.pages, self.departures, self.pages.holdings.roots[number].share
        if share.quota is None:
            return count
        size = frame_class.frame_bytes
        possible = min(count, share.quota // size)
        excess = share.bytes + share.expected_bytes + possible * size - share.quota
        if possible and excess > 0:
            parent = pages.find(anchor) if anchor else None
            if parent is not None:
                pages.hold(parent)
            self._shrink(share, excess, out, before_ms=used_ms)
            if parent is not None:
                pages.unhold(parent)
        room = (share.quota - share.bytes - share.expected_bytes) // size
        fits = max(0, min(possible, room))
        if fits < possible and not departures.waiting and departures.below is not None:
            departures.waiting = any(self._belongs_to(share, address) for address in departures.below.held_pages())
        if fits < count and not departures.waiting:
            share.refused += count - fits
        return fits

    def _belongs_to(self, share: Share, address: Address) -> bool:
        owner = self.pages.segment.extents[address.extent].owner[address.frame]
        return self.pages.holdings.roots[owner].share is share

    def spare(self, number: int, frame_class: FrameClass, count: int, part: int) -> int:
        """Return how many of ``count`` frames a tenant may get ahead of need. No page is evicted for them.

        Expected bytes are limited to one part in ``part`` of the tenant's quota.
        """
        share = self.pages.holdings.roots[number].share
        if share.quota is None:
            return count
        room = min(share.quota - share.bytes, share.quota // part) - share.expected_bytes
        return max(0, min(count, room // frame_class.frame_bytes))

    def admit(
        self,
        number: int,
        event: ev.SealGranted | ev.SealObjects,
        pages: Sequence[int],
        anchor: bytes,
        out: list[do.Instruction],
    ) -> int:
        """Return how many of these pages of the request the tenant of root ``number`` may store.

        Pages in frames that the tenant is already charged for are admitted; other pages are admitted as far as its
        quota allows. Published pages are all admitted, because a refusal would not reach their writer. Pages beyond the
        quota leave step by step (``trim``).
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
        """Bring tenants that exceed their quota nearer to it, by a bounded step each."""
        holdings = self.pages.holdings
        if not holdings.suspect:
            return
        holdings.suspect = False
        for share in holdings.shares.values():
            excess = share.bytes + share.expected_bytes - share.quota if share.quota is not None else 0
            if excess > 0:
                holdings.suspect = True
                self._shrink(share, excess, out, TRIM_LOOKS)

    def _scan(self, share: Share) -> None:
        """List all leaves of a tenant. This is needed after startup, after damage, or if one of its roots was named
        late."""
        pages = self.pages
        numbers = [number for number, account in enumerate(pages.holdings.roots) if account.share is share]
        share.leaves = {}
        for extent in pages.segment.extents.values():
            mask = np.isin(np.asarray(extent.owner), numbers) & (np.frombuffer(extent.state, np.uint8) == SEALED)
            mask &= np.asarray(extent.children) == 0
            for frame in np.flatnonzero(mask).tolist():
                pages.leaves.push(share, extent, frame, pages.page(extent.pool, extent.slot_base + frame))
        share.has_all_leaves = True

    def _next(self, share: Share, passed: set[int]) -> int | None:
        """Return the hint whose coldest page should leave next, or None. Skip the hints in ``passed``.

        The chosen page has the longest weighted time since its last use.
        """
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
        """Evict up to ``size`` bytes of a tenant's own coldest pages.

        ``looks``: maximum number of pages to look at. ``before_ms``: only evict pages last used before then.
        """
        pages, departures = self.pages, self.departures
        if not share.has_all_leaves:
            self._scan(share)
        leaving = departures.new_batch()
        aside: list[tuple[list[Leaf], Leaf]] = []
        passed: set[int] = set()
        unsaved_bytes = 0
        while size > 0 and unsaved_bytes < size and looks != 0 and (hint := self._next(share, passed)) is not None:
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
                unsaved_bytes += frame_bytes
                aside.append((leaves, leaf))
            else:
                departures.leave(extent, frame, leaving)
                size -= frame_bytes
                share.evicted += 1
        for leaves, leaf in aside:
            heapq.heappush(leaves, leaf)
        departures.finish(leaving, "quota", out)
        if unsaved_bytes:
            departures.waiting = True
