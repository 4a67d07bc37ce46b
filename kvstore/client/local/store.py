"""``LocalStore``: the store of a node on this machine, run by a daemon or inside this process."""

from __future__ import annotations

import time
from typing import Any

from kvstore.client.local.cache import LocalCache
from kvstore.client.local.channel import SocketChannel
from kvstore.client.local.node import LocalNode, MappedNode
from kvstore.client.local.objects import LocalObjects
from kvstore.client.local.segment import LocalSegment, mount
from kvstore.client.store import Store, check_cache
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.shard import Strides
from kvstore.shm.folder import NodeFolder
from kvstore.shm.header import DaemonState
from kvstore.tier.peer_memory import MountedMemory
from kvstore.wire import control
from kvstore.wire.control import Op

ADMIN_TIMEOUT_S = 60.0
HEARTBEAT_NS_MAX = 1_000_000_000  # ten ticks of the daemon


class LocalStore(Store, LocalObjects):
    """The store of a node on this machine. Reads need no daemon, since they use files in shared memory."""

    reads_without_node = True

    def __init__(self, node: LocalNode) -> None:
        super().__init__()
        self._node = node

    @property
    def name(self) -> str:
        """The node's name."""
        return self._node.name

    def _cache(self, layout: Layout, salt: str, adapter: str, replicas: int | None) -> LocalCache:
        self._node.check_open()
        mapped = self._node.mapped()
        check_cache(layout, salt, adapter, mapped.header.extent_bytes if mapped is not None else 0)
        verify = mapped is not None and bool(mapped.header.verify_reads)
        return LocalCache(self._node, layout, salt, adapter, verify, replicas)

    def stats(self) -> dict[str, Any]:
        """Return the node's statistics and this client's misses. Without a daemon, return what its files show."""
        self._node.check_open()
        try:
            stats = self._admin("stats") if self._has_daemon() else self._header_stats()
        except NodeUnavailable:
            stats = self._header_stats()
        stats["client"] = {"misses": dict(self._node.misses)}
        return stats

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the node takes requests.

        Raises:
            DeadlineExceeded: the node does not take requests within ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            mapped = self._node.mapped()
            if mapped is not None and (self._node.embedded or self._is_daemon_ready(mapped)):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.name}: not ready after {timeout_s:g} s")
            time.sleep(0.005)

    def replace_session(self) -> None:
        """End the session and begin a new one. The frames and leases of the old session end, and calls in progress
        fail."""
        mapped = self._node.mapped()
        if mapped is not None and isinstance(mapped.channel, SocketChannel):
            mapped.channel.ended = True
            self._node.writable()

    def close(self) -> None:
        """End the session, and an embedded node with it. Later calls are refused."""
        self._registrations.close()
        self._node.close()

    def in_pool(self, keys: Keys) -> Keys:
        """Return the keys that these pages have in the node's pool, and so in its listings and events."""
        mapped = self._node.mapped()
        return mapped.in_pool(keys) if mapped is not None else keys

    def mount(
        self, layout: Layout, frames: int, memory: MountedMemory | None = None, strides: Strides | None = None
    ) -> LocalSegment:
        """Mount memory of this process, with ``frames`` frames, as a segment of ``Tier.HBM``.

        Lookups and gets of other processes on the machine find the pages that are published in the segment, until the
        pages are retired or this process ends. The memory is counted for the tenants of its pages, but not charged to
        their quotas.

        Args:
            memory: for example device memory, see ``tier.peer_memory``. None creates shared host memory.
            strides: where the parts of a page are, if another engine arranges the memory. With None, pages are
                contiguous.

        Raises:
            InvalidRequest: ``layout`` is not a layout; ``frames`` is not positive, exceeds the node's limit, or does
                not fit ``memory``; ``strides`` do not fit a page.
            Unavailable: the memory cannot be exported to other processes.
            OutOfSpace: there is not enough memory, or the node's limit of mounted memory is reached.
            NodeUnavailable: there is no such node, or its daemon is not responding.
        """
        check_cache(layout, "", "", 0)
        if not isinstance(frames, int) or frames < 1:
            raise InvalidRequest("frames", f"must be a positive number (got {frames!r})")
        return mount(self._node, layout, frames, memory, strides)

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        """Make an operator's call and return its result. Waits up to ``timeout_s`` for a daemon; its reply may take
        longer."""
        deadline = time.monotonic() + self._node.timeout_s
        while not self._has_daemon():
            self._node.check_open()
            if time.monotonic() >= deadline:
                raise NodeUnavailable(f"{self.name}: its daemon is not running")
            time.sleep(0.005)
        body = (control.pack_json({"call": call, **arguments}),)
        mapped = self._node.writable()
        try:
            message = mapped.exchange(Op.ADMIN, body=body, timeout_s=ADMIN_TIMEOUT_S)
        except NodeUnavailable:
            renewed = self._node.writable()
            if renewed is mapped:
                raise
            message = renewed.exchange(Op.ADMIN, body=body, timeout_s=ADMIN_TIMEOUT_S)
        return control.unpack_json(message.body)

    def _has_daemon(self) -> bool:
        """Return whether a daemon holds the lock of the node's folder."""
        folder = NodeFolder.at(self._node.path)
        return folder.is_trusted() and folder.is_running()

    def _is_daemon_ready(self, mapped: MappedNode) -> bool:
        """Return whether the daemon is ready and had a recent heartbeat. A stopped process still holds its lock, but
        takes no requests."""
        heartbeat_age_ns = time.monotonic_ns() - mapped.header.heartbeat_ns
        return mapped.header.state == DaemonState.READY and heartbeat_age_ns < HEARTBEAT_NS_MAX and self._has_daemon()

    def _header_stats(self) -> dict[str, Any]:
        """Return the statistics in the node's files."""
        mapped = self._node.mapped()
        stats: dict[str, Any] = {"name": self.name, "state": "down"}
        if mapped is not None:
            header = mapped.header
            stats["incarnation"] = f"{mapped.incarnation:016x}"
            stats["pages"] = mapped.index.count(mapped.dram.tier)
            stats |= {f"{tier}_pages": mapped.index.count(tier) for tier in mapped.lower}
            capacity = header.positions * header.extent_bytes
            stats["tiers"] = {
                str(mapped.dram.tier): {"capacity_bytes": capacity, "populated_bytes": header.populated_bytes}
            }
        return stats
