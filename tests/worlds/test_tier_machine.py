"""``NodeMachine`` with NVMe below: any order of events, with a mover, a scanner, reboots and failing devices."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvstore.state.interfaces import TieringRules
from tests.helpers.worlds.copying import WorldDisk
from tests.helpers.worlds.node_machine import EXTENT_BYTES, POSITIONS, NodeMachine, chains, fractions, sessions
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.tiered_world import TieredWorld
from tests.helpers.worlds.world import Chain

NVME_EXTENT_BYTES = 80 << 10  # 9 frames of 4 KiB, 3 of 16 KiB, 1 of 50 KB
NVME_POSITIONS = 6


class TieredMachine(NodeMachine):
    """Every rule is one thing that can happen; ``World`` checks the answers, ``laws`` the rest."""

    world: TieredWorld

    def __init__(self) -> None:
        super().__init__()
        disk = WorldDisk(NVME_EXTENT_BYTES, NVME_POSITIONS, 1)
        rules = TieringRules(demote_at=0.5, promote_after=2)
        self.world = TieredWorld(EXTENT_BYTES, POSITIONS, Nvme(disk, rules))

    # --- the mover --------------------------------------------------------------------------------------------------

    @rule(bytes_max=st.sampled_from([1, 20_000, 1 << 20]))
    def asked_what_to_save(self, bytes_max: int) -> None:
        self.world.demote(bytes_max)

    @precondition(lambda self: self.world.flights or self.world.node.copies)
    @rule(steps=st.integers(1, 5), fail=st.sampled_from([False, False, False, True]))
    def copied(self, steps: int, fail: bool) -> None:
        self.world.copies_fail = 0.5 if fail else 0.0
        for _ in range(steps):
            self.world.move_on()
        self.world.copies_fail = 0.0

    @rule()
    def settled(self) -> None:
        self.world.settle()

    @rule(session=sessions, chain=chains, hint=st.booleans())
    def prefetched(self, session: int, chain: Chain, hint: bool) -> None:
        self.world.prefetch(self._alive(session), chain, hint=hint)

    # --- troubles ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.node.nvme_index)
    @rule(which=fractions, found=st.booleans())
    def damaged_below(self, which: float, found: bool) -> None:
        keys = sorted(self.world.node.nvme_index)
        key = keys[int(which * len(keys))]
        if found:
            self.world.damage_below(key)
        else:
            self.world.rot(key)

    @precondition(lambda self: not self.world.disk.failed)
    @rule(position=st.integers(0, NVME_POSITIONS - 1))
    def device_failed(self, position: int) -> None:
        self.world.fail(set(range(position, NVME_POSITIONS)))

    # --- starting again ---------------------------------------------------------------------------------------------

    @rule(at=st.lists(fractions, max_size=2), populated=st.integers(0, POSITIONS))
    def rebooted(self, at: list[float], populated: int) -> None:
        self.world.crash_at = at
        self.world.reboot()
        self.world.populate(list(range(populated)))

    @rule(position=st.integers(0, NVME_POSITIONS - 1), steps=st.integers(0, 2))
    def checkpointed(self, position: int, steps: int) -> None:
        taken = self.world.snapshot(position)
        for _ in range(steps):
            self.world.move_on()
        if taken is not None:
            self.world.checkpoint(taken)

    @precondition(lambda self: self.world.scan is not None)
    @rule(steps=st.integers(1, 4), count=st.integers(1, 9))
    def scanned(self, steps: int, count: int) -> None:
        for _ in range(steps):
            self.world.scan_on(count)

    def teardown(self) -> None:
        """See ``NodeMachine``; and the mover and the scan come to an end."""
        self.world.crash_at = []
        while self.world.scan_on(count=50):
            pass
        self.world.settle()
        super().teardown()
        self.world.settle()
        self.world.check()
        for space in self.world.state.spaces.values():
            for extent in space.segment.extents.values():
                assert extent.count(0) + extent.sealed == extent.frames


TestTieredNode = TieredMachine.TestCase
TestTieredNode.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
