"""RemoteStore: a node reached over gRPC, as its users see it."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import Any

from kvstore.client.admin import KEYS_MAX
from kvstore.client.registration import Registrations
from kvstore.client.remote.admin import PROMPT, Admin
from kvstore.client.remote.cache import RemoteCache
from kvstore.client.remote.endpoint import Endpoint
from kvstore.client.remote.node import OVERHEAD_BYTES, RemoteNode
from kvstore.client.remote.objects import RemoteObjects
from kvstore.client.store import Store
from kvstore.errors import DeadlineExceeded, InvalidRequest, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys

ROOTS_MAX = 4096  # caches remembered by the root of their keys, so that an operator's verbs can name pages by keys
_RETRY_S = 0.05


class RemoteStore(RemoteObjects, Store):
    """One node at the other end of a connection, shared by all threads of this process. Made by ``kvstore.connect``.

    Life: made -> used -> ``close`` (or leaving ``with``, or being dropped together with its caches, or the end of the
    process). The node's pages stay; leases and reservations end by their deadlines where they were not released. A
    lost connection is made again by the next call. A forked child is refused and connects itself.
    """

    reads_without_node = False

    def __init__(self, node: RemoteNode) -> None:
        self._remote = node
        self._registrations = Registrations()
        self._calls = Admin(node)
        self._caches: OrderedDict[bytes, RemoteCache] = OrderedDict()

    @property
    def name(self) -> str:
        """The node's name."""
        return str(self._remote.about.name)

    def cache(self, layout: Layout, salt: str = "", adapter: str = "") -> RemoteCache:
        """See ``Store.cache``."""
        self._remote.check_open()
        if not isinstance(layout, Layout):
            raise InvalidRequest("layout", f"must be a kvstore.Layout, not {type(layout).__name__}")
        for field, value in (("salt", salt), ("adapter", adapter)):
            if not isinstance(value, str):
                raise InvalidRequest(field, f"must be text, not {type(value).__name__}")
        extent_bytes = self._remote.about.extent_bytes
        if extent_bytes and layout.page_bytes > extent_bytes:
            raise InvalidRequest(
                "layout", f"a page of {layout.page_bytes} bytes does not fit extents of {extent_bytes}"
            )
        cache = RemoteCache(self._remote, layout, salt, adapter)
        self._caches[cache.root] = cache
        if len(self._caches) > ROOTS_MAX:
            self._caches.popitem(last=False)
        return cache

    def stats(self) -> dict[str, Any]:
        """Numbers about node and client. For operators.

        ``client.misses``: why matches of this store ended early, by reason.
        """
        stats = self._admin("stats")
        stats["client"] = {"misses": dict(self._remote.misses)}
        return stats

    def verify(self, timeout_s: float = 600.0) -> dict[str, Any]:
        """See ``Store.verify``. A node may end the call before ``timeout_s``, by its own bound."""
        return self._calls.verify(timeout_s)

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the node takes requests.

        Raises:
            DeadlineExceeded: it did not in time.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._remote.ask_about(min(self._remote.timeout_s, max(0.01, deadline - time.monotonic())))
                return
            except Unavailable as error:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise DeadlineExceeded(
                        f"{self._remote.endpoint.address}: not ready after {timeout_s:g} s"
                    ) from error
                time.sleep(_RETRY_S)

    def renew_session(self) -> None:
        """See ``Store.renew_session``. There is no session here: the node itself ends what its callers left."""
        self._remote.check_open()

    def close(self) -> None:
        """End the connection. Closing twice is fine."""
        self._remote.close()

    def __repr__(self) -> str:
        return f"<kvstore.Store {self.name!r} at {self._remote.endpoint.address}>"

    def in_pool(self, keys: Keys) -> Keys:
        """Without what a pool adds to the chain: its nodes alone know that."""
        return keys.with_tag(b"")

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        return self._calls.call(call, arguments)

    def _pages_named(self, keys: Keys) -> dict[str, Any]:
        cache = self._caches.get(keys.root)
        if cache is None:
            raise InvalidRequest("keys", "are of no cache of this store: make them with store.cache(...).keys(tokens)")
        pages = cache.named(keys)
        most = self._remote.about.message_bytes_max
        if len(keys) > KEYS_MAX or (most and pages.ByteSize() + OVERHEAD_BYTES > most):
            return super()._pages_named(keys)  # by keys, which are shorter, and in parts; for operators only
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
