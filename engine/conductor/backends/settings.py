"""Settings of a back end: ``http://HOST:PORT tokenizer=FOLDER events=tcp://HOST:PORT ...``."""

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
    """One back end.

    Attributes:
        url: http or https, host and port; OpenAI's API is at its ``/v1``.
        tokenizer: the folder of its model's tokenizer and chat template; "bytes": a byte is a token.
        model: its name there and here; empty: the first one that it lists.
        dialect: "openai": only OpenAI's own parameters; "vllm": it reports token ids, and keeps salts apart.
        key_file: the file with its API key; only its owner may read it.
        ca: PEM file of authorities that sign its certificate; None: those of the system.
        events, replay: ZMQ endpoints of its KV events; empty: it publishes none.
        page_tokens: the page size that we use for it. Its blocks may have another size.
        context: tokens of one sequence; 0: as it reports.
        batch: sequences that it decodes together.
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
        """The name of the engine that represents it here."""
        return self.url

    def __str__(self) -> str:
        words = [f"{name}={getattr(self, name)}" for name in _WORDS if getattr(self, name) != _DEFAULTS.get(name)]
        return " ".join([self.url, *words])


def parse_backends(value: object, name: str = "backend") -> tuple[BackendSettings, ...]:
    """Parse back ends from ``"URL WORD=VALUE ..."``, several separated by commas, or from a list of them.

    Raises:
        InvalidRequest: one of them is not valid, or two have the same address.
    """
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise InvalidRequest(name, f"{value!r} is not URL tokenizer=FOLDER ..., nor a list of them")
    found = tuple(_backend(part, name) for part in parts if part != "")
    if len({each.name for each in found}) < len(found):
        raise InvalidRequest(name, "two have the same address")
    return found


def _backend(value: object, name: str) -> BackendSettings:
    if isinstance(value, BackendSettings):
        return value
    url, *words = value.split() if isinstance(value, str) else [""]
    if not is_http_address(url) or re.search(r"[@?#]", url):
        raise InvalidRequest(name, f"{value!r} does not begin with http://HOST:PORT or https://HOST:PORT")
    given: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in _WORDS or not text or key in given:
            raise InvalidRequest(name, f"{word!r} is not one of {'=, '.join(_WORDS)}=, each once")
        given[key] = _WORDS[key](text, f"{name}: {key}")
    if "tokenizer" not in given:
        raise InvalidRequest(name, f"{url}: tokenizer=FOLDER is missing (or tokenizer={BYTES}: a byte is a token)")
    made = BackendSettings(url=url.rstrip("/"), **given)
    if made.replay and not made.events:
        raise InvalidRequest(name, f"{url}: replay= goes with events=")
    if not 1 <= made.page_tokens <= PAGE_TOKENS_MAX:
        raise InvalidRequest(name, f"{url}: page_tokens must be from 1 to {PAGE_TOKENS_MAX}")
    if made.batch < 1:
        raise InvalidRequest(name, f"{url}: batch must be 1 or more")
    return made


def _text(value: str, name: str) -> str:
    return value


def _dialect(value: str, name: str) -> str:
    if value not in DIALECTS:
        raise InvalidRequest(name, f"{value!r} is not one of {', '.join(DIALECTS)}")
    return value


def _endpoint(value: str, name: str) -> str:
    if _ENDPOINT.fullmatch(value) is None:
        raise InvalidRequest(name, f"{value!r} is not tcp://HOST:PORT or ipc:///PATH")
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
