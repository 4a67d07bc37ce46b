"""Conductor: performs the decisions of ``ConductorState``. All methods but ``update_members`` run on one event loop.

::

    FleetWatch ── found, lost, reports, pages ─▶ handle ─▶ ConductorState ─▶ instructions
    OpenAnswer ── arrived, first token, ended, broke ─▶       │
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
COUNT_S: Final = 1.0
LOOK_S: Final = 0.02
HASHED_AT_ONCE: Final = 1 << 15  # tokens hashed in the event loop: a few milliseconds; longer prompts use a thread

DECIDED: Final = boundary.StateGuard("state/conductor")
_ORDERING: Final = boundary.RequestGuard("task/order")

log = logging.getLogger("kvstore.conductor")


class Conductor:
    """A conductor. Its servers (HTTP, gRPC) use ``models``, ``answer`` and ``explain``, on its event loop.

    Args:
        leading: the revision with which this one leads its pool now, and gives orders; None: another one does.

    Attributes:
        tally: counts since its start.
        pages: the number of pages that nodes reported, as of the last second.
    """

    def __init__(self, config: ConductorConfig, tally: ConductorTally, leading: Callable[[], int | None]) -> None:
        self.config = config
        self.tally = tally
        self.leading = leading
        self.pages = 0
        self.membership: Callable[[], dict[str, Any]] = dict  # our place in the pool, for ``status``
        self.state = ConductorState(config.rules)
        self.members = FleetWatch(config.engine, config.backend, tally.kv_events, self.handle)
        self.members.changed([], [], [])
        self._loop = asyncio.get_running_loop()
        self._events: deque[ev.ConductorEvent] = deque()
        self._handling = False
        self._led: int | None = None
        self._counted_s = 0.0
        self._numbers = itertools.count(1)
        self._answering: dict[int, OpenAnswer] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # --- decisions --------------------------------------------------------------------------------------------------

    def handle(self, event: ev.ConductorEvent) -> None:
        """Decide about an event and perform what follows, which may be more events."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                event = self._events.popleft()
                began_s = time.perf_counter()
                with DECIDED:
                    instructions = self.state.handle(event)
                    if isinstance(event, ev.RequestArrived):
                        self.tally.decided.add(time.perf_counter() - began_s)
                    for it in instructions:
                        self._perform(it)
        finally:
            self._handling = False

    def _perform(self, it: do.Instruction) -> None:
        match it:
            case do.Send() | do.Refuse() | do.LoseRequest():
                answering = self._answering.get(it.number)
                if answering is not None:  # else its caller has just gone
                    answering.deliver(it)
            case do.SetRole():
                self._later(self._set_role(it))
            case do.RestartStream():
                self.members.restart_stream(it.node)
            case do.CopyPrefix() | do.PrefetchPrefix():
                self._later(self._bring(it))
            case _:
                raise AssertionError(f"nothing performs {it}")

    async def _set_role(self, it: do.SetRole) -> None:
        known = self.members.engines.get(it.engine)
        if known is not None and self.leading() is not None:  # checked last: leadership may have been lost since
            try:
                with _ORDERING:
                    await known.link.set_role(it.role, it.order, ORDER_S)
            except KVStoreError as error:  # its next report says what role it has
                log.warning("%s may keep its role: %s", it.engine, error)
        self.handle(ev.RoleOrderEnded(time.monotonic(), it.engine))
        self.members.look(it.engine)

    async def _bring(self, it: do.CopyPrefix | do.PrefetchPrefix) -> None:
        """Ask a node to bring pages of a request's prompt into its memory; if it cannot, nothing is lost.

        Such an order needs no revision: one from a leader that has been replaced only wastes transfers, within one
        leader's budget. Any client may make this call, and it changes nothing that other conductors rely on.
        """
        answering, link = self._answering.get(it.number), self.members.nodes.get(it.node)
        layout = next((each.layout for each in self.members.engines.values() if each.about.layout == it.layout), None)
        if answering is not None and link is not None and layout is not None and self.leading() is not None:
            request = answering.request
            tokens = request.tokens[: it.pages * layout.page_tokens]
            try:
                with _ORDERING:
                    await link.prefetch(layout, request.page_salt, request.adapter, tokens, LATE_S)
            except KVStoreError as error:
                log.debug("%s brings no pages: %s", it.node, error)
        self.handle(ev.PageOrderEnded(time.monotonic(), it.order))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- its life ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled."""
        try:
            await boundary.task_loop("task/conductor", self._turn)
        finally:
            await self.members.close()

    async def _turn(self) -> None:
        now_s = time.monotonic()
        if (leading := self.leading()) != self._led:
            self._led = leading
            self.handle(ev.LeadershipChanged(now_s, leading is not None, leading or 0))
        self.handle(ev.Ticked(now_s))
        if now_s >= self._counted_s + COUNT_S:  # it brings all changes into the index
            self.pages, self._counted_s = len(self.state.prefixes), now_s
        await asyncio.sleep(TICK_S)

    def status(self) -> dict[str, Any]:
        """What it is, what it knows, what waits, as plain values for JSON. Any thread: it only reads."""
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
            "membership": self.membership(),
        }

    def _phases(self) -> dict[RequestPhase, int]:
        counts = Counter(request.phase for request in list(self.state.requests.values()))
        return {phase: counts[phase] for phase in RequestPhase}

    def update_members(self, engines: list[EngineEntry], nodes: list[NodeEntry], clusters: list[ClusterEntry]) -> None:
        """Take the members that the catalog lists now. Any thread."""
        self._loop.call_soon_threadsafe(self.members.changed, engines, nodes, clusters)

    async def settled(self, timeout_s: float) -> None:
        """Wait at most this long until all known members have answered, so that the first decision is right."""
        until_s = time.monotonic() + timeout_s
        while not self.members.settled and time.monotonic() < until_s:
            await asyncio.sleep(LOOK_S)

    @property
    def under_way(self) -> int:
        """Requests that have not ended. Any thread."""
        return len(self._answering)

    # --- requests ---------------------------------------------------------------------------------------------------

    def models(self) -> list[ServedModel]:
        """The models that can be asked for now, by name."""
        found: dict[str, ServedModel] = {}
        for known in self.members.engines.values():
            name, context = known.about.model, known.about.context_max
            before = found.get(name)
            foreign = known.about.foreign and (before is None or before.foreign)
            if before is None or context > before.context_tokens:
                found[name] = ServedModel(name, known.model_path, context, foreign)
            else:
                found[name] = replace(before, foreign=foreign)
        return [found[name] for name in sorted(found)]

    async def answer(self, request: Request) -> AsyncGenerator[AnswerPart, None]:
        """Answer a request: ``AnswerRoute`` (again if the answer continues at another engine), ``AnswerTokens`` as
        tokens come, one ``AnswerEnd``. Closing the generator cancels the work within a second.

        Parts wait for their reader: a slow one holds up only this answer, and a bounded part of it.

        Raises:
            InvalidRequest: names the field.
            TooManyCalls: refused; ``retry_after_s``.
            Unavailable: no engine is there, or too many failed on it.
        """
        arrived = await self._arrival(request, next(self._numbers))
        explained = self.state.explain(arrived) if request.explain else {}
        answering = self._answering[arrived.number] = OpenAnswer(self, arrived.request, arrived.number, explained)
        try:
            self.handle(arrived)
            async with contextlib.aclosing(answering.parts()) as parts:
                async for part in parts:
                    yield part
        finally:
            await answering.end()
            del self._answering[arrived.number]

    async def explain(self, request: Request) -> dict[str, Any]:
        """What would be done with this request now. Changes nothing.

        Raises:
            InvalidRequest: names the field.
        """
        return self.state.explain(await self._arrival(request, 0))

    def _check(self, request: Request) -> None:
        engines = self._engines(request.model)
        if not engines:
            models = [each.name for each in self.models()]
            if not models:
                raise NodeUnavailable("no engine is there")
            raise InvalidRequest("model", f"{request.model!r} is not one of {', '.join(models)}")
        tokens, more = request.tokens, request.sampling.max_tokens
        if tokens.dtype != np.uint32 or tokens.ndim != 1 or not len(tokens):
            raise InvalidRequest("tokens", "must be non-empty uint32")
        most = max(known.about.context_max for known in engines)
        if len(tokens) + more > most:
            raise InvalidRequest("tokens", f"{len(tokens)}, and {more} more: {most} fit")
        barred = self.barred(request)
        if len(barred) == len(engines):
            raise next(iter(barred.values()))

    def barred(self, request: Request, begun: bool = False) -> dict[str, InvalidRequest]:
        """See ``Decides``."""
        found = {known.about.name: known.link.why_not(request, begun) for known in self._engines(request.model)}
        return {name: why for name, why in found.items() if why is not None}

    def _engines(self, model: str) -> list[KnownEngine]:
        return [known for known in self.members.engines.values() if known.about.model == model]

    async def _arrival(self, request: Request, number: int) -> ev.RequestArrived:
        """A request as it arrives at the decisions. Raises what ``answer`` does."""
        if request.salt is None:
            request = replace(request, salt=self.config.salt)
        self._check(request)
        kinds = {(known.about.layout, known.about.page_tokens) for known in self._engines(request.model)}

        def pages() -> dict[str, Fingerprints]:
            return {layout: _pages(request, layout, page_tokens) for layout, page_tokens in kinds}

        long = len(request.tokens) * len(kinds) > HASHED_AT_ONCE
        found = await asyncio.to_thread(pages) if long else pages()
        return ev.RequestArrived(time.monotonic(), number, request, found, tuple(self.barred(request)))


def _pages(request: Request, layout: str, page_tokens: int) -> Fingerprints:
    """Fingerprints of the prompt's full pages. They need no secret of the pool: they come from the first half of the
    keys.
    """
    keys = Keys.of(request.tokens, page_tokens, root_of(bytes.fromhex(layout), request.page_salt, request.adapter))
    return fingerprints(b"".join(keys.links))
