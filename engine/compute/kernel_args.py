"""Tiles: how a batch is described to a kernel of a device, and how a layer attends.

A tile is up to ``tokens`` consecutive tokens of one slice: what one program of a kernel computes for some heads. A step
of decoding has one tile per sequence, a chunk has many.

Example: slices of 1 and 5 tokens, tiles of 4: tiles (0, 0), (1, 0) and (1, 4), as (slice, first token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True)
class Terms:
    """How a layer attends. ``window`` 0: to all tokens before. ``sinks``: ``[heads]``."""

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class SliceTable:
    """The slices of a batch, on its device. All int64 ``[slices]`` but for ``frames``.

    Attributes:
        row: where the slice's tokens begin in the input.
        start, count: tokens before it, and of it.
        first: where its page table begins in ``frames``.
        frames: page tables, end to end.
        stop_max: the most tokens that one of the slices attends to.
        steps: whether each is one token.
        slices: how many there are.
    """

    row: torch.Tensor
    start: torch.Tensor
    count: torch.Tensor
    first: torch.Tensor
    frames: torch.Tensor
    stop_max: int
    steps: bool
    slices: int


@dataclass(frozen=True, eq=False)
class Tiles:
    """The tiles of a batch, on its device: int64 ``[tiles]``, the slice of each, and its first token in there."""

    slice: torch.Tensor
    token: torch.Tensor


class PageKernel(Protocol):
    """Attention over pages in place, for one kind of device. Threads may share it.

    Attributes:
        name: as status shows it.
    """

    name: str

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        reading: BatchReading,
        terms: Terms,
        v_dim: int,
        v_at: int,
    ) -> torch.Tensor:
        """``[T, heads, v_dim]``: every token of the batch attends to those of its sequence up to itself.

        Args:
            pages: of one layer, ``[frames, kv_heads, page_tokens, content]``; the last two dimensions are contiguous.
            query: ``[T, heads, dim]``; the first ``dim`` elements of a content are K.
            v_dim, v_at: of a head of V, and where it begins in a content.
        """
        ...


class BatchReading:
    """What one forward reads: the table of its slices, and their tiles, computed once for all layers."""

    def __init__(self, table: SliceTable, counts: npt.NDArray[np.int64]) -> None:
        self.table = table
        self._counts = counts
        self._tiles: dict[int, Tiles] = {}

    def tiles(self, tokens: int) -> Tiles:
        """The batch in tiles of this many tokens."""
        if tokens not in self._tiles:
            slices, first = tiled(self._counts, tokens)
            device = self.table.row.device
            self._tiles[tokens] = Tiles(torch.from_numpy(slices).to(device), torch.from_numpy(first).to(device))
        return self._tiles[tokens]


def reading_of(
    frames: Sequence[torch.Tensor], starts: Sequence[int], counts: Sequence[int], page_tokens: int, device: torch.device
) -> BatchReading:
    """The table of slices ``[start, start + count)`` with these page tables."""
    start, count = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    stop = start + count
    pages = -(-stop // page_tokens)
    rows = np.stack((np.cumsum(count) - count, start, count, np.cumsum(pages) - pages))
    row, start_, count_, first = torch.from_numpy(rows).to(device)
    table = torch.cat([part[:n] for part, n in zip(frames, pages.tolist(), strict=True)]).to(device)
    steps = bool((count == 1).all())
    return BatchReading(SliceTable(row, start_, count_, first, table, int(stop.max()), steps, len(count)), count)


def tiled(counts: npt.NDArray[np.int64], tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The slice of each tile, and its first token there. See the module's example."""
    tiles = -(-counts // tokens)
    slices = np.repeat(np.arange(len(counts)), tiles)
    return slices, (np.arange(len(slices)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
