"""RemoteStore: a node reached over gRPC, as its users see it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from kvstore.client.admin import KEYS_MAX
from kvstore.client.remote.admin import PROMPT, RemoteAdmin
from kvstore.client.remote.cache import RemoteCache
from kvstore.client.remote.endpoint import Endpoint
from kvstore.client.remote.node import OVERHEAD_BYTES, RemoteNode
from kvstore.client.remote.objects import RemoteObjects
from kvstore.client.store import Store, check_cache
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys

ROOTS_MAX = 4096  # caches remembered by the root of their keys, so that an operator's verbs can name pages by keys
_RETRY_S = 0.05


class RemoteStore(Store, RemoteObjects):
    """A store at the other end of a connection. Leases and reservations end by their deadlines where they were not
    released. A lost connection is made again by the next call.
    """

    def __init__(self, node: RemoteNode) -> None:
        super().__init__()
        self._node = node
        self._calls = RemoteAdmin(node)
        self._caches: OrderedDict[bytes, RemoteCache] = OrderedDict()

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return str(self._node.about.name)

    def _cache(self, layout: Layout, salt: str, adapter: str) -> RemoteCache:
        self._node.check_open()
        check_cache(layout, salt, adapter, self._node.about.extent_bytes)
        cache = RemoteCache(self._node, layout, salt, adapter)
        self._caches[cache.root] = cache
        if len(self._caches) > ROOTS_MAX:
            self._caches.popitem(last=False)
        return cache

    def stats(self) -> dict[str, Any]:
        """See ``Store.stats``."""
        stats = self._admin("stats")
        stats["client"] = {"misses": dict(self._node.misses)}
        return stats

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """See ``Store.verify``. A node may end the call before ``timeout_s``, by its own bound."""
        return self._calls.verify(timeout_s)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """See ``Store.wait_ready``."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._node.ask_about(min(self._node.timeout_s, max(0.01, deadline - time.monotonic())))
                return
            except Unavailable as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise DeadlineExceeded(f"{self._node.endpoint.address}: not ready after {timeout_s:g} s") from error
                time.sleep(_RETRY_S)

    def renew_session(self) -> None:
        """See ``Store.renew_session``."""
        self._node.check_open()

    def close(self) -> None:
        """See ``Store.close``."""
        self._node.close()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self.name!r} at {self._node.endpoint.address}>"

    def in_pool(self, keys: Keys) -> Keys:
        """Without what a pool adds to the chain: its nodes alone know that."""
        return keys.with_tag(b"")

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._calls.call(call, arguments)

    def _pages_sent(self, keys: Keys) -> dict[str, Any]:
        cache = self._caches.get(keys.root)
        if cache is None:
            raise InvalidRequest("keys", "are of no cache of this store: make them with store.cache(...).keys(tokens)")
        pages = cache.named(keys)
        most = self._node.about.message_bytes_max
        if len(keys) > KEYS_MAX or (most and pages.ByteSize() + OVERHEAD_BYTES > most):
            return super()._pages_sent(keys)  # by keys, which are shorter, and in parts; for operators only
        return {PROMPT: pages}


def connect_remote(endpoint: Endpoint, timeout_s: float) -> RemoteStore:
    """A store over a new connection, once the node has said what it is. Raises what ``connect`` does."""
    node = RemoteNode(endpoint, timeout_s)
    try:
        node.ask_about()
    except BaseException:
        node.close()
        raise
    return RemoteStore(node)
