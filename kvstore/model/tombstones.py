"""Tombstones: which opaque objects were deleted or replaced, and when.

A node that decides to delete or replace an object keeps a tombstone of its key, with a stamp (see ``model.objects``).
Values with an older stamp are void on every node of the pool. So a node that could not be reached at the time of the
decision drops its copy later, when it gets the tombstone. A tombstone is kept for ``TOMBSTONE_S``, on every node that
has got it.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile
from typing import Final, NamedTuple

TOMBSTONE_S: Final = 3600
TOMBSTONES_MAX: Final = 1 << 16  # in one table; the oldest one leaves early


class Tombstone(NamedTuple):
    """A deletion or a replacement of an object.

    Attributes:
        key: the key of the object's head.
        root: the root of the salt's objects.
        stamp: values with a smaller stamp are void.
        until_ns: when it ends, by the monotonic clock of the process that has it.
    """

    key: bytes
    root: bytes
    stamp: int
    until_ns: int


class Tombstones:
    """The latest tombstone of each key. Used by one thread at a time.

    Tombstones are numbered in the order in which they were added, so that a reader can follow.

    Attributes:
        last: the number of the newest one; 0 before the first.
        lost: how many left before their end, because there were too many.
    """

    def __init__(self) -> None:
        self.last = 0
        self.lost = 0
        self._table: OrderedDict[bytes, tuple[int, Tombstone]] = OrderedDict()
        self._next_end_ns = 0  # none ends before this time

    def __len__(self) -> int:
        return len(self._table)

    def add(self, tombstone: Tombstone) -> bool:
        """Add a tombstone. Return False if one of the same key is as late."""
        if self.stamp(tombstone.key) >= tombstone.stamp:
            return False
        self.last += 1
        self._next_end_ns = min(self._next_end_ns, tombstone.until_ns) if self._table else tombstone.until_ns
        self._table[tombstone.key] = self.last, tombstone
        self._table.move_to_end(tombstone.key)
        if len(self._table) > TOMBSTONES_MAX:
            self._table.popitem(last=False)
            self.lost += 1
        return True

    def stamp(self, key: bytes) -> int:
        """Return the stamp of a key's tombstone; 0 if there is none."""
        entry = self._table.get(key)
        return entry[1].stamp if entry is not None else 0

    def since(self, number: int) -> list[Tombstone]:
        """Return the tombstones after this number, the newest first."""
        entries = reversed(self._table.values())
        return [tombstone for _, tombstone in takewhile(lambda entry: entry[0] > number, entries)]

    def expire(self, now_ns: int) -> list[bytes]:
        """Remove the tombstones that have ended, and return their keys."""
        if not self._table or now_ns < self._next_end_ns:
            return []
        ended = [key for key, (_, tombstone) in self._table.items() if tombstone.until_ns <= now_ns]
        for key in ended:
            del self._table[key]
        self._next_end_ns = min((tombstone.until_ns for _, tombstone in self._table.values()), default=0)
        return ended
