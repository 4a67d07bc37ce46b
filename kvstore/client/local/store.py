"""LocalStore: a node of this machine through shared memory, run by a daemon or by this process."""

from __future__ import annotations

import time
from typing import Any

from kvstore.client.local.cache import LocalCache
from kvstore.client.local.channel import SocketChannel
from kvstore.client.local.node import LocalNode, Mapped
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
BEAT_NS_MAX = 1_000_000_000  # ten ticks of the daemon


class LocalStore(Store, LocalObjects):
    """A store whose reads need no daemon: files in shared memory have all the information."""

    reads_without_node = True

    def __init__(self, node: LocalNode) -> None:
        super().__init__()
        self._node = node

    @property
    def name(self) -> str:
        """See ``Store.name``."""
        return self._node.name

    def _cache(self, layout: Layout, salt: str, adapter: str) -> LocalCache:
        self._node.check_open()
        mapped = self._node.mapped()
        check_cache(layout, salt, adapter, mapped.header.extent_bytes if mapped is not None else 0)
        verify = mapped is not None and bool(mapped.header.verify_reads)
        return LocalCache(self._node, layout, salt, adapter, verify)

    def stats(self) -> dict[str, Any]:
        """See ``Store.stats``."""
        self._node.check_open()
        try:
            stats = self._admin("stats") if self._alive() else self._header_stats()
        except NodeUnavailable:
            stats = self._header_stats()
        stats["client"] = {"misses": dict(self._node.misses)}
        return stats

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """See ``Store.wait_ready``."""
        deadline = time.monotonic() + timeout_s
        while True:
            mapped = self._node.mapped()
            if mapped is not None and (
                self._node.embedded or (mapped.header.state == DaemonState.READY and _beats(mapped) and self._alive())
            ):
                return
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"{self.name}: not ready after {timeout_s:g} s")
            time.sleep(0.005)

    def renew_session(self) -> None:
        """See ``Store.renew_session``."""
        mapped = self._node.mapped()
        if mapped is not None and isinstance(mapped.channel, SocketChannel):
            mapped.channel.ended = True
            self._node.writable()

    def close(self) -> None:
        """See ``Store.close``."""
        self._node.close()

    def in_pool(self, keys: Keys) -> Keys:
        """Return the keys by which the node's listings and events name these pages."""
        mapped = self._node.mapped()
        return mapped.in_pool(keys) if mapped is not None else keys

    def mount(
        self, layout: Layout, frames: int, memory: MountedMemory | None = None, strides: Strides | None = None
    ) -> LocalSegment:
        """Mount memory of this process for ``frames`` pages, which other processes of the machine can read
        (``Tier.HBM``): their lookups and gets find pages that are published there, until they are retired or this
        process ends. The memory is counted for the tenants whose pages it holds, but not charged to a quota.

        Args:
            memory: device memory, for example (see ``tier.peer_memory``). None creates shared host memory.
            strides: the layout of pages in memory that another engine arranges; None if each page is contiguous.

        Raises:
            InvalidRequest: ``layout`` is not a layout; ``frames`` is not positive, or exceeds what a node allows or
                ``memory`` holds; ``strides`` do not fit a page.
            Unavailable: the memory cannot be exported to other processes.
            OutOfSpace: no memory, or the node's limit of mounted memory is reached.
            NodeUnavailable: there is no such node, or its daemon does not answer.
        """
        check_cache(layout, "", "", 0)
        if not isinstance(frames, int) or frames < 1:
            raise InvalidRequest("frames", f"must be a positive number (got {frames!r})")
        return mount(self._node, layout, frames, memory, strides)

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._node.timeout_s  # for a daemon to appear; its answer may take longer
        while not self._alive():
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

    def _alive(self) -> bool:
        """Return whether the node's daemon holds its lock."""
        folder = NodeFolder.at(self._node.path)
        return folder.trusted() and folder.owned()

    def _header_stats(self) -> dict[str, Any]:
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


def _beats(mapped: Mapped) -> bool:
    """Return whether the daemon had a recent heartbeat: a stopped process holds its lock, but takes no requests."""
    return time.monotonic_ns() - mapped.header.heartbeat_ns < BEAT_NS_MAX
