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
    """The longest stored prefix: ``with cache.lease(tokens) as lease: use(lease.pages[0])``.

    Life: made -> entered (leased by the node, then fetched) -> left, which releases it. Two more ends: its deadline
    ``ttl_s`` after it was taken or renewed, and a restart of the node. The lease keeps the pages in the node, for
    others to find; what is here is a copy and stays right.

    Attributes (once entered):
        pages: read-only uint8 arrays ``[page_bytes]``, one per matched page.
        match: how much was found.
    """

    def __init__(self, node: RemoteNode, layout: Layout, keys: Keys, ttl_s: float, named: Named) -> None:
        super().__init__(None, layout, keys, ttl_s)  # type: ignore[arg-type]  # nothing of this machine's is used
        self._remote = node
        self._named = named
        self._entered = False
        self._lease = b""

    def __enter__(self) -> RemoteLease:
        """Take the lease and fetch its pages.

        Raises:
            NodeUnavailable, DeadlineExceeded: the node did not answer in time.
        """
        if self._entered:
            raise InvalidRequest("lease", "is taken already: make another")
        self._entered = True
        self._remote.check_open()
        pages, reason = self._ask() if len(self._keys) else (0, "")
        try:
            if pages:
                request = pb.ReadRequest(pages=self._named(self._keys[:pages]))
                found = fetch(self._remote, request, pages, self._layout.page_bytes, None)
                if found.pages < pages:
                    pages, reason = found.pages, found.reason
                found.rows.flags.writeable = False
                self.pages = list(found.rows[:pages])
        except BaseException:
            self.release()
            raise
        if reason:
            self._remote.missed(reason)
        self.match = Match(pages * self._layout.page_tokens, pages, reason)
        return self

    def check(self) -> None:
        """Nothing to check: what was fetched was verified, and no one else writes there."""

    def renew(self, ttl_s: float) -> None:
        """Move the deadline to ``ttl_s`` from now; a lease that had ended is taken again.

        Raises:
            LeaseBroken: it had ended, and some of its pages are gone from the node; those fetched are right.
            NodeUnavailable, DeadlineExceeded: the node did not answer; the old deadline holds.
        """
        if not 0 < ttl_s < 1e6:
            raise InvalidRequest("ttl_s", f"must be positive seconds, not {ttl_s!r}")
        self._ttl_ms = max(1, int(ttl_s * 1000))
        if not self._lease:
            return
        try:
            self._remote.call("Renew", pb.RenewRequest(lease=self._lease, ttl_ms=self._ttl_ms), pb.LeaseReply)
        except LeaseBroken:
            held, self._lease = len(self.pages), b""
            if self._ask()[0] < held:
                raise

    def release(self) -> None:
        """End it now. The arrays in ``pages`` are forgotten, and stay right for whoever holds them."""
        lease, self._lease = self._lease, b""
        self.pages = []
        if lease:
            with contextlib.suppress(Unavailable, LeaseBroken, InvalidRequest):  # InvalidRequest: closed first
                self._remote.call("Release", pb.ReleaseRequest(lease=lease), pb.Empty, RELEASE_S, again=False)

    def _ask(self) -> tuple[int, str]:
        """Ask for the lease; for how many leading pages it was given, and why not more."""
        request = pb.LeaseRequest(pages=self._named(self._keys), ttl_ms=self._ttl_ms)
        reply = self._remote.call("Lease", request, pb.LeaseReply)
        self._lease = reply.lease
        return min(reply.pages, len(self._keys)), reply.reason
