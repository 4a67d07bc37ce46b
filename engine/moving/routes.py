"""Routes: where the prompt of a request is computed, here or by another engine, and what became of that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from engine.config import EngineConfig
from engine.memory.arena import Arena
from engine.memory.lossy import Lossy
from engine.model.observer import Observer
from engine.model.request import Handoff, Role
from engine.moving.handoff import Fetch
from engine.moving.link import parse_link
from engine.moving.peers import Peers
from engine.moving.store_side import Pool
from engine.shell.sequence import Sequence, State
from kvstore.errors import KVStoreError, Unavailable, VersionMismatch

AVOID_S = 5.0

Next = Callable[[Sequence, int], None]

log = logging.getLogger("kvstore.engine.routes")


class Routes:
    """The hand-offs under way. Touched by the engine's thread alone; ``changed`` wakes it.

    A sequence is asked for at one engine after the other, until one has computed its prompt or none is left.
    """

    def __init__(
        self,
        config: EngineConfig,
        peers: Peers,
        arena: Arena,
        pool: Pool,
        codecs: Mapping[str, Lossy | None],
        vocab_size: int,
        observer: Observer,
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._observer = observer
        self._peers = peers
        self._arena = arena
        self._pool = pool
        self._codecs = codecs
        self._changed = changed
        self._link = parse_link(config.link)
        self._fetches: dict[Sequence, Fetch] = {}
        self._left: dict[Sequence, list[str]] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def choose(self, sequence: Sequence, role: Role) -> bool:
        """Whether its prompt is to be computed elsewhere. Where the pool has almost all, the rest is computed here."""
        asked = sequence.request.prefill
        addresses = asked if asked is not None else self._config.prefill if role is Role.DECODE else ()
        engines = self._peers.usable(addresses)
        if not engines:
            return False
        if asked is None:
            stored = self._pool.written(sequence, sequence.prompt // sequence.page_tokens)
            if max(1, sequence.prompt - stored * sequence.page_tokens) <= self._config.local_prefill_tokens:
                return False
        self._left[sequence] = engines
        return True

    def lazy(self, sequence: Sequence) -> bool:
        """Whether the KV is to be fetched only when it is computed."""
        return (sequence.request.handoff or self._config.handoff) is Handoff.LAZY

    def begin(self, sequence: Sequence) -> Fetch | None:
        """Ask the next engine; None where none is left."""
        left = self._left.get(sequence, [])
        peer = None
        while left and peer is None:
            address = left.pop(0)
            try:
                peer = self._peers[address]
            except KVStoreError as error:  # no address, or our credentials must not go there
                log.warning("prefill of %s by %s: %s", sequence.id, address, error)
        if peer is None:
            return None
        name = self._config.compress if sequence.request.allow_lossy else "none"
        fetch = Fetch(
            sequence,
            address,
            peer,
            self._arena,
            self._link,
            (name, self._codecs[name]),
            sequence.request.source or self._config.source,
            sequence.request.grain or self._config.grain,
            self._config.chunk_tokens,
            self._vocab_size,
            self._changed,
        )
        self._fetches[sequence] = fetch
        fetch.begin(self._pool.layout, self._config.hold_s)
        return fetch

    def settled(self, sequence: Sequence) -> bool:
        """Whether the prompt is computed, or will not be."""
        fetch = self._fetches.get(sequence)
        return fetch is None or fetch.handoff is not None or fetch.failure is not None

    def go(self, sequence: Sequence) -> bool:
        """It has frames, and in them what the pool had: bring the rest from where it is computed, if elsewhere.

        Whether it is.
        """
        fetch = self._fetches.get(sequence) or self.begin(sequence)
        if fetch is not None:
            sequence.state = State.MOVING
            if fetch.failure is None:
                fetch.move()
        return fetch is not None

    def follow(self, sequence: Sequence, next_token: Next, refused: Callable[[Sequence, KVStoreError], None]) -> None:
        """What has come of its hand-off since the last turn."""
        fetch = self._fetches.get(sequence)
        if fetch is None or sequence.state not in (State.MOVING, State.DECODING):
            return
        if fetch.failure is not None:
            if fetch.idle:
                self._failed(sequence, fetch, refused)
        elif fetch.handoff is not None and sequence.state is State.MOVING:
            sequence.spent.prefill_engine = fetch.address
            sequence.cached = sequence.prompt  # of which some may still be on its way
            sequence.arrivals = fetch.arrivals
            next_token(sequence, fetch.handoff.first_token)
        elif fetch.handoff is not None and fetch.complete:
            if sequence.arrivals is not None:
                sequence.arrivals = None
                sequence.stored_pages = 0 if sequence.lossy else fetch.handoff.stored
                self._observer.handed_off(sequence.spent.moved_bytes, sequence.since_first_s())
            self.over(sequence)  # once its thread has ended

    def _failed(self, sequence: Sequence, fetch: Fetch, refused: Callable[[Sequence, KVStoreError], None]) -> None:
        """Another engine, or compute what has not arrived here. Engines that do not fit are a mistake to show."""
        failure = fetch.failure
        del self._fetches[sequence]
        log.warning("prefill of %s by %s failed: %s", sequence.id, fetch.address, failure)
        if isinstance(failure, VersionMismatch):
            refused(sequence, failure)
            return
        if isinstance(failure, Unavailable):
            self._peers.avoid(fetch.address, AVOID_S)
        if fetch.moving:
            arrived = min(fetch.arrivals.tokens(layer) for layer in range(self._arena.layout.layers))
            whole = arrived // sequence.page_tokens * sequence.page_tokens
            sequence.cached = sequence.prompt if arrived >= sequence.prompt else whole
        sequence.arrivals = None
        sequence.spent.prefill_engine, sequence.spent.prefill_cached = "", {}
        # Where no token was drawn another engine may still do all of it.
        if sequence.length > sequence.prompt or not self.go(sequence):
            sequence.compute_rest()

    def over(self, sequence: Sequence) -> bool:
        """The sequence has ended, or has all it needs. Whether its frames are no longer written to."""
        self._left.pop(sequence, None)
        fetch = self._fetches.get(sequence)
        if fetch is None:
            return True
        if not fetch.complete and fetch.failure is None:
            fetch.give_up()
        if not fetch.idle:
            return False
        del self._fetches[sequence]
        return True
