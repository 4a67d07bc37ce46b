"""Catalog: a small replicated map with sessions, as every implementation offers it.

The model is that of etcd v3: one revision counter, entries that belong to a session and leave with it, and watches that
tell every change after a revision. Entries are few (one per node, engine or wish) and small.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from kvstore.boundary import kept_task
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.catalog.task_health import boot_s as boot_s
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 64 << 10
LISTING_MAX: Final = 65_536  # entries below one prefix
TTL_MIN_S: Final = 1.0
TTL_MAX_S: Final = 3600.0
CALL_S: Final = 5.0  # a call that has no answer by then ends in Unavailable
RENEWALS_PER_TTL: Final = 4

log = logging.getLogger("kvstore.cluster.catalog")


class Taken(KVStoreError):
    """The condition of a publish does not hold. ``entry``: what is there instead; None where nothing is."""

    def __init__(self, key: str, entry: Entry | None) -> None:
        super().__init__(f"{key}: {'changed in the meantime' if entry is None else 'another process has it'}")
        self.key = key
        self.entry = entry


class SessionLost(Unavailable):
    """The session has ended: it was not renewed within its time to live. Its entries are gone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key and its value.

    Attributes:
        revision: of the change that wrote it; only ever larger for later changes of the whole catalog.
        session: its owner; 0 where it stays without one.
    """

    key: str
    value: bytes
    revision: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What a watch tells: changes up to ``revision``.

    Attributes:
        entries: new or changed.
        gone: keys that left. A key that left and came back stands in ``entries`` alone.
        whole: ``entries`` is everything there is, and what is not among it is gone. The first update of every watch is
            whole; so is one after changes that were missed and are told no more.
    """

    revision: int
    entries: tuple[Entry, ...] = ()
    gone: tuple[str, ...] = ()
    whole: bool = False


class Session(ABC):
    """A member's liveness. Renewed in the background until ``close``; its entries leave with it.

    Life: opened -> renewed -> ended by ``close``, or ``lost``. The owner of a lost session opens another one.

    Attributes:
        id: not 0.
        ttl_s: how long it lives without a renewal.
        lost: set once it is known to have ended without ``close``.
    """

    def __init__(self, session_id: int, ttl_s: float, started_s: float) -> None:
        self.id = session_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._renewed_s = started_s
        self._renewing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """True while no other member can have ended it, by this process' own clock.

        The clock counts sleep, too, and starts before the renewal was sent. So a leader that was stopped or cut off
        finds out on its own, at the latest when others do.
        """
        return not self.lost.is_set() and boot_s() < self._renewed_s + self.ttl_s

    def start(self, health: TaskHealth) -> None:
        """Renew from now on; ``health`` notes how each renewal went."""
        renewing = kept_task("membership/session", lambda: self._renew_always(health))
        self._renewing = asyncio.create_task(renewing, name=f"catalog session {self.id:x}")

    async def close(self) -> None:
        """End it. Its entries leave at once; where the catalog cannot be reached, after ``ttl_s``."""
        if self._renewing is not None:
            renewing, self._renewing = self._renewing, None
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
        if boot_s() < self._renewed_s + self.ttl_s:
            try:
                await self._end()
            except KVStoreError as error:
                log.debug("session %x ends without us, in %.0f s at most: %s", self.id, self.ttl_s, error)
        self.lost.set()

    async def _renew_always(self, health: TaskHealth) -> bool:
        """Until it is lost: True."""
        wait_s = self.ttl_s / RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(wait_s)
            sent_s = boot_s()
            try:
                if not await self._renew():
                    health.note_failure(SessionLost(f"session {self.id:x} was not renewed in time and has ended"))
                    self.lost.set()
                    return True
            except KVStoreError as error:
                wait_s = min(health.note_failure(error), self.ttl_s / RENEWALS_PER_TTL)
                continue
            self._renewed_s = sent_s
            wait_s = self.ttl_s / RENEWALS_PER_TTL
            health.note_success()

    @abstractmethod
    async def _renew(self) -> bool:
        """True where it still lives, and for ``ttl_s`` more. Raises KVStoreError where the catalog does not say."""

    @abstractmethod
    async def _end(self) -> None:
        """Take it and its entries away."""


class Catalog(ABC):
    """The interface. All calls belong to one event loop; each ends within ``CALL_S``, or raises a KVStoreError.

    Attributes:
        url: as it was connected to, without secrets.
    """

    url: str

    async def __aenter__(self) -> Catalog:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Reach it once.

        Raises:
            Unavailable: no endpoint answers; names the endpoints and the remedy.
            InvalidRequest: it answers and refuses us, or a path or file is not ours alone.
        """

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections and files. Sessions that are still open end after their time to live."""

    @abstractmethod
    async def listing(self, prefix: str) -> Update:
        """Every entry whose key starts with ``prefix``, sorted by key: a whole update."""

    @abstractmethod
    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """Write one entry; returns its revision.

        Args:
            session: its owner; None: it stays until it is retracted.
            only_if: the revision that the entry must have now; 0: it must not exist; None: no condition.

        Raises:
            Taken: ``only_if`` does not hold. Nothing was changed.
            SessionLost: the session has ended. Nothing was changed.
            Unavailable: no answer in time. It may have been written or not.
        """

    @abstractmethod
    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """Take an entry away; False where there was none, or ``only_if`` does not hold."""

    @abstractmethod
    def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """Everything below ``prefix``, then each change, in order, until the iterator is closed.

        The watch outlives every ``KVStoreError``: it goes on with the next change, or with a whole update where changes
        were missed. Close the generator with ``contextlib.aclosing``.

        Args:
            health: notes each sign that the watch is live, also while nothing changes; and each failure.
        """

    @abstractmethod
    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        """A new session, renewed from now on. Implementations with coarser clocks round ``ttl_s`` up.

        Args:
            health: notes how each renewal went.
        """

    async def get(self, key: str) -> Entry | None:
        """One entry, or None."""
        return next((each for each in (await self.listing(key)).entries if each.key == key), None)


def check_key(key: str) -> str:
    """The key, or InvalidRequest."""
    if not key.startswith("/") or len(key.encode()) > KEY_BYTES_MAX or "\0" in key:
        raise InvalidRequest("key", f"starts with '/' and has at most {KEY_BYTES_MAX} bytes, got {key[:80]!r}")
    return key


def check_value(value: bytes) -> bytes:
    """The value, or InvalidRequest."""
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest("value", f"has at most {VALUE_BYTES_MAX} bytes, got {len(value)}")
    return value


def check_ttl_s(ttl_s: float) -> float:
    """The time to live, or InvalidRequest."""
    if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
        raise InvalidRequest("ttl_s", f"lies between {TTL_MIN_S:g} and {TTL_MAX_S:g}, got {ttl_s}")
    return ttl_s
