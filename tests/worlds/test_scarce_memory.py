"""A node whose tmpfs runs out of memory, by others and by itself, under load and with kills: one seed, one history.

Tables that cannot be made, positions that cannot be populated, an index that has no room for a large transaction. What
a decision needs is had before it is made (``node.node``), so none is performed by half: an extent without
tables, or an index that cannot follow, is an AssertionError here, and was 151 broken laws in a real node.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvstore.model.replica import FrameClass
from kvstore.node.node import make_room
from kvstore.state import events as ev
from kvstore.state import instructions as do
from tests.helpers.worlds.simulation import EXTENT_BYTES, LARGE, POSITIONS, SMALL, Simulation
from tests.helpers.worlds.world import World

STEPS = 1600
ROW = 3  # units of memory per frame of a table; of an index entry: 1; a position has EXTENT
EXTENT = 400
HEADROOM = 60
STEP = 16  # changes of a small transaction


class ScarceMemory:
    """``FolderMemory`` and ``real_node.Scarce``: a number of units, which other processes take and give back."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = self.random.choice([2, 5, 9]) * EXTENT
        self.taken = 0  # by others
        self.mapped = 0  # tables that are no more, and that somebody still maps
        self.index_units = 2 * STEP
        self.spares: Counter[tuple[FrameClass, int]] = Counter()
        self.refused: Counter[str] = Counter()

    def blocked(self) -> bool:
        return False

    def press(self) -> None:
        """Others take memory, or give it back."""
        if self.random.random() < 0.5:
            took = self.random.choice([self.free, self.free // 2])
            self.free, self.taken = self.free - took, self.taken + took
        else:
            self.free, self.taken = self.free + self.taken, 0
        self.free, self.mapped = self.free + self.mapped, 0

    def tables(self, frame_class: FrameClass, frames: int, count: int) -> int:
        """See ``FolderMemory``."""
        while self.spares[frame_class, frames] < count and self.free >= frames * ROW:
            self.free -= frames * ROW
            self.spares[frame_class, frames] += 1
        have = min(count, self.spares[frame_class, frames])
        self.refused["tables"] += have < count
        return have

    def index(self, frames_more: int) -> bool:
        """See ``FolderMemory``."""
        more = max(0, self.frames + frames_more + 2 * STEP - self.index_units)
        if more > self.free:
            self.refused["index"] += 1
            return False
        self.free, self.index_units = self.free - more, self.index_units + more
        return True

    def low(self) -> bool:
        """See ``FolderMemory``."""
        return self.free < HEADROOM

    def give_back(self, position: int) -> None:
        """See ``FolderMemory``."""
        self.refused["positions"] += 1
        self.free += EXTENT

    frames = 0  # of all extents

    def take_table(self, frame_class: FrameClass, frames: int) -> None:
        """See ``real_node.Scarce``."""
        assert self.spares[frame_class, frames], "an extent is carved that no table was made for"
        self.spares[frame_class, frames] -= 1
        self.frames += frames

    def drop(self, frames: int) -> None:
        """See ``real_node.Scarce``."""
        self.mapped += frames * ROW
        self.frames -= frames

    def commit(self, changes: int, entries: int) -> None:
        """See ``real_node.Scarce``. In one transaction, or in small ones, which always have to be possible."""
        spare = self.index_units - entries
        if 4 * changes > spare + self.free:
            self.refused["transactions"] += 1
            assert min(changes, STEP) <= spare, "the index cannot follow"


class ScarceWorld(World):
    """Asks for room before it decides, as ``Node`` does."""

    memory: ScarceMemory

    def send(self, event: ev.Event) -> do.Reply | None:
        """See ``World``."""
        if isinstance(event, ev.Grant | ev.Reserve):
            count = event.count if isinstance(event, ev.Grant) else len(event.rows)
            make_room(self.state, self.memory, event.frame_class, count, self.now_ns)
        reply = super().send(event)
        self.state.segment.tables.clear()
        return reply

    def populate(self, positions: list[int], *, failed: bool = False) -> None:
        """See ``World``."""
        for position in positions:
            enough = self.memory.free >= EXTENT
            self.memory.free -= EXTENT if enough else 0
            super().populate([position], failed=not enough)

    def restart(self) -> None:
        """See ``World``: the tables that nobody took are removed, those of extents are counted as they are found."""
        for (_, frames), count in self.memory.spares.items():
            self.memory.free += count * frames * ROW
        self.memory.spares.clear()
        super().restart()
        self.memory.frames = sum(table.frames for table in self.node.tables.values())


class ScarceSimulation(Simulation):
    """The same clients, and others that fill the tmpfs."""

    def __init__(self, seed: int, *, crash_every: int) -> None:
        super().__init__(seed, crash_every=crash_every)
        self.world = world = ScarceWorld(EXTENT_BYTES, POSITIONS, now_ns=self.world.now_ns)
        self.memory = world.memory = world.node.scarce = ScarceMemory(seed)

    def _something(self) -> None:
        if self.random.random() < 0.05:
            self.memory.press()
        super()._something()
        if self.random.random() < 0.1:
            self.world.check()

    def _window(self, step: int) -> None:
        """Who comes late may find no memory at all."""


@pytest.mark.parametrize("seed", range(8))
def test_memory_runs_out(seed: int) -> None:
    simulation = ScarceSimulation(seed, crash_every=(0, 40)[seed % 2])
    simulation.run(STEPS)
    refused = simulation.memory.refused
    assert refused["tables"] + refused["index"] + refused["transactions"] > 0, "there was memory for everything"
    assert sum(simulation.sealed[frame_class] for frame_class in (SMALL, LARGE)) > 0
