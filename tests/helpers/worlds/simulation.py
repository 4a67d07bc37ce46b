"""A node under four times the load it can hold, for long, with faults: one seed, one history."""

from __future__ import annotations

import os
import random
from collections import Counter

from kvstore.model.replica import FrameClass, Status
from tests.helpers.worlds.world import MS, Chain, World

# ``KVSTORE_TEST_HISTORIES``: how many histories each simulation of a node runs: a third each with no, few, many kills.
SEEDS = range(int(os.environ.get("KVSTORE_TEST_HISTORIES", "9")))

EXTENT_BYTES = 128 << 10
POSITIONS = 12
SMALL = FrameClass(4096, 2, 4)  # 32 frames in an extent, 384 in the whole segment
LARGE = FrameClass(40_000, 2, 1)  # 3 in an extent, 36 in the whole segment
PAGES_MAX = {SMALL: 12, LARGE: 4}
CONVERSATIONS = {SMALL: 256, LARGE: 72}  # of PAGES_MAX pages: each class alone asks for eight or more times the segment
SESSIONS = 6
WINDOW = 400  # steps in which each class must have stored something


class Simulation:
    """Clients that put, write, read and die; a daemon that dies too. Every choice comes from the seed."""

    make_world: type[World] = World

    def __init__(self, seed: int, *, crash_every: int, classes: tuple[FrameClass, ...] = (SMALL, LARGE)) -> None:
        self.random = random.Random(seed)
        self.world = self.make_world(EXTENT_BYTES, POSITIONS, now_ns=self.random.choice([10**9, 50 * 86_400 * 10**9]))
        self.crash_every = crash_every
        self.classes = classes
        self.sealed: Counter[FrameClass] = Counter()  # in this window
        self.groups = 0
        self.evictions = 0

    def run(self, steps: int) -> None:
        """So many things happen, one after another."""
        world, chance = self.world, self.random
        world.populate(list(range(4)))
        for step in range(steps):
            if step % 20 == 10 and len(world.state.segment.populated) < POSITIONS:
                world.populate([len(world.state.segment.populated)])
            if self.crash_every and chance.randrange(self.crash_every) == 0:
                world.crash_at = [chance.random() for _ in range(chance.choice([1, 1, 2]))]
            self._something()
            world.now_ns += chance.randrange(20) * MS
            if step % 10 == 0:
                world.tick(0)
            if step % 50 == 0:
                world.check()
            if step % WINDOW == WINDOW - 1:
                self._window(step)
        world.crash_at = []
        world.check()

    def _window(self, step: int) -> None:
        for frame_class in self.classes:
            assert self.sealed[frame_class] >= 5, f"{frame_class} starves around step {step}: {self.sealed}"
        self.sealed.clear()

    def _something(self) -> None:
        kinds = {
            self._put: 50,
            self._read: 25,
            self._write: 10,
            self._lease: 6,
            self._end_of_client: 2,
            self._trouble: 2,
            self._pin: 1,
        }
        self.random.choices(list(kinds), list(kinds.values()))[0]()

    def _session(self) -> int:
        session = self.random.randint(1, SESSIONS)
        known = self.world.state.sessions.get(session)
        if session not in self.world.clients or known is None or not known.connected:
            self.world.open(session)
        return session

    def _chain(self) -> Chain:
        frame_class = self.random.choice(self.classes)
        conversation = int(CONVERSATIONS[frame_class] * self.random.random() ** 2)
        pages = self.random.randint(1, PAGES_MAX[frame_class])
        return Chain(frame_class, (conversation % 8, conversation, *range(pages))[:pages])

    def _put(self) -> None:
        world, session, chain = self.world, self._session(), self._chain()
        stored = world.stored_pages(chain)
        short = len(chain.path) - stored - len(world.clients[session].granted.get(chain.frame_class, []))
        for key in chain.keys[:stored]:
            world.use(key)
        if stored == len(chain.path):
            return
        anchor = chain.keys[stored - 1] if stored else b""
        if short > 0 or self.random.random() < 0.3:
            ahead = short <= 0
            world.grant(session, chain.frame_class, max(short, 4), ahead=ahead, anchor=anchor)
        self._send_pages(session, chain, stored)
        spare = world.clients[session].granted.get(chain.frame_class, [])
        if len(spare) > 16 or self.random.random() < 0.05:  # as a client gives back what it does not need
            world.revoke(session, spare[8:])
        if world.clients[session].forfeited:
            world.revoke(session, list(world.clients[session].forfeited))

    def _send_pages(self, session: int, chain: Chain, stored: int) -> None:
        statuses = self.world.put(session, chain, stored, resend=self.random.random() < 0.5)
        self.sealed[chain.frame_class] += statuses.count(Status.OK)

    def _write(self) -> None:
        """Ranks of a write group reserve, seal in any order, or leave each other in the lurch."""
        world, chain, chance = self.world, self._chain(), self.random
        self.groups += 1
        group, shards = self.groups, chance.choice([1, 2, 2, 4])
        start = min(world.stored_pages(chain), len(chain.path) - 1)
        ttl_ns = chance.choice([100, 2000]) * MS
        for shard in range(shards):
            if chance.random() < 0.97:
                world.reserve(self._session(), group, shard, shards, chain, start, ttl_ns)
        writers = [(client.session, shard) for client in world.clients.values() for _, shard in client.writing]
        for session, shard in chance.sample(sorted(set(writers)), chance.randint(0, len(set(writers)))):
            client = world.clients.get(session)
            addresses = [address for address, of_shard in client.writing if of_shard == shard] if client else []
            if addresses and chance.random() < 0.1:
                world.revoke(session, addresses)
            elif addresses:
                chance.shuffle(addresses)
                self.sealed[chain.frame_class] += world.seal(session, shard, addresses).count(Status.OK)

    def _read(self) -> None:
        chain = self._chain()
        for key in chain.keys:
            self.world.use(key)

    def _lease(self) -> None:
        world, session, chain = self.world, self._session(), self._chain()
        leases = world.clients[session].leases
        if leases and self.random.random() < 0.6:
            lease = abs(self.random.choice(sorted(leases)))
            if self.random.random() < 0.3:
                world.renew(session, lease, 300 * MS)
            else:
                world.release(session, lease)
        world.lease(session, self.random.randint(1, 3), chain.keys, self.random.choice([50, 1000]) * MS)

    def _pin(self) -> None:
        world, chance = self.world, self.random
        if world.pins and chance.random() < 0.4:
            world.unpin(chance.choice(sorted(world.pins)))
        elif chance.random() < 0.2:
            world.name(chance.choice(self.classes), chance.choice(["a", "b"]))
        else:
            world.pin(self._chain(), chance.choice([50, 1000]) * MS)

    def _end_of_client(self) -> None:
        session = self._session()
        if self.random.random() < 0.3:
            self.world.lose(session)
        else:
            self.world.kill(session, noticed=self.random.random() < 0.5)

    def _trouble(self) -> None:
        index = self.world.node.index
        if index and self.random.random() < 0.3:
            self.world.damage(self.random.choice(sorted(index)))
        elif self.random.random() < 0.5:
            self.world.evict(self.random.randint(1, 40))
        else:
            self.world.evict(size=self.random.randint(1, 400_000))
