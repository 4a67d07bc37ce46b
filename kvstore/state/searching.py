"""Searching: whom to ask for the pages of a chain, and what the answers say. Pure; ``transfer.finding`` performs.

A chain that is prefix-closed is whole wherever its last page is. So only the last pages of spans are asked for at
first, and not even of all: of the last span, and of so many others that no long run of spans is unknown; whoever owns
several tells of all of them. Then all pages are asked for of the spans between the last one that somebody has and the
first one that nobody has::

    spans       0 1 2 3 4 5 6 7 8     (0 to 5 are somewhere, and half of 6)
    asked           x     x   x x     two owners, one of them of three
    there           +     +   - -
    asked then              ooo       all pages of 6, whose owner has not told yet where it ends

So a chain that is somewhere takes one answer, or as many as no long run needs, and any other one round more, however
many nodes there are. Who does not answer is replaced by the second owner.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.model.span import Fingerprints, fingerprints, spans_between
from kvstore.state.directory import TIERS, Listed
from kvstore.state.placement import Placement

UNKNOWN_MIN: Final = 4  # so many spans in a row may be unknown at first; in long chains the root of their number


@dataclass(frozen=True)
class Stretch:
    """Consecutive pages that one node has: ``start`` to ``stop`` of those asked for. ``tiers``: of each the number of
    the fastest one in ``TIERS``."""

    node: str
    start: int
    stop: int
    tiers: bytes


class Question(NamedTuple):
    """What to ask one owner: ``pages``, which lie at ``places`` in the chain. They are the last ones of ``spans`` (a
    bit for each), or all of them (``whole``)."""

    owner: str
    pages: Fingerprints
    places: list[int]
    spans: int
    whole: bool


class Search:
    """One search. Life: ``ask`` -> ``answered``, once per question that was answered -> ``ask`` .. until it has no
    questions, or the caller no time -> ``found``.

    Args:
        keys: of the chain from its root.
        first: the first page that is wanted.
        nodes: who may be named.
        closed: who has a page has those before it.
        turn: any number; of nodes that have the same, another is named with each.
    """

    def __init__(
        self, placement: Placement, keys: list[bytes], first: int, nodes: Collection[str], closed: bool, turn: int = 0
    ) -> None:
        self._keys, self._first, self._nodes, self._closed, self._turn = keys, first, nodes, closed, turn
        self._spans = spans_between(first, len(keys))
        names, self._lasts = self._spans.named(keys)
        self._members, self._owned = placement.nodes, owned_spans(placement, names)
        self._told = 0  # spans of whose last page somebody told
        self._whole = 0  # and of all of whose pages
        self._answers: list[tuple[list[int], Listed]] = []
        self._last, self._holder = first - 1, ""  # the last page that somebody has, and who

    def ask(self, silent: Collection[str]) -> list[Question]:
        """The next questions, one per owner; none: all is known that can be. ``silent``: who does not answer."""
        owned = {place: spans for place, spans in self._owned.items() if self._members[place] not in silent}
        lasts = self._spans.lasts
        every = (1 << len(lasts)) - 1
        if not self._closed:
            return [self._of_all(*each) for each in fewest(owned, every & ~self._whole).items()]
        if self._last == lasts[-1]:
            return []
        low = bisect_right(lasts, self._last)
        rest = every & -(1 << low)
        chosen = spread(owned, rest, self._told, max(UNKNOWN_MIN, isqrt(len(lasts))))
        if chosen:
            return [self._of_lasts(*each) for each in chosen.items()]
        missing = self._told & rest
        unsure = (missing & -missing) * 2 - 1 if missing else every
        return [self._of_all(*each) for each in fewest(owned, unsure & rest & ~self._whole).items()]

    def answered(self, question: Question, told: Listed) -> None:
        """An owner's answer."""
        self._told |= question.spans
        if question.whole:
            self._whole |= question.spans
        self._answers.append((question.places, told))
        nodes, pages = told.nodes.tolist(), told.pages.tolist()
        best: tuple[int, int, int] | None = None
        for row in reversed(range(len(pages))):  # they are in order
            place = question.places[pages[row]]
            if place <= self._last or (best is not None and place < -best[0]):
                break
            if told.names[nodes[row]] in self._nodes:
                rank = -place, int(told.tiers[row]), (nodes[row] + self._turn) % len(told.names)
                if best is None or rank < best:
                    best, holder = rank, told.names[nodes[row]]
        if best is not None:
            self._last, self._holder = -best[0], holder

    def found(self) -> list[Stretch]:
        """Where the pages are from the first one on, one stretch after another; places count from there."""
        if not self._closed:
            return stretches(_merged(self._answers, self._first), len(self._keys) - self._first, self._nodes)
        tiers = dict[int, int]()
        for places, told in self._answers:
            its = [name == self._holder for name in told.names]
            rows = zip(told.pages.tolist(), told.nodes.tolist(), told.tiers.tolist(), strict=True)
            for page, node, tier in reversed(list(rows)):  # of a page in several tiers the fastest one is first
                if its[node]:
                    tiers[places[page]] = tier
        known, at = b"", self._first
        for page in sorted(tiers):  # those that were not asked for: as the next one
            known += bytes([tiers[page]]) * (page + 1 - at)
            at = page + 1
        return [Stretch(self._holder, 0, len(known), known)] if known else []

    def _of_lasts(self, owner: int, spans: int) -> Question:
        at = _bits(spans)
        lasts = self._spans.lasts
        return Question(self._members[owner], self._lasts[at], [lasts[span] for span in at], spans, whole=False)

    def _of_all(self, owner: int, spans: int) -> Question:
        its = self._spans
        places = [page for span in _bits(spans) for page in range(its.firsts[span], its.lasts[span] + 1)]
        pages = fingerprints(b"".join([self._keys[page] for page in places]))
        return Question(self._members[owner], pages, places, spans, whole=True)


def owned_spans(placement: Placement, names: Fingerprints) -> dict[int, int]:
    """By place of a node, which of these spans it owns: a bit for each."""
    owned: dict[int, int] = {}
    bit = 1
    for owners in placement.owners_of(names.tolist()):
        for place in owners:
            owned[place] = owned.get(place, 0) | bit
        bit <<= 1
    return owned


def spread(owned: Mapping[int, int], spans: int, told: int, unknown_max: int) -> dict[int, int]:
    """Whom to ask of which of ``spans``, so that with those that were ``told`` the last one is known, and at most so
    many in a row are not. Those that nobody owns do not count."""
    anybody = 0
    for theirs in owned.values():
        anybody |= theirs
    chosen: dict[int, int] = {}
    last, unknown = (spans & anybody).bit_length() - 1, spans & anybody & ~told
    while unknown:
        runs = unknown  # then: the starts of runs that are too long
        for _ in range(unknown_max):
            runs &= runs >> 1
        if unknown >> last & 1:
            wanted = last
        elif runs:
            wanted = (runs & -runs).bit_length() - 1 + unknown_max
        else:
            break
        owner = max(
            (place for place in owned if owned[place] >> wanted & 1),
            key=lambda place: (owned[place] & unknown).bit_count(),
        )
        chosen[owner] = owned[owner] & unknown
        unknown &= ~owned[owner]
    return chosen


def fewest(owned: Mapping[int, int], spans: int) -> dict[int, int]:
    """Of each of these spans one of its owners, so that few are asked: whoever owns most of those that are left, again
    and again. Those that nobody owns are nobody's."""
    chosen: dict[int, int] = {}
    while spans:
        owner = max(owned, key=lambda each: (owned[each] & spans).bit_count(), default=-1)
        if owner < 0 or not owned[owner] & spans:
            break
        chosen[owner] = owned[owner] & spans
        spans &= ~owned[owner]
    return chosen


def _bits(word: int) -> list[int]:
    """Which bits are set, ascending."""
    return [at for at in range(word.bit_length()) if word >> at & 1]


def stretches(found: Listed, asked: int, nodes: Collection[str]) -> list[Stretch]:
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


def _merged(answers: list[tuple[list[int], Listed]], first: int) -> Listed:
    """Answers about some pages each as one; its places count from page ``first`` on."""
    names: list[str] = []
    pages, nodes, tiers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    for places, told in answers:
        pages.append(np.array(places, np.int64)[told.pages] - first)
        nodes.append(told.nodes + len(names))
        tiers.append(told.tiers)
        names += told.names
    return Listed(np.concatenate(pages), np.concatenate(nodes), np.concatenate(tiers), names)
