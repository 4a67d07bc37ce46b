"""InProcessChannel: calls a node of this process without a socket."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from kvstore.model.replica import Status
from kvstore.rpc import control
from kvstore.rpc.control import Message, Op
from kvstore.rpc.copies import Copies
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.node.node import Node
from kvstore.state import events as ev
from kvstore.tier.counters import SessionCounters


@dataclass(frozen=True)
class _Done:
    """A reply that is there already."""

    message: Message

    def result(self) -> Message:
        """See ``PendingReply.result``."""
        return self.message


def closed() -> NodeUnavailable:
    """What a request, or a copy, of a closed store raises."""
    return NodeUnavailable("the store is closed")


class InProcessChannel:
    """Peer of the socket channel: the request is handled in the caller's thread, under the node's mutex."""

    def __init__(self, node: Node, dispatcher: Dispatcher) -> None:
        self._node = node
        self._dispatcher = dispatcher
        self._session = secrets.randbits(63) | 1
        self.ended = False
        self.copies = Copies()
        self.publisher = None  # a request is a call
        self.counters = SessionCounters()
        node.sessions.join(self._session, self.counters)
        node.handle(ev.SessionOpened(time.monotonic_ns(), self._session))

    @property
    def session(self) -> int:
        """See ``Channel.session``."""
        return self._session

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
    ) -> _Done:
        """See ``Channel.request``. Nothing is waited for but the node's mutex, so no deadline is needed."""
        if self.ended:
            raise closed()
        sent = control.encode(op, 0, count=count, a=a, b=b, flags=flags, body=body)
        reply = self._dispatcher.exchange(self._session, control.decode(memoryview(sent)))
        message = control.decode(memoryview(reply or control.encode(Status.OK, 0)))
        if message.op == Status.INVALID:
            field, _, reason = bytes(message.body).decode().partition("\0")
            raise InvalidRequest(field, reason)
        if message.op == Status.FAILED:
            raise Unavailable(bytes(message.body).decode())
        return _Done(message)

    def close(self) -> None:
        """See ``Channel.close``."""
        if not self.ended:
            self.ended = True
            self.copies.close(closed, self._leave)

    def _leave(self) -> None:
        self._node.sessions.leave(self._session)
        self._node.handle(ev.SessionDead(time.monotonic_ns(), self._session))

    def copied(self, deadline: float) -> bool:
        """Let no copy begin, and wait for those in flight; whether they have ended by then."""
        ended = threading.Event()
        self.copies.close(closed, ended.set)
        return ended.wait(max(0.0, deadline - time.monotonic()))
