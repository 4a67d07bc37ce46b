"""Arguments: what callers give that every store checks alike. Each check raises InvalidRequest naming the field."""

from __future__ import annotations

from typing import Any

from kvstore.errors import InvalidRequest

SECONDS_MAX = 1e6


def check_seconds(value: Any, field: str) -> float:
    """A number of seconds, more than zero."""
    if not isinstance(value, int | float) or not 0 < value < SECONDS_MAX:
        raise InvalidRequest(field, f"must be positive seconds, not {value!r}")
    return value


def check_text(value: Any, field: str) -> str:
    """Text that UTF-8 can say."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be text, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid text ({error.reason})") from None
    return value
