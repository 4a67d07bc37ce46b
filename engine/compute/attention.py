"""Attention over frames of an arena, registered with transformers as ``kvstore_paged``.

Each slice of a batch attends only to its own sequence. A token sees all tokens up to itself; with a sliding window it
sees the last ``window`` of them. The model passes scaling, soft cap (Gemma 2) and sinks (gpt-oss: one logit per head
that takes a share of the softmax and has no value). There are no masks: transformers makes a mask only if a mask
function is registered under the same name.

The KV is read in one of three ways:

- On a device that has a kernel (``engine.compute.kernels``), the kernel reads pages in place, for steps and chunks.
- On a CPU, machine code reads pages in place for a slice of one token (``cpu_kernel``).
- Any other slice is a chunk. Arithmetic bounds its speed, so its context is copied into one piece per layer, and
  torch attends to the copy.

The kernels compute MLA in the absorbed form (DeepSeek-V2, section 2.1.2): the query is multiplied with the latent
itself, so the context is never expanded. Chunks on a CPU use the expanded context that the model makes.
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
SHARED_BYTES_MIN = 256 << 10  # of a layer's KV; one thread has read fewer bytes before a second thread has started

AttendPages = Callable[[torch.Tensor, int, int], torch.Tensor]  # (query, v_dim, v_at) -> [n, heads, v_dim]


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
    """Compute the attention of one layer for a batch. transformers calls this function.

    Args:
        query: ``[1, heads, T, dim]``.
        key, value: the expanded contexts of all chunks, end to end. They are read only for chunks with MLA.
        paged: the batch. ``Runner`` passes it to the model, and the model passes it on.

    Returns:
        ``[1, T, heads, value dim]``, and None in place of the weights.
    """
    assert paged is not None, "paged attention needs a batch: run the model through a Runner"
    assert attention_mask is None and not dropout, "paged attention supports neither masks nor dropout"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    sinks = s_aux if s_aux is not None else getattr(module, "sinks", None)
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window or 0, softcap or 0.0, sinks)
    rows = query[0].transpose(0, 1)  # [T, heads, dim]
    mla = bool(paged.layout.mla_latent)
    step = _step_mla if mla else _step
    if paged.kernel is not None:
        return step(module, rows, paged, partial(_attend_on_device, layer, paged, terms))[None], None
    attend_pages = partial(_attend_on_cpu, layer, paged, terms)
    if paged.steps is not None and paged.steps.index is None:
        return step(module, rows, paged, attend_pages)[None], None
    out = rows.new_empty((*rows.shape[:2], value.shape[-1] if mla else paged.layout.head_dim))
    if paged.steps is not None:
        out[paged.steps.index] = step(module, rows[paged.steps.index], paged, attend_pages)
    offset = 0  # where the chunk's context begins in `key` and `value`
    for first, part in paged.chunks:
        if mla:
            k, v = key[0, :, offset : offset + part.stop], value[0, :, offset : offset + part.stop]
            offset += part.stop
        else:
            start = max(part.start + 1 - terms.window, 0) if terms.window else 0
            context = paged.context(layer, part, start)
            k_dim = paged.arenas.groups[0].k_dim
            k, v = context[..., :k_dim], context[..., k_dim:]
        out[first : first + part.count] = attend(rows[first : first + part.count], k, v, terms)
    return out[None], None


# --- With a kernel ---


def _step(module: torch.nn.Module, query: torch.Tensor, batch: Batch, attend_pages: AttendPages) -> torch.Tensor:
    """Attend with ``query [n, heads, head_dim]``. Returns the same shape."""
    head_dim = batch.layout.head_dim
    return attend_pages(query, head_dim, head_dim)


def _step_mla(module: torch.nn.Module, query: torch.Tensor, batch: Batch, attend_pages: AttendPages) -> torch.Tensor:
    """Attend with ``query [n, heads, dim]`` in the absorbed form. Returns ``[n, heads, value dim]``.

    For each head, ``kv_b_proj`` has rows ``A`` that make the key of a latent ``c``, then rows ``B`` that make its
    value. So ``(A c) . q = c . (A^T q)``, and the weighted sum of values is ``B`` times the weighted sum of latents.
    This function multiplies the query by ``A^T`` and the result by ``B``; the pages need no expansion.
    """
    latent = batch.layout.mla_latent
    nope = query.shape[-1] - batch.layout.mla_rope
    projection = module.kv_b_proj
    assert isinstance(projection, torch.nn.Linear), "kv_b_proj is not a linear layer"
    assert getattr(projection, "bias", None) is None, "kv_b_proj has a bias: it cannot be absorbed into the query"
    rows = projection.weight.view(query.shape[1], -1, latent)
    absorbed = torch.bmm(query[..., :nope].transpose(0, 1), rows[:, :nope]).transpose(0, 1)
    query = torch.cat((absorbed, query[..., nope:]), dim=-1)
    sums = attend_pages(query, latent, 0)
    return torch.bmm(sums.transpose(0, 1), rows[:, nope:].transpose(1, 2)).transpose(0, 1)


def _attend_on_device(
    layer: int, batch: Batch, terms: Terms, query: torch.Tensor, v_dim: int, v_at: int
) -> torch.Tensor:
    """Attend for all tokens of the batch, those of chunks included, with the device's kernel."""
    assert batch.kernel is not None
    reading = batch.readings[batch.arenas.places[layer][0]]
    return batch.kernel.attend(batch.arenas.layer_pages(layer), query, reading, terms, v_dim, v_at)


def _attend_on_cpu(layer: int, batch: Batch, terms: Terms, query: torch.Tensor, v_dim: int, v_at: int) -> torch.Tensor:
    """Attend for the slices of one token, with the CPU's machine code.

    Args:
        query: ``[n, heads, dim]``. The first ``dim`` elements of a token's content are K.

    Returns:
        ``[n, heads, v_dim]``
    """
    steps: Steps | None = batch.steps
    assert steps is not None
    group, layer_in_group = batch.arenas.places[layer]
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
    query_f32 = query.float().contiguous()
    sinks = _no_sinks(heads) if terms.sinks is None else terms.sinks.float().contiguous()
    out = torch.empty((count, heads, v_dim), dtype=torch.float32)
    low = steps.low(terms.window)
    addresses = (x.data_ptr() for x in (steps.tables[group], steps.first, low, steps.high, query_f32, sinks, out))
    work = KernelWork(0, count * kv_heads, pages.data_ptr(), layer_in_group, *addresses, terms.scaling, terms.softcap)
    read_bytes = steps.tokens * kv_heads * content * pages.element_size()
    kernel(shape).run(work, torch.get_num_threads() if read_bytes >= SHARED_BYTES_MIN else 1)
    return out.to(query.dtype)


@cache
def _no_sinks(heads: int) -> torch.Tensor:
    return torch.full((heads,), NO_SINK, dtype=torch.float32)


# --- A chunk of tokens of one sequence ---


def attend(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Compute the attention of a context's last ``n`` tokens to that context.

    Args:
        query: ``[n, heads, dim]``.
        k, v: ``[kv_heads, m, dim]``, the context up to and including the last token of ``query``. With a window, ``m``
            must cover at least the tokens that the first token of ``query`` sees.

    Returns:
        ``[n, heads, v dim]``
    """
    count, heads, dim = query.shape
    grouped = query.transpose(0, 1).reshape(k.shape[0], -1, count, dim)  # [kv_heads, group, n, dim]
    flash = query.device.type == "cpu" and not terms.softcap and v.shape[-1] <= dim
    out, total = (_flash if flash else _eager)(grouped, k, v, terms)
    if terms.sinks is not None:
        sinks = terms.sinks.float().view(*out.shape[:2], 1)
        out = out * torch.sigmoid(total - sinks)[..., None].to(out.dtype)
    return out.reshape(heads, count, -1).transpose(0, 1)


def _flash(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with torch's flash attention, on a CPU. For arguments and results see ``_eager``.

    Every token of the chunk sees all tokens before the chunk. That part needs no mask, and the heads of a group count
    as further tokens of one head. The chunk itself is causal. The function computes both parts and joins them by their
    sums of exponentials. A mask is needed only if a window ends inside the context.
    """
    kv_heads, group, count, dim = query.shape
    v_dim, length = v.shape[-1], k.shape[1]
    if v_dim < dim:
        v = functional.pad(v, (0, dim - v_dim))
    before = length - count  # tokens before the chunk
    wide = (kv_heads, group, length, dim)
    if terms.window and length > terms.window:
        mask = _mask(count, length, terms.window, query)
        out, total = _flash_cpu(query, k[:, None].expand(wide), v[:, None].expand(wide), terms.scaling, mask=mask)
        return out[..., :v_dim], total
    own = (kv_heads, group, count, dim)
    out, total = _flash_cpu(
        query, k[:, None, before:].expand(own), v[:, None, before:].expand(own), terms.scaling, causal=True
    )
    if before:
        packed = query.reshape(1, kv_heads, group * count, dim)
        out_before, total_before = _flash_cpu(packed, k[None, :, :before], v[None, :, :before], terms.scaling)
        out_before, total_before = out_before.view(query.shape), total_before.view(total.shape)
        share = torch.sigmoid(total - total_before)[..., None].to(out.dtype)
        out = torch.lerp(out_before, out, share)
        total = torch.logaddexp(total, total_before)
    return out[..., :v_dim], total


def _flash_cpu(
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    causal: bool = False,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the operator that ``scaled_dot_product_attention`` uses on a CPU. Unlike that function, the operator also
    returns the logarithm of the sums of exponentials."""
    output: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, k, v, 0.0, causal, attn_mask=mask, scale=scaling
    )
    return output


def _eager(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend by the plain formula: works on any device and with a soft cap.

    Args:
        query: ``[kv_heads, group, n, dim]``.

    Returns:
        ``[kv_heads, group, n, v dim]``, and ``[kv_heads, group, n]``: the logarithm of each sum of exponentials.
    """
    count, length = query.shape[2], k.shape[1]
    scores = (query * terms.scaling) @ k[:, None].transpose(2, 3)
    if terms.softcap:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    scores = scores.float() + _mask(count, length, terms.window, query).float()
    total = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - total[..., None]).to(v.dtype)
    return weights @ v[:, None], total


def _mask(count: int, length: int, window: int, like: torch.Tensor) -> torch.Tensor:
    """Return a mask ``[count, length]`` for the last ``count`` of ``length`` tokens: 0 where the row's token sees the
    column's token, else minus infinity. Dtype and device are those of ``like``."""
    positions = torch.arange(length, device=like.device)
    own = positions[length - count :, None]
    visible = positions <= own
    if window:
        visible &= positions > own - window
    return torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, -torch.inf)


AttentionInterface.register(NAME, paged_attention)
