"""Candidates: for one request, what every engine could do, and when.

For every pair of an engine that computes the prompt and one that answers::

    first_token_s = max(wait, room, move) + prefill + hand-off's exposed tail
    prefill_s     = what the tokens take + a decode step of the sequences that run for each chunk of them
    token_s       = a decode step of the batch that will run when the prompt is computed

``wait`` is for the prompts before it, ``room`` for a place in the engine's batch and for the memory that the request
will hold. What is moved in comes while the request waits. A hand-off goes layer by layer during the prefill, so only
what is longer than that, and the last layer, is seen. Two further terms are not the request's own: what it costs those
that already run there, since a chunk of a prompt makes their step longer, and so does one more sequence in their batch.
The first of them counts only where tokens have no limit: sequences that keep theirs lose nothing that they asked for.

A remote cluster is an engine that computes prompts, several at a time, and whose hand-off goes through what may leave
it: behind what is to leave it already, and not at all where that is more than ``EGRESS_BURST_S`` of it. What leaves
while a prompt is computed costs that request nothing, so that an idle remote cluster looks as good as an engine here.
Yet its egress and its engines are for prompts that take long: one that takes less than ``SHORT`` of what is usual goes
there only where it would have to wait here for longer than an engine's window.

All engines are looked at together: an option is a place in arrays, and becomes an object when it is chosen.

Cost: how long a request takes at an engine. Priors come from the configuration, scales from measurements.

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
from itertools import repeat
from typing import Final, TypeVar

import numpy as np

from engine.conductor.state.engine_table import (
    EngineFleet,
    EngineTable,
    Flags,
    FleetEngine,
    Floats,
    Paces,
    Places,
    ending_by,
)
from engine.conductor.state.prefixes import Matches
from engine.conductor.state.routed_requests import Answering, Computing, Route, RoutedRequest

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

    def add_prefill(self, engine: FleetEngine, tokens: int, cached: int, measured_s: float) -> None:
        """Record how long the last ``tokens - cached`` tokens of a prompt took there; 0: not known."""
        if measured_s > 0:
            speed = engine.tokens_per_s or self.priors.prefill_tokens_per_s
            ratio = measured_s / (engine.scale * self._prefill_s(tokens, float(cached), speed))
            engine.scale = min(SCALE_MAX, max(1 / SCALE_MAX, engine.scale * ratio**SMOOTH))

    def add_first_token(self, local: bool, late_s: float) -> None:
        """Record how much later than predicted a first token came. ``local``: one engine did both."""
        late_s = max(-LATE_MAX_S, min(LATE_MAX_S, late_s))
        if local:
            self._late_s += LATE_SMOOTH * (late_s - self._late_s)
            self.handoff_s *= 1 - LATE_FORGOTTEN
        else:
            self.handoff_s = max(0.0, self.handoff_s + LATE_SMOOTH * (late_s - self._late_s))

    def add_prompt(self, model: str, prefill_s: float) -> None:
        """Record a request and how long its prompt takes. (Only for models that an engine has.)"""
        count, mean_s = self._usual_s.get(model, (0, 0.0))
        count += 1
        self._usual_s[model] = count, mean_s + (prefill_s - mean_s) * max(PREFILL_SMOOTH, 1 / count)

    def usual_prefill_s(self, model: str) -> float:
        """The mean time that prompts of this model took recently."""
        return self._usual_s.get(model, (0, 0.0))[1]

    def add_answer(self, tenant: str, tokens: int) -> None:
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


WORK_PRICE: Final = 0.5  # of a second of an engine, in seconds of waiting: a later request may need it
LAYERS: Final = 32  # of a model, for the part of a hand-off that nothing hides
SILENT_S: Final = 2.0  # how much busier others may be before a silent engine is used
LATE_S: Final = 1e9  # more than any answer takes
EGRESS_BURST_S: Final = 2.0  # see the module's docstring
SHORT: Final = 0.5


class Candidates:
    """What could be done with one request. Arrays have one entry for each engine, in the order of their names.

    Args:
        at: engines of the table that may get it.
        matches: of the prompt, by layout.
        window_s: of prompts that an engine has before it, at most, to have room for one more.

    Attributes:
        engines: as given.
        matches: as given; ``layouts``: of the engines, by the number that their column has.
        own: tokens of the prompt that the engine's own node has now.
        own_pages, upper_pages: the same in pages, and how many of them are in the node's memory.
        own_prefill_s: time to compute the prompt if only the pages of the engine's own node are used.
        cached, donor, after_s, wait_s, move_s, prefill_s, harm_s, ready_s: as of ``Computing``; ``donor``: a node's
            number, or -1.
        speeds: of prompts, in tokens per second.
        doubt_s: added to an engine's time when it is chosen, but not to predictions: the engine is silent.
        batch, token_s, answer_harm_s: as of ``Answering``; meaningless for an engine that does not answer.
        answers_s: seconds of the whole answer, including the delay it causes to other requests.
        room_s: until the engine has a place in its batch and memory for the request.
        prompts_s: until the prompt is computed, with what that costs other requests, and a price for the work itself.
        prefills, answers: places of engines that compute prompts for others, and of those that answer.
        answer_tokens: the predicted length of the answer.
    """

    def __init__(
        self,
        request: RoutedRequest,
        table: EngineTable,
        at: Places,
        matches: Mapping[str, Matches],
        costs: Costs,
        fleet: EngineFleet,
        now_s: float,
        window_s: float,
    ) -> None:
        self.request = request
        self.costs = costs
        self.matches = matches
        self.layouts = table.layouts
        self.now_s = now_s
        self._fleet, self._table, self._at = fleet, table, at
        self._window_s = window_s
        self.engines, self.columns, self._apart = table.take(at)
        self.answer_tokens = costs.answer_tokens(request.tenant, request.answer_max)
        columns, paces = self.columns, table.paces(at)
        full = columns.egress_free_s - now_s > EGRESS_BURST_S  # always False for local engines
        self._egress, self._mixed = bool(columns.egress.any()), table.mixed
        self.doubt_s = SILENT_S * columns.silent
        self.prefills = (columns.prefills > full).nonzero()[0]
        self.answers = columns.answers.nonzero()[0]
        found = [(matches[layout], number) for number, layout in enumerate(table.layouts) if layout in matches]
        running = columns.others_running + columns.running
        self._paces = paces
        self._compute(found, running)
        if self._egress:
            self.prefills = self._kept_here(self.prefills)
        horizon_s = now_s + (float(self.ready_s.min()) if len(self.engines) else 0.0)
        others = running - ending_by(self.engines, repeat(horizon_s), now_s)
        self.batch = others + 1
        self.token_s, others_s = costs.steps_s(paces, self.batch, others)
        self.answer_harm_s = (self.token_s - others_s) * others * self.answer_tokens
        harm_s = 0.0 if request.token_s else self.harm_s  # see the docstring of the module
        self.prompts_s = self.ready_s + harm_s + WORK_PRICE * self.prefill_s
        self.answers_s = self.answer_tokens * self.token_s + self.answer_harm_s

    def _kept_here(self, fit: Places) -> Places:
        """Keep only the local engines among these if the prompt is short and does not wait long: see the module's
        docstring.
        """
        here = fit[self.columns.egress[fit] == 0]
        usual_s = self.costs.usual_prefill_s(self.request.model)
        short = len(here) > 0 and self.prefill_s[here].min() < SHORT * usual_s
        return here if short and self.wait_s[here].min() <= self._window_s else fit

    # --- the computation of the prompt ------------------------------------------------------------------------------

    def _compute(self, found: list[tuple[Matches, int]], running: Floats) -> None:
        columns, costs, last = (
            self.columns,
            self.costs,
            self.request.tokens - 1,
        )  # the last token is computed in any case
        nodes = columns.node.astype(np.int64)
        pages = upper = np.zeros(len(nodes))
        mine = {layout: columns.layout == layout for _, layout in found}
        for matches, layout in found:
            told, in_memory = pages + matches.stored[nodes] * mine[layout], matches.upper is matches.stored
            upper = told if in_memory and upper is pages else upper + matches.upper[nodes] * mine[layout]
            pages = told
        self.own_pages, self.upper_pages = pages, upper
        self.own = self.cached = np.minimum(pages * columns.page_tokens, last)
        self.move_s = costs.moves_s(upper * columns.page_bytes, costs.s_per_byte[HERE])
        if upper is not pages:
            self.move_s = self.move_s + costs.moves_s((pages - upper) * columns.page_bytes, costs.s_per_byte[NVME])
        self.speeds = costs.speeds(self._paces)
        self.prefill_s = costs.prefills_s(self._paces, self.speeds, self.request.tokens, self.cached)
        wait_s = np.maximum(0.0, columns.first_done_s - self.now_s) + columns.behind_s
        wait_s = np.maximum(0.0, wait_s - (1 - 1 / columns.lanes) * self.prefill_s)
        self.room_s = self._rooms_s()
        self.wait_s = np.maximum(wait_s + columns.others_waiting * self.prefill_s, self.room_s)
        decoding = running - ending_by(self.engines, (self.now_s + self.wait_s).tolist(), self.now_s)
        (steps_s,) = costs.steps_s(self._paces, decoding)
        self._beside_s = np.where(decoding > 0, steps_s / columns.chunk_tokens, 0.0)
        self.own_prefill_s = self.prefill_s = self._prefills_s(self.cached)
        self.donor, self.after_s = np.full(len(nodes), -1), np.zeros(len(nodes))
        for matches, layout in found:
            self._bring(matches, mine[layout], nodes)
        self.harm_s = self.prefill_s * decoding
        self.ready_s = np.maximum(self.wait_s, self.move_s) + self.prefill_s

    def _rooms_s(self) -> Floats:
        """Seconds until each engine has a place in its batch and the memory that the request will hold."""
        columns, now_s = self.columns, self.now_s
        rooms_s: Floats = np.maximum(0.0, columns.place_free_s - now_s)
        lack = columns.tokens + columns.others_tokens + self.request.tokens + self.answer_tokens - columns.kv_tokens_max
        for at in (lack > 0).nonzero()[0].tolist():
            free_s = self.engines[at].memory_free_s(float(lack[at])) - now_s
            # Other callers' requests end at unknown times: this one waits here until a report says that there is room.
            rooms_s[at] = max(float(rooms_s[at]), free_s if free_s < np.inf else 2 * self._window_s)
        return rooms_s

    def _prefills_s(self, cached: Floats) -> Floats:
        """Seconds for the rest of the prompt, in steps in which the engine's sequences decode as well."""
        tokens = self.request.tokens
        return self.costs.prefills_s(self._paces, self.speeds, tokens, cached) + (tokens - cached) * self._beside_s

    def _bring(self, matches: Matches, mine: Flags, nodes: Places) -> None:
        """Wait for a longer prefix at its own node, or bring it from another one, where that pays."""
        columns, costs, own_move_s = self.columns, self.costs, self.move_s
        best_s = np.maximum(self.wait_s, self.move_s) + (1 + WORK_PRICE) * self.prefill_s

        def bring(
            may: Flags, node: Places | int, pages: Places | int, ready_s: Floats | float, moves_s: Floats
        ) -> None:
            nonlocal best_s
            longer = np.minimum(pages * columns.page_tokens, self.request.tokens - 1)
            brought_s = own_move_s + np.maximum(0.0, ready_s - self.now_s) + moves_s
            rest_s = self._prefills_s(longer)
            total_s = np.maximum(self.wait_s, brought_s) + (1 + WORK_PRICE) * rest_s
            better = may & (total_s < best_s)
            if better.any():
                best_s = np.where(better, total_s, best_s)
                self.move_s, self.prefill_s = (
                    np.where(better, brought_s, self.move_s),
                    np.where(better, rest_s, self.prefill_s),
                )
                self.cached, self.donor = np.where(better, longer, self.cached), np.where(better, node, self.donor)
                self.after_s = np.where(better, ready_s, self.after_s)

        if self._egress:
            mine = mine & (columns.egress == 0)
        soon = matches.soon[nodes]
        may = mine & (soon > self.own_pages)
        if may.any():
            bring(may, nodes, soon, matches.soon_s[nodes], np.zeros(len(nodes)))
        if self._mixed:
            mine = mine & (columns.foreign == 0)
        for donor in matches.donors:
            may = mine & (nodes != donor.node) & (donor.pages > self.own_pages)
            if may.any():
                way = costs.ways[self._table.apart(*self._fleet.place(donor.node))[self._at]]
                moves_s = costs.moves_s((donor.pages - self.own_pages) * columns.page_bytes, way)
                bring(may, donor.node, donor.pages, donor.ready_s, moves_s)

    # --- pairs ------------------------------------------------------------------------------------------------------

    def partners(self, computing: int) -> Places:
        """Engines that could answer what this one computes, except itself."""
        columns, answers = self.columns, self.answers
        fit = answers != computing
        if self._mixed:
            fit &= (columns.layout[answers] == columns.layout[computing]) & (columns.foreign[answers] == 0)
            fit &= columns.foreign[computing] == 0
        partners: Places = answers[fit]
        return partners

    def tails_s(self, computing: Places, answering: Places) -> Floats:
        """The exposed part of hand-offs from these engines to those; the arrays are broadcast against each other.

        Infinite if there can be no hand-off, because their pages differ or an engine is foreign.
        """
        columns = self.columns
        moves_s = self._tails_s(computing, answering) + self.costs.handoff_s
        tails_s: Floats = np.maximum(moves_s, self.room_s[answering] - self.ready_s[computing])
        if not self._mixed:
            return tails_s
        foreign = columns.foreign[computing] + columns.foreign[answering] > 0
        return np.where(foreign | (columns.layout[computing] != columns.layout[answering]), np.inf, tails_s)

    def _tails_s(self, computing: Places, answering: Places) -> Floats:
        columns = self.columns
        size = self.request.tokens * columns.kv_bytes[computing]
        way = self.costs.ways[self._apart[computing, answering]]
        if not self._egress:
            moves_s = self.costs.moves_s(size, way)
            return np.maximum(moves_s - self.prefill_s[computing], moves_s / LAYERS)
        egress = columns.egress[computing]
        moves_s = self.costs.moves_s(size, np.where(egress > 0, 1 / np.maximum(1.0, egress), way))
        tails_s = np.maximum(moves_s - self.prefill_s[computing], moves_s / LAYERS)
        behind_s = columns.egress_free_s[computing] - self.now_s  # until the data queued before it has left
        late_s = behind_s + moves_s - self.ready_s[computing]
        return np.where(egress > 0, np.maximum(tails_s, late_s), tails_s)

    def totals_s(self, computing: Places, answering: Places, tails_s: Floats | float) -> Floats:
        """``Route.total_s`` for each of these pairs."""
        totals_s: Floats = self.prompts_s[computing] + tails_s + self.answers_s[answering]
        return totals_s

    @property
    def node_names(self) -> list[str]:
        """The names of nodes, by number."""
        return self._fleet.nodes.names

    def with_room(self, fit: Places) -> Places:
        """The engines among these that have room; all of them if none has."""
        roomy = fit[self.wait_s[fit] <= self._window_s]
        return roomy if len(roomy) else fit

    @property
    def hurries(self) -> bool:
        """True if the request has any limit to meet."""
        return self.request.first_token_s > 0 or self.request.token_s > 0

    def late(self, first_token_s: Floats, token_s: Floats | float = 0.0) -> Floats:
        """A time above any total for pairs that miss the request's limits, otherwise 0."""
        request = self.request
        late = first_token_s > (request.first_token_s or np.inf)
        late = late | (np.asarray(token_s) > (request.token_s or np.inf))
        return np.where(late, LATE_S, 0.0)

    # --- as objects -------------------------------------------------------------------------------------------------

    def route(self, computing: int, answering: int) -> Route:
        """The route with these two engines."""
        one, other = np.array([computing]), np.array([answering])
        tails_s = self.tails_s(one, other) if computing != answering else np.zeros(1)
        total_s = float(self.totals_s(one, other, tails_s)[0])
        return Route(self.computing(computing), self.answering(answering), float(tails_s[0]), total_s)

    def computing(self, at: int) -> Computing:
        """The terms of this engine if it computes."""
        donor = int(self.donor[at])
        return Computing(
            self.engines[at],
            int(self.cached[at]),
            int(self.own[at]),
            self.node_names[donor] if donor >= 0 else "",
            float(self.after_s[at]),
            float(self.wait_s[at]),
            float(self.move_s[at]),
            float(self.prefill_s[at]),
            float(self.harm_s[at]),
        )

    def answering(self, at: int) -> Answering:
        """The terms of this engine if it answers."""
        return Answering(
            self.engines[at],
            int(self.own[at]),
            int(self.batch[at]),
            float(self.token_s[at]),
            float(self.answer_harm_s[at]),
        )
