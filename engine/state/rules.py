"""Rules: what the decisions of an engine depend on, and does not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

SIDE_MAX = 4  # side batches at once; each has a thread


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See ``EngineConfig`` for what the settings mean. ``frames``: of the arena, all; ``layers``: of the model;
    ``kept_max``: frames that may keep pages of requests that have ended; ``window``: tokens that the layer sees which
    sees most, 0 where one sees everything."""

    frames: int
    kept_max: int = 0
    layers: int
    page_tokens: int
    chunk_tokens: int
    batch_max: int
    local_prefill_tokens: int = 0
    prefill: tuple[str, ...] = ()
    side_max: int = SIDE_MAX
    window: int = 0

    def frames_for(self, tokens: int) -> int:
        """Frames that a sequence of so many tokens needs.

        With a window no more than a ring: pages that the longest chunk and what its first token sees can touch. A page
        is put where the page lies that is a ring's length before it, and that nobody sees any more.
        """
        pages = -(-tokens // self.page_tokens)
        if not self.window:
            return pages
        touched = self.window - 1 + max(self.chunk_tokens, self.page_tokens)
        return min(pages, max(touched - 2, 0) // self.page_tokens + 2)

    @property
    def tokens_max(self) -> int:
        """Tokens of the longest sequence that all frames hold; 0: any, since it needs no more than a ring of them."""
        tokens = self.frames * self.page_tokens
        return 0 if self.frames_for(tokens + 1) <= self.frames else tokens
