"""Prefixes: how much of a prompt each node has, as far as nodes have told, and what was decided a moment ago.

Nodes tell in streams, as they tell the owners of the directory (``kvstore.state.directory``). A decision counts before
any node confirms it: the pages that a request is going to store are taken for stored, for ``EXPECTED_S``, at the node
of the engine that computes them. So a burst of equal prompts follows the first one instead of being spread.

Nothing here is trusted. A page that is not there any more costs a wrong choice: the engine finds out and computes it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.model.replica import Tier
from kvstore.model.span import Fingerprints
from kvstore.state.directory import GONE, TIERS, Directory, Listed, Told

EXPECTED_S: Final = 30.0
EXPECTED_MAX: Final = 1 << 18  # pages; those decided first go first
LOOK_PAGES: Final = 64  # looked up at once; twice as many each time somebody has all of them
NODES_MAX: Final = 1024  # of which one page may be known

_DRAM: Final = TIERS.index(Tier.DRAM)


@dataclass(frozen=True, slots=True)
class Matches:
    """What nodes have of one prompt, in pages from its first one on.

    Attributes:
        pages: of each node that has any, the longest prefix that it has whole.
        upper: how many pages of that prefix lie in its DRAM or HBM; the others lie on NVMe.
        soon: of nodes that are to get a longer one.
        donors: who has a prefix, or will have, the longest first.
    """

    pages: dict[str, int]
    upper: dict[str, int]
    soon: dict[str, Donor]
    donors: list[Donor]


@dataclass(frozen=True, slots=True)
class Donor:
    """A node has so many pages of a prompt, or will have them at ``ready_s``; 0: now."""

    node: str
    pages: int
    ready_s: float = 0.0


@dataclass(slots=True)
class _Expected:
    until_s: float
    node: str
    pages: Fingerprints


class Prefixes:
    """The index of one conductor.

    Args:
        bytes_max: memory for what nodes tell.
    """

    def __init__(self, bytes_max: int) -> None:
        self._told = Directory(bytes_max)
        self._expected = Directory(16 * EXPECTED_MAX)
        self._waits: deque[_Expected] = deque()
        self._waiting = 0
        self._numbers: dict[str, int] = {}  # of a node, the next batch of what is expected there
        self._ready: dict[tuple[str, int], float] = {}  # by the first page that is expected

    def __len__(self) -> int:
        return len(self._told)

    def told(self, batch: Told) -> int:
        """A node's batch. Returns the number that is wanted next, or ``directory.AGAIN``."""
        return self._told.told(batch)

    def forget(self, node: str) -> None:
        """The node has gone, and with it what it had and what it was to get."""
        self._told.forget(node)
        self._expected.forget(node)
        self._numbers.pop(node, None)

    def expect(self, node: str, pages: Fingerprints, ready_s: float, now_s: float) -> None:
        """A request that was sent to an engine of this node will have stored these pages there by then."""
        if len(pages):
            self._ready.setdefault((node, int(pages[0])), ready_s)
            self._change(node, pages, _DRAM)
            self._waits.append(_Expected(now_s + EXPECTED_S, node, pages))
            self._waiting += len(pages)
        self.expire(now_s)

    def expire(self, now_s: float) -> None:
        """What should have been told by now is not expected any longer."""
        while self._waits and (self._waits[0].until_s <= now_s or self._waiting > EXPECTED_MAX):
            late = self._waits.popleft()
            self._waiting -= len(late.pages)
            self._ready.pop((late.node, int(late.pages[0])), None)
            if late.node in self._numbers:
                self._change(late.node, late.pages, _DRAM | GONE)

    def _change(self, node: str, pages: Fingerprints, mark: int) -> None:
        number = self._numbers.get(node, 0)
        marks = np.full(len(pages), mark, np.uint8)
        self._numbers[node] = self._expected.told(Told(node, 0, number, pages, marks, whole=number == 0))

    def match(self, pages: Fingerprints) -> Matches:
        """How much of a prompt every node has. ``pages``: fingerprints of its full pages, in order."""
        names = sorted({*self._told.nodes, *self._expected.nodes})
        held = np.zeros(len(names), np.int64)  # pages, with those that are expected
        upper, told = held.copy(), held.copy()
        looked, step = 0, LOOK_PAGES
        while names and looked < len(pages) and held.max() == looked:
            part = pages[looked : looked + step]
            has = _held(self._told.find(part, NODES_MAX), names, len(part))
            soon = _held(self._expected.find(part, NODES_MAX), names, len(part)) | has
            has = np.where(told == looked, np.logical_and.accumulate(has > 0), False) * has
            told += (has > 0).sum(axis=0)
            upper += (has > 1).sum(axis=0)
            held += np.where(held == looked, np.logical_and.accumulate(soon > 0).sum(axis=0), 0)
            looked += len(part)
            step *= 2
        there = {names[at]: int(told[at]) for at in np.flatnonzero(told)}
        later: dict[str, Donor] = {}
        for at in np.flatnonzero(held > told):
            ready_s = self._ready.get((names[at], int(pages[told[at]])))
            if ready_s is not None:
                later[names[at]] = Donor(names[at], int(held[at]), ready_s)
        donors = [*(Donor(name, count) for name, count in there.items()), *later.values()]
        donors.sort(key=lambda donor: (-donor.pages, donor.ready_s))
        return Matches(there, {names[at]: int(upper[at]) for at in np.flatnonzero(upper)}, later, donors)


def _held(listed: Listed, names: list[str], pages: int) -> npt.NDArray[np.uint8]:
    """Of every page and node: 0 the node does not have the page, 1 on NVMe, 3 in its memory."""
    held = np.zeros((pages, len(names)), np.uint8)
    place = {name: at for at, name in enumerate(names)}
    nodes = np.array([place.get(name, 0) for name in listed.names], np.int64)  # a name that is free is in no row
    np.bitwise_or.at(held, (listed.pages, nodes[listed.nodes]), np.where(listed.tiers <= _DRAM, 3, 1).astype(np.uint8))
    return held
