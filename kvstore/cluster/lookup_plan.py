"""Searching: whom to ask for the pages of a chain, and what the answers say. Pure; ``cluster.find_pages`` performs.

A chain that is prefix-closed is whole wherever its last page is. So only the last pages of spans are asked for at
first, and not even of all: of the last span, and of enough others that no long run of spans is unknown; a node that
owns several answers for all of them. Then all pages are asked for of the spans between the last one that a node has and
the first one that no node has::

    spans       0 1 2 3 4 5 6 7 8     (0 to 5 are somewhere, and half of 6)
    asked           x     x   x x     two owners, one of them of three
    there           +     +   - -
    asked then              ooo       all pages of 6, whose owner has not told yet where it ends

So a chain that is somewhere takes one answer, or as many as no long run needs, and any other one round more, however
many nodes there are. An owner that does not answer is replaced by the second owner.

An owner also names nodes of which it may not know everything (``directory_owner``). Where pages are still missing then,
those nodes are asked which of them they have. Where the other owners of the spans in doubt are fewer, they are asked
first, and then at most ``ASKED_MAX`` nodes that are in doubt at both owners.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.cluster.directory import TIERS, Listed, Placement, Unsure
from kvstore.model.prefix import Fingerprints, fingerprints, spans_between

UNKNOWN_MIN: Final = 4  # spans in a row that may be unknown at first; in long chains the root of their number
ASKED_MAX: Final = 8  # other owners that are asked in one search where some were unsure, and as many nodes themselves
HOLD_PAGES_MAX: Final = 1 << 15  # pages that one of them is asked for
_NONE_OLDER: Final[Mapping[int, Placement]] = {}


@dataclass(frozen=True)
class Stretch:
    """Consecutive pages that one node has: ``start`` to ``stop`` of those asked for. ``tiers``: of each the number of
    the fastest one in ``TIERS``."""

    node: str
    start: int
    stop: int
    tiers: bytes


class Question(NamedTuple):
    """What to ask one owner: ``pages``, which are at ``places`` in the chain. They are the last ones of ``spans`` (a
    bit for each), or all of them (``whole``). Where there are ``keys``, that node is asked which of these it has."""

    owner: str
    pages: Fingerprints
    places: list[int]
    spans: int
    whole: bool
    keys: list[bytes] | None = None


class Search:
    """One search. Life: ``ask`` -> ``answered``, once per question that was answered -> ``ask`` .. until it has no
    questions, or the caller no time -> ``found``.

    Args:
        keys: of the chain from its root.
        first: the first page that is wanted.
        nodes: who may be named.
        closed: who has a page has those before it.
        turn: any number; of nodes that have the same, another is named with each.
        older: placements that were true before, by their numbers.
    """

    def __init__(
        self,
        placement: Placement,
        keys: list[bytes],
        first: int,
        nodes: Collection[str],
        closed: bool,
        turn: int = 0,
        older: Mapping[int, Placement] = _NONE_OLDER,
    ) -> None:
        self._keys, self._first, self._nodes, self._closed, self._turn = keys, first, nodes, closed, turn
        self._spans = spans_between(first, len(keys))
        self._names, self._lasts = self._spans.named(keys)
        self._members, self._owned = placement.nodes, owned_spans(placement, self._names)
        self._older = older
        self._second = False  # whether other owners of spans in doubt were asked
        self._asked = set[str]()  # nodes that were asked for their own pages
        self._told = _Told()  # of the last pages of spans
        self._whole = _Told()  # of all of their pages
        self._told_by: dict[int, int] = {}  # by owner, spans
        self._answers: list[tuple[list[int], Listed]] = []
        self._last, self._holder = first - 1, ""  # the last page that a node has, and that node

    def ask(self, silent: Collection[str]) -> list[Question]:
        """The next questions, one per node; none: all is known that can be. ``silent``: who does not answer."""
        return self._of_owners(silent) or self._in_doubt(silent)

    def _of_owners(self, silent: Collection[str]) -> list[Question]:
        owned = {place: spans for place, spans in self._owned.items() if self._members[place] not in silent}
        lasts = self._spans.lasts
        every = (1 << len(lasts)) - 1
        if not self._closed:
            return [self._of_all(*each) for each in fewest(owned, every & ~self._whole.spans).items()]
        if self._last == lasts[-1]:
            return []
        low = bisect_right(lasts, self._last)
        rest = every & -(1 << low)
        chosen = spread(owned, rest, self._told.spans, max(UNKNOWN_MIN, isqrt(len(lasts))))
        if chosen:
            return [self._of_lasts(*each) for each in chosen.items()]
        missing = self._told.spans & rest
        unsure = (missing & -missing) * 2 - 1 if missing else every
        return [self._of_all(*each) for each in fewest(owned, unsure & rest & ~self._whole.spans).items()]

    def answered(self, question: Question, told: Listed) -> None:
        """The answer to a question."""
        if question.keys is None:
            self._note(question, told.unsure)
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

    def _note(self, question: Question, unsure: Collection[Unsure]) -> None:
        """An owner has told of some spans, and may not know all that these nodes have of them."""
        owner, spans, doubts = question.owner, question.spans, dict[str, int]()
        for node, placed in unsure:
            doubts[node] = doubts.get(node, 0) | spans & ~self._owned_before(owner, placed)
        self._told.add(spans, doubts)
        if question.whole:
            self._whole.add(spans, doubts)
        place = self._members.index(owner)
        self._told_by[place] = self._told_by.get(place, 0) | spans

    def _owned_before(self, owner: str, placed: int) -> int:
        """Which spans that node owned in the placement of this number already; none, where it is not known."""
        old = self._older.get(placed)
        if old is None or owner not in old.nodes:
            return 0
        return owned_spans(old, self._names).get(old.nodes.index(owner), 0)

    def _in_doubt(self, silent: Collection[str]) -> list[Question]:
        """Questions about nodes of which the owners that have answered may not know everything."""
        rest = self._missing()
        if not rest:
            return []
        unknown = {node: self._unknown(node, rest) for node in self._nodes if node not in silent}
        unknown = {node: spans for node, spans in unknown.items() if spans and node not in self._asked}
        spans = 0
        for its in unknown.values():
            spans |= its
        owners = {
            place: its & ~self._told_by.get(place, 0)
            for place, its in self._owned.items()
            if self._members[place] not in silent
        }
        chosen = fewest(owners, spans)
        if not self._second and 0 < len(chosen) < len(unknown):
            self._second = True
            return [self._of_all(*each) for each in list(chosen.items())[:ASKED_MAX]]
        nodes = sorted(unknown)
        turn = self._turn % max(1, len(nodes))
        nodes = (nodes[turn:] + nodes[:turn])[: ASKED_MAX - len(self._asked)]
        self._asked.update(nodes)
        return [self._of_node(node, unknown[node]) for node in nodes]

    def _missing(self) -> int:
        """Spans of which some page was found nowhere."""
        lasts = self._spans.lasts
        every = (1 << len(lasts)) - 1
        if self._closed:
            return every & -(1 << bisect_right(lasts, self._last))
        pages = np.zeros(len(self._keys), np.bool_)
        for places, told in self._answers:
            mine = np.array([name in self._nodes for name in told.names], np.bool_)
            pages[np.array(places, np.int64)[told.pages[mine[told.nodes]]]] = True
        return sum(1 << span for span in _bits(every) if not pages[self._spans.firsts[span] : lasts[span] + 1].all())

    def _unknown(self, node: str, rest: int) -> int:
        """The spans among these that this node may have more of than it announced. In a closed chain it has nothing
        after a span whose last page it surely does not have."""
        ends = self._told.sure(node) & rest if self._closed else 0
        return rest & ~self._whole.sure(node) & ((ends & -ends) * 2 - 1 if ends else -1)

    def _of_node(self, node: str, spans: int) -> Question:
        its, after = self._spans, self._last if self._closed else -1
        places = [
            page for span in _bits(spans) for page in range(its.firsts[span], its.lasts[span] + 1) if page > after
        ]
        places = places[:HOLD_PAGES_MAX]
        return Question(node, self._lasts[:0], places, spans, whole=True, keys=[self._keys[page] for page in places])

    def _of_lasts(self, owner: int, spans: int) -> Question:
        at = _bits(spans)
        lasts = self._spans.lasts
        return Question(self._members[owner], self._lasts[at], [lasts[span] for span in at], spans, whole=False)

    def _of_all(self, owner: int, spans: int) -> Question:
        its = self._spans
        places = [page for span in _bits(spans) for page in range(its.firsts[span], its.lasts[span] + 1)]
        pages = fingerprints(b"".join([self._keys[page] for page in places]))
        return Question(self._members[owner], pages, places, spans, whole=True)


class _Told:
    """Spans that owners have told of. A span is in doubt for a node where every owner that told of it was unsure of the
    node.

    Attributes:
        spans: a bit for each.
    """

    def __init__(self) -> None:
        self.spans = 0
        self._doubts: dict[str, int] = {}  # by node, spans; "": any node

    def add(self, spans: int, unsure: Mapping[str, int]) -> None:
        """An owner has told of these spans; ``unsure``: by node, those that may be incomplete."""
        first, again = spans & ~self.spans, spans & self.spans
        self.spans |= spans
        if not unsure and not self._doubts:
            return
        any_before, any_now = self._doubts.get("", 0), unsure.get("", 0)
        after: dict[str, int] = {}
        for node in {*unsure, *self._doubts}:
            before, now = self._doubts.get(node, 0) | any_before, unsure.get(node, 0) | any_now
            if doubted := first & now | before & (now | ~again):
                after[node] = doubted
        self._doubts = after

    def sure(self, node: str) -> int:
        """Spans that are not in doubt for that node."""
        return self.spans & ~(self._doubts.get(node, 0) | self._doubts.get("", 0))


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
    """Which nodes to ask about which of ``spans``, so that, with the spans that are already ``told``, the last one is
    known and at most ``unknown_max`` in a row are not. Spans without an owner do not count."""
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
    """One owner for each of these spans, so that few nodes are asked: repeatedly the node that owns most of the
    remaining spans. Spans without an owner are left out."""
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
