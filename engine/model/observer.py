"""Observer: receives what an engine does. The one here ignores it; ``engine.api.metrics`` counts."""

from __future__ import annotations

from engine.model.request import Usage


class Observer:
    """Called by the engine's thread; must be quick."""

    def ended(self, outcome: str, usage: Usage) -> None:
        """A request ended: stop, eos, length, cancelled, prefilled, migrated, or failed."""

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """One forward: how many sequences decode, and how many prompt tokens it has."""

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        """The KV of a prompt has arrived~; ``seconds`` from the first token to the last layer."""

    def stalled(self, seconds: float) -> None:
        """A step waited this long for layers that are on their way."""
