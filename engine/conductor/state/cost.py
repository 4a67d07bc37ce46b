"""Cost: how long a request takes at an engine. Priors come from the configuration, scales from measurements.

The time to compute ``n`` tokens after ``c`` that are cached::

    prefill_s = fixed_s + n / tokens_per_s * (1 + (c + n / 2) / context_even)

``context_even`` is the context at which attention costs as much as everything else; the sum over ``n`` tokens of a cost
that is linear in their position is that of the middle one. A decode step of a batch::

    step_s = alone_s * (1 + batch * each)

Every engine has a scale: how much longer prompts took there than predicted, smoothed (a geometric mean, so that one
outlier counts little). Engines also report their own speed, which replaces the prior. All of this is noisy: see
``Paces``.

A hand-off takes more than its bytes: a second queue, and a second step before the first token. The extra is how much
later than predicted its first tokens come, compared with those of engines that do both::

    handoff_s += LATE_SMOOTH * (late_s of this hand-off - the usual late_s of the others)

It decays slowly, so that hand-offs are tried again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np

from engine.conductor.state.engine_table import Floats, Paces
from engine.conductor.state.fleet import FleetEngine

SMOOTH: Final = 0.1
SCALE_MAX: Final = 8.0  # the largest slowdown that is believed of one engine
ANSWER_SMOOTH: Final = 0.02
TENANTS_MAX: Final = 4096  # tenants whose answers are remembered
PREFILL_SMOOTH: Final = 0.02
LATE_SMOOTH: Final = 0.05
LATE_MAX_S: Final = 1.0  # the most that one request counts for
LATE_FORGOTTEN: Final = 0.002  # the fraction that decays with each answer of an engine that does both
ANSWER_TOKENS: Final = 256.0  # assumed length of an answer until some have ended

Number = TypeVar("Number", float, Floats)

HERE, NVME, HOST, ZONE, FAR = "here", "nvme", "host", "zone", "far"


@dataclass(frozen=True, kw_only=True)
class Priors:
    """What is assumed of an engine and of the paths between engines, until it is measured.

    Attributes:
        bytes_per_s: by where pages are: in the memory of the engine's own node, on its NVMe, on another node of the
            host, of the zone, or further away.
        move_s: the least time that such a move takes.
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
    """Predictions, and what was learned. Methods that take ``columns`` predict for all engines in them at once.

    Attributes:
        s_per_byte: see ``Priors.bytes_per_s``; ``ways``: of moves between nodes, by their distance.
        handoff_s: what a hand-off takes in addition to what its bytes predict.
    """

    def __init__(self, priors: Priors) -> None:
        self.priors = priors
        self.s_per_byte = {where: 1 / speed for where, speed in priors.bytes_per_s.items()}
        self.ways = np.array([self.s_per_byte[where] for where in (HOST, ZONE, FAR)])
        self.handoff_s = 0.0
        self._late_s = 0.0
        self._answer_tokens: dict[str, float] = {}
        self._usual_s: dict[str, tuple[int, float]] = {}  # by model: how many requests, and their mean

    def speeds(self, paces: Paces) -> Floats:
        """Prompt tokens per second, as engines report. An engine without a report is assumed to be like the others."""
        return _believed(paces.tokens_per_s, self.priors.prefill_tokens_per_s)

    def prefills_s(self, paces: Paces, speeds: Floats, tokens: int, cached: Floats) -> Floats:
        """Seconds to compute the last ``tokens - cached`` tokens of a prompt."""
        return self._prefill_s(tokens, cached, speeds) * paces.scale

    def _prefill_s(self, tokens: int, cached: Number, speed: Number) -> Number:
        context = 2 * self.priors.context_even
        return self.priors.prefill_fixed_s + (tokens - cached) / speed * (cached / context + (1 + tokens / context))

    def steps_s(self, paces: Paces, *batches: Floats) -> list[Floats]:
        """Seconds of a decode step of this many sequences."""
        alone_s = _believed(paces.alone_s, self.priors.step_alone_s)
        return [alone_s * (1 + batch * self.priors.step_each) for batch in batches]

    def token_s(self, engine: FleetEngine) -> float:
        """Seconds of an engine for one token of an answer, when its batch is full."""
        each, batch = self.priors.step_each, engine.about.batch_max
        alone = engine.alone_s or self.priors.step_alone_s
        return alone * (1 + batch * each) / batch

    def moves_s(self, size: Floats, s_per_byte: Floats | float) -> Floats:
        """Seconds to move this many bytes."""
        return (size > 0) * self.priors.move_s + size * s_per_byte

    # --- learned ----------------------------------------------------------------------------------------------------

    def took(self, engine: FleetEngine, tokens: int, cached: int, measured_s: float) -> None:
        """Record how long the last ``tokens - cached`` tokens of a prompt took there; 0: not known."""
        if measured_s > 0:
            speed = engine.tokens_per_s or self.priors.prefill_tokens_per_s
            ratio = measured_s / (engine.scale * self._prefill_s(tokens, float(cached), speed))
            engine.scale = min(SCALE_MAX, max(1 / SCALE_MAX, engine.scale * ratio**SMOOTH))

    def began(self, local: bool, late_s: float) -> None:
        """Record how much later than predicted a first token came. ``local``: one engine did both."""
        late_s = max(-LATE_MAX_S, min(LATE_MAX_S, late_s))
        if local:
            self._late_s += LATE_SMOOTH * (late_s - self._late_s)
            self.handoff_s *= 1 - LATE_FORGOTTEN
        else:
            self.handoff_s = max(0.0, self.handoff_s + LATE_SMOOTH * (late_s - self._late_s))

    def asked(self, model: str, prefill_s: float) -> None:
        """Record a request and how long its prompt takes. (Only for models that an engine has.)"""
        count, mean_s = self._usual_s.get(model, (0, 0.0))
        count += 1
        self._usual_s[model] = count, mean_s + (prefill_s - mean_s) * max(PREFILL_SMOOTH, 1 / count)

    def usual_prefill_s(self, model: str) -> float:
        """The mean time that prompts of this model took recently."""
        return self._usual_s.get(model, (0, 0.0))[1]

    def answered(self, tenant: str, tokens: int) -> None:
        """Record the length of an answer, in tokens."""
        before = self._answer_tokens.pop(tenant, ANSWER_TOKENS)
        if len(self._answer_tokens) >= TENANTS_MAX:
            del self._answer_tokens[next(iter(self._answer_tokens))]  # the tenant whose last answer is oldest
        self._answer_tokens[tenant] = before + ANSWER_SMOOTH * (tokens - before)

    def answer_tokens(self, tenant: str, tokens_max: int) -> float:
        """How many tokens the next answer to this tenant will have."""
        return min(float(tokens_max), self._answer_tokens.get(tenant, ANSWER_TOKENS))


def _believed(reported: Floats, prior: float) -> Floats:
    """What engines report; for those without a report the mean of the others, or 0 if there are none."""
    known = reported > 0
    if known.all():
        return reported
    return np.where(known, reported, reported[known].mean() if known.any() else prior)
