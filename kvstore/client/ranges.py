"""Ranges: which bytes of something were written, where they come in pieces of any size and order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class Ranges:
    """Disjoint ranges ``[start, stop)`` in ascending order; touching ones become one.

    Worked example: after ``add(0, 4)``, ``add(8, 12)`` and ``add(4, 9)`` there is one range, 0..12.
    """

    __slots__ = ("_starts", "_stops")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, start: int, stop: int) -> None:
        """These bytes were written, perhaps again."""
        first = bisect_left(self._stops, start)
        last = bisect_right(self._starts, stop)
        if first < last:
            start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]

    def covers(self, start: int, stop: int) -> bool:
        """Whether all of these were."""
        found = bisect_right(self._starts, start) - 1
        return found >= 0 and self._stops[found] >= stop
