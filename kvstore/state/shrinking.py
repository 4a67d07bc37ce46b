"""Shrinking: extents beyond a segment's bound give their positions up. See ``Segment.limit``; of DRAM alone.

Nothing is granted there any more (``Extent.close``). What is stored there moves into other extents of its class, which
evict as many of their coldest pages for it as have no room. Leases, reservations and copies on their way keep an extent
where it is; it is asked again.
"""

from __future__ import annotations

from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state.frames import Extent
from kvstore.state.space import Space

FREE, SEALED = FrameState.FREE, FrameState.SEALED


def shrink(space: Space, out: list[ev.Instruction]) -> None:
    """Empty one extent beyond the bound, if one can be: one decision moves no more than that."""
    beyond = [extent for extent in space.segment.extents.values() if extent.position >= space.segment.bound]
    kept = space.leases.extents() | space.in_flight() if beyond else set()
    for extent in beyond:
        still = extent.number not in kept and extent.count(FREE) + extent.sealed == extent.frames
        if still and _fits(space, extent, out):
            for frame in [frame for frame in range(extent.frames) if extent.state[frame] == SEALED]:
                target = space.grant(extent.pool, 1)[0]
                space.move(Address(extent.number, frame, extent.generation[frame]), target, out)
            space.drop_extent(extent, out)
            return


def _fits(space: Space, extent: Extent, out: list[ev.Instruction]) -> bool:
    """What is sealed there finds room in other extents, once these have evicted their coldest pages."""
    pool = extent.pool  # whose free frames do not count those of an extent that grants nothing
    if extent.sealed > pool.free:
        space.evict_for(pool, extent.sealed - pool.free, out)
    return extent.sealed <= pool.free
