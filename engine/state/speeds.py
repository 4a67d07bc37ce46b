"""Speeds: what this engine has measured of itself, smoothed; predictions and ``status`` use it."""

from __future__ import annotations

SMOOTH = 0.2
OUTLIER = 3.0  # times as long as steps before it: what is more than that counts as that
CHUNK_TOKENS_MIN = 16  # shorter ones measure the fixed cost


class Speeds:
    """Written by the engine's thread.

    Attributes:
        step_s: a step that only decodes. 0: none was measured yet; so with the next.
        prefill_tokens_per_s: of steps that only prefill.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0

    @property
    def layer_s(self) -> float:
        """A layer of a decode step."""
        return self.step_s / self._layers

    def measured(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """A step took so long."""
        if decoding and not chunk_tokens:
            # A process that stood still has had one step of seconds: nobody would send it anything ever after.
            self.step_s = _smoothed(self.step_s, min(seconds, OUTLIER * self.step_s or seconds))
        elif chunk_tokens >= CHUNK_TOKENS_MIN and not decoding:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, chunk_tokens / seconds)


def _smoothed(old: float, new: float) -> float:
    return old + SMOOTH * (new - old) if old else new
