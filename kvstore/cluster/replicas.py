"""Second copies of pages: to which node each one goes, and which ones are owed. No I/O.

**Target.** A copy goes to a node on another machine, in another zone if the pool has one. Among the nodes that remain,
those that already have the page's parent are preferred, because a node stores a page only after its parent. Otherwise
rendezvous hashing chooses, weighted by capacity: a node with twice the capacity receives twice the pages, and a node
that joins takes its share of later pages only. Worked example, a node of machine m1 and zone z1::

    other nodes             a (m1, z1)   b (m2, z1)   c (m3, z2)   d (m4, z2, draining)
    may have the copy                                 c

Without c, the copy goes to b. Without b and c, it goes nowhere, unless ``same_machine`` allows a.

**Owed copies.** A second copy is owed from the seal of the page until another node has stored the page. The queue is in
memory. The queue is bounded, and can always be rebuilt: records say which pages want a second copy, and the directory
says which of them another node has. Life of a run of pages::

    owe ──> waiting ──next──> under way ──settle──> (all pages copied, or gone)
               ^                  │
               └─────postpone─────┘   for a growing pause

A run whose parent page is owed as well waits until the parent's run has ended, because a node stores a page only after
its parent. All other runs may be under way at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final

import xxhash

OWED_MAX: Final = 1 << 18  # pages in the queue
PAUSE_S_MIN: Final = 0.1  # before a run is tried again; doubles with each try
PAUSE_S_MAX: Final = 5.0
REFUSED_TRIES: Final = 4  # about 0.7 s; by then the pool lists a node that has just started or has been replaced


@dataclass(frozen=True)
class Site:
    """A node as a place for copies.

    Attributes:
        machine: id of its machine; "" if unknown.
        zone: its zone; "" if unknown.
        capacity_bytes: of all its tiers.
        draining: whether it is about to leave.
    """

    name: str
    machine: str
    zone: str = ""
    capacity_bytes: int = 1
    draining: bool = False


def choose_target(
    mine: Site,
    others: Iterable[Site],
    anchor: bytes,
    parent_nodes: Collection[str] = (),
    same_machine: bool = False,
) -> str | None:
    """Return the node that receives the second copy of a page; None if no node may.

    Args:
        mine: the node that has the page.
        others: the nodes that are alive. ``mine`` may be among them.
        anchor: the name of the copy for rendezvous hashing, such as the page's key.
        parent_nodes: nodes that have the page's parent.
        same_machine: whether nodes of this machine may have the copy if there is no other machine.
    """
    sites = [each for each in others if each.name != mine.name and not each.draining]
    apart = [each for each in sites if not _is_same(each.machine, mine.machine)]
    sites = apart or (sites if same_machine else [])
    sites = [each for each in sites if each.zone and mine.zone and each.zone != mine.zone] or sites
    sites = [each for each in sites if each.name in parent_nodes] or sites
    return min(sites, key=lambda each: _distance(anchor, each)).name if sites else None


def _is_same(machine: str, other: str) -> bool:
    """Return whether two nodes may be on one machine. A node of an earlier version does not say where it is."""
    return not machine or not other or machine == other


def _distance(anchor: bytes, site: Site) -> tuple[float, str]:
    """Return the distance between an anchor and a node. The nearest node is chosen, with a probability in proportion to
    its weight (weighted rendezvous hashing: an exponential variable of rate ``weight``)."""
    digest = xxhash.xxh3_64_intdigest(anchor + site.name.encode())
    uniform = (digest + 1) / (1 << 64)  # above 0, at most 1
    return -math.log(uniform) / max(1, site.capacity_bytes), site.name


@dataclass(slots=True)
class OwedRun:
    """Consecutive pages of one chain whose second copy is owed.

    Attributes:
        keys: the pages that are not copied yet, in order.
        page_bytes: size of each page.
        tries: tries in a row that copied nothing.
        reason: why the last try copied nothing, or "".
        refused: nodes that had no space for the pages.
    """

    number: int
    keys: list[bytes]
    page_bytes: int
    tries: int = 0
    reason: str = ""
    refused: tuple[str, ...] = ()


class OwedCopies:
    """The queue of owed copies, see the module. Not thread-safe. The caller passes the time, always of the same clock.

    Args:
        pages_max: the limit of the queue. Pages beyond it are dropped, see ``dropped``.

    Attributes:
        dropped: pages that the queue had no space for. The caller finds them in the records later.
        copied: pages that were copied.
        reason: why the last try copied nothing; "" after a try that did.
    """

    def __init__(self, pages_max: int = OWED_MAX) -> None:
        self.dropped = self.copied = 0
        self.reason = ""
        self._max = pages_max
        self._runs: dict[int, OwedRun] = {}
        self._run_of: dict[bytes, int] = {}
        self._waiting: list[tuple[float, int]] = []  # heap of (earliest time, run)
        self._after: dict[int, list[int]] = {}  # run -> runs that wait for its end
        self._nbytes = 0
        self._next = 0

    def __len__(self) -> int:
        """Return the number of pages whose copy is owed."""
        return len(self._run_of)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages whose copy is owed."""
        return self._nbytes

    def owes(self, key: bytes) -> bool:
        """Return whether a copy of this page is owed."""
        return key in self._run_of

    def refuses(self, key: bytes) -> bool:
        """Return whether several tries in a row found no node that may store a copy of this page."""
        run = self._runs.get(self._run_of.get(key, -1))
        return run is not None and run.reason == NO_NODE and run.tries >= REFUSED_TRIES

    def owe(self, parent: bytes, keys: list[bytes], page_bytes: int, now_s: float) -> None:
        """Add consecutive pages of a chain, which follow the page ``parent``. Pages that are owed already are not added
        again."""
        keys = [key for key in keys if key not in self._run_of]
        room = max(0, self._max - len(self._run_of))
        self.dropped += max(0, len(keys) - room)
        if keys := keys[:room]:
            run = OwedRun(self._next, keys, page_bytes)
            self._next += 1
            self._runs[run.number] = run
            before = self._run_of.get(parent)
            self._run_of.update(dict.fromkeys(keys, run.number))
            self._nbytes += len(keys) * page_bytes
            if before is not None:
                self._after.setdefault(before, []).append(run.number)
            else:
                heappush(self._waiting, (now_s, run.number))

    def next(self, now_s: float) -> OwedRun | None:
        """Return the run to copy next, which is then under way; None if there is none now.

        The caller calls ``settle`` or ``postpone`` afterwards.
        """
        if not self._waiting or self._waiting[0][0] > now_s:
            return None
        return self._runs[heappop(self._waiting)[1]]

    def due_s(self) -> float:
        """Return the earliest time at which a run may be copied; infinity if no run waits."""
        return self._waiting[0][0] if self._waiting else math.inf

    def settle(self, run: OwedRun, pages: int, now_s: float, *, gone: bool = False) -> None:
        """Remove the leading ``pages`` of a run that is under way. Later pages, if any, wait again.

        Args:
            gone: the pages are no longer stored here, and were not copied.
        """
        for key in run.keys[:pages]:
            del self._run_of[key]
        self._nbytes -= pages * run.page_bytes
        self.copied += 0 if gone else pages
        del run.keys[:pages]
        run.tries, run.reason, run.refused = 0, "", ()
        self.reason = self.reason if gone else ""
        self._end(run, now_s)

    def postpone(self, run: OwedRun, reason: str, now_s: float, refused_by: str = "") -> None:
        """End a try that copied nothing. The run waits, longer with each try.

        Args:
            refused_by: the node that had no space for the pages. Another node is tried at once.
        """
        self.reason = run.reason = reason
        if refused_by and refused_by not in run.refused:
            run.refused += (refused_by,)
            self._end(run, now_s)
            return
        run.refused = ()
        pause_s = min(PAUSE_S_MAX, PAUSE_S_MIN * 2**run.tries)
        run.tries = min(run.tries + 1, 16)
        self._end(run, now_s + pause_s)

    def retry_all(self, now_s: float) -> None:
        """Let every run be tried now, because the nodes of the pool have changed."""
        self._waiting = [(min(due_s, now_s), number) for due_s, number in self._waiting]
        self._waiting.sort()

    def _end(self, run: OwedRun, due_s: float) -> None:
        if run.keys:
            heappush(self._waiting, (due_s, run.number))
            return
        del self._runs[run.number]
        for number in self._after.pop(run.number, ()):
            heappush(self._waiting, (due_s, number))


NO_NODE: Final = "no node of another machine can store a copy"
