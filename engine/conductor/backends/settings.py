"""Settings of a back end, as a string: ``http://HOST:PORT tokenizer=FOLDER events=tcp://HOST:PORT ...``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvstore.config.reading import is_http_address, parse_count, parse_path
from kvstore.errors import InvalidRequest

BYTES: Final = "bytes"
DIALECTS: Final = ("openai", "vllm")
PAGE_TOKENS_MAX: Final = 4096
_ENDPOINT: Final = re.compile(r"tcp://[^\s/*]+:[0-9]{1,5}|ipc:///\S+")


@dataclass(frozen=True, kw_only=True)
class BackendSettings:
    """The settings of one back end.

    Attributes:
        url: http or https, with host and port. OpenAI's API is at ``/v1`` below it.
        tokenizer: the folder of the model's tokenizer and chat template; "bytes": every byte is a token.
        model: the model's name at the back end and here; empty means the first model that the back end lists.
        dialect: "openai": the back end accepts only OpenAI's own parameters. "vllm": it also reports token ids, and
            separates the pages of different salts.
        key_file: the file with the API key; only its owner may read it.
        ca: the PEM file of the authorities that sign its certificate; None means the system's.
        events: the ZMQ endpoint of its KV events; empty if it publishes none.
        replay: the ZMQ endpoint that replays missed events; empty if there is none.
        page_tokens: the size of the pages that stand for its blocks, which may have another size.
        context: the longest sequence, in tokens; 0 means the value that the back end reports.
        batch: how many sequences it decodes together.
    """

    url: str
    tokenizer: str
    model: str = ""
    dialect: str = DIALECTS[0]
    key_file: Path | None = None
    ca: Path | None = None
    events: str = ""
    replay: str = ""
    page_tokens: int = 16
    context: int = 0
    batch: int = 256

    @property
    def name(self) -> str:
        """The name of the engine that represents the back end here."""
        return self.url

    def __str__(self) -> str:
        words = [f"{name}={getattr(self, name)}" for name in _WORDS if getattr(self, name) != _DEFAULTS.get(name)]
        return " ".join([self.url, *words])


def parse_backends(value: object, name: str = "backend") -> tuple[BackendSettings, ...]:
    """Parse back ends from texts ``"URL WORD=VALUE ..."``: from a list of them, or from one text with commas between.

    Raises:
        InvalidRequest: a string is not valid, or two back ends have the same address.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise InvalidRequest(name, f"must be URL tokenizer=FOLDER ..., or a list of these (got {value!r})")
    backends = tuple(_backend(part, name) for part in parts if part != "")
    if len({each.name for each in backends}) < len(backends):
        raise InvalidRequest(name, "two have the same address")
    return backends


def _backend(value: object, name: str) -> BackendSettings:
    if isinstance(value, BackendSettings):
        return value
    url, *words = value.split() if isinstance(value, str) else [""]
    if not is_http_address(url) or re.search(r"[@?#]", url):
        raise InvalidRequest(name, f"must begin with http://HOST:PORT or https://HOST:PORT (got {value!r})")
    values: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in _WORDS or not text or key in values:
            raise InvalidRequest(name, f"{word!r} is not one of {'=, '.join(_WORDS)}=, each once")
        values[key] = _WORDS[key](text, f"{name}: {key}")
    if "tokenizer" not in values:
        raise InvalidRequest(name, f"{url}: tokenizer=FOLDER is missing (or tokenizer={BYTES}: a byte is a token)")
    settings = BackendSettings(url=url.rstrip("/"), **values)
    if settings.replay and not settings.events:
        raise InvalidRequest(name, f"{url}: replay= needs events=")
    if not 1 <= (tokens := settings.page_tokens) <= PAGE_TOKENS_MAX:
        raise InvalidRequest(name, f"{url}: page_tokens must be from 1 to {PAGE_TOKENS_MAX} (got {tokens})")
    if settings.batch < 1:
        raise InvalidRequest(name, f"{url}: batch must be 1 or more (got {settings.batch})")
    return settings


def _text(value: str, name: str) -> str:
    return value


def _dialect(value: str, name: str) -> str:
    if value not in DIALECTS:
        raise InvalidRequest(name, f"must be one of {', '.join(DIALECTS)} (got {value!r})")
    return value


def _endpoint(value: str, name: str) -> str:
    if _ENDPOINT.fullmatch(value) is None:
        raise InvalidRequest(name, f"must be tcp://HOST:PORT or ipc:///PATH (got {value!r})")
    return value


_WORDS: Final[Mapping[str, Callable[[str, str], Any]]] = MappingProxyType(
    {
        "tokenizer": _text,
        "model": _text,
        "dialect": _dialect,
        "key_file": parse_path,
        "ca": parse_path,
        "events": _endpoint,
        "replay": _endpoint,
        "page_tokens": parse_count,
        "context": parse_count,
        "batch": parse_count,
    }
)
_DEFAULTS: Final = {each: getattr(BackendSettings, each) for each in _WORDS if hasattr(BackendSettings, each)}
