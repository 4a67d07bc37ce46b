"""Cost: what a request takes at an engine. Priors come from the configuration, scales from what was measured.

The time to compute ``n`` tokens after ``c`` that are cached::

    prefill_s = fixed_s + n / tokens_per_s * (1 + (c + n / 2) / context_even)

``context_even`` is the context at which attention costs as much as everything else; the sum over ``n`` tokens of a cost
that is linear in their position is that of the middle one. A decode step of a batch::

    step_s = alone_s * (1 + batch * each)

Every engine has a scale: how much longer prompts took there than was predicted, smoothed (a geometric mean, so that one
outlier counts little). Engines also report their own speed; that takes the place of the prior.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.conductor.state.fleet import FleetEngine

SMOOTH: Final = 0.1
SCALE_MAX: Final = 8.0  # one engine is believed to be slower by at most that
ANSWER_SMOOTH: Final = 0.02
ANSWER_TOKENS: Final = 256.0  # of an answer, until some have ended

HERE, NVME, HOST, ZONE, FAR = "here", "nvme", "host", "zone", "far"


@dataclass(frozen=True, kw_only=True)
class Priors:
    """What is believed of an engine and of the ways between them, until it is measured.

    Attributes:
        bytes_per_s: by where pages lie: in the memory of the engine's own node, on its NVMe, on another node of the
            host, of the zone, or further away.
        move_s: that such a move takes at least.
    """

    prefill_tokens_per_s: float = 8_000.0
    prefill_fixed_s: float = 0.01
    context_even: float = 30_000.0
    step_alone_s: float = 0.02
    step_each: float = 0.01
    bytes_per_s: Mapping[str, float] = field(
        default_factory=lambda: {HERE: 10e9, NVME: 2e9, HOST: 5e9, ZONE: 3e9, FAR: 1e9}
    )
    move_s: float = 0.001


class Costs:
    """Predictions, and what was learned."""

    def __init__(self, priors: Priors) -> None:
        self.priors = priors
        self._scale: dict[str, float] = {}
        self._answer_tokens: dict[str, float] = {}

    def prefill_s(self, engine: FleetEngine, tokens: int, cached: int) -> float:
        """Computing the last ``tokens - cached`` of a prompt."""
        priors, new = self.priors, tokens - cached
        speed = engine.prefill_tokens_per_s or priors.prefill_tokens_per_s
        took = priors.prefill_fixed_s + new / speed * (1 + (cached + new / 2) / priors.context_even)
        return took * self._scale.get(engine.about.name, 1.0)

    def step_s(self, engine: FleetEngine, batch: int) -> float:
        """A decode step of so many sequences. What an engine reports is a step of the batch that it has now."""
        each = self.priors.step_each
        if engine.step_s:
            now = max(1, len(engine.ends) + engine.others_running)
            return engine.step_s * (1 + batch * each) / (1 + now * each)
        return self.priors.step_alone_s * (1 + batch * each)

    def token_s(self, engine: FleetEngine) -> float:
        """What one token of an answer takes of an engine whose batch is half full."""
        batch = max(1, engine.about.batch_max // 2)
        return self.step_s(engine, batch) / batch

    def move_s(self, size: int, where: str) -> float:
        """Bringing so many bytes from there."""
        return self.priors.move_s + size / self.priors.bytes_per_s[where] if size else 0.0

    def way(self, source: FleetEngine, target: FleetEngine) -> str:
        """Where, for one engine, the memory of another is."""
        return place(source.about.host, source.about.zone, target.about.host, target.about.zone)

    # --- learned ----------------------------------------------------------------------------------------------------

    def took(self, engine: FleetEngine, tokens: int, cached: int, measured_s: float) -> None:
        """Computing the last ``tokens - cached`` of a prompt took so long there; 0: it is not known."""
        if measured_s <= 0:
            return
        name = engine.about.name
        scale = self._scale.get(name, 1.0)
        ratio = measured_s / self.prefill_s(engine, tokens, cached)
        self._scale[name] = min(SCALE_MAX, max(1 / SCALE_MAX, scale * ratio**SMOOTH))

    def forget(self, name: str) -> None:
        """An engine has gone."""
        self._scale.pop(name, None)

    def answered(self, tenant: str, tokens: int) -> None:
        """An answer had so many tokens."""
        before = self._answer_tokens.get(tenant, ANSWER_TOKENS)
        self._answer_tokens[tenant] = before + ANSWER_SMOOTH * (tokens - before)

    def answer_tokens(self, tenant: str, tokens_max: int) -> float:
        """How many tokens the next answer to this tenant will have."""
        return min(float(tokens_max), self._answer_tokens.get(tenant, ANSWER_TOKENS))


def place(host: str, zone: str, other_host: str, other_zone: str) -> str:
    """How far two places are from each other."""
    if host and host == other_host:
        return HOST
    return ZONE if zone and zone == other_zone else FAR
