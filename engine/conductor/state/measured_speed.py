"""MeasuredSpeed: the speed of an engine that does not report one, measured from its answers."""

from __future__ import annotations

from typing import Final

SMOOTH: Final = 0.2
TOKENS_MIN: Final = 64  # prompt tokens; a shorter prompt says little about the speed


class MeasuredSpeed:
    """The measured speeds of one engine.

    Attributes:
        tokens_per_s: prompt tokens per second; 0 if not known yet.
        step_s: seconds of a decode step; 0 if not known yet.
    """

    def __init__(self) -> None:
        self.tokens_per_s = self.step_s = 0.0

    def add_prefill(self, tokens: int, took_s: float) -> None:
        """Record the time that a prompt took from its arrival, when no other prompt was queued before it."""
        if tokens >= TOKENS_MIN and took_s > 0:
            self.tokens_per_s = _smoothed(self.tokens_per_s, tokens / took_s)

    def add_decode(self, tokens: int, took_s: float) -> None:
        """Record the time from the first token of an answer to its end, with ``tokens`` tokens after the first."""
        if tokens > 0 and took_s > 0:
            self.step_s = _smoothed(self.step_s, took_s / tokens)


def _smoothed(before: float, now: float) -> float:
    """Return the weighted geometric mean, in which one outlier counts little."""
    return before ** (1 - SMOOTH) * now**SMOOTH if before else now
