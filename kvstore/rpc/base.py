"""The seam between a client and the node that decides for it: one verb.

Two peers implement it: ``client.local.channel.SocketChannel`` (a daemon on this machine, over its unix socket) and
``service.local.in_process.InProcessChannel`` (a node in this process). One contract suite runs over both.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvstore.rpc.control import Message, Op
from kvstore.rpc.copies import Copies
from kvstore.rpc.publisher import Publisher
from kvstore.tier.counters import SessionCounters


class PendingReply(Protocol):
    """A request on its way. Replies arrive in the order of the requests."""

    def result(self) -> Message:
        """The reply, its body owned by the caller.

        Raises:
            DeadlineExceeded: no reply within the request's deadline. The request may still be carried out.
            NodeUnavailable: the daemon is down. The request may have been carried out.
            InvalidRequest, Unavailable: the node refused; nothing was changed.
        """
        ...


class Channel(Protocol):
    """Requests to one node in the name of one session."""

    @property
    def session(self) -> int:
        """The session id, drawn at random when the channel was made."""
        ...

    @property
    def counters(self) -> SessionCounters:
        """What this session counts for its node to see."""
        ...

    @property
    def copies(self) -> Copies:
        """Entered around every store into a frame granted to this session."""
        ...

    @property
    def publisher(self) -> Publisher | None:
        """Where puts are published instead of being sent; None: nowhere."""
        ...

    @property
    def ended(self) -> bool:
        """No request can succeed any more: it was closed, or its node was recreated."""
        ...

    def request(
        self,
        op: Op,
        *,
        count: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        body: Iterable[bytes] = (),
        timeout_s: float | None = None,
    ) -> PendingReply:
        """Send one request; does not wait for its reply. With ``NO_REPLY`` in flags there will be none.

        Raises:
            NodeUnavailable: the daemon could not be reached; nothing was sent.
        """
        ...

    def close(self) -> None:
        """End the session: what it had reserved is given back, its leases end. Waits for no copy of another thread.
        Where one is in flight, the node gets the frames back when that copy has ended."""
        ...
