"""What a node sends to the owners of its spans: ``AnnouncePlan`` for pages, ``TombstonePlan`` for tombstones. No I/O.
See ``directory``.

Each owner gets a stream: first everything the node has for this owner, then each change. A stream has only one batch in
flight, which is sent again until it is answered. When the members of the cluster change, an owner that stays receives
only the pages that it gained and lost. An owner that is new, or has forgotten this node, receives a new stream.

The caller follows the node's event log. ``add_pages`` needs the pages of some partitions at one point of that log::

    wanted = plan.wanted()                                           (None: nothing to do)
    lock the node: note the log's newest number, copy the pages that ``wanted`` selects
    apply(events up to that number), add_pages(wanted, pages), apply(later events) ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, KeysView, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.cluster.directory import AGAIN, GONE, AnnounceBatch, Marks, Placement, partitions
from kvstore.model.prefix import Fingerprints, fingerprints
from kvstore.model.tombstones import Tombstone

BATCH_PAGES: Final = 4096
LOOK_S: Final = 0.05  # pause between two looks for news, in seconds, ...
OWNERS_PER_LOOK: Final = 16  # ... with this many owners or fewer; see ``pause_s``
ADD_PAGES: Final = 1 << 17  # pages that ``add_pages`` divides between owners at a time
QUEUED_MAX: Final = 1 << 20  # entries that wait for one owner; with more, the owner gets a new stream


def pause_s(owners: int) -> float:
    """Return the pause between two looks for news, in seconds. With many owners, each receives fewer and larger
    batches, because a put then touches more owners and fills fewer of their batches."""
    return LOOK_S * max(1.0, owners / OWNERS_PER_LOOK)


IDLE_S: Final = 1.0  # a node without news for an owner sends an empty batch after this time, ...
IDLE_PER_S: Final = 64  # ... or later, so that it sends at most this many empty batches per second


def idle_s(owners: int) -> float:
    """Return after which time, in seconds, a node without news for an owner sends an empty batch."""
    return max(IDLE_S, owners / IDLE_PER_S)


class Entries(NamedTuple):
    """Pages and their spans, columns of equal length. ``marks`` as in ``directory``."""

    spans: Fingerprints
    fingerprints: Fingerprints
    marks: Marks


def settle(pages: Entries, changes: Entries) -> Entries:
    """Return the pages that remain of ``pages`` after ``changes``. ``pages`` may be in any order and may repeat;
    ``changes`` are in the order in which they happened."""
    if not len(changes.marks):
        return pages
    touched = np.isin(pages.fingerprints, changes.fingerprints)
    last = dict[tuple[int, int], tuple[int, int]]()
    for some in (part_of(pages, touched), changes):
        for span, page, mark in zip(*(column.tolist() for column in some), strict=True):
            last[page, mark & ~GONE] = span, mark
    stays = [(span, page, mark) for (page, _), (span, mark) in last.items() if not mark & GONE]
    spans, prints, marks = zip(*stays, strict=True) if stays else ((), (), ())
    after = Entries(np.array(spans, np.uint64), np.array(prints, np.uint64), np.array(marks, np.uint8))
    return join([part_of(pages, ~touched), after])


def part_of(pages: Entries, which: npt.NDArray[np.bool_] | slice) -> Entries:
    """Return the entries that ``which`` selects."""
    return Entries(pages.spans[which], pages.fingerprints[which], pages.marks[which])


def join(parts: Sequence[Entries]) -> Entries:
    """Return all ``parts`` as one, in order."""
    spans, prints, marks = zip(*parts, strict=True)
    return Entries(np.concatenate(spans), np.concatenate(prints), np.concatenate(marks))


@dataclass(frozen=True, slots=True)
class Wanted:
    """The pages that a plan needs to continue.

    Attributes:
        placement: the placement that the plan will use.
        streams: the owners that will get a new stream.
        partitions: for each partition, whether the plan needs its pages: bool ``[PARTITIONS]``.
    """

    placement: Placement
    streams: frozenset[str]
    partitions: npt.NDArray[np.bool_]

    def select(self, spans: Fingerprints) -> npt.NDArray[np.bool_]:
        """Return which of these spans are in a wanted partition."""
        return self.partitions[partitions(spans)]


@dataclass(slots=True)
class _Owner:
    """The state of one owner. While ``stream`` is None nothing is queued: the owner needs a new stream with
    everything."""

    stream: int | None = None
    next: int = 0
    queue: deque[tuple[Fingerprints, Marks]] = field(default_factory=deque)
    queued: int = 0
    first: int = 0  # number of entries in ``queued`` that the node had when the stream began
    whole: bool = False  # the batch that completes these entries was sent
    target: int = 0  # the placement that the owner is being updated to
    due: int = 0  # number of entries in ``queued`` to send before the owner is complete for ``target``
    placement: int = 0  # the placement for which the owner is complete once it has all batches sent so far
    sent: AnnounceBatch | None = None

    def add(self, fingerprints: Fingerprints, marks: Marks) -> None:
        if self.stream is None or not len(fingerprints):
            return
        self.queue.append((fingerprints, marks))
        self.queued += len(fingerprints)
        if self.queued > QUEUED_MAX + self.first:
            self.drop()

    def drop(self) -> None:
        self.stream, self.sent, self.placement = None, None, 0
        self.queue.clear()
        self.queued = self.first = 0


class AnnouncePlan:
    """Decides what one node announces. The caller sends what ``batch`` returns, and reports the answer.

    Args:
        node: the node's name.
        draw: returns numbers of streams that are unique in the pool.
    """

    def __init__(self, node: str, draw: Callable[[], int]) -> None:
        self._node = node
        self._draw = draw
        self._members: tuple[str, ...] = ()
        self._placement = Placement([])
        self._owners: dict[str, _Owner] = {}

    @property
    def owners(self) -> KeysView[str]:
        """The owners that receive announcements."""
        return self._owners.keys()

    @property
    def placement(self) -> Placement:
        """The placement of the spans of the pages that were added last."""
        return self._placement

    @property
    def queued(self) -> int:
        """How many entries are not announced yet."""
        return sum(each.queued + (len(each.sent.marks) if each.sent else 0) for each in self._owners.values())

    def members(self, names: Iterable[str]) -> None:
        """Set the nodes that own a part of the directory."""
        self._members = tuple(sorted(set(names)))

    def restart(self) -> None:
        """Begin a new stream to every owner, because events were missed."""
        for owner in self._owners.values():
            owner.drop()

    def wanted(self) -> Wanted | None:
        """Return which pages ``add_pages`` needs, because the members changed or an owner needs a new stream. None if
        neither is the case."""
        now = self._placement
        placement = now if self._members == now.nodes else Placement(self._members, now)
        current = {name for name, owner in self._owners.items() if owner.stream is not None}
        streams = frozenset(placement.nodes) - current
        if placement is now and not streams:
            return None
        which = placement.partitions_of(streams)
        if placement is not now and not which.all():
            which |= placement.partitions_moved(now)
        return Wanted(placement, streams, which)

    def add_pages(self, wanted: Wanted, pages: Entries) -> None:
        """Continue with the placement of ``wanted``.

        Args:
            wanted: the result of the last ``wanted``.
            pages: the node's pages as of the last ``apply``: at least those that ``wanted`` selects.
        """
        before, self._placement = self._placement, wanted.placement
        self._owners = {name: self._owners.get(name) or _Owner() for name in wanted.placement.nodes}
        for name in wanted.streams:
            owner = self._owners[name]
            owner.drop()
            owner.stream, owner.next, owner.whole = self._draw(), 0, False
        for start in range(0, len(pages.marks), ADD_PAGES):
            part = part_of(pages, slice(start, start + ADD_PAGES))
            self._add_part(wanted, before, part_of(part, wanted.select(part.spans)))
        for owner in self._owners.values():
            owner.target, owner.due = wanted.placement.number, owner.queued

    def _add_part(self, wanted: Wanted, before: Placement, pages: Entries) -> None:
        had = dict(before.shares(pages.spans))
        has = dict(wanted.placement.shares(pages.spans))
        none = np.zeros(0, np.int64)
        for name in had.keys() | has.keys():
            owner, mine = self._owners.get(name), has.get(name, none)
            if owner is None:
                continue
            if name in wanted.streams:
                owner.first += len(mine)
                owner.add(pages.fingerprints[mine], pages.marks[mine])
            else:
                his = had.get(name, none)
                gained, lost = np.setdiff1d(mine, his, True), np.setdiff1d(his, mine, True)
                owner.add(pages.fingerprints[gained], pages.marks[gained])
                owner.add(pages.fingerprints[lost], pages.marks[lost] | np.uint8(GONE))

    def apply(self, pages: Entries) -> None:
        """Apply these changes, stored and removed pages, in their order."""
        for name, mine in self._placement.shares(pages.spans):
            self._owners[name].add(pages.fingerprints[mine], pages.marks[mine])

    def batch(self, name: str, idle: bool = False) -> AnnounceBatch | None:
        """Return the next batch for this owner, or None. A batch that was not answered is returned again.

        ``idle``: return an empty batch if there is no news, so that an owner that has forgotten this node says so.
        """
        owner = self._owners.get(name)
        if owner is None or owner.stream is None:
            return None
        is_incomplete = not owner.whole or owner.placement != owner.target
        if owner.sent is None and (owner.queue or is_incomplete or idle):
            owner.sent = self._next(owner, owner.stream)
        elif owner.sent is not None and owner.sent.placement and owner.queue:
            owner.sent = replace(owner.sent, placement=0)  # not answered yet, and there is news
        return owner.sent

    def _next(self, owner: _Owner, stream: int) -> AnnounceBatch:
        parts: list[tuple[Fingerprints, Marks]] = []
        room = BATCH_PAGES
        while owner.queue and room:
            fingerprints, marks = owner.queue.popleft()
            if len(marks) > room:
                owner.queue.appendleft((fingerprints[room:], marks[room:]))
            parts.append((fingerprints[:room], marks[:room]))
            room -= len(parts[-1][1])
        entries = BATCH_PAGES - room
        owner.queued -= entries
        owner.first, owner.due = max(0, owner.first - entries), max(0, owner.due - entries)
        owner.placement = owner.placement if owner.due else owner.target
        completes = not owner.whole and owner.first == 0
        owner.whole |= completes
        fingerprints = np.concatenate([np.zeros(0, np.uint64), *(part[0] for part in parts)])
        marks = np.concatenate([np.zeros(0, np.uint8), *(part[1] for part in parts)])
        placement = owner.placement if owner.queued == owner.due else 0  # 0: more entries follow this batch
        return AnnounceBatch(self._node, stream, owner.next, fingerprints, marks, completes, placement)

    def take_answer(self, name: str, sent: AnnounceBatch, next_number: int) -> None:
        """Handle the owner's answer to the batch ``sent``: the number of the batch that the owner expects next."""
        owner = self._owners.get(name)
        if owner is None or owner.sent is not sent:
            return
        if next_number == sent.number + 1:
            owner.next, owner.sent = next_number, None
        elif next_number == AGAIN or next_number != sent.number:
            owner.drop()


class TombstonePlan:
    """Which tombstones a node sends to the owners of the directory.

    A tombstone belongs to the owners of its object's span, as the entries of the object do. An owner that is a new
    process has forgotten all of them, and after a change of the members a span may have other owners. Then the node
    sends every tombstone again that belongs to the owner.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[str, int, int]] = {}  # owner -> its process, the placement, the last number

    def start(self, owner: str, process: str, placement: Placement) -> int:
        """Return the number of the last tombstone that the owner has got; 0 if it needs all of them."""
        known_process, number, last = self._sent.get(owner, ("", 0, 0))
        return last if (known_process, number) == (process, placement.number) else 0

    def for_owner(self, owner: str, placement: Placement, tombstones: Sequence[Tombstone]) -> list[Tombstone]:
        """Return the tombstones that belong to this owner."""
        if not tombstones or owner not in placement.nodes:
            return []
        owners = placement.owners(fingerprints(b"".join([each.key for each in tombstones])))
        is_theirs = (owners == placement.nodes.index(owner)).any(axis=1).tolist()
        return [each for each, belongs in zip(tombstones, is_theirs, strict=True) if belongs]

    def note_sent(self, owner: str, process: str, placement: Placement, last: int) -> None:
        """Note that the owner has got its tombstones up to this number."""
        self._sent[owner] = process, placement.number, last
        for name in self._sent.keys() - set(placement.nodes):
            del self._sent[name]
