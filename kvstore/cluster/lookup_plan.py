"""Search: which nodes to ask for the pages of a chain, and what their answers mean. Pure; ``cluster.find_pages`` asks.

In a closed chain, a node that has a page also has all pages before it. So the first questions are only about the last
pages of spans: of the last span, and of enough other spans that no long run of spans stays unknown. One owner answers
for all spans that it owns. Then the search asks for all pages of the spans between the last page that some node has and
the first page that no node has::

    spans       0 1 2 3 4 5 6 7 8     (nodes have 0 to 5, and half of 6)
    round 1         x     x   x x     two owners are asked; one of them owns three of the spans
    answers         +     +   - -
    round 2                 ooo       all pages of 6, whose owner has not said where they end

A chain that is stored completely needs one round, and any other chain two, however many nodes there are. If an owner is
not responding, the second owner is asked.

An owner also names nodes whose entries may be incomplete (``directory_owner``). If pages are still missing then, the
search asks those nodes which pages they have. If fewer nodes are second owners of the spans in doubt, it asks these
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

from kvstore.cluster.directory import Doubt, Locations, Placement
from kvstore.model.prefix import Fingerprints, SpanRange, fingerprints, spans_between
from kvstore.model.replica import TIERS

UNKNOWN_MIN: Final = 4  # spans in a row that round 1 may skip; in long chains the square root of their number
ASKED_MAX: Final = 8  # second owners to ask in one search, and nodes in doubt to ask
HOLD_PAGES_MAX: Final = 1 << 15  # pages in one question to a node
_NONE_OLDER: Final[Mapping[int, Placement]] = {}


@dataclass(frozen=True)
class Stretch:
    """Consecutive pages that one node has: ``start`` to ``stop`` (exclusive), counted from the first page of the
    search. ``tiers`` has a byte per page, the number of its fastest tier in ``TIERS``. ``others`` are more nodes that
    have all of these pages."""

    node: str
    start: int
    stop: int
    tiers: bytes
    others: tuple[str, ...] = ()


class Question(NamedTuple):
    """A question to one owner about ``pages``, which are at ``places`` in the chain. They are the last pages of
    ``spans`` (a bit for each), or all their pages (``whole``). With ``keys``, the question is to a node: which of these
    pages it has."""

    owner: str
    pages: Fingerprints
    places: list[int]
    spans: int
    whole: bool
    keys: list[bytes] | None = None


class Search:
    """One search. Life: ``ask`` -> ``take_answer`` for each answer -> ``ask`` .. until there are no more questions or
    there is no time -> ``result``.

    Args:
        keys: keys of the chain from its root.
        first: the first page to find.
        nodes: the nodes that are allowed in the result.
        closed: a node that has a page also has all pages before it.
        turn: any number. It decides which of several nodes with the same pages is chosen.
        older: earlier placements by their numbers.
        spans: the spans of the keys, if these are not those of a chain: with ``separate_spans``, the keys are those of
            opaque objects. ``holders`` then has the result.
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
        spans: SpanRange | None = None,
    ) -> None:
        self._keys, self._first, self._nodes, self._closed, self._turn = keys, first, nodes, closed, turn
        self._spans = spans or spans_between(first, len(keys))
        self._names, self._lasts = self._spans.names_and_lasts(keys)
        self._members, self._spans_of = placement.nodes, owned_spans(placement, self._names)
        self._older = older
        self._second = False  # whether the second owners of spans in doubt were asked
        self._asked_nodes = set[str]()  # nodes that were asked which pages they have
        self._ends = _Coverage()  # answers about the last pages of spans
        self._full = _Coverage()  # answers about all pages of spans
        self._answers_of: dict[int, int] = {}  # the spans that each owner has answered for
        self._answers: list[tuple[list[int], Locations]] = []
        self._last, self._holder = first - 1, ""  # the last page that any node has, and that node
        self._holders = set[str]()  # all nodes that have it

    def ask(self, silent: Collection[str]) -> list[Question]:
        """Return the next questions, one per node. The list is empty if no further question would help. ``silent``:
        nodes that are not responding."""
        return self._of_owners(silent) or self._in_doubt(silent)

    def _of_owners(self, silent: Collection[str]) -> list[Question]:
        owned = {place: spans for place, spans in self._spans_of.items() if self._members[place] not in silent}
        lasts = self._spans.lasts
        every = (1 << len(lasts)) - 1
        if not self._closed:
            return [self._of_all(*each) for each in fewest(owned, every & ~self._full.spans).items()]
        if self._last == lasts[-1]:
            return []
        low = bisect_right(lasts, self._last)
        rest = every & -(1 << low)
        chosen = spread(owned, rest, self._ends.spans, max(UNKNOWN_MIN, isqrt(len(lasts))))
        if chosen:
            return [self._of_lasts(*each) for each in chosen.items()]
        missing = self._ends.spans & rest
        unclear = (missing & -missing) * 2 - 1 if missing else every
        return [self._of_all(*each) for each in fewest(owned, unclear & rest & ~self._full.spans).items()]

    def take_answer(self, question: Question, answer: Locations) -> None:
        """Handle the answer to a question."""
        if question.keys is None:
            self._note(question, answer.doubts)
        self._answers.append((question.places, answer))
        nodes, pages = answer.nodes.tolist(), answer.pages.tolist()
        best: tuple[int, int, int] | None = None
        for row in reversed(range(len(pages))):  # the rows are in order of pages
            place = question.places[pages[row]]
            if place <= self._last or (best is not None and place < -best[0]):
                break
            if answer.names[nodes[row]] in self._nodes:
                rank = -place, int(answer.tiers[row]), (nodes[row] + self._turn) % len(answer.names)
                if best is None or rank < best:
                    best, holder = rank, answer.names[nodes[row]]
        if best is not None:
            self._last, self._holder = -best[0], holder
            self._holders.clear()
        for row in reversed(range(len(pages))):
            if question.places[pages[row]] < self._last:
                break
            if question.places[pages[row]] == self._last and answer.names[nodes[row]] in self._nodes:
                self._holders.add(answer.names[nodes[row]])

    def result(self) -> list[Stretch]:
        """Return the result so far: the places of the leading pages, as consecutive stretches."""
        if not self._closed:
            return stretches(_merge(self._answers, self._first), len(self._keys) - self._first, self._nodes)
        tiers = dict[int, int]()
        for places, answer in self._answers:
            its = [name == self._holder for name in answer.names]
            rows = zip(answer.pages.tolist(), answer.nodes.tolist(), answer.tiers.tolist(), strict=True)
            for page, node, tier in reversed(list(rows)):  # a page's fastest tier comes first
                if its[node]:
                    tiers[places[page]] = tier
        known, at = b"", self._first
        for page in sorted(tiers):  # a page that was not asked for gets the tier of the next one
            known += bytes([tiers[page]]) * (page + 1 - at)
            at = page + 1
        others = tuple(sorted(self._holders - {self._holder}))
        return [Stretch(self._holder, 0, len(known), known, others)] if known else []

    def holders(self) -> list[list[str]]:
        """Return, for each key, the nodes that have it, those with it in the fastest tier first."""
        known: list[dict[str, int]] = [{} for _ in self._keys]
        for places, answer in self._answers:
            rows = zip(answer.pages.tolist(), answer.nodes.tolist(), answer.tiers.tolist(), strict=True)
            for page, node, tier in rows:
                if (name := answer.names[node]) in self._nodes:
                    tiers = known[places[page]]
                    tiers[name] = min(tier, tiers.get(name, tier))
        return [[name for _, name in sorted((tier, name) for name, tier in tiers.items())] for tiers in known]

    def _note(self, question: Question, doubts: Collection[Doubt]) -> None:
        """Note that an owner has answered for some spans, and that its entries of the nodes in ``doubts`` may be
        incomplete."""
        owner, spans, spans_in_doubt = question.owner, question.spans, dict[str, int]()
        for node, placement in doubts:
            spans_in_doubt[node] = spans_in_doubt.get(node, 0) | spans & ~self._owned_before(owner, placement)
        self._ends.add(spans, spans_in_doubt)
        if question.whole:
            self._full.add(spans, spans_in_doubt)
        place = self._members.index(owner)
        self._answers_of[place] = self._answers_of.get(place, 0) | spans

    def _owned_before(self, owner: str, placement: int) -> int:
        """Return the spans that ``owner`` already owned in the placement with this number; none if that placement is
        unknown."""
        old = self._older.get(placement)
        if old is None or owner not in old.nodes:
            return 0
        return owned_spans(old, self._names).get(old.nodes.index(owner), 0)

    def _in_doubt(self, silent: Collection[str]) -> list[Question]:
        """Return the questions about nodes whose entries might be incomplete at all owners that have answered."""
        rest = self._missing()
        if not rest:
            return []
        unknown = {node: self._unknown(node, rest) for node in self._nodes if node not in silent}
        unknown = {node: spans for node, spans in unknown.items() if spans and node not in self._asked_nodes}
        spans = 0
        for its in unknown.values():
            spans |= its
        owners = {
            place: its & ~self._answers_of.get(place, 0)
            for place, its in self._spans_of.items()
            if self._members[place] not in silent
        }
        chosen = fewest(owners, spans)
        if not self._second and 0 < len(chosen) < len(unknown):
            self._second = True
            return [self._of_all(*each) for each in list(chosen.items())[:ASKED_MAX]]
        nodes = sorted(unknown)
        turn = self._turn % max(1, len(nodes))
        nodes = (nodes[turn:] + nodes[:turn])[: ASKED_MAX - len(self._asked_nodes)]
        self._asked_nodes.update(nodes)
        return [self._of_node(node, unknown[node]) for node in nodes]

    def _missing(self) -> int:
        """Spans with a page that no node has so far."""
        lasts = self._spans.lasts
        every = (1 << len(lasts)) - 1
        if self._closed:
            return every & -(1 << bisect_right(lasts, self._last))
        pages = np.zeros(len(self._keys), np.bool_)
        for places, answer in self._answers:
            mine = np.array([name in self._nodes for name in answer.names], np.bool_)
            pages[np.array(places, np.int64)[answer.pages[mine[answer.nodes]]]] = True
        return sum(1 << span for span in _bits(every) if not pages[self._spans.firsts[span] : lasts[span] + 1].all())

    def _unknown(self, node: str, rest: int) -> int:
        """Return the spans in ``rest`` of which this node might have more pages than it announced. In a closed chain,
        it has nothing after a span whose last page it certainly lacks."""
        ends = self._ends.sure(node) & rest if self._closed else 0
        return rest & ~self._full.sure(node) & ((ends & -ends) * 2 - 1 if ends else -1)

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


class _Coverage:
    """Spans that owners have answered for. A span is in doubt for a node if every owner that answered named
    that node as one whose entries may be incomplete.

    Attributes:
        spans: one bit per span.
    """

    def __init__(self) -> None:
        self.spans = 0
        self._doubts: dict[str, int] = {}  # the spans in doubt for each node; "": for any node

    def add(self, spans: int, doubts: Mapping[str, int]) -> None:
        """Record that an owner has answered for ``spans``. ``doubts`` has, for each node, the spans that might be
        incomplete."""
        first, second = spans & ~self.spans, spans & self.spans
        self.spans |= spans
        if not doubts and not self._doubts:
            return
        any_before, any_now = self._doubts.get("", 0), doubts.get("", 0)
        after: dict[str, int] = {}
        for node in {*doubts, *self._doubts}:
            before, now = self._doubts.get(node, 0) | any_before, doubts.get(node, 0) | any_now
            if doubt := first & now | before & (now | ~second):
                after[node] = doubt
        self._doubts = after

    def sure(self, node: str) -> int:
        """Spans that are not in doubt for this node."""
        return self.spans & ~(self._doubts.get(node, 0) | self._doubts.get("", 0))


def owned_spans(placement: Placement, names: Fingerprints) -> dict[int, int]:
    """Return the spans that each node owns, with one bit per span, by the node's place in ``placement``."""
    owned: dict[int, int] = {}
    bit = 1
    for owners in placement.owners_of(names.tolist()):
        for place in owners:
            owned[place] = owned.get(place, 0) | bit
        bit <<= 1
    return owned


def spread(owned: Mapping[int, int], spans: int, known: int, unknown_max: int) -> dict[int, int]:
    """Choose the nodes to ask, and about which of ``spans``, so that together with ``known`` the last span is known and
    at most ``unknown_max`` spans in a row are not. Spans without an owner do not count."""
    reachable = 0
    for theirs in owned.values():
        reachable |= theirs
    chosen: dict[int, int] = {}
    last, unknown = (spans & reachable).bit_length() - 1, spans & reachable & ~known
    while unknown:
        runs = unknown  # after the loop: where runs begin that are too long
        for _ in range(unknown_max):
            runs &= runs >> 1
        if unknown >> last & 1:
            span = last
        elif runs:
            span = (runs & -runs).bit_length() - 1 + unknown_max
        else:
            break
        owner = max(
            (place for place in owned if owned[place] >> span & 1),
            key=lambda place: (owned[place] & unknown).bit_count(),
        )
        chosen[owner] = owned[owner] & unknown
        unknown &= ~owned[owner]
    return chosen


def fewest(owned: Mapping[int, int], spans: int) -> dict[int, int]:
    """Choose one owner for each of ``spans`` so that few nodes are asked: repeatedly the node that owns most of the
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
    """Return the numbers of the bits that are set, ascending."""
    return [at for at in range(word.bit_length()) if word >> at & 1]


def stretches(locations: Locations, count: int, nodes: Collection[str]) -> list[Stretch]:
    """Return the fewest stretches that cover the first ``count`` pages, up to the first page that none of ``nodes``
    has."""
    best: dict[str, npt.NDArray[np.uint8]] = {}  # each node's fastest tier of each page; len(TIERS): none
    for place in np.unique(locations.nodes).tolist():
        if locations.names[place] in nodes:
            tiers = best.setdefault(locations.names[place], np.full(count, len(TIERS), np.uint8))
            rows = locations.nodes == place
            np.minimum.at(tiers, locations.pages[rows], locations.tiers[rows])
    ends = {node: _ends(tiers < len(TIERS)) for node, tiers in best.items()}
    covered: list[Stretch] = []
    at = 0
    while at < count and ends:
        node = max(ends, key=lambda node: (int(ends[node][at]), node))
        stop = int(ends[node][at])
        if stop <= at:
            break
        others = tuple(sorted(each for each in ends if each != node and int(ends[each][at]) >= stop))
        covered.append(Stretch(node, at, stop, best[node][at:stop].tobytes(), others))
        at = stop
    return covered


def _ends(has: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return, for each page, the first missing page at or after it."""
    gaps = np.append(np.flatnonzero(~has), len(has))
    return gaps[np.searchsorted(gaps, np.arange(len(has)))]


def _merge(answers: list[tuple[list[int], Locations]], first: int) -> Locations:
    """Return all answers as one, with places counted from page ``first``."""
    names: list[str] = []
    pages, nodes, tiers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)]
    for places, answer in answers:
        pages.append(np.array(places, np.int64)[answer.pages] - first)
        nodes.append(answer.nodes + len(names))
        tiers.append(answer.tiers)
        names += answer.names
    return Locations(np.concatenate(pages), np.concatenate(nodes), np.concatenate(tiers), names)
