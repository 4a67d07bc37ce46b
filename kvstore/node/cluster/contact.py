"""Contact: when a node last had contact with its pool, and which objects it drops after a long time without contact.

Other nodes keep tombstones of deleted and replaced objects for ``TOMBSTONE_S``. A node that was away for longer may
have objects whose tombstones have ended. So before it announces anything again, it drops every object that was put more
than ``TOMBSTONE_S`` ago. The tombstones of newer objects still exist.

The time of the last contact is in the node's header, and on its NVMe devices, so that it survives a reboot.
"""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import Final

import numpy as np

from kvstore.model.objects import HEAD_TAG, STAMP_BYTES, is_object_class
from kvstore.model.replica import Address, FrameState, Status
from kvstore.model.tombstones import TOMBSTONE_S
from kvstore.node.node import Node
from kvstore.node.performer import Performer
from kvstore.state import events as ev
from kvstore.state.node_state import NodeState
from kvstore.wire.control import BATCH_MAX

SLICE_FRAMES: Final = 1 << 14  # read under the node's lock at a time
_NS_PER_MINUTE: Final = 60 * 10**9

log = logging.getLogger("kvstore.cluster")


class Contact:
    """The contact of one node with its pool. Used by one thread."""

    def __init__(self, node: Node) -> None:
        self._node = node

    @property
    def is_away(self) -> bool:
        """True if the node had no contact for longer than tombstones are kept, or never had any."""
        header, nvme = self._node.performer.header, self._node.nvme
        on_nvme = nvme.devices.contact if nvme is not None else None
        last = min(minute for minute in (header.contact, on_nvme) if minute is not None)
        return _minute() - last > TOMBSTONE_S // 60

    def note(self) -> None:
        """Note that the node has contact now."""
        header, nvme, now = self._node.performer.header, self._node.nvme, _minute()
        if header.contact != now:
            header.contact = now
        if nvme is not None:
            with contextlib.suppress(OSError):  # the device keeps the time of an earlier contact
                nvme.devices.note_contact(now)

    def drop_old_objects(self) -> bool:
        """Drop the objects that were put more than ``TOMBSTONE_S`` ago. Return False if some could not be dropped now.

        Raises:
            Unavailable: the node is stopping, or a device failed.
        """
        limit_ns, dropped, remaining = time.time_ns() - TOMBSTONE_S * 10**9, 0, 0
        for number, frames in self._node.look(_object_extents):
            for first in range(0, frames, SLICE_FRAMES):
                part = slice(first, first + SLICE_FRAMES)
                addresses = self._node.look(partial(_old_heads, number=number, frames=part, limit_ns=limit_ns))
                for start in range(0, len(addresses), BATCH_MAX):
                    event = ev.Delete(time.monotonic_ns(), addresses[start : start + BATCH_MAX])
                    statuses = self._node.handle(event).statuses
                    dropped += statuses.count(Status.OK)
                    remaining += statuses.count(Status.BUSY)
        if dropped or remaining:
            log.warning("was away from the pool: dropped %d old objects, %d remain", dropped, remaining)
        return not remaining


def _minute() -> int:
    return time.time_ns() // _NS_PER_MINUTE


def _object_extents(performer: Performer, state: NodeState) -> list[tuple[int, int]]:
    """Return (number, frames) of each extent that may hold objects."""
    extents = [extent for space in state.spaces.values() for extent in space.segment.extents.values()]
    return [(each.number, each.frames) for each in extents if is_object_class(each.pool.frame_class)]


def _old_heads(performer: Performer, state: NodeState, number: int, frames: slice, limit_ns: int) -> list[Address]:
    """Return the addresses of the heads in these frames whose stamps are smaller than ``limit_ns``."""
    extent = next((each for space in state.spaces.values() if (each := space.segment.extents.get(number))), None)
    if extent is None:  # it was dropped
        return []
    sealed = np.frombuffer(extent.state, np.uint8)[frames] == FrameState.SEALED
    at = np.flatnonzero(sealed) + (frames.start or 0)
    table = performer.tables[number]
    extras = table.rows[at][:, table.fmt.extra]
    start = len(HEAD_TAG)
    is_head = (extras[:, :start] == np.frombuffer(HEAD_TAG, np.uint8)).all(axis=1)
    stamps = np.ascontiguousarray(extras[:, start : start + STAMP_BYTES]).view("<u8")[:, 0]
    return [
        Address(number, frame, int(extent.generation[frame])) for frame in at[is_head & (stamps < limit_ns)].tolist()
    ]
