"""MemoryLease: pages that stay in a store in memory until a deadline."""

from __future__ import annotations

import secrets

from kvstore.client.lease import Lease
from kvstore.client.match import Match
from kvstore.client.memory.pool import MemoryHold, MemoryPage, MemoryPool
from kvstore.errors import LeaseBroken
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys


class MemoryLease(Lease):
    """A lease that keeps the pages in the store, for others to find. Its views are right for ever: a page that has left
    is not written to.
    """

    def __init__(self, pool: MemoryPool, layout: Layout, keys: Keys, ttl_s: float) -> None:
        super().__init__(layout, keys, ttl_s)
        self._pool = pool
        self._held: list[MemoryPage] = []
        self._number = secrets.randbits(63) | 1

    def _take(self) -> None:
        with self._pool.held() as now_ns:
            self._held, reason = self._pool.prefix(self._keys)
            self._pool.use(self._held, now_ns)
            self._pool.missed(reason)
            self._hold(now_ns)
        self.pages = [page.data for page in self._held]
        self.match = Match(len(self._held) * self._layout.page_tokens, len(self._held), reason)

    def _hold(self, now_ns: int) -> None:
        if self._held:
            for page in self._held:
                page.leases += 1
            self._pool.leases[self._number] = MemoryHold(self._held, now_ns + self._ttl_ms * 1_000_000)

    def check(self) -> None:
        """Nothing to check: pages never change."""

    def _renew(self) -> None:
        with self._pool.held() as now_ns:
            self._pool.end_lease(self._number)
            if any(self._pool.pages.get(page.name) is not page for page in self._held):
                raise LeaseBroken("it had ended, and a page has left the store; what was read is right")
            self._hold(now_ns)

    def release(self) -> None:
        """See ``Lease.release``."""
        self.pages, self._held = [], []
        if not self._pool.closed:
            with self._pool.held():
                self._pool.end_lease(self._number)
