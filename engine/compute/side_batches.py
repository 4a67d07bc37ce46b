"""Side batches: steps of single sequences whose KV is still arriving, where they wait without delaying other
sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine.compute.arrivals import Arrivals, Waits
from engine.compute.lost import StepFault, translated
from engine.compute.paged_cache import Batch, Slice
from engine.compute.runner import Forward
from engine.compute.teams import alone
from engine.memory.arena import Arenas

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
