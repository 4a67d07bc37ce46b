"""Candidates: what every engine could do with one request, and when; Costs: the predictions behind it.

For every pair of an engine that computes the prompt and one that answers::

    first_token_s = max(wait, room, move) + prefill + hand-off's exposed tail
    prefill_s     = the time of its tokens + for each chunk, a decode step of the sequences that run there
    token_s       = a decode step of the batch that will run when the prompt is computed

``wait`` is the time of the prompts queued before this one. ``room`` is the time until the engine has a place in its
batch and memory for the request. Pages are moved in while the request waits. A hand-off goes layer by layer during the
prefill: only the time by which it exceeds the prefill, or that of the last layer, is exposed.

Two further terms are costs to other requests. A chunk of a prompt makes each step of the running sequences longer, and
so does one more sequence in their batch. The first term counts only for a request without a limit on the time per
token.

A remote cluster appears as one engine that computes several prompts at a time. Its hand-offs share the bandwidth that
may leave the cluster: each waits for the data queued before it, and the cluster gets no request while more than
``EGRESS_BURST_S`` of data is queued. Data that leaves while a prompt is computed delays nothing, so an idle remote
cluster looks as good as a local engine. Remote
clusters are kept for long prompts: a prompt that needs less than the fraction ``SHORT`` of the usual time goes there
only if the local wait exceeds ``window_s``.

All engines are compared at once, in arrays; the chosen pair alone becomes objects.

The time to compute ``n`` tokens when ``c`` tokens before them are cached::

    prefill_s = fixed_s + n / tokens_per_s * (1 + (c + n / 2) / context_even)

``context_even`` is the context at which attention costs as much as everything else. The cost of a token is linear in
its position, so ``n`` tokens cost ``n`` times as much as the middle one. A decode step of a batch::

    step_s = alone_s * (1 + batch * each)

The constants come from the configuration. Each engine also has a measured scale: how much longer its prompts take than
predicted, as a geometric mean, so that one outlier counts little. Speeds that engines report replace the configured
ones. ``Paces`` removes the noise of these measurements.

A hand-off takes longer than its bytes predict: it adds a second queue, and a second step before the first token. The
extra time is measured by comparing first tokens after a hand-off with those of engines that do both::

    handoff_s += LATE_SMOOTH * (late_s of this hand-off - the usual late_s without one)

The extra time decays slowly, so that hand-offs are tried again.
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
SCALE_MAX: Final = 8.0  # the largest slowdown that is assumed for one engine
ANSWER_SMOOTH: Final = 0.02
TENANTS_MAX: Final = 4096  # tenants whose answers are remembered
PREFILL_SMOOTH: Final = 0.02
LATE_SMOOTH: Final = 0.05
LATE_MAX_S: Final = 1.0  # a larger lateness counts as this much
LATE_FORGOTTEN: Final = 0.002  # fraction of handoff_s that decays with each answer without a hand-off
ANSWER_TOKENS: Final = 256.0  # assumed length of an answer until some have ended

Number = TypeVar("Number", float, Floats)

HERE, NVME, HOST, ZONE, FAR = "here", "nvme", "host", "zone", "far"


@dataclass(frozen=True, kw_only=True)
class Priors:
    """The values assumed for an engine and for the paths between engines, until they are measured.

    Attributes:
        bytes_per_s: by the place of the pages: in the memory of the engine's own node, on its NVMe, on another node of
            the host, of the zone, or further away.
        move_s: the shortest time that a move of pages takes.
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
    """Predictions, and the measured values that they use. Methods that take ``paces`` predict for all engines at once.

    Attributes:
        s_per_byte: the inverse of ``Priors.bytes_per_s``.
        ways: seconds per byte of a move between nodes, by ``Distances``.
        handoff_s: the extra time of a hand-off; see the module's docstring.
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
        """Return the prompt tokens per second of engines: as reported, or the mean of the others."""
        return _complete(paces.tokens_per_s, self.priors.prefill_tokens_per_s)

    def prefills_s(self, paces: Paces, speeds: Floats, tokens: int, cached: Floats) -> Floats:
        """Return the seconds to compute the last ``tokens - cached`` tokens of a prompt."""
        return self._prefill_s(tokens, cached, speeds) * paces.scale

    def _prefill_s(self, tokens: int, cached: Number, speed: Number) -> Number:
        context = 2 * self.priors.context_even
        return self.priors.prefill_fixed_s + (tokens - cached) / speed * (cached / context + (1 + tokens / context))

    def steps_s(self, paces: Paces, *batches: Floats) -> list[Floats]:
        """Return the seconds of a decode step: one array of times for each array of batch sizes."""
        alone_s = _complete(paces.alone_s, self.priors.step_alone_s)
        return [alone_s * (1 + batch * self.priors.step_each) for batch in batches]

    def token_s(self, engine: FleetEngine) -> float:
        """Return the step time of a full batch, divided by the batch size."""
        each, batch = self.priors.step_each, engine.about.batch_max
        alone = engine.alone_s or self.priors.step_alone_s
        return alone * (1 + batch * each) / batch

    def moves_s(self, size: Floats, s_per_byte: Floats | float) -> Floats:
        """Return the seconds to move ``size`` bytes."""
        return (size > 0) * self.priors.move_s + size * s_per_byte

    # --- learning ---------------------------------------------------------------------------------------------------

    def add_prefill(self, engine: FleetEngine, tokens: int, cached: int, measured_s: float) -> None:
        """Record how long the engine took for the last ``tokens - cached`` tokens of a prompt; 0 s if unknown."""
        if measured_s > 0:
            speed = engine.tokens_per_s or self.priors.prefill_tokens_per_s
            ratio = measured_s / (engine.scale * self._prefill_s(tokens, float(cached), speed))
            engine.scale = min(SCALE_MAX, max(1 / SCALE_MAX, engine.scale * ratio**SMOOTH))

    def add_first_token(self, local: bool, late_s: float) -> None:
        """Record how much later than predicted a first token came. ``local``: without a hand-off."""
        late_s = max(-LATE_MAX_S, min(LATE_MAX_S, late_s))
        if local:
            self._late_s += LATE_SMOOTH * (late_s - self._late_s)
            self.handoff_s *= 1 - LATE_FORGOTTEN
        else:
            self.handoff_s = max(0.0, self.handoff_s + LATE_SMOOTH * (late_s - self._late_s))

    def add_prompt(self, model: str, prefill_s: float) -> None:
        """Record the predicted time of a request's prompt. The model must be one that an engine serves."""
        count, mean_s = self._usual_s.get(model, (0, 0.0))
        count += 1
        self._usual_s[model] = count, mean_s + (prefill_s - mean_s) * max(PREFILL_SMOOTH, 1 / count)

    def usual_prefill_s(self, model: str) -> float:
        """Return the mean predicted time of recent prompts of this model, in seconds."""
        return self._usual_s.get(model, (0, 0.0))[1]

    def add_answer(self, tenant: str, tokens: int) -> None:
        """Record the length of an answer, in tokens."""
        before = self._answer_tokens.pop(tenant, ANSWER_TOKENS)
        if len(self._answer_tokens) >= TENANTS_MAX:
            del self._answer_tokens[next(iter(self._answer_tokens))]  # the tenant whose last answer is oldest
        self._answer_tokens[tenant] = before + ANSWER_SMOOTH * (tokens - before)

    def answer_tokens(self, tenant: str, tokens_max: int) -> float:
        """Return how many tokens the next answer to this tenant will have, by prediction."""
        return min(float(tokens_max), self._answer_tokens.get(tenant, ANSWER_TOKENS))


def _complete(reported: Floats, prior: float) -> Floats:
    """Return the reported values. An engine without one gets the mean of the others, or ``prior`` if there are none."""
    known = reported > 0
    if known.all():
        return reported
    return np.where(known, reported, reported[known].mean() if known.any() else prior)


# The price of one second of engine time, in seconds of waiting: a later request may need that time.
WORK_PRICE: Final = 0.5
LAYERS: Final = 32  # layers assumed for a model: the last one of a hand-off is always exposed
SILENT_S: Final = 2.0  # a silent engine is used only if the others would be later by more than this
LATE_S: Final = 1e9  # longer than any answer takes
EGRESS_BURST_S: Final = 2.0  # see the module's docstring
SHORT: Final = 0.5


class Candidates:
    """The options for one request. Arrays have one entry for each engine, in the order of the engines' names.

    Args:
        at: engines of the table that may get the request.
        matches: stored prefixes of the prompt, by layout.
        window_s: an engine has room for one more prompt while its queue is no longer than this.

    Attributes:
        engines: the engines at ``at``.
        matches: see above.
        layouts: layouts of the engines; ``columns.layout`` is an index into it.
        own: tokens of the prompt that the engine's own node stores now.
        own_pages: pages of the prompt that the node stores now.
        upper_pages: how many of ``own_pages`` are in the node's memory.
        own_prefill_s: time to compute the prompt if only the pages of the engine's own node are used.
        cached, after_s, wait_s, move_s, prefill_s, harm_s, ready_s: see ``Computing``.
        donor: see ``Computing``, as a node's number; -1 if there is none.
        speeds: prompt tokens per second.
        doubt_s: added to the time of a silent engine when engines are compared; not part of predictions.
        batch, token_s, answer_harm_s: see ``Answering``; meaningless for an engine that is not responding.
        answers_s: seconds of the complete answer, plus the delay that it causes to other requests.
        room_s: seconds until the engine has a place in its batch and memory for the request.
        prompts_s: seconds until the prompt is computed, plus the delay that this causes to other requests and
            ``WORK_PRICE`` of the work itself.
        prefills: indices of engines that compute prompts for other engines.
        answers: indices of engines that answer.
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
        usable = [(matches[layout], number) for number, layout in enumerate(table.layouts) if layout in matches]
        running = columns.others_running + columns.running
        self._paces = paces
        self._compute(usable, running)
        if self._egress:
            self.prefills = self._without_egress(self.prefills)
        horizon_s = now_s + (float(self.ready_s.min()) if len(self.engines) else 0.0)
        others = running - ending_by(self.engines, repeat(horizon_s), now_s)
        self.batch = others + 1
        self.token_s, others_s = costs.steps_s(paces, self.batch, others)
        self.answer_harm_s = (self.token_s - others_s) * others * self.answer_tokens
        harm_s = 0.0 if request.token_s else self.harm_s  # see the module's docstring
        self.prompts_s = self.ready_s + harm_s + WORK_PRICE * self.prefill_s
        self.answers_s = self.answer_tokens * self.token_s + self.answer_harm_s

    def _without_egress(self, places: Places) -> Places:
        """Exclude remote clusters if the prompt is short and waits no longer than the window here."""
        here = places[self.columns.egress[places] == 0]
        usual_s = self.costs.usual_prefill_s(self.request.model)
        short = len(here) > 0 and self.prefill_s[here].min() < SHORT * usual_s
        return here if short and self.wait_s[here].min() <= self._window_s else places

    # --- the computation of the prompt ------------------------------------------------------------------------------

    def _compute(self, usable: list[tuple[Matches, int]], running: Floats) -> None:
        columns, costs = self.columns, self.costs
        last = self.request.tokens - 1  # the last token is always computed
        nodes = columns.node.astype(np.int64)
        pages = upper = np.zeros(len(nodes))
        has_layout = {layout: columns.layout == layout for _, layout in usable}
        for matches, layout in usable:
            stored, in_memory = pages + matches.stored[nodes] * has_layout[layout], matches.upper is matches.stored
            upper = stored if in_memory and upper is pages else upper + matches.upper[nodes] * has_layout[layout]
            pages = stored
        self.own_pages, self.upper_pages = pages, upper
        self.own = self.cached = np.minimum(pages * columns.page_tokens, last)
        self.move_s = costs.moves_s(upper * columns.page_bytes, costs.s_per_byte[HERE])
        if upper is not pages:
            self.move_s = self.move_s + costs.moves_s((pages - upper) * columns.page_bytes, costs.s_per_byte[NVME])
        self.speeds = costs.speeds(self._paces)
        self.prefill_s = costs.prefills_s(self._paces, self.speeds, self.request.tokens, self.cached)
        wait_s = np.maximum(0.0, columns.first_done_s - self.now_s) + columns.queued_s
        wait_s = np.maximum(0.0, wait_s - (1 - 1 / columns.lanes) * self.prefill_s)
        self.room_s = self._rooms_s()
        self.wait_s = np.maximum(wait_s + columns.others_waiting * self.prefill_s, self.room_s)
        decoding = running - ending_by(self.engines, (self.now_s + self.wait_s).tolist(), self.now_s)
        (steps_s,) = costs.steps_s(self._paces, decoding)
        self._chunk_share_s = np.where(decoding > 0, steps_s / columns.chunk_tokens, 0.0)
        self.own_prefill_s = self.prefill_s = self._prefills_s(self.cached)
        self.donor, self.after_s = np.full(len(nodes), -1), np.zeros(len(nodes))
        for matches, layout in usable:
            self._plan_transfer(matches, has_layout[layout], nodes)
        self.harm_s = self.prefill_s * decoding
        self.ready_s = np.maximum(self.wait_s, self.move_s) + self.prefill_s

    def _rooms_s(self) -> Floats:
        """Return the seconds until each engine has a place in its batch and the memory for the request."""
        columns, now_s = self.columns, self.now_s
        rooms_s: Floats = np.maximum(0.0, columns.place_free_s - now_s)
        lack = columns.tokens + columns.others_tokens + self.request.tokens + self.answer_tokens - columns.kv_tokens_max
        for at in (lack > 0).nonzero()[0].tolist():
            free_s = self.engines[at].memory_free_s(float(lack[at])) - now_s
            # Requests of other callers end at unknown times: this request waits until a report shows room.
            rooms_s[at] = max(float(rooms_s[at]), free_s if free_s < np.inf else 2 * self._window_s)
        return rooms_s

    def _prefills_s(self, cached: Floats) -> Floats:
        """Return the seconds to compute the tokens that are not cached, in steps that also decode sequences."""
        tokens = self.request.tokens
        return self.costs.prefills_s(self._paces, self.speeds, tokens, cached) + (tokens - cached) * self._chunk_share_s

    def _plan_transfer(self, matches: Matches, eligible: Flags, nodes: Places) -> None:
        """Plan to get a longer prefix, where that saves time.

        An engine can wait until its own node has the prefix, or load it from another node.

        Args:
            eligible: the engines with the layout of ``matches``.
            nodes: the node of each engine.
        """
        columns, costs, own_move_s = self.columns, self.costs, self.move_s
        best_s = np.maximum(self.wait_s, self.move_s) + (1 + WORK_PRICE) * self.prefill_s

        def consider(
            may: Flags, node: Places | int, pages: Places | int, ready_s: Floats | float, moves_s: Floats
        ) -> None:
            nonlocal best_s
            longer = np.minimum(pages * columns.page_tokens, self.request.tokens - 1)
            moved_s = own_move_s + np.maximum(0.0, ready_s - self.now_s) + moves_s
            rest_s = self._prefills_s(longer)
            total_s = np.maximum(self.wait_s, moved_s) + (1 + WORK_PRICE) * rest_s
            better = may & (total_s < best_s)
            if better.any():
                best_s = np.where(better, total_s, best_s)
                self.move_s, self.prefill_s = (
                    np.where(better, moved_s, self.move_s),
                    np.where(better, rest_s, self.prefill_s),
                )
                self.cached, self.donor = np.where(better, longer, self.cached), np.where(better, node, self.donor)
                self.after_s = np.where(better, ready_s, self.after_s)

        if self._egress:
            eligible = eligible & (columns.egress == 0)
        soon = matches.soon[nodes]
        may = eligible & (soon > self.own_pages)
        if may.any():
            consider(may, nodes, soon, matches.soon_s[nodes], np.zeros(len(nodes)))
        if self._mixed:
            eligible = eligible & (columns.foreign == 0)
        for donor in matches.donors:
            may = eligible & (nodes != donor.node) & (donor.pages > self.own_pages)
            if may.any():
                way = costs.ways[self._table.apart(*self._fleet.place(donor.node))[self._at]]
                moves_s = costs.moves_s((donor.pages - self.own_pages) * columns.page_bytes, way)
                consider(may, donor.node, donor.pages, donor.ready_s, moves_s)

    # --- pairs ------------------------------------------------------------------------------------------------------

    def partners(self, computing: int) -> Places:
        """Return the other engines that could answer a request whose prompt this engine computes."""
        columns, answers = self.columns, self.answers
        can_answer = answers != computing
        if self._mixed:
            can_answer &= (columns.layout[answers] == columns.layout[computing]) & (columns.foreign[answers] == 0)
            can_answer &= columns.foreign[computing] == 0
        partners: Places = answers[can_answer]
        return partners

    def tails_s(self, computing: Places, answering: Places) -> Floats:
        """Return the seconds of hand-offs that the prefill does not hide. The two arrays are broadcast.

        The result is infinite if no hand-off is possible, because the layouts differ or an engine is foreign.
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
        egress_wait_s = columns.egress_free_s[computing] - self.now_s  # for the data queued before it
        late_s = egress_wait_s + moves_s - self.ready_s[computing]
        return np.where(egress > 0, np.maximum(tails_s, late_s), tails_s)

    def totals_s(self, computing: Places, answering: Places, tails_s: Floats | float) -> Floats:
        """Return ``Route.total_s`` for each pair."""
        totals_s: Floats = self.prompts_s[computing] + tails_s + self.answers_s[answering]
        return totals_s

    @property
    def node_names(self) -> list[str]:
        """The names of nodes, by number."""
        return self._fleet.nodes.names

    def with_room(self, places: Places) -> Places:
        """Return the engines that have room; all of ``places`` if none has."""
        with_room = places[self.wait_s[places] <= self._window_s]
        return with_room if len(with_room) else places

    @property
    def hurries(self) -> bool:
        """True if the request limits the time to its first token or the time per token."""
        return self.request.first_token_s > 0 or self.request.token_s > 0

    def late_penalties_s(self, first_token_s: Floats, token_s: Floats | float = 0.0) -> Floats:
        """Return ``LATE_S`` for each pair that misses a limit of the request, and 0 for the others."""
        request = self.request
        late = first_token_s > (request.first_token_s or np.inf)
        late = late | (np.asarray(token_s) > (request.token_s or np.inf))
        return np.where(late, LATE_S, 0.0)

    # --- objects ----------------------------------------------------------------------------------------------------

    def route(self, computing: int, answering: int) -> Route:
        """Return the route of this pair. Both indices may be the same."""
        one, other = np.array([computing]), np.array([answering])
        tails_s = self.tails_s(one, other) if computing != answering else np.zeros(1)
        total_s = float(self.totals_s(one, other, tails_s)[0])
        return Route(self.computing(computing), self.answering(answering), float(tails_s[0]), total_s)

    def computing(self, at: int) -> Computing:
        """Return the predicted terms if this engine computes the prompt."""
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
        """Return the predicted terms if this engine answers."""
        return Answering(
            self.engines[at],
            int(self.own[at]),
            int(self.batch[at]),
            float(self.token_s[at]),
            float(self.answer_harm_s[at]),
        )
