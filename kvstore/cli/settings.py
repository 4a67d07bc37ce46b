"""Flags of ``serve``, ``config`` and ``engine``: one per setting, in the order of the dataclass."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.cli.output import json_option
from kvstore.config import format_size
from kvstore.config.reading import Declaration, Parser, Settings, declarations, parse_size, parse_size_or_zero

_SIZES = (parse_size, parse_size_or_zero)
_Command = TypeVar("_Command", bound=Callable[..., Any])


def with_settings(kind: type[Settings], only: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Add ``--config``, ``--json``, and an option per setting, or per setting in ``only``.

    Values have the form that ``load`` reads: text, True for a switch, a tuple for an option that may repeat, and None
    for an option that is not used.
    """

    def decorate(command: _Command) -> _Command:
        defaults = {field.name: field.default for field in fields(kind)}
        for name, setting in reversed(declarations(kind).items()):
            if not only or name in only:
                command = _option(name, setting, defaults[name])(command)
        path = click.Path(dir_okay=False)
        with_file = click.option(
            "--config", "path", type=path, help="A TOML file; flags and environment take precedence."
        )
        return with_file(json_option(command))

    return decorate


def _option(name: str, setting: Declaration, default: Any) -> Callable[[_Command], _Command]:
    flags = [flag for flag in (setting.short, f"--{name.replace('_', '-')}") if flag]
    shown = default_text(setting, default)
    about = f"{setting.help}{' May repeat.' if setting.repeats else ''}{f'  [default: {shown}]' if shown else ''}"
    if isinstance(default, bool):
        return click.option(*flags, name, is_flag=True, default=None, help=about)
    if setting.repeats:
        return click.option(
            *flags, name, multiple=True, metavar=setting.metavar, help=about, callback=lambda *a: a[2] or None
        )
    return click.option(*flags, name, metavar=setting.metavar, help=about)


def default_text(setting: Declaration, default: Any) -> str:
    """Return a setting's default as text; "" if there is none."""
    if setting.default_shown is not None:
        return setting.default_shown
    if default is False:
        return "off"
    if isinstance(default, tuple):
        return ", ".join(map(str, default)) or "none"
    return value_text(setting.parser, default).strip('"') or "none"


def value_text(parser: Parser, value: Any) -> str:
    """Return a setting's value in the syntax of the file: ``"512MiB"``, ``0.5``, ``["a", "b"]``; ``none`` if it is not
    set."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_quoted(str(part)) for part in value)}]"
    if parser in _SIZES:
        return _quoted(format_size(value)) if value else "0"
    return _quoted(str(value)) if isinstance(value, str | Path) else str(value)


def _quoted(text: str) -> str:
    """Quote a TOML string."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped) + '"'
