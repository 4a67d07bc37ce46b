"""Vacating: what becomes of a frame that its page leaves.

Most are free at once. A frame of NVMe that has an object's head, or into which one was perhaps written, has to be
erased before another page gets it, or a reboot might bring an object back that was deleted since::

    SEALED, RESERVED ──> FREE
                    └──> RETIRING ──Erase, Erased──> FREE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.model.replica import Address
from kvstore.state import events as ev

Erasing = Callable[[list[tuple[bytes, Address]], list[ev.Instruction]], None]
"""Has these frames erased, that are RETIRING: the keys of what was there, where known, and where."""


@dataclass(slots=True)
class Vacated:
    """Frames that pages left, renewed: those that are free at once, and those (with keys) that must be erased first."""

    free: list[Address] = field(default_factory=list)
    wiped: list[tuple[bytes, Address]] = field(default_factory=list)


class Leaving(NamedTuple):
    """Pages that leave by one decision: their frames; keys; roots; spans; copies below, with the use they inherit."""

    vacated: Vacated
    keys: list[bytes]
    roots: list[bytes]
    spans: list[int]
    copies: list[tuple[Address, int]]
