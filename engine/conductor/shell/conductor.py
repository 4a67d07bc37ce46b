"""Conductor: performs the decisions of ``ConductorState``.

All methods run on one event loop, except those that say "any thread"::

    FleetWatch ── members, reports, pages ─▶ handle ─▶ ConductorState ─▶ instructions
    OpenAnswer ── arrival, first token, end, failure ─▶       │
        ▲                                                     ▼
        └───────── Send, Refuse, LoseRequest ──────────── perform ── SetRole, RestartStream ──▶ engines, nodes
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import replace
from typing import Any, Final

import numpy as np

from engine.conductor.config import ConductorConfig
from engine.conductor.links import KnownEngine
from engine.conductor.shell.fleet_watch import FleetWatch
from engine.conductor.shell.metrics import ConductorTally
from engine.conductor.shell.open_answer import OpenAnswer
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.conductor_state import ConductorState
from engine.conductor.state.prefetch import LATE_S
from engine.conductor.state.roles import ORDER_S
from engine.conductor.state.routed_requests import RequestPhase
from engine.model.request import AnswerPart, Request, ServedModel
from kvstore import boundary
from kvstore.cluster.catalog.schema import ClusterEntry, EngineEntry, NodeEntry
from kvstore.errors import InvalidRequest, KVStoreError, NodeUnavailable
from kvstore.model.prefix import Fingerprints, Keys, fingerprints, root_of

TICK_S: Final = 0.02
COUNT_S: Final = 1.0  # between two counts of the pages in the index
SETTLE_POLL_S: Final = 0.02
HASHED_AT_ONCE: Final = 1 << 15  # tokens that are hashed in the event loop, in a few ms; longer prompts use a thread

GUARD: Final = boundary.StateGuard("state/conductor")
_ORDER: Final = boundary.RequestGuard("task/order")

log = logging.getLogger("kvstore.conductor")


class Conductor:
    """One conductor. The HTTP and gRPC servers call ``models``, ``answer`` and ``explain`` on its event loop.

    Args:
        leading: returns the revision with which this conductor leads its pool now; None if another conductor leads.

    Attributes:
        tally: counts since the start.
        pages: how many pages the index had, at most ``COUNT_S`` ago.
        membership: returns the conductor's membership in the catalog, for ``status``.
    """

    def __init__(self, config: ConductorConfig, tally: ConductorTally, leading: Callable[[], int | None]) -> None:
        self.config = config
        self.tally = tally
        self.leading = leading
        self.pages = 0
        self.membership: Callable[[], dict[str, Any]] = dict
        self.state = ConductorState(config.rules)
        self.members = FleetWatch(config.engine, config.backend, tally.kv_events, self.handle)
        self.members.update([], [], [])
        self._loop = asyncio.get_running_loop()
        self._events: deque[ev.ConductorEvent] = deque()
        self._handling = False
        self._revision: int | None = None  # the last value of ``leading`` that was handled
        self._counted_s = 0.0
        self._numbers = itertools.count(1)
        self._answers: dict[int, OpenAnswer] = {}  # those that have not ended, by the request's number
        self._tasks: set[asyncio.Task[None]] = set()

    # --- decisions --------------------------------------------------------------------------------------------------

    def handle(self, event: ev.ConductorEvent) -> None:
        """Decide about an event, and perform the instructions. Events that they cause are handled before it returns."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                start_s = time.perf_counter()
                with GUARD:
                    instructions = self.state.handle(event)
                    if isinstance(event, ev.RequestArrived):
                        self.tally.decided.add(time.perf_counter() - start_s)
                    for instruction in instructions:
                        self._perform(instruction)
        finally:
            self._handling = False

    def _perform(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.Send() | do.Refuse() | do.LoseRequest():
                answer = self._answers.get(instruction.number)
                if answer is not None:  # otherwise its caller has just gone
                    answer.deliver(instruction)
            case do.SetRole():
                self._start_task(self._set_role(instruction))
            case do.RestartStream():
                self.members.restart_stream(instruction.node)
            case do.CopyPrefix() | do.PrefetchPrefix():
                self._start_task(self._prefetch(instruction))
            case _:
                raise AssertionError(f"unknown instruction: {instruction}")

    async def _set_role(self, instruction: do.SetRole) -> None:
        known = self.members.engines.get(instruction.engine)
        if known is not None and self.leading() is not None:  # leadership may have been lost since the decision
            try:
                with _ORDER:
                    await known.link.set_role(instruction.role, instruction.order, ORDER_S)
            except KVStoreError as error:  # the next report has its role
                log.warning("%s may keep its role: %s", instruction.engine, error)
        self.handle(ev.RoleOrderEnded(time.monotonic(), instruction.engine))
        self.members.poll_now(instruction.engine)

    async def _prefetch(self, instruction: do.CopyPrefix | do.PrefetchPrefix) -> None:
        """Ask a node to load pages of a request's prompt into its memory. A failure loses nothing.

        This order needs no revision. Any client may make the same call, and no other conductor depends on its effect.
        An order of a replaced leader only wastes transfers, within the budget of one leader.
        """
        answer, link = self._answers.get(instruction.number), self.members.nodes.get(instruction.node)
        engines = self.members.engines.values()
        layout = next((each.layout for each in engines if each.about.layout == instruction.layout), None)
        if answer is not None and link is not None and layout is not None and self.leading() is not None:
            request = answer.request
            tokens = request.tokens[: instruction.pages * layout.page_tokens]
            try:
                with _ORDER:
                    await link.prefetch(layout, request.page_salt, request.adapter, tokens, LATE_S)
            except KVStoreError as error:
                log.debug("%s prefetches no pages: %s", instruction.node, error)
        self.handle(ev.PageOrderEnded(time.monotonic(), instruction.order))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- running ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the members and handle ticks until cancelled."""
        try:
            await boundary.task_loop("task/conductor", self._turn)
        finally:
            await self.members.close()

    async def _turn(self) -> None:
        now_s = time.monotonic()
        if (revision := self.leading()) != self._revision:
            self._revision = revision
            self.handle(ev.LeadershipChanged(now_s, revision is not None, revision or 0))
        self.handle(ev.Ticked(now_s))
        if now_s >= self._counted_s + COUNT_S:  # counting also merges recent changes into the index
            self.pages, self._counted_s = len(self.state.prefixes), now_s
        await asyncio.sleep(TICK_S)

    def status(self) -> dict[str, Any]:
        """Return the state of the conductor as plain values for JSON. Any thread: it only reads."""
        state, now_s = self.state, time.monotonic()
        engines = {
            name: {
                "address": engine.about.address,
                "model": engine.about.model,
                "role": str(engine.role),
                "role_order": engine.order._asdict(),
                "role_unsure": engine.unsure,
                "node": engine.about.node,
                "foreign": engine.about.foreign,
                "draining": engine.draining,
                "waiting": engine.waiting + engine.others_waiting,
                "running": len(engine.ends) + engine.others_running,
                "heard_ago_s": round(now_s - engine.last_seen_s, 3),
                "layout": engine.about.layout,
                "page_tokens": engine.about.page_tokens,
                "kv_bytes": engine.about.kv_bytes,
                "context_max": engine.about.context_max,
                "prefill_tokens_per_s": engine.tokens_per_s,
                "egress_bytes_per_s": engine.about.egress_bytes_per_s,
            }
            for name, engine in sorted(state.fleet.engines.copy().items())
        }
        return {
            "policy": state.rules.policy,
            "split": state.rules.split,
            "leads": self.leading() is not None,
            "revision": self.leading(),
            "engines": engines,
            "refused": dict(self.members.refused),
            "nodes": sorted(self.members.nodes),
            "pages": self.pages,
            "requests": {phase.name.lower(): count for phase, count in self._phases().items()},
            "routed": self.tally.routed,
            "role_refusals": self.tally.role_refusals,
            "answers": dict(self.tally.outcomes),
            "ttft_error": self.tally.ttft_error,
            "recent": self.tally.recent_requests(now_s),
            "membership": self.membership(),
        }

    def _phases(self) -> dict[RequestPhase, int]:
        counts = Counter(request.phase for request in list(self.state.requests.values()))
        return {phase: counts[phase] for phase in RequestPhase}

    def update_members(self, engines: list[EngineEntry], nodes: list[NodeEntry], clusters: list[ClusterEntry]) -> None:
        """Follow the members that the catalog lists now. Any thread may call this."""
        self._loop.call_soon_threadsafe(self.members.update, engines, nodes, clusters)

    async def wait_settled(self, timeout_s: float) -> None:
        """Wait at most ``timeout_s`` until all listed members have answered, so that the first decisions are good."""
        until_s = time.monotonic() + timeout_s
        while not self.members.is_settled and time.monotonic() < until_s:
            await asyncio.sleep(SETTLE_POLL_S)

    @property
    def under_way(self) -> int:
        """The number of requests that have not ended. Any thread may read this."""
        return len(self._answers)

    # --- requests ---------------------------------------------------------------------------------------------------

    def models(self) -> list[ServedModel]:
        """Return the models that engines serve now, sorted by name."""
        models: dict[str, ServedModel] = {}
        for known in self.members.engines.values():
            name, context = known.about.model, known.about.context_max
            before = models.get(name)
            foreign = known.about.foreign and (before is None or before.foreign)
            if before is None or context > before.context_tokens:
                models[name] = ServedModel(name, known.model_path, context, foreign)
            else:
                models[name] = replace(before, foreign=foreign)
        return [models[name] for name in sorted(models)]

    async def answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        """Yield the parts of an answer.

        The first part is an ``AnswerRoute``; another one comes whenever the answer continues at another engine.
        ``AnswerTokens`` follow as tokens come, and the last part is one ``AnswerEnd``. Closing the generator ends the
        work within a second. A slow reader delays only this answer, and only a bounded part of it is buffered.

        Raises:
            InvalidRequest: the request is not valid. The error names the field.
            TooManyCalls: the request is refused; ``retry_after_s`` says when to retry.
            Unavailable: there is no engine, or too many engines failed on the request.
        """
        arrival = await self._arrival(request, next(self._numbers))
        explanation = self.state.explain(arrival) if request.explain else {}
        answer = self._answers[arrival.number] = OpenAnswer(self, arrival.request, arrival.number, explanation)
        try:
            self.handle(arrival)
            async with contextlib.aclosing(answer.parts()) as parts:
                async for part in parts:
                    yield part
        finally:
            await answer.cancel()
            del self._answers[arrival.number]

    async def explain(self, request: Request) -> dict[str, Any]:
        """Return what would happen to this request now, and why. Changes no state.

        Raises:
            InvalidRequest: the request is not valid. The error names the field.
        """
        return self.state.explain(await self._arrival(request, 0))

    def _check(self, request: Request) -> None:
        """Raise the error for a request that no engine can serve."""
        engines = self._engines(request.model)
        if not engines:
            models = [each.name for each in self.models()]
            if not models:
                raise NodeUnavailable("there is no engine")
            raise InvalidRequest("model", f"{request.model!r} is not one of {', '.join(models)}")
        tokens, answer_tokens = request.tokens, request.sampling.max_tokens
        if tokens.dtype != np.uint32 or tokens.ndim != 1 or not len(tokens):
            raise InvalidRequest("tokens", "must be a non-empty array of uint32")
        most = max(known.about.context_max for known in engines)
        if len(tokens) + answer_tokens > most:
            raise InvalidRequest("tokens", f"{len(tokens)}, and {answer_tokens} more: {most} fit")
        refusals = self.refusals(request)
        if len(refusals) == len(engines):
            raise next(iter(refusals.values()))

    def refusals(self, request: Request, is_started: bool = False) -> dict[str, InvalidRequest]:
        """Return the engines that cannot serve this request, and why, by name.

        Args:
            is_started: True if the engine would have to continue an answer that another engine has started.
        """
        errors = {each.about.name: each.link.refusal(request, is_started) for each in self._engines(request.model)}
        return {name: error for name, error in errors.items() if error is not None}

    def _engines(self, model: str) -> list[KnownEngine]:
        return [known for known in self.members.engines.values() if known.about.model == model]

    async def _arrival(self, request: Request, number: int) -> ev.RequestArrived:
        """Check a request, compute its pages, and return its event. Raises the errors of ``answer``."""
        if request.salt is None:
            request = replace(request, salt=self.config.salt)
        self._check(request)
        kinds = {(known.about.layout, known.about.page_tokens) for known in self._engines(request.model)}

        def pages() -> dict[str, Fingerprints]:
            return {layout: _pages(request, layout, page_tokens) for layout, page_tokens in kinds}

        is_long = len(request.tokens) * len(kinds) > HASHED_AT_ONCE
        pages_by_layout = await asyncio.to_thread(pages) if is_long else pages()
        return ev.RequestArrived(time.monotonic(), number, request, pages_by_layout, tuple(self.refusals(request)))


def _pages(request: Request, layout: str, page_tokens: int) -> Fingerprints:
    """Return the fingerprints of the prompt's full pages.

    A fingerprint comes from the first half of a key, which does not depend on the secret of the pool.
    """
    keys = Keys.of(request.tokens, page_tokens, root_of(bytes.fromhex(layout), request.page_salt, request.adapter))
    return fingerprints(b"".join(keys.links))
