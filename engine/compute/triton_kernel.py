# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Attention over pages in place, in Triton. One kernel computes steps and chunks, with grouped heads or MLA.

A program computes a tile of tokens for some query heads of one KV head, that is ``BLOCK_M`` rows of queries. It loops
over the tokens that these rows see, in blocks of ``BLOCK_N``. Tokens that no row sees are not loaded. The page table is
read for each token separately, so a page may have any number of tokens. Scores, and the running maximum and sum of
their exponentials (online softmax), are float32, whatever the dtype of the pages.

If there are too few tiles to fill the device, ``SPLITS`` programs share the tokens of each sequence, and a second
kernel joins their sums (flash-decoding).

K is multiplied in two parts, because a block's size must be a power of two. For example, the 576 elements of a latent
and its rope key are split into 512 and 64.

To run on a CPU, set ``TRITON_INTERPRET=1`` before this module is imported.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from engine.compute.kernel_args import BatchReading, Terms

LOG2_E = 1.4426950408889634
SPLITS_MAX = 32
PROGRAMS_PER_CORE = 2  # as many programs fill the device
HEADS_MAX = 16  # the most query heads of a program


@triton.jit
def _attend(
    query,
    pages,
    frames,
    tile_slice,
    tile_token,
    row_of,
    start_of,
    count_of,
    first_of,
    sinks,
    out,
    sums,
    scaling,
    softcap,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    CONTENT: tl.constexpr,
    K_DIM: tl.constexpr,
    K_MAIN: tl.constexpr,
    K_REST: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    V_AT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    tile, split = tl.program_id(0), tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    slice_ = tl.load(tile_slice + tile)
    token0 = tl.load(tile_token + tile)
    start = tl.load(start_of + slice_)
    count = tl.load(count_of + slice_)
    table = frames + tl.load(first_of + slice_)

    rows = tl.arange(0, BLOCK_M)
    token = token0 + rows // BLOCK_H
    member = (tl.program_id(1) % HEAD_BLOCKS) * BLOCK_H + rows % BLOCK_H
    real = (rows < BLOCK_T * BLOCK_H) & (token < count) & (member < GROUP)
    position = start + token
    head = kv_head * GROUP + member
    item = (tl.load(row_of + slice_) + token) * HEADS + head

    main = tl.arange(0, K_MAIN)
    inner = main < K_DIM if K_MAIN > K_DIM else main >= 0  # a tensor core needs 16 elements; smaller heads are padded
    q = tl.load(query + item[:, None] * K_DIM + main[None, :], mask=real[:, None] & inner[None, :], other=0.0)
    if K_REST:
        rest = K_MAIN + tl.arange(0, K_REST)
        q_rest = tl.load(
            query + item[:, None] * K_DIM + rest[None, :], mask=real[:, None] & (rest < K_DIM)[None, :], other=0.0
        )
    dims = tl.arange(0, V_PAD)

    high = start + tl.minimum(token0 + BLOCK_T, count)
    low = start * 0
    if WINDOW:
        low = tl.maximum(start + token0 + 1 - WINDOW, 0)
    share = tl.cdiv(tl.cdiv(high - low, BLOCK_N), SPLITS) * BLOCK_N
    low = low + split * share
    high = tl.minimum(high, low + share)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    summed = tl.zeros([BLOCK_M, V_PAD], tl.float32)
    for at in range(low, high, BLOCK_N):
        context = at + tl.arange(0, BLOCK_N)  # positions of the block's tokens
        exists = context < high
        frame = tl.load(table + context // PAGE_TOKENS, mask=exists, other=0)
        offset = frame * page_stride + kv_head * head_stride + (context % PAGE_TOKENS) * CONTENT
        k = tl.load(pages + offset[None, :] + main[:, None], mask=exists[None, :] & inner[:, None], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if K_REST:
            k_rest = tl.load(
                pages + offset[None, :] + rest[:, None], mask=exists[None, :] & (rest < K_DIM)[:, None], other=0.0
            )
            scores += tl.dot(q_rest, k_rest.to(q.dtype), input_precision="ieee")
        scores = scores * scaling
        if SOFTCAP:
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)  # softcap * tanh(scores / softcap)
        visible = exists[None, :] & (context[None, :] <= position[:, None])
        if WINDOW:
            visible = visible & (context[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has seen no token yet
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(peak - level)
        v = tl.load(
            pages + offset[:, None] + V_AT + dims[None, :], mask=exists[:, None] & (dims < V_DIM)[None, :], other=0.0
        )
        total = total * fade + tl.sum(weights, 1)
        summed = summed * fade[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
        peak = higher

    inside = real[:, None] & (dims < V_DIM)[None, :]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
            level = tl.maximum(peak, sink)
            fade = tl.exp2(peak - level)
            total = total * fade + tl.exp2(sink - level)
            summed = summed * fade[:, None]
        result = summed / tl.where(real, total, 1.0)[:, None]
        tl.store(out + item[:, None] * V_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        base = sums + (item * SPLITS + split) * (V_DIM + 2)
        tl.store(base[:, None] + dims[None, :], summed, mask=inside)
        tl.store(base + V_DIM, peak, mask=real)
        tl.store(base + V_DIM + 1, total, mask=real)


@triton.jit
def _join(
    sums,
    sinks,
    out,
    HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    SINKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    item = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, V_PAD)
    base = sums + (item * SPLITS + tl.arange(0, SPLITS)) * (V_DIM + 2)
    peaks = tl.load(base + V_DIM)
    totals = tl.load(base + V_DIM + 1)
    parts = tl.load(base[:, None] + dims[None, :], mask=(dims < V_DIM)[None, :], other=0.0)
    level = tl.max(peaks, 0)
    extra = level * 0.0
    if SINKS:
        sink = tl.load(sinks + item % HEADS) * LOG2E
        level = tl.maximum(level, sink)
        extra = tl.exp2(sink - level)
    fades = tl.exp2(peaks - level)
    total = tl.sum(totals * fades, 0) + extra
    result = tl.sum(parts * fades[:, None], 0) / total
    tl.store(out + item * V_DIM + dims, result.to(out.dtype.element_ty), mask=dims < V_DIM)


class TritonKernel:
    """The ``PageKernel`` of CUDA devices.

    Args:
        cores: the number of the device's multiprocessors to fill; None means all.
    """

    name = "triton"

    def __init__(self, cores: int | None = None) -> None:
        self._cores = cores

    def attend(
        self,
        pages: torch.Tensor,
        query: torch.Tensor,
        reading: BatchReading,
        terms: Terms,
        v_dim: int,
        v_at: int,
    ) -> torch.Tensor:
        """Attend from all tokens of the batch, as ``PageKernel.attend`` says."""
        rows, heads, k_dim = query.shape
        kv_heads, page_tokens, content = pages.shape[1:]
        assert pages.stride(-1) == 1 and pages.stride(-2) == content, pages.stride()
        table = reading.table
        group = heads // kv_heads
        shape = block_shape(group, k_dim, v_dim, pages.element_size(), table.steps)
        tiles = reading.tiles(shape["BLOCK_T"])
        programs = len(tiles.slice), kv_heads * -(-group // shape["BLOCK_H"])
        cores = self._cores if self._cores is not None else _cores(query.device)
        splits = splits_of(programs[0] * programs[1], cores, table.stop_max, shape["BLOCK_N"])
        out = query.new_empty((rows, heads, v_dim))
        sums = query.new_empty((rows * heads * splits * (v_dim + 2) if splits > 1 else 1,), dtype=torch.float32)
        sinks = sums if terms.sinks is None else terms.sinks.float().contiguous()
        shared_options = head_shape(heads, v_dim, terms.sinks is not None, splits)
        _attend[(*programs, splits)](
            query.contiguous(),
            pages,
            table.frames,
            tiles.slice,
            tiles.token,
            table.row,
            table.start,
            table.count,
            table.first,
            sinks,
            out,
            sums,
            terms.scaling,
            terms.softcap,
            pages.stride(0),
            pages.stride(1),
            GROUP=group,
            PAGE_TOKENS=page_tokens,
            CONTENT=content,
            K_DIM=k_dim,
            V_AT=v_at,
            WINDOW=terms.window,
            SOFTCAP=bool(terms.softcap),
            **options_of(shape, v_dim, pages.element_size()),
            **shared_options,
            **shape,
        )
        if splits > 1:
            _join[(rows * heads,)](sums, sinks, out, **shared_options)
        return out


def block_shape(group: int, k_dim: int, v_dim: int, element_bytes: int, steps: bool) -> dict[str, int]:
    """Return the block sizes of one program. Its registers and shared memory limit them.

    Tensor cores need at least 16 rows, columns and elements.
    """
    k_main = max(16, 1 << (k_dim.bit_length() - 1))
    k_rest = max(16, triton.next_power_of_2(k_dim - k_main)) if k_dim > k_main else 0
    block_h = min(HEADS_MAX, triton.next_power_of_2(group))
    rows_max = 64 if v_dim <= 128 else 32
    block_t = 1 if steps else max(1, rows_max // block_h)
    block_n = 64 if k_dim <= 128 else 32 if k_dim <= 256 else 16
    if element_bytes == 4:
        block_n = max(16, block_n // 2)
    return {
        "K_MAIN": k_main,
        "K_REST": k_rest,
        "BLOCK_T": block_t,
        "BLOCK_H": block_h,
        "BLOCK_M": max(16, block_t * block_h),
        "BLOCK_N": block_n,
    }


def head_shape(heads: int, v_dim: int, sinks: bool, splits: int) -> dict[str, int]:
    """Return the compile-time constants that both kernels have."""
    v_pad = max(16, triton.next_power_of_2(v_dim))
    return {"HEADS": heads, "V_DIM": v_dim, "V_PAD": v_pad, "SINKS": sinks, "SPLITS": splits}


def options_of(shape: dict[str, int], v_dim: int, element_bytes: int) -> dict[str, int]:
    """Return Triton's options for the compilation of the first kernel."""
    return {"num_warps": 8 if shape["BLOCK_M"] * v_dim > 64 * 64 else 4, "num_stages": stages_of(element_bytes)}


def stages_of(element_bytes: int) -> int:
    """Return how many blocks are loaded ahead. For float32 it is one, because speed does not matter there."""
    return 2 if element_bytes == 2 else 1


def splits_of(programs: int, cores: int, stop_max: int, block_n: int) -> int:
    """Return how many programs share a sequence. It is a power of two, so that few kernels are compiled."""
    to_fill_device = PROGRAMS_PER_CORE * cores // max(1, programs)
    with_enough_work = stop_max // (4 * block_n)  # each program has at least four blocks
    return 1 << max(0, min(to_fill_device, with_enough_work, SPLITS_MAX).bit_length() - 1)


@functools.cache
def _cores(device: torch.device) -> int:
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count)
