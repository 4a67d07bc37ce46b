"""Row: what the demo measured of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoRow:
    """One request, with the pool, and once more without it. What a row does not say is of the one with it.

    Attributes:
        phase: "up"; "down": without a node; "again": after that; "restarted": after the machine did.
        hbm_tokens, dram_tokens, nvme_tokens: of the prompt, reused from there. The others were computed.
        computed_by: "prefill" or "decode", the role of the engine.
        loaded_bytes, moved_bytes: read from the pool, and moved from engine to engine.
        same: both answers are the same tokens.
    """

    number: int
    phase: str
    user: str
    turn: int
    document: str
    prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    nvme_tokens: int
    computed_tokens: int
    computed_by: str
    answer_tokens: int
    ttft_ms: float
    ttft_without_ms: float
    loaded_bytes: int
    moved_bytes: int
    same: bool
