"""Stamps of opaque objects: the later of two values of a key, or of a value and a deletion, has the larger stamp.

A stamp is the time of this machine's clock, or a later number: later than every tombstone of the node, and than every
value that the decision found on other nodes.
"""

from __future__ import annotations

import secrets
import time

from kvstore.client.local.node import MappedNode
from kvstore.model.objects import RANDOM_BYTES, make_nonces


def wall_ns() -> int:
    """Return the time of this machine's clock, in nanoseconds since the epoch."""
    return time.time_ns()


def new_stamp(mapped: MappedNode, known: int = 0) -> int:
    """Return a stamp for a put or a deletion that is decided now. The stamp is later than ``known``, and than every
    tombstone of the node, even if the clock of another machine is ahead."""
    return max(wall_ns(), mapped.header.object_stamp + 1, known + 1)


def new_nonces(stamp: int, count: int) -> list[bytes]:
    """Return nonces of values that are put with this stamp."""
    return make_nonces(stamp, secrets.token_bytes(RANDOM_BYTES * count))
