"""MemoryCatalog: a catalog within one process, for a single node, tests and simulations.

``Ledger`` has the rules of a catalog in plain dicts, and waits for nothing: time comes as an argument.
``MemoryCatalog`` adds notification of changes. Simulations of clusters use the ledger alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvstore.cluster.catalog.base import (
    LISTING_MAX,
    Catalog,
    Entry,
    KeyTaken,
    Session,
    SessionLost,
    Update,
    boot_s,
    check_key,
    check_ttl_s,
    check_value,
)
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.errors import KVStoreError, Unavailable

LOG_MAX: Final = 4096  # changes by which a watch can lag before it gets everything again


class Ledger:
    """Entries, sessions and the last changes.

    Attributes:
        revision: the revision of the last change.
    """

    def __init__(self, log_max: int = LOG_MAX) -> None:
        self.revision = 0
        self._entries: dict[str, Entry] = {}
        self._deadlines: dict[int, tuple[float, float]] = {}  # session -> (when it ends, its time to live)
        self._changes: deque[tuple[int, str]] = deque(maxlen=log_max)
        self._last_session = 0

    def listing(self, prefix: str) -> Update:
        """As ``Catalog.listing``."""
        entries = sorted((each for each in self._entries.values() if each.key.startswith(prefix)), key=lambda e: e.key)
        return Update(self.revision, tuple(entries), whole=True)

    def publish(self, key: str, value: bytes, session: int, only_if: int | None) -> int:
        """As ``Catalog.publish``."""
        if session and session not in self._deadlines:
            raise SessionLost(f"session {session:x} has ended")
        entry = self._entries.get(key)
        if only_if is not None and only_if != (entry.revision if entry else 0):
            raise KeyTaken(key, entry)
        if entry is None and len(self._entries) >= LISTING_MAX:
            raise Unavailable(f"the catalog has at most {LISTING_MAX} entries")
        self._note_change(key)
        self._entries[key] = Entry(key, value, self.revision, session)
        return self.revision

    def retract(self, key: str, only_if: int | None) -> bool:
        """As ``Catalog.retract``."""
        entry = self._entries.get(key)
        if entry is None or only_if not in (None, entry.revision):
            return False
        del self._entries[key]
        self._note_change(key)
        return True

    def changes(self, prefix: str, since: int) -> Update:
        """Return the changes under ``prefix`` after revision ``since``, or everything if the changes are no longer
        known."""
        oldest = self._changes[0][0] if self._changes else self.revision + 1
        if since + 1 < oldest and since < self.revision:
            return self.listing(prefix)
        log = list(self._changes)
        keys = {key for _, key in log[bisect_right(log, since, key=lambda each: each[0]) :] if key.startswith(prefix)}
        entries = sorted((self._entries[key] for key in keys if key in self._entries), key=lambda e: e.revision)
        return Update(self.revision, tuple(entries), tuple(sorted(keys - self._entries.keys())))

    def open_session(self, ttl_s: float, now_s: float) -> int:
        """Open a session that ends ``ttl_s`` after its last renewal."""
        self._last_session += 1
        self._deadlines[self._last_session] = (now_s + ttl_s, ttl_s)
        return self._last_session

    def renew(self, session: int, now_s: float) -> bool:
        """Renew a session; return False if it has ended."""
        if session not in self._deadlines:
            return False
        ttl_s = self._deadlines[session][1]
        self._deadlines[session] = (now_s + ttl_s, ttl_s)
        return True

    def end(self, session: int) -> None:
        """End a session, and remove its entries."""
        self._deadlines.pop(session, None)
        for key in [each.key for each in self._entries.values() if each.session == session]:
            del self._entries[key]
            self._note_change(key)

    def expire(self, now_s: float) -> None:
        """End expired sessions. Call it before anything else at ``now_s``."""
        for session in [each for each, (ends_s, _) in self._deadlines.items() if ends_s <= now_s]:
            self.end(session)

    def next_end_s(self) -> float | None:
        """Return the time at which the next session ends if it is not renewed."""
        return min((ends_s for ends_s, _ in self._deadlines.values()), default=None)

    def _note_change(self, key: str) -> None:
        self.revision += 1
        self._changes.append((self.revision, key))


LOOK_S: Final = 1.0  # interval of a watch's signs of life


class MemoryCatalog(Catalog):
    """A catalog over a ledger that several catalogs of one event loop may share.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, hub: Hub | None = None, clock: Callable[[], float] = boot_s) -> None:
        self.url = "memory"
        self._hub = hub or Hub()
        self._clock = clock

    async def start(self) -> None:
        """Do nothing: there is no server."""

    async def close(self) -> None:
        """Do nothing: there is no connection."""

    async def listing(self, prefix: str) -> Update:
        """See ``Catalog.listing``."""
        return self._ledger().listing(prefix)

    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """See ``Catalog.publish``."""
        check_key(key), check_value(value)
        if session is not None and session.lost.is_set():
            raise SessionLost(f"session {session.id:x} has ended")
        revision = self._ledger().publish(key, value, session.id if session else 0, only_if)
        self._hub.ring()
        return revision

    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """See ``Catalog.retract``."""
        was_removed = self._ledger().retract(check_key(key), only_if)
        self._hub.ring()
        return was_removed

    async def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """See ``Catalog.watch``."""
        health = health or TaskHealth("watch")
        since: int | None = None
        while True:
            bell = self._hub.bell
            try:
                ledger = self._ledger()
                update = ledger.listing(prefix) if since is None else ledger.changes(prefix, since)
            except KVStoreError as error:
                await asyncio.sleep(health.note_failure(error))
                continue
            health.note_success()
            since = update.revision
            if update.whole or update.entries or update.removals:
                yield update
                continue
            ends_s = self._hub.ledger.next_end_s()
            wait_s = LOOK_S if ends_s is None else min(LOOK_S, max(0.0, ends_s - self._clock()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # unlike wait_for, of Python 3.11, it loses no cancellation
                    await bell.wait()

    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        """See ``Catalog.open_session``."""
        now_s = self._clock()
        session = _MemorySession(self, self._ledger().open_session(check_ttl_s(ttl_s), now_s), ttl_s, now_s)
        session.start(health or TaskHealth("session"))
        self._hub.ring()
        return session

    def _ledger(self) -> Ledger:
        """Return the current ledger, in which expired sessions have ended."""
        self._hub.ledger.expire(self._clock())
        return self._hub.ledger


class Hub:
    """The state that the catalogs of one cluster share. ``bell`` is set once, at the next change."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.bell = asyncio.Event()

    def ring(self) -> None:
        """Wake the waiting watches."""
        bell, self.bell = self.bell, asyncio.Event()
        bell.set()


class _MemorySession(Session):
    def __init__(self, catalog: MemoryCatalog, session_id: int, ttl_s: float, started_s: float) -> None:
        super().__init__(session_id, ttl_s, started_s)
        self._catalog = catalog

    async def _renew(self) -> bool:
        return self._catalog._ledger().renew(self.id, self._catalog._clock())

    async def _end(self) -> None:
        self._catalog._ledger().end(self.id)
        self._catalog._hub.ring()
