"""Announcing: what a node tells the owners of its pages' spans, and what it has told them. See ``directory``.

A stream per owner: everything the node has for it, then each change. Only one batch of a stream is under way at a time,
and it is sent again until it is answered. When the members of the cluster change, an owner that stays is told just what
it gained and what it lost; one that is new, or has forgotten us, gets a new stream.

The caller follows the node's event log. It has to know the moment at which ``dumped`` was true::

    lock the node: the log's newest number, and all its pages      (only when ``wants_pages``)
    changed(events up to that number), dumped(pages), changed(what follows) ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.cluster.directory import AGAIN, GONE, Marks, Placement, Told
from kvstore.model.prefix import Fingerprints

BATCH_PAGES: Final = 4096
LOOK_S: Final = 0.05  # between two looks for news ...
OWNERS_PER_LOOK: Final = 16  # ... where there are no more owners than this; see ``pause_s``
QUEUED_MAX: Final = 1 << 20  # entries that wait for one owner; with more it gets everything again when it answers


def pause_s(owners: int) -> float:
    """Between two looks for news. Where many owners are to be told each is told less often, and more at a time: the
    more there are the fewer messages of one put could go together."""
    return LOOK_S * max(1.0, owners / OWNERS_PER_LOOK)


class Entries(NamedTuple):
    """Pages and their spans, as many of each; ``marks`` as in ``directory``."""

    spans: Fingerprints
    fingerprints: Fingerprints
    marks: Marks


def settled(pages: Entries, changes: Entries) -> Entries:
    """What is there of ``pages``, in any order and some of them twice, after these changes, which came one by one."""
    touched = np.isin(pages.fingerprints, changes.fingerprints)
    last = dict[tuple[int, int], tuple[int, int]]()
    for some in (part_of(pages, touched), changes):
        for span, page, mark in zip(*(column.tolist() for column in some), strict=True):
            last[page, mark & ~GONE] = span, mark
    stays = [(span, page, mark) for (page, _), (span, mark) in last.items() if not mark & GONE]
    spans, prints, marks = zip(*stays, strict=True) if stays else ((), (), ())
    after = Entries(np.array(spans, np.uint64), np.array(prints, np.uint64), np.array(marks, np.uint8))
    return joined([part_of(pages, ~touched), after])


def part_of(pages: Entries, which: npt.NDArray[np.bool_]) -> Entries:
    """Some of them."""
    return Entries(pages.spans[which], pages.fingerprints[which], pages.marks[which])


def joined(parts: Sequence[Entries]) -> Entries:
    """One after another."""
    spans, prints, marks = zip(*parts, strict=True)
    return Entries(np.concatenate(spans), np.concatenate(prints), np.concatenate(marks))


@dataclass(slots=True)
class _Owner:
    """One owner. ``stream`` None: it has to be told everything again, and nothing is kept for it until then."""

    stream: int | None = None
    next: int = 0
    queue: deque[tuple[Fingerprints, Marks]] = field(default_factory=deque)
    queued: int = 0
    first: int = 0  # of ``queued``, what belongs to what the node had when the stream began
    whole: bool = False  # the batch that completes that was sent, or is under way
    target: int = 0  # the placement for which it is being told
    due: int = 0  # of ``queued``, how many entries have to be told until it has everything for ``target``
    placed: int = 0  # the placement for which it has everything, or will with the batches that are under way
    sent: Told | None = None

    def add(self, fingerprints: Fingerprints, marks: Marks) -> None:
        if self.stream is None or not len(fingerprints):
            return
        self.queue.append((fingerprints, marks))
        self.queued += len(fingerprints)
        if self.queued > QUEUED_MAX + self.first:
            self.drop()

    def drop(self) -> None:
        self.stream, self.sent, self.placed = None, None, 0
        self.queue.clear()
        self.queued = self.first = 0


class Announcing:
    """One node's side. The caller sends what ``batch`` says, and reports what became of it.

    Args:
        node: its name.
        draw: numbers of streams, none of them twice in the pool.
    """

    def __init__(self, node: str, draw: Callable[[], int]) -> None:
        self._node = node
        self._draw = draw
        self._members: tuple[str, ...] = ()
        self._placement = Placement([])
        self._owners: dict[str, _Owner] = {}

    @property
    def owners(self) -> list[str]:
        """The owners that receive announcements."""
        return list(self._owners)

    @property
    def wants_pages(self) -> bool:
        """Whether ``dumped`` is needed: members changed, or an owner has to be told everything again."""
        return self._members != self._placement.nodes or any(each.stream is None for each in self._owners.values())

    @property
    def queued(self) -> int:
        """Entries that were not announced yet."""
        return sum(each.queued + (len(each.sent.marks) if each.sent else 0) for each in self._owners.values())

    def members(self, names: Iterable[str]) -> None:
        """These nodes have a part of the directory from now on."""
        self._members = tuple(sorted(set(names)))

    def lost(self) -> None:
        """Events were missed: every owner has to be told everything again."""
        for owner in self._owners.values():
            owner.drop()

    def dumped(self, pages: Entries) -> None:
        """These are all pages of the node, as of the last ``changed``."""
        before, self._placement = self._placement, Placement(self._members)
        had = before.owned(pages.spans)
        owned = self._placement.owned(pages.spans)
        self._owners = {name: self._owners.get(name) or _Owner() for name in owned}
        for name, mine in owned.items():
            owner = self._owners[name]
            if owner.stream is None:
                owner.stream, owner.next, owner.whole, owner.placed = self._draw(), 0, False, 0
                owner.first = int(mine.sum())
                owner.add(pages.fingerprints[mine], pages.marks[mine])
            else:
                gained, gone = mine & ~had[name], had[name] & ~mine
                owner.add(pages.fingerprints[gained], pages.marks[gained])
                owner.add(pages.fingerprints[gone], pages.marks[gone] | np.uint8(GONE))
            owner.target, owner.due = self._placement.number, owner.queued

    def changed(self, pages: Entries) -> None:
        """These pages came and went, in this order."""
        for name, mine in self._placement.shares(pages.spans):
            self._owners[name].add(pages.fingerprints[mine], pages.marks[mine])

    def batch(self, name: str, idle: bool = False) -> Told | None:
        """What to send to this owner next; None: nothing. One that was not answered is sent again.

        ``idle``: an empty batch if there is nothing, so that an owner that has forgotten us says so.
        """
        owner = self._owners.get(name)
        if owner is None or owner.stream is None:
            return None
        untold = not owner.whole or owner.placed != owner.target
        if owner.sent is None and (owner.queue or untold or idle):
            owner.sent = self._next(owner, owner.stream)
        elif owner.sent is not None and owner.sent.placed and owner.queue:
            owner.sent = replace(owner.sent, placed=0)  # it was not answered, and there is news
        return owner.sent

    def _next(self, owner: _Owner, stream: int) -> Told:
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
        owner.placed = owner.placed if owner.due else owner.target
        completes = not owner.whole and owner.first == 0
        owner.whole |= completes
        fingerprints = np.concatenate([np.zeros(0, np.uint64), *(part[0] for part in parts)])
        marks = np.concatenate([np.zeros(0, np.uint8), *(part[1] for part in parts)])
        placed = owner.placed if owner.queued == owner.due else 0  # else there is news that it is not told yet
        return Told(self._node, stream, owner.next, fingerprints, marks, completes, placed)

    def answered(self, name: str, sent: Told, wanted: int) -> None:
        """The owner has answered this batch."""
        owner = self._owners.get(name)
        if owner is None or owner.sent is not sent:
            return
        if wanted == sent.number + 1:
            owner.next, owner.sent = wanted, None
        elif wanted == AGAIN or wanted != sent.number:
            owner.drop()
