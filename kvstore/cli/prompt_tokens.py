"""Token ids of a prompt: from a list or ranges, from a file, or from text with a tokenizer.

Tokenizers of Hugging Face are imported only when one is asked for; ``bytes`` (an id per byte of UTF-8) needs nothing.
Every failure is an InvalidRequest that names the option it came with.
"""

from __future__ import annotations

import importlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import InvalidRequest
from kvstore.model.prefix import TOKEN_ID_MAX, Tokens, as_tokens

FILE_BYTES_MAX = 256 << 20
TOKENS_MAX = 1 << 24
STDIN = "-"
BYTES = "bytes"

_RANGE = re.compile(r"([0-9]{1,10})(?:-([0-9]{1,10}))?")
_SEPARATORS = re.compile(r"[\s,]+")


def from_list(text: str, field: str = "--tokens") -> Tokens:
    """``1,2,3``; ``A-B`` stands for all from A to B: ``5,7,100-355``. Separated by commas or blanks."""
    parts: list[Any] = []
    total = 0
    for part in filter(None, _SEPARATORS.split(text)):
        found = _RANGE.fullmatch(part)
        if found is None:
            raise InvalidRequest(field, f"{part!r} is not a token id or a range such as 0-1023")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first or last > TOKEN_ID_MAX:
            raise InvalidRequest(field, f"{part!r} is not a range of ids from 0 to {TOKEN_ID_MAX}")
        total += last - first + 1
        if total > TOKENS_MAX:
            raise InvalidRequest(field, f"has more than {TOKENS_MAX} tokens")
        parts.append(np.arange(first, last + 1, dtype=np.int64) if found[2] else first)
    if not parts:
        raise InvalidRequest(field, "has no tokens")
    return _checked(np.concatenate([np.atleast_1d(np.asarray(part, np.int64)) for part in parts]), field)


def from_file(path: str, field: str = "--file") -> Tokens:
    """``.npy``: an array of integers. Else JSON (a list of ids, or an object with ``tokens``), where it starts like it;
    else text as ``from_list`` takes it. ``-`` is the standard input, in any of these forms."""
    data = _read(path, field)
    if data[:6] == b"\x93NUMPY":
        try:
            array = np.load(io.BytesIO(data), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise InvalidRequest(field, f"{path} is no array that can be read ({error})") from None
        return _checked(array, field)
    text = _text(data, path, field)
    if text.lstrip()[:1] in ("[", "{"):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise InvalidRequest(field, f"{path} is no JSON ({error})") from None
        found = found.get("tokens") if isinstance(found, dict) else found
        if not isinstance(found, list):
            raise InvalidRequest(field, f"{path} has no list of token ids, nor an object with `tokens`")
        return _checked(found, field)
    return from_list(text, field)


def from_text(text: str, tokenizer: str | None, special: bool) -> Tokens:
    """The ids that a tokenizer makes of a text; ``special``: with those that it adds to a prompt."""
    if tokenizer is None:
        raise InvalidRequest("--tokenizer", f"text needs one: a path, or {BYTES!r} (an id per byte)")
    if tokenizer == BYTES:
        ids: Any = np.frombuffer(text.encode(errors="surrogateescape"), np.uint8)
    else:
        ids = _hugging_face(tokenizer, text, special)
    if not len(ids):
        raise InvalidRequest("--text", "has no tokens")
    return _checked(ids, "--text")


def read_text(path: str) -> str:
    """A prompt's text from a file, or from the standard input."""
    return _text(_read(path, "--text-file"), path, "--text-file")


def _hugging_face(tokenizer: str, text: str, special: bool) -> list[int]:
    """A ``tokenizer.json`` is read by `tokenizers`; a folder, or a name whose files are here, by `transformers`.
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
    """Whatever such a package raises of its files, plain `Exception` among it, is about what the user named."""

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
        reason = f"needs the Python package {name!r}, not found; {BYTES!r} needs none"
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
        raise InvalidRequest(field, f"{path} has more than {FILE_BYTES_MAX} bytes")
    return data


def _text(data: bytes, path: str, field: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(field, f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def _checked(tokens: Any, field: str) -> Tokens:
    try:
        found = as_tokens(tokens)
    except InvalidRequest as error:
        raise InvalidRequest(field, error.reason) from None
    if len(found) > TOKENS_MAX:
        raise InvalidRequest(field, f"has more than {TOKENS_MAX} tokens")
    return found
