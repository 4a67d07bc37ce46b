"""Finding: which nodes of the pool have pages, as the owners of their spans tell.

One FIND per owner that is asked, all of them under way at the same time. A span has two owners: the second one is
asked where the first does not answer. What was told is kept for a second. Nothing of it is proven: where a page is
read, it is.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.model.span import Fingerprints
from kvstore.state.directory import TIERS, Listed
from kvstore.state.placement import OWNERS, Placement
from kvstore.transfer.find_messages import FIND_PAGES_MAX, pack_find, unpack_found
from kvstore.transfer.links import PeerLinks
from kvstore.transfer.peers import PeersFile, PoolNode, PoolView
from kvstore.transfer.wire import FrameKind

OWNER_S: Final = 0.3  # for an owner to answer
KEPT_S: Final = 1.0
KEPT_MAX: Final = 64  # answers
KEPT_PAGES_MAX: Final = 4096  # of one that is kept

_NOWHERE: Final = Listed(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.uint8), [])


@dataclass(frozen=True)
class Stretch:
    """Consecutive pages that one node has: ``start`` to ``stop`` of those asked for. ``tiers``: of each the number of
    the fastest one in ``TIERS``."""

    node: str
    start: int
    stop: int
    tiers: bytes


class Finder:
    """Asks for one process. Threads may share it.

    Args:
        peers: who there is.
        links: how they are reached.
        kept_s: how long what was told is kept.
    """

    def __init__(self, peers: PeersFile, links: PeerLinks, kept_s: float = KEPT_S) -> None:
        self._kept_s = kept_s
        self._peers = peers
        self._links = links
        self._placement = Placement([])
        self._kept: OrderedDict[bytes, tuple[float, Listed]] = OrderedDict()

    def find(
        self,
        pages: Fingerprints,
        spans: Fingerprints,
        deadline_s: float,
        without: Collection[str] = (),
        closed: bool = True,
    ) -> list[Stretch]:
        """Where the pages of one chain are, from the first of these on: as far as some other node has each.

        Args:
            spans: the span of each.
            deadline_s: of ``time.monotonic()``; no round of questions waits longer than twice ``OWNER_S`` either.
            without: nodes that are not to be named.
            closed: who has a page has those before it. So whoever gets furthest has all, and only the last page of
                each span is asked for, and then the pages of the span in which that ends.
        """
        view = self._peers.look()
        if view is None or len(view.peers) < 2 or not len(pages):
            return []
        pages, spans = pages[:FIND_PAGES_MAX], spans[:FIND_PAGES_MAX]
        others = {name for name in view.peers if name != view.node and name not in without}
        name, now_s = pages.tobytes(), time.monotonic()
        kept = self._kept.get(name)
        if kept is not None and kept[0] >= now_s and not without:
            found = kept[1]
        elif closed:
            found = self._ask_ends(view, pages, spans, deadline_s, others)
        else:
            found = self._ask(view, pages, spans, deadline_s)
        if not without and len(pages) <= KEPT_PAGES_MAX:
            self._keep(name, now_s + self._kept_s, found)
        return furthest(found, others) if closed else stretches(found, len(pages), others)

    def _keep(self, name: bytes, until_s: float, found: Listed) -> None:
        if name not in self._kept or self._kept[name][1] is not found:
            self._kept[name] = until_s, found
        while len(self._kept) > KEPT_MAX:
            with contextlib.suppress(KeyError):  # another thread has done it
                self._kept.popitem(last=False)

    def _ask_ends(
        self, view: PoolView, pages: Fingerprints, spans: Fingerprints, deadline_s: float, nodes: set[str]
    ) -> Listed:
        """See ``find``: of the last page of each span, and of all in the span after the last one that these have."""
        ends = np.append(np.flatnonzero(spans[1:] != spans[:-1]), len(spans) - 1)
        found = self._ask(view, pages[ends], spans[ends], deadline_s)
        found = Listed(ends[found.pages], found.nodes, found.tiers, found.names)
        others = np.array([name in nodes for name in found.names], bool)
        first = int(found.pages[others[found.nodes]].max(initial=-1)) + 1
        after = ends[np.searchsorted(ends, first)] if first < len(pages) else first
        if first >= after:
            return found
        more = self._ask(view, pages[first:after], spans[first:after], deadline_s)
        return _merged([(np.arange(len(pages)), found), (np.arange(first, after), more)])

    def _ask(self, view: PoolView, pages: Fingerprints, spans: Fingerprints, deadline_s: float) -> Listed:
        placement = self._placement
        if placement.nodes != tuple(sorted(view.peers)):
            self._placement = placement = Placement(view.peers)
        edges = [0, *(np.flatnonzero(spans[1:] != spans[:-1]) + 1).tolist(), len(spans)]
        owners = [{placement.nodes[place] for place in row} for row in placement.owners(spans[edges[:-1]]).tolist()]
        silent = {name for name, peer in view.peers.items() if self._links.dead(peer)}
        found: list[tuple[npt.NDArray[np.int64], Listed]] = []
        rest = list(range(len(owners)))
        for _ in range(OWNERS):
            asked = [
                (name, np.concatenate([np.arange(edges[at], edges[at + 1]) for at in theirs]), theirs)
                for name, theirs in fewest({at: owners[at] - silent for at in rest}).items()
            ]
            answers = self._round([(view.peers[name], pages[of]) for name, of, _ in asked], deadline_s)
            rest = []
            for (name, of, theirs), answer in zip(asked, answers, strict=True):
                if answer is not None:
                    found.append((of, answer))
                else:
                    silent.add(name)
                    rest += theirs
            if not rest or time.monotonic() >= deadline_s:
                break
        return _merged(found)

    def _round(self, asked: list[tuple[PoolNode, Fingerprints]], deadline_s: float) -> list[Listed | None]:
        """Ask all of these at the same time; None: no answer."""
        until_s = min(deadline_s, time.monotonic() + OWNER_S)
        answers: list[Listed | None] = [None] * len(asked)
        with contextlib.ExitStack() as open_links:
            under_way = []
            for at, (peer, pages) in enumerate(asked):
                with contextlib.suppress(KVStoreError):
                    connection = open_links.enter_context(self._links.to(peer, until_s))
                    number = connection.send(FrameKind.FIND, pack_find(pages), deadline_s=until_s)
                    under_way.append((at, connection, number))
            for at, connection, number in under_way:
                try:
                    head = connection.receive_head(number, FrameKind.FOUND, deadline_s=until_s)
                    body = connection.receive(head.body_bytes, deadline_s=until_s)
                    answers[at] = unpack_found(body, len(asked[at][1]))
                except KVStoreError:
                    if connection.broken:
                        self._links.lost(asked[at][0])
        return answers


def fewest(owners: dict[int, set[str]]) -> dict[str, list[int]]:
    """Of each span one of its owners, so that few are asked: whoever owns most of those that are left, again and again.
    A span without owners is nobody's."""
    chosen: dict[str, list[int]] = {}
    while True:
        counts = Counter(name for names in owners.values() for name in names)
        if not counts:
            return chosen
        name = max(counts, key=lambda each: (counts[each], each))
        chosen[name] = sorted(at for at, names in owners.items() if name in names)
        owners = {at: names for at, names in owners.items() if name not in names}


def furthest(found: Listed, nodes: set[str]) -> list[Stretch]:
    """Whichever of these nodes has the last of the pages that any has, and so all before it. Tiers are those of the
    next page that is listed there."""
    last: dict[str, dict[int, int]] = {}
    for page, node, tier in zip(found.pages.tolist(), found.nodes.tolist(), found.tiers.tolist(), strict=True):
        name = found.names[node]
        if name in nodes:
            tiers = last.setdefault(name, {})
            tiers[page] = min(tier, tiers.get(page, tier))
    if not last:
        return []
    name = max(last, key=lambda each: (max(last[each]), each))
    told, at = b"", 0
    for page, tier in sorted(last[name].items()):
        told += bytes([tier]) * (page + 1 - at)
        at = page + 1
    return [Stretch(name, 0, at, told)]


def stretches(found: Listed, asked: int, nodes: set[str]) -> list[Stretch]:
    """The fewest stretches that cover the pages from the first on, as far as one of these nodes has each."""
    best: dict[str, npt.NDArray[np.uint8]] = {}  # of each node the fastest tier of each page; none: as many as tiers
    for place in np.unique(found.nodes).tolist():
        if found.names[place] in nodes:
            tiers = best.setdefault(found.names[place], np.full(asked, len(TIERS), np.uint8))
            rows = found.nodes == place
            np.minimum.at(tiers, found.pages[rows], found.tiers[rows])
    ends = {node: _ends(tiers < len(TIERS)) for node, tiers in best.items()}
    covered: list[Stretch] = []
    at = 0
    while at < asked and ends:
        node = max(ends, key=lambda node: (int(ends[node][at]), node))
        stop = int(ends[node][at])
        if stop <= at:
            break
        covered.append(Stretch(node, at, stop, best[node][at:stop].tobytes()))
        at = stop
    return covered


def _ends(has: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """For each page, the first one from there on that is missing."""
    gaps = np.append(np.flatnonzero(~has), len(has))
    return gaps[np.searchsorted(gaps, np.arange(len(has)))]


def _merged(found: list[tuple[npt.NDArray[np.int64], Listed]]) -> Listed:
    """Answers about some pages each (their places among all) as one."""
    if not found:
        return _NOWHERE
    names = [name for _, each in found for name in each.names]
    before = np.cumsum([0, *(len(each.names) for _, each in found)])
    pages = np.concatenate([of[each.pages] for of, each in found])
    nodes = np.concatenate([each.nodes + first for (_, each), first in zip(found, before, strict=False)])
    return Listed(pages, nodes, np.concatenate([each.tiers for _, each in found]), names)
