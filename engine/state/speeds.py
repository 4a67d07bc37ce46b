"""Speeds: what this engine has measured of itself, smoothed, for predictions and ``status``."""

from __future__ import annotations

SMOOTH = 0.2
OUTLIER = 3.0  # a step counts as at most this many times the smoothed value
CHUNK_TOKENS_MIN = 16  # shorter ones measure mainly the fixed cost


class Speeds:
    """Measured speeds. Written by the engine's thread.

    Attributes:
        step_s: a step that only decodes; 0: none was measured yet, as for the next.
        prefill_tokens_per_s: in steps that only prefill.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self.step_s = 0.0
        self.prefill_tokens_per_s = 0.0

    @property
    def layer_s(self) -> float:
        """Seconds for one layer of a decode step."""
        return self.step_s / self._layers

    def measured(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        if decoding and not chunk_tokens:
            # A suspended process has measured one step of seconds: without this limit it would get no requests again.
            self.step_s = _smoothed(self.step_s, min(seconds, OUTLIER * self.step_s or seconds))
        elif chunk_tokens >= CHUNK_TOKENS_MIN and not decoding:
            self.prefill_tokens_per_s = _smoothed(self.prefill_tokens_per_s, chunk_tokens / seconds)


def _smoothed(old: float, new: float) -> float:
    return old + SMOOTH * (new - old) if old else new
