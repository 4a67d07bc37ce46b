"""Layout of a prompt on the command line: from a file, from ``key=value`` text, or from what the node has met."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from kvstore.client.admin import AdminVerbs
from kvstore.errors import InvalidRequest, PermissionDenied, Unavailable
from kvstore.model.layout import Layout

FIELD: Final = "--layout"
FILE_BYTES_MAX: Final = 1 << 20
_INTEGERS: Final = frozenset(field.name for field in fields(Layout) if field.type == "int")
_NAMES: Final = frozenset(field.name for field in fields(Layout))
_FINGERPRINT: Final = re.compile("[0-9a-f]{6,32}")
_LISTED_MAX: Final = 8


def find_layout(store: AdminVerbs, given: str | None, model: str | None) -> Layout:
    """The layout that the user means.

    Args:
        given: a file (.json, .toml), ``model=m,layers=2,...``, or how the fingerprint of one begins that the node has
            met. None: the only one that the node has met (of ``model``).

    Raises:
        InvalidRequest: it is none, or several fit.
    """
    if given is not None and (not _FINGERPRINT.fullmatch(given) or Path(given).is_file()):
        layout = parse_layout(given)
        if model is not None and layout.model != model:
            raise InvalidRequest("--model", f"{model!r} is not that of the layout, {layout.model!r}")
        return layout
    try:
        known = store.layouts(model)
    except PermissionDenied:
        raise InvalidRequest(FIELD, "is needed: which layouts a node has met is for operators") from None
    except Unavailable as error:
        raise InvalidRequest(FIELD, f"is needed: the node cannot say which it has met ({error})") from None
    return _chosen(known, given, model)


def parse_layout(text: str) -> Layout:
    """A layout of a file or of ``key=value`` text. Raises InvalidRequest."""
    found = _of_pairs(text) if "=" in text else _of_file(text)
    unknown = sorted(set(found) - _NAMES)
    if unknown:
        raise InvalidRequest(FIELD, f"has no field {unknown[0]!r}; there are {', '.join(sorted(_NAMES))}")
    missing = [name for name in ("model", "layers") if name not in found]
    if missing:
        raise InvalidRequest(FIELD, f"says no {missing[0]}")
    try:
        return Layout(**found)
    except InvalidRequest as error:
        raise InvalidRequest(FIELD, f"{error.field.removeprefix('layout.')} {error.reason}") from None


def _chosen(known: Sequence[dict[str, Any]], prefix: str | None, model: str | None) -> Layout:
    """One of those that the node has met."""
    fit = [entry for entry in known if entry["fingerprint"].startswith(prefix or "")]
    of = f" of model {model!r}" if model is not None else ""
    if not fit:
        which = f" whose fingerprint begins with {prefix}" if prefix else ""
        raise InvalidRequest(FIELD, f"is needed: the node has met none{of}{which}; give a file or model=...,layers=...")
    if len(fit) > 1:
        listed = ", ".join(f"{entry['fingerprint'][:12]} ({_described(entry)})" for entry in fit[:_LISTED_MAX])
        more = f" and {len(fit) - _LISTED_MAX} more" if len(fit) > _LISTED_MAX else ""
        raise InvalidRequest(FIELD, f"the node has met {len(fit)}{of}, say which: {listed}{more}")
    if fit[0]["layout"] is None:
        raise InvalidRequest(FIELD, f"is needed: nobody told the node all of {fit[0]['fingerprint'][:12]}")
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
            raise InvalidRequest(FIELD, f"{part!r} is not key=value")
        if name in found:
            raise InvalidRequest(FIELD, f"{name} is said twice")
        if name in _INTEGERS and not re.fullmatch("[0-9]{1,10}", value):
            raise InvalidRequest(FIELD, f"{name} must be a whole number, not {value!r}")
        found[name] = int(value) if name in _INTEGERS else value
    return found


def _of_file(text: str) -> dict[str, Any]:
    """JSON or TOML, as the name ends; in either the fields may stand in a table ``layout``."""
    path = Path(text)
    try:
        with open(path, "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidRequest(FIELD, f"{text}: {error.strerror}; give a file or model=...,layers=...") from None
    try:
        if len(data) > FILE_BYTES_MAX:
            raise ValueError(f"more than {FILE_BYTES_MAX} bytes")
        found = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except ValueError as error:  # of JSON, TOML and UTF-8 alike
        raise InvalidRequest(FIELD, f"{text} cannot be read ({error})") from None
    if isinstance(found, dict) and isinstance(found.get("layout"), dict):
        found = found["layout"]
    if not isinstance(found, dict):
        raise InvalidRequest(FIELD, f"{text} has no fields")
    return found
