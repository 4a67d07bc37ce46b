"""Options that select a prompt by its token ids and its layout, for lookup, pages, evict, pin and unpin.

Token ids come from a list, from a file, or from text and a tokenizer. Hugging Face tokenizers are imported only when
needed; ``bytes`` (one id per byte of UTF-8) needs no package. The layout comes from a file, from ``key=value`` text, or
from the node's known layouts. Every failure is an InvalidRequest that names its option.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from itertools import chain
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

FILE_BYTES_MAX = 256 << 20
TOKENS_MAX = 1 << 24
LAYOUTS_SHOWN: Final = 8
BYTES: Final = "bytes"  # the tokenizer that makes one id of every byte
SOURCES: Final = ("--tokens", "--file", "--text", "--text-file")
NEEDED: Final = "needs one of --tokens, --file, --text and --text-file"
SALT_HELP: Final = "The prompt's tenant.  [default: the tenant without a name]"

_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class PromptOptions:
    """A prompt on the command line; ``tokens`` is None if none was given."""

    tokens: Tokens | None
    layout: str | None
    model: str | None
    adapter: str | None

    def find(self, store: Store, salt: str | None) -> Prompt:
        """Return the prompt with its cache and keys in a store. Raises InvalidRequest naming the option."""
        assert self.tokens is not None
        cache = store.cache(find_layout(store, self.layout, self.model), salt or "", self.adapter or "")
        return Prompt(cache, self.tokens, cache.keys(self.tokens))


@dataclass(frozen=True)
class Prompt:
    """A prompt's tokens, and the keys of its full pages in one cache."""

    cache: PrefixCache
    tokens: Tokens
    keys: Keys

    def page_keys(self) -> Keys:
        """Return the keys. Raises InvalidRequest if the prompt fills no page."""
        if not len(self.keys):
            page_tokens = self.cache.layout.page_tokens
            raise InvalidRequest("prompt", f"must fill a page of {page_tokens} tokens (got {len(self.tokens)})")
        return self.keys


def prompt_options(command: _Command) -> _Command:
    """Add the options; the command receives them as ``prompt``, a ``PromptOptions``."""
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

    @wraps(command)
    def with_prompt(*args: Any, layout: str | None, model: str | None, adapter: str | None, **values: Any) -> Any:
        sources = {option: values.pop(option[2:].replace("-", "_")) for option in SOURCES}
        tokenizer, special_tokens = values.pop("tokenizer"), values.pop("special_tokens")
        needing = {"--tokenizer": tokenizer, "--layout": layout, "--model": model, "--adapter": adapter}
        tokens = read_tokens(sources, tokenizer, special_tokens)
        for option, value in needing.items():
            if tokens is None and value is not None:
                raise InvalidRequest(option, "needs a prompt: --tokens, --file, --text or --text-file")
        return command(*args, prompt=PromptOptions(tokens, layout, model, adapter), **values)

    decorated: Any = with_prompt
    for option in reversed(options):
        decorated = option(decorated)
    return cast(_Command, decorated)


# --- token ids ------------------------------------------------------------------------------------------------------


def read_tokens(sources: dict[str, str | None], tokenizer: str | None, special_tokens: bool) -> Tokens | None:
    """Return the token ids from the option that gives the prompt; None if no option is used."""
    used = {option: value for option, value in sources.items() if value is not None}
    if len(used) > 1:
        first, second, *_ = used
        raise InvalidRequest(second, f"cannot be combined with {first}")
    for option, value in used.items():
        if option == "--text-file":
            data = _read(value, option)
            with _ErrorsOf(option, value):
                value = data.decode()
        if option.startswith("--text"):
            return from_text(value, tokenizer, special_tokens)
        if tokenizer is not None:
            raise InvalidRequest("--tokenizer", "needs --text or --text-file")
        return from_list(value) if option == "--tokens" else from_file(value)
    return None


def from_list(text: str, option: str = "--tokens") -> Tokens:
    """Parse ``1,2,3``; ``A-B`` stands for all ids from A to B: ``5,7,100-355``. Separators are commas and blanks."""
    ranges, count = list[range](), 0
    for part in text.replace(",", " ").split():
        match = re.fullmatch("([0-9]{1,10})(?:-([0-9]{1,10}))?", part)
        if match is None:
            raise InvalidRequest(option, f"must be token ids or ranges such as 0-1023 (got {part!r})")
        ranges.append(range(int(match[1]), int(match[2] or match[1]) + 1))
        count += len(ranges[-1])
        if not ranges[-1] or ranges[-1][-1] > TOKEN_ID_MAX:
            raise InvalidRequest(option, f"must be ids or ascending ranges up to {TOKEN_ID_MAX} (got {part!r})")
        if count > TOKENS_MAX:
            raise InvalidRequest(option, f"must have at most {TOKENS_MAX} tokens")
    return _token_array(np.fromiter(chain.from_iterable(ranges), np.int64, count), option)


def from_file(path: str, option: str = "--file") -> Tokens:
    """Read ``.npy`` (an array of integers), JSON (a list of ids, or an object with ``tokens``), or text as for
    ``from_list``. ``-`` is standard input, in any of these forms."""
    data = _read(path, option)
    with _ErrorsOf(option, path):
        if data.startswith(b"\x93NUMPY"):
            return _token_array(np.load(io.BytesIO(data), allow_pickle=False), option)
        if data.lstrip()[:1] not in (b"[", b"{"):
            return from_list(data.decode(), option)
        ids = json.loads(data)
        return _token_array(ids.get("tokens") if isinstance(ids, dict) else ids, option)


def from_text(text: str, tokenizer: str | None, special_tokens: bool) -> Tokens:
    """Return a tokenizer's ids for a string, optionally with the special tokens that it adds to a prompt."""
    if tokenizer is None:
        raise InvalidRequest("--tokenizer", f"is needed for text: a path, or {BYTES!r} (one id per byte)")
    if tokenizer == BYTES:
        return _token_array(np.frombuffer(text.encode(errors="surrogateescape"), np.uint8), "--text")
    with _ErrorsOf("--tokenizer", tokenizer):
        encoded = _hugging_face(tokenizer).encode(text, add_special_tokens=special_tokens)
    return _token_array(list(getattr(encoded, "ids", encoded)), "--text")


def _hugging_face(tokenizer: str) -> Any:
    """Load a tokenizer with `transformers` (a folder, or a name with local files), or with `tokenizers` (a
    ``tokenizer.json``, also that of a folder where `transformers` is not installed). Nothing is downloaded."""
    path = Path(tokenizer)
    if tokenizer.startswith((".", "/")) or path.suffix == ".json":
        path.stat()  # a path that does not exist is not the name of a model
    if not path.is_file():
        try:
            auto = importlib.import_module("transformers").AutoTokenizer
            return auto.from_pretrained(tokenizer, local_files_only=True)
        except ModuleNotFoundError:
            path /= "tokenizer.json"
            if not path.is_file():
                raise
    return importlib.import_module("tokenizers").Tokenizer.from_file(str(path))


def _read(path: str, option: str) -> bytes:
    with _ErrorsOf(option, path), click.open_file(path, "rb") as file:  # - is standard input
        data: bytes = file.read(FILE_BYTES_MAX + 1)
    if len(data) > FILE_BYTES_MAX:
        raise InvalidRequest(option, f"{path} must have at most {FILE_BYTES_MAX} bytes")
    return data


def _token_array(ids: Any, option: str) -> Tokens:
    with _ErrorsOf(option, ""):
        tokens = as_tokens(ids)
    if len(tokens) > TOKENS_MAX:
        raise InvalidRequest(option, f"must have at most {TOKENS_MAX} tokens")
    return tokens


class _ErrorsOf:
    """Turns every exception inside into an error of an option. Parsers of files raise many kinds, even a plain
    `Exception`."""

    def __init__(self, option: str, value: str) -> None:
        self._option, self._value = option, value

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InvalidRequest):
            raise InvalidRequest(self._option, error.reason) from None
        if isinstance(error, Exception):
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidRequest(self._option, f"{self._value} cannot be used ({first_line})") from None


# --- the layout -----------------------------------------------------------------------------------------------------


def find_layout(store: AdminVerbs, layout: str | None, model: str | None) -> Layout:
    """Return the layout that the options select.

    Args:
        layout: a file (.json, .toml), ``model=m,layers=2,...``, or the beginning of a known layout's fingerprint. None
            takes the node's only known layout (of ``model``).

    Raises:
        InvalidRequest: ``layout`` is not a layout, or no known layout or several fit.
    """
    if layout is not None and (not re.fullmatch("[0-9a-f]{6,32}", layout) or Path(layout).is_file()):
        parsed = parse_layout(layout)
        if model is not None and parsed.model != model:
            raise InvalidRequest("--model", f"must be the layout's, {parsed.model!r} (got {model!r})")
        return parsed
    try:
        known = [each for each in store.layouts(model) if each["fingerprint"].startswith(layout or "")]
    except PermissionDenied:
        raise InvalidRequest("--layout", "is needed: only operators may list a node's layouts") from None
    except Unavailable as error:
        raise InvalidRequest("--layout", f"is needed: the node does not list its layouts ({error})") from None
    which = f" of model {model!r}" * (model is not None) + f" whose fingerprint begins with {layout}" * bool(layout)
    if not known:
        raise InvalidRequest(
            "--layout", f"is needed: the node has no known layout{which}; give a file or model=...,layers=..."
        )
    if len(known) > 1:
        listed = ", ".join(f"{each['fingerprint'][:12]} ({_layout_text(each)})" for each in known[:LAYOUTS_SHOWN])
        more = f" and {len(known) - LAYOUTS_SHOWN} more" if len(known) > LAYOUTS_SHOWN else ""
        raise InvalidRequest("--layout", f"must be one of {len(known)} known layouts{which}: {listed}{more}")
    if known[0]["layout"] is None:
        fingerprint = known[0]["fingerprint"][:12]
        raise InvalidRequest("--layout", f"is needed: only the fingerprint {fingerprint} is known")
    return Layout(**known[0]["layout"])


def parse_layout(text: str) -> Layout:
    """Return the layout in a file (JSON, or TOML if its name ends so) or in ``key=value`` text. Raises
    InvalidRequest."""
    if "=" in text:
        values: Any = dict(_pair(part) for part in text.split(","))
    else:
        data = _read(text, "--layout")
        with _ErrorsOf("--layout", text):
            values = tomllib.loads(data.decode()) if text.endswith(".toml") else json.loads(data)
            values = values.get("layout", values)  # a table of this name may have the fields
    try:
        return Layout(**values)
    except TypeError as error:  # an unknown field, or one that is missing
        raise InvalidRequest("--layout", str(error).removeprefix("Layout.__init__() ")) from None
    except InvalidRequest as error:
        raise InvalidRequest("--layout", f"{error.field.removeprefix('layout.')} {error.reason}") from None


def _pair(part: str) -> tuple[str, int | str]:
    name, _, value = (word.strip() for word in part.partition("="))
    is_integer = value.isdecimal() and name in {field.name for field in fields(Layout) if field.type == "int"}
    return name, int(value) if is_integer else value


def _layout_text(known: dict[str, Any]) -> str:
    layout = known["layout"]
    if layout is None:
        return f"{known['pages']} pages"
    group = f", group {layout['group']}" if layout.get("group") else ""
    return f"{layout['model']}{group}, {layout['page_tokens']} tokens a page, {known['pages']} pages"
