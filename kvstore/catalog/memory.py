"""MemoryCatalog: a catalog within one process. It ships: a node alone, tests, and simulations use it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Final

from kvstore.catalog.base import Catalog, Session, SessionLost, Update, boot_s, check_key, check_ttl_s, check_value
from kvstore.catalog.ledger import Ledger
from kvstore.catalog.task_health import TaskHealth
from kvstore.errors import KVStoreError

LOOK_S: Final = 1.0  # a watch gives a sign of life this often


class MemoryCatalog(Catalog):
    """Over a ledger that several catalogs of one event loop may share.

    Args:
        clock: seconds; for tests.
    """

    def __init__(self, hub: Hub | None = None, clock: Callable[[], float] = boot_s) -> None:
        self.url = "memory"
        self._hub = hub or Hub()
        self._clock = clock

    async def start(self) -> None:
        """Nothing to reach."""

    async def close(self) -> None:
        """Nothing to let go of."""

    async def listing(self, prefix: str) -> Update:
        """See ``Catalog.listing``."""
        return self._now().listing(prefix)

    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """See ``Catalog.publish``."""
        check_key(key), check_value(value)
        if session is not None and session.lost.is_set():
            raise SessionLost(f"session {session.id:x} has ended")
        revision = self._now().publish(key, value, session.id if session else 0, only_if)
        self._hub.ring()
        return revision

    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """See ``Catalog.retract``."""
        done = self._now().retract(check_key(key), only_if)
        self._hub.ring()
        return done

    async def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """See ``Catalog.watch``."""
        health = health or TaskHealth("watch")
        since: int | None = None
        while True:
            bell = self._hub.bell
            try:
                ledger = self._now()
                update = ledger.listing(prefix) if since is None else ledger.changes(prefix, since)
            except KVStoreError as error:
                await asyncio.sleep(health.note_failure(error))
                continue
            health.note_success()
            since = update.revision
            if update.whole or update.entries or update.gone:
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
        session = _MemorySession(self, self._now().open_session(check_ttl_s(ttl_s), now_s), ttl_s, now_s)
        session.start(health or TaskHealth("session"))
        self._hub.ring()
        return session

    def _now(self) -> Ledger:
        """The ledger as of now: sessions whose time is over have ended."""
        self._hub.ledger.expire(self._clock())
        return self._hub.ledger


class Hub:
    """What the catalogs of one cluster share. ``bell`` rings once, at the next change."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.bell = asyncio.Event()

    def ring(self) -> None:
        """Wake who waits for a change."""
        bell, self.bell = self.bell, asyncio.Event()
        bell.set()


class _MemorySession(Session):
    def __init__(self, catalog: MemoryCatalog, session_id: int, ttl_s: float, started_s: float) -> None:
        super().__init__(session_id, ttl_s, started_s)
        self._catalog = catalog

    async def _renew(self) -> bool:
        return self._catalog._now().renew(self.id, self._catalog._clock())

    async def _end(self) -> None:
        self._catalog._now().end(self.id)
        self._catalog._hub.ring()
