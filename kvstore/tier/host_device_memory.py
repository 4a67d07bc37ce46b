"""The memory of ``HostDevice``, and what its copies may touch."""

from __future__ import annotations

import ctypes
import mmap
import os
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import numpy as np

from kvstore.tier.device import Bytes

POISON: Final = 0xD5

Span = tuple[int, int]  # from, to


class HostMemory:
    """See ``DeviceMemory``. Its addresses are never given again, so that a use after ``free`` is found."""

    def __init__(
        self, freed: Callable[[HostMemory], None], nbytes: int, descriptor: int = -1, theirs: bool = False
    ) -> None:
        self._freed = freed
        self._map = mmap.mmap(descriptor, max(nbytes, 1))
        self.nbytes = nbytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.live = True
        self.descriptor = -1 if theirs else descriptor  # -1: it is not shared; a mapping has its own
        self.theirs = theirs  # memory of another process
        if not theirs:
            ctypes.memset(self.address, POISON, nbytes)

    def free(self) -> None:
        """See ``DeviceMemory``."""
        self._freed(self)

    def view(self) -> Bytes:
        """Its bytes, for tests and for what stands for a kernel: a program reads them by a copy."""
        return np.frombuffer(self._map, np.uint8, self.nbytes)

    def let_go(self) -> None:
        """Give the pages back, and keep the addresses."""
        self.live = False
        self._map.madvise(mmap.MADV_DONTNEED)
        if self.descriptor >= 0:
            os.close(self.descriptor)


def check_apart(reads: list[Span], writes: list[Span]) -> None:
    """No piece is written where another is read or written."""
    ordered = sorted(writes)
    for (_, end), (begin, _) in pairwise(ordered):
        assert end <= begin, "pieces of one copy are written over each other"
    for begin, end in reads:
        at = bisect_right(ordered, (begin, begin)) - 1
        assert at < 0 or ordered[at][1] <= begin, "a piece is read where another is written"
        assert at + 1 >= len(ordered) or end <= ordered[at + 1][0], "a piece is read where another is written"


def check_mapped(pieces: list[Span], *, writable: bool) -> None:
    """Each lies in memory that this process may read, or write."""
    if not pieces:
        return
    mapped: list[list[int]] = []  # ranges with no gap between them, in order
    with open("/proc/self/maps") as file:
        for line in file:
            span, allowed = line.split(maxsplit=2)[:2]
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if not allowed.startswith("rw" if writable else "r"):
                continue
            if mapped and mapped[-1][1] == begin:
                mapped[-1][1] = end
            else:
                mapped.append([begin, end])
    for begin, end in pieces:
        at = bisect_right(mapped, begin, key=lambda span: span[0]) - 1
        assert at >= 0 and end <= mapped[at][1], f"{begin, end} is not {'writable ' if writable else ''}memory"
