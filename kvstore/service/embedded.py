"""Embedded: a node inside this process, and the channel that calls it without a socket."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvstore.config import NodeConfig
from kvstore.errors import InvalidRequest, NodeUnavailable, Unavailable
from kvstore.model.replica import Status
from kvstore.rpc import control
from kvstore.rpc.control import Message, Op
from kvstore.rpc.copies import Copies
from kvstore.service.local.dispatch import Dispatcher
from kvstore.service.node import on_stop
from kvstore.service.node.node import Node
from kvstore.service.upkeep.background import Background
from kvstore.service.upkeep.scrubber import Scrubber
from kvstore.state import events as ev
from kvstore.tier.counters import SessionCounters
from kvstore.tier.folder import EMBEDDED_PREFIX
from kvstore.tier.header import DaemonState

COPIES_S = 1.0  # how long an embedded node that is closed waits for copies of other threads


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


class EmbeddedNode:
    """A started node with its background threads, from ``start`` to ``close``.

    A pool without a name of its own goes with its process; a named one stays for the next ``open`` or ``serve``.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.node = Node(config)
        self.scrubber = Scrubber(self.node, config.scrub_bytes_per_s)
        self._background = Background(self.node, self.scrubber)
        self._dispatcher = Dispatcher(self.node, self.scrubber, self._background.mover.wake)
        self._channels: weakref.WeakSet[InProcessChannel] = weakref.WeakSet()

    def start(self) -> None:
        """See ``Node.start``."""
        self.node.start()
        try:
            self._background.start()
        except InvalidRequest:  # what is configured cannot be had
            self.node.stop(remove=self.folder.name.startswith(EMBEDDED_PREFIX))
            raise
        self.node.performer.header.state = DaemonState.READY

    @property
    def folder(self) -> Path:
        """Where the node's files are."""
        return self.node.folder

    def channel(self) -> InProcessChannel:
        """A new session with this node."""
        channel = InProcessChannel(self.node, self._dispatcher)
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        """Stop serving; a pool without a name of its own gives its memory back, once what NVMe takes is saved there.

        Where another thread still copies after ``COPIES_S``, a named pool stays locked until that has ended: the frames
        would be somebody else's by then.
        """
        anonymous = self.folder.name.startswith(EMBEDDED_PREFIX)
        self._background.stop(*on_stop.save_s(self.node.config, self.folder.name))
        deadline = time.monotonic() + COPIES_S
        busy = [channel.copies for channel in list(self._channels) if not channel.copied(deadline)]
        folder = self.node.performer.folder
        self.node.stop(remove=anonymous, keep_name=bool(busy) and not anonymous)
        _after(busy, folder.close)


def _after(copies: list[Copies], then: Callable[[], None]) -> None:
    """Call ``then`` when all of these have ended."""
    if copies:
        copies[0].close(closed, partial(_after, copies[1:], then))
    else:
        then()


def open_node(config: NodeConfig) -> EmbeddedNode:
    """Start a node in this process. Raises what ``Node.start`` raises."""
    node = EmbeddedNode(config)
    node.start()
    return node
