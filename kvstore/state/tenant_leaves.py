"""TenantLeaves: the pages without children of each tenant that has a quota; the next pages to leave for its new ones.

A list may name pages that have left, or have children again; ``has`` is false for these.
"""

from __future__ import annotations

import heapq

from kvstore.model.replica import FrameState
from kvstore.state.eviction.base import Page
from kvstore.state.frames import Extent, Segment
from kvstore.state.tenants import Leaf, Share, TierAccounts

LEAVES_SPARE = 64  # outdated entries of a tenant's heap that are not worth looking for
SEALED = int(FrameState.SEALED)


class TenantLeaves:
    """Keeps ``Share.leaves`` of the tenants of one tier. Part of ``TierPages``."""

    def __init__(self, segment: Segment, holdings: TierAccounts) -> None:
        self._segment = segment
        self._holdings = holdings

    def add(self, extent: Extent, frame: int, page: Page) -> None:
        """List a page that has just lost its last child, where its tenant has a quota."""
        share = self._holdings.roots[extent.owner[frame]].share
        if share.quota is not None and share.complete:
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
        """True while the page is stored, has no children, and belongs to this tenant."""
        _, number, frame, generation = leaf
        extent = self._segment.extents.get(number)
        return (
            extent is not None
            and extent.generation[frame] == generation
            and extent.state[frame] == SEALED
            and extent.children[frame] == 0
            and self._holdings.roots[extent.owner[frame]].share is share
        )
