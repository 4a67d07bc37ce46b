"""Batch: one packed forward over several sequences, whose KV lies in frames of an arena; and the cache that puts it there.

Every sequence is a page table (its frames, in order). A forward takes a slice of tokens of each: one token of those
that decode, a chunk of those that prefill, all end to end in one ``[1, T]`` input with explicit position ids. Each
layer then, in this order: ``before(layer)``, the new K and V go into the frames, ``after(layer)``, attention reads
frames. ``start`` of a slice is logical: what is before it may arrive as late as in ``before(layer)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from engine.arena import Arena, runs

__all__ = ["Arena", "Batch", "PagedCache", "Slice", "runs"]

LayerHook = Callable[[int], None]


@dataclass
class Slice:
    """Part of one sequence in one forward: tokens ``[start, start + count)``.

    Attributes:
        frames: its page table, int64 ``[>= ceil((start + count) / page_tokens)]``.
        start: tokens before; their KV is there, or will be when ``before(layer)`` returns.
        tokens: integers ``[count]``, at least one.
    """

    frames: torch.Tensor
    start: int
    tokens: torch.Tensor | npt.NDArray[Any]

    @property
    def count(self) -> int:
        """Tokens of this slice."""
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """Tokens of the sequence after this slice."""
        return self.start + self.count


class Batch:
    """One forward: what every layer of it needs, computed once. Used for one forward.

    Args:
        before: called once per layer, before older KV of that layer is read.
        after: called once per layer, when the KV of all new tokens of that layer is in the arena.

    Attributes:
        tokens, positions: int64 ``[1, T]``, all slices end to end.
        first: where each slice starts in them.
        last: int64 ``[len(slices)]``, where the last token of each is.
    """

    def __init__(
        self,
        arena: Arena,
        slices: Sequence[Slice],
        before: LayerHook | None = None,
        after: LayerHook | None = None,
    ) -> None:
        assert slices, "a forward of nothing"
        page_tokens = arena.layout.page_tokens
        for part in slices:
            assert part.count >= 1 and part.start >= 0, (part.start, part.count)
            assert part.stop <= len(part.frames) * page_tokens, (part.stop, len(part.frames))
        self.arena = arena
        self.slices = list(slices)
        self.before = before
        self.after = after
        device = arena.device
        counts = np.array([part.count for part in slices])
        ends = np.cumsum(counts)
        self.first: list[int] = (ends - counts).tolist()
        self.last = torch.from_numpy(ends - 1).to(device)
        positions = np.concatenate([np.arange(part.start, part.stop) for part in slices])
        self.tokens = torch.cat([torch.as_tensor(np.asarray(part.tokens, np.int64)) for part in slices])[None].to(device)
        self.positions = torch.from_numpy(positions)[None].to(device)
        pages = torch.from_numpy(positions // page_tokens)
        frames = [part.frames[pages[a : a + part.count]] for a, part in zip(self.first, slices, strict=True)]
        self._frames = torch.cat(frames).to(device)
        self._slots = torch.from_numpy(positions % page_tokens).to(device)

    def write(self, layer: int, content: torch.Tensor) -> None:
        """Puts ``content [T, kv_heads, content]`` of all new tokens where it belongs."""
        self.arena.pages[:, layer][self._frames, :, self._slots] = content

    def context(self, layer: int, part: Slice) -> torch.Tensor:
        """``[kv_heads, stop, content]``: a copy of the KV of all tokens up to the end of a slice."""
        shape = self.arena.layout.shape
        pages = -(-part.stop // shape[2])
        out = torch.empty((shape[1], pages, *shape[2:]), dtype=self.arena.pages.dtype, device=self.arena.device)
        for index, frame, count in runs(part.frames[:pages]):
            out[:, index : index + count] = self.arena.pages[frame : frame + count, layer].transpose(0, 1)
        return out.view(shape[1], -1, shape[3])[:, : part.stop]


class PagedCache(Cache):
    """What transformers takes for a cache during the forward of one batch. Holds nothing itself."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(layers=[])
        self._batch = batch

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Puts the new K and V ``[1, kv_heads, T, dim]`` of a layer into the frames, and calls the hooks.

        Returns:
            Both as they came; attention reads frames. MLA, where attention is given what the model expands out of this:
            latent and rope key of the whole context of every slice, end to end.
        """
        batch = self._batch
        if batch.before is not None:
            batch.before(layer_idx)
        batch.write(layer_idx, torch.cat((key_states, value_states), dim=-1)[0].transpose(0, 1))
        if batch.after is not None:
            batch.after(layer_idx)
        if not batch.arena.layout.mla_latent:
            return key_states, value_states
        context = torch.cat([batch.context(layer_idx, part) for part in batch.slices], dim=1)[None]
        return context[..., : batch.arena.k_dim], context[..., batch.arena.k_dim :]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: positions are given to the model, it need not count."""
        return 0
