"""Runner: a model's forward over batches whose KV lies in an arena."""

from __future__ import annotations

from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.compute import attention
from engine.compute.models import Model
from engine.compute.pacing import PacedRunner
from engine.compute.paged_cache import Arena, Batch, PagedCache, Slice


class HasNet(Protocol):
    """What a runner needs of a model."""

    @property
    def net(self) -> PreTrainedModel:
        """A causal language model of transformers."""
        ...


class Forward(Protocol):
    """What an engine computes with: a ``Runner``, or a ``PacedRunner`` in its place."""

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Runner.forward``."""
        ...


def runner_of(model: Model, arena: Arena) -> Forward:
    """What runs this model over ``arena``."""
    if model.pace is not None:
        return PacedRunner(model.pace, model.geometry.vocab_size, arena)
    return Runner(model, arena)


class Runner:
    """Runs batches through ``model.net`` over ``arena``. Several threads may, each a batch of its own.

    The net attends to pages from then on: nothing but a runner can run it.
    """

    def __init__(self, model: HasNet, arena: Arena) -> None:
        self._net = model.net
        self._arena = arena
        self._net.set_attn_implementation(attention.NAME)
        self._warm_up()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Float32 logits ``[len(batch.slices), vocab]`` of the last token of each slice.

        Puts the KV of all tokens of the batch into their frames. What a hook of the batch raises ends the forward;
        layers before it have been written.
        """
        assert batch.arena is self._arena, "a batch over another arena"
        with torch.inference_mode():
            output = self._net(
                input_ids=batch.tokens,
                position_ids=batch.positions,
                past_key_values=PagedCache(batch),
                use_cache=True,
                logits_to_keep=batch.last,
                paged=batch,
            )
            return output.logits[0].float()

    def _warm_up(self) -> None:
        """Has the code for this model's shapes made, so that nobody's first token waits for it."""
        frames = self._arena.take(1)
        if frames is None:
            return
        try:
            self.forward(Batch(self._arena, [Slice(frames, 0, torch.zeros(1, dtype=torch.int64))]))
            self._arena.pages[frames] = 0
        finally:
            self._arena.give_back(frames)
