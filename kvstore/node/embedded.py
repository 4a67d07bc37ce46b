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

COPIES_S = 1.0  # how long ``close`` waits for copies of other threads


class EmbeddedNode:
    """A node with its background threads, from ``start`` to ``close``.

    ``close`` deletes a pool without a name. A pool with a name stays for the next ``open`` or ``serve``.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.scrubber = Scrubber(self.node, node.config.scrub_bytes_per_s)
        self._background = Background(self.node, self.scrubber)
        self._dispatcher = Dispatcher(self.node, self.scrubber, self._background.mover.wake)
        self._channels: weakref.WeakSet[InProcessChannel] = weakref.WeakSet()

    def start(self) -> None:
        """Start the background threads.

        Raises:
            InvalidRequest: see ``Background.start``. The node has stopped.
        """
        try:
            self._background.start()
        except InvalidRequest:
            self.node.stop(remove=self.folder.name.startswith(EMBEDDED_PREFIX))
            raise
        self.node.enter(DaemonState.READY)

    @property
    def folder(self) -> Path:
        """Path of the node's files."""
        return self.node.folder

    def channel(self) -> InProcessChannel:
        """Open a new session with this node."""
        channel = InProcessChannel(self.node, self._dispatcher)
        self._channels.add(channel)
        return channel

    def close(self) -> None:
        """Save to NVMe what only DRAM has, if DRAM will be lost, and stop the node.

        Other threads may still copy after ``COPIES_S``. Then a named pool stays locked until their copies have ended,
        because another node could give their frames to other writers.
        """
        is_anonymous = self.folder.name.startswith(EMBEDDED_PREFIX)
        self._background.stop(*on_stop.save_s(self.node.config, self.folder.name))
        deadline_s = time.monotonic() + COPIES_S
        busy = [channel.copies for channel in list(self._channels) if not channel.wait_for_copies(deadline_s)]
        self.node.stop(remove=is_anonymous, keep_name=bool(busy) and not is_anonymous)
        _call_after(busy, self.node.release_name)


def _call_after(copies: list[Copies], action: Callable[[], None]) -> None:
    """Call ``action`` when all copies have ended."""
    if copies:
        copies[0].close(closed, partial(_call_after, copies[1:], action))
    else:
        action()


def open_node(config: NodeConfig) -> EmbeddedNode:
    """Start a node in this process.

    Raises:
        NodeBusy, InvalidRequest: see ``Node.start`` and ``EmbeddedNode.start``.
    """
    embedded = EmbeddedNode(Node.start(config))
    embedded.start()
    return embedded
