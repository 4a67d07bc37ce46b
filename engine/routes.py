"""Routes: where the prompt of a request is computed, here or by another engine, and what became of that."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from engine.arena import Arena
from engine.config import EngineConfig
from engine.handoff import Fetch, Peers
from engine.link import parse_link
from engine.lossy import Lossy
from engine.pool import Pool
from engine.request import Handoff, Role
from engine.sequence import Sequence
from kvstore.errors import Unavailable

AVOID_S = 5.0

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
        changed: Callable[[], None],
    ) -> None:
        self._config = config
        self._peers = peers
        self._arena = arena
        self._pool = pool
        self._codecs = codecs
        self._changed = changed
        self._link = parse_link(config.link)
        self._fetches: dict[str, Fetch] = {}
        self._left: dict[str, list[str]] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def choose(self, sequence: Sequence, role: Role) -> bool:
        """Whether its prompt is to be computed elsewhere. Decided by what the pool has: short rests are computed here."""
        asked = sequence.request.prefill
        addresses = asked if asked is not None else self._config.prefill if role is Role.DECODE else ()
        engines = self._peers.usable(addresses)
        if not engines:
            return False
        stored = 0
        if sequence.cache is not None:
            stored = sequence.cache.lookup(sequence.tokens[: sequence.prompt]).tokens
        if asked is None and sequence.prompt - stored <= self._config.local_prefill_tokens:
            return False
        self._left[sequence.id] = engines
        return True

    def wanted(self, sequence: Sequence) -> bool:
        """Whether there is an engine left to ask, and nobody was asked yet."""
        return bool(self._left.get(sequence.id)) and sequence.id not in self._fetches

    def lazy(self, sequence: Sequence) -> bool:
        """Whether the KV is to be fetched only when it is computed."""
        return (sequence.request.handoff or self._config.handoff) is Handoff.LAZY

    def begin(self, sequence: Sequence) -> Fetch | None:
        """Ask the next engine; None where none is left."""
        left = self._left.get(sequence.id, [])
        if not left:
            return None
        address = left.pop(0)
        name = self._config.compress if sequence.request.allow_lossy else "none"
        fetch = Fetch(
            sequence,
            address,
            self._peers[address],
            self._arena,
            self._link,
            (name, self._codecs[name]),
            sequence.request.source or self._config.source,
            sequence.request.grain or self._config.grain,
            self._changed,
        )
        self._fetches[sequence.id] = fetch
        fetch.begin(self._pool.layout, self._config.hold_s)
        return fetch

    def get(self, sequence: Sequence) -> Fetch | None:
        """The attempt under way."""
        return self._fetches.get(sequence.id)

    def failed(self, sequence: Sequence) -> None:
        """The attempt failed: forget it, and leave that engine alone for a while where it did not answer."""
        fetch = self._fetches.pop(sequence.id)
        log.warning("prefill of %s by %s failed: %s", sequence.id, fetch.address, fetch.failure)
        if isinstance(fetch.failure, Unavailable):
            self._peers.avoid(fetch.address, AVOID_S)

    def over(self, sequence: Sequence) -> bool:
        """The sequence has ended, or has all it needs. Whether its frames are no longer written to."""
        self._left.pop(sequence.id, None)
        fetch = self._fetches.get(sequence.id)
        if fetch is None:
            return True
        if not fetch.complete and fetch.failure is None:
            fetch.give_up()
        if not fetch.idle:
            return False
        del self._fetches[sequence.id]
        return True
