"""Parses what a back end sends, without trusting it: documents of OpenAI's API, and events of a completion stream."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterable
from dataclasses import dataclass
from typing import Any, Final

from kvstore.errors import NodeUnavailable

EVENT_BYTES_MAX: Final = 1 << 20
TOKEN_MAX: Final = 2**32 - 1
DONE: Final = b"[DONE]"
SHOWN_MAX: Final = 200  # characters of its error message in ours


@dataclass(frozen=True)
class BackendPart:
    """A part of an answer. ``ids`` None: not reported. ``reason``: why it ended; ``stopped``: a stop text ended it.

    Attributes:
        prompt, cached, completion: token counts of its usage; None: not reported.
    """

    text: str = ""
    ids: tuple[int, ...] | None = None
    reason: str = ""
    stopped: bool = False
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


def document_of(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises NodeUnavailable if it is not valid."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise NodeUnavailable("it sent invalid JSON") from None
    if not isinstance(found, dict):
        raise NodeUnavailable("it sent JSON that is not an object")
    return found


def error_in(document: dict[str, Any]) -> tuple[str, str]:
    """The message and the parameter of an error, as far as present."""
    error = document.get("error", document)
    if not isinstance(error, dict):
        return str(error)[:SHOWN_MAX], ""
    message, param = error.get("message"), error.get("param")
    shown = " ".join(message.split())[:SHOWN_MAX] if isinstance(message, str) else "no reason is given"
    return shown, param[:SHOWN_MAX] if isinstance(param, str) else ""


async def events_in(chunks: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of server-sent events, up to ``[DONE]`` or the end. Raises NodeUnavailable if one is too long."""
    waiting = bytearray()
    async for chunk in chunks:
        waiting += chunk
        if b"\n" in chunk:
            *lines, rest = bytes(waiting).split(b"\n")
            waiting = bytearray(rest)
            for line in lines:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == DONE:
                        return
                    yield data
        if len(waiting) > EVENT_BYTES_MAX:
            raise NodeUnavailable(f"it sent an event of more than {EVENT_BYTES_MAX} bytes")


def part_in(data: bytes) -> BackendPart:
    """Parse one event of a completion stream. Raises NodeUnavailable if it is an error or not valid."""
    said = document_of(data)
    if said.get("error") is not None:
        raise NodeUnavailable(f"it failed: {error_in(said)[0]}")
    choices, usage = said.get("choices"), said.get("usage")
    choice = choices[0] if isinstance(choices, list) and choices else {}
    if not isinstance(choice, dict):
        raise NodeUnavailable("it sent an invalid completion")
    text, reason = choice.get("text"), choice.get("finish_reason")
    cached = None
    if isinstance(usage, dict) and isinstance(details := usage.get("prompt_tokens_details"), dict):
        cached = _count(details.get("cached_tokens"))
    usage = usage if isinstance(usage, dict) else {}
    return BackendPart(
        text if isinstance(text, str) else "",
        _ids(choice.get("token_ids")),
        reason if isinstance(reason, str) else "",
        isinstance(choice.get("stop_reason"), str),
        _count(usage.get("prompt_tokens")),
        cached,
        _count(usage.get("completion_tokens")),
    )


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    if not all(type(each) is int and 0 <= each <= TOKEN_MAX for each in value):
        raise NodeUnavailable("it sent invalid token ids")
    return tuple(value)


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= TOKEN_MAX else None
