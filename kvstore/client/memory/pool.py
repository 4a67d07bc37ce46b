"""Pool: what a store in memory holds, and which of it leaves to make room.

Plain dicts under one lock. The rules are those of a node. A page is sealed only behind its sealed parent, and leaves
only when nothing hangs on it, so that a chain never has a gap. What is leased, pinned or about to get a child stays. A
hit is proven by comparing root, key and token ids. Nobody writes to a page, so that a view of it is right for as
long as somebody holds it.

Worked example: room is needed while chains A1 A2 A3 and B1 B2 are stored, B was used last, and A3 is leased. A1 and A2
have children, A3 may not leave, so B2 leaves, then B1.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvstore.client.match import ABSENT, IDENTITY
from kvstore.client.store import AFTER_FORK
from kvstore.errors import InvalidRequest
from kvstore.model.prefix import Keys
from kvstore.model.replica import FRAME_ALIGN

EVENTS_MAX: Final = 16384

Bytes = npt.NDArray[np.uint8]
Name = tuple[bytes, bytes]
"""Root and key of a page."""


@dataclass(frozen=True)
class RootOwner:
    """Whose the pages of a root are."""

    salt: str
    adapter: str
    model: str
    layout: dict[str, Any] | None  # None: they hold objects
    fingerprint: str = ""


@dataclass(eq=False, slots=True)
class MemoryPage:
    """A sealed page, or the value of an object: from ``MemoryPool.add`` until ``drop``. Its bytes never change."""

    name: Name
    parent: Name | None  # None: the first of its chain
    proof: bytes  # key, root, extra and token ids; of an object its key
    data: Bytes
    tokens: int
    position: int
    used_ns: int
    hint: int = 0  # shown, but this store evicts by time alone
    children: int = 0
    leases: int = 0
    pins: int = 0


@dataclass(eq=False, slots=True)
class Frame:
    """A page that the shards of one group are writing: from ``MemoryPool.reserve`` until all have sealed it, one has
    given it up, or its deadline."""

    name: Name
    parent: Name | None
    proof: bytes
    data: Bytes
    tokens: int
    position: int
    owner: RootOwner
    group: int
    shards: int
    until_ns: int
    hint: int = 0
    writers: set[int] = field(default_factory=set)  # shards that have a writer now
    sealed: set[int] = field(default_factory=set)
    progress: dict[int, int] = field(default_factory=dict)  # shard -> leading layers written
    ended: bool = False

    def shows(self, layer: int) -> bool:
        """Whether every shard has written this layer."""
        return len(self.progress) == self.shards and min(self.progress.values()) > layer


@dataclass(slots=True)
class MemoryHold:
    """A lease or a pin: pages that stay until a deadline."""

    pages: list[MemoryPage]
    until_ns: int


class MemoryPool:
    """Pages by name, the least recently used first. Threads may share it: everything but ``check_open`` is called
    inside ``with pool.held()``."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes: Final = capacity_bytes
        self.used_bytes = 0
        self.pages: OrderedDict[Name, MemoryPage] = OrderedDict()
        self.frames: dict[Name, list[Frame]] = {}  # in the order in which they were reserved
        self.leases: dict[int, MemoryHold] = {}
        self.pins: dict[int, MemoryHold] = {}
        self.owners: dict[bytes, RootOwner] = {}  # of roots that have a page
        self.counters: Counter[str] = Counter()
        self.misses: Counter[str] = Counter()
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self.last_event = 0
        self.started_ns: Final = time.monotonic_ns()
        self.closed = False
        self._pages_of: Counter[bytes] = Counter()  # pages of each root
        self._waiting: Counter[Name] = Counter()  # frames that hang on each page
        self._pid: Final = os.getpid()
        self._lock = threading.RLock()

    def check_open(self) -> None:
        """Raises InvalidRequest where the store is closed, or this is a forked child."""
        if os.getpid() != self._pid:
            raise InvalidRequest("store", AFTER_FORK.format(self._pid))
        if self.closed:
            raise InvalidRequest("store", "is closed")

    @contextmanager
    def held(self) -> Iterator[int]:
        """Nobody else looks or changes anything meanwhile; what has run out is over. Gives the time (monotonic ns)."""
        self.check_open()
        with self._lock:
            self.check_open()
            now_ns = time.monotonic_ns()
            self._expire(now_ns)
            yield now_ns

    def close(self) -> None:
        """Forget everything; views that somebody holds stay right."""
        if os.getpid() == self._pid:
            with self._lock:
                self.closed = True
                self.pages.clear()
                self.frames.clear()

    # --- finding ----------------------------------------------------------------------------------------------------

    def prefix(self, keys: Keys) -> tuple[list[MemoryPage], str]:
        """The leading pages of ``keys`` that are stored, proven, and why not more ("" where all)."""
        found: list[MemoryPage] = []
        for name, proof in named(keys):
            page = self.pages.get(name)
            if page is None or page.proof != proof:
                return found, ABSENT if page is None else IDENTITY
            found.append(page)
        return found, ""

    def position_behind(self, parent: Name | None) -> int:
        """Place in its chain of a page that hangs on this one."""
        page = self.pages.get(parent) if parent is not None else None
        return page.position + 1 if page is not None else 0

    def use(self, pages: Sequence[MemoryPage], now_ns: int) -> None:
        """Mark pages of a chain as used: its end will leave first."""
        for page in reversed(pages):
            page.used_ns = now_ns
            if self.pages.get(page.name) is page:
                self.pages.move_to_end(page.name)

    def missed(self, reason: str) -> None:
        """Count why a match ended early."""
        if reason:
            self.misses[reason] += 1

    # --- storing ----------------------------------------------------------------------------------------------------

    def add(self, page: MemoryPage, owner: RootOwner) -> None:
        """Seal a page whose room was made. Its parent is sealed."""
        self.pages[page.name] = page
        self.owners[page.name[0]] = owner
        self._pages_of[page.name[0]] += 1
        if page.parent is not None:
            self.pages[page.parent].children += 1
        self.counters["pages_sealed"] += 1
        self.tell("sealed", page, "")

    def drop(self, page: MemoryPage, kind: str, reason: str) -> None:
        """Let a page leave that nothing hangs on."""
        root = page.name[0]
        del self.pages[page.name]
        self.used_bytes -= room_of(page.data)
        self._pages_of[root] -= 1
        if not self._pages_of[root]:
            del self._pages_of[root]
        if page.parent is not None:
            self.pages[page.parent].children -= 1
        self.counters[f"{kind}_{reason}"] += 1
        self.tell(kind, page, reason)
        if root not in self._pages_of:
            del self.owners[root]

    def why_not(self, page: MemoryPage) -> str:
        """Why a page may not leave now; "" where it may."""
        if page.leases:
            return "leased"
        if page.pins:
            return "pinned"
        if self._waiting[page.name]:
            return "held"
        return "children" if page.children else ""

    def make_room(self, size: int, behind: Name | None = None) -> bool:
        """Take room of ``size`` bytes, for a page that will hang on ``behind``; False where it cannot be had. Those
        used longest ago leave first."""
        if size > self.capacity_bytes:
            return False
        while self.used_bytes + size > self.capacity_bytes:
            victim = next((p for p in self.pages.values() if p.name != behind and not self.why_not(p)), None)
            if victim is None:
                return False
            self.drop(victim, "evicted", "space")
        self.used_bytes += size
        return True

    # --- writing layer by layer -------------------------------------------------------------------------------------

    def reserve(self, frame: Frame, shard: int) -> Frame | None:
        """A frame for this shard: that of its group, or a new one, as described by ``frame``. None: there is no room,
        or no parent, or that shard has a writer already."""
        ours = next((f for f in self.frames.get(frame.name, ()) if f.group == frame.group), None)
        if ours is None:
            parent = frame.parent
            if parent is not None and parent not in self.pages and parent not in self.frames:
                return None
            if not self.make_room(room_of(frame.data), parent):
                return None
            ours = frame
            self.frames.setdefault(frame.name, []).append(ours)
            if parent is not None:
                self._waiting[parent] += 1
        elif shard in ours.writers or shard in ours.sealed or ours.shards != frame.shards:
            return None
        ours.writers.add(shard)
        ours.until_ns = max(ours.until_ns, frame.until_ns)
        return ours

    def seal(self, frame: Frame, shard: int, now_ns: int) -> bool:
        """One shard is done; with the last one the page is stored. False: it is not, and will not be by this frame."""
        if frame.ended:
            return False
        frame.writers.discard(shard)
        frame.sealed.add(shard)
        if len(frame.sealed) < frame.shards:
            return True
        fits = frame.name not in self.pages and (frame.parent is None or frame.parent in self.pages)
        if not fits:
            self.give_up(frame)
            return False
        self._unlist(frame)
        frame.data.flags.writeable = False
        page = MemoryPage(
            frame.name, frame.parent, frame.proof, frame.data, frame.tokens, frame.position, now_ns, frame.hint
        )
        self.add(page, frame.owner)
        return True

    def give_up(self, frame: Frame) -> None:
        """Give back what a frame takes; whatever its shards have written is lost."""
        if not frame.ended:
            self.used_bytes -= room_of(frame.data)
            self._unlist(frame)

    def _unlist(self, frame: Frame) -> None:
        frame.ended = True
        others = self.frames[frame.name]
        others.remove(frame)
        if not others:
            del self.frames[frame.name]
        if frame.parent is not None:
            self._waiting[frame.parent] -= 1
            if not self._waiting[frame.parent]:
                del self._waiting[frame.parent]

    # --- leases and pins --------------------------------------------------------------------------------------------

    def end_lease(self, number: int) -> None:
        """Let go of leased pages. One that has ended already is fine."""
        hold = self.leases.pop(number, None)
        for page in hold.pages if hold is not None else ():
            page.leases -= 1

    def end_pin(self, number: int) -> None:
        """Let go of pinned pages."""
        for page in self.pins.pop(number).pages:
            page.pins -= 1

    def _expire(self, now_ns: int) -> None:
        for number in [number for number, lease in self.leases.items() if lease.until_ns <= now_ns]:
            self.end_lease(number)
        for number in [number for number, pin in self.pins.items() if pin.until_ns <= now_ns]:
            self.end_pin(number)
        if self.frames:
            for frame in [f for frames in self.frames.values() for f in frames if f.until_ns <= now_ns]:
                self.give_up(frame)

    def tell(self, kind: str, page: MemoryPage, reason: str) -> None:
        """Note what happened to a page."""
        self.last_event += 1
        tenants = [self.owners[page.name[0]].salt]
        self.events.append(
            {
                "seq": self.last_event,
                "time_ns": time.time_ns(),
                "kind": kind,
                "tier": "dram",
                "reason": reason,
                "keys": [page.name[1].hex()],
                "tenants": tenants,
            }
        )

    # --- laws -------------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        """One line per law that does not hold: closure, counts of children, bytes."""
        children: Counter[Name] = Counter(p.parent for p in self.pages.values() if p.parent is not None)
        wrong = [f"{p.name[1].hex()}: its parent is not stored" for p in self.pages.values() if not self._rooted(p)]
        for page in self.pages.values():
            if page.children != children[page.name]:
                wrong.append(f"{page.name[1].hex()}: {page.children} children, {children[page.name]} are stored")
        arrays = [page.data for page in self.pages.values()]
        arrays += [frame.data for frames in self.frames.values() for frame in frames]
        used = sum(room_of(data) for data in arrays)
        if used != self.used_bytes or used > self.capacity_bytes:
            wrong.append(f"{used} bytes are in use, {self.used_bytes} were counted, {self.capacity_bytes} may be")
        return wrong

    def _rooted(self, page: MemoryPage) -> bool:
        return page.parent is None or page.parent in self.pages


def named(keys: Keys) -> Iterator[tuple[Name, bytes]]:
    """Name and proof of each page of ``keys``."""
    rows, width = keys.identity_bytes, len(keys.identity_bytes) // max(1, len(keys))
    return (((keys.root, key), rows[i * width : (i + 1) * width]) for i, key in enumerate(keys.hashes))


def before(keys: Keys) -> Name | None:
    """The page before the first one of ``keys``; None where that is the first of its chain."""
    return (keys.root, keys.parent) if keys.parent != keys.root else None


def room_of(data: Bytes) -> int:
    """What a page takes: as in a node, a multiple of 4 KiB, and never nothing."""
    return max(1, -(-data.nbytes // FRAME_ALIGN)) * FRAME_ALIGN
