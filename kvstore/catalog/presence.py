"""Presence: entries that stay published as long as their process lives and reaches the catalog."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Final

from kvstore.boundary import kept_task
from kvstore.catalog.base import Catalog, Entry, Session, SessionLost, Taken
from kvstore.catalog.task_health import TaskHealth
from kvstore.errors import KVStoreError, NodeBusy

RETRY_S: Final = 0.5


class Presence:
    """Publishes entries under a session; after an outage that ended it, under a new one.

    An entry names one identity. While another process holds it, ours is not published: the second of one name loses.
    What we wrote ourselves is told from another's by its bytes, so every value carries something random of its process.

    Args:
        ttl_s: how long others go on seeing us after we died or were cut off.
        health: notes whether everything that we want is published.
        session_health: notes how the session fares.
    """

    def __init__(
        self,
        catalog: Catalog,
        ttl_s: float,
        health: TaskHealth | None = None,
        session_health: TaskHealth | None = None,
    ) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._health = health or TaskHealth("presence")
        self._session_health = session_health or TaskHealth("session")
        self._wanted: dict[str, bytes] = {}
        self._lasting: dict[str, bytes] = {}
        self._written: dict[str, list[bytes]] = {}  # what we may have written under a key: the last two values
        self._stored: dict[str, tuple[bytes, int]] = {}  # what is known to be in the catalog: value and revision
        self._session: Session | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def published(self) -> bool:
        """Whether others see us now, as far as we can know."""
        return self._session is not None and self._session.alive

    async def start(
        self,
        entries: dict[str, bytes],
        former: bytes = b"",
        lasting: dict[str, bytes] | None = None,
        former_key: str = "",
    ) -> None:
        """Publish for the first time.

        Args:
            lasting: what is published where there is nothing under that key, and stays when we leave.
            former: what a process that is known to be dead published under these keys: that is replaced at once.
            former_key: another key of a process that is known to be dead: its entry goes once ours are there.

        Raises:
            NodeBusy: another process that is alive has one of these keys. Nothing of ours stays.
            Unavailable: the catalog does not answer.
        """
        self._wanted, self._lasting = dict(entries), dict(lasting or {})
        self._written = {key: [former] for key in entries if former}
        try:
            await self._publish_all()
            if former_key:
                await self._catalog.retract(former_key)
            self._health.note_success()
        except Taken as error:
            await self.close()
            raise NodeBusy(f"{error.key} is taken by another process; give this one another name") from error
        except KVStoreError:
            await self.close()
            raise
        self._keeping = asyncio.create_task(kept_task("membership/presence", self._keep), name="catalog presence")

    async def update(self, key: str, value: bytes) -> None:
        """Publish another value under a key; where the catalog is away, as soon as it is back."""
        self._wanted[key] = value
        if self._session is not None and self._session.alive:
            try:
                await self._publish(key, self._session)
            except KVStoreError as error:
                self._health.note_failure(error)  # it is tried again, see ``_keep``

    def keep(self, key: str, value: bytes) -> None:
        """This is published as ``lasting`` from now on: another process was faster."""
        self._lasting[key] = value

    def look(self, known: Mapping[str, Entry], revision: int, whole: bool) -> None:
        """What a watch says is in the catalog at ``revision``: an entry of ours that is not is published again."""
        for key, (value, since) in list(self._stored.items()):
            there = known.get(key)
            if (whole or revision >= since) and (there is None or (there.value != value and there.revision > since)):
                del self._stored[key]

    async def close(self) -> None:
        """Take everything back, but for what lasts."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
            self._keeping = None
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def _keep(self) -> None:
        """One turn: whenever the session is lost, or something could not be written, publish again."""
        try:
            if self._session is None or not await self._stays(self._session):
                await self._publish_all()
            self._health.note_success()
        except KVStoreError as error:
            pause_s = self._health.note_failure(error)
            await asyncio.sleep(max(pause_s, self._ttl_s / 2) if isinstance(error, Taken) else pause_s)

    async def _stays(self, session: Session) -> bool:
        """Wait for the session's end; False once it has ended or a wish is unwritten."""
        if self._complete:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await session.lost.wait()
        return session.alive and self._complete

    @property
    def _complete(self) -> bool:
        """Whether all that we want is stored, as far as we know."""
        return all(self._stored.get(key, (None, 0))[0] == value for key, value in self._wanted.items())

    async def _publish_all(self) -> None:
        if self._session is None or not self._session.alive:
            if self._session is not None:
                await self._session.close()
                self._session = None
            try:
                self._session = await self._catalog.open_session(self._ttl_s, self._session_health)
            except KVStoreError as error:
                self._session_health.note_failure(error)
                raise
            self._session_health.note_success()
            self._written = {key: values[-1:] for key, values in self._written.items()}
            self._stored.clear()
        for key, value in self._lasting.items():
            with contextlib.suppress(Taken):
                await self._catalog.publish(key, value, only_if=0)
        for key in self._wanted:
            await self._publish(key, self._session)

    async def _publish(self, key: str, session: Session) -> None:
        value = self._wanted[key]
        mine = self._written.setdefault(key, [])
        self._stored.pop(key, None)
        there = await self._catalog.get(key)
        if there is not None and there.value not in mine:
            raise Taken(key, there)
        if there is not None and (there.session, there.value) == (session.id, value):
            self._stored[key] = value, there.revision
            return
        mine.append(value)
        del mine[:-2]
        try:
            revision = await self._catalog.publish(key, value, session, only_if=there.revision if there else 0)
        except SessionLost:
            session.lost.set()
            raise
        except Taken as error:
            # A try of ours that was not answered in time may have been done: the next turn sees whether it is ours.
            if error.entry is None or error.entry.value != value:
                raise
        else:
            self._stored[key] = value, revision
