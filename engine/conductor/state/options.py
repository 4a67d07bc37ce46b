"""Options: for one request, what every engine could do, and when.

For every pair of an engine that computes the prompt and one that answers::

    first_token_s = max(wait, move) + prefill + hand-off's exposed tail       (DESIGN section 8)
    token_s       = a decode step of the batch that will run when the prompt is computed

What is moved in comes while the request waits. A hand-off goes layer by layer during the prefill, so only what is
longer than that, and the last layer, is seen. Two further terms are not the request's own: what it costs those that
already run there, since a chunk of a prompt makes their step longer, and so does one more sequence in their batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from engine.conductor.state.cost import HERE, NVME, Costs, place
from engine.conductor.state.fleet import FleetEngine
from engine.conductor.state.prefixes import Donor, Matches
from kvstore.model.span import Fingerprints

DONORS: Final = 3  # nodes from which a longer prefix could come, the longest first
WORK_PRICE: Final = 0.5  # of a second of an engine, in seconds of waiting: somebody may come who needs it
LAYERS: Final = 32  # of a model, for the part of a hand-off that nothing hides


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteWish:
    """A request, as far as its route depends on it.

    Attributes:
        number: the conductor's.
        pages: fingerprints of the prompt's full pages, in order, for each layout that an engine of its model has.
        tokens: of the prompt.
        answer_max: tokens that the answer may have.
        first_token_s, token_s: what it wants to meet, at most; 0: nothing.
    """

    number: int
    tenant: str
    model: str
    pages: Mapping[str, Fingerprints]
    tokens: int
    answer_max: int
    priority: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Computing:
    """An engine that could compute the prompt.

    Attributes:
        cached: tokens that it need not compute.
        own: those of them that its own node has now.
        donor: the node that the others come from, its own where they are being computed there; empty: none.
        after_s: the moment from which on the donor has them: the request is kept until then; 0: now.
        wait_s, move_s, prefill_s: see the top.
        harm_s: seconds that those that it answers lose together.
    """

    engine: FleetEngine
    cached: int
    own: int
    donor: str
    after_s: float
    wait_s: float
    move_s: float
    prefill_s: float
    harm_s: float

    @property
    def ready_s(self) -> float:
        """Until the prompt is computed."""
        return max(self.wait_s, self.move_s) + self.prefill_s


@dataclass(frozen=True, slots=True)
class Answering:
    """An engine that could answer.

    Attributes:
        batch: sequences that it would decode together, this one among them.
        token_s: its step then.
        harm_s: seconds that the others lose together while this answer lasts.
    """

    engine: FleetEngine
    batch: int
    token_s: float
    harm_s: float


@dataclass(frozen=True, slots=True)
class Route:
    """Both, and what comes of it.

    Attributes:
        tail_s: of the hand-off, what nothing hides; 0 where one engine does both.
        total_s: until the last token, with the harm to others: what the default policy makes small.
    """

    computing: Computing
    answering: Answering
    tail_s: float
    total_s: float

    @property
    def local(self) -> bool:
        """One engine does both."""
        return self.computing.engine is self.answering.engine

    @property
    def first_token_s(self) -> float:
        """Until the first token."""
        return self.computing.ready_s + self.tail_s


class Options:
    """What could be done with one request.

    Args:
        engines: that may get it.
        places: host and zone of every node.

    Attributes:
        computing: every engine, as one that computes the prompt; sorted by when it would be ready.
        answering: every engine that answers; sorted by its step.
        answer_tokens: that the answer will have, by prediction.
    """

    def __init__(
        self,
        wish: RouteWish,
        engines: list[FleetEngine],
        matches: Mapping[str, Matches],
        costs: Costs,
        places: Mapping[str, tuple[str, str]],
        now_s: float,
    ) -> None:
        self.wish = wish
        self._costs = costs
        self._places = places
        self._now_s = now_s
        self.answer_tokens = costs.answer_tokens(wish.tenant, wish.answer_max)
        fit = [engine for engine in engines if _fits(engine, wish)]
        self.computing = sorted((self._computing(each, matches) for each in fit), key=attrgetter("ready_s"))
        horizon_s = now_s + (self.computing[0].ready_s if self.computing else 0.0)
        answering = (self._answering(each, horizon_s) for each in fit if each.answers)
        self.answering = sorted(answering, key=attrgetter("token_s"))

    def route(self, computing: Computing, answering: Answering) -> Route:
        """These two together."""
        tail_s = 0.0
        if computing.engine is not answering.engine:
            size = self.wish.tokens * computing.engine.about.kv_bytes
            moves_s = self._costs.move_s(size, self._costs.way(computing.engine, answering.engine))
            tail_s = max(moves_s - computing.prefill_s, moves_s / LAYERS)
        own_s = computing.ready_s + tail_s + self.answer_tokens * answering.token_s
        harm_s = computing.harm_s + answering.harm_s + WORK_PRICE * computing.prefill_s
        return Route(computing, answering, tail_s, own_s + harm_s)

    def own_prefill_s(self, computing: Computing) -> float:
        """The prompt's computation, had only the engine's own node any of it."""
        return self._costs.prefill_s(computing.engine, self.wish.tokens, computing.own)

    def prefill_speed(self, engine: FleetEngine) -> float:
        """Tokens per second."""
        return engine.prefill_tokens_per_s or self._costs.priors.prefill_tokens_per_s

    def local(self, computing: Computing) -> Route | None:
        """One engine for both; None where it does not answer."""
        found = next((each for each in self.answering if each.engine is computing.engine), None)
        return self.route(computing, found) if found is not None else None

    def _computing(self, engine: FleetEngine, matches: Mapping[str, Matches]) -> Computing:
        costs, about, wish = self._costs, engine.about, self.wish
        found = matches.get(about.layout)
        page = about.page_tokens
        own = found.pages.get(about.node, 0) if found is not None else 0
        upper = found.upper.get(about.node, 0) if found is not None else 0
        last = wish.tokens - 1  # the last token is computed in any case
        cached, donor = min(own * page, last), ""
        page_bytes = page * about.kv_bytes
        move_s = costs.move_s(upper * page_bytes, HERE) + costs.move_s((own - upper) * page_bytes, NVME)
        prefill_s = costs.prefill_s(engine, wish.tokens, cached)
        wait_s = engine.wait_s(self._now_s, prefill_s)
        best, bring_s = max(wait_s, move_s) + (1 + WORK_PRICE) * prefill_s, move_s
        after_s = 0.0
        for other in _donors(found, own, about.node):
            longer = min(other.pages * page, last)
            brought_s = move_s + max(0.0, other.ready_s - self._now_s)
            if other.node != about.node:
                way = place(about.host, about.zone, *self._places.get(other.node, ("", "")))
                brought_s += costs.move_s((other.pages - own) * page_bytes, way)
            rest_s = costs.prefill_s(engine, wish.tokens, longer)
            total_s = max(wait_s, brought_s) + (1 + WORK_PRICE) * rest_s
            if total_s < best:
                best, bring_s, prefill_s = total_s, brought_s, rest_s
                cached, donor, after_s = longer, other.node, other.ready_s
        harm_s = prefill_s * engine.running_at(self._now_s + wait_s)
        kept = min(own * page, last)
        return Computing(engine, cached, kept, donor, after_s, wait_s, bring_s, prefill_s, harm_s)

    def _answering(self, engine: FleetEngine, moment_s: float) -> Answering:
        others = engine.running_at(moment_s)
        token_s = self._costs.step_s(engine, others + 1)
        harm_s = (token_s - self._costs.step_s(engine, others)) * others * self.answer_tokens
        return Answering(engine, others + 1, token_s, harm_s)


def _fits(engine: FleetEngine, wish: RouteWish) -> bool:
    """Whether it could ever hold the request."""
    about, tokens = engine.about, wish.tokens + wish.answer_max
    if about.model != wish.model or (about.context_max and tokens > about.context_max):
        return False
    return not about.tokens_max or tokens <= about.tokens_max


def _donors(found: Matches | None, own: int, node: str) -> list[Donor]:
    """Who has, or will have, more of the prompt than its own node has now; that one itself first."""
    if found is None:
        return []
    mine = found.soon.get(node)
    others = [donor for donor in found.donors[:DONORS] if donor.node != node]
    return [donor for donor in ([mine] if mine is not None else []) + others if donor.pages > own]
