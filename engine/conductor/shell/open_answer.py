"""OpenAnswer: one request, from its arrival to the end of its answer, over as many engines as it takes.

The tokens drawn so far are sent along as part of the prompt. Token ``i`` depends only on the seed, ``i`` and the
logits, so another engine with the same model continues as the first one would have, and no token comes twice. Tokens
are taken from an engine as fast as the reader takes them: a slow reader holds up gRPC, then the engine's mailbox, never
other answers. An engine that is not ours may report no token ids: if it fails after its first token, the answer is
lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from engine.conductor.config import ConductorConfig
from engine.conductor.shell.fleet_watch import FleetWatch
from engine.conductor.shell.metrics import ConductorTally
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.explain import route_document
from engine.conductor.state.measured_speed import MeasuredSpeed
from engine.conductor.state.routed_requests import Route
from engine.model.request import AnswerEnd, AnswerPart, AnswerRoute, AnswerTokens, Finished, Request, Usage
from engine.state.admission import ROLE
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, TooManyCalls
from kvstore.server.gate import STALL_S

ID_BYTES: Final = 64  # of the client's id, in the id sent to engines, which limit its length

log = logging.getLogger("kvstore.conductor")

Decision = do.Send | do.Refuse | do.LoseRequest


class Decides(Protocol):
    """The conductor, as an answer uses it."""

    config: ConductorConfig
    tally: ConductorTally
    members: FleetWatch

    def handle(self, event: ev.ConductorEvent) -> None:
        """Decide, and perform what follows."""

    def barred(self, request: Request, begun: bool) -> dict[str, InvalidRequest]:
        """Engines that cannot answer it, or cannot continue an answer that has begun, and why."""


class OpenAnswer:
    """Life: made -> arrived -> sent, once or more often -> ended, on its own or by ``end``.

    Args:
        explained: the explanation of its decision, included in where it goes.
    """

    def __init__(self, conductor: Decides, request: Request, number: int, explained: Mapping[str, Any]) -> None:
        self._conductor = conductor
        self.request = request
        self._explained = {"explained": explained} if explained else {}
        self._number = number
        self._decisions: asyncio.Queue[Decision] = asyncio.Queue(1)  # a request gets one update at a time
        self._begun_s = time.monotonic()
        self._first_s = self._second_s = 0.0
        self._ids: list[int] = []
        self._tokens = 0  # the number of tokens, or more if an engine reported no ids
        self._attempts = 0
        self._failure = ""
        self._ended = False

    def deliver(self, it: Decision) -> None:
        """Deliver a decision about it."""
        self._decisions.put_nowait(it)

    async def end(self) -> None:
        """End its work, if it has not ended: the answer is no longer wanted."""
        if not self._ended:
            self._ended = True
            self._conductor.tally.outcomes["cancelled"] += 1
            self._conductor.handle(ev.RequestCancelled(time.monotonic(), self._number))

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """All parts of the answer. Raises what ``Conductor.answer`` does."""
        while not self._ended:
            it = await self._next()
            match it:
                case do.Refuse():
                    self._close("refused")
                    if it.retry_s is None:  # it can never be answered
                        raise InvalidRequest("tokens", it.why)
                    raise TooManyCalls(it.why, it.retry_s, "refused")
                case do.LoseRequest():
                    self._close("failed")
                    raise NodeUnavailable(f"{it.why}{self._failure}")
                case do.Send():
                    self._conductor.tally.routed += 1
                    rules = self._conductor.config.rules
                    yield AnswerRoute({**route_document(it, rules.policy, rules.split), **self._explained})
                    async with contextlib.aclosing(self._from(it)) as parts:
                        async for part in parts:
                            yield part

    async def _next(self) -> Decision:
        try:
            async with asyncio.timeout(max(0.0, self._remaining_s())):
                return await self._decisions.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine had room within {self.request.deadline_s:g} s") from None

    async def _from(self, it: do.Send) -> AsyncGenerator[AnswerPart, None]:
        """The parts that one engine gives: to the end, or until it fails."""
        name = it.route.answering.engine.about.name
        known = self._conductor.members.engines.get(name)
        stay = EngineStay(it, self._tokens)
        try:
            if known is None:
                raise NodeUnavailable(f"{name} has just left")
            request = await self._request(it)
            if request is None:
                return
            async with contextlib.aclosing(known.link.answer(request)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        self._finish(part.reason, *self._prefill_result(it.route, part.usage, stay, known.speeds))
                        yield AnswerEnd(part.reason, part.text, self._usage(part.usage, stay))
                        return
                    stay.add_tokens(max(1, len(part.ids)))
                    self._count(part, first=self._tokens == stay.before)
                    yield part
                    stay.mark_read()
            raise NodeUnavailable(f"{name} closed the stream before the end of the answer")
        except InvalidRequest as error:
            if error.field != ROLE or known is None or known.about.foreign:
                raise
            self._role_refused(name, error)
        except KVStoreError as error:
            if stay.waited_s >= STALL_S:
                raise DeadlineExceeded(f"the client read nothing for {stay.waited_s:.0f} s") from None
            if self._remaining_s() <= 0:
                raise DeadlineExceeded(f"no whole answer within {self.request.deadline_s:g} s") from None
            for end in self._engine_failed(name, error):
                yield end

    def _prefill_result(
        self, route: Route, usage: Usage, stay: EngineStay, speeds: MeasuredSpeed | None
    ) -> tuple[int, float]:
        tokens = len(self.request.tokens) + stay.before
        return _prefill_result(route, usage, tokens) if speeds is None else stay.measure(usage, tokens, speeds)

    async def _request(self, it: do.Send) -> Request | None:
        """The request to the engine that answers; None: the remote cluster that was to compute the prompt cannot."""
        about = it.route.computing.engine.about
        self._attempts += 1
        shown = self.request.id.encode()[:ID_BYTES].decode(errors="ignore")
        request = replace(
            self.request,
            id=f"{shown}.{self._attempts}.{secrets.token_hex(8)}",
            tokens=np.append(self.request.tokens, np.array(self._ids, np.uint32)),
            generated=len(self._ids),
            deadline_s=self._remaining_s(),
            prefill=(),
        )
        if it.route.local or not about.egress_bytes_per_s:
            return request if it.route.local else replace(request, prefill=(about.address,))
        try:
            return replace(request, prefill=(await self._conductor.members.remote(about.name, request),))
        except KVStoreError as error:
            self._engine_failed(about.name, error)
            return None

    def _remaining_s(self) -> float:
        return self._begun_s + min(self.request.deadline_s, self._conductor.config.request_s_max) - time.monotonic()

    # --- results --------------------------------------------------------------------------------------------------

    def _count(self, part: AnswerTokens, first: bool) -> None:
        now_s, count = time.monotonic(), max(1, len(part.ids))
        if not self._tokens:
            self._first_s = now_s
            self._conductor.tally.ttft.add(now_s - self._begun_s)
        if not self._second_s and self._tokens + count > 1:
            self._second_s = now_s
        if first:
            self._conductor.handle(ev.FirstToken(now_s, self._number))
        self._tokens += count
        self._ids += part.ids

    def _finish(self, reason: str, cached: int = 0, prefill_s: float = 0.0) -> None:
        self._ended = True
        tally = self._conductor.tally
        tally.outcomes[reason if reason in tally.outcomes else "failed"] += 1
        tally.completion_tokens += self._tokens
        tally.prompt_tokens += len(self.request.tokens)
        self._conductor.handle(ev.AnswerEnded(time.monotonic(), self._number, self._tokens, cached, prefill_s))

    def _engine_failed(self, name: str, error: KVStoreError) -> list[AnswerPart]:
        """Handle the failure of the engine. Returns the end of the answer if only that was missing."""
        self._conductor.tally.broken += 1
        if 0 < self.request.sampling.max_tokens <= len(self._ids):
            self._finish("length")
            return [AnswerEnd("length", "", self._usage(Usage(prompt_tokens=len(self.request.tokens))))]
        self._failure = f" ({error})"
        lost = ""
        if self._tokens > len(self._ids):
            lost = f"{name} failed, and no engine can continue: it reported no token ids"
        barred = self._conductor.barred(self.request, begun=self._tokens > 0)
        self._conductor.handle(
            ev.EngineFailed(time.monotonic(), self._number, name, len(self._ids), tuple(barred), lost)
        )
        return []

    def _role_refused(self, name: str, error: InvalidRequest) -> None:
        """Handle a role that differs from the engine's report: ask it again, and send the request elsewhere."""
        log.debug("%s: %s", name, error)
        self._conductor.tally.role_refusals += 1
        self._conductor.handle(ev.RoleRefused(time.monotonic(), self._number, name))
        self._conductor.members.look(name)

    def _close(self, outcome: str) -> None:
        self._ended = True
        self._conductor.tally.outcomes[outcome] += 1

    def _usage(self, usage: Usage, stay: EngineStay | None = None) -> Usage:
        """The usage of the last engine, with tokens and times as measured here."""
        completion = self._tokens
        if stay is not None and self._tokens > len(self._ids):  # parts were counted: the engine's count is better
            completion = stay.before + usage.completion_tokens
        return replace(
            usage,
            prompt_tokens=len(self.request.tokens),
            completion_tokens=completion,
            ttft_ms=1e3 * max(0.0, self._first_s - self._begun_s),
            gap_ms=1e3 * max(0.0, self._second_s - self._first_s),
        )


def _prefill_result(route: Route, usage: Usage, tokens: int) -> tuple[int, float]:
    """How much of a prompt the computing engine had found, and how long it computed the rest.

    (0, 0) if not known: the prompt was computed elsewhere.
    """
    if route.local:
        cached = sum(usage.cached_tokens.values())
        right = not usage.prefill_engine and cached + usage.computed_tokens == tokens
    else:
        cached = sum(usage.prefill_cached_tokens.values())
        right = usage.prefill_engine == route.computing.engine.about.address
    return (cached, usage.prefill_ms / 1e3) if right and cached < tokens else (0, 0.0)


class EngineStay:
    """Begins when the request is sent to the engine.

    Args:
        before: tokens of the answer that had come before.

    Attributes:
        waited_s: how long it waited for its reader, after the last part.
    """

    def __init__(self, it: do.Send, before: int) -> None:
        self.before = before
        self.waited_s = 0.0
        self._cached = it.route.computing.cached
        engine = it.route.computing.engine
        self._alone = engine.waiting <= 1 and not engine.others_waiting  # no other prompt is before it there
        self._sent_s = self._first_s = self._last_s = time.monotonic()
        self._tokens = self._first_tokens = 0
        self._waits_s = 0.0

    def add_tokens(self, tokens: int) -> None:
        """Record that more tokens have come."""
        now_s = time.monotonic()
        if not self._tokens:
            self._first_s, self._first_tokens = now_s, tokens
        else:
            self._waits_s += self.waited_s
        self._tokens += tokens
        self._last_s = now_s

    def mark_read(self) -> None:
        """Record that the reader has taken them."""
        self.waited_s = time.monotonic() - self._last_s

    def measure(self, usage: Usage, tokens: int, speeds: MeasuredSpeed) -> tuple[int, float]:
        """Learn the speeds of an engine that reports none, at the end of its answer.

        Args:
            tokens: tokens that it had to have computed before its first one.

        Returns:
            How many of those were cached, and how long the rest took; (0, 0) if not known.
        """
        if not self._tokens:
            return 0, 0.0
        speeds.add_decode(self._tokens - self._first_tokens, self._last_s - self._first_s - self._waits_s)
        if not self._alone:
            return 0, 0.0
        cached = tokens - usage.computed_tokens if usage.computed_tokens else min(self._cached, tokens - 1)
        speeds.add_prefill(tokens - cached, self._first_s - self._sent_s)
        return cached, self._first_s - self._sent_s
