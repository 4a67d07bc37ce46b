"""Attention over frames of an arena, registered with transformers as ``kvstore_paged``.

Every slice of the batch attends to its own sequence: a token to those up to itself, in a sliding window to the last
``window`` of those. Scaling, soft cap (Gemma 2) and sinks (gpt-oss: a logit per head that takes its share of the
softmax and has no value) are as the model passes them. No mask is made or read: transformers makes none for a function
without a mask function of the same name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from engine.paged_cache import Batch

NAME = "kvstore_paged"


@dataclass(frozen=True)
class Terms:
    """How a layer attends. ``window`` 0: everything before. ``sinks``: ``[heads]``."""

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: Batch | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer for a batch, as transformers calls it.

    Args:
        query: ``[1, heads, T, dim]``.
        key, value: not read, but with MLA: the expanded contexts of all slices, end to end.
        paged: the batch, handed through by ``Runner``.

    Returns:
        ``[1, T, heads, value dim]``, and no weights.
    """
    assert paged is not None, "this attention needs a batch: run the model through a Runner"
    assert attention_mask is None and not dropout, "nobody makes masks for paged attention, nor trains with it"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    terms = Terms(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, s_aux
    )
    outs = []
    at = 0
    for first, part in zip(paged.first, paged.slices, strict=True):
        if paged.arena.layout.mla_latent:
            k, v = key[0, :, at : at + part.stop], value[0, :, at : at + part.stop]
            at += part.stop
        else:
            context = paged.context(layer, part)
            k, v = context[..., : paged.arena.k_dim], context[..., paged.arena.k_dim :]
        outs.append(_attend(query[0, :, first : first + part.count], k, v, part.start, terms))
    return torch.cat(outs, dim=1).transpose(0, 1)[None], None


def _attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, terms: Terms) -> torch.Tensor:
    """``query [heads, n, dim]`` of tokens from ``start`` on, ``k``, ``v [kv_heads, start + n, dim]``."""
    heads, count, dim = query.shape
    kv_heads, length, _ = k.shape
    scores = query.reshape(kv_heads, -1, dim) @ k.transpose(1, 2) * terms.scaling
    if terms.softcap:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.view(heads, count, length)
    positions = torch.arange(length, device=query.device)
    own = positions[start:, None]
    seen = positions <= own
    if terms.window:
        seen &= positions > own - terms.window
    scores = scores.masked_fill(~seen, -torch.inf)
    if terms.sinks is not None:
        scores = torch.cat((scores, terms.sinks.view(-1, 1, 1).expand(-1, count, 1).to(scores.dtype)), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)[..., :length]
    return (weights.view(kv_heads, -1, length) @ v).view(heads, count, -1)


AttentionInterface.register(NAME, paged_attention)
