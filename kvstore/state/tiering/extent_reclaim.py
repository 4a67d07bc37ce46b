"""Extent reclaim: an extent of a lower tier that another class needs is emptied while the node keeps working.

In the first tier a decision moves the pages of an extent itself. In a lower tier it cannot: a device may take long, or
never answer. So the extent grants no more frames (``Extent.leaving``), and its remaining pages are carried into other
extents of its class, one batch at a time::

    start ──> Carry ──> Carried ──> Carry ... ──> all frames free ──> Drop
                          └─ a copy failed, or there is no room ──> the extent stays, and grants frames again

A page is held while it is carried, and is read at its old place until the copy is durable. A page that could not be
written stays where it was. The reclaim waits for copies and erasures that have already started.
"""

from __future__ import annotations

from collections import Counter

from kvstore.model.replica import Address, FrameState
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.frames import ClassPool, Extent
from kvstore.state.space import Space
from kvstore.state.tiering.copying import CopyBatch, CopyBatches

CARRY_BYTES_MAX = 32 << 20  # bytes of a batch
FREE, SEALED = FrameState.FREE, FrameState.SEALED


class ExtentReclaim:
    """The reclaim of one extent at a time (a ``space.ExtentEmptier``). Part of ``Tiering``."""

    def __init__(self, copies: CopyBatches, space: Space) -> None:
        self.taker: ClassPool | None = None
        self._copies = copies
        self._space = space
        self._extent: Extent | None = None

    def start(self, extent: Extent, taker: ClassPool, out: list[do.Instruction]) -> None:
        """Start emptying this extent for ``taker``. It is dropped once it is empty."""
        assert self.taker is None
        self.taker, self._extent = taker, extent
        extent.set_leaving(True)
        self.proceed(out)

    def proceed(self, out: list[do.Instruction]) -> None:
        """Carry the next pages, or drop the empty extent. Call this when a copy or an erasure has ended.

        Pages that this event has sealed or moved have no record at their new place yet, so the policy could not judge
        them. If there are any, the next ``Demote`` continues.
        """
        extent = self._extent
        if (
            extent is None
            or self._space.pages.fresh
            or any(batch.source is self._space for batch in self._copies.carrying.values())
        ):
            return
        if extent.closed:
            self._stop()
            return
        most = max(1, CARRY_BYTES_MAX // self._space.segment.stride(extent.pool.frame_class))
        short = min(most, extent.sealed) - extent.pool.free
        if short > 0:  # pages were saved there in the meantime
            self._space.evict_for_move(extent.pool, short, out)
        if extent.count(FREE) == extent.frames:
            self._stop()
            self._space.drop_extent(extent, out)
            return
        held = set(self._copies.held_pages(self._space))
        sealed = (f for f in range(extent.frames) if extent.state[f] == SEALED)
        sources = [Address(extent.number, frame, extent.generation[frame]) for frame in sealed]
        sources = [source for source in sources if source not in held][:most]
        if sources and not self._carry(extent.pool, sources, out):
            self._stop()

    def _stop(self) -> None:
        extent, self._extent, self.taker = self._extent, None, None
        assert extent is not None
        extent.set_leaving(False)

    def _carry(self, pool: ClassPool, sources: list[Address], out: list[do.Instruction]) -> bool:
        """Start carrying as many of these pages as there is room for. Return False if there is no room."""
        space = self._space
        targets = space.pages.grant(pool, len(sources))
        keys = [space.pages.records.key(source.extent, source.frame) for source in sources]
        pages = [do.Copying(*page) for page in zip(keys, sources, targets, strict=False)]
        if pages:
            self._copies.start_carrying(CopyBatch(pages, pool.frame_class, self._space, self._space), out)
        return bool(pages)

    def carried(self, event: ev.Carried) -> list[do.Instruction]:
        """Handle ``events.Carried``: pages that were copied and are still at their old place have moved."""
        out: list[do.Instruction] = []
        batch = self._copies.carrying.pop(event.number)
        space, holds = self._space, Counter(self._copies.held_pages(self._space))
        unused: dict[Address, bytes] = {}
        to_erase: list[tuple[bytes, Address]] = []
        for i, page in enumerate(batch.pages):
            is_sealed = space.pages.sealed(page.source)
            if is_sealed:
                space.pages.unhold(page.source)
            if i in event.failed or not is_sealed or holds[page.source]:
                unused[page.target] = page.key
                continue
            key, freed = space.pages.move(page.source, page.target, out)
            if space.segment.extents[freed.extent].state[freed.frame] != FREE:
                to_erase.append((key, freed))
        if to_erase:
            self._copies.start_erasing(to_erase, out)
        space.pages.free(list(unused), out, unused)
        for reason in event.failed.values():
            self._copies.counters[f"move_failed_{reason}"] += 1
        if event.failed and self._extent is not None:
            self._stop()
        self.proceed(out)
        return out
