"""Answers of admin calls: how much of a list fits one message."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

ANSWER_BYTES: Final = 100 * 1024  # of the lists in an answer; a local message has 128 KiB


def fitted(items: Iterable[Any], bytes_max: int = ANSWER_BYTES) -> list[Any]:
    """The first of ``items`` that take at most ``bytes_max`` as JSON, but at least one."""
    found: list[Any] = []
    left = bytes_max
    for item in items:
        left -= len(json.dumps(item)) + 2
        if found and left < 0:
            break
        found.append(item)
    return found
