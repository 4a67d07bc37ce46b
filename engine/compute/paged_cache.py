"""The batch of one forward, over sequences whose KV is in frames of an arena, and the cache that writes new KV there.

A sequence has one page table per cache group of the model: its frames, in order. A forward computes one slice of each
sequence in the batch: a single token if the sequence decodes, a chunk of tokens if it prefills. The slices are packed
end to end into one ``[1, T]`` input with explicit position ids.

Each layer does four things in this order:

1. It calls ``before(layer)``. KV of earlier tokens may still be arriving until this call returns.
2. It writes the K and V of the new tokens into the frames.
3. It calls ``after(layer)``.
4. Attention reads the frames.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from engine.compute.kernel_args import BatchReading, reading_of
from engine.compute.kernels import kernel_for
from engine.memory.arena import Arenas, runs

LayerHook = Callable[[int], None]


@dataclass
class Slice:
    """The part of one sequence that a forward pass computes: tokens ``[start, start + count)``.

    Attributes:
        frames: the sequence's page table, int64 ``[pages]`` with ``pages >= ceil((start + count) / page_tokens)``, or
            ``[groups, pages]`` if the model has several cache groups.
        start: the number of tokens before the slice. Their KV is in the frames at the latest when ``before(layer)``
            returns.
        tokens: integers ``[count]``, at least one.
    """

    frames: torch.Tensor
    start: int
    tokens: torch.Tensor | npt.NDArray[Any]

    @property
    def tables(self) -> torch.Tensor:
        """The page tables, ``[groups, pages]``."""
        return self.frames.view(-1, self.frames.shape[-1])

    @property
    def count(self) -> int:
        """The number of tokens in the slice."""
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """The number of tokens of the sequence up to the end of the slice."""
        return self.start + self.count


class Steps:
    """The slices of one token, as the CPU's kernel reads them. They are computed once per forward pass, not per layer.

    Attributes:
        index: int64 ``[n]``: the rows of the slices' tokens in the input; None if the input has no other tokens.
        count: ``n``.
        tables: int64 ``[groups, pages]``: in each group, the page tables of all slices, end to end.
        first: int64 ``[n]``: the index in ``tables`` at which the slice's page table begins.
        high: int64 ``[n]``: the number of tokens of each sequence, including the slice's token.
        tokens: the sum of ``high``.
    """

    def __init__(
        self,
        arenas: Arenas,
        slices: Sequence[Slice],
        numbers: npt.NDArray[np.intp],  # of the slices of one token
        last: npt.NDArray[np.int64],
    ) -> None:
        self.count = len(numbers)
        self.index = None if self.count == len(slices) else torch.from_numpy(last[numbers])
        stops = [slices[i].stop for i in numbers]
        self.high, self.tokens = torch.tensor(stops), sum(stops)
        pages = -(-self.high // arenas.groups[0].layout.page_tokens)
        self.first = torch.cumsum(pages, 0) - pages
        self.tables = torch.cat([slices[i].tables[:, :n] for i, n in zip(numbers, pages.tolist(), strict=True)], dim=1)
        assert self.tables.dtype == torch.int64, self.tables.dtype
        for table, arena in zip(self.tables, arenas.groups, strict=True):
            assert table.min() >= 0 and table.max() < arena.frames_total, "a page table has a number without a frame"
        self._low: dict[int, torch.Tensor] = {}

    def low(self, window: int) -> torch.Tensor:
        """Return int64 ``[n]``: the first token that each slice sees. A ``window`` of 0 means all tokens."""
        if window not in self._low:
            self._low[window] = (self.high - window).clamp(min=0) if window else torch.zeros_like(self.high)
        return self._low[window]


class Batch:
    """The input of one forward pass. Values that all layers need are computed once. A batch is used only once.

    Args:
        before: called once per layer, before attention reads older KV of that layer.
        after: called once per layer, when the KV of all new tokens of that layer is in the arena.

    Attributes:
        layout: the layout of the first cache group. The layouts of other groups differ only in their layers and in
            fields that a forward pass does not read.
        kernel: the device's kernel. It reads all slices, by ``readings``; None if there is no kernel.
        steps: on a CPU, the slices of one token; None if there are none, and on other devices.
        chunks: all slices that neither ``kernel`` nor ``steps`` covers, each with the row of the input in which it
            begins.
    """

    def __init__(
        self,
        arenas: Arenas,
        slices: Sequence[Slice],
        before: LayerHook | None = None,
        after: LayerHook | None = None,
    ) -> None:
        assert slices, "a batch needs a slice"
        self.layout = layout = arenas.groups[0].layout
        for part in slices:
            pages = part.frames.shape[-1]
            assert part.count >= 1 and part.start >= 0, (part.start, part.count)
            assert part.stop <= pages * layout.page_tokens, (part.stop, pages)
        self.arenas = arenas
        self.slices = list(slices)
        self.before = before
        self.after = after
        self._counts = np.array([part.count for part in slices])
        ends = np.cumsum(self._counts)
        firsts: list[int] = (ends - self._counts).tolist()
        self._ends, self._firsts = ends, firsts
        self.kernel = kernel_for(layout, arenas.device).kernel
        self.steps: Steps | None = None
        self.chunks: list[tuple[int, Slice]] = []
        if self.kernel is None:
            is_step = self._counts == 1 if arenas.device.type == "cpu" else np.zeros(len(slices), np.bool_)
            if is_step.any():
                self.steps = Steps(arenas, slices, np.flatnonzero(is_step), ends - 1)
            self.chunks = [(firsts[i], slices[i]) for i in np.flatnonzero(~is_step).tolist()]

    # Tensors are copied to the device on first use: a step that a graph replays needs none of them.

    @cached_property
    def tokens(self) -> torch.Tensor:
        """The tokens of all slices, int64 ``[1, T]``."""
        parts = [torch.as_tensor(np.asarray(part.tokens, np.int64)) for part in self.slices]
        return torch.cat(parts)[None].to(self.arenas.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The positions of all tokens in their sequences, int64 ``[1, T]``."""
        return torch.from_numpy(self._positions)[None].to(self.arenas.device)

    @cached_property
    def last(self) -> torch.Tensor:
        """The row of each slice's last token in the input, int64 ``[slices]``."""
        return torch.from_numpy(self._ends - 1).to(self.arenas.device)

    @cached_property
    def readings(self) -> list[BatchReading]:
        """The slices as the device's kernel reads them, for each cache group."""
        starts, counts, device = [part.start for part in self.slices], self._counts.tolist(), self.arenas.device
        tables = zip(*(part.tables for part in self.slices), strict=True)
        return [reading_of(group, starts, counts, self.layout.page_tokens, device) for group in tables]

    @cached_property
    def _positions(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(part.start, part.stop) for part in self.slices])

    @cached_property
    def _frames(self) -> torch.Tensor:
        pages = torch.from_numpy(self._positions // self.layout.page_tokens)
        rows = zip(self._firsts, self.slices, strict=True)
        return torch.cat([part.tables[:, pages[a : a + part.count]] for a, part in rows], dim=1).to(self.arenas.device)

    @cached_property
    def _slots(self) -> torch.Tensor:
        return torch.from_numpy(self._positions % self.layout.page_tokens).to(self.arenas.device)

    def write(self, layer: int, content: torch.Tensor) -> None:
        """Write the KV of all new tokens, ``[T, kv_heads, content]``, into the frames."""
        group, layer_in_group = self.arenas.places[layer]
        self.arenas.groups[group].pages[:, layer_in_group][self._frames[group], :, self._slots] = content

    def context(self, layer: int, part: Slice, start: int = 0) -> torch.Tensor:
        """Copy the KV of tokens from ``start`` to the end of a slice: ``[kv_heads, stop - start, content]``."""
        group, pages = self.arenas.places[layer][0], self.arenas.layer_pages(layer)
        _, kv_heads, page_tokens, content = self.layout.shape
        first_page = start // page_tokens
        frames = part.tables[group, first_page : -(-part.stop // page_tokens)]
        out = torch.empty((kv_heads, len(frames), page_tokens, content), dtype=pages.dtype, device=pages.device)
        for index, frame, count in runs(frames):
            out[:, index : index + count] = pages[frame : frame + count].transpose(0, 1)
        offset = first_page * page_tokens
        return out.view(kv_heads, -1, content)[:, start - offset : part.stop - offset]


class PagedCache(Cache):
    """The cache for transformers in one batch's forward pass. It writes to the arena and stores nothing."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the hooks of the batch, and write the new K and V ``[1, kv_heads, T, dim]`` of a layer into the frames.

        Returns:
            K and V unchanged, because attention reads the frames. With MLA the model expands the result for attention,
                so it is the latent and the rope key of the whole context of every chunk, end to end. If there are no
                chunks, it is that of one token, which attention does not read.
        """
        batch = self._batch
        if batch.before is not None:
            batch.before(layer_idx)
        batch.write(layer_idx, torch.cat((key_states, value_states), dim=-1)[0].transpose(0, 1))
        if batch.after is not None:
            batch.after(layer_idx)
        if not batch.layout.mla_latent:
            return key_states, value_states
        if not batch.chunks:
            return key_states[:, :, :1], value_states[:, :, :1]
        context = torch.cat([batch.context(layer_idx, part) for _, part in batch.chunks], dim=1)[None]
        k_dim = batch.arenas.groups[0].k_dim
        return context[..., :k_dim], context[..., k_dim:]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0. The model receives explicit positions, so it does not use the length."""
        return 0
