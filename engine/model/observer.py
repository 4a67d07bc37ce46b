"""Observer: receives what an engine reports of its work, and ignores it. ``engine.api.metrics`` counts it."""

from __future__ import annotations

from engine.model.request import Usage


class Observer:
    """The engine's thread calls these methods; they must return quickly."""

    def ended(self, outcome: str, usage: Usage) -> None:
        """A request ended. ``outcome``: stop, eos, length, cancelled, prefilled, migrated, or failed."""

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """A forward ended: ``decoding`` sequences and ``chunk_tokens`` prompt tokens took ``seconds``."""

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        """The KV of a prompt has arrived. ``seconds``: from the first token to the last layer."""

    def stalled(self, seconds: float) -> None:
        """A step waited ``seconds`` for layers that were being moved."""
