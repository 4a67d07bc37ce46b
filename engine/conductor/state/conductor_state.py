"""ConductorState: every decision of a conductor. Pure: ``handle(event)`` returns what is to be done.

A request's life: arrived -> waiting (in the queue, until an engine has room) -> sent -> decoding -> ended. While
another engine computes its prefix, which will be brought from there, the request is kept, and is sent when that is
done. A request may be refused when it arrives, or when it has waited longer than it allows. When its engine fails it
returns to the front of the queue, with the tokens generated up to then.
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

ATTEMPTS_MAX: Final = 4  # engines that may fail on one request
RETRY_MIN_S: Final = 0.1
RETRY_NOBODY_S: Final = 1.0  # while no engine is there at all
MAKES_NO_ROOM: Final = (ev.PagesReported, ev.NodeFound, ev.NodeLost, ev.ReportAsked, ev.Silent)


@dataclass(frozen=True, kw_only=True)
class ConductorRules:
    """Settings of a conductor.

    Attributes:
        policy, split: names, see ``policies``.
        window_s: seconds of prompts that an engine has before it; beyond that requests wait here, in fair shares.
        queue_bytes: memory of requests that wait here.
        index_bytes: memory of what nodes report about their pages.
        orders_bytes_per_s, orders_bytes_max: see ``Orders``.
        roles_floor: engines that stay in each role; None: roles are not changed.
        first_token_s, token_s: limits of requests that name none; 0: no limit.
        seed: seeds every random choice.
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
    """One conductor. One thread calls ``handle``; instructions are performed before the next event.

    Attributes:
        requests: those that have not ended, by number.
        queues: requests that wait, by model.
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
        self._kept: list[tuple[float, int]] = []  # a heap of (when to send, number) of requests whose engine is chosen

    def handle(self, event: ev.ConductorEvent) -> list[Instruction]:
        """Apply an event and return what is to be done now."""
        out: list[Instruction] = []
        match event:
            case ev.EngineFound():
                self.fleet.add_engine(event.about, event.role, event.now_s)
            case ev.EngineLost():
                self._lost(event)
            case ev.NodeFound():
                self.fleet.add_node(event.name, event.host, event.zone)
            case ev.NodeLost():
                self.fleet.remove_node(event.name)
                self.prefixes.forget(event.name)
            case ev.PagesReported():
                if self.prefixes.update(event.batch) != event.batch.number + 1:
                    out.append(do.RestartStream(event.batch.node))
            case ev.ReportAsked():
                self.fleet.start_report(event.engine, event.now_s)
            case ev.Reported():
                self.fleet.apply_report(event.engine, event.report, event.now_s)
                self._roles.see_order(event.report.order)
            case ev.Silent():
                self.fleet.mark_silent(event.engine)
            case ev.Arrived():
                self._arrived(event, out)
            case ev.FirstToken():
                self._first_token(event)
            case ev.Ended():
                self._ended(event)
            case ev.RequestCancelled():
                self._cancelled(event)
            case ev.Broke():
                self._broke(event, out)
            case ev.RoleRefused():
                self._role_refused(event)
            case ev.LeadershipChanged():
                self.orders.leads = event.leads
                self._roles.lead(event.revision if event.leads else None, event.now_s)
            case ev.RoleAnswered():
                self.fleet.mark_role_answered(event.engine)
            case ev.OrderEnded():
                self.orders.end(event.order)
            case ev.Ticked():
                self.prefixes.expire(event.now_s)
                if self.rules.roles_floor is not None:
                    self._change_roles(event.now_s, out)
        self._release(event.now_s, out)
        if not isinstance(event, MAKES_NO_ROOM):
            for queue in self.queues.values():
                if len(queue):
                    self._send(queue, event.now_s, out)
        return out

    def _change_roles(self, now_s: float, out: list[Instruction]) -> None:
        self._roles.keep(self.fleet.models)
        if not self._roles.may_order(now_s):
            return
        waiting = [request for request in self.requests.values() if request.phase is RequestPhase.WAITING]
        costs = [(request.model, request.cost_s, request.answer_s) for request in waiting]
        for change in self._roles.changes(list(self.fleet.engines.values()), costs, now_s):
            self.fleet.mark_role_ordered(change.engine)
            out.append(change)

    def candidates(self, request: RoutedRequest, now_s: float) -> Candidates | None:
        """What could be done with a request now; None where no engine has its model. Changes nothing."""
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

    def _request(self, event: ev.Arrived) -> RoutedRequest:
        """The record of a request that has just arrived."""
        return RoutedRequest(
            event.number,
            event.request,
            event.pages,
            event.barred,
            event.now_s,
            first_token_s=event.request.first_token_s or self.rules.first_token_s,
            token_s=event.request.token_s or self.rules.token_s,
        )

    def _arrived(self, event: ev.Arrived, out: list[Instruction]) -> None:
        request, now_s = self._request(event), event.now_s
        number, model = request.number, request.model
        table = self.fleet.table(model)
        if table is None or not table.holds(request.tokens + request.answer_max):
            out.append(do.Refuse(number, self._why_nobody(request), None if self.fleet.engines else RETRY_NOBODY_S))
            return
        candidates = self.candidates(request, now_s)
        route = self._route(candidates) if candidates is not None else None
        if candidates is not None and route is not None:
            request.cost_s = route.computing.prefill_s
            self.costs.add_prompt(model, request.cost_s)
            request.answer_s = candidates.answer_tokens * self.costs.token_s(route.answering.engine)
            self._roles.add_request(model, request.cost_s, request.answer_s, now_s)
            late = self._late(candidates, route)
            if late is not None:
                out.append(do.Refuse(number, *late))
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
        if len(queue) == 1 and self._has_room(route):  # otherwise requests before it are considered first
            self._start(queue, request, route, now_s, out)
        out += self.orders.follow(candidates, route, request.phase is RequestPhase.WAITING, self.prefixes, now_s)

    def _late(self, candidates: Candidates, route: Route) -> tuple[str, float] | None:
        """Why a request would miss its limits, by prediction, and when to retry; None: it would meet them."""
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

    def explain(self, event: ev.Arrived) -> Explanation:
        """What would become of a request that arrived now, and why: see ``explain``. Changes nothing."""
        request, names = self._request(event), (self.rules.policy, self.rules.split)
        table, candidates = self.fleet.table(request.model), self.candidates(request, event.now_s)
        if table is None or candidates is None or not table.holds(request.tokens + request.answer_max):
            return explain_refusal(request, f"It is refused: {self._why_nobody(request)}.", *names)
        route, queue = self._route(candidates), self.queues.get(request.model)
        late = self._late(candidates, route) if route is not None else None
        if late is not None:
            outcome = f"It is refused: {late[0]}; it may come back after {late[1]:.2f} s."
        elif queue:
            outcome = f"It waits behind {len(queue)} others."
        elif route is None or not self._has_room(route):
            outcome = "It waits until an engine has room."
        else:
            outcome = "It is sent at once."
        return explain_decision(candidates, table, route, outcome, *names)

    def _why_nobody(self, request: RoutedRequest) -> str:
        models = {engine.about.model for engine in self.fleet.engines.values()}
        if request.model not in models:
            return f"no engine has the model {request.model!r}" if models else "no engine is there"
        return f"no engine holds {request.tokens} tokens and an answer of {request.answer_max}"

    def _send(self, queue: Queue, now_s: float, out: list[Instruction]) -> None:
        """Send the next requests, as far as engines of their model have room."""
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
        queue.take(request)
        self._sent(request, route, now_s)
        heapq.heappush(self._kept, (route.computing.after_s, request.number))
        self._release(now_s, out)

    def _release(self, now_s: float, out: list[Instruction]) -> None:
        """Send requests that were kept until now; those whose engines have changed roles go elsewhere."""
        while self._kept and self._kept[0][0] <= now_s:
            _, number = heapq.heappop(self._kept)
            request = self.requests.get(number)
            if request is not None and request.phase is RequestPhase.KEPT and request.route is not None:
                if not self._takes(request.route):
                    self.fleet.end_request(number, request.engines, now_s)
                    self._back(request)
                    continue
                request.phase = RequestPhase.SENT
                out.append(do.Send(number, request.route, now_s - request.arrived_s))

    def _takes(self, route: Route) -> bool:
        """True while the engines of a route still do their parts, as far as is known."""
        computes, answers = route.computing.engine.about.name, route.answering.engine.about.name
        return self.fleet.takes(answers, answers=True) and (route.local or self.fleet.takes(computes, answers=False))

    def _has_room(self, route: Route) -> bool:
        return (
            route.computing.wait_s <= self.rules.window_s
            and route.answering.batch <= route.answering.engine.about.batch_max
        )

    def _sent(self, request: RoutedRequest, route: Route, now_s: float) -> None:
        number = request.number
        request.phase, request.route = RequestPhase.KEPT, route
        answer = self.costs.answer_tokens(request.tenant, request.answer_max)
        ends_s = now_s + route.first_token_s + answer * route.answering.token_s
        held = request.tokens + int(answer)
        computing, answering = route.computing, route.answering
        name, other = computing.engine.about.name, answering.engine.about.name
        self.fleet.add(name, EngineWork(number, computing.prefill_s, held, now_s, route.local, ends_s))
        ready_s = now_s + route.first_token_s
        has = computing.cached if computing.donor == computing.engine.about.node else computing.own
        self._expect(computing.engine, request, has, ready_s, now_s)
        if not route.local:
            self.fleet.add(other, EngineWork(number, 0.0, held, now_s, True, ends_s))
            self.fleet.add_egress(name, request.tokens * computing.engine.about.kv_bytes, now_s)
            self._expect(answering.engine, request, answering.own, ready_s, now_s)

    def _expect(self, engine: FleetEngine, request: RoutedRequest, has: int, ready_s: float, now_s: float) -> None:
        """Expect all of the prompt at its node, where ``has`` tokens of it are or will be anyway."""
        pages = request.pages.get(engine.about.layout)
        if pages is not None and engine.about.node:
            self.prefixes.expect(engine.about.node, pages[has // engine.about.page_tokens :], ready_s, now_s)

    def _first_token(self, event: ev.FirstToken) -> None:
        request = self.requests.get(event.number)
        if request is None or request.phase is not RequestPhase.SENT or request.route is None:
            return
        route = request.route
        request.phase = RequestPhase.DECODING
        computing = self.fleet.engines.get(route.computing.engine.about.name)
        work = computing.works.get(event.number) if computing is not None else None
        if work is not None:
            self.costs.add_first_token(route.local, event.now_s - work.sent_s - route.first_token_s)
        answer = self.costs.answer_tokens(request.tenant, request.answer_max)
        ends_s = event.now_s + answer * route.answering.token_s
        self.fleet.mark_first_token(event.number, request.engines, event.now_s, ends_s)

    def _ended(self, event: ev.Ended) -> None:
        request = self.requests.pop(event.number, None)
        if request is not None:
            self.fleet.end_request(event.number, request.engines, event.now_s, answered=True)
            self.costs.add_answer(request.tenant, event.tokens)
            engine = self.fleet.engines.get(request.route.computing.engine.about.name) if request.route else None
            if engine is not None:
                self.costs.add_prefill(engine, request.tokens, event.cached, event.prefill_s)
                self.fleet.write(engine)

    def _cancelled(self, event: ev.RequestCancelled) -> None:
        request = self.requests.pop(event.number, None)
        if request is None:
            return
        if request.phase is RequestPhase.WAITING:
            self.queues[request.model].drop(request)
        self.fleet.end_request(event.number, request.engines, event.now_s)

    def _broke(self, event: ev.Broke, out: list[Instruction]) -> None:
        """Let another engine continue from what was generated. Every request avoids the failed engine for a while."""
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
        self._back(request)

    def _role_refused(self, event: ev.RoleRefused) -> None:
        """Route the request again as if it had not been sent. Our view of its role was outdated."""
        self.fleet.mark_role_refused(event.engine)
        request = self.requests.get(event.number)
        if request is not None and request.phase in (RequestPhase.SENT, RequestPhase.DECODING):
            self.fleet.end_request(event.number, request.engines, event.now_s)
            self._back(request)

    def _lost(self, event: ev.EngineLost) -> None:
        """Report its received KV as broken to requests that wait for it. What it was to receive goes elsewhere."""
        for number in self.fleet.remove_engine(event.name):
            request = self.requests[number]
            if request.phase is RequestPhase.KEPT:
                self.fleet.end_request(number, request.engines, event.now_s)
                self._back(request)

    def _back(self, request: RoutedRequest) -> None:
        request.phase, request.route = RequestPhase.WAITING, None
        self.queues[request.model].back(request)
