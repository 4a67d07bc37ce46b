"""Choosing: pages that an operator named leave, those that may. What is chosen, and why the rest stays.

Addresses come leaves first, so that a whole tail leaves in one decision. A worked example, a chain A B C where C is
leased and the names come as ``C B A``::

    C   leased      stays, "leased"
    B   has C       stays, "children"
    A   has B       stays, "children"
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.model.replica import Address
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.space import UNSAVED_MAX, Space

CHANGED, LEASED, CHILDREN, UNSAVED = "changed", "leased", "children", "unsaved"


class Choosing:
    """Decides about ``events.EvictChosen``. Part of ``NodeState``."""

    def __init__(self, space_of: Callable[[int], Space]) -> None:
        self._space_of = space_of

    def evict(self, event: ev.EvictChosen) -> list[do.Instruction]:
        """Reply detail: ``gone`` (places in ``addresses``) and ``stayed`` (place -> reason)."""
        out: list[do.Instruction] = []
        gone: list[int] = []
        stayed: dict[int, str] = {}
        if event.addresses:
            space = self._space_of(event.addresses[0].extent)
            self._leave(space, event, gone, stayed, out)
            assert len(gone) + len(stayed) == len(event.addresses), "every page goes or stays"
        out.append(do.Reply(detail={"gone": gone, "stayed": stayed}))
        return out

    def _leave(
        self, space: Space, event: ev.EvictChosen, gone: list[int], stayed: dict[int, str], out: list[do.Instruction]
    ) -> None:
        leaving = space.departures.leaving()
        for place, address in enumerate(event.addresses):
            reason = self._stays(space, address, event.save)
            if reason:
                stayed[place] = reason
            else:
                space.departures.leave(space.segment.extents[address.extent], address.frame, leaving)
                gone.append(place)
        space.departures.left(leaving, "request", out)

    def _stays(self, space: Space, address: Address, save: bool) -> str:
        """Why a page may not leave now; "" where it may. One that has to be saved first is set aside for that."""
        if not space.pages.sealed(address):
            return CHANGED
        extent = space.segment.extents[address.extent]
        if space.pages.leases.holds(address.extent, address.frame):
            return LEASED
        if extent.children[address.frame]:
            return CHILDREN
        pool, slot = extent.pool, extent.slot_base + address.frame
        full = len(pool.unsaved) >= UNSAVED_MAX and slot not in pool.ready
        if save and space.departures.below is not None and (full or not space.departures.may_leave(pool, slot)):
            return UNSAVED
        return ""
