"""The daemon is killed at every store of every decision about NVMe; the next start goes on, and loses nothing."""

from __future__ import annotations

from functools import cache

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


class History(TieredWorld):
    """A history in which everything happens once: the same one every time, until a kill.

    Attributes:
        stores: the kind of event of every decision, and how many stores it made, if ``node.counts``. Its end is one.
    """

    def __init__(self) -> None:
        disk = WorldDisk(NVME_EXTENT_BYTES, NVME_POSITIONS)
        super().__init__(EXTENT_BYTES, POSITIONS, Nvme(disk, TieringRules(demote_at=0.3)))
        self.stores: list[tuple[str, int]] = []

    def send(self, event: ev.Event) -> do.Reply | None:
        """See ``World.send``."""
        before = self.node.counted
        reply = super().send(event)
        self.stores.append((type(event).__name__, self.node.counted - before))
        return reply

    def put(self, *args: object, **options: object) -> list[int]:
        """See ``World.put``, or store pages of a chain, as far as there is room."""
        if not isinstance(args[0], Chain):
            return super().put(*args, **options)  # type: ignore[arg-type]
        chain = args[0]
        if unpopulated := [i for i in range(POSITIONS) if i not in self.state.segment.populated]:
            self.populate(unpopulated)
        known = self.state.sessions.get(A)
        if A not in self.clients or known is None or not known.connected:
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


class CutHistory(History):
    """The history, with a kill before store ``store`` of decision ``decision``."""

    def __init__(self, decision: int, store: int) -> None:
        super().__init__()
        self.decision, self.store = decision, store
        self.cut = False

    def send(self, event: ev.Event) -> do.Reply | None:
        """See ``World.send``."""
        if self.cut or len(self.stores) != self.decision:
            return super().send(event)
        instructions = self.state.handle(event)
        self._account(event, instructions)
        self.node.perform(instructions, self.store)
        assert self.node.killed
        self.cut = True
        self.restart()
        self.check()
        return None


KINDS = {
    *("Grant", "Demote", "Saved", "Prefetch", "Loaded", "Carried"),
    *("Evict", "Damaged", "Adopt", "Adopted", "TierFailed"),
}
PARTS = 12


@cache
def kills() -> list[tuple[str, int, int]]:
    """Every store of every decision about an event of ``KINDS``: (kind, decision, store)."""
    history = History()
    history.node.counts = True
    history.run()
    history.finish()
    history.node.close()
    decisions = [(kind, number, stores) for number, (kind, stores) in enumerate(history.stores) if kind in KINDS]
    return [(kind, number, store) for kind, number, stores in decisions for store in range(stores)]


def test_every_kind_of_decision_is_killed() -> None:
    assert {kind for kind, _, _ in kills()} == KINDS


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_every_store(part: int) -> None:
    """Every ``PARTS``-th kill, so that several processes share them."""
    for kind, decision, store in kills()[part::PARTS]:
        history = CutHistory(decision, store)
        try:
            history.run()
            history.finish()
            assert history.cut
        except BaseException as error:
            error.add_note(f"killed before store {store} of decision {decision}, {kind}")
            raise
        history.node.close()
