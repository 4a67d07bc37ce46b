"""Embedded: a node inside this process."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvstore.client.local.publisher import Copies
from kvstore.config import NodeConfig
from kvstore.errors import InvalidRequest
from kvstore.node import on_stop
from kvstore.node.background import Background
from kvstore.node.dispatch import Dispatcher, InProcessChannel, closed
from kvstore.node.node import Node
from kvstore.node.scrubber import Scrubber
from kvstore.shm.folder import EMBEDDED_PREFIX
from kvstore.shm.header import DaemonState

COPIES_S = 1.0  # how long an embedded node that is closed waits for copies of other threads


class EmbeddedNode:
    """A node with its background threads, from ``start`` to ``close``.

    A pool without a name of its own goes with its process; a named one stays for the next ``open`` or ``serve``.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.scrubber = Scrubber(self.node, node.config.scrub_bytes_per_s)
        self._background = Background(self.node, self.scrubber)
        self._dispatcher = Dispatcher(self.node, self.scrubber, self._background.mover.wake)
        self._channels: weakref.WeakSet[InProcessChannel] = weakref.WeakSet()

    def start(self) -> None:
        """Begin to work in the background. Where what is configured cannot be had the node stops.

        Raises:
            InvalidRequest: see ``Background.start``.
        """
        try:
            self._background.start()
        except InvalidRequest:
            self.node.stop(remove=self.folder.name.startswith(EMBEDDED_PREFIX))
            raise
        self.node.enter(DaemonState.READY)

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
        would belong to another writer by then.
        """
        anonymous = self.folder.name.startswith(EMBEDDED_PREFIX)
        self._background.stop(*on_stop.save_s(self.node.config, self.folder.name))
        deadline = time.monotonic() + COPIES_S
        busy = [channel.copies for channel in list(self._channels) if not channel.copied(deadline)]
        self.node.stop(remove=anonymous, keep_name=bool(busy) and not anonymous)
        _after(busy, self.node.release_name)


def _after(copies: list[Copies], then: Callable[[], None]) -> None:
    """Call ``then`` when all of these have ended."""
    if copies:
        copies[0].close(closed, partial(_after, copies[1:], then))
    else:
        then()


def open_node(config: NodeConfig) -> EmbeddedNode:
    """Start a node in this process. Raises what ``Node.start`` and ``EmbeddedNode.start`` raise."""
    embedded = EmbeddedNode(Node.start(config))
    embedded.start()
    return embedded
