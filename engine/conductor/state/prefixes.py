"""Prefixes: how much of a prompt each node has, as far as nodes have told, and what was decided a moment ago.

Nodes tell in streams, as they tell the owners of the directory (``kvstore.state.directory``). A decision counts before
any node confirms it: the pages that a request is going to store are taken for stored, for ``EXPECTED_S``, at the node
of the engine that computes them. So a burst of equal prompts follows the first one instead of being spread.

A page's fingerprint stands for all pages before it, too. So of two chains that are equal at one place everything before
is equal, and what is expected is found by the first page of its chain alone.

A node stores no page without the one before it, so whether it has a page tells of all before; where one is lost all the
same, that is found out like any other error below.

Nodes are numbered from 0 on, in the order in which they were first heard of; answers are arrays over these numbers.
Nothing here is trusted. A page that is not there any more costs a wrong choice: the engine finds out and computes it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.conductor.state.names import NumberedNames
from kvstore.model.replica import Tier
from kvstore.model.span import Fingerprints
from kvstore.state.directory import TIERS, Directory, Told

EXPECTED_S: Final = 30.0
EXPECTED_MAX: Final = 1 << 18  # pages; those decided first go first
EXPECTED_SAME: Final = 4  # chains with the same first page that are expected at one node; those decided first go first
STRIDE: Final = 16  # every so many pages are looked for first
NODES_MAX: Final = 1024  # of which one page may be known
DONORS: Final = 3  # nodes from which a longer prefix could come, the longest first

_DRAM: Final = TIERS.index(Tier.DRAM)
_BETWEEN: Final = np.arange(STRIDE - 1)
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Donor:
    """A node has so many pages of a prompt, or will have them at ``ready_s``; 0: now."""

    node: int
    pages: int
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Matches:
    """What nodes have of one prompt, in pages from its first one on.

    The arrays have one more place than there are nodes, with 0 in it: that of an engine without a node, -1.

    Attributes:
        told: of each node, the longest prefix that it has whole.
        upper: how many pages of that prefix lie in its DRAM or HBM; the others lie on NVMe.
        soon, soon_s: what a node will have that is to get a longer one, else 0; and the moment when it will.
        donors: who has most, or will have, the longest first; ``DONORS`` of them.
    """

    told: Counts
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
        self._told = Directory(bytes_max)
        self._streams: list[str] = []  # the directory's names of them, and ...
        self._nodes = np.zeros(0, np.int64)  # ... the nodes' numbers in their order
        self._expected: dict[int, list[_Expected]] = {}  # by the first page, the newest last
        self._waits: deque[_Expected] = deque()
        self._waiting = 0  # pages

    def __len__(self) -> int:
        return len(self._told)

    def told(self, batch: Told) -> int:
        """A node's batch. Returns the number that is wanted next, or ``directory.AGAIN``."""
        self._names.number(batch.node)
        return self._told.told(batch)

    def forget(self, node: str) -> None:
        """The node has gone, and with it what it had and what it was to get."""
        self._told.forget(node)
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

        ``pages``: those that the node has not, and is not expected to have, up to the end of the prompt.
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
        """What should have been told by now is not expected any longer."""
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
        # The first page and every STRIDE-th; then those between the last one of them that a node has, or has in its
        # memory, and the next.
        places = np.arange(-1, len(prompt), STRIDE)[: len(prompt)]
        places[:1] = 0
        probes = self._look(prompt[places], np.arange(len(places)), [np.zeros(len(self._names) + 1, np.int64)])
        starts = STRIDE * np.bincount(np.concatenate(probes))[1:].nonzero()[0]
        between = (starts[:, None] + _BETWEEN).ravel()
        between = between[: between.searchsorted(len(prompt))]
        known = [STRIDE * np.maximum(0, each - 1) for each in probes]
        known = self._look(prompt[between], between, known) if len(between) else known
        told, upper = known[0], known[-1]
        soon = self._soon(prompt, told) if self._expected else {}
        longest = [number for number in (-told[:-1]).argsort(kind="stable")[:DONORS].tolist() if told[number]]
        donors = [*(Donor(number, int(told[number])) for number in longest), *soon.values()]
        donors.sort(key=lambda donor: (-donor.pages, donor.ready_s))
        pages, moments = np.zeros(len(told), np.int64), np.zeros(len(told))
        for donor in soon.values():
            pages[donor.node], moments[donor.node] = donor.pages, donor.ready_s
        return Matches(told, upper, pages, moments, donors[:DONORS])

    def _look(self, pages: Fingerprints, places: Counts, known: list[Counts]) -> list[Counts]:
        """What is ``known`` of nodes: how much they have, and how much of it in memory, once where that is the same.

        With these pages, at these places.
        """
        listed = self._told.find(pages, NODES_MAX)
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

    def _soon(self, pages: Fingerprints, told: Counts) -> dict[int, Donor]:
        """Nodes that will have more of the prompt than they have."""
        chain = pages.tolist()
        soon: dict[int, Donor] = {}
        for page in filter(self._expected.__contains__, chain):
            start = chain.index(page)
            for waits in self._expected[page]:
                before = soon.get(waits.node)
                has, ready_s = (before.pages, before.ready_s) if before is not None else (int(told[waits.node]), 0.0)
                if has < start:
                    continue
                end = start + _common(chain[start:], waits.pages)
                if end > has:
                    soon[waits.node] = Donor(waits.node, end, max(ready_s, waits.ready_s))
                elif end == has and before is not None and waits.ready_s < before.ready_s:
                    soon[waits.node] = Donor(waits.node, end, waits.ready_s)
        return soon


def _longer(known: Counts, nodes: Counts, places: Counts) -> Counts:
    """How much each node has, with these places of nodes, in order, as far as each follows the one before it."""
    steps = places - known[nodes]
    mine = steps >= 0
    follows = np.zeros((len(known), int(places[-1]) + 2), bool)
    follows[nodes[mine], steps[mine]] = True
    return known + follows.argmin(1)


def _common(one: list[int], other: list[int]) -> int:
    """How many pages two chains have in common, from the first on; where they differ once they differ for good."""
    length = min(len(one), len(other))
    if one[length - 1] == other[length - 1]:
        return length
    return bisect_left(range(length), True, key=lambda place: one[place] != other[place])
