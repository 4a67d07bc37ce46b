"""Batch: one packed forward over sequences whose KV is in frames of an arena, and the cache that puts it there.

Every sequence is a page table (its frames, in order), one per cache group of the model. A forward takes a slice of
tokens of each: one token of those that decode, a chunk of those that prefill, all end to end in one ``[1, T]`` input
with explicit position ids. Each layer then, in this order: ``before(layer)``, the new K and V go into the frames,
``after(layer)``, attention reads frames. ``start`` of a slice is logical: the KV before it may arrive as late as in
``before(layer)``.
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
from engine.compute.kernels import chosen
from engine.memory.arena import Arena, Arenas, runs

__all__ = ["Arena", "Arenas", "Batch", "PagedCache", "Slice", "runs"]

LayerHook = Callable[[int], None]


@dataclass
class Slice:
    """Part of one sequence in one forward: tokens ``[start, start + count)``.

    Attributes:
        frames: its page table, int64 ``[>= ceil((start + count) / page_tokens)]``; ``[groups, pages]`` where the
            model has several cache groups.
        start: tokens before; their KV is there, or will be when ``before(layer)`` returns.
        tokens: integers ``[count]``, at least one.
    """

    frames: torch.Tensor
    start: int
    tokens: torch.Tensor | npt.NDArray[Any]

    @property
    def tables(self) -> torch.Tensor:
        """``[groups, pages]``."""
        return self.frames.view(-1, self.frames.shape[-1])

    @property
    def count(self) -> int:
        """Tokens of this slice."""
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """Tokens of the sequence after this slice."""
        return self.start + self.count


class Steps:
    """Slices of one token each, in the form that the kernel needs: computed once per forward, not per layer.

    Attributes:
        index: int64 ``[n]``, where their tokens are in the input; None if they are the whole input, in order.
        count: ``n``.
        tables: per group their page tables, int64, end to end; ``first[i]`` is where the one of ``i`` starts.
        high: int64 ``[n]``: the tokens of each sequence, this one included; ``tokens``: their sum.
    """

    def __init__(
        self,
        arenas: Arenas,
        slices: Sequence[Slice],
        chosen: npt.NDArray[np.intp],
        last: npt.NDArray[np.int64],
    ) -> None:
        self.count = len(chosen)
        self.index = None if self.count == len(slices) else torch.from_numpy(last[chosen])
        stops = [slices[i].stop for i in chosen]
        self.high, self.tokens = torch.tensor(stops), sum(stops)
        pages = -(-self.high // arenas.groups[0].layout.page_tokens)
        self.first = torch.cumsum(pages, 0) - pages
        self.tables = torch.cat([slices[i].tables[:, :n] for i, n in zip(chosen, pages.tolist(), strict=True)], dim=1)
        assert self.tables.dtype == torch.int64, self.tables.dtype
        for table, arena in zip(self.tables, arenas.groups, strict=True):
            assert table.min() >= 0 and table.max() < arena.frames_total, "a page table names no frame"
        self._low: dict[int, torch.Tensor] = {}

    def low(self, window: int) -> torch.Tensor:
        """int64 ``[n]``: the first token that each of them sees; a ``window`` of 0 shows everything."""
        if window not in self._low:
            self._low[window] = (self.high - window).clamp(min=0) if window else torch.zeros_like(self.high)
        return self._low[window]


class Batch:
    """One forward: everything that all its layers need, computed once. Used for one forward.

    Args:
        before: called once per layer, before older KV of that layer is read.
        after: called once per layer, when the KV of all new tokens of that layer is in the arena.

    Attributes:
        tokens, positions: int64 ``[1, T]``, all slices end to end.
        last: int64 ``[len(slices)]``, where the last token of each slice is.
        steps: the slices of one token, None if there are none, or if they are read like chunks.
        chunks: all other slices, and where each starts in the input.
        layout: of the first cache group; the others' differ in layers, and in what else a forward does not read.
        kernel: of a device with one, by which all slices are read as ``readings`` say, one per group; ``steps`` and
            ``chunks`` are empty then.
    """

    def __init__(
        self,
        arenas: Arenas,
        slices: Sequence[Slice],
        before: LayerHook | None = None,
        after: LayerHook | None = None,
    ) -> None:
        assert slices, "a forward of nothing"
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
        self.kernel = chosen(layout, arenas.device).kernel
        self.steps: Steps | None = None
        self.chunks: list[tuple[int, Slice]] = []
        if self.kernel is None:
            single = self._counts == 1 if arenas.device.type == "cpu" else np.zeros(len(slices), np.bool_)
            if single.any():
                self.steps = Steps(arenas, slices, np.flatnonzero(single), ends - 1)
            self.chunks = [(firsts[i], slices[i]) for i in np.flatnonzero(~single).tolist()]

    # Tensors go to the device when first used: a replayed step needs none of them.

    @cached_property
    def tokens(self) -> torch.Tensor:
        """All tokens; see the class."""
        parts = [torch.as_tensor(np.asarray(part.tokens, np.int64)) for part in self.slices]
        return torch.cat(parts)[None].to(self.arenas.device)

    @cached_property
    def positions(self) -> torch.Tensor:
        """Their positions; see the class."""
        return torch.from_numpy(self._places)[None].to(self.arenas.device)

    @cached_property
    def last(self) -> torch.Tensor:
        """Places of the last tokens; see the class."""
        return torch.from_numpy(self._ends - 1).to(self.arenas.device)

    @cached_property
    def readings(self) -> list[BatchReading]:
        """How the kernel reads all slices; see the class."""
        starts, counts, device = [part.start for part in self.slices], self._counts.tolist(), self.arenas.device
        tables = zip(*(part.tables for part in self.slices), strict=True)
        return [reading_of(each, starts, counts, self.layout.page_tokens, device) for each in tables]

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        return np.concatenate([np.arange(part.start, part.stop) for part in self.slices])

    @cached_property
    def _frames(self) -> torch.Tensor:
        pages = torch.from_numpy(self._places // self.layout.page_tokens)
        rows = zip(self._firsts, self.slices, strict=True)
        return torch.cat([part.tables[:, pages[a : a + part.count]] for a, part in rows], dim=1).to(self.arenas.device)

    @cached_property
    def _slots(self) -> torch.Tensor:
        return torch.from_numpy(self._places % self.layout.page_tokens).to(self.arenas.device)

    def write(self, layer: int, content: torch.Tensor) -> None:
        """Put ``content [T, kv_heads, content]`` of all new tokens into the frames."""
        group, number = self.arenas.places[layer]
        self.arenas.groups[group].pages[:, number][self._frames[group], :, self._slots] = content

    def context(self, layer: int, part: Slice, start: int = 0) -> torch.Tensor:
        """``[kv_heads, stop - start, content]``: a copy of the KV of tokens from ``start`` to the end of a slice."""
        group, pages = self.arenas.places[layer][0], self.arenas.layer_pages(layer)
        shape = self.layout.shape
        page = start // shape[2]
        frames = part.tables[group, page : -(-part.stop // shape[2])]
        out = torch.empty((shape[1], len(frames), *shape[2:]), dtype=pages.dtype, device=pages.device)
        for index, frame, count in runs(frames):
            out[:, index : index + count] = pages[frame : frame + count].transpose(0, 1)
        return out.view(shape[1], -1, shape[3])[:, start - page * shape[2] : part.stop - page * shape[2]]


class PagedCache(Cache):
    """The object that transformers takes for a cache during the forward of one batch. Holds nothing itself."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put the new K and V ``[1, kv_heads, T, dim]`` of a layer into the frames, and call the hooks.

        Returns:
            Both unchanged; attention reads frames. For MLA, where the model expands them for attention: latent and rope
                key of the whole context of every chunk, end to end; without chunks those of one token, unread.
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
        """0: the model is given positions, so it need not count."""
        return 0
