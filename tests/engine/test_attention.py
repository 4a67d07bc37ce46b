"""Attention over frames against the formula, in float64, token by token."""

from __future__ import annotations

import math

import pytest
import torch

from engine.compute.attention import attend
from engine.compute.kernel_args import Terms
from engine.compute.paged_cache import Slice
from tests.helpers.engines.paged import TERMS, attended, compare, formula, paged_world, steps


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(3)
    yield
    torch.set_num_threads(before)


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
