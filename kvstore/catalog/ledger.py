"""Ledger: the rules of a catalog in plain dicts. Time comes as an argument; nothing here waits.

The in-memory catalog is a ledger with a bell, and simulations of a cluster hold one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from kvstore.catalog.base import LISTING_MAX, Entry, SessionLost, Taken, Update
from kvstore.errors import Unavailable

LOG_MAX: Final = 4096  # changes that a watch can be behind before it is told everything again


class Ledger:
    """Entries, sessions and the last changes.

    Attributes:
        revision: of the last change.
    """

    def __init__(self, log_max: int = LOG_MAX) -> None:
        self.revision = 0
        self._entries: dict[str, Entry] = {}
        self._deadlines: dict[int, tuple[float, float]] = {}  # session -> (when it ends, its time to live)
        self._changes: deque[tuple[int, str]] = deque(maxlen=log_max)
        self._last_session = 0

    def listing(self, prefix: str) -> Update:
        """As ``Catalog.listing``."""
        found = sorted((each for each in self._entries.values() if each.key.startswith(prefix)), key=lambda e: e.key)
        return Update(self.revision, tuple(found), whole=True)

    def publish(self, key: str, value: bytes, session: int, only_if: int | None) -> int:
        """As ``Catalog.publish``."""
        if session and session not in self._deadlines:
            raise SessionLost(f"session {session:x} has ended")
        there = self._entries.get(key)
        if only_if is not None and only_if != (there.revision if there else 0):
            raise Taken(key, there)
        if there is None and len(self._entries) >= LISTING_MAX:
            raise Unavailable(f"the catalog holds at most {LISTING_MAX} entries")
        self._changed(key)
        self._entries[key] = Entry(key, value, self.revision, session)
        return self.revision

    def retract(self, key: str, only_if: int | None) -> bool:
        """As ``Catalog.retract``."""
        there = self._entries.get(key)
        if there is None or only_if not in (None, there.revision):
            return False
        del self._entries[key]
        self._changed(key)
        return True

    def changes(self, prefix: str, since: int) -> Update:
        """What changed below ``prefix`` after revision ``since``; everything where that is known no more."""
        oldest = self._changes[0][0] if self._changes else self.revision + 1
        if since + 1 < oldest and since < self.revision:
            return self.listing(prefix)
        log = list(self._changes)
        keys = {key for _, key in log[bisect_right(log, since, key=lambda each: each[0]) :] if key.startswith(prefix)}
        entries = sorted((self._entries[key] for key in keys if key in self._entries), key=lambda e: e.revision)
        return Update(self.revision, tuple(entries), tuple(sorted(keys - self._entries.keys())))

    def open_session(self, ttl_s: float, now_s: float) -> int:
        """A session that ends ``ttl_s`` after its last renewal."""
        self._last_session += 1
        self._deadlines[self._last_session] = (now_s + ttl_s, ttl_s)
        return self._last_session

    def renew(self, session: int, now_s: float) -> bool:
        """False where it has ended."""
        if session not in self._deadlines:
            return False
        ttl_s = self._deadlines[session][1]
        self._deadlines[session] = (now_s + ttl_s, ttl_s)
        return True

    def end(self, session: int) -> None:
        """Its entries leave."""
        self._deadlines.pop(session, None)
        for key in [each.key for each in self._entries.values() if each.session == session]:
            del self._entries[key]
            self._changed(key)

    def expire(self, now_s: float) -> None:
        """End the sessions whose time is over. Call it before anything else that happens at ``now_s``."""
        for session in [each for each, (ends_s, _) in self._deadlines.items() if ends_s <= now_s]:
            self.end(session)

    def next_end_s(self) -> float | None:
        """When the next session ends unless it is renewed."""
        return min((ends_s for ends_s, _ in self._deadlines.values()), default=None)

    def _changed(self, key: str) -> None:
        self.revision += 1
        self._changes.append((self.revision, key))
