"""Decode: which sequences make their next token together, and how one whose KV is still arriving joins them.

A sequence whose first layer is there may join the batch when the other layers are predicted to be there in time: layer
``l`` is needed ``l`` layers' time into the step. Otherwise it makes its next token in a side batch of its own, where it
waits without keeping anybody. A prediction that fails costs the batch ``STALL_S`` at most; the sequence then goes
aside.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Runner
from engine.memory.arena import Arena
from engine.shell.sequence import Sequence

STALL_S = 0.02
SIDE_MAX = 4
MARGIN = 1.2  # a layer is predicted to take that much longer than it did


def next_token_slice(sequence: Sequence) -> Slice:
    """The one token whose KV is missing."""
    assert sequence.frames is not None and sequence.left == 1
    return Slice(sequence.frames, sequence.cached, sequence.tokens[sequence.cached : sequence.length])


def in_time(sequence: Sequence, layers: int, layer_s: float) -> bool:
    """Whether a step whose layers take ``layer_s`` would find every layer of the sequence there when it needs it."""
    arrivals = sequence.arrivals
    if arrivals is None:
        return True
    there = arrivals.layers_with(sequence.prompt)
    if there == layers:
        return True
    if not there or not arrivals.layer_s or arrivals.late:
        return False
    # Both ends of a straight line: the first layer that is missing, and the last one.
    each = MARGIN * arrivals.layer_s
    return each <= there * layer_s and (layers - there) * each <= (layers - 1) * layer_s


@dataclass
class Waits:
    """The waiting of one forward for layers: bounded in sum, and nobody is waited for twice."""

    sequences: list[Sequence]
    budget_s: float
    missed: set[Sequence] = field(default_factory=set)
    waited_s: float = 0.0

    def before(self, layer: int) -> None:
        """Called before the layer's KV is read."""
        for sequence in self.sequences:
            arrivals = sequence.arrivals
            if arrivals is None or sequence in self.missed or arrivals.tokens(layer) >= sequence.prompt:
                continue
            start = time.monotonic()
            if not arrivals.wait(layer, sequence.prompt, start + self.budget_s - self.waited_s):
                self.missed.add(sequence)
                arrivals.late = True
            self.waited_s += time.monotonic() - start


class SideBatches:
    """Steps of single sequences, each in a thread of its own; the engine's thread collects what they gave.

    Ends with ``stop``, which waits for what runs; its waits end with the sequences' deadlines at the latest.
    """

    def __init__(self, runner: Runner, arena: Arena, changed: Callable[[], None]) -> None:
        self._runner = runner
        self._arena = arena
        self._changed = changed
        self._threads = ThreadPoolExecutor(SIDE_MAX, "engine-side")
        self._done: queue.SimpleQueue[tuple[Sequence, torch.Tensor | BaseException | None]] = queue.SimpleQueue()
        self._inside: set[Sequence] = set()
        self.steps = 0

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._inside

    @property
    def full(self) -> bool:
        """Whether there is no thread left."""
        return len(self._inside) >= SIDE_MAX

    def add(self, sequence: Sequence) -> None:
        """Make its next token aside."""
        self._inside.add(sequence)
        self.steps += 1
        self._threads.submit(self._step, sequence)

    def collect(self) -> Iterable[tuple[Sequence, torch.Tensor | None]]:
        """Sequences whose step is over, with logits ``[vocab]``, or None where the KV did not come. Raises what a step
        raised.
        """
        while not self._done.empty():
            sequence, given = self._done.get_nowait()
            self._inside.discard(sequence)
            if isinstance(given, BaseException):
                raise given
            yield sequence, given

    def stop(self) -> None:
        """Wait for all."""
        self._threads.shutdown(wait=True)

    def _step(self, sequence: Sequence) -> None:
        outcome: torch.Tensor | BaseException | None = None
        waits = Waits([sequence], max(0.0, sequence.deadline_s - time.monotonic()))
        try:
            given = self._runner.forward(Batch(self._arena, [next_token_slice(sequence)], waits.before))
            outcome = None if waits.missed else given[0]
        except BaseException as error:
            outcome = error
            raise
        finally:
            self._done.put((sequence, outcome))
            self._changed()
