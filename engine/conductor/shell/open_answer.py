"""OpenAnswer: one request, from its arrival to the end of its answer.

If an engine fails, the answer continues at another one. The tokens generated so far are sent along as part of the
prompt. Token ``i`` depends only on the seed, ``i`` and the logits, so the next engine continues as the first one would
have, and no token comes twice. A foreign engine may report no token ids. If such an engine fails after its first
token, the answer is lost.

Tokens are read from an engine as fast as the client reads them. A slow client fills the buffers of gRPC and then the
engine's mailbox, and delays no other answer.
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
from engine.model.request import AnswerEnd, AnswerPart, AnswerRoute, AnswerTokens, Finished, Request, Usage
from engine.state.admission import ROLE
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, TooManyCalls
from kvstore.server.gate import STALL_S

ROUTE_SHOWN: Final = ("policy", "computes", "answers", "donor", "wait_s", "move_s", "prefill_s")  # of recent requests
ID_BYTES: Final = 64  # of the client's request id that engines receive: they limit the length of an id

log = logging.getLogger("kvstore.conductor")

Decision = do.Send | do.Refuse | do.LoseRequest


class AnswerConductor(Protocol):
    """The parts of ``Conductor`` that an answer uses."""

    config: ConductorConfig
    tally: ConductorTally
    members: FleetWatch

    def handle(self, event: ev.ConductorEvent) -> None:
        """Decide about an event, and perform the instructions."""

    def refusals(self, request: Request, is_started: bool) -> dict[str, InvalidRequest]:
        """Return the engines that cannot serve this request, and why; see ``Conductor.refusals``."""


class OpenAnswer:
    """The answer to one request.

    Call ``parts`` to get the answer. ``deliver`` supplies the decisions about the request: where to send it, once or
    more often, or that it is refused. The answer ends with its last part, with an error, or by ``cancel``.

    Args:
        number: the conductor's number of the request.
        explanation: the explanation of its first decision, which ``AnswerRoute`` includes; empty if there is none.
    """

    def __init__(
        self, conductor: AnswerConductor, request: Request, number: int, explanation: Mapping[str, Any]
    ) -> None:
        self._conductor = conductor
        self.request = request
        self._explanation = {"explained": explanation} if explanation else {}
        self._number = number
        self._decisions: asyncio.Queue[Decision] = asyncio.Queue(1)  # a request never has two open decisions
        self._arrived_s = time.monotonic()
        self._first_s = self._second_s = 0.0
        self._ids: list[int] = []
        self._tokens = 0  # len(self._ids); more than that if an engine reports no ids
        self._attempts = 0
        self._failure = ""  # the last failure of an engine, for an error text
        self._route: Mapping[str, Any] = {}
        self._cached: Mapping[str, int] = {}
        self._ended = False

    def deliver(self, decision: Decision) -> None:
        """Pass on a decision about the request."""
        self._decisions.put_nowait(decision)

    async def cancel(self) -> None:
        """End the work, because the client has disconnected. Does nothing if the work has ended."""
        if not self._ended:
            self._record_end("cancelled")
            self._conductor.handle(ev.RequestCancelled(time.monotonic(), self._number))

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """Yield all parts of the answer. Raises the errors of ``Conductor.answer``."""
        while not self._ended:
            decision = await self._next_decision()
            match decision:
                case do.Refuse():
                    self._record_end("refused")
                    if decision.retry_s is None:  # no engine can ever answer it
                        raise InvalidRequest("tokens", decision.why)
                    raise TooManyCalls(decision.why, decision.retry_s, "refused")
                case do.LoseRequest():
                    self._record_end("failed")
                    raise NodeUnavailable(f"{decision.why}{self._failure}")
                case do.Send():
                    self._conductor.tally.routed += 1
                    rules = self._conductor.config.rules
                    self._route = route_document(decision, rules.policy, rules.split)
                    yield AnswerRoute({**self._route, **self._explanation})
                    async with contextlib.aclosing(self._parts_from(decision)) as parts:
                        async for part in parts:
                            yield part

    async def _next_decision(self) -> Decision:
        try:
            async with asyncio.timeout(max(0.0, self._remaining_s())):
                return await self._decisions.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine had room within {self.request.deadline_s:g} s") from None

    async def _parts_from(self, send: do.Send) -> AsyncGenerator[AnswerPart, None]:
        """Yield the parts that one engine sends, until the answer ends or the engine fails."""
        name = send.route.answering.engine.about.name
        known = self._conductor.members.engines.get(name)
        attempt = EngineAttempt(send, self._tokens)
        try:
            if known is None:
                raise NodeUnavailable(f"{name} has just left")
            request = await self._engine_request(send)
            if request is None:
                return
            async with contextlib.aclosing(known.link.answer(request)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        result = attempt.prefill_result(part.usage, len(self.request.tokens), known.speeds)
                        usage = part.usage
                        self._cached = usage.prefill_cached_tokens if usage.prefill_engine else usage.cached_tokens
                        self._finish(part.reason, *result)
                        yield AnswerEnd(part.reason, part.text, self._usage(part.usage, attempt))
                        return
                    attempt.add_tokens(max(1, len(part.ids)))
                    self._add_part(part, is_first=self._tokens == attempt.tokens_before)
                    yield part
                    attempt.mark_read()
            raise NodeUnavailable(f"{name} closed the stream before the end of the answer")
        except InvalidRequest as error:
            if error.field != ROLE or known is None or known.about.foreign:
                raise
            self._handle_role_refusal(name, error)
        except KVStoreError as error:
            if attempt.read_s >= STALL_S:
                raise DeadlineExceeded(f"the client read nothing for {attempt.read_s:.0f} s") from None
            if self._remaining_s() <= 0:
                raise DeadlineExceeded(f"no whole answer within {self.request.deadline_s:g} s") from None
            for end in self._handle_failure(name, error):
                yield end

    async def _engine_request(self, send: do.Send) -> Request | None:
        """Return the request for the engine that answers; None if a remote cluster failed to compute the prompt."""
        about = send.route.computing.engine.about
        self._attempts += 1
        id_prefix = self.request.id.encode()[:ID_BYTES].decode(errors="ignore")
        request = replace(
            self.request,
            id=f"{id_prefix}.{self._attempts}.{secrets.token_hex(8)}",
            tokens=np.append(self.request.tokens, np.array(self._ids, np.uint32)),
            generated=len(self._ids),
            deadline_s=self._remaining_s(),
            prefill=(),
        )
        if send.route.local or not about.egress_bytes_per_s:
            return request if send.route.local else replace(request, prefill=(about.address,))
        try:
            return replace(request, prefill=(await self._conductor.members.choose_remote_engine(about.name, request),))
        except KVStoreError as error:
            self._handle_failure(about.name, error)
            return None

    def _remaining_s(self) -> float:
        return self._arrived_s + min(self.request.deadline_s, self._conductor.config.request_s_max) - time.monotonic()

    # --- results ----------------------------------------------------------------------------------------------------

    def _add_part(self, part: AnswerTokens, is_first: bool) -> None:
        """Record a part. ``is_first``: the engine of this attempt sent nothing before it."""
        now_s, count = time.monotonic(), max(1, len(part.ids))
        if not self._tokens:
            self._first_s = now_s
            self._conductor.tally.add_first_token(now_s - self._arrived_s, self._predicted_s())
        if not self._second_s and self._tokens + count > 1:
            self._second_s = now_s
        if is_first:
            self._conductor.handle(ev.FirstToken(now_s, self._number))
        self._tokens += count
        self._ids += part.ids

    def _finish(self, reason: str, cached: int = 0, prefill_s: float = 0.0) -> None:
        tally = self._conductor.tally
        self._record_end(reason if reason in tally.outcomes else "failed")
        tally.completion_tokens += self._tokens
        tally.prompt_tokens += len(self.request.tokens)
        self._conductor.handle(ev.AnswerEnded(time.monotonic(), self._number, self._tokens, cached, prefill_s))

    def _handle_failure(self, name: str, error: KVStoreError) -> list[AnswerPart]:
        """Handle the failure of an engine. Returns the end of the answer if all its tokens have come, else nothing."""
        self._conductor.tally.broken += 1
        if 0 < self.request.sampling.max_tokens <= len(self._ids):
            self._finish("length")
            return [AnswerEnd("length", "", self._usage(Usage(prompt_tokens=len(self.request.tokens))))]
        self._failure = f" ({error})"
        lost = ""
        if self._tokens > len(self._ids):
            lost = f"{name} failed, and no engine can continue: it reported no token ids"
        barred = tuple(self._conductor.refusals(self.request, is_started=self._tokens > 0))
        self._conductor.handle(ev.EngineFailed(time.monotonic(), self._number, name, len(self._ids), barred, lost))
        return []

    def _handle_role_refusal(self, name: str, error: InvalidRequest) -> None:
        """Handle an engine whose role is not the reported one: ask it again, and send the request elsewhere."""
        log.debug("%s: %s", name, error)
        self._conductor.tally.role_refusals += 1
        self._conductor.handle(ev.RoleRefused(time.monotonic(), self._number, name))
        self._conductor.members.poll_now(name)

    def _predicted_s(self) -> float:
        """Return the predicted time from the arrival to the first token; 0 if the request was sent more than once."""
        is_first = self._attempts == 1 and self._route
        return float(self._route["waited_s"] + self._route["first_token_s"]) if is_first else 0.0

    def _record_end(self, outcome: str) -> None:
        self._ended = True
        now_s, tally = time.monotonic(), self._conductor.tally
        tally.outcomes[outcome] += 1
        tally.recent.append(
            {
                "ended_at_s": round(now_s, 3),
                "outcome": outcome,
                "model": self.request.model,
                "tenant": self.request.tenant,
                "prompt_tokens": len(self.request.tokens),
                "completion_tokens": self._tokens,
                "cached_tokens": dict(self._cached),
                "route": {name: self._route[name] for name in ROUTE_SHOWN if name in self._route},
                "predicted_ttft_s": round(self._predicted_s(), 4),
                "ttft_s": round(max(0.0, self._first_s - self._arrived_s), 4),
                "took_s": round(now_s - self._arrived_s, 4),
            }
        )

    def _usage(self, usage: Usage, attempt: EngineAttempt | None = None) -> Usage:
        """Return the usage of the last engine, with the tokens and times of the whole answer."""
        completion = self._tokens
        if attempt is not None and self._tokens > len(self._ids):  # here, parts without ids counted as one token each
            completion = attempt.tokens_before + usage.completion_tokens
        return replace(
            usage,
            prompt_tokens=len(self.request.tokens),
            completion_tokens=completion,
            ttft_ms=1e3 * max(0.0, self._first_s - self._arrived_s),
            gap_ms=1e3 * max(0.0, self._second_s - self._first_s),
        )


class EngineAttempt:
    """The times of one attempt to get the answer from an engine. It starts when the request is sent.

    Args:
        tokens_before: tokens of the answer that came from other engines before.

    Attributes:
        tokens_before: see above.
        read_s: how long the client took to read the last part.
    """

    def __init__(self, send: do.Send, tokens_before: int) -> None:
        self.tokens_before = tokens_before
        self.read_s = 0.0
        self._route = send.route
        engine = send.route.computing.engine
        self._is_alone = engine.waiting <= 1 and not engine.others_waiting  # no other prompt is queued before it
        self._sent_s = self._first_s = self._last_s = time.monotonic()
        self._tokens = self._first_tokens = 0
        self._reads_s = 0.0  # the sum of all ``read_s`` between two parts

    def add_tokens(self, tokens: int) -> None:
        """Record that a part with this many tokens has come."""
        now_s = time.monotonic()
        if not self._tokens:
            self._first_s, self._first_tokens = now_s, tokens
        else:
            self._reads_s += self.read_s
        self._tokens += tokens
        self._last_s = now_s

    def mark_read(self) -> None:
        """Record that the client has read the last part."""
        self.read_s = time.monotonic() - self._last_s

    def prefill_result(self, usage: Usage, prompt_tokens: int, speeds: MeasuredSpeed | None) -> tuple[int, float]:
        """Return how the prompt and ``tokens_before`` were computed, when the answer is complete.

        Args:
            usage: the usage that the engine reported.
            speeds: measured speeds of an engine that reports none, which are updated; None if the engine reports
            speeds.

        Returns:
            How many of these tokens were cached, and the seconds that the rest took; (0, 0) if unknown.
        """
        tokens = prompt_tokens + self.tokens_before
        if speeds is not None:
            return self._measure(usage, tokens, speeds)
        if self._route.local:
            cached = sum(usage.cached_tokens.values())
            as_routed = not usage.prefill_engine and cached + usage.computed_tokens == tokens
        else:
            cached = sum(usage.prefill_cached_tokens.values())
            as_routed = usage.prefill_engine == self._route.computing.engine.about.address
        return (cached, usage.prefill_ms / 1e3) if as_routed and cached < tokens else (0, 0.0)

    def _measure(self, usage: Usage, tokens: int, speeds: MeasuredSpeed) -> tuple[int, float]:
        if not self._tokens:
            return 0, 0.0
        speeds.add_decode(self._tokens - self._first_tokens, self._last_s - self._first_s - self._reads_s)
        if not self._is_alone:
            return 0, 0.0
        predicted = min(self._route.computing.cached, tokens - 1)
        cached = tokens - usage.computed_tokens if usage.computed_tokens else predicted
        speeds.add_prefill(tokens - cached, self._first_s - self._sent_s)
        return cached, self._first_s - self._sent_s
