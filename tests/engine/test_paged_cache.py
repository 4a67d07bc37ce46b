"""Frames of an arena: who has them, what bytes are in them, and how a batch's KV gets there."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

import kvstore
from engine.compute.paged_cache import Batch, PagedCache, Slice
from engine.memory.arena import Arena, runs

LAYOUT = kvstore.Layout(model="m", layers=3, kv_heads=2, head_dim=4, dtype="float32", page_tokens=4)
MLA = kvstore.Layout(model="m", layers=2, dtype="float32", page_tokens=4, mla_latent=6, mla_rope=2)


def arena_of(frames: int, layout: kvstore.Layout = LAYOUT) -> Arena:
    return Arena(layout, frames, layout.head_dim or layout.mla_latent)


def frames_of(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


# --- Who has them --------------------------------------------------------------------------------------------------


def test_frames_are_taken_in_one_run_where_there_is_one_and_in_few_where_there_is_not():
    arena = arena_of(10)
    taken = arena.take(10)
    arena.give_back(frames_of(0, 1, 5, 6, 7, 8, 9))  # 2-4 are taken: the example of the module
    assert arena.take(2).tolist() == [0, 1]
    arena.give_back(frames_of(1, 0))
    assert arena.take(3).tolist() == [5, 6, 7]
    arena.give_back(frames_of(5, 6, 7))
    assert arena.take(6).tolist() == [0, 5, 6, 7, 8, 9]
    assert arena.take(2) is None  # only 1 is free, and asking takes nothing
    assert (arena.frames_free, arena.take(1).tolist(), arena.take(1)) == (1, [1], None)
    assert arena.take(0).tolist() == []
    arena.check()
    arena.give_back(taken)
    assert (arena.frames_free, arena.frames_total) == (10, 10)
    arena.check()


def test_random_taking_and_giving_back_never_shares_a_frame():
    random_ = random.Random(5)
    arena = arena_of(97)
    held: list[torch.Tensor] = []
    for _ in range(1000):
        if held and random_.random() < 0.5:
            arena.give_back(held.pop(random_.randrange(len(held))))
        else:
            count = random_.randint(1, 20)
            free = arena.frames_free
            frames = arena.take(count)
            assert (frames is None) == (count > free)
            if frames is not None:
                held.append(frames)
                assert len(frames) == count and frames.tolist() == sorted(frames.tolist())
        everything = torch.cat([frames_of(), *held])
        assert len(torch.unique(everything)) == len(everything) == arena.frames_total - arena.frames_free
        arena.check()


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], []),
        ([7, 8, 9, 3, 4], [(0, 7, 3), (3, 3, 2)]),
        ([0], [(0, 0, 1)]),
        ([2, 1, 0], [(0, 2, 1), (1, 1, 1), (2, 0, 1)]),
        ([4, 4], [(0, 4, 1), (1, 4, 1)]),
    ],
)
def test_runs_are_the_longest_pieces_of_consecutive_frames(frames, expected):
    assert runs(frames) == runs(np.array(frames, dtype=np.int64)) == runs(frames_of(*frames)) == expected


# --- What is in them -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_frame_is_a_page_of_the_layout_byte_for_byte(dtype):
    layout = replace(LAYOUT, dtype=dtype)
    arena = arena_of(5, layout)
    assert not arena.pages.any()
    arena.pages.copy_(torch.randn(arena.pages.shape))
    rows = arena.rows(1, 3)
    assert rows.shape == (3, layout.page_bytes) and rows.dtype == np.uint8 and rows.flags.c_contiguous
    for layer in range(layout.layers):
        start, stop = layout.byte_range(layer)
        part = arena.layer_rows(1, 3, layer)
        assert part.shape == (3, layout.layer_bytes) and np.array_equal(part, rows[:, start:stop])
        of_head, stop = layout.byte_range(layer, 1, 2)
        content = arena.pages[2, layer, 1].contiguous().view(torch.uint8).numpy().reshape(-1)
        assert np.array_equal(rows[1, of_head:stop], content)
    rows[:] = 0  # they are views
    assert not arena.pages[1:4].any() and arena.pages[0].all() and arena.pages[4].all()


# --- How KV gets there ---------------------------------------------------------------------------------------------


def new_kv(tokens: int, layout: kvstore.Layout = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, as a model gives them: of tokens that lie apart, heads first."""
    dims = (layout.head_dim, layout.head_dim) if layout.head_dim else (layout.mla_latent, layout.mla_rope)
    k, v = (torch.randn(1, tokens, layout.kv_heads, dim).transpose(1, 2) for dim in dims)
    return k, v


def test_a_batch_puts_each_token_where_its_page_table_says_and_touches_nothing_else():
    arena = arena_of(8)
    arena.pages.fill_(-1)
    # Three tokens from 3 on: across a page's end; one token in a page that starts; six from the beginning.
    slices = [
        Slice(frames_of(6, 2), 3, torch.tensor([10, 11, 12])),
        Slice(frames_of(0, 5, 7), 8, np.array([13])),
        Slice(frames_of(4, 1), 0, torch.arange(6)),
    ]
    batch = Batch(arena, slices)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 0, 1, 2, 3, 4, 5]]
    assert batch.positions.tolist() == [[3, 4, 5, 8, 0, 1, 2, 3, 4, 5]]
    assert batch.last.tolist() == [2, 3, 9]
    k, v = new_kv(10)
    given = PagedCache(batch).update(k, v, 1)
    assert given[0] is k and given[1] is v
    at = [(6, 3), (2, 0), (2, 1), (7, 0), (4, 0), (4, 1), (4, 2), (4, 3), (1, 0), (1, 1)]
    for token, (frame, slot) in enumerate(at):
        assert torch.equal(arena.pages[frame, 1, :, slot, :4], k[0, :, token])
        assert torch.equal(arena.pages[frame, 1, :, slot, 4:], v[0, :, token])
        arena.pages[frame, 1, :, slot] = -1
    assert (arena.pages == -1).all()


def test_a_context_is_the_tokens_of_a_sequence_in_order():
    arena = arena_of(8)
    table = frames_of(5, 6, 2)
    k, v = new_kv(11)
    PagedCache(Batch(arena, [Slice(table, 0, torch.arange(11))])).update(k, v, 2)
    part = Slice(table, 9, torch.arange(2))
    whole = torch.cat((k, v), dim=-1)[0]
    batch = Batch(arena, [part])
    for start in (0, 3, 4, 9):
        assert torch.equal(batch.context(2, part, start), whole[:, start:])


def test_hooks_are_called_once_per_layer_around_the_write():
    arena = arena_of(2)
    seen: list[tuple[str, int, bool]] = []
    part = Slice(frames_of(1), 0, torch.arange(2))

    def hook(name: str, layer: int) -> None:
        seen.append((name, layer, bool(arena.pages[1, layer].any())))

    batch = Batch(arena, [part], before=lambda layer: hook("before", layer), after=lambda layer: hook("after", layer))
    cache = PagedCache(batch)
    for layer in range(2):
        cache.update(*new_kv(2), layer)
    assert seen == [("before", 0, False), ("after", 0, True), ("before", 1, False), ("after", 1, True)]


def test_what_arrives_late_is_not_put_over_what_is_new():
    """A page that comes whole in ``before`` may hold room of tokens that this forward computes."""
    arena = arena_of(1)
    part = Slice(frames_of(0), 2, torch.arange(1))
    k, v = new_kv(1)

    def arrive(layer: int) -> None:
        arena.pages[0] = 7

    PagedCache(Batch(arena, [part], before=arrive)).update(k, v, 0)
    assert torch.equal(arena.pages[0, 0, :, 2, :4], k[0, :, 0])
    assert (arena.pages[0, 0, :, :2] == 7).all()


def test_mla_is_given_the_contexts_of_chunks_and_nothing_of_steps():
    arena = arena_of(6, MLA)
    tables = [frames_of(0, 1), frames_of(2, 3), frames_of(4)]
    lengths = (7, 5, 3)
    latent, rope = new_kv(sum(lengths), MLA)
    filled = Batch(arena, [Slice(table, 0, torch.arange(n)) for table, n in zip(tables, lengths, strict=True)])
    context = PagedCache(filled).update(latent, rope, 1)
    assert torch.equal(context[0], latent) and torch.equal(context[1], rope)

    mixed = Batch(arena, [Slice(t, n - m, torch.arange(m)) for t, n, m in zip(tables, lengths, (2, 1, 3), strict=True)])
    last = torch.tensor([5, 6, 11, 12, 13, 14])
    context = PagedCache(mixed).update(latent[:, :, last], rope[:, :, last], 1)
    chunks = torch.tensor([*range(7), 12, 13, 14])
    assert torch.equal(context[0], latent[:, :, chunks]) and torch.equal(context[1], rope[:, :, chunks])

    steps = Batch(arena, [Slice(table, 0, torch.arange(1)) for table in tables])
    context = PagedCache(steps).update(latent[:, :, :3], rope[:, :, :3], 0)
    assert context[0].shape == (1, 1, 1, 6) and context[1].shape == (1, 1, 1, 2)
