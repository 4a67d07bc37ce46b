"""Ends: what ends with a client's node, however it ends: closed, dropped, or with the process."""

from __future__ import annotations

import os
from typing import Protocol

from kvstore.client.local.grants import GrantPools
from kvstore.client.local.read_threads import ReadThreads
from kvstore.client.workers import Workers
from kvstore.rpc.base import Channel


class Embedded(Protocol):
    """A node inside this process."""

    def channel(self) -> Channel:
        """A new session with it."""
        ...

    def close(self) -> None:
        """End it and remove its files."""
        ...


class Ends:
    """What has to be ended with a LocalNode, also when it is merely dropped or the process exits."""

    def __init__(self, embedded: Embedded | None, workers: Workers, threads: ReadThreads) -> None:
        self.pid = os.getpid()
        self.embedded = embedded
        self.workers = workers
        self.threads = threads
        self.channel: Channel | None = None
        self.pools: GrantPools | None = None

    def end(self) -> None:
        """Close everything, the node last. In a forked child nothing is done: all of it is the parent's."""
        if os.getpid() != self.pid:
            return
        self.workers.close()
        self.threads.close()
        if self.channel is not None:
            self.channel.close()
        if self.pools is not None:
            self.pools.end()
        if self.embedded is not None:
            self.embedded.close()
