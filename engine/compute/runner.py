"""Runner: a model's forward over batches whose KV is in an arena.

Side batches: steps of single sequences whose KV is still arriving, where they wait without delaying other
sequences.
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
from engine.compute.kernels import chosen
from engine.compute.kv_arrivals import Arrivals, Waits
from engine.compute.models import Model
from engine.compute.omp_threads import alone
from engine.compute.packed_linear import pack
from engine.compute.paged_cache import Batch, PagedCache, Slice
from engine.compute.presets import PacedRunner
from engine.compute.torch_errors import StepFault, translated
from engine.memory.arena import Arenas


class HasNet(Protocol):
    """A model, as a runner uses it."""

    @property
    def net(self) -> PreTrainedModel:
        """A causal language model of transformers."""
        ...


class Forward(Protocol):
    """Computes for an engine: a ``Runner``, or a ``PacedRunner`` in its place.

    Attributes:
        graphs: how decoding steps use graphs, or why they do not, for status.
    """

    graphs: str

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``Runner.forward``."""
        ...


def runner_of(model: Model, arenas: Arenas, steps_max: int) -> Forward:
    """The runner for this model over ``arenas``, in steps of at most this many sequences."""
    if model.pace is not None:
        return PacedRunner(model.pace, model.geometry.vocab_size, arenas)
    with translated(arenas.device):
        return _made(model, arenas, steps_max)


def _made(model: Model, arenas: Arenas, steps_max: int) -> Runner:
    runner = Runner(model, arenas)
    if arenas.device.type == "cuda":
        first = arenas.groups[0]
        pages_max = -(-model.context_tokens_max // first.layout.page_tokens)
        runner.record(steps_max, min(pages_max, first.frames_total), cuda_recorder(arenas.device))
    return runner


class Runner:
    """Runs batches through ``model.net`` over ``arenas``. Several threads may run it, each with a batch of its own.

    The net then attends to pages: only a runner can run it. On a CPU its linear layers are packed.
    """

    graphs = "none: only a CUDA device has them"

    def __init__(self, model: HasNet, arenas: Arenas) -> None:
        self._net = model.net
        self._arenas = arenas
        self._graphs: StepGraphs | None = None
        self._net.set_attn_implementation(attention.NAME)
        pack(self._net)
        self._warm_up()

    def forward(self, batch: Batch) -> torch.Tensor:
        """Float32 logits ``[len(batch.slices), vocab]`` of the last token of each slice.

        Puts the KV of all tokens of the batch into their frames. An error of a hook of the batch ends the forward;
        layers before it have been written.
        """
        assert batch.arenas is self._arenas, "a batch over another arena"
        if self._graphs is not None and (rows := self._graphs.rows(batch)) is not None:
            return self._graphs.replay(batch, rows)
        return self._forward(batch)

    def record(self, rows_max: int, pages_max: int, record: Callable[[Run], Run]) -> None:
        """Replay steps of up to this many sequences from now on, if the model and its kernel can be recorded. Must be
        called before the first computation."""
        kernel = chosen(self._arenas.groups[0].layout, self._arenas.device).kernel
        frames = self._borrow()
        if kernel is None or frames is None:
            self.graphs = "none: pages are gathered" if kernel is None else "none: all frames are taken"
            return
        try:
            some = frames[:, 0].tolist()
            self._graphs = StepGraphs(self._forward, self._arenas, kernel, rows_max, pages_max, some, record)
            self.graphs = f"steps of up to {rows_max} sequences and {pages_max} pages each"
        except RuntimeError as error:  # a model that reads values on the host, as some mixtures of experts do
            self.graphs = f"none: {' '.join(str(error).split())[:200]}"
        finally:
            self._return(frames)

    def _borrow(self) -> torch.Tensor | None:
        """A frame of each cache group, ``[groups, 1]``; None if one has no free frame."""
        if any(not arena.frames_free for arena in self._arenas.groups):
            return None
        taken = [arena.take(1) for arena in self._arenas.groups]
        return torch.stack([frames for frames in taken if frames is not None])

    def _return(self, frames: torch.Tensor) -> None:
        for arena, some in zip(self._arenas.groups, frames, strict=True):
            arena.pages[some] = 0
            arena.give_back(some)

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
        """Compile the code for this model's shapes, so that no first token waits for it."""
        frames = self._borrow()
        if frames is None:
            return
        try:
            self.forward(Batch(self._arenas, [Slice(frames, 0, torch.zeros(1, dtype=torch.int64))]))
        finally:
            self._return(frames)


Done = Callable[[torch.Tensor | BaseException | None], None]


class SideBatches:
    """Steps of single sequences, each in a thread of its own, ``threads`` at once. None has a team (``teams``): teams
    of waiting threads would slow every other step.

    Ends with ``stop``, which waits for running steps; their waits end with the sequences' deadlines at the latest.

    Attributes:
        steps: the number of steps so far.
    """

    def __init__(self, runner: Forward, arenas: Arenas, threads: int) -> None:
        self._runner = runner
        self._arenas = arenas
        self._threads = ThreadPoolExecutor(threads, "engine-side", alone)
        self.steps = 0

    def add(self, part: Slice, arrivals: Arrivals, tokens: int, deadline_s: float, done: Done) -> None:
        """Compute ``part`` once ``tokens`` tokens have arrived. ``done`` is called by a thread with its logits
        ``[vocab]``, None if they did not come, or the step's error (``StepFault``).
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
            with translated(self._arenas.device), StepFault() as fault:
                given = self._runner.forward(Batch(self._arenas, [part], waits.before))
                outcome = None if waits.missed else given[0].cpu()
            outcome = fault.error or outcome
        except BaseException as error:
            outcome = error
            raise
        finally:
            done(outcome)
