"""The daemon is killed at every store of every decision about NVMe; the next start goes on, and loses nothing."""

from __future__ import annotations

from itertools import count

import pytest

from kvstore.model.replica import FrameClass, FrameState, Status
from kvstore.state import events as ev
from kvstore.state import instructions as do
from kvstore.state.interfaces import TieringRules
from tests.helpers.worlds.copying import WorldDisk
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.tiered_world import TieredWorld
from tests.helpers.worlds.world import Chain

SMALL, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 2)
EXTENT_BYTES, NVME_EXTENT_BYTES = 32 << 10, 136 << 10  # 8 SMALL frames or 2 LARGE ones; on NVMe 16 or 6
POSITIONS, NVME_POSITIONS = 2, 3
A = 1


class CutWorld(TieredWorld):
    """Is killed after ``steps`` stores of the ``which``-th decision about an event of ``kind``."""

    def __init__(self, kind: str, which: int, steps: int) -> None:
        disk = WorldDisk(NVME_EXTENT_BYTES, NVME_POSITIONS, steps)
        super().__init__(EXTENT_BYTES, POSITIONS, Nvme(disk, TieringRules(demote_at=0.3)))
        self.kind, self.which, self.steps = kind, which, steps
        self.seen = 0
        self.cut = False

    def send(self, event: ev.Event) -> do.Reply | None:
        """See ``World.send``."""
        if type(event).__name__ != self.kind:
            return super().send(event)
        self.seen += 1
        if self.seen != self.which:
            return super().send(event)
        instructions = self.state.handle(event)
        self._account(event, instructions)
        self.node.perform(instructions, self.steps)
        self.cut = self.node.killed
        self.restart()
        self.check()
        return None

    # --- a history in which everything happens once -----------------------------------------------------------------

    def put(self, *args: object, **options: object) -> list[int]:
        """See ``World.put``, or store pages of a chain, as far as there is room."""
        if not isinstance(args[0], Chain):
            return super().put(*args, **options)  # type: ignore[arg-type]
        chain = args[0]
        self.populate([i for i in range(POSITIONS) if i not in self.state.segment.populated])
        self.open(A)
        self.now_ns += 1_000_000
        stored = self.stored_pages(chain)
        short = len(chain.path) - stored - len(self.clients[A].granted.get(chain.frame_class, []))
        anchor = chain.keys[stored - 1] if stored else b""
        if short > 0 and not self.grant(A, chain.frame_class, short, anchor=anchor) and self.status == Status.BUSY:
            self.settle()
            self.grant(A, chain.frame_class, short, anchor=anchor)
        return super().put(A, chain, min(stored, self.stored_pages(chain))) if stored < len(chain.path) else []

    def run(self) -> None:
        """Put, save, load, drop, steal, reboot, scan."""
        for i in range(21):
            self.put(Chain(SMALL, (i, i)))
        self.settle()
        if self.node.nvme_index:
            self.damage_below(min(self.node.nvme_index))  # so that something may move
        for i in range(3):
            self.put(Chain(LARGE, (i, i)))
        self.settle()
        for i in range(18, 21):
            self.prefetch(A, Chain(SMALL, (i, i)))
            self.settle()
            self.put(Chain(SMALL, (i, i, 9)))
            self.settle()
        self.evict(pages=4)
        for key in (Chain(SMALL, (16, 16)).keys[0], Chain(SMALL, (17, 17)).keys[1]):
            if key in self.node.nvme_index:
                self.damage_below(key)
        self.settle()
        taken = self.snapshot(0)
        if taken is not None:
            self.checkpoint(taken)
        for i in range(22, 25):
            self.put(Chain(SMALL, (i, i)))
        self.settle()
        self.reboot()
        while self.scan_on(count=4):
            self.put(Chain(SMALL, (1, 1)))
        self.fail({1})
        for i in range(30, 34):
            self.put(Chain(SMALL, (i, i)))
        self.settle()

    def finish(self) -> None:
        """At rest, nothing is held by anybody."""
        while self.scan_on():
            pass
        for session in list(self.clients):
            self.kill(session, noticed=False)
        for session in list(self.state.sessions):
            self.lose(session)
        self.tick(100 * 10**9)
        self.settle()
        self.check()
        for space in self.state.spaces.values():
            for extent in space.segment.extents.values():
                assert extent.count(FrameState.FREE) + extent.sealed == extent.frames


KINDS = (
    "Grant",
    "Demote",
    "Saved",
    "Prefetch",
    "Loaded",
    "Carried",
    "Evict",
    "Damaged",
    "Adopt",
    "Adopted",
    "TierFailed",
)
PARTS = 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_every_store(kind: str, part: int) -> None:
    """Every ``PARTS``-th decision of a kind, so that several processes share them."""
    cuts = 0
    for which in count(1 + part, PARTS):
        for steps in count():
            world = CutWorld(kind, which, steps)
            world.run()
            world.finish()
            world.node.close()
            if not world.cut:
                break
            cuts += 1
        if world.seen < which:
            break
    assert cuts > 0 or 0 < world.seen <= part
