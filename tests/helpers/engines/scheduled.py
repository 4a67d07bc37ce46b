"""Requests over a runner, greedily, as an engine schedules them; and what plain transformers says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from engine.compute.models import Model
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner
from engine.memory.arena import Arena


def prompts_of(lengths: Sequence[int], vocab_size: int = 256, seed: int = 5) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]


def generated(net: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What plain transformers says."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def arena_for(model: Model, page_tokens: int, tokens: int) -> Arena:
    return Arena(model.layout(page_tokens), -(-tokens // page_tokens), model.geometry.k_dim)


class Scheduler:
    """Runs requests as an engine does: prompts in chunks, packed with the steps of those that decode already."""

    def __init__(self, runner: Runner, arena: Arena, prompts: Sequence[Sequence[int]], count: int) -> None:
        self.runner, self.arena, self.count = runner, arena, count
        self.tokens = [list(prompt) for prompt in prompts]
        self.prompts = [len(prompt) for prompt in prompts]
        self.done = [0] * len(prompts)
        page_tokens = arena.layout.page_tokens
        taken = [arena.take(-(-(len(prompt) + count) // page_tokens)) for prompt in prompts]
        assert None not in taken
        self.frames = [frames for frames in taken if frames is not None]

    def step(self, chunk: int) -> None:
        """One forward: ``chunk`` tokens at most of each prompt, one of each answer."""
        parts, who = [], []
        for i, tokens in enumerate(self.tokens):
            if len(tokens) - self.prompts[i] == self.count:
                continue
            new = tokens[self.done[i] : self.done[i] + chunk]
            parts.append(Slice(self.frames[i], self.done[i], np.array(new)))
            who.append(i)
            self.done[i] += len(new)
        logits = self.runner.forward(Batch(self.arena, parts))
        assert logits.dtype == torch.float32 and len(logits) == len(parts)
        for i, row in zip(who, logits, strict=True):
            if self.done[i] == len(self.tokens[i]):
                self.tokens[i].append(int(row.argmax()))

    def answers(self, chunk: int) -> list[list[int]]:
        """Until all is said."""
        while any(len(tokens) - n < self.count for tokens, n in zip(self.tokens, self.prompts, strict=True)):
            self.step(chunk)
        return [tokens[n:] for tokens, n in zip(self.tokens, self.prompts, strict=True)]
