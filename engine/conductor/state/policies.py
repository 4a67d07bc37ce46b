"""Policies: which engine computes a prompt and which answers it. The live conductor and the simulator share them.

``kv-centric`` is the default. The others are published policies, for comparison:

- ``random``, ``round-robin``, ``least-load``: look at no prefix.
- ``longest-prefix``: the engine whose node has most of the prompt. If every prompt shares the first page, this selects
only one node's engines, until they are full. - ``own-cache``: the soonest first token, ignoring what other nodes have.
- ``dynamo-linear``: the smallest sum of blocks to compute and blocks being decoded (NVIDIA
  Dynamo's KV router).
- ``dualmap``: two candidates by two hashes of the prompt's first pages; the one with more of the prompt, unless it
  would be late (after DualMap).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import xxhash

from engine.conductor.state.candidates import Candidates
from engine.conductor.state.engine_table import Floats, Places
from kvstore.errors import InvalidRequest

BEST: Final = 6  # engines of each kind whose pairs are tried
DUALMAP_PAGES: Final = 4  # the first pages of a prompt, which identify a conversation
DUALMAP_LATE: Final = 2.0  # how much later the warmer of two engines may be ready
DYNAMO_LOCAL_TOKENS: Final = 2048
DYNAMO_LOCAL_SHARE: Final = 0.7


class Policy:
    """Chooses a pair of engines. A policy chooses the computing engine among those with free capacity, so that no
    request waits for a full one; by default the engine with the smallest batch answers.

    A request is routed again for as long as it waits, so calling a policy changes no state.
    """

    name = ""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """Return the position of the engine that computes the prompt, among these (at least one)."""
        raise NotImplementedError

    def route(self, candidates: Candidates, split: Split) -> tuple[int, int] | None:
        """The engines that compute and answer; None if there are none."""
        apart = split(candidates)
        if apart is not False and len(candidates.prefills):
            chosen = self.computing(candidates, candidates.with_room(candidates.prefills))
            others = candidates.partners(chosen)
            if len(others) and (apart or chosen not in candidates.answers):
                return chosen, int(others[candidates.batch[others].argmin()])
            if chosen in candidates.answers:
                return chosen, chosen
        if not len(candidates.answers):
            return None
        chosen = self.computing(candidates, candidates.with_room(candidates.answers))
        return chosen, chosen


Split = Callable[[Candidates], bool | None]
"""True if another engine than the answering one computes the prompt; None: as the policy decides."""


class KvCentric(Policy):
    """The pair with the soonest last token, including the delay it causes to other requests, among the pairs that meet
    the request's limits, if there are any. Equal pairs take turns.
    """

    name = "kv-centric"

    def route(self, candidates: Candidates, split: Split) -> tuple[int, int] | None:
        """See ``Policy.route``."""
        apart, answers = split(candidates), candidates.answers
        if not len(answers):
            return None
        best: tuple[float, int, int] | None = None
        if apart is not False and len(candidates.prefills):
            soonest = candidates.prompts_s + candidates.doubt_s
            if candidates.hurries:
                soonest = soonest + candidates.late_penalties_s(candidates.ready_s)
            computing = _smallest(candidates.prefills, soonest)
            answering = _smallest(answers, candidates.answers_s)
            one_each, other_each = computing[:, None], answering[None, :]
            tails_s = candidates.tails_s(one_each, other_each)
            tails_s[one_each == other_each] = np.inf  # these pairs are added below
            totals = candidates.totals_s(one_each, other_each, tails_s)
            totals = totals + candidates.doubt_s[one_each] + candidates.doubt_s[other_each]
            if candidates.hurries:
                totals = totals + candidates.late_penalties_s(
                    candidates.ready_s[one_each] + tails_s, candidates.token_s[other_each]
                )
            one, other = divmod(_first(totals.ravel(), candidates), len(answering))
            if totals[one, other] < np.inf:
                best = float(totals[one, other]), int(computing[one]), int(answering[other])
        if apart is not True or best is None:
            totals = candidates.totals_s(answers, answers, 0.0) + candidates.doubt_s[answers]
            if candidates.hurries:
                totals = totals + candidates.late_penalties_s(candidates.ready_s[answers], candidates.token_s[answers])
            at = _first(totals, candidates)
            if best is None or totals[at] <= best[0]:
                return int(answers[at]), int(answers[at])
        return best[1:]


class Random(Policy):
    """Chooses at random."""

    name = "random"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        return int(fit[_drawn(candidates.request.number.to_bytes(8, "little"), self.seed, len(fit))])


class RoundRobin(Policy):
    """Uses the engines in turn."""

    name = "round-robin"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        return int(fit[candidates.request.number % len(fit)])


class LeastLoad(Policy):
    """Chooses the shortest wait."""

    name = "least-load"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        return int(fit[_first((candidates.wait_s + candidates.doubt_s)[fit], candidates)])


class LongestPrefix(Policy):
    """Chooses the engine with most of the prompt; among equal ones, the shortest wait."""

    name = "longest-prefix"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        return int(fit[np.lexsort((candidates.wait_s[fit], -candidates.own[fit]))[0]])


class OwnCache(Policy):
    """Chooses the soonest first token, counting only pages of the engine's own node."""

    name = "own-cache"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        return int(fit[_first((candidates.wait_s + candidates.own_prefill_s + candidates.doubt_s)[fit], candidates)])


class DynamoLinear(Policy):
    """Chooses by the tokens to compute and the blocks being decoded."""

    name = "dynamo-linear"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        columns = candidates.columns
        blocks = (
            candidates.wait_s * candidates.speeds + candidates.request.tokens - candidates.own + columns.tokens
        ) / columns.page_tokens
        return int(fit[_first(blocks[fit], candidates)])


class DualMap(Policy):
    """Chooses the warmer of two engines, which are given by two hashes."""

    name = "dualmap"

    def computing(self, candidates: Candidates, fit: Places) -> int:
        """See ``Policy.computing``."""
        pages = next(iter(candidates.request.pages.values()), None)
        if pages is None or not len(pages):
            return int(fit[_first(candidates.ready_s[fit], candidates)])
        first = pages[:DUALMAP_PAGES].tobytes()
        one, other = (int(fit[_drawn(first, self.seed + which, len(fit))]) for which in (1, 2))
        warm, cold = (one, other) if candidates.own[one] >= candidates.own[other] else (other, one)
        return warm if candidates.ready_s[warm] <= DUALMAP_LATE * candidates.ready_s[cold] else cold


def never(candidates: Candidates) -> bool | None:
    """Let every engine compute the prompts that it answers."""
    return False


def always(candidates: Candidates) -> bool | None:
    """Use two engines for every request."""
    return True


def threshold(candidates: Candidates) -> bool | None:
    """Use two engines if much is left to compute (NVIDIA Dynamo's rule and figures)."""
    left = candidates.request.tokens - candidates.cached[candidates.answers].max(initial=0)
    return bool(left >= DYNAMO_LOCAL_TOKENS or left >= DYNAMO_LOCAL_SHARE * candidates.request.tokens)


def cost(candidates: Candidates) -> bool | None:
    """Let the policy decide."""
    return None


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        each.name: each
        for each in (KvCentric, Random, RoundRobin, LeastLoad, LongestPrefix, OwnCache, DynamoLinear, DualMap)
    }
)
SPLITS: Mapping[str, Split] = MappingProxyType({"cost": cost, "never": never, "always": always, "threshold": threshold})


def make_policy(name: str, seed: int) -> Policy:
    """Make a policy by name.

    Raises:
        InvalidRequest: there is no policy with this name.
    """
    if name not in POLICIES:
        raise InvalidRequest("policy", f"must be one of {', '.join(POLICIES)} (got {name!r})")
    return POLICIES[name](seed)


def make_split(name: str) -> Split:
    """Return the rule by name that decides when two engines share a request.

    Raises:
        InvalidRequest: there is no split with this name.
    """
    if name not in SPLITS:
        raise InvalidRequest("split", f"must be one of {', '.join(SPLITS)} (got {name!r})")
    return SPLITS[name]


def _smallest(fit: Places, values: Floats) -> Places:
    """The ``BEST`` engines with the smallest values, in the order given."""
    if len(fit) <= BEST:
        return fit
    return np.sort(fit[values[fit].argsort(kind="stable")[:BEST]])


def _first(values: Floats, candidates: Candidates) -> int:
    """Return the position of the smallest value; equal ones take turns from request to request."""
    smallest = (values == values.min()).nonzero()[0]
    return int(smallest[candidates.request.number % len(smallest)])


def _drawn(what: bytes, seed: int, count: int) -> int:
    """A pseudo-random number below ``count``, the same for the same request."""
    return xxhash.xxh3_64_intdigest(what, seed) % count
