"""Replies: documents of OpenAI's API, whole or as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.conductor.shell.answers import Answered, Routed
from engine.model.request import Usage
from kvstore.errors import Unavailable

DONE: Final = b"data: [DONE]\n\n"
REASONS: Final = {"stop": "stop", "eos": "stop", "length": "length"}

_dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass
class Choice:
    """One answer, as far as it has come. ``text``: for a reply that is not streamed."""

    texts: list[str] = field(default_factory=list)
    reason: str = ""
    usage: Usage | None = None

    def ended(self, answered: Answered) -> None:
        """Mark the answer as complete. Raises Unavailable if another caller cancelled it."""
        if answered.reason not in REASONS:
            raise Unavailable("the answer was cancelled before its end")
        self.reason, self.usage = REASONS[answered.reason], answered.usage


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

    def opening(self, index: int) -> bytes:
        """The first events of a chat's choice; empty for a completion."""
        return self._event(index, '"delta":{"role":"assistant","content":""}') if self.is_chat else b""

    def drawn(self, index: int, text: str) -> bytes:
        """An event with more text of a choice."""
        said = _dumps(text)
        return self._event(index, f'"delta":{{"content":{said}}}' if self.is_chat else f'"text":{said}')

    def ended(self, index: int) -> bytes:
        """The last event of a choice."""
        return self._event(index, '"delta":{}' if self.is_chat else '"text":""', f'"{self.choices[index].reason}"')

    def routed(self, index: int, part: Routed) -> bytes:
        """An event without choices: where a choice goes, and why."""
        own = _dumps({"index": index, "route": part.document})
        return f'{self._head}"choices":[],"kvstore":{own}{self._tail}'.encode()

    def closing(self) -> bytes:
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
