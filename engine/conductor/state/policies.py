"""Policies: who computes a prompt and who answers it. One interface; the live conductor and the simulator run the same.

``kv-centric`` is the default. The others are what is published elsewhere, to compare with:

- ``random``, ``round-robin``, ``least-load``: look at no prefix.
- ``longest-prefix``: the engine whose node has most of the prompt. Collapses where everybody shares the first page.
- ``own-cache``: the soonest first token, what other nodes have left aside.
- ``dynamo-linear``: the smallest sum of blocks that it would have to compute and blocks that it decodes (NVIDIA
  Dynamo's KV router).
- ``dualmap``: two candidates by two hashes of the prompt's first pages; the one with more of it unless that is late
  (after DualMap).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import xxhash

from engine.conductor.state.options import Answering, Computing, Options, Route
from kvstore.errors import InvalidRequest

BEST: Final = 6  # engines of each kind whose pairs are tried
DUALMAP_PAGES: Final = 4  # of the prompt's first pages, what a conversation is known by
DUALMAP_LATE: Final = 2.0  # the warmer of two engines may be ready so much later
DYNAMO_LOCAL_TOKENS: Final = 2048
DYNAMO_LOCAL_SHARE: Final = 0.7


class Policy:
    """Chooses a pair. A policy says which engine computes; by default the soonest step answers.

    Args:
        draw: the only source of chance.
    """

    name = ""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """Of these, at least one, who computes the prompt."""
        raise NotImplementedError

    def route(self, options: Options, split: Split) -> Route | None:
        """Who computes and who answers; None where nobody can."""
        if not options.answering:
            return None
        local = [each for each in options.computing if each.engine.answers]
        away = [each for each in options.computing if each.engine.prefills]
        apart = split(options)
        if away and apart is not False:
            chosen = self.computing(options, away)
            if apart or not chosen.engine.answers:
                others = [each for each in options.answering if each.engine is not chosen.engine]
                if others:
                    return options.route(chosen, self.answering(options, others))
        if not local:
            return None
        return options.local(self.computing(options, local))

    def answering(self, options: Options, fit: list[Answering]) -> Answering:
        """Of these, at least one, who answers."""
        return min(fit, key=lambda each: (each.batch, each.token_s, each.engine.about.name))


Split = Callable[[Options], bool | None]
"""Whether the prompt is computed by another engine than the one that answers; None: as the policy finds."""


class KvCentric(Policy):
    """The pair with the soonest last token, what it costs others counted as its own."""

    name = "kv-centric"

    def route(self, options: Options, split: Split) -> Route | None:
        """See ``Policy.route``."""
        apart = split(options)
        pairs: list[Route] = []
        if apart is not True:
            pairs += filter(None, map(options.local, self._local(options)))
        if apart is not False:
            away = [each for each in options.computing if each.engine.prefills][:BEST]
            pairs += [
                options.route(one, other)
                for one in away
                for other in self._answering(options)
                if one.engine is not other.engine
            ]
        if not pairs:
            pairs += filter(None, map(options.local, self._local(options)))
        return min(pairs, key=_total, default=None)

    @staticmethod
    def _local(options: Options) -> list[Computing]:
        answering = [each for each in options.computing if each.engine.answers]
        return sorted(answering, key=lambda each: each.ready_s + each.harm_s)[: 2 * BEST]

    @staticmethod
    def _answering(options: Options) -> list[Answering]:
        return sorted(options.answering, key=lambda each: each.token_s * options.answer_tokens + each.harm_s)[:BEST]


class Random(Policy):
    """Any."""

    name = "random"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        return self.draw.choice(fit)


class RoundRobin(Policy):
    """One after the other."""

    name = "round-robin"

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self._turn = -1

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        self._turn += 1
        return sorted(fit, key=_name)[self._turn % len(fit)]


class LeastLoad(Policy):
    """The shortest wait."""

    name = "least-load"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        return min(fit, key=lambda each: (each.wait_s, _name(each)))


class LongestPrefix(Policy):
    """Most of the prompt."""

    name = "longest-prefix"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        return min(fit, key=lambda each: (-each.own, each.wait_s, _name(each)))


class OwnCache(Policy):
    """The soonest first token by what its own node has."""

    name = "own-cache"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        return min(fit, key=lambda each: (each.wait_s + options.own_prefill_s(each), _name(each)))


class DynamoLinear(Policy):
    """Tokens to compute, and blocks that are decoded."""

    name = "dynamo-linear"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        return min(fit, key=lambda each: (self._blocks(options, each), _name(each)))

    @staticmethod
    def _blocks(options: Options, each: Computing) -> float:
        engine, page = each.engine, each.engine.about.page_tokens
        speed = options.prefill_speed(engine)
        return (each.wait_s * speed + options.wish.tokens - each.own) / page + engine.tokens / page


class DualMap(Policy):
    """The warmer of two, by two hashes."""

    name = "dualmap"

    def computing(self, options: Options, fit: list[Computing]) -> Computing:
        """See ``Policy.computing``."""
        by_name = sorted(fit, key=_name)
        pages = next(iter(options.wish.pages.values()), None)
        if pages is None or not len(pages):
            return min(fit, key=lambda each: (each.ready_s, _name(each)))
        first = pages[:DUALMAP_PAGES].tobytes()
        one, other = (by_name[xxhash.xxh3_64_intdigest(first, seed) % len(by_name)] for seed in (1, 2))
        warm, cold = (one, other) if one.own >= other.own else (other, one)
        return warm if warm.ready_s <= DUALMAP_LATE * cold.ready_s else cold


def never(options: Options) -> bool | None:
    """Every engine computes what it answers."""
    return False


def always(options: Options) -> bool | None:
    """Two engines for every request."""
    return True


def threshold(options: Options) -> bool | None:
    """Two engines where much is left to compute (NVIDIA Dynamo's rule and figures)."""
    left = options.wish.tokens - max((each.cached for each in options.computing if each.engine.answers), default=0)
    return left >= DYNAMO_LOCAL_TOKENS or left >= DYNAMO_LOCAL_SHARE * options.wish.tokens


def cost(options: Options) -> bool | None:
    """As the policy finds."""
    return None


POLICIES: Mapping[str, type[Policy]] = MappingProxyType(
    {
        each.name: each
        for each in (KvCentric, Random, RoundRobin, LeastLoad, LongestPrefix, OwnCache, DynamoLinear, DualMap)
    }
)
SPLITS: Mapping[str, Split] = MappingProxyType({"cost": cost, "never": never, "always": always, "threshold": threshold})


def make_policy(name: str, seed: int) -> Policy:
    """A policy by name.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in POLICIES:
        raise InvalidRequest("policy", f"there is no policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](random.Random(seed))


def make_split(name: str) -> Split:
    """When two engines share a request, by name.

    Raises:
        InvalidRequest: there is none of that name.
    """
    if name not in SPLITS:
        raise InvalidRequest("split", f"there is no split {name!r}; there are {', '.join(SPLITS)}")
    return SPLITS[name]


def _name(each: Computing) -> str:
    return each.engine.about.name


def _total(route: Route) -> tuple[float, str, str]:
    return route.total_s, route.computing.engine.about.name, route.answering.engine.about.name
