"""Frames: which frames are free, and which extents and frame classes they belong to.

A segment is a row of equal *positions*. A position is carved into an *extent* of one frame class when that class needs
frames. An extent number is never reused. When no position is vacant, a class evicts its own coldest pages, or takes an
extent from a class that is idle or whose coldest page is much colder. Every active class keeps at least one extent.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import FrameClass, FrameState, position_of
from kvstore.state.eviction import POLICIES, POLICY_DEFAULT, EvictionPolicy, Page
from kvstore.state.eviction.base import Tail

_FREE, _SEALED = FrameState.FREE, FrameState.SEALED
SORTED_MAX = 1024  # with more free frames than this, those freed first are taken, without a search for runs
TOGETHER_TOKENS = 256  # pages with fewer tokens are judged in groups of this many tokens, larger ones one by one


class Extent:
    """The frames of one carved position. 19 bytes of state per frame; everything else is in the records.

    ``children`` and ``owner`` have one byte per frame while their numbers fit, then two, then four.
    """

    def __init__(self, number: int, position: int, pool: ClassPool, slot_base: int) -> None:
        self.number = number
        self.position = position
        self.pool = pool
        self.slot_base = slot_base  # slot of its first frame in the pool's eviction policy
        self.frames = pool.frames_per_extent
        self.generation = array("Q", bytes(8 * self.frames))
        self.state = bytearray(self.frames)
        self.children = array("B", bytes(self.frames))
        self.owner = array("B", bytes(self.frames))  # number of the page's root, see ``Tenants``; 0: none
        self.span = array("Q", bytes(8 * self.frames))  # see ``model.prefix``
        self.free: deque[int] = deque(range(self.frames))
        self.sealed = 0
        self.closed = False  # its device accepts no more writes: pages are read, no frame is granted
        self.leaving = False  # it is being emptied, see ``tiering.extent_reclaim``: no frame is granted
        self.late = False  # its device is not responding: no frame is granted until it does

    def count(self, state: FrameState) -> int:
        """Return the number of frames in ``state``."""
        return self.state.count(state)

    def similar_before(self, frame: int, most: int) -> int:
        """Return how many frames just before this one, up to ``most``, hold a page that has the same root and exactly
        one child."""
        for values, value in ((self.state, _SEALED), (self.children, 1), (self.owner, self.owner[frame])):
            before = values[max(0, frame - most) : frame]
            if isinstance(before, bytearray) or before.typecode == "B":
                most = len(before) - len(bytes(before).rstrip(bytes((value,))))
            else:
                most = next((back for back, other in enumerate(reversed(before)) if other != value), len(before))
        return most

    def set_children(self, frame: int, children: int) -> None:
        """Set the number of children of the page in this frame."""
        try:
            self.children[frame] = children
        except OverflowError:
            self.children = _wider(self.children)
            self.set_children(frame, children)

    def set_owner(self, frame: int, owner: int) -> None:
        """Set the number of the root whose page is, or will be, in this frame."""
        try:
            self.owner[frame] = owner
        except OverflowError:
            self.owner = _wider(self.owner)
            self.set_owner(frame, owner)

    def set_owners(self, frames: slice, owner: int) -> None:
        """Set the number of the root whose pages are in these frames."""
        self.set_owner(frames.start, owner)  # widens the array if necessary
        self.owner[frames] = array(self.owner.typecode, (owner,)) * (frames.stop - frames.start)

    def release(self, frames: Iterable[int]) -> None:
        """Add these frames to the free ones."""
        self.free.extend(frames)
        if self.grants:
            self.pool.extents_with_free[self.number] = self

    def take(self, count: int) -> list[int]:
        """Take up to ``count`` free frames, in ascending order. Short runs come first, so that long ones remain."""
        if count >= len(self.free):
            frames = sorted(self.free)
            self.free.clear()
        elif len(self.free) > SORTED_MAX:
            frames = sorted([self.free.popleft() for _ in range(count)])
        else:
            free = sorted(self.free)
            starts = [place for place, (frame, after) in enumerate(pairwise(free), 1) if after != frame + 1]
            runs = sorted((free[start:stop] for start, stop in pairwise([0, *starts, len(free)])), key=len)
            by_length = [*chain.from_iterable(runs)]
            frames, self.free = sorted(by_length[:count]), deque(by_length[count:])
        return frames

    def restore(self, free: list[int]) -> None:
        """Replace the list of free frames."""
        self.free = deque(free)
        self.pool.extents_with_free.pop(self.number, None)
        if free and self.grants:
            self.pool.extents_with_free[self.number] = self

    @property
    def grants(self) -> bool:
        """True if its free frames may be granted."""
        return not (self.closed or self.leaving or self.late)

    def close(self) -> None:
        """Stop granting frames for good."""
        self.closed = True
        self.pool.extents_with_free.pop(self.number, None)

    def set_late(self, late: bool) -> None:
        """Stop granting frames while the device is not responding (``late``), or grant them again."""
        self.late = late
        self.restore(list(self.free))

    def set_leaving(self, leaving: bool) -> None:
        """Stop granting frames while the extent is being emptied (``leaving``), or grant them again."""
        self.leaving = leaving
        self.restore(list(self.free))


def _wider(numbers: array[int]) -> array[int]:
    return array({"B": "H", "H": "I"}[numbers.typecode], numbers)


def narrowest(numbers: npt.NDArray[np.uint32]) -> array[int]:
    """Return these numbers in an array of the narrowest type that can hold them."""
    kind = np.min_scalar_type(numbers.max(initial=0)).char
    return array(kind, numbers.astype(kind).tobytes())


@dataclass
class ClassPool:
    """All extents of one frame class, and the order in which their pages are evicted.

    Attributes:
        unsaved: cold pages, removed from the policy, that must be saved to the tier below before they are evicted: slot
            -> last use (ms) at the time of removal.
        ready: the same for cold pages that may be evicted at once.
        by_base: ``slot_base // frames_per_extent`` -> extent.
        spare_bases: keys of ``by_base`` that belonged to dropped extents.
        extents_with_free: extents with frames that can be taken, by number.
        granted_ahead: number of RESERVED frames without a key, across all sessions.
        used_ns: when frames of this class were last requested.
    """

    frame_class: FrameClass
    frames_per_extent: int
    policy: EvictionPolicy
    unsaved: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)
    by_base: dict[int, Extent] = field(default_factory=dict)
    spare_bases: list[int] = field(default_factory=list)
    extents_with_free: dict[int, Extent] = field(default_factory=dict)
    granted_ahead: int = 0
    used_ns: int = 0

    def locate(self, slot: int) -> tuple[Extent, int]:
        """Return the extent and frame of a slot."""
        return self.by_base[slot // self.frames_per_extent], slot % self.frames_per_extent

    def offer(self, slot: int, page: Page) -> None:
        """Offer a page without children for eviction."""
        self.policy.add(slot, page)

    def withdraw(self, slot: int) -> None:
        """Stop offering a page that has gained a child. No-op if it is not offered."""
        self.policy.remove(slot)
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)

    def forget(self, slot: int, key: int | None) -> None:
        """Forget a page that was evicted or removed. ``key``: see ``EvictionPolicy.forget``."""
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)
        self.policy.forget(slot, key)

    def forget_tail(self, tail: Tail) -> int:
        """Forget an evicted leaf and some of the pages before it. Return how many preceding pages were forgotten, see
        ``EvictionPolicy``."""
        slot = tail.slots[-1]
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)
        group = TOGETHER_TOKENS // self.frame_class.page_tokens
        return self.policy.forget_tail(tail, position_of(tail.standings[-1]) % group if group > 1 else 0)

    def offered(self, slot: int) -> bool:
        """Return True if the page is offered for eviction, or set aside to leave."""
        return slot in self.policy or slot in self.ready or slot in self.unsaved

    @property
    def frames(self) -> int:
        """Number of frames in all extents of this class."""
        return len(self.extents) * self.frames_per_extent

    @property
    def free(self) -> int:
        """Number of frames that can be taken."""
        return sum(len(extent.free) for extent in self.extents_with_free.values())

    def take(self, count: int, avoid: Extent | None = None) -> list[tuple[Extent, list[int]]]:
        """Take up to ``count`` free frames, in ascending order within an extent, so that one copy serves a run."""
        taken: list[tuple[Extent, list[int]]] = []
        for extent in sorted(self.extents_with_free.values(), key=lambda e: len(e.free), reverse=True):
            if extent is avoid or count == 0:
                continue
            frames = extent.take(count)
            taken.append((extent, frames))
            count -= len(frames)
            if not extent.free:
                del self.extents_with_free[extent.number]
        return taken


class ExtentNumbers:
    """A source of extent numbers that are never reused."""

    def __init__(self) -> None:
        self._next = 1

    def draw(self) -> int:
        """Return the next number."""
        self._next += 1
        return self._next - 1

    def skip(self, number: int) -> None:
        """Skip all numbers lower than ``number``, which were used before."""
        self._next = max(self._next, number)


class Segment:
    """The positions of one tier and the frame classes that they are carved for. Bookkeeping only, see ``NodeState``.

    Args:
        frames_in: returns how many frames of a class fit in an extent; by default frames are contiguous without gaps.
        stride: returns the size in bytes of a page with its header; by default the size of its frame.
        numbers: source of extent numbers, shared by the tiers of a node.
        policy: name of the eviction policy of every class.

    Attributes:
        tables: how many extents of a class this event may carve; a missing class has no limit.
        quarantined: positions that sessions may still write to, with these sessions.
        bound: positions starting at this one are given back, because the node was restarted with less memory.
        beyond: the positions to give back that no longer hold a page.
    """

    def __init__(
        self,
        extent_bytes: int,
        positions: int,
        *,
        frames_in: Callable[[int, FrameClass], int] | None = None,
        stride: Callable[[FrameClass], int] = attrgetter("frame_bytes"),
        numbers: ExtentNumbers | None = None,
        policy: str = POLICY_DEFAULT,
    ) -> None:
        self.extent_bytes = extent_bytes
        self.positions = positions
        self.policy = policy
        self.numbers = numbers if numbers is not None else ExtentNumbers()
        self._frames_in = frames_in or contiguous_frames
        self.stride = stride
        self.populated: set[int] = set()
        self.failed: set[int] = set()
        self.tables: dict[FrameClass, int] = {}
        self.quarantined: dict[int, set[int]] = {}
        self.vacant: set[int] = set(range(positions))
        self.bound = positions
        self.beyond: set[int] = set()
        self.extents: dict[int, Extent] = {}
        self.pools: dict[FrameClass, ClassPool] = {}

    def frames_per_extent(self, frame_class: FrameClass) -> int:
        """Return how many frames of a class fit in one extent; 0 if a page does not fit."""
        return self._frames_in(self.extent_bytes, frame_class)

    def pool(self, frame_class: FrameClass) -> ClassPool:
        """Return the pool of a class. It is created on first use, without extents.

        Clients can name very many classes. Classes without extents are forgotten, except the newest.
        """
        pool = self.pools.get(frame_class)
        if pool is None:
            if len(self.pools) >= CLASSES_MAX:
                for other in [other for other, pool in self.pools.items() if not pool.extents][:-CLASSES_KEPT]:
                    del self.pools[other]
            frames = self.frames_per_extent(frame_class)
            policy = POLICIES[self.policy](0)  # grows with its extents: a class that is only named costs little
            pool = self.pools[frame_class] = ClassPool(frame_class, frames, policy)
        return pool

    def ahead_max(self, pool: ClassPool) -> int:
        """Return how many frames of a class may be granted ahead, across all sessions.

        A class that can grow gets a share of the largest size it could reach, limited to frames that are free now. No
        page is evicted and no extent carved for frames granted ahead.
        """
        grown = pool.frames + len(self.vacant & self.populated) * pool.frames_per_extent
        free = min(grown // GRANTED_AHEAD_SHARE, pool.free + pool.granted_ahead)
        return max(pool.frames // GRANTED_AHEAD_SHARE, free)

    def may_carve(self, pool: ClassPool) -> bool:
        """Return True if there is memory for the tables of another extent of that class."""
        return self.tables.get(pool.frame_class, 1) > 0

    def next_vacant(self, pool: ClassPool) -> int | None:
        """Return a position to carve; None if there is none.

        Only positions with allocated memory are used, so that no client can fault on a full tmpfs.
        """
        return min(self.vacant & self.populated, default=None) if self.may_carve(pool) else None

    def carve(self, pool: ClassPool, position: int, number: int | None = None) -> Extent:
        """Give a vacant position to a class. ``number`` is set only at recovery."""
        if number is None:
            number = self.numbers.draw()
        self.vacant.discard(position)
        self.beyond.discard(position)
        if pool.frame_class in self.tables:
            self.tables[pool.frame_class] -= 1
        base = pool.spare_bases.pop() if pool.spare_bases else len(pool.by_base)
        extent = Extent(number, position, pool, base * pool.frames_per_extent)
        pool.by_base[base] = extent
        pool.extents[number] = self.extents[number] = pool.extents_with_free[number] = extent
        pool.policy.resize(pool.frames)
        return extent

    def fail(self, positions: list[int]) -> None:
        """Mark these positions as having no memory. Extents that are carved there stay."""
        vacant = self.vacant.intersection(positions)
        self.vacant -= vacant
        self.failed |= vacant
        self.populated.difference_update(positions)

    def uncarve(self, extent: Extent) -> None:
        """Take an entirely free extent away from its class. Its position is vacant again."""
        assert extent.count(_FREE) == extent.frames
        pool = extent.pool
        base = extent.slot_base // pool.frames_per_extent
        del pool.by_base[base], pool.extents[extent.number], self.extents[extent.number]
        pool.spare_bases.append(base)
        pool.extents_with_free.pop(extent.number, None)
        self._vacate(extent.position)
        pool.policy.resize(pool.frames)

    def limit(self, bound: int) -> None:
        """At startup, stop carving positions starting at ``bound``. Pages there stay until they are moved."""
        self.bound = bound
        self.beyond = {position for position in self.vacant if position >= bound}
        self.vacant -= self.beyond

    def _vacate(self, position: int) -> None:
        (self.vacant if position < self.bound else self.beyond).add(position)

    def quarantine(self, writers: Mapping[int, Iterable[int]]) -> None:
        """At startup, keep vacant positions from being carved until all their sessions have ended."""
        for position, sessions in writers.items():
            if position in self.vacant | self.beyond and sessions:
                self.vacant.discard(position)
                self.beyond.discard(position)
                self.quarantined[position] = set(sessions)

    def session_ended(self, session: int) -> bool:
        """Remove a session from quarantine. Return True if this makes a position vacant again."""
        released = [position for position, sessions in self.quarantined.items() if sessions == {session}]
        for sessions in self.quarantined.values():
            sessions.discard(session)
        for position in released:
            del self.quarantined[position]
            self._vacate(position)
        return bool(released)

    def donor(
        self, taker: ClassPool, coldest_ns: Callable[[ClassPool], int | None], leased: set[int], now_ns: int
    ) -> Extent | None:
        """Return the extent that another class should give up for ``taker``; None if ``taker`` should evict instead.

        An empty extent of any class is preferred. Otherwise the class with the coldest pages gives one, if it keeps
        another extent or was idle for ``IDLE_NS``. A taker that has extents takes only from a class whose coldest page
        is more than twice as old as its own, so that two busy classes do not trade extents back and forth. Extents
        with ``leased`` frames, or with frames that are neither free nor sealed, stay.
        """
        for extent in self.empty(taker, now_ns):
            if extent.number not in leased:
                return extent
        own = coldest_ns(taker) if taker.extents else None
        own_age = now_ns - own if own is not None else 0
        givers: list[tuple[int, int, ClassPool]] = []
        for number, pool in enumerate(self.pools.values()):
            if pool is taker or not self._may_give(pool, now_ns):
                continue
            coldest = coldest_ns(pool)
            age = now_ns - coldest if coldest is not None else (IDLE_NS if pool.free else 0)
            if own is None or age >= 2 * own_age + STEAL_MARGIN_NS:
                givers.append((age, number, pool))
        for _, _, pool in sorted(givers, key=lambda giver: giver[:2], reverse=True):
            candidates = [
                extent
                for extent in pool.extents.values()
                if extent.grants
                and extent.number not in leased
                and extent.count(_FREE) + extent.sealed == extent.frames
            ]
            if candidates:
                return min(candidates, key=lambda extent: extent.sealed)
        return None

    def empty(self, taker: ClassPool, now_ns: int) -> list[Extent]:
        """Return the empty extents of all other classes that may give up an extent."""
        givers = [pool for pool in self.pools.values() if pool is not taker and self._may_give(pool, now_ns)]
        return [
            extent for pool in givers for extent in pool.extents_with_free.values() if len(extent.free) == extent.frames
        ]

    def _may_give(self, pool: ClassPool, now_ns: int) -> bool:
        """Return True if the class would keep another extent, or none of its frames was requested during
        ``IDLE_NS``."""
        return len(pool.extents) > 1 or (bool(pool.extents) and now_ns - pool.used_ns > IDLE_NS)


CLASSES_MAX, CLASSES_KEPT = 1024, 64  # a class costs about 20 KiB, and every event looks at each class
GRANTED_AHEAD_SHARE = 8  # one frame in this many may be granted ahead; frames for a put are not limited by this
IDLE_NS = 600 * 10**9  # a class without requests for ten minutes may lose its last extent
STEAL_MARGIN_NS = 100_000_000  # differences of ages below a tenth of a second are noise


def contiguous_frames(extent_bytes: int, frame_class: FrameClass) -> int:
    """Return how many contiguous frames of a class fit in an extent."""
    return extent_bytes // frame_class.frame_bytes
