"""ConductorTally: what a conductor has done since its start. Its event loop counts, any thread reads."""

from __future__ import annotations

from collections import Counter
from typing import Final

from engine.conductor.state.kv_blocks import KV_OUTCOMES
from kvstore.server.call_counts import Durations

OUTCOMES: Final = ("stop", "eos", "length", "cancelled", "refused", "failed")


class ConductorTally:
    """Counts.

    Attributes:
        outcomes: ended answers, by outcome.
        routed: requests that were sent to engines; one that goes on elsewhere counts again.
        broken: times that an engine failed on an answer.
        role_refusals: times that an engine refused a request because of its role, which was then routed again.
        decided: time of the decision about an arriving request.
        ttft: from a request's arrival to its first token.
        kv_events: outcomes of KV events of foreign engines.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.routed = self.broken = self.role_refusals = self.prompt_tokens = self.completion_tokens = 0
        self.kv_events: Counter[str] = Counter(dict.fromkeys(KV_OUTCOMES, 0))
        self.decided, self.ttft = Durations(), Durations()
