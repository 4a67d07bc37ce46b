"""The node's decisions against a naive model, any order of events, the daemon and its clients dying anywhere."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.model.replica import FrameClass
from tests.property.world import MS, Chain, World

EXTENT_BYTES = 64 << 10
POSITIONS = 5
# 16, 4 and 1 frames in an extent
SMALL, MIDDLE, LARGE = FrameClass(4096, 2, 2), FrameClass(16 << 10, 2, 3), FrameClass(50_000, 2, 1)

sessions = st.integers(1, 4)
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

    @initialize(populated=st.integers(2, POSITIONS))
    def start(self, populated: int) -> None:
        self.world.populate(list(range(populated)))
        self.world.open(1)

    @invariant()
    def laws(self) -> None:
        self.world.check()

    # --- sessions ---------------------------------------------------------------------------------------------------

    @rule(session=sessions)
    def hello(self, session: int) -> None:
        self.world.open(session)

    @rule(session=sessions)
    def connection_lost(self, session: int) -> None:
        self.world.lose(self._alive(session))

    @rule(session=sessions, noticed=st.booleans())
    def client_dies(self, session: int, noticed: bool) -> None:
        self.world.kill(self._alive(session), noticed=noticed)

    # --- put --------------------------------------------------------------------------------------------------------

    @rule(session=sessions, chain=chains, count=st.integers(1, 20), ahead=st.booleans())
    def granted(self, session: int, chain: Chain, count: int, ahead: bool) -> None:
        self.world.grant(self._alive(session), chain.frame_class, count, ahead=ahead)

    @rule(session=sessions, chain=chains, start=st.integers(0, 6), resend=st.booleans())
    def sealed_ahead(self, session: int, chain: Chain, start: int, resend: bool) -> None:
        self.world.put(self._alive(session), chain, min(start, len(chain.path) - 1), resend=resend)

    @rule(session=sessions, chain=chains)
    def whole_put(self, session: int, chain: Chain) -> None:
        if self.world.grant(self._alive(session), chain.frame_class, len(chain.path)):
            self.world.put(session, chain)

    @rule(
        session=sessions,
        chain=chains,
        group=st.integers(1, 3),
        shard=st.integers(0, 3),
        shards=st.sampled_from([1, 1, 2, 2, 4]),
        start=st.integers(0, 2),
        ttl_ns=ttls,
    )
    def reserved(
        self, session: int, chain: Chain, group: int, shard: int, shards: int, start: int, ttl_ns: int
    ) -> None:
        start = min(start, len(chain.path) - 1)
        self.world.reserve(self._alive(session), group, shard % shards, shards, chain, start, ttl_ns)

    def _part(self, session: int, shard: int, first: int, backwards: bool) -> list:
        writing = self.world.clients[session].writing
        addresses = [address for address, of_shard in writing if of_shard == shard]
        if backwards:
            addresses.reverse()
        return addresses[min(first, len(addresses) - 1) :] if addresses else []

    @rule(session=sessions, first=st.integers(0, 5), backwards=st.booleans(), lowest=st.booleans())
    def sealed(self, session: int, first: int, backwards: bool, lowest: bool) -> None:
        shards = sorted({shard for _, shard in self.world.clients[self._alive(session)].writing})
        if shards:
            shard = shards[0 if lowest else -1]
            self.world.seal(session, shard, self._part(session, shard, first, backwards))

    @rule(session=sessions, first=st.integers(0, 5))
    def revoked(self, session: int, first: int) -> None:
        client = self.world.clients[self._alive(session)]
        frames = [address for granted in client.granted.values() for address in granted]
        frames += [address for address, _ in client.writing] + client.forfeited
        if frames:
            self.world.revoke(session, list(dict.fromkeys(frames[first:] or frames)))

    # --- reading ----------------------------------------------------------------------------------------------------

    @rule(session=sessions, lease=st.integers(1, 2), chain=chains, ttl_ns=ttls)
    def leased(self, session: int, lease: int, chain: Chain, ttl_ns: int) -> None:
        self.world.lease(self._alive(session), lease, chain.keys(), ttl_ns)

    @rule(session=sessions, lease=st.integers(1, 2), ttl_ns=ttls)
    def renewed(self, session: int, lease: int, ttl_ns: int) -> None:
        self.world.renew(self._alive(session), lease, ttl_ns)

    @rule(session=sessions, lease=st.integers(1, 2))
    def released(self, session: int, lease: int) -> None:
        self.world.release(self._alive(session), lease)

    @rule(chain=chains)
    def used(self, chain: Chain) -> None:
        for key in chain.keys():
            self.world.use(key)

    # --- the daemon -------------------------------------------------------------------------------------------------

    @rule(elapsed_ms=st.sampled_from([1, 60, 700, 6000, 700_000]))
    def time(self, elapsed_ms: int) -> None:
        self.world.tick(elapsed_ms * MS)

    @rule(pages=st.integers(0, 30), size=st.integers(0, 100_000))
    def evicted(self, pages: int, size: int) -> None:
        self.world.evict(pages, size)

    @precondition(lambda self: self.world.shell.index)
    @rule(which=fractions)
    def damaged(self, which: float) -> None:
        keys = sorted(self.world.shell.index)
        self.world.damage(keys[int(which * len(keys))])

    @rule(position=st.integers(0, POSITIONS - 1), failed=st.booleans())
    def populated(self, position: int, failed: bool) -> None:
        if position not in self.world.state.segment.populated:
            self.world.populate([position], failed=failed)

    @rule(at=st.lists(fractions, min_size=1, max_size=3))
    def kill_during_the_next_decision(self, at: list[float]) -> None:
        self.world.crash_at = at

    @rule()
    def kill_when_idle(self) -> None:
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


TestNode = NodeMachine.TestCase
TestNode.settings = settings(
    max_examples=120, stateful_step_count=50, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
