"""Store: a node as its users see it, and how to reach one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, NoReturn

from kvstore.client.admin import AdminVerbs
from kvstore.client.local.channel import SocketChannel
from kvstore.client.local.node import LocalNode, Mapped
from kvstore.client.objects import ObjectVerbs
from kvstore.client.prefix_cache import PrefixCache
from kvstore.client.registration import Registrations
from kvstore.errors import DeadlineExceeded, InvalidRequest, NodeUnavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.model.replica import Tier
from kvstore.rpc import control
from kvstore.rpc.control import Op
from kvstore.tier.folder import list_nodes
from kvstore.tier.header import DaemonState

ADMIN_TIMEOUT_S = 60.0
BEAT_NS_MAX = 1_000_000_000  # ten ticks of the daemon


class Store(AdminVerbs, ObjectVerbs):
    """One node, shared by all threads of this process. Made by ``kvstore.open`` or ``kvstore.connect``.

    Life: made -> used -> ``close`` (or leaving ``with``, or being dropped together with its caches, or the end of the
    process). Closing ends the session: reserved frames are given back and leases end; an embedded node ends with its
    store, a daemon's pages stay. A forked child is refused and connects itself.
    """

    reads_without_node = True  # what is read through shared memory needs no daemon

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._registrations = Registrations()

    @property
    def name(self) -> str:
        """The node's name."""
        return self._node.name

    def cache(self, layout: Layout, salt: str = "", adapter: str = "") -> PrefixCache:
        """The pages of one layout, tenant salt and adapter. Cheap; nothing is shared between different ones.

        Raises:
            InvalidRequest: layout, salt or adapter is of the wrong type, or a page does not fit an extent of the node.
        """
        self._node.check_open()
        if not isinstance(layout, Layout):
            raise InvalidRequest("layout", f"must be a kvstore.Layout, not {type(layout).__name__}")
        for field, value in (("salt", salt), ("adapter", adapter)):
            if not isinstance(value, str):
                raise InvalidRequest(field, f"must be text, not {type(value).__name__}")
        mapped = self._node.mapped()
        if mapped is not None and layout.page_bytes > mapped.header.extent_bytes:
            extent_bytes = mapped.header.extent_bytes
            raise InvalidRequest(
                "layout", f"a page of {layout.page_bytes} bytes does not fit extents of {extent_bytes}"
            )
        verify = mapped is not None and bool(mapped.header.verify_reads)
        return PrefixCache(self._node, layout, salt, adapter, verify)

    def stats(self) -> dict[str, Any]:
        """Numbers about node and client. While the daemon is down, what its header says, with ``state`` "down".

        ``client.misses``: why matches of this store ended early, by reason.
        """
        self._node.check_open()
        try:
            stats = self._admin("stats") if self._alive() else self._header_stats()
        except NodeUnavailable:
            stats = self._header_stats()
        stats["client"] = {"misses": dict(self._node.misses)}
        return stats

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the daemon takes requests.

        Raises:
            DeadlineExceeded: it did not in time.
        """
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
        """End the session and begin another, after requests whose outcome is unknown: frames that the node holds for
        us, in doubt until this process ends, are free at once. No thread may be writing; leases end, calls under way
        fail. Raises NodeUnavailable where there is no such node.
        """
        mapped = self._node.mapped()
        if mapped is not None and isinstance(mapped.channel, SocketChannel):
            mapped.channel.ended = True
            self._node.writable()

    def close(self) -> None:
        """End the session, and an embedded node with it. Closing twice is fine.

        Puts and writers of other threads fail. A copy that one of them is at is not waited for (by an embedded node a
        second at most): its frames are nobody else's until it has ended, and a named embedded pool cannot be opened
        again before.
        """
        self._node.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest("store", "cannot be pickled: call kvstore.connect() in the other process")

    def __repr__(self) -> str:
        return f"<kvstore.Store {self.name!r}>"

    def in_pool(self, keys: Keys) -> Keys:
        """The same pages by the keys that the node's listings and events name them by."""
        mapped = self._node.mapped()
        return mapped.in_pool(keys) if mapped is not None else keys

    def _admin(self, call: str, **arguments: Any) -> dict[str, Any]:
        deadline = time.monotonic() + self._node.timeout_s  # for a daemon to be there; its answer may take longer
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
        """Whether the node's daemon holds its lock."""
        return dict(list_nodes(self._node.path.parent)).get(self.name, False)

    def _header_stats(self) -> dict[str, Any]:
        mapped = self._node.mapped()
        stats: dict[str, Any] = {"name": self.name, "state": "down"}
        if mapped is not None:
            header = mapped.header
            stats["incarnation"] = f"{mapped.incarnation:016x}"
            stats["pages"], stats["nvme_pages"] = mapped.index.count(Tier.DRAM), mapped.index.count(Tier.NVME)
            capacity = header.positions * header.extent_bytes
            stats["tiers"] = {"dram": {"capacity_bytes": capacity, "populated_bytes": header.populated_bytes}}
        return stats


def _beats(mapped: Mapped) -> bool:
    """Whether the daemon gave a sign of late: a stopped one holds its lock, and takes no requests."""
    return time.monotonic_ns() - mapped.header.heartbeat_ns < BEAT_NS_MAX
