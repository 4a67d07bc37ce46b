"""Clearing: an extent of a tier below that another class needs is emptied while the node goes on.

Its pages cannot be moved by the decision itself, as those of the first tier are: a device may take long, or never
answer. So the
extent grants nothing from then on (``Extent.leaving``), and what is still wanted of it is carried into other extents
of its class, a batch at a time::

    begin ──> Carry ──> Carried ──> Carry ... ──> all frames free ──> Drop
                          └─ something failed, or there is no room ──> it stays, and grants again

A page is held while it is carried, and is read at its old place. It is at its new one when that is durable; a page that
could not be written stays where it was. Copies and erasures under way are waited for.
"""

from __future__ import annotations

from collections import Counter

from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.space import Space
from kvstore.state.tiering.copying import CopyBatch, CopyBatches

CARRY_BYTES_MAX = 32 << 20  # on their way at a time
FREE, SEALED = FrameState.FREE, FrameState.SEALED


class Clearing:
    """Empties one extent at a time (``space.Clears``). Part of ``Tiering``."""

    def __init__(self, copies: CopyBatches, space: Space) -> None:
        self.taker: ClassPool | None = None
        self._copies = copies
        self._space = space
        self._extent: Extent | None = None

    def begin(self, extent: Extent, taker: ClassPool, out: list[do.Instruction]) -> None:
        """See ``space.Clears``."""
        assert self.taker is None
        self.taker, self._extent = taker, extent
        extent.leave(True)
        self.go_on(out)

    def go_on(self, out: list[do.Instruction]) -> None:
        """A copy has ended, or frames were erased: carry what is left, or drop the extent.

        Pages that this very event has sealed, or moved, have no record yet where they are, so it would be unknown which
        ones he lets leave: where there are some, the next ``Demote`` goes on.
        """
        extent = self._extent
        if (
            extent is None
            or self._space.pages.fresh
            or any(batch.source is self._space for batch in self._copies.carrying.values())
        ):
            return
        if extent.closed:
            self._end()
            return
        most = max(1, CARRY_BYTES_MAX // self._space.segment.stride(extent.pool.frame_class))
        short = min(most, extent.sealed) - extent.pool.free
        if short > 0:  # others were saved there since
            self._space.evict_for(extent.pool, short, out)
        if extent.count(FREE) == extent.frames:
            self._end()
            self._space.drop_extent(extent, out)
            return
        copied = set(self._copies.held(self._space))
        sealed = (f for f in range(extent.frames) if extent.state[f] == SEALED)
        sources = [Address(extent.number, frame, extent.generation[frame]) for frame in sealed]
        sources = [source for source in sources if source not in copied][:most]
        if sources and not self._carry(extent.pool, sources, out):
            self._end()

    def _end(self) -> None:
        extent, self._extent, self.taker = self._extent, None, None
        assert extent is not None
        extent.leave(False)

    def _carry(self, pool: ClassPool, sources: list[Address], out: list[do.Instruction]) -> bool:
        """Have these pages copied, as many as there is room for. False: there is none."""
        space = self._space
        targets = space.pages.grant(pool, len(sources))
        keys = [space.pages.records.key(source.extent, source.frame) for source in sources]
        pages = [do.Copying(*page) for page in zip(keys, sources, targets, strict=False)]
        if pages:
            self._copies.start_carrying(CopyBatch(pages, pool.frame_class, self._space, self._space), out)
        return bool(pages)

    def carried(self, event: ev.Carried) -> list[do.Instruction]:
        """See ``events.Carried``: what was copied, and still is where it was, has moved."""
        out: list[do.Instruction] = []
        batch = self._copies.carrying.pop(event.number)
        space, copied = self._space, Counter(self._copies.held(self._space))
        unused: dict[Address, bytes] = {}
        wiped: list[tuple[bytes, Address]] = []
        for i, page in enumerate(batch.pages):
            there = space.pages.sealed(page.source)
            if there:
                space.pages.unhold(page.source)
            if i in event.failed or not there or copied[page.source]:
                unused[page.target] = page.key
                continue
            key, freed = space.pages.move(page.source, page.target, out)
            if space.segment.extents[freed.extent].state[freed.frame] != FREE:
                wiped.append((key, freed))
        if wiped:
            self._copies.start_erasing(wiped, out)
        space.pages.free(list(unused), out, unused)
        for reason in event.failed.values():
            self._copies.counters[f"move_failed_{reason}"] += 1
        if event.failed and self._extent is not None:
            self._end()
        self.go_on(out)
        return out
