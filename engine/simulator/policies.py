"""Policies of the literature (SLRU, S3-FIFO and ARC), which the simulator compares with the policies of a node.

They differ from their papers, because a node has less information. Their queues contain only leaves, so shares are
shares of the leaves. A policy notices the use of a page only when the page reaches the cold end of its queue, or when
it is added again. When a child is evicted, the policy infers how often the parent was used *before* it became a leaf.
Each use of the child was a use of the parent. If a later request stored the child, that was another use. So is a last
use of the parent after the child's::

    parent stored by turn 1 ── child stored by turn 3, used twice since     the parent was used at least 4 times

A page that becomes a leaf because its child was evicted gets the child's place at the cold end, because the same
request used both last. These policies need about 350 bytes for each leaf, while those of a node need 14 to 18.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from kvstore.errors import InvalidRequest
from kvstore.state import eviction
from kvstore.state.eviction.base import EvictionPolicy, Page, Tail, UsedMs

Queue = OrderedDict[int, None]  # slots, coldest first
Ghosts = OrderedDict[int, None]  # keys of pages that were evicted, oldest first


@dataclass(slots=True)
class Leaf:
    """A stored page that is listed, or was listed before.

    Attributes:
        uses: the number of uses since the page was stored, as far as the policy has noticed.
        queue: the queue of the page; None while it is not listed.
        is_reused: True if the page belongs to the queue of pages that were used more than once.
    """

    key: int
    used_ms: int
    position: int
    turns: int
    uses: int
    queue: Queue | None = None
    is_reused: bool = False


class QueuePolicy:
    """The common part of these policies: the leaves, and two queues of them.

    A subclass decides which queue a page enters, and which queue evicts its coldest page.

    Attributes:
        once: pages that were used once.
        reused: pages that were used more than once.
    """

    hinted = False

    def __init__(self, pages: int = 0) -> None:
        self.pages = pages
        self.once: Queue = OrderedDict()
        self.reused: Queue = OrderedDict()
        self._leaves: dict[int, Leaf] = {}
        self._evicted: Leaf | None = None  # the page that was just evicted, until the next call

    def resize(self, pages: int) -> None:
        """Set the approximate number of stored pages."""
        self.pages = pages

    def add(self, slot: int, page: Page) -> None:
        """List a page."""
        leaf, child, self._evicted = self._leaves.get(slot), self._evicted, None
        if leaf is None:
            is_parent = child is not None and child.position == page.position + 1
            uses = _uses_of_parent(page, child) if child is not None and is_parent else 0
            leaf = self._leaves[slot] = Leaf(page.key, page.used_ms, page.position, page.turns, uses)
            leaf.is_reused = self.is_reused(leaf)
            self._enqueue(slot, leaf, cold=is_parent)
            return
        assert leaf.queue is None, slot
        if page.used_ms > leaf.used_ms:
            self._record_use(leaf, page.used_ms)
        self._enqueue(slot, leaf, cold=False)

    def remove(self, slot: int) -> None:
        """Stop listing a page that cannot be evicted now."""
        leaf = self._leaves.get(slot)
        if leaf is not None and leaf.queue is not None:
            del leaf.queue[slot]
            leaf.queue = None
            self._evicted = None

    def forget(self, slot: int, key: int | None) -> None:
        """Drop a page that is no longer stored. ``key``: set if it was evicted to free its frame."""
        self.remove(slot)
        leaf = self._leaves.pop(slot, None)
        if leaf is not None and key is not None:
            self.record_evicted(leaf)
        self._evicted = leaf if key is not None else None

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """Evict only the leaf."""
        self.forget(tail.slots[-1], tail.keys[-1])
        return 0

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """Return the slot of the page to evict next, after moving pages that were used in the meantime."""
        while self.once or self.reused:
            queue = self.next_queue()
            slot = next(iter(queue))
            leaf = self._leaves[slot]
            mark_ms = used_ms(slot)
            if mark_ms <= leaf.used_ms:
                return slot
            self._record_use(leaf, mark_ms)
            del queue[slot]
            self._enqueue(slot, leaf, cold=False)
        return None

    def coldest_ms(self) -> int | None:
        """Return the earliest last use of the pages at the cold ends."""
        heads = [self._leaves[next(iter(queue))].used_ms for queue in (self.once, self.reused) if queue]
        return min(heads, default=None)

    def __contains__(self, slot: int) -> bool:
        """Return True if the page in the slot is listed."""
        leaf = self._leaves.get(slot)
        return leaf is not None and leaf.queue is not None

    def __len__(self) -> int:
        """Return the number of listed pages."""
        return len(self.once) + len(self.reused)

    def _record_use(self, leaf: Leaf, used_ms: int) -> None:
        leaf.used_ms = used_ms
        leaf.uses += 1
        leaf.is_reused = True

    def _enqueue(self, slot: int, leaf: Leaf, *, cold: bool) -> None:
        leaf.queue = self.reused if leaf.is_reused else self.once
        leaf.queue[slot] = None
        if cold:
            leaf.queue.move_to_end(slot, last=False)

    # --- for subclasses -------------------------------------------------------------------------------------------

    def is_reused(self, leaf: Leaf) -> bool:
        """Return whether a page that is listed for the first time was used more than once."""
        return leaf.uses > 0

    def next_queue(self) -> Queue:
        """Return the queue that evicts its coldest page next. It must not be empty."""
        raise NotImplementedError

    def record_evicted(self, leaf: Leaf) -> None:
        """Record that a page was evicted to free its frame."""


class Slru(QueuePolicy):
    """Segmented LRU (Karedla, Love, Wherry 1994): leaves that were used again are protected, up to a share.

    The coldest pages beyond this share move to the warm end of the other queue. They need another use to return.
    """

    SHARE = 0.95

    def next_queue(self) -> Queue:
        """Return the unprotected pages, if there are any."""
        while len(self.reused) > self.SHARE * len(self):
            slot, _ = self.reused.popitem(last=False)
            leaf = self._leaves[slot]
            leaf.is_reused = False
            self._enqueue(slot, leaf, cold=False)
        return self.once or self.reused


class S3Fifo(QueuePolicy):
    """S3-FIFO (Yang and others, SOSP 2023): new pages enter a small queue, in front of the main queue.

    The keys of pages that are evicted from the small queue are remembered (ghosts). A page that is stored again while
    its key is remembered enters the main queue.
    """

    SMALL = 0.1  # the share of the leaves in the small queue

    def __init__(self, pages: int = 0) -> None:
        super().__init__(pages)
        self._ghosts: Ghosts = OrderedDict()

    def is_reused(self, leaf: Leaf) -> bool:
        """Return whether the page was used before, or its key is remembered."""
        return leaf.uses > 0 or self._ghosts.pop(leaf.key, 0) is None

    def next_queue(self) -> Queue:
        """Return the small queue if it exceeds its share."""
        if self.once and (len(self.once) > self.SMALL * len(self) or not self.reused):
            return self.once
        return self.reused

    def record_evicted(self, leaf: Leaf) -> None:
        """Remember the key of a page of the small queue."""
        if not leaf.is_reused:
            _remember(self._ghosts, leaf.key, self.pages)


class Arc(QueuePolicy):
    """ARC (Megiddo and Modha, FAST 2003), in its clock form: the shares of the two queues adapt.

    The keys of pages that are evicted from each queue are remembered (ghosts). If such a page is stored again, the
    share of its queue grows, because the queue was too short.
    """

    def __init__(self, pages: int = 0) -> None:
        super().__init__(pages)
        self._share = 0.5  # the share of the leaves in the queue of pages that were used once
        self._ghosts_once: Ghosts = OrderedDict()
        self._ghosts_reused: Ghosts = OrderedDict()

    def is_reused(self, leaf: Leaf) -> bool:
        """Return whether the page was used before, or its key is remembered. In the second case, adapt the share."""
        once, reused, step = len(self._ghosts_once), len(self._ghosts_reused), 1 / max(1, self.pages)
        if self._ghosts_once.pop(leaf.key, 0) is None:
            self._share = min(1.0, self._share + step * max(1.0, reused / once))
            return True
        if self._ghosts_reused.pop(leaf.key, 0) is None:
            self._share = max(0.0, self._share - step * max(1.0, once / reused))
            return True
        return leaf.uses > 0

    def next_queue(self) -> Queue:
        """Return the queue that exceeds its share."""
        if self.once and (len(self.once) > self._share * len(self) or not self.reused):
            return self.once
        return self.reused or self.once

    def record_evicted(self, leaf: Leaf) -> None:
        """Remember the key of a page, with its queue."""
        _remember(self._ghosts_reused if leaf.is_reused else self._ghosts_once, leaf.key, self.pages)


def _uses_of_parent(page: Page, child: Leaf) -> int:
    """Return how often ``page`` was used at least, now that its last child is evicted. The module explains the sum."""
    return child.uses + max(0, child.turns - page.turns) + (page.used_ms > child.used_ms)


def _remember(ghosts: Ghosts, key: int, pages: int) -> None:
    ghosts.pop(key, 0)
    ghosts[key] = None
    while len(ghosts) > pages:
        ghosts.popitem(last=False)


# All policies, by name: those of a node, and those of this module.
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {**eviction.POLICIES, "slru": Slru, "s3fifo": S3Fifo, "arc": Arc}
)


def make_policy(name: str, capacity_pages: int) -> EvictionPolicy:
    """Make a policy for about ``capacity_pages`` pages.

    Raises:
        InvalidRequest: there is no policy with this name.
    """
    if name not in POLICIES:
        raise InvalidRequest("policy", f"must be one of {', '.join(POLICIES)} (got {name!r})")
    return POLICIES[name](capacity_pages)
