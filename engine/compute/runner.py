"""Runner: a model's forward over batches whose KV lies in an arena."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.compute import attention
from engine.compute.graphs import Run, StepGraphs, cuda_recorder
from engine.compute.kernels import chosen
from engine.compute.lost import translated
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
    """What an engine computes with: a ``Runner``, or a ``PacedRunner`` in its place.

    Attributes:
        graphs: how steps of decoding go by graphs, or why not, for status.
    """

    graphs: str

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Runner.forward``."""
        ...


def runner_of(model: Model, arena: Arena, steps_max: int) -> Forward:
    """What runs this model over ``arena``, in steps of so many sequences at most."""
    if model.pace is not None:
        return PacedRunner(model.pace, model.geometry.vocab_size, arena)
    with translated(arena.device):
        return _made(model, arena, steps_max)


def _made(model: Model, arena: Arena, steps_max: int) -> Runner:
    runner = Runner(model, arena)
    if arena.device.type == "cuda":
        pages_max = -(-model.context_tokens_max // arena.layout.page_tokens)
        runner.record(steps_max, min(pages_max, arena.frames_total), cuda_recorder(arena.device))
    return runner


class Runner:
    """Runs batches through ``model.net`` over ``arena``. Several threads may, each a batch of its own.

    The net attends to pages from then on: nothing but a runner can run it.
    """

    graphs = "none: only a CUDA device has them"

    def __init__(self, model: HasNet, arena: Arena) -> None:
        self._net = model.net
        self._arena = arena
        self._graphs: StepGraphs | None = None
        self._net.set_attn_implementation(attention.NAME)
        self._warm_up()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Float32 logits ``[len(batch.slices), vocab]`` of the last token of each slice.

        Puts the KV of all tokens of the batch into their frames. What a hook of the batch raises ends the forward;
        layers before it have been written.
        """
        assert batch.arena is self._arena, "a batch over another arena"
        if self._graphs is not None and (rows := self._graphs.rows(batch)) is not None:
            return self._graphs.replay(batch, rows)
        return self._forward(batch)

    def record(self, rows_max: int, pages_max: int, record: Callable[[Run], Run]) -> None:
        """Have steps of up to so many sequences replayed from now on, where the model and its kernel can be recorded.
        Before anybody computes."""
        kernel = chosen(self._arena.layout, self._arena.device).kernel
        frames = self._arena.take(1)
        if kernel is None or frames is None:
            self.graphs = "none: pages are gathered" if kernel is None else "none: all frames are taken"
            return
        try:
            frame = int(frames[0])
            self._graphs = StepGraphs(self._forward, self._arena, kernel, rows_max, pages_max, frame, record)
            self.graphs = f"steps of up to {rows_max} sequences and {pages_max} pages each"
        except RuntimeError as error:  # a model that looks at numbers on its way, as some mixtures of experts do
            self.graphs = f"none: {' '.join(str(error).split())[:200]}"
        finally:
            self._arena.pages[frames] = 0
            self._arena.give_back(frames)

    def _forward(self, batch: Batch) -> torch.Tensor:
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
