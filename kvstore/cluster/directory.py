"""The directory: which nodes of the cluster have which pages, as announced. Soft state; nothing in it is trusted.

**Owners.** The name of a span says in which of 65,536 partitions it is. ``Placement`` assigns each partition to two
nodes, the owners of its spans, by rendezvous hashing (Thaler and Ravishankar, "Using name-based mappings to increase
hit rates", 1998): every pair of partition and node has a weight, and the two nodes with the largest weights own the
partition. When a node joins or leaves, only its own partitions change owners. Every node announces its pages to their
owners. An entry is a page's fingerprint, a node and a tier. It has no address: the node that has the page finds and
proves it.

**Streams.** A node sends an owner a *stream* of numbered batches, which begins with everything the node has for this
owner. Until the stream is complete, an earlier stream remains in use. The batch that completes it (``whole``) makes the
earlier one void. A repeated batch changes nothing. A late batch may seem to begin a stream; it becomes void when the
node continues the stream before. If an owner does not know a stream (it is new, or forgot the node), or misses a
number, the node begins another stream::

    node    stream 7: 0 1 2(whole) 3 4 ..        stream 9: 0 1(whole) 2 ..
    owner               1 2 3      4 5  (restarts)  AGAIN  1 2        3 ..

Each batch says for which placement of spans the owner now has all entries (``placement``). While a stream or the
entries of moved spans are still being sent, the owner's entries of that node may be incomplete.

**Entries.** An entry has 8 bytes: 48 bits of the fingerprint, 14 bits for the number of a stream, 2 for the tier.
Entries are sorted in one array. Changes are sorted in a second one, and merged into the first when there are many.
Pages with equal 48 bits cannot be distinguished. With 10 million entries, about one lookup in 10 million asks a node
without result, or misses a page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore.model.prefix import Fingerprints

AGAIN: Final = -1
GONE: Final = 0x80  # bit of a mark: the page was removed from that tier
CHANGES_MIN: Final = 4096  # number of changes that are kept in addition to the table
CHANGES_SHARE: Final = 32  # or this part of the table
MERGED_MAX: Final = 1 << 16  # up to this many entries changes are merged before each read
STREAMS_MAX: Final = 1 << 14  # an entry has this many places; a node that announces everything again has two
SORTED_MIN: Final = 256  # a lookup with more pages sorts them first
PER_PAGE_MAX: Final = 8  # entries of one page in an answer

_LOW: Final = np.uint64(0xFFFF)
_HIGH: Final = ~_LOW
_LOW_BITS: Final = np.uint64(16)
_TIER_BITS: Final = np.uint64(2)
_TIER: Final = np.uint64(3)
Marks = npt.NDArray[np.uint8]
"""For each page, the number of its tier in ``TIERS``, with the bit ``GONE`` if the page was removed from the tier."""


@dataclass(frozen=True, slots=True)
class AnnounceBatch:
    """A batch of a node's stream to one owner.

    Attributes:
        node: the node's name.
        stream: number of the stream, drawn by the node.
        number: number of the batch in its stream, starting at 0.
        fingerprints, marks: stored and removed pages, in order.
        whole: whether this batch completes the node's entries for this owner.
        placement: the number of the ``Placement`` for which the owner has all entries after this batch; 0 if for none,
            or if more follows at once.
    """

    node: str
    stream: int
    number: int
    fingerprints: Fingerprints
    marks: Marks
    whole: bool = False
    placement: int = 0


class Doubt(NamedTuple):
    """A node whose entries may be incomplete at an owner.

    Attributes:
        node: the node's name; "" stands for any node.
        placement: the number of the ``Placement`` for which the entries are complete; 0 if for none, so any may be
            missing.
    """

    node: str
    placement: int


@dataclass(frozen=True, slots=True)
class Locations:
    """The result of a lookup: rows, ordered by page.

    Attributes:
        pages: positions among the requested pages, int64 ``[rows]``. nodes: positions in ``names``, int64 ``[rows]``.
        tiers: numbers in ``TIERS``, uint8 ``[rows]``.
        doubts: nodes that may have more of these pages.
    """

    pages: npt.NDArray[np.int64]
    nodes: npt.NDArray[np.int64]
    tiers: npt.NDArray[np.uint8]
    names: list[str]
    doubts: tuple[Doubt, ...] = ()


@dataclass(slots=True)
class _Stream:
    place: int
    number: int
    next: int = 0
    placement: int = 0


class Directory:
    """The entries of one owner.

    Args:
        bytes_max: limit of the entries' memory. Entries that do not fit are dropped, so their pages are not found
            through this owner.

    Attributes:
        refused: number of entries that did not fit.
    """

    def __init__(self, bytes_max: int) -> None:
        self._max = bytes_max // 16  # entries: a change of the table makes a second one
        self._streams: dict[str, list[_Stream]] = {}  # by node, the newest last
        self._names: list[str] = []  # by place; "": free
        self._table = _NONE
        self._added = _NONE  # entries that are not in the table yet
        self._removed = _NONE  # entries that may be in the table and are void
        self.refused = 0

    def __len__(self) -> int:
        """Return the number of entries."""
        self._merge()
        return len(self._table)

    @property
    def nbytes(self) -> int:
        """Memory of the entries."""
        return self._table.nbytes + self._added.nbytes + self._removed.nbytes

    @property
    def nodes(self) -> list[str]:
        """The nodes that have announced something."""
        return sorted(self._streams)

    def apply(self, batch: AnnounceBatch) -> int:
        """Apply a batch. Return the number of the next batch, or ``AGAIN`` to ask for a new stream."""
        streams = self._streams.get(batch.node, [])
        stream = next((each for each in streams if each.number == batch.stream), None)
        if stream is None:
            stream = self._begin(batch) if batch.number == 0 else None
            if stream is None:
                return AGAIN
        if batch.number != stream.next:
            if batch.number == stream.next - 1 and not batch.placement:
                stream.placement = 0  # our answer was lost, and the node has more to announce
            return stream.next
        stream.next += 1
        stream.placement = batch.placement
        self._change(stream, batch)
        streams = self._streams[batch.node]
        void = streams if batch.whole else streams[streams.index(stream) + 1 :]
        self._end([(batch.node, each) for each in void if each is not stream])
        return stream.next

    def placement(self, node: str) -> int:
        """Return the number of the placement for which the node's newest stream is complete; 0 if there is none."""
        streams = self._streams.get(node)
        return streams[-1].placement if streams else 0

    def forget(self, nodes: Collection[str]) -> None:
        """Drop the entries of nodes that are no longer members."""
        self._end([(node, stream) for node in nodes for stream in self._streams.get(node, [])])

    def find(self, pages: Fingerprints, most: int = PER_PAGE_MAX) -> Locations:
        """Return the known locations of these pages, at most ``most`` entries per page."""
        if len(self._table) <= MERGED_MAX:
            self._merge()
        rows = _rows(self._table, pages, most)
        if len(self._removed) or len(self._added):
            rows = _with(_without(rows, _rows(self._removed, pages, most)), _rows(self._added, pages, most))
            rows = _first(rows, most)
        low = rows.astype(np.uint16)
        places, nodes, tiers = rows >> _LOW_BITS, low >> np.uint16(2), low & np.uint16(3)
        return Locations(places.astype(np.int64), nodes.astype(np.int64), tiers.astype(np.uint8), self._names)

    def entries_of(self, node: str, start: int, count: int) -> Fingerprints:
        """Return ``count`` entries of this node starting at ``start``, in the form of ``page_entries``."""
        self._merge()
        tail = self._table[np.searchsorted(self._table, np.uint64(start) & ~_LOW) :]
        places = [stream.place for stream in self._streams.get(node, [])]
        mine = tail[np.isin((tail & _LOW) >> _TIER_BITS, np.array(places, np.uint64))]
        entries = np.unique(mine & (~_LOW | _TIER))
        return entries[np.searchsorted(entries, np.uint64(start)) :][:count]

    # --- streams ----------------------------------------------------------------------------------------------------

    def _begin(self, batch: AnnounceBatch) -> _Stream | None:
        """Begin a new stream of a node; an incomplete one becomes void."""
        self._end([(batch.node, stream) for stream in self._streams.get(batch.node, [])[1:]])
        place = next((place for place, name in enumerate(self._names) if not name), len(self._names))
        if place == STREAMS_MAX:
            return None
        if place == len(self._names):
            self._names = [*self._names, batch.node]  # not changed in place: answers refer to it
        else:
            self._names = [*self._names[:place], batch.node, *self._names[place + 1 :]]
        stream = _Stream(place, batch.stream)
        self._streams.setdefault(batch.node, []).append(stream)
        return stream

    def _end(self, streams: list[tuple[str, _Stream]]) -> None:
        """Drop these streams of these nodes, in one pass over the table."""
        if not streams:
            return
        self._merge()
        stays, names = np.ones(STREAMS_MAX, np.bool_), list(self._names)
        for node, stream in streams:
            stays[stream.place], names[stream.place] = False, ""
            self._streams[node].remove(stream)
            if not self._streams[node]:
                del self._streams[node]
        self._table = self._table[stays[(self._table & _LOW) >> _TIER_BITS]]
        self._names = names  # a new list: answers refer to the old one

    # --- entries ----------------------------------------------------------------------------------------------------

    def _change(self, stream: _Stream, batch: AnnounceBatch) -> None:
        """Apply stored and removed pages. If an entry is named twice, the later one counts."""
        low = np.uint64(stream.place << 2) | (batch.marks & 3).astype(np.uint64)
        entries = batch.fingerprints & _HIGH | low
        order = np.argsort(entries, kind="stable")
        entries = entries[order]
        last = np.ones(len(entries), bool)
        last[:-1] = entries[1:] != entries[:-1]
        leaves = (batch.marks[order] & GONE != 0)[last]
        added, removed = entries[last][~leaves], entries[last][leaves]
        room = max(0, self._max - len(self._table) - len(self._added))
        self.refused += max(0, len(added) - room)
        added = added[:room]
        self._added = _with(_without(self._added, removed), added)
        self._removed = _with(_without(self._removed, added), removed)
        if len(self._added) + len(self._removed) > max(CHANGES_MIN, len(self._table) // CHANGES_SHARE):
            self._merge()

    def _merge(self) -> None:
        """Merge the changes into the table."""
        if len(self._added) or len(self._removed):
            self._table = _with(_without(self._table, self._removed), self._added)
            self._added = self._removed = _NONE


_NONE: Final = np.zeros(0, np.uint64)


def page_entries(pages: Fingerprints, marks: Marks) -> Fingerprints:
    """Return the sorted entries of a node's pages: 48 bits of the fingerprint, and the tier."""
    return np.unique(pages & ~_LOW | (marks & 3).astype(np.uint64))


def _without(entries: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the sorted ``entries`` that are not in the sorted ``others``."""
    if not len(entries) or not len(others):
        return entries
    at = np.searchsorted(entries, others)
    at = at[at < len(entries)]
    return np.delete(entries, at[entries[at] == others[: len(at)]])


def _with(entries: npt.NDArray[np.uint64], others: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the sorted union of sorted ``entries`` and ``others``. (``numpy.union1d`` would sort or hash all of them
    again.)"""
    if not len(entries) or not len(others):
        return entries if len(entries) else others
    at = entries.searchsorted(others)
    new = entries[np.minimum(at, len(entries) - 1)] != others
    return np.insert(entries, at[new], others[new])


def _first(rows: npt.NDArray[np.uint64], most: int) -> npt.NDArray[np.uint64]:
    """Return the first ``most`` rows of each page, from sorted ``rows``."""
    places = rows >> _LOW_BITS
    return rows[np.arange(len(rows)) - places.searchsorted(places) < most]


def _rows(entries: npt.NDArray[np.uint64], pages: Fingerprints, most: int) -> npt.NDArray[np.uint64]:
    """Return entries of these pages, at most ``most`` per page, with the page's position in place of its
    fingerprint."""
    if not len(entries):
        return _NONE
    # Sorted pages are found five times as fast, since neighbouring parts of a large table are in a CPU cache.
    order = pages.argsort() if len(pages) >= SORTED_MIN else None
    pages = pages if order is None else pages[order]
    low = entries.searchsorted(pages & _HIGH)
    at = (entries.take(low, mode="clip") ^ pages <= _LOW).nonzero()[0]
    if not len(at):
        return _NONE
    rows = low[at]
    if (entries.take(rows + 1, mode="clip") ^ pages[at] <= _LOW).any():  # some page has two entries
        counts = np.minimum(entries.searchsorted(pages[at] | _LOW, "right") - rows, most)
        at = np.repeat(at, counts)
        rows = np.arange(len(at)) + np.repeat(rows - np.cumsum(counts) + counts, counts)
    result = (at if order is None else order[at]).astype(np.uint64) << _LOW_BITS | entries[rows] & _LOW
    if order is not None:
        result.sort()
    return result


def join(parts: list[Locations], step: int) -> Locations:
    """Combine the results of lookups of ``step`` pages each into one."""
    names: list[str] = []
    nodes = []
    for part in parts:
        if part.names and names[-len(part.names) :] != part.names:
            names = names + part.names
        nodes.append(part.nodes + (len(names) - len(part.names)))
    pages = np.concatenate([part.pages + step * number for number, part in enumerate(parts)])
    return Locations(pages, np.concatenate(nodes), np.concatenate([part.tiers for part in parts]), names)


OWNERS: Final = 2
PARTITIONS: Final = 1 << 16  # more make nodes' shares more equal: 300 nodes own 437 each, with a deviation of 5 %
BLOCK_WEIGHTS: Final = 1 << 18  # weights in memory at a time
NODES_MAX: Final = (1 << 16) - 1
_UNKNOWN: Final = np.uint32((1 << 32) - 1)
_SECOND: Final = np.uint32(16)
_FIRST: Final = np.uint32((1 << 16) - 1)


def partitions(spans: Fingerprints) -> npt.NDArray[np.uint64]:
    """Return the partition of each span: the low bits of its name, because the entries of pages do not have them."""
    return spans & np.uint64(PARTITIONS - 1)


class Placement:
    """The owners of spans for one set of live nodes. Immutable: other members make another placement. Threads may share
    it.

    The owners of a partition are computed when they are needed for the first time. A placement that is made from an
    earlier one copies what that one has computed, and changes only the partitions that changed owners. So its cost
    depends on how many nodes joined and left, and not on how many there are.

    Args:
        before: an earlier placement, with other members.

    Attributes:
        nodes: names, sorted.
        number: a hash of the names, never 0, so that placements of the same nodes have equal numbers.
    """

    def __init__(self, nodes: Iterable[str], before: Placement | None = None) -> None:
        self.nodes = tuple(sorted(set(nodes)))
        assert len(self.nodes) <= NODES_MAX, "the catalog has at most this many nodes"
        self.number = xxhash.xxh3_64_intdigest("\0".join((str(PARTITIONS), *self.nodes)).encode()) | 1
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in self.nodes], np.uint64)
        # By partition: the positions of both owners in one word, so that a thread never reads half of a pair.
        self._table = np.full(PARTITIONS, _UNKNOWN, np.uint32)
        self._words = memoryview(self._table.data)
        if before is not None and min(len(self.nodes), len(before.nodes)) >= OWNERS:
            self._continue(before)

    def owners(self, spans: Fingerprints) -> npt.NDArray[np.int64]:
        """Return the positions in ``nodes`` of each span's owners, the first owner first: int64
        ``[spans, min(2, nodes)]``."""
        count = min(OWNERS, len(self.nodes))
        if count < OWNERS:
            return np.zeros((len(spans), count), np.int64)
        words = self._of(partitions(spans))
        owners = np.empty((len(spans), OWNERS), np.int64)
        owners[:, 0], owners[:, 1] = words & _FIRST, words >> _SECOND
        return owners

    def owners_of(self, spans: list[int]) -> list[tuple[int, ...]]:
        """Return the owners of a few spans."""
        if len(self.nodes) < OWNERS:
            return [tuple(range(len(self.nodes)))] * len(spans)
        words, partition = self._words, PARTITIONS - 1
        pairs = [words[span & partition] for span in spans]
        if int(_UNKNOWN) in pairs:
            pairs = self._of(partitions(np.array(spans, np.uint64))).tolist()
        return [(pair & 0xFFFF, pair >> 16) for pair in pairs]

    def shares(self, spans: Fingerprints) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
        """Yield each owner of at least one of these spans, with the ascending positions of its spans."""
        owners = self.owners(spans).astype(np.uint16)
        flat = owners.ravel()
        order = flat.argsort(kind="stable")
        edges = np.flatnonzero(np.diff(flat[order])) + 1
        for part in np.split(order, edges) if len(order) else ():
            yield self.nodes[flat[part[0]]], part // owners.shape[1]

    def partitions_of(self, names: Collection[str]) -> npt.NDArray[np.bool_]:
        """Return, for each partition, whether at least one of these nodes may own it: bool ``[PARTITIONS]``. True for
        partitions that were not computed, unless there are no such nodes."""
        chosen = np.array([name in names for name in self.nodes], np.bool_)
        if chosen.all() or not chosen.any():
            return np.full(PARTITIONS, bool(len(chosen)) and bool(chosen[0]))
        owned = np.ones(PARTITIONS, np.bool_)
        known = np.flatnonzero(self._table != _UNKNOWN).astype(np.uint64)
        owned[known] = chosen[self.owners(known)].any(axis=1)
        return owned

    def partitions_moved(self, before: Placement) -> npt.NDArray[np.bool_]:
        """Return, for each partition, whether its owners may be others than before: bool ``[PARTITIONS]``. True for
        partitions that ``before`` has not computed, because no page of them was announced."""
        if min(len(self.nodes), len(before.nodes)) < OWNERS:
            return np.full(PARTITIONS, self.nodes != before.nodes)
        moved = np.ones(PARTITIONS, np.bool_)
        known = np.flatnonzero(before._table != _UNKNOWN).astype(np.uint64)
        ours, theirs = self.owners(known), self._places_of(before)[before.owners(known)]
        stay = (ours[:, 0] == theirs[:, 0]) & (ours[:, 1] == theirs[:, 1])
        moved[known] = ~(stay | (ours[:, 0] == theirs[:, 1]) & (ours[:, 1] == theirs[:, 0]))
        return moved

    def _of(self, which: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return the words of these partitions, after computing those that are not known."""
        words = self._table[which]
        unknown = words == _UNKNOWN
        if unknown.any():
            is_missing = np.zeros(PARTITIONS, np.bool_)
            is_missing[which[unknown]] = True
            missing, rows = np.flatnonzero(is_missing), max(1, BLOCK_WEIGHTS // len(self.nodes))
            for start in range(0, len(missing), rows):
                block = missing[start : start + rows].astype(np.uint64)
                self._table[block] = self._heaviest(block)
            words = self._table[which]
        return words

    def _heaviest(self, which: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
        """Return the words of these partitions, from the weights of all nodes."""
        weights = _mix(which[:, None] ^ self._seeds)
        first = weights.argmax(axis=1)
        weights[np.arange(len(weights)), first] = 0
        return _pair(first, weights.argmax(axis=1))

    def _places_of(self, before: Placement) -> npt.NDArray[np.int64]:
        """Return the place here of each node of an earlier placement; -1 if it has left."""
        places = {name: place for place, name in enumerate(self.nodes)}
        return np.array([places.get(name, -1) for name in before.nodes], np.int64)

    def _continue(self, before: Placement) -> None:
        """Take over the owners of partitions that ``before`` knows. A partition that a node has left becomes unknown. A
        node that has joined owns the partitions in which it is heavier than the second owner."""
        known = np.flatnonzero(before._table != _UNKNOWN)
        words, places = before._table[known], self._places_of(before)
        first, second = places[words & _FIRST], places[words >> _SECOND]
        stays = (first >= 0) & (second >= 0)
        known, first, second = known[stays], first[stays], second[stays]
        if not len(known):
            return
        which = known.astype(np.uint64)
        joined = np.setdiff1d(np.arange(len(self.nodes)), places)
        if len(joined) * OWNERS > len(self.nodes):
            return  # most partitions change, so it is as cheap to compute all of them
        firsts, seconds = (_mix(which ^ self._seeds[each]) for each in (first, second))
        for place in joined.tolist():
            weights = _mix(which ^ self._seeds[place])
            at = np.flatnonzero(weights > seconds)
            wins = weights[at] > firsts[at]
            top, low = at[wins], at[~wins]
            second[top], seconds[top], first[top], firsts[top] = first[top], firsts[top], place, weights[top]
            second[low], seconds[low] = place, weights[low]
        self._table[known] = _pair(first, second)


def _pair(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    return first.astype(np.uint32) | second.astype(np.uint32) << _SECOND


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
