"""Prefixes: how much of a prompt each node has, by the nodes' reports and by decisions made a moment ago.

Nodes report in streams, as they do to the owners of the directory (``kvstore.cluster.directory``). A decision counts
before
any node confirms it: the pages that a request is going to store are taken for stored, for ``EXPECTED_S``, at the node
of the engine that computes them. So a burst of equal prompts follows the first one instead of being spread.

A page's fingerprint identifies all pages before it, too. If two chains are equal at one place, everything before it is
equal, and expected pages are found by the first page of their chain alone.

A node stores no page without the one before it, so a page's presence implies all pages before it; if one is lost
nevertheless, that is found out like any other error below.

Nodes are numbered from 0, in the order in which they first appeared; answers are arrays over these numbers. Nothing
here is trusted. A page that is gone costs a wrong choice: the engine finds out and computes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.conductor.state.engine_table import NumberedNames
from kvstore.cluster.directory import TIERS, AnnounceBatch, Directory
from kvstore.model.prefix import Fingerprints
from kvstore.model.replica import Tier

EXPECTED_S: Final = 30.0
EXPECTED_MAX: Final = 1 << 18  # pages; the oldest decisions are dropped first
EXPECTED_SAME: Final = 4  # chains with the same first page that are expected at one node; the oldest go first
STRIDE: Final = 16  # every 16th page is looked up first
NODES_MAX: Final = 1024  # nodes that may be known to have one page
DONORS: Final = 3  # nodes from which a longer prefix could come, the longest first

_DRAM: Final = TIERS.index(Tier.DRAM)
_BETWEEN: Final = np.arange(STRIDE - 1)
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Donor:
    """A node that has this many pages of a prompt, or will have them at ``ready_s``; 0: now."""

    node: int
    pages: int
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Matches:
    """What nodes have of one prompt, in pages from its first one on.

    The arrays have one more place than there are nodes, with 0 in it: that of an engine without a node, -1.

    Attributes:
        stored: the longest prefix that each node has without gaps.
        upper: how many pages of that prefix are in its DRAM or HBM; the others are on NVMe.
        soon, soon_s: the longer prefix that a node will have, else 0; and when it will have it.
        donors: nodes that have or will have most, the longest first; at most ``DONORS``.
    """

    stored: Counts
    upper: Counts
    soon: Counts
    soon_s: npt.NDArray[np.float64]
    donors: list[Donor]


@dataclass(slots=True, eq=False)
class _Expected:
    """Pages that a node will have at ``ready_s``."""

    until_s: float
    node: int
    pages: list[int]
    ready_s: float


class Prefixes:
    """The index of one conductor.

    Args:
        bytes_max: memory for what nodes tell.
        nodes: their numbers.
    """

    def __init__(self, bytes_max: int, nodes: NumberedNames) -> None:
        self._names = nodes
        self._directory = Directory(bytes_max)
        self._streams: list[str] = []  # their names in the directory, and ...
        self._nodes = np.zeros(0, np.int64)  # ... the nodes' numbers in their order
        self._expected: dict[int, list[_Expected]] = {}  # by the first page, the newest last
        self._waits: deque[_Expected] = deque()
        self._waiting = 0  # pages

    def __len__(self) -> int:
        return len(self._directory)

    def update(self, batch: AnnounceBatch) -> int:
        """Apply a node's batch. Returns the number of the next one expected, or ``directory.AGAIN``."""
        self._names.number(batch.node)
        return self._directory.apply(batch)

    def forget(self, node: str) -> None:
        """Remove a node, with what it had and what it was to receive."""
        self._directory.forget(node)
        number = self._names.number(node)
        stays: deque[_Expected] = deque()
        for waits in self._waits:
            if waits.node == number:
                self._drop(waits)
            else:
                stays.append(waits)
        self._waits = stays

    # --- what is expected -------------------------------------------------------------------------------------------

    def expect(self, node: str, pages: Fingerprints, ready_s: float, now_s: float) -> None:
        """A request that was sent to an engine of this node will have stored these pages there by then.

        ``pages``: up to the end of the prompt, those that the node neither has nor is expected to have.
        """
        if len(pages):
            waits = _Expected(now_s + EXPECTED_S, self._names.number(node), pages.tolist(), ready_s)
            same = self._expected.setdefault(waits.pages[0], [])
            mine = [each for each in same if each.node == waits.node]
            if len(mine) >= EXPECTED_SAME:
                same.remove(mine[0])
            same.append(waits)
            self._waits.append(waits)
            self._waiting += len(pages)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Drop expected pages that nodes should have reported by now."""
        while self._waits and (self._waits[0].until_s <= now_s or self._waiting > EXPECTED_MAX):
            self._drop(self._waits.popleft())

    def _drop(self, waits: _Expected) -> None:
        self._waiting -= len(waits.pages)
        same = self._expected.get(waits.pages[0], [])
        if waits in same:
            same.remove(waits)
            if not same:
                del self._expected[waits.pages[0]]

    # --- matching ---------------------------------------------------------------------------------------------------

    def match(self, prompt: Fingerprints) -> Matches:
        """How much of a prompt every node has. ``prompt``: fingerprints of its full pages, in order."""
        # The first page and every STRIDE-th; then those between the last of them that a node has (or has in its
        # memory) and the next.
        places = np.arange(-1, len(prompt), STRIDE)[: len(prompt)]
        places[:1] = 0
        probes = self._look(prompt[places], np.arange(len(places)), [np.zeros(len(self._names) + 1, np.int64)])
        starts = STRIDE * np.bincount(np.concatenate(probes))[1:].nonzero()[0]
        between = (starts[:, None] + _BETWEEN).ravel()
        between = between[: between.searchsorted(len(prompt))]
        known = [STRIDE * np.maximum(0, each - 1) for each in probes]
        known = self._look(prompt[between], between, known) if len(between) else known
        stored, upper = known[0], known[-1]
        soon = self._soon(prompt, stored) if self._expected else {}
        longest = [number for number in (-stored[:-1]).argsort(kind="stable")[:DONORS].tolist() if stored[number]]
        donors = [*(Donor(number, int(stored[number])) for number in longest), *soon.values()]
        donors.sort(key=lambda donor: (-donor.pages, donor.ready_s))
        pages, moments = np.zeros(len(stored), np.int64), np.zeros(len(stored))
        for donor in soon.values():
            pages[donor.node], moments[donor.node] = donor.pages, donor.ready_s
        return Matches(stored, upper, pages, moments, donors[:DONORS])

    def _look(self, pages: Fingerprints, places: Counts, known: list[Counts]) -> list[Counts]:
        """How many of these pages nodes have, and how many in memory, once where that is the same.

        ``known``: what nodes have of the pages at these places.
        """
        listed = self._directory.find(pages, NODES_MAX)
        if not len(listed.pages):
            return known
        if listed.names is not self._streams:
            self._streams = listed.names
            self._nodes = np.array([self._names.number(name) for name in listed.names], np.int64)
        nodes, at = self._nodes[listed.nodes], places[listed.pages]
        in_memory = listed.tiers <= _DRAM
        if in_memory.all() and len(known) == 1:
            return [_longer(known[0], nodes, at)]
        upper = _longer(known[-1], nodes[in_memory], at[in_memory]) if in_memory.any() else known[-1]
        return [_longer(known[0], nodes, at), upper]

    def _soon(self, pages: Fingerprints, stored: Counts) -> dict[int, Donor]:
        """Nodes that will have more of the prompt than they have."""
        chain = pages.tolist()
        soon: dict[int, Donor] = {}
        for page in filter(self._expected.__contains__, chain):
            start = chain.index(page)
            for waits in self._expected[page]:
                before = soon.get(waits.node)
                has, ready_s = (before.pages, before.ready_s) if before is not None else (int(stored[waits.node]), 0.0)
                if has < start:
                    continue
                end = start + _common(chain[start:], waits.pages)
                if end > has:
                    soon[waits.node] = Donor(waits.node, end, max(ready_s, waits.ready_s))
                elif end == has and before is not None and waits.ready_s < before.ready_s:
                    soon[waits.node] = Donor(waits.node, end, waits.ready_s)
        return soon


def _longer(known: Counts, nodes: Counts, places: Counts) -> Counts:
    """The length of each node's prefix, given places of nodes in order, while each follows the one before it."""
    steps = places - known[nodes]
    mine = steps >= 0
    follows = np.zeros((len(known), int(places[-1]) + 2), bool)
    follows[nodes[mine], steps[mine]] = True
    lengths: Counts = known + follows.argmin(1)
    return lengths


def _common(one: list[int], other: list[int]) -> int:
    """How many pages two chains have in common at their beginning; chains that differ once differ from there on."""
    length = min(len(one), len(other))
    if one[length - 1] == other[length - 1]:
        return length
    return bisect_left(range(length), True, key=lambda place: one[place] != other[place])
