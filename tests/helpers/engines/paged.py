"""Attention over pages against the formula, in float64, token by token; for every kernel that reads pages."""

from __future__ import annotations

import itertools

import torch

import kvstore
from engine.compute.attention import attend, paged_attention
from engine.compute.kernel_args import BatchReading, Terms
from engine.compute.paged_cache import Batch, Slice
from engine.memory.arena import Arena

TERMS = {
    "plain": Terms(0.3),
    "window": Terms(0.3, window=20),
    "window of one": Terms(0.3, window=1),
    "softcap": Terms(0.3, softcap=1.5),
    "large softcap": Terms(3.0, softcap=50.0),
    "sinks": Terms(0.3, sinks=torch.tensor([-30.0, 0.0, 1.5, 40.0])),
    "all": Terms(0.7, window=33, softcap=4.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}


def formula(query: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """``query [n, heads, dim]`` of the last tokens of ``k``, ``v [kv_heads, m, dim]``: ``[n, heads, v dim]``."""
    count, heads, _ = query.shape
    kv_heads, length, _ = k.shape
    out = torch.empty((count, heads, v.shape[-1]), dtype=torch.float64)
    for i, head in itertools.product(range(count), range(heads)):
        own = length - count + i
        low = max(0, own + 1 - terms.window) if terms.window else 0
        seen = slice(low, own + 1)
        group = head // (heads // kv_heads)
        logits = k[group, seen].double() @ query[i, head].double() * terms.scaling
        if terms.softcap:
            logits = torch.tanh(logits / terms.softcap) * terms.softcap
        if terms.sinks is not None:
            logits = torch.cat((logits, terms.sinks[head : head + 1].double()))
        weights = torch.softmax(logits, dim=0)[: own + 1 - low]
        out[i, head] = weights @ v[group, seen].double()
    return out


class Layer(torch.nn.Module):
    """What attention sees of a layer."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx


def paged_world(
    kv_heads: int, dim: int, page_tokens: int, lengths: list[int], dtype: str = "float32", device: str = "cpu"
):
    """An arena in which every sequence's frames lie scattered, full of random numbers, and their page tables."""
    layout = kvstore.Layout(model="m", layers=2, kv_heads=kv_heads, head_dim=dim, dtype=dtype, page_tokens=page_tokens)
    pages = [-(-length // page_tokens) for length in lengths]
    arena = Arena(layout, sum(pages) + 3, dim, device)
    arena.pages.copy_(torch.randn(arena.pages.shape))
    return arena, list(torch.randperm(arena.frames_total)[: sum(pages)].split(pages))


def attended(arena: Arena, slices: list[Slice], query: torch.Tensor, terms: Terms) -> torch.Tensor:
    """``[T, heads, dim]`` of ``query [T, heads, dim]``, in layer 1."""
    device = arena.device
    unread = torch.empty(1, arena.layout.kv_heads, len(query), arena.k_dim, device=device)
    out, weights = paged_attention(
        Layer(1),
        query.to(device).transpose(0, 1)[None],
        unread,
        unread,
        None,
        scaling=terms.scaling,
        sliding_window=terms.window or None,
        softcap=terms.softcap or None,
        s_aux=terms.sinks if terms.sinks is None else terms.sinks.to(device),
        paged=Batch(arena, slices),
    )
    assert weights is None and out.shape[0] == 1
    return out[0].cpu()


def compare(arena: Arena, slices: list[Slice], heads: int, terms: Terms, tolerance: float = 2e-6) -> None:
    query = torch.randn(sum(part.count for part in slices), heads, arena.k_dim)
    out = attended(arena, slices, query, terms)
    at = 0
    for part in slices:
        context = Batch(arena, [part]).context(1, part)
        k, v = context[..., : arena.k_dim].float().cpu(), context[..., arena.k_dim :].float().cpu()
        expected = formula(query[at : at + part.count], k, v, terms)
        torch.testing.assert_close(out[at : at + part.count].double(), expected, atol=tolerance, rtol=tolerance)
        at += part.count


def steps(tables: list[torch.Tensor], lengths: list[int]) -> list[Slice]:
    return [Slice(table, length - 1, torch.zeros(1)) for table, length in zip(tables, lengths, strict=True)]


class GatherKernel:
    """A kernel of a device, in words that any device understands: what ``PageKernel`` promises, and nothing fast."""

    name = "plain"

    def attend(
        self, pages: torch.Tensor, query: torch.Tensor, reading: BatchReading, terms: Terms, v_dim: int, v_at: int
    ) -> torch.Tensor:
        """See ``PageKernel``."""
        table, page_tokens = reading.table, pages.shape[2]
        out = query.new_empty((*query.shape[:2], v_dim))
        for part in range(table.slices):
            row, start, count, first = (int(x[part]) for x in (table.row, table.start, table.count, table.first))
            stop = start + count
            frames = table.frames[first : first + -(-stop // page_tokens)]
            context = pages[frames].transpose(0, 1).reshape(pages.shape[1], -1, pages.shape[3])[:, :stop]
            k, v = context[..., : query.shape[-1]], context[..., v_at : v_at + v_dim]
            out[row : row + count] = attend(query[row : row + count], k, v, terms)
        return out
