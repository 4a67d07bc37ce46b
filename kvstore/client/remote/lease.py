"""RemoteLease: pages kept in a node for some time, and fetched from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from kvstore.client.lease import Lease
from kvstore.client.match import Match
from kvstore.client.remote.fetch import fetch
from kvstore.client.remote.node import RemoteNode
from kvstore.errors import InvalidRequest, LeaseBroken, Unavailable
from kvstore.model.layout import Layout
from kvstore.model.prefix import Keys
from kvstore.pb import store_pb2 as pb

RELEASE_S = 0.5  # a release that cannot be sent is no loss: the deadline passes by itself

Named = Callable[[Keys], pb.Pages]


class RemoteLease(Lease):
    """A lease that keeps the pages in the node, for others to find. What is here is a copy, fetched when it is taken;
    it is right whatever becomes of the lease. A restart of the node ends it.
    """

    def __init__(self, node: RemoteNode, layout: Layout, keys: Keys, ttl_s: float, named: Named) -> None:
        super().__init__(layout, keys, ttl_s)
        self._node = node
        self._named = named
        self._lease = b""

    def _take(self) -> None:
        self._node.check_open()
        pages, reason = self._ask() if len(self._keys) else (0, "")
        try:
            if pages:
                request = pb.ReadRequest(pages=self._named(self._keys[:pages]))
                found = fetch(self._node, request, pages, self._layout.page_bytes, None)
                if found.pages < pages:
                    pages, reason = found.pages, found.reason
                found.rows.flags.writeable = False
                self.pages = list(found.rows[:pages])
        except BaseException:
            self.release()
            raise
        if reason:
            self._node.missed(reason)
        self.match = Match(pages * self._layout.page_tokens, pages, reason)

    def check(self) -> None:
        """Nothing to check: what was fetched was verified, and no one else writes there."""

    def _renew(self) -> None:
        if not self._lease:
            return
        try:
            self._node.call("Renew", pb.RenewRequest(lease=self._lease, ttl_ms=self._ttl_ms), pb.LeaseReply)
        except LeaseBroken:
            held, self._lease = len(self.pages), b""
            if self._ask()[0] < held:
                raise

    def release(self) -> None:
        """See ``Lease.release``. The arrays in ``pages`` are forgotten, and stay right for whoever holds them."""
        lease, self._lease = self._lease, b""
        self.pages = []
        if lease:
            with contextlib.suppress(Unavailable, LeaseBroken, InvalidRequest):  # InvalidRequest: closed first
                self._node.call("Release", pb.ReleaseRequest(lease=lease), pb.Empty, RELEASE_S, again=False)

    def _ask(self) -> tuple[int, str]:
        """Ask for the lease; for how many leading pages it was given, and why not more."""
        request = pb.LeaseRequest(pages=self._named(self._keys), ttl_ms=self._ttl_ms)
        reply = self._node.call("Lease", request, pb.LeaseReply)
        self._lease = reply.lease
        return min(reply.pages, len(self._keys)), reply.reason
