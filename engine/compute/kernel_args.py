"""The arguments of a device's attention kernel: the slices of a batch, their tiles, and the terms of a layer.

A tile is a run of consecutive tokens of one slice, at most ``tokens`` long. One program of a kernel computes one tile
for some heads. In a decoding step each sequence has one tile; a chunk has many.

Example: two slices of 1 and 5 tokens, and tiles of 4 tokens. The tiles, as (slice, first token), are (0, 0), (1, 0) and
(1, 4).
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
    """The constants of one layer's attention.

    Attributes:
        window: how many tokens a token sees, itself included; 0 if it sees all tokens up to itself.
        softcap: the bound of the scores; 0 means no bound.
        sinks: one logit per head, ``[heads]``.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class SliceTable:
    """The slices of a batch, on its device. Tensors are int64 ``[slices]``, except ``frames``.

    Attributes:
        row: the row of the input in which the slice begins.
        start: the number of tokens of the sequence before the slice.
        count: the number of tokens in the slice.
        first: the index in ``frames`` at which the slice's page table begins.
        frames: int64: the page tables of all slices, end to end.
        stop_max: the most tokens that any slice attends to.
        steps: True if every slice is one token.
        slices: the number of slices.
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
    """The tiles of a batch, on its device.

    Attributes:
        slice: int64 ``[tiles]``: the number of the tile's slice.
        token: int64 ``[tiles]``: the tile's first token, counted from the start of its slice.
    """

    slice: torch.Tensor
    token: torch.Tensor


class PageKernel(Protocol):
    """A kernel that reads pages in place, for one kind of device. Several threads may use it at once.

    Attributes:
        name: the name that ``status`` shows.
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
        """Attend from each token of the batch to all tokens of its sequence up to itself.

        Args:
            pages: one layer, ``[frames, kv_heads, page_tokens, content]``. The last two dimensions are contiguous.
            query: ``[T, heads, dim]``. The first ``dim`` elements of a token's content are K.
            v_dim: the number of elements of V.
            v_at: the element of a token's content at which V begins.

        Returns:
            ``[T, heads, v_dim]``
        """
        ...


class BatchReading:
    """The slices and tiles of one forward pass. They are computed once and used by all layers.

    Args:
        counts: the number of tokens in each slice, as in ``table`` but on the host.
    """

    def __init__(self, table: SliceTable, counts: npt.NDArray[np.int64]) -> None:
        self.table = table
        self._counts = counts
        self._tiles: dict[int, Tiles] = {}

    def tiles(self, tokens: int) -> Tiles:
        """Return the tiles of the batch, of at most ``tokens`` tokens each."""
        if tokens not in self._tiles:
            slices, first_tokens = tile_slices(self._counts, tokens)
            device = self.table.row.device
            self._tiles[tokens] = Tiles(torch.from_numpy(slices).to(device), torch.from_numpy(first_tokens).to(device))
        return self._tiles[tokens]


def reading_of(
    frames: Sequence[torch.Tensor], starts: Sequence[int], counts: Sequence[int], page_tokens: int, device: torch.device
) -> BatchReading:
    """Return the reading of slices ``[start, start + count)``. ``frames`` has the page table of each slice."""
    start, count = np.asarray(starts, np.int64), np.asarray(counts, np.int64)
    stop = start + count
    pages = -(-stop // page_tokens)
    rows = np.stack((np.cumsum(count) - count, start, count, np.cumsum(pages) - pages))
    row_column, start_column, count_column, first_column = torch.from_numpy(rows).to(device)
    tables = torch.cat([table[:n] for table, n in zip(frames, pages.tolist(), strict=True)]).to(device)
    table = SliceTable(
        row=row_column,
        start=start_column,
        count=count_column,
        first=first_column,
        frames=tables,
        stop_max=int(stop.max()),
        steps=bool((count == 1).all()),
        slices=len(count),
    )
    return BatchReading(table, count)


def tile_slices(counts: npt.NDArray[np.int64], tokens: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the slice of each tile and the tile's first token in that slice. The module's docstring has an example."""
    tiles = -(-counts // tokens)
    slices = np.repeat(np.arange(len(counts)), tiles)
    return slices, (np.arange(len(slices)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * tokens
