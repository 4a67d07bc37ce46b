"""The node's decisions against a naive model, any order of events, the daemon and its clients dying anywhere."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.model.replica import FrameClass
from tests.helpers.worlds.world import MS, Chain, World

EXTENT_BYTES = 64 << 10
POSITIONS = 5
# 16, 4 and 1 frames in an extent
SMALL, MIDDLE, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 4), FrameClass(50_000, 2, 1)

sessions = st.integers(1, 3)
fractions = st.floats(0, 1, exclude_max=True)
ttls = st.sampled_from([50, 500, 5000]).map(lambda ms: ms * MS)
chains = st.builds(
    Chain,
    st.sampled_from([SMALL, SMALL, MIDDLE, LARGE]),
    st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple),
)


class NodeMachine(RuleBasedStateMachine):
    """Every rule is one thing that can happen to a node; ``World`` checks the answers, ``laws`` the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(EXTENT_BYTES, POSITIONS)

    def _alive(self, session: int) -> int:
        """A session that can send; a dead or new one says hello first."""
        if session not in self.world.clients:
            self.world.open(session)
        return session

    @initialize(populated=st.integers(3, POSITIONS))
    def start(self, populated: int) -> None:
        self.world.populate(list(range(populated)))
        self.world.open(1)

    @invariant()
    def laws(self) -> None:
        self.world.check()

    # --- sessions ---------------------------------------------------------------------------------------------------

    @rule(session=sessions, what=st.sampled_from(["says hello", "is cut off", "dies", "dies unnoticed"]))
    def a_client(self, session: int, what: str) -> None:
        self._alive(session)
        if what == "says hello":
            self.world.open(session)
        elif what == "is cut off":
            self.world.lose(session)
        else:
            self.world.kill(session, noticed=what == "dies")

    # --- put --------------------------------------------------------------------------------------------------------

    @rule(session=sessions, chain=chains, count=st.integers(1, 20), ahead=st.booleans())
    def granted(self, session: int, chain: Chain, count: int, ahead: bool) -> None:
        anchor = chain.keys[self.world.stored_pages(chain) - 1] if self.world.stored_pages(chain) else b""
        self.world.grant(self._alive(session), chain.frame_class, count, ahead=ahead, anchor=anchor)

    @rule(session=sessions, chain=chains, start=st.integers(0, 6), resend=st.booleans())
    def sealed_ahead(self, session: int, chain: Chain, start: int, resend: bool) -> None:
        self.world.put(self._alive(session), chain, min(start, len(chain.path) - 1), resend=resend)

    @rule(session=sessions, chain=chains, behind=st.integers(0, 2))
    def whole_put(self, session: int, chain: Chain, behind: int) -> None:
        start = max(0, min(self.world.stored_pages(chain), len(chain.path) - 1) - behind)
        if self.world.grant(self._alive(session), chain.frame_class, len(chain.path) - start):
            self.world.put(session, chain, start)

    @rule(
        session=sessions,
        chain=chains,
        group=st.integers(1, 2),
        shard=st.integers(0, 1),
        shards=st.integers(1, 2),
        start=st.none() | st.integers(0, 3),
        ttl_ns=ttls,
    )
    def reserved(
        self, session: int, chain: Chain, group: int, shard: int, shards: int, start: int | None, ttl_ns: int
    ) -> None:
        start = min(self.world.stored_pages(chain) if start is None else start, len(chain.path) - 1)
        self.world.reserve(self._alive(session), group, shard % shards, shards, chain, start, ttl_ns)

    @rule(chain=chains, group=st.integers(1, 2), shards=st.integers(2, 3), ttl_ns=ttls)
    def reserved_together(self, chain: Chain, group: int, shards: int, ttl_ns: int) -> None:
        start = min(self.world.stored_pages(chain), len(chain.path) - 1)
        for shard in range(shards):
            self.world.reserve(self._alive(1 + shard), group, shard, shards, chain, start, ttl_ns)

    def _writers(self) -> list[tuple[int, int]]:
        """(session, shard) of all that write reserved pages."""
        clients = self.world.clients.values()
        return sorted({(client.session, shard) for client in clients for _, shard in client.writing})

    @precondition(lambda self: self._writers())
    @rule(which=fractions, first=st.sampled_from([0, 0, 1, 4]), backwards=st.booleans())
    def sealed(self, which: float, first: int, backwards: bool) -> None:
        writers = self._writers()
        session, shard = writers[int(which * len(writers))]
        addresses = [address for address, of_shard in self.world.clients[session].writing if of_shard == shard]
        if backwards:
            addresses.reverse()
        self.world.seal(session, shard, addresses[min(first, len(addresses) - 1) :])

    @precondition(lambda self: self._writers())
    @rule(backwards=st.booleans())
    def sealed_together(self, backwards: bool) -> None:
        for session, shard in self._writers():
            client = self.world.clients.get(session)
            addresses = [address for address, of_shard in client.writing if of_shard == shard] if client else []
            if addresses:
                self.world.seal(session, shard, addresses[::-1] if backwards else addresses)

    @rule(session=sessions, first=st.integers(0, 5))
    def revoked(self, session: int, first: int) -> None:
        client = self.world.clients[self._alive(session)]
        frames = [address for granted in client.granted.values() for address in granted]
        frames += [address for address, _ in client.writing] + client.forfeited
        if frames:
            self.world.revoke(session, list(dict.fromkeys(frames[first:] or frames)))

    # --- reading ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.node.index)
    @rule(session=sessions, lease=st.integers(1, 2), which=fractions, count=st.integers(1, 4), ttl_ns=ttls)
    def leased(self, session: int, lease: int, which: float, count: int, ttl_ns: int) -> None:
        keys = sorted(self.world.node.index)
        first = int(which * len(keys))
        self.world.lease(self._alive(session), lease, keys[first : first + count], ttl_ns)

    @precondition(lambda self: any(client.leases for client in self.world.clients.values()))
    @rule(ttl_ns=st.none() | ttls)
    def lease_renewed_or_released(self, ttl_ns: int | None) -> None:
        for client in self.world.clients.values():
            for lease in [abs(lease) for lease in client.leases][:1]:
                if ttl_ns is None:
                    self.world.release(client.session, lease)
                else:
                    self.world.renew(client.session, lease, ttl_ns)

    @rule(chain=chains)
    def used(self, chain: Chain) -> None:
        for key in chain.keys:
            self.world.use(key)

    # --- tenants ----------------------------------------------------------------------------------------------------

    @rule(frame_class=st.sampled_from([SMALL, MIDDLE, LARGE]), salt=st.sampled_from(["a", "b"]))
    def named(self, frame_class: FrameClass, salt: str) -> None:
        self.world.name(frame_class, salt)

    @rule(chain=chains, ttl_ns=ttls)
    def pinned(self, chain: Chain, ttl_ns: int) -> None:
        self.world.pin(chain, ttl_ns)

    @precondition(lambda self: self.world.pins)
    @rule(which=fractions)
    def unpinned(self, which: float) -> None:
        numbers = sorted(self.world.pins)
        self.world.unpin(numbers[int(which * len(numbers))])

    # --- the daemon -------------------------------------------------------------------------------------------------

    @rule(elapsed_ms=st.sampled_from([1, 60, 700, 6000, 700_000]))
    def time(self, elapsed_ms: int) -> None:
        self.world.tick(elapsed_ms * MS)

    @precondition(lambda self: self.world.node.index)
    @rule(pages=st.integers(0, 10), size=st.sampled_from([0, 0, 20_000]))
    def evicted(self, pages: int, size: int) -> None:
        self.world.evict(pages, size)

    @precondition(lambda self: self.world.node.index)
    @rule(which=fractions)
    def damaged(self, which: float) -> None:
        keys = sorted(self.world.node.index)
        self.world.damage(keys[int(which * len(keys))])

    @rule(position=st.integers(0, POSITIONS - 1), failed=st.sampled_from([False, False, True]))
    def populated(self, position: int, failed: bool) -> None:
        if position not in self.world.state.segment.populated:
            self.world.populate([position], failed=failed)

    @rule(at=st.lists(fractions, min_size=0, max_size=3))
    def killed(self, at: list[float]) -> None:
        """While idle, or (and again while it starts) during what it decides next."""
        self.world.crash_at = at
        if not at:
            self.world.restart()

    def teardown(self) -> None:
        """Everything comes back: with all writers dead and all leases over, no frame is held by anybody."""
        world = self.world
        world.crash_at = []
        for session in list(world.clients):
            world.kill(session, noticed=False)
        for session in list(world.state.sessions):
            world.lose(session)
        for _ in range(3):
            world.tick(100_000 * MS)
        world.check()
        assert not world.state.pending and not world.state.leases
        assert all(extent.count(0) + extent.sealed == extent.frames for extent in world.state.segment.extents.values())
