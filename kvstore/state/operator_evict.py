"""Eviction of chosen pages: an operator names pages of one tier. The reply says why a page stays.

Addresses come leaves first, so that a whole tail leaves in one decision. A worked example: in a chain A B C the page C
is leased, and the addresses are those of ``C B A``::

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


class ChosenEviction:
    """The decisions about ``events.EvictChosen``. Part of ``NodeState``."""

    def __init__(self, space_of: Callable[[int], Space]) -> None:
        self._space_of = space_of

    def evict(self, event: ev.EvictChosen) -> list[do.Instruction]:
        """Evict pages. The reply's detail has ``gone`` (places in ``addresses``) and ``stayed`` (place -> reason)."""
        out: list[do.Instruction] = []
        evicted: list[int] = []
        stayed: dict[int, str] = {}
        if event.addresses:
            space = self._space_of(event.addresses[0].extent)
            self._evict(space, event, evicted, stayed, out)
            assert len(evicted) + len(stayed) == len(event.addresses), "every page leaves or stays"
        out.append(do.Reply(detail={"gone": evicted, "stayed": stayed}))
        return out

    def _evict(
        self, space: Space, event: ev.EvictChosen, evicted: list[int], stayed: dict[int, str], out: list[do.Instruction]
    ) -> None:
        leaving = space.departures.new_batch()
        for place, address in enumerate(event.addresses):
            reason = self._reason_to_stay(space, address, event.save)
            if reason:
                stayed[place] = reason
            else:
                space.departures.leave(space.segment.extents[address.extent], address.frame, leaving)
                evicted.append(place)
        space.departures.finish(leaving, "request", out)

    def _reason_to_stay(self, space: Space, address: Address, save: bool) -> str:
        """Return why a page has to stay now, or "". A page that must be saved first is set aside for that."""
        if not space.pages.sealed(address):
            return CHANGED
        extent = space.segment.extents[address.extent]
        if space.pages.leases.holds(address.extent, address.frame):
            return LEASED
        if extent.children[address.frame]:
            return CHILDREN
        pool, slot = extent.pool, extent.slot_base + address.frame
        is_full = len(pool.unsaved) >= UNSAVED_MAX and slot not in pool.ready
        if save and space.departures.below is not None and (is_full or not space.departures.may_leave(pool, slot)):
            return UNSAVED
        return ""
