"""The choice of the kernel that reads pages on a device.

A CPU needs no choice: ``engine.compute.cpu_kernel`` compiles its machine code. On a CUDA device this module tries each
candidate once, the best first, on pages of the engine's own layout. The first candidate whose results are correct is
used. If there is none, attention copies the KV of every sequence into one piece for torch, which is correct on every
device, but slow.
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
GROUP = 4  # query heads per KV head in the trial
ERROR_MAX = {"float32": 2e-3, "bfloat16": 4e-2, "float16": 1e-2}  # of a trial: a larger error is more than rounding


@dataclass(frozen=True)
class KernelChoice:
    """The outcome of the choice.

    Attributes:
        kernel: None if no kernel of the device can be used, and for a CPU.
        line: the kernel in use, and why each better candidate was rejected. ``status`` shows it.
    """

    kernel: PageKernel | None
    line: str


@functools.cache
def kernel_for(layout: Layout, device: torch.device) -> KernelChoice:
    """Return the kernel that reads pages of ``layout`` on ``device``.

    The first call for a layout and device compiles and runs a few small kernels.
    """
    if device.type == "cpu":
        return KernelChoice(None, "cpu: machine code compiled for the model")
    rejections: list[str] = []
    for name in CANDIDATES:
        kernel, reason = _try(name, layout, device)
        if kernel is not None:
            return KernelChoice(kernel, "; ".join([name, *rejections]))
        rejections.append(f"not {name}: {reason}")
    return KernelChoice(None, "; ".join(["gather", *rejections]))


def _try(name: str, layout: Layout, device: torch.device) -> tuple[PageKernel | None, str]:
    """Return the candidate and "", or None and the reason why it cannot be used."""
    module, class_name = CANDIDATES[name]
    try:
        kernel: PageKernel = getattr(importlib.import_module(module), class_name)()
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            error_max = trial(kernel, layout, device)
    except (ImportError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        # Kernel compilers raise any of these if a layout does not suit them.
        return None, " ".join(str(error).split())[:200] or type(error).__name__
    if not error_max <= ERROR_MAX[layout.dtype]:
        return None, f"results are off by {error_max:.2g}, and rounding explains at most {ERROR_MAX[layout.dtype]:g}"
    return kernel, ""


def trial(kernel: PageKernel, layout: Layout, device: torch.device) -> float:
    """Return the kernel's largest absolute error against the formula, for a step and a chunk over scattered pages."""
    page_tokens, content = layout.page_tokens, layout.shape[-1]
    k_dim = layout.head_dim or content
    v_dim, v_at = (k_dim, k_dim) if layout.head_dim else (layout.mla_latent, 0)
    lengths, counts = [2 * page_tokens + 3, page_tokens + 5], [1, 4]
    tables = [torch.tensor([4, 0, 3]), torch.tensor([1, 2])]
    generator = torch.Generator().manual_seed(7)
    shape = (5, *layout.shape[1:])
    pages = torch.randn(shape, generator=generator).to(device, DTYPES[layout.dtype])
    query = torch.randn(sum(counts), layout.kv_heads * GROUP, k_dim, generator=generator).to(device, pages.dtype)
    starts = [length - count for length, count in zip(lengths, counts, strict=True)]
    reading = reading_of(tables, starts, counts, page_tokens, device)
    out = kernel.attend(pages, query, reading, Terms(k_dim**-0.5), v_dim, v_at).float().cpu()
    error_max, row = 0.0, 0
    for table, length, count in zip(tables, lengths, counts, strict=True):
        context = pages.cpu().float()[table].transpose(0, 1).reshape(layout.kv_heads, -1, content)
        for i in range(count):
            visible = context[:, : length - count + i + 1].repeat_interleave(GROUP, dim=0)
            scores = torch.einsum("hd,hnd->hn", query[row].cpu().float(), visible[..., :k_dim]) * k_dim**-0.5
            expected = torch.einsum("hn,hnd->hd", scores.softmax(-1), visible[..., v_at : v_at + v_dim])
            error_max = max(error_max, float((out[row] - expected).abs().max()))
            row += 1
    return error_max
