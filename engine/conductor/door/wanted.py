"""Wanted: reads a client's request from the document of ``/v1/completions`` or ``/v1/chat/completions``.

Every parameter of OpenAI's API is in one of three tables: it is read, or it is accepted because it changes nothing
(``NEUTRAL``), or it is refused by name. Any other parameter is refused as unknown.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.conductor.door.documents import TOKEN_MAX, TokenList
from engine.conductor.door.errors import Refusal, invalid
from engine.conductor.shell.answers import PRIORITY_MAX
from engine.model.request import Sampling

CHOICES_MAX: Final = 32  # answers to one request
STOP_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 256
MAX_TOKENS: Final = 16  # default of a completion
CHAT_TOKENS: Final = 1024  # default of a chat, if the context leaves this many
SEED_MAX: Final = 2**63 - 1
TEMPERATURE_MAX: Final = 2.0
TEXT_MAX: Final = 256  # characters in a name
DEADLINE_S: Final = 300.0
DEADLINE_S_MAX: Final = 3600.0
PROMPT_KINDS: Final = "must be text, token ids, or a list of either"

Message = dict[str, Any]
Prompt = str | npt.NDArray[np.uint32]

_BOTH: Final = (
    "model", "n", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options", "kvstore",
)  # fmt: skip
READ: Final[Mapping[bool, frozenset[str]]] = {
    False: frozenset((*_BOTH, "prompt")),
    True: frozenset((*_BOTH, "messages", "max_completion_tokens")),
}
# Parameters that we do not implement, and their values that ask for nothing. Null always does.
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# Parameters that identify the caller or the purpose: they change no answer.
NOTES: Final = frozenset(("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"))
OWN: Final = frozenset(("explain", "salt", "adapter", "priority", "deadline_s", "first_token_s", "token_s"))
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """One request, checked. ``prompts`` of a completion, ``messages`` of a chat.

    Attributes:
        max_tokens: None: ``CHAT_TOKENS``, or what the context leaves.
        n: answers to each prompt.
        salt: None: the one of the caller's key.
        explain: the response says where the request went, and why.
        deadline_s, first_token_s, token_s, priority, adapter: as in ``Ask``.
    """

    model: str
    is_chat: bool
    prompts: tuple[Prompt, ...] = ()
    messages: tuple[Message, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    explain: bool = False
    salt: str | None = None
    adapter: str = ""
    priority: int = 0
    deadline_s: float = DEADLINE_S
    first_token_s: float = 0.0
    token_s: float = 0.0


def read_wanted(document: dict[str, Any], is_chat: bool) -> Wanted:
    """Read a request from its document. Raises Refusal naming the parameter."""
    _check_names(document, is_chat)
    given = _Given(document)
    model = given.text("model")
    if not model:
        raise invalid("model", "is missing", "missing_required_parameter")
    own = _own(document.get("kvstore"))
    stream = given.flag("stream")
    options = _stream_options(document.get("stream_options"), stream)
    max_tokens = given.whole("max_tokens", 1, TOKEN_MAX)
    if is_chat and document.get("max_completion_tokens") is not None:
        max_tokens = given.whole("max_completion_tokens", 1, TOKEN_MAX)
    prompts = () if is_chat else _prompts(document.get("prompt"))
    n = given.whole("n", 1, CHOICES_MAX) or 1
    if n * max(1, len(prompts)) > CHOICES_MAX:
        raise invalid("n", f"{len(prompts)} prompts with {n} answers each; at most {CHOICES_MAX} answers in all")
    seed = given.whole("seed", -SEED_MAX - 1, SEED_MAX)
    temperature, top_p = given.real("temperature", 0, TEMPERATURE_MAX), given.real("top_p", 0, 1)
    if top_p == 0:
        raise invalid("top_p", "must be above 0 and at most 1")
    return Wanted(
        model=model,
        is_chat=is_chat,
        prompts=prompts,
        messages=_messages(document.get("messages")) if is_chat else (),
        sampling=Sampling(
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            seed=secrets.randbits(32) if seed is None else seed & SEED_MAX,
            stop=_stop(document.get("stop")),
        ),
        max_tokens=max_tokens if max_tokens is not None or is_chat else MAX_TOKENS,
        n=n,
        stream=stream,
        include_usage=options,
        explain=own.flag("explain"),
        salt=own.text("salt"),
        adapter=own.text("adapter") or "",
        priority=own.whole("priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
        deadline_s=own.real("deadline_s", 0.001, DEADLINE_S_MAX) or DEADLINE_S,
        first_token_s=own.real("first_token_s", 0, DEADLINE_S_MAX) or 0.0,
        token_s=own.real("token_s", 0, DEADLINE_S_MAX) or 0.0,
    )


def check_text(value: str, param: str) -> str:
    """Return ``value`` if it can be encoded: half a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(param, "must be valid Unicode: it has half of a surrogate pair") from None
    return value


class _Given:
    """Reads typed values from a document; ``prefix`` precedes their names in errors. Null counts as absent."""

    def __init__(self, document: dict[str, Any], prefix: str = "") -> None:
        self._document = document
        self._prefix = prefix

    def flag(self, name: str) -> bool:
        value = self._document.get(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(self._prefix + name, "must be true or false", "invalid_type")
        return bool(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        value = self._document.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(self._prefix + name, "must be an integer", "invalid_type")
        if not low <= value <= high:
            raise invalid(self._prefix + name, f"must be from {low} to {high}")
        return value

    def real(self, name: str, low: float, high: float) -> float | None:
        value = self._document.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(self._prefix + name, "must be a number", "invalid_type")
        if not low <= value <= high:  # NaN is in no range
            raise invalid(self._prefix + name, f"must be from {low:g} to {high:g}")
        return float(value)

    def text(self, name: str) -> str | None:
        value = self._document.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise invalid(self._prefix + name, "must be text", "invalid_type")
        if len(value) > TEXT_MAX:
            raise invalid(self._prefix + name, f"has {len(value)} characters; at most {TEXT_MAX}")
        return check_text(value, self._prefix + name)


def _check_names(document: dict[str, Any], is_chat: bool) -> None:
    for name, value in document.items():
        if name in READ[is_chat] or name in NOTES or value is None:
            continue
        if name not in NEUTRAL:
            raise invalid(_shown(name), "unknown parameter", "unknown_parameter")
        is_n = name == "best_of" and value == document.get("n")
        if not is_n and not any(_is_same(value, one) for one in NEUTRAL[name]):
            raise invalid(name, "is not supported with this value", "unsupported_parameter")


def _is_same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _shown(name: str) -> str:
    return name[:TEXT_MAX].encode("utf-8", "replace").decode()


def _own(value: Any) -> _Given:
    if value is None:
        return _Given({})
    if not isinstance(value, dict):
        raise invalid("kvstore", "must be an object", "invalid_type")
    for name in value:
        if name not in OWN:
            raise invalid(f"kvstore.{_shown(name)}", f"must be one of {', '.join(sorted(OWN))}", "unknown_parameter")
    return _Given(value, "kvstore.")


def _stream_options(value: Any, stream: bool) -> bool:
    """Whether the last event includes the usage."""
    if value is None:
        return False
    if not isinstance(value, dict):
        raise invalid("stream_options", "must be an object", "invalid_type")
    if not stream:
        raise invalid("stream_options", "goes with stream: true")
    for name in value:
        if name not in ("include_usage", "include_obfuscation"):
            raise invalid(f"stream_options.{_shown(name)}", "unknown parameter", "unknown_parameter")
    options = _Given(value, "stream_options.")
    if options.flag("include_obfuscation"):
        raise invalid("stream_options.include_obfuscation", "is not supported", "unsupported_parameter")
    return options.flag("include_usage")


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise invalid("stop", "must be text, or a list of texts", "invalid_type")
    if len(found) > STOP_MAX:
        raise invalid("stop", f"{len(found)} texts; at most {STOP_MAX}")
    if not all(1 <= len(text) <= STOP_CHARACTERS_MAX for text in found):
        raise invalid("stop", f"each must have 1 to {STOP_CHARACTERS_MAX} characters")
    return tuple(check_text(text, "stop") for text in found)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """A text, its tokens, or a list of either."""
    if value is None:
        raise invalid("prompt", "is missing", "missing_required_parameter")
    if not isinstance(value, str | list | TokenList):
        raise invalid("prompt", PROMPT_KINDS, "invalid_type")
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return (_prompt(value),)
    if len(value) > CHOICES_MAX:
        raise invalid("prompt", f"{len(value)} prompts; at most {CHOICES_MAX}")
    return tuple(_prompt(one) for one in value)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return check_text(value, "prompt")
    if isinstance(value, TokenList):
        if value.ids is None:
            raise _no_token()
        return value.ids
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise invalid("prompt", PROMPT_KINDS, "invalid_type")
    if not value:
        raise invalid("prompt", "is empty")
    try:
        return np.array(value, np.uint32)
    except OverflowError:
        raise _no_token() from None


def _no_token() -> Refusal:
    return invalid("prompt", f"token ids are from 0 to {TOKEN_MAX}")


def _messages(value: Any) -> tuple[Message, ...]:
    if value is None:
        raise invalid("messages", "is missing", "missing_required_parameter")
    if not isinstance(value, list) or not value:
        raise invalid("messages", "must be a list of one message or more", "invalid_type")
    return tuple(_message(one, f"messages[{index}]") for index, one in enumerate(value))


def _message(value: Any, param: str) -> Message:
    if not isinstance(value, dict):
        raise invalid(param, "must be an object", "invalid_type")
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{param}.role", f"must be one of {', '.join(ROLES)}")
    for name, given in value.items():
        if name not in ("role", "content", "name") and given is not None and given != []:
            raise invalid(f"{param}.{_shown(name)}", "is not supported", "unsupported_parameter")
    return {"role": ROLES[role], "content": _content(value.get("content"), f"{param}.content")}


def _content(value: Any, param: str) -> str:
    """Text, or parts that are all text."""
    if isinstance(value, str):
        return check_text(value, param)
    if not isinstance(value, list) or not value:
        raise invalid(param, "must be text, or a list of parts", "invalid_type")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise invalid(f"{param}[{index}]", 'only parts of text are taken: {"type": "text", "text": ...}')
        texts.append(check_text(part["text"], f"{param}[{index}].text"))
    return "".join(texts)
