"""Spans: the pages a writer has reserved, as runs of consecutive frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.client.buffers import Rows
from kvstore.model.replica import ADDRESS_BYTES
from kvstore.model.shard import Shard
from kvstore.rpc.control import BATCH_MAX


class ReservedRun:
    """Reserved pages in consecutive frames: ``pages[i]`` of the extent is page ``page + i`` of the keys."""

    __slots__ = ("pages", "shown", "page", "count", "first", "levels")

    def __init__(
        self,
        pages: npt.NDArray[np.uint8],
        shown: npt.NDArray[Any],
        page: int,
        first: int,
        levels: npt.NDArray[Any],
    ) -> None:
        self.pages = pages  # [count, page_bytes]
        self.shown = shown  # [count], where this shard shows its progress
        self.page = page
        self.count = len(pages)
        self.first = first  # of its pages among the writer's own
        self.levels = levels  # [layers + 1, count], what it stores there after so many layers

    def beside(self, shard: Shard, parts: list[Rows]) -> Iterator[tuple[list[Rows], list[Rows]]]:
        """Of each array that has some of these pages, ``[n, layers, width]`` each, laid end to end: by layer, where in
        our pages it goes, and where it is."""
        first = 0
        for part in parts:
            low, high = max(first, self.page), min(first + len(part), self.page + self.count)
            if low < high:
                pages = shard.part(self.pages[low - self.page : high - self.page])
                yield list(pages.swapaxes(0, 1)), list(part[low - first : high - first].swapaxes(0, 1))
            first += len(part)


def parts_of(raw: bytes, pages: int = BATCH_MAX) -> list[bytes]:
    """Addresses, end to end, cut into what one request takes."""
    step = pages * ADDRESS_BYTES
    return [raw[start : start + step] for start in range(0, len(raw), step)]


def unbroken(pages: list[int]) -> list[tuple[int, int]]:
    """``(start, count)`` of runs of consecutive page numbers."""
    runs, start = [], 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            runs.append((start, i - start))
            start = i
    return runs
