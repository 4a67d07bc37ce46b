"""MemoryStore: a whole store in this process's memory."""

from __future__ import annotations

import os
from typing import Any

from kvstore.client.admin import KEYS_MAX
from kvstore.client.memory.cache import MemoryCache
from kvstore.client.memory.objects import MemoryObjects
from kvstore.client.memory.operator import Operator
from kvstore.client.memory.pool import MemoryPool
from kvstore.client.store import Store, check_cache
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys


class MemoryStore(Store, MemoryObjects):
    """A store without files, threads or a daemon; other processes do not see it. Made by ``kvstore.memory``.

    The same verbs with the same answers and refusals as of a node with DRAM alone. It has no quotas, no bounds of pins,
    no events in vLLM's format and no numbers about processes; an object counts as one page; ``explain`` looks for a
    prompt under the one root that it is given. What is used longest ago leaves first.
    """

    reads_without_node = True
    keys_per_call = KEYS_MAX  # no message has to hold them

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()
        self._pool = MemoryPool(capacity_bytes)
        self._operator = Operator(self._pool)

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return "memory"

    def _cache(self, layout: Layout, salt: str, adapter: str) -> MemoryCache:
        self._pool.check_open()
        check_cache(layout, salt, adapter, self._pool.capacity_bytes)
        return MemoryCache(self._pool, layout, salt, adapter)

    def stats(self) -> dict[str, Any]:
        """See ``Store.stats``."""
        pool = self._pool
        with pool.held() as now_ns:
            frames = sum(len(frames) for frames in pool.frames.values())
            return {
                "name": self.name,
                "pid": os.getpid(),
                "state": "ready",
                "uptime_s": (now_ns - pool.started_ns) / 1e9,
                "tiers": {
                    "dram": {
                        "capacity_bytes": pool.capacity_bytes,
                        "used_bytes": pool.used_bytes,
                        "pages": len(pool.pages),
                        "eviction": "lru",
                    }
                },
                "leases": len(pool.leases),
                "reservations": frames,
                "counters": dict(pool.counters),
                "client": {"misses": dict(pool.misses)},
            }

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """See ``Store.verify``. Pages have no checksums here; the conservation laws are all there is to hold."""
        with self._pool.held():
            pages, findings = len(self._pool.pages), self._pool.findings()
        return {"pages_verified": pages, "pages_damaged": 0, "findings": findings, "damage_since_start": {}}

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """See ``Store.wait_ready``."""
        self._pool.check_open()

    def renew_session(self) -> None:
        """See ``Store.renew_session``. No outcome is ever unknown here."""
        self._pool.check_open()

    def close(self) -> None:
        """See ``Store.close``."""
        self._pool.close()

    def in_pool(self, keys: Keys) -> Keys:
        """The same keys: this pool adds nothing to a chain."""
        return keys.with_tag(b"")

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._operator.call(call, {name: value for name, value in arguments.items() if value is not None})
