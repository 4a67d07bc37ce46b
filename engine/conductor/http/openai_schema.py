"""The bodies of ``/v1/completions`` and ``/v1/chat/completions``: parses and checks them, and turns them into requests.

``parse_document`` parses the JSON of a body at a bounded cost. Python makes objects of 24 bytes from each byte of
``[1],[1],...``, and holds the interpreter until all of them are made. A body of 8 MiB would cost 200 MiB, and stall all
other requests for a second. Therefore numpy first examines a large body in blocks, and other threads can run between
them. It cuts out long lists of token ids, which become arrays without a Python object for each id::

    {"model": "m", "prompt": [[5, 17, ... 100,000 more], "text"]}    the body
    {"model": "m", "prompt": [NaN,                       "text"]}    the text that ``json`` parses

The rest may have at most ``VALUES_MAX`` values of any kind and nesting. Texts may have any length.

``read_body`` checks the parameters. Every parameter of OpenAI's API is a field of ``Body``, ``CompletionBody`` or
``ChatBody``. There are three kinds: parameters that are used, parameters that never change an answer, and parameters
of which only values without effect are accepted. Unknown parameters are refused. If only engines of other systems
serve the model, unknown parameters are passed on unchanged.

``requests_of`` makes one ``Request`` for each answer.
"""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Self

import numpy as np
import numpy.typing as npt
from pydantic import (
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from engine.conductor.http.openai_errors import INVALID, Refusal, invalid
from engine.conductor.http.prompts import Tokens
from engine.model.request import PRIORITY_MAX, Request, Sampling, ServedModel

SMALL_BYTES: Final = 16 << 10  # ``json`` parses a body up to this size directly, in at most a millisecond
VALUES_MAX: Final = 32768  # values of a body without the token ids in cut lists: enough for 8,000 messages
LISTS_MAX: Final = 64  # lists that are cut out: twice the number of prompts that a request may have
CUT_BYTES_MIN: Final = 256  # shorter lists are not cut out, and each of their ids counts as a value
BLOCK_BYTES: Final = 64 << 10
TOKEN_MAX: Final = 2**32 - 1
TOKEN_DIGITS: Final = 10  # digits of the largest token
CUT: Final = b"NaN"  # replaces a cut list; a valid body has none of its own, because it is not JSON

_QUOTE, _ESCAPE, _COMMA, _ZERO = b'"'[0], b"\\"[0], b","[0], b"0"[0]
_OPEN, _CLOSE = b"{"[0], b"}"[0]
_CASE: Final = 0x20  # the only bit in which brackets differ from braces
_IN_LISTS: Final = np.zeros(256, np.bool_)
_IN_LISTS[list(b"0123456789, \t\r\n")] = True

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class TokenList:
    """A long list of whole numbers in a document.

    Attributes:
        ids: None if one of the numbers is above ``TOKEN_MAX``.
    """

    ids: Ids | None


def parse_document(body: bytes | bytearray) -> dict[str, Any]:
    """Return the JSON object in a body. Long lists of token ids in it become ``TokenList``.

    Parse a body of more than ``SMALL_BYTES`` in a thread: it takes up to 0.3 s, and lets other threads run.

    Raises:
        Refusal: the body is not a JSON object in UTF-8, or has more than ``VALUES_MAX`` values.
    """
    try:
        document = json.loads(body.decode()) if len(body) <= SMALL_BYTES else _parse_large(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, a number with thousands of digits, or nested too deeply
        raise Refusal(400, INVALID, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(document, dict):
        raise Refusal(400, INVALID, "the body is not a JSON object", code="invalid_json")
    return document


def _parse_large(body: bytes | bytearray) -> Any:
    data = np.frombuffer(body, np.uint8)
    brackets, commas = _outline(data)
    cuts: list[tuple[int, int]] = []
    lists: list[TokenList] = []
    for start, stop in _flat_lists(data, brackets):
        parsed = _token_list(data[start + 1 : stop])
        if parsed is not None:
            token_list, count = parsed
            commas -= count - 1
            cuts.append((start, stop + 1))
            lists.append(token_list)
            if len(lists) == LISTS_MAX:
                break
    values = commas + len(brackets) // 2 - len(cuts) + 1
    if values > VALUES_MAX:
        raise _too_many()
    remaining = iter(lists)

    def next_list(_: str) -> TokenList:
        token_list = next(remaining, None)
        if token_list is None:  # the client sent a NaN
            raise ValueError
        return token_list

    text = b"".join(_without_lists(body, cuts)).decode() if cuts else body.decode()
    return json.loads(text, parse_constant=next_list)


def _without_lists(body: bytes | bytearray, cuts: list[tuple[int, int]]) -> Iterator[bytes | memoryview]:
    """Yield the parts of a body, with ``CUT`` in place of each range in ``cuts``."""
    at = 0
    whole = memoryview(body)
    for start, stop in cuts:
        yield whole[at:start]
        yield CUT
        at = stop
    yield whole[at:]


def _outline(data: Bytes) -> tuple[npt.NDArray[np.int64], int]:
    """Return the positions of brackets and braces outside texts, and the number of commas outside texts.

    Raises:
        Refusal: there are too many brackets.
    """
    positions: list[npt.NDArray[np.int64]] = []
    brackets, commas, in_text, escapes = 0, 0, False, 0
    for at in range(0, len(data), BLOCK_BYTES):
        block = data[at : at + BLOCK_BYTES]
        quotes = np.flatnonzero(block == _QUOTE)
        quotes, escapes = _unescaped(block, quotes, escapes)
        flips = np.zeros(len(block), np.uint8)
        flips[quotes] = 1
        outside = ((np.add.accumulate(flips, dtype=np.uint8) + np.uint8(in_text)) & 1) == 0
        in_text ^= bool(len(quotes) % 2)
        kinds = block | _CASE
        in_block = np.flatnonzero(((kinds == _OPEN) | (kinds == _CLOSE)) & outside)
        commas += int(np.count_nonzero((block == _COMMA) & outside))
        brackets += len(in_block)
        if brackets > 2 * VALUES_MAX:
            raise _too_many()
        positions.append(in_block + at)
    return np.concatenate(positions), commas


def _unescaped(block: Bytes, quotes: npt.NDArray[np.int64], carried: int) -> tuple[npt.NDArray[np.int64], int]:
    """Return the quotes that begin or end a string, and the number of backslashes at the end of the block.

    Args:
        quotes: the positions of all quotes in the block.
        carried: how many backslashes come right before the block.
    """
    escapes = np.flatnonzero(block == _ESCAPE)
    if not len(escapes):
        return (quotes[1:] if carried % 2 and len(quotes) and quotes[0] == 0 else quotes), 0
    begins = escapes[np.flatnonzero(np.diff(escapes, prepend=-2) != 1)]  # the starts of runs of backslashes
    runs = np.searchsorted(begins, quotes) - 1  # the index of the last run before each quote
    lengths = quotes - begins[np.maximum(runs, 0)]
    if begins[0] == 0:
        lengths[runs == 0] += carried
    is_run = np.zeros(len(quotes), np.bool_)
    after = quotes > 0
    is_run[after] = block[quotes[after] - 1] == _ESCAPE
    escaped = is_run & (lengths % 2 == 1)
    if len(quotes) and quotes[0] == 0:
        escaped[0] = carried % 2 == 1
    ending = 0
    if escapes[-1] == len(block) - 1:
        ending = len(block) - int(begins[-1]) + (carried if begins[-1] == 0 else 0)
    return quotes[~escaped], ending


def _flat_lists(data: Bytes, brackets: npt.NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield the positions of the brackets of each list that contains no list or object and is long enough to cut."""
    if len(brackets) < 2:
        return
    kinds = data[brackets]
    opens, closes = kinds[:-1] == b"["[0], kinds[1:] == b"]"[0]
    for index in np.flatnonzero(opens & closes & (np.diff(brackets) > CUT_BYTES_MIN)):
        yield int(brackets[index]), int(brackets[index + 1])


def _token_list(text: Bytes) -> tuple[TokenList, int] | None:
    """Return the whole numbers between two brackets, and their count; None if the text is something else."""
    parts: list[Ids] = []
    is_beyond = False
    at = 0
    while at < len(text):
        block = text[at : at + BLOCK_BYTES]
        is_last = at + len(block) == len(text)
        if not is_last:
            commas = np.flatnonzero(block == _COMMA)
            if not len(commas):
                return None
            block = block[: commas[-1] + 1]
        at += len(block)
        ids = _numbers(block, is_last)
        if ids is None:
            return None
        is_beyond |= bool(len(ids)) and int(ids.max()) > TOKEN_MAX
        parts.append(ids.astype(np.uint32))
    count = sum(map(len, parts))
    return TokenList(None if is_beyond else np.concatenate(parts)), count


def _numbers(block: Bytes, is_last: bool) -> npt.NDArray[np.uint64] | None:
    """Return the numbers in a block; None if the block has anything else.

    A comma must follow each number, except the last one if the block ``is_last``. A number that has more digits than a
    token can have becomes 2**32.
    """
    if not _IN_LISTS[block].all():
        return None
    is_digit = block - _ZERO < 10
    padded = np.concatenate(([False], is_digit, [False]))
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    starts, stops = edges[::2], edges[1::2]
    commas = np.flatnonzero(block == _COMMA)
    if len(commas) != len(starts) - is_last:
        return None
    if (commas < stops[: len(commas)]).any() or (commas[: len(starts) - 1] > starts[1:]).any():
        return None  # no comma between two numbers, or no number between two commas
    digits = stops - starts
    if ((block[starts] == _ZERO) & (digits > 1)).any():
        return None
    values = np.zeros(len(starts), np.uint64)
    for place in range(min(int(digits.max(initial=0)), TOKEN_DIGITS)):
        at = np.maximum(stops - 1 - place, 0)
        values += np.where(place < digits, block[at] - _ZERO, 0).astype(np.uint64) * np.uint64(10**place)
    values[digits > TOKEN_DIGITS] = TOKEN_MAX + 1
    return values


def _too_many() -> Refusal:
    reason = f"the body has more than {VALUES_MAX} values that are not token ids in a list"
    return Refusal(400, INVALID, reason, code="invalid_json")


CHOICES_MAX: Final = 32  # answers that one request may ask for
STOP_MAX: Final = 4
STOP_CHARACTERS_MAX: Final = 256
MAX_TOKENS: Final = 16  # the default for a completion
CHAT_TOKENS: Final = 1024  # the default for a chat, if the context has room for them
SEED_MAX: Final = 2**63 - 1
TEMPERATURE_MAX: Final = 2.0
TEXT_MAX: Final = 256  # characters of a name
GOT_MAX: Final = 64  # characters of a value that an error shows
DEADLINE_S: Final = 300.0
DEADLINE_S_MAX: Final = 3600.0
PROMPT_KINDS: Final = "must be text, token ids, or a list of either"
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
EXTRA_BYTES_MAX: Final = 64 << 10  # of all parameters that are passed on together
# Parameters of vLLM and SGLang that are never passed on: the conductor sets them, or they affect other callers.
NOT_PASSED_ON: Final = frozenset(
    ("cache_salt", "custom_logit_processor", "kv_transfer_params", "priority", "request_id", "return_token_ids")
)

Prompt = str | npt.NDArray[np.uint32]
Problem = PydanticCustomError


# --- values ----------------------------------------------------------------------------------------------------------


def _unicode(value: str, at: str = "") -> str:
    """Return a string, after a check that it has no half of a surrogate pair, which cannot be encoded."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Problem("invalid_value", "must be valid Unicode, without half of a surrogate pair", {"at": at}) from None
    return value


def _only(*values: Any) -> PlainValidator:
    """Return the type of a parameter that is not implemented. ``values``: the values that have no effect."""

    def check(value: Any) -> Any:
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            raise Problem("unsupported_parameter", "is not supported with this value")
        return value

    return PlainValidator(check)


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise Problem("invalid_type", "must be text, or a list of texts")
    if len(texts) > STOP_MAX:
        raise Problem("invalid_value", f"must be at most {STOP_MAX} texts (got {len(texts)})")
    if not all(1 <= len(text) <= STOP_CHARACTERS_MAX for text in texts):
        raise Problem("invalid_value", f"each text must have 1 to {STOP_CHARACTERS_MAX} characters")
    return tuple(_unicode(text) for text in texts)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """Return the prompts in a string, a list of token ids, or a list of either."""
    if not isinstance(value, str | list | TokenList):
        raise Problem("invalid_type", PROMPT_KINDS)
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        return (_prompt(value),)
    if len(value) > CHOICES_MAX:
        raise Problem("invalid_value", f"must be at most {CHOICES_MAX} prompts (got {len(value)})")
    return tuple(map(_prompt, value))


def _prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return _unicode(value)
    if isinstance(value, TokenList):
        if value.ids is None:
            raise _not_tokens()
        return value.ids
    if not isinstance(value, list) or set(map(type, value)) - {int}:
        raise Problem("invalid_type", PROMPT_KINDS)
    if not value:
        raise Problem("invalid_value", "is empty")
    try:
        return np.array(value, np.uint32)
    except OverflowError:
        raise _not_tokens() from None


def _not_tokens() -> PydanticCustomError:
    return Problem("invalid_value", f"token ids must be from 0 to {TOKEN_MAX}")


def _role(value: Any) -> str:
    if not isinstance(value, str) or value not in ROLES:
        raise Problem("invalid_value", f"must be one of {', '.join(ROLES)}")
    return ROLES[value]


def _content(value: Any) -> str:
    """Return a string, or the strings of all parts together. An error has the position of the part in ``at``."""
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, list) or not value:
        raise Problem("invalid_type", "must be text, or a list of parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            reason = 'must be a part of text: {"type": "text", "text": ...}'
            raise Problem("invalid_value", reason, {"at": f"[{index}]"})
        texts.append(_unicode(part["text"], f"[{index}].text"))
    return "".join(texts)


Name = Annotated[str, Field(max_length=TEXT_MAX)]
Anything = Annotated[Any, PlainValidator(lambda value: value)]
Seconds = Annotated[float, Field(ge=0, le=DEADLINE_S_MAX)]
Count = Annotated[int, Field(ge=1, le=TOKEN_MAX)]


# --- bodies ----------------------------------------------------------------------------------------------------------


class JsonObject(BaseModel):
    """A JSON object. A field that is null counts as absent.

    Attributes:
        ignored: an unknown field with one of these values is ignored.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    ignored: ClassVar[tuple[Any, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cls.model_fields
        if value.keys() <= fields.keys() and None not in value.values():
            return value
        known = {name: each for name, each in value.items() if name in fields and each is not None}
        unknown = (name for name, each in value.items() if name not in fields and each not in cls.ignored)
        return known | dict.fromkeys(itertools.islice(unknown, 1))  # one unknown field is enough for a refusal


class ChatMessage(JsonObject):
    """A message of a chat. An unknown field that is null or an empty list is ignored."""

    ignored = (None, [])

    role: Annotated[str, PlainValidator(_role)] = Field(default=None, validate_default=True)
    content: Annotated[str, PlainValidator(_content)] = Field(default=None, validate_default=True)
    name: Anything = None


class StreamOptions(JsonObject):
    """Options of a stream.

    Attributes:
        include_usage: True if the last event must have the usage.
    """

    include_usage: bool = False
    include_obfuscation: Annotated[Any, _only(False)] = None


class KVStoreOptions(JsonObject):
    """Our own parameters, see ``Request``.

    Attributes:
        explain: True if the reply must say where the request was sent, and why.
    """

    explain: bool = False
    salt: Name | None = None
    adapter: Name = ""
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    deadline_s: Annotated[float, Field(ge=0.001, le=DEADLINE_S_MAX)] = DEADLINE_S
    first_token_s: Seconds = 0.0
    token_s: Seconds = 0.0


class Body(JsonObject):
    """The parameters that both kinds of requests have.

    Attributes:
        max_tokens: None means ``MAX_TOKENS`` for a completion, and ``CHAT_TOKENS`` for a chat if the context has room.
        n: how many answers each prompt gets.
    """

    is_chat: ClassVar[bool]

    model: Annotated[Name, Field(min_length=1)]
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX)] = 1
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_MAX)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-SEED_MAX - 1, le=SEED_MAX)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop)] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    kvstore: KVStoreOptions = KVStoreOptions()

    # Parameters that identify the caller or the purpose. They never change an answer.
    metadata: Anything = None
    prompt_cache_key: Anything = None
    prompt_cache_retention: Anything = None
    safety_identifier: Anything = None
    user: Anything = None

    # Parameters that are not implemented, with their values that have no effect.
    audio: Annotated[Any, _only()] = None
    best_of: Anything = None  # must be 1 or equal to ``n``
    echo: Annotated[Any, _only(False)] = None
    frequency_penalty: Annotated[Any, _only(0)] = None
    function_call: Annotated[Any, _only("none")] = None
    functions: Annotated[Any, _only([])] = None
    logit_bias: Annotated[Any, _only({})] = None
    logprobs: Annotated[Any, _only(False)] = None
    modalities: Annotated[Any, _only(["text"])] = None
    parallel_tool_calls: Annotated[Any, _only(True, False)] = None
    prediction: Annotated[Any, _only()] = None
    presence_penalty: Annotated[Any, _only(0)] = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    store: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    tools: Annotated[Any, _only([])] = None
    top_logprobs: Annotated[Any, _only()] = None
    verbosity: Annotated[Any, _only("medium")] = None
    web_search_options: Annotated[Any, _only()] = None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.best_of is not None and (isinstance(self.best_of, bool) or self.best_of not in (1, self.n)):
            raise invalid("best_of", "is not supported with this value", "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream: true")
        return self


class CompletionBody(Body):
    """The body of ``/v1/completions``."""

    is_chat = False

    prompt: Annotated[tuple[Prompt, ...], PlainValidator(_prompts)]

    @model_validator(mode="after")
    def _answers_fit(self) -> Self:
        if self.n * len(self.prompt) > CHOICES_MAX:
            raise invalid(
                "n", f"must give at most {CHOICES_MAX} answers in all (got {len(self.prompt)} prompts and {self.n})"
            )
        return self

    @property
    def tokens_max(self) -> int | None:
        """The longest answer, in tokens."""
        return self.max_tokens or MAX_TOKENS


class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    is_chat = True

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: Count | None = None

    @property
    def tokens_max(self) -> int | None:
        """The longest answer, in tokens; None if the request does not set it."""
        return self.max_completion_tokens or self.max_tokens

    def turns(self) -> list[dict[str, str]]:
        """Return the messages in the form that a chat template expects."""
        return [{"role": message.role, "content": message.content} for message in self.messages]


AnyBody = CompletionBody | ChatBody


def read_body(
    document: Mapping[str, Any], is_chat: bool, passing: Collection[str] = ()
) -> tuple[AnyBody, dict[str, Any]]:
    """Return the body in a document, and the parameters to pass on unchanged.

    Args:
        passing: the models that only engines of other systems serve.

    Raises:
        Refusal: a parameter is not valid. The error names the parameter.
    """
    kind = ChatBody if is_chat else CompletionBody
    document = {name: value for name, value in document.items() if value is not None}
    extra: dict[str, Any] = {}
    model = document.get("model")
    if isinstance(model, str) and model in passing:
        extra = {name: document.pop(name) for name in document.keys() - kind.model_fields.keys() - NOT_PASSED_ON}
    try:
        return kind.model_validate(document), _plain(extra) if extra else extra
    except ValidationError as error:
        raise _refusal(error) from None


def _plain(extra: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as plain JSON values. Raises Refusal if they are too large."""
    try:
        text = json.dumps(extra, allow_nan=False, default=_ids)
    except ValueError:
        raise Refusal(400, INVALID, "the body is not valid JSON", code="invalid_json") from None
    if len(text) > EXTRA_BYTES_MAX:
        reason = f"parameters for the back end must have at most {EXTRA_BYTES_MAX} bytes (got {len(text)})"
        raise invalid(_shown(next(iter(extra))), reason)
    plain: dict[str, Any] = json.loads(text)
    return plain


def _ids(value: TokenList) -> list[int]:
    if value.ids is None or len(value.ids) > EXTRA_BYTES_MAX:
        raise invalid(None, f"a list must have at most {EXTRA_BYTES_MAX} numbers, each at most {TOKEN_MAX}")
    ids: list[int] = value.ids.tolist()
    return ids


# --- errors ----------------------------------------------------------------------------------------------------------

# For each kind of error of pydantic: our code and message.
PROBLEMS: Final[Mapping[str, tuple[str, str]]] = {
    "bool_type": ("invalid_type", "must be true or false"),
    "float_type": ("invalid_type", "must be a number"),
    "greater_than": ("invalid_value", "must be above {gt}"),
    "greater_than_equal": ("invalid_value", "must be at least {ge}"),
    "int_type": ("invalid_type", "must be an integer"),
    "less_than_equal": ("invalid_value", "must be at most {le}"),
    "list_type": ("invalid_type", "must be a list"),
    "missing": ("missing_required_parameter", "is missing"),
    "model_type": ("invalid_type", "must be an object"),
    "string_too_long": ("invalid_value", "must have at most {max_length} characters"),
    "string_too_short": ("missing_required_parameter", "is missing"),
    "string_type": ("invalid_type", "must be text"),
    "string_unicode": ("invalid_value", "must be valid Unicode, without half of a surrogate pair"),
    "too_short": ("invalid_type", "must be a list of one message or more"),
}


def _refusal(error: ValidationError) -> Refusal:
    """Return the refusal for the first error."""
    first = error.errors(include_url=False)[0]
    kind, where, got = first["type"], first["loc"], _got(first["input"])
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{_shown(part)}" for part in where).removeprefix(".")
    if kind == "extra_forbidden":
        if where[0] == "messages" and len(where) > 1:
            return invalid(param, "is not supported", "unsupported_parameter")
        if where[0] == "kvstore" and len(where) > 1:
            return invalid(
                param, f"must be one of {', '.join(sorted(KVStoreOptions.model_fields))}", "unknown_parameter"
            )
        return invalid(param, "unknown parameter", "unknown_parameter")
    if kind not in PROBLEMS:
        return invalid(param + first.get("ctx", {}).get("at", ""), first["msg"], kind)
    code, problem = PROBLEMS[kind]
    limits = {name: f"{each:g}" if isinstance(each, float) else each for name, each in first.get("ctx", {}).items()}
    return invalid(param or None, problem.format(**limits) + got, code)


def _got(value: Any) -> str:
    """Return the end of an error message, with the value if it can be shown."""
    if isinstance(value, str):
        return f" (got {json.dumps(value)})" if 0 < len(value) <= GOT_MAX else ""
    if isinstance(value, bool | int | float):
        return f" (got {json.dumps(value)[:GOT_MAX]})"
    return ""


def _shown(name: str) -> str:
    return name[:TEXT_MAX].encode("utf-8", "replace").decode()


# --- requests --------------------------------------------------------------------------------------------------------


def requests_of(
    body: AnyBody,
    extra: Mapping[str, Any],
    id: str,
    model: ServedModel,
    prompts: list[Tokens],
    tenant: str,
    salt: str | None,
) -> list[Request]:
    """Return one request for each answer. Raises Refusal if a prompt and its answer exceed the model's context."""
    requests: list[Request] = []
    seed = secrets.randbits(32) if body.seed is None else body.seed & SEED_MAX
    own = body.kvstore
    for tokens in prompts:
        room = model.context_tokens - len(tokens)
        max_tokens = body.tokens_max or max(1, min(room, CHAT_TOKENS))
        if max_tokens > room:
            count = f"{len(tokens)} tokens" if room >= 0 else f"more than {model.context_tokens} tokens"
            reason = f"{count} and {max_tokens} more exceed the context of {model.context_tokens}"
            raise invalid("messages" if body.is_chat else "prompt", reason, "context_length_exceeded")
        for number in range(body.n):
            requests.append(
                Request(
                    id=f"{id}-{len(requests)}",
                    model=model.name,
                    tokens=tokens,
                    sampling=Sampling(
                        max_tokens=max_tokens,
                        temperature=body.temperature,
                        top_p=body.top_p,
                        seed=(seed + number) % (SEED_MAX + 1),
                        stop=body.stop,
                    ),
                    tenant=tenant,
                    salt=salt,
                    adapter=own.adapter,
                    priority=own.priority,
                    first_token_s=own.first_token_s,
                    token_s=own.token_s,
                    deadline_s=own.deadline_s,
                    explain=own.explain,
                    needs_ids=False,
                    extra=extra,
                )
            )
    return requests
