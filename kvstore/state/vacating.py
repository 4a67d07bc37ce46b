"""Vacating: what becomes of a frame that its page leaves.

Most are free at once. A frame of NVMe in which an object's head lies, or was perhaps written in vain, has to be erased
before anybody else gets it, or a reboot might bring an object back that was deleted since::

    SEALED, RESERVED ──> FREE
                    └──> RETIRING ──Erase, Erased──> FREE
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from kvstore.model.objects import HEAD_TAG, is_object_class
from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state.frames import Segment
from kvstore.state.views import RecordView

Erasing = Callable[[list[tuple[bytes, Address]], list[ev.Instruction]], None]
"""Has these frames erased, that are RETIRING: the keys of what was there, where known, and where."""


class Vacating(Protocol):
    """What is asked of a tier."""

    segment: Segment
    records: RecordView
    erase: Erasing | None


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


def must_erase(tier: Vacating, address: Address) -> bool:
    """What lies in this frame has to be made unreadable before anybody else has it."""
    extent = tier.segment.extents[address.extent]
    if tier.erase is None or not is_object_class(extent.pool.frame_class):
        return False
    state = extent.state[address.frame]
    if state == FrameState.SEALED:
        return tier.records.extra(extent.number, address.frame)[: len(HEAD_TAG)] == HEAD_TAG
    return state in (FrameState.RESERVED, FrameState.RETIRING)
