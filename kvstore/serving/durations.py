"""Durations: how long calls and the like took, counted in buckets."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BOUNDS_S: Final = tuple(2.0**bits for bits in range(-13, 7))  # 122 us to 64 s


class Durations:
    """Calls by how long they took: as many counts as ``BOUNDS_S`` and one more."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one call that took ``seconds``."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds
