"""The forward of a model, over batches whose KV is in an arena.

A ``Runner`` runs the batches of an engine: on a CUDA device it replays a graph where it can. ``SideBatches`` runs steps
of single sequences whose KV is still arriving. Each waits in a thread of its own, so that it delays no other sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.compute import attention
from engine.compute.graphs import Run, StepGraphs, cuda_recorder
from engine.compute.kernels import kernel_for
from engine.compute.kv_arrivals import Arrivals, Waits
from engine.compute.models import Model
from engine.compute.omp_threads import compute_without_team
from engine.compute.packed_linear import pack
from engine.compute.paged_cache import Batch, PagedCache, Slice
from engine.compute.presets import PacedRunner
from engine.compute.torch_errors import StepFault, computing_on
from engine.memory.arena import Arenas


class HasNet(Protocol):
    """The part of a model that a runner needs."""

    @property
    def net(self) -> PreTrainedModel:
        """The causal language model of transformers."""
        ...


class Forward(Protocol):
    """An executor of batches: a ``Runner``, or a ``PacedRunner`` for a simulated model.

    Attributes:
        graphs: how decoding steps use graphs, or why they do not. ``status`` shows it.
    """

    graphs: str

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch as ``Runner.forward`` does."""
        ...


def runner_of(model: Model, arenas: Arenas, steps_max: int) -> Forward:
    """Return the runner for ``model`` over ``arenas``. On a CUDA device it records graphs for steps of at most
    ``steps_max`` sequences."""
    if model.pace is not None:
        return PacedRunner(model.pace, model.geometry.vocab_size, arenas)
    with computing_on(arenas.device):
        runner = Runner(model, arenas)
        if arenas.device.type == "cuda":
            first = arenas.groups[0]
            pages_max = -(-model.context_tokens_max // first.layout.page_tokens)
            runner.record(steps_max, min(pages_max, first.frames_total), cuda_recorder(arenas.device))
        return runner


class Runner:
    """The executor of batches for a real model. Several threads may run batches of their own at once.

    The constructor changes ``model.net``: its attention reads pages of ``arenas``, so that only a runner can run it.
    On a CPU its linear layers are packed.
    """

    graphs = "none: only a CUDA device has graphs"

    def __init__(self, model: HasNet, arenas: Arenas) -> None:
        self._net = model.net
        self._arenas = arenas
        self._graphs: StepGraphs | None = None
        self._net.set_attn_implementation(attention.NAME)
        pack(self._net)
        self._warm_up()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Compute a batch, and write the KV of all its tokens into their frames.

        An error that a hook of the batch raises ends the forward. The KV of earlier layers is then in the frames.

        Returns:
            Float32 logits ``[len(batch.slices), vocab]`` of the last token of each slice.
        """
        assert batch.arenas is self._arenas, "a batch over another arena"
        if self._graphs is not None and (rows := self._graphs.rows(batch)) is not None:
            return self._graphs.replay(batch, rows)
        return self._forward(batch)

    def record(self, rows_max: int, pages_max: int, record: Callable[[Run], Run]) -> None:
        """Record graphs, and from now on replay steps of at most ``rows_max`` sequences with ``pages_max`` pages each.

        Steps run without graphs if there is no kernel or no free frame, or if the model cannot be recorded. The
        attribute ``graphs`` then has the reason. Call this method before the first computation.
        """
        kernel = kernel_for(self._arenas.groups[0].layout, self._arenas.device).kernel
        if kernel is None:
            self.graphs = "none: no kernel reads pages in place"
            return
        frames = self._borrow()
        if frames is None:
            self.graphs = "none: no frame is free"
            return
        try:
            numbers = frames[:, 0].tolist()
            self._graphs = StepGraphs(self._forward, self._arenas, kernel, rows_max, pages_max, numbers, record)
            self.graphs = f"steps of up to {rows_max} sequences and {pages_max} pages each"
        except RuntimeError as error:  # the model reads values on the host, as some mixtures of experts do
            self.graphs = f"none: {' '.join(str(error).split())[:200]}"
        finally:
            self._return(frames)

    def _borrow(self) -> torch.Tensor | None:
        """Take one frame of each cache group, ``[groups, 1]``. Returns None if a group has no free frame."""
        if any(not arena.frames_free for arena in self._arenas.groups):
            return None
        frames = [arena.take(1) for arena in self._arenas.groups]
        return torch.stack([frame for frame in frames if frame is not None])

    def _return(self, frames: torch.Tensor) -> None:
        for arena, frame in zip(self._arenas.groups, frames, strict=True):
            arena.pages[frame] = 0
            arena.give_back(frame)

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
            logits: torch.Tensor = output.logits[0].float()
            return logits

    def _warm_up(self) -> None:
        """Run one token, so that the code for this model's shapes is compiled before the first request."""
        frames = self._borrow()
        if frames is None:
            return
        try:
            self.forward(Batch(self._arenas, [Slice(frames, 0, torch.zeros(1, dtype=torch.int64))]))
        finally:
            self._return(frames)


Done = Callable[[torch.Tensor | BaseException | None], None]


class SideBatches:
    """Steps of single sequences, each in a thread of its own; at most ``threads`` run at once.

    These threads have no OpenMP team (``omp_threads``), because the teams of waiting threads would slow every other
    step. ``stop`` waits for running steps. A step waits for KV until the deadline of its sequence at the latest.

    Attributes:
        steps: the number of steps so far.
    """

    def __init__(self, runner: Forward, arenas: Arenas, threads: int) -> None:
        self._runner = runner
        self._arenas = arenas
        self._threads = ThreadPoolExecutor(threads, "engine-side", compute_without_team)
        self.steps = 0

    def add(self, part: Slice, arrivals: Arrivals, tokens: int, deadline_s: float, done: Done) -> None:
        """Compute ``part`` in a thread, as soon as the KV of the first ``tokens`` tokens has arrived.

        The thread then calls ``done`` with the logits ``[vocab]``, with None if the KV did not arrive in time, or with
        the error of the step (``StepFault``).
        """
        self.steps += 1
        self._threads.submit(self._step, part, Waits({0: (arrivals, tokens)}, 0.0), deadline_s, done)

    def stop(self) -> None:
        """Wait for all steps."""
        self._threads.shutdown(wait=True)

    def _step(self, part: Slice, waits: Waits, deadline_s: float, done: Done) -> None:
        outcome: torch.Tensor | BaseException | None = None
        waits.budget_s = max(0.0, deadline_s - time.monotonic())
        try:
            with computing_on(self._arenas.device), StepFault() as fault:
                logits = self._runner.forward(Batch(self._arenas, [part], waits.before))
                outcome = None if waits.missed else logits[0].cpu()
            outcome = fault.error or outcome
        except BaseException as error:
            outcome = error
            raise
        finally:
            done(outcome)
