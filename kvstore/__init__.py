"""kvstore: a KV-cache-centric tiered store for disaggregated LLM serving.

::

    import kvstore

    store = kvstore.open(dram="512MiB", nvme="/var/tmp/kv:4GiB")  # a node in this process
    store = kvstore.connect()               # or one on this machine
    layout = kvstore.Layout(model="meta-llama/Llama-3.1-8B", layers=32, kv_heads=8, head_dim=128, page_tokens=64)
    cache = store.cache(layout, salt="tenant-a")
    cache.put(tokens, pages)                # the full pages of a prompt
    match = cache.get(tokens, out=buffer)   # the longest stored prefix
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore import errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.addresses import connect
    from kvstore.client.grouped_cache import GroupedCache, GroupedLease, GroupedMatch
    from kvstore.client.match import Lease, Match
    from kvstore.client.prefix_cache import PrefixCache
    from kvstore.client.reader import Reader
    from kvstore.client.store import Store
    from kvstore.client.writer import Writer
    from kvstore.device.host_memory import empty
    from kvstore.model.groups import GroupedKeys
    from kvstore.model.layout import Layout
    from kvstore.model.prefix import Keys
    from kvstore.model.replica import Tier
    from kvstore.model.retention import Retention

    __version__: str

__all__ = [
    "GroupedCache",
    "GroupedKeys",
    "GroupedLease",
    "GroupedMatch",
    "Keys",
    "Layout",
    "Lease",
    "Match",
    "PrefixCache",
    "Reader",
    "Retention",
    "Store",
    "Tier",
    "Writer",
    "__version__",
    "connect",
    "empty",
    "errors",
    "open",
]

# Where each name lives. Loaded when first asked for, so that `kvstore --help` does not wait for numpy.
_HOMES = {
    "GroupedCache": "kvstore.client.grouped_cache",
    "GroupedKeys": "kvstore.model.groups",
    "GroupedLease": "kvstore.client.grouped_cache",
    "GroupedMatch": "kvstore.client.grouped_cache",
    "Keys": "kvstore.model.prefix",
    "Layout": "kvstore.model.layout",
    "Lease": "kvstore.client.match",
    "Match": "kvstore.client.match",
    "PrefixCache": "kvstore.client.prefix_cache",
    "Reader": "kvstore.client.reader",
    "Retention": "kvstore.model.retention",
    "Store": "kvstore.client.store",
    "Tier": "kvstore.model.replica",
    "Writer": "kvstore.client.writer",
    "connect": "kvstore.addresses",
    "empty": "kvstore.device.host_memory",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from kvstore import about

        value: object = about.version()
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    globals()[name] = value
    return value


def open(
    name: str | None = None, dram: str | int = "512MiB", nvme: str | Sequence[str] = (), **config: object
) -> Store:
    """Start a node inside this process and return its store. No daemon; the node ends with the store.

    Without a name the store is private: its folder is its own, ``connect`` does not choose it, and all of it is gone
    with the store. So each test of a program that uses a store can open one, at once with others.

    Args:
        name: what other processes of this machine may ``connect`` to, to read while this one lives; None: a unique one.
        dram: capacity, as ``"512MiB"`` or bytes. Memory is taken as pages arrive.
        nvme: a file or block device below DRAM as ``"PATH:SIZE"``, or several of them. Made where absent.
        config: any other setting of a node, see ``kvstore.config.NodeConfig``; ``shm_dir`` for example.

    Raises:
        InvalidRequest: an unknown or impossible setting, too little memory, or an NVMe target that holds something
            else; names the field and the remedy.
        NodeBusy: a node of that name runs already, or another one has that NVMe target.
    """
    import os
    import secrets

    from kvstore.client.local.node import LocalNode
    from kvstore.client.local.store import LocalStore
    from kvstore.config import node_config
    from kvstore.node.embedded import open_node  # only here: a client that connects needs no service

    if name is None:
        name = f"embedded-{os.getpid()}-{secrets.token_hex(4)}"
    settings = node_config(name=name, dram=dram, nvme=nvme, **config)
    embedded = open_node(settings)
    try:
        return LocalStore(LocalNode(embedded.folder, embedded=embedded))
    except BaseException:
        embedded.close()
        raise
