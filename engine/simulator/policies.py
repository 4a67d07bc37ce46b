"""Policies that the simulator compares with a node's own: SLRU, S3-FIFO and ARC, over leaves.

They differ from their papers in what a node can know. Only leaves stand in their queues, so shares are shares of the
leaves. They see a use when a page has come to the cold end of a queue, or is offered again. From a child that leaves
they infer how often its parent was used *before* it became a leaf: every use of a child is a use of its parent, a child
that was stored by a later request means one more, and so does a mark younger than the child's::

    parent stored by turn 1 ── child stored by turn 3, used twice since     the parent was used at least 4 times

A page that becomes a leaf because its child left takes the child's place at the cold end: both were last used by the
same request. A leaf costs these policies about 350 bytes, a node's own 14 to 18, so no node runs them.
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
    """A stored page that is or was offered."""

    key: int
    used_ms: int
    position: int
    turns: int
    uses: int  # since it was stored, as far as known
    queue: Queue | None = None  # where it stands while it is listed
    kept: bool = False  # it belongs to the queue of pages used more than once


class QueuePolicy:
    """What these policies share: the table of leaves, and two queues. A policy adds where pages go and which page
    leaves.
    """

    hinted = False

    def __init__(self, pages: int = 0) -> None:
        self.pages = pages
        self.once: Queue = OrderedDict()
        self.kept: Queue = OrderedDict()
        self._leaves: dict[int, Leaf] = {}
        self._gone: Leaf | None = None  # the page that left last, if nothing happened since

    def resize(self, pages: int) -> None:
        """See ``EvictionPolicy.resize``."""
        self.pages = pages

    def add(self, slot: int, page: Page) -> None:
        """See ``EvictionPolicy.add``."""
        leaf, child, self._gone = self._leaves.get(slot), self._gone, None
        if leaf is None:
            follows = child is not None and child.position == page.position + 1
            uses = _inferred(page, child) if child is not None and follows else 0
            leaf = self._leaves[slot] = Leaf(page.key, page.used_ms, page.position, page.turns, uses)
            leaf.kept = self.admit(leaf)
            self._stand(slot, leaf, cold=follows)
            return
        assert leaf.queue is None, slot
        if page.used_ms > leaf.used_ms:
            self.use(leaf, page.used_ms)
        self._stand(slot, leaf, cold=False)

    def remove(self, slot: int) -> None:
        """See ``EvictionPolicy.remove``."""
        leaf = self._leaves.get(slot)
        if leaf is not None and leaf.queue is not None:
            del leaf.queue[slot]
            leaf.queue = None
            self._gone = None

    def forget(self, slot: int, key: int | None) -> None:
        """See ``EvictionPolicy.forget``."""
        self.remove(slot)
        leaf = self._leaves.pop(slot, None)
        if leaf is not None and key is not None:
            self.left(leaf)
        self._gone = leaf if key is not None else None

    def forget_tail(self, tail: Tail, together: int = 0) -> int:
        """See ``EvictionPolicy.forget_tail``."""
        self.forget(tail.slots[-1], tail.keys[-1])
        return 0

    def victim(self, used_ms: UsedMs, now_ms: int) -> int | None:
        """See ``EvictionPolicy.victim``."""
        while self.once or self.kept:
            queue = self.giver()
            slot = next(iter(queue))
            leaf = self._leaves[slot]
            mark_ms = used_ms(slot)
            if mark_ms <= leaf.used_ms:
                return slot
            self.use(leaf, mark_ms)
            del queue[slot]
            self._stand(slot, leaf, cold=False)
        return None

    def coldest_ms(self) -> int | None:
        """See ``EvictionPolicy.coldest_ms``."""
        heads = [self._leaves[next(iter(queue))].used_ms for queue in (self.once, self.kept) if queue]
        return min(heads, default=None)

    def __contains__(self, slot: int) -> bool:
        """See ``EvictionPolicy.__contains__``."""
        leaf = self._leaves.get(slot)
        return leaf is not None and leaf.queue is not None

    def __len__(self) -> int:
        """Pages listed."""
        return len(self.once) + len(self.kept)

    def use(self, leaf: Leaf, used_ms: int) -> None:
        """A use was seen: from here on the page is one of those used more than once."""
        leaf.used_ms = used_ms
        leaf.uses += 1
        leaf.kept = True

    def _stand(self, slot: int, leaf: Leaf, *, cold: bool) -> None:
        leaf.queue = self.kept if leaf.kept else self.once
        leaf.queue[slot] = None
        if cold:
            leaf.queue.move_to_end(slot, last=False)

    # --- what a policy says ---------------------------------------------------------------------------------------

    def admit(self, leaf: Leaf) -> bool:
        """A page is offered for the first time: it belongs to those used more than once."""
        return leaf.uses > 0

    def giver(self) -> Queue:
        """The queue whose cold end leaves next; it is not empty."""
        raise NotImplementedError

    def left(self, leaf: Leaf) -> None:
        """The page was evicted for room."""


class Slru(QueuePolicy):
    """Segmented LRU (Karedla, Love, Wherry 1994): pages used again are protected, up to a share of the leaves.

    What exceeds the share falls back to the warm end of the others, and has to be used once more.
    """

    SHARE = 0.95

    def giver(self) -> Queue:
        """The unprotected ones, while there are any."""
        while len(self.kept) > self.SHARE * len(self):
            slot, _ = self.kept.popitem(last=False)
            leaf = self._leaves[slot]
            leaf.kept = False
            self._stand(slot, leaf, cold=False)
        return self.once or self.kept


class S3Fifo(QueuePolicy):
    """S3-FIFO (Yang and others, SOSP 2023): a small queue in front filters what is used once; ghosts of it come back.

    A page that leaves the small queue is remembered by key; where it comes back it goes to the main queue at once.
    """

    SMALL = 0.1  # share of the leaves that may stand in the small queue

    def __init__(self, pages: int = 0) -> None:
        super().__init__(pages)
        self._ghosts: Ghosts = OrderedDict()

    def admit(self, leaf: Leaf) -> bool:
        """Used before, or remembered."""
        return leaf.uses > 0 or self._ghosts.pop(leaf.key, 0) is None

    def giver(self) -> Queue:
        """The small queue while it exceeds its share."""
        if self.once and (len(self.once) > self.SMALL * len(self) or not self.kept):
            return self.once
        return self.kept

    def left(self, leaf: Leaf) -> None:
        """Remember it."""
        if not leaf.kept:
            _remember(self._ghosts, leaf.key, self.pages)


class Arc(QueuePolicy):
    """ARC (Megiddo and Modha, FAST 2003), in its clock form: ghosts of both queues move the border between them.

    A page that comes back and was evicted out of the first queue says that this one is too short, and the other way
    round. The border is a share of the leaves here.
    """

    def __init__(self, pages: int = 0) -> None:
        super().__init__(pages)
        self._share = 0.5  # of the leaves that may stand in the queue of pages used once
        self._ghosts_once: Ghosts = OrderedDict()
        self._ghosts_kept: Ghosts = OrderedDict()

    def admit(self, leaf: Leaf) -> bool:
        """Used before, or remembered; what is remembered moves the border."""
        once, kept, step = len(self._ghosts_once), len(self._ghosts_kept), 1 / max(1, self.pages)
        if self._ghosts_once.pop(leaf.key, 0) is None:
            self._share = min(1.0, self._share + step * max(1.0, kept / once))
            return True
        if self._ghosts_kept.pop(leaf.key, 0) is None:
            self._share = max(0.0, self._share - step * max(1.0, once / kept))
            return True
        return leaf.uses > 0

    def giver(self) -> Queue:
        """The queue that exceeds its share."""
        if self.once and (len(self.once) > self._share * len(self) or not self.kept):
            return self.once
        return self.kept or self.once

    def left(self, leaf: Leaf) -> None:
        """Remember it, by queue."""
        _remember(self._ghosts_kept if leaf.kept else self._ghosts_once, leaf.key, self.pages)


def _inferred(page: Page, child: Leaf) -> int:
    """How often ``page`` was used at least, now that its last child left: see the top of this file."""
    return child.uses + max(0, child.turns - page.turns) + (page.used_ms > child.used_ms)


def _remember(ghosts: Ghosts, key: int, pages: int) -> None:
    ghosts.pop(key, 0)
    ghosts[key] = None
    while len(ghosts) > pages:
        ghosts.popitem(last=False)


# By name: a node's, and those that only the simulator runs.
POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {**eviction.POLICIES, "slru": Slru, "s3fifo": S3Fifo, "arc": Arc}
)


def make_policy(name: str, capacity_pages: int) -> EvictionPolicy:
    """A policy by name.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in POLICIES:
        raise InvalidRequest("policy", f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](capacity_pages)
