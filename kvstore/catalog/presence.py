"""Presence: entries that stay published as long as their process lives and reaches the catalog."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from kvstore.catalog.base import Catalog, Session, SessionLost, Taken
from kvstore.errors import NodeBusy, Unavailable

RETRY_S: Final = 0.5

log = logging.getLogger("kvstore.catalog")


class Presence:
    """Publishes entries under a session; after an outage that ended it, under a new one.

    An entry names one identity. While somebody else holds it, ours is not published: the second of one name loses. What
    we wrote ourselves is told from another's by its bytes, so every value carries something random of its process.

    Args:
        ttl_s: how long others go on seeing us after we died or were cut off.
    """

    def __init__(self, catalog: Catalog, ttl_s: float) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._wanted: dict[str, bytes] = {}
        self._lasting: dict[str, bytes] = {}
        self._written: dict[str, list[bytes]] = {}  # what we may have written under a key: the last two values
        self._taken: set[str] = set()  # what somebody else had when we last looked
        self._session: Session | None = None
        self._keeping: asyncio.Task[None] | None = None

    @property
    def published(self) -> bool:
        """Whether others see us now, as far as we can know."""
        return self._session is not None and self._session.alive

    @property
    def heard_s(self) -> float:
        """When the catalog last renewed our session, by ``boot_s``; 0 without one."""
        return self._session.renewed_s if self._session is not None else 0.0

    async def start(
        self, entries: dict[str, bytes], former: bytes = b"", lasting: dict[str, bytes] | None = None
    ) -> None:
        """Publish for the first time.

        Args:
            lasting: what is published where there is nothing under that key, and stays when we leave.
            former: what a process that is known to be dead published under these keys: that is replaced at once.

        Raises:
            NodeBusy: another process that is alive has one of these keys. Nothing of ours stays.
            Unavailable: the catalog does not answer.
        """
        self._wanted, self._lasting = dict(entries), dict(lasting or {})
        self._written = {key: [former] for key in entries if former}
        try:
            await self._publish_all()
        except Taken as error:
            await self.close()
            raise NodeBusy(f"{error.key} is taken by another process; give this one another name") from error
        self._keeping = asyncio.create_task(self._keep(), name="catalog presence")

    async def update(self, key: str, value: bytes) -> None:
        """Publish another value under a key; where the catalog is away, as soon as it is back."""
        self._wanted[key] = value
        if self._session is not None and self._session.alive:
            try:
                await self._publish(key, self._session)
            except (Unavailable, Taken) as error:
                log.warning("%s is published later: %s", key, error)

    def keep(self, key: str, value: bytes) -> None:
        """This is published as ``lasting`` from now on: somebody else was faster."""
        self._lasting[key] = value

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
        """Whenever the session is lost, or something could not be written, publish again."""
        while True:
            if self._session is not None and await self._stays(self._session):
                continue
            try:
                await self._publish_all()
            except Unavailable:
                await asyncio.sleep(RETRY_S)
            except Taken as error:
                log.error("%s: another process has it now; ours is not published until that one ends", error.key)
                await asyncio.sleep(self._ttl_s / 2)

    async def _stays(self, session: Session) -> bool:
        """Wait for the session's end; False once it is lost or a wish is unwritten."""
        if self._taken or any(self._written.get(key, [None])[-1] != value for key, value in self._wanted.items()):
            return False
        try:
            await asyncio.wait_for(session.lost.wait(), RETRY_S)
        except TimeoutError:
            return True
        return False

    async def _publish_all(self) -> None:
        if self._session is None or not self._session.alive:
            if self._session is not None:
                await self._session.close()
                self._session = None
            self._session = await self._catalog.open_session(self._ttl_s)
            self._written = {key: values[-1:] for key, values in self._written.items()}
        for key, value in self._lasting.items():
            with contextlib.suppress(Taken):
                await self._catalog.publish(key, value, only_if=0)
        for key in self._wanted:
            await self._publish(key, self._session)

    async def _publish(self, key: str, session: Session) -> None:
        value = self._wanted[key]
        mine = self._written.setdefault(key, [])
        there = await self._catalog.get(key)
        if there is not None and there.value not in mine:
            self._taken.add(key)
            raise Taken(key, there)
        self._taken.discard(key)
        if there is not None and (there.session, there.value) == (session.id, value):
            return
        mine.append(value)
        del mine[:-2]
        try:
            await self._catalog.publish(key, value, session, only_if=there.revision if there else 0)
        except SessionLost:
            session.lost.set()
            raise
        except Taken as error:
            # A try of ours that was not answered in time may have been done.
            if error.entry is None or error.entry.value != value:
                raise
