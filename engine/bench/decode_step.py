"""Rows about decoding: a step with an engine's paged attention, compared with a contiguous cache.

The limit is a program without pages. It preallocates K and V of each layer as ``[batch, kv_heads, tokens, head_dim]``.
A step writes its token in place, and passes a view of the filled part to transformers. All sequences have the same
length, so no mask is needed, and attention is that of torch. The engine reads frames that are scattered over the arena.
Both use the same weights and the same core or device. They repeat the same step, and the logits are compared every
time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from engine.compute.models import Model, load_model
from engine.compute.packed_linear import pack
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import runner_of
from engine.memory.arena import Arena
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage, free_bytes

MODEL, MODEL_QUICK = "small-llama", "tiny-llama"
PAGE_TOKENS = 64
# Tokens of context, including the token of the step. The first number belongs to the row without a suffix.
CONTEXTS, CONTEXTS_QUICK = (2048, 512, 8192), (96,)
STEP_TOKENS = 1 << 17  # tokens of context that one variant reads in a round, in at least one step
STEPS_MAX = 15
LOGITS_APART_MAX = 2e-3  # relative to the largest logit


class ContiguousCache(Cache):
    """K and V of all sequences.

    Args:
        kv: ``[layers, 2, batch, kv_heads, tokens, head_dim]``. A step writes the last but one token.
    """

    def __init__(self, kv: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._kv = kv

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the token of the step. Returns K and V of all tokens up to this one."""
        key, value = self._kv[layer_idx]
        key[:, :, -2:-1] = key_states
        value[:, :, -2:-1] = value_states
        return key[:, :, :-1], value[:, :, :-1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the step."""
        return int(self._kv.shape[-2]) - 2

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the position of the step's token."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of tokens that attention sees, and the position of the first one."""
        return self.get_seq_length() + query_length, 0


@dataclass
class Nets:
    """Two nets with the same weights: one for an engine, and one with the attention of transformers."""

    model: Model
    plain: PreTrainedModel


def nets_of(preset: str, device: str = "cpu") -> Nets:
    """Return the nets of a preset."""
    model = load_model(preset, device=device)
    pack(model.net)  # in both nets, as a runner does it: rows must not compare the linear layers
    return Nets(model, copy.deepcopy(model.net, {id(tensor): tensor for tensor in model.net.parameters()}))


def decode_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """Measure a step of ``batch`` sequences with several lengths of context.

    Raises:
        BenchFailed: the logits of the two variants differ, or there is too little memory for both.
    """
    stage.clear()
    quick = stage.settings.quick
    with one_core():
        nets = nets_of(MODEL_QUICK if quick else MODEL, stage.settings.device)
        contexts = CONTEXTS_QUICK if quick else CONTEXTS
        names = [name, *(f"{name}.{context}" for context in contexts[1:])]
        return [_measure(stage, row, bar, nets, batch, tokens) for row, tokens in zip(names, contexts, strict=True)]


def _measure(stage: Stage, name: str, bar: Bar, nets: Nets, batch: int, context: int) -> Result:
    layout = nets.model.layout(PAGE_TOKENS)
    pages = -(-context // PAGE_TOKENS)
    needed = 2 * batch * pages * layout.page_bytes
    if needed > 0.8 * free_bytes(stage.settings.shm_dir):
        raise BenchFailed(f"{name} needs {needed >> 20} MiB of memory")
    device = stage.settings.device
    arena = Arena(layout, batch * pages, nets.model.geometry.k_dim, device)
    runner = runner_of(nets.model, arena, batch)
    assert arena.take(batch * pages) is not None
    _fill(arena)
    frames = torch.randperm(arena.frames_total, generator=torch.Generator().manual_seed(1)).view(batch, pages)
    kv = _contiguous(arena, frames, context)
    tokens = torch.arange(batch) % nets.model.geometry.vocab_size
    position = torch.full((batch, 1), context - 1, device=device)
    input_ids = tokens[:, None].to(device)

    def paged(_: None) -> torch.Tensor:
        parts = [Slice(frames[i], context - 1, tokens[i : i + 1]) for i in range(batch)]
        return runner.forward(Batch(arena, parts)).cpu()  # waits for the device

    def contiguous(_: None) -> torch.Tensor:
        with torch.inference_mode():
            cache = ContiguousCache(kv)
            out = nets.plain(input_ids=input_ids, position_ids=position, past_key_values=cache, use_cache=True)
            logits: torch.Tensor = out.logits[:, -1].float().cpu()
            return logits

    def check(variant: str, logits: object) -> None:
        assert isinstance(logits, torch.Tensor)
        if (logits - expected).abs().max() > LOGITS_APART_MAX * expected.abs().max():
            raise BenchFailed(f"{name}: wrong logits of the variant {variant}")

    expected = contiguous(None)
    check("paged", paged(None))
    steps = 2 * max(1, min(STEPS_MAX, STEP_TOKENS // (batch * context)))
    variants = {"contiguous": contiguous, "paged": paged}
    seconds = alternate(variants, range(steps), stage.settings.rounds, lambda _: None, check)
    details: dict[str, Any] = {
        "batch": batch,
        "context_tokens": context,
        "page_tokens": PAGE_TOKENS,
        "parameters": sum(tensor.numel() for tensor in nets.plain.parameters()),
        "kv_bytes": batch * context * layout.page_bytes // PAGE_TOKENS,
        "step_seconds": {variant: medians(times) for variant, times in seconds.items()},
    }
    return result(
        name,
        Kind.TIME,
        medians(seconds["paged"]),
        medians(seconds["contiguous"]),
        bar=bar,
        limit_is="the same step, contiguous cache",
        details=details,
    )


def _fill(arena: Arena) -> None:
    """Fill the arena with random numbers. The same 8 frames repeat, which does not change the step time."""
    pattern = arena.pages[:8]
    pattern.copy_(torch.randn(pattern.shape, generator=torch.Generator().manual_seed(2)))
    for frame in range(8, arena.frames_total, 8):
        arena.pages[frame : frame + 8] = pattern[: arena.frames_total - frame]


def _contiguous(arena: Arena, frames: torch.Tensor, context: int) -> torch.Tensor:
    """Copy the KV of these page tables to a tensor ``[layers, 2, batch, kv_heads, context + 1, head_dim]``."""
    layers, kv_heads, page_tokens, _ = arena.layout.shape
    dim = arena.k_dim
    kv = arena.pages.new_zeros((layers, 2, len(frames), kv_heads, context + 1, dim))
    for sequence, table in enumerate(frames):
        for page, frame in enumerate(table.tolist()):
            first = page * page_tokens
            count = min(page_tokens, context - first)
            content = arena.pages[frame, :, :, :count]
            kv[:, 0, sequence, :, first : first + count] = content[..., :dim]
            kv[:, 1, sequence, :, first : first + count] = content[..., dim:]
    return kv


@contextmanager
def one_core() -> Iterator[None]:
    """Let torch use one core inside the ``with`` block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
