"""The progress of KV that other threads load for a sequence. A forward pass waits here for that KV."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.state.events import Arriving
from kvstore.errors import KVStoreError


class Arrivals:
    """The number of tokens of each layer whose KV is in the frames, while another thread brings more.

    Life: created -> ``reached`` for each piece -> complete, or ``fail`` with the reason. Every change wakes the threads
    in ``wait``.

    Attributes:
        failure: the reason why no more KV comes; None if there is none.
        late: True if a step waited for this KV without success.
        layer_s: the smoothed time in which one layer arrives, in seconds; 0 if unknown.
    """

    def __init__(self, layers: int) -> None:
        self._tokens = [0] * layers
        self._gates: list[Callable[[], None] | None] = [None] * layers
        self._changed = threading.Condition()
        self.failure: KVStoreError | None = None
        self.late = False
        self.layer_s = 0.0
        self._last_s = 0.0  # when the last piece arrived

    def reached(self, layer: int, tokens: int, gate: Callable[[], None] | None = None) -> None:
        """Record that the first ``tokens`` tokens of ``layer`` are in the frames.

        Computations may read them after a call of ``gate``, see ``Staging.arrival_gate``.
        """
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
        """Record that the first ``tokens`` tokens of all layers are in the frames. They arrived together."""
        with self._changed:
            self._tokens = [max(tokens, arrived) for arrived in self._tokens]
            self._changed.notify_all()

    def begin(self, tokens: Sequence[int]) -> None:
        """Record, for each layer, the number of leading tokens that are already in the frames or are not needed."""
        with self._changed:
            self._tokens = [max(pair) for pair in zip(tokens, self._tokens, strict=True)]
            self._changed.notify_all()

    def fail(self, error: KVStoreError) -> None:
        """Record the error after which no more KV arrives. The first error is kept."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def tokens(self, layer: int) -> int:
        """Return the number of leading tokens of ``layer`` that are in the frames."""
        return self._tokens[layer]

    def pass_gate(self, layer: int) -> None:
        """Make later computations on the device wait for the KV that has reached ``layer``. Returns at once."""
        gate = self._gates[layer]
        if gate is not None:
            gate()

    def tokens_min(self) -> int:
        """Return the number of leading tokens that are in the frames in every layer."""
        return min(self._tokens)

    def layers_with(self, tokens: int) -> int:
        """Return the number of leading layers of which at least ``tokens`` tokens are in the frames."""
        return next((i for i, arrived in enumerate(self._tokens) if arrived < tokens), len(self._tokens))

    def so_far(self, tokens: int) -> Arriving:
        """Return the progress for a prompt of ``tokens`` tokens. The choice of the next step uses it."""
        return Arriving(self.layers_with(tokens), self.layer_s, self.late)

    def wait(self, layer: int, tokens: int, deadline_s: float) -> bool:
        """Wait until ``tokens`` tokens of ``layer`` are in the frames.

        Returns False at ``deadline_s`` (of ``time.monotonic``), or once no more KV comes.
        """
        with self._changed:
            while self._tokens[layer] < tokens:
                remaining_s = deadline_s - time.monotonic()
                if self.failure is not None or remaining_s <= 0:
                    return False
                self._changed.wait(remaining_s)
            return True


@dataclass
class Waits:
    """The waits of one forward pass for KV. Their total time is bounded. It waits for a late sequence only once.

    Attributes:
        awaited: by the number of a sequence, its arrivals and the number of tokens that must arrive.
        budget_s: the longest time that the forward pass may wait in total.
        missed: the numbers of the sequences whose KV did not arrive in time.
        waited_s: how long the forward pass has waited so far.
    """

    awaited: dict[int, tuple[Arrivals, int]]
    budget_s: float
    missed: set[int] = field(default_factory=set)
    waited_s: float = 0.0

    def before(self, layer: int) -> None:
        """Wait for the KV of ``layer``. The forward pass calls this before attention reads the layer."""
        for number, (arrivals, tokens) in self.awaited.items():
            if number not in self.missed and arrivals.tokens(layer) < tokens:
                start = time.monotonic()
                if not arrivals.wait(layer, tokens, start + self.budget_s - self.waited_s):
                    self.missed.add(number)
                    arrivals.late = True
                self.waited_s += time.monotonic() - start
            if number not in self.missed:
                arrivals.pass_gate(layer)
