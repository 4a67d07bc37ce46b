"""Rules: what the decisions of an engine depend on, and does not change while it runs."""

from __future__ import annotations

from dataclasses import dataclass

SIDE_MAX = 4  # side batches at once; each has a thread


@dataclass(frozen=True, kw_only=True)
class Rules:
    """See ``EngineConfig`` for what the settings mean. ``frames``: of the arena, all; ``layers``: of the model;
    ``kept_max``: frames that may keep pages of requests that have ended."""

    frames: int
    kept_max: int = 0
    layers: int
    page_tokens: int
    chunk_tokens: int
    batch_max: int
    local_prefill_tokens: int = 0
    prefill: tuple[str, ...] = ()
    side_max: int = SIDE_MAX
