"""Prefixes: how much of a prompt each node has, from the reports of nodes and from the conductor's recent decisions.

Nodes report their pages in streams, as they do to the owners of the directory (``kvstore.cluster.directory``). A
decision counts before any node confirms it: the pages that a request will store are expected at the node of the
computing engine, for ``EXPECTED_S``. A burst of equal prompts therefore follows the first one to the same engine, and
does not spread over the fleet.

A page's fingerprint also identifies all pages before it. Two chains with the same page at one place are equal up to
there. Expected pages can therefore be found by the first page of their chain.

A node stores a page only after the page before it, so a page that is present implies all pages before it. ``match``
relies on this and looks at few pages of a long prompt.

The index may be wrong, and nothing depends on it being right. If a page is missing, the choice of the engine was worse
than possible, and the engine computes the page. Nodes have numbers from 0, in the order of their first appearance, and
results are arrays over these numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from engine.conductor.state.engine_table import NumberedNames
from kvstore.cluster.directory import AnnounceBatch, Directory
from kvstore.model.prefix import Fingerprints
from kvstore.model.replica import TIERS, Tier

EXPECTED_S: Final = 30.0
EXPECTED_MAX: Final = 1 << 18  # pages that are expected; beyond it, the oldest decisions are dropped
EXPECTED_SAME: Final = 4  # chains with one first page that are expected at a node; beyond it, the oldest is dropped
STRIDE: Final = 16  # ``match`` first looks up every 16th page
NODES_MAX: Final = 1024  # nodes that one lookup returns for a page
DONORS: Final = 3  # nodes that ``match`` names as sources of a longer prefix

_DRAM: Final = TIERS.index(Tier.DRAM)
_BETWEEN: Final = np.arange(STRIDE - 1)  # offsets of the pages between two of these sample pages
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Donor:
    """A node that has the first ``pages`` pages of a prompt at ``ready_s``, or now if that is 0."""

    node: int
    pages: int
    ready_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Matches:
    """How many leading pages of one prompt each node has.

    The arrays are indexed by node. They have one entry more than there are nodes, and it is 0: an engine without a node
    has the node number -1, which selects it.

    Attributes:
        stored: the longest prefix that the node has without gaps.
        upper: how many pages of that prefix are in its DRAM or HBM; the others are on NVMe.
        soon: the length of a longer prefix that the node will have; 0 if there is none.
        soon_s: when the node will have it.
        donors: the nodes that have or will have the longest prefixes, the longest first; at most ``DONORS``.
    """

    stored: Counts
    upper: Counts
    soon: Counts
    soon_s: npt.NDArray[np.float64]
    donors: list[Donor]


@dataclass(slots=True, eq=False)
class _Expected:
    """Consecutive pages of a chain that a node will have at ``ready_s``. They are dropped at ``until_s``."""

    until_s: float
    node: int
    pages: list[int]
    ready_s: float


class Prefixes:
    """The index of the pages that nodes have.

    Args:
        bytes_max: memory for the reported pages.
        nodes: the numbers of nodes.
    """

    def __init__(self, bytes_max: int, nodes: NumberedNames) -> None:
        self._names = nodes
        self._directory = Directory(bytes_max)
        self._listed_names: list[str] = []  # names of nodes in the last result of the directory, ...
        self._listed_numbers = np.zeros(0, np.int64)  # the numbers of those names in this index, in the same order
        self._expected: dict[int, list[_Expected]] = {}  # by the first page; the newest last
        self._expected_by_age: deque[_Expected] = deque()
        self._expected_pages = 0

    def __len__(self) -> int:
        return len(self._directory)

    def update(self, batch: AnnounceBatch) -> int:
        """Apply a node's batch. Returns the number that the next batch must have, or ``directory.AGAIN``."""
        self._names.number(batch.node)
        return self._directory.apply(batch)

    def forget(self, node: str) -> None:
        """Remove a node, with its pages and its expected pages."""
        self._directory.forget([node])
        number = self._names.number(node)
        remaining: deque[_Expected] = deque()
        for expected in self._expected_by_age:
            if expected.node == number:
                self._drop(expected)
            else:
                remaining.append(expected)
        self._expected_by_age = remaining

    # --- expected pages ---------------------------------------------------------------------------------------------

    def expect(self, node: str, pages: Fingerprints, ready_s: float, now_s: float) -> None:
        """Expect these pages at a node, because an engine of the node will have stored them at ``ready_s``.

        Args:
            pages: the last pages of a prompt, from the first one that the node neither has nor is expected to have.
        """
        if len(pages):
            expected = _Expected(now_s + EXPECTED_S, self._names.number(node), pages.tolist(), ready_s)
            chains = self._expected.setdefault(expected.pages[0], [])
            at_node = [each for each in chains if each.node == expected.node]
            if len(at_node) >= EXPECTED_SAME:
                chains.remove(at_node[0])
            chains.append(expected)
            self._expected_by_age.append(expected)
            self._expected_pages += len(pages)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """Drop expected pages that the nodes should have reported by now."""
        queue = self._expected_by_age
        while queue and (queue[0].until_s <= now_s or self._expected_pages > EXPECTED_MAX):
            self._drop(queue.popleft())

    def _drop(self, expected: _Expected) -> None:
        self._expected_pages -= len(expected.pages)
        chains = self._expected.get(expected.pages[0], [])
        if expected in chains:
            chains.remove(expected)
            if not chains:
                del self._expected[expected.pages[0]]

    # --- matching ---------------------------------------------------------------------------------------------------

    def match(self, prompt: Fingerprints) -> Matches:
        """Return how much of a prompt each node has.

        Args:
            prompt: fingerprints of its full pages, in order.
        """
        # Look up the first page and every STRIDE-th page. Then look up the pages that follow the last of these that a
        # node has (or has in memory), up to the next of these.
        places = np.arange(-1, len(prompt), STRIDE)[: len(prompt)]
        places[:1] = 0
        probes = self._look(prompt[places], np.arange(len(places)), [np.zeros(len(self._names) + 1, np.int64)])
        starts = STRIDE * np.bincount(np.concatenate(probes))[1:].nonzero()[0]
        between = (starts[:, None] + _BETWEEN).ravel()
        between = between[: between.searchsorted(len(prompt))]
        lengths = [STRIDE * np.maximum(0, each - 1) for each in probes]
        lengths = self._look(prompt[between], between, lengths) if len(between) else lengths
        stored, upper = lengths[0], lengths[-1]
        soon = self._soon(prompt, stored) if self._expected else {}
        longest = [number for number in (-stored[:-1]).argsort(kind="stable")[:DONORS].tolist() if stored[number]]
        donors = [*(Donor(number, int(stored[number])) for number in longest), *soon.values()]
        donors.sort(key=lambda donor: (-donor.pages, donor.ready_s))
        pages, moments = np.zeros(len(stored), np.int64), np.zeros(len(stored))
        for donor in soon.values():
            pages[donor.node], moments[donor.node] = donor.pages, donor.ready_s
        return Matches(stored, upper, pages, moments, donors[:DONORS])

    def _look(self, pages: Fingerprints, places: Counts, lengths: list[Counts]) -> list[Counts]:
        """Look up pages in the directory, and return the prefix lengths that each node has with them.

        Args:
            places: the position of each page in the prompt.
            lengths: the prefix lengths that are known without these pages.

        Returns:
            Two arrays: the length that is stored, and the length that is in memory. One array if both are equal.
        """
        listed = self._directory.find(pages, NODES_MAX)
        if not len(listed.pages):
            return lengths
        if listed.names is not self._listed_names:
            self._listed_names = listed.names
            self._listed_numbers = np.array([self._names.number(name) for name in listed.names], np.int64)
        nodes, at = self._listed_numbers[listed.nodes], places[listed.pages]
        in_memory = listed.tiers <= _DRAM
        if in_memory.all() and len(lengths) == 1:
            return [_extend(lengths[0], nodes, at)]
        upper = _extend(lengths[-1], nodes[in_memory], at[in_memory]) if in_memory.any() else lengths[-1]
        return [_extend(lengths[0], nodes, at), upper]

    def _soon(self, pages: Fingerprints, stored: Counts) -> dict[int, Donor]:
        """Return the nodes that will have more of the prompt than they have now, by number."""
        chain = pages.tolist()
        soon: dict[int, Donor] = {}
        for page in filter(self._expected.__contains__, chain):
            start = chain.index(page)
            for expected in self._expected[page]:
                node, before = expected.node, soon.get(expected.node)
                length, ready_s = (before.pages, before.ready_s) if before is not None else (int(stored[node]), 0.0)
                if length < start:
                    continue
                end = start + _common(chain[start:], expected.pages)
                if end > length:
                    soon[node] = Donor(node, end, max(ready_s, expected.ready_s))
                elif end == length and before is not None and expected.ready_s < before.ready_s:
                    soon[node] = Donor(node, end, expected.ready_s)
        return soon


def _extend(lengths: Counts, nodes: Counts, places: Counts) -> Counts:
    """Extend each node's prefix by the pages that follow it without a gap. Returns the new lengths.

    Args:
        lengths: the length of each node's prefix.
        nodes, places: pairs of a node and the place of a page that it has, in the order of places.
    """
    steps = places - lengths[nodes]
    is_beyond = steps >= 0
    present = np.zeros((len(lengths), int(places[-1]) + 2), bool)
    present[nodes[is_beyond], steps[is_beyond]] = True
    extended: Counts = lengths + present.argmin(1)
    return extended


def _common(one: list[int], other: list[int]) -> int:
    """Return how many pages two chains have in common at their start. Once they differ, they differ in all pages."""
    length = min(len(one), len(other))
    if one[length - 1] == other[length - 1]:
        return length
    return bisect_left(range(length), True, key=lambda place: one[place] != other[place])
