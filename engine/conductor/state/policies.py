"""Policies: choose the engine that computes a prompt and the engine that answers.

``kv-centric`` is the default. The others are published policies, for comparison:

- ``random``, ``round-robin`` and ``least-load`` ignore prefixes.
- ``longest-prefix`` chooses the engine whose node has most of the prompt. If all prompts share their first page, it
  uses the engines of a single node until they are full.
- ``own-cache`` chooses the engine with the soonest first token, and ignores the pages of other nodes.
- ``dynamo-linear`` minimizes the blocks to compute plus the blocks being decoded (NVIDIA Dynamo's KV router).
- ``dualmap`` gets two engines from two hashes of the prompt's first pages. It chooses the one whose node has more of
  the prompt, unless that engine would be ready much later (after DualMap).

A *split* decides whether two engines share a request: one computes the prompt, the other answers.
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

BEST: Final = 6  # computing engines, and answering engines, whose pairs ``kv-centric`` compares
DUALMAP_PAGES: Final = 4  # how many first pages of a prompt identify its conversation
DUALMAP_LATE: Final = 2.0  # the warmer engine may be ready later than the other by this factor
DYNAMO_LOCAL_TOKENS: Final = 2048
DYNAMO_LOCAL_SHARE: Final = 0.7


class Policy:
    """Chooses a pair of engines for a request.

    A policy chooses the computing engine among the engines with room, so that no request waits for a full engine while
    another has room. By default the partner with the smallest batch answers. A policy has no state that its methods
    change, because a waiting request is routed again and again.
    """

    name = ""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the engine that computes the prompt. It is one of ``places``, which is not empty."""
        raise NotImplementedError

    def route(self, candidates: Candidates, split: Split) -> tuple[int, int] | None:
        """Return the engines that compute and answer; None if no engine can."""
        is_split = split(candidates)
        if is_split is not False and len(candidates.prefills):
            chosen = self.choose(candidates, candidates.with_room(candidates.prefills))
            partners = candidates.partners(chosen)
            if len(partners) and (is_split or chosen not in candidates.answers):
                return chosen, int(partners[candidates.batch[partners].argmin()])
            if chosen in candidates.answers:
                return chosen, chosen
        if not len(candidates.answers):
            return None
        chosen = self.choose(candidates, candidates.with_room(candidates.answers))
        return chosen, chosen


Split = Callable[[Candidates], bool | None]
"""True: two engines share the request. False: one engine does both. None: the policy decides."""


class KvCentric(Policy):
    """Chooses the pair with the soonest last token, counting also the delay that it causes to other requests.

    Pairs that meet the limits of the request are preferred to pairs that do not. Equal pairs take turns.
    """

    name = "kv-centric"

    def route(self, candidates: Candidates, split: Split) -> tuple[int, int] | None:
        """Return the best pair; see the class."""
        is_split, answers = split(candidates), candidates.answers
        if not len(answers):
            return None
        best: tuple[float, int, int] | None = None
        if is_split is not False and len(candidates.prefills):
            soonest = candidates.prompts_s + candidates.doubt_s
            if candidates.hurries:
                soonest = soonest + candidates.late_penalties_s(candidates.ready_s)
            computing = _smallest(candidates.prefills, soonest)
            answering = _smallest(answers, candidates.answers_s)
            one_each, other_each = computing[:, None], answering[None, :]
            tails_s = candidates.tails_s(one_each, other_each)
            tails_s[one_each == other_each] = np.inf  # one engine for both is considered below
            totals = candidates.totals_s(one_each, other_each, tails_s)
            totals = totals + candidates.doubt_s[one_each] + candidates.doubt_s[other_each]
            if candidates.hurries:
                totals = totals + candidates.late_penalties_s(
                    candidates.ready_s[one_each] + tails_s, candidates.token_s[other_each]
                )
            one, other = divmod(_first(totals.ravel(), candidates), len(answering))
            if totals[one, other] < np.inf:
                best = float(totals[one, other]), int(computing[one]), int(answering[other])
        if is_split is not True or best is None:
            totals = candidates.totals_s(answers, answers, 0.0) + candidates.doubt_s[answers]
            if candidates.hurries:
                totals = totals + candidates.late_penalties_s(candidates.ready_s[answers], candidates.token_s[answers])
            at = _first(totals, candidates)
            if best is None or totals[at] <= best[0]:
                return int(answers[at]), int(answers[at])
        return best[1:]


class Random(Policy):
    """Chooses an engine at random."""

    name = "random"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        return int(places[_pick(candidates.request.number.to_bytes(8, "little"), self.seed, len(places))])


class RoundRobin(Policy):
    """Uses the engines in turn."""

    name = "round-robin"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        return int(places[candidates.request.number % len(places)])


class LeastLoad(Policy):
    """Chooses the engine with the shortest wait."""

    name = "least-load"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        return int(places[_first((candidates.wait_s + candidates.doubt_s)[places], candidates)])


class LongestPrefix(Policy):
    """Chooses the engine whose node has most of the prompt; among equal ones, the one with the shortest wait."""

    name = "longest-prefix"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        return int(places[np.lexsort((candidates.wait_s[places], -candidates.own[places]))[0]])


class OwnCache(Policy):
    """Chooses the engine with the soonest first token, if each engine uses only the pages of its own node."""

    name = "own-cache"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        ready_s = candidates.wait_s + candidates.own_prefill_s + candidates.doubt_s
        return int(places[_first(ready_s[places], candidates)])


class DynamoLinear(Policy):
    """Chooses the engine with the fewest blocks to compute and to decode."""

    name = "dynamo-linear"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        columns = candidates.columns
        blocks = (
            candidates.wait_s * candidates.speeds + candidates.request.tokens - candidates.own + columns.tokens
        ) / columns.page_tokens
        return int(places[_first(blocks[places], candidates)])


class DualMap(Policy):
    """Chooses the warmer of two engines that two hashes of the prompt select."""

    name = "dualmap"

    def choose(self, candidates: Candidates, places: Places) -> int:
        """Return the chosen engine; see the class."""
        pages = next(iter(candidates.request.pages.values()), None)
        if pages is None or not len(pages):
            return int(places[_first(candidates.ready_s[places], candidates)])
        first = pages[:DUALMAP_PAGES].tobytes()
        one, other = (int(places[_pick(first, self.seed + which, len(places))]) for which in (1, 2))
        warm, cold = (one, other) if candidates.own[one] >= candidates.own[other] else (other, one)
        return warm if candidates.ready_s[warm] <= DUALMAP_LATE * candidates.ready_s[cold] else cold


def never(candidates: Candidates) -> bool | None:
    """Let every engine compute the prompts that it answers."""
    return False


def always(candidates: Candidates) -> bool | None:
    """Use two engines for every request."""
    return True


def threshold(candidates: Candidates) -> bool | None:
    """Use two engines if much of the prompt must be computed (NVIDIA Dynamo's rule and figures)."""
    tokens = candidates.request.tokens
    to_compute = tokens - candidates.cached[candidates.answers].max(initial=0)
    return bool(to_compute >= DYNAMO_LOCAL_TOKENS or to_compute >= DYNAMO_LOCAL_SHARE * tokens)


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
    """Make the policy with this name.

    Raises:
        InvalidRequest: there is no policy with this name.
    """
    if name not in POLICIES:
        raise InvalidRequest("policy", f"must be one of {', '.join(POLICIES)} (got {name!r})")
    return POLICIES[name](seed)


def make_split(name: str) -> Split:
    """Return a split by name.

    Raises:
        InvalidRequest: there is no split with this name.
    """
    if name not in SPLITS:
        raise InvalidRequest("split", f"must be one of {', '.join(SPLITS)} (got {name!r})")
    return SPLITS[name]


def _smallest(places: Places, values: Floats) -> Places:
    """Return the ``BEST`` engines with the smallest values, in the order of ``places``."""
    if len(places) <= BEST:
        return places
    return np.sort(places[values[places].argsort(kind="stable")[:BEST]])


def _first(values: Floats, candidates: Candidates) -> int:
    """Return the position of the smallest value. Equal values take turns from request to request."""
    smallest = (values == values.min()).nonzero()[0]
    return int(smallest[candidates.request.number % len(smallest)])


def _pick(data: bytes, seed: int, count: int) -> int:
    """Return a pseudo-random number below ``count``. Equal data and seeds give equal numbers."""
    return xxhash.xxh3_64_intdigest(data, seed) % count
