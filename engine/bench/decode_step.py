"""Rows about decoding: a step of an engine's paged attention against the same model over one contiguous cache.

The limit is what a program without pages would do: K and V of each layer preallocated as ``[batch, kv_heads, tokens,
head_dim]``, a step writes its token in place and gives transformers a view of what is filled; sequences are equally
long, so that no mask is needed, and attention is torch's. Ours reads frames that lie scattered over the arena. Both
share the weights, use one core or device, and compute the same step again and again: their logits are compared every
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
from engine.compute.paged_cache import Arena, Batch, Slice
from engine.compute.runner import runner_of
from kvstore.bench.harness import Bar, BenchFailed, Kind, Result, alternate, medians, result
from kvstore.bench.stage import Stage, free_bytes

MODEL, MODEL_QUICK = "small-llama", "tiny-llama"
PAGE_TOKENS = 64
CONTEXTS, CONTEXTS_QUICK = (2048, 512, 8192), (96,)  # tokens, that of the step included; the first gives the row's line
STEP_TOKENS = 1 << 17  # of context, read per round and variant; one step at least
STEPS_MAX = 15
LOGITS_APART_MAX = 2e-3  # of the largest one


class ContiguousCache(Cache):
    """K and V of all sequences, ``[layers, 2, batch, kv_heads, tokens, head_dim]``; the last token is to be written."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__(layers=[])
        self._held = held

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the step's token, and shows everything up to it."""
        key, value = self._held[layer_idx]
        key[:, :, -2:-1] = key_states
        value[:, :, -2:-1] = value_states
        return key[:, :, :-1], value[:, :, :-1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the step."""
        return int(self._held.shape[-2]) - 2

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Where the step's token is."""
        return self.get_seq_length()

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Tokens that are seen, from 0 on."""
        return self.get_seq_length() + query_length, 0


@dataclass
class Nets:
    """A model twice, sharing its weights: as transformers attends, and over an arena."""

    model: Model
    plain: PreTrainedModel


def nets_of(preset: str, device: str = "cpu") -> Nets:
    """Return the nets of a preset, not changed by any engine."""
    model = load_model(preset, device=device)
    pack(model.net)  # as a runner would: rows compare what is around the linear layers
    return Nets(model, copy.deepcopy(model.net, {id(tensor): tensor for tensor in model.net.parameters()}))


def decode_step(stage: Stage, name: str, bar: Bar, batch: int) -> list[Result]:
    """A step of ``batch`` sequences, at several lengths of context.

    Raises:
        BenchFailed: the two ways do not agree on the logits, or there is no memory for both.
    """
    stage.clear()
    quick = stage.settings.quick
    with one_core():
        nets = nets_of(MODEL_QUICK if quick else MODEL, stage.settings.device)
        contexts = CONTEXTS_QUICK if quick else CONTEXTS
        names = [name, *(f"{name}.{context}" for context in contexts[1:])]
        return [_measure(stage, line, bar, nets, batch, tokens) for line, tokens in zip(names, contexts, strict=True)]


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
    held = _contiguous(arena, frames, context)
    tokens = torch.arange(batch) % nets.model.geometry.vocab_size
    position = torch.full((batch, 1), context - 1, device=device)
    known = tokens[:, None].to(device)

    def paged(_: None) -> torch.Tensor:
        parts = [Slice(frames[i], context - 1, tokens[i : i + 1]) for i in range(batch)]
        return runner.forward(Batch(arena, parts)).cpu()  # which waits for it

    def contiguous(_: None) -> torch.Tensor:
        with torch.inference_mode():
            cache = ContiguousCache(held)
            out = nets.plain(input_ids=known, position_ids=position, past_key_values=cache, use_cache=True)
            logits: torch.Tensor = out.logits[:, -1].float().cpu()
            return logits

    def check(variant: str, logits: object) -> None:
        assert isinstance(logits, torch.Tensor)
        if (logits - expected).abs().max() > LOGITS_APART_MAX * expected.abs().max():
            raise BenchFailed(f"{name}: {variant} computes other logits")

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
    """Random numbers of no structure; the same in many frames, which does not matter."""
    some = arena.pages[:8]
    some.copy_(torch.randn(some.shape, generator=torch.Generator().manual_seed(2)))
    for at in range(8, arena.frames_total, 8):
        arena.pages[at : at + 8] = some[: arena.frames_total - at]


def _contiguous(arena: Arena, frames: torch.Tensor, context: int) -> torch.Tensor:
    """What sequences with these page tables hold, ``[layers, 2, batch, kv_heads, context + 1, head_dim]``."""
    layers, kv_heads, page_tokens, _ = arena.layout.shape
    dim = arena.k_dim
    held = arena.pages.new_zeros((layers, 2, len(frames), kv_heads, context + 1, dim))
    for sequence, table in enumerate(frames):
        for page, frame in enumerate(table.tolist()):
            first = page * page_tokens
            count = min(page_tokens, context - first)
            content = arena.pages[frame, :, :, :count]
            held[:, 0, sequence, :, first : first + count] = content[..., :dim]
            held[:, 1, sequence, :, first : first + count] = content[..., dim:]
    return held


@contextmanager
def one_core() -> Iterator[None]:
    """torch computes with one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
