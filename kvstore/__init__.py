"""kvstore: a KV-cache-centric tiered store for disaggregated LLM serving.

::

    import kvstore

    store = kvstore.open(dram="512MiB", nvme="/var/tmp/kv:4GiB")  # a node in this process
    store = kvstore.connect()               # or the node of this machine's daemon
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
    from kvstore.client.buffers import DevicePointer
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
    "DevicePointer",
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

# The module of each name. A module is imported when its name is first used, so that `kvstore --help` does not wait for
# numpy.
_MODULES = {
    "DevicePointer": "kvstore.client.buffers",
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
    elif name in _MODULES:
        from importlib import import_module

        value = getattr(import_module(_MODULES[name]), name)
    else:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    globals()[name] = value
    return value


def open(
    name: str | None = None, dram: str | int = "512MiB", nvme: str | Sequence[str] = (), **config: object
) -> Store:
    """Start a node inside this process, without a daemon, and return its store. Closing the store ends the node.

    A store without a name is private: it has its own folder, ``connect`` without an address never chooses it, and its
    pages in memory are dropped when it is closed. So several tests of a program can each open a store at the same time.

    Args:
        name: other processes of this machine may ``connect`` to this name and read, while this process lives. None: a
            unique name.
        dram: capacity, as ``"512MiB"`` or in bytes. Memory is allocated as pages arrive.
        nvme: a file or block device below DRAM as ``"PATH:SIZE"``, or several of them. A file is created if it does not
            exist.
        config: other settings of a node by name, such as ``shm_dir``; see ``kvstore.config.NodeConfig``.

    Raises:
        InvalidRequest: a setting is unknown or invalid, there is too little memory, or an NVMe target holds other data.
            The message names the field and the remedy.
        NodeBusy: a node with this name is running, or another node uses the NVMe target.
    """
    import os
    import secrets

    from kvstore.client.local.node import LocalNode
    from kvstore.client.local.store import LocalStore
    from kvstore.config import node_config
    from kvstore.node.embedded import open_node  # only here: clients of a daemon do not need the node's code

    if name is None:
        name = f"embedded-{os.getpid()}-{secrets.token_hex(4)}"
    embedded = open_node(node_config(name=name, dram=dram, nvme=nvme, **config))
    try:
        return LocalStore(LocalNode(embedded.folder, embedded=embedded))
    except BaseException:
        embedded.close()
        raise
