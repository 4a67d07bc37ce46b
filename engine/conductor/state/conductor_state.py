"""ConductorState: makes every decision of a conductor. It does no I/O: ``handle(event)`` returns instructions.

A request passes through these phases: arrived -> waiting (in the queue, until an engine has room) -> sent -> decoding
-> ended. If another engine is still computing a prefix that the request will use, the request is kept after its route
is chosen, and sent when the prefix is there.

A request is refused on arrival, or later when it has waited longer than its limit allows. If its engine fails, the
request returns to the front of the queue with the tokens that were generated up to then.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Final

from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.candidates import Candidates, Costs, Priors
from engine.conductor.state.engine_table import EngineFleet, EngineWork, FleetEngine, NumberedNames
from engine.conductor.state.explain import Explanation, explain_decision, explain_refusal
from engine.conductor.state.instructions import Instruction
from engine.conductor.state.policies import make_policy, make_split
from engine.conductor.state.prefetch import Orders
from engine.conductor.state.prefixes import Prefixes
from engine.conductor.state.roles import FleetRoles
from engine.conductor.state.routed_requests import Queue, QueueRoom, RequestPhase, Route, RoutedRequest
from kvstore.errors import TooManyCalls

ATTEMPTS_MAX: Final = 4  # a request is lost after this many engines have failed on it
RETRY_MIN_S: Final = 0.1
RETRY_WITHOUT_ENGINES_S: Final = 1.0
# After these events no engine has more room than before, so no waiting request can be sent.
MAKES_NO_ROOM: Final = (ev.PagesReported, ev.NodeFound, ev.NodeLost, ev.ReportRequested, ev.EngineSilent)


@dataclass(frozen=True, kw_only=True)
class ConductorRules:
    """The rules that decisions follow.

    Attributes:
        policy, split: names of entries in ``policies.POLICIES`` and ``policies.SPLITS``.
        window_s: an engine gets prompts for this many seconds of work at most. Further requests wait in the queue,
            and tenants are served fairly.
        queue_bytes: memory for waiting requests.
        index_bytes: memory for the reports of nodes about their pages.
        orders_bytes_per_s, orders_bytes_max: see ``Orders``.
        roles_floor: the number of engines that keep each role; None if roles never change.
        first_token_s, token_s: limits for requests that name none; 0 for no limit.
        seed: the seed of all random choices.
    """

    policy: str = "kv-centric"
    split: str = "cost"
    window_s: float = 4.0
    queue_bytes: int = 256 << 20
    index_bytes: int = 1 << 30
    orders_bytes_per_s: float = 1e9
    orders_bytes_max: int = 1 << 30
    roles_floor: int | None = None
    first_token_s: float = 0.0
    token_s: float = 0.0
    seed: int = 0
    priors: Priors = Priors()


class ConductorState:
    """The state of one conductor. One thread calls ``handle``, and performs its instructions before the next event.

    Attributes:
        requests: the requests that have not ended, by number.
        queues: the waiting requests, by model.
    """

    def __init__(self, rules: ConductorRules) -> None:
        self.rules = rules
        nodes = NumberedNames()
        self.fleet = EngineFleet(nodes, rules.priors.step_each)
        self.prefixes = Prefixes(rules.index_bytes, nodes)
        self.costs = Costs(rules.priors)
        self.queues: dict[str, Queue] = {}
        self._room = QueueRoom(rules.queue_bytes)
        self.orders = Orders(rules.orders_bytes_per_s, rules.orders_bytes_max)
        self.policy = make_policy(rules.policy, rules.seed)
        self.split = make_split(rules.split)
        self._roles = FleetRoles(rules.roles_floor)
        self.requests: dict[int, RoutedRequest] = {}
        self._kept: list[tuple[float, int]] = []  # a heap of (when to send, number) of requests in phase KEPT

    def handle(self, event: ev.ConductorEvent) -> list[Instruction]:
        """Apply an event, and return the instructions that follow from it."""
        out: list[Instruction] = []
        match event:
            case ev.EngineFound():
                self.fleet.add_engine(event.about, event.role, event.now_s)
            case ev.EngineLost():
                self._remove_engine(event)
            case ev.NodeFound():
                self.fleet.add_node(event.name, event.host, event.zone)
            case ev.NodeLost():
                self.fleet.remove_node(event.name)
                self.prefixes.forget(event.name)
            case ev.PagesReported():
                if self.prefixes.update(event.batch) != event.batch.number + 1:
                    out.append(do.RestartStream(event.batch.node))
            case ev.ReportRequested():
                self.fleet.start_report(event.engine, event.now_s)
            case ev.LoadReported():
                self.fleet.apply_report(event.engine, event.report, event.now_s)
                self._roles.see_order(event.report.order)
            case ev.EngineSilent():
                self.fleet.mark_silent(event.engine)
            case ev.RequestArrived():
                self._accept_or_refuse(event, out)
            case ev.FirstToken():
                self._mark_first_token(event)
            case ev.AnswerEnded():
                self._end_answer(event)
            case ev.RequestCancelled():
                self._cancel(event)
            case ev.EngineFailed():
                self._handle_failure(event, out)
            case ev.RoleRefused():
                self._handle_role_refusal(event)
            case ev.LeadershipChanged():
                self.orders.leads = event.leads
                self._roles.lead(event.revision if event.leads else None, event.now_s)
            case ev.RoleOrderEnded():
                self.fleet.mark_role_answered(event.engine)
            case ev.PageOrderEnded():
                self.orders.end(event.order)
            case ev.Ticked():
                self.prefixes.expire(event.now_s)
                if self.rules.roles_floor is not None:
                    self._change_roles(event.now_s, out)
        self._send_kept(event.now_s, out)
        if not isinstance(event, MAKES_NO_ROOM):
            for queue in self.queues.values():
                if len(queue):
                    self._route_waiting(queue, event.now_s, out)
        return out

    def _change_roles(self, now_s: float, out: list[Instruction]) -> None:
        self._roles.update_models(self.fleet.models)
        if not self._roles.may_order(now_s):
            return
        waiting = [request for request in self.requests.values() if request.phase is RequestPhase.WAITING]
        costs = [(request.model, request.cost_s, request.answer_s) for request in waiting]
        for change in self._roles.changes(list(self.fleet.engines.values()), costs, now_s):
            self.fleet.mark_role_ordered(change.engine)
            out.append(change)

    def candidates(self, request: RoutedRequest, now_s: float) -> Candidates | None:
        """Return the options for a request now; None if no engine has its model. Changes no state."""
        table = self.fleet.table(request.model)
        if table is None:
            return None
        at = table.usable(request.tokens + request.answer_max, request.barred, request.failed, now_s)
        matches = {layout: self.prefixes.match(pages) for layout, pages in request.pages.items()}
        return Candidates(request, table, at, matches, self.costs, self.fleet, now_s, self.rules.window_s)

    def _route(self, candidates: Candidates) -> Route | None:
        pair = self.policy.route(candidates, self.split)
        return candidates.route(*pair) if pair is not None else None

    # --- requests ---------------------------------------------------------------------------------------------------

    def _new_request(self, event: ev.RequestArrived) -> RoutedRequest:
        return RoutedRequest(
            event.number,
            event.request,
            event.pages,
            event.barred,
            event.now_s,
            first_token_s=event.request.first_token_s or self.rules.first_token_s,
            token_s=event.request.token_s or self.rules.token_s,
        )

    def _accept_or_refuse(self, event: ev.RequestArrived, out: list[Instruction]) -> None:
        request, now_s = self._new_request(event), event.now_s
        number, model = request.number, request.model
        table = self.fleet.table(model)
        if table is None or not table.holds(request.tokens + request.answer_max):
            out.append(
                do.Refuse(number, self._why_no_engine(request), None if self.fleet.engines else RETRY_WITHOUT_ENGINES_S)
            )
            return
        candidates = self.candidates(request, now_s)
        route = self._route(candidates) if candidates is not None else None
        if candidates is not None and route is not None:
            request.cost_s = route.computing.prefill_s
            self.costs.add_prompt(model, request.cost_s)
            request.answer_s = candidates.answer_tokens * self.costs.token_s(route.answering.engine)
            self._roles.add_request(model, request.cost_s, request.answer_s, now_s)
            missed_limit = self._missed_limit(candidates, route)
            if missed_limit is not None:
                out.append(do.Refuse(number, *missed_limit))
                return
        queue = self.queues.setdefault(model, Queue(self._room))
        try:
            queue.add(request)
        except TooManyCalls as full:
            out.append(do.Refuse(number, str(full), full.retry_after_s))
            return
        self.requests[number] = request
        if candidates is None or route is None:
            return
        if len(queue) == 1 and self._has_room(route):  # otherwise the requests before it go first
            self._start(queue, request, route, now_s, out)
        out += self.orders.follow(candidates, route, request.phase is RequestPhase.WAITING, self.prefixes, now_s)

    def _missed_limit(self, candidates: Candidates, route: Route) -> tuple[str, float] | None:
        """Return why a request would miss its limits and when to retry, in seconds; None if it would meet them."""
        request = candidates.request
        queue = self.queues.get(request.model)
        ahead_s = queue.ahead_s(request.tenant, route.computing.prefill_s) if queue is not None else 0.0
        first_s = ahead_s / max(1, len(candidates.engines)) + route.first_token_s
        if request.first_token_s and first_s > request.first_token_s:
            retry_s = max(RETRY_MIN_S, first_s - request.first_token_s)
            return f"the first token would come after {first_s:.2f} s", retry_s
        if request.token_s and route.answering.token_s > request.token_s:
            why = f"tokens would come every {1e3 * route.answering.token_s:.1f} ms"
            return why, max(RETRY_MIN_S, candidates.answer_tokens * route.answering.token_s)
        return None

    def explain(self, event: ev.RequestArrived) -> Explanation:
        """Explain what would happen to a request that arrived now, and why. Changes no state."""
        request, names = self._new_request(event), (self.rules.policy, self.rules.split)
        table, candidates = self.fleet.table(request.model), self.candidates(request, event.now_s)
        if table is None or candidates is None or not table.holds(request.tokens + request.answer_max):
            return explain_refusal(request, f"It is refused: {self._why_no_engine(request)}.", *names)
        route, queue = self._route(candidates), self.queues.get(request.model)
        missed_limit = self._missed_limit(candidates, route) if route is not None else None
        if missed_limit is not None:
            outcome = f"It is refused: {missed_limit[0]}; it may come back after {missed_limit[1]:.2f} s."
        elif queue:
            outcome = f"It waits behind {len(queue)} others."
        elif route is None or not self._has_room(route):
            outcome = "It waits until an engine has room."
        else:
            outcome = "It is sent at once."
        return explain_decision(candidates, table, route, outcome, *names)

    def _why_no_engine(self, request: RoutedRequest) -> str:
        models = {engine.about.model for engine in self.fleet.engines.values()}
        if request.model not in models:
            return f"no engine has the model {request.model!r}" if models else "there is no engine"
        return f"no engine holds {request.tokens} tokens and an answer of {request.answer_max}"

    def _route_waiting(self, queue: Queue, now_s: float, out: list[Instruction]) -> None:
        """Choose routes for waiting requests in order, until no engine has room for the next one."""
        while (request := queue.first()) is not None:
            waited_s = now_s - request.arrived_s
            if request.first_token_s and not request.generated and waited_s > request.first_token_s:
                queue.drop(request)
                del self.requests[request.number]
                out.append(do.Refuse(request.number, f"it has waited for {waited_s:.2f} s", RETRY_MIN_S))
                continue
            candidates = self.candidates(request, now_s)
            route = self._route(candidates) if candidates is not None else None
            if route is None or not self._has_room(route):
                return
            self._start(queue, request, route, now_s, out)

    def _start(self, queue: Queue, request: RoutedRequest, route: Route, now_s: float, out: list[Instruction]) -> None:
        queue.serve(request)
        self._record_route(request, route, now_s)
        heapq.heappush(self._kept, (route.computing.after_s, request.number))
        self._send_kept(now_s, out)

    def _send_kept(self, now_s: float, out: list[Instruction]) -> None:
        """Send the kept requests whose time has come. A request whose engines have changed roles waits again."""
        while self._kept and self._kept[0][0] <= now_s:
            _, number = heapq.heappop(self._kept)
            request = self.requests.get(number)
            if request is not None and request.phase is RequestPhase.KEPT and request.route is not None:
                if not self._roles_fit(request.route):
                    self.fleet.end_request(number, request.engines, now_s)
                    self._requeue(request)
                    continue
                request.phase = RequestPhase.SENT
                out.append(do.Send(number, request.route, now_s - request.arrived_s))

    def _roles_fit(self, route: Route) -> bool:
        """Return True if, by the last reports, the engines of a route still have the roles for their parts."""
        computing, answering = route.computing.engine.about.name, route.answering.engine.about.name
        return self.fleet.takes(answering, answers=True) and (route.local or self.fleet.takes(computing, answers=False))

    def _has_room(self, route: Route) -> bool:
        return (
            route.computing.wait_s <= self.rules.window_s
            and route.answering.batch <= route.answering.engine.about.batch_max
        )

    def _record_route(self, request: RoutedRequest, route: Route, now_s: float) -> None:
        """Add the request's work to its engines, and its pages to those that their nodes will have."""
        number = request.number
        request.phase, request.route = RequestPhase.KEPT, route
        answer_tokens = self.costs.answer_tokens(request.tenant, request.answer_max)
        ends_s = now_s + route.first_token_s + answer_tokens * route.answering.token_s
        tokens = request.tokens + int(answer_tokens)
        computing, answering = route.computing, route.answering
        name, other = computing.engine.about.name, answering.engine.about.name
        self.fleet.add(name, EngineWork(number, computing.prefill_s, tokens, now_s, route.local, ends_s))
        ready_s = now_s + route.first_token_s
        cached = computing.cached if computing.donor == computing.engine.about.node else computing.own
        self._expect(computing.engine, request, cached, ready_s, now_s)
        if not route.local:
            self.fleet.add(other, EngineWork(number, 0.0, tokens, now_s, True, ends_s))
            self.fleet.add_egress(name, request.tokens * computing.engine.about.kv_bytes, now_s)
            self._expect(answering.engine, request, answering.own, ready_s, now_s)

    def _expect(self, engine: FleetEngine, request: RoutedRequest, cached: int, ready_s: float, now_s: float) -> None:
        """Expect the prompt's pages at the engine's node, except ``cached`` tokens that are or will be there anyway."""
        pages = request.pages.get(engine.about.layout)
        if pages is not None and engine.about.node:
            self.prefixes.expect(engine.about.node, pages[cached // engine.about.page_tokens :], ready_s, now_s)

    def _mark_first_token(self, event: ev.FirstToken) -> None:
        request = self.requests.get(event.number)
        if request is None or request.phase is not RequestPhase.SENT or request.route is None:
            return
        route = request.route
        request.phase = RequestPhase.DECODING
        computing = self.fleet.engines.get(route.computing.engine.about.name)
        work = computing.works.get(event.number) if computing is not None else None
        if work is not None:
            self.costs.add_first_token(route.local, event.now_s - work.sent_s - route.first_token_s)
        answer_tokens = self.costs.answer_tokens(request.tenant, request.answer_max)
        ends_s = event.now_s + answer_tokens * route.answering.token_s
        self.fleet.mark_first_token(event.number, request.engines, event.now_s, ends_s)

    def _end_answer(self, event: ev.AnswerEnded) -> None:
        request = self.requests.pop(event.number, None)
        if request is not None:
            self.fleet.end_request(event.number, request.engines, event.now_s, answered=True)
            self.costs.add_answer(request.tenant, event.tokens)
            engine = self.fleet.engines.get(request.route.computing.engine.about.name) if request.route else None
            if engine is not None:
                self.costs.add_prefill(engine, request.tokens, event.cached, event.prefill_s)
                self.fleet.write(engine)

    def _cancel(self, event: ev.RequestCancelled) -> None:
        request = self.requests.pop(event.number, None)
        if request is None:
            return
        if request.phase is RequestPhase.WAITING:
            self.queues[request.model].drop(request)
        self.fleet.end_request(event.number, request.engines, event.now_s)

    def _handle_failure(self, event: ev.EngineFailed, out: list[Instruction]) -> None:
        """Let another engine continue after the generated tokens. All requests avoid the failed engine for a while."""
        self.fleet.mark_failed(event.engine, event.now_s)
        request = self.requests.get(event.number)
        if request is None or request.phase in (RequestPhase.WAITING, RequestPhase.KEPT):
            return
        self.fleet.end_request(event.number, request.engines, event.now_s)
        request.failed = (*request.failed, event.engine)
        if event.lost or len(request.failed) >= ATTEMPTS_MAX:
            del self.requests[event.number]
            why = event.lost or f"{ATTEMPTS_MAX} engines failed: {', '.join(request.failed)}"
            out.append(do.LoseRequest(event.number, why))
            return
        request.generated, request.barred = event.generated, event.barred or request.barred
        self._requeue(request)

    def _handle_role_refusal(self, event: ev.RoleRefused) -> None:
        """Route the request again as if it had not been sent: the engine has another role than it had reported."""
        self.fleet.mark_role_refused(event.engine)
        request = self.requests.get(event.number)
        if request is not None and request.phase in (RequestPhase.SENT, RequestPhase.DECODING):
            self.fleet.end_request(event.number, request.engines, event.now_s)
            self._requeue(request)

    def _remove_engine(self, event: ev.EngineLost) -> None:
        """Remove an engine. Its kept requests wait again. The shell reports that the sent requests failed."""
        for number in self.fleet.remove_engine(event.name):
            request = self.requests[number]
            if request.phase is RequestPhase.KEPT:
                self.fleet.end_request(number, request.engines, event.now_s)
                self._requeue(request)

    def _requeue(self, request: RoutedRequest) -> None:
        request.phase, request.route = RequestPhase.WAITING, None
        self.queues[request.model].requeue(request)
