"""Attention over frames of an arena, registered with transformers as ``kvstore_paged``.

Every slice of the batch attends to its own sequence: a token to all tokens up to itself, in a sliding window to the
last ``window`` of those. Scaling, soft cap (Gemma 2) and sinks (gpt-oss: a logit per head that takes its share of the
softmax and has no value) are as the model passes them. No mask is made or read: transformers makes none for a function
without a mask function of the same name.

A device with a kernel for it (``engine.compute.kernels``) reads pages in place, for steps and chunks.

One token on a CPU reads pages in place (``kernel``); MLA does so in the absorbed form (DeepSeek-V2, section
2.1.2), in which a query meets the latent itself and the context is never expanded. A chunk of tokens is bound by
arithmetic: its context is gathered once per layer, and given to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from engine.compute.cpu_kernel import NO_SINK, KernelWork, Shape, kernel
from engine.compute.kernel_args import Terms
from engine.compute.paged_cache import Batch, Steps

NAME = "kvstore_paged"
SHARED_BYTES_MIN = 256 << 10  # of a layer's KV; a smaller amount is read before another thread has begun

Read = Callable[[torch.Tensor, int, int], torch.Tensor]  # of query, v_dim, v_at


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
        key, value: only read for chunks with MLA: their expanded contexts, end to end.
        paged: the batch, passed through by ``Runner``.

    Returns:
        ``[1, T, heads, value dim]``, and no weights.
    """
    assert paged is not None, "this attention needs a batch: run the model through a Runner"
    assert attention_mask is None and not dropout, "paged attention takes no masks, and is not for training"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, sinks)
    rows = query[0].transpose(0, 1)  # [T, heads, dim]
    mla = bool(paged.layout.mla_latent)
    step = _step_mla if mla else _step
    if paged.kernel is not None:
        return step(module, rows, paged, partial(_on_device, layer, paged, terms))[None], None
    read = partial(_run_kernel, layer, paged, terms)
    if paged.steps is not None and paged.steps.index is None:
        return step(module, rows, paged, read)[None], None
    out = rows.new_empty((*rows.shape[:2], value.shape[-1] if mla else paged.layout.head_dim))
    if paged.steps is not None:
        out[paged.steps.index] = step(module, rows[paged.steps.index], paged, read)
    at = 0
    for first, part in paged.chunks:
        if mla:
            start, k, v = 0, key[0, :, at : at + part.stop], value[0, :, at : at + part.stop]
            at += part.stop
        else:
            start = max(part.start + 1 - terms.window, 0) if terms.window else 0
            context = paged.context(layer, part, start)
            k_dim = paged.arenas.groups[0].k_dim
            k, v = context[..., :k_dim], context[..., k_dim:]
        out[first : first + part.count] = attend(rows[first : first + part.count], k, v, terms)
    return out[None], None


# --- By a kernel ---


def _step(module: torch.nn.Module, query: torch.Tensor, batch: Batch, read: Read) -> torch.Tensor:
    """``[n, heads, head_dim]`` of ``query [n, heads, head_dim]``."""
    head_dim = batch.layout.head_dim
    return read(query, head_dim, head_dim)


def _step_mla(module: torch.nn.Module, query: torch.Tensor, batch: Batch, read: Read) -> torch.Tensor:
    """``[n, heads, value dim]``: what ``expand_kv`` would do to each token of the context is done to the query.

    Rows of ``kv_b_proj`` make of a latent, head by head, first the key, then the value. So key dot query is latent dot
    (those rows, transposed, times query), and the sum of values is the rows of the value times the sum of latents.
    """
    latent = batch.layout.mla_latent
    nope = query.shape[-1] - batch.layout.mla_rope
    projection = module.kv_b_proj
    assert isinstance(projection, torch.nn.Linear), "an unknown kind of MLA"
    assert getattr(projection, "bias", None) is None, "latents of a projection with a bias cannot be absorbed"
    rows = projection.weight.view(query.shape[1], -1, latent)
    absorbed = torch.bmm(query[..., :nope].transpose(0, 1), rows[:, :nope]).transpose(0, 1)
    query = torch.cat((absorbed, query[..., nope:]), dim=-1)
    sums = read(query, latent, 0)
    return torch.bmm(sums.transpose(0, 1), rows[:, nope:].transpose(1, 2)).transpose(0, 1)


def _on_device(layer: int, batch: Batch, terms: Terms, query: torch.Tensor, v_dim: int, v_at: int) -> torch.Tensor:
    """Attention for all tokens of the batch, chunks as well."""
    assert batch.kernel is not None
    reading = batch.readings[batch.arenas.places[layer][0]]
    return batch.kernel.attend(batch.arenas.layer_pages(layer), query, reading, terms, v_dim, v_at)


def _run_kernel(layer: int, batch: Batch, terms: Terms, query: torch.Tensor, v_dim: int, v_at: int) -> torch.Tensor:
    """On a CPU, one token of each sequence: ``[n, heads, v_dim]`` of ``query [n, heads, dim]``, where ``dim`` elements
    of the content are K."""
    steps: Steps | None = batch.steps
    assert steps is not None
    group, number = batch.arenas.places[layer]
    layout, pages = batch.layout, batch.arenas.groups[group].pages
    _, kv_heads, page_tokens, content = layout.shape
    count, heads, dim = query.shape
    shape = Shape(
        dtype=layout.dtype,
        kv_heads=kv_heads,
        group=heads // kv_heads,
        k_dim=dim,
        v_dim=v_dim,
        v_at=v_at,
        content=content,
        page_tokens=page_tokens,
        layer_stride=pages.stride(1),
        page_stride=pages.stride(0),
        softcap=bool(terms.softcap),
    )
    exact = query.float().contiguous()
    sinks = _no_sinks(heads) if terms.sinks is None else terms.sinks.float().contiguous()
    out = torch.empty((count, heads, v_dim), dtype=torch.float32)
    low = steps.low(terms.window)
    addresses = (x.data_ptr() for x in (steps.tables[group], steps.first, low, steps.high, exact, sinks, out))
    work = KernelWork(0, count * kv_heads, pages.data_ptr(), number, *addresses, terms.scaling, terms.softcap)
    read_bytes = steps.tokens * kv_heads * content * pages.element_size()
    kernel(shape).run(work, torch.get_num_threads() if read_bytes >= SHARED_BYTES_MIN else 1)
    return out.to(query.dtype)


@cache
def _no_sinks(heads: int) -> torch.Tensor:
    return torch.full((heads,), NO_SINK, dtype=torch.float32)


# --- A chunk of tokens of one sequence ---


def attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Attention of the last tokens of a context to it.

    Args:
        query: ``[n, heads, dim]``.
        k, v: ``[kv_heads, m, dim]`` of the tokens up to the last one of ``query``; with a window, at least those that
            the first one sees.

    Returns:
        ``[n, heads, v dim]``
    """
    count, heads, dim = query.shape
    grouped = query.transpose(0, 1).reshape(k.shape[0], -1, count, dim)  # heads of a group, side by side
    flash = query.device.type == "cpu" and not terms.softcap and v.shape[-1] <= dim
    out, total = (_flash if flash else _eager)(grouped, k, v, terms)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(*out.shape[:2], 1)
        out = out * torch.sigmoid(total - sinks)[..., None].to(out.dtype)
    return out.reshape(heads, count, -1).transpose(0, 1)


def _flash(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[kv_heads, group, n, v dim]`` of ``query [kv_heads, group, n, dim]``, and the logarithm of its sums
    of exps.

    What is older than the chunk is seen by all of it: no mask, and the heads of a group are as good as more tokens. The
    chunk itself is causal. Both are joined by their sums. Only a window that ends inside the context needs a mask.
    """
    kv_heads, group, count, dim = query.shape
    v_dim, length = v.shape[-1], k.shape[1]
    if v_dim < dim:
        v = functional.pad(v, (0, dim - v_dim))
    old = length - count
    wide = (kv_heads, group, length, dim)
    if terms.window and length > terms.window:
        mask = _mask(count, length, terms.window, query)
        out, total = _flash_cpu(query, k[:, None].expand(wide), v[:, None].expand(wide), terms.scaling, mask=mask)
        return out[..., :v_dim], total
    own = (kv_heads, group, count, dim)
    out, total = _flash_cpu(
        query, k[:, None, old:].expand(own), v[:, None, old:].expand(own), terms.scaling, causal=True
    )
    if old:
        packed = query.reshape(1, kv_heads, group * count, dim)
        before, sums = _flash_cpu(packed, k[None, :, :old], v[None, :, :old], terms.scaling)
        before, sums = before.view(query.shape), sums.view(total.shape)
        share = torch.sigmoid(total - sums)[..., None].to(out.dtype)
        out = torch.lerp(before, out, share)
        total = torch.logaddexp(total, sums)
    return out[..., :v_dim], total


def _flash_cpu(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torch runs on a CPU below ``scaled_dot_product_attention``, which does not return the sums."""
    output: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, k, v, 0.0, causal, attn_mask=mask, scale=scaling
    )
    return output


def _eager(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on any device, and with a soft cap, written out."""
    count, length = query.shape[2], k.shape[1]
    scores = (query * terms.scaling) @ k[:, None].transpose(2, 3)
    if terms.softcap:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.float() + _mask(count, length, terms.window, query).float()
    total = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - total[..., None]).to(v.dtype)
    return weights @ v[:, None], total


def _mask(count: int, length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """``[count, length]``: 0 where one of the last ``count`` tokens sees another token, else minus infinity."""
    positions = torch.arange(length, device=like.device)
    own = positions[length - count :, None]
    seen = positions <= own
    if window:
        seen &= positions > own - window
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


AttentionInterface.register(NAME, paged_attention)
