"""Catalog: a small replicated map with sessions, as every implementation offers it.

The model is that of etcd v3: one revision counter, entries that belong to a session and leave with it, and watches that
tell every change after a revision. Entries are few (one per node, engine or wish) and small.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from kvstore.errors import InvalidRequest, KVStoreError, Unavailable

KEY_BYTES_MAX: Final = 512
VALUE_BYTES_MAX: Final = 64 << 10
LISTING_MAX: Final = 65_536  # entries below one prefix
TTL_MIN_S: Final = 1.0
TTL_MAX_S: Final = 3600.0
CALL_S: Final = 5.0  # a call that has no answer by then ends in Unavailable
RENEWALS_PER_TTL: Final = 4
RENEWAL_RETRY_S: Final = 0.25

log = logging.getLogger("kvstore.catalog")


class Taken(KVStoreError):
    """The condition of a publish does not hold. ``entry``: what is there instead; None where nothing is."""

    def __init__(self, key: str, entry: Entry | None) -> None:
        super().__init__(f"{key}: {'changed meanwhile' if entry is None else 'somebody else has it'}")
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
    """Somebody's liveness. Renewed in the background until ``close``; its entries leave with it.

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
        """Whether nobody can have ended it yet, by this process' own clock.

        The clock counts sleep, too, and starts before the renewal was sent. So a leader that was stopped or cut off
        finds out by itself, at the latest when others do.
        """
        return not self.lost.is_set() and boot_s() < self._renewed_s + self.ttl_s

    @property
    def renewed_s(self) -> float:
        """When it was last renewed, by ``boot_s``."""
        return self._renewed_s

    def start(self) -> None:
        """Renew from now on."""
        self._renewing = asyncio.create_task(self._renew_always(), name=f"catalog session {self.id:x}")

    async def close(self) -> None:
        """End it. Its entries leave at once; where the catalog cannot be reached, after ``ttl_s``."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        if not self.lost.is_set():
            try:
                await self._end()
            except Unavailable as error:
                log.warning("session %x ends by itself in %.0f s: %s", self.id, self.ttl_s, error)
            self.lost.set()

    async def _renew_always(self) -> None:
        wait_s = self.ttl_s / RENEWALS_PER_TTL
        while True:
            await asyncio.sleep(wait_s)
            sent_s = boot_s()
            try:
                if not await self._renew():
                    log.warning("session %x was not renewed in time and has ended", self.id)
                    self.lost.set()
                    return
                self._renewed_s = sent_s
                wait_s = self.ttl_s / RENEWALS_PER_TTL
            except Unavailable:
                wait_s = min(RENEWAL_RETRY_S, self.ttl_s / RENEWALS_PER_TTL)

    @abstractmethod
    async def _renew(self) -> bool:
        """Whether it still lives, and for ``ttl_s`` more. Raises Unavailable where nobody can tell."""

    @abstractmethod
    async def _end(self) -> None:
        """Take it and its entries away."""


class Catalog(ABC):
    """The interface. All calls belong to one event loop; each ends within ``CALL_S`` or raises Unavailable.

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
            Unavailable: nobody answers; names the endpoints and the remedy.
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
            session: its owner; None: it stays until somebody retracts it.
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
    def watch(self, prefix: str) -> AsyncGenerator[Update, None]:
        """Everything below ``prefix``, then each change, in order, until the iterator is closed.

        It outlives the loss of the catalog: it goes on with the next change, or with a whole update where changes were
        missed. It is an asynchronous generator: close it with ``contextlib.aclosing``.
        """

    @abstractmethod
    async def open_session(self, ttl_s: float) -> Session:
        """A new session, renewed from now on. Implementations with coarser clocks round ``ttl_s`` up."""

    async def get(self, key: str) -> Entry | None:
        """One entry, or None."""
        return next((each for each in (await self.listing(key)).entries if each.key == key), None)


def boot_s() -> float:
    """Seconds since this machine started, asleep or not. No step of the wall clock moves it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


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
