"""The seam through which tests look behind a store: the one place that knows its private names."""

from __future__ import annotations

from typing import Any, cast

from kvstore import PrefixCache, Store
from kvstore.client.local.node import LocalNode


def node_of(opened: Store | PrefixCache) -> LocalNode:
    """The node behind a store of this machine, or behind a cache of it: its files as this process maps them."""
    return cast(LocalNode, cast(Any, opened)._node)


def hurry(store: Store, timeout_s: float) -> None:
    """From here on a request to its node has so long."""
    node = node_of(store)
    mapped = node.writable()
    node.timeout_s = mapped.timeout_s = mapped.channel.timeout_s = timeout_s


def admin(store: Store, call: str, **arguments: Any) -> dict[str, Any]:
    """An admin call as it is sent: what no public verb would say."""
    return store._admin(call, **arguments)
