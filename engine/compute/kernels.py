"""Kernels: which of them reads pages on a device, and why the others do not.

On a CPU it is machine code of our own (``engine.compute.cpu``). On a CUDA device each candidate, the best first, is
tried once on pages of the engine's own layout: the first that gives the right numbers is used. If none does, the KV of
every sequence is gathered into one piece for torch: correct everywhere, and slow.
"""

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from engine.compute.kernel_args import PageKernel, Terms, reading_of
from engine.memory.arena import DTYPES
from kvstore.model.layout import Layout

CANDIDATES = {"triton": ("engine.compute.triton_kernel", "TritonKernel")}
GROUP = 4  # query heads per KV head of the trial
CLOSE = {"float32": 2e-3, "bfloat16": 4e-2, "float16": 1e-2}


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of a device; None if pages are read without one.

    Attributes:
        line: which one is in use and why better ones are not, for status.
    """

    kernel: PageKernel | None
    line: str


@functools.cache
def chosen(layout: Layout, device: torch.device) -> KernelChoice:
    """The kernel that reads pages of ``layout`` on ``device``. The first call compiles and runs a few small kernels."""
    if device.type == "cpu":
        return KernelChoice(None, "cpu: machine code made for the model")
    refused: list[str] = []
    for name in CANDIDATES:
        kernel, why = _tried(name, layout, device)
        if kernel is not None:
            return KernelChoice(kernel, "; ".join([name, *refused]))
        refused.append(f"not {name}: {why}")
    return KernelChoice(None, "; ".join(["gather", *refused]))


def _tried(name: str, layout: Layout, device: torch.device) -> tuple[PageKernel | None, str]:
    """The candidate, or why it cannot be used."""
    module, kind = CANDIDATES[name]
    try:
        kernel: PageKernel = getattr(importlib.import_module(module), kind)()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            off = trial(kernel, layout, device)
    except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # Compilers of kernels raise this when a layout does not suit them.
        return None, " ".join(str(error).split())[:200] or type(error).__name__
    if not off <= CLOSE[layout.dtype]:
        return None, f"off by {off:.2g} where at most {CLOSE[layout.dtype]:g} is rounding"
    return kernel, ""


def trial(kernel: PageKernel, layout: Layout, device: torch.device) -> float:
    """The largest error of the kernel against the formula, for a step and a chunk over scattered pages."""
    page_tokens, content = layout.page_tokens, layout.shape[-1]
    k_dim = layout.head_dim or content
    v_dim, v_at = (k_dim, k_dim) if layout.head_dim else (layout.mla_latent, 0)
    lengths, counts = [2 * page_tokens + 3, page_tokens + 5], [1, 4]
    tables = [torch.tensor([4, 0, 3]), torch.tensor([1, 2])]
    draw = torch.Generator().manual_seed(7)
    shape = (5, *layout.shape[1:])
    pages = torch.randn(shape, generator=draw).to(device, DTYPES[layout.dtype])
    query = torch.randn(sum(counts), layout.kv_heads * GROUP, k_dim, generator=draw).to(device, pages.dtype)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    reading = reading_of(tables, starts, counts, page_tokens, device)
    out = kernel.attend(pages, query, reading, Terms(k_dim**-0.5), v_dim, v_at).float().cpu()
    off, at = 0.0, 0
    for table, length, count in zip(tables, lengths, counts, strict=True):
        context = pages.cpu().float()[table].transpose(0, 1).reshape(layout.kv_heads, -1, content)
        for i in range(count):
            seen = context[:, : length - count + i + 1].repeat_interleave(GROUP, dim=0)
            scores = torch.einsum("hd,hnd->hn", query[at].cpu().float(), seen[..., :k_dim]) * k_dim**-0.5
            expected = torch.einsum("hn,hnd->hd", scores.softmax(-1), seen[..., v_at : v_at + v_dim])
            off = max(off, float((out[at] - expected).abs().max()))
            at += 1
    return off
