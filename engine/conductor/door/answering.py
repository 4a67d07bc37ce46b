"""Answering: turns the parts of one or several answers into one reply, streamed or whole.

Several answers run side by side. Among those to one prompt the first goes ahead until its first token: then the pages
of its prompt are there for the others. Nothing is queued here: a part is sent before the next one of its answer is
requested, so a client that reads slowly delays only its own answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from engine.conductor.door.errors import refusal_of
from engine.conductor.door.replies import Choice, OpenAIReply, error_event
from engine.conductor.shell.answers import Answered, AnswerPart, Answers, Drawn, Routed
from engine.model.request import Request
from kvstore import boundary
from kvstore.errors import DeadlineExceeded, KVStoreError

SLACK_S = 5.0  # how far an answer may exceed its deadline, which its engine enforces

_ANSWERING = boundary.answered("http/answer", OSError)  # a client that has gone

Take = Callable[[int, AnswerPart], Awaitable[None]]
"""Called with the number of an answer and a part of it, one at a time."""


class EventSink(Protocol):
    """Receives the events of a stream."""

    @property
    def begun(self) -> bool:
        """True once the client has received something."""
        ...

    async def send(self, events: bytes) -> None:
        """Send these; waits until the connection has room."""
        ...


async def answer_all(answers: Answers, requests: Sequence[Request], per_prompt: int, take: Take) -> None:
    """Get all answers. The first error ends the others. Cancelling ends all.

    Raises:
        KVStoreError: the error of the first answer that failed.
    """
    if len(requests) == 1:
        await _answer(answers, 0, requests[0], take)
        return
    drew = [asyncio.Event() for _ in requests[::per_prompt]]
    turn = asyncio.Lock()

    async def take_in_turn(index: int, part: AnswerPart) -> None:
        async with turn:
            await take(index, part)
        if not isinstance(part, Routed):
            drew[index // per_prompt].set()

    async def follow(index: int, request: Request) -> None:
        if index % per_prompt:
            await drew[index // per_prompt].wait()
        await _answer(answers, index, request, take_in_turn)

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(follow(index, request))
    except* KVStoreError as errors:
        raise _first(errors) from None


def _first(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


async def _answer(answers: Answers, index: int, request: Request, take: Take) -> None:
    with _ANSWERING:
        async with aclosing(answers.answer(request)) as parts:
            async for part in parts:
                await take(index, part)


async def reply_whole(answers: Answers, requests: Sequence[Request], reply: OpenAIReply) -> bytes:
    """Send the reply when all of it is there. Raises KVStoreError."""

    async def take(index: int, part: AnswerPart) -> None:
        choice = reply.choices[index]
        match part:
            case Routed() if requests[index].explain:
                reply.routes.append({"index": index, "route": part.document})
            case Drawn():
                choice.texts.append(part.text)
            case Answered():
                choice.texts.append(part.text)
                choice.ended(part)

    await _in_time(answer_all(answers, requests, reply.per_prompt, take), requests[0].deadline_s)
    return reply.whole()


async def reply_streamed(answers: Answers, requests: Sequence[Request], reply: OpenAIReply, stream: EventSink) -> None:
    """Send the reply event by event. Nothing is sent before the first token: until then errors have a status.

    Raises:
        KVStoreError: before anything was sent; afterwards the last event reports the error.
    """
    held: list[bytes] = []  # a few events: where answers go
    opened: set[int] = set()

    async def take(index: int, part: AnswerPart) -> None:
        choice: Choice = reply.choices[index]
        match part:
            case Routed():
                if requests[index].explain:
                    held.append(reply.routed(index, part))
                return
            case Drawn():
                events = reply.drawn(index, part.text) if part.text else b""
            case Answered():
                choice.ended(part)
                events = reply.drawn(index, part.text) if part.text else b""
                events += reply.ended(index)
        if index not in opened:
            opened.add(index)
            events = reply.opening(index) + events
        if held:
            events = b"".join((*held, events))
            held.clear()
        if events:
            await stream.send(events)

    try:
        await _in_time(answer_all(answers, requests, reply.per_prompt, take), requests[0].deadline_s)
    except KVStoreError as error:
        if not stream.begun:
            raise
        await stream.send(error_event(refusal_of(error).document))
    else:
        await stream.send(reply.closing())


async def _in_time(work: Awaitable[None], deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s + SLACK_S) as limit:
            await work
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded("the answer did not end within its deadline") from None
        raise
