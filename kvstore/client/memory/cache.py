"""MemoryCache: the pages of one layout, salt and adapter in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import numpy as np

from kvstore.client.arguments import check_seconds
from kvstore.client.buffers import Rows, rows_to_fill
from kvstore.client.device_link import host_rows
from kvstore.client.match import Match
from kvstore.client.memory.holding import MemoryLease
from kvstore.client.memory.layers import MemoryReader, MemoryWriter
from kvstore.client.memory.pool import MemoryPage, MemoryPool, RootOwner, before, named, room_of
from kvstore.client.pending import PendingPut
from kvstore.client.prefix_cache import PrefixCache
from kvstore.errors import KVStoreError
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.retention import Retention
from kvstore.model.shard import Shard
from kvstore.tier.host_memory import empty


class MemoryPut(PendingPut):
    """A put that has ended already."""

    __slots__ = ("_new",)

    def __init__(self, new: int) -> None:
        self._new = new

    def result(self) -> int:
        """See ``PendingPut.result``."""
        return self._new


class MemoryCache(PrefixCache):
    """A prefix cache over dicts. Every call is done when it returns, the asynchronous ones too. There are no checksums
    to verify: what was put is what is read.
    """

    def __init__(self, pool: MemoryPool, layout: Layout, salt: str, adapter: str) -> None:
        super().__init__(layout, salt, adapter)
        self._pool = pool
        self._owner = RootOwner(salt, adapter, layout.model, asdict(layout), layout.fingerprint.hex())

    def _tag(self) -> bytes:
        return b""

    def lookup(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Match:
        """See ``PrefixCache.lookup``."""
        keys = self._asked(tokens, extras)
        with self._pool.held():
            pages, reason = self._pool.prefix(keys)
        return Match(len(pages) * self._page_tokens, len(pages), reason)

    def prefetch(self, tokens: Any, timeout_s: float = 5.0, extras: Sequence[bytes] | None = None) -> Match:
        """See ``PrefixCache.prefetch``. All there is is here."""
        check_seconds(timeout_s, "timeout_s")
        return self.lookup(tokens, extras)

    def get(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Match:
        """See ``PrefixCache.get``."""
        keys = self._asked(tokens, extras)
        if out is not None and (match := self._to_device(keys, out, verify)) is not None:
            return match
        target = rows_to_fill(out, self.page_bytes, len(keys)) if out is not None else None
        return self._get_shard(keys, self._whole, target, verify)

    def get_async(
        self, tokens: Any, out: Any = None, *, extras: Sequence[bytes] | None = None, verify: bool | None = None
    ) -> Future[Match]:
        """See ``PrefixCache.get_async``."""
        future: Future[Match] = Future()
        try:
            future.set_result(self.get(tokens, out, extras=extras, verify=verify))
        except KVStoreError as error:
            future.set_exception(error)
        return future

    def _get_shard(self, keys: Keys, shard: Shard, target: Rows | None, verify: bool | None) -> Match:
        with self._pool.held() as now_ns:
            pages, reason = self._pool.prefix(keys)
            self._pool.use(pages, now_ns)
            self._pool.missed(reason)
        rows = target if target is not None else empty((len(pages), shard.nbytes))
        parts = shard.unpacked(rows)
        for i, page in enumerate(pages):  # which never change: no lock is needed
            parts[i] = shard.part(page.data[None])[0]
        data = rows if target is None else None
        return Match(len(pages) * self._page_tokens, len(pages), reason, data)

    def put(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        wait: bool = False,
        retention: Retention | Sequence[Retention] = (),
    ) -> int:
        """See ``PrefixCache.put``."""
        keys = self._to_store(tokens, extras, retention)
        rows = host_rows(pages, self.page_bytes, len(keys))
        pool, parent, new = self._pool, before(keys), 0
        with pool.held() as now_ns:
            chain: list[MemoryPage] = []
            position = pool.position_behind(parent)
            for i, (name, proof) in enumerate(named(keys)):
                page = pool.pages.get(name)
                if page is None:
                    data = np.array(rows[i])
                    missing = parent is not None and parent not in pool.pages
                    if missing or not pool.make_room(room_of(data), parent):
                        break
                    data.flags.writeable = False
                    hint = keys.hints[i] if keys.hints else 0
                    page = MemoryPage(name, parent, proof, data, self._page_tokens, position + i, now_ns, hint)
                    pool.add(page, self._owner)
                    new += 1
                elif page.proof != proof:
                    break
                chain.append(page)
                parent = name
            pool.use(chain, now_ns)
        return new

    def put_async(
        self,
        tokens: Any,
        pages: Any,
        extras: Sequence[bytes] | None = None,
        *,
        checksum: bool = False,
        retention: Retention | Sequence[Retention] = (),
    ) -> MemoryPut:
        """See ``PrefixCache.put_async``."""
        return MemoryPut(self.put(tokens, pages, extras, checksum=checksum, retention=retention))

    # --- leases, and layers -----------------------------------------------------------------------------------------

    def _lease(self, keys: Keys, ttl_s: float) -> MemoryLease:
        return MemoryLease(self._pool, self.layout, keys, ttl_s)

    def _writer(self, shard: Shard, keys: Keys, ttl_s: float, group: str | int | None) -> MemoryWriter:
        return MemoryWriter(self._pool, self._owner, shard, keys, ttl_s, group)

    def _reader(self, keys: Keys, timeout_s: float) -> MemoryReader:
        return MemoryReader(self._pool, self.layout, keys, timeout_s)
