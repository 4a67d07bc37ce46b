"""PeerLinks: connections to the data servers of a pool, kept open between requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Final

from kvstore.errors import KVStoreError, NodeUnavailable, TooManyCalls
from kvstore.transfer.base import DialCredentials
from kvstore.transfer.peers import PoolNode
from kvstore.transfer.tcp import DataConnection
from kvstore.transfer.wire import Hello

IDLE_MAX: Final = 4  # connections to one data server that nobody uses
IDLE_S: Final = 60.0
DEAD_S: Final = 2.0  # for so long nobody asks again who did not answer


class PeerLinks:
    """Threads may share it. A connection is lent to one of them at a time; one that broke is closed.

    Args:
        pool: that its peers belong to.
        caller: what we call ourselves.
    """

    def __init__(self, pool: str, caller: str, credentials: DialCredentials | None = None) -> None:
        self._hello = Hello(pool=pool, caller=caller, token=credentials.token if credentials else "")
        self._credentials = credentials
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, DataConnection]]] = {}  # by process of the server
        self._dead: dict[str, float] = {}  # process -> until when
        self._closed = False

    def dead(self, peer: PoolNode) -> bool:
        """Whether it did not answer a moment ago."""
        return self._dead.get(peer.process, 0.0) > time.monotonic()

    @contextlib.contextmanager
    def to(self, peer: PoolNode, deadline_s: float) -> Iterator[DataConnection]:
        """A connection to that data server.

        Raises:
            KVStoreError: as ``DataConnection.open``; NodeUnavailable at once where it did not answer a moment ago.
        """
        if self.dead(peer):
            raise NodeUnavailable(f"{peer.name}: did not answer a moment ago")
        connection = self._take(peer)
        try:
            if connection is None:
                connection = self._open(peer, deadline_s)
            yield connection
        except KVStoreError as error:
            if (connection is None or connection.broken) and not isinstance(error, TooManyCalls):
                self.lost(peer)
            raise
        finally:
            if connection is not None:
                self._give_back(peer, connection)

    def close(self) -> None:
        """Close what nobody uses; what is used is closed when it comes back."""
        with self._lock:
            self._closed = True
            kept = [connection for idle in self._idle.values() for _, connection in idle]
            self._idle.clear()
        for connection in kept:
            connection.close()

    def _open(self, peer: PoolNode, deadline_s: float) -> DataConnection:
        if not peer.addresses:
            raise NodeUnavailable(f"{peer.name}: has no address")
        return DataConnection.open(peer.addresses[0], self._hello, self._credentials, deadline_s=deadline_s)

    def _take(self, peer: PoolNode) -> DataConnection | None:
        """One that is open; those that were idle for long, which the server may have closed, are closed."""
        now_s, old = time.monotonic(), list[DataConnection]()
        with self._lock:
            idle = self._idle.get(peer.process, [])
            taken = idle.pop()[1] if idle and idle[-1][0] > now_s - IDLE_S else None
            if taken is None:
                old = [connection for _, connection in idle]
                idle.clear()
        for connection in old:
            connection.close()
        return taken

    def _give_back(self, peer: PoolNode, connection: DataConnection) -> None:
        with self._lock:
            idle = self._idle.setdefault(peer.process, [])
            if not connection.broken and not self._closed and len(idle) < IDLE_MAX:
                idle.append((time.monotonic(), connection))
                return
        connection.close()

    def lost(self, peer: PoolNode) -> None:
        """Nobody asks it for a while; its other connections are of no use either."""
        with self._lock:
            now_s = time.monotonic()
            self._dead = {process: until_s for process, until_s in self._dead.items() if until_s > now_s}
            self._dead[peer.process] = now_s + DEAD_S
            idle = self._idle.pop(peer.process, [])
        for _, connection in idle:
            connection.close()
