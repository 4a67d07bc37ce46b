"""EngineStay: how an answer's time at one engine divides into the engine's part and its reader's."""

from __future__ import annotations

import time

from engine.conductor.state import instructions as do
from engine.conductor.state.speeds import ObservedSpeeds
from engine.model.request import Usage


class EngineStay:
    """Begins when the request is sent to the engine.

    Args:
        before: tokens of the answer that had come before.

    Attributes:
        waited_s: how long it waited for its reader, after the last part.
    """

    def __init__(self, it: do.Send, before: int) -> None:
        self.before = before
        self.waited_s = 0.0
        self._cached = it.route.computing.cached
        engine = it.route.computing.engine
        self._alone = engine.waiting <= 1 and not engine.others_waiting  # no other prompt is before it there
        self._sent_s = self._first_s = self._last_s = time.monotonic()
        self._tokens = self._first_tokens = 0
        self._waits_s = 0.0

    def came(self, tokens: int) -> None:
        """Record that more tokens have come."""
        now_s = time.monotonic()
        if not self._tokens:
            self._first_s, self._first_tokens = now_s, tokens
        else:
            self._waits_s += self.waited_s
        self._tokens += tokens
        self._last_s = now_s

    def given(self) -> None:
        """Record that the reader has taken them."""
        self.waited_s = time.monotonic() - self._last_s

    def observed(self, usage: Usage, tokens: int, speeds: ObservedSpeeds) -> tuple[int, float]:
        """Learn the speeds of an engine that reports none, at the end of its answer.

        Args:
            tokens: tokens that it had to have computed before its first one.

        Returns:
            How many of those were cached, and how long the rest took; (0, 0) if not known.
        """
        if not self._tokens:
            return 0, 0.0
        speeds.decoded(self._tokens - self._first_tokens, self._last_s - self._first_s - self._waits_s)
        if not self._alone:
            return 0, 0.0
        cached = tokens - usage.computed_tokens if usage.computed_tokens else min(self._cached, tokens - 1)
        speeds.computed(tokens - cached, self._first_s - self._sent_s)
        return cached, self._first_s - self._sent_s
