"""Options with which lookup, pages, evict, pin and unpin select a prompt.

Finds the layout of a prompt on the command line: from a file, from ``key=value`` text, or from the node's known
layouts.

Reads the token ids of a prompt: from a list or ranges, from a file, or from text with a tokenizer.

Hugging Face tokenizers are imported only when needed; ``bytes`` (one id per byte of UTF-8) needs no package. Every
failure is an InvalidRequest that names its option.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import click
import numpy as np

from kvstore.client.admin import AdminVerbs
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.store import Store
from kvstore.errors import InvalidRequest, PermissionDenied, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import TOKEN_ID_MAX, Keys, Tokens, as_tokens

FIELD: Final = "--layout"
LAYOUT_FILE_BYTES_MAX: Final = 1 << 20
_INTEGERS: Final = frozenset(field.name for field in fields(Layout) if field.type == "int")
_NAMES: Final = frozenset(field.name for field in fields(Layout))
_FINGERPRINT: Final = re.compile("[0-9a-f]{6,32}")
_LISTED_MAX: Final = 8


def find_layout(store: AdminVerbs, given: str | None, model: str | None) -> Layout:
    """Return the layout that the user means.

    Args:
        given: a file (.json, .toml), ``model=m,layers=2,...``, or the beginning of a known layout's fingerprint. None
            takes the node's only known layout (of ``model``).

    Raises:
        InvalidRequest: it is not a layout, or several fit.
    """
    if given is not None and (not _FINGERPRINT.fullmatch(given) or Path(given).is_file()):
        layout = parse_layout(given)
        if model is not None and layout.model != model:
            raise InvalidRequest("--model", f"must be the layout's, {layout.model!r} (got {model!r})")
        return layout
    try:
        known = store.layouts(model)
    except PermissionDenied:
        raise InvalidRequest(FIELD, "is needed: only operators may list a node's layouts") from None
    except Unavailable as error:
        raise InvalidRequest(FIELD, f"is needed: the node does not list its layouts ({error})") from None
    return _chosen(known, given, model)


def parse_layout(text: str) -> Layout:
    """Return the layout in a file or in ``key=value`` text. Raises InvalidRequest."""
    found = _of_pairs(text) if "=" in text else _of_file(text)
    unknown = sorted(set(found) - _NAMES)
    if unknown:
        raise InvalidRequest(FIELD, f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_NAMES))}")
    missing = [name for name in ("model", "layers") if name not in found]
    if missing:
        raise InvalidRequest(FIELD, f"lacks {missing[0]}")
    try:
        return Layout(**found)
    except InvalidRequest as error:
        raise InvalidRequest(FIELD, f"{error.field.removeprefix('layout.')} {error.reason}") from None


def _chosen(known: Sequence[dict[str, Any]], prefix: str | None, model: str | None) -> Layout:
    """Choose one of the node's known layouts."""
    fit = [entry for entry in known if entry["fingerprint"].startswith(prefix or "")]
    of = f" of model {model!r}" if model is not None else ""
    if not fit:
        which = f" whose fingerprint begins with {prefix}" if prefix else ""
        raise InvalidRequest(FIELD, f"is needed: the node knows none{of}{which}; give a file or model=...,layers=...")
    if len(fit) > 1:
        listed = ", ".join(f"{entry['fingerprint'][:12]} ({_described(entry)})" for entry in fit[:_LISTED_MAX])
        more = f" and {len(fit) - _LISTED_MAX} more" if len(fit) > _LISTED_MAX else ""
        raise InvalidRequest(FIELD, f"must be one of {len(fit)} that the node knows{of}: {listed}{more}")
    if fit[0]["layout"] is None:
        raise InvalidRequest(FIELD, f"is needed: the node knows only the fingerprint {fit[0]['fingerprint'][:12]}")
    return Layout(**fit[0]["layout"])


def _described(entry: dict[str, Any]) -> str:
    layout = entry["layout"]
    if layout is None:
        return f"{entry['pages']} pages"
    group = f", group {layout['group']}" if layout.get("group") else ""
    return f"{layout['model']}{group}, {layout['page_tokens']} tokens a page, {entry['pages']} pages"


def _of_pairs(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not name:
            raise InvalidRequest(FIELD, f"must be key=value (got {part!r})")
        if name in found:
            raise InvalidRequest(FIELD, f"{name} is given twice")
        if name in _INTEGERS and not re.fullmatch("[0-9]{1,10}", value):
            raise InvalidRequest(FIELD, f"{name} must be a whole number (got {value!r})")
        found[name] = int(value) if name in _INTEGERS else value
    return found


def _of_file(text: str) -> dict[str, Any]:
    """Read JSON or TOML, depending on the name's ending; the fields may also be in a table ``layout``."""
    path = Path(text)
    try:
        with open(path, "rb") as file:
            data = file.read(LAYOUT_FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(FIELD, f"{text}: {error.strerror}; give a file or model=...,layers=...") from None
    try:
        if len(data) > LAYOUT_FILE_BYTES_MAX:
            raise ValueError(f"more than {LAYOUT_FILE_BYTES_MAX} bytes")
        found = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except ValueError as error:  # also of JSON, TOML and UTF-8
        raise InvalidRequest(FIELD, f"{text} cannot be read ({error})") from None
    if isinstance(found, dict) and isinstance(found.get("layout"), dict):
        found = found["layout"]
    if not isinstance(found, dict):
        raise InvalidRequest(FIELD, f"{text} has no fields")
    return found


FILE_BYTES_MAX = 256 << 20
TOKENS_MAX = 1 << 24
STDIN = "-"
BYTES = "bytes"

_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_SEPARATORS = re.compile(r"[\s,]+")


def from_list(text: str, field: str = "--tokens") -> Tokens:
    """Parse ``1,2,3``; ``A-B`` stands for all ids from A to B: ``5,7,100-355``. Separators are commas and blanks."""
    parts: list[Any] = []
    total = 0
    for part in filter(None, _SEPARATORS.split(text)):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise InvalidRequest(field, f"must be token ids or ranges such as 0-1023 (got {part!r})")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last > TOKEN_ID_MAX:
            raise InvalidRequest(field, f"must be ids from 0 to {TOKEN_ID_MAX} (got {part!r})")
        total += last - first + 1
        if total > TOKENS_MAX:
            raise InvalidRequest(field, f"must have at most {TOKENS_MAX} tokens")
        parts.append(np.arange(first, last + 1, dtype=np.int64) if found[2] else first)
    if not parts:
        raise InvalidRequest(field, "has no tokens")
    return _checked(np.concatenate([np.atleast_1d(np.asarray(part, np.int64)) for part in parts]), field)


def from_file(path: str, field: str = "--file") -> Tokens:
    """Read ``.npy`` (an array of integers), JSON (a list of ids, or an object with ``tokens``), or text as for
    ``from_list``. ``-`` is standard input, in any of these forms."""
    data = _read(path, field)
    if data[:6] == b"\x93NUMPY":
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise InvalidRequest(field, f"{path} is not a readable array ({error})") from None
        return _checked(array, field)
    text = _text(data, path, field)
    if text.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(field, f"{path} is not valid JSON ({error})") from None
        found = found.get("tokens") if isinstance(found, dict) else found
        if not isinstance(found, list):
            raise InvalidRequest(field, f"{path} must be a list of token ids, or an object with `tokens`")
        return _checked(found, field)
    return from_list(text, field)


def from_text(text: str, tokenizer: str | None, special: bool) -> Tokens:
    """Return a tokenizer's ids for a text; with ``special``, including the special tokens that it adds to a prompt."""
    if tokenizer is None:
        raise InvalidRequest("--tokenizer", f"is needed for text: a path, or {BYTES!r} (one id per byte)")
    if tokenizer == BYTES:
        ids: Any = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    else:
        ids = _hugging_face(tokenizer, text, special)
    if not len(ids):
        raise InvalidRequest("--text", "has no tokens")
    return _checked(ids, "--text")


def read_text(path: str) -> str:
    """Read a prompt's text from a file, or from standard input."""
    return _text(_read(path, "--text-file"), path, "--text-file")


def _hugging_face(tokenizer: str, text: str, special: bool) -> list[int]:
    """Tokenize with `tokenizers` (a ``tokenizer.json``), or with `transformers` (a folder, or a name with local files).
    Nothing is downloaded."""
    path = Path(tokenizer)
    if (tokenizer.startswith((".", "/")) or path.suffix == ".json") and not path.exists():
        raise InvalidRequest("--tokenizer", f"{tokenizer}: No such file or directory")
    alone = path if path.is_file() else path / "tokenizer.json"
    if path.is_file() or (alone.is_file() and not _installed("transformers")):
        loader = _needed("tokenizers").Tokenizer.from_file
        source: str = str(alone)
    else:
        auto = _needed("transformers").AutoTokenizer

        def loader(name: str) -> Any:
            return auto.from_pretrained(name, local_files_only=True)

        source = tokenizer
    with _BlamedOn(tokenizer):
        encoded = loader(source).encode(text, add_special_tokens=special)
    return list(getattr(encoded, "ids", encoded))


class _BlamedOn:
    """Turns every exception of such a package about its files, even a plain `Exception`, into an error of the user's
    option."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidRequest("--tokenizer", f"{self._tokenizer} cannot be used ({first})") from None


def _installed(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"needs the Python package {name!r}, which is not installed; {BYTES!r} needs none"
        raise InvalidRequest("--tokenizer", reason) from None


def _read(path: str, field: str) -> bytes:
    if path == STDIN:
        data = sys.stdin.buffer.read(FILE_BYTES_MAX + 1)
    else:
        try:
            with open(path, "rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            raise InvalidRequest(field, f"{path}: {error.strerror}") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(field, f"{path} must have at most {FILE_BYTES_MAX} bytes")
    return data


def _text(data: bytes, path: str, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"{path} is not valid UTF-8 ({error.reason} at byte {error.start})") from None


def _checked(tokens: Any, field: str) -> Tokens:
    try:
        found = as_tokens(tokens)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.reason) from None
    if len(found) > TOKENS_MAX:
        raise InvalidRequest(field, f"must have at most {TOKENS_MAX} tokens")
    return found


_Command = TypeVar("_Command", bound=Callable[..., Any])

SALT_HELP = "The prompt's tenant.  [default: the tenant without a name]"


@dataclass(frozen=True)
class PromptOptions:
    """The prompt options as given; None if not given."""

    tokens: str | None
    file: str | None
    text: str | None
    text_file: str | None
    tokenizer: str | None
    special_tokens: bool
    layout: str | None
    model: str | None
    adapter: str | None

    @property
    def given(self) -> bool:
        """Return whether a prompt was given. Raises InvalidRequest if it is incomplete."""
        if self._sources():
            return True
        for field in ("tokenizer", "layout", "model", "adapter"):
            if getattr(self, field) is not None:
                raise InvalidRequest(f"--{field}", "needs a prompt: --tokens, --file, --text or --text-file")
        return False

    def _sources(self) -> list[str]:
        return [name for name in ("tokens", "file", "text", "text_file") if getattr(self, name) is not None]

    def check(self) -> None:
        """Read the prompt, so that its errors are reported before any node is asked."""
        _ = self._read  # cached: standard input can be read only once

    @cached_property
    def _read(self) -> Tokens:
        """Return the prompt's token ids. Raises InvalidRequest naming the option."""
        sources = [f"--{name.replace('_', '-')}" for name in self._sources()]
        if not sources:
            raise InvalidRequest("prompt", "needs one of --tokens, --file, --text and --text-file")
        if len(sources) > 1:
            raise InvalidRequest(sources[1], f"cannot be combined with {sources[0]}")
        if self.tokenizer is not None and not sources[0].startswith("--text"):
            raise InvalidRequest("--tokenizer", "needs --text or --text-file")
        if self.tokens is not None:
            return from_list(self.tokens)
        if self.file is not None:
            return from_file(self.file)
        text = self.text if self.text is not None else read_text(str(self.text_file))
        return from_text(text, self.tokenizer, self.special_tokens)

    def find(self, store: Store, salt: str | None) -> Prompt:
        """Return the prompt in that store. Raises InvalidRequest naming the option."""
        tokens = self._read
        cache = store.cache(find_layout(store, self.layout, self.model), salt or "", self.adapter or "")
        return Prompt(cache, tokens, cache.keys(tokens))


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the keys of its full pages in one cache."""

    cache: PrefixCache
    tokens: Tokens
    keys: Keys

    def some(self) -> Keys:
        """Return the keys. Raises InvalidRequest if the prompt fills no page."""
        if not len(self.keys):
            page_tokens = self.cache.layout.page_tokens
            raise InvalidRequest("prompt", f"must fill a page of {page_tokens} tokens (got {len(self.tokens)})")
        return self.keys


def prompt_options(command: _Command) -> _Command:
    """Add the options; the command receives them as one ``PromptOptions``, ``prompt``."""
    options = (
        click.option("--tokens", metavar="IDS", help="Token ids: 1,2,3 or with ranges 5,7,100-355."),
        click.option(
            "--file", metavar="FILE", help="Token ids from .npy, JSON (a list, or `tokens` of an object), text, or -."
        ),
        click.option("--text", metavar="TEXT", help="The prompt's text; needs --tokenizer."),
        click.option("--text-file", metavar="FILE", help="File with the prompt's text, or -; needs --tokenizer."),
        click.option(
            "--tokenizer",
            metavar="PATH",
            help="tokenizer.json or a Hugging Face model's folder; `bytes` for one id per byte.",
        ),
        click.option(
            "--special-tokens/--no-special-tokens",
            default=True,
            help="Add the tokenizer's special tokens.  [default: add]",
        ),
        click.option(
            "--layout",
            metavar="LAYOUT",
            help="FILE.json, FILE.toml, model=m,layers=2,kv_heads=1,head_dim=64, or a known layout's fingerprint.  "
            "[default: the node's only known layout]",
        ),
        click.option("--model", metavar="NAME", help="Use the node's known layout of this model."),
        click.option("--adapter", metavar="NAME", help="Select pages computed with this adapter."),
    )

    def gathered(*args: Any, **given: Any) -> Any:
        prompt = PromptOptions(**{name: given.pop(name) for name in PromptOptions.__dataclass_fields__})
        return command(*args, prompt=prompt, **given)

    gathered.__doc__, gathered.__name__ = command.__doc__, command.__name__
    gathered.__click_params__ = getattr(command, "__click_params__", [])  # type: ignore[attr-defined]
    decorated: Any = gathered
    for option in reversed(options):
        decorated = option(decorated)
    return cast(_Command, decorated)
