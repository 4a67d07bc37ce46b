"""Values that operators type: durations, percentages, sizes, as types of click's options."""

from __future__ import annotations

import math
import re
from typing import Any

import click

from kvstore.config.values import parse_size
from kvstore.errors import InvalidRequest

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*) ?")


def parse_duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``1.5h``, ``1h30m``, ``2d``. Raises ValueError."""
    seconds, place, parts = 0.0, 0, 0
    text = text.strip()
    for found in _PART.finditer(text):
        number, unit = found.groups()
        bare = not unit and found.end() == len(text) and parts == 0  # a number alone is seconds
        if found.start() != place or not (bare or unit in _UNITS_S):
            break
        seconds += float(number) * _UNITS_S[unit or "s"]
        place, parts = found.end(), parts + 1
    if not parts or place != len(text) or not math.isfinite(seconds):
        raise ValueError(f"{text!r} is not a duration such as 30s, 10m, 1h30m or 2d")
    return seconds


class Duration(click.ParamType):
    """Seconds, from text as ``parse_duration``. ``days_max``: no more than that, and above zero."""

    name = "duration"

    def __init__(self, days_max: int | None = None) -> None:
        self._days_max = days_max

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See ``click.ParamType``."""
        try:
            seconds = float(value) if isinstance(value, int | float) else parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if self._days_max is not None and not 0 < seconds <= self._days_max * _UNITS_S["d"]:
            self.fail(f"{value!r} is not above zero and at most {self._days_max} days", param, ctx)
        return seconds


class Percent(click.ParamType):
    """Above 0 and at most 100, from ``25`` or ``25%``."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See ``click.ParamType``."""
        text = str(value).strip().removesuffix("%").strip()
        try:
            percent = float(text)
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            self.fail(f"{value!r} is not above 0 and at most 100", param, ctx)
        return percent


class Size(click.ParamType):
    """Bytes, from ``512MiB``, ``4GiB`` or ``1048576``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See ``click.ParamType``."""
        try:
            return parse_size(value)
        except InvalidRequest as error:
            self.fail(error.reason, param, ctx)
