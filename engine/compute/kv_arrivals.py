"""Arrivals: how much KV of one sequence has arrived, as other threads bring it, and how a forward waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.state.events import Arriving
from kvstore.errors import KVStoreError


class Arrivals:
    """How many tokens of each layer are in the frames, while another thread brings them.

    Life: made -> ``reached`` for each piece -> complete, or ``failed`` with the reason; both wake waiting threads.
    """

    def __init__(self, layers: int) -> None:
        self._tokens = [0] * layers
        self._gates: list[Callable[[], None] | None] = [None] * layers
        self._changed = threading.Condition()
        self.failure: KVStoreError | None = None
        self.late = False  # a step waited for it without success
        self.layer_s = 0.0  # how long a layer takes to arrive, smoothed; 0: unknown
        self._last_s = 0.0

    def reached(self, layer: int, tokens: int, gate: Callable[[], None] | None = None) -> None:
        """Record that the first ``tokens`` tokens of ``layer`` are there, for what is computed behind ``gate``: see
        ``Staging.arrival_gate``."""
        now = time.monotonic()
        with self._changed:
            self._gates[layer] = gate
            self._tokens[layer] = max(self._tokens[layer], tokens)
            if self._last_s:
                gap = now - self._last_s
                self.layer_s = gap if not self.layer_s else 0.7 * self.layer_s + 0.3 * gap
            self._last_s = now
            self._changed.notify_all()

    def all_reached(self, tokens: int) -> None:
        """Record that the first ``tokens`` tokens of all layers are there, which came together."""
        with self._changed:
            self._tokens = [max(tokens, there) for there in self._tokens]
            self._changed.notify_all()

    def begin(self, tokens: Sequence[int]) -> None:
        """Record that this many tokens of each layer are there, or not needed."""
        with self._changed:
            self._tokens = [max(each) for each in zip(tokens, self._tokens, strict=True)]
            self._changed.notify_all()

    def fail(self, error: KVStoreError) -> None:
        """Record that no more will come."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def tokens(self, layer: int) -> int:
        """The tokens of that layer that are there."""
        return self._tokens[layer]

    def pass_gate(self, layer: int) -> None:
        """Make later computations wait for what has reached ``layer``. Returns at once."""
        gate = self._gates[layer]
        if gate is not None:
            gate()

    def tokens_min(self) -> int:
        """The number of tokens that are there in every layer."""
        return min(self._tokens)

    def layers_with(self, tokens: int) -> int:
        """The number of leading layers that have this many tokens."""
        return next((i for i, there in enumerate(self._tokens) if there < tokens), len(self._tokens))

    def so_far(self, tokens: int) -> Arriving:
        """The state that decides the next step, for a prompt of ``tokens`` tokens."""
        return Arriving(self.layers_with(tokens), self.layer_s, self.late)

    def wait(self, layer: int, tokens: int, deadline_s: float) -> bool:
        """Wait until this many are there, at most until ``deadline_s`` of ``time.monotonic``; returns whether they
        are.
        """
        with self._changed:
            while self._tokens[layer] < tokens:
                left_s = deadline_s - time.monotonic()
                if self.failure is not None or left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True


@dataclass
class Waits:
    """How one forward waits for layers: with a bounded total, and no sequence is waited for twice.

    Attributes:
        awaited: arrivals and tokens, by the number of a sequence.
        missed: numbers of sequences whose KV did not come in time.
    """

    awaited: dict[int, tuple[Arrivals, int]]
    budget_s: float
    missed: set[int] = field(default_factory=set)
    waited_s: float = 0.0

    def before(self, layer: int) -> None:
        """Called before the layer's KV is read."""
        for number, (arrivals, tokens) in self.awaited.items():
            if number not in self.missed and arrivals.tokens(layer) < tokens:
                start = time.monotonic()
                if not arrivals.wait(layer, tokens, start + self.budget_s - self.waited_s):
                    self.missed.add(number)
                    arrivals.late = True
                self.waited_s += time.monotonic() - start
            if number not in self.missed:
                arrivals.pass_gate(layer)
