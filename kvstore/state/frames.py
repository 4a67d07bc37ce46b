"""Frames: which are free, which extents they belong to, and what leaves when there are too few.

A segment is a row of equal *positions*. A position is carved into an *extent* of one frame class when that class needs
frames; an extent number is never used twice. When no position is left, a class evicts its own coldest pages or takes
an extent from a class whose coldest page is much colder (or that is idle), always leaving every active class one.
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
SORTED_MAX = 1024  # of more free frames those that were freed first are taken, without a look at their runs
TOGETHER_TOKENS = 256  # pages of a chain are judged one by one where they are this long; shorter ones together


class Extent:
    """Frames of one carved position. 19 bytes of state per frame; everything else is in the records.

    ``children`` and ``owner`` are a byte per frame as long as their numbers fit, then two, then four.
    """

    def __init__(self, number: int, position: int, pool: ClassPool, slot_base: int) -> None:
        self.number = number
        self.position = position
        self.pool = pool
        self.slot_base = slot_base  # of its frames in the pool's eviction policy
        self.frames = pool.frames_per_extent
        self.generation = array("Q", bytes(8 * self.frames))
        self.state = bytearray(self.frames)
        self.children = array("B", bytes(self.frames))
        self.owner = array("B", bytes(self.frames))  # number of the page's root, see ``Tenants``; 0: none
        self.span = array("Q", bytes(8 * self.frames))  # of the page, see ``model.prefix``
        self.free: deque[int] = deque(range(self.frames))
        self.sealed = 0
        self.closed = False  # its device takes no more writes: what is there is read, nothing is granted
        self.leaving = False  # it is being emptied, see ``tiering.extent_reclaim``: nothing is granted
        self.late = False  # its device does not answer now: nothing is granted until it does

    def count(self, state: FrameState) -> int:
        """Frames in ``state``."""
        return self.state.count(state)

    def alike(self, frame: int, most: int) -> int:
        """How many frames before this one, at most ``most``, have a page of the same root, on which one thing hangs."""
        for values, value in ((self.state, _SEALED), (self.children, 1), (self.owner, self.owner[frame])):
            before = values[max(0, frame - most) : frame]
            if isinstance(before, bytearray) or before.typecode == "B":
                most = len(before) - len(bytes(before).rstrip(bytes((value,))))
            else:
                most = next((back for back, other in enumerate(reversed(before)) if other != value), len(before))
        return most

    def hang(self, frame: int, children: int) -> None:
        """Set how many children the page in this frame has."""
        try:
            self.children[frame] = children
        except OverflowError:
            self.children = _wider(self.children)
            self.hang(frame, children)

    def own(self, frame: int, owner: int) -> None:
        """The page in this frame is, or will be, of the root with that number."""
        try:
            self.owner[frame] = owner
        except OverflowError:
            self.owner = _wider(self.owner)
            self.own(frame, owner)

    def release(self, frames: Iterable[int]) -> None:
        """These frames are free again."""
        self.free.extend(frames)
        if self.grants:
            self.pool.roomy[self.number] = self

    def take(self, count: int) -> list[int]:
        """Up to ``count`` of its free frames, ascending: the shortest runs first, so that long ones last."""
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
        """Exactly these frames are free: for start."""
        self.free = deque(free)
        self.pool.roomy.pop(self.number, None)
        if free and self.grants:
            self.pool.roomy[self.number] = self

    @property
    def grants(self) -> bool:
        """Its free frames may be granted."""
        return not (self.closed or self.leaving or self.late)

    def close(self) -> None:
        """From here on no frame of it is granted."""
        self.closed = True
        self.pool.roomy.pop(self.number, None)

    def wait(self, late: bool) -> None:
        """Its device does not answer, so that no frame of it is granted; or it answers again."""
        self.late = late
        self.restore(list(self.free))

    def leave(self, leaving: bool) -> None:
        """Mark the extent as about to be emptied, so that none of its frames is granted; or take that back."""
        self.leaving = leaving
        self.restore(list(self.free))


def _wider(numbers: array[int]) -> array[int]:
    return array({"B": "H", "H": "I"}[numbers.typecode], numbers)


def narrowest(numbers: npt.NDArray[np.uint32]) -> array[int]:
    """These numbers in as few bytes each as hold them."""
    kind = np.min_scalar_type(numbers.max(initial=0)).char
    return array(kind, numbers.astype(kind).tobytes())


@dataclass
class ClassPool:
    """All extents of one frame class and the eviction order over them."""

    frame_class: FrameClass
    frames_per_extent: int
    policy: EvictionPolicy
    # Cold pages taken out of the policy because they are about to leave, slot -> last use when they were (ms):
    # those whose chain has to be saved to the tier below first, and those that may go at once.
    unsaved: dict[int, int] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    extents: dict[int, Extent] = field(default_factory=dict)
    by_base: dict[int, Extent] = field(default_factory=dict)  # slot_base // frames_per_extent -> extent
    spare_bases: list[int] = field(default_factory=list)  # of extents that were given up
    roomy: dict[int, Extent] = field(default_factory=dict)  # those that frames can be taken from, by number
    granted_ahead: int = 0  # RESERVED frames without a key, over all sessions
    used_ns: int = 0  # when frames of this class were last asked for

    def locate(self, slot: int) -> tuple[Extent, int]:
        """The frame behind a slot of the policy."""
        return self.by_base[slot // self.frames_per_extent], slot % self.frames_per_extent

    def offer(self, slot: int, page: Page) -> None:
        """Nothing hangs on this page any more: it may be evicted."""
        self.policy.add(slot, page)

    def withdraw(self, slot: int) -> None:
        """Something hangs on this page: it may not be evicted. No-op where it was not offered."""
        self.policy.remove(slot)
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)

    def forget(self, slot: int, key: int | None) -> None:
        """The page is gone. ``key``: see ``EvictionPolicy.forget``."""
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)
        self.policy.forget(slot, key)

    def forget_tail(self, tail: Tail) -> int:
        """A leaf is gone, and some pages before it. Returns how many: see ``EvictionPolicy.forget_tail``."""
        slot = tail.slots[-1]
        self.unsaved.pop(slot, None)
        self.ready.pop(slot, None)
        stretch = TOGETHER_TOKENS // self.frame_class.page_tokens
        return self.policy.forget_tail(tail, position_of(tail.standings[-1]) % stretch if stretch > 1 else 0)

    def offered(self, slot: int) -> bool:
        """Nothing hangs on this page: it may be evicted, now or when its chain is saved."""
        return slot in self.policy or slot in self.ready or slot in self.unsaved

    @property
    def frames(self) -> int:
        """Frames in all extents of this class."""
        return len(self.extents) * self.frames_per_extent

    @property
    def free(self) -> int:
        """Frames that can be taken."""
        return sum(len(extent.free) for extent in self.roomy.values())

    def take(self, count: int, avoid: Extent | None = None) -> list[tuple[Extent, list[int]]]:
        """Up to ``count`` free frames, ascending inside an extent so that one copy serves a run of them."""
        taken: list[tuple[Extent, list[int]]] = []
        for extent in sorted(self.roomy.values(), key=lambda e: len(e.free), reverse=True):
            if extent is avoid or count == 0:
                continue
            frames = extent.take(count)
            taken.append((extent, frames))
            count -= len(frames)
            if not extent.free:
                del self.roomy[extent.number]
        return taken


class ExtentNumbers:
    """Hands out extent numbers, none of them twice."""

    def __init__(self) -> None:
        self._next = 1

    def draw(self) -> int:
        """The next number."""
        self._next += 1
        return self._next - 1

    def skip(self, number: int) -> None:
        """Numbers below this one were used before."""
        self._next = max(self._next, number)


class Segment:
    """Positions of one tier and the classes they are carved for. Pure bookkeeping; see ``NodeState``.

    Args:
        frames_in: frames of a class in an extent; by default frames are contiguous, with nothing between them.
        stride: bytes that a page of a class takes there, with what stands before it; by default those of its frame.
        numbers: where extent numbers come from; the tiers of a node share one.
        policy: name of the eviction policy of every class.
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
        self._frames_in = frames_in or frames_side_by_side
        self.stride = stride
        self.populated: set[int] = set()
        self.failed: set[int] = set()
        self.tables: dict[FrameClass, int] = {}  # extents of a class that this event may carve; absent: any number
        self.quarantined: dict[int, set[int]] = {}  # position -> sessions that may still write there
        self.vacant: set[int] = set(range(positions))
        self.bound = positions  # positions from here on are given back: a smaller node has taken over
        self.beyond: set[int] = set()  # those that hold nothing any more
        self.extents: dict[int, Extent] = {}
        self.pools: dict[FrameClass, ClassPool] = {}

    def frames_per_extent(self, frame_class: FrameClass) -> int:
        """0 where a page does not fit an extent."""
        return self._frames_in(self.extent_bytes, frame_class)

    def pool(self, frame_class: FrameClass) -> ClassPool:
        """The pool of a class, made on first use (without extents). Clients may name very
        many classes: those that never got an extent, or lost their last one, are forgotten, except the newest."""
        pool = self.pools.get(frame_class)
        if pool is None:
            if len(self.pools) >= CLASSES_MAX:
                for other in [other for other, pool in self.pools.items() if not pool.extents][:-CLASSES_KEPT]:
                    del self.pools[other]
            frames = self.frames_per_extent(frame_class)
            policy = POLICIES[self.policy](0)  # grows with its extents: a class that clients only name has none
            pool = self.pools[frame_class] = ClassPool(frame_class, frames, policy)
        return pool

    def ahead_max(self, pool: ClassPool) -> int:
        """How many frames of a class may be granted ahead, over all sessions. While it can grow, that is a share of
        what it can become, as far as frames are free by now: nothing leaves, and nothing is carved, for these."""
        grown = pool.frames + len(self.vacant & self.populated) * pool.frames_per_extent
        free = min(grown // GRANTED_AHEAD_SHARE, pool.free + pool.granted_ahead)
        return max(pool.frames // GRANTED_AHEAD_SHARE, free)

    def may_carve(self, pool: ClassPool) -> bool:
        """There is memory for the tables of another extent of that class."""
        return self.tables.get(pool.frame_class, 1) > 0

    def next_vacant(self, pool: ClassPool) -> int | None:
        """A position to carve; only where memory is allocated, so that no client can fault on a full tmpfs."""
        return min(self.vacant & self.populated, default=None) if self.may_carve(pool) else None

    def carve(self, pool: ClassPool, position: int, number: int | None = None) -> Extent:
        """Give a vacant position to a class. ``number`` only at recovery."""
        if number is None:
            number = self.numbers.draw()
        self.vacant.discard(position)
        self.beyond.discard(position)
        if pool.frame_class in self.tables:
            self.tables[pool.frame_class] -= 1
        base = pool.spare_bases.pop() if pool.spare_bases else len(pool.by_base)
        extent = Extent(number, position, pool, base * pool.frames_per_extent)
        pool.by_base[base] = extent
        pool.extents[number] = self.extents[number] = pool.roomy[number] = extent
        pool.policy.resize(pool.frames)
        return extent

    def fail(self, positions: list[int]) -> None:
        """There is no memory for these positions. What is carved there stays."""
        gone = [position for position in positions if position in self.vacant]
        self.vacant.difference_update(gone)
        self.failed.update(gone)
        self.populated.difference_update(positions)

    def uncarve(self, extent: Extent) -> None:
        """Take an extent whose frames are all free out of its class; the position is vacant again."""
        assert extent.count(_FREE) == extent.frames
        pool = extent.pool
        base = extent.slot_base // pool.frames_per_extent
        del pool.by_base[base], pool.extents[extent.number], self.extents[extent.number]
        pool.spare_bases.append(base)
        pool.roomy.pop(extent.number, None)
        self._vacate(extent.position)
        pool.policy.resize(pool.frames)

    def limit(self, bound: int) -> None:
        """For start: positions from ``bound`` on are not carved any more. What is there stays until it is moved."""
        self.bound = bound
        self.beyond = {position for position in self.vacant if position >= bound}
        self.vacant -= self.beyond

    def _vacate(self, position: int) -> None:
        (self.vacant if position < self.bound else self.beyond).add(position)

    def quarantine(self, held: Mapping[int, Iterable[int]]) -> None:
        """For start: these vacant positions are not carved before each of these sessions has ended."""
        for position, sessions in held.items():
            if position in self.vacant | self.beyond and sessions:
                self.vacant.discard(position)
                self.beyond.discard(position)
                self.quarantined[position] = set(sessions)

    def session_ended(self, session: int) -> bool:
        """This session writes nothing more. True where a position is vacant again by it."""
        done = [position for position, sessions in self.quarantined.items() if sessions == {session}]
        for sessions in self.quarantined.values():
            sessions.discard(session)
        for position in done:
            del self.quarantined[position]
            self._vacate(position)
        return bool(done)

    def donor(
        self, taker: ClassPool, coldest_ns: Callable[[ClassPool], int | None], leased: set[int], now_ns: int
    ) -> Extent | None:
        """The extent another class should give up for ``taker``, or None where evicting its own pages is fairer.

        An empty extent is given first, whichever class has it. Else one class with the coldest pages gives, if it
        keeps an extent or has been idle for ``IDLE_NS``; a taker that has extents of its own takes only from a class
        whose coldest page is more than twice as old as its own (so that two busy classes do not trade extents back and
        forth). Extents with ``leased`` or unsealed frames stay.
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
        """Empty extents of other classes that may give one."""
        givers = [pool for pool in self.pools.values() if pool is not taker and self._may_give(pool, now_ns)]
        return [extent for pool in givers for extent in pool.roomy.values() if len(extent.free) == extent.frames]

    def _may_give(self, pool: ClassPool, now_ns: int) -> bool:
        """True for a class that keeps an extent, or whose frames were not asked for during ``IDLE_NS``."""
        return len(pool.extents) > 1 or (bool(pool.extents) and now_ns - pool.used_ns > IDLE_NS)


CLASSES_MAX, CLASSES_KEPT = 1024, 64  # a class costs some 20 KiB, and every event looks at each
GRANTED_AHEAD_SHARE = 8  # one frame in this many; what a put needs now is not bounded by it
IDLE_NS = 600 * 10**9  # a class that was not asked for in ten minutes may lose its last extent
STEAL_MARGIN_NS = 100_000_000  # below a tenth of a second, ages are noise


def frames_side_by_side(extent_bytes: int, frame_class: FrameClass) -> int:
    """Frames of a class in an extent that holds nothing else."""
    return extent_bytes // frame_class.frame_bytes
