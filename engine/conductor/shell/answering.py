"""OpenAnswer: one request, from its arrival to the end of its answer, over as many engines as it takes.

What was drawn so far goes along as part of the prompt. Token ``i`` depends on the seed, ``i`` and the logits alone, so
another engine with the same model goes on as the first one would have, and no token comes twice. Tokens are taken from
an engine as the reader takes them from here: who reads slowly holds up gRPC, then the engine's mailbox, never others.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, Final, Protocol

import numpy as np

from engine.api.wire import events_of, submit_request
from engine.conductor.config import ConductorConfig
from engine.conductor.shell.answers import Answered, AnswerPart, Ask, Drawn, Routed
from engine.conductor.shell.members import FleetMembers
from engine.conductor.shell.tally import ConductorTally
from engine.conductor.shell.telling import routed
from engine.conductor.state import events as ev
from engine.conductor.state import instructions as do
from engine.conductor.state.options import Route
from engine.model.request import Finished, Request, Token, Usage
from kvstore.errors import DeadlineExceeded, InvalidRequest, KVStoreError, NodeUnavailable, TooManyCalls
from kvstore.serving.gate import STALL_S

ID_CHARS: Final = 64  # of the client's id, in the id that engines know a request by

Told = do.Send | do.Refuse | do.LoseRequest


class Decides(Protocol):
    """The conductor, as an answer needs it."""

    config: ConductorConfig
    tally: ConductorTally
    members: FleetMembers

    def handle(self, event: ev.ConductorEvent) -> None:
        """Decide, and perform what follows."""


class OpenAnswer:
    """Life: made -> arrived -> sent, once or more often -> ended, by itself or by ``end``.

    Args:
        explained: of its decision; it is told with where it goes.
    """

    def __init__(self, conductor: Decides, ask: Ask, number: int, explained: Mapping[str, Any]) -> None:
        self._conductor = conductor
        self.ask = ask
        self._explained = {"explained": explained} if explained else {}
        self._number = number
        self._told: asyncio.Queue[Told] = asyncio.Queue(1)  # a request is told one thing at a time
        self._begun_s = time.monotonic()
        self._first_s = self._second_s = 0.0
        self._drawn: list[int] = []
        self._attempts = 0
        self._failure = ""
        self._over = False

    def told(self, it: Told) -> None:
        """What was decided about it."""
        self._told.put_nowait(it)

    async def end(self) -> None:
        """Nobody waits any more. Where it has not ended, its work does now."""
        if not self._over:
            self._over = True
            self._conductor.tally.outcomes["cancelled"] += 1
            self._conductor.handle(ev.RequestCancelled(time.monotonic(), self._number))

    async def parts(self) -> AsyncGenerator[AnswerPart, None]:
        """All parts of the answer. Raises what ``Answers.answer`` does."""
        while not self._over:
            it = await self._next()
            match it:
                case do.Refuse():
                    self._close("refused")
                    if it.retry_s is None:  # it never can be answered
                        raise InvalidRequest("tokens", it.why)
                    raise TooManyCalls(it.why, it.retry_s, "refused")
                case do.LoseRequest():
                    self._close("failed")
                    raise NodeUnavailable(f"{it.why}{self._failure}")
                case do.Send():
                    self._conductor.tally.routed += 1
                    yield Routed({**routed(it, self._conductor.config.rules), **self._explained})
                    async with contextlib.aclosing(self._from(it)) as parts:
                        async for part in parts:
                            yield part

    async def _next(self) -> Told:
        try:
            async with asyncio.timeout(max(0.0, self._left_s())):
                return await self._told.get()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine had room within {self.ask.deadline_s:g} s") from None

    async def _from(self, it: do.Send) -> AsyncGenerator[AnswerPart, None]:
        """What one engine gives: to the end, or until it breaks."""
        name = it.route.answering.engine.about.name
        known = self._conductor.members.engines.get(name)
        sent_drawn, waited_s = len(self._drawn), 0.0
        try:
            if known is None:
                raise NodeUnavailable(f"{name} has just left")
            message = submit_request(self._request(it))
            async with contextlib.aclosing(known.link.submit(message, self._left_s())) as replies:
                async for reply in replies:
                    tokens: list[Token] = []
                    for event in events_of(reply):
                        if isinstance(event, Finished):
                            took = _took(it.route, event.usage, len(self.ask.tokens) + sent_drawn)
                            self._answered(event.reason, *took)
                            yield Answered(event.reason, event.text, self._usage(event.usage))
                            return
                        assert isinstance(event, Token), event
                        tokens.append(event)
                    if tokens:
                        self._count(tokens, first=len(self._drawn) == sent_drawn)
                        given_s = time.monotonic()
                        yield Drawn(tuple(token.id for token in tokens), "".join(token.text for token in tokens))
                        waited_s = time.monotonic() - given_s
            raise NodeUnavailable(f"{name} ended the answer before its end")
        except InvalidRequest:
            raise
        except KVStoreError as error:
            if waited_s >= STALL_S:
                raise DeadlineExceeded(f"nobody took the answer for {waited_s:.0f} s") from None
            if self._left_s() <= 0:
                raise DeadlineExceeded(f"no whole answer within {self.ask.deadline_s:g} s") from None
            for part in self._broke(name, error):
                yield part

    def _request(self, it: do.Send) -> Request:
        ask, route = self.ask, it.route
        self._attempts += 1
        salt = self._conductor.config.salt if ask.salt is None else ask.salt
        return Request(
            id=f"{ask.request_id[:ID_CHARS]}.{self._attempts}.{secrets.token_hex(4)}",
            tokens=np.append(ask.tokens, np.array(self._drawn, np.uint32)),
            sampling=ask.sampling,
            salt=salt,
            adapter=ask.adapter,
            generated=len(self._drawn),
            deadline_s=self._left_s(),
            prefill=() if route.local else (route.computing.engine.about.address,),
        )

    def _left_s(self) -> float:
        return self._begun_s + min(self.ask.deadline_s, self._conductor.config.request_s_max) - time.monotonic()

    # --- what happened ----------------------------------------------------------------------------------------------

    def _count(self, tokens: list[Token], first: bool) -> None:
        now_s = time.monotonic()
        if not self._drawn:
            self._first_s = now_s
            self._conductor.tally.ttft.add(now_s - self._begun_s)
        if not self._second_s and len(self._drawn) + len(tokens) > 1:
            self._second_s = now_s
        if first:
            self._conductor.handle(ev.FirstToken(now_s, self._number))
        self._drawn += [token.id for token in tokens]

    def _answered(self, reason: str, cached: int = 0, prefill_s: float = 0.0) -> None:
        self._over = True
        tally = self._conductor.tally
        tally.outcomes[reason if reason in tally.outcomes else "failed"] += 1
        tally.completion_tokens += len(self._drawn)
        tally.prompt_tokens += len(self.ask.tokens)
        self._conductor.handle(ev.Ended(time.monotonic(), self._number, len(self._drawn), cached, prefill_s))

    def _broke(self, name: str, error: KVStoreError) -> list[AnswerPart]:
        """The engine has failed. Returns the end of the answer where nothing but that was missing."""
        self._conductor.tally.broken += 1
        if 0 < self.ask.sampling.max_tokens <= len(self._drawn):
            self._answered("length")
            return [Answered("length", "", self._usage(Usage(prompt_tokens=len(self.ask.tokens))))]
        self._failure = f" ({error})"
        self._conductor.handle(ev.Broke(time.monotonic(), self._number, name, len(self._drawn)))
        return []

    def _close(self, outcome: str) -> None:
        self._over = True
        self._conductor.tally.outcomes[outcome] += 1

    def _usage(self, usage: Usage) -> Usage:
        """The last engine's usage, with tokens and times as they were here."""
        return replace(
            usage,
            prompt_tokens=len(self.ask.tokens),
            completion_tokens=len(self._drawn),
            ttft_ms=1e3 * max(0.0, self._first_s - self._begun_s),
            gap_ms=1e3 * max(0.0, self._second_s - self._first_s),
        )


def _took(route: Route, usage: Usage, tokens: int) -> tuple[int, float]:
    """Of a prompt, how much the engine that was to compute it had found, and how long it computed the others.

    (0, 0) where that is not known: the prompt was computed elsewhere, or by an engine of an earlier version.
    """
    if route.local:
        cached = sum(usage.cached_tokens.values())
        right = not usage.prefill_engine and cached + usage.computed_tokens == tokens
    else:
        cached = sum(usage.prefill_cached_tokens.values())
        right = usage.prefill_engine == route.computing.engine.about.address
    return (cached, usage.prefill_ms / 1e3) if right and cached < tokens else (0, 0.0)
