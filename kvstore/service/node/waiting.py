"""Waiting: what a node decided that takes its time. The performer puts it here, threads of ``upkeep`` carry it out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvstore.model.replica import Address
from kvstore.state import events as ev

UNSTAMPED_MAX = 16384  # sealed pages waiting for checksums; beyond, the scrubber's sweep finds them

Work = ev.Save | ev.Carry | ev.Erase
"""What waits for a device that is written to."""


@dataclass(slots=True)
class Waiting:
    """Queues; all but the last are bounded by what ``Tiering`` allows to be on its way.

    Attributes:
        copies: for the mover, which writes.
        loads: for the mover, which reads.
        relays: of tiers that the mover has no hand on.
        unstamped: sealed pages without checksums.
    """

    copies: deque[Work] = field(default_factory=deque)
    loads: deque[ev.Load] = field(default_factory=deque)
    relays: deque[Work | ev.Load] = field(default_factory=deque)
    unstamped: deque[Address] = field(default_factory=lambda: deque(maxlen=UNSTAMPED_MAX))
