"""Output of subcommands: aligned tables, JSON documents and numbers with units; and option types for click: durations,
percentages and sizes.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import click

from kvstore.config.reading import parse_size
from kvstore.errors import InvalidRequest

_Command = TypeVar("_Command", bound=Callable[..., Any])

_KEY = re.compile("[0-9a-f]{32}")
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def json_option(command: _Command) -> _Command:
    """Add the ``--json`` flag that every subcommand has. The command receives it as ``as_json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")(command)


def print_json(document: object) -> None:
    """Write `document` to stdout as one JSON document.

    Dataclasses are written as objects, enums as their values, bytes as hexadecimal text, and NumPy scalars and arrays
    as numbers and lists. Raises ValueError for NaN and infinities, which JSON cannot represent.
    """
    click.echo(json.dumps(document, indent=2, default=_plain, allow_nan=False))


def say(as_json: bool, document: object, line: str) -> None:
    """Print a document or a line and flush it, because the parent process may wait for it."""
    if as_json:
        print_json(document)
    else:
        click.echo(line)
    sys.stdout.flush()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Write `table_text` to stdout."""
    click.echo(table_text(headers, rows))


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Write one ``name  value`` line per entry to stdout, values aligned."""
    width = max((len(name) for name in pairs), default=0)
    for name, value in pairs.items():
        click.echo(f"{name:<{width}}  {value}")


def table_text(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with columns as wide as their longest cell. Columns of numbers are right-aligned.

    Cells are converted with `str`. A column has numbers if every cell in it is ``-`` or starts with a digit and is not
    a page's key.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    assert all(len(row) == len(headers) for row in cells), "every row has one cell per header"
    lines = [list(headers), *cells]
    columns = range(len(headers))
    widths = [max(len(line[column]) for line in lines) for column in columns]
    right = [bool(cells) and all(_is_number(row[column]) for row in cells) for column in columns]

    def aligned(line: Sequence[str]) -> str:
        padded = (line[c].rjust(widths[c]) if right[c] else line[c].ljust(widths[c]) for c in columns)
        return "  ".join(padded).rstrip()

    return "\n".join([aligned(lines[0]), "  ".join("-" * width for width in widths), *map(aligned, cells)])


def bytes_text(size_bytes: float) -> str:
    """Return a size in binary units with three digits: ``512 MiB``, ``1.46 GiB``."""
    scaled, unit = float(size_bytes), 0
    while abs(scaled) >= 999.5 and unit < len(_BYTE_UNITS) - 1:
        scaled, unit = scaled / 1024, unit + 1
    return f"{_three_digits(scaled)} {_BYTE_UNITS[unit]}"


def duration_text(duration_s: float) -> str:
    """Return a duration with units: ``2 h 5 min``, ``3 min 20 s``, ``1.46 s``, ``85 us``."""
    whole_s = round(duration_s)
    if whole_s >= 3600:
        return f"{whole_s // 3600} h {whole_s % 3600 // 60} min"
    if whole_s >= 60:
        return f"{whole_s // 60} min {whole_s % 60} s"
    for unit_s, unit in _TIME_UNITS:
        if abs(duration_s) >= 0.9995 * unit_s:
            return f"{_three_digits(duration_s / unit_s)} {unit}"
    return "0 s" if duration_s == 0 else f"{_three_digits(duration_s * 1e9)} ns"


def speed_text(bytes_per_s: float) -> str:
    """Return a transfer speed in GB/s (10^9 bytes), the usual unit for memory and links: ``19.2 GB/s``."""
    return f"{_three_digits(bytes_per_s / 1e9)} GB/s"


def name_text(name: str) -> str:
    """Return a name for a terminal: at most 40 characters, ``?`` for control codes, and ``(none)`` if it is empty."""
    return "".join(c if c.isprintable() else "?" for c in name[:40]) or "(none)"


def ratio_text(part: float, whole: float) -> str:
    """Return `part` / `whole` with two decimals; ``-`` if `whole` is 0."""
    return f"{part / whole:.2f}" if whole else "-"


def _three_digits(number: float) -> str:
    decimals = 0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def _is_number(cell: str) -> bool:
    return cell == "-" or (cell.lstrip("-")[:1].isdigit() and not _KEY.fullmatch(cell))


def _plain(value: Any) -> object:
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, without importing NumPy for them
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*) ?")


def parse_duration(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``1.5h``, ``1h30m`` or ``2d``. Raises ValueError."""
    seconds, place, parts = 0.0, 0, 0
    text = text.strip()
    for match in _PART.finditer(text):
        number, unit = match.groups()
        is_bare = not unit and match.end() == len(text) and parts == 0  # a number without a unit is seconds
        if match.start() != place or not (is_bare or unit in _UNITS_S):
            break
        seconds += float(number) * _UNITS_S[unit or "s"]
        place, parts = match.end(), parts + 1
    if not parts or place != len(text) or not math.isfinite(seconds):
        raise ValueError(f"must be a duration such as 30s, 10m, 1h30m or 2d (got {text!r})")
    return seconds


class Duration(click.ParamType[float]):
    """An option in seconds, as parsed by ``parse_duration``: above zero and at most ``days_max`` days if that is
    set."""

    name = "duration"

    def __init__(self, days_max: int | None = None) -> None:
        self._days_max = days_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert an option's value, or fail with a message for the user."""
        try:
            seconds = float(value) if isinstance(value, int | float) else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._days_max is not None and not 0 < seconds <= self._days_max * _UNITS_S["d"]:
            self.fail(f"must be above zero and at most {self._days_max} days (got {value!r})", param, ctx)
        return seconds


class Percent(click.ParamType[float]):
    """An option above 0 and at most 100, from ``25`` or ``25%``."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Convert an option's value, or fail with a message for the user."""
        text = str(value).strip().removesuffix("%").strip()
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            self.fail(f"must be above 0 and at most 100 (got {value!r})", param, ctx)
        return percent


class Size(click.ParamType[int]):
    """An option in bytes, from ``512MiB``, ``4GiB`` or ``1048576``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert an option's value, or fail with a message for the user."""
        try:
            return parse_size(value)
        except InvalidRequest as error:
            self.fail(error.reason, param, ctx)
