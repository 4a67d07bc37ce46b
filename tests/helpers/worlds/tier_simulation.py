"""A node with NVMe under more load than its DRAM, or both tiers, can hold: with a mover, kills, reboots and scans."""

from __future__ import annotations

from kvstore.model.replica import Status
from kvstore.state.eviction import POLICIES
from kvstore.state.interfaces import TieringRules
from tests.helpers.worlds.copying import WorldDisk
from tests.helpers.worlds.real_node import Nvme
from tests.helpers.worlds.simulation import CONVERSATIONS, PAGES_MAX, SMALL, Simulation
from tests.helpers.worlds.tiered_world import Directory, TieredWorld
from tests.helpers.worlds.world import Chain

EXTENT_BYTES = 128 << 10
NVME_EXTENT_BYTES = 512 << 10  # 62 SMALL frames, 11 LARGE ones
POSITIONS = 6  # of DRAM: 192 SMALL frames, or 18 LARGE ones
STEPS = 1600
ENOUGH = 180  # of NVMe: each half holds all pages of a run, as the other one may be late for as long as it lasts


class TierSimulation(Simulation):
    """``Simulation`` with a tier below. ``lossless``: it holds everything there is, and nothing but damage loses a
    page."""

    world: TieredWorld

    def __init__(
        self,
        seed: int,
        *,
        crash_every: int,
        lossless: bool,
    ) -> None:
        super().__init__(seed, crash_every=crash_every)
        chance = self.random
        disk = WorldDisk(NVME_EXTENT_BYTES, ENOUGH if lossless else chance.choice([3, 8]), chance.randrange(1 << 32))
        rules = TieringRules(
            demote_at=chance.choice([0.0, 0.5, 0.9]),
            promote_after=chance.choice([1, 2]),
            admission="all" if lossless else chance.choice(["all", "all", "reused"]),
            write_bytes_per_day=0 if lossless else chance.choice([0, 0, 3 << 20]),
        )
        nvme = Nvme(disk, rules, chance.choice(sorted(POLICIES)))
        self.world.node.close()
        self.world = TieredWorld(EXTENT_BYTES, POSITIONS, nvme, now_ns=self.world.now_ns, lossless=lossless)
        self.world.chance = self.random
        self.world.copies_fail = self.random.choice([0.0, 0.0, 0.02])
        self.lossless = lossless
        self.checkpoints: list[Directory] = []
        self.waited = 0
        self.behind = 0  # pages that were put behind what only NVMe had

    def _something(self) -> None:
        kinds = {
            self._put: 36,
            self._read: 16,
            self._write: 8,
            self._lease: 5,
            self._prefetch: 10,
            self._end_of_client: 2,
            self._trouble: 2,
            self._trouble_below: 1,
            self._checkpoint: 4,
            self._pin: 2,
        }
        self.random.choices(list(kinds), list(kinds.values()))[0]()
        for _ in range(self.random.randrange(4)):
            self.world.move_on()
        if self.random.random() < 0.5:
            self.world.demote(self.random.choice([1, 100_000, 1 << 20]))
        if self.random.random() < 0.5:
            self.world.scan_on()
        if self.random.random() < 0.004:
            self._reboot()
        if self.random.random() < 0.002 and self.world.scan is None:
            self.world.forget_tables()
        if self.random.random() < 0.03:
            device, none = self._device(), set[int]()
            self.world.answer_late(
                *self.random.choice([(none, none), (device, none), (none, device), (device, device)])
            )
        if self.random.random() < 0.01:
            self.world.written_today = 0
        if not self.lossless and self.random.random() < 0.001:
            self.world.fail(self._device())

    def _device(self) -> set[int]:
        """The positions of one of two devices."""
        half = self.world.disk.positions // 2
        return set(self.random.choice([range(half), range(half, self.world.disk.positions)]))

    def _populate(self) -> None:
        missing = [i for i in range(POSITIONS) if i not in self.world.state.segment.populated]
        if missing:
            self.world.populate(missing)

    def _reboot(self) -> None:
        if self.random.random() < 0.5:
            self._last_save()
        self.world.reboot()
        self.checkpoints.clear()
        self._populate()
        if self.random.random() < 0.5:
            while self.world.scan_on(count=20):
                pass

    def _last_save(self) -> None:
        """An orderly end: nothing leaves DRAM, and what NVMe can hold of it is there."""
        world = self.world
        world.settle()
        before = set(world.node.index)
        calm = not world.crash_at and not world.copies_fail and not world.rotten
        world.last_save(self.random.choice([30_000, 1 << 20]))
        if calm and not world.crash_at:
            assert set(world.node.index) == before
            assert not self.lossless or before <= world.node.nvme_index.keys(), "not all is saved"

    def _put(self) -> None:
        world, session, chain = self.world, self._session(), self._chain()
        stored = world.stored_pages(chain)
        for key in chain.keys:
            world.use(key)
        below = world.nvme_pages(chain)
        if stored < below < len(chain.path) and self.random.random() < 0.6:
            self._put_behind(session, chain, below)
            return
        if world.nvme_pages(chain) > stored and self.random.random() < 0.5:
            world.prefetch(session, chain)
        if session not in world.clients or stored == len(chain.path):
            return  # nothing to do, or a reboot came between
        frames = world.clients[session].granted.get(chain.frame_class, [])
        short = len(chain.path) - stored - len(frames)
        anchor = chain.keys[stored - 1] if stored else b""
        got = short <= 0 or world.grant(session, chain.frame_class, short, anchor=anchor)
        if not got and world.status == Status.BUSY:
            self._wait(session, chain, short, anchor)
        stored = min(stored, world.stored_pages(chain))
        statuses = world.put(session, chain, stored, resend=self.random.random() < 0.5)
        self.sealed[chain.frame_class] += statuses.count(Status.OK)
        spare = world.clients[session].granted.get(chain.frame_class, [])
        if len(spare) > 16 or self.random.random() < 0.05:
            world.revoke(session, spare[8:])
        if world.clients[session].forfeited:
            world.revoke(session, list(world.clients[session].forfeited))

    def _put_behind(self, session: int, chain: Chain, below: int) -> None:
        """As who extends a prefix that was found on NVMe."""
        world, anchor = self.world, chain.keys[below - 1]
        short = len(chain.path) - below - len(world.clients[session].granted.get(chain.frame_class, []))
        got = short <= 0 or world.grant(session, chain.frame_class, short, anchor=anchor)
        if not got and world.status == Status.BUSY:
            self._wait(session, chain, short, anchor)
        self.behind += world.put_behind(session, chain, below).count(Status.OK)
        if session in world.clients and world.clients[session].forfeited:
            world.revoke(session, list(world.clients[session].forfeited))

    def _wait(self, session: int, chain: Chain, short: int, anchor: bytes) -> None:
        """Asked again when the mover has done what there was to do, the node is not BUSY for long."""
        self.waited += 1
        for _ in range(8):  # what it needs may be set aside only when it is asked; a copy may fail
            crashes = self.world.crashes
            self.world.settle()
            granted = self.world.grant(session, chain.frame_class, short, anchor=anchor)
            if granted or self.world.status != Status.BUSY or self.world.crashes > crashes:
                return
        raise AssertionError("BUSY for ever")

    def _prefetch(self) -> None:
        self.world.prefetch(self._session(), self._chain(), hint=self.random.random() < 0.6)

    def _checkpoint(self) -> None:
        if self.checkpoints and self.random.random() < 0.5:
            self.world.checkpoint(self.checkpoints.pop(self.random.randrange(len(self.checkpoints))))
            return
        positions = sorted(self.world.node.pages.devices.extents)
        taken = self.world.snapshot(self.random.choice(positions)) if positions else None
        if taken is not None:
            self.checkpoints.append(taken)

    def _trouble_below(self) -> None:
        world = self.world
        index = world.node.nvme_index
        if not index or world.hidden:
            return
        key = self.random.choice(sorted(index))
        if self.lossless or self.random.random() < 0.5:
            world.damage_below(key)
        else:
            world.rot(key)

    def finish(self) -> None:
        """Everything comes to rest, and nothing is held by anybody."""
        world = self.world
        world.crash_at, world.copies_fail = [], 0.0
        while world.scan_on(count=50):
            pass
        for session in list(world.clients):
            world.kill(session, noticed=False)
        for session in list(world.state.sessions):
            world.lose(session)
        for _ in range(3):
            world.tick(100 * 10**9)
        world.settle()
        world.check()
        assert not world.state.pending and not world.state.leases
        for space in world.state.spaces.values():
            for extent in space.segment.extents.values():
                assert extent.count(0) + extent.sealed == extent.frames, "a frame is held by nobody"
                assert sum(extent.children) <= sum(other.sealed for other in space.segment.extents.values())


assert CONVERSATIONS[SMALL] * PAGES_MAX[SMALL] > 8 * POSITIONS * EXTENT_BYTES // SMALL.frame_bytes
