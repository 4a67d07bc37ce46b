"""Replies: gets the answers to a request, and sends them as documents of OpenAI's API, whole or streamed.

Several answers run at the same time. The later answers to a prompt wait until its first answer has a token. They then
find the pages of the prompt stored. No part is queued: a part is sent before the next part of its answer is requested.
A client that reads slowly therefore delays only its own answers.
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
    """One answer, with the parts received so far.

    Attributes:
        texts: the parts of its text, if the reply is not streamed.
        reason: why it ended, in OpenAI's words; empty if it has not ended.
    """

    texts: list[str] = field(default_factory=list)
    reason: str = ""
    usage: Usage | None = None

    def finish(self, end: AnswerEnd) -> None:
        """Record the end of the answer. Raises Unavailable if another caller cancelled it."""
        if end.reason not in REASONS:
            raise Unavailable("the answer was cancelled before its end")
        self.reason, self.usage = REASONS[end.reason], end.usage


@dataclass
class OpenAIReply:
    """The documents of the reply to one request.

    Attributes:
        per_prompt: how many choices each prompt has. The choices of one prompt are consecutive.
        routes: the documents of the choices' routes, if the request wants them.
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
        """Return the first event of a choice of a chat; empty for a completion."""
        return self._event(index, '"delta":{"role":"assistant","content":""}') if self.is_chat else b""

    def text_event(self, index: int, text: str) -> bytes:
        """Return an event with more text of a choice."""
        value = _dumps(text)
        return self._event(index, f'"delta":{{"content":{value}}}' if self.is_chat else f'"text":{value}')

    def end_event(self, index: int) -> bytes:
        """Return the last event of a choice."""
        return self._event(index, '"delta":{}' if self.is_chat else '"text":""', f'"{self.choices[index].reason}"')

    def route_event(self, index: int, part: AnswerRoute) -> bytes:
        """Return an event that says where a choice is computed, and why. It has no choices."""
        value = _dumps({"index": index, "route": part.document})
        return f'{self._head}"choices":[],"kvstore":{value}{self._tail}'.encode()

    def closing_events(self) -> bytes:
        """Return the events after the end of all choices."""
        if not self.include_usage:
            return DONE
        return f'{self._head}"choices":[],"usage":{_dumps(self.usage())}}}\n\n'.encode() + DONE

    def _event(self, index: int, content: str, reason: str = "null") -> bytes:
        choice = f'{{"index":{index},{content},"logprobs":null,"finish_reason":{reason}}}'
        return f'{self._head}"choices":[{choice}]{self._tail}'.encode()

    # --- whole ------------------------------------------------------------------------------------------------------

    def whole(self) -> bytes:
        """Return the complete document."""
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
        message = {"role": "assistant", "content": text, "refusal": None}
        content = {"message": message} if self.is_chat else {"text": text}
        return {"index": index, **content, "logprobs": None, "finish_reason": choice.reason}

    def usage(self) -> dict[str, Any]:
        """Return the token counts. A prompt counts once for all its answers, with the cached tokens of the first."""
        usages = [choice.usage for choice in self.choices if choice.usage is not None]
        firsts = usages[:: self.per_prompt]
        prompt = sum(usage.prompt_tokens for usage in firsts)
        completion = sum(usage.completion_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(_cached_tokens(usage) for usage in firsts)},
        }


def _cached_tokens(usage: Usage) -> int:
    """Return how many tokens of the prompt were cached at the engine that computed the rest."""
    return max(sum(usage.cached_tokens.values()), sum(usage.prefill_cached_tokens.values()))


def error_event(document: Mapping[str, Any]) -> bytes:
    """Return an error as an event, for a client that has received the start of an answer."""
    return f"data: {_dumps(document)}\n\n".encode()


def models_document(names: Sequence[str], created_s: int) -> dict[str, Any]:
    """Return the document of ``/v1/models``."""
    return {"object": "list", "data": [model_document(name, created_s) for name in names]}


def model_document(name: str, created_s: int) -> dict[str, Any]:
    """Return the document of one model."""
    return {"id": name, "object": "model", "created": created_s, "owned_by": "kvstore"}


SLACK_S = 5.0  # an answer is given up this long after its deadline, which its engine enforces

_ANSWER = boundary.RequestGuard("http/answer", OSError)  # OSError: the client has gone

Take = Callable[[int, AnswerPart], Awaitable[None]]
"""Is called with the number of an answer and a part of it. The calls do not overlap."""


class EventSink(Protocol):
    """Receives the events of a stream."""

    @property
    def is_started(self) -> bool:
        """True if the client may have received something."""
        ...

    async def send(self, events: bytes) -> None:
        """Send these events, and wait until the connection has room."""
        ...


async def answer_all(conductor: Conductor, requests: Sequence[Request], per_prompt: int, take: Take) -> None:
    """Get all answers, and pass on their parts. The first error ends all answers, and so does cancelling.

    Args:
        per_prompt: how many consecutive requests have the same prompt.
        take: receives the parts.

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
        raise _first_error(errors) from None


def _first_error(errors: BaseException) -> BaseException:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


async def _answer(conductor: Conductor, index: int, request: Request, take: Take) -> None:
    with _ANSWER:
        async with aclosing(conductor.answer(request)) as parts:
            async for part in parts:
                await take(index, part)


async def reply_whole(conductor: Conductor, requests: Sequence[Request], reply: OpenAIReply) -> bytes:
    """Get all answers, and return the complete document. Raises KVStoreError."""

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
    """Get all answers, and send their parts as events.

    No event is sent before the first token, so that an error until then can have an HTTP status.

    Raises:
        KVStoreError: an answer failed before anything was sent. After that, the last event reports the error.
    """
    route_events: list[bytes] = []  # events that wait for the first token
    opened: set[int] = set()

    async def take(index: int, part: AnswerPart) -> None:
        choice: Choice = reply.choices[index]
        match part:
            case AnswerRoute():
                if requests[index].explain:
                    route_events.append(reply.route_event(index, part))
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
        if route_events:
            events = b"".join((*route_events, events))
            route_events.clear()
        if events:
            await stream.send(events)

    try:
        await _in_time(answer_all(conductor, requests, reply.per_prompt, take), requests[0].deadline_s)
    except KVStoreError as error:
        if not stream.is_started:
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
