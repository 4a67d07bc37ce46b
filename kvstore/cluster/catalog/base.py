"""Catalog: a small replicated map with sessions; the interface of all implementations.

The model is that of etcd v3: one revision counter for all entries, entries that are removed when their session ends,
and watches that report every change after a revision. Entries are few (one per node, engine or setting) and small.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from kvstore.boundary import task_loop
from kvstore.cluster.catalog.task_health import TaskHealth
from kvstore.cluster.catalog.task_health import boot_s as boot_s
from kvstore.errors import InvalidRequest, KVStoreError, Unavailable

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 64 << 10
LISTING_MAX: Final = 65_536  # number of entries with the same prefix
TTL_MIN_S: Final = 1.0
TTL_MAX_S: Final = 3600.0
CALL_S: Final = 5.0  # a call without an answer raises Unavailable after this time
RENEWALS_PER_TTL: Final = 4

log = logging.getLogger("kvstore.cluster.catalog")


class KeyTaken(KVStoreError):
    """The condition of a publish does not hold. ``entry`` is the stored entry, or None if there is none."""

    def __init__(self, key: str, entry: Entry | None) -> None:
        super().__init__(f"{key}: {'changed in the meantime' if entry is None else 'another process has it'}")
        self.key = key
        self.entry = entry


class SessionLost(Unavailable):
    """The session was not renewed within its time to live, and has ended. Its entries were removed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One key and its value.

    Attributes:
        revision: number of the change that wrote the entry. Later changes of the catalog have larger numbers.
        session: the session that owns the entry; 0 if no session owns it, so that it stays.
    """

    key: str
    value: bytes
    revision: int
    session: int = 0


@dataclass(frozen=True, slots=True)
class Update:
    """What a watch reports: changes up to ``revision``.

    Attributes:
        entries: new or changed entries.
        removals: removed keys. A key that was removed and written again is only in ``entries``.
        whole: ``entries`` has all entries, and no other key exists. The first update of every watch is whole. So is an
            update after changes that were missed and that the catalog can no longer report.
    """

    revision: int
    entries: tuple[Entry, ...] = ()
    removals: tuple[str, ...] = ()
    whole: bool = False


class Session(ABC):
    """A session shows that a member is alive. It is renewed in the background until ``close``. When it ends, its
    entries are removed.

    Life: opened -> renewed -> ended by ``close``, or ``lost``. The owner of a lost session opens another one.

    Attributes:
        id: number of the session, not 0.
        ttl_s: how long the session lives without a renewal.
        lost: set when the session is known to have ended without ``close``.
    """

    def __init__(self, session_id: int, ttl_s: float, started_s: float) -> None:
        self.id = session_id
        self.ttl_s = ttl_s
        self.lost = asyncio.Event()
        self._renewed_s = started_s
        self._renewing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        """True while, by this process's own clock, no other member can have ended the session.

        The clock also counts while the machine sleeps, and the time starts before the renewal is sent. So a leader that
        was stopped or cut off notices no later than the other members.
        """
        return not self.lost.is_set() and boot_s() < self._renewed_s + self.ttl_s

    def start(self, health: TaskHealth) -> None:
        """Begin to renew the session. ``health`` notes the result of each renewal."""
        renewing = task_loop("membership/session", lambda: self._renew_always(health))
        self._renewing = asyncio.create_task(renewing, name=f"catalog session {self.id:x}")

    async def close(self) -> None:
        """End the session. Its entries are removed at once, or after ``ttl_s`` if the catalog cannot be reached."""
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
        """Renew until the session is lost; then return True."""
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
        """Return True if the session is alive for another ``ttl_s``. Raises KVStoreError if the catalog is not
        responding."""

    @abstractmethod
    async def _end(self) -> None:
        """Remove the session and its entries."""


class Catalog(ABC):
    """The interface. All calls are made in one event loop. Each ends within ``CALL_S``, or raises a KVStoreError.

    Attributes:
        url: the address that it was made for, without secrets.
    """

    url: str

    async def __aenter__(self) -> Catalog:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    async def start(self) -> None:
        """Connect for the first time.

        Raises:
            Unavailable: no endpoint answers. The message names the endpoints and the remedy.
            InvalidRequest: the catalog refuses this process, or other users can write the path or file.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close connections and files. Sessions that are still open end after their time to live."""

    @abstractmethod
    async def listing(self, prefix: str) -> Update:
        """Return every entry whose key starts with ``prefix``, sorted by key, as a whole update."""

    @abstractmethod
    async def publish(self, key: str, value: bytes, session: Session | None = None, only_if: int | None = None) -> int:
        """Write one entry, and return its revision.

        Args:
            session: the owner of the entry. With None, the entry stays until it is retracted.
            only_if: the revision that the entry must have now. 0 means that it must not exist, None that there is no
                condition.

        Raises:
            KeyTaken: ``only_if`` does not hold. Nothing was changed.
            SessionLost: the session has ended. Nothing was changed.
            Unavailable: no answer in time. The entry might or might not have been written.
        """

    @abstractmethod
    async def retract(self, key: str, only_if: int | None = None) -> bool:
        """Remove an entry. Returns False if there is no entry, or ``only_if`` does not hold."""

    @abstractmethod
    def watch(self, prefix: str, health: TaskHealth | None = None) -> AsyncGenerator[Update, None]:
        """Yield all entries whose keys start with ``prefix``, then each change, in order, until the iterator is closed.

        The watch survives every ``KVStoreError``: it continues with the next change, or with a whole update if changes
        were missed. Close the generator with ``contextlib.aclosing``.

        Args:
            health: notes each failure, and each sign of life, even while nothing changes.
        """

    @abstractmethod
    async def open_session(self, ttl_s: float, health: TaskHealth | None = None) -> Session:
        """Open a session and begin to renew it. Implementations with coarser clocks round ``ttl_s`` up.

        Args:
            health: notes the result of each renewal.
        """

    async def get(self, key: str) -> Entry | None:
        """Return one entry, or None."""
        return next((each for each in (await self.listing(key)).entries if each.key == key), None)


def check_key(key: str) -> str:
    """Return ``key`` if it is valid, else raise InvalidRequest."""
    if not key.startswith("/") or len(key.encode()) > KEY_BYTES_MAX or "\0" in key:
        raise InvalidRequest("key", f"must start with '/' and have at most {KEY_BYTES_MAX} bytes (got {key[:80]!r})")
    return key


def check_value(value: bytes) -> bytes:
    """Return ``value`` if it is valid, else raise InvalidRequest."""
    if len(value) > VALUE_BYTES_MAX:
        raise InvalidRequest("value", f"must have at most {VALUE_BYTES_MAX} bytes (got {len(value)})")
    return value


def check_ttl_s(ttl_s: float) -> float:
    """Return ``ttl_s`` if it is valid, else raise InvalidRequest."""
    if not TTL_MIN_S <= ttl_s <= TTL_MAX_S:
        raise InvalidRequest("ttl_s", f"must be between {TTL_MIN_S:g} and {TTL_MAX_S:g} (got {ttl_s})")
    return ttl_s
