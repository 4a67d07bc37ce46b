"""Replies: the documents of OpenAI's API, and how the parts of one or several answers become one, whole or streamed.

Several answers run side by side. Among those to one prompt the first goes ahead until its first token: then the pages
of its prompt are there for the others. Nothing is queued here: a part is sent before the next one of its answer is
requested, so a client that reads slowly delays only its own answers.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from engine.conductor.http.openai_errors import refusal_of
from engine.conductor.shell.conductor import Conductor
from engine.model.request import AnswerEnd, AnswerPart, AnswerRoute, AnswerTokens, Request, Usage
from kvstore import boundary
from kvstore.errors import DeadlineExceeded, KVStoreError, Unavailable

DONE: Final = b"data: [DONE]\n\n"
REASONS: Final = {"stop": "stop", "eos": "stop", "length": "length"}

_dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass
class Choice:
    """One answer, as far as it has come. ``text``: for a reply that is not streamed."""

    texts: list[str] = field(default_factory=list)
    reason: str = ""
    usage: Usage | None = None

    def finish(self, end: AnswerEnd) -> None:
        """Mark the answer as complete. Raises Unavailable if another caller cancelled it."""
        if end.reason not in REASONS:
            raise Unavailable("the answer was cancelled before its end")
        self.reason, self.usage = REASONS[end.reason], end.usage


@dataclass
class OpenAIReply:
    """The documents of one request's reply. ``per_prompt``: the number of choices of each prompt, which are
    consecutive.
    """

    id: str
    created_s: int
    model: str
    is_chat: bool
    per_prompt: int
    include_usage: bool
    choices: list[Choice]
    routes: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kind = "chat.completion" if self.is_chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        if self.is_chat:
            head["object"] += ".chunk"  # type: ignore[operator]
        self._head = f"data: {_dumps(head)[:-1]},"
        self._tail = ',"usage":null}\n\n' if self.include_usage else "}\n\n"

    # --- streamed ---------------------------------------------------------------------------------------------------

    def opening_events(self, index: int) -> bytes:
        """The first events of a chat's choice; empty for a completion."""
        return self._event(index, '"delta":{"role":"assistant","content":""}') if self.is_chat else b""

    def text_event(self, index: int, text: str) -> bytes:
        """An event with more text of a choice."""
        said = _dumps(text)
        return self._event(index, f'"delta":{{"content":{said}}}' if self.is_chat else f'"text":{said}')

    def end_event(self, index: int) -> bytes:
        """The last event of a choice."""
        return self._event(index, '"delta":{}' if self.is_chat else '"text":""', f'"{self.choices[index].reason}"')

    def route_event(self, index: int, part: AnswerRoute) -> bytes:
        """An event without choices: where a choice goes, and why."""
        own = _dumps({"index": index, "route": part.document})
        return f'{self._head}"choices":[],"kvstore":{own}{self._tail}'.encode()

    def closing_events(self) -> bytes:
        """The events after the last choice."""
        if not self.include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{_dumps(self.usage())}}}\n\n'.encode() + DONE

    def _event(self, index: int, said: str, reason: str = "null") -> bytes:
        choice = f'{{"index":{index},{said},"logprobs":null,"finish_reason":{reason}}}'
        return f'{self._head}"choices":[{choice}]{self._tail}'.encode()

    # --- whole ------------------------------------------------------------------------------------------------------

    def whole(self) -> bytes:
        """The complete document."""
        document: dict[str, Any] = {
            "id": self.id,
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(self.choices)],
            "usage": self.usage(),
        }
        if self.routes:
            document["kvstore"] = {"routes": self.routes}
        return _dumps(document).encode()

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        said = {"message": {"role": "assistant", "content": text, "refusal": None}} if self.is_chat else {"text": text}
        return {"index": index, **said, "logprobs": None, "finish_reason": choice.reason}

    def usage(self) -> dict[str, Any]:
        """Token counts. Each prompt counts once for all its answers; cached tokens are those of its first answer."""
        found = [choice.usage for choice in self.choices if choice.usage is not None]
        first = found[:: self.per_prompt]
        prompt, completion = sum(one.prompt_tokens for one in first), sum(one.completion_tokens for one in found)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(_cached(one) for one in first)},
        }


def _cached(usage: Usage) -> int:
    """Cached tokens of the prompt, whichever engine computed the rest of it."""
    return max(_sum(usage.cached_tokens), _sum(usage.prefill_cached_tokens))


def _sum(tiers: Mapping[str, int]) -> int:
    return sum(tiers.values())


def error_event(document: Mapping[str, Any]) -> bytes:
    """The error, as an event for a client that has received the beginning of an answer."""
    return f"data: {_dumps(document)}\n\n".encode()


def models_document(names: Sequence[str], created_s: int) -> dict[str, Any]:
    """The document of ``/v1/models``."""
    return {"object": "list", "data": [model_document(name, created_s) for name in names]}


def model_document(name: str, created_s: int) -> dict[str, Any]:
    """The entry of one model."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "kvstore"}


SLACK_S = 5.0  # how far an answer may exceed its deadline, which its engine enforces

_ANSWERING = boundary.RequestGuard("http/answer", OSError)  # a client that has gone

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


async def answer_all(conductor: Conductor, requests: Sequence[Request], per_prompt: int, take: Take) -> None:
    """Get all answers. The first error ends the others. Cancelling ends all.

    Raises:
        KVStoreError: the error of the first answer that failed.
    """
    if len(requests) == 1:
        await _answer(conductor, 0, requests[0], take)
        return
    first_tokens = [asyncio.Event() for _ in requests[::per_prompt]]
    turn = asyncio.Lock()

    async def take_in_turn(index: int, part: AnswerPart) -> None:
        async with turn:
            await take(index, part)
        if not isinstance(part, AnswerRoute):
            first_tokens[index // per_prompt].set()

    async def follow(index: int, request: Request) -> None:
        if index % per_prompt:
            await first_tokens[index // per_prompt].wait()
        await _answer(conductor, index, request, take_in_turn)

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


async def _answer(conductor: Conductor, index: int, request: Request, take: Take) -> None:
    with _ANSWERING:
        async with aclosing(conductor.answer(request)) as parts:
            async for part in parts:
                await take(index, part)


async def reply_whole(conductor: Conductor, requests: Sequence[Request], reply: OpenAIReply) -> bytes:
    """Send the reply when all of it is there. Raises KVStoreError."""

    async def take(index: int, part: AnswerPart) -> None:
        choice = reply.choices[index]
        match part:
            case AnswerRoute() if requests[index].explain:
                reply.routes.append({"index": index, "route": part.document})
            case AnswerTokens():
                choice.texts.append(part.text)
            case AnswerEnd():
                choice.texts.append(part.text)
                choice.finish(part)

    await _in_time(answer_all(conductor, requests, reply.per_prompt, take), requests[0].deadline_s)
    return reply.whole()


async def reply_streamed(
    conductor: Conductor, requests: Sequence[Request], reply: OpenAIReply, stream: EventSink
) -> None:
    """Send the reply event by event. Nothing is sent before the first token: until then errors have a status.

    Raises:
        KVStoreError: before anything was sent; afterwards the last event reports the error.
    """
    held: list[bytes] = []  # a few events: where answers go
    opened: set[int] = set()

    async def take(index: int, part: AnswerPart) -> None:
        choice: Choice = reply.choices[index]
        match part:
            case AnswerRoute():
                if requests[index].explain:
                    held.append(reply.route_event(index, part))
                return
            case AnswerTokens():
                events = reply.text_event(index, part.text) if part.text else b""
            case AnswerEnd():
                choice.finish(part)
                events = reply.text_event(index, part.text) if part.text else b""
                events += reply.end_event(index)
        if index not in opened:
            opened.add(index)
            events = reply.opening_events(index) + events
        if held:
            events = b"".join((*held, events))
            held.clear()
        if events:
            await stream.send(events)

    try:
        await _in_time(answer_all(conductor, requests, reply.per_prompt, take), requests[0].deadline_s)
    except KVStoreError as error:
        if not stream.begun:
            raise
        await stream.send(error_event(refusal_of(error).document))
    else:
        await stream.send(reply.closing_events())


async def _in_time(work: Awaitable[None], deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s + SLACK_S) as limit:
            await work
    except TimeoutError:
        if limit.expired():
            raise DeadlineExceeded("the answer did not end within its deadline") from None
        raise
