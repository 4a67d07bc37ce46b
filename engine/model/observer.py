"""Observer: the interface through which an engine reports its work. ``engine.api.metrics`` counts the reports."""

from __future__ import annotations

from engine.model.request import Usage


class Observer:
    """An observer that ignores all reports. The engine's thread calls the methods, so they must return quickly."""

    def ended(self, outcome: str, usage: Usage) -> None:
        """Report the end of a request. ``outcome``: stop, eos, length, cancelled, prefilled, migrated, or failed."""

    def stepped(self, decoding: int, chunk_tokens: int, seconds: float) -> None:
        """Report a forward pass of ``decoding`` sequences and ``chunk_tokens`` prompt tokens that took ``seconds``."""

    def handed_off(self, moved_bytes: int, seconds: float) -> None:
        """Report that the KV of a prompt has arrived, ``seconds`` after the first token was drawn."""

    def stalled(self, seconds: float) -> None:
        """Report that a step has waited for ``seconds`` for layers that were still arriving."""
