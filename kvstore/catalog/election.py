"""Election: one leader at a time, over any catalog."""

from __future__ import annotations

from contextlib import aclosing

from kvstore.catalog.base import Catalog, Session, Taken
from kvstore.catalog.task_health import TaskHealth


async def elect(catalog: Catalog, key: str, value: bytes, session: Session, health: TaskHealth | None = None) -> int:
    """Wait until we lead: until ``key`` is ours, written under ``session``.

    We lead as long as ``session.alive``. Ask that before each act as a leader: it is false before any other process can
    win. Returns the revision of the win, which grows from leader to leader: a number to fence old ones with.

    Raises:
        SessionLost: the session ended while we waited.
    """
    async with aclosing(catalog.watch(key)) as updates:
        async for update in updates:
            held = key not in update.gone and any(each.key == key for each in update.entries)
            if held and not any(each.session == session.id for each in update.entries if each.key == key):
                continue
            if not (update.whole or key in update.gone):
                continue
            try:
                return await catalog.publish(key, value, session, only_if=0)
            except Taken as error:
                if error.entry is not None and error.entry.session == session.id:
                    return error.entry.revision
    raise AssertionError("a watch has no end")
