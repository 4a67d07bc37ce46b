"""Attention over frames against the formula, in float64, token by token."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import kvstore
from engine.compute.attention import Terms, attend, paged_attention
from engine.compute.paged_cache import Batch, Slice
from engine.memory.arena import Arena


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(before)


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


def paged_world(kv_heads: int, dim: int, page_tokens: int, lengths: list[int], dtype: str = "float32"):
    """An arena in which every sequence's frames lie scattered, full of random numbers, and their page tables."""
    layout = kvstore.Layout(model="m", layers=2, kv_heads=kv_heads, head_dim=dim, dtype=dtype, page_tokens=page_tokens)
    pages = [-(-length // page_tokens) for length in lengths]
    arena = Arena(layout, sum(pages) + 3, dim)
    arena.pages.copy_(torch.randn(arena.pages.shape))
    return arena, list(torch.randperm(arena.frames_total)[: sum(pages)].split(pages))


def attended(arena: Arena, slices: list[Slice], query: torch.Tensor, terms: Terms) -> torch.Tensor:
    """``[T, heads, dim]`` of ``query [T, heads, dim]``, in layer 1."""
    unread = torch.empty(1, arena.layout.kv_heads, len(query), arena.k_dim)
    out, weights = paged_attention(
        Layer(1),
        query.transpose(0, 1)[None],
        unread,
        unread,
        None,
        scaling=terms.scaling,
        sliding_window=terms.window or None,
        softcap=terms.softcap or None,
        s_aux=terms.sinks,
        paged=Batch(arena, slices),
    )
    assert weights is None and out.shape[0] == 1
    return out[0]


def compare(arena: Arena, slices: list[Slice], heads: int, terms: Terms, tolerance: float = 2e-6) -> None:
    query = torch.randn(sum(part.count for part in slices), heads, arena.k_dim)
    out = attended(arena, slices, query, terms)
    at = 0
    for part in slices:
        context = Batch(arena, [part]).context(1, part)
        k, v = context[..., : arena.k_dim].float(), context[..., arena.k_dim :].float()
        expected = formula(query[at : at + part.count], k, v, terms)
        torch.testing.assert_close(out[at : at + part.count].double(), expected, atol=tolerance, rtol=tolerance)
        at += part.count


def steps(tables: list[torch.Tensor], lengths: list[int]) -> list[Slice]:
    return [Slice(table, length - 1, torch.zeros(1)) for table, length in zip(tables, lengths, strict=True)]


# --- One token of each sequence ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page_tokens", "kv_heads", "group", "dim"),
    [
        (16, 2, 3, 64),
        (32, 2, 3, 64),
        (64, 2, 3, 64),
        (4, 1, 1, 16),  # a page is less than a vector
        (24, 3, 8, 24),  # nothing is a power of two
        (16, 2, 7, 80),
        (64, 1, 5, 7),  # vectors of one
        (32, 2, 4, 256),
    ],
)
def test_one_token_of_many_sequences(page_tokens, kv_heads, group, dim):
    lengths = [1, 2, 3, 15, 16, 17, 63, 64, 65, 130, 200]
    arena, tables = paged_world(kv_heads, dim, page_tokens, lengths)
    compare(arena, steps(tables, lengths), kv_heads * group, Terms(dim**-0.5))


TERMS = {
    "plain": Terms(0.3),
    "window": Terms(0.3, window=20),
    "window of one": Terms(0.3, window=1),
    "softcap": Terms(0.3, softcap=1.5),
    "large softcap": Terms(3.0, softcap=50.0),
    "sinks": Terms(0.3, sinks=torch.tensor([-30.0, 0.0, 1.5, 40.0])),
    "all": Terms(0.7, window=33, softcap=4.0, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])),
}


@pytest.mark.parametrize("page_tokens", [16, 32])
@pytest.mark.parametrize("name", TERMS)
def test_one_token_under_every_term(name, page_tokens):
    lengths = [1, 19, 20, 21, 36, 64, 100]
    arena, tables = paged_world(2, 16, page_tokens, lengths)
    compare(arena, steps(tables, lengths), 4, TERMS[name], tolerance=1e-5 if "softcap" in name else 3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_pages_of_half_precision_are_summed_in_float32(dtype):
    lengths = [5, 77]
    arena, tables = paged_world(2, 32, 16, lengths, dtype)
    compare(arena, steps(tables, lengths), 4, Terms(0.2))


def test_a_logit_that_towers_over_all_others_and_logits_that_are_all_the_same():
    arena, tables = paged_world(1, 16, 16, [200])
    arena.pages[tables[0][3], 1, 0, 5, :16] = 60.0
    compare(arena, steps(tables, [200]), 2, Terms(1.0))
    arena.pages[:, 1, :, :, :16] = 0.0
    compare(arena, steps(tables, [200]), 2, Terms(1.0))


def test_what_no_token_sees_is_not_read():
    """Not even multiplied by nothing: what another sequence left behind may be no number at all."""
    lengths = [21, 70]
    arena, tables = paged_world(2, 16, 16, lengths)
    query = torch.randn(2, 4, 16)
    for terms in (Terms(0.25), Terms(0.25, window=10)):
        before = attended(arena, steps(tables, lengths), query, terms)
        kept = arena.pages.clone()
        seen = torch.zeros(arena.pages.shape[0], 16, dtype=torch.bool)
        for table, length in zip(tables, lengths, strict=True):
            for token in range(max(0, length - terms.window) if terms.window else 0, length):
                seen[table[token // 16], token % 16] = True
        arena.pages.masked_fill_(~seen[:, None, None, :, None], math.nan)
        arena.pages[:, 0] = math.nan
        assert torch.equal(attended(arena, steps(tables, lengths), query, terms), before)
        arena.pages.copy_(kept)


def test_more_cores_change_nothing():
    lengths = [64, 3, 90, 17, 33]
    arena, tables = paged_world(3, 16, 16, lengths)
    query = torch.randn(5, 6, 16)
    alone = attended(arena, steps(tables, lengths), query, Terms(0.25))
    torch.set_num_threads(2)
    assert torch.equal(attended(arena, steps(tables, lengths), query, Terms(0.25)), alone)


# --- Chunks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TERMS)
def test_chunks_and_steps_in_one_batch(name):
    lengths = [9, 40, 70, 33, 21]
    counts = [9, 1, 30, 5, 1]
    arena, tables = paged_world(2, 16, 16, lengths)
    slices = [
        Slice(table, length - count, torch.zeros(count))
        for table, length, count in zip(tables, lengths, counts, strict=True)
    ]
    compare(arena, slices, 4, TERMS[name], tolerance=1e-5)


@pytest.mark.parametrize("count", [1, 2, 17, 600])
@pytest.mark.parametrize("old", [0, 1, 50, 700])
def test_a_chunk_after_what_is_older(count, old):
    k, v = (torch.randn(2, old + count, 16) for _ in range(2))
    query = torch.randn(count, 4, 16)
    last = slice(-3, None)
    expected = torch.cat(
        [formula(query[i : i + 1], k[:, : old + i + 1], v[:, : old + i + 1], Terms(0.25)) for i in range(count)[last]]
    )
    out = attend(query, k, v, Terms(0.25))
    torch.testing.assert_close(out[last].double(), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_chunk_whose_values_are_narrower_than_its_keys(softcap):
    k, v, query = torch.randn(3, 50, 24), torch.randn(3, 50, 10), torch.randn(20, 3, 24)
    terms = Terms(0.2, softcap=softcap)
    torch.testing.assert_close(attend(query, k, v, terms).double(), formula(query, k, v, terms), atol=2e-6, rtol=2e-6)
